"""The loss, its statistics and its gradient from rows of logits: the torch backend.

The operations are those of `fastppo_kernels.definition`, fast enough to train with on a CPU.
Nothing here builds an autograd graph: PPO's loss is a weighted sum whose weights are known
beforehand, so the gradient of a row of logits is known as soon as its softmax is, and is written
out by hand below.

For one row of logits `x` (V entries), sampled token `y` and temperature `T`:

    z_j     = logit_scale · x_j,  or  cap · tanh(logit_scale · x_j / cap)  with a soft-cap
    t_j     = (z_j − max z) / T          shifted: no offset of the row costs digits
    log_sum = log Σ_j e^{t_j}
    log p_j = t_j − log_sum                        logprob = log p_y
    entropy = log_sum − Σ_j p_j t_j
    full KL = Σ_j p_j (log p_j − log q_j)          q: the reference's softmax, same temperature

With upstream gradients g_l (logprob), g_h (entropy) and g_k (full KL), the row's gradient is

    dz_j = (1/T) · { g_l·[j=y]
                     + p_j·( −g_l − g_h·(log p_j + entropy) + g_k·(log p_j − log q_j − KL) ) }
    dx_j = logit_scale · (1 − (z_j/cap)²) · dz_j

Arithmetic is fp32 for bf16, fp16 and fp32 logits and fp64 for fp64 logits. Rows are taken in chunks
that stay in cache, so the extra memory is a few chunks' (`_Scratch`) however many rows there are.

Shapes: `logits [N, V]`, or `[B, T, V]` with any strides and a dense last axis (`logits[:, :-1]` is
not copied), N = B·T; everything per token is `[N]`. Rows whose weight is 0 are never read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastppo_kernels.records import (
    LOG_RATIO_LIMIT,
    LOWEST,
    Objective,
    PerToken,
    PPORows,
    Selection,
    Softmax,
    StatsGradients,
    Sums,
    TokenStats,
    accumulation_dtype,
)

ROW_CHUNK_ELEMENTS = {"cpu": 2**19, "cuda": 2**26}
"""Logits handled at once: 2 MiB of fp32 for each thread of a CPU, which its caches hold, and which
is enough work between two meetings of the threads; 256 MiB on a GPU."""

SUMS_CHUNK_SHARE = 4
"""Where rows have sums and no gradient, a CPU takes a quarter of that at once: two buffers of
512 KiB and as much of the logits stay in a second-level cache, and little else is done between."""

ROW_CHUNK_THREADS = 8
"""More threads share the chunk of this many: three buffers of 16 MiB are the most a call takes."""

GEMM_ROWS = 8
"""`chunk_ppo_loss` hands a multiple of as many rows to the gradient GEMMs. On a CPU an odd number
makes the one for dW slower by a seventh (255 rows against 252 or 256; sgemm, V = 32000, H = 1024).
"""

READS_VALUES = True
"""The host looks at values between two operations, which on a CPU costs nothing: rows of weight 0
and rows without a gradient stay out of the lm-head's GEMMs."""


class _Scratch(NamedTuple):
    """Buffers [n, V] that a chunk's passes write into; where None, each pass allocates its own."""

    shifted: Tensor | None = None
    exp: Tensor | None = None
    product: Tensor | None = None


_ALLOCATE = _Scratch()


def _chunks(
    rows: int,
    elements_per_row: int,
    device: torch.device,
    dtype: torch.dtype,
    exp: Tensor | None = None,
    names: Sequence[str] = _Scratch._fields,
    share: int = 1,
) -> Iterator[tuple[slice, _Scratch]]:
    """Chunks of rows, and what to compute them in: the same memory for each.

    Args:
        names: the buffers.
        share: the fewer elements at once, on a CPU.
        exp: [rows, elements_per_row]: its rows become the buffer of that name, where the gradient
            is formed. A gradient of the right dtype is so computed in its place, not copied there.

    Buffers that are freed and allocated anew with every chunk can go back to the system in between,
    and on a CPU their page faults then cost as much as the arithmetic.
    """
    budget = ROW_CHUNK_ELEMENTS.get(device.type, ROW_CHUNK_ELEMENTS["cuda"])
    if device.type == "cpu":
        budget = budget * min(torch.get_num_threads(), ROW_CHUNK_THREADS) // share
    step = min(rows, max(1, budget // max(1, elements_per_row)))
    buffers = {
        name: torch.empty(step, elements_per_row, device=device, dtype=dtype)
        for name in names
        if exp is None or name != "exp"
    }
    for start in range(0, rows, max(1, step)):
        stop = min(start + step, rows)
        views = {name: buffer[: stop - start] for name, buffer in buffers.items()}
        if exp is not None:
            views["exp"] = exp[start:stop]
        yield slice(start, stop), _Scratch(**views)


def _as_rows(x: Tensor, rows: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """[N, V] of x's memory if that is contiguous, of this dtype, and `rows` (None) are all."""
    if rows is None and x.dtype == dtype and x.is_contiguous():
        return x.view(-1, x.shape[-1])
    return None


def _take(x: Tensor, rows: Selection) -> Tensor:
    """Rows of [N, V], or of [B, T, V] counted through B·T without flattening it (a copy)."""
    return x[rows] if x.dim() == 2 else x[_unravel(x, rows)]


def _put(x: Tensor, rows: Selection, values: Tensor | float) -> None:
    x[rows if x.dim() == 2 else _unravel(x, rows)] = values


def _unravel(x: Tensor, rows: Selection) -> tuple[Tensor, Tensor]:
    index = (
        torch.arange(rows.start, rows.stop, device=x.device) if isinstance(rows, slice) else rows
    )
    return index // x.shape[1], index % x.shape[1]


# ------------------------------------------------------------------------------------- row maths


class _Shifted(NamedTuple):
    """What a chunk of rows is turned into; `shifted` and `exp` are [n, V], the rest [n]."""

    shifted: Tensor  # t
    exp: Tensor | None  # e^t, when it was formed
    row_max: Tensor  # max x, or max z with a soft-cap
    log_sum: Tensor
    slope: Tensor | None  # dz/dx / logit_scale, only with a soft-cap
    p_others: Tensor | None = None  # 1 − p of the token, from the others' sum


def _temperature(softmax: Softmax) -> float | Tensor:
    """A number, or a column [n, 1]."""
    if softmax.temperatures is None:
        return softmax.temperature
    return softmax.temperatures.unsqueeze(-1)


def _shift(
    x: Tensor,
    softmax: Softmax,
    row_max: Tensor | None,
    out: Tensor | None,
    *,
    bounded: bool = True,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(t, row maximum, soft-cap slope). Subtracting before scaling keeps t exact at any offset.

    `bounded=False` leaves t below LOWEST as it is, which saves a pass.
    """
    wide = accumulation_dtype(x.dtype)
    temperature = _temperature(softmax)
    if softmax.softcap is None:
        x = x if x.dtype == wide else _widened(x, wide, out)
        row_max = x.amax(-1) if row_max is None else row_max
        shifted = torch.sub(x, row_max.unsqueeze(-1), out=out)
        factor = softmax.logit_scale / temperature
        if isinstance(factor, Tensor) or factor != 1.0:
            shifted.mul_(factor)
        return shifted.clamp_(min=LOWEST) if bounded else shifted, row_max, None
    x = _widened(x, wide, out).mul_(softmax.logit_scale / softmax.softcap)
    slope = torch.cosh(x).square_().reciprocal_()  # 1 − tanh² would cancel near the cap
    z = x.tanh_().mul_(softmax.softcap)
    row_max = z.amax(-1) if row_max is None else row_max
    return z.sub_(row_max.unsqueeze(-1)).div_(temperature), row_max, slope


def _widened(x: Tensor, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    """A copy of x in `dtype`."""
    return x.to(dtype, copy=True) if out is None else out.copy_(x)


class _Swept(NamedTuple):
    """What the statistics of rows follow from, [n] each, e = e^t."""

    row_max: Tensor
    token_shifted: Tensor  # t of the token
    token_exp: Tensor  # e of the token
    others: Tensor  # Σ e but the token's
    weighted: Tensor  # Σ e·t

    def finish(self) -> _Finished:
        others, token_exp = self.others, self.token_exp
        total = others + token_exp
        log_sum = total.log()
        rare = self.token_shifted - log_sum
        logprobs = torch.where(token_exp > others, -torch.log1p(others / token_exp), rare)
        return _Finished(logprobs, log_sum, self.weighted / total, others / total)


class _Finished(NamedTuple):
    """Statistics [n]: logprob of the token, log Σ e^t, mean of t under p, 1 − p of the token."""

    logprobs: Tensor
    log_sum: Tensor
    mean_shifted: Tensor
    p_others: Tensor


def _sweep(
    x: Tensor, column: Tensor, softmax: Softmax, scratch: _Scratch, *, bounded: bool = True
) -> tuple[Tensor, Tensor, Tensor | None, _Swept]:
    """(t, e^t, soft-cap slope, sums) of rows whose tokens are in `column` [n, 1].

    The token is left out of the sum and added after it: where it holds most of the mass, logprob
    is then −log(1 + the others' part), and keeps its digits however sure the policy is.
    `scratch.product` may be `scratch.shifted`, where t is not wanted.
    """
    shifted, row_max, slope = _shift(x, softmax, None, scratch.shifted, bounded=bounded)
    exp = torch.exp(shifted, out=scratch.exp)
    token_shifted, token_exp = shifted.gather(1, column), exp.gather(1, column)
    weighted = torch.mul(exp, shifted, out=scratch.product).sum(-1)
    others = exp.scatter_(1, column, 0.0).sum(-1)
    exp.scatter_(1, column, token_exp)
    swept = _Swept(row_max, token_shifted.squeeze(-1), token_exp.squeeze(-1), others, weighted)
    return shifted, exp, slope, swept


def _sums_of_rows(
    logits: Tensor, columns: Tensor, softmax: Softmax, rows: Tensor | None = None
) -> _Swept:
    """The sums of all rows, or of `rows` [n] alone, where nothing else is wanted of them.

    `columns` [N, 1] are the tokens'.

    Between two chunks nothing is done but passes over memory: what is small is done once at the
    end, and two buffers are held in place of three, so that a chunk stays in a smaller cache.
    """
    dtype = accumulation_dtype(logits.dtype)
    count = logits.shape[:-1].numel() if rows is None else rows.numel()
    parts, bounded = [], logits.device.type != "cpu"
    for chunk, scratch in _chunks(
        count,
        logits.shape[-1],
        logits.device,
        dtype,
        names=("shifted", "exp"),
        share=SUMS_CHUNK_SHARE,
    ):
        index = chunk if rows is None else rows[chunk]
        scratch = scratch._replace(product=scratch.shifted)
        x, column, of = _take(logits, index), columns[index], softmax.at(index)
        swept = _sweep(x, column, of, scratch, bounded=bounded)[-1]
        if not bounded and not math.isfinite(swept.weighted.sum()):
            bounded = True  # 0·−inf: there are columns at −inf, in the other rows too
            swept = _sweep(x, column, of, scratch)[-1]
        parts.append(swept)
    if not parts:
        return _Swept(*(logits.new_zeros(0, dtype=dtype) for _ in _Swept._fields))
    swept = _Swept(*map(torch.cat, zip(*parts, strict=True)))
    return swept._replace(token_shifted=swept.token_shifted.clamp(min=LOWEST))


def _exponentials(
    x: Tensor,
    tokens: Tensor,
    softmax: Softmax,
    scratch: _Scratch = _ALLOCATE,
) -> tuple[_Shifted, Tensor, Tensor]:
    """(shifted scores and exponentials, logprob of the token, mean of t under p)."""
    shifted, exp, slope, swept = _sweep(x, tokens.unsqueeze(-1), softmax, scratch)
    logprobs, log_sum, mean_shifted, p_others = swept.finish()
    rows = _Shifted(shifted, exp, swept.row_max, log_sum, slope, p_others)
    return rows, logprobs, mean_shifted


def _row_gradient(
    rows: _Shifted,
    gap: Tensor | None,
    tokens: Tensor,
    logprobs: Tensor,
    mean_shifted: Tensor,
    mean_gap: Tensor | None,
    g: StatsGradients,
    softmax: Softmax,
    scratch: _Scratch,
) -> Tensor:
    """dL/dx [n, V] in the accumulation dtype; the formula in the module's docstring.

    In it log p_j + entropy is t_j − Σ p t, and log p_j − log q_j − KL is t_j − r_j − Σ p (t − r):
    log sums cancel and are not formed. At the token, 1 − p_y is the others' share. What is constant
    along a row, 1/Σ e^t and dx/dt included, is multiplied before it meets the row: one pass over
    the chunk for each term.
    """
    scale = softmax.logit_scale / _temperature(softmax)
    exp = torch.exp(rows.shifted, out=scratch.exp) if rows.exp is None else rows.exp
    normalize = torch.exp(-rows.log_sum)
    column = tokens.unsqueeze(-1)
    constant, linear, at_token = -g.logprobs, None, None
    if g.entropy is not None:
        constant = constant + g.entropy * mean_shifted
        linear = -g.entropy
        token_shifted = rows.shifted.gather(1, column).squeeze(-1)
        at_token = g.entropy * (mean_shifted - token_shifted)
    if g.kl is not None:
        assert gap is not None
        assert mean_gap is not None
        # An infinite KL that is only reported does not touch the gradient.
        mean_gap = torch.where(g.kl != 0, mean_gap, 0.0)
        constant = constant - g.kl * mean_gap
        token_gap = gap.gather(1, column).squeeze(-1)
        of_kl = g.kl * (token_gap - mean_gap)
        at_token = of_kl if at_token is None else at_token + of_kl
    per_row = normalize.unsqueeze(-1) * scale
    if g.entropy is None and g.kl is None:
        grad = exp.mul_(constant.unsqueeze(-1) * per_row)
    else:
        linear = torch.zeros_like(constant) if linear is None else linear
        factor = torch.mul(rows.shifted, linear.unsqueeze(-1) * per_row, out=scratch.product)
        factor.add_(constant.unsqueeze(-1) * per_row)
        if g.kl is not None:
            assert gap is not None
            factor.addcmul_(gap, g.kl.unsqueeze(-1) * per_row)
        grad = exp.mul_(factor)
    assert rows.p_others is not None
    token_grad = g.logprobs * rows.p_others
    if at_token is not None:
        token_grad = torch.exp(logprobs) * at_token + token_grad
    token_grad = token_grad.unsqueeze(-1) * scale
    grad.scatter_(1, column, token_grad)
    if rows.slope is not None:
        grad.mul_(rows.slope)
    return grad


def _gap(x: Tensor, ref_x: Tensor, rows: _Shifted, ref: _Shifted, softmax: Softmax) -> Tensor:
    """t − r [n, V]. Near the reference the difference of the logits is exact where that of the two
    shifted and scaled rows is not; columns at −inf keep their stand-ins."""
    wide = accumulation_dtype(x.dtype)
    temperature = _temperature(softmax)
    factor = softmax.logit_scale / temperature
    if softmax.softcap is not None:
        inner = softmax.logit_scale / softmax.softcap
        x, ref_x = (torch.mul(z.to(wide), inner).tanh_().mul_(softmax.softcap) for z in (x, ref_x))
        factor = 1 / temperature
    gap = torch.sub(x.to(wide), ref_x)
    gap.sub_((rows.row_max - ref.row_max).unsqueeze(-1)).mul_(factor)
    ruled_out = (rows.shifted <= LOWEST).logical_or_(ref.shifted <= LOWEST)
    if ruled_out.any():
        gap = torch.where(ruled_out, rows.shifted - ref.shifted, gap)
    return gap


def _full_kl(rows: _Shifted, ref: _Shifted, gap: Tensor) -> tuple[Tensor, Tensor]:
    """(Σ p (log p − log q), Σ p (t − r)) per row, exact; both +inf where q is 0 and p is not."""
    assert rows.exp is not None
    mean_gap = torch.linalg.vecdot(rows.exp, gap) / torch.exp(rows.log_sum)
    ruled_out = (ref.shifted <= LOWEST).logical_and_(rows.exp > 0).any(-1)
    mean_gap = mean_gap.masked_fill(ruled_out, math.inf)
    return mean_gap - rows.log_sum + ref.log_sum, mean_gap


# ------------------------------------------------------------------------------------- statistics


def token_stats(
    logits: Tensor, tokens: Tensor, softmax: Softmax, *, ref_logits: Tensor | None = None
) -> TokenStats:
    """Logprob of the token, entropy and (given `ref_logits` [N, V]) the full KL of each row."""
    n, vocab = logits.shape[:-1].numel(), logits.shape[-1]
    dtype = accumulation_dtype(logits.dtype)
    kl, mean_gap = (logits.new_zeros(n, dtype=dtype) for _ in range(2))
    ref_normalizer = logits.new_zeros((n, 2), dtype=dtype)
    if ref_logits is None:
        swept = _sums_of_rows(logits, tokens.unsqueeze(-1), softmax)
        logprobs, log_sum, mean_shifted, p_others = swept.finish()
        normalizer = _normalizer(swept.row_max, log_sum)
        entropy = log_sum - mean_shifted
        return TokenStats(logprobs, entropy, kl, p_others, mean_gap, normalizer, ref_normalizer)
    logprobs, entropy, p_others = (logits.new_zeros(n, dtype=dtype) for _ in range(3))
    normalizer = logits.new_zeros((n, 2), dtype=dtype)
    for chunk, scratch in _chunks(n, vocab, logits.device, dtype):
        x, of = _take(logits, chunk), softmax.at(chunk)
        rows, logprobs[chunk], mean_shifted = _exponentials(x, tokens[chunk], of, scratch)
        assert rows.p_others is not None
        entropy[chunk], p_others[chunk] = rows.log_sum - mean_shifted, rows.p_others
        normalizer[chunk] = _normalizer(rows.row_max, rows.log_sum)
        # In the same order of sums as the policy, so that the KL to itself is exactly 0.
        ref_x = _take(ref_logits, chunk)
        ref, *_ = _exponentials(ref_x, tokens[chunk], of)
        kl[chunk], mean_gap[chunk] = _full_kl(rows, ref, _gap(x, ref_x, rows, ref, of))
        ref_normalizer[chunk] = _normalizer(ref.row_max, ref.log_sum)
    return TokenStats(logprobs, entropy, kl, p_others, mean_gap, normalizer, ref_normalizer)


def _normalizer(row_max: Tensor, log_sum: Tensor) -> Tensor:
    """[n, 2]; a row of −inf alone has no mass."""
    return torch.stack([row_max, log_sum.masked_fill(row_max == -math.inf, -math.inf)], -1)


def token_stats_backward(
    grads: StatsGradients,
    logits: Tensor,
    tokens: Tensor,
    stats: TokenStats,
    softmax: Softmax,
    *,
    ref_logits: Tensor | None = None,
) -> Tensor:
    """dL/dlogits in the logits' shape and dtype, from one more read of the rows with a gradient."""
    grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
    moving = _moves(grads)
    # Zeros are what autograd makes of a result that nobody used: two passes less.
    if grads.entropy is not None and not bool(grads.entropy.any()):
        grads = grads._replace(entropy=None)
    if grads.kl is not None and not bool(grads.kl.any()):
        grads = grads._replace(kl=None)
    by_shifted = grads.entropy is not None or grads.kl is not None
    counted_rows = None if bool(moving.all()) else moving.nonzero().squeeze(-1)
    if counted_rows is not None:
        _put(grad, (~moving).nonzero().squeeze(-1), 0.0)
    wide = accumulation_dtype(logits.dtype)
    count = moving.numel() if counted_rows is None else counted_rows.numel()
    written = _as_rows(grad, counted_rows, wide)
    for chunk, scratch in _chunks(count, logits.shape[-1], logits.device, wide, written):
        index = chunk if counted_rows is None else counted_rows[chunk]
        x, of, of_rows = _take(logits, index), softmax.at(index), stats.at(index)
        row_max, log_sum = of_rows.normalizer.unbind(-1)
        shifted, row_max, slope = _shift(x, of, row_max, scratch.shifted, bounded=by_shifted)
        rows = _Shifted(shifted, None, row_max, log_sum, slope, of_rows.p_others)
        gap = None
        if grads.kl is not None:
            assert ref_logits is not None
            ref_x = _take(ref_logits, index)
            ref_max, ref_log_sum = of_rows.ref_normalizer.unbind(-1)
            ref_shifted, ref_max, _ = _shift(ref_x, of, ref_max, None)
            ref = _Shifted(ref_shifted, None, ref_max, ref_log_sum, None)
            gap = _gap(x, ref_x, rows, ref, of)
        mean_shifted = log_sum - of_rows.entropy
        row_grad = _row_gradient(
            rows,
            gap,
            tokens[index],
            of_rows.logprobs,
            mean_shifted,
            of_rows.mean_gap,
            grads.at(index),
            of,
            scratch,
        )
        if written is None:
            _put(grad, index, row_grad.to(grad.dtype))
    return grad


def _moves(grads: StatsGradients) -> Tensor:
    """[n] bool, True for rows with a gradient. NaN is one: it must be seen."""
    moves = grads.logprobs != 0
    for g in (grads.entropy, grads.kl):
        moves = moves if g is None else moves | (g != 0)
    return moves


# ----------------------------------------------------------------------------------- token losses


def ratio_of(logprobs: Tensor, per_token: PerToken) -> tuple[Tensor, Tensor]:
    """(π/π_old, whether its exponent was clamped, where it has no derivative)."""
    difference = logprobs - per_token.old_logprobs
    ratio = torch.exp(difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    return ratio, difference.abs() > LOG_RATIO_LIMIT


def policy_term(
    logprobs: Tensor, per_token: PerToken, objective: Objective
) -> tuple[Tensor, Tensor, Tensor]:
    """(−min(ratio·A, clip(ratio)·A), its derivative by the logprob, the ratio), elementwise.

    The derivative is −ratio·A where the unclipped branch is the smaller one and 0 where a clip is
    active. Term and derivative are times the importance weights. Source: Schulman et al. 2017,
    eq. 7; the dual clip, Ye et al. 2020, eq. 3.
    """
    advantages = per_token.advantages
    ratio, is_clamped = ratio_of(logprobs, per_token)
    unclipped = ratio * advantages
    clipped = ratio.clamp(objective.lowest_ratio, objective.highest_ratio) * advantages
    surrogate = torch.minimum(unclipped, clipped)
    # Written so that a NaN counts as active: it must reach the gradient, where it is noticed.
    active = ~(unclipped > clipped) & ~is_clamped
    if objective.dual_clip is not None:
        floor = objective.dual_clip * advantages
        dual = (advantages < 0) & (surrogate < floor)
        surrogate = torch.where(dual, floor, surrogate)
        active &= ~dual
    term, derivative = -surrogate, torch.where(active, -unclipped, 0.0)
    if per_token.importance_weights is not None:
        term = term * per_token.importance_weights
        derivative = derivative * per_token.importance_weights
    return term, derivative, ratio


def sampled_kl(difference: Tensor, estimator: str) -> Tensor:
    """The estimate from d = logprob − ref_logprob.

    k1 = d, k2 = ½d², k3 = e^{−d} − 1 + d. Source: Schulman 2020, "Approximating KL divergence".
    """
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference * difference
    if estimator == "k3":
        # expm1 keeps the digits that e^{−d} − 1 loses near d = 0, where training lives.
        return torch.expm1((-difference).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)) + difference
    raise ValueError(f"kl_estimator must be k1, k2, k3 or full, got {estimator!r}")


def sampled_kl_slope(difference: Tensor, estimator: str) -> Tensor:
    """The derivative of `sampled_kl` by the logprob."""
    if estimator == "k1":
        return torch.ones_like(difference)
    if estimator == "k2":
        return difference
    inverse = torch.exp((-difference).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    inside = difference.abs() <= LOG_RATIO_LIMIT
    return 1 - torch.where(inside, inverse, 0.0)


def ratio_weighted_slope(
    logprobs: Tensor, kl: Tensor, slope: Tensor, per_token: PerToken, objective: Objective
) -> Tensor:
    """The derivative of ratio·KL by the logprob, from the estimate and its slope.

    ratio·(KL + slope) where the ratio moves. Of k3 that sum is d: as a sum of e^{−d} − 1 + d and
    1 − e^{−d} it would lose its digits far below the reference.
    """
    assert per_token.ref_logprobs is not None
    ratio, is_clamped = ratio_of(logprobs, per_token)
    both = kl + slope
    if objective.kl_estimator == "k3":
        difference = logprobs - per_token.ref_logprobs
        both = torch.where(difference.abs() > LOG_RATIO_LIMIT, both, difference)
    return ratio * torch.where(is_clamped, slope, both)


class TokenTerms(NamedTuple):
    """Of each token [N], before its weight: policy term·importance weight, ratio, KL."""

    policy: Tensor
    ratio: Tensor
    kl: Tensor


def token_loss(
    logprobs: Tensor,
    full_kl: Tensor | None,
    per_token: PerToken,
    objective: Objective,
    counts: Tensor | None = None,
) -> tuple[TokenTerms, StatsGradients]:
    """(the terms of the loss, its derivatives by the statistics), [N] each.

    Of w·(policy term·importance weight + kl_coef·KL − entropy_coef·entropy), the KL times the ratio
    if that is asked for. Its sum is in `loss_sums`.

    Args:
        counts: [N] bool, False where the weight is 0: such tokens count for nothing, whatever they
            hold, and their terms and derivatives are 0. None: no weight is 0.
    """
    weights = per_token.weights
    policy, g_logprob, ratio = policy_term(logprobs, per_token, objective)
    kl, g_kl = torch.zeros_like(logprobs), None
    if objective.kl_estimator == "full":
        if full_kl is not None:
            kl = full_kl
            g_kl = weights * objective.kl_coef if objective.kl_coef else None
    elif per_token.ref_logprobs is not None:
        difference = logprobs - per_token.ref_logprobs
        kl = sampled_kl(difference, objective.kl_estimator)
        if objective.kl_coef:
            slope = sampled_kl_slope(difference, objective.kl_estimator)
            if objective.kl_ratio_weighted:
                slope = ratio_weighted_slope(logprobs, kl, slope, per_token, objective)
            g_logprob = g_logprob + objective.kl_coef * slope
    terms, g_logprob = TokenTerms(policy, ratio, kl), weights * g_logprob
    if counts is not None:
        terms = TokenTerms(*(torch.where(counts, term, 0.0) for term in terms))
        g_logprob = torch.where(counts, g_logprob, 0.0)
    g_entropy = -objective.entropy_coef * weights if objective.entropy_coef else None
    return terms, StatsGradients(g_logprob, g_entropy, g_kl)


def loss_sums(
    logprobs: Tensor,
    entropy: Tensor,
    terms: TokenTerms,
    per_token: PerToken,
    objective: Objective,
    counts: Tensor | None = None,
) -> Tensor:
    """[len(SUMS)] of all tokens, from their statistics; terms and `counts` as in `token_loss`."""
    weights, advantages = per_token.weights, per_token.advantages
    policy, ratio, kl = terms
    loss = policy - objective.entropy_coef * entropy
    penalty = ratio * kl if objective.kl_ratio_weighted else kl
    loss = loss + (objective.kl_coef * penalty if objective.kl_coef else 0.0)
    approx_kl = sampled_kl(per_token.old_logprobs - logprobs, "k3")
    above, below = ratio > objective.highest_ratio, ratio < objective.lowest_ratio
    positive, negative = advantages > 0, advantages < 0
    tokens = loss.new_full((), len(loss))
    if counts is not None:
        positive, negative = positive & counts, negative & counts
        loss, entropy, approx_kl = (torch.where(counts, x, 0.0) for x in (loss, entropy, approx_kl))
        tokens = counts.sum(dtype=loss.dtype)
    dual_clipped = loss.new_zeros(())
    if objective.dual_clip is not None:
        dual_clipped = (negative & (ratio > objective.dual_clip)).sum(dtype=loss.dtype)
    return torch.stack(
        Sums(
            loss=(weights * loss).sum(),
            policy_loss=(weights * policy).sum(),
            tokens=tokens,
            entropy=entropy.sum(),
            kl=kl.sum(),
            approx_kl=approx_kl.sum(),
            ratio=ratio.sum(),
            ratio_squared=(ratio * ratio).sum(),
            above_positive=(above & positive).sum(dtype=loss.dtype),
            below_positive=(below & positive).sum(dtype=loss.dtype),
            above_negative=(above & negative).sum(dtype=loss.dtype),
            below_negative=(below & negative).sum(dtype=loss.dtype),
            dual_clipped=dual_clipped,
            ratio_max=ratio.amax() if len(ratio) else ratio.sum(),
        )
    )


# ------------------------------------------------------------------------------- loss from logits


class _RowPass(NamedTuple):
    """logprobs, entropy [n]; the loss's terms and its derivatives by them; grad [n, V] in the
    accumulation dtype, in `scratch.exp`, or None."""

    logprobs: Tensor
    entropy: Tensor
    terms: TokenTerms
    by_stats: StatsGradients
    grad: Tensor | None


def _row_pass(
    x: Tensor,
    ref_x: Tensor | None,
    per_token: PerToken,
    objective: Objective,
    softmax: Softmax,
    scratch: _Scratch,
    *,
    need_grad: bool,
) -> _RowPass:
    """Statistics, terms and gradient of a few rows of logits `x` [n, V], against `ref_x`'s; all
    of them count."""
    tokens = per_token.tokens
    rows, logprobs, mean_shifted = _exponentials(x, tokens, softmax, scratch)
    entropy = rows.log_sum - mean_shifted
    full_kl, gap, mean_gap = None, None, None
    if ref_x is not None:
        ref, *_ = _exponentials(ref_x, tokens, softmax)
        gap = _gap(x, ref_x, rows, ref, softmax)
        full_kl, mean_gap = _full_kl(rows, ref, gap)
    terms, by_stats = token_loss(logprobs, full_kl, per_token, objective)
    grad = None
    if need_grad:
        grad = _row_gradient(
            rows, gap, tokens, logprobs, mean_shifted, mean_gap, by_stats, softmax, scratch
        )
    return _RowPass(logprobs, entropy, terms, by_stats, grad)


def ppo_loss(
    logits: Tensor,
    per_token: PerToken,
    objective: Objective,
    softmax: Softmax,
    *,
    ref_logits: Tensor | None = None,
    need_grad: bool = True,
    inplace: bool = False,
) -> PPORows:
    """Clipped PPO loss of every row, its statistics, and its gradient in the same pass.

        L = Σ_t w_t · ( policy_t·iw_t + kl_coef·KL_t − entropy_coef·H_t )

    `inplace=True` writes dL/dlogits over the logits. `ref_logits` is read for `kl_estimator="full"`
    alone. Sources: Schulman et al. 2017, eq. 7; Ziegler et al. 2019; Ye et al. 2020 (dual clip).
    """
    n, vocab = logits.shape[:-1].numel(), logits.shape[-1]
    dtype = accumulation_dtype(logits.dtype)
    logprobs, entropy, *terms = (logits.new_zeros(n, dtype=dtype) for _ in range(5))
    valid = per_token.weights != 0
    every_row = bool(valid.all())
    counts = None if every_row else valid
    counted_rows = None if every_row else valid.nonzero().squeeze(-1)
    grad = None
    if need_grad:
        grad = (
            logits if inplace else torch.empty_like(logits, memory_format=torch.contiguous_format)
        )
        if not every_row:
            _put(grad, (~valid).nonzero().squeeze(-1), 0.0)
    if objective.kl_estimator != "full":
        ref_logits = None
    if not need_grad and ref_logits is None:
        read = slice(None) if counted_rows is None else counted_rows
        columns = per_token.tokens.unsqueeze(-1)
        stats = _sums_of_rows(logits, columns, softmax, counted_rows).finish()
        logprobs[read], entropy[read] = stats.logprobs, stats.log_sum - stats.mean_shifted
        of_tokens, _ = token_loss(logprobs, None, per_token, objective, counts)
        sums = loss_sums(logprobs, entropy, of_tokens, per_token, objective, counts)
        return PPORows(sums, logprobs, entropy, of_tokens.kl, grad)
    count = n if counted_rows is None else counted_rows.numel()
    # In place, e^t is written over the logits: the full KL would read them once more.
    written = None
    if grad is not None and (ref_logits is None or not inplace):
        written = _as_rows(grad, counted_rows, dtype)
    for chunk, scratch in _chunks(count, vocab, logits.device, dtype, written):
        rows = chunk if counted_rows is None else counted_rows[chunk]
        done = _row_pass(
            _take(logits, rows),
            None if ref_logits is None else _take(ref_logits, rows),
            per_token.at(rows),
            objective,
            softmax.at(rows),
            scratch,
            need_grad=need_grad,
        )
        logprobs[rows], entropy[rows] = done.logprobs, done.entropy
        for term, of_rows in zip(terms, done.terms, strict=True):
            term[rows] = of_rows
        if grad is not None and done.grad is not None and written is None:
            _put(grad, rows, done.grad.to(grad.dtype))
    of_tokens = TokenTerms(*terms)
    sums = loss_sums(logprobs, entropy, of_tokens, per_token, objective, counts)
    return PPORows(sums, logprobs, entropy, of_tokens.kl, grad)


def chunk_ppo_loss(
    logits: Tensor,
    per_token: PerToken,
    objective: Objective,
    softmax: Softmax,
    *,
    ref_logits: Tensor | None = None,
    need_grad: bool = True,
) -> tuple[PPORows, Tensor | None]:
    """`ppo_loss` in place for a chunk [n, V] of rows that all count, and the rows with a gradient.

    Rows whose gradient is exactly zero (clipped or A = 0, with no entropy or KL term) are left out:
    the others' gradients are written to consecutive rows, which costs no pass over memory.

    Returns:
        (PPORows, whose grad is [m, V] or None; [m] int64, the rows that it holds, None for all n).
    """
    wide = accumulation_dtype(logits.dtype)
    n, vocab = logits.shape
    parts, moving, written = [], [], 0
    for part, scratch in _chunks(n, vocab, logits.device, wide):
        done = _row_pass(
            logits[part],
            None if ref_logits is None else ref_logits[part],
            per_token.at(part),
            objective,
            softmax.at(part),
            scratch,
            need_grad=need_grad,
        )
        parts.append((done.logprobs, done.entropy, *done.terms))
        if done.grad is not None:
            # Behind what is written, ahead of what is still to be read.
            moves = _moves(done.by_stats)
            count = int(moves.sum())
            _pick(done.grad, moves, out=logits[written : written + count])
            written += count
            moving.append(moves)
    columns = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
    logprobs, entropy, *terms = columns
    of_tokens = TokenTerms(*terms)
    sums = loss_sums(logprobs, entropy, of_tokens, per_token, objective)
    if not written:
        return PPORows(sums, logprobs, entropy, of_tokens.kl), None
    # The rows with a gradient, then as many without as fill up their number.
    size = min(n, -(-written // GEMM_ROWS) * GEMM_ROWS)
    logits[written:size] = 0.0
    live = None
    if written < n:
        moves = torch.cat(moving)
        still = moves.logical_not().nonzero()[: size - written]
        live = torch.cat([moves.nonzero(), still]).squeeze(-1)
    return PPORows(sums, logprobs, entropy, of_tokens.kl, logits[:size]), live


def _pick(x: Tensor, rows: Tensor, out: Tensor) -> None:
    """out = x[rows] for rows [n] bool, in one copy where that is possible."""
    if len(out) == len(x):
        out.copy_(x)
    elif x.dtype == out.dtype:
        torch.index_select(x, 0, rows.nonzero().squeeze(-1), out=out)
    else:
        out.copy_(x[rows])
