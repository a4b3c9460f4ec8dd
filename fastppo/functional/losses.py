"""PPO's loss as drop-in functions over logits or hidden states.

    loss = Σ_t w_t · ( policy_t · importance_weight_t + kl_coef·KL_t − entropy_coef·entropy_t )

`ppo_loss` takes logits and reads them once. `linear_ppo_loss` takes hidden states and the lm-head's
weight, and holds only a chunk of the logits at a time. Both are stateless. `LossKeywords` declares
the keywords of both, and `loss_operands` checks them. Both share `_loss`, and differ in the source
of their logprobs: `_Logits` and `_HiddenStates`.

`policy_t` is PPO's clipped term, or the one selected by `objective`: CISPO, SAPO, GSPO, SAO's
double-sided mask, or DPPO's divergence masks. With `T` the temperature and `z` the logits after
`logit_scale` and soft-capping:

    logprob = z_y/T − logsumexp(z/T)          entropy = −Σ p log p with p = softmax(z/T)
    ratio   = exp(clamp(logprob − old_logprob, −20, 20))
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple, TypeVar, Unpack

import torch
from fastppo_kernels import definition, records
from fastppo_kernels.records import (
    LOSS,
    SUMS,
    Gemm,
    GradientsWanted,
    LinearPPORows,
    PerToken,
    PPORows,
    Projection,
    Sums,
)
from torch import Tensor

from fastppo.functional import arguments, operators, scalars, user_functions
from fastppo.functional.gradients import (
    LinearTokenStatisticsFunction,
    PPOLossFunction,
    TokenStatisticsFunction,
)
from fastppo.functional.loss_keywords import (
    CUSTOM,
    OBJECTIVES,
    LossKeywords,
    with_loss_keywords,
)
from fastppo.functional.loss_operands import LossOperands, loss_operands
from fastppo.functional.operands import (
    choose_gemm,
    gradients_wanted,
    needs_gradient,
    projection,
    ref_projection,
    rows_view,
)

NO_GRADIENTS = GradientsWanted(hidden=False, weight=False, bias=False)


class PPOLoss(NamedTuple):
    """Result of `ppo_loss` and `linear_ppo_loss`."""

    loss: Tensor
    """The loss, () fp32, differentiable."""
    logprobs: Tensor
    """Logprobs of the tokens, (...) fp32 in nats, detached, 0 where masked."""
    entropy: Tensor
    """Entropies, like `logprobs`."""
    kl: Tensor
    """KL to the reference, like `logprobs`."""
    sums: Tensor
    """Sums behind the metrics. `combine_sums` adds those of several calls."""
    objective: str = "clip"
    """Name of the objective, which `loss_metrics` needs."""

    @property
    def metrics(self) -> dict[str, Tensor]:
        """Metrics as detached 0-d tensors on the device, computed on access: `loss_metrics`."""
        return loss_metrics(self.sums, self.objective)


def combine_sums(total: Tensor, part: Tensor) -> Tensor:
    """Combine the `sums` of two losses over disjoint tokens, such as two microbatches.

    Args:
        total, part: `PPOLoss.sums`, or results of this function.

    Returns:
        Tensor of the same shape and dtype, with the sums added and the larger of the largest
        ratios.

    Raises:
        ValueError, TypeError: a shape is wrong, or dtypes or devices differ.
    """
    _check_sums("total", total)
    arguments.tensor("part", part, shape=total.shape, like=total, dtypes=(total.dtype,))
    return records.combine_sums(total, part)


def _check_sums(name: str, sums: Tensor) -> None:
    arguments.tensor(name, sums, shape=(len(SUMS),), dtypes=(torch.float32, torch.float64))


def loss_metrics(sums: Tensor, objective: str = "clip") -> dict[str, Tensor]:
    """Return the metrics of `PPOLoss.sums`, or of several combined by `combine_sums`.

    `policy_loss` is weighted like the loss. The others are means over the tokens of non-zero
    weight: `entropy`; `kl` to the reference; `approx_kl` to the old policy (k3); `ratio_mean`,
    `ratio_variance`, `ratio_max`; `clip_fraction`, the share of tokens without gradient because of
    the clip (for `cispo` and `dis`: outside the range, whatever their advantage; for `custom`, a
    function: with an advantage and no gradient); `dual_clip_fraction`; the shares
    `ratio_{above,below}_{positive,negative}` of tokens beyond the clip range, by the advantage's
    sign (for `dppo_tv` and `dppo_kl`: beyond the divergence); and `effective_sample_size`,
    (Σr)²/(n·Σr²) in (0, 1]. Under `gspo` the ratio is that of the sequence, except in `approx_kl`.

    Raises:
        ValueError, TypeError: `sums` has a wrong shape or dtype, or the objective is unknown.
    """
    _check_sums("sums", sums)
    scalars.choice("objective", objective, (*OBJECTIVES, CUSTOM))
    part = Sums(*sums.unbind())
    n = part.tokens.clamp(min=1)
    mean = Sums(*(sums / n).unbind())
    clipped = part.above_positive + part.below_negative
    if objective in ("cispo", "dis", CUSTOM):
        clipped = part.outside
    return {
        "policy_loss": part.policy_loss,
        "entropy": mean.entropy,
        "kl": mean.kl,
        "approx_kl": mean.approx_kl,
        "clip_fraction": clipped / n,
        "dual_clip_fraction": mean.dual_clipped,
        "ratio_mean": mean.ratio,
        "ratio_variance": (mean.ratio_squared - mean.ratio**2).clamp(min=0),
        "ratio_max": part.ratio_max,
        "effective_sample_size": part.ratio**2
        / (n * part.ratio_squared).clamp(min=torch.finfo(sums.dtype).tiny),
        "ratio_above_positive": mean.above_positive,
        "ratio_below_positive": mean.below_positive,
        "ratio_above_negative": mean.above_negative,
        "ratio_below_negative": mean.below_negative,
    }


# ------------------------------------------------------------------------------- loss from logits


@with_loss_keywords
def ppo_loss(
    logits: Tensor,
    tokens: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    ref_logits: Tensor | None = None,
    inplace: bool = False,
    **keywords: Unpack[LossKeywords],
) -> PPOLoss:
    """Compute PPO's clipped loss, the entropy and the KL in one pass over the logits.

        loss_t = −min(r_t·A_t, clip(r_t, 1−ε_low, 1+ε_high)·A_t)·importance_weight_t
                 + kl_coef·KL_t − entropy_coef·H_t

    Args:
        logits: (..., V) bf16, fp16, fp32 or fp64 with a dense last axis. Row t predicts tokens[t].
            Sums are in fp32 (fp64 for fp64). `logits[:, :-1]` is not copied.
        tokens: (...) int64, the sampled tokens. Masked entries are ignored.
        old_logprobs: (...) nats, at the same temperature. No gradient.
        advantages: (...), one per token. No gradient.
        mask: (...) bool, True on response tokens. Masked tokens add no loss and no gradient.
        ref_logits: (..., V), the reference's logits, for `kl_estimator="full"`. The sampled
            estimators take the tokens' logprobs from it if `ref_logprobs` is missing. No gradient.
        inplace: whether to write the gradient over the logits, which saves the memory of one copy.
            Backward may then run only once. The logits must be the output of an operation, such as
            an lm-head, because a leaf's `.grad` would share its memory, and must not be fp16.
        keywords: `LossKeywords`, listed at the end.

    Returns:
        PPOLoss: the loss, () fp32, differentiable in the logits; logprobs, entropy and KL of the
        tokens, (...) fp32 in nats, detached, 0 where masked; and metrics, 0-d tensors on the
        device.

    Raises:
        ValueError, TypeError: shapes, dtypes, devices or options are inconsistent; a token is
            outside the vocabulary (checked on a CPU, or anywhere with FASTPPO_CHECK_VALUES=1);
            there is a NaN or a positive logprob (checked with FASTPPO_CHECK_VALUES=1); a tensor is
            a DTensor. Values of a temperature or denominator tensor are checked only on a CPU.

    Source: Schulman et al. 2017, eq. 7 and 9. The KL estimators: Schulman 2020. Their product with
    the ratio: DeepSeek-AI 2025 (DeepSeek-V3.2), section 3.1. Objectives: MiniMax 2025 (CISPO,
    arXiv:2506.13585), Gao et al. 2025 (SAPO, arXiv:2511.20347), Zheng et al. 2025 (GSPO-token,
    arXiv:2507.18071, eq. 13 and 14), Hou et al. 2026 (the mask of SAO, arXiv:2607.07508), Qi et al.
    2026 (DPPO, arXiv:2602.04879, eq. 11 to 14).
    """
    rows = rows_view("logits", logits)
    scalars.boolean("inplace", inplace)
    ref = None
    if ref_logits is not None:
        arguments.tensor("ref_logits", ref_logits, shape=logits.shape, like=logits)
        ref = _Logits(rows_view("ref_logits", ref_logits.detach()))
    operands = loss_operands(
        like=logits,
        shape=logits.shape[:-1],
        has_ref=ref is not None,
        tokens=tokens,
        old_logprobs=old_logprobs,
        advantages=advantages,
        mask=mask,
        keywords=keywords,
    )
    need_grad = needs_gradient(logits)
    if inplace and need_grad:
        _check_inplace(logits)
    out = _loss(_Logits(rows, need_grad, inplace and need_grad), ref, operands)
    arguments.check_values("logits, which give the logprobs,", out.logprobs)
    return out


def _check_inplace(logits: Tensor) -> None:
    """Raise an error if the logits' memory cannot hold the gradient."""
    if logits.dtype == torch.float16:
        raise ValueError(
            "inplace=True needs bfloat16, float32 or float64 logits, got float16, whose gradient "
            "needs the loss scale of the backward pass"
        )
    if logits.dim() > 3 and not logits.is_contiguous():
        raise ValueError(
            f"inplace=True needs logits that collapse to [N, V] or [B, T, V] without a copy, got "
            f"shape {list(logits.shape)} with strides {logits.stride()}"
        )
    shape_and_strides = zip(logits.shape[:-1], logits.stride()[:-1], strict=True)
    axes = [(size, stride) for size, stride in shape_and_strides if size > 1]
    # In pairs, since torch.compile cannot sort symbolic strides.
    overlap = any(stride < logits.shape[-1] for _, stride in axes) or any(
        a_stride < b_size * b_stride and b_stride < a_size * a_stride
        for (a_size, a_stride), (b_size, b_stride) in itertools.combinations(axes, 2)
    )
    if overlap:
        raise ValueError(
            f"inplace=True needs rows that do not overlap, got strides {logits.stride()}"
        )


# ------------------------------------------------------------------------- loss from hidden states


@with_loss_keywords
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
    **keywords: Unpack[LossKeywords],
) -> PPOLoss:
    """Compute `ppo_loss(hidden @ weight.T + bias, ...)` with only a chunk of logits in memory.

    `chunk_size` rows of logits at a time are computed and replaced by their gradient, which gives
    the gradients of hidden and weight in 6·N·H·V FLOP, against 8·N·H·V with recomputed logits.
    Masked rows never reach the head. (Counting them synchronizes once with a GPU. In a graph
    capture and under `torch.compile` they pass with weight 0.) On a CPU, rows with a zero gradient
    skip the last two GEMMs.

    Under autocast the GEMMs run in the autocast dtype, otherwise in the dtype of `hidden`. In fp16
    the gradient needs the loss scale, so backward recomputes the logits, and `kl_estimator="full"`
    is not supported. The same holds for a function as `objective`.

    Args:
        hidden: (..., H), the final hidden states. Row t predicts tokens[t].
        weight: [V, H], the lm-head's weight or the tied embedding. Its gradient is accumulated in
            fp32 and cast once; `requires_grad=False` skips it. With LoRA adapters on the lm-head,
            pass `head_weight(model.lm_head)`, because `.weight` lacks them.
        tokens, old_logprobs, advantages, mask: see `ppo_loss`.
        bias: [V] or None.
        chunk_size: the number of rows of logits in memory. The default is all rows up to 512 MiB
            of bf16 on a GPU, or 32 MiB of fp32 on a CPU. Beyond that it is an eighth of the rows,
            1024 to 4096, on a GPU, and a quarter, 384 to 512, on a CPU.
        ref_hidden, ref_weight, ref_bias: the reference's hidden states (..., H'), head [V, H'] and
            bias, for `kl_estimator="full"` or in place of `ref_logprobs`. No gradient.
        keywords: `LossKeywords`, listed at the end.

    Returns:
        PPOLoss: as of `ppo_loss`, differentiable in hidden, weight and bias.

    Raises:
        ValueError, TypeError: see `ppo_loss`.
    """
    head = projection(hidden, weight, bias)
    ref = ref_projection(ref_hidden, ref_weight, ref_bias, hidden=hidden, weight=weight)
    gemm = choose_gemm(chunk_size, hidden)
    operands = loss_operands(
        like=hidden,
        shape=hidden.shape[:-1],
        has_ref=ref is not None,
        tokens=tokens,
        old_logprobs=old_logprobs,
        advantages=advantages,
        mask=mask,
        keywords=keywords,
    )
    wanted = gradients_wanted(head)
    compact = mask is not None and _host_may_wait(hidden)
    source = _HiddenStates(head, gemm, compact, wanted)
    if ref is not None and operands.objective.kl_estimator == "full":
        if source.is_fp16:
            raise ValueError(
                "kl_estimator='full' needs GEMMs in bfloat16 or float32, got float16, where its "
                "gradient would underflow; ppo_loss on the logits takes float16"
            )
        if operands.function is not None:
            raise ValueError(
                "kl_estimator='full' is fused with the built-in objectives: with a function, use "
                "another estimator, or ppo_loss on the logits"
            )
    out = _loss(source, None if ref is None else _HiddenStates(ref, gemm, compact), operands)
    arguments.check_values("hidden and weight, which give the logprobs,", out.logprobs)
    return out


def _host_may_wait(hidden: Tensor) -> bool:
    """Return whether the host may wait for a GPU to count unmasked rows.

    It must not in the capture of a CUDA graph, nor under torch.compile, whose graphs may be
    captured.
    """
    if torch.compiler.is_compiling():
        return False
    return not (hidden.is_cuda and torch.cuda.is_current_stream_capturing())


# -------------------------------------------------------------------------- logits, hidden states


class _Logits(NamedTuple):
    """Logits as the input of a loss: [N, V] or [B, T, V]."""

    rows: Tensor
    need_grad: bool = False
    inplace: bool = False

    @property
    def is_fp16(self) -> bool:
        """Whether the gradient must wait for the loss scale."""
        return self.need_grad and self.rows.dtype == torch.float16

    def statistics(
        self, operands: LossOperands, ref: _Logits | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return (logprobs, entropy, full KL) [N], differentiable in the logits."""
        logprobs, entropies, full_kl = TokenStatisticsFunction.apply(
            self.rows,
            _tokens_or_zero(operands.per_token),
            operands.softmax,
            None if ref is None else ref.rows,
            operands.backend,
        )
        return logprobs, entropies, None if ref is None else full_kl

    def rows_and_loss(
        self, operands: LossOperands, ref: _Logits | None
    ) -> tuple[PPORows | LinearPPORows, Tensor]:
        """Return the operator's results, and the loss, differentiable in the logits."""
        gradient: Tensor | None
        if self.inplace:
            # The operator reads the logits here and leaves their gradient in the same memory.
            gradient = self.rows.detach()
            result = operators.ppo_loss_inplace_op(
                logits=gradient,
                per_token=operands.per_token,
                objective=operands.objective,
                softmax=operands.softmax,
                ref_logits=None if ref is None else ref.rows,
                backend=operands.backend,
            )
        else:
            result = operators.ppo_loss_op(
                logits=self.rows,
                per_token=operands.per_token,
                objective=operands.objective,
                softmax=operands.softmax,
                ref_logits=None if ref is None else ref.rows,
                need_grad=self.need_grad,
                backend=operands.backend,
            )
            gradient = result.grad
        loss = result.sums[LOSS]
        if not self.need_grad:
            return result, loss.clone()
        return result, PPOLossFunction.apply(loss, (gradient,), operands.backend, self.rows)


class _HiddenStates(NamedTuple):
    """Hidden states and lm-head as the input of a loss."""

    head: Projection
    gemm: Gemm
    compact: bool
    """Leave rows of weight 0 out of the GEMMs. Otherwise they are read as zeros, because 0·NaN
    would reach the weight's gradient."""
    wanted: GradientsWanted = NO_GRADIENTS

    @property
    def is_fp16(self) -> bool:
        """Whether the gradient must wait for the loss scale."""
        return any(self.wanted) and self.gemm.dtype == torch.float16

    def statistics(
        self, operands: LossOperands, ref: _HiddenStates | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return (logprobs, entropy, None) [N], differentiable in the head's parts."""
        hidden = self.head.hidden
        per_token = operands.per_token
        tokens = per_token.tokens
        softmax = operands.softmax
        counted = per_token.weights != 0
        rows = None
        if self.compact:
            rows = counted.nonzero().squeeze(-1)
            hidden = hidden[rows]
            tokens = tokens[rows]
            softmax = softmax.at(rows)
        else:
            hidden = torch.where(counted.unsqueeze(-1), hidden, 0.0)
            tokens = _tokens_or_zero(per_token)
        logprobs, entropies, _ = LinearTokenStatisticsFunction.apply(
            hidden,
            self.head.weight,
            self.head.bias,
            tokens,
            softmax,
            None,
            self.gemm,
            operands.backend,
        )
        if rows is None:
            return logprobs, entropies, None
        zeros = logprobs.new_zeros(counted.shape)
        return (
            zeros.index_put((rows,), logprobs),
            zeros.index_put((rows,), entropies),
            None,
        )

    def rows_and_loss(
        self, operands: LossOperands, ref: _HiddenStates | None
    ) -> tuple[PPORows | LinearPPORows, Tensor]:
        """Return the operator's results, and the loss, differentiable in the head's parts."""
        result = operators.linear_ppo_loss_op(
            projection=self.head,
            per_token=operands.per_token,
            objective=operands.objective,
            softmax=operands.softmax,
            ref_projection=None if ref is None else ref.head,
            gemm=self.gemm,
            wanted=self.wanted,
            compact=self.compact,
            backend=operands.backend,
        )
        loss = result.sums[LOSS]
        if not any(self.wanted):
            return result, loss.clone()
        gradients = operators.only_wanted(result.grads, self.wanted)
        head = self.head
        return result, PPOLossFunction.apply(
            loss, gradients, operands.backend, head.hidden, head.weight, head.bias
        )


# --------------------------------------------------------------------------------------- the loss


Source = TypeVar("Source", _Logits, _HiddenStates)


def _loss(source: Source, ref: Source | None, operands: LossOperands) -> PPOLoss:
    """Compute the loss of logits or of hidden states, with an optional reference."""
    if ref is not None and operands.objective.kl_estimator != "full":
        # The sampled estimators need only the reference's logprobs.
        if operands.per_token.ref_logprobs is None:
            with torch.no_grad():
                ref_logprobs, _, _ = ref.statistics(operands)
            operands = operands.with_per_token(ref_logprobs=ref_logprobs)
        ref = None
    if source.is_fp16 or operands.function is not None:
        # Backward computes the gradient: the loss scale, or the derivative of the function, is
        # known only then.
        logprobs, entropies, full_kl = source.statistics(operands, ref)
        return _loss_of_statistics(logprobs, entropies, full_kl, operands)
    fused_operands = operands
    if operands.sequence_starts is not None:
        # A token's ratio needs the logprobs of its whole sequence: one more pass.
        with torch.no_grad():
            logprobs, _, _ = source.statistics(operands)
        fused_operands = _with_sequence_ratios(operands, logprobs)
    rows, loss = source.rows_and_loss(fused_operands, ref)
    sums = rows.sums
    if operands.sequence_starts is not None:
        sums = _with_token_kl(sums, rows.logprobs, operands.per_token)
    return PPOLoss(
        loss=loss,
        logprobs=rows.logprobs.view(operands.shape),
        entropy=rows.entropy.view(operands.shape),
        kl=rows.kl.view(operands.shape),
        sums=sums,
        objective=operands.objective_name,
    )


def _loss_of_statistics(
    logprobs: Tensor, entropies: Tensor, full_kl: Tensor | None, operands: LossOperands
) -> PPOLoss:
    """Compute the loss, differentiable in the statistics [N].

    It uses PyTorch on every device, because N numbers do not need a kernel.
    """
    counted = operands.per_token.weights != 0
    loss_operands = operands
    token_loss = None
    if operands.function is not None:
        token_loss = functools.partial(
            user_functions.token_loss, operands.function, cu_seqlens=operands.sequence_starts
        )
    elif operands.sequence_starts is not None:
        loss_operands = _with_sequence_ratios(operands, logprobs)
    loss, sums, kl = definition.loss_of_statistics(
        logprobs, entropies, full_kl, loss_operands.per_token, operands.objective, token_loss
    )
    if operands.function is None and operands.sequence_starts is not None:
        sums = _with_token_kl(sums, logprobs.detach(), operands.per_token)
    return PPOLoss(
        loss=loss,
        logprobs=torch.where(counted, logprobs.detach(), 0.0).view(operands.shape),
        entropy=torch.where(counted, entropies.detach(), 0.0).view(operands.shape),
        kl=kl.view(operands.shape),
        sums=sums,
        objective=operands.objective_name,
    )


def _with_sequence_ratios(operands: LossOperands, logprobs: Tensor) -> LossOperands:
    """Replace the old logprobs so that each token's ratio is that of its sequence (GSPO).

    The kernels know no sequences.

    Args:
        logprobs: [N], the policy's.
    """
    per_token = operands.per_token
    assert operands.sequence_starts is not None
    old_logprobs = definition.sequence_ratio_logprobs(
        logprobs, per_token.old_logprobs, per_token.weights != 0, operands.sequence_starts
    )
    return operands.with_per_token(old_logprobs=old_logprobs)


def _with_token_kl(sums: Tensor, logprobs: Tensor, per_token: PerToken) -> Tensor:
    """Return the sums with `approx_kl` computed from the old policy's true logprobs (GSPO)."""
    difference = per_token.old_logprobs - logprobs
    difference = torch.where(per_token.weights != 0, difference, 0.0)
    sums = sums.clone()
    sums[SUMS.index("approx_kl")] = definition.sampled_kl(difference, "k3").sum()
    return sums


def _tokens_or_zero(per_token: PerToken) -> Tensor:
    """Return the tokens, with 0 in place of masked ones, which may hold anything."""
    return torch.where(per_token.weights != 0, per_token.tokens, 0)
