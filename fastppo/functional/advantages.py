"""Advantages: shaped rewards, generalized advantage estimation, whitening.

    r_t = −β·KL_t, plus the score on the last response token
    δ_t = r_t + γ·V_next − V_t,   A_t = δ_t + γλ·A_next,   return_t = A_t + V_t

"next" is the next *unmasked* token: masked gaps, such as a tool's output in a multi-turn response,
are skipped. Inputs are padded `[B, T]`, or packed `[total]` with `cu_seqlens [B + 1]`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from fastppo_kernels.records import KL_ESTIMATORS, Shaping
from torch import Tensor

from fastppo.functional import arguments, operators, scalars


class Advantages(NamedTuple):
    """Result of `compute_advantages`."""

    advantages: Tensor
    """[B, T] or [total] fp32, whitened by default, 0 where masked."""
    returns: Tensor
    """[B, T] or [total] fp32: advantages before whitening plus values, 0 where masked."""
    kl: Tensor
    """[B] fp32, nats: the estimate summed over each sequence."""


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    gamma: float | Tensor = 1.0,
    lam: float | Tensor = 0.95,
    bootstrap: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation over padded or packed sequences.

    Args:
        rewards, values: [B, T], or packed [total] with `cu_seqlens`; any float dtype, summed in
            fp32 or wider. values[t] is the value of the state *before* token t. No gradient.
        mask: the same shape, bool, True on response tokens; None means all. Gaps are skipped.
        cu_seqlens: [B + 1] int32 or int64, the start of each packed sequence, and the total.
        gamma, lam: in [0, 1], or [B], one per sequence.
        bootstrap: [B], the value after the last token of a truncated sequence; None means 0.
        backend: "auto", "triton", "cpu" or "torch".

    Returns:
        (advantages, returns), fp32, the shape of `values`, 0 where masked.

    Raises:
        ValueError, TypeError: inconsistent shapes, dtypes or devices.

    Source: Schulman et al. 2016, eq. 11, 12 and 16.
    """
    arguments.tensor("rewards", rewards)
    trajectory, batch = arguments.trajectory(
        values, rewards=rewards, mask=mask, cu_seqlens=cu_seqlens, bootstrap=bootstrap
    )
    estimates = operators.gae_op(
        trajectory=trajectory,
        discounts=arguments.discounts(gamma, lam, batch=batch, like=values),
        backend=arguments.choose_backend(backend, values),
    )
    return estimates.advantages, estimates.returns


def compute_advantages(
    scores: Tensor,
    values: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor | None,
    mask: Tensor,
    *,
    kl_coef: float = 0.0,
    kl_estimator: str = "k1",
    gamma: float | Tensor = 1.0,
    lam: float | Tensor = 0.95,
    whiten: bool = True,
    shift_mean: bool = True,
    bootstrap: Tensor | None = None,
    score_clip: float | None = None,
    token_rewards: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    reduce_moments: Callable[[Tensor], Tensor] | None = None,
    backend: str = "auto",
) -> Advantages:
    """Reward shaping, GAE and whitening in one call.

    Args:
        scores: [B], the reward of each response, placed on its last unmasked token.
        values, logprobs: [B, T], or packed [total] with `cu_seqlens`: the rollout policy's.
        ref_logprobs: the same shape, or None for no KL (kl_coef must then be 0).
        mask: the same shape, bool, True on response tokens.
        kl_coef: β of the shaped reward −β·KL_t. kl_estimator: k1, k2 or k3.
        gamma, lam, bootstrap, cu_seqlens, backend: see `gae`.
        whiten, shift_mean: see the function `whiten`. Returns are never whitened.
        score_clip: clamp scores to ±score_clip first.
        token_rewards: shaped like values, added to the shaped rewards.
        reduce_moments: a function from the moments (count, Σx, Σx²), fp64 [3], to those of the
            global batch, for example an all-reduce.

    Returns:
        Advantages(advantages, returns, kl).

    Raises:
        ValueError, TypeError: inconsistent shapes, dtypes, devices or options.

    Source: Ziegler et al. 2019, eq. 2; Stiennon et al. 2020, section 3.4.
    """
    scalars.boolean("whiten", whiten)
    scalars.boolean("shift_mean", shift_mean)
    arguments.tensor("mask", mask, dtypes=(torch.bool,))
    trajectory, batch = arguments.trajectory(
        values,
        rewards=token_rewards,
        mask=mask,
        cu_seqlens=cu_seqlens,
        bootstrap=bootstrap,
        rewards_name="token_rewards",
    )
    arguments.tensor("scores", scores, shape=(batch,), like=values, wants="one per sequence")
    arguments.check_scores(scores, mask, cu_seqlens)
    arguments.tensor("logprobs", logprobs, shape=values.shape, like=values)
    arguments.check_values("values", values, mask)
    arguments.check_values("logprobs", logprobs, mask)
    scalars.choice("kl_estimator", kl_estimator, KL_ESTIMATORS)
    scalars.finite("kl_coef", kl_coef)
    if ref_logprobs is not None:
        arguments.tensor("ref_logprobs", ref_logprobs, shape=values.shape, like=values)
        ref_logprobs = ref_logprobs.detach()
    elif kl_coef:
        raise ValueError(f"kl_coef={kl_coef} needs ref_logprobs, got None")
    if score_clip is not None:
        score_clip = float(scalars.at_least("score_clip", score_clip, 0.0, strictly=True))
    backend = arguments.choose_backend(backend, values)
    shaped = operators.shaped_advantages_op(
        trajectory=trajectory,
        shaping=Shaping(
            scores=scores.detach(),
            logprobs=logprobs.detach(),
            ref_logprobs=ref_logprobs,
            kl_coef=float(kl_coef),
            kl_estimator=kl_estimator,
            score_clip=score_clip,
        ),
        discounts=arguments.discounts(gamma, lam, batch=batch, like=values),
        backend=backend,
    )
    advantages = shaped.advantages
    if whiten:
        moments = shaped.moments
        if reduce_moments is not None:
            moments = reduce_moments(moments)
            # None, from a function that works in place, would whiten each rank by itself.
            arguments.tensor("result of reduce_moments", moments, shape=(3,), like=advantages)
        advantages = operators.whiten_op(
            x=advantages, mask=mask, moments=moments, shift_mean=shift_mean, backend=backend
        )
    return Advantages(advantages, shaped.returns, shaped.kl)


def whiten(
    x: Tensor,
    mask: Tensor | None = None,
    *,
    shift_mean: bool = True,
    moments: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """`(x − mean)·rsqrt(var + 1e-8)` over the mask, var with Bessel's correction.

    Args:
        x: (...) any float dtype; mask: (...) bool or None.
        shift_mean: False adds the mean back: (x − mean)·rsqrt(var + 1e-8) + mean.
        moments: (count, Σx, Σx²), fp64 [3], of a larger batch that includes x.

    Returns:
        (...) fp32, 0 where masked.

    Source: Ziegler et al. 2019 (their code's `whiten`).
    """
    arguments.tensor("x", x)
    scalars.boolean("shift_mean", shift_mean)
    if mask is not None:
        arguments.tensor("mask", mask, shape=x.shape, like=x, dtypes=(torch.bool,))
    if moments is not None:
        arguments.tensor("moments", moments, shape=(3,), like=x)
    return operators.whiten_op(
        x=x.detach(),
        mask=mask,
        moments=moments,
        shift_mean=shift_mean,
        backend=arguments.choose_backend(backend, x),
    )
