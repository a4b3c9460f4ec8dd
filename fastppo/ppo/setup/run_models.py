"""Models of a run, made from its options: policy, value function and reference.

Training makes them with weights; `fastppo.ppo.plan.memory` makes the same models without.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from fastppo.models import quantized
from fastppo.models.adapters import adapters_of
from fastppo.models.device import cast_frozen, compute_dtype, is_empty
from fastppo.models.head import lm_head_of
from fastppo.models.multimodal import freeze, language_trunk, not_quantized
from fastppo.models.policy import ActorCritic, LanguageModel
from fastppo.models.pretrained import (
    is_sequence_classifier,
    load_causal_lm,
    load_whole,
    model_config,
)
from fastppo.models.reference_policy import ReferencePolicy
from fastppo.models.trunk import checkpoint_activations, trunk_of
from fastppo.models.value import (
    CriticValue,
    DetachedValue,
    SharedValue,
    ValueFunction,
    critic_of_file,
    critic_of_policy,
    critic_of_reward_model,
    freeze_attention,
)
from fastppo.ppo.options.config import PPOConfig


class ModelLoader:
    """Load models in the run's dtype onto its device."""

    def __init__(self, config: PPOConfig, device: torch.device) -> None:
        self.config = config
        self.device = device
        self.dtype: torch.dtype = getattr(torch, config.param_dtype)

    def causal_lm(self, name: str, option: str) -> PreTrainedModel:
        """Load the causal LM of a directory or hub name; `model` is quantized as in the options.

        Raises:
            ValueError: it cannot be loaded, or is quantized already.
        """
        is_policy = option == "model"
        quantization = self.config.quantization if is_policy else "none"
        if is_policy and quantization == "none":
            config = model_config(name, option)
            if getattr(config, "quantization_config", None) is not None:
                raise ValueError(
                    f"model {name} is quantized already, and quantization=none does not train it; "
                    "pass the unquantized model, and quantization=nf4 with LoRA"
                )
        settings = None
        if quantization != "none":
            products = compute_dtype(self.config.precision, self.device) or self.dtype
            settings = quantized.nf4_config(products, not_quantized(model_config(name, option)))
        model = load_causal_lm(
            name,
            dtype=self.dtype,
            attn_implementation=self.config.attn_implementation,
            device=self.device,
            what=option,
            quantization=settings,
        )
        if settings is not None:
            quantized.keep_as_loaded(model)
        return model

    def classifier(self, name: str, option: str) -> PreTrainedModel:
        """Load the sequence classifier of a directory or hub name."""
        model, _ = load_whole(AutoModelForSequenceClassification, name, option, dtype=self.dtype)
        return model.to(self.device)  # type: ignore[arg-type]


def make_policy(causal_lm: PreTrainedModel, config: PPOConfig, loader: ModelLoader) -> ActorCritic:
    """Build policy and value function on `causal_lm`, and add adapters to it.

    A vision tower is frozen.

    Raises:
        ValueError: the heads do not give the model's own logits; the value function does not fit;
            trained weights of fp16 are not in fp32.
    """
    freeze(causal_lm)
    peft = adapters_of(causal_lm, config)
    if config.gradient_checkpointing:
        checkpoint_activations(causal_lm)
    value_function = make_value_function(causal_lm, config, loader)
    value_function.head.requires_grad_(not config.fits_value_head)
    products = compute_dtype(config.precision, loader.device)
    policy = ActorCritic(causal_lm, peft, value_function, products)
    if not is_empty(policy):
        policy.check_heads()
    if peft is not None:
        # The vision tower keeps its bits in the saved policy.
        cast_frozen(language_trunk(causal_lm), products)
    policy.set_training(config.gradient_checkpointing)
    if config.precision == "fp16":
        for name, parameter in policy.named_parameters():
            if parameter.requires_grad and parameter.dtype != torch.float32:
                raise ValueError(
                    "precision=fp16 scales gradients of fp32 weights, so trained weights must be "
                    f"float32, got {name} in {parameter.dtype}"
                )
    return policy


def make_value_function(
    causal_lm: PreTrainedModel, config: PPOConfig, loader: ModelLoader
) -> ValueFunction:
    """Build the value function of `value_model`.

    Raises:
        ValueError: the critic cannot be loaded.
    """
    trunk: Any = trunk_of(causal_lm)
    width = lm_head_of(causal_lm).weight.shape[1]
    if config.value_model == "shared":
        return SharedValue(trunk, width)
    if config.value_model == "detached":
        return DetachedValue(trunk, width)
    critic = make_critic(causal_lm, config, loader)
    if config.critic.frozen == "attention":
        freeze_attention(critic.trunk)
    return critic


def make_critic(causal_lm: PreTrainedModel, config: PPOConfig, loader: ModelLoader) -> CriticValue:
    """Build a critic from the policy, an earlier critic, or the model of `critic_model`.

    Raises:
        ValueError: it cannot be loaded.
    """
    name = config.critic_model
    if name is None:
        return critic_of_policy(causal_lm)
    if name.endswith(".safetensors"):
        return critic_of_file(causal_lm, name)
    if is_sequence_classifier(model_config(name, "critic_model")):
        critic = critic_of_reward_model(loader.classifier(name, "critic_model"), name)
    else:
        model = loader.causal_lm(name, "critic_model")
        freeze(model)
        critic = CriticValue(trunk_of(model), lm_head_of(model).weight.shape[1])
    if config.gradient_checkpointing:
        checkpoint_activations(critic.trunk)
    return critic


def make_reference(
    policy: ActorCritic,
    tokenizer: Any,
    config: PPOConfig,
    loader: ModelLoader,
    *,
    model: PreTrainedModel | None = None,
) -> ReferencePolicy | None:
    """Build the reference policy; None if no KL needs a model.

    Args:
        model: a model passed to `PPOTrainer`; otherwise `reference_model`, or the policy.

    Raises:
        ValueError: the reference's vocabulary, or its logits, do not fit the policy's.
    """
    if model is not None:
        model = model.to(loader.device)  # type: ignore[arg-type]
    elif config.reference_model is not None:
        model = loader.causal_lm(config.reference_model, "reference_model")
    if model is None:
        # Without adapters the trunk is the reference, at no cost, so its KL is always logged.
        is_free = policy.peft is not None
        return ReferencePolicy(policy) if config.wants_reference or is_free else None
    if config.reference_refresh:
        raise ValueError("reference_refresh replaces the reference; pass in none")
    reference = LanguageModel(model, compute_dtype=policy.compute_dtype)
    if not is_empty(reference):
        reference.check_heads()
    check_reference(reference, policy, tokenizer, config)
    return ReferencePolicy(policy, reference)


def check_reference(
    reference: LanguageModel, policy: ActorCritic, tokenizer: Any, config: PPOConfig
) -> None:
    """Raise ValueError if the KL to another model cannot be computed."""
    ref_head = reference.head
    head = policy.head
    if tokenizer is not None and ref_head.vocabulary < len(tokenizer):
        raise ValueError(
            f"the reference has a vocabulary of {ref_head.vocabulary} tokens and the policy's "
            f"tokenizer {len(tokenizer)}"
        )
    needs_exact_kl = "full" in (config.kl_estimator, config.kl_loss_estimator)
    has_same_logits = (
        ref_head.transform == head.transform and ref_head.vocabulary == head.vocabulary
    )
    if needs_exact_kl and not has_same_logits:
        raise ValueError(
            "the exact KL (full) needs a reference with the policy's vocabulary and logit "
            f"transform: expected {head.vocabulary} tokens, scale {head.logit_scale:g} and "
            f"soft-cap {head.softcap}, got {ref_head.vocabulary}, {ref_head.logit_scale:g} and "
            f"{ref_head.softcap}. Use k1, k2 or k3"
        )
