"""The decoder's loop at fixed shapes: on a GPU a step is one launch, a CUDA graph.

A step of a small model is some hundred kernels of a few microseconds each, which a host launches
more slowly than a GPU runs them. So a step, which is trunk, head, draw, logprob, value and the test
for stop tokens, is written to read and write the same memory each time and to leave nothing to the
host: it is recorded once and replayed. There is one graph for each bucket of rows and of cached
tokens; a sequence that outgrows its bucket goes to the next, and when half of the rows have ended
the others move to a smaller bucket, a copy of the cache that costs as much as reading it once. The
host looks every `LOOK` steps at which rows have ended; in between such rows are decoded along and
write nothing. What a stop string ends is found at the next look, and what was drawn beyond it is
cut off.

Rows and their random numbers are those of `rollout.decoder`, so for one seed the tokens are too.

Graphs read weights at their addresses. They are recorded anew where those have changed, or the
adapters that are switched on; fp32 matrices under autocast are cast once a call, to copies that
stay in place. Nothing random happens in a step: its uniforms are drawn before. All memory, the
cache's and the graphs', is freed by `release`; so an iteration records its graphs anew, which takes
as long as three steps for each.

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

from fastppo.models.cache import FixedCache
from fastppo.models.device import cast_matrices
from fastppo.models.head import Head
from fastppo.models.policy import LanguageModel
from fastppo.models.trunk import last_states
from fastppo.models.value import ValueFunction
from fastppo.rollout import Rollout
from fastppo.rollout.draw import draw_next, scratch_for
from fastppo.rollout.prompts import PromptBatch, distinct, padded_left
from fastppo.rollout.record import ResponseRecord

LOOK = 16
"""Steps from one look of the host to the next: a look is a wait of some ten microseconds, and
decodes up to so many steps more than were needed."""
ROWS = 8
"""Buckets of rows are its multiples: below it a step reads the weights and little else."""
TOKENS = 128
"""Buckets of cached tokens are its multiples: a graph takes as long as three steps to record, and
serves so many. Attention kernels that take a mask want multiples of 16."""


def bucket(count: int, multiple: int) -> int:
    """The bucket of so many rows or tokens."""
    return -(-count // multiple) * multiple


class FixedShapes:
    """Decodes batches of prompts for `DecoderEngine`.

    Args:
        policy: whose trunk has a fixed cache (`fastppo.models.cache.has_fixed_cache`).
        value_function: of final hidden states; None gives no values.
        final_values: also the value after the last token of responses that are cut off.
    """

    def __init__(
        self, policy: LanguageModel, value_function: ValueFunction | None, *, final_values: bool
    ) -> None:
        self.policy = policy
        self.value_function = value_function
        self.final_values = final_values
        self.trunk: Any = policy.causal_lm.base_model
        self._memory: _Memory | None = None
        self._cast: dict[nn.Module, nn.Parameter] = {}

    @property
    def records(self) -> bool:
        """Whether steps become graphs."""
        return self.policy.device.type == "cuda"

    @cached_property
    def stream(self) -> torch.cuda.Stream:
        """The one that all graphs are recorded on: those of one pool share memory on one stream
        alone, and cuBLAS keeps a workspace for each."""
        return torch.cuda.Stream(self.policy.device)

    def record(self, step: Callable[[], None], pool: Any) -> torch.cuda.CUDAGraph:
        """A step as a graph; nothing is computed yet."""
        graph = torch.cuda.CUDAGraph()
        # torch would record on a stream of the current device, which may be another one. Other
        # threads may use the device in the meantime.
        with (
            torch.cuda.device(self.policy.device),
            torch.cuda.graph(
                graph, pool=pool, stream=self.stream, capture_error_mode="thread_local"
            ),
        ):
            step()
        return graph

    def release(self) -> None:
        """Frees caches, graphs and cast weights."""
        self._memory = None
        self._cast = {}

    @torch.no_grad()
    def decode(self, batch: PromptBatch) -> Rollout:
        """One response per prompt."""
        dtype = self.policy.compute_dtype
        with (
            # Casts that autocast would keep for this call alone must not get into a graph.
            torch.autocast(
                self.policy.device.type, dtype=dtype, enabled=dtype is not None, cache_enabled=False
            ),
            cast_matrices(self.trunk, dtype, self._cast),
            _masked_attention(self.trunk),
        ):
            head = self._cast_head()
            longest = max(map(len, batch.prompt_ids)) + batch.sampling.max_new_tokens
            memory = self._memory_for(len(batch), longest)
            memory.keep_graphs_of(self._recorded_from(head))
            return _Decoding(self, head, memory, batch).run()

    def _cast_head(self) -> Head:
        """The policy's, with its weight cast as those of the trunk are."""
        head = self.policy.head
        dtype = self.policy.compute_dtype
        if dtype is None or head.weight.dtype != torch.float32:
            return head
        key = self.policy.causal_lm
        if key not in self._cast:
            self._cast[key] = nn.Parameter(head.weight.to(dtype), requires_grad=False)
        self._cast[key].data.copy_(head.weight)
        return head._replace(weight=self._cast[key])

    def _memory_for(self, rows: int, tokens: int) -> _Memory:
        """Memory with room for so many; what is there already, if it is large enough."""
        rows = bucket(rows, ROWS)
        tokens = bucket(tokens, TOKENS)
        if self._memory is not None:
            if self._memory.rows >= rows and self._memory.tokens >= tokens:
                return self._memory
            rows = max(rows, self._memory.rows)
            tokens = max(tokens, self._memory.tokens)
            self._memory = None  # freed before there is another
        has_values = self.value_function is not None
        self._memory = _Memory(self.policy, rows, tokens, has_values=has_values)
        return self._memory

    def _recorded_from(self, head: Head) -> tuple[object, ...]:
        """What a graph is recorded from: addresses of weights, and which adapters are on."""
        modules: list[nn.Module] = [self.trunk]
        if self.value_function is not None:
            modules.append(self.value_function)
        weights: list[Tensor] = [p for module in modules for p in module.parameters()]
        weights.append(head.weight)
        if head.bias is not None:
            weights.append(head.bias)
        adapters = [
            (module.disable_adapters, tuple(module.merged_adapters), tuple(module.active_adapters))
            for module in self.trunk.modules()
            if hasattr(module, "merged_adapters")  # a layer of PEFT
        ]
        return (*(weight.data_ptr() for weight in weights), *adapters)


class _Memory:
    """The tensors that a step reads and writes. Graphs hold their addresses, so each batch fills
    them anew and replaces none.

    Slots are the rows that are decoded; of several slots `row` says which of the batch's rows each
    is. `next`, `positions`, `mask` and `live` are indexed by slot, all else by the batch's row. The
    record has one column more than `tokens`, which is never read: rows that have ended write there.
    """

    def __init__(self, policy: LanguageModel, rows: int, tokens: int, *, has_values: bool) -> None:
        device = policy.device
        self.rows = rows
        self.tokens = tokens
        self.cache = FixedCache(
            policy.config, rows=rows, tokens=tokens, dtype=policy.compute_dtype, device=device
        )
        self.next = torch.zeros(rows, 1, dtype=torch.int64, device=device)
        self.positions = torch.zeros(rows, 1, dtype=torch.int64, device=device)
        self.mask = torch.ones(rows, tokens, dtype=torch.bool, device=device)
        self.live = torch.zeros(rows, dtype=torch.bool, device=device)
        self.row = torch.arange(rows, dtype=torch.int64, device=device)
        self.drawn = torch.zeros(1, dtype=torch.int64, device=device)
        self.uniforms = torch.zeros(rows, tokens, dtype=torch.float64, device=device)
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=device)
        self.record = ResponseRecord(rows, tokens + 1, device, has_values=has_values)
        logits = torch.empty(1, policy.head.vocabulary, device=device).expand(rows, -1)
        self.scratch = scratch_for(logits)
        self._recorded_from: tuple[object, ...] = ()
        self._forget_graphs()

    def keep_graphs_of(self, recorded_from: tuple[object, ...]) -> None:
        """Forgets graphs that were recorded from anything else."""
        if self._recorded_from != recorded_from:
            self._recorded_from = recorded_from
            self._forget_graphs()

    def _forget_graphs(self) -> None:
        self.graphs: dict[object, torch.cuda.CUDAGraph | None] = {}
        # Their own memory, which they share: one is replayed at a time. torch does not let a pool
        # be used again when the last graph in it is gone.
        self.pool = torch.cuda.graph_pool_handle() if self.next.is_cuda else None

    def begin(self, prompts: Tensor, mask: Tensor, uniforms: Tensor | None) -> None:
        """Sets everything for prompts [B, W] and their mask; slots beyond B have ended."""
        count, width = prompts.shape
        self.cache.begin()
        self.cache.position.fill_(width)
        self.mask.fill_(True)
        self.mask[:count, :width] = mask.bool()
        self.positions.fill_(0)
        self.positions[:count] = mask.sum(1, keepdim=True)
        self.next.fill_(0)
        self.live.fill_(False)
        self.live[:count] = True
        torch.arange(self.rows, out=self.row)
        self.lengths.fill_(0)
        self.drawn.fill_(0)
        if uniforms is not None:
            self.uniforms[:count, : uniforms.shape[1]] = uniforms


class _Decoding:
    """The decoding of one batch of prompts; the first `slots` rows of the memory are decoded."""

    def __init__(
        self, decoder: FixedShapes, head: Head, memory: _Memory, batch: PromptBatch
    ) -> None:
        self.decoder = decoder
        self.head = head
        self.memory = memory
        self.batch = batch
        self.sampling = batch.sampling
        self.count = len(batch)
        self.slots = len(batch)
        self.string_ends: dict[int, int] = {}
        """The lengths of rows that a stop string has ended."""
        self.searched = 0
        """Tokens of each response in which stop strings have been looked for."""
        self.width = max(map(len, batch.prompt_ids))

    def run(self) -> Rollout:
        most = self.sampling.max_new_tokens
        self._draw(self._read_prompts())
        self.slots = bucket(self.count, ROWS)
        for drawn in range(1, most):
            if drawn % LOOK == 0 and not self._look(drawn):
                break
            self._advance(drawn)
        else:
            self._look(most)
        return self._rollout()

    # ------------------------------------------------------------------------------- on the device

    def _read_prompts(self) -> Tensor:
        """[B, H] hidden states that predict the first tokens."""
        device = self.decoder.policy.device
        prompt_ids = self.batch.prompt_ids
        prompts, mask = (x.to(device) for x in padded_left(prompt_ids, 0))
        self.memory.begin(prompts, mask, self.batch.uniforms)
        is_ragged = len({*map(len, prompt_ids)}) > 1
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        first_rows, which = (x.to(device) for x in distinct(prompt_ids))
        states = last_states(
            self.decoder.trunk,
            prompts[first_rows],
            attention_mask=mask[first_rows] if is_ragged else None,
            position_ids=positions[first_rows],
            cache=self.memory.cache,
        )
        if len(first_rows) < len(which):  # a prompt that several rows have is read once
            self.memory.cache.select(which, self.width)
        return states[which]

    def _states(self, tokens: int) -> Tensor:
        """[slots, H] hidden states that predict the next tokens, of which the cache has `tokens`
        in view."""
        memory = self.memory
        slots = self.slots
        memory.cache.show(slots, tokens)
        return last_states(
            self.decoder.trunk,
            memory.next[:slots],
            attention_mask=memory.mask[:slots, :tokens],
            position_ids=memory.positions[:slots],
            cache=memory.cache,
        )

    def _draw(self, hidden: Tensor) -> None:
        """Draws and records the next token of the first slots, from their hidden states."""
        memory = self.memory
        slots = hidden.shape[0]
        row = memory.row[:slots]
        live = memory.live[:slots]
        uniforms = None if self.sampling.greedy else memory.uniforms[row, memory.drawn]
        logits = self.head.logits(hidden)
        draws = draw_next(logits, self.sampling, uniforms, scratch=memory.scratch[:slots])
        value_function = self.decoder.value_function
        values = None if value_function is None else value_function.read(hidden)
        column = torch.where(live, memory.drawn, memory.tokens)
        memory.record.write(row, column, draws=draws, values=values)
        memory.lengths.index_add_(0, row, live.long())
        for token in self.sampling.stop_token_ids:
            live &= draws.tokens != token
        memory.next[:slots, 0] = draws.tokens
        memory.drawn += 1

    def _step(self, tokens: int) -> None:
        hidden = self._states(tokens)
        self.memory.cache.position += 1
        self.memory.positions += 1
        self._draw(hidden)

    def _advance(self, drawn: int) -> None:
        """A step, `drawn` tokens into the response: from its graph, or run if there is none."""
        memory = self.memory
        sampling = self.sampling
        tokens = bucket(self.width + drawn, TOKENS)
        if not self.decoder.records:
            self._step(tokens)
            return
        kind = (
            self.slots,
            tokens,
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
            sampling.greedy,
            sampling.stop_token_ids,
        )
        if kind not in memory.graphs:
            self._step(tokens)  # the warm-up that recording needs
            memory.graphs[kind] = None
            return
        graph = memory.graphs[kind]
        if graph is None:
            graph = self.decoder.record(partial(self._step, tokens), memory.pool)
            memory.graphs[kind] = graph
        graph.replay()

    # --------------------------------------------------------------------------------- on the host

    def _look(self, drawn: int) -> bool:
        """Whether any row has not ended. Where half of the slots or more have, they are dropped."""
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
            for slot_values in (
                memory.next,
                memory.positions,
                memory.mask,
                memory.live,
                memory.row,
            ):
                slot_values[:fewer] = slot_values[chosen]
            self.slots = fewer
        return bool(left)

    def _find_strings(self) -> None:
        """Ends the rows in which a stop string was completed since the last look."""
        memory = self.memory
        lengths = memory.lengths[: self.count].tolist()
        longest = max(lengths)
        responses = memory.record.tokens[: self.count, :longest].tolist()
        for length in range(self.searched + 1, longest + 1):
            rows = [
                row
                for row in range(self.count)
                if lengths[row] >= length and row not in self.string_ends
            ]
            if rows:
                ended = self.batch.strings.ended([responses[row][:length] for row in rows])
                ends = {row: length for row, is_ended in zip(rows, ended, strict=True) if is_ended}
                self.string_ends |= ends
        self.searched = longest
        goes_on = torch.tensor([row not in self.string_ends for row in range(memory.rows)])
        memory.live &= goes_on.to(memory.live.device)[memory.row]

    def _final_values(self) -> Tensor:
        """[B] fp32: the value after the last token of the rows that are left, 0 elsewhere."""
        memory = self.memory
        final = torch.zeros(self.count)
        slots = [slot for slot, is_live in enumerate(memory.live[: self.slots].tolist()) if is_live]
        if slots:
            assert self.decoder.value_function is not None
            tokens = bucket(self.width + self.sampling.max_new_tokens, TOKENS)
            values = self.decoder.value_function.read(self._states(tokens)).float().cpu()
            final[memory.row.cpu()[slots]] = values[slots]
        return final

    def _rollout(self) -> Rollout:
        memory = self.memory
        final_values = self._final_values() if self.decoder.final_values else None
        lengths = memory.lengths[: self.count].tolist()
        last = memory.lengths[: self.count].unsqueeze(1) - 1
        last_tokens = memory.record.tokens[: self.count].gather(1, last).squeeze(1).tolist()
        finished = [token in self.sampling.stop_token_ids for token in last_tokens]
        for row, length in self.string_ends.items():
            lengths[row] = min(length, lengths[row])
            finished[row] = True
        return memory.record.rollout(lengths, finished, final_values)


@contextmanager
def _masked_attention(trunk: Any) -> Iterator[None]:
    """SDPA in place of flash-attn, which takes no mask and reads lengths off the device."""
    config = trunk.config
    chosen = config._attn_implementation
    if chosen.startswith("flash"):
        config._attn_implementation = "sdpa"
    try:
        yield
    finally:
        config._attn_implementation = chosen
