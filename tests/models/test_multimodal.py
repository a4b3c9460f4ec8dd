"""Vision-language checkpoints train on text: the vision tower keeps its bits, all keys stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_vision
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from fastppo.models.adapters import add_adapters
from fastppo.models.multimodal import auto_class, frozen_modules, frozen_parameters
from fastppo.models.policy import ActorCritic
from fastppo.models.reference_policy import frozen_copy
from fastppo.models.value import critic_of_file, critic_of_policy
from fastppo.ppo.options.config import PPOConfig
from fastppo.ppo.plan.plan import make_plan
from fastppo.ppo.trainer import PPOTrainer

ARCHITECTURES = tuple(tiny_vision.CONFIGS)
LANGUAGE = ("language_model.", "text_model.", "lm_head")
"""In the names of the language model's weights."""
FROZEN = ("visual", "vision", "connector", "projector", "image_newline")
"""In the names of the other weights."""


def _train(directory: str, tmp_path: Path, **options: Any) -> PPOTrainer:
    """Train on text for two iterations."""
    config = PPOConfig(**tiny.options(tmp_path, model=directory, **options))
    words = tiny_vision.tokenizer()
    trainer = PPOTrainer(config, tokenizer=words, prompts=tiny.PROMPTS, rewards=[tiny.every_other])
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    ("architecture", "more"),
    [
        ("qwen3_5", {}),
        ("qwen2_5_vl", {}),
        ("qwen2_5_vl", {"lora_rank": 4, "precision": "bf16"}),
        ("qwen3_vl", {"value_model": "critic", "kl_coef": 0.1}),
        ("idefics3", {"kl_coef": 0.1}),
        ("llama4", {}),
        *[
            pytest.param(name, {}, marks=pytest.mark.slow)
            for name in ARCHITECTURES
            if name not in ("qwen3_5", "qwen2_5_vl", "llama4", "paligemma")
        ],
    ],
)
def test_a_checkpoint_trained_on_text_keeps_its_keys_and_its_tower(
    architecture: str, more: dict[str, Any], tmp_path: Path
) -> None:
    directory = tiny_vision.saved_model(tmp_path / "model", architecture)
    trainer = _train(directory, tmp_path, **more)
    before = load_file(tmp_path / "model" / "model.safetensors")
    policy = tmp_path / "run" / "policy"
    after = load_file(policy / "model.safetensors")
    assert after.keys() == before.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert not [name for name in changed if any(part in name for part in FROZEN)]
    name = "preprocessor_config.json"
    assert (policy / name).read_bytes() == (tmp_path / "model" / name).read_bytes()
    loaded, loading = AutoModelForImageTextToText.from_pretrained(policy, output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    assert type(loaded) is type(trainer.model.causal_lm)


def test_the_class_of_a_checkpoint_is_the_one_that_its_config_names() -> None:
    config = tiny_vision.CONFIGS["qwen3_5"]()
    assert auto_class(config) is AutoModelForImageTextToText
    config.architectures = ["Qwen3_5ForConditionalGeneration"]
    assert auto_class(config) is AutoModelForImageTextToText
    config.architectures = ["Qwen3_5ForCausalLM"]
    assert auto_class(config) is AutoModelForCausalLM
    assert auto_class(tiny.CONFIGS["llama"]()) is AutoModelForCausalLM


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_everything_outside_the_language_model_is_frozen(architecture: str) -> None:
    model = tiny_vision.model(architecture)
    frozen = {id(p) for p in frozen_parameters(model)}
    for name, parameter in model.named_parameters():
        is_language = any(part in name for part in LANGUAGE)
        assert (id(parameter) in frozen) is not is_language, name
    assert frozen_parameters(tiny.model("opt")) == []


def test_adapters_are_in_the_language_model_alone() -> None:
    model = tiny_vision.model("qwen2_5_vl")
    frozen = frozen_modules(model)
    add_adapters(model, rank=2, alpha=4)
    adapted = [name for name, _ in model.named_parameters() if "lora_A" in name]
    assert adapted
    assert all(".language_model." in name for name in adapted)
    assert not [name for name in adapted if any(name.startswith(f"{x}.") for x in frozen)]


def test_copies_share_the_tower_and_nothing_else() -> None:
    model = tiny_vision.model("smolvlm")
    policy = ActorCritic(model, value_function=critic_of_policy(model))
    frozen = {id(p) for p in frozen_parameters(model)}
    for copied in (frozen_copy(policy).causal_lm, policy.value_function.trunk):
        shared = {id(p) for p in copied.parameters()} & {id(p) for p in model.parameters()}
        assert shared == frozen


def test_the_file_of_a_critic_has_no_tower(tmp_path: Path) -> None:
    model = tiny_vision.model("smolvlm")
    policy = ActorCritic(model, value_function=critic_of_policy(model))
    with torch.no_grad():
        policy.value_function.head.weight.normal_()
    policy.save_value_function(tmp_path / "critic.safetensors")
    saved = load_file(tmp_path / "critic.safetensors")
    assert not [name for name in saved if "vision_model" in name or "connector" in name]
    critic = critic_of_file(model, str(tmp_path / "critic.safetensors"))
    assert torch.equal(critic.head.weight, policy.value_function.head.weight)
    other = tiny_vision.model("qwen2_vl")
    with pytest.raises(ValueError, match="critic_model"):
        critic_of_file(other, str(tmp_path / "critic.safetensors"))
    # Its tower would overwrite that of the policy.
    name = min(critic.shared_names(model))
    save_file(
        saved | {name: torch.zeros_like(critic.state_dict()[name])}, tmp_path / "own.safetensors"
    )
    with pytest.raises(ValueError, match="tower of its own"):
        critic_of_file(model, str(tmp_path / "own.safetensors"))


def test_a_plan_counts_the_tower_once_and_without_optimizer_states(tmp_path: Path) -> None:
    directory = tiny_vision.saved_model(tmp_path / "model", "qwen3_vl")
    options = tiny.options(tmp_path, model=directory, kl_coef=0.1, value_model="critic")
    (plan,) = [make_plan(PPOConfig(**options), 8)]
    parts = plan.peak.parts
    model = tiny_vision.model("qwen3_vl")
    tower = sum(p.numel() for p in frozen_parameters(model))
    whole = sum(p.numel() for p in model.parameters())
    head = model.lm_head.weight.numel()
    buffers = 1000
    assert parts["policy weights"] == pytest.approx(4 * whole, abs=buffers)
    assert parts["reference"] == pytest.approx(4 * (whole - tower), abs=buffers)
    critic = whole - tower - head + 33
    assert parts["value function"] == pytest.approx(4 * critic, abs=buffers)
    trained = whole - tower + critic
    assert parts["optimizer states"] == pytest.approx(8 * trained, abs=buffers)
