"""A lean decoding loop over the learner's own trunk and head, with transformers' caches.

What it has over `generate`: the draw yields the logprob as it goes (`rollout.draw`), the hidden
state that predicts a token also gives its value, so that a learner in fp32 has its old logprobs and
values without a pass of its own, and rows that have ended leave the batch.

Prompts are padded on the left, with position ids that count tokens. All random numbers of a call
are drawn before its first token, one per row and step: what a row draws depends neither on which
other rows have ended nor on how many are decoded at once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastppo.models.cache import GrowingCache
from fastppo.models.head import Head
from fastppo.models.policy import ActorCritic, LanguageModel
from fastppo.models.sharding import groups_of
from fastppo.models.trunk import inference, last_states
from fastppo.models.value import ValueFunction
from fastppo.rollout import FINISHED, TRUNCATED, Rollout, RolloutEngine, Sampling
from fastppo.rollout.draw import Draws, draw, kept_tokens, scratch_for
from fastppo.rollout.fixed_shapes import FixedShapes
from fastppo.rollout.prompts import check_prompts, distinct, padded_left
from fastppo.rollout.stopping import StopStrings


class DecoderEngine(RolloutEngine):
    """Decodes the policy that is trained, in batches of `batch_size`.

    Args:
        policy: with a value function that reads the trunk's final hidden states, values are given.
        final_values: also give the value after the last token of responses that are cut off, for
            which the trunk runs once more.
        tokenizer: for stop strings alone.
        fixed_shapes: decode by `rollout.fixed_shapes`, whose steps are CUDA graphs; by default on a
            GPU. What it cannot decode goes through the loop here.
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
        self.final_values = final_values
        self.tokenizer = tokenizer
        self.fixed: FixedShapes | None = None
        if policy.device.type == "cuda" if fixed_shapes is None else fixed_shapes:
            self.fixed = FixedShapes(policy, _value_function(policy), final_values)

    def release(self) -> None:
        if self.fixed is not None:
            self.fixed.release()

    @torch.no_grad()
    def generate(self, prompt_ids: list[list[int]], sampling: Sampling) -> Rollout:
        """Draws one response per prompt from the policy's current weights.

        Raises:
            ValueError: a prompt is empty; stop strings without a tokenizer; an option in `extra`.
        """
        check_prompts(prompt_ids)
        if sampling.extra:
            raise ValueError(
                f"the decoder has no options of its own, got {', '.join(sampling.extra)}; those of "
                "Hugging Face generate need rollout=generate"
            )
        strings = StopStrings(self.tokenizer, sampling.stop_strings)
        uniforms = None
        if not sampling.greedy:
            seed = int(torch.randint(2**63 - 1, ()))
            first, rows = sampling.place or (0, len(prompt_ids))
            uniforms = torch.rand(
                rows,
                sampling.max_new_tokens,
                dtype=torch.float64,
                generator=torch.Generator().manual_seed(seed),
            )[first : first + len(prompt_ids)].to(self.policy.device)
        causal_lm = self.policy.causal_lm
        was_training = causal_lm.training
        causal_lm.eval()  # gradient checkpointing is for training mode and forbids the cache
        try:
            with self.policy.autocast():
                decode = self._decode
                if self.fixed is not None and self.fixed.can_decode():
                    decode = self.fixed.decode
                step = self.batch_size or max(1, len(prompt_ids))
                return Rollout.joined(
                    [
                        decode(
                            prompt_ids[start : start + step],
                            sampling,
                            None if uniforms is None else uniforms[start : start + step],
                            strings,
                        )
                        for start in range(0, len(prompt_ids), step)
                    ]
                )
        finally:
            causal_lm.train(was_training)

    def _decode(
        self,
        prompt_ids: list[list[int]],
        sampling: Sampling,
        uniforms: Tensor | None,
        strings: StopStrings,
    ) -> Rollout:
        rows = _Rows(self.policy, prompt_ids, sampling, uniforms)
        record = _Record(len(prompt_ids))
        # FSDP keeps what it gathers for the passes that have gradients.
        lean = torch.no_grad() if groups_of(self.policy) else inference(self.policy)
        with lean:
            self._draw_all(rows, record, sampling, strings)
            final = self._final_values(rows, len(prompt_ids)) if self.final_values else None
        return record.rollout(None if final is None else final.clone())

    def _draw_all(
        self, rows: _Rows, record: _Record, sampling: Sampling, strings: StopStrings
    ) -> None:
        """Token after token, until every row has ended or been cut off."""
        for drawn in range(sampling.max_new_tokens):
            hidden = rows.advance()
            found = rows.draw(hidden, drawn)
            record.add(rows.live, found, _values(self.policy, hidden))
            ended = rows.at_stop_token(found.tokens)
            if sampling.stop_strings:
                at_string = strings.ended(record.responses(rows.live))
                ended |= torch.tensor(at_string, device=ended.device)
            rows.append(found.tokens)
            if ended.any():
                record.finished[rows.live[ended]] = True
                rows.leave(ended)
                if not len(rows.live):
                    break

    def _final_values(self, rows: _Rows, count: int) -> Tensor | None:
        """[count] fp32: the value after the last token of the rows that are left, 0 elsewhere."""
        if _value_function(self.policy) is None:
            return None
        final = torch.zeros(count)
        if len(rows.live):
            values = _values(self.policy, rows.advance())
            assert values is not None
            final[rows.live.cpu()] = values.float().cpu()
        return final


class _Rows:
    """The rows that still decode: their cache, and what the next step reads.

    Attributes:
        live: [L] int64, which of the batch's rows they are, in order.
    """

    def __init__(
        self,
        policy: LanguageModel,
        prompt_ids: list[list[int]],
        sampling: Sampling,
        uniforms: Tensor | None,
    ) -> None:
        device = policy.device
        prompts, mask = padded_left(prompt_ids, 0)
        self.sampling, self.uniforms = sampling, uniforms
        self.trunk: Any = policy.causal_lm.base_model
        self.head: Head = policy.head
        self.cache = GrowingCache(policy.config, policy.compute_dtype)
        self.is_ragged = not mask.all()
        self.live = torch.arange(len(prompt_ids), device=device)
        self.stop = torch.tensor(sampling.stop_token_ids, dtype=torch.int64, device=device)
        response = torch.ones(len(prompt_ids), sampling.max_new_tokens, dtype=torch.int64)
        self.mask = torch.cat([mask, response], dim=1).to(device)
        self.positions = (self.mask.cumsum(1) - 1).clamp(min=0)
        self.next = prompts.to(device)
        self.different, self.which = (x.to(device) for x in distinct(prompt_ids))
        self.length = 0
        self.scratch: Tensor | None = None

    def advance(self) -> Tensor:
        """[L, H] hidden states that predict the next tokens; the cache takes up the last ones."""
        begin, self.length = self.length, self.length + self.next.shape[1]
        # A prompt that several rows have is read once, and what is cached of it copied.
        is_shared = begin == 0 and len(self.different) < len(self.which)
        rows = self.different if is_shared else slice(None)
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

    def draw(self, hidden: Tensor, drawn: int) -> Draws:
        """The next token of each row, `drawn` tokens into the response."""
        scores = self.head.logits(hidden)
        if self.sampling.temperature != 1:
            scores = scores / self.sampling.temperature
        keep = None
        if self.sampling.is_restricted:
            keep = kept_tokens(scores, self.sampling)
        if self.scratch is None:
            self.scratch = scratch_for(scores)
        uniforms = None if self.uniforms is None else self.uniforms[:, drawn]
        return draw(scores, uniforms, keep, self.scratch)

    def at_stop_token(self, tokens: Tensor) -> Tensor:
        """[L] bool."""
        return torch.isin(tokens, self.stop)

    def append(self, tokens: Tensor) -> None:
        """Takes up the tokens [L] that were drawn."""
        self.next = tokens.unsqueeze(1)

    def leave(self, ended: Tensor) -> None:
        """Drops the rows that have ended, [L] bool."""
        left = (~ended).nonzero().squeeze(1)
        self.live = self.live[left]
        if not len(left):
            return
        self.cache.batch_select_indices(left)
        self.mask, self.positions = self.mask[left], self.positions[left]
        self.next = self.next[left]
        if self.uniforms is not None:
            self.uniforms = self.uniforms[left]


class _Record:
    """What was drawn, step by step, and the rollout that it makes."""

    def __init__(self, count: int) -> None:
        self.finished = torch.zeros(count, dtype=torch.bool)
        self.rows: list[Tensor] = []
        self.draws: list[Draws] = []
        self.values: list[Tensor | None] = []

    def add(self, live: Tensor, found: Draws, values: Tensor | None) -> None:
        """One step's tokens of the rows `live` [L], and the values [L] of the states before."""
        self.rows.append(live)
        self.draws.append(found)
        self.values.append(values)

    def responses(self, live: Tensor) -> list[list[int]]:
        """The tokens so far of rows that have drawn one at every step."""
        columns = []
        for rows, found in zip(self.rows, self.draws, strict=True):
            columns.append(found.tokens[torch.isin(rows, live)])
        return torch.stack(columns, dim=1).tolist()

    def rollout(self, final_values: Tensor | None) -> Rollout:
        """The responses, row by row."""
        rows = torch.cat(self.rows).cpu()
        order = rows.argsort(stable=True)  # each row's steps stay in their order
        lengths = rows.bincount(minlength=len(self.finished)).tolist()

        def packed(steps: list[Tensor]) -> list[Tensor]:
            return list(torch.cat(steps).cpu()[order].split(lengths))

        values = [each for each in self.values if each is not None]
        return Rollout(
            tokens=[each.tolist() for each in packed([found.tokens for found in self.draws])],
            finish_reasons=[
                FINISHED if finished else TRUNCATED for finished in self.finished.tolist()
            ],
            sampler_logprobs=packed([found.sampler_logprobs for found in self.draws]),
            logprobs=packed([found.logprobs for found in self.draws]),
            values=packed(values) if values else None,
            final_values=final_values,
        )


def _value_function(policy: LanguageModel) -> ValueFunction | None:
    """The value function, where a final hidden state is all that it reads."""
    if isinstance(policy, ActorCritic) and policy.value_function.reads_final_hidden:
        return policy.value_function
    return None


def _values(policy: LanguageModel, hidden: Tensor) -> Tensor | None:
    function = _value_function(policy)
    return None if function is None else function.read(hidden)
