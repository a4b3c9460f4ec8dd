"""PPO's loss: drop-in functions over logits, or over hidden states.

    loss = Σ_t w_t · ( policy_t · importance_weight_t + kl_coef·KL_t − entropy_coef·entropy_t )

`ppo_loss` takes logits and touches them once; `linear_ppo_loss` takes hidden states and the
lm-head's weight and holds a chunk of the logits at a time. Neither carries state; sharding,
schedules and models are the trainer's business.

`policy_t` is PPO's clipped term, or the one that `objective` names: that of CISPO, SAPO, GSPO, or
SAO's double-sided mask.

Throughout: `T` is the temperature, `z` the logits after `logit_scale` and soft-capping, and

    logprob = z_y/T − logsumexp(z/T)          entropy = −Σ p log p with p = softmax(z/T)
    ratio   = exp(clamp(logprob − old_logprob, −20, 20))
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from fastppo_kernels import definition, records
from fastppo_kernels.records import (
    LOSS,
    SUMS,
    Gemm,
    LinearPPORows,
    Objective,
    PerToken,
    PPORows,
    Projection,
    Softmax,
    Sums,
)
from torch import Tensor

from fastppo.functional import arguments, operators, scalars
from fastppo.functional.gradients import (
    LinearTokenStatisticsFunction,
    PPOLossFunction,
    TokenStatisticsFunction,
)


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
    objective: str = "clip"

    @property
    def metrics(self) -> dict[str, Tensor]:
        """Detached 0-d tensors on the device; see `loss_metrics`. Formed when they are read."""
        return loss_metrics(self.sums, self.objective)


def combine_sums(total: Tensor, part: Tensor) -> Tensor:
    """Joins the `sums` of two losses over disjoint sets of tokens, say of two microbatches.

    Args:
        total, part: `PPOLoss.sums`, or what this function returned.

    Returns:
        the same shape and dtype: the sums added, the largest ratio the larger of both.

    Raises:
        ValueError, TypeError: one of them is no such tensor, or they differ in dtype or device.
    """
    _check_sums("total", total)
    arguments.tensor("part", part, shape=total.shape, like=total, dtypes=(total.dtype,))
    return records.combine_sums(total, part)


def _check_sums(name: str, sums: Tensor) -> None:
    arguments.tensor(name, sums, shape=(len(SUMS),), dtypes=(torch.float32, torch.float64))


def loss_metrics(sums: Tensor, objective: str = "clip") -> dict[str, Tensor]:
    """The metrics of `PPOLoss.sums`, which may be those of several calls joined by `combine_sums`.

    `policy_loss` is weighted as the loss is. The rest are means over the tokens of non-zero weight:
    `entropy`, `kl` (to the reference), `approx_kl` (to the old policy, k3), `ratio_mean`,
    `clip_fraction` (tokens whose gradient a clip cut off; of `cispo` and `dis` those outside the
    range, whatever their advantage's sign), `dual_clip_fraction`, and the four corners
    `ratio_{above,below}_{positive,negative}`: shares of tokens beyond the clip range, by the sign
    of the advantage. `ratio_variance`, `ratio_max`; `effective_sample_size`, (Σr)²/(n·Σr²), in
    (0, 1]. With `gspo` a token's ratio is its sequence's, but in `approx_kl`.

    Raises:
        ValueError, TypeError: `sums` is no such tensor, or there is no such objective.
    """
    _check_sums("sums", sums)
    arguments.choice("objective", objective, arguments.OBJECTIVES)
    part = Sums(*sums.unbind())
    n = part.tokens.clamp(min=1)
    clipped = part.above_positive + part.below_negative
    if objective in ("cispo", "dis"):
        clipped = clipped + part.below_positive + part.above_negative
    return {
        "policy_loss": part.policy_loss,
        "entropy": part.entropy / n,
        "kl": part.kl / n,
        "approx_kl": part.approx_kl / n,
        "clip_fraction": clipped / n,
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


def ppo_loss(
    logits: Tensor,
    tokens: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    objective: str = "clip",
    clip_ratio: float | tuple[float, float] | None = 0.2,
    dual_clip: float | None = None,
    sapo_tau: tuple[float, float] | None = None,
    cu_seqlens: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    ref_logits: Tensor | None = None,
    kl_coef: float = 0.0,
    kl_estimator: str = "k3",
    kl_ratio_weighted: bool = False,
    entropy_coef: float = 0.0,
    temperature: float | Tensor = 1.0,
    importance_weights: Tensor | None = None,
    aggregation: str = "token-mean",
    denominator: float | Tensor | None = None,
    weights: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    inplace: bool = False,
    backend: str = "auto",
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
        objective: "clip", PPO's; "cispo", the detached clipped ratio times the logprob; "sapo", a
            soft gate; "gspo", "clip" with the ratio of the token's sequence; "dis", the detached
            ratio times the logprob, and nothing where the ratio is outside the range.
        clip_ratio: ε, or (ε_low, ε_high), or None for no clipping; not read by "sapo".
        dual_clip: c > 1 bounds the loss by −c·A where A < 0 (Ye et al. 2020); of "clip" and "gspo".
        sapo_tau: the gate's temperatures, where A > 0 and elsewhere; None: (1, 1.05).
        cu_seqlens: [B + 1] int32 or int64, where each sequence of the flattened tokens begins, and
            N. Of "gspo"; without it the tokens' last axis runs along a sequence.
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
        backend: "auto", "triton", "cpu", or "torch": the definition, slowly.

    Returns:
        PPOLoss: loss () fp32, differentiable in the logits; logprobs, entropy, kl (...) fp32, nats,
        detached, 0 where masked; metrics, 0-d tensors on the device.

    Raises:
        ValueError, TypeError: shapes, dtypes, devices or options disagree; a token outside the
            vocabulary (on a CPU, or anywhere with FASTPPO_CHECK_TOKENS=1); a DTensor is passed. The
            values of a temperature or denominator that is a tensor are looked at on a CPU alone.

    Source: Schulman et al. 2017, eq. 7 and 9; the KL estimators, Schulman 2020; weighted by the
    ratio, DeepSeek-AI 2025 (DeepSeek-V3.2), section 3.1. Objectives: MiniMax 2025 (CISPO,
    arXiv:2506.13585), Gao et al. 2025 (SAPO, arXiv:2511.20347), Zheng et al. 2025 (GSPO-token,
    arXiv:2507.18071, eq. 13 and 14), Hou et al. 2026 (the mask of SAO, arXiv:2607.07508).
    """
    rows = arguments.rows_view("logits", logits)
    shape = logits.shape[:-1]
    scalars.boolean("inplace", inplace)
    ref_rows = None
    if ref_logits is not None:
        arguments.tensor("ref_logits", ref_logits, shape=logits.shape, like=logits)
        ref_rows = arguments.rows_view("ref_logits", ref_logits.detach())
    kernel_objective = arguments.objective(
        name=objective,
        sapo_tau=sapo_tau,
        clip_ratio=clip_ratio,
        dual_clip=dual_clip,
        kl_coef=kl_coef,
        kl_estimator=kl_estimator,
        kl_ratio_weighted=kl_ratio_weighted,
        entropy_coef=entropy_coef,
        has_ref_logprobs=ref_logprobs is not None,
        has_ref_logits=ref_rows is not None,
    )
    weights = arguments.token_weights(
        mask,
        aggregation=aggregation,
        denominator=denominator,
        weights=weights,
        shape=shape,
        like=logits,
    )
    softmax = arguments.softmax(
        temperature, logit_scale, softcap, shape=shape, like=logits, counted=weights != 0
    )
    per_token = arguments.per_token(
        tokens=tokens,
        old_logprobs=old_logprobs,
        advantages=advantages,
        weights=weights,
        importance_weights=importance_weights,
        ref_logprobs=ref_logprobs,
        shape=shape,
        like=logits,
    )
    # Of gspo alone, None of the others.
    sequence_starts = arguments.sequence_starts(cu_seqlens, objective, shape=shape, like=logits)
    backend = arguments.choose_backend(backend, logits)
    need_grad = arguments.needs_gradient(logits)
    if inplace and need_grad:
        _check_inplace(logits)
    if ref_rows is not None and kl_estimator != "full":
        # The sampled estimators need the reference's logprobs alone.
        if ref_logprobs is None:
            ref_logprobs = _logprobs_of_rows(ref_rows, per_token, softmax, backend)
            per_token = per_token._replace(ref_logprobs=ref_logprobs.to(weights.dtype))
        ref_rows = None
    if logits.dtype == torch.float16 and need_grad:
        # The gradient waits for the loss scale: it is formed in the backward pass.
        logprobs, entropies, full_kl = TokenStatisticsFunction.apply(
            rows, _tokens_or_zero(per_token), softmax, ref_rows, backend
        )
        return _loss_of_statistics(
            logprobs,
            entropies,
            None if ref_rows is None else full_kl,
            per_token=per_token,
            objective=kernel_objective,
            objective_name=objective,
            shape=shape,
            sequence_starts=sequence_starts,
        )
    kernel_per_token = per_token
    if sequence_starts is not None:
        # A token's ratio needs the logprobs of its whole sequence, hence a pass before.
        logprobs = _logprobs_of_rows(rows, per_token, softmax, backend)
        kernel_per_token = _with_sequence_ratios(per_token, logprobs, sequence_starts)
    gradient: Tensor | None
    if inplace and need_grad:
        # The operator reads the logits here and leaves their gradient in the same memory.
        gradient = rows.detach()
        result = operators.ppo_loss_inplace_op(
            logits=gradient,
            per_token=kernel_per_token,
            objective=kernel_objective,
            softmax=softmax,
            ref_logits=ref_rows,
            backend=backend,
        )
    else:
        result = operators.ppo_loss_op(
            logits=rows,
            per_token=kernel_per_token,
            objective=kernel_objective,
            softmax=softmax,
            ref_logits=ref_rows,
            need_grad=need_grad,
            backend=backend,
        )
        gradient = result.grad
    if sequence_starts is not None:
        result = result._replace(sums=_with_token_kl(result.sums, result.logprobs, per_token))
    if need_grad:
        loss = PPOLossFunction.apply(result.sums[LOSS], (gradient,), backend, rows)
    else:
        loss = result.sums[LOSS].clone()
    return _shaped_result(loss, result, shape, objective)


def _shaped_result(
    loss: Tensor, rows: PPORows | LinearPPORows, shape: torch.Size, objective: str
) -> PPOLoss:
    """The result of an operator on N rows, in the shape of the tokens."""
    return PPOLoss(
        loss=loss,
        logprobs=rows.logprobs.view(shape),
        entropy=rows.entropy.view(shape),
        kl=rows.kl.view(shape),
        sums=rows.sums,
        objective=objective,
    )


def _logprobs_of_rows(
    logits: Tensor, per_token: PerToken, softmax: Softmax, backend: str
) -> Tensor:
    """[N] logprobs of the tokens under rows of logits, without a gradient."""
    stats = operators.token_stats_op(
        logits=logits.detach(),
        tokens=_tokens_or_zero(per_token),
        softmax=softmax,
        ref_logits=None,
        backend=backend,
    )
    return stats.logprobs


def _with_sequence_ratios(
    per_token: PerToken, logprobs: Tensor, sequence_starts: Tensor
) -> PerToken:
    """GSPO: old logprobs from which the kernel, which knows no sequences, forms for each token the
    ratio of its sequence.

    Args:
        logprobs: [N], of the policy.
    """
    return per_token._replace(
        old_logprobs=definition.sequence_ratio_logprobs(
            logprobs, per_token.old_logprobs, per_token.weights != 0, sequence_starts
        )
    )


def _with_token_kl(sums: Tensor, logprobs: Tensor, per_token: PerToken) -> Tensor:
    """GSPO: the kernel's sums, with `approx_kl` formed from the old policy's own logprobs in place
    of those of `_with_sequence_ratios`.

    Args:
        logprobs: [N], of the policy.
        per_token: with the old policy's own logprobs.
    """
    difference = per_token.old_logprobs - logprobs
    difference = torch.where(per_token.weights != 0, difference, 0.0)
    sums = sums.clone()
    sums[SUMS.index("approx_kl")] = definition.sampled_kl(difference, "k3").sum()
    return sums


def _tokens_or_zero(per_token: PerToken) -> Tensor:
    """The tokens, with 0 in place of those of weight 0, which may be anything."""
    return torch.where(per_token.weights != 0, per_token.tokens, 0)


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
    *,
    per_token: PerToken,
    objective: Objective,
    objective_name: str,
    shape: torch.Size,
    sequence_starts: Tensor | None,
) -> PPOLoss:
    """PPO's loss, differentiable with respect to the statistics [N].

    In PyTorch on every device: N numbers are not worth a kernel.

    Args:
        objective_name: as `ppo_loss` takes it.
        sequence_starts: of GSPO; else None.
    """
    counted = per_token.weights != 0
    per_token_of_loss = per_token
    if sequence_starts is not None:
        per_token_of_loss = _with_sequence_ratios(per_token, logprobs, sequence_starts)
    loss, sums, kl = definition.loss_of_statistics(
        logprobs, entropies, full_kl, per_token_of_loss, objective
    )
    if sequence_starts is not None:
        sums = _with_token_kl(sums, logprobs.detach(), per_token)
    return PPOLoss(
        loss=loss,
        logprobs=torch.where(counted, logprobs.detach(), 0.0).view(shape),
        entropy=torch.where(counted, entropies.detach(), 0.0).view(shape),
        kl=kl.view(shape),
        sums=sums,
        objective=objective_name,
    )


# ------------------------------------------------------------------------- loss from hidden states


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
    objective: str = "clip",
    clip_ratio: float | tuple[float, float] | None = 0.2,
    dual_clip: float | None = None,
    sapo_tau: tuple[float, float] | None = None,
    cu_seqlens: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    ref_hidden: Tensor | None = None,
    ref_weight: Tensor | None = None,
    ref_bias: Tensor | None = None,
    kl_coef: float = 0.0,
    kl_estimator: str = "k3",
    kl_ratio_weighted: bool = False,
    entropy_coef: float = 0.0,
    temperature: float | Tensor = 1.0,
    importance_weights: Tensor | None = None,
    aggregation: str = "token-mean",
    denominator: float | Tensor | None = None,
    weights: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    backend: str = "auto",
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
        PPOLoss, as `ppo_loss` does; the loss is differentiable in hidden, weight and bias.

    Raises:
        ValueError, TypeError: shapes, dtypes, devices or options disagree; a DTensor is passed.
    """
    head = arguments.projection(hidden, weight, bias)
    ref = arguments.ref_projection(ref_hidden, ref_weight, ref_bias, hidden=hidden, weight=weight)
    gemm = arguments.gemm(chunk_size, hidden)
    shape = hidden.shape[:-1]
    kernel_objective = arguments.objective(
        name=objective,
        sapo_tau=sapo_tau,
        clip_ratio=clip_ratio,
        dual_clip=dual_clip,
        kl_coef=kl_coef,
        kl_estimator=kl_estimator,
        kl_ratio_weighted=kl_ratio_weighted,
        entropy_coef=entropy_coef,
        has_ref_logprobs=ref_logprobs is not None,
        has_ref_logits=ref is not None,
    )
    weights = arguments.token_weights(
        mask,
        aggregation=aggregation,
        denominator=denominator,
        weights=weights,
        shape=shape,
        like=hidden,
    )
    softmax = arguments.softmax(
        temperature, logit_scale, softcap, shape=shape, like=hidden, counted=weights != 0
    )
    per_token = arguments.per_token(
        tokens=tokens,
        old_logprobs=old_logprobs,
        advantages=advantages,
        weights=weights,
        importance_weights=importance_weights,
        ref_logprobs=ref_logprobs,
        shape=shape,
        like=hidden,
    )
    # Of gspo alone, None of the others.
    sequence_starts = arguments.sequence_starts(cu_seqlens, objective, shape=shape, like=hidden)
    backend = arguments.choose_backend(backend, hidden)
    wanted = arguments.gradients_wanted(head)
    need_grad = any(wanted)
    is_fp16 = gemm.dtype == torch.float16 and need_grad
    if is_fp16 and ref is not None and kl_estimator == "full":
        raise ValueError(
            "kl_estimator='full' needs GEMMs in bfloat16 or float32, got float16, where its "
            "gradient would underflow; ppo_loss on the logits takes float16"
        )
    compact = mask is not None and _host_may_wait(hidden)
    statistics = functools.partial(
        _statistics_of_weighted_rows,
        per_token=per_token,
        softmax=softmax,
        gemm=gemm,
        compact=compact,
        backend=backend,
    )
    if ref is not None and kl_estimator != "full":
        # The sampled estimators need the reference's logprobs alone.
        if ref_logprobs is None:
            ref_logprobs, _ = statistics(ref)
            per_token = per_token._replace(ref_logprobs=ref_logprobs)
        ref = None
    if is_fp16:
        # 8·N·H·V FLOP, because backward forms the logits again, after the loss scale.
        logprobs, entropies = statistics(head)
        return _loss_of_statistics(
            logprobs,
            entropies,
            None,
            per_token=per_token,
            objective=kernel_objective,
            objective_name=objective,
            shape=shape,
            sequence_starts=sequence_starts,
        )
    kernel_per_token = per_token
    if sequence_starts is not None:
        # A token's ratio needs the logprobs of its whole sequence, hence a pass before.
        with torch.no_grad():
            logprobs, _ = statistics(head)
        kernel_per_token = _with_sequence_ratios(per_token, logprobs, sequence_starts)
    result = operators.linear_ppo_loss_op(
        projection=head,
        per_token=kernel_per_token,
        objective=kernel_objective,
        softmax=softmax,
        ref_projection=ref,
        gemm=gemm,
        wanted=wanted,
        compact=compact,
        backend=backend,
    )
    if sequence_starts is not None:
        result = result._replace(sums=_with_token_kl(result.sums, result.logprobs, per_token))
    if need_grad:
        gradients = operators.only_wanted(result.grads, wanted)
        loss = PPOLossFunction.apply(
            result.sums[LOSS], gradients, backend, head.hidden, head.weight, head.bias
        )
    else:
        loss = result.sums[LOSS].clone()
    return _shaped_result(loss, result, shape, objective)


def _host_may_wait(hidden: Tensor) -> bool:
    """Whether the host may wait for a GPU to count unmasked rows: not in a CUDA-graph capture, nor
    under torch.compile, whose graphs may be captured."""
    if torch.compiler.is_compiling():
        return False
    return not (hidden.is_cuda and torch.cuda.is_current_stream_capturing())


def _statistics_of_weighted_rows(
    head: Projection,
    *,
    per_token: PerToken,
    softmax: Softmax,
    gemm: Gemm,
    compact: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Logprobs and entropy [N] of the tokens that count, differentiable in the head's parts.

    Rows of weight 0 are left out with `compact`, and then 0; else they are read as zeros, because
    0·NaN would reach the weight's gradient.
    """
    hidden = head.hidden
    tokens = per_token.tokens
    counted = per_token.weights != 0
    rows = None
    if compact:
        rows = counted.nonzero().squeeze(-1)
        hidden = hidden[rows]
        tokens = tokens[rows]
        softmax = softmax.at(rows)
    else:
        hidden = torch.where(counted.unsqueeze(-1), hidden, 0.0)
        tokens = _tokens_or_zero(per_token)
    logprobs, entropies, _ = LinearTokenStatisticsFunction.apply(
        hidden, head.weight, head.bias, tokens, softmax, None, gemm, backend
    )
    if rows is None:
        return logprobs, entropies
    zeros = logprobs.new_zeros(counted.shape)
    return zeros.index_put((rows,), logprobs), zeros.index_put((rows,), entropies)
