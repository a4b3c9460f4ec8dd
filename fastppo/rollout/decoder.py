"""Decode in a loop over the learner's trunk and head.

In contrast to Hugging Face `generate`, the loop

- computes the logprob of a token while drawing it (`rollout.draw`), at no extra cost;
- computes values from the same hidden states, so a learner in fp32 gets old logprobs and values
  without another forward pass;
- drops finished rows from the batch.

Prompts are padded on the left, and position ids count tokens. All random numbers of a call are
drawn before its first token, one per row and step, so the tokens of a row depend neither on the
other rows nor on the batch size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastppo.data.images import (
    ImageInputs,
    encoded_images,
    rope_positions,
    without_image_tokens,
)
from fastppo.models.cache import GrowingCache
from fastppo.models.policy import ActorCritic, LanguageModel
from fastppo.models.trunk import last_states
from fastppo.rollout import FINISHED, TRUNCATED, Rollout, RolloutEngine, Sampling
from fastppo.rollout.draw import Draws, draw_next, scratch_for
from fastppo.rollout.prompts import check_prompts, distinct, padded_left
from fastppo.rollout.stopping import StopStrings


class DecoderEngine(RolloutEngine):
    """Decode with the policy in training, `batch_size` rows at a time.

    Args:
        policy: the policy; an `ActorCritic` without a separate critic also gives values.
        final_values: whether to compute the value after the last token of truncated responses, at
            the cost of one more forward pass of the trunk.
        tokenizer: the policy's tokenizer, needed for stop strings only.
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
    ) -> None:
        self.policy = policy
        self.batch_size = batch_size
        self.tokenizer = tokenizer
        self.value_function = None
        if isinstance(policy, ActorCritic) and policy.value_function.reads_final_hidden:
            self.value_function = policy.value_function
        self.final_values = final_values and self.value_function is not None

    @torch.no_grad()
    def generate(self, prompt_ids: list[list[int]], sampling: Sampling) -> Rollout:
        """Draw one response per prompt from the policy's current weights.

        Raises:
            ValueError: a prompt is empty, or there are stop strings and no tokenizer.
        """
        check_prompts(prompt_ids)
        strings = StopStrings(self.tokenizer, sampling.stop_strings)
        uniforms = self._uniforms(len(prompt_ids), sampling)
        step = self.batch_size or max(1, len(prompt_ids))
        causal_lm = self.policy.causal_lm
        was_training = causal_lm.training
        causal_lm.eval()  # in training mode gradient checkpointing switches the cache off
        try:
            with self.policy.autocast():
                batches = []
                for start in range(0, len(prompt_ids), step):
                    rows = _LiveRows(
                        self.policy,
                        prompt_ids[start : start + step],
                        sampling,
                        None if uniforms is None else uniforms[start : start + step],
                    )
                    batches.append(self._decode(rows, sampling, strings))
                return Rollout.joined(batches)
        finally:
            causal_lm.train(was_training)

    def _uniforms(self, count: int, sampling: Sampling) -> Tensor | None:
        """Draw the random numbers of a call, [count, max_new_tokens] fp64; None if greedy."""
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

    def _decode(self, rows: _LiveRows, sampling: Sampling, strings: StopStrings) -> Rollout:
        """Draw tokens until every row has ended or reached `max_new_tokens`."""
        count = len(rows.live)
        record = _ResponseRecord(
            count,
            sampling.max_new_tokens,
            self.policy.device,
            has_values=self.value_function is not None,
        )
        lengths = torch.full((count,), sampling.max_new_tokens)
        finished = torch.zeros(count, dtype=torch.bool)
        for column in range(sampling.max_new_tokens):
            hidden = rows.advance()
            draws = rows.draw(hidden, column)
            record.write(rows.live, column, draws, self._values(hidden))
            ended = torch.isin(draws.tokens, rows.stop)
            if sampling.stop_strings:
                responses = record.tokens[rows.live, : column + 1].tolist()
                ended |= torch.tensor(strings.ended(responses), device=ended.device)
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
            final_values = torch.zeros(count)
            if len(rows.live):
                values = self._values(rows.advance())
                assert values is not None
                final_values[rows.live.cpu()] = values.float().cpu()
        return record.rollout(lengths.tolist(), finished.tolist(), final_values)

    def _values(self, hidden: Tensor) -> Tensor | None:
        return None if self.value_function is None else self.value_function.read(hidden)


class _LiveRows:
    """Unfinished rows: their cache and the inputs of the next step.

    Attributes:
        live: [L] int64, indices in the batch, ascending.
        stop: int64, the stop tokens.
    """

    def __init__(
        self,
        policy: LanguageModel,
        prompt_ids: Sequence[Sequence[int]],
        sampling: Sampling,
        uniforms: Tensor | None,
    ) -> None:
        device = policy.device
        self.sampling = sampling
        self.uniforms = uniforms
        self.trunk: Any = policy.causal_lm.base_model
        self.head = policy.head
        self.cache = GrowingCache(policy.config, policy.compute_dtype)
        self.live = torch.arange(len(prompt_ids), device=device)
        self.stop = torch.tensor(sampling.stop_token_ids, dtype=torch.int64, device=device)
        prompts, mask = padded_left(prompt_ids, 0)
        self.is_ragged = not mask.all()
        response = torch.ones(len(prompt_ids), sampling.max_new_tokens, dtype=torch.int64)
        self.mask = torch.cat([mask, response], dim=1).to(device)
        self.positions = (self.mask.cumsum(1) - 1).clamp(min=0)
        self.image_tokens: Tensor | None = None
        self.next = prompts.to(device)
        first_rows, which = distinct(prompt_ids)
        self.first_rows = first_rows.to(device)
        self.which = which.to(device)
        self.images = self._read_images(prompt_ids)
        self.length = 0
        self.scratch: Tensor | None = None

    def _read_images(self, prompt_ids: Sequence[Sequence[int]]) -> ImageInputs | None:
        """Return the images of the distinct prompts, and set the positions of M-RoPE."""
        encoded = encoded_images(prompt_ids)
        if encoded is None:
            return None
        image_tokens = [-1 if images is None else images.token_id for images in encoded]
        self.image_tokens = torch.tensor(image_tokens, device=self.next.device)
        positions = self.positions.cpu()
        rows = torch.arange(len(encoded)).unsqueeze(1).expand_as(positions)
        of_rope = rope_positions(encoded, rows, positions)
        begin = self.next.shape[1]
        if of_rope is not None:
            self.positions = of_rope.to(self.next.device)
        prompt_positions = None if of_rope is None else self.positions[:, self.first_rows, :begin]
        return ImageInputs.of([encoded[row] for row in self.first_rows.tolist()], prompt_positions)

    def advance(self) -> Tensor:
        """Run the trunk on the next tokens and return their final hidden states, [L, H]."""
        begin = self.length
        self.length += self.next.shape[1]
        # A prompt shared by several rows is read once, and its cache entries are copied.
        is_shared = begin == 0 and len(self.first_rows) < len(self.which)
        rows = self.first_rows if is_shared else slice(None)
        images, self.images = self.images, None  # the cache holds them from now on
        states = last_states(
            self.trunk,
            self.next[rows],
            attention_mask=self.mask[rows, : self.length] if self.is_ragged else None,
            position_ids=self.positions[..., rows, begin : self.length],
            cache=self.cache,
            images=images,
        )
        if is_shared:
            self.cache.select(self.which)
            states = states[self.which]
        return states

    def draw(self, hidden: Tensor, column: int) -> Draws:
        """Draw a token per row of hidden states [L, H]."""
        logits = self.head.logits(hidden)
        if self.scratch is None:
            self.scratch = scratch_for(logits)
        uniforms = None if self.uniforms is None else self.uniforms[:, column]
        return draw_next(logits, self.sampling, uniforms, scratch=self.scratch)

    def append(self, tokens: Tensor) -> None:
        """Make tokens [L] the input of the next step."""
        if self.image_tokens is not None:
            tokens = without_image_tokens(tokens, self.image_tokens)
        self.next = tokens.unsqueeze(1)

    def leave(self, ended: Tensor) -> None:
        """Drop finished rows; `ended` is [L] bool."""
        left = (~ended).nonzero().squeeze(1)
        self.live = self.live[left]
        if not len(left):
            return
        self.cache.select(left)
        self.mask = self.mask[left]
        self.positions = self.positions[..., left, :]
        self.next = self.next[left]
        if self.image_tokens is not None:
            self.image_tokens = self.image_tokens[left]
        if self.uniforms is not None:
            self.uniforms = self.uniforms[left]


class _ResponseRecord:
    """Preallocated tokens, logprobs and values of a batch of responses, [rows, tokens] each."""

    def __init__(self, rows: int, tokens: int, device: torch.device, *, has_values: bool) -> None:
        self.tokens = torch.zeros(rows, tokens, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(rows, tokens, device=device)
        self.sampler_logprobs = torch.zeros(rows, tokens, device=device)
        self.values = torch.zeros(rows, tokens, device=device) if has_values else None

    def write(self, rows: Tensor, column: int, draws: Draws, values: Tensor | None) -> None:
        """Record one token of each row in `rows` [L] and the values [L] of the states before it."""
        self.tokens[rows, column] = draws.tokens
        self.logprobs[rows, column] = draws.logprobs
        self.sampler_logprobs[rows, column] = draws.sampler_logprobs
        if self.values is not None:
            assert values is not None
            self.values[rows, column] = values.to(self.values.dtype)

    def rollout(
        self, lengths: Sequence[int], finished: Sequence[bool], final_values: Tensor | None
    ) -> Rollout:
        """Cut every row to its length."""
        longest = max(lengths)

        def cut(recorded: Tensor) -> list[Tensor]:
            rows = recorded[:, :longest].cpu()
            return [row[:length].clone() for row, length in zip(rows, lengths, strict=True)]

        return Rollout(
            tokens=[tokens.tolist() for tokens in cut(self.tokens)],
            finish_reasons=[FINISHED if ended else TRUNCATED for ended in finished],
            sampler_logprobs=cut(self.sampler_logprobs),
            logprobs=cut(self.logprobs),
            values=None if self.values is None else cut(self.values),
            final_values=final_values,
        )
