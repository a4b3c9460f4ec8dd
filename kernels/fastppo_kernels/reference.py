"""The definition of every FastPPO operation in plain PyTorch.

Written to be read, and fast enough to train with on a CPU. Nothing here builds an autograd graph:
PPO's loss is a weighted sum whose weights are known beforehand, so the gradient of a row of logits
is known as soon as its softmax is, and is written out by hand below. `fastppo.ops` turns these
functions into differentiable operators.

Notation, for one row of logits `x` (V entries), sampled token `y` and temperature `T`:

    z_j    = logit_scale · x_j,  or  cap · tanh(logit_scale · x_j / cap)  with a soft-cap
    t_j    = (z_j − max z) / T          shifted: no offset of the row costs digits
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
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""|logprob − old_logprob| is clamped here before the exponential: e^20 ≈ 5e8 is far outside any
clip range and still finite in fp32, even squared."""

LOWEST = -1e30
"""Stands in for −inf in `t`: e^LOWEST is exactly 0 and 0·LOWEST is 0, where 0·(−inf) is NaN."""

ROW_CHUNK_ELEMENTS = {"cpu": 2**19, "cuda": 2**26}
"""Logits handled at once: 2 MiB of fp32 for each thread of a CPU, which its caches hold, and which
is enough work between two meetings of the threads; 256 MiB on a GPU."""

ROW_CHUNK_THREADS = 8
"""More threads share the chunk of this many: three buffers of 16 MiB are the most a call takes."""


class LinearBudget(NamedTuple):
    """What decides how many rows of logits the fused lm-head holds at once; `linear_chunk_size`."""

    whole: int  # logits, in elements, that are formed in one chunk without more ado
    share: int  # otherwise at most one row in `share`,
    least: int  # but no fewer rows than this,
    enough: int  # and no more than this, unless `whole` has room for them


LINEAR_BUDGETS = {
    "cpu": LinearBudget(whole=2**23, share=4, least=384, enough=512),
    "cuda": LinearBudget(whole=2**28, share=8, least=1024, enough=4096),
}
"""On a CPU each GEMM packs the weight anew: 256 rows a time cost 5 % more than 1024, 64 rows 28 %
(sgemm, V = 32000, one thread). On a GPU each chunk reads and writes the fp32 dW, as many bytes as
4·H rows of bf16 logits: 4096 rows make that small beside the GEMMs. An eighth of the rows is 12.5 %
of the logits' memory. 2^28 logits are 512 MiB of bf16, and 2^23 are 32 MiB of fp32: fewer rows in
one chunk instead of two take a fifth less time (64 rows; 256 rows: an eighth)."""

GEMM_ROWS = 8
"""The fused lm-head's gradient GEMMs take a multiple of as many rows. On a CPU an odd number makes
the one for dW slower by a seventh (255 rows against 252 or 256; sgemm, V = 32000, H = 1024)."""

SUMS = (
    "loss",  # Σ w · token loss
    "policy_loss",  # Σ w · policy term (with importance weights)
    "tokens",  # from here on unweighted sums over the tokens with w ≠ 0
    "entropy",
    "kl",
    "approx_kl",  # k3 of the policy against the old policy
    "ratio",
    "ratio_squared",
    "above_positive",  # ratio > 1 + ε_high and A > 0: clipped, no gradient
    "below_positive",  # ratio < 1 − ε_low  and A > 0: pulled back
    "above_negative",  # ratio > 1 + ε_high and A < 0: pushed back
    "below_negative",  # ratio < 1 − ε_low  and A < 0: clipped, no gradient
    "dual_clipped",  # A < 0 and ratio beyond the dual clip: no gradient
    "ratio_max",  # the one entry that combines by max
)
"""Order of the `sums` vector. Sums add up over chunks, microbatches and ranks; ratio_max maxes."""


def combine_sums(total: Tensor, part: Tensor) -> Tensor:
    """Joins the `sums` [len(SUMS)] of two disjoint sets of tokens."""
    joined = total + part
    joined[-1] = torch.maximum(total[-1], part[-1])
    return joined


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32 for every dtype but fp64, which is kept (it is the oracle's)."""
    return torch.float64 if dtype == torch.float64 else torch.float32


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
) -> Iterator[tuple[slice, _Scratch]]:
    """Chunks of rows, and what to compute them in: the same memory for each.

    Args:
        exp: [rows, elements_per_row]: its rows become the buffer of that name, where the gradient
            is formed. A gradient of the right dtype is so computed in its place, not copied there.

    Buffers that are freed and allocated anew with every chunk can go back to the system in between,
    and on a CPU their page faults then cost as much as the arithmetic.
    """
    budget = ROW_CHUNK_ELEMENTS.get(device.type, ROW_CHUNK_ELEMENTS["cuda"])
    if device.type == "cpu":
        budget *= min(torch.get_num_threads(), ROW_CHUNK_THREADS)
    step = min(rows, max(1, budget // max(1, elements_per_row)))
    names = [name for name in _Scratch._fields if exp is None or name != "exp"]
    buffers = {
        name: torch.empty(step, elements_per_row, device=device, dtype=dtype) for name in names
    }
    for start in range(0, rows, max(1, step)):
        stop = min(start + step, rows)
        views = {name: buffer[: stop - start] for name, buffer in buffers.items()}
        if exp is not None:
            views["exp"] = exp[start:stop]
        yield slice(start, stop), _Scratch(**views)


def _as_rows(x: Tensor, rows: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """[N, V] of x's own memory if that is contiguous, of this dtype, and `rows` (None) are all."""
    if rows is None and x.dtype == dtype and x.is_contiguous():
        return x.view(-1, x.shape[-1])
    return None


def linear_chunk_size(rows: int, vocab: int, device: torch.device) -> int:
    """Rows of logits that the fused lm-head holds at once: chunks of equal size (but for the last).

    A GPU's default stays below 15 % of the logits' memory from 8192 rows on.
    """
    budget = LINEAR_BUDGETS.get(device.type, LINEAR_BUDGETS["cuda"])
    if rows * vocab <= budget.whole:
        return max(1, rows)
    most = max(budget.enough, budget.whole // vocab)
    limit = min(max(math.ceil(rows / budget.share), budget.least), most)
    chunks = max(2, math.ceil(rows / limit))
    return math.ceil(rows / chunks)


def _take(x: Tensor, rows: slice | Tensor) -> Tensor:
    """Rows of [N, V], or of [B, T, V] counted through B·T without flattening it (a copy)."""
    return x[rows] if x.dim() == 2 else x[_unravel(x, rows)]


def _put(x: Tensor, rows: slice | Tensor, values: Tensor | float) -> None:
    x[rows if x.dim() == 2 else _unravel(x, rows)] = values


def _unravel(x: Tensor, rows: slice | Tensor) -> tuple[Tensor, Tensor]:
    index = (
        torch.arange(rows.start, rows.stop, device=x.device) if isinstance(rows, slice) else rows
    )
    return index // x.shape[1], index % x.shape[1]


# ------------------------------------------------------------------------------------- row maths


class _Softmax(NamedTuple):
    """What a chunk of rows is turned into; `shifted` and `exp` are [n, V], the rest [n]."""

    shifted: Tensor  # t
    exp: Tensor | None  # e^t, when it was formed
    row_max: Tensor  # max x, or max z with a soft-cap
    log_sum: Tensor
    slope: Tensor | None  # dz/dx / logit_scale, only with a soft-cap


def _temperature_column(temperature: float | Tensor, rows: slice | Tensor) -> float | Tensor:
    return temperature[rows].unsqueeze(-1) if isinstance(temperature, Tensor) else temperature


def _shift(
    x: Tensor,
    temperature: float | Tensor,
    logit_scale: float,
    softcap: float | None,
    row_max: Tensor | None,
    out: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(t, row maximum, soft-cap slope). Subtracting before scaling keeps t exact at any offset."""
    wide = accumulation_dtype(x.dtype)
    if softcap is None:
        x = x if x.dtype == wide else _widened(x, wide, out)
        row_max = x.amax(-1) if row_max is None else row_max
        shifted = torch.sub(x, row_max.unsqueeze(-1), out=out)
        factor = logit_scale / temperature
        if isinstance(factor, Tensor) or factor != 1.0:
            shifted.mul_(factor)
        return shifted.clamp_(min=LOWEST), row_max, None
    x = _widened(x, wide, out).mul_(logit_scale / softcap)
    slope = torch.cosh(x).square_().reciprocal_()  # 1 − tanh² would cancel near the cap
    z = x.tanh_().mul_(softcap)
    row_max = z.amax(-1) if row_max is None else row_max
    return z.sub_(row_max.unsqueeze(-1)).div_(temperature), row_max, slope


def _widened(x: Tensor, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    """A copy of x in `dtype`."""
    return x.to(dtype, copy=True) if out is None else out.copy_(x)


def _softmax(
    x: Tensor,
    tokens: Tensor,
    temperature: float | Tensor,
    logit_scale: float,
    softcap: float | None,
    scratch: _Scratch = _ALLOCATE,
) -> tuple[_Softmax, Tensor, Tensor]:
    """(softmax, logprob of the token, mean of t under p).

    The token is left out of the sum and added behind it: where it holds most of the mass, logprob
    is then −log(1 + the others' part), and keeps its digits however sure the policy is.
    """
    shifted, row_max, slope = _shift(x, temperature, logit_scale, softcap, None, scratch.shifted)
    exp = torch.exp(shifted, out=scratch.exp)
    column = tokens.unsqueeze(-1)
    token_exp = exp.gather(1, column)
    others = exp.scatter_(1, column, 0.0).sum(-1)
    exp.scatter_(1, column, token_exp)
    token_exp = token_exp.squeeze(-1)
    total = others + token_exp
    log_sum = total.log()
    rare = shifted.gather(1, column).squeeze(-1) - log_sum
    logprobs = torch.where(token_exp > others, -torch.log1p(others / token_exp), rare)
    mean_shifted = torch.mul(exp, shifted, out=scratch.product).sum(-1) / total
    return _Softmax(shifted, exp, row_max, log_sum, slope), logprobs, mean_shifted


def _row_gradient(
    soft: _Softmax,
    gap: Tensor | None,
    tokens: Tensor,
    logprobs: Tensor,
    mean_shifted: Tensor,
    g_logprob: Tensor,
    g_entropy: Tensor | None,
    g_kl: Tensor | None,
    scale: float | Tensor,
    scratch: _Scratch,
) -> Tensor:
    """dL/dx [n, V] in the accumulation dtype; the formula in the module's docstring.

    In it log p_j + entropy is t_j − Σ p t, and log p_j − log q_j − KL is t_j − r_j − Σ p (t − r):
    log sums cancel and are not formed. At the token, 1 − p_y is −expm1(logprob). `g_entropy` and
    `g_kl` are None where the term is absent. What is constant along a row, 1/Σ e^t and the scale
    included, is multiplied before it meets the row: one pass over the chunk for each term.
    """
    exp = torch.exp(soft.shifted, out=scratch.exp) if soft.exp is None else soft.exp
    normalize = torch.exp(-soft.log_sum)
    column = tokens.unsqueeze(-1)
    constant, linear = -g_logprob, torch.zeros_like(g_logprob)
    at_token = torch.zeros_like(g_logprob)
    if g_entropy is not None:
        constant = constant + g_entropy * mean_shifted
        linear = linear - g_entropy
        token_shifted = soft.shifted.gather(1, column).squeeze(-1)
        at_token = g_entropy * (mean_shifted - token_shifted)
    if g_kl is not None:
        assert gap is not None
        # Summed again rather than taken from the KL, where log sums would cancel. An infinite KL
        # that is only reported does not touch the gradient.
        mean_gap = torch.where(g_kl != 0, torch.linalg.vecdot(exp, gap) * normalize, 0.0)
        constant = constant - g_kl * mean_gap
        token_gap = gap.gather(1, column).squeeze(-1)
        at_token = at_token + g_kl * (token_gap - mean_gap)
    per_row = normalize.unsqueeze(-1) * scale
    if g_entropy is None and g_kl is None:
        grad = exp.mul_(constant.unsqueeze(-1) * per_row)
    else:
        factor = torch.mul(soft.shifted, linear.unsqueeze(-1) * per_row, out=scratch.product)
        factor.add_(constant.unsqueeze(-1) * per_row)
        if g_kl is not None:
            assert gap is not None
            factor.addcmul_(gap, g_kl.unsqueeze(-1) * per_row)
        grad = exp.mul_(factor)
    token_grad = torch.exp(logprobs) * at_token - g_logprob * torch.expm1(logprobs)
    grad.scatter_(1, column, token_grad.unsqueeze(-1) * scale)
    if soft.slope is not None:
        grad.mul_(soft.slope)
    return grad


def _gap(
    x: Tensor,
    ref: Tensor,
    soft: _Softmax,
    reference: _Softmax,
    temperature: float | Tensor,
    logit_scale: float,
    softcap: float | None,
) -> Tensor:
    """t − r [n, V]. Near the reference the logits' own difference is exact where that of the two
    shifted and scaled rows is not; columns at −inf keep their stand-ins."""
    wide = accumulation_dtype(x.dtype)
    factor = logit_scale / temperature
    if softcap is not None:
        inner = logit_scale / softcap
        x, ref = (torch.mul(z.to(wide), inner).tanh_().mul_(softcap) for z in (x, ref))
        factor = 1 / temperature
    gap = torch.sub(x.to(wide), ref)
    gap.sub_((soft.row_max - reference.row_max).unsqueeze(-1)).mul_(factor)
    ruled_out = (soft.shifted <= LOWEST).logical_or_(reference.shifted <= LOWEST)
    if ruled_out.any():
        gap = torch.where(ruled_out, soft.shifted - reference.shifted, gap)
    return gap


def _full_kl(soft: _Softmax, reference: _Softmax, gap: Tensor) -> Tensor:
    """Σ p (log p − log q) per row, exact; +inf where q is 0 and p is not."""
    assert soft.exp is not None
    mean_gap = torch.linalg.vecdot(soft.exp, gap) / torch.exp(soft.log_sum)
    ruled_out = (reference.shifted <= LOWEST).logical_and_(soft.exp > 0).any(-1)
    kl = mean_gap - soft.log_sum + reference.log_sum
    return torch.where(ruled_out, math.inf, kl)


class TokenStats(NamedTuple):
    """All [N] but the normalizers [N, 2]: (row maximum, log Σ e^t), which backward needs."""

    logprobs: Tensor
    entropy: Tensor
    kl: Tensor
    normalizer: Tensor
    ref_normalizer: Tensor


def token_stats(
    logits: Tensor,
    tokens: Tensor,
    *,
    ref_logits: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> TokenStats:
    """Logprob of the token, entropy and (given `ref_logits` [N, V]) the full KL of each row.

    Args:
        logits: [N, V]; tokens: [N] int64; temperature: a float or [N] in the accumulation dtype.
    """
    n, vocab = logits.shape[:-1].numel(), logits.shape[-1]
    dtype = accumulation_dtype(logits.dtype)
    logprobs, entropy, kl = (logits.new_zeros(n, dtype=dtype) for _ in range(3))
    normalizer, ref_normalizer = (logits.new_zeros((n, 2), dtype=dtype) for _ in range(2))
    for rows, scratch in _chunks(n, vocab, logits.device, dtype):
        t = _temperature_column(temperature, rows)
        soft, row_logprobs, mean_shifted = _softmax(
            _take(logits, rows), tokens[rows], t, logit_scale, softcap, scratch
        )
        logprobs[rows] = row_logprobs
        entropy[rows] = soft.log_sum - mean_shifted
        normalizer[rows, 0] = soft.row_max
        normalizer[rows, 1] = soft.log_sum
        if ref_logits is not None:
            # In the same order of sums as the policy, so that the KL to itself is exactly 0.
            reference, *_ = _softmax(_take(ref_logits, rows), tokens[rows], t, logit_scale, softcap)
            gap = _gap(
                _take(logits, rows),
                _take(ref_logits, rows),
                soft,
                reference,
                t,
                logit_scale,
                softcap,
            )
            kl[rows] = _full_kl(soft, reference, gap)
            ref_normalizer[rows, 0] = reference.row_max
            ref_normalizer[rows, 1] = reference.log_sum
    return TokenStats(logprobs, entropy, kl, normalizer, ref_normalizer)


def token_stats_backward(
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
    grad_kl: Tensor | None,
    logits: Tensor,
    tokens: Tensor,
    stats: TokenStats,
    *,
    ref_logits: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> Tensor:
    """dL/dlogits in the logits' shape and dtype, from one more read of the rows with a gradient."""
    grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
    asked = grad_logprobs != 0
    for upstream in (grad_entropy, grad_kl):
        asked = asked if upstream is None else asked | (upstream != 0)
    kept = None if bool(asked.all()) else asked.nonzero().squeeze(-1)
    if kept is not None:
        _put(grad, (~asked).nonzero().squeeze(-1), 0.0)
    wide = accumulation_dtype(logits.dtype)
    count = asked.numel() if kept is None else kept.numel()
    written = _as_rows(grad, kept, wide)
    for chunk, scratch in _chunks(count, logits.shape[-1], logits.device, wide, written):
        rows = chunk if kept is None else kept[chunk]
        t = _temperature_column(temperature, rows)
        normalizer, ref_normalizer = stats.normalizer[rows], stats.ref_normalizer[rows]
        shifted, row_max, slope = _shift(
            _take(logits, rows), t, logit_scale, softcap, normalizer[:, 0], scratch.shifted
        )
        soft = _Softmax(shifted, None, row_max, normalizer[:, 1], slope)
        reference, gap = None, None
        if grad_kl is not None:
            assert ref_logits is not None
            ref_shifted, ref_max, _ = _shift(
                _take(ref_logits, rows), t, logit_scale, softcap, ref_normalizer[:, 0], None
            )
            reference = _Softmax(ref_shifted, None, ref_max, ref_normalizer[:, 1], None)
            gap = _gap(
                _take(logits, rows),
                _take(ref_logits, rows),
                soft,
                reference,
                t,
                logit_scale,
                softcap,
            )
        row_grad = _row_gradient(
            soft,
            gap,
            tokens[rows],
            stats.logprobs[rows],
            normalizer[:, 1] - stats.entropy[rows],
            grad_logprobs[rows],
            None if grad_entropy is None else grad_entropy[rows],
            None if grad_kl is None else grad_kl[rows],
            logit_scale / t,
            scratch,
        )
        if written is None:
            _put(grad, rows, row_grad.to(grad.dtype))
    return grad


# ----------------------------------------------------------------------------------- token losses


def policy_term(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(−min(ratio·A, clip(ratio)·A), its derivative by the logprob, the ratio), elementwise.

    The derivative is −ratio·A where the unclipped branch is the smaller one and 0 where a clip is
    active. `clip_low = clip_high = inf` is no clipping. Source: Schulman et al. 2017, eq. 7; the
    dual clip, Ye et al. 2020, eq. 3.
    """
    difference = logprobs - old_logprobs
    ratio = torch.exp(difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    surrogate = torch.minimum(unclipped, clipped)
    # Written so that a NaN counts as active: it must reach the gradient, where it is noticed.
    active = ~(unclipped > clipped) & ~(difference.abs() > LOG_RATIO_LIMIT)
    if dual_clip is not None:
        floor = dual_clip * advantages
        dual = (advantages < 0) & (surrogate < floor)
        surrogate = torch.where(dual, floor, surrogate)
        active &= ~dual
    return -surrogate, torch.where(active, -unclipped, 0.0), ratio


def sampled_kl(difference: Tensor, estimator: str) -> tuple[Tensor, Tensor]:
    """(estimate, derivative by the logprob) from d = logprob − ref_logprob.

    k1 = d, k2 = ½d², k3 = e^{−d} − 1 + d. Source: Schulman 2020, "Approximating KL divergence".
    """
    if estimator == "k1":
        return difference, torch.ones_like(difference)
    if estimator == "k2":
        return 0.5 * difference * difference, difference
    if estimator == "k3":
        inverse = torch.exp((-difference).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
        # expm1 keeps the digits that e^{−d} − 1 loses near d = 0, where training lives.
        value = torch.expm1((-difference).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)) + difference
        inside = difference.abs() <= LOG_RATIO_LIMIT
        return value, 1 - torch.where(inside, inverse, 0.0)
    raise ValueError(f"kl_estimator must be k1, k2, k3 or full, got {estimator!r}")


class Objective(NamedTuple):
    """The scalars of the loss; infinite clips are no clipping."""

    clip_low: float
    clip_high: float
    dual_clip: float | None
    kl_coef: float
    kl_estimator: str
    entropy_coef: float


class PerToken(NamedTuple):
    """The loss's operands of shape [N]."""

    tokens: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    importance_weights: Tensor | None = None
    ref_logprobs: Tensor | None = None
    temperature: float | Tensor = 1.0

    def at(self, rows: slice | Tensor) -> PerToken:
        picked = {name: x[rows] for name, x in self._asdict().items() if isinstance(x, Tensor)}
        return self._replace(**picked)

    def policy_term(self, logprobs: Tensor, of: Objective) -> tuple[Tensor, Tensor, Tensor]:
        """`policy_term` of these tokens, term and derivative times the importance weights."""
        term, derivative, ratio = policy_term(
            logprobs,
            self.old_logprobs,
            self.advantages,
            clip_low=of.clip_low,
            clip_high=of.clip_high,
            dual_clip=of.dual_clip,
        )
        if self.importance_weights is not None:
            term, derivative = term * self.importance_weights, derivative * self.importance_weights
        return term, derivative, ratio


class TokenLoss(NamedTuple):
    """kl [N]; derivatives of the summed loss by each statistic, None where absent."""

    kl: Tensor
    g_logprob: Tensor
    g_entropy: Tensor | None
    g_kl: Tensor | None


def token_loss(
    logprobs: Tensor, full_kl: Tensor | None, tokens: PerToken, of: Objective
) -> TokenLoss:
    """The derivatives of w·(policy term·importance weight + kl_coef·KL − entropy_coef·entropy).

    Tokens of weight 0 count for nothing, whatever stands there. The loss itself is in `loss_sums`.
    """
    weights = tokens.weights
    _, g_logprob, _ = tokens.policy_term(logprobs, of)
    kl, g_kl = torch.zeros_like(logprobs), None
    if of.kl_estimator == "full":
        if full_kl is not None:
            kl = full_kl
            g_kl = weights * of.kl_coef if of.kl_coef else None
    elif tokens.ref_logprobs is not None:
        kl, slope = sampled_kl(logprobs - tokens.ref_logprobs, of.kl_estimator)
        if of.kl_coef:
            g_logprob = g_logprob + of.kl_coef * slope
    valid = weights != 0
    return TokenLoss(
        torch.where(valid, kl, 0.0),
        torch.where(valid, weights * g_logprob, 0.0),
        -of.entropy_coef * weights if of.entropy_coef else None,
        g_kl,
    )


def loss_sums(
    logprobs: Tensor, entropy: Tensor, kl: Tensor, tokens: PerToken, of: Objective
) -> Tensor:
    """[len(SUMS)] of all tokens, from their statistics; `kl` is that of `token_loss`."""
    weights, advantages = tokens.weights, tokens.advantages
    policy, _, ratio = tokens.policy_term(logprobs, of)
    loss = policy - of.entropy_coef * entropy + (of.kl_coef * kl if of.kl_coef else 0.0)
    approx_kl, _ = sampled_kl(tokens.old_logprobs - logprobs, "k3")
    above, below = ratio > 1 + of.clip_high, ratio < 1 - of.clip_low
    positive, negative = advantages > 0, advantages < 0
    dual = torch.zeros_like(negative)
    if of.dual_clip is not None:
        dual = negative & (ratio > of.dual_clip)
    terms = (
        weights * loss,
        weights * policy,
        torch.ones_like(loss),
        entropy,
        kl,
        approx_kl,
        ratio,
        ratio * ratio,
        above & positive,
        below & positive,
        above & negative,
        below & negative,
        dual,
    )
    valid = weights != 0
    sums = [torch.where(valid, term, 0.0).sum(dtype=loss.dtype) for term in terms]
    highest = torch.where(valid, ratio, 0.0).amax() if len(ratio) else torch.zeros_like(sums[0])
    return torch.stack([*sums, highest])


class _RowPass(NamedTuple):
    """logprobs, entropy [n]; grad [n, V] in the accumulation dtype, in `scratch.exp`, or None."""

    logprobs: Tensor
    entropy: Tensor
    token: TokenLoss
    grad: Tensor | None


def _row_pass(
    x: Tensor,
    ref: Tensor | None,
    operands: PerToken,
    objective: Objective,
    scratch: _Scratch,
    *,
    logit_scale: float,
    softcap: float | None,
    need_grad: bool,
) -> _RowPass:
    """Statistics, KL and gradient of a few rows of logits `x` [n, V], against `ref`'s."""
    t = _temperature_column(operands.temperature, slice(None))
    soft, logprobs, mean_shifted = _softmax(x, operands.tokens, t, logit_scale, softcap, scratch)
    entropy = soft.log_sum - mean_shifted
    full_kl, gap = None, None
    if ref is not None:
        reference, *_ = _softmax(ref, operands.tokens, t, logit_scale, softcap)
        gap = _gap(x, ref, soft, reference, t, logit_scale, softcap)
        full_kl = _full_kl(soft, reference, gap)
    token = token_loss(logprobs, full_kl, operands, objective)
    grad = None
    if need_grad:
        grad = _row_gradient(
            soft,
            gap,
            operands.tokens,
            logprobs,
            mean_shifted,
            token.g_logprob,
            token.g_entropy,
            token.g_kl,
            logit_scale / t,
            scratch,
        )
    return _RowPass(logprobs, entropy, token, grad)


class PPORows(NamedTuple):
    """sums [len(SUMS)]; logprobs, entropy, kl [N], 0 where the weight is 0; grad [N, V] or None."""

    sums: Tensor
    logprobs: Tensor
    entropy: Tensor
    kl: Tensor
    grad: Tensor | None


def ppo_loss(
    logits: Tensor,
    tokens: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    importance_weights: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    ref_logits: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    kl_coef: float = 0.0,
    kl_estimator: str = "k3",
    entropy_coef: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
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
    logprobs, entropy, kl = (logits.new_zeros(n, dtype=dtype) for _ in range(3))
    valid = weights != 0
    every_row = bool(valid.all())
    kept = None if every_row else valid.nonzero().squeeze(-1)
    grad = None
    if need_grad:
        grad = (
            logits if inplace else torch.empty_like(logits, memory_format=torch.contiguous_format)
        )
        if not every_row:
            _put(grad, (~valid).nonzero().squeeze(-1), 0.0)
    if kl_estimator != "full":
        ref_logits = None
    operands = PerToken(
        tokens,
        old_logprobs,
        advantages,
        weights,
        importance_weights,
        ref_logprobs,
        temperature,
    )
    objective = Objective(clip_low, clip_high, dual_clip, kl_coef, kl_estimator, entropy_coef)
    count = n if kept is None else kept.numel()
    # In place, e^t is written over the logits: the full KL would read them once more.
    written = None
    if grad is not None and (ref_logits is None or not inplace):
        written = _as_rows(grad, kept, dtype)
    for chunk, scratch in _chunks(count, vocab, logits.device, dtype, written):
        rows = chunk if kept is None else kept[chunk]
        done = _row_pass(
            _take(logits, rows),
            None if ref_logits is None else _take(ref_logits, rows),
            operands.at(rows),
            objective,
            scratch,
            logit_scale=logit_scale,
            softcap=softcap,
            need_grad=need_grad,
        )
        logprobs[rows], entropy[rows], kl[rows] = done.logprobs, done.entropy, done.token.kl
        if grad is not None and done.grad is not None and written is None:
            _put(grad, rows, done.grad.to(grad.dtype))
    sums = loss_sums(logprobs, entropy, kl, operands, objective)
    return PPORows(sums, logprobs, entropy, kl, grad)


# ------------------------------------------------------------------------------- the fused lm-head


class LinearPPORows(NamedTuple):
    """As PPORows; grad_hidden [N, H], grad_weight [V, H], grad_bias [V], each None if not asked."""

    sums: Tensor
    logprobs: Tensor
    entropy: Tensor
    kl: Tensor
    grad_hidden: Tensor | None
    grad_weight: Tensor | None
    grad_bias: Tensor | None


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """x @ weight.T + bias in the first rows of `out`."""
    out = out[: x.shape[0]]
    if bias is None:
        return torch.mm(x, weight.T, out=out)
    return torch.addmm(bias, x, weight.T, out=out)


class _HeadGradients:
    """dX, dW and dbias, gathered chunk by chunk.

    GEMMs run in `compute_dtype`; dW and dbias add up in fp32 (fp64 for fp64) and are cast once.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        need: tuple[bool, bool, bool],
    ) -> None:
        wide = accumulation_dtype(weight.dtype)
        self.hidden = hidden.new_zeros(hidden.shape) if need[0] else None
        self.weight = weight.new_zeros(weight.shape, dtype=wide) if need[1] else None
        self.bias = torch.zeros_like(bias, dtype=wide) if need[2] and bias is not None else None

    def add(self, rows: slice | Tensor, grad: Tensor, hidden: Tensor, weight: Tensor) -> None:
        """The share of the logits' gradient `grad` [n, V] of rows whose hidden states are given."""
        if self.hidden is not None:
            self.hidden[rows] = (grad @ weight).to(self.hidden.dtype)
        if self.weight is not None:
            if grad.dtype == self.weight.dtype:
                self.weight.addmm_(grad.T, hidden)
            elif grad.is_cuda:
                torch.addmm(
                    self.weight, grad.T, hidden, out_dtype=self.weight.dtype, out=self.weight
                )
            else:  # a CPU has no product of bf16 matrices in fp32: a chunk's own share is rounded
                self.weight += grad.T @ hidden
        if self.bias is not None:
            self.bias += grad.sum(0, dtype=self.bias.dtype)

    def finished(
        self, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return (
            self.hidden,
            None if self.weight is None else self.weight.to(weight.dtype),
            None if self.bias is None or bias is None else self.bias.to(bias.dtype),
        )


def linear_ppo_loss(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    bias: Tensor | None = None,
    ref_hidden: Tensor | None = None,
    ref_weight: Tensor | None = None,
    ref_bias: Tensor | None = None,
    importance_weights: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    kl_coef: float = 0.0,
    kl_estimator: str = "k3",
    entropy_coef: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    chunk_size: int | None = None,
    compute_dtype: torch.dtype | None = None,
    need: tuple[bool, bool, bool] = (True, True, True),
) -> LinearPPORows:
    """`ppo_loss` of `hidden [N, H] @ weight [V, H].T + bias`, holding `chunk_size` rows of logits.

    Per chunk: one GEMM for the logits, the row pass in place, one GEMM for dX and one for dW. That
    is 6·N·H·V FLOP in all; recomputing the logits in a backward pass would make it 8·N·H·V. Rows of
    weight 0 never enter. Rows whose gradient is exactly zero (clipped or A = 0, with no entropy or
    KL term) are left out of the last two GEMMs: the row pass writes the others' gradients one
    behind the other, so leaving rows out costs nothing but a gather of their hidden states.

    Args:
        need: gradients wanted of (hidden, weight, bias). With none, only the first GEMM runs.
        compute_dtype: dtype of the GEMMs and of the logits; default that of `hidden`.
    """
    n, vocab = hidden.shape[0], weight.shape[0]
    dtype = compute_dtype or hidden.dtype
    kept = _kept(weights)
    count = n if kept is None else kept.numel()
    step = chunk_size or linear_chunk_size(count, vocab, hidden.device)
    head, head_bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    wide = accumulation_dtype(dtype)
    logprobs, entropy, kl = (hidden.new_zeros(n, dtype=wide) for _ in range(3))
    objective = Objective(clip_low, clip_high, dual_clip, kl_coef, kl_estimator, entropy_coef)
    operands = PerToken(
        tokens,
        old_logprobs,
        advantages,
        weights,
        importance_weights,
        ref_logprobs,
        temperature,
    )
    grads = _HeadGradients(hidden, weight, bias, need)
    buffer = hidden.new_empty((min(step, count), vocab), dtype=dtype)
    ref_head, ref_head_bias, ref_buffer = None, None, None
    if ref_hidden is not None and ref_weight is not None and kl_estimator == "full":
        ref_head = ref_weight.to(dtype)
        ref_head_bias = None if ref_bias is None else ref_bias.to(dtype)
        ref_buffer = torch.empty_like(buffer)
    for start in range(0, count, step):
        chunk = slice(start, min(start + step, count))
        rows = chunk if kept is None else kept[chunk]
        x = hidden[rows].to(dtype)
        chunk_operands = operands.at(rows)
        logits = _linear(x, head, head_bias, out=buffer)
        ref_logits = None
        if ref_hidden is not None and ref_head is not None and ref_buffer is not None:
            ref_logits = _linear(ref_hidden[rows].to(dtype), ref_head, ref_head_bias, ref_buffer)
        parts, moving, written = [], [], 0
        for part, scratch in _chunks(x.shape[0], vocab, x.device, wide):
            done = _row_pass(
                logits[part],
                None if ref_logits is None else ref_logits[part],
                chunk_operands.at(part),
                objective,
                scratch,
                logit_scale=logit_scale,
                softcap=softcap,
                need_grad=any(need),
            )
            parts.append(torch.stack([done.logprobs, done.entropy, done.token.kl]))
            if done.grad is not None:
                # Behind what is written, ahead of what is still to be read.
                moves = _moves(done.token)
                count_moving = int(moves.sum())
                _pick(done.grad, moves, out=logits[written : written + count_moving])
                written += count_moving
                moving.append(moves)
        logprobs[rows], entropy[rows], kl[rows] = torch.cat(parts, 1)
        if written:
            # The rows with a gradient, then as many without as fill up their number.
            size = min(x.shape[0], -(-written // GEMM_ROWS) * GEMM_ROWS)
            logits[written:size] = 0.0
            if written < x.shape[0]:
                order = torch.cat(moving).logical_not().argsort(stable=True)[:size]
                rows = start + order if kept is None else kept[start + order]
                x = x[order]
            grads.add(rows, logits[:size], x, head)
    sums = loss_sums(logprobs, entropy, kl, operands, objective)
    return LinearPPORows(sums, logprobs, entropy, kl, *grads.finished(weight, bias))


def _kept(weights: Tensor) -> Tensor | None:
    """Indices of the rows of weight ≠ 0; None where that is every row."""
    valid = weights != 0
    return None if bool(valid.all()) else valid.nonzero().squeeze(-1)


def _moves(token: TokenLoss) -> Tensor:
    """[n] bool, True for rows with a gradient. NaN is one: it must be seen."""
    moves = token.g_logprob != 0
    for g in (token.g_entropy, token.g_kl):
        moves = moves if g is None else moves | (g != 0)
    return moves


def _pick(x: Tensor, rows: Tensor, out: Tensor) -> None:
    """out = x[rows] for rows [n] bool, in one copy where that is possible."""
    if len(out) == len(x):
        out.copy_(x)
    elif x.dtype == out.dtype:
        torch.index_select(x, 0, rows.nonzero().squeeze(-1), out=out)
    else:
        out.copy_(x[rows])


def linear_token_stats(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    chunk_size: int | None = None,
    compute_dtype: torch.dtype | None = None,
) -> TokenStats:
    """`token_stats` of `hidden @ weight.T + bias` without holding more than a chunk of logits."""
    n, vocab = hidden.shape[0], weight.shape[0]
    dtype = compute_dtype or hidden.dtype
    wide = accumulation_dtype(dtype)
    head, head_bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    logprobs, entropy = (hidden.new_zeros(n, dtype=wide) for _ in range(2))
    normalizer = hidden.new_zeros((n, 2), dtype=wide)
    step = chunk_size or linear_chunk_size(n, vocab, hidden.device)
    buffer = hidden.new_empty((min(step, n), vocab), dtype=dtype)
    for start in range(0, n, step):
        rows = slice(start, min(start + step, n))
        stats = token_stats(
            _linear(hidden[rows].to(dtype), head, head_bias, out=buffer),
            tokens[rows],
            temperature=temperature[rows] if isinstance(temperature, Tensor) else temperature,
            logit_scale=logit_scale,
            softcap=softcap,
        )
        logprobs[rows], entropy[rows], normalizer[rows] = stats[0], stats[1], stats.normalizer
    return TokenStats(
        logprobs, entropy, torch.zeros_like(entropy), normalizer, torch.zeros_like(normalizer)
    )


def linear_token_stats_backward(
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    stats: TokenStats,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    chunk_size: int | None = None,
    compute_dtype: torch.dtype | None = None,
    need: tuple[bool, bool, bool] = (True, True, True),
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dX, dW, dbias). The upstream gradient is arbitrary, so logits are formed again."""
    n, vocab = hidden.shape[0], weight.shape[0]
    dtype = compute_dtype or hidden.dtype
    head, head_bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    grads = _HeadGradients(hidden, weight, bias, need)
    step = chunk_size or linear_chunk_size(n, vocab, hidden.device)
    buffer = hidden.new_empty((min(step, n), vocab), dtype=dtype)
    for start in range(0, n, step):
        rows = slice(start, min(start + step, n))
        x = hidden[rows].to(dtype)
        grad = token_stats_backward(
            grad_logprobs[rows],
            None if grad_entropy is None else grad_entropy[rows],
            None,
            _linear(x, head, head_bias, out=buffer),
            tokens[rows],
            TokenStats(*(part[rows] for part in stats)),
            temperature=temperature[rows] if isinstance(temperature, Tensor) else temperature,
            logit_scale=logit_scale,
            softcap=softcap,
        )
        grads.add(rows, grad, x, head)
    return grads.finished(weight, bias)


# -------------------------------------------------------------------------------------- advantages


def gae_loop(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float | Tensor,
    lam: float | Tensor,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """GAE by the textbook loop backwards over time: the oracle for `gae`, and slow.

        δ_t = r_t + γ·V_next − V_t,   A_t = δ_t + γλ·A_next,   return_t = A_t + V_t

    "next" is the next token with mask True; behind the last one stands `bootstrap` [B], else 0.

    Args:
        rewards, values, mask: [B, T]; gamma, lam: floats or [B].

    Source: Schulman et al. 2016, eq. 11, 12 and 16.
    """
    dtype = accumulation_dtype(values.dtype)
    rewards, values = rewards.to(dtype), values.to(dtype)
    batch, length = values.shape
    next_value = values.new_zeros(batch) if bootstrap is None else bootstrap.to(dtype)
    next_advantage = values.new_zeros(batch)
    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    for t in reversed(range(length)):
        here = mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * next_advantage
        advantages[:, t] = torch.where(here, advantage, 0.0)
        returns[:, t] = torch.where(here, advantage + values[:, t], 0.0)
        next_value = torch.where(here, values[:, t], next_value)
        next_advantage = torch.where(here, advantage, next_advantage)
    return advantages, returns


SCAN_BLOCK = 64
"""Steps of the blocked scan: blocks of 64 make log₆₄(N) levels of 64 vector operations each."""


def _reverse_scan(decay: Tensor, x: Tensor) -> Tensor:
    """y_t = x_t + decay_t · y_{t+1} over flat [N] tensors, in blocks that are scanned side by side.

    Each block is scanned as if nothing followed it, keeping the product of its decays; the blocks'
    carries are the same recurrence, one block per step, and are found by recursion.
    """
    n = x.numel()
    if n <= SCAN_BLOCK:
        y = x.clone()
        for t in reversed(range(n - 1)):
            y[t] += decay[t] * y[t + 1]
        return y
    # At least one column of padding, and odd: rows a power of two apart would share cache sets.
    blocks = (n // SCAN_BLOCK + 1) | 1
    # [SCAN_BLOCK, blocks]: a step of the scan is one contiguous row.
    a, y = x.new_zeros((2, SCAN_BLOCK, blocks))
    full = n // SCAN_BLOCK
    for columns, flat in ((a.T, decay), (y.T, x)):
        columns[:full] = flat[: full * SCAN_BLOCK].view(full, SCAN_BLOCK)
        columns[full, : n - full * SCAN_BLOCK] = flat[full * SCAN_BLOCK :]
    for t in reversed(range(SCAN_BLOCK - 1)):
        y[t].addcmul_(a[t], y[t + 1])
        a[t].mul_(a[t + 1])
    first = _reverse_scan(a[0], y[0])  # y at the first token of each block, carries included
    carry = torch.cat([first[1:], first.new_zeros(1)])
    y.addcmul_(a, carry)
    return y.T.reshape(-1)[:n]


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    gamma: float | Tensor = 1.0,
    lam: float | Tensor = 0.95,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(advantages, returns) as `gae_loop` gives them, with no loop over time or over the batch.

    The tokens that count are cut out of their gaps and laid end to end; with the decay set to 0
    behind each sequence the whole batch is one linear recurrence. So a row with gaps gives the same
    bits as the row without them, and packed rows the same bits as padded ones. Sums run in fp64.

    Args:
        rewards, values, mask: [B, T], or [total] with `cu_seqlens` [B + 1] int32 or int64.
        gamma, lam: floats or [B]. bootstrap: [B], the value behind a sequence's last token.
    """
    dtype = accumulation_dtype(values.dtype)
    sequence = sequence_index(values, cu_seqlens)
    valid = torch.ones_like(sequence, dtype=torch.bool) if mask is None else mask.reshape(-1)
    index = valid.nonzero().squeeze(-1)
    sequence = sequence.index_select(0, index)
    r, v = (x.reshape(-1).index_select(0, index).double() for x in (rewards, values))
    is_last = torch.ones_like(sequence, dtype=torch.bool)
    torch.ne(sequence[1:], sequence[:-1], out=is_last[:-1])
    next_value = torch.cat([v[1:], v.new_zeros(1)])[: v.numel()]
    next_value[is_last] = 0.0 if bootstrap is None else bootstrap.double()[sequence[is_last]]
    discount = gamma.double()[sequence] if isinstance(gamma, Tensor) else gamma
    smoothing = lam.double()[sequence] if isinstance(lam, Tensor) else lam
    decay = torch.ones_like(v).mul_(discount * smoothing).masked_fill_(is_last, 0.0)
    delta = next_value.mul_(discount).add_(r).sub_(v)
    if not delta.sum().isfinite():  # one read; to look at each entry first takes five passes
        broken = ~delta.isfinite()
        # 0·NaN is NaN: the scan would carry it over the end of a sequence into the one before.
        found = _reverse_scan(decay, delta.masked_fill(broken, 0.0))
        reached = _reverse_scan((~is_last).double(), broken.double()) > 0
        found.masked_fill_(reached, math.nan)
    else:
        found = _reverse_scan(decay, delta)
    advantages, returns = (values.new_zeros(values.numel(), dtype=dtype) for _ in range(2))
    advantages.index_copy_(0, index, found.to(dtype))
    returns.index_copy_(0, index, found.add_(v).to(dtype))
    return advantages.view(values.shape), returns.view(values.shape)


def sequence_index(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """The sequence that each token of [B, T] or packed [total] belongs to: flat int64."""
    if cu_seqlens is None:
        batch, length = x.shape
        return torch.arange(batch, device=x.device).repeat_interleave(length)
    lengths = cu_seqlens.diff().long()
    return torch.arange(lengths.numel(), device=x.device).repeat_interleave(
        lengths, output_size=x.numel()
    )


def whitening_moments(x: Tensor, mask: Tensor | None = None) -> Tensor:
    """(count, Σx, Σx²) over the mask, fp64 [3]: they add up over ranks before `whiten`."""
    kept = (x if mask is None else x[mask]).double().reshape(-1)
    count = torch.full((), kept.numel(), dtype=torch.float64, device=x.device)
    return torch.stack([count, kept.sum(), (kept * kept).sum()])


WHITEN_EPSILON = 1e-8
"""Added to the variance (Ziegler et al. 2019)."""


def whiten(
    x: Tensor,
    mask: Tensor | None = None,
    *,
    shift_mean: bool = True,
    moments: Tensor | None = None,
) -> Tensor:
    """(x − mean)·rsqrt(var + 1e-8) over the mask, Bessel-corrected; 0 where masked.

    `shift_mean=False` puts the mean back. `moments` are those of the whole global batch.
    """
    count, total, squares = whitening_moments(x, mask) if moments is None else moments
    mean = total / count.clamp(min=1)
    variance = ((squares - count * mean * mean) / (count - 1).clamp(min=1)).clamp(min=0)
    white = (x.double() - mean) * torch.rsqrt(variance + WHITEN_EPSILON)
    if not shift_mean:
        white = white + mean
    if mask is not None:
        white = torch.where(mask, white, 0.0)
    return white.to(accumulation_dtype(x.dtype))


class Advantages(NamedTuple):
    """advantages, returns: like the values, fp32, 0 where masked; kl [B] fp32, nats, the sum over
    each sequence; moments [3] fp64 of the advantages before whitening."""

    advantages: Tensor
    returns: Tensor
    kl: Tensor
    moments: Tensor


def shaped_advantages(
    scores: Tensor,
    values: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor | None,
    mask: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    kl_coef: float = 0.0,
    kl_estimator: str = "k1",
    gamma: float | Tensor = 1.0,
    lam: float | Tensor = 0.95,
    bootstrap: Tensor | None = None,
    score_clip: float | None = None,
    token_rewards: Tensor | None = None,
) -> Advantages:
    """Shaped rewards r_t = −β·KL_t, plus the score on the last token, then GAE; no whitening.

    Args:
        scores: [B]; values, logprobs, ref_logprobs, mask, token_rewards: [B, T] or packed [total].
        score_clip: scores are clamped to ±score_clip first.
        token_rewards: added to the shaped rewards (partial or per-step rewards).

    Source: Ziegler et al. 2019, eq. 2; Stiennon et al. 2020, section 3.4.
    """
    dtype = accumulation_dtype(values.dtype)
    scores = scores.to(dtype)
    if score_clip is not None:
        scores = scores.clamp(-score_clip, score_clip)
    token_kl = torch.zeros_like(values, dtype=dtype)
    if ref_logprobs is not None:
        token_kl = sampled_kl(logprobs.to(dtype) - ref_logprobs.to(dtype), kl_estimator)[0]
        token_kl = torch.where(mask, token_kl, 0.0)
    rewards = -kl_coef * token_kl
    if token_rewards is not None:
        rewards = rewards + torch.where(mask, token_rewards.to(dtype), 0.0)
    sequence = sequence_index(values, cu_seqlens)
    index = mask.reshape(-1).nonzero().squeeze(-1)
    owner = sequence[index]
    is_last = torch.ones_like(owner, dtype=torch.bool)
    is_last[:-1] = owner[1:] != owner[:-1]
    flat = rewards.reshape(-1).clone()
    flat[index[is_last]] += scores[owner[is_last]]
    # Differences of one running sum, in fp64: the same for both layouts, since masked tokens add 0,
    # and an indexed add would be atomic on a GPU.
    running = torch.nn.functional.pad(token_kl.double().reshape(-1).cumsum(0), (1, 0))
    if cu_seqlens is None:
        ends = torch.arange(values.shape[0] + 1, device=values.device) * values.shape[1]
    else:
        ends = cu_seqlens.long()
    kl = running[ends].diff().to(dtype)
    advantages, returns = gae(
        flat.view(values.shape),
        values,
        mask,
        cu_seqlens=cu_seqlens,
        gamma=gamma,
        lam=lam,
        bootstrap=bootstrap,
    )
    return Advantages(advantages, returns, kl, whitening_moments(advantages, mask))
