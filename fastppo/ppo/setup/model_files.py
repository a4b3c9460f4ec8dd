"""Checks of a run's models by their files, before torch is imported and before one is loaded.
Loading checks the same, with the same sentences, of what is not here yet."""

from __future__ import annotations

from pathlib import Path

from fastppo.models import kinds
from fastppo.models.names import check_tokenizer_files, check_weight_files, context_of, read_config
from fastppo.ppo.options.config import PPOConfig
from fastppo.rewards.loading import URL, match_function


def check_model_files(config: PPOConfig) -> None:
    """Raises ValueError where a model lacks files, is of another kind than its option asks for, or
    cannot read the policy's tokens."""
    check_policy(config)
    if config.reference_model:
        name = config.reference_model
        check_weight_files(name, "reference_model")
        kinds.check_causal_lm(read_config(name), name, "reference_model")
        check_vocabularies(config, name, "reference_model")
    critic = config.critic_model
    if critic and critic.endswith(".safetensors"):
        if not Path(critic).is_file():
            raise ValueError(f"critic_model {critic}: there is no such file")
    elif critic:
        check_weight_files(critic, "critic_model")
        check_vocabularies(config, critic, "critic_model")
        values = read_config(critic)
        if kinds.is_a(values, "ForSequenceClassification"):
            kind = kinds.architectures_of(values)[0]
            kinds.check_critic(critic, kind, labels=kinds.labels_of(values))
    for spec in reward_models(config):
        check_tokenizer_files(spec, "reward")
        check_weight_files(spec, "reward")
    context = shortest_context(config)
    kinds.check_room(context, config.max_new_tokens)
    if config.ptx_data:
        kinds.check_block_size(config.ptx_block_size, context_of(config.model))


def check_policy(config: PPOConfig) -> None:
    """What `check_model_files` checks of `model`."""
    check_tokenizer_files(config.model)
    check_weight_files(config.model)
    values = read_config(config.model)
    kinds.check_causal_lm(values, config.model)
    if config.quantization == "none":
        kinds.check_not_quantized(values, config.model)
    kinds.check_attention(config.attn_implementation, config.param_dtype)
    vocabulary = kinds.vocabulary_of(values)
    if vocabulary is not None:
        kinds.check_stop_tokens(config.stop_token_ids or (), vocabulary)


def check_vocabularies(config: PPOConfig, name: str, what: str) -> None:
    """Raises ValueError where a model's tokenizer is not the policy's, as far as both are here."""
    files = [Path(model) / "tokenizer.json" for model in (name, config.model)]
    if all(file.is_file() for file in files) and files[0].read_bytes() != files[1].read_bytes():
        tokens, policy_tokens = map(kinds.tokens_of, (name, config.model))
        if tokens and policy_tokens:
            kinds.check_same_vocabulary(tokens, policy_tokens, name, what)


def reward_models(config: PPOConfig) -> list[str]:
    """The rewards that are models."""
    specs = (*config.rewards, *config.monitor_rewards, *config.reward_ensemble)
    return [spec for spec in specs if match_function(spec) is None and not URL.match(spec)]


def shortest_context(config: PPOConfig) -> int | None:
    """Tokens that policy, reference and critic take, as far as their files say."""
    names = filter(None, (config.model, config.reference_model, config.critic_model))
    contexts = [context_of(name) for name in names if not name.endswith(".safetensors")]
    return min((context for context in contexts if context is not None), default=None)
