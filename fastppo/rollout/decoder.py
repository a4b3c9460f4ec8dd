"""Decode in a loop over the learner's trunk and head.

In contrast to Hugging Face `generate`, the loop

- computes the logprob of a token while drawing it (`rollout.draw`), at no extra cost;
- computes values from the same hidden states, so a learner in fp32 gets old logprobs and values
  without another forward pass;
- drops finished rows from the batch;
- keeps the cache between the turns of an episode (`DecoderEngine.conversations`).

On a GPU, reading a token makes the host wait for the device, which then has nothing queued. So the
loop looks at the tokens only every `LOOK` steps, and rows that have ended in between are decoded in
vain until then.

Prompts are padded on the left, and position ids count tokens. All random numbers of a call are
drawn before its first token, one per row and step, so the tokens of a row depend neither on the
other rows nor on the batch size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from fastppo_kernels.definition import WITHOUT_FP64
from torch import Tensor

from fastppo.activity import begin_count, count
from fastppo.data.batch import on_device
from fastppo.data.image_inputs import (
    EncodedImages,
    ImageInputs,
    rope_positions,
    without_image_tokens,
)
from fastppo.data.images import encoded_images
from fastppo.models.cache import GrowingCache, KeptPrefixes, Prefix
from fastppo.models.policy import ActorCritic, LanguageModel
from fastppo.models.trunk import last_states, takes_padding_mask, trunk_of
from fastppo.rollout import FINISHED, TRUNCATED, Rollout, RolloutEngine, Sampling
from fastppo.rollout.draw import Draws, draw_next, scratch_for
from fastppo.rollout.prompts import check_prompts, distinct, padded_left
from fastppo.rollout.stopping import StopStrings

LOOK = 8
"""Steps between two looks at the tokens on a GPU."""


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
        self.look = LOOK if policy.device.type == "cuda" else 1
        self.kept: KeptPrefixes | None = None
        """Cache entries of earlier turns; None outside of `conversations`."""

    @contextmanager
    def conversations(self) -> Iterator[None]:
        """Keep the cache from call to call, as far as the tokens agree, within the block.

        A prompt that continues an earlier prompt and its response is computed from the first token
        that differs. The kept entries take at most as much memory as the largest cache of the
        calls so far. The weights must not change within the block.
        """
        self.kept = KeptPrefixes()
        try:
            yield
        finally:
            self.kept = None

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
        begin_count(len(prompt_ids))
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
                        self.kept,
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
        drawn = uniforms[first : first + count]
        device = self.policy.device
        return on_device(drawn.float() if device.type in WITHOUT_FP64 else drawn, device)

    def _decode(self, rows: _LiveRows, sampling: Sampling, strings: StopStrings) -> Rollout:
        """Draw tokens until every row has ended or reached `max_new_tokens`."""
        responses = _Responses(rows.prompt_ids, sampling, strings)
        pending = []
        for column in range(sampling.max_new_tokens):
            hidden = rows.advance()
            draws = rows.draw(hidden, column)
            responses.write(draws, self._values(hidden))
            rows.append(draws.tokens)
            pending.append(draws.tokens)
            if len(pending) < self.look and column + 1 < sampling.max_new_tokens:
                continue
            left = responses.read(torch.stack(pending, dim=1).tolist())
            pending = []
            if len(left) < len(rows.live):
                count(len(rows.live) - len(left))
                rows.leave(left, responses.tokens)
                responses.live = rows.live
                if not left:
                    break
        count(len(rows.live))
        final_values = None
        if self.final_values:
            final_values = torch.zeros(len(responses.tokens))
            if rows.live:
                values = self._values(rows.advance())
                assert values is not None
                final_values[rows.live] = values.float().cpu()
        rows.leave([], responses.tokens)
        return responses.rollout(final_values)

    def _values(self, hidden: Tensor) -> Tensor | None:
        return None if self.value_function is None else self.value_function.read(hidden)


class _LiveRows:
    """Unfinished rows: their cache and the inputs of the next step.

    Attributes:
        live: [L], indices in the batch, ascending.
        length: number of columns in the cache, padding included.
    """

    def __init__(
        self,
        policy: LanguageModel,
        prompt_ids: Sequence[Sequence[int]],
        sampling: Sampling,
        uniforms: Tensor | None,
        kept: KeptPrefixes | None,
    ) -> None:
        self.device = policy.device
        self.prompt_ids = prompt_ids
        self.sampling = sampling
        self.uniforms = uniforms
        self.trunk: Any = trunk_of(policy.causal_lm)
        self.head = policy.head
        self.cache = GrowingCache(policy.config, policy.compute_dtype)
        self.kept = kept if self.cache.has_keys_alone else None
        self.live = list(range(len(prompt_ids)))
        prompts, mask = padded_left(prompt_ids, 0)
        self.width = prompts.shape[1]
        self.is_ragged = not mask.all()
        response = torch.ones(len(prompt_ids), sampling.max_new_tokens, dtype=torch.int64)
        mask = torch.cat([mask, response], dim=1)
        self.positions = on_device((mask.cumsum(1) - 1).clamp(min=0), self.device)
        self.mask = on_device(mask, self.device)
        self.step_mask: Tensor | None = None
        """[L, 1, 1, columns] bool, for steps of one token; None if the trunk makes its own."""
        if self.is_ragged and self.cache.has_keys_alone and takes_padding_mask(self.trunk):
            self.step_mask = self.mask.bool()[:, None, None]
        encoded = encoded_images(prompt_ids)
        if encoded is not None:
            self.kept = None  # kept entries are found by their tokens
        first_rows, which = distinct(prompt_ids)
        self.length = self._take_kept(len(first_rows))
        # A prompt shared by several rows is read once, and its cache entries are copied.
        self.is_shared = self.length == 0 and len(first_rows) < len(which)
        self.first_rows = on_device(first_rows, self.device)
        self.which = on_device(which, self.device)
        self.next = on_device(prompts[:, self.length :], self.device)
        self.scratch: Tensor | None = None
        self.images: ImageInputs | None = None
        """Images of the prompts until they are read."""
        self.image_tokens: Tensor | None = None
        """[L] int64, the id of image tokens; None without images."""
        if encoded is not None:
            self._take_images(encoded, mask, first_rows.tolist())

    def _take_images(
        self, encoded: Sequence[EncodedImages | None], mask: Tensor, first_rows: list[int]
    ) -> None:
        """Prepare the images of the distinct prompts, and the positions of M-RoPE.

        Args:
            mask: [B, columns] int64 on the CPU, 0 on padding.
        """
        image_tokens = [-1 if images is None else images.token_id for images in encoded]
        self.image_tokens = on_device(torch.tensor(image_tokens), self.device)
        places = (mask.cumsum(1) - 1).clamp(min=0)
        rows = torch.arange(len(encoded)).unsqueeze(1).expand_as(places)
        of_rope = rope_positions(encoded, rows, places)
        of_prompts = None
        if of_rope is not None:
            self.positions = on_device(of_rope, self.device)
            of_prompts = self.positions[:, self.first_rows, : self.width]
        self.images = ImageInputs.of([encoded[row] for row in first_rows], of_prompts)

    def _take_kept(self, distinct_prompts: int) -> int:
        """Begin with the kept entries if that computes fewer tokens; return the cached columns.

        All rows compute the same columns, so the row with most new tokens decides.
        """
        if self.kept is None or not self.prompt_ids:
            return 0
        prefixes: list[Prefix] = []
        new = 0
        for prompt in self.prompt_ids:
            prefix, common = self.kept.best(prompt)
            if prefix is None:
                return 0
            prefixes.append(prefix)
            new = max(new, len(prompt) - min(common, len(prompt) - 1))
        if new * len(self.prompt_ids) >= distinct_prompts * self.width:
            return 0
        length = self.width - new
        self.cache.begin_with(prefixes, [*map(self._column, self.live)], length)
        return length

    def _column(self, row: int) -> int:
        """Return the column of a row's first token."""
        return self.width - len(self.prompt_ids[row])

    def advance(self) -> Tensor:
        """Run the trunk on the next tokens and return their final hidden states, [L, H]."""
        begin = self.length
        self.length += self.next.shape[1]
        is_shared = self.is_shared
        self.is_shared = False
        rows = self.first_rows if is_shared else slice(None)
        images, self.images = self.images, None  # the cache holds them from now on
        mask = None
        # A recurrent state has no columns that a mask could exclude after the prompts.
        if self.is_ragged and (begin == 0 or self.cache.has_keys):
            mask = self.mask[rows, : self.length]
            if self.step_mask is not None and self.length - begin == 1:
                mask = self.step_mask[rows, :, :, : self.length]
        states = last_states(
            self.trunk,
            self.next[rows],
            attention_mask=mask,
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

    def leave(self, left: Sequence[int], responses: Sequence[Sequence[int]]) -> None:
        """Drop all rows but those at the places `left` in `live`, and keep their entries."""
        if self.kept is not None:
            self.kept.limit = max(self.kept.limit, len(self.prompt_ids) * self.length)
            for place in sorted({*range(len(self.live))} - {*left}):
                self._keep(place, responses[self.live[place]])
        self.live = [self.live[place] for place in left]
        if not left:
            return
        rows = on_device(torch.tensor(left), self.device)
        self.cache.select(rows)
        self.mask = self.mask[rows]
        self.positions = self.positions[..., rows, :]
        self.next = self.next[rows]
        if self.step_mask is not None:
            self.step_mask = self.step_mask[rows]
        if self.image_tokens is not None:
            self.image_tokens = self.image_tokens[rows]
        if self.uniforms is not None:
            self.uniforms = self.uniforms[rows]

    def _keep(self, place: int, response: Sequence[int]) -> None:
        """Keep the entries of the row at a place in `live`."""
        assert self.kept is not None
        row = self.live[place]
        begin = self._column(row)
        # The token drawn last is not in the cache yet.
        tokens = [*self.prompt_ids[row], *response][: self.length - begin]
        prefix = self.cache.prefix(place, begin, tokens)
        if prefix is not None:
            self.kept.add(prefix)


class _Responses:
    """Responses of a batch: tokens on the host, logprobs and values on the device until the end.

    Attributes:
        live: [L], the rows that are decoded.
        tokens: [B], the tokens of each response so far.
    """

    def __init__(
        self, prompt_ids: Sequence[Sequence[int]], sampling: Sampling, strings: StopStrings
    ) -> None:
        self.live = list(range(len(prompt_ids)))
        self.tokens: list[list[int]] = [[] for _ in prompt_ids]
        self.finished = [False] * len(prompt_ids)
        self.stop = {*sampling.stop_token_ids}
        self.strings = strings
        self.steps: list[tuple[list[int], Tensor]] = []
        """For each step the live rows, and logprobs, sampler logprobs and values there, [2 or 3,
        L]."""

    def write(self, draws: Draws, values: Tensor | None) -> None:
        """Record the numbers of a step."""
        numbers = [draws.logprobs, draws.sampler_logprobs]
        if values is not None:
            numbers.append(values.to(draws.logprobs.dtype))
        self.steps.append((self.live, torch.stack(numbers)))

    def read(self, block: Sequence[Sequence[int]]) -> list[int]:
        """Take the next tokens of the live rows, [L, steps]; return the places that go on."""
        left = list(range(len(self.live)))
        for step in range(len(block[0])):
            for place in left:
                self.tokens[self.live[place]].append(block[place][step])
            ended = [block[place][step] in self.stop for place in left]
            if self.strings.strings:
                by_string = self.strings.ended([self.tokens[self.live[place]] for place in left])
                ended = [a or b for a, b in zip(ended, by_string, strict=True)]
            for place, has_ended in zip(left, ended, strict=True):
                self.finished[self.live[place]] = has_ended
            left = [place for place, has_ended in zip(left, ended, strict=True) if not has_ended]
        return left

    def rollout(self, final_values: Tensor | None) -> Rollout:
        """Cut every row to its length."""
        count = len(self.steps[0][1])
        rows = torch.tensor([row for live, _ in self.steps for row in live])
        columns = torch.tensor(
            [column for column, (live, _) in enumerate(self.steps) for _ in live]
        )
        numbers = torch.zeros(count, len(self.tokens), len(self.steps))
        numbers[:, rows, columns] = torch.cat([step for _, step in self.steps], dim=1).cpu()
        lengths = [len(tokens) for tokens in self.tokens]

        def cut(recorded: Tensor) -> list[Tensor]:
            return [row[:length].clone() for row, length in zip(recorded, lengths, strict=True)]

        logprobs, sampler_logprobs, *values = map(cut, numbers)
        return Rollout(
            tokens=self.tokens,
            finish_reasons=[FINISHED if ended else TRUNCATED for ended in self.finished],
            sampler_logprobs=sampler_logprobs,
            logprobs=logprobs,
            values=values[0] if values else None,
            final_values=final_values,
        )
