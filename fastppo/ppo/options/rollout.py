"""Options of the rollout: how responses are generated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fastppo.run.options import Options, option


def check_stop_strings(strings: Sequence[str]) -> None:
    """Raises ValueError for a string that is in every text."""
    if "" in strings:
        raise ValueError("stop_strings holds an empty string, which every text contains")


@dataclass(kw_only=True, frozen=True)
class RolloutOptions(Options):
    """Rollout."""

    rollout: Literal["decoder", "generate", "vllm", "server"] = option(
        "decoder",
        "What draws the responses: FastPPO's decoder, Hugging Face generate, vLLM in the process, "
        "or vLLM's servers at rollout_urls",
    )
    rollout_urls: Sequence[str] = option([], "Servers of rollout=server, such as http://host:8000")
    rollout_batch_size: int = option(64, "Responses per iteration, sequences", minimum=1)
    samples_per_prompt: int = option(
        1, "Responses to each prompt, of the rollout_batch_size", minimum=1
    )
    generate_batch_size: int | None = option(
        None, "Sequences generated at once; none given means the whole rollout batch", minimum=1
    )
    max_new_tokens: int = option(128, "Longest response, tokens", minimum=1)
    temperature: float = option(1.0, "Sampling temperature, the loss's too", above=0)
    top_k: int = option(
        0, "Sample from the k likeliest tokens, tokens; 0 is all of them", minimum=0
    )
    top_p: float = option(
        1.0, "Sample from the smallest set of this probability; 1 is all", above=0, maximum=1
    )
    stop_token_ids: Sequence[int] | None = option(
        None, "Tokens that end a response; none given means the model's EOS tokens", minimum=0
    )
    stop_strings: Sequence[str] = option(
        [], "Texts that end a response, at the token that completes one"
    )
    vllm_gpu_memory_utilization: float = option(
        0.3, "Share of the GPU's memory for vLLM's weights and KV cache", above=0, maximum=1
    )
    vllm_tensor_parallel_size: int = option(
        1, "Neighbouring processes that share each layer of one vLLM", minimum=1
    )
    async_steps: int = option(
        0,
        "1: the next batch is drawn during the update on this one, with the weights before it",
        minimum=0,
        maximum=1,
    )
    old_logprobs: Literal["auto", "sampler", "recompute"] = option(
        "auto",
        "Old logprobs and values: the sampler's own (values where it has them), or recomputed by "
        "the learner; auto: the sampler's where both compute the same weights in fp32",
    )
    importance_mode: Literal[
        "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
    ] = option(
        "token_truncate",
        "The importance weight that corrects for the sampler's distribution: each token's or the "
        "whole response's; beyond its bounds it is moved to them (truncate), or 0 (mask)",
    )
    importance_cap: float | None = option(
        2.0,
        "Upper bound of the importance weight; with none, and no importance_floor, nothing is "
        "corrected",
        above=0,
    )
    importance_floor: float | None = option(
        None, "Lower bound of the importance weight; none given means 0", above=0
    )

    @property
    def holds_cache(self) -> bool:
        """Whether responses are drawn in the process itself, with a KV cache of its own."""
        return self.rollout in ("decoder", "generate")


@dataclass(kw_only=True, frozen=True)
class TurnOptions(Options):
    """Turns."""

    environment: str = option(
        "",
        "What answers the policy's turns and pays them: file.py:Name, module:Name (a class with "
        "`step`, or with tools), an agent chat:file.py:name, or an address such as "
        "openenv:http://localhost:8000",
    )
    max_turns: int = option(8, "Turns of a response, each of max_new_tokens at most", minimum=1)
