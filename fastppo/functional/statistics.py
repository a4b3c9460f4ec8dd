"""Differentiable logprobs, entropies and exact KLs of tokens, from logits or hidden states.

    logprob = z_y/T − logsumexp(z/T)          entropy = −Σ p log p with p = softmax(z/T)
    KL      = Σ_j p_j (log p_j − log q_j)     with q the reference's softmax

`T` is the temperature, and `z` are the logits after `logit_scale` and soft-capping.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from fastppo_kernels import definition
from fastppo_kernels.records import KL_ESTIMATORS, accumulation_dtype
from torch import Tensor

from fastppo.functional import arguments, operands, scalars
from fastppo.functional.gradients import LinearTokenStatisticsFunction, TokenStatisticsFunction


class TokenStats(NamedTuple):
    """Statistics of tokens, (...) fp32 in nats each, differentiable."""

    logprobs: Tensor
    """Logprobs of the tokens."""
    entropy: Tensor
    """Entropies of the policy."""
    kl: Tensor | None
    """Exact KL to the reference, or None without one."""


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
        logits: (..., V) bf16, fp16, fp32 or fp64 with a dense last axis. Row t predicts tokens[t].
        tokens: (...) int64.
        ref_logits: (..., V), which get the same temperature, scale and soft-cap. No gradient.
        temperature, logit_scale, softcap, backend: see `ppo_loss`.

    Returns:
        TokenStats: logprobs, entropy and kl, (...) fp32 in nats, differentiable. The backward pass
        reads the logits again.

    Raises:
        ValueError, TypeError: shapes, dtypes, devices or options are inconsistent, or a token is
            outside the vocabulary.
    """
    rows = operands.rows_view("logits", logits)
    shape = logits.shape[:-1]
    flat_tokens = operands.token_ids(tokens, shape, logits)
    ref_rows = None
    if ref_logits is not None:
        arguments.tensor("ref_logits", ref_logits, shape=logits.shape, like=logits)
        ref_rows = operands.rows_view("ref_logits", ref_logits.detach())
    softmax = operands.softmax(temperature, logit_scale, softcap, shape=shape, like=logits)
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
    """Return each token's logprob, (...) fp32 in nats, differentiable. See `token_stats`."""
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
    """Return `token_stats` of `hidden @ weight.T + bias` without the `[N, V]` logits in memory.

    Args:
        hidden: (..., H), the final hidden states.
        weight: [V, H], the lm-head's weight.
        tokens: (...) int64.
        bias: [V] or None.
        ref_hidden, ref_weight, ref_bias: the reference's hidden states (..., H'), head [V, H'] and
            bias, for the exact KL. No gradient.
        chunk_size: the number of rows of logits in memory. By default, a memory budget sets it.
        temperature, logit_scale, softcap, backend: see `ppo_loss`.

    Returns:
        TokenStats: logprobs, entropy and kl, (...) fp32 in nats, differentiable in hidden, weight
        and bias. Under `torch.no_grad()` they cost 2·N·H·V FLOP, and 2·N·H'·V more with a
        reference. The backward pass recomputes the logits.

    Raises:
        ValueError, TypeError: shapes, dtypes, devices or options are inconsistent, a token is
            outside the vocabulary, or a tensor is a DTensor.
    """
    head = operands.projection(hidden, weight, bias)
    ref = operands.ref_projection(ref_hidden, ref_weight, ref_bias, hidden=hidden, weight=weight)
    gemm = operands.choose_gemm(chunk_size, hidden)
    shape = hidden.shape[:-1]
    flat_tokens = operands.token_ids(tokens, shape, hidden)
    softmax = operands.softmax(temperature, logit_scale, softcap, shape=shape, like=hidden)
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
    """Return `linear_token_stats(...).logprobs`, or (logprobs, entropy) with `return_entropy`.

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
    """Estimate the KL of each token, (...) fp32 in nats.

    With d = logprob − ref_logprob: k1 = d, k2 = d²/2, k3 = e^{−d} − 1 + d.
    """
    scalars.choice("estimator", estimator, KL_ESTIMATORS)
    arguments.tensor("logprobs", logprobs)
    arguments.tensor("ref_logprobs", ref_logprobs, shape=logprobs.shape, like=logprobs)
    wide = accumulation_dtype(logprobs.dtype)
    return definition.sampled_kl(logprobs.to(wide) - ref_logprobs.to(wide), estimator)
