"""Sweeps of the CPU's loops over one row of logits: the maximum, the sums and the gradient.

For one row of logits x, sampled token y, scores z (scaled and capped), m = max z and c = 1/T (times
`logit_scale` without a cap):

    t_j   = (z_j − m)·c       shifted before scaling, so an offset costs no digits
    gap_j = t_j − r_j         r: the shifted scores of the reference

A row takes three sweeps through the caches: its maximum; the sums of e^t, which is kept; and
e^t·(constant + linear·t + gap·(t − r)), which gives the gradient, optionally in place. A backward
pass has the statistics and takes only the last sweep, with e^t computed again.

Sweeps work on blocks that fit in the L1 cache. Sums are carried in fp32 lanes within a block and
joined in fp64. The exponential is a polynomial, so that everything compiles to vector instructions;
it is shorter for 16-bit logits.

A function with `@overload` is compiled for the types of its arguments: 16-bit logits are converted,
and a missing soft-cap costs nothing. Its plain body is never called.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import types
from numba.extending import overload

from fastppo_kernels.cpu.arithmetic import (
    F32,
    FOUR,
    I32,
    LN_2,
    LOG2_E,
    LOWEST_32,
    LOWEST_BITS,
    LOWEST_NATS,
    ONE,
    ZERO,
    bits_of,
    exp,
    exp2,
    from_bf16,
    from_bits,
    from_fp16,
    tanh,
    to_bf16,
    to_fp16,
)
from fastppo_kernels.cpu.operands import BLOCK
from fastppo_kernels.cpu.threads import EXACT, IN_LANES, compiled


@compiled
def row_at(rows, i):
    """Return row i of a `Rows`."""
    start = (i // rows.inner) * rows.outer_stride + (i % rows.inner) * rows.stride
    return rows.memory[start : start + rows.vocab]


def to_fp32(logit):
    """Convert a logit to fp32."""


@overload(to_fp32, jit_options={"fastmath": set(EXACT)})
def _compile_to_fp32(logit):
    if isinstance(logit, types.Float):
        return lambda logit: logit
    convert = from_bf16 if logit.signed else from_fp16
    return lambda logit: convert(logit)


def store_at(out, j, value):
    """Store an fp32 number in the gradient's dtype."""


@overload(store_at, jit_options={"fastmath": set(EXACT)})
def _compile_store_at(out, j, value):
    if isinstance(out.dtype, types.Float):
        convert = F32
    else:
        convert = to_bf16 if out.dtype.signed else to_fp16

    def store_at(out, j, value):
        out[j] = convert(value)

    return store_at


@compiled
def clear(out):
    """Set a row to 0. Assigning to a slice takes a second longer to compile."""
    for j in range(len(out)):
        out[j] = 0


@compiled
def capped(x, softcap, logit_scale):
    """Return the score of an fp32 logit. Without a soft-cap, the scale follows the shift."""
    if softcap is None:
        return x
    return F32(softcap) * tanh(x * F32(logit_scale / softcap))


def scores(x, block, softcap, logit_scale):
    """Return the scores of a block: the logits, or the capped scores in the buffer `block`."""


@overload(scores, jit_options={"fastmath": set(EXACT), "forceinline": True})
def _compile_scores(x, block, softcap, logit_scale):
    if isinstance(softcap, types.NoneType):
        return lambda x, block, softcap, logit_scale: x

    def scores(x, block, softcap, logit_scale):
        for j in range(len(x)):
            block[j] = capped(to_fp32(x[j]), softcap, logit_scale)
        return block[: len(x)]

    return scores


@compiled
def score_at(x, j, softmax):
    """Return the score of column j."""
    return capped(to_fp32(x[j]), softmax.softcap, softmax.logit_scale)


def _largest(x):
    """Return the largest logit of a row in fp32. A NaN without a sign bit is the largest.

    As integers, with the magnitude bits of negative numbers inverted, floats have the same order,
    and the maximum of integers is a vector instruction that NaN does not disturb.
    """


@overload(_largest, jit_options={"fastmath": set(EXACT)})
def _compile_largest(x):
    if isinstance(x.dtype, types.Float):
        integer = I32
        sign = I32(31)
        to_integer = bits_of
        from_integer = from_bits
    else:
        integer = np.int16
        sign = np.int16(15)
        to_integer = np.int16
        from_integer = from_bf16 if x.dtype.signed else from_fp16
    least = integer(np.iinfo(integer).min)
    magnitude = integer(np.iinfo(integer).max)

    def largest(x):
        largest = least  # not ~magnitude, which numba widens
        for j in range(len(x)):
            bits = to_integer(x[j])
            key = integer(bits ^ ((bits >> sign) & magnitude))
            largest = key if key > largest else largest
        return from_integer(integer(largest ^ ((largest >> sign) & magnitude)))

    return largest


@compiled
def largest_score(x, softmax):
    """Return the largest score of a row."""
    return capped(_largest(x), softmax.softcap, softmax.logit_scale)


def _units(z):
    """Return (exponential, lowest t, nats per unit of t, units per nat).

    The unit of t is a nat for fp32 logits, and a bit for 16-bit logits, whose exponential is 2^t.
    """
    if isinstance(z.dtype, types.Float):
        return exp, LOWEST_NATS, ONE, ONE
    return exp2, LOWEST_BITS, LN_2, LOG2_E


def _block_sums(z, maximum, scale, exponentials):
    """Return (Σ e^t, Σ e^t·t) of a block, and write e^t unless `exponentials` is None."""


@overload(_block_sums, jit_options={"fastmath": set(IN_LANES), "forceinline": True})
def _compile_block_sums(z, maximum, scale, exponentials):
    power, lowest, nats, per_nat = _units(z)

    def block_sums(z, maximum, scale, exponentials):
        scale = scale * per_nat
        mass = ZERO
        moment = ZERO
        for j in range(len(z)):
            t = (to_fp32(z[j]) - maximum) * scale
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
def exponentials_of(exponentials, start, stop):
    """Return the kept e^t of a block, or None if none are kept."""
    return None if exponentials is None else exponentials[start:stop]


@compiled
def exponential_sums(x, block, token, maximum, scale, softmax, exponentials):
    """Return (Σ e^t, Σ e^t·t) over all columns except the token, in fp64."""
    mass = 0.0
    moment = 0.0
    start = 0
    while start < len(x):
        stop = _stop(start, token, len(x))
        z = scores(x[start:stop], block, softmax.softcap, softmax.logit_scale)
        kept = exponentials_of(exponentials, start, stop)
        block_mass, block_moment = _block_sums(z, maximum, scale, kept)
        mass += block_mass
        moment += block_moment
        start = stop + 1 if stop == token else stop
    return mass, moment


class Maxima(NamedTuple):
    """The largest scores of a row and of the reference's row."""

    maximum: float
    ref_maximum: float


@compiled
def gap_between(z, ref_z, maxima, scale):
    """Return t − r of one column.

    Close to the reference, the difference of the scores is exact where that of the shifted and
    scaled scores is not. Columns at −inf keep the numbers that replace it.
    """
    t = (z - maxima.maximum) * scale
    r = (ref_z - maxima.ref_maximum) * scale
    t = LOWEST_NATS if t < LOWEST_NATS else t
    r = LOWEST_32 if r < LOWEST_32 else r
    near = ((z - ref_z) - (maxima.maximum - maxima.ref_maximum)) * scale
    return t - r if t <= LOWEST_NATS or r <= LOWEST_32 else near


def _block_gap_sums(z, ref_z, maxima, scale):
    """Return (Σ e^t·gap, the number of columns that only the reference rules out) of a block."""


@overload(_block_gap_sums, jit_options={"fastmath": set(IN_LANES), "forceinline": True})
def _compile_block_gap_sums(z, ref_z, maxima, scale):
    power, lowest, _, per_nat = _units(z)

    def block_gap_sums(z, ref_z, maxima, scale):
        total = ZERO
        ruled_out = ZERO
        for j in range(len(z)):
            t = (to_fp32(z[j]) - maxima.maximum) * (scale * per_nat)
            exponential = power(lowest if t < lowest else t)
            ref = to_fp32(ref_z[j])
            total += exponential * gap_between(to_fp32(z[j]), ref, maxima, scale)
            is_out = (ref - maxima.ref_maximum) * scale <= LOWEST_32
            ruled_out += ONE if is_out and exponential > ZERO else ZERO
        return total, ruled_out

    return block_gap_sums


@compiled
def gap_sums(x, ref_x, blocks, token, maxima, scale, softmax):
    """Return (Σ e^t·gap, the number of columns that only the reference rules out), in fp64.

    The sums are over all columns except the token.
    """
    total = 0.0
    ruled_out = 0.0
    start = 0
    while start < len(x):
        stop = _stop(start, token, len(x))
        z = scores(x[start:stop], blocks[0], softmax.softcap, softmax.logit_scale)
        ref_z = scores(ref_x[start:stop], blocks[1], softmax.softcap, softmax.logit_scale)
        block_total, block_ruled_out = _block_gap_sums(z, ref_z, maxima, scale)
        total += block_total
        ruled_out += block_ruled_out
        start = stop + 1 if stop == token else stop
    return total, ruled_out


@compiled
def cap_slope(x, softcap, logit_scale):
    """Return the slope 1 − tanh² of a soft-cap at an fp32 logit.

    It is computed from the logit, because near the cap the score has no digits for it.
    """
    if softcap is None:
        return ONE
    u = abs(x * F32(logit_scale / softcap))
    decay = exp(-u - u)
    return FOUR * decay / ((ONE + decay) * (ONE + decay))


class Factors(NamedTuple):
    """The coefficients of a row's gradient, e^t·(constant + linear·t + gap·(t − r))."""

    constant: float
    linear: float
    gap: float


def block_gradient(x, z, ref_z, out, maxima, scale, factors, softmax, exponentials):
    """Write dL/dx of a block, without the gap's term if `ref_z` is None or empty.

    e^t is computed again if `exponentials` is None. `out` must not alias the inputs, or the loop
    would not compile to vector instructions.
    """


@overload(block_gradient, jit_options={"fastmath": set(EXACT), "forceinline": True})
def _compile_block_gradient(x, z, ref_z, out, maxima, scale, factors, softmax, exponentials):
    power, lowest, nats, per_nat = _units(z)

    def block_gradient(x, z, ref_z, out, maxima, scale, factors, softmax, exponentials):
        linear = factors.linear * nats
        for j in range(len(out)):
            t = (to_fp32(z[j]) - maxima.maximum) * (scale * per_nat)
            t = lowest if t < lowest else t
            factor = factors.constant + linear * t
            if ref_z is not None and len(ref_z):
                gap = gap_between(to_fp32(z[j]), to_fp32(ref_z[j]), maxima, scale)
                factor += factors.gap * gap
            slope = cap_slope(to_fp32(x[j]), softmax.softcap, softmax.logit_scale)
            exponential = power(t) if exponentials is None else exponentials[j]
            store_at(out, j, exponential * factor * slope)

    return block_gradient


@compiled
def copy_to(buffer, x):
    """Copy a block to the buffer, and return the copy."""
    for j in range(len(x)):
        buffer[j] = x[j]
    return buffer[: len(x)]


@compiled
def reference_scores(ref_rows, i, start, stop, block, softmax):
    """Return the scores of a block of the reference's row i, or None without a reference."""
    if ref_rows is None:
        return None
    ref_x = row_at(ref_rows, i)[start:stop]
    return scores(ref_x, block, softmax.softcap, softmax.logit_scale)
