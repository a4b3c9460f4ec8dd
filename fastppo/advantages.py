"""Advantages: shaped rewards, generalised advantage estimation, whitening, KL coefficients.

    r_t = −β·KL_t, plus the score on the last response token
    δ_t = r_t + γ·V_next − V_t,   A_t = δ_t + γλ·A_next,   return_t = A_t + V_t

"next" is the next *unmasked* token, so a masked gap (a tool's output in a multi-turn response) is
stepped over. All functions take padded `[B, T]`, or packed `[total]` with `cu_seqlens [B + 1]`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from fastppo_kernels import reference
from torch import Tensor

from fastppo import ops, validation


class Advantages(NamedTuple):
    """Result of `compute_advantages`."""

    advantages: Tensor
    """[B, T] or [total] fp32, whitened if asked, 0 where masked."""
    returns: Tensor
    """The same shape, fp32: unwhitened advantages plus values, 0 where masked."""
    kl: Tensor
    """[B] fp32, nats: the estimator summed over each sequence."""


def _sequences(values: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None) -> int:
    """Number of sequences B; refuses shapes that do not fit the layout."""
    validation.tensor("values", values)
    if mask is not None:
        validation.tensor("mask", mask, shape=values.shape, like=values, dtypes=(torch.bool,))
    if cu_seqlens is None:
        if values.dim() != 2:
            raise ValueError(
                f"values must be [B, T], or packed [total] with cu_seqlens, "
                f"got {list(values.shape)}"
            )
        return values.shape[0]
    if values.dim() != 1:
        raise ValueError(f"with cu_seqlens values must be packed [total], got {list(values.shape)}")
    validation.tensor("cu_seqlens", cu_seqlens, like=values, dtypes=(torch.int32, torch.int64))
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(f"cu_seqlens must be [B + 1], got {list(cu_seqlens.shape)}")
    if cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():
        steps = cu_seqlens.diff()
        if (
            int(cu_seqlens[0]) != 0
            or int(cu_seqlens[-1]) != values.numel()
            or bool((steps < 0).any())
        ):
            raise ValueError(
                f"cu_seqlens must rise from 0 to {values.numel()}, the number of packed tokens, "
                f"got {cu_seqlens.tolist()}"
            )
    return cu_seqlens.shape[0] - 1


def _discount(
    name: str, value: float | Tensor, batch: int, like: Tensor
) -> tuple[float, Tensor | None]:
    """A scalar, or one per sequence: (the scalar, [B] or None)."""
    if isinstance(value, Tensor):
        if value.dim() == 0:
            value = value.expand(batch)
        return 0.0, validation.tensor(
            name, value, shape=(batch,), like=like, wants="one per sequence"
        )
    if not 0 <= validation.number(name, value) <= 1:
        raise ValueError(f"{name} must be in [0, 1], got {value!r}")
    return float(value), None


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
    """Generalised advantage estimation over padded or packed sequences.

    Args:
        rewards, values: [B, T], or packed [total] with `cu_seqlens`; any float dtype, summed in
            fp32 or wider. values[t] is the value of the state *before* token t. No gradient.
        mask: the same shape, bool, True on response tokens; None means all. Gaps are stepped over.
        cu_seqlens: [B + 1] int32 or int64, where each packed sequence begins, and the total.
        gamma, lam: in [0, 1], or [B], one per sequence.
        bootstrap: [B], the value behind the last token of a truncated sequence; None means 0.
        backend: "auto", "triton" or "torch".

    Returns:
        (advantages, returns), fp32, the shape of `values`, 0 where masked.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices disagree.

    Source: Schulman et al. 2016, eq. 11, 12 and 16.
    """
    batch = _sequences(values, mask, cu_seqlens)
    validation.tensor("rewards", rewards, shape=values.shape, like=values)
    gamma, gammas = _discount("gamma", gamma, batch, values)
    lam, lams = _discount("lam", lam, batch, values)
    if bootstrap is not None:
        validation.tensor("bootstrap", bootstrap, shape=(batch,), like=values)
    return ops.gae_op(
        rewards.detach(),
        values.detach(),
        mask,
        cu_seqlens,
        gammas,
        lams,
        None if bootstrap is None else bootstrap.detach(),
        gamma=gamma,
        lam=lam,
        backend=ops.choose_backend(backend, values),
    )


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
        scores: [B], the reward of each whole response; placed on its last unmasked token.
        values, logprobs: [B, T], or packed [total] with `cu_seqlens`: the rollout policy's.
        ref_logprobs: the same shape, or None for no KL (then kl_coef must be 0).
        mask: the same shape, bool, True on response tokens.
        kl_coef: β of the shaped reward −β·KL_t. kl_estimator: k1, k2 or k3.
        gamma, lam, bootstrap, cu_seqlens, backend: see `gae`.
        whiten, shift_mean: see the function `whiten`; returns are never whitened.
        score_clip: clamp scores to ±score_clip first.
        token_rewards: the shape of values; added to the shaped rewards (partial rewards).
        reduce_moments: takes the moments (count, Σx, Σx²), fp64 [3], and returns those of the whole
            global batch, say by an all-reduce.

    Returns:
        Advantages(advantages, returns, kl).

    Raises:
        ValueError, TypeError: shapes, dtypes, devices or options disagree.

    Source: Ziegler et al. 2019, eq. 2; Stiennon et al. 2020, section 3.4.
    """
    validation.tensor("mask", mask, dtypes=(torch.bool,))
    batch = _sequences(values, mask, cu_seqlens)
    validation.tensor("scores", scores, shape=(batch,), like=values, wants="one per sequence")
    validation.tensor("logprobs", logprobs, shape=values.shape, like=values)
    validation.choice("kl_estimator", kl_estimator, validation.KL_ESTIMATORS[:3])
    validation.finite("kl_coef", kl_coef)
    if ref_logprobs is not None:
        validation.tensor("ref_logprobs", ref_logprobs, shape=values.shape, like=values)
    elif kl_coef:
        raise ValueError(f"kl_coef={kl_coef} needs ref_logprobs, got None")
    if token_rewards is not None:
        validation.tensor("token_rewards", token_rewards, shape=values.shape, like=values)
    if bootstrap is not None:
        validation.tensor("bootstrap", bootstrap, shape=(batch,), like=values)
    if score_clip is not None:
        validation.at_least("score_clip", score_clip, 0.0, strictly=True)
    gamma, gammas = _discount("gamma", gamma, batch, values)
    lam, lams = _discount("lam", lam, batch, values)
    backend = ops.choose_backend(backend, values)
    floats = (x if x is None else x.detach() for x in (scores, values, logprobs, ref_logprobs))
    advantages, returns, kl, moments = ops.shaped_advantages_op(
        *floats,
        mask,
        cu_seqlens,
        gammas,
        lams,
        None if bootstrap is None else bootstrap.detach(),
        None if token_rewards is None else token_rewards.detach(),
        gamma=gamma,
        lam=lam,
        kl_coef=float(kl_coef),
        kl_estimator=kl_estimator,
        score_clip=score_clip,
        backend=backend,
    )
    if whiten:
        moments = moments if reduce_moments is None else reduce_moments(moments)
        advantages = ops.whiten_op(
            advantages, mask, moments, shift_mean=shift_mean, backend=backend
        )
    return Advantages(advantages, returns, kl)


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
        moments: (count, Σx, Σx²), fp64 [3], of a larger batch that x is a part of.

    Returns:
        (...) fp32, 0 where masked.

    Source: Ziegler et al. 2019 (their code's `whiten`).
    """
    validation.tensor("x", x)
    if mask is not None:
        validation.tensor("mask", mask, shape=x.shape, like=x, dtypes=(torch.bool,))
    if moments is not None:
        validation.tensor("moments", moments, shape=(3,), like=x)
    backend = ops.choose_backend(backend, x)
    return ops.whiten_op(x.detach(), mask, moments, shift_mean=shift_mean, backend=backend)


@dataclass(slots=True)
class FixedKL:
    """β stays what it is."""

    coef: float

    def update(self, kl: float, sequences: int) -> None:
        """`kl`: mean over sequences of the summed KL to the reference, nats."""


@dataclass(slots=True)
class AdaptiveKL:
    """β ← β·(1 + clip(KL/target − 1, −0.2, 0.2)·n/horizon). Source: Ziegler et al. 2019, 2.2."""

    coef: float
    target: float
    horizon: float = 10_000.0
    """Sequences over which a constant error of 20 % moves β by 20 %."""

    def update(self, kl: float, sequences: int) -> None:
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.coef *= 1 + error * sequences / self.horizon


@dataclass(slots=True)
class PenaltyKL:
    """β·2 if KL > 1.5·target, β/2 if KL < target/1.5. Source: Schulman et al. 2017, section 4."""

    coef: float
    target: float

    def update(self, kl: float, sequences: int) -> None:
        if kl > 1.5 * self.target:
            self.coef *= 2
        elif kl < self.target / 1.5:
            self.coef /= 2


def sampled_kl(logprobs: Tensor, ref_logprobs: Tensor, estimator: str = "k1") -> Tensor:
    """k1 = d, k2 = d²/2 or k3 = e^{−d} − 1 + d of d = logprob − ref_logprob: (...) fp32, nats."""
    validation.choice("estimator", estimator, validation.KL_ESTIMATORS[:3])
    validation.tensor("logprobs", logprobs)
    validation.tensor("ref_logprobs", ref_logprobs, shape=logprobs.shape, like=logprobs)
    wide = reference.accumulation_dtype(logprobs.dtype)
    return reference.sampled_kl(logprobs.to(wide) - ref_logprobs.to(wide), estimator)[0]
