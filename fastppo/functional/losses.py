"""The PPO losses: drop-in functions over logits, over hidden states, or over logprobs.

    loss = Σ_t w_t · ( policy_t · importance_weight_t + kl_coef·KL_t − entropy_coef·entropy_t )

`ppo_loss` takes logits and touches them once; `linear_ppo_loss` takes hidden states and the
lm-head's weight and holds a chunk of the logits at a time. `policy_loss`, `value_loss`, `entropy`
and `total_loss` are the functions that PPO tutorials write by hand. None of them carries state;
sharding, schedules and models are the trainer's business.

Throughout: `T` is the temperature, `z` the logits after `logit_scale` and soft-capping, and

    logprob = z_y/T − logsumexp(z/T)          entropy = −Σ p log p with p = softmax(z/T)
    ratio   = exp(clamp(logprob − old_logprob, −20, 20))
"""

from __future__ import annotations

from typing import Any, NamedTuple, Unpack

import torch
from fastppo_kernels.records import (
    LOG_RATIO_LIMIT,
    Gemm,
    GradientsWanted,
    Objective,
    PerToken,
    Projection,
    Softmax,
    Sums,
    accumulation_dtype,
)
from torch import Tensor

from fastppo.functional import arguments, operators
from fastppo.functional.arguments import (
    DEFAULTS,
    AggregationOptions,
    LossOptions,
    SoftmaxOptions,
    completed,
    takes,
)
from fastppo.functional.statistics import token_logprobs, token_stats


class PPOLoss(NamedTuple):
    """Result of `ppo_loss` and `linear_ppo_loss`."""

    loss: Tensor
    """() fp32, differentiable."""
    logprobs: Tensor
    """(...) fp32, nats, detached, 0 where masked; the same for `entropy` and `kl`."""
    entropy: Tensor
    kl: Tensor
    sums: Tensor
    """What the metrics are made of. Those of several calls join with `combine_sums`."""

    @property
    def metrics(self) -> dict[str, Tensor]:
        """Detached 0-d tensors on the device; see `loss_metrics`. Made when asked for."""
        return loss_metrics(self.sums)


def loss_metrics(sums: Tensor) -> dict[str, Tensor]:
    """The metrics of `PPOLoss.sums`, which may be those of several calls joined by `combine_sums`.

    `policy_loss` is weighted as the loss is. The rest are means over the tokens of non-zero weight:
    `entropy`, `kl` (to the reference), `approx_kl` (to the old policy, k3), `ratio_mean`,
    `clip_fraction` (tokens whose gradient a clip cut off), `dual_clip_fraction`, and the four
    corners `ratio_{above,below}_{positive,negative}`: shares of tokens beyond the clip range, by
    the sign of the advantage. `ratio_variance`, `ratio_max`; `effective_sample_size`,
    (Σr)²/(n·Σr²), in (0, 1].
    """
    part = Sums(*sums.unbind())
    n = part.tokens.clamp(min=1)
    return {
        "policy_loss": part.policy_loss,
        "entropy": part.entropy / n,
        "kl": part.kl / n,
        "approx_kl": part.approx_kl / n,
        "clip_fraction": (part.above_positive + part.below_negative) / n,
        "dual_clip_fraction": part.dual_clipped / n,
        "ratio_mean": part.ratio / n,
        "ratio_variance": (part.ratio_squared / n - (part.ratio / n) ** 2).clamp(min=0),
        "ratio_max": part.ratio_max,
        "effective_sample_size": part.ratio**2
        / (n * part.ratio_squared).clamp(min=torch.finfo(sums.dtype).tiny),
        "ratio_above_positive": part.above_positive / n,
        "ratio_below_positive": part.below_positive / n,
        "ratio_above_negative": part.above_negative / n,
        "ratio_below_negative": part.below_negative / n,
    }


# ------------------------------------------------------------------------------- loss from logits


@takes(LossOptions)
def ppo_loss(
    logits: Tensor,
    tokens: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    ref_logits: Tensor | None = None,
    inplace: bool = False,
    **options: Unpack[LossOptions],
) -> PPOLoss:
    """Clipped PPO loss, entropy and KL in one pass over the logits.

        loss_t = −min(r_t·A_t, clip(r_t, 1−ε_low, 1+ε_high)·A_t)·importance_weight_t
                 + kl_coef·KL_t − entropy_coef·H_t

    Args:
        logits: (..., V) bf16, fp16, fp32 or fp64, dense last axis; row t predicts tokens[t].
            Accumulated in fp32 (fp64 for fp64). `logits[:, :-1]` is not copied.
        tokens: (...) int64, the sampled tokens. Masked entries may hold anything.
        old_logprobs: (...) nats, at the same temperature. No gradient.
        advantages: (...), one per token. No gradient.
        mask: (...) bool, True on response tokens. Masked entries add no loss and no gradient.
        clip_ratio: ε, or (ε_low, ε_high), or None for no clipping.
        dual_clip: c > 1 bounds the loss by −c·A where A < 0 (Ye et al. 2020).
        ref_logprobs: (...) nats, for the k1, k2 and k3 estimators of the KL to the reference.
        ref_logits: (..., V), for `kl_estimator="full"`; the sampled estimators take the tokens'
            logprobs from it where `ref_logprobs` is not given. No gradient.
        kl_coef: weight of the KL in the loss. The KL is reported whenever a reference is given.
        kl_estimator: k1 = d, k2 = d²/2, k3 = e^{−d} − 1 + d of d = logprob − ref_logprob; or full.
        kl_ratio_weighted: the loss has kl_coef·r_t·KL_t, gradient through both, which makes k1 and
            k3 unbiased for tokens of π_old. The reported KL stays the estimator itself.
        entropy_coef: weight of the entropy bonus.
        temperature: a number > 0, or (...) one per token.
        importance_weights: (...), multiply the policy term (correct for the sampler's logprobs).
        aggregation, denominator: see `aggregation_weights`.
        weights: (...) the weight of each token, given directly; replaces the two above.
        logit_scale, softcap: z = logit_scale·x, then softcap·tanh(z/softcap).
        inplace: write the gradient over the logits' memory, which then holds no logits any more.
            Backward may run once. For results of an operation, say a lm-head's: a leaf's `.grad`
            would share its memory. Not for fp16.
        backend: "auto", "triton" or "torch".

    Returns:
        PPOLoss: loss () fp32, differentiable by the logits; logprobs, entropy, kl (...) fp32, nats,
        detached, 0 where masked; metrics, 0-d tensors on the device.

    Raises:
        ValueError, TypeError: shapes, dtypes, devices or options disagree; a token outside the
            vocabulary (on a CPU, or anywhere with FASTPPO_CHECK_TOKENS=1); a DTensor is passed. The
            values of a temperature or denominator that is a tensor are looked at on a CPU alone.

    Source: Schulman et al. 2017, eq. 7 and 9; the KL estimators, Schulman 2020; weighted by the
    ratio, DeepSeek-AI 2025 (DeepSeek-V3.2), section 3.1.
    """
    rows, shape = arguments.rows_view("logits", logits), logits.shape[:-1]
    arguments.boolean("inplace", inplace)
    options = completed(options, LossOptions, ppo_loss)
    ref_rows = None
    if ref_logits is not None:
        arguments.tensor("ref_logits", ref_logits, shape=logits.shape, like=logits)
        ref_rows = arguments.rows_view("ref_logits", ref_logits.detach())
        if options["kl_estimator"] != "full":
            ref_rows = None
            if options["ref_logprobs"] is None:
                counted = arguments.counted_tokens(tokens, mask, options["weights"])
                softmax_options: Any = {name: options[name] for name in DEFAULTS[SoftmaxOptions]}  # type: ignore[literal-required]
                softmax_options["temperature"] = arguments.counted_temperature(
                    options["temperature"], mask, options["weights"]
                )
                options["ref_logprobs"] = token_logprobs(
                    ref_logits.detach(), counted, **softmax_options
                )
    per_token, objective, softmax, backend = arguments.loss_arguments(
        options,
        shape,
        logits,
        tokens,
        old_logprobs,
        advantages,
        mask,
        has_full_reference=ref_rows is not None,
    )
    need_grad = arguments.is_asked(logits)
    if inplace and need_grad:
        _check_inplace(logits)
    if logits.dtype == torch.float16 and need_grad:
        # The gradient waits for the loss scale: it is formed in the backward pass.
        counts = per_token.weights != 0
        logprobs, entropies, full_kl = operators.TokenStatistics.apply(
            rows, torch.where(counts, per_token.tokens, 0), softmax, ref_rows, backend
        )
        loss, sums, *stats = _loss_of_statistics(
            logprobs, entropies, None if ref_rows is None else full_kl, per_token, objective
        )
    else:
        loss, sums, *stats = operators.PPOLoss.apply(
            rows, per_token, objective, softmax, ref_rows, need_grad, inplace, backend
        )
    logprobs, entropies, kl = (x.view(shape) for x in stats)
    return PPOLoss(loss, logprobs, entropies, kl, sums)


def _check_inplace(logits: Tensor) -> None:
    """Refuses logits whose memory cannot hold the gradient."""
    if logits.dtype == torch.float16:
        raise ValueError(
            "inplace=True needs bfloat16, float32 or float64 logits, got float16, whose gradient "
            "is formed in the backward pass, when the loss scale is known"
        )
    if logits.dim() > 3 and not logits.is_contiguous():
        raise ValueError(
            f"inplace=True needs logits that collapse to [N, V] or [B, T, V] without a copy, got "
            f"shape {list(logits.shape)} with strides {logits.stride()}"
        )
    reach = logits.shape[-1]
    axes = list(zip(logits.shape, logits.stride(), strict=True))[:-1]
    for size, stride in sorted(axes, key=lambda axis: axis[1]):
        if size > 1 and stride < reach:
            raise ValueError(
                f"inplace=True needs rows that do not overlap, got strides {logits.stride()}"
            )
        reach = max(reach, size * stride)


def _loss_of_statistics(
    logprobs: Tensor,
    entropies: Tensor,
    full_kl: Tensor | None,
    per_token: PerToken,
    objective: Objective,
) -> tuple[Tensor, ...]:
    """(loss, sums, logprobs, entropy, kl), as the fused operators return them."""
    loss, sums, kl = operators.TokenLoss.apply(logprobs, entropies, full_kl, per_token, objective)
    counts = per_token.weights != 0
    stats = (torch.where(counts, x.detach(), 0.0) for x in (logprobs, entropies))
    return (loss, sums, *stats, kl)


# ------------------------------------------------------------------------- loss from hidden states


@takes(LossOptions)
def linear_ppo_loss(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    chunk_size: int | None = None,
    ref_hidden: Tensor | None = None,
    ref_weight: Tensor | None = None,
    ref_bias: Tensor | None = None,
    **options: Unpack[LossOptions],
) -> PPOLoss:
    """`ppo_loss(hidden @ weight.T + bias, ...)` without holding more than a chunk of the logits.

    Logits are formed for `chunk_size` rows at a time, turned into their gradient in place, and that
    into gradients of hidden and weight: 6·N·H·V FLOP, where a backward pass that forms the logits
    again needs 8·N·H·V. Rows that `mask` leaves out never reach the head (counting them takes one
    synchronisation with a GPU; in a graph capture and under `torch.compile` they pass with weight
    0). Rows whose gradient is exactly zero stay out of the last two GEMMs on a CPU.

    Args:
        hidden: (..., H), the final hidden states; row t predicts tokens[t].
        weight: [V, H], the lm-head's weight (or the tied embedding). Its gradient is accumulated in
            fp32 and cast once; `requires_grad=False` skips it. A lm-head with LoRA adapters keeps
            them beside its `.weight`, which lacks them: pass `head_weight(model.lm_head)`.
        bias: [V] or None.
        chunk_size: rows of logits held at once. By default all of them while they are small (on a
            GPU 512 MiB of bf16, on a CPU 32 MiB of fp32), else a share of the rows: an eighth,
            1024 to 4096, on a GPU, a quarter, 384 to 512, on a CPU.
        ref_hidden, ref_weight, ref_bias: the reference's hidden states (..., H'), head [V, H'] and
            bias, for `kl_estimator="full"`, or in place of `ref_logprobs`. No gradient.
        The other keywords are those of `ppo_loss`.

    Under autocast the GEMMs run in the autocast dtype, else in that of `hidden`. In fp16 the
    gradient waits for the loss scale: backward forms the logits again, and `kl_estimator="full"`
    is refused.

    Returns:
        PPOLoss, as `ppo_loss` does; the loss is differentiable by hidden, weight and bias.

    Raises:
        ValueError, TypeError: shapes, dtypes, devices or options disagree; a DTensor is passed.
    """
    projection, asked, gemm = arguments.projection_arguments(hidden, weight, bias, chunk_size)
    options = completed(options, LossOptions, linear_ppo_loss)
    ref = arguments.ref_projection_argument(ref_hidden, ref_weight, ref_bias, hidden, weight)
    shape = hidden.shape[:-1]
    per_token, objective, softmax, backend = arguments.loss_arguments(
        options,
        shape,
        hidden,
        tokens,
        old_logprobs,
        advantages,
        mask,
        has_full_reference=ref is not None,
    )
    # Masked rows are worth a synchronisation; a graph of torch.compile may be replayed.
    compact = mask is not None and not torch.compiler.is_compiling()
    if objective.kl_estimator != "full" and ref is not None:
        if per_token.ref_logprobs is None:
            nothing = GradientsWanted(hidden=False, weight=False, bias=False)
            ref_logprobs, _ = _counted_statistics(
                ref, nothing, gemm, compact, per_token, softmax, backend
            )
            per_token = per_token._replace(ref_logprobs=ref_logprobs)
        ref = None
    if gemm.dtype == torch.float16 and any(asked):
        if ref is not None:
            raise ValueError(
                "kl_estimator='full' needs GEMMs in bfloat16 or float32, got float16, where its "
                "gradient would underflow; ppo_loss on the logits takes float16"
            )
        # 8·N·H·V FLOP, because backward forms the logits again, after the loss scale.
        logprobs, entropies = _counted_statistics(
            projection, asked, gemm, compact, per_token, softmax, backend
        )
        loss, sums, *stats = _loss_of_statistics(logprobs, entropies, None, per_token, objective)
    else:
        loss, sums, *stats = operators.LinearPPOLoss.apply(
            *projection, per_token, objective, softmax, ref, gemm, asked, compact, backend
        )
    logprobs, entropies, kl = (x.view(shape) for x in stats)
    return PPOLoss(loss, logprobs, entropies, kl, sums)


def _counted_statistics(
    projection: Projection,
    asked: GradientsWanted,
    gemm: Gemm,
    compact: bool,
    per_token: PerToken,
    softmax: Softmax,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Logprobs and entropy [N] of a projection, differentiable.

    Rows of weight 0 are cut out if `compact` allows it, and then 0; else they are read as zeros,
    because 0·NaN would reach the weight's gradient.
    """
    hidden, weight, bias = projection
    tokens, counts = per_token.tokens, per_token.weights != 0
    counted = None
    if compact and not (hidden.is_cuda and torch.cuda.is_current_stream_capturing()):
        counted = counts.nonzero().squeeze(-1)
        hidden, tokens, softmax = hidden[counted], tokens[counted], softmax.at(counted)
    else:
        hidden = torch.where(counts.unsqueeze(-1), hidden, 0.0)
        tokens = torch.where(counts, tokens, 0)
    logprobs, entropies, _ = operators.LinearTokenStatistics.apply(
        hidden, weight, bias, tokens, softmax, None, gemm, asked, backend
    )
    if counted is None:
        return logprobs, entropies
    empty = logprobs.new_zeros(counts.shape)
    return empty.index_put((counted,), logprobs), empty.index_put((counted,), entropies)


# ---------------------------------------------------------------------------- losses of tutorials


@takes(AggregationOptions)
def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    clip_ratio: float | tuple[float, float] | None = 0.2,
    dual_clip: float | None = None,
    importance_weights: Tensor | None = None,
    **options: Unpack[AggregationOptions],
) -> Tensor:
    """Clipped surrogate from logprobs: `Σ w·(−min(ratio·A, clip(ratio)·A))`, a 0-d tensor.

    Args:
        logprobs: (...) nats, differentiable; old_logprobs, advantages: (...). No gradient.
        The keywords are those of `ppo_loss`.

    Source: Schulman et al. 2017, eq. 7.
    """
    arguments.tensor("logprobs", logprobs)
    shape = logprobs.shape
    for name, value in (("old_logprobs", old_logprobs), ("advantages", advantages)):
        arguments.tensor(name, value, shape=shape, like=logprobs)
    wide = accumulation_dtype(logprobs.dtype)
    options = completed(options, AggregationOptions, policy_loss)
    w = arguments.token_weights(options, shape, logprobs, mask)
    lowest_ratio, highest_ratio = arguments.clip_range(clip_ratio)
    difference = logprobs.to(wide) - old_logprobs.detach().to(wide)
    # Masked entries may hold anything: cut them out before the exponential, not after.
    difference = torch.where(w != 0, difference, 0.0)
    advantages = torch.where(w != 0, advantages.detach().to(wide), 0.0)
    ratio = torch.exp(difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    clipped = ratio.clamp(lowest_ratio, highest_ratio)
    surrogate = torch.minimum(ratio * advantages, clipped * advantages)
    dual_clip = arguments.dual_clip(dual_clip)
    if dual_clip is not None:
        bounded = torch.maximum(surrogate, dual_clip * advantages)
        surrogate = torch.where(advantages < 0, bounded, surrogate)
    if importance_weights is not None:
        arguments.tensor("importance_weights", importance_weights, shape=shape, like=logprobs)
        surrogate = surrogate * importance_weights.detach().to(wide)
    return -(torch.where(w != 0, surrogate, 0.0) * w).sum()


@takes(AggregationOptions)
def value_loss(
    values: Tensor,
    returns: Tensor,
    mask: Tensor | None = None,
    *,
    old_values: Tensor | None = None,
    clip_ratio: float | None = None,
    **options: Unpack[AggregationOptions],
) -> Tensor:
    """`Σ w·½(V − R)²`, or with value clipping `Σ w·½max((V−R)², (V_old + clip(V−V_old, ±c) − R)²)`.

    Args:
        values: (...), differentiable; returns: (...). No gradient.
        old_values, clip_ratio: (...) and c > 0 in units of the value; clipping needs both.
        mask, aggregation, denominator, weights: see `ppo_loss` and `aggregation_weights`.

    Returns:
        () fp32, differentiable by the values. The value term of `total_loss` is twice this.

    Source: Schulman et al. 2017, eq. 9, whose squared error has no ½; ½ and clipping, the PPO code
    of OpenAI baselines.
    """
    arguments.tensor("values", values)
    shape = values.shape
    arguments.tensor("returns", returns, shape=shape, like=values)
    options = completed(options, AggregationOptions, value_loss)
    w = arguments.token_weights(options, shape, values, mask)
    if clip_ratio is not None:
        arguments.at_least("clip_ratio", clip_ratio, 0.0, strictly=True)
        if old_values is None:
            raise ValueError("clip_ratio needs old_values, the values of the rollout, got None")
        arguments.tensor("old_values", old_values, shape=shape, like=values)
        old_values = old_values.detach()
    loss, _ = operators.ValueLoss.apply(values, returns.detach(), w, old_values, clip_ratio)
    return loss


@takes(SoftmaxOptions)
def entropy(
    logits: Tensor,
    mask: Tensor | None = None,
    *,
    aggregation: str = "token-mean",
    denominator: float | Tensor | None = None,
    **options: Unpack[SoftmaxOptions],
) -> Tensor:
    """Mean entropy of `softmax(z/T)` over the unmasked rows of (..., V): a 0-d tensor, nats."""
    arguments.tensor("logits", logits)
    options = completed(options, SoftmaxOptions, entropy)
    tokens = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    stats = token_stats(logits, tokens, **options)
    how: AggregationOptions = {
        "aggregation": aggregation,
        "denominator": denominator,
        "weights": None,
    }
    w = arguments.token_weights(how, tokens.shape, logits, mask)
    return (torch.where(w != 0, stats.entropy, 0.0) * w).sum()


def total_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    values: Tensor,
    returns: Tensor,
    logits: Tensor,
    mask: Tensor | None = None,
    *,
    clip_ratio: float | tuple[float, float] | None = 0.2,
    vf_coef: float = 0.5,
    entropy_coef: float = 0.01,
    dual_clip: float | None = None,
    old_values: Tensor | None = None,
    value_clip: float | None = None,
    temperature: float | Tensor = 1.0,
    aggregation: str = "token-mean",
    denominator: float | Tensor | None = None,
) -> dict[str, Tensor]:
    """`policy_loss + vf_coef·value_loss − entropy_coef·entropy`, and its three parts.

    Args:
        logprobs, old_logprobs, advantages, values, returns: (...); logits: (..., V).
        vf_coef multiplies the squared error (V − R)², as in the paper; with `value_clip` the larger
            one of clipped and unclipped values. `fastppo.value_loss` is half of it.

    Returns:
        dict of 0-d tensors: total_loss, policy_loss, value_loss (without the ½), entropy;
        differentiable by logprobs, values and logits.

    Source: Schulman et al. 2017, eq. 9.
    """
    arguments.finite("vf_coef", vf_coef)
    arguments.finite("entropy_coef", entropy_coef)
    shared: dict[str, Any] = {"aggregation": aggregation, "denominator": denominator}
    policy = policy_loss(
        logprobs,
        old_logprobs,
        advantages,
        mask,
        clip_ratio=clip_ratio,
        dual_clip=dual_clip,
        **shared,
    )
    value = 2 * value_loss(
        values, returns, mask, old_values=old_values, clip_ratio=value_clip, **shared
    )
    mean_entropy = entropy(logits, mask, temperature=temperature, **shared)
    return {
        "total_loss": policy + vf_coef * value - entropy_coef * mean_entropy,
        "policy_loss": policy,
        "value_loss": value,
        "entropy": mean_entropy,
    }
