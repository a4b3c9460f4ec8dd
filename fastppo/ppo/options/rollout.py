"""Options of the rollout: generation, old logprobs and importance weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fastppo.run.options import Options, option


def check_stop_strings(strings: Sequence[str]) -> None:
    """Raise ValueError for an empty stop string."""
    if "" in strings:
        raise ValueError("stop_strings holds an empty string, which every text contains")


@dataclass(kw_only=True, frozen=True)
class RolloutOptions(Options):
    """Rollout."""

    rollout: Literal["decoder", "generate", "vllm", "server"] = option(
        "decoder",
        "Sampler: FastPPO's decoder, Hugging Face generate, vLLM in this process, or vLLM servers "
        "at rollout_urls",
    )
    rollout_urls: Sequence[str] = option([], "Servers of rollout=server, such as http://host:8000")
    rollout_batch_size: int = option(64, "Responses per iteration, sequences", minimum=1)
    samples_per_prompt: int = option(
        1, "Responses to each prompt; rollout_batch_size counts them all", minimum=1
    )
    dynamic_sampling: int = option(
        0,
        "Rounds in which prompts whose samples all have the same reward are replaced; for rloo "
        "and group",
        minimum=0,
    )
    generate_batch_size: int | None = option(
        None, "Sequences generated at once; default: the whole rollout batch", minimum=1
    )
    max_new_tokens: int = option(128, "Longest response, tokens", minimum=1)
    temperature: float = option(1.0, "Temperature of sampling and of the loss", above=0)
    top_k: int = option(0, "Sample from the k most likely tokens, tokens; 0: all", minimum=0)
    top_p: float = option(
        1.0,
        "Sample from the smallest set of tokens with this probability; 1: all",
        above=0,
        maximum=1,
    )
    stop_token_ids: Sequence[int] | None = option(
        None, "Tokens that end a response; default: the model's EOS tokens", minimum=0
    )
    stop_strings: Sequence[str] = option(
        [], "Texts that end a response, at the token that completes one"
    )
    vllm_gpu_memory_utilization: float = option(
        0.3, "Share of the GPU's memory for vLLM's weights and KV cache", above=0, maximum=1
    )
    vllm_tensor_parallel_size: int = option(
        1, "Neighboring processes that share one vLLM by tensor parallelism", minimum=1
    )
    async_steps: int = option(
        0,
        "1: generate the next batch during the update, with the weights before it",
        minimum=0,
        maximum=1,
    )
    old_logprobs: Literal["auto", "sampler", "recompute"] = option(
        "auto",
        "Source of old logprobs and values: the sampler, or a forward pass; auto: the sampler "
        "where both compute with the same weights in fp32",
    )
    importance: Literal["truncate", "mask", "sequence-truncate", "sequence-mask"] = option(
        "truncate",
        "Importance weight against the sampler's distribution, per token or per response "
        "(sequence-…). truncate: clamp it to importance_cap; mask: set it to 0 outside "
        "[1/importance_cap, importance_cap]",
    )
    importance_cap: float | None = option(
        2.0, "Upper bound of the importance weight; none disables the correction", above=0
    )

    @property
    def importance_bounds(self) -> tuple[float, float] | None:
        """Bounds of the importance weight; None without a correction."""
        cap = self.importance_cap
        if cap is None:
            return None
        return (1 / cap if self.importance.endswith("mask") else 0.0), cap

    @property
    def holds_cache(self) -> bool:
        """Whether this process holds a KV cache of its own for the rollout."""
        return self.rollout in ("decoder", "generate")
