"""Shared parts of the stages: split by prompt, trainer, checkpoints, records."""

from __future__ import annotations

import functools
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from stage_runs import ROWS, interrupted, sft, sft_config
from transformers import Trainer, TrainingArguments

from fastppo.data.datasets import DataError
from fastppo.run import manifest
from fastppo.run.log import read_jsonl
from fastppo.stages.data import row_limit, split_by_prompt
from fastppo.stages.demonstrations import collate, encode_demonstrations
from fastppo.stages.sft import _SFTTrainer


def test_training_and_held_out_rows_share_no_prompt() -> None:
    rows = [{"prompt": f"w{i % 10}", "n": i} for i in range(40)]
    split = split_by_prompt(rows, [row["prompt"] for row in rows], 0.2, seed=0)
    assert len(split.held_out) == 8  # two prompts of four rows
    assert len(split.train) == 32
    assert not {r["prompt"] for r in split.train} & {r["prompt"] for r in split.held_out}
    assert split == split_by_prompt(rows, [row["prompt"] for row in rows], 0.2, seed=0)
    assert split != split_by_prompt(rows, [row["prompt"] for row in rows], 0.2, seed=1)
    with pytest.raises(DataError, match="eval_share"):
        split_by_prompt([1, 2], ["w1", "w1"], 0.1, seed=0)


def test_a_share_of_0_holds_nothing_out_and_a_small_one_one_prompt() -> None:
    assert split_by_prompt([1, 2], ["w1", "w2"], 0, seed=0) == ([1, 2], [])
    assert len(split_by_prompt(range(50), range(50), 0.001, seed=0).held_out) == 1


def test_a_frequent_prompt_stays_in_training() -> None:
    """Unless every prompt has more rows than are wanted: then the rarest is held out."""
    prompts = ["often"] * 180 + [f"w{i}" for i in range(20)]
    for seed in range(12):
        assert len(split_by_prompt(prompts, prompts, 0.05, seed).held_out) == 10
    prompts = ["a"] * 60 + ["b"] * 40
    assert set(split_by_prompt(prompts, prompts, 0.05, seed=0).held_out) == {"b"}
    prompts = ["a"] * 100 + ["b"] * 100 + ["c"] * 100 + ["d"]
    assert len(split_by_prompt(prompts, prompts, 0.2, seed=0).held_out) == 101


def test_the_length_of_a_row_is_limited_by_the_context() -> None:
    model = tiny.model()
    assert row_limit(model, None) == tiny.CONTEXT
    assert row_limit(model, 8) == 8
    with pytest.raises(ValueError, match=r"max_length=65 .* 64"):
        row_limit(model, 65)


# ------------------------------------------------------------------------------------- the training

LONG = [{"prompt": f"w{i} w{i % 7}", "completion": "w7" + " w8" * (i % 5)} for i in range(18)]
"""Two epochs of three optimizer steps: batches of 4 rows, two in a step, the last ones smaller."""


@pytest.mark.parametrize(
    ("lr_schedule", "warmup", "epochs", "weight_decay"),
    [("cosine", 0.3, 2, 0.0), ("linear", 0.0, 1.4, 0.5), ("constant", 0.5, 2, 0.5)],
)
@pytest.mark.filterwarnings("ignore")  # transformers and accelerate warn about one another
def test_records_and_weights_are_those_of_transformers_trainer(
    lr_schedule: str, warmup: float, epochs: float, weight_decay: float, tmp_path: Path
) -> None:
    """The same rows in each step, the same learning rate, loss and gradient norm."""
    theirs = tiny.model()
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "theirs"),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_train_epochs=epochs,
        learning_rate=5e-3,
        lr_scheduler_type=lr_schedule.replace("constant", "constant_with_warmup"),
        warmup_steps=warmup,
        weight_decay=weight_decay,
        max_grad_norm=1.0,
        seed=3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=theirs,
        args=arguments,
        train_dataset=encode_demonstrations(LONG, tiny.tokenizer()).examples,
        data_collator=functools.partial(collate, pad_token_id=0),
    )
    trainer.train()
    ours = tiny.model()
    config = sft_config(
        tmp_path,
        gradient_accumulation=2,
        epochs=epochs,
        lr_schedule=lr_schedule,
        warmup=warmup,
        weight_decay=weight_decay,
        seed=3,
    )
    sft(config, ours, LONG)
    records = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    expected = [record for record in trainer.state.log_history if "loss" in record]
    assert len(records) == len(expected) == math.ceil(3 * epochs)
    for record, other in zip(records, expected, strict=True):
        for name, value in record.items():
            # fp32 sums in another order, through six steps of Adam
            assert value == pytest.approx(other[name], rel=1e-5), (name, other)
    for (name, weight), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(weight, other, rtol=0, atol=1e-4, msg=name)


def test_small_updates_of_bf16_weights_are_not_rounded_away(tmp_path: Path) -> None:
    """Steps of 1e-5 are far below a half ulp of most weights; 64 of them are not."""
    model = tiny.model().to(torch.bfloat16)
    before = [weight.detach().clone() for weight in model.parameters()]
    options = {"learning_rate": 1e-5, "warmup": 0.0, "lr_schedule": "constant"}
    sft(sft_config(tmp_path, **options, batch_size=1, epochs=8), model)
    moved = [
        (weight != old).float().mean().item()
        for weight, old in zip(model.parameters(), before, strict=True)
        if weight.dim() == 2
    ]
    assert min(moved) > 0.1


def test_a_nan_loss_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is recorded, but not taken."""
    original = _SFTTrainer.loss_sum
    steps = []

    def loss_sum(self: Any, batch: Any) -> torch.Tensor:
        steps.append(batch)
        return original(self, batch) * (math.nan if len(steps) == 2 else 1)

    monkeypatch.setattr(_SFTTrainer, "loss_sum", loss_sum)
    model = tiny.model()
    with pytest.raises(FloatingPointError, match=r"step 2; .* learning_rate"):
        sft(sft_config(tmp_path, epochs=4), model)
    losses = [record["loss"] for record in read_jsonl(tmp_path / "run" / "metrics.jsonl")]
    assert [math.isnan(loss) for loss in losses] == [False, True]
    assert all(weight.isfinite().all() for weight in model.parameters())


# ---------------------------------------------------------------------------------- the checkpoints


def test_a_resumed_run_visits_the_remaining_rows(tmp_path: Path) -> None:
    """After a checkpoint within an epoch and one at its end."""

    def visited(after: int | None, folder: Path) -> list[list[int]]:
        options: dict[str, Any] = {"checkpoint_interval": 1, "epochs": 2, "batch_size": 3}
        with pytest.MonkeyPatch.context() as patch:
            batches: list[list[int]] = []
            original = _SFTTrainer.loss_sum

            def loss_sum(self: Any, batch: Any) -> torch.Tensor:
                batches.append(batch["input_ids"][:, 0].tolist())
                return original(self, batch)

            patch.setattr(_SFTTrainer, "loss_sum", loss_sum)
            if after is not None:
                with interrupted(after=after):
                    sft(sft_config(folder, **options))
            sft(sft_config(folder, **options, resume=after is not None))
        return batches

    expected = visited(None, tmp_path)
    assert len(expected) == 6
    for epoch in (expected[:3], expected[3:]):
        assert len({word for batch in epoch for word in batch}) == len(ROWS)
    assert expected[:3] != expected[3:]
    for after in (1, 3, 5):
        assert visited(after, tmp_path / f"{after}") == expected


class _Touch:
    """A pickle of this creates a file when it is executed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_pickle_in_a_checkpoint_is_not_executed(tmp_path: Path) -> None:
    sft(sft_config(tmp_path, checkpoint_interval=1))
    path = tmp_path / "run" / "checkpoint-000002"
    owner = manifest.read(path)
    (path / "optimizer.pt").write_bytes(pickle.dumps(_Touch(tmp_path / "executed"), protocol=2))
    manifest.write(path, owner)
    with pytest.raises(ValueError, match="checkpoint-000002"):
        sft(sft_config(tmp_path, checkpoint_interval=1, epochs=2, resume=True))
    assert not (tmp_path / "executed").exists()


def test_a_checkpoint_of_another_version_is_refused(tmp_path: Path) -> None:
    sft(sft_config(tmp_path, checkpoint_interval=1))
    path = tmp_path / "run" / "checkpoint-000002"
    owner = manifest.read(path)
    (path / "state.json").unlink()
    manifest.write(path, owner)
    with pytest.raises(ValueError, match=r"checkpoint-000002.* format"):
        sft(sft_config(tmp_path, checkpoint_interval=1, resume=True))


# -------------------------------------------------------------------------------------- the records


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_every_schedule_warms_up(schedule: str, tmp_path: Path) -> None:
    sft(sft_config(tmp_path, lr_schedule=schedule, warmup=0.5, epochs=4, learning_rate=1e-3))
    lines = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    rates = [line["learning_rate"] for line in lines if "learning_rate" in line]
    assert len(rates) == 8
    assert rates[:5] == pytest.approx([0.0, 2.5e-4, 5e-4, 7.5e-4, 1e-3])
    assert (rates[-1] == pytest.approx(1e-3)) == (schedule == "constant")


def test_held_out_rows_are_evaluated_at_the_end_of_an_incomplete_epoch(tmp_path: Path) -> None:
    sft(sft_config(tmp_path, epochs=1.5, batch_size=2), eval_rows=ROWS)
    records = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    evaluated = [(r["step"], r["epoch"]) for r in records if "eval_loss" in r]
    assert evaluated == [(0, 0.0), (4, 1.0), (6, 1.5)]
