"""The default engine: Hugging Face `generate` on the policy itself, so no weights are copied.

`generate` keeps the logits of one step at a time. The sampled tokens' logprobs are taken from them
step by step, so `[B, T, V]` is never held.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from fastppo.functional.statistics import token_logprobs
from fastppo.models.device import autocast
from fastppo.rollout import FINISHED, TRUNCATED, Rollout, Sampling


class _SampledLogprobs(LogitsProcessor):
    """Holds one step's logits until the token drawn from them is known, then only its logprob."""

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature
        self.pending: Tensor | None = None
        self.steps: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.take(input_ids)
        self.pending = scores
        return scores

    def take(self, input_ids: Tensor) -> None:
        """Records the logprob of the newest token under the logits that it was drawn from."""
        if self.pending is not None:
            drawn = input_ids[:, -1].contiguous()
            self.steps.append(token_logprobs(self.pending, drawn, temperature=self.temperature))
            self.pending = None


class GenerateEngine:
    """`generate(prompt_ids, sampling)` with a transformers model, in batches of `batch_size`."""

    def __init__(
        self,
        model: PreTrainedModel,
        pad_token_id: int,
        *,
        batch_size: int | None = None,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        self.model = model
        self.pad_token_id = pad_token_id
        self.batch_size = batch_size
        self.compute_dtype = compute_dtype

    @torch.no_grad()
    def generate(self, prompt_ids: list[list[int]], sampling: Sampling) -> Rollout:
        """Draws one response per prompt from the model's current weights.

        Raises:
            ValueError: a prompt is empty.
        """
        rollout = Rollout([], [], [])
        step = self.batch_size or max(1, len(prompt_ids))
        for start in range(0, len(prompt_ids), step):
            rollout.extend(self._generate_batch(prompt_ids[start : start + step], sampling))
        return rollout

    def _generate_batch(self, prompt_ids: list[list[int]], sampling: Sampling) -> Rollout:
        device = self.model.device
        longest = max(len(prompt) for prompt in prompt_ids)
        if min(len(prompt) for prompt in prompt_ids) == 0:
            raise ValueError("a prompt is empty: generation needs at least one token")
        input_ids = torch.full((len(prompt_ids), longest), self.pad_token_id, dtype=torch.int64)
        attention_mask = torch.zeros_like(input_ids)
        for row, prompt in enumerate(prompt_ids):
            input_ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            attention_mask[row, longest - len(prompt) :] = 1
        recorder = _SampledLogprobs(sampling.temperature)
        precision = autocast(device, self.compute_dtype)
        with _generation_config(self.model, self.pad_token_id, sampling), precision:
            output = self.model.generate(  # type: ignore[operator]
                input_ids=input_ids.to(device),
                attention_mask=attention_mask.to(device),
                logits_processor=LogitsProcessorList([recorder]),
            )
        recorder.take(output)
        drawn = output[:, longest:].cpu()
        logprobs = torch.stack(recorder.steps, dim=1).cpu()
        return _cut_at_stop(drawn, logprobs, set(sampling.stop_token_ids))


class _generation_config:  # noqa: N801 (a context manager, used as a function)
    """Makes `sampling` all that decides: a model's own generation config may carry a top-k or a
    repetition penalty, and then the tokens would not be drawn from the policy that is trained."""

    def __init__(self, model: PreTrainedModel, pad_token_id: int, sampling: Sampling) -> None:
        self.model, self.replaced = model, model.generation_config
        drawn: dict[str, Any] = {"do_sample": False}
        if not sampling.greedy:
            drawn = {
                "do_sample": True,
                "temperature": sampling.temperature,
                "top_k": sampling.top_k,
                "top_p": sampling.top_p,
            }
        self.ours = GenerationConfig(
            max_new_tokens=sampling.max_new_tokens,
            eos_token_id=list(sampling.stop_token_ids) or None,
            pad_token_id=pad_token_id,
            use_cache=True,
            **drawn,
            **sampling.extra,
        )

    def __enter__(self) -> None:
        self.was_training = self.model.training
        self.model.eval()  # gradient checkpointing is for training mode and forbids the cache
        self.model.generation_config = self.ours

    def __exit__(self, *error: object) -> None:
        self.model.generation_config = self.replaced
        self.model.train(self.was_training)


def _cut_at_stop(drawn: Tensor, logprobs: Tensor, stop: set[int]) -> Rollout:
    """Responses up to and with their first stop token; what follows it is never looked at."""
    rollout = Rollout([], [], [])
    for tokens, token_logprobs_ in zip(drawn.tolist(), logprobs, strict=True):
        end = next((i for i, token in enumerate(tokens) if token in stop), None)
        length = len(tokens) if end is None else end + 1
        rollout.tokens.append(tokens[:length])
        rollout.finish_reasons.append(TRUNCATED if end is None else FINISHED)
        rollout.logprobs.append(token_logprobs_[:length])
    return rollout
