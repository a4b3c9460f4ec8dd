"""The parts of a PPO run, made from its options: models, data, rewards, and checks between them.

The trainer is the algorithm; what it runs on is put together here. Nothing here changes during a
run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from fastppo.advantages import AdaptiveKL, FixedKL, PenaltyKL
from fastppo.config import PPOConfig
from fastppo.data import Prompts, Rows, encode_prompts, load_rows
from fastppo.model import (
    ActorCritic,
    LanguageModel,
    add_adapters,
    checkpoint_activations,
)
from fastppo.pretrained import (
    is_sequence_classifier,
    load_causal_lm,
    load_tokenizer,
    model_config,
)
from fastppo.pretraining import PretrainingText
from fastppo.reference_policy import ReferencePolicy
from fastppo.rewards import Reward, RewardEnsemble, RewardTerm, make_terms
from fastppo.value_function import (
    BranchValue,
    CriticValue,
    DetachedValue,
    SharedValue,
    critic_of_policy,
    critic_of_reward_model,
)


def choose_device(name: str) -> torch.device:
    """`auto` is a GPU if there is one.

    Raises:
        ValueError: no device of that name is there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device must be auto, cpu, cuda, cuda:1, …, got {name!r}") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device={name}: torch {torch.__version__} sees {torch.cuda.device_count()} GPUs here"
        )
    return device


def autocast_dtype(precision: str, device: torch.device) -> torch.dtype | None:
    """The compute dtype of the matrix products, or None for that of the weights."""
    if precision == "bf16" or (precision == "auto" and device.type == "cuda"):
        return torch.bfloat16
    return None


def pad_token_id(tokenizer: Any, model: PreTrainedModel) -> int:
    """Any token will do, since masks come from lengths."""
    for value in (tokenizer.pad_token_id, model.config.pad_token_id, tokenizer.eos_token_id):
        if isinstance(value, int) and value >= 0:
            return value
    return 0


def stop_token_ids(
    chosen: list[int] | None, tokenizer: Any, model: PreTrainedModel
) -> tuple[int, ...]:
    """The tokens that end a response: the chosen ones, or the model's and the tokenizer's EOS."""
    if chosen is not None:
        return tuple(chosen)
    found: list[int] = []
    for value in (model.generation_config.eos_token_id, tokenizer.eos_token_id):
        found += value if isinstance(value, list) else [] if value is None else [value]
    return tuple(dict.fromkeys(found))


def kl_controller(config: PPOConfig) -> FixedKL | AdaptiveKL | PenaltyKL:
    """What moves β of the KL in the reward."""
    if config.kl_controller == "adaptive":
        return AdaptiveKL(config.kl_coef, config.kl_target, config.kl_horizon)
    if config.kl_controller == "penalty":
        return PenaltyKL(config.kl_coef, config.kl_target)
    return FixedKL(config.kl_coef)


def load_model(
    name: str, config: PPOConfig, device: torch.device, what: str = "model"
) -> PreTrainedModel:
    """A causal LM in the run's dtype and attention implementation; `what` is the option."""
    return load_causal_lm(
        name,
        dtype=getattr(torch, config.param_dtype),
        attn_implementation=config.attn_implementation,
        device=device,
        what=what,
    )


def make_actor_critic(causal_lm: PreTrainedModel, tokenizer: Any, config: PPOConfig) -> ActorCritic:
    """Policy and value function on `causal_lm`, which gets its adapters here.

    Raises:
        ValueError: the heads do not give the model's own logits; the value function does not fit.
    """
    peft = None
    if config.lora_rank > 0:
        peft = add_adapters(
            causal_lm, config.lora_rank, config.lora_alpha, config.lora_target_modules
        )
    if config.gradient_checkpointing:
        checkpoint_activations(causal_lm)
    model = ActorCritic(causal_lm, peft, _make_value_function(causal_lm, tokenizer, config))
    model.check_heads()
    model.set_training(config.gradient_checkpointing)
    return model


def _make_value_function(
    causal_lm: PreTrainedModel, tokenizer: Any, config: PPOConfig
) -> SharedValue:
    trunk: Any = causal_lm.base_model
    width = causal_lm.get_output_embeddings().weight.shape[1]
    if config.value_model == "shared":
        return SharedValue(trunk, width)
    if config.value_model == "detached":
        return DetachedValue(trunk, width)
    if config.value_model == "branch":
        return BranchValue(trunk, width, config.value_branch_layers)
    name = config.critic_model
    if name is None:
        return critic_of_policy(causal_lm)
    _check_same_vocabulary("critic_model", name, tokenizer)
    if is_sequence_classifier(model_config(name, "critic_model")):
        dtype = getattr(torch, config.param_dtype)
        critic = critic_of_reward_model(name, dtype=dtype, device=trunk.device)
    else:
        other = load_model(name, config, trunk.device, "critic_model")
        critic = CriticValue(other.base_model, other.get_output_embeddings().weight.shape[1])
    if config.gradient_checkpointing:
        checkpoint_activations(critic.trunk)
    return critic


def _check_same_vocabulary(option: str, name: str, tokenizer: Any) -> None:
    """Critic and reference read the policy's tokens, so a token must mean the same to them."""
    theirs, ours = load_tokenizer(name, option).get_vocab(), tokenizer.get_vocab()
    if theirs != ours:
        raise ValueError(
            f"{option} {name}: its tokenizer has another vocabulary ({len(theirs)} tokens) "
            f"than the policy's ({len(ours)}), so it cannot read the policy's tokens"
        )


def make_reference(
    policy: ActorCritic, given: PreTrainedModel | None, tokenizer: Any, config: PPOConfig
) -> ReferencePolicy | None:
    """The reference policy, or None where no KL needs a model.

    Args:
        given: a model that the trainer was handed; otherwise `reference_model`, or the policy.

    Raises:
        ValueError: the reference's vocabulary, or its logits, do not fit the policy's.
    """
    if given is None and config.reference_model is not None:
        _check_same_vocabulary("reference_model", config.reference_model, tokenizer)
        given = load_model(config.reference_model, config, policy.device, "reference_model")
    if given is not None and config.reference_policy == "rollout":
        raise ValueError("reference_policy=rollout holds no model, but one is passed in")
    if given is not None and config.reference_refresh:
        raise ValueError("reference_refresh replaces the reference; pass in none")
    # The trunk without its adapters costs nothing, so its KL is always logged.
    free = policy.peft is not None and config.reference_policy == "fixed"
    if given is None and not config.wants_reference and not free:
        return None
    if given is None:
        return ReferencePolicy(policy, offload=config.reference_offload)
    reference = LanguageModel(given.to(policy.device))  # type: ignore[arg-type]
    reference.check_heads()
    theirs, ours = reference.head, policy.head
    if theirs.weight.shape[0] < len(tokenizer):
        raise ValueError(
            f"the reference has a vocabulary of {theirs.weight.shape[0]} tokens and the policy's "
            f"tokenizer {len(tokenizer)}: it cannot read the policy's tokens"
        )
    transforms = [(head.logit_scale, head.softcap) for head in (ours, theirs)]
    same = transforms[0] == transforms[1] and theirs.weight.shape[0] == ours.weight.shape[0]
    if "full" in (config.kl_estimator, config.kl_loss_estimator) and not same:
        raise ValueError(
            "the exact KL (full) wants a reference with the policy's vocabulary and logit "
            f"transform: got {theirs.weight.shape[0]} tokens, scale and soft-cap {transforms[1]}; "
            f"the policy has {ours.weight.shape[0]} and {transforms[0]}. Use k1, k2 or k3"
        )
    return ReferencePolicy(policy, reference, offload=config.reference_offload)


def shortest_context(policy: ActorCritic, reference: ReferencePolicy | None) -> int | None:
    """Tokens that a sequence may have: the least of policy, reference and critic, if any says."""
    limits = [policy.context, reference.context if reference is not None else None]
    if isinstance(policy.value_function, CriticValue):
        text = policy.value_function.trunk.config.get_text_config()
        limits.append(getattr(text, "max_position_embeddings", None))
    return min((limit for limit in limits if limit is not None), default=None)


def check_vocabulary(model: ActorCritic, tokenizer: Any, stop: Sequence[int]) -> None:
    """Raises ValueError if the tokenizer or the stop tokens reach beyond the model's vocabulary."""
    rows = model.head.weight.shape[0]
    if any(not 0 <= token < rows for token in stop):
        raise ValueError(f"stop_token_ids must be in [0, {rows}), got {tuple(stop)}")
    if len(tokenizer) > rows:
        raise ValueError(
            f"vocabulary mismatch: the tokenizer has {len(tokenizer)} tokens and the "
            f"model {rows}; this is another model's tokenizer"
        )


def load_prompts(
    rows: Rows | None, tokenizer: Any, context: int | None, config: PPOConfig
) -> Prompts | None:
    """The prompts of `rows` or of the config, encoded; None if there are none.

    Raises:
        ValueError: `max_new_tokens` leaves no room for a prompt in the context.
        DataError: a prompt that cannot be used; see `encode_prompts`.
    """
    if rows is None and not config.prompts:
        return None
    room = (context or 2**31) - config.max_new_tokens
    if room < 1:
        raise ValueError(
            f"max_new_tokens={config.max_new_tokens} leaves no room for a prompt in the "
            f"context of {context} tokens"
        )
    return encode_prompts(
        load_rows(config.prompts, config.split) if rows is None else rows,
        tokenizer,
        column=config.prompt_column,
        max_prompt_tokens=room,
        source=config.prompts or "prompts",
    )


def load_pretraining(
    tokenizer: Any, context: int | None, config: PPOConfig
) -> PretrainingText | None:
    """The text of PPO-ptx, or None."""
    if not config.ptx_data:
        return None
    if context is not None and config.ptx_block_size > context:
        raise ValueError(
            f"ptx_block_size={config.ptx_block_size} is longer than the context of {context} tokens"
        )
    rows = load_rows(config.ptx_data, config.split)
    return PretrainingText(rows, tokenizer, config.ptx_block_size, source=config.ptx_data)


def load_rewards(
    rewards: Sequence[str | Reward], config: PPOConfig, device: torch.device
) -> list[RewardTerm]:
    """What is trained on: rewards under their names with their weights, an ensemble last."""
    options = _reward_model_options(config, device)
    terms = make_terms(rewards, config.reward_weights, **options)
    if config.reward_ensemble:
        ensemble = RewardEnsemble(
            config.reward_ensemble,
            config.reward_ensemble_by,
            config.reward_ensemble_std_coef,
            **options,
        )
        if any(term.name == "ensemble" for term in terms):
            raise ValueError(
                "a reward is called 'ensemble', which is the name of reward_ensemble: rename it"
            )
        terms.append(RewardTerm("ensemble", ensemble, config.reward_ensemble_weight))
    return terms


def load_monitors(
    rewards: Sequence[str | Reward], config: PPOConfig, device: torch.device
) -> list[RewardTerm]:
    """What is watched and not trained on."""
    return make_terms(rewards, **_reward_model_options(config, device))


def _reward_model_options(config: PPOConfig, device: torch.device) -> dict[str, Any]:
    return {
        "device": device,
        "batch_size": config.reward_batch_size,
        "max_length": config.reward_max_length,
    }
