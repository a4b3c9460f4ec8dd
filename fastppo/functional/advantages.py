"""Advantages: shaped rewards, generalized advantage estimation, whitening.

    r_t = −β·KL_t, plus the score on the last response token
    δ_t = r_t + γ·V_next − V_t,   A_t = δ_t + γλ·A_next,   return_t = A_t + V_t

"next" is the next *unmasked* token: GAE skips masked gaps, such as a tool's output in a multi-turn
response. Inputs are padded `[B, T]`, or packed `[total]` with `cu_seqlens [B + 1]`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from fastppo_kernels.records import KL_ESTIMATORS, Discounts, Shaping, Trajectory
from torch import Tensor

from fastppo.functional import arguments, operators, scalars


class Advantages(NamedTuple):
    """Result of `compute_advantages`."""

    advantages: Tensor
    """Advantages of the tokens, [B, T] or [total] fp32, whitened by default, 0 where masked."""
    returns: Tensor
    """Advantages before whitening plus values, [B, T] or [total] fp32, 0 where masked."""
    kl: Tensor
    """KL estimate summed over each sequence, [B] fp32 in nats."""


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
    """Estimate advantages over padded or packed sequences (GAE).

    Args:
        rewards, values: [B, T], or packed [total] with `cu_seqlens`, of any float dtype; sums are
            in fp32 or wider. values[t] is the value of the state *before* token t. No gradient.
        mask: bool, the same shape, True on response tokens. None means all. Gaps are skipped.
        cu_seqlens: [B + 1] int32 or int64, the start of each packed sequence, and the total.
        gamma, lam: numbers in [0, 1], or [B], one per sequence.
        bootstrap: [B], the value after the last token of a truncated sequence. None means 0.
        backend: "auto", "triton", "cpu" or "torch".

    Returns:
        tuple[Tensor, Tensor]: advantages and returns, fp32, shaped like `values`, 0 where masked.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices are inconsistent.

    Source: Schulman et al. 2016, eq. 11, 12 and 16.
    """
    arguments.tensor("rewards", rewards)
    trajectory, batch = _trajectory(
        values, rewards=rewards, mask=mask, cu_seqlens=cu_seqlens, bootstrap=bootstrap
    )
    estimates = operators.gae_op(
        trajectory=trajectory,
        discounts=_discounts(gamma, lam, batch=batch, like=values),
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
    """Shape rewards, estimate advantages and whiten them, in one call.

    Args:
        scores: [B], the reward of each response, placed on its last unmasked token.
        values, logprobs: [B, T], or packed [total] with `cu_seqlens`, at the time of the rollout.
        ref_logprobs: the same shape, or None for no KL (kl_coef must then be 0).
        mask: bool, the same shape, True on response tokens.
        kl_coef: β of the shaped reward −β·KL_t.
        kl_estimator: "k1", "k2" or "k3".
        gamma, lam, bootstrap, cu_seqlens, backend: see `gae`.
        whiten, shift_mean: see the function `whiten`. Returns are never whitened.
        score_clip: a bound to which scores are clamped first, ±score_clip.
        token_rewards: rewards shaped like values, which are added to the shaped rewards.
        reduce_moments: a function from the moments (count, Σx, Σx²), fp64 [3], to those of the
            global batch, for example an all-reduce.

    Returns:
        Advantages: advantages, returns and kl.

    Raises:
        ValueError, TypeError: shapes, dtypes, devices or options are inconsistent.

    Source: Ziegler et al. 2019, eq. 2; Stiennon et al. 2020, section 3.4.
    """
    scalars.boolean("whiten", whiten)
    scalars.boolean("shift_mean", shift_mean)
    arguments.tensor("mask", mask, dtypes=(torch.bool,))
    trajectory, batch = _trajectory(
        values,
        rewards=token_rewards,
        mask=mask,
        cu_seqlens=cu_seqlens,
        bootstrap=bootstrap,
        rewards_name="token_rewards",
    )
    arguments.tensor("scores", scores, shape=(batch,), like=values, wants="one per sequence")
    _check_scores(scores, mask, cu_seqlens)
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
        discounts=_discounts(gamma, lam, batch=batch, like=values),
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
    """Return `(x − mean)·rsqrt(var + 1e-8)` over the mask, var with Bessel's correction.

    Args:
        x: (...) of any float dtype.
        mask: (...) bool, or None.
        shift_mean: False adds the mean back: (x − mean)·rsqrt(var + 1e-8) + mean.
        moments: (count, Σx, Σx²), fp64 [3], of a larger batch that includes x.

    Returns:
        Tensor (...) fp32, 0 where masked.

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


# ---------------------------------------------------------------------------- checks of arguments


def _check_scores(scores: Tensor, mask: Tensor, cu_seqlens: Tensor | None) -> None:
    """Refuse NaN, and scores of responses without a token, if FASTPPO_CHECK_VALUES=1."""
    if not arguments.values_are_checked():
        return
    arguments.check_values("scores", scores)
    if cu_seqlens is None:
        lengths = mask.sum(-1)
    else:
        lengths = torch.nn.functional.pad(mask.cumsum(0), (1, 0))[cu_seqlens.long()].diff()
    lost = ((lengths == 0) & (scores != 0)).nonzero().tolist()
    if lost:
        raise ValueError(f"scores{lost[0]} is lost: mask has no token of its response")


def _trajectory(
    values: Tensor,
    *,
    rewards: Tensor | None,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    bootstrap: Tensor | None,
    rewards_name: str = "rewards",
) -> tuple[Trajectory, int]:
    """Check a trajectory, and return it detached with its number of sequences B."""
    batch = _sequences(values, mask, cu_seqlens)
    if rewards is not None:
        rewards = arguments.tensor(rewards_name, rewards, shape=values.shape, like=values).detach()
    if bootstrap is not None:
        bootstrap = arguments.tensor("bootstrap", bootstrap, shape=(batch,), like=values).detach()
    return Trajectory(values.detach(), rewards, mask, cu_seqlens, bootstrap), batch


def _sequences(values: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None) -> int:
    """Check the layout of values, and return the number of sequences B."""
    arguments.tensor("values", values)
    if mask is not None:
        arguments.tensor("mask", mask, shape=values.shape, like=values, dtypes=(torch.bool,))
    if cu_seqlens is None:
        if values.dim() != 2:
            raise ValueError(
                "values must be [B, T], or packed [total] with cu_seqlens, "
                f"got {list(values.shape)}"
            )
        return values.shape[0]
    if values.dim() != 1:
        raise ValueError(f"with cu_seqlens values must be packed [total], got {list(values.shape)}")
    arguments.check_cu_seqlens(cu_seqlens, values.numel(), like=values)
    return cu_seqlens.shape[0] - 1


def _discounts(
    gamma: float | Tensor, lam: float | Tensor, *, batch: int, like: Tensor
) -> Discounts:
    """Check γ and λ: each is a number in [0, 1], or [B], one per sequence."""
    per_sequence = {}
    for name, value in (("gamma", gamma), ("lam", lam)):
        if isinstance(value, Tensor):
            value = value.detach()
            value = value.expand(batch) if value.dim() == 0 else value
            arguments.tensor(name, value, shape=(batch,), like=like, wants="one per sequence")
            _check_unit_interval(name, value)
            per_sequence[name] = value
        elif not 0 <= scalars.number(name, value) <= 1:
            raise ValueError(f"{name} must be in [0, 1], got {scalars.describe(value)}")
    return Discounts(
        gamma=0.0 if isinstance(gamma, Tensor) else float(gamma),
        lam=0.0 if isinstance(lam, Tensor) else float(lam),
        gammas=per_sequence.get("gamma"),
        lams=per_sequence.get("lam"),
    )


def _check_unit_interval(name: str, x: Tensor) -> None:
    """Check that values are in [0, 1], if reading them is free."""
    if arguments.values_are_free(x):
        least = x.min().item()
        most = x.max().item()
        if not 0 <= least <= most <= 1:
            raise ValueError(f"{name} must be in [0, 1], got values from {least} to {most}")
