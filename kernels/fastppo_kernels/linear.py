"""PPO's loss and the tokens' statistics from hidden states and the lm-head, in chunks of rows.

The operations are those of `fastppo_kernels.definition` under the same names, for all backends.
For a chunk of rows X [n, H], and the head W [V, H]:

    Z  = X Wᵀ + b             into one reused buffer [n, V]
    G  = dL/dZ                the backend's row functions, in place
    dX = G W                  into the chunk's rows of dX
    dW += Gᵀ X,  db += Σ G    in fp32, cast once after the last chunk

PPO's loss is a weighted sum with known weights, so G is available as soon as a row's softmax is,
and nothing is recomputed: 6·N·H·V FLOP. Recomputing Z in a backward pass takes 8·N·H·V. Bytes
besides the GEMMs' operands, for b bytes per logit: the first GEMM writes N·V·b, the row pass moves
2·N·V·b, the last two GEMMs read 2·N·V·b, and each chunk after the first moves 8·H·V for the fp32
dW. The last term is why chunks are as large as the memory budget allows (`chunk_rows`). A single
chunk has no
accumulator: dW is written in the weight's dtype (the GEMM accumulates in fp32).

Differences between backends and devices:

    rows of weight 0       skipped before the first GEMM if the host may read values: always on a
                           CPU, elsewhere with `compact` (one synchronization). Otherwise they pass
                           through the GEMMs with a gradient of 0.
    rows without gradient  skip the last two GEMMs with the CPU's loops (`chunk_ppo_loss`)
    dW in fp32             cuBLAS multiplies 16-bit matrices into fp32. A CPU has no such product
                           and multiplies fp32 copies, `PRODUCT_COLUMNS` columns at a time.
    buffer rows            for kernels, rows start at multiples of `ROW_ALIGNMENT` bytes

Sums are added in a fixed order. GEMM and softmax are separate kernels (kernels/NOTES.md says why),
and a GPU does not skip rows without a gradient.
"""

from __future__ import annotations

import functools
import math
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from fastppo_kernels.records import (
    SUMS,
    Gemm,
    GradientsWanted,
    LinearPPORows,
    Objective,
    PerToken,
    Projection,
    ProjectionGradients,
    Selection,
    Softmax,
    StatsGradients,
    StatsRows,
    accumulation_dtype,
    combine_sums,
)

ROW_ALIGNMENT = 128
"""Alignment in bytes of the rows of the logits' buffer: a cache line, and a multiple of the 16
bytes that tensor-core GEMMs need, so an odd vocabulary (50257) is as fast as an even one."""

DEFAULT = Gemm()
EVERYTHING = GradientsWanted()

PRODUCT_COLUMNS = 4096
"""Columns of dW that a CPU computes at once, to limit the fp32 copies of 16-bit gradients."""


class LinearBudget(NamedTuple):
    """Limits on the rows of logits in memory, for `chunk_rows`."""

    one_chunk: int  # up to this many logits are always one chunk
    share: int  # beyond it, at most 1/share of the rows,
    least: int  # but at least this many,
    least_narrow: int  # or this many for hidden states narrower than NARROW,
    enough: int  # and at most this many, unless `one_chunk` allows more


LINEAR_BUDGETS = {
    "cpu": LinearBudget(one_chunk=2**23, share=4, least=384, least_narrow=384, enough=512),
    "cuda": LinearBudget(one_chunk=2**28, share=8, least=2048, least_narrow=4096, enough=4096),
}
"""On a CPU each GEMM packs the weight again: 256 rows at a time cost 5 % more than 1024, 64 rows 28
% (sgemm, V = 32000, one thread). On a GPU each chunk reads and writes the fp32 dW, as many bytes as
4·H rows of bf16 logits: 4096 rows make that small next to the GEMMs. An eighth of the rows is 12.5
% of the logits' memory. 2^28 logits are 512 MiB of bf16, 2^23 are 32 MiB of fp32: one chunk instead
of two takes a fifth less time for 64 rows, an eighth less for 256."""

NARROW = 2048
"""The traffic of dW takes about 700/rows of the time of a chunk's last GEMM (kernels/NOTES.md) for
any H. The other costs of a chunk, its launches and the tails of its GEMMs, weigh more if H is
small."""


def accumulator_rows(weight: Tensor, dtype: torch.dtype, *, buffers: int = 1) -> int:
    """Return how many rows of logits fit in the memory of the fp32 accumulator of dW.

    Several chunks need the accumulator and one chunk does not. For a bf16 head that is 2·H rows; an
    fp32 head has no separate accumulator.

    buffers: logits of `dtype` per row, with a reference 2.
    """
    width = accumulation_dtype(weight.dtype).itemsize
    spared = weight.shape[1] * width if weight.dtype.itemsize < width else 0
    return spared // (buffers * dtype.itemsize)


def chunk_rows(
    rows: int, vocab: int, device: torch.device, *, width: int, spared_rows: int = 0
) -> int:
    """Return the rows of logits in memory at once, for chunks of equal size (except the last).

    Args:
        width: H of the hidden states.
        spared_rows: `accumulator_rows` if dW is needed. On a GPU up to this many rows are one
            chunk, which takes no more memory than several would, and moves less.
    """
    budget = LINEAR_BUDGETS.get(device.type, LINEAR_BUDGETS["cuda"])
    spared_rows = 0 if device.type == "cpu" else spared_rows
    if rows * vocab <= budget.one_chunk or rows <= spared_rows:
        return max(1, rows)
    least = budget.least_narrow if width < NARROW else budget.least
    most = max(budget.enough, budget.one_chunk // vocab)
    limit = min(max(math.ceil(rows / budget.share), least), most)
    chunks = max(2, math.ceil(rows / limit))
    if device.type != "cpu":  # each chunk has at least `least` rows
        chunks = max(1, min(chunks, rows // least))
    return math.ceil(rows / chunks)


# ------------------------------------------------------------------------------------------
# products


def _mm(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a @ b, accumulated in fp32 and rounded once to the dtype of `out`."""
    if a.dtype == out.dtype:
        torch.mm(a, b, out=out)
    elif a.is_cuda and out.dtype == torch.float32:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:  # cuBLAS only widens, and torch on a CPU does not even widen: rounded twice
        out.copy_(a @ b)


def _accumulate(out: Tensor, a: Tensor, b: Tensor, *, is_first: bool) -> None:
    """out = a @ b if `is_first`, else out += a @ b, with no rounding before the sum in `out`."""
    if a.dtype != out.dtype and not a.is_cuda:
        b = b.to(out.dtype)
        for part, into in zip(a.split(PRODUCT_COLUMNS), out.split(PRODUCT_COLUMNS), strict=True):
            _accumulate(into, part.to(out.dtype), b, is_first=is_first)
    elif is_first:
        _mm(a, b, out)
    elif a.dtype == out.dtype:
        out.addmm_(a, b)
    else:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)


class _Head:
    """A projection's operands in the GEMMs' dtype, and the buffer of its logits."""

    def __init__(
        self,
        projection: Projection,
        dtype: torch.dtype,
        *,
        buffer_rows: int,
        row_functions: ModuleType,
    ) -> None:
        self.hidden = projection.hidden
        self.dtype = dtype
        self.weight = projection.weight.to(dtype)
        self.bias = None if projection.bias is None else projection.bias.to(dtype)
        vocab = self.weight.shape[0]
        multiple = 1 if row_functions.READS_VALUES else ROW_ALIGNMENT // dtype.itemsize
        shape = (buffer_rows, math.ceil(vocab / multiple) * multiple)
        empty_like = getattr(row_functions, "fresh", torch.empty_like)
        buffer = empty_like(self.weight[:1, :1].expand(shape))
        # oneDNN's bf16 products on AMX read the padding times 0, and NaN would stay NaN.
        buffer[:, vocab:] = 0
        self.buffer = buffer[:, :vocab]

    def hidden_at(self, rows: Selection) -> Tensor:
        """Return the hidden states [n, H]."""
        return self.hidden[rows].to(self.dtype)

    def logits(self, x: Tensor) -> Tensor:
        """Compute the logits [n, V] of hidden states [n, H] in the buffer's first rows."""
        out = self.buffer[: x.shape[0]]
        if self.bias is None:
            return torch.mm(x, self.weight.T, out=out)
        return torch.addmm(self.bias, x, self.weight.T, out=out)


class _Loop:
    """The chunks of a batch's rows, and the heads that compute their logits.

    `chunks` are slices, or indices if `weighted_rows` [n] selects rows.
    """

    def __init__(
        self,
        projection: Projection,
        ref_projection: Projection | None,
        gemm: Gemm,
        *,
        weighted_rows: Tensor | None = None,
        trains_weight: bool,
        row_functions: ModuleType,
    ) -> None:
        hidden = projection.hidden
        weight = projection.weight
        dtype = gemm.dtype_for(projection)
        count = hidden.shape[0] if weighted_rows is None else weighted_rows.numel()
        buffers = 1 if ref_projection is None else 2
        spared_rows = accumulator_rows(weight, dtype, buffers=buffers) if trains_weight else 0
        step = gemm.chunk_size or chunk_rows(
            count,
            weight.shape[0],
            hidden.device,
            width=weight.shape[1],
            spared_rows=spared_rows,
        )
        slices = [slice(start, min(start + step, count)) for start in range(0, count, step)]
        self.chunks: list[Selection] = [
            part if weighted_rows is None else weighted_rows[part] for part in slices
        ]
        new_head = functools.partial(
            _Head, dtype=dtype, buffer_rows=min(step, count), row_functions=row_functions
        )
        self.head = new_head(projection)
        self.ref_head = None if ref_projection is None else new_head(ref_projection)

    def ref_logits(self, rows: Selection) -> Tensor | None:
        if self.ref_head is None:
            return None
        return self.ref_head.logits(self.ref_head.hidden_at(rows))


class _Gradients:
    """Accumulators of dX, dW and dbias; None for those not needed.

    dW and dbias are accumulated in fp32 (fp64 for fp64). dW of a single chunk is complete after one
    GEMM in the weight's dtype. Frozen parts cost nothing.

    Args:
        writes_all_rows: whether every row of dX gets a product, so that it need not start at 0.
    """

    def __init__(
        self,
        projection: Projection,
        wanted: GradientsWanted,
        *,
        is_one_chunk: bool,
        writes_all_rows: bool = False,
    ) -> None:
        self.projection = projection
        self.wanted = wanted
        self.is_one_chunk = is_one_chunk
        contiguous = torch.contiguous_format
        self.hidden: Tensor | None = None
        if wanted.hidden:
            make = torch.empty_like if writes_all_rows else torch.zeros_like
            self.hidden = make(projection.hidden, memory_format=contiguous)
        self.weight: Tensor | None = None  # allocated by its first product
        self.bias: Tensor | None = None
        if wanted.bias and projection.bias is not None:
            dtype = accumulation_dtype(projection.bias.dtype)
            self.bias = torch.zeros_like(projection.bias, dtype=dtype)

    def add(self, rows: Selection, grad: Tensor, *, x: Tensor, head: Tensor) -> None:
        """Add the contribution of `grad` [n, V], the gradient of the logits of a chunk.

        x: the chunk's hidden states [n, H], and head: the weight, both in the GEMMs' dtype.
        """
        if self.bias is not None:
            self.bias += grad.sum(0, dtype=self.bias.dtype)
        if self.hidden is not None:
            if isinstance(rows, slice):
                _mm(grad, head, out=self.hidden[rows])
            else:
                self.hidden[rows] = (grad @ head).to(self.hidden.dtype)
        if self.wanted.weight:
            self._add_weight(grad, x)

    def _add_weight(self, grad: Tensor, x: Tensor) -> None:
        weight = self.projection.weight
        is_first = self.weight is None
        if self.weight is None:
            dtype = weight.dtype if self.is_one_chunk else accumulation_dtype(weight.dtype)
            contiguous = torch.contiguous_format
            self.weight = torch.empty_like(weight, dtype=dtype, memory_format=contiguous)
        if self.is_one_chunk:
            _mm(grad.T, x, out=self.weight)
        else:
            _accumulate(self.weight, grad.T, x, is_first=is_first)

    def finished(self) -> ProjectionGradients:
        weight = self.projection.weight
        bias = self.projection.bias
        grad = self.weight
        if grad is None and self.wanted.weight:  # no row had a gradient
            grad = torch.zeros_like(weight, memory_format=torch.contiguous_format)
        return ProjectionGradients(
            hidden=self.hidden,
            weight=None if grad is None else grad.to(weight.dtype),
            bias=None if self.bias is None or bias is None else self.bias.to(bias.dtype),
        )


# -------------------------------------------------------------------------------------- operations


def ppo_loss(
    projection: Projection,
    per_token: PerToken,
    objective: Objective,
    softmax: Softmax,
    *,
    row_functions: ModuleType,
    ref_projection: Projection | None = None,
    gemm: Gemm = DEFAULT,
    wanted: GradientsWanted = EVERYTHING,
    compact: bool = False,
) -> LinearPPORows:
    """Compute `definition.linear_ppo_loss` with only a chunk of the logits in memory.

    Args:
        row_functions: the backend: `triton_backend`, `cpu_backend` or `torch_backend`.
        ref_projection: the reference's, read only for `kl_estimator="full"`.
        wanted: the gradients to compute. With none, only the first GEMM runs.
        compact: skip rows of weight 0 before the first GEMM, whatever the backend.

    Returns:
        LinearPPORows; statistics in fp32 (fp64), gradients in the dtypes of their parameters.
    """
    n = projection.hidden.shape[0]
    compact = compact or row_functions.READS_VALUES
    weighted_rows = None
    if compact:
        weighted_rows = (per_token.weights != 0).nonzero().squeeze(-1)
        if weighted_rows.numel() == n:
            weighted_rows = None
    loop = _Loop(
        projection,
        ref_projection if objective.kl_estimator == "full" else None,
        gemm,
        weighted_rows=weighted_rows,
        trains_weight=wanted.weight,
        row_functions=row_functions,
    )
    is_one_chunk = len(loop.chunks) <= 1
    grads = _Gradients(
        projection, wanted, is_one_chunk=is_one_chunk, writes_all_rows=not compact and n > 0
    )
    wide = accumulation_dtype(loop.head.dtype)
    # The only chunk's statistics are those of all rows. Otherwise each chunk copies its own.
    is_whole = is_one_chunk and weighted_rows is None and n > 0
    statistics: list[Tensor] = []
    if not is_whole:
        statistics = [projection.hidden.new_zeros(n, dtype=wide) for _ in range(3)]
    sums = None
    for index in loop.chunks:
        x = loop.head.hidden_at(index)
        operands = {
            "logits": loop.head.logits(x),
            "per_token": per_token.at(index),
            "objective": objective,
            "softmax": softmax.at(index),
            "ref_logits": loop.ref_logits(index),
            "need_grad": any(wanted),
        }
        live = None
        if hasattr(row_functions, "chunk_ppo_loss"):
            chunk, live = row_functions.chunk_ppo_loss(**operands)
        else:
            chunk = row_functions.ppo_loss(**operands, inplace=True)
        of_chunk = [chunk.logprobs, chunk.entropy, chunk.kl]
        if is_whole:
            statistics = of_chunk
        else:
            for of_all, part in zip(statistics, of_chunk, strict=True):
                of_all[index] = part
        sums = chunk.sums if sums is None else combine_sums(sums, chunk.sums)
        if chunk.grad is not None:
            if live is not None:
                x = x[live]
                index = index.start + live if isinstance(index, slice) else index[live]
            elif wanted.weight and not compact:
                # Masked rows may hold anything, and 0·NaN would reach all of dW.
                x = torch.where((per_token.weights[index] != 0).unsqueeze(-1), x, 0.0)
            grads.add(index, chunk.grad, x=x, head=loop.head.weight)
        del chunk, operands  # which hold the logits' buffer
    if sums is None:  # no rows of weight other than 0
        sums = statistics[0].new_zeros(len(SUMS))
    del loop  # free the logits' buffers before dW is cast
    logprobs, entropy, kl = statistics
    return LinearPPORows(sums, logprobs, entropy, kl, grads.finished())


def token_stats(
    projection: Projection,
    tokens: Tensor,
    softmax: Softmax,
    *,
    row_functions: ModuleType,
    ref_projection: Projection | None = None,
    gemm: Gemm = DEFAULT,
) -> StatsRows:
    """Compute `definition.linear_token_stats`: 2·N·H·V FLOP, one write and one read of the logits.

    A reference costs the same again.
    """
    loop = _Loop(
        projection,
        ref_projection,
        gemm,
        trains_weight=False,
        row_functions=row_functions,
    )
    chunks = [
        row_functions.token_stats(
            loop.head.logits(loop.head.hidden_at(index)),
            tokens[index],
            softmax.at(index),
            ref_logits=loop.ref_logits(index),
        )
        for index in loop.chunks or [slice(0, 0)]
    ]
    if len(chunks) == 1:
        return chunks[0]
    return StatsRows(*(torch.cat(columns) for columns in zip(*chunks, strict=True)))


def token_stats_backward(
    grads: StatsGradients,
    projection: Projection,
    tokens: Tensor,
    stats: StatsRows,
    softmax: Softmax,
    *,
    row_functions: ModuleType,
    ref_projection: Projection | None = None,
    gemm: Gemm = DEFAULT,
    wanted: GradientsWanted = EVERYTHING,
) -> ProjectionGradients:
    """Return the projection's gradients from those of its statistics.

    The upstream gradients are arbitrary, so the logits are recomputed, and a chunk's gradient is
    held next to them.
    """
    loop = _Loop(
        projection,
        None if grads.kl is None else ref_projection,
        gemm,
        trains_weight=wanted.weight,
        row_functions=row_functions,
    )
    projection_grads = _Gradients(projection, wanted, is_one_chunk=len(loop.chunks) <= 1)
    for index in loop.chunks:
        x = loop.head.hidden_at(index)
        logits_grad = row_functions.token_stats_backward(
            grads.at(index),
            loop.head.logits(x),
            tokens[index],
            stats.at(index),
            softmax.at(index),
            ref_logits=loop.ref_logits(index),
        )
        projection_grads.add(index, logits_grad, x=x, head=loop.head.weight)
        del logits_grad
    del loop  # free the logits' buffers before dW is cast
    return projection_grads.finished()
