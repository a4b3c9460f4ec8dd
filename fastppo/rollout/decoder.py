"""A lean decoding loop over the learner's own trunk and head, with transformers' caches.

What it has over `generate`: drawing a token gives its logprob at no further cost (`rollout.draw`),
the hidden state that predicts a token also gives its value, so that a learner in fp32 has its old
logprobs and values without a pass of its own, and rows that have ended leave the batch.

Prompts are padded on the left, with position ids that count tokens. All random numbers of a call
are drawn before its first token, one per row and step: what a row draws depends neither on which
other rows have ended nor on how many are decoded at once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastppo.models.cache import GrowingCache, has_fixed_cache
from fastppo.models.policy import ActorCritic, LanguageModel
from fastppo.models.trunk import last_states
from fastppo.models.value import ValueFunction
from fastppo.rollout import Rollout, RolloutEngine, Sampling
from fastppo.rollout.draw import Draws, draw_next, scratch_for
from fastppo.rollout.fixed_shapes import FixedShapes
from fastppo.rollout.prompts import PromptBatch, check_prompts, distinct, padded_left
from fastppo.rollout.record import ResponseRecord
from fastppo.rollout.stopping import StopStrings


class DecoderEngine(RolloutEngine):
    """Decodes the policy that is trained, in batches of `batch_size`.

    Args:
        policy: with a value function that reads the trunk's final hidden states, values are given.
        final_values: also give the value after the last token of responses that are cut off, for
            which the trunk runs once more.
        tokenizer: only needed for stop strings.
        fixed_shapes: decode by `rollout.fixed_shapes`, whose steps are CUDA graphs; by default on a
            GPU. A trunk that it cannot decode goes through the loop here.
    """

    same_weights = True
    draws_by_row = True

    def __init__(
        self,
        policy: LanguageModel,
        *,
        batch_size: int | None = None,
        final_values: bool = False,
        tokenizer: Any = None,
        fixed_shapes: bool | None = None,
    ) -> None:
        self.policy = policy
        self.batch_size = batch_size
        self.tokenizer = tokenizer
        self.value_function = _value_function(policy)
        self.final_values = final_values and self.value_function is not None
        if fixed_shapes is None:
            fixed_shapes = policy.device.type == "cuda"
        self.fixed: FixedShapes | None = None
        if fixed_shapes and has_fixed_cache(policy.config):
            self.fixed = FixedShapes(policy, self.value_function, final_values=self.final_values)

    def release(self) -> None:
        if self.fixed is not None:
            self.fixed.release()

    @torch.no_grad()
    def generate(self, prompt_ids: list[list[int]], sampling: Sampling) -> Rollout:
        """Draws one response per prompt from the policy's current weights.

        Raises:
            ValueError: a prompt is empty; stop strings without a tokenizer.
        """
        check_prompts(prompt_ids)
        strings = StopStrings(self.tokenizer, sampling.stop_strings)
        uniforms = self._uniforms(len(prompt_ids), sampling)
        step = self.batch_size or max(1, len(prompt_ids))
        batches = [
            PromptBatch(
                prompt_ids=prompt_ids[start : start + step],
                sampling=sampling,
                strings=strings,
                uniforms=None if uniforms is None else uniforms[start : start + step],
            )
            for start in range(0, len(prompt_ids), step)
        ]
        causal_lm = self.policy.causal_lm
        was_training = causal_lm.training
        causal_lm.eval()  # gradient checkpointing is for training mode and forbids the cache
        decode = self._decode if self.fixed is None else self.fixed.decode
        try:
            with self.policy.autocast():
                return Rollout.joined([decode(batch) for batch in batches])
        finally:
            causal_lm.train(was_training)

    def _uniforms(self, count: int, sampling: Sampling) -> Tensor | None:
        """[count, max_new_tokens] fp64: the random numbers of a call; None for greedy decoding."""
        if sampling.greedy:
            return None
        seed = sampling.drawn_seed()
        first, rows = sampling.place or (0, count)
        uniforms = torch.rand(
            rows,
            sampling.max_new_tokens,
            dtype=torch.float64,
            generator=torch.Generator().manual_seed(seed),
        )
        return uniforms[first : first + count].to(self.policy.device)

    def _decode(self, batch: PromptBatch) -> Rollout:
        """Draws token after token, until every row has ended or been cut off."""
        sampling = batch.sampling
        rows = _LiveRows(self.policy, batch)
        record = ResponseRecord(
            len(batch),
            sampling.max_new_tokens,
            self.policy.device,
            has_values=self.value_function is not None,
        )
        lengths = torch.full((len(batch),), sampling.max_new_tokens)
        finished = torch.zeros(len(batch), dtype=torch.bool)
        for column in range(sampling.max_new_tokens):
            hidden = rows.advance()
            draws = rows.draw(hidden, column)
            record.write(rows.live, column, draws=draws, values=self._values(hidden))
            ended = torch.isin(draws.tokens, rows.stop)
            if sampling.stop_strings:
                responses = record.tokens[rows.live, : column + 1].tolist()
                ended |= torch.tensor(batch.strings.ended(responses), device=ended.device)
            rows.append(draws.tokens)
            if ended.any():
                ended_rows = rows.live[ended].cpu()
                finished[ended_rows] = True
                lengths[ended_rows] = column + 1
                rows.leave(ended)
                if not len(rows.live):
                    break
        final_values = None
        if self.final_values:
            final_values = torch.zeros(len(batch))
            if len(rows.live):
                values = self._values(rows.advance())
                assert values is not None
                final_values[rows.live.cpu()] = values.float().cpu()
        return record.rollout(lengths.tolist(), finished.tolist(), final_values)

    def _values(self, hidden: Tensor) -> Tensor | None:
        return None if self.value_function is None else self.value_function.read(hidden)


class _LiveRows:
    """The rows that still decode: their cache, and what the next step reads.

    Attributes:
        live: [L] int64, which of the batch's rows they are, in order.
        stop: int64, the stop tokens.
    """

    def __init__(self, policy: LanguageModel, batch: PromptBatch) -> None:
        device = policy.device
        sampling = batch.sampling
        self.sampling = sampling
        self.uniforms = batch.uniforms
        self.trunk: Any = policy.causal_lm.base_model
        self.head = policy.head
        self.cache = GrowingCache(policy.config, policy.compute_dtype)
        self.live = torch.arange(len(batch), device=device)
        self.stop = torch.tensor(sampling.stop_token_ids, dtype=torch.int64, device=device)
        prompts, mask = padded_left(batch.prompt_ids, 0)
        self.is_ragged = not mask.all()
        response = torch.ones(len(batch), sampling.max_new_tokens, dtype=torch.int64)
        self.mask = torch.cat([mask, response], dim=1).to(device)
        self.positions = (self.mask.cumsum(1) - 1).clamp(min=0)
        self.next = prompts.to(device)
        first_rows, which = distinct(batch.prompt_ids)
        self.first_rows = first_rows.to(device)
        self.which = which.to(device)
        self.length = 0
        self.scratch: Tensor | None = None

    def advance(self) -> Tensor:
        """[L, H] hidden states that predict the next tokens; the last ones enter the cache."""
        begin = self.length
        self.length += self.next.shape[1]
        # A prompt that several rows have is read once, and what is cached of it copied.
        is_shared = begin == 0 and len(self.first_rows) < len(self.which)
        rows = self.first_rows if is_shared else slice(None)
        states = last_states(
            self.trunk,
            self.next[rows],
            attention_mask=self.mask[rows, : self.length] if self.is_ragged else None,
            position_ids=self.positions[rows, begin : self.length],
            cache=self.cache,
        )
        if is_shared:
            self.cache.batch_select_indices(self.which)
            states = states[self.which]
        return states

    def draw(self, hidden: Tensor, column: int) -> Draws:
        """The next token of each row, which predicts from hidden [L, H]."""
        logits = self.head.logits(hidden)
        if self.scratch is None:
            self.scratch = scratch_for(logits)
        uniforms = None if self.uniforms is None else self.uniforms[:, column]
        return draw_next(logits, self.sampling, uniforms, scratch=self.scratch)

    def append(self, tokens: Tensor) -> None:
        """The tokens [L] that were drawn are read in the next step."""
        self.next = tokens.unsqueeze(1)

    def leave(self, ended: Tensor) -> None:
        """Drops the rows that have ended, [L] bool."""
        left = (~ended).nonzero().squeeze(1)
        self.live = self.live[left]
        if not len(left):
            return
        self.cache.batch_select_indices(left)
        self.mask = self.mask[left]
        self.positions = self.positions[left]
        self.next = self.next[left]
        if self.uniforms is not None:
            self.uniforms = self.uniforms[left]


def _value_function(policy: LanguageModel) -> ValueFunction | None:
    """The value function, if all that it reads is a final hidden state."""
    if isinstance(policy, ActorCritic) and policy.value_function.reads_final_hidden:
        return policy.value_function
    return None
