"""A run that stopped and went on ends in the same bits as one that never stopped."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch

from fastppo import checkpoint
from fastppo.config import PPOConfig
from fastppo.run_log import read_jsonl
from fastppo.trainer import PPOTrainer

TIMING = ("seconds/", "tokens_per_second")


def _trainer(directory: Path, reward=tiny.count_w7, **options) -> PPOTrainer:
    chosen = {
        "iterations": 4,
        "checkpoint_interval": 1,
        "lr_schedule": "cosine",
        "warmup_steps": 3,
        "kl_controller": "adaptive",
        "kl_horizon": 100.0,
    }
    return PPOTrainer(
        PPOConfig(**tiny.options(directory, **chosen | options)),
        model=tiny.model(),
        tokenizer=tiny.tokenizer(),
        prompts=tiny.PROMPTS,
        rewards=[reward],
    )


@pytest.fixture(autouse=True)
def _no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plots take longer than the runs here."""
    monkeypatch.setattr("fastppo.trainer.write_report", lambda run_dir: None)


class _Interrupted(KeyboardInterrupt):
    pass


def _noisy_reward(stop_at: int | None):
    """A reward that draws from Python's and numpy's generators, and stops the run on a call."""
    calls = 0

    def noisy(prompts, completions):
        nonlocal calls
        calls += 1
        if calls == stop_at:
            raise _Interrupted
        noise = 0.01 * random.random() + 0.01 * float(np.random.rand())
        return [value + noise for value in tiny.count_w7(prompts, completions)]

    return noisy


def _without_timing(run: Path) -> list[dict]:
    return [
        {name: value for name, value in record.items() if not name.startswith(TIMING)}
        for record in read_jsonl(run / "metrics.jsonl")
    ]


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_a_resumed_run_ends_in_the_same_bits(lora_rank: int, tmp_path: Path) -> None:
    random.seed(1)
    np.random.seed(1)
    whole = _trainer(tmp_path / "whole", _noisy_reward(None), lora_rank=lora_rank)
    whole.train()

    random.seed(1)
    np.random.seed(1)
    stopped = _trainer(tmp_path / "parts", _noisy_reward(stop_at=3), lora_rank=lora_rank)
    with pytest.raises(_Interrupted):
        stopped.train()
    random.seed(99)  # whatever stands there is replaced
    np.random.seed(99)
    torch.manual_seed(99)
    resumed = _trainer(tmp_path / "parts", _noisy_reward(None), lora_rank=lora_rank, resume=True)
    resumed.train()

    for (name, one), other in zip(
        whole.model.named_parameters(), resumed.model.parameters(), strict=True
    ):
        assert torch.equal(one, other), name
    assert whole.state == resumed.state
    runs = [tmp_path / part / "run" for part in ("whole", "parts")]
    assert _without_timing(runs[0]) == _without_timing(runs[1])
    assert [read_jsonl(run / "samples.jsonl") for run in runs[:1]] == [
        read_jsonl(run / "samples.jsonl") for run in runs[1:]
    ]


def test_two_runs_of_one_seed_end_in_the_same_bits(tmp_path: Path) -> None:
    """Property 4."""
    runs = [_trainer(tmp_path / name) for name in ("one", "two")]
    for run in runs:
        run.train()
    for one, other in zip(runs[0].model.parameters(), runs[1].model.parameters(), strict=True):
        assert torch.equal(one, other)
    other_seed = _trainer(tmp_path / "three", seed=1)
    other_seed.train()
    assert _without_timing(tmp_path / "one/run") != _without_timing(tmp_path / "three/run")


def test_old_checkpoints_go_and_the_newest_stay(tmp_path: Path) -> None:
    _trainer(tmp_path, checkpoint_limit=2).train()
    names = [path.name for path in checkpoint.checkpoints(tmp_path / "run")]
    assert names == ["checkpoint-000003", "checkpoint-000004"]


def test_a_checkpoint_that_was_cut_off_while_being_written_is_not_seen(
    tmp_path: Path, monkeypatch
) -> None:
    trainer = _trainer(tmp_path)
    trainer.save_checkpoint()
    trainer.state.iteration = 1

    def fails(*args):
        raise OSError("no space left on device")

    monkeypatch.setattr(checkpoint, "_random_state", fails)
    with pytest.raises(OSError, match="no space"):
        trainer.save_checkpoint()
    names = [path.name for path in checkpoint.checkpoints(tmp_path / "run")]
    assert names == ["checkpoint-000000"]


def test_resuming_without_a_checkpoint_starts_from_the_beginning(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, resume=True, iterations=1)
    trainer.train()
    assert trainer.state.iteration == 1


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path)
    path = trainer.save_checkpoint()
    other = PPOTrainer(
        PPOConfig(**tiny.options(tmp_path)), model=tiny.model("gpt2"), tokenizer=tiny.tokenizer()
    )
    with pytest.raises(ValueError, match="does not fit the model"):
        checkpoint.load(path, other.model, other.optimizer)


def test_a_checkpoint_of_another_format_is_refused(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path)
    path = trainer.save_checkpoint()
    state = path / "state.json"
    state.write_text(state.read_text().replace('"format": 1', '"format": 99'))
    with pytest.raises(ValueError, match="checkpoint format 99; this reads 1"):
        checkpoint.load(path, trainer.model, trainer.optimizer)


def test_a_resumed_run_follows_its_own_options(tmp_path: Path) -> None:
    """Rates, decay and β of the config, not those that the checkpoint was written under."""
    _trainer(tmp_path, iterations=2).train()
    options = {"learning_rate": 1e-6, "weight_decay": 0.1, "kl_coef": 0.5}
    options |= {"kl_controller": "fixed", "kl_horizon": 10_000.0}
    resumed = _trainer(tmp_path, resume=True, iterations=3, lr_schedule="constant", **options)
    metrics = resumed.train()
    assert metrics["learning_rate"] == pytest.approx(1e-6)
    assert metrics["kl_coef"] == 0.5
    assert resumed.optimizer.param_groups[0]["lr"] == pytest.approx(1e-6)
    assert resumed.optimizer.param_groups[0]["weight_decay"] == 0.1


def test_leftovers_of_a_killed_run_go(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path)
    stale = tmp_path / "run" / ".checkpoint-000001.tmp-1"
    stale.mkdir(parents=True)
    trainer.save_checkpoint()
    trainer.save_checkpoint()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["checkpoint-000000"]
