"""Scalar functions of the CPU's loops: exponentials, tanh, and conversions of 16-bit floats.

They are polynomials and integer operations, without calls and branches, so that a loop over them
compiles to vector instructions. numba has neither bf16 nor fp16: the loops see their bits as int16
and uint16.
"""

from __future__ import annotations

import math

import numpy as np

from fastppo_kernels.cpu.threads import compiled
from fastppo_kernels.records import LOWEST

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
"""Least-squares fit of (2^r − 1)/r on Chebyshev points of |r| ≤ ½: 2^r has an error of 1.1e-7."""

TANH_NEAR = F32(0.625)
TANH_3, TANH_5, TANH_7, TANH_9, TANH_11 = (
    F32(x) for x in (-0.33333329, 0.13332782, -0.0538525, 0.02100364, -0.00610495)
)
"""Least-squares fit of (tanh(x)/x − 1)/x² on Chebyshev points of x² in [0, 0.625²]. Error below
2e-8."""


@compiled
def bits_of(value):
    """Return the bits of an fp32 number as int32."""
    return F32(value).view(I32)


@compiled
def from_bits(bits):
    """Return the fp32 number with these bits."""
    return I32(bits).view(F32)


@compiled
def exp(t):
    """Return e^t for t ≤ 0 in fp32, with a relative error of 1e-7. NaN stays NaN."""
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
def exp2(b):
    """Return 2^b for −127 ≤ b ≤ 0 in fp32, with a relative error of 3e-7, and 0 at −127.

    NaN stays NaN if it was converted from 16 bits.
    """
    rounded = b + ROUNDER
    r = b - (rounded - ROUNDER)
    p = B5 * r + B4
    p = p * r + B3
    p = p * r + B2
    p = p * r + B1
    p = p * r + ONE
    return from_bits(bits_of(p) + I32(bits_of(rounded) << I32(23)))


@compiled
def tanh(u):
    """Return tanh u, from e^{−2|u|} or, near 0, from an odd polynomial."""
    e = exp(-abs(u) - abs(u))
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
def from_bf16(bits):
    """Convert bf16 to fp32."""
    return I32(I32(bits) << I32(16)).view(F32)


@compiled
def to_bf16(value):
    """Round an fp32 number to bf16, to nearest with ties to even."""
    bits = F32(value if value == value else NAN).view(U32)  # a NaN without bits that would carry
    return np.int16(U32(bits + U32(0x7FFF) + ((bits >> U32(16)) & U32(1))) >> U32(16))


@compiled
def from_fp16(bits):
    """Convert fp16 to fp32."""
    magnitude = U32((U32(bits) & U32(0x7FFF)) << U32(13))
    # 2¹¹² changes the exponent's bias, for subnormal numbers as well.
    value = U32(magnitude).view(F32) * F32(2.0**112)
    special = U32(magnitude | U32(0x7F800000)).view(F32)  # infinity or NaN
    value = special if magnitude >= U32(0x0F800000) else value
    return -value if U32(bits) & U32(0x8000) else value


@compiled
def to_fp16(value):
    """Round an fp32 number to fp16, to nearest with ties to even."""
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
