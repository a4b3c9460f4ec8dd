"""The trainer learns: the reward rises, and it does not if the advantages' sign is flipped."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch

from fastppo import trainer as trainer_module
from fastppo.config import PPOConfig
from fastppo.run_log import read_jsonl
from fastppo.trainer import PPOTrainer


@pytest.fixture(autouse=True)
def _no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plots take longer than the runs here."""
    monkeypatch.setattr("fastppo.trainer.write_report", lambda run_dir: None)


def _rewards(tmp_path: Path, seed: int) -> list[float]:
    """Mean reward of each iteration; a policy at random gets about 1/43, the best gets 1."""
    config = PPOConfig(
        **tiny.options(
            tmp_path,
            rollout_batch_size=64,
            microbatch_size=64,
            iterations=20,
            learning_rate=2e-3,
            kl_coef=0.0,
            seed=seed,
        )
    )
    torch.manual_seed(seed)
    model = tiny.AutoModelForCausalLM.from_config(tiny.CONFIGS["llama"]())
    PPOTrainer(
        config,
        model=model,
        tokenizer=tiny.tokenizer(),
        prompts=tiny.PROMPTS,
        rewards=[tiny.count_w7],
    ).train()
    return [record["reward"] for record in read_jsonl(tmp_path / "run" / "metrics.jsonl")]


@pytest.mark.parametrize("seed", [0, 1])
def test_the_reward_rises(seed: int, tmp_path: Path) -> None:
    rewards = _rewards(tmp_path, seed)
    assert rewards[0] < 0.1
    assert rewards[-1] > 0.5


def test_the_reward_does_not_rise_with_the_advantages_sign_flipped(
    tmp_path: Path, monkeypatch
) -> None:
    right = trainer_module.compute_advantages

    def flipped(*args, **options):
        result = right(*args, **options)
        return result._replace(advantages=-result.advantages)

    monkeypatch.setattr(trainer_module, "compute_advantages", flipped)
    rewards = _rewards(tmp_path, seed=0)
    assert rewards[-1] <= rewards[0]
