"""Generate with Hugging Face `generate`, which supports all causal LMs of transformers.

A logits processor computes the logprob of each sampled token from the logits of its step, so
`[B, T, V]` logits are never stored. This engine does not compute values.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

from fastppo.functional.statistics import token_logprobs
from fastppo.models.device import autocast
from fastppo.rollout import FINISHED, TRUNCATED, Rollout, RolloutEngine, Sampling
from fastppo.rollout.draw import kept_tokens
from fastppo.rollout.prompts import batches_of, check_prompts, padded_left
from fastppo.rollout.stopping import StopStrings


class _SampledLogprobs(LogitsProcessor):
    """Restrict the logits of each step, and record the logprobs of the tokens drawn from them."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self.pending: tuple[Tensor, Tensor | None] | None = None
        self.logprobs: list[Tensor] = []
        self.sampler_logprobs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.take(input_ids)
        restricted = None
        if self.sampling.is_restricted:
            keep = kept_tokens(scores / self.sampling.temperature, self.sampling)
            restricted = None if keep is None else scores.masked_fill(~keep, -torch.inf)
        self.pending = (scores, restricted)
        return scores if restricted is None else restricted

    def take(self, input_ids: Tensor) -> None:
        """Record the logprobs of the newest token under the pending logits."""
        if self.pending is None:
            return
        drawn = input_ids[:, -1].contiguous()
        scores, restricted = self.pending
        temperature = self.sampling.temperature
        logprobs = token_logprobs(scores, drawn, temperature=temperature)
        self.logprobs.append(logprobs)
        if restricted is None:
            self.sampler_logprobs.append(logprobs)
        else:
            # −inf on finished rows whose pad token top-k or top-p excludes; these tokens are cut
            # off later.
            self.sampler_logprobs.append(token_logprobs(restricted, drawn, temperature=temperature))
        self.pending = None


class _AtStopString(StoppingCriteria):
    """End rows at a stop string, and record their lengths."""

    def __init__(self, strings: StopStrings, width: int, rows: int) -> None:
        self.strings = strings
        self.width = width
        self.lengths: list[int | None] = [None] * rows

    def __call__(self, input_ids: Tensor, scores: Tensor, **more: Any) -> Tensor:
        drawn = input_ids[:, self.width :].tolist()
        length = len(drawn[0])
        for row, ended in enumerate(self.strings.ended(drawn)):
            if ended and self.lengths[row] is None:
                self.lengths[row] = length
        ended_rows = [length is not None for length in self.lengths]
        return torch.tensor(ended_rows, dtype=torch.bool, device=input_ids.device)


class GenerateEngine(RolloutEngine):
    """Sample with `model.generate`, `batch_size` rows at a time.

    Args:
        tokenizer: the policy's tokenizer, needed for stop strings only.
        static_cache: whether to use transformers' static KV cache where it can hold the model's
            keys and values. On a GPU `generate` then compiles the decoding step, and the first
            rollout waits for the compiler.
        equal_lengths: generate for prompts of one length at a time, so that none is padded: some
            recurrent models read the padding.
        use_cache: whether to use a KV cache or recurrent states; without them each token costs a
            forward pass over the whole sequence.
    """

    same_weights = True

    def __init__(
        self,
        model: PreTrainedModel,
        pad_token_id: int,
        *,
        batch_size: int | None = None,
        compute_dtype: torch.dtype | None = None,
        tokenizer: Any = None,
        static_cache: bool = False,
        equal_lengths: bool = False,
        use_cache: bool = True,
    ) -> None:
        self.model = model
        self.pad_token_id = pad_token_id
        self.batch_size = batch_size
        self.compute_dtype = compute_dtype
        self.tokenizer = tokenizer
        self.static_cache = static_cache
        self.equal_lengths = equal_lengths
        self.use_cache = use_cache

    @torch.no_grad()
    def generate(self, prompt_ids: list[list[int]], sampling: Sampling) -> Rollout:
        """Draw one response per prompt from the model's current weights.

        Raises:
            ValueError: a prompt is empty, or there are stop strings and no tokenizer.
        """
        check_prompts(prompt_ids)
        strings = StopStrings(self.tokenizer, sampling.stop_strings)
        batches = batches_of(prompt_ids, self.batch_size, equal_lengths=self.equal_lengths)
        rollout = Rollout.joined(
            [
                self._generate_batch([prompt_ids[row] for row in rows], sampling, strings)
                for rows in batches
            ]
        )
        order = [row for rows in batches for row in rows]
        return rollout.select(sorted(range(len(order)), key=order.__getitem__))

    def _generate_batch(
        self, prompt_ids: list[list[int]], sampling: Sampling, strings: StopStrings
    ) -> Rollout:
        device = self.model.device
        input_ids, mask = padded_left(prompt_ids, self.pad_token_id)
        width = input_ids.shape[1]
        recorder = _SampledLogprobs(sampling)
        at_string = _AtStopString(strings, width, len(prompt_ids))
        config = _generation_config(sampling, self.pad_token_id)
        config.use_cache = self.use_cache
        if self.static_cache and self.model.dtype == (self.compute_dtype or self.model.dtype):
            # Under autocast of fp32 weights, rotary embeddings leave keys in fp32, while values are
            # in bf16. A static layer has one dtype for both before transformers 5.24.
            config.cache_implementation = "static"
        with _generating(self.model, config), autocast(device, self.compute_dtype):
            output = self.model.generate(  # type: ignore[operator]
                input_ids=input_ids.to(device),
                attention_mask=mask.to(device),
                logits_processor=LogitsProcessorList([recorder]),
                stopping_criteria=StoppingCriteriaList([at_string] if strings.strings else []),
            )
        recorder.take(output)
        return _cut_at_stop(
            output[:, width:].cpu(),
            sampler_logprobs=torch.stack(recorder.sampler_logprobs, dim=1).cpu(),
            logprobs=torch.stack(recorder.logprobs, dim=1).cpu(),
            stop=set(sampling.stop_token_ids),
            string_lengths=at_string.lengths,
        )


@contextmanager
def _generating(model: PreTrainedModel, config: GenerationConfig) -> Iterator[None]:
    """Put the model in evaluation mode and replace its generation config, for the block."""
    own_config = model.generation_config
    was_training = model.training
    model.eval()  # in training mode gradient checkpointing switches the cache off
    model.generation_config = config
    try:
        yield
    finally:
        model.generation_config = own_config
        model.train(was_training)


def _generation_config(sampling: Sampling, pad_token_id: int) -> GenerationConfig:
    """Build a config from `sampling` alone.

    The model's generation config may have a top-k or a repetition penalty, and would then sample
    from another distribution than the trained policy.
    """
    options: dict[str, Any] = {"do_sample": False}
    if not sampling.greedy:
        # The logits processor applies top-k and top-p, and records both logprobs.
        options = {
            "do_sample": True,
            "temperature": sampling.temperature,
            "top_k": 0,
            "top_p": 1.0,
        }
    return GenerationConfig(
        max_new_tokens=sampling.max_new_tokens,
        eos_token_id=list(sampling.stop_token_ids) or None,
        pad_token_id=pad_token_id,
        **options,
    )


def _cut_at_stop(
    drawn: Tensor,
    *,
    sampler_logprobs: Tensor,
    logprobs: Tensor,
    stop: set[int],
    string_lengths: list[int | None],
) -> Rollout:
    """Cut each response after its first stop token or complete stop string.

    Args:
        drawn, sampler_logprobs, logprobs: [B, T].
        string_lengths: the length at which a stop string was complete, or None, for each row.
    """
    rollout = Rollout([], [], sampler_logprobs=[], logprobs=[])
    assert rollout.sampler_logprobs is not None
    assert rollout.logprobs is not None
    for row, (tokens, at_string) in enumerate(zip(drawn.tolist(), string_lengths, strict=True)):
        at_token = next((i + 1 for i, token in enumerate(tokens) if token in stop), None)
        ends = [end for end in (at_token, at_string) if end is not None]
        length = min(ends, default=len(tokens))
        rollout.tokens.append(tokens[:length])
        rollout.finish_reasons.append(FINISHED if ends else TRUNCATED)
        rollout.sampler_logprobs.append(sampler_logprobs[row, :length])
        rollout.logprobs.append(logprobs[row, :length])
    return rollout
