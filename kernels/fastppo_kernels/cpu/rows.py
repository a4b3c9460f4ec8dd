"""PPO's loss from logits on a CPU: compiled loops that read each row from memory once.

The operations, names and operands are those of `fastppo_kernels.definition`. For one row of
logits x, sampled token y, scores z (scaled and capped), m = max z and c = 1/T (times `logit_scale`
without a cap):

    t_j     = (z_j − m)·c         shifted before scaling, so an offset costs no digits
    S       = Σ_j e^{t_j}         the token's term is added last, so 1 − p_y keeps its digits
    μ       = Σ_j e^{t_j}·t_j/S
    logprob = t_y − log S         entropy = log S − μ
    gap_j   = t_j − r_j           r: the shifted scores of the reference
    KL      = γ − log S + log S_ref     with γ = Σ_j e^{t_j}·gap_j/S

and with the loss's derivatives g_l, g_h and g_k by logprob, entropy and KL,

    dz_j = (1/T)·{ g_l·[j=y] + p_j·( −g_l − g_h·(t_j − μ) + g_k·(gap_j − γ) ) }

A row takes three sweeps through the caches: its maximum; the sums of e^t, which is kept; and
e^t·(a + b·t), which gives the gradient, optionally in place. A backward pass has the statistics and
takes only the last sweep, with e^t computed again. Sweeps work on blocks that fit in the L1 cache.
The exponential is a polynomial, so that everything compiles to vector instructions; it is shorter
for 16-bit logits. Sums are carried in fp32 lanes and joined in fp64.

Rows are distributed over as many threads as torch has; the bits do not depend on their number. Rows
of weight 0 are not read. fp64 logits use the torch backend.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import types
from numba.extending import overload
from torch import Tensor

from fastppo_kernels.cpu.threads import (
    CLEARANCE,
    EXACT,
    IN_LANES,
    compiled,
    fresh,
    in_threads,
    kernel,
)
from fastppo_kernels.records import (
    DPPO_EPSILON,
    LOG_RATIO_LIMIT,
    LOWEST,
    RATIO_MAX,
    SUMS,
    Objective,
    PerToken,
    PPORows,
    Softmax,
    StatsGradients,
    StatsRows,
    Sums,
)

READS_VALUES = True
"""The host reads values between operations, which is free on a CPU: rows of weight 0 and rows
without a gradient skip the lm-head's GEMMs."""

GEMM_ROWS = 8
"""Rows with a gradient are padded to a multiple of this: an odd number makes the GEMM of dW a
seventh slower (255 rows against 252 or 256; sgemm, V = 32000, H = 1024)."""

# Python's numbers are fp64, and would promote a loop to fp64.
F32 = np.float32
I32 = np.int32
U32 = np.uint32
ZERO = F32(0)
ONE = F32(1)
FOUR = F32(4)
NAN = F32(math.nan)
LOWEST_32 = F32(LOWEST)
LOG2_E = F32(math.log2(math.e))
LN_2_HIGH = F32(0.693359375)  # n·LN_2_HIGH is exact
LN_2_LOW = F32(math.log(2) - 0.693359375)
ROUNDER = F32(1.5 * 2**23)  # x + ROUNDER holds the integer nearest to x in its last bits
UNDERFLOW = F32(-87.0)  # below it e^t < 2e-38 is treated as 0
LOWEST_NATS = F32(-174.0)  # replaces t where e^t is 0; any finite number
E2, E3, E4, E5, E6 = (F32(1 / math.factorial(n)) for n in range(2, 7))
LN_2 = F32(math.log(2))
LOWEST_BITS = F32(-127)
B1, B2, B3, B4, B5 = (F32(x) for x in (0.69314686, 0.24022238, 0.05550893, 0.0096717, 0.00132187))
"""Least-squares fit of (2^r − 1)/r on Chebyshev points of |r| ≤ ½; 2^r has an error of 1.1e-7."""

TANH_NEAR = F32(0.625)
TANH_3, TANH_5, TANH_7, TANH_9, TANH_11 = (
    F32(x) for x in (-0.33333329, 0.13332782, -0.0538525, 0.02100364, -0.00610495)
)
"""Least-squares fit of (tanh(x)/x − 1)/x² on Chebyshev points of x² in [0, 0.625²]. Error below
2e-8."""

BLOCK = 2048
"""Columns per block: 8 KiB in fp32. Sums of a block are fp32, and joined in fp64."""

CLIP, CISPO, SAPO, DIS, DPPO_TV, DPPO_KL = range(6)
POLICY_TERMS: dict[str, Any] = {
    "clip": CLIP,
    "cispo": CISPO,
    "sapo": SAPO,
    "dis": DIS,
    "dppo_tv": DPPO_TV,
    "dppo_kl": DPPO_KL,
}

K1, K2, K3, FULL = range(1, 5)
ESTIMATORS: dict[str, Any] = {"k1": K1, "k2": K2, "k3": K3, "full": FULL}


class _Rows(NamedTuple):
    """[N, V] or [B, T, V]: row i starts at (i // inner)·outer_stride + (i % inner)·stride.

    bf16 is viewed as int16 and fp16 as uint16, which numba has; the loops tell them apart by that.
    """

    memory: Any
    vocab: int
    inner: int
    outer_stride: int
    stride: int


class _Softmax(NamedTuple):
    """A `Softmax` for the loops.

    None has a type of its own in numba: code for a missing soft-cap or reference is not compiled.

    temperatures: [N], or empty.
    shifted_scale: times 1/T, the factor of the shifted scores; the logit scale without a cap.
    unit: of the maximum in a `StatsRows`: the soft-cap, or 1.
    """

    temperature: float
    temperatures: Any
    logit_scale: float
    softcap: float | None
    shifted_scale: float
    unit: float


class _Room(NamedTuple):
    """The buffers of a block.

    logits: [BLOCK], a copy in the logits' dtype, since the gradient may overwrite them.
    scores: [2, BLOCK] fp32, capped scores of policy and reference.
    exponentials: [V] fp32, e^t of a row for its gradient, or None.
    """

    logits: Any
    scores: Any
    exponentials: Any


class _Statistics(NamedTuple):
    """The statistics of a row, fp64 except the maxima; those of a missing reference are 0."""

    maximum: float
    ref_maximum: float
    shifted_token: float  # t_y
    token_gap: float  # gap_y − γ
    total: float  # S
    log_total: float
    ref_log_total: float
    mean: float  # μ
    mean_gap: float  # γ
    p_others: float  # 1 − p_y
    logprob: float
    entropy: float
    kl: float


# -------------------------------------------------------------------------------------- one number


@compiled
def _bits(value):
    return F32(value).view(I32)


@compiled
def _from_bits(bits):
    return I32(bits).view(F32)


@compiled
def _exp(t):
    """e^t for t ≤ 0, fp32, with a relative error of 1e-7; NaN stays NaN."""
    rounded = t * LOG2_E + ROUNDER
    n = rounded - ROUNDER
    r = (t - n * LN_2_HIGH) - n * LN_2_LOW
    p = E6 * r + E5
    p = p * r + E4
    p = p * r + E3
    p = p * r + E2
    p = p * r + ONE
    p = p * r + ONE
    power = I32((F32(rounded).view(I32) + I32(127)) << I32(23))
    return ZERO if t < UNDERFLOW else p * I32(power).view(F32)


@compiled
def _exp2(b):
    """2^b for −127 ≤ b ≤ 0, fp32, with a relative error of 3e-7; 0 at −127.

    NaN stays NaN if it was converted from 16 bits.
    """
    rounded = b + ROUNDER
    r = b - (rounded - ROUNDER)
    p = B5 * r + B4
    p = p * r + B3
    p = p * r + B2
    p = p * r + B1
    p = p * r + ONE
    return _from_bits(_bits(p) + I32(_bits(rounded) << I32(23)))


@compiled
def _tanh(u):
    """tanh u from e^{−2|u|}, or from an odd polynomial near 0."""
    e = _exp(-abs(u) - abs(u))
    far = (ONE - e) / (ONE + e)
    square = u * u
    series = TANH_11 * square + TANH_9
    series = series * square + TANH_7
    series = series * square + TANH_5
    series = series * square + TANH_3
    near = u + u * square * series
    far = -far if u < ZERO else far
    return near if abs(u) < TANH_NEAR else far


@compiled
def _from_bf16(bits):
    return I32(I32(bits) << I32(16)).view(F32)


@compiled
def _to_bf16(value):
    """Round to nearest, ties to even."""
    bits = F32(value if value == value else NAN).view(U32)  # a NaN without bits that would carry
    return np.int16(U32(bits + U32(0x7FFF) + ((bits >> U32(16)) & U32(1))) >> U32(16))


@compiled
def _from_fp16(bits):
    magnitude = U32((U32(bits) & U32(0x7FFF)) << U32(13))
    # 2¹¹² changes the exponent's bias, for subnormal numbers as well.
    value = U32(magnitude).view(F32) * F32(2.0**112)
    special = U32(magnitude | U32(0x7F800000)).view(F32)  # infinity or NaN
    value = special if magnitude >= U32(0x0F800000) else value
    return -value if U32(bits) & U32(0x8000) else value


@compiled
def _to_fp16(value):
    """Round to nearest, ties to even."""
    bits = F32(value).view(U32)
    magnitude = U32(bits & U32(0x7FFFFFFF))
    size = U32(magnitude).view(F32)
    # Below 2⁻¹⁴, adding ½ rounds to a multiple of 2⁻²⁴, counted by the last bits of the sum.
    small = U32(F32(size + F32(0.5)).view(U32) - U32(0x3F000000))
    rounded = U32(U32(magnitude + U32(0xC8000FFF) + ((magnitude >> U32(13)) & U32(1))) >> U32(13))
    half = small if size < F32(2.0**-14) else rounded
    half = U32(0x7C00) if size >= F32(65520.0) else half
    half = U32(0x7E00) if value != value else half
    return np.uint16(half | U32((bits >> U32(16)) & U32(0x8000)))


# ------------------------------------------------------------------------------ sweeps over one row


@compiled
def _row(rows, i):
    start = (i // rows.inner) * rows.outer_stride + (i % rows.inner) * rows.stride
    return rows.memory[start : start + rows.vocab]


def _wide(logit):
    """Convert a logit to fp32."""


@overload(_wide, jit_options={"fastmath": set(EXACT)})
def _wide_of(logit):
    if isinstance(logit, types.Float):
        return lambda logit: logit
    convert = _from_bf16 if logit.signed else _from_fp16
    return lambda logit: convert(logit)


def _store(out, j, value):
    """Store an fp32 value in the gradient."""


@overload(_store, jit_options={"fastmath": set(EXACT)})
def _store_of(out, j, value):
    if isinstance(out.dtype, types.Float):
        convert = F32
    else:
        convert = _to_bf16 if out.dtype.signed else _to_fp16

    def store(out, j, value):
        out[j] = convert(value)

    return store


@compiled
def clear(out):
    """Set a row to 0. Assigning to a slice takes a second longer to compile."""
    for j in range(len(out)):
        out[j] = 0


@compiled
def _capped(x, softcap, logit_scale):
    """Return the score of an fp32 logit. Without a soft-cap the scale comes after the shift."""
    if softcap is None:
        return x
    return F32(softcap) * _tanh(x * F32(logit_scale / softcap))


def _scores(x, block, softcap, logit_scale):
    """Return z of a block: the logits, or the capped scores in the buffer."""


@overload(_scores, jit_options={"fastmath": set(EXACT), "forceinline": True})
def _scores_of(x, block, softcap, logit_scale):
    if isinstance(softcap, types.NoneType):
        return lambda x, block, softcap, logit_scale: x

    def scores(x, block, softcap, logit_scale):
        for j in range(len(x)):
            block[j] = _capped(_wide(x[j]), softcap, logit_scale)
        return block[: len(x)]

    return scores


@compiled
def _score(x, j, softmax):
    return _capped(_wide(x[j]), softmax.softcap, softmax.logit_scale)


def _largest(x):
    """Return the largest logit of a row in fp32. A NaN without a sign bit is the largest.

    As integers, with the magnitude bits of negative numbers inverted, floats have the same order,
    and the maximum of integers is a vector instruction that NaN does not disturb.
    """


@overload(_largest, jit_options={"fastmath": set(EXACT)})
def _largest_of(x):
    if isinstance(x.dtype, types.Float):
        integer = I32
        sign = I32(31)
        bits_of = _bits
        number_of = _from_bits
    else:
        integer = np.int16
        sign = np.int16(15)
        bits_of = np.int16
        number_of = _from_bf16 if x.dtype.signed else _from_fp16
    least = integer(np.iinfo(integer).min)
    magnitude = integer(np.iinfo(integer).max)

    def largest(x):
        largest = least  # not ~magnitude, which numba widens
        for j in range(len(x)):
            bits = bits_of(x[j])
            key = integer(bits ^ ((bits >> sign) & magnitude))
            largest = key if key > largest else largest
        return number_of(integer(largest ^ ((largest >> sign) & magnitude)))

    return largest


@compiled
def _maximum(x, softmax):
    """Return the largest score."""
    return _capped(_largest(x), softmax.softcap, softmax.logit_scale)


def _units(z):
    """(exponential, lowest t, nats per unit of t, units per nat). 16-bit logits have t in bits."""
    if isinstance(z.dtype, types.Float):
        return _exp, LOWEST_NATS, ONE, ONE
    return _exp2, LOWEST_BITS, LN_2, LOG2_E


def _block_sums(z, maximum, scale, exponentials):
    """Return (Σ e^t, Σ e^t·t) of a block, and write e^t unless `exponentials` is None."""


@overload(_block_sums, jit_options={"fastmath": set(IN_LANES), "forceinline": True})
def _block_sums_of(z, maximum, scale, exponentials):
    power, lowest, nats, per_nat = _units(z)

    def block_sums(z, maximum, scale, exponentials):
        scale = scale * per_nat
        mass = ZERO
        moment = ZERO
        for j in range(len(z)):
            t = (_wide(z[j]) - maximum) * scale
            t = lowest if t < lowest else t
            exponential = power(t)
            if exponentials is not None:
                exponentials[j] = exponential
            mass += exponential
            moment += exponential * t
        return mass, moment * nats

    return block_sums


@compiled
def _stop(start, token, size):
    """Return the end of the block at `start`: before the token if it is in the block.

    The next block starts after the token, so that the kernel contains the block loop once.
    """
    stop = min(start + BLOCK, size)
    return token if start <= token < stop else stop


@compiled
def _part(exponentials, start, stop):
    return None if exponentials is None else exponentials[start:stop]


@compiled
def _sums(x, block, token, maximum, scale, softmax, exponentials):
    """Return (Σ e^t, Σ e^t·t) of all columns except the token, fp64."""
    mass = 0.0
    moment = 0.0
    start = 0
    while start < len(x):
        stop = _stop(start, token, len(x))
        z = _scores(x[start:stop], block, softmax.softcap, softmax.logit_scale)
        of_block = _block_sums(z, maximum, scale, _part(exponentials, start, stop))
        mass += of_block[0]
        moment += of_block[1]
        start = stop + 1 if stop == token else stop
    return mass, moment


@compiled
def _gap(z, ref_z, row, scale):
    """Return t − r of one column.

    Close to the reference, the difference of the scores is exact where that of the shifted and
    scaled scores is not. Columns at −inf keep their replacements.
    """
    t = (z - row.maximum) * scale
    r = (ref_z - row.ref_maximum) * scale
    t = LOWEST_NATS if t < LOWEST_NATS else t
    r = LOWEST_32 if r < LOWEST_32 else r
    near = ((z - ref_z) - (row.maximum - row.ref_maximum)) * scale
    return t - r if t <= LOWEST_NATS or r <= LOWEST_32 else near


class _Maxima(NamedTuple):
    maximum: float
    ref_maximum: float


def _block_gap_sums(z, ref_z, maxima, scale):
    """Return (Σ e^t·gap, the number of columns that only the reference rules out) of a block."""


@overload(_block_gap_sums, jit_options={"fastmath": set(IN_LANES), "forceinline": True})
def _block_gap_sums_of(z, ref_z, maxima, scale):
    power, lowest, _, per_nat = _units(z)

    def block_gap_sums(z, ref_z, maxima, scale):
        total = ZERO
        ruled_out = ZERO
        for j in range(len(z)):
            t = (_wide(z[j]) - maxima.maximum) * (scale * per_nat)
            exponential = power(lowest if t < lowest else t)
            ref = _wide(ref_z[j])
            total += exponential * _gap(_wide(z[j]), ref, maxima, scale)
            is_out = (ref - maxima.ref_maximum) * scale <= LOWEST_32
            ruled_out += ONE if is_out and exponential > ZERO else ZERO
        return total, ruled_out

    return block_gap_sums


@compiled
def _gap_sums(x, ref_x, blocks, token, maxima, scale, softmax):
    """Return the `_block_gap_sums` of a row without the token, fp64."""
    total = 0.0
    ruled_out = 0.0
    start = 0
    while start < len(x):
        stop = _stop(start, token, len(x))
        z = _scores(x[start:stop], blocks[0], softmax.softcap, softmax.logit_scale)
        ref_z = _scores(ref_x[start:stop], blocks[1], softmax.softcap, softmax.logit_scale)
        of_block = _block_gap_sums(z, ref_z, maxima, scale)
        total += of_block[0]
        ruled_out += of_block[1]
        start = stop + 1 if stop == token else stop
    return total, ruled_out


@compiled
def _cap_slope(x, softcap, logit_scale):
    """1 − tanh² of a capped score, from the logit: near the cap the score has no digits for it."""
    if softcap is None:
        return ONE
    u = abs(x * F32(logit_scale / softcap))
    decay = _exp(-u - u)
    return FOUR * decay / ((ONE + decay) * (ONE + decay))


class _Factors(NamedTuple):
    """The gradient e^t·(constant + linear·t + of_gap·gap)."""

    constant: float
    linear: float
    of_gap: float


def _block_gradient(x, z, ref_z, out, maxima, scale, factors, softmax, exponentials):
    """Write dL/dx of a block, without the gap if `ref_z` is None or empty.

    e^t is computed if `exponentials` is None.

    `out` must not alias the inputs, or there would be no vector instructions.
    """


@overload(_block_gradient, jit_options={"fastmath": set(EXACT), "forceinline": True})
def _block_gradient_of(x, z, ref_z, out, maxima, scale, factors, softmax, exponentials):
    power, lowest, nats, per_nat = _units(z)

    def block_gradient(x, z, ref_z, out, maxima, scale, factors, softmax, exponentials):
        linear = factors.linear * nats
        for j in range(len(out)):
            t = (_wide(z[j]) - maxima.maximum) * (scale * per_nat)
            t = lowest if t < lowest else t
            factor = factors.constant + linear * t
            if ref_z is not None and len(ref_z):
                factor += factors.of_gap * _gap(_wide(z[j]), _wide(ref_z[j]), maxima, scale)
            slope = _cap_slope(_wide(x[j]), softmax.softcap, softmax.logit_scale)
            exponential = power(t) if exponentials is None else exponentials[j]
            _store(out, j, exponential * factor * slope)

    return block_gradient


@compiled
def _copied(x, room):
    for j in range(len(x)):
        room[j] = x[j]
    return room[: len(x)]


@compiled
def _reference_scores(ref_rows, i, start, stop, block, softmax):
    if ref_rows is None:
        return None
    ref_x = _row(ref_rows, i)[start:stop]
    return _scores(ref_x, block, softmax.softcap, softmax.logit_scale)


# ------------------------------------------------------------------------------------- whole rows


@compiled
def _scales(softmax, i):
    """Return (factor of the shifted scores, dt/dx without the cap's slope)."""
    temperature = softmax.temperature
    if len(softmax.temperatures):
        temperature = softmax.temperatures[i]
    return softmax.shifted_scale / temperature, softmax.logit_scale / temperature


@compiled
def _total(x, block, token, scale, softmax, exponentials):
    """Return (m, t_y, Σ e^t of the other columns, Σ e^t·t, log Σ e^t)."""
    maximum = _maximum(x, softmax)
    factor = F32(scale)
    others, moment = _sums(x, block, token, maximum, factor, softmax, exponentials)
    shifted = np.float64((_score(x, token, softmax) - maximum) * factor)
    shifted = LOWEST if shifted < LOWEST else shifted
    exponential = math.exp(shifted)
    moment += exponential * shifted
    return maximum, shifted, others, moment, math.log1p(others + (exponential - 1.0))


@compiled
def _statistics(x, ref_rows, room, token, scale, softmax, i):
    blocks = room.scores
    maximum, shifted, others, moment, log_total = _total(
        x, blocks[0], token, scale, softmax, room.exponentials
    )
    exponential = math.exp(shifted)
    total = others + exponential
    logprob = shifted - log_total
    if exponential > others:
        logprob = -math.log1p(others / exponential)
    mean = moment / total
    ref_maximum = maximum
    ref_log_total = 0.0
    token_gap = 0.0
    mean_gap = 0.0
    kl = 0.0
    if ref_rows is not None:
        ref_x = _row(ref_rows, i)
        ref_maximum, _, _, _, ref_log_total = _total(ref_x, blocks[1], token, scale, softmax, None)
        maxima = _Maxima(maximum, ref_maximum)
        factor = F32(scale)
        gaps, ruled_out = _gap_sums(x, ref_x, blocks, token, maxima, factor, softmax)
        z = _score(x, token, softmax)
        ref_z = _score(ref_x, token, softmax)
        token_gap = np.float64(_gap(z, ref_z, maxima, factor))
        if (ref_z - ref_maximum) * factor <= LOWEST_32 and exponential > 0:
            ruled_out += ONE
        mean_gap = np.inf if ruled_out > 0 else (gaps + exponential * token_gap) / total
        kl = mean_gap - log_total + ref_log_total
    return _Statistics(
        maximum=maximum,
        ref_maximum=ref_maximum,
        shifted_token=shifted,
        token_gap=0.0 if shifted <= LOWEST else token_gap - mean_gap,
        total=total,
        log_total=log_total,
        ref_log_total=ref_log_total,
        mean=mean,
        mean_gap=mean_gap,
        p_others=others / total,
        logprob=logprob,
        entropy=log_total - mean,
        kl=kl,
    )


@compiled
def _row_gradient(x, ref_rows, room, of_row, grad, token, by, softmax, i):
    """Write dL/dx of a row from its statistics and by = (g_l, g_h, g_k). `grad` may alias `x`."""
    by_logprob, by_entropy, by_kl = by
    scale, slope = _scales(softmax, i)
    probability = math.exp(of_row.logprob)
    per_row = slope / of_row.total
    constant = by_entropy * of_row.mean - by_logprob
    at_token = by_logprob * of_row.p_others
    at_token += probability * by_entropy * (of_row.mean - of_row.shifted_token)
    if by_kl != 0:
        constant -= by_kl * of_row.mean_gap
        at_token += probability * by_kl * of_row.token_gap
    maxima = _Maxima(of_row.maximum, of_row.ref_maximum)
    factors = _Factors(
        constant=F32(constant * per_row),
        linear=F32(-by_entropy * per_row),
        of_gap=F32(by_kl * per_row),
    )
    of_token = _cap_slope(_wide(x[token]), softmax.softcap, softmax.logit_scale)
    of_token = F32(slope * at_token) * of_token
    for start in range(0, len(x), BLOCK):
        stop = min(start + BLOCK, len(x))
        logits = _copied(x[start:stop], room.logits)
        z = _scores(logits, room.scores[0], softmax.softcap, softmax.logit_scale)
        # An infinite KL that is only reported does not affect the gradient.
        ref_stop = start if by_kl == 0 else stop
        ref_z = _reference_scores(ref_rows, i, start, ref_stop, room.scores[1], softmax)
        out = grad[start:stop]
        exponentials = _part(room.exponentials, start, stop)
        _block_gradient(logits, z, ref_z, out, maxima, F32(scale), factors, softmax, exponentials)
        if start <= token < stop:
            _store(out, token - start, of_token)


@compiled
def _k3(difference):
    """e^{−d} − 1 + d with a clamped exponent."""
    return math.expm1(min(max(-difference, -LOG_RATIO_LIMIT), LOG_RATIO_LIMIT)) + difference


@compiled
def sampled_kl(difference, estimator):
    """Return (the estimate from d = logprob − ref_logprob, its derivative by the logprob).

    NaN for a number that is no estimator's.
    """
    if estimator == K1:
        return difference, 1.0
    if estimator == K2:
        return 0.5 * difference * difference, difference
    if estimator == K3:
        is_inside = abs(difference) <= LOG_RATIO_LIMIT
        return _k3(difference), -math.expm1(-difference) if is_inside else 1.0
    return math.nan, math.nan


@compiled
def _bounded_variable(logprob, old_logprob, ratio, loss):
    """Return the variable that the clip range bounds; see `definition.bounded_variable`."""
    if loss.policy_term != DPPO_TV and loss.policy_term != DPPO_KL:
        return ratio
    p = math.exp(logprob)
    q = math.exp(old_logprob)
    if loss.policy_term == DPPO_TV:
        return 1.0 + (p - q)
    others = math.log((1.0 - q + DPPO_EPSILON) / (1.0 - p + DPPO_EPSILON))
    kl = q * (old_logprob - logprob) + (1.0 - q) * others
    return 1.0 - kl if p < q else 1.0 + kl


@compiled
def _policy_term(logprob, ratio, bounded, advantage, is_clamped, loss):
    """Return (policy term, its derivative by the logprob); see `definition.policy_term`.

    NaN for a number that is no term's.
    """
    unclipped = ratio * advantage
    if loss.policy_term == CLIP:
        clipped = min(max(ratio, loss.lowest_ratio), loss.highest_ratio) * advantage
        is_active = not unclipped > clipped
        surrogate = unclipped if is_active else clipped
        if advantage < 0 and surrogate < loss.dual_clip * advantage:
            surrogate = loss.dual_clip * advantage
            is_active = False
        return -surrogate, -unclipped if is_active and not is_clamped else 0.0
    if loss.policy_term == SAPO:
        tau = loss.tau_positive if advantage > 0 else loss.tau_negative
        x = tau * (ratio - 1.0)
        e = math.exp(-abs(x))
        share = 1.0 / (1.0 + e)
        gate = e * share if x < 0 else share
        slope = 4.0 * e * share * share * unclipped
        return -4.0 / tau * gate * advantage, 0.0 if is_clamped else -slope
    coefficient = math.nan
    if loss.policy_term == CISPO:
        coefficient = min(max(ratio, loss.lowest_ratio), loss.highest_ratio)
    above = bounded > loss.highest_ratio
    below = bounded < loss.lowest_ratio
    if loss.policy_term == DIS:
        coefficient = 0.0 if above or below else ratio
    elif loss.policy_term == DPPO_TV or loss.policy_term == DPPO_KL:
        coefficient = 0.0 if (above if advantage > 0 else below) else ratio
    by_logprob = -coefficient * advantage
    return by_logprob * logprob, by_logprob


@compiled
def _token_loss(logprob, full_kl, token, loss, i):
    """Return (policy term·importance weight, ratio, KL, w·(g_l, g_h, g_k)) of one token.

    A derivative is 0 where a clip is active or the ratio's exponent is clamped. Comparisons treat
    NaN as active, so that it reaches the gradient and is noticed.
    """
    advantage = token.advantages[i]
    weight = token.weights[i]
    difference = logprob - token.old_logprobs[i]
    is_clamped = abs(difference) > LOG_RATIO_LIMIT
    ratio = math.exp(min(max(difference, -LOG_RATIO_LIMIT), LOG_RATIO_LIMIT))
    ratio = difference if difference != difference else ratio
    bounded = _bounded_variable(logprob, token.old_logprobs[i], ratio, loss)
    policy, by_logprob = _policy_term(logprob, ratio, bounded, advantage, is_clamped, loss)
    importance = token.importance_weights[i] if len(token.importance_weights) else 1.0
    policy *= importance
    by_logprob *= importance
    kl = 0.0
    by_kl = 0.0
    if loss.kl_estimator == FULL:
        kl = full_kl
        by_kl = weight * loss.kl_coef
    elif len(token.ref_logprobs):
        distance = logprob - token.ref_logprobs[i]
        kl, slope = sampled_kl(distance, loss.kl_estimator)
        if loss.kl_ratio_weighted:
            # For k3, KL + slope is d; the sum would have no digits far below the reference.
            is_k3 = loss.kl_estimator == K3 and abs(distance) <= LOG_RATIO_LIMIT
            both = distance if is_k3 else kl + slope
            slope = ratio * (slope if is_clamped else both)
        if loss.kl_coef != 0:
            by_logprob += loss.kl_coef * slope
    by = (weight * by_logprob, -loss.entropy_coef * weight, by_kl)
    return policy, ratio, kl, by


@compiled
def _terms(logprob, entropy, kl, policy, ratio, token, loss, i):
    """Return a token's contribution to each of `SUMS`, and its ratio for the maximum."""
    weight = token.weights[i]
    advantage = token.advantages[i]
    total = policy - loss.entropy_coef * entropy
    if loss.kl_coef != 0:
        total += loss.kl_coef * (ratio * kl if loss.kl_ratio_weighted else kl)
    bounded = _bounded_variable(logprob, token.old_logprobs[i], ratio, loss)
    above = bounded > loss.highest_ratio
    below = bounded < loss.lowest_ratio
    return Sums(
        loss=weight * total,
        policy_loss=weight * policy,
        tokens=1.0,
        entropy=entropy,
        kl=kl,
        approx_kl=_k3(token.old_logprobs[i] - logprob),
        ratio=ratio,
        ratio_squared=ratio * ratio,
        outside=np.float64(above or below),
        above_positive=np.float64(above and advantage > 0),
        below_positive=np.float64(below and advantage > 0),
        above_negative=np.float64(above and advantage < 0),
        below_negative=np.float64(below and advantage < 0),
        dual_clipped=np.float64(advantage < 0 and ratio > loss.dual_clip),
        ratio_max=ratio,
    )


# -------------------------------------------------------------------------------- loops over rows


@compiled
def _saved_statistics(x, stats, token, softmax, i):
    """Restore the statistics of a row from the `StatsRows` of the forward pass."""
    maximum = F32(stats.normalizer[i, 0] * softmax.unit)
    log_total = np.float64(stats.normalizer[i, 1])
    shifted = np.float64(_score(x, token, softmax) - maximum) * _scales(softmax, i)[0]
    return _Statistics(
        maximum=maximum,
        ref_maximum=F32(stats.ref_normalizer[i, 0] * softmax.unit),
        shifted_token=LOWEST if shifted < LOWEST else shifted,
        token_gap=np.float64(stats.token_gap[i]),
        total=math.exp(log_total),
        log_total=log_total,
        ref_log_total=np.float64(stats.ref_normalizer[i, 1]),
        mean=log_total - stats.entropy[i],
        mean_gap=np.float64(stats.mean_gap[i]),
        p_others=np.float64(stats.p_others[i]),
        logprob=np.float64(stats.logprobs[i]),
        entropy=np.float64(stats.entropy[i]),
        kl=np.float64(stats.kl[i]),
    )


@kernel
def _loss_rows(
    start, stop, room, rows, ref_rows, token, loss, softmax, row_stats, terms, has_gradient, grad
):
    """The loss of rows start to stop.

    For rows of non-zero weight, write (logprob, entropy, KL) to row_stats [3, N], their
    contribution to `SUMS` to terms [N, len(SUMS)], and has_gradient [N]. For all rows, write the
    gradient to `grad` if it has columns.
    """
    for i in range(start, stop):
        if token.weights[i] == 0:
            clear(_row(grad, i))
            continue
        x = _row(rows, i)
        scale = _scales(softmax, i)[0]
        of_row = _statistics(x, ref_rows, room, token.tokens[i], scale, softmax, i)
        logprob = np.float64(F32(of_row.logprob))  # rounded as the caller gets it
        policy, ratio, kl, by = _token_loss(logprob, of_row.kl, token, loss, i)
        row_stats[0, i] = logprob
        row_stats[1, i] = of_row.entropy
        row_stats[2, i] = kl
        of_token = _terms(logprob, of_row.entropy, kl, policy, ratio, token, loss, i)
        for k in range(len(of_token)):
            terms[i, k] = of_token[k]
        has_gradient[i] = grad.vocab > 0 and (by[0] != 0 or by[1] != 0 or by[2] != 0)
        if has_gradient[i]:
            grad_row = _row(grad, i)
            _row_gradient(x, ref_rows, room, of_row, grad_row, token.tokens[i], by, softmax, i)
        else:
            clear(_row(grad, i))


@kernel
def _statistics_rows(start, stop, room, rows, ref_rows, tokens, softmax, row_stats, normalizers):
    """Write (logprob, entropy, KL, 1 − p, γ, gap_y − γ) to row_stats [6, N] and the normalizers to
    [2, N, 2]."""
    for i in range(start, stop):
        x = _row(rows, i)
        of_row = _statistics(x, ref_rows, room, tokens[i], _scales(softmax, i)[0], softmax, i)
        row_stats[0, i] = of_row.logprob
        row_stats[1, i] = of_row.entropy
        row_stats[2, i] = of_row.kl
        row_stats[3, i] = of_row.p_others
        row_stats[4, i] = of_row.mean_gap
        row_stats[5, i] = of_row.token_gap
        # One by one: assigning a tuple to an array takes three seconds to compile.
        normalizers[0, i, 0] = of_row.maximum / softmax.unit
        normalizers[0, i, 1] = of_row.log_total
        if ref_rows is not None:
            normalizers[1, i, 0] = of_row.ref_maximum / softmax.unit
            normalizers[1, i, 1] = of_row.ref_log_total


@kernel
def _gradient_rows(start, stop, room, rows, ref_rows, tokens, softmax, by, stats, grad):
    """Write dL/dx from the results of `_statistics_rows` and by [3, N], the loss's derivatives by
    logprob, entropy and KL."""
    for i in range(start, stop):
        of_loss = (by[0, i], by[1, i], by[2, i])
        if of_loss[0] == 0 and of_loss[1] == 0 and of_loss[2] == 0:
            clear(_row(grad, i))
            continue
        x = _row(rows, i)
        grad_row = _row(grad, i)
        of_row = _saved_statistics(x, stats, tokens[i], softmax, i)
        _row_gradient(x, ref_rows, room, of_row, grad_row, tokens[i], of_loss, softmax, i)


# --------------------------------------------------------------------------------------- operations

NOTHING = np.empty(0)


BITS = {
    torch.float32: torch.float32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.uint16,
}
"""Supported dtypes, and the dtypes that the loops view them as."""


def _rows(x: Tensor | None, like: Tensor) -> _Rows:
    """View [N, V] or [B, T, V] with a dense last axis; None or empty gives rows without columns."""
    if x is None or not x.numel():
        return _Rows(torch.empty(0, dtype=BITS[like.dtype]).numpy(), 0, 1, 0, 0)
    x = x.detach() if x.dtype in BITS else x.detach().float()  # a reference in fp64
    x = x.view(BITS[x.dtype])
    outer, inner, vocab = (1, *x.shape) if x.dim() == 2 else x.shape
    outer_stride, stride = (0, x.stride(0)) if x.dim() == 2 else x.stride()[:2]
    size = (outer - 1) * outer_stride + (inner - 1) * stride + vocab
    return _Rows(x.as_strided((size,), (1,)).numpy(), vocab, inner, outer_stride, stride)


def _doubles(x: Tensor | None) -> Any:
    return NOTHING if x is None else x.detach().double().contiguous().numpy()


def _reference_rows(x: Tensor | None, like: Tensor) -> _Rows | None:
    return None if x is None else _rows(x, like)


def _room(logits: Tensor, *, keeps_exponentials: bool = False) -> _Room:
    """Allocate the buffers of one thread."""
    in_memory = torch.empty(BLOCK, dtype=BITS[logits.dtype])
    exponentials = None
    if keeps_exponentials:
        exponentials = np.empty(CLEARANCE + logits.shape[-1], np.float32)[CLEARANCE:]
    return _Room(in_memory.numpy(), np.empty((2, BLOCK), np.float32), exponentials)


def _numbers(softmax: Softmax) -> _Softmax:
    softcap = softmax.softcap
    return _Softmax(
        temperature=float(softmax.temperature),
        temperatures=_doubles(softmax.temperatures),
        logit_scale=float(softmax.logit_scale),
        softcap=None if softcap is None else float(softcap),
        shifted_scale=float(softmax.logit_scale) if softcap is None else 1.0,
        unit=1.0 if softcap is None else float(softcap),
    )


def _arrays(per_token: PerToken) -> PerToken:
    """Convert to fp64 arrays, empty for None."""
    tokens, *numbers = per_token
    indices: Any = tokens.contiguous().numpy()
    return PerToken(indices, *[_doubles(x) for x in numbers])


def code(field: str, name: str, codes: dict[str, Any]) -> Any:
    """Return the number of a name in the loops, or raise ValueError if they do not have it."""
    if name not in codes:
        raise ValueError(f"{field}: the CPU's loops have {', '.join(codes)}, got {name!r}")
    return codes[name]


def _codes(objective: Objective) -> Objective:
    """Replace names by numbers, a missing dual clip by infinity and missing gates by NaN."""
    return objective._replace(
        dual_clip=math.inf if objective.dual_clip is None else objective.dual_clip,
        kl_estimator=code("kl_estimator", objective.kl_estimator, ESTIMATORS),
        policy_term=code("policy_term", objective.policy_term, POLICY_TERMS),
        tau_positive=math.nan if objective.tau_positive is None else objective.tau_positive,
        tau_negative=math.nan if objective.tau_negative is None else objective.tau_negative,
    )


class _Pass(NamedTuple):
    """The results of a pass over rows, besides the gradient.

    statistics: [3, N] fp32: logprobs, entropy, KL. has_gradient: [N] bool.
    """

    sums: Tensor
    statistics: Tensor
    has_gradient: Tensor


def _loss_pass(
    logits: Tensor,
    per_token: PerToken,
    objective: Objective,
    softmax: Softmax,
    *,
    ref_logits: Tensor | None,
    grad: Tensor | None,
) -> _Pass:
    count = per_token.tokens.numel()
    row_stats = np.zeros((3, count), np.float32)
    terms = np.zeros((count + 1, len(SUMS)))
    has_gradient = np.zeros(count, np.bool_)
    if objective.kl_estimator != "full":
        ref_logits = None
    in_threads(
        _loss_rows,
        count,
        _rows(logits, logits),
        _reference_rows(ref_logits, logits),
        _arrays(per_token),
        _codes(objective),
        _numbers(softmax),
        row_stats,
        terms,
        has_gradient,
        _rows(grad, logits),
        entries=logits.numel(),
        room=functools.partial(_room, logits, keeps_exponentials=True),
    )
    of_tokens = torch.from_numpy(terms)
    sums = of_tokens.sum(0)
    sums[RATIO_MAX] = of_tokens[:, RATIO_MAX].max()  # propagates NaN
    return _Pass(sums.float(), torch.from_numpy(row_stats), torch.from_numpy(has_gradient))


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
    """PPO loss of every row, its statistics, and its gradient in the same pass.

    `inplace` writes dL/dlogits over the logits. `ref_logits` is read only for
    `kl_estimator="full"`.
    Sources: Schulman et al. 2017, eq. 7; Ziegler et al. 2019; Ye et al. 2020 (dual clip).
    """
    grad = (logits if inplace else fresh(logits)) if need_grad else None
    done = _loss_pass(logits, per_token, objective, softmax, ref_logits=ref_logits, grad=grad)
    logprobs, entropy, kl = (x.clone() for x in done.statistics)
    return PPORows(done.sums, logprobs, entropy, kl, grad)


def chunk_ppo_loss(
    logits: Tensor,
    per_token: PerToken,
    objective: Objective,
    softmax: Softmax,
    *,
    ref_logits: Tensor | None = None,
    need_grad: bool = True,
) -> tuple[PPORows, Tensor | None]:
    """`ppo_loss` in place for a chunk [n, V] of rows with non-zero weight.

    Rows with a gradient are moved together, so that the GEMMs skip the others (clipped, or A = 0,
    without entropy or KL terms).

    Returns:
        (PPORows with grad [m, V] or None; the rows [m] int64 in grad, or None for all n).
    """
    grad = logits if need_grad else None
    done = _loss_pass(logits, per_token, objective, softmax, ref_logits=ref_logits, grad=grad)
    logprobs, entropy, kl = done.statistics
    chunk = PPORows(done.sums, logprobs, entropy, kl)
    count = int(done.has_gradient.sum())
    if count == 0:
        return chunk, None
    size = min(len(logits), -(-count // GEMM_ROWS) * GEMM_ROWS)
    if size == len(logits):
        return chunk._replace(grad=logits), None
    fillers = done.has_gradient.logical_not().nonzero()[: size - count]
    live = torch.cat([done.has_gradient.nonzero(), fillers]).squeeze(-1).sort().values
    for place, row in enumerate(live.tolist()):  # ascending: overwrites only rows already moved
        if place != row:
            logits[place] = logits[row]
    return chunk._replace(grad=logits[:size]), live


def _mend_normalizers(normalizers: Any, logits: Tensor) -> None:
    """Apply the definition's rules for NaN and −inf: `_largest` misses NaN with a sign bit, which
    an x86 CPU's conversion to bf16 creates."""
    maximum, log_total = normalizers.T
    for i in np.flatnonzero((maximum == -np.inf) | np.isnan(log_total)):
        row = logits.detach()[np.unravel_index(i, logits.shape[:-1])]
        if row.isnan().any():
            normalizers[i] = np.nan
        elif maximum[i] == -np.inf:
            normalizers[i] = -np.inf


def token_stats(
    logits: Tensor, tokens: Tensor, softmax: Softmax, *, ref_logits: Tensor | None = None
) -> StatsRows:
    """Return the token's logprob, entropy and, with `ref_logits`, full KL of each row."""
    count = tokens.numel()
    row_stats = np.empty((6, count), np.float32)
    normalizers = np.zeros((2, count, 2), np.float32)
    in_threads(
        _statistics_rows,
        count,
        _rows(logits, logits),
        _reference_rows(ref_logits, logits),
        tokens.contiguous().numpy(),
        _numbers(softmax),
        row_stats,
        normalizers,
        entries=logits.numel(),
        room=functools.partial(_room, logits),
    )
    _mend_normalizers(normalizers[0], logits)
    if ref_logits is not None:
        _mend_normalizers(normalizers[1], ref_logits)
    columns = [*torch.from_numpy(row_stats), *torch.from_numpy(normalizers)]
    return StatsRows(*[x.clone() for x in columns])


def token_stats_backward(
    grads: StatsGradients,
    logits: Tensor,
    tokens: Tensor,
    stats: StatsRows,
    softmax: Softmax,
    *,
    ref_logits: Tensor | None = None,
) -> Tensor:
    """Return dL/dlogits in the logits' shape and dtype, reading rows with a gradient once more.

    The entropy's part is p·(μ − t) with μ = log S − entropy, which fp32 keeps to 5e-7 nats: for
    rows of deviation σ the error is about 1e-7/σ of the row's largest entry.
    """
    grad = fresh(logits)
    by = np.zeros((3, tokens.numel()))
    for row, derivative in zip(by, grads, strict=True):
        if derivative is not None:
            row[:] = derivative.numpy()
    stats_arrays: list[Any] = [x.detach().numpy() for x in stats]
    in_threads(
        _gradient_rows,
        tokens.numel(),
        _rows(logits, logits),
        _reference_rows(None if grads.kl is None else ref_logits, logits),
        tokens.contiguous().numpy(),
        _numbers(softmax),
        by,
        StatsRows(*stats_arrays),
        _rows(grad, logits),
        entries=logits.numel(),
        room=functools.partial(_room, logits),
    )
    return grad
