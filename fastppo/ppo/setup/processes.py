"""Options that do not go with a number of processes or with a model's context."""

from __future__ import annotations

from fastppo.ppo.options.config import PPOConfig


def check_processes(config: PPOConfig, count: int) -> None:
    """Raises ValueError for options that so many processes do not have."""
    if count % config.vllm_tensor_parallel_size:
        raise ValueError(
            f"vllm_tensor_parallel_size must divide the number of processes, which torchrun "
            f"starts: got {config.vllm_tensor_parallel_size} and {count}"
        )
    if count == 1:
        return
    if config.async_steps:
        raise ValueError(f"{count} processes: async_steps=1 is for one process; use 0")
    if config.rollout == "server":
        raise ValueError(f"{count} processes: rollout=server is for one process; use vllm")
    if config.optimizer != "adamw":
        raise ValueError(
            f"{count} processes shard the optimizer's state, so optimizer must be adamw, got "
            f"{config.optimizer}"
        )
    if config.precision == "fp16":
        raise ValueError(
            f"{count} processes: the loss scale of precision=fp16 follows the gradients of "
            "one process; use bf16"
        )
    if config.quantization != "none":
        raise ValueError(
            f"{count} processes: the matrices of quantization={config.quantization} cannot be "
            "sharded; use none"
        )


def check_context(prompt_tokens: int, max_new_tokens: int, context: int | None) -> None:
    """Raises ValueError where a prompt and its response are longer than the context, in tokens;
    None is of a model whose config does not say it."""
    if context is not None and prompt_tokens + max_new_tokens > context:
        raise ValueError(
            f"prompts of {prompt_tokens} tokens and responses of {max_new_tokens} are longer than "
            f"the context of {context} tokens: give a smaller --prompt_tokens or --max_new_tokens"
        )
