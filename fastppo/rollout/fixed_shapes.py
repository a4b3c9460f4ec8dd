"""The decoder's loop at fixed shapes: on a GPU a step is one launch, a CUDA graph.

A step of a small model is some hundred kernels of a few microseconds each, which a host launches
more slowly than a GPU runs them. So a step, which is trunk, head, draw, logprob, value and the test
for stop tokens, is written to read and write the same memory each time and to leave nothing to the
host: it is recorded once and replayed. There is one graph for each bucket of rows and of cached
tokens; a sequence that outgrows its bucket goes to the next, and rows go to the bucket of half as
many when no more are left, a copy of the cache that costs as much as reading it once. The host
looks every `LOOK` steps at which rows have ended; in between such rows are decoded along and write
nothing. What a stop string ends is found at the next look, and what was drawn beyond it is cut off.

Rows and their random numbers are those of `rollout.decoder`, so for one seed the tokens are too.

Graphs read weights at their addresses. They are recorded anew where those have changed, or the
adapters that are switched on; fp32 matrices under autocast are cast once a call, to copies that
stay in place. Nothing random happens in a step: its uniforms are drawn before. All memory, the
cache's and the graphs', is given up by `release`; so an iteration records its graphs anew, three
steps' time for each.

Heads of keys that several heads of queries share are read as they are with transformers 5.23; 5.17
copies them at every step. Without a GPU the same steps run one by one; that is for tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from fastppo.models.cache import FixedCache, has_fixed_cache
from fastppo.models.device import cast_matrices
from fastppo.models.head import Head
from fastppo.models.policy import LanguageModel
from fastppo.models.trunk import last_states
from fastppo.models.value import ValueFunction
from fastppo.rollout import FINISHED, TRUNCATED, Rollout, Sampling
from fastppo.rollout.draw import draw, kept_tokens, scratch_for
from fastppo.rollout.prompts import distinct, padded_left
from fastppo.rollout.stopping import StopStrings

LOOK = 16
"""Steps from one look of the host to the next: a look is a wait of some ten microseconds, and
decodes up to so many steps more than were needed."""
ROWS = 8
"""Buckets of rows are its multiples: below it a step reads the weights and little else."""
TOKENS = 128
"""Buckets of cached tokens are its multiples: a graph takes three steps' time and serves so many.
Attention kernels that take a mask want multiples of 16."""


def bucket(count: int, multiple: int) -> int:
    """The bucket of so many rows or tokens."""
    return -(-count // multiple) * multiple


class FixedShapes:
    """Decodes batches of prompts for `DecoderEngine`.

    Args:
        value_function: of final hidden states; None gives no values.
        final_values: also the value after the last token of responses that are cut off.
    """

    def __init__(
        self, policy: LanguageModel, value_function: ValueFunction | None, final_values: bool
    ) -> None:
        self.policy, self.value_function = policy, value_function
        self.final_values = final_values and value_function is not None
        self.trunk: Any = policy.causal_lm.base_model
        self.has_cache = has_fixed_cache(policy.config)
        self._memory: _Memory | None = None
        self._cast: dict[nn.Module, nn.Parameter] = {}

    @property
    def records(self) -> bool:
        """Whether steps become graphs."""
        return self.policy.device.type == "cuda"

    @cached_property
    def stream(self) -> torch.cuda.Stream | None:
        """The one that all graphs are recorded on: those of one pool share memory on one stream
        alone, and cuBLAS keeps a workspace for each."""
        device = self.policy.device
        return torch.cuda.Stream(device) if device.type == "cuda" else None

    def can_decode(self) -> bool:
        """Not a trunk whose state is more than keys and values."""
        return self.has_cache

    def release(self) -> None:
        """Gives up caches, graphs and cast weights."""
        self._memory, self._cast = None, {}

    @torch.no_grad()
    def decode(
        self,
        prompt_ids: list[list[int]],
        sampling: Sampling,
        uniforms: Tensor | None,
        strings: StopStrings,
    ) -> Rollout:
        """One response per prompt.

        Args:
            uniforms: [B, max_new_tokens] fp64 in [0, 1) on the policy's device; None is greedy.
        """
        device, dtype = self.policy.device, self.policy.compute_dtype
        enabled = dtype is not None
        with (
            # Casts that autocast would keep for this call alone must not get into a graph.
            torch.autocast(device.type, dtype=dtype, enabled=enabled, cache_enabled=False),
            cast_matrices(self.trunk, dtype, self._cast),
            _masked_attention(self.trunk),
        ):
            head = self._cast_head()
            tokens = max(map(len, prompt_ids)) + sampling.max_new_tokens
            memory = self._memory_for(len(prompt_ids), tokens, self._reads(head))
            batch = _Batch(self, head, memory, prompt_ids, sampling, uniforms, strings)
            return batch.decoded()

    def _cast_head(self) -> Head:
        """The policy's, with its weight cast as those of the trunk are."""
        head, dtype, key = self.policy.head, self.policy.compute_dtype, self.policy.causal_lm
        if dtype is None or head.weight.dtype != torch.float32:
            return head
        if key not in self._cast:
            self._cast[key] = nn.Parameter(head.weight.to(dtype), requires_grad=False)
        self._cast[key].data.copy_(head.weight)
        return head._replace(weight=self._cast[key])

    def _memory_for(self, rows: int, tokens: int, reads: tuple[object, ...]) -> _Memory:
        rows, tokens = bucket(rows, ROWS), bucket(tokens, TOKENS)
        memory = self._memory
        if memory is None or memory.rows < rows or memory.tokens < tokens:
            if memory is not None:
                rows, tokens = max(rows, memory.rows), max(tokens, memory.tokens)
            memory = self._memory = None  # gone before there is another
            memory = self._memory = _Memory(self.policy, rows, tokens)
        if memory.reads != reads:
            memory.forget_graphs(reads)
        return memory

    def _reads(self, head: Head) -> tuple[object, ...]:
        """What a graph is recorded of: addresses of weights, and which adapters are on."""
        modules = [self.trunk, *filter(None, [self.value_function])]
        weights = [p for module in modules for p in module.parameters()]
        weights += [x for x in (head.weight, head.bias) if x is not None]
        adapters = [
            (each._disable_adapters, tuple(each.merged_adapters), tuple(each.active_adapters))
            for each in self.trunk.modules()
            if hasattr(each, "_disable_adapters")
        ]
        return (*(x.data_ptr() for x in weights), *adapters)


class _Memory:
    """What a step reads and writes: its addresses stay, its contents are a batch's.

    `next`, `positions`, `mask`, `live` and `row` are of the slots that are decoded; all else is of
    the batch's rows. Column `tokens` of what is written is read by nobody: ended rows write there.
    """

    def __init__(self, policy: LanguageModel, rows: int, tokens: int) -> None:
        device = policy.device
        whole: dict[str, Any] = {"dtype": torch.int64, "device": device}
        self.rows, self.tokens = rows, tokens
        self.cache = FixedCache(policy.config, rows, tokens, policy.compute_dtype, device)
        self.next = torch.zeros(rows, 1, **whole)
        self.positions = torch.zeros(rows, 1, **whole)
        self.mask = torch.ones(rows, tokens, dtype=torch.bool, device=device)
        self.live = torch.zeros(rows, dtype=torch.bool, device=device)
        self.row = torch.arange(rows, **whole)
        self.drawn = torch.zeros(1, **whole)
        self.uniforms = torch.zeros(rows, tokens, dtype=torch.float64, device=device)
        self.lengths = torch.zeros(rows, **whole)
        self.responses = torch.zeros(rows, tokens + 1, **whole)
        self.logprobs = torch.zeros(rows, tokens + 1, device=device)
        self.sampler_logprobs = torch.zeros(rows, tokens + 1, device=device)
        self.values = torch.zeros(rows, tokens + 1, device=device)
        scores = torch.empty(1, policy.head.vocabulary, device=device).expand(rows, -1)
        self.scratch = scratch_for(scores)
        self.forget_graphs(())

    def forget_graphs(self, reads: tuple[object, ...]) -> None:
        """Those to come are of what is read now."""
        self.reads = reads
        self.graphs: dict[object, torch.cuda.CUDAGraph | None] = {}
        # Their own memory, which they share: one is replayed at a time. torch does not let a pool
        # be used again when the last graph in it is gone.
        self.pool = torch.cuda.graph_pool_handle() if self.next.is_cuda else None

    def begin(self, prompts: Tensor, mask: Tensor, uniforms: Tensor | None) -> None:
        """Takes up prompts [B, W] and their mask; slots beyond B have ended."""
        count, width = prompts.shape
        lengths = mask.sum(1, keepdim=True)
        self.cache.begin()
        self.cache.position.fill_(width)
        self.mask.fill_(True)
        self.mask[:count, :width] = mask.bool()
        self.positions.fill_(0)
        self.positions[:count] = lengths
        self.next.fill_(0)
        self.live.fill_(False)
        self.live[:count] = True
        torch.arange(self.rows, out=self.row)
        self.lengths.fill_(0)
        self.drawn.fill_(0)
        if uniforms is not None:
            self.uniforms[:count, : uniforms.shape[1]] = uniforms


class _Batch:
    """The decoding of one batch of prompts; `slots` are those that are decoded."""

    def __init__(
        self,
        decoder: FixedShapes,
        head: Head,
        memory: _Memory,
        prompt_ids: list[list[int]],
        sampling: Sampling,
        uniforms: Tensor | None,
        strings: StopStrings,
    ) -> None:
        self.decoder, self.head, self.memory = decoder, head, memory
        self.sampling, self.strings = sampling, strings
        self.count, self.slots = len(prompt_ids), len(prompt_ids)
        self.stop = set(sampling.stop_token_ids)
        self.at_string: dict[int, int] = {}
        """Rows that a stop string has ended, and their lengths."""
        self.looked = 0
        prompts, mask = (x.to(decoder.policy.device) for x in padded_left(prompt_ids, 0))
        self.width = prompts.shape[1]
        memory.begin(prompts, mask, uniforms)
        is_ragged = len({*map(len, prompt_ids)}) > 1
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        different, which = (x.to(prompts.device) for x in distinct(prompt_ids))
        states = last_states(
            decoder.trunk,
            prompts[different],
            attention_mask=mask[different] if is_ragged else None,
            position_ids=positions[different],
            cache=memory.cache,
        )
        self.prompt_states = states[which]
        if len(different) < len(which):  # a prompt that several rows have is read once
            memory.cache.select(which, self.width)

    def decoded(self) -> Rollout:
        most = self.sampling.max_new_tokens
        self._draw(self.prompt_states)
        self.slots = bucket(self.count, ROWS)
        for drawn in range(1, most):
            if drawn % LOOK == 0 and not self._look(drawn):
                break
            self._advance(drawn)
        else:
            self._look(most)
        return self._rollout(self._final_values() if self.decoder.final_values else None)

    # ------------------------------------------------------------------------------- on the device

    def _states(self, drawn: int) -> Tensor:
        """[slots, H] hidden states that predict the next tokens, `drawn` into the response."""
        memory, slots = self.memory, self.slots
        tokens = bucket(self.width + drawn, TOKENS)
        memory.cache.show(slots, tokens)
        return last_states(
            self.decoder.trunk,
            memory.next[:slots],
            attention_mask=memory.mask[:slots, :tokens],
            position_ids=memory.positions[:slots],
            cache=memory.cache,
        )

    def _draw(self, hidden: Tensor) -> None:
        """The next token of the first slots, of these hidden states, and all that is kept of it."""
        memory, sampling, slots = self.memory, self.sampling, hidden.shape[0]
        scores = self.head.logits(hidden)
        if sampling.temperature != 1:
            scores = scores / sampling.temperature
        keep = kept_tokens(scores, sampling) if sampling.is_restricted else None
        row, live = memory.row[:slots], memory.live[:slots]
        uniforms = None if sampling.greedy else memory.uniforms[row, memory.drawn]
        found = draw(scores, uniforms, keep, memory.scratch[:slots])
        column = torch.where(live, memory.drawn, memory.tokens)
        memory.responses[row, column] = found.tokens
        memory.logprobs[row, column] = found.logprobs
        memory.sampler_logprobs[row, column] = found.sampler_logprobs
        if self.decoder.value_function is not None:
            memory.values[row, column] = self.decoder.value_function.read(hidden)
        memory.lengths.index_add_(0, row, live.long())
        for token in sampling.stop_token_ids:
            live &= found.tokens != token
        memory.next[:slots, 0] = found.tokens
        memory.drawn += 1

    def _step(self, drawn: int) -> None:
        memory = self.memory
        hidden = self._states(drawn)
        memory.cache.position += 1
        memory.positions += 1
        self._draw(hidden)

    def _advance(self, drawn: int) -> None:
        """A step: from its graph, or as it is where there is none."""
        memory, sampling = self.memory, self.sampling
        if not self.decoder.records:
            self._step(drawn)
            return
        kind = (
            *(self.slots, bucket(self.width + drawn, TOKENS)),
            *(sampling.temperature, sampling.top_k, sampling.top_p, sampling.greedy),
            sampling.stop_token_ids,
        )
        if kind not in memory.graphs:
            self._step(drawn)  # the warm-up that recording needs
            memory.graphs[kind] = None
            return
        graph = memory.graphs[kind]
        if graph is None:
            graph = _recorded(partial(self._step, drawn), memory.pool, self.decoder.stream)
            memory.graphs[kind] = graph
        graph.replay()

    # --------------------------------------------------------------------------------- on the host

    def _look(self, drawn: int) -> bool:
        """Whether there are rows that have not ended; slots that have may be left behind."""
        memory = self.memory
        if self.sampling.stop_strings:
            self._find_strings()
        live = memory.live[: self.slots].tolist()
        left = [slot for slot, is_live in enumerate(live) if is_live]
        fewer = bucket(len(left), ROWS)
        if left and 2 * fewer <= self.slots:
            ended = [slot for slot, is_live in enumerate(live) if not is_live]
            chosen = torch.tensor(left + ended[: fewer - len(left)]).to(memory.row.device)
            memory.cache.select(chosen, self.width + drawn)
            for held in (memory.next, memory.positions, memory.mask, memory.live, memory.row):
                held[:fewer] = held[chosen]
            self.slots = fewer
        return bool(left)

    def _find_strings(self) -> None:
        """Ends the rows in which a stop string is complete since the last look."""
        memory = self.memory
        lengths = memory.lengths[: self.count].tolist()
        responses = memory.responses[: self.count, : max(lengths)].tolist()
        for length in range(self.looked + 1, max(lengths) + 1):
            rows = [
                row
                for row in range(self.count)
                if lengths[row] >= length and row not in self.at_string
            ]
            texts = [responses[row][:length] for row in rows]
            ended = self.strings.ended(texts) if rows else []
            found = [row for row, is_ended in zip(rows, ended, strict=True) if is_ended]
            self.at_string |= dict.fromkeys(found, length)
        self.looked = max(lengths)
        goes_on = torch.tensor([row not in self.at_string for row in range(memory.rows)])
        memory.live &= goes_on.to(memory.live.device)[memory.row]

    def _final_values(self) -> Tensor:
        """[B] fp32: the value after the last token of the rows that are left, 0 elsewhere."""
        memory, final = self.memory, torch.zeros(self.count)
        slots = [slot for slot, is_live in enumerate(memory.live[: self.slots].tolist()) if is_live]
        if slots:
            assert self.decoder.value_function is not None
            states = self._states(self.sampling.max_new_tokens)
            values = self.decoder.value_function.read(states).float().cpu()
            final[memory.row.cpu()[slots]] = values[slots]
        return final

    def _rollout(self, final_values: Tensor | None) -> Rollout:
        memory = self.memory
        lengths = memory.lengths[: self.count].tolist()
        lengths = [min(n, self.at_string.get(row, n)) for row, n in enumerate(lengths)]

        def cut(held: Tensor) -> list[Tensor]:
            rows = held[: self.count, : max(lengths)].cpu()
            return [row[:length].clone() for row, length in zip(rows, lengths, strict=True)]

        tokens = [each.tolist() for each in cut(memory.responses)]
        ended = [row in self.at_string or each[-1] in self.stop for row, each in enumerate(tokens)]
        return Rollout(
            tokens=tokens,
            finish_reasons=[FINISHED if each else TRUNCATED for each in ended],
            sampler_logprobs=cut(memory.sampler_logprobs),
            logprobs=cut(memory.logprobs),
            values=None if self.decoder.value_function is None else cut(memory.values),
            final_values=final_values,
        )


def _recorded(
    step: Callable[[], None], pool: Any, stream: torch.cuda.Stream | None
) -> torch.cuda.CUDAGraph:
    """A step as a graph; nothing is computed yet."""
    assert stream is not None
    graph = torch.cuda.CUDAGraph()
    # torch would record on a stream of the current device, which may be another one. Other threads
    # may use the device in the meantime.
    with (
        torch.cuda.device(stream.device),
        torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
    ):
        step()
    return graph


@contextmanager
def _masked_attention(trunk: Any) -> Iterator[None]:
    """SDPA in place of flash-attn, which takes no mask and reads lengths off the device."""
    config, chosen = trunk.config, trunk.config._attn_implementation
    if chosen.startswith("flash"):
        config._attn_implementation = "sdpa"
    try:
        yield
    finally:
        config._attn_implementation = chosen
