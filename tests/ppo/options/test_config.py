"""Options of a run: conflicts, schedules, and derived values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fastppo.ppo.options.config import PPOConfig
from fastppo.ppo.options.run import WARNINGS
from fastppo.run.watch import parse_threshold

K3_BY_RATIO = {"kl_loss_coef": 0.1, "kl_loss_estimator": "k3_by_ratio"}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"kl_controller": "adaptve"}, "kl_controller must be one of fixed, adaptive, penalty"),
        ({"report_to": ["mlflow"]}, "report_to must be one of wandb, got 'mlflow'"),
        ({"adam_beta2": 2.0}, r"adam_beta2 must be in \[0, 1\]"),
        ({"generate_batch_size": -1}, "generate_batch_size must be >= 1"),
        ({"score_clip": -1.0}, "score_clip must be > 0"),
        ({"reward_timeout": 0.0}, "reward_timeout must be > 0, got 0"),
        ({"max_grad_norm": None}, "max_grad_norm must be a finite number, got None"),
        ({"rollout": "server"}, "needs rollout_urls"),
        ({"rollout_urls": ["http://a"]}, "rollout_urls has an effect only with rollout=server"),
        ({"rollout": "server", "rollout_urls": ["a:8000"]}, "expected http://host:port, got a"),
        ({"async_steps": 1, "rollout": "generate"}, "update, which rollout=generate does not"),
        ({"async_steps": 1, "environment": "e.py:Game"}, "environment must be none"),
        ({"async_steps": 1, "solved_reward": 1.0}, "before the scores that solved_reward needs"),
        ({"objective": "penalty", "kl_loss_coef": 0.1}, "kl_loss_coef must be 0"),
        ({"objective": "penalty", "ppo_epochs": 1, "minibatches": 1}, "minibatches must be > 1"),
        ({"early_stop_kl": 0.1, "ppo_epochs": 1, "minibatches": 1}, "minibatches must be > 1"),
        ({"objective": "penalty", "clip_ratio": 0.1}, "clip_ratio has an effect only with"),
        ({"objective": "penalty", "schedules": ["clip_ratio=linear:0.1"]}, "clip_ratio has an eff"),
        ({"objective": "sapo", "clip_ratio_high": 0.3}, "not penalty, sapo or"),
        ({"importance_floor": 3.0}, "importance_floor must be below importance_cap"),
        ({"importance_mode": "token_mask", "importance_cap": None}, "effect only with an import"),
        ({"objective": "ppo"}, "dppo_kl, file.py:function, package.module:function, got 'ppo'"),
        ({"objective": "a.py:f", "clip_ratio": 0.1}, "effect only with an objective with a clip"),
        (
            {"objective": "a.py:f", "kl_loss_coef": 0.1, "kl_loss_estimator": "full"},
            "another estimator for objective=a.py:f",
        ),
        ({"objective": "dis", "dual_clip": 3.0}, "no clipped surrogate"),
        (K3_BY_RATIO | {"objective": "gspo"}, "needs the ratios of tokens"),
        ({"precision": "fp16", "param_dtype": "bfloat16"}, "precision=fp16 "),
        (K3_BY_RATIO | {"precision": "fp16", "kl_loss_estimator": "full"}, "precision=fp16 "),
        ({"quantization": "nf4"}, "freezes the model's weights, so lora_rank must be > 0"),
        ({"quantization": "nf4", "lora_rank": 4, "value_model": "critic"}, "value_model shared or"),
        ({"quantization": "nf4", "lora_rank": 4, "rollout": "vllm"}, "vllm needs unquantized"),
        ({"policy_kl_target": 0.1}, "effect only with objective=penalty"),
        ({"kl_estimator": "k3", "kl_coef": 0}, "effect only with kl_coef > 0"),
        ({"kl_loss_estimator": "k2"}, "effect only with kl_loss_coef > 0"),
        ({"kl_target": 2.0}, "effect only with kl_controller=adaptive or penalty"),
        ({"lam": 0.9, "advantage": "sequence"}, "effect only with advantage=gae"),
        ({"lora_alpha": 16.0}, "effect only with lora_rank > 0"),
        ({"ptx_block_size": 16}, "effect only with ptx_data"),
        ({"reference_refresh": 1}, "kl_coef must be 0"),
        ({"value_warmup_iterations": 2, "vf_coef": 0}, "vf_coef must be > 0"),
        ({"dual_clip": 3.0, "schedules": ["dual_clip=linear:0.5"]}, "dual_clip must be > 1"),
        ({"schedules": ["clip_ratio=linear:-0.5"]}, r"clip_ratio must be in \[0, 1\], got -0.5"),
        ({"clip_ratio": 2}, r"clip_ratio must be in \[0, 1\], got 2"),
        ({"clip_ratio_high": -1}, "clip_ratio_high must be >= 0, got -1"),
        ({"top_p": 0}, r"top_p must be in \(0, 1\], got 0"),
        ({"objective": "penalty", "dual_clip": 3.0}, "dual_clip must be none"),
        ({"reference_model": "x", "reference_refresh": 3}, "give one of them"),
        ({"reference_refresh": 3, "kl_coef": 0}, "needs a reference"),
        ({"critic_model": "x"}, "critic_model has an effect only with value_model=critic"),
        ({"value_epochs": 4}, "value_epochs has an effect only with value_model=critic"),
        ({"value_epochs": 3, "value_model": "critic"}, "at least ppo_epochs, 4, got 3"),
        ({"value_clip": 0.2}, "value_clip must be none, or value_head gradient"),
        ({"value_learning_rate": 1e-3}, "effect only with value_model=critic or value_head=grad"),
        ({"advantage": "reinforce", "vf_coef": 0, "value_head": "gradient"}, "a value function"),
        ({"advantage": "sequence", "bootstrap_truncated": True}, "complete returns"),
        ({"advantage": "group", "samples_per_prompt": 2}, "no value function to train, so vf_coef"),
        ({"advantage": "rloo", "vf_coef": 0.0}, "samples_per_prompt must be at least 2"),
        (
            {"advantage": "group", "vf_coef": 0.0, "samples_per_prompt": 2}
            | {"whiten_advantages": "full"},
            "whiten_advantages must",
        ),
        ({"advantage": "reinforce", "vf_coef": 0.0, "value_model": "critic"}, "value_model must"),
        ({"advantage": "sequence", "value_lam": 0.5}, "effect only with advantage=gae"),
        ({"lam": 0.9, "lam_alpha": 0.05}, "effect only with advantage=gae and no lam_alpha"),
        ({"ptx_coef": 1.0}, "ptx_coef > 0 needs ptx_data"),
        ({"ptx_data": "x"}, "expected both or neither"),
        ({"reward_ensemble": ["rm"]}, "at least two"),
        ({"advantage": "turn_gae", "lam_alpha": 0.1}, "lam_alpha has an effect only with adv"),
        ({"eval_interval": 3}, "effect only with eval_prompts"),
        ({"schedules": ["kl_coef=linear:0"], "kl_controller": "adaptive"}, "expected one of"),
        ({"schedules": ["kl_coef=linear:0", "kl_coef=linear:1"]}, "one name twice"),
        ({"schedules": ["kl_coef=quadratic:0"]}, "must be one of constant, linear, cosine"),
        ({"schedules": ["gamma=linear:0"]}, "the name must be one of"),
        ({"schedules": ["kl_coef=linear:-1"]}, "kl_coef must be >= 0, got -1.0"),
        ({"schedules": ["dual_clip=linear:2"]}, "dual_clip has no value to start from"),
        ({"schedules": ["kl_coef"]}, "expected name=linear:final"),
        ({"schedules": ["kl_coef=linear:x"]}, "schedules: "),
        ({"kl_controller": "adaptive", "kl_coef": 0.0}, "multiplies kl_coef"),
        ({"checkpoint_best": "min:"}, "checkpoint_best must name a metric.*got 'min:'"),
        ({"checkpoint_best": "min:eval/kl"}, "checkpoint_best has an effect only with eval_pr"),
        ({"stop_strings": ["x", ""]}, "stop_strings holds an empty string"),
        ({"stop_if": ["kl over 9"]}, "stop_if must be like `kl > 20`.*got 'kl over 9'"),
        ({"dual_clip": 1.0}, "dual_clip must be > 1"),
        ({"rollout_batch_size": 11}, "must be a multiple of minibatches, got 11 and 2"),
        ({"samples_per_prompt": 5}, "must be a multiple of samples_per_prompt, got 64 and 5"),
        ({"rewards": ["a:b"], "reward_weights": [1, 2]}, "be as many as rewards, 1, got 2"),
        (
            {"rewards": ["a:b"], "reward_weights": [1] * 3, "reward_ensemble": ["c", "d"]},
            "as many as rewards, 1, or one more for reward_ensemble, got 3",
        ),
    ],
)
def test_options_that_are_wrong_or_conflict_or_have_no_effect_are_refused(
    options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        PPOConfig(**options)


@pytest.mark.parametrize(
    ("advantage", "whitening"), [("group", "none"), ("rloo", "full"), ("reinforce", "full")]
)
def test_an_advantage_chooses_a_permitted_whitening(advantage: str, whitening: str) -> None:
    config = PPOConfig(advantage=advantage, vf_coef=0.0, samples_per_prompt=2)
    assert config.whiten_advantages == whitening
    chosen = replace(config, whiten_advantages="variance")
    assert chosen.whiten_advantages == "variance"


def test_the_defaults_are_valid() -> None:
    config = PPOConfig()
    assert config.warn_if == tuple(WARNINGS)
    assert [str(parse_threshold(text)) for text in WARNINGS] == list(WARNINGS)


# --------------------------------------------------------------------------- what follows from them


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, True),
        ({"kl_coef": 0}, False),
        ({"kl_coef": 0, "kl_loss_coef": 0.1}, True),
        ({"kl_coef": 0, "schedules": ["kl_coef=linear:0.1"]}, True),
        ({"kl_coef": 0, "schedules": ["kl_loss_coef=linear:0.1"]}, True),
        ({"kl_coef": 0, "schedules": ["vf_coef=linear:0.1"]}, False),
    ],
)
def test_a_reference_is_wanted_with_a_kl_now_or_later(options, wanted: bool) -> None:
    assert PPOConfig(**options).wants_reference == wanted
