"""The trainer learns: the reward rises, and it does not if the advantages' sign is flipped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from fastppo.ppo.config import PPOConfig
from fastppo.ppo.trainer import PPOTrainer
from fastppo.run.log import read_jsonl


def _rewards(tmp_path: Path, seed: int, dtype: str = "float32", **more: Any) -> list[float]:
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
            param_dtype=dtype,
            **more,
        )
    )
    torch.manual_seed(seed)
    model = tiny.AutoModelForCausalLM.from_config(tiny.CONFIGS["llama"]())
    model = model.to(getattr(torch, dtype))
    PPOTrainer(
        config,
        model=model,
        tokenizer=tiny.tokenizer(),
        prompts=tiny.PROMPTS,
        rewards=[tiny.count_w7],
    ).train()
    return [record["reward"] for record in read_jsonl(tmp_path / "run" / "metrics.jsonl")]


def test_the_reward_rises(tmp_path: Path) -> None:
    rewards = _rewards(tmp_path, seed=0)
    assert rewards[0] < 0.1
    assert rewards[-1] > 0.5


@pytest.mark.parametrize(
    "advantage",
    [
        "rloo",
        pytest.param("reinforce", marks=pytest.mark.slow),
        pytest.param("group", marks=pytest.mark.slow),
    ],
)
def test_the_reward_rises_without_a_value_function(advantage: str, tmp_path: Path) -> None:
    whiten = "none" if advantage == "group" else "full"
    rewards = _rewards(
        tmp_path,
        0,
        advantage=advantage,
        vf_coef=0.0,
        samples_per_prompt=4,
        whiten_advantages=whiten,
    )
    assert rewards[0] < 0.1
    assert rewards[-1] > 0.5
