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
        "Keyword arguments of the engine, as a YAML mapping such as '{batch_size: 32}', for vllm "
        "'{gpu_memory_utilization: 0.4, tensor_parallel_size: 2}', for server "
        "'{urls: [http://localhost:8000]}'",
    )
    rollout_batch_size: int = option(64, "Number of responses per iteration", minimum=1)
    samples_per_prompt: int = option(
        1, "Number of responses to each prompt; rollout_batch_size counts them all", minimum=1
    )
    dynamic_sampling: int = option(
        0,
        "Maximum number of rounds that replace prompts whose samples all have the same reward, for "
        "advantage=rloo and group; 0 disables it",
        minimum=0,
    )
    max_new_tokens: int = option(128, "Maximum length of a response in tokens", minimum=1)
    temperature: float = option(1.0, "Sampling temperature, which the loss uses too", above=0)
    top_k: int = option(0, "Top-k sampling; 0 disables it", minimum=0)
    top_p: float = option(
        1.0,
        "Top-p (nucleus) sampling; 1 disables it",
        above=0,
        maximum=1,
    )
    stop_token_ids: Sequence[int] | None = option(
        None, "Token ids that end a response; default: the EOS tokens of the model", minimum=0
    )
    stop_strings: Sequence[str] = option(
        [], "Strings that end a response, at the token that completes one"
    )
    async_steps: int = option(
        0,
        "1 generates the next batch during the update, with the weights before the update",
        minimum=0,
        maximum=1,
    )
    old_logprobs: Literal["auto", "sampler", "recompute"] = option(
        "auto",
        "Take old logprobs and values from the sampler, or recompute them in a forward pass. auto "
        "takes the sampler's if it computes with the policy's weights in fp32",
    )
    importance: Literal["truncate", "mask", "sequence-truncate", "sequence-mask"] = option(
        "truncate",
        "Importance weight that corrects for a sampler that differs from the policy, per token or "
        "per response (sequence-…). truncate clips it to importance_cap; mask sets it to 0 outside "
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
        if self.rollout not in ENGINES:  # its batch_size may mean something else
            return self.rollout_batch_size
        return self.engine_keywords["batch_size"] or self.rollout_batch_size

    @property
    def holds_cache(self) -> bool:
        """Whether this process holds a KV cache of its own for the rollout."""
        return self.rollout in ("decoder", "generate")
