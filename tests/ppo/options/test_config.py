"""Options of a run: contradictions, options without an effect, schedules, derived values."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from typing import Any, Literal, get_args, get_origin

import pytest
import yaml

from fastppo.data.text import BLOCK_TOKENS
from fastppo.generate_options import GenerateConfig
from fastppo.ppo.coefficients import POLICY_KL_TARGET
from fastppo.ppo.controllers import AdaptiveKL
from fastppo.ppo.options import config as config_module
from fastppo.ppo.options.config import PPOConfig, contradictions
from fastppo.ppo.options.run import WARNINGS
from fastppo.run.options import Options, inner_type, unused
from fastppo.run.watch import parse_threshold
from fastppo.stages.options import RewardModelConfig, SFTConfig

K3_BY_RATIO = {"kl_loss_coef": 0.1, "kl_loss_estimator": "k3_by_ratio"}
CRITIC = {"value_model": "critic"}
ONE_STEP = {"ppo_epochs": 1, "minibatches": 1}


def _refusal(options: dict[str, Any]) -> str:
    try:
        PPOConfig(**options)
    except ValueError as error:
        return str(error)
    pytest.fail(f"{options} is accepted")


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"kl_controller": "adaptve"}, "kl_controller"),
        ({"report_to": ["mlflow"]}, "report_to"),
        ({"score_clip": -1.0}, "score_clip"),
        ({"reward_timeout": 0.0}, "reward_timeout"),
        ({"max_grad_norm": None}, "max_grad_norm"),
        ({"clip_ratio": 2}, "clip_ratio"),
        ({"clip_ratio_high": -1}, "clip_ratio_high"),
        ({"top_p": 0}, "top_p"),
        ({"dual_clip": 1.0}, "dual_clip"),
        ({"objective": "ppo"}, "objective"),
        ({"rollout": "nowhere"}, "rollout"),
        ({"resume": "maybe"}, "resume"),
        ({"whiten_advantages": "full"}, "whiten_advantages"),
        ({"stop_strings": ["x", ""]}, "stop_strings"),
        ({"stop_if": ["kl over 9"]}, "stop_if"),
        ({"schedules": ["kl_coef=linear:0", "kl_coef=linear:1"]}, "schedules"),
        ({"schedules": ["kl_coef=quadratic:0"]}, "schedules"),
        ({"schedules": ["gamma=linear:0"]}, "schedules"),
        ({"schedules": ["dual_clip=linear:2"]}, "schedules: dual_clip"),
        ({"schedules": ["kl_coef"]}, "schedules"),
        ({"schedules": ["kl_coef=linear:x"]}, "schedules"),
        ({"schedules": ["kl_coef=linear:-1"]}, "kl_coef"),
        ({"schedules": ["clip_ratio=linear:-0.5"]}, "clip_ratio"),
        ({"dual_clip": 3.0, "schedules": ["dual_clip=linear:0.5"]}, "dual_clip"),
        ({"engine_options": {"batch_size": -1}}, "engine_options: batch_size"),
        ({"engine_options": {"urls": ["http://a"]}}, "engine_options: no option 'urls'"),
        ({"rollout": "server"}, "engine_options: urls"),
        ({"rollout": "server", "engine_options": {"urls": ["a:8000"]}}, "engine_options: urls"),
        (CRITIC | {"critic_options": {"epoch": 3}}, "critic_options: no option 'epoch'"),
        (CRITIC | {"critic_options": {"frozen": 1}}, "critic_options: frozen"),
    ],
    ids=str,
)
def test_a_wrong_value_is_refused_with_the_name_of_its_option(
    options: dict[str, Any], name: str
) -> None:
    assert _refusal(options).startswith(name)


def test_an_unknown_key_of_a_mapping_is_answered_with_the_known_ones() -> None:
    said = _refusal({"engine_options": {"batchsize": 2}})
    assert "did you mean batch_size?" in said
    assert "it takes batch_size" in said


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"rollout_batch_size": 11}, "rollout_batch_size"),
        ({"samples_per_prompt": 5}, "rollout_batch_size"),
        ({"rewards": ["a:b"], "reward_weights": [1, 2]}, "reward_weights"),
        (
            {"rewards": ["a:b"], "reward_weights": [1] * 3, "reward_ensemble": ["c", "d"]},
            "reward_weights",
        ),
        ({"reward_ensemble": ["rm"]}, "reward_ensemble"),
        ({"quantization": "nf4"}, "quantization"),
        (CRITIC | {"quantization": "nf4", "lora_rank": 4}, "quantization"),
        ({"quantization": "nf4", "lora_rank": 4, "rollout": "vllm"}, "quantization"),
        ({"precision": "fp16", "param_dtype": "bfloat16"}, "precision"),
        (K3_BY_RATIO | {"precision": "fp16", "kl_loss_estimator": "full"}, "precision"),
        (CRITIC | {"critic_options": {"epochs": 3}}, "critic_options"),
        (
            CRITIC | {"critic_options": {"epochs": 5}, "value_head": "closed_form"},
            "critic_options",
        ),
        (
            {"value_warmup_iterations": 2, "vf_coef": 0, "value_head": "gradient"},
            "value_warmup_iterations",
        ),
        ({"value_warmup_iterations": 2, "advantage": "reinforce"}, "value_warmup_iterations"),
        (CRITIC | {"value_warmup_iterations": 2}, "value_warmup_iterations"),
        ({"value_clip": 0.2}, "value_clip"),
        (CRITIC | {"advantage": "reinforce"}, "value_model"),
        ({"advantage": "rloo"}, "samples_per_prompt"),
        (
            {"advantage": "group", "samples_per_prompt": 2, "whiten_advantages": True},
            "whiten_advantages",
        ),
        ({"dynamic_sampling": 1}, "dynamic_sampling"),
        ({"advantage": "sequence", "truncated": "bootstrap"}, "truncated"),
        (ONE_STEP, "learning_rate"),
        (ONE_STEP | {"learning_rate": 1e-5, "objective": "penalty"}, "learning_rate"),
        (ONE_STEP | {"learning_rate": 1e-5, "early_stop_kl": 0.1}, "learning_rate"),
        ({"objective": "penalty"}, "objective"),
        ({"objective": "penalty", "learning_rate": 1e-5, "kl_loss_coef": 0.1}, "objective"),
        ({"objective": "dis", "dual_clip": 3.0}, "dual_clip"),
        (
            {"objective": "a.py:f", "kl_loss_coef": 0.1, "kl_loss_estimator": "full"},
            "kl_loss_estimator",
        ),
        (K3_BY_RATIO | {"objective": "gspo"}, "kl_loss_estimator"),
        ({"schedules": ["kl_coef=linear:0"], "kl_controller": "adaptive"}, "kl_coef"),
        ({"reference_model": "x", "reference_refresh": 3}, "reference_refresh"),
        ({"reference_refresh": 1}, "reference_refresh"),
        ({"importance": "mask", "importance_cap": 1.0}, "importance"),
        ({"async_steps": 1, "rollout": "generate"}, "async_steps"),
        ({"async_steps": 1, "solved_reward": 1.0}, "async_steps"),
        (
            {"async_steps": 1, "environment": "e.py:Game", "environment_failure": "drop"},
            "async_steps",
        ),
        (
            {"solved_reward": 1.0, "environment": "e.py:Game", "environment_failure": "drop"},
            "environment_failure",
        ),
        ({"ptx_coef": 1.0}, "ptx_coef"),
        ({"checkpoint_best": "min:"}, "checkpoint_best"),
        ({"checkpoint_best": "min:eval/kl"}, "checkpoint_best"),
    ],
    ids=str,
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, Any], name: str) -> None:
    assert _refusal(options).startswith(name)


def test_every_contradiction_is_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row of the table applies to some options above."""
    (mark,) = test_options_that_contradict_each_other_are_refused.pytestmark
    monkeypatch.setattr(config_module, "contradictions", lambda options: [])
    tables = [contradictions(PPOConfig(**options)) for options, _ in mark.args[1]]
    for row in zip(*tables, strict=True):
        assert any(is_there for is_there, _ in row), row[0][1]


# ------------------------------------------------------------------------ options without an effect


@pytest.mark.parametrize(
    ("options", "needs"),
    [
        ({"lora_alpha": 16.0}, "lora_rank"),
        ({"kl_estimator": "k3", "kl_coef": 0}, "kl_coef"),
        ({"kl_controller": "adaptive", "kl_coef": 0}, "kl_coef"),
        ({"kl_loss_estimator": "k2"}, "kl_loss_coef"),
        ({"kl_target": 2.0}, "kl_controller!=fixed"),
        ({"reference_refresh": 3, "kl_coef": 0}, "kl_coef or kl_loss_coef"),
        ({"ptx_data": "x"}, "ptx_coef"),
        ({"ptx_batch_size": 16}, "ptx_data"),
        ({"eval_interval": 3}, "eval_prompts"),
        ({"max_turns": 3}, "environment"),
        ({"importance": "mask", "importance_cap": None}, "importance_cap"),
        ({"critic_model": "x"}, "value_model=critic"),
        ({"critic_options": {"epochs": 1}}, "value_model=critic"),
        ({"value_learning_rate": 1e-3}, "value_model=critic or value_head=gradient"),
        ({"lam": 0.9, "advantage": "sequence"}, "advantage=turn_gae"),
        ({"lam": 0.9, "lam_alpha": 0.05}, "lam_alpha=none"),
        ({"lam_alpha": 0.1, "advantage": "turn_gae"}, "advantage=gae"),
        ({"value_lam": 0.5, "advantage": "sequence"}, "advantage=gae/turn_gae"),
        ({"value_head": "gradient", "advantage": "reinforce"}, "advantage=gae"),
        ({"clip_ratio_high": 0.3, "objective": "sapo"}, "objective=clip"),
        ({"clip_ratio": 0.1, "objective": "a.py:f"}, "objective=clip"),
        ({"schedules": ["clip_ratio=linear:0.1"], "objective": "sapo"}, "objective=clip"),
        ({"vf_coef": 1.0, "value_model": "detached"}, "value_head=gradient or value_model=shared"),
        ({"vf_coef": 1.0, "advantage": "reinforce"}, "value_head=gradient"),
        ({"value_clip": 0.2, "advantage": "reinforce"}, "value_head=gradient"),
        ({"step_kl": 0.1, "learning_rate": 1e-5}, "learning_rate=auto"),
        ({"reward_ensemble_by": "min"}, "reward_ensemble"),
    ],
    ids=str,
)
def test_an_option_without_an_effect_is_a_sentence(options: dict[str, Any], needs: str) -> None:
    (sentence,) = unused(PPOConfig(**options))
    name = next(iter(options))
    if name == "schedules":
        name = "clip_ratio"
    assert name in sentence
    assert needs in sentence


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (
            {"value_head": "gradient", "vf_coef": 1.0, "advantage": "reinforce"},
            ["value_head", "vf_coef"],
        ),
        (
            {"kl_controller": "adaptive", "kl_target": 2.0, "kl_coef": 0},
            ["kl_controller", "kl_target"],
        ),
    ],
    ids=["value head", "KL controller"],
)
def test_an_option_that_needs_one_without_an_effect_has_none(
    options: dict[str, Any], names: list[str]
) -> None:
    sentences = unused(PPOConfig(**options))
    assert [re.findall(r"not used: (\w+)", sentence) for sentence in sentences] == [
        [name] for name in names
    ]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lora_rank": 4, "lora_alpha": 16.0},
        {"kl_coef": 0, "schedules": ["kl_coef=linear:1"], "kl_estimator": "k3"},
        {"kl_controller": "penalty", "kl_target": 2.0},
        {"lam": 0.9, "advantage": "turn_gae"},
        {"clip_ratio": 0.1, "objective": "gspo"},
        {"value_head": "gradient", "advantage": "a.py:f", "value_learning_rate": 1e-3},
        {"lr_schedule": "linear", "warmup_steps": 3},
    ],
    ids=str,
)
def test_an_option_with_an_effect_is_not_mentioned(options: dict[str, Any]) -> None:
    assert unused(PPOConfig(**options)) == []


def test_an_environment_that_is_passed_in_counts() -> None:
    assert unused(PPOConfig(max_turns=3), passed=["environment"]) == []


@pytest.mark.parametrize("options", [PPOConfig, SFTConfig, RewardModelConfig, GenerateConfig])
def test_what_an_option_needs_exists(options: type[Options]) -> None:
    """Names of options, and values that they may have."""
    for member in fields(options):
        for condition in re.split(" or | and ", member.metadata["needs"]):
            name, _, values = condition.partition("=")
            if not condition or (options is GenerateConfig and not values):
                continue
            hint, words = inner_type(options.types()[name.removesuffix("!")])
            allowed = {*words, *(get_args(hint) if get_origin(hint) is Literal else ())}
            allowed |= {*options.__dataclass_fields__[name.removesuffix("!")].metadata["choices"]}
            assert {*filter(None, values.split("/"))} <= allowed | {"none", "file.py:name"}


def test_an_unused_critic_does_not_train() -> None:
    config = PPOConfig(critic_model="x", critic_options={"epochs": 9})
    assert (config.initial_critic, config.critic_only_epochs) == (None, 0)


# ------------------------------------------------------------------------------------- former names


@pytest.mark.parametrize(
    ("name", "option", "more"),
    [
        ("adam_beta2", "optimizer_options", {}),
        ("allow_config_change", "resume", {}),
        ("bootstrap_truncated", "truncated", {}),
        ("critic_frozen", "critic_options", CRITIC),
        ("generate_batch_size", "engine_options", {}),
        ("importance_mode", "importance", {}),
        ("rollout_urls", "engine_options", {"rollout": "server"}),
        ("value_epochs", "critic_options", CRITIC),
        ("vllm_gpu_memory_utilization", "engine_options", {"rollout": "vllm"}),
        ("vllm_tensor_parallel_size", "engine_options", {"rollout": "vllm"}),
    ],
)
def test_a_former_option_is_answered_with_a_successor_that_works(
    name: str, option: str, more: dict[str, Any]
) -> None:
    said = re.search(r"did you mean (\w+)=?(.*)\?", PPOConfig.unknown(name))
    assert said is not None
    assert said[1] == option
    if said[2]:
        assert PPOConfig(**more, **{option: yaml.safe_load(said[2])}).is_set(option)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("eval_sampling", "evaluations sample as in training"),
        ("importance_floor", "importance_cap"),
        ("kl_horizon", f"{AdaptiveKL(0.1, 1.0).horizon:,.0f} sequences"),
        ("policy_kl_target", f"{POLICY_KL_TARGET} nats"),
        ("ptx_block_size", f"{BLOCK_TOKENS} tokens"),
    ],
)
def test_a_former_option_without_a_successor_is_answered_with_the_reason(
    name: str, says: str
) -> None:
    """No other option is suggested: to follow it would train something else."""
    said = PPOConfig.unknown(name)
    assert says in said
    assert "did you mean" not in said
    assert says not in SFTConfig.unknown(name)


def test_batch_size_of_a_users_engine_is_its_own() -> None:
    options = {"rollout_batch_size": 16, "engine_options": {"batch_size": 2}}
    assert PPOConfig(**options).generated_at_once == 2
    assert PPOConfig(rollout="mine.py:Engine", **options).generated_at_once == 16


@pytest.mark.parametrize(
    ("advantage", "whitening"), [("group", False), ("rloo", True), ("reinforce", True)]
)
def test_an_advantage_chooses_a_permitted_whitening(advantage: str, whitening: bool) -> None:
    config = PPOConfig(advantage=advantage, vf_coef=0.0, samples_per_prompt=2)
    assert config.whiten_advantages == whitening
    assert replace(config, whiten_advantages=False).whiten_advantages is False


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
