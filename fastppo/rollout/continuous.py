"""transformers' continuous batching on the live weights: a response that ends makes room for the
next at once. Its speed needs flash attention; on a CPU it is slower than `generate`.

A manager kept alive over an update would serve prefixes cached under the old weights, in silence
where blocks are shared; so each call has a manager of its own, and blocks are not shared. It sets
the global random state, which is restored. Its thread knows nothing of the caller's autocast, and
its cache has the weights' dtype: fp32 weights under bf16 are refused. Requests are queued before it
starts, for what is drawn depends on which responses are decoded together.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from fastppo.models.layers import uncompiled
from fastppo.models.policy import LanguageModel
from fastppo.rollout import FINISHED, TRUNCATED, Rollout, RolloutEngine, Sampling
from fastppo.rollout.prompts import check_prompts

PAGE = 256
"""Tokens of a block of the cache, transformers' default."""
MOST_TOKENS = 8192
"""Of one forward pass, transformers' default."""
WAIT = 1.0
"""Seconds after which a result that has not come makes us look whether the thread still runs."""


class ContinuousEngine(RolloutEngine):
    """`generate(prompt_ids, sampling)` with a manager for each call.

    Args:
        batch_size: most responses decoded at once; None leaves it to transformers.
        options: more keywords of `ContinuousBatchingConfig`, which win.

    Raises:
        ValueError: the weights are not in the dtype of the products.
    """

    same_weights = True

    def __init__(
        self, policy: LanguageModel, *, batch_size: int | None = None, **options: Any
    ) -> None:
        weights, products = policy.causal_lm.dtype, policy.compute_dtype
        if products is not None and weights != products:
            raise ValueError(
                f"rollout=continuous decodes without autocast: expected weights in {products}, got "
                f"{weights}; use param_dtype=bfloat16 or precision=fp32"
            )
        self.policy = policy
        self.options = {"allow_block_sharing": False, "return_logprobs": True} | options
        if batch_size is not None:
            self.options["max_requests_per_batch"] = batch_size

    @torch.no_grad()
    def generate(self, prompt_ids: list[list[int]], sampling: Sampling) -> Rollout:
        """Draws one response per prompt. `logprobs` are None where sampling is restricted.

        Of greedy tokens the logprobs are those at temperature 1.

        Raises:
            ValueError: a prompt is empty; transformers has not what `sampling` asks for.
            RuntimeError: the manager's thread failed.
        """
        check_prompts(prompt_ids)
        check_sampling(sampling)
        if not prompt_ids:
            return Rollout([], [], [], [])
        seed = int(torch.randint(2**31, ()))
        model: Any = self.policy.causal_lm
        device, was_training = self.policy.device, model.training
        with (
            torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
            uncompiled(model.base_model),
        ):
            options = self._size(prompt_ids, sampling) | self.options
            manager = model.init_continuous_batching(
                _generation_config(sampling), ContinuousBatchingConfig(seed=seed, **options)
            )
            try:
                names = manager.add_requests(prompt_ids, max_new_tokens=sampling.max_new_tokens)
                manager.start()
                found = _results(manager, len(names))
            finally:
                manager.stop(block=True)
                manager.destroy()
                model.train(was_training)
        stop = {*sampling.stop_token_ids}
        tokens = [list(found[name].generated_tokens) for name in names]
        logprobs = [torch.tensor(found[name].logprobs, dtype=torch.float32) for name in names]
        whole = not sampling.is_restricted and (not sampling.greedy or sampling.temperature == 1)
        reasons = [FINISHED if each[-1] in stop else TRUNCATED for each in tokens]
        return Rollout(tokens, reasons, logprobs, logprobs if whole else None)

    def _size(self, prompt_ids: list[list[int]], sampling: Sampling) -> dict[str, Any]:
        """Room for these prompts and their responses; else nine tenths of all memory is taken."""
        rows = min(len(prompt_ids), self.options.get("max_requests_per_batch", len(prompt_ids)))
        tokens = max(map(len, prompt_ids)) + sampling.max_new_tokens
        return {
            "num_blocks": rows * (-(-tokens // PAGE) + 1),
            "max_batch_tokens": max(rows, min(MOST_TOKENS, sum(map(len, prompt_ids)))),
        }


def check_sampling(sampling: Sampling) -> None:
    """Raises ValueError where something is asked for that continuous batching has not."""
    for name in ("min_new_tokens", "no_repeat_ngram_size", "stop_strings", "extra"):
        if getattr(sampling, name):
            raise ValueError(
                f"rollout=continuous has no {name}; use rollout=decoder or rollout=generate"
            )


def _generation_config(sampling: Sampling) -> GenerationConfig:
    drawn: dict[str, Any] = {"do_sample": False}
    if not sampling.greedy:
        drawn = {"do_sample": True, "temperature": sampling.temperature, "top_k": sampling.top_k}
        drawn["top_p"] = sampling.top_p
    stop = list(sampling.stop_token_ids) or [-1]
    return GenerationConfig(
        max_new_tokens=sampling.max_new_tokens, eos_token_id=stop, pad_token_id=0, **drawn
    )


def _results(manager: Any, count: int) -> dict[str, Any]:
    """The finished requests by name."""
    found: dict[str, Any] = {}
    while len(found) < count:
        result = manager.get_result(timeout=WAIT)
        if result is not None and result.error is not None:
            raise RuntimeError(f"continuous batching failed: {result.error}")
        if result is not None and result.is_finished():
            found[result.request_id] = result
        if result is None and not manager.is_running():
            raise RuntimeError("continuous batching ended before all responses had")
    return found
