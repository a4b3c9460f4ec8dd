"""Options of the rollout: generation, old logprobs and importance weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fastppo.ppo.options.engines import ENGINES
from fastppo.run.options import Options, option, read_mapping


def check_stop_strings(strings: Sequence[str]) -> None:
    """Raise ValueError for an empty stop string."""
    if "" in strings:
        raise ValueError("stop_strings holds an empty string, which every text contains")


@dataclass(kw_only=True, frozen=True)
class RolloutOptions(Options):
    """Rollout."""

    rollout: str | Literal["decoder", "generate", "vllm", "server"] = option(
        "decoder",
        "Engine that generates the responses: FastPPO's decoder, Hugging Face generate, vLLM in "
        "this process, vLLM servers, or your class or function: file.py:Engine, "
        "package.module:Engine",
    )
    engine_options: Mapping[str, Any] | None = option(
        None,
        "Keyword arguments of the engine, a YAML mapping such as '{batch_size: 32}', for vllm "
        "'{gpu_memory_utilization: 0.4, tensor_parallel_size: 2}', for server "
        "'{urls: [http://localhost:8000]}'",
    )
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
        needs="importance_cap",
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
    def engine_keywords(self) -> dict[str, Any]:
        """Keyword arguments of the engine, with the defaults of a built-in one.

        Raises:
            ValueError: a built-in engine does not take a key of `engine_options`, or its value.
        """
        given = dict(self.engine_options or {})
        if self.rollout not in ENGINES:
            return given
        options = ENGINES[self.rollout]
        passed_on = {}
        if self.rollout == "vllm":  # the other keys are those of `vllm.LLM`
            known = options.types()
            passed_on = {key: given.pop(key) for key in [*given] if key not in known}
        return passed_on | read_mapping("engine_options", given, options).to_dict()

    @property
    def generated_at_once(self) -> int:
        """Most sequences that the engine generates at once, in all processes."""
        return self.engine_keywords.get("batch_size") or self.rollout_batch_size

    @property
    def holds_cache(self) -> bool:
        """Whether this process holds a KV cache of its own for the rollout."""
        return self.rollout in ("decoder", "generate")
