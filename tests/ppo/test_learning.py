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
from runs import make_trainer


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


@pytest.mark.slow
def test_the_reward_rises_with_weights_in_bf16_and_fp32_masters(tmp_path: Path) -> None:
    """One seed here; five on the demo's task are `docs/study_weight_dtypes.py`."""
    rewards = _rewards(tmp_path, 0, "bfloat16")
    assert rewards[0] < 0.1
    assert rewards[-1] > 0.5


@pytest.mark.slow
def test_the_reward_rises_with_token_budgets_and_packed_rows(tmp_path: Path) -> None:
    rewards = _rewards(tmp_path, 0, microbatch_tokens=256, packing="on")
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


def test_an_entropy_bonus_keeps_the_policy_wider(tmp_path: Path) -> None:
    entropy = {}
    for coef in (0.0, 0.3):
        trainer = make_trainer(
            tmp_path / str(coef), entropy_coef=coef, iterations=12, learning_rate=1e-2, kl_coef=0.0
        )
        entropy[coef] = trainer.train()["entropy"]
    assert entropy[0.3] > entropy[0.0] + 0.05


def test_ptx_lowers_the_held_out_language_model_loss(tmp_path: Path) -> None:
    data = tiny.saved_text(tmp_path / "text.jsonl")
    held_out = torch.tensor([[4, 5, 6, 7] * 5])
    losses = []
    for more in ({}, {"ptx_coef": 1.0, "ptx_data": data, "ptx_block_size": 12}):
        trainer = make_trainer(tmp_path / str(len(more)), iterations=4, learning_rate=3e-3, **more)
        metrics = trainer.train()
        assert ("ptx_loss" in metrics) == bool(more)
        with torch.no_grad():
            losses.append(trainer.model.language_model_loss(held_out).item())
    assert losses[1] < losses[0] - 1.0
