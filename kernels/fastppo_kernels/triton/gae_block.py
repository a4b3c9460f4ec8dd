"""The scan of one block of tokens, for the kernels of `gae`.

For the valid tokens of a sequence, with "next" the next *valid* token,

    A_t = r_t − V_t + U_next,   U_next = γ·V_next + γλ·A_next      (what the future contributes)

Substituting A_t in U_t = γ·V_t + γλ·A_t gives one first-order linear recurrence without δ and
V_next:

    U_t = γλ · U_next + γ·((1−λ)·V_t + λ·r_t)

A token is thus the affine map U ↦ a·U + b with a = γλ and b = γ((1−λ)V_t + λr_t). A masked token is
the identity (1, 0), so gaps need no search for the next valid token. Composition of maps is
associative, so a block of tokens is scanned in parallel; its composite map carries U to the block
before it.

A thread has `VECTOR` consecutive tokens and composes them in registers; the scan by shuffles covers
the vectors. The order of the sums is written out, and does not depend on the layout of the loads.

Sources: Schulman et al. 2016, eq. 11, 12, 16; Blelloch 1990 for scans of linear recurrences.
"""

# Kernels' parameters have no other annotations than those that Triton reads (constexpr, the width
# of a scalar).

from __future__ import annotations

import triton
import triton.language as tl

from fastppo_kernels.triton.jit import sampled_kl

VECTOR = tl.constexpr(4)
"""Consecutive tokens of a thread: 16 bytes of fp32. Loads by element (packed rows, and lengths that
are not multiples of four) are rearranged through 512 bytes of shared memory."""


@triton.jit
def compose(a_later, b_later, a_earlier, b_earlier):
    """Return the composite of two maps: U ↦ a_earlier·(a_later·U + b_later) + b_earlier."""
    return a_earlier * a_later, tl.fma(a_earlier, b_later, b_earlier)


@triton.jit
def positions(block, BLOCK: tl.constexpr):
    """Return the positions [lanes, VECTOR] of a block in its sequence, the last vector first."""
    vector = tl.arange(0, BLOCK // VECTOR) + 1
    end = (block + 1) * BLOCK
    return (end - VECTOR * vector)[:, None] + tl.arange(0, VECTOR)[None, :]


@triton.jit
def _load(pointer, inside, LAST: tl.constexpr):
    """Load a float operand in fp32. The `LAST` read is evicted first."""
    hint: tl.constexpr = "evict_first" if LAST else ""
    return tl.load(pointer, mask=inside, other=0.0, eviction_policy=hint).to(tl.float32)


@triton.jit
def load_block(start, position, inside, trajectory, shaping, LAST: tl.constexpr):
    """Return (valid, V, r, KL) of a block, with r = −β·KL + token reward; 0 where not valid.

    All loads are issued before the mask is used; masked tokens may hold anything.
    """
    token = start + position
    valid = inside
    if trajectory.mask is not None:
        valid = inside & (tl.load(trajectory.mask + token, mask=inside, other=0) != 0)
    value = _load(trajectory.token_values + token, inside, LAST)
    reward = tl.zeros_like(value)
    if trajectory.token_rewards is not None:
        reward = _load(trajectory.token_rewards + token, inside, LAST)
    kl = tl.zeros_like(value)
    if shaping.ref_logprobs is not None:
        logprob = _load(shaping.logprobs + token, inside, LAST)
        ref_logprob = _load(shaping.ref_logprobs + token, inside, LAST)
        estimate, _slope = sampled_kl(logprob - ref_logprob, shaping.kl_estimator)
        kl = tl.where(valid, estimate, 0.0)
        reward = tl.fma(kl, tl.zeros_like(kl) - shaping.kl_coef, reward)
    return valid, tl.where(valid, value, 0.0), tl.where(valid, reward, 0.0), kl


@triton.jit
def _split(x):
    """Split [lanes, VECTOR] into its columns."""
    even, odd = tl.split(tl.reshape(x, (x.shape[0], 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def join(first, second, third, fourth):
    """Join four columns to [lanes, VECTOR]."""
    pairs = tl.join(tl.join(first, third), tl.join(second, fourth))
    return tl.reshape(pairs, (first.shape[0], VECTOR))


@triton.jit
def sum_vectors(x):
    """Sum each vector of [lanes, VECTOR], in an order that is the same for all layouts."""
    first, second, third, fourth = _split(x)
    return (first + second) + (third + fourth)


@triton.jit
def scan_block(valid, value, reward, decay, weight):
    """Return the maps (a, b) of each vector's later tokens, and of the block down to each vector.

    A token's map is (γλ, γλ·r + γ(1−λ)·V): `decay` is γλ and `weight` γ(1−λ). Vectors run backwards
    in time, because a scan with `reverse=True` reverses the lanes by shuffles before and after.
    """
    a = tl.where(valid, decay, 1.0)
    b = tl.fma(reward, tl.zeros_like(reward) + decay, weight * value)  # 0 if r and V are 0
    a0, a1, a2, a3 = _split(a)
    b0, b1, b2, b3 = _split(b)
    later_a, later_b = compose(a3, b3, a2, b2)
    earlier_a, earlier_b = compose(a1, b1, a0, b0)
    vector_a, vector_b = compose(later_a, later_b, earlier_a, earlier_b)
    vector_a, vector_b = tl.associative_scan((vector_a, vector_b), 0, compose)
    return (a1, a2, a3), (b1, b2, b3), vector_a, vector_b


@triton.jit
def whole_block(a, b, lane):
    """Return the composite map of the block, the last lane's, in fp64 scalars."""
    first = lane == lane.shape[0] - 1
    a_block = tl.sum(tl.where(first, a, 0.0), axis=0).to(tl.float64)
    b_block = tl.sum(tl.where(first, b, 0.0), axis=0).to(tl.float64)
    return a_block, b_block
