"""Differentiable logprobs, entropies and exact KLs of tokens, from logits or hidden states.

    logprob = z_y/T − logsumexp(z/T)          entropy = −Σ p log p with p = softmax(z/T)
    KL      = Σ_j p_j (log p_j − log q_j)     with q the reference's softmax

`T` is the temperature, `z` the logits after `logit_scale` and soft-capping.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from fastppo_kernels import definition
from fastppo_kernels.records import KL_ESTIMATORS, accumulation_dtype
from torch import Tensor

from fastppo.functional import arguments, scalars
from fastppo.functional.gradients import LinearTokenStatisticsFunction, TokenStatisticsFunction


class TokenStats(NamedTuple):
    """(...) fp32, nats, differentiable; kl is None without a reference."""

    logprobs: Tensor
    entropy: Tensor
    kl: Tensor | None


def token_stats(
    logits: Tensor,
    tokens: Tensor,
    *,
    ref_logits: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    backend: str = "auto",
) -> TokenStats:
    """Return each token's logprob and entropy and, with `ref_logits`, the exact KL(p‖q).

    Args:
        logits: (..., V) bf16, fp16, fp32 or fp64, dense last axis; row t predicts tokens[t].
        tokens: (...) int64.
        ref_logits: (..., V), with the same temperature, scale and soft-cap. No gradient.
        temperature, logit_scale, softcap, backend: see `ppo_loss`.

    Returns:
        TokenStats(logprobs, entropy, kl): (...) fp32, nats, differentiable. Backward reads the
        logits again.

    Raises:
        ValueError, TypeError: inconsistent shapes, dtypes, devices or options; a token outside the
            vocabulary.
    """
    rows = arguments.rows_view("logits", logits)
    shape = logits.shape[:-1]
    flat_tokens = arguments.token_ids(tokens, shape, logits)
    ref_rows = None
    if ref_logits is not None:
        arguments.tensor("ref_logits", ref_logits, shape=logits.shape, like=logits)
        ref_rows = arguments.rows_view("ref_logits", ref_logits.detach())
    softmax = arguments.softmax(temperature, logit_scale, softcap, shape=shape, like=logits)
    backend = arguments.choose_backend(backend, logits)
    logprobs, entropy, kl = TokenStatisticsFunction.apply(
        rows, flat_tokens, softmax, ref_rows, backend
    )
    return TokenStats(
        logprobs.view(shape), entropy.view(shape), None if ref_rows is None else kl.view(shape)
    )


def token_logprobs(
    logits: Tensor,
    tokens: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """`z_y/T − logsumexp(z/T)` per token: (...) fp32, nats, differentiable. See `token_stats`."""
    stats = token_stats(
        logits,
        tokens,
        temperature=temperature,
        logit_scale=logit_scale,
        softcap=softcap,
        backend=backend,
    )
    return stats.logprobs


def linear_token_stats(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    *,
    bias: Tensor | None = None,
    ref_hidden: Tensor | None = None,
    ref_weight: Tensor | None = None,
    ref_bias: Tensor | None = None,
    chunk_size: int | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    backend: str = "auto",
) -> TokenStats:
    """`token_stats` of `hidden @ weight.T + bias` without the `[N, V]` logits in memory.

    Args:
        hidden: (..., H); weight: [V, H]; bias: [V] or None; tokens: (...) int64.
        ref_hidden, ref_weight, ref_bias: the reference's hidden states (..., H'), head [V, H'] and
            bias, for the exact KL. No gradient.
        chunk_size: rows of logits in memory; by default set by a memory budget.
        temperature, logit_scale, softcap, backend: see `ppo_loss`.

    Returns:
        TokenStats(logprobs, entropy, kl): (...) fp32, nats, differentiable in hidden, weight and
        bias. Under `torch.no_grad()` it costs 2·N·H·V FLOP, and 2·N·H'·V more with a reference. The
        backward pass recomputes the logits.

    Raises:
        ValueError, TypeError: inconsistent shapes, dtypes, devices or options; a token outside the
            vocabulary; a DTensor.
    """
    head = arguments.projection(hidden, weight, bias)
    ref = arguments.ref_projection(ref_hidden, ref_weight, ref_bias, hidden=hidden, weight=weight)
    gemm = arguments.gemm(chunk_size, hidden)
    shape = hidden.shape[:-1]
    flat_tokens = arguments.token_ids(tokens, shape, hidden)
    softmax = arguments.softmax(temperature, logit_scale, softcap, shape=shape, like=hidden)
    backend = arguments.choose_backend(backend, hidden)
    logprobs, entropy, kl = LinearTokenStatisticsFunction.apply(
        head.hidden, head.weight, head.bias, flat_tokens, softmax, ref, gemm, backend
    )
    return TokenStats(
        logprobs.view(shape), entropy.view(shape), None if ref is None else kl.view(shape)
    )


def linear_token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    *,
    bias: Tensor | None = None,
    return_entropy: bool = False,
    chunk_size: int | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    backend: str = "auto",
) -> Any:
    """`linear_token_stats(...).logprobs`, or (logprobs, entropy) with `return_entropy`.

    The logits are rounded to the GEMM's dtype before the softmax (bf16 for bf16 or under autocast),
    as in `linear_ppo_loss`, so the ratio of a first update is 1.
    """
    scalars.boolean("return_entropy", return_entropy)
    stats = linear_token_stats(
        hidden,
        weight,
        tokens,
        bias=bias,
        chunk_size=chunk_size,
        temperature=temperature,
        logit_scale=logit_scale,
        softcap=softcap,
        backend=backend,
    )
    return (stats.logprobs, stats.entropy) if return_entropy else stats.logprobs


def sampled_kl(logprobs: Tensor, ref_logprobs: Tensor, estimator: str = "k1") -> Tensor:
    """k1 = d, k2 = d²/2 or k3 = e^{−d} − 1 + d with d = logprob − ref_logprob: (...) fp32, nats."""
    scalars.choice("estimator", estimator, KL_ESTIMATORS)
    arguments.tensor("logprobs", logprobs)
    arguments.tensor("ref_logprobs", ref_logprobs, shape=logprobs.shape, like=logprobs)
    wide = accumulation_dtype(logprobs.dtype)
    return definition.sampled_kl(logprobs.to(wide) - ref_logprobs.to(wide), estimator)
