"""The PPO losses: drop-in functions over logits, over hidden states, or over logprobs.

    loss = Σ_t w_t · ( policy_t · importance_weight_t + kl_coef·KL_t − entropy_coef·entropy_t )

`ppo_loss` takes logits and touches them once; `linear_ppo_loss` takes hidden states and the
lm-head's weight and holds a chunk of the logits at a time. `token_logprobs`, `token_stats` and
`linear_token_logprobs` give the statistics alone, with gradients. `policy_loss`, `value_loss`,
`entropy` and `total_loss` are the functions that PPO tutorials write by hand. None of them carries
state; sharding, schedules and models are the trainer's business.

Throughout: `T` is the temperature, `z` the logits after `logit_scale` and soft-capping, and

    logprob = z_y/T − logsumexp(z/T)          entropy = −Σ p log p with p = softmax(z/T)
    ratio   = exp(clamp(logprob − old_logprob, −20, 20))
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from fastppo_kernels import reference
from torch import Tensor

from fastppo import ops, validation


class PPOLoss(NamedTuple):
    """Result of `ppo_loss` and `linear_ppo_loss`."""

    loss: Tensor
    """() fp32, differentiable."""
    logprobs: Tensor
    """(...) fp32, nats, detached, 0 where masked; the same for `entropy` and `kl`."""
    entropy: Tensor
    kl: Tensor
    metrics: dict[str, Tensor]
    """Detached 0-d tensors on the device; see `loss_metrics`."""
    sums: Tensor
    """What the metrics are made of. Those of several calls join with `combine_sums`."""


class TokenStats(NamedTuple):
    """Result of `token_stats`: (...) fp32, nats, differentiable; kl is None without a reference."""

    logprobs: Tensor
    entropy: Tensor
    kl: Tensor | None


def aggregation_weights(
    mask: Tensor,
    aggregation: str = "token-mean",
    denominator: float | Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The weight w_t of each token, so that `loss = Σ w_t · token_loss_t`.

    | aggregation           | w_t                  | default denominator D              |
    |-----------------------|----------------------|------------------------------------|
    | `token-mean`          | mask / D             | Σ mask                             |
    | `seq-mean-token-mean` | mask / (length · D)  | sequences with at least one token  |
    | `seq-mean-token-sum`  | mask / D             | sequences with at least one token  |
    | `token-sum`           | mask / D             | 1                                  |

    Pass the *global* denominator (of all microbatches and ranks), and the loss does not depend on
    how the batch is split.

    Args:
        mask: (...) bool; for the seq modes its last axis runs along a sequence, (..., T).
        denominator: a number > 0 or a 0-d tensor that replaces the default.
        dtype: fp32, or fp64 for a loss in fp64: 1/D rounded to fp32 is off by 3e-8.

    Returns:
        (...) of `dtype`, 0 where masked; all 0 if nothing is unmasked.

    Raises:
        ValueError, TypeError: a mask that is not bool, an unknown mode, a denominator that is not
            positive or not 0-d; a seq mode without an axis of sequences.
    """
    validation.choice("aggregation", aggregation, validation.AGGREGATIONS)
    validation.tensor("mask", mask, dtypes=(torch.bool,))
    if isinstance(denominator, Tensor):
        validation.tensor("denominator", denominator, shape=(), dtypes=validation.NUMBERS)
        denominator = denominator.detach()
    elif denominator is not None:
        validation.at_least("denominator", denominator, 0.0, strictly=True)
    weights = mask.to(dtype)
    by_sequence = aggregation.startswith("seq-")
    if by_sequence and mask.dim() < 2:
        raise ValueError(
            f"aggregation={aggregation!r} needs sequences along the last axis, (..., T), got mask "
            f"of shape {list(mask.shape)}; for a flat list of tokens pass `weights`"
        )
    lengths = weights.sum(-1, keepdim=True) if by_sequence else None
    if denominator is None:
        if lengths is not None:
            denominator = (lengths > 0).sum().clamp(min=1)
        else:
            denominator = weights.sum().clamp(min=1) if aggregation == "token-mean" else 1.0
    if aggregation == "seq-mean-token-mean":
        assert lengths is not None
        weights = weights / lengths.clamp(min=1)
    return weights / denominator


def _weights(
    shape: torch.Size,
    like: Tensor,
    mask: Tensor | None,
    aggregation: str,
    denominator: float | Tensor | None,
    weights: Tensor | None,
) -> Tensor:
    if mask is not None:
        validation.tensor("mask", mask, shape=shape, like=like, dtypes=(torch.bool,))
    wide = reference.accumulation_dtype(like.dtype)
    if weights is None:
        if mask is None:
            mask = torch.ones(shape, dtype=torch.bool, device=like.device)
        return aggregation_weights(mask, aggregation, denominator, dtype=wide)
    if denominator is not None or aggregation != "token-mean":
        raise ValueError(
            "weights already fix the aggregation: leave aggregation and denominator out"
        )
    validation.tensor("weights", weights, shape=shape, like=like)
    weights = weights.detach().to(wide)
    return weights if mask is None else torch.where(mask, weights, 0.0)


def loss_metrics(sums: Tensor) -> dict[str, Tensor]:
    """The metrics of `reference.SUMS` sums, which may be those of several calls combined.

    `policy_loss` is weighted as the loss is. The rest are means over the tokens of non-zero weight:
    `entropy`, `kl` (to the reference), `approx_kl` (to the old policy, k3), `ratio_mean`,
    `clip_fraction` (tokens whose gradient a clip cut off), `dual_clip_fraction`, and the four
    corners `ratio_{above,below}_{positive,negative}`: shares of tokens beyond the clip range, by
    the sign of the advantage. `ratio_max`; `effective_sample_size`, (Σr)²/(n·Σr²), in (0, 1].
    """
    part = dict(zip(reference.SUMS, sums.unbind(), strict=True))
    n = part["tokens"].clamp(min=1)
    metrics = {
        "policy_loss": part["policy_loss"],
        "entropy": part["entropy"] / n,
        "kl": part["kl"] / n,
        "approx_kl": part["approx_kl"] / n,
        "clip_fraction": (part["above_positive"] + part["below_negative"]) / n,
        "dual_clip_fraction": part["dual_clipped"] / n,
        "ratio_mean": part["ratio"] / n,
        "ratio_max": part["ratio_max"],
        "effective_sample_size": part["ratio"] ** 2
        / (n * part["ratio_squared"]).clamp(min=torch.finfo(sums.dtype).tiny),
    }
    for corner in ("above_positive", "below_positive", "above_negative", "below_negative"):
        metrics[f"ratio_{corner}"] = part[corner] / n
    return metrics


class _LossArguments(NamedTuple):
    per_token: tuple[Tensor | None, ...]  # as in ops.PER_TOKEN, flat
    options: ops.LossOptions


def _loss_arguments(
    shape: torch.Size,
    x: Tensor,
    tokens: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor | None,
    *,
    clip_ratio: float | tuple[float, float] | None,
    dual_clip: float | None,
    ref_logprobs: Tensor | None,
    has_full_reference: bool,
    kl_coef: float,
    kl_estimator: str,
    entropy_coef: float,
    temperature: float | Tensor,
    importance_weights: Tensor | None,
    aggregation: str,
    denominator: float | Tensor | None,
    weights: Tensor | None,
    logit_scale: float,
    softcap: float | None,
    backend: str,
) -> _LossArguments:
    """Checks and flattens what `ppo_loss` and `linear_ppo_loss` have in common."""
    wide = reference.accumulation_dtype(x.dtype)
    validation.tensor("tokens", tokens, shape=shape, like=x, dtypes=(torch.int64,))
    floats = {
        "old_logprobs": old_logprobs,
        "advantages": advantages,
        "importance_weights": importance_weights,
        "ref_logprobs": ref_logprobs,
    }
    flat: dict[str, Tensor | None] = {}
    for name, value in floats.items():
        if value is None and name in ("importance_weights", "ref_logprobs"):
            flat[name] = None
            continue
        validation.tensor(name, value, shape=shape, like=x, wants="one per token")
        assert value is not None
        flat[name] = value.detach().to(wide).reshape(-1)
    validation.choice("kl_estimator", kl_estimator, validation.KL_ESTIMATORS)
    validation.finite("kl_coef", kl_coef)
    validation.finite("entropy_coef", entropy_coef)
    if kl_estimator == "full" and kl_coef and not has_full_reference:
        raise ValueError(
            "kl_estimator='full' needs the reference's whole distribution: pass ref_logits "
            "(ref_hidden and ref_weight for linear_ppo_loss)"
        )
    if kl_estimator != "full" and kl_coef and ref_logprobs is None and not has_full_reference:
        raise ValueError(f"kl_coef={kl_coef} with kl_estimator={kl_estimator!r} needs ref_logprobs")
    w = _weights(shape, x, mask, aggregation, denominator, weights)
    clip_low, clip_high = validation.clip_range(clip_ratio)
    softmax, temperatures = _softmax_options(shape, x, temperature, logit_scale, softcap, backend)
    options = ops.LossOptions(
        *softmax,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=validation.dual_clip(dual_clip),
        kl_coef=float(kl_coef),
        kl_estimator=kl_estimator,
        entropy_coef=float(entropy_coef),
    )
    per_token = (
        tokens.reshape(-1),
        flat["old_logprobs"],
        flat["advantages"],
        w.reshape(-1),
        flat["importance_weights"],
        flat["ref_logprobs"],
        temperatures,
    )
    return _LossArguments(per_token, options)


def _softmax_options(
    shape: torch.Size,
    x: Tensor,
    temperature: float | Tensor,
    logit_scale: float,
    softcap: float | None,
    backend: str,
) -> tuple[ops.SoftmaxOptions, Tensor | None]:
    validation.at_least("logit_scale", logit_scale, 0.0, strictly=True)
    validation.finite("logit_scale", logit_scale)
    if softcap is not None:
        validation.at_least("softcap", softcap, 0.0, strictly=True)
        validation.finite("softcap", softcap)
    temperatures = None
    if isinstance(temperature, Tensor):
        if temperature.dim() > 0:
            validation.tensor(
                "temperature", temperature, shape=shape, like=x, wants="one per token"
            )
        wide = reference.accumulation_dtype(x.dtype)
        temperatures = temperature.detach().to(x.device, wide).expand(shape).reshape(-1)
    else:
        validation.at_least("temperature", temperature, 0.0, strictly=True)
        validation.finite("temperature", temperature)
    options = ops.SoftmaxOptions(
        1.0 if isinstance(temperature, Tensor) else float(temperature),
        float(logit_scale),
        None if softcap is None else float(softcap),
        ops.choose_backend(backend, x),
    )
    return options, temperatures


def _rows_view(name: str, logits: Tensor) -> Tensor:
    """[N, V] where the leading axes collapse without a copy, [B, T, V] where they do not."""
    validation.tensor(name, logits)
    if logits.dim() < 2:
        raise ValueError(f"{name} must be (..., V) with at least 2 axes, got {list(logits.shape)}")
    if logits.shape[-1] == 0:
        raise ValueError(f"{name} must have a vocabulary of at least 1, got {list(logits.shape)}")
    if logits.stride(-1) != 1 and logits.shape[-1] > 1:
        raise ValueError(f"{name} must have a dense last axis, got strides {logits.stride()}")
    if logits.dim() == 2:
        return logits
    if logits.dim() == 3 and logits.stride(0) != logits.shape[1] * logits.stride(1):
        return logits
    return logits.reshape(-1, logits.shape[-1])


def _counted_tokens(tokens: Tensor, mask: Tensor | None, weights: Tensor | None) -> Tensor:
    """`tokens` with 0 in place of those that count for nothing, which may be anything."""
    for counts in (mask, None if weights is None else weights != 0):
        if counts is not None:
            tokens = torch.where(counts, tokens, 0)
    return tokens


def _is_asked(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.requires_grad and torch.is_grad_enabled()


def ppo_loss(
    logits: Tensor,
    tokens: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    clip_ratio: float | tuple[float, float] | None = 0.2,
    dual_clip: float | None = None,
    ref_logprobs: Tensor | None = None,
    ref_logits: Tensor | None = None,
    kl_coef: float = 0.0,
    kl_estimator: str = "k3",
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
        clip_ratio: ε, or (ε_low, ε_high), or None for no clipping.
        dual_clip: c > 1 bounds the loss by −c·A where A < 0 (Ye et al. 2020).
        ref_logprobs: (...) nats, for the k1, k2 and k3 estimators of the KL to the reference.
        ref_logits: (..., V), for `kl_estimator="full"`; the sampled estimators take the tokens'
            logprobs from it where `ref_logprobs` is not given. No gradient.
        kl_coef: weight of the KL in the loss. The KL is reported whenever a reference is given.
        kl_estimator: k1 = d, k2 = d²/2, k3 = e^{−d} − 1 + d of d = logprob − ref_logprob; or full.
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
            vocabulary (on a CPU, or anywhere with FASTPPO_CHECK_TOKENS=1).

    Source: Schulman et al. 2017, eq. 7 and 9; the KL estimators, Schulman 2020.
    """
    rows = _rows_view("logits", logits)
    shape = logits.shape[:-1]
    ref_rows = None
    if ref_logits is not None:
        validation.tensor("ref_logits", ref_logits, shape=logits.shape, like=logits)
        ref_rows = _rows_view("ref_logits", ref_logits.detach())
        if kl_estimator != "full":
            if ref_logprobs is None:
                ref_logprobs = token_logprobs(
                    ref_logits.detach(),
                    _counted_tokens(tokens, mask, weights),
                    temperature=temperature,
                    logit_scale=logit_scale,
                    softcap=softcap,
                    backend=backend,
                )
            ref_rows = None
    per_token, options = _loss_arguments(
        shape,
        logits,
        tokens,
        old_logprobs,
        advantages,
        mask,
        clip_ratio=clip_ratio,
        dual_clip=dual_clip,
        ref_logprobs=ref_logprobs,
        has_full_reference=ref_rows is not None,
        kl_coef=kl_coef,
        kl_estimator=kl_estimator,
        entropy_coef=entropy_coef,
        temperature=temperature,
        importance_weights=importance_weights,
        aggregation=aggregation,
        denominator=denominator,
        weights=weights,
        logit_scale=logit_scale,
        softcap=softcap,
        backend=backend,
    )
    need_grad = _is_asked(logits)
    if inplace and need_grad:
        _check_inplace(logits)
    if logits.dtype == torch.float16 and need_grad:
        loss, sums, *stats = _ppo_loss_by_statistics(rows, ref_rows, per_token, options)
    else:
        loss, sums, *stats = ops.PPOLoss.apply(
            rows, ref_rows, need_grad, inplace, options, *per_token
        )
    logprobs, entropy, kl = (x.view(shape) for x in stats)
    return PPOLoss(loss, logprobs, entropy, kl, loss_metrics(sums), sums)


def _check_inplace(logits: Tensor) -> None:
    """Refuses logits whose memory cannot hold the gradient."""
    if logits.dtype == torch.float16:
        raise ValueError(
            "inplace=True does not go with float16 logits: their gradient is formed in the "
            "backward pass, when the loss scale is known"
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


def _ppo_loss_by_statistics(
    rows: Tensor,
    ref_rows: Tensor | None,
    per_token: tuple[Tensor | None, ...],
    options: ops.LossOptions,
) -> tuple[Tensor, ...]:
    """The same loss with the logits' gradient formed in the backward pass, after the loss scale."""
    tokens, *_, temperatures = per_token
    valid = _counts(per_token)
    assert tokens is not None
    logprobs, entropy, full_kl = ops.TokenStats.apply(
        rows, torch.where(valid, tokens, 0), ref_rows, temperatures, _softmax_of(options)
    )
    return _loss_of_statistics(
        logprobs, entropy, None if ref_rows is None else full_kl, per_token, options
    )


def _linear_statistics(
    head: list[Tensor | None],
    need: tuple[bool, bool, bool],
    chunk_size: int | None,
    dtype: torch.dtype,
    compact: bool,
    per_token: tuple[Tensor | None, ...],
    options: ops.LossOptions,
) -> tuple[Tensor, Tensor]:
    """Logprobs and entropy [N] of the head (hidden [N, H], weight, bias), differentiable.

    Rows of weight 0 are cut out if `compact` allows it, and then 0; else they are read as zeros,
    because 0·NaN would reach the weight's gradient.
    """
    hidden, weight, bias = head
    tokens, *_, temperatures = per_token
    valid = _counts(per_token)
    assert hidden is not None
    assert tokens is not None
    if compact and not (hidden.is_cuda and torch.cuda.is_current_stream_capturing()):
        kept = valid.nonzero().squeeze(-1)
        hidden, tokens = hidden[kept], tokens[kept]
        temperatures = None if temperatures is None else temperatures[kept]
    else:
        kept = None
        hidden = torch.where(valid.unsqueeze(-1), hidden, 0.0)
        tokens = torch.where(valid, tokens, 0)
    logprobs, entropy = ops.LinearTokenStats.apply(
        hidden, weight, bias, tokens, temperatures, need, chunk_size, dtype, _softmax_of(options)
    )
    if kept is None:
        return logprobs, entropy
    empty = logprobs.new_zeros(valid.shape)
    return empty.index_put((kept,), logprobs), empty.index_put((kept,), entropy)


def _counts(per_token: tuple[Tensor | None, ...]) -> Tensor:
    """[N] bool, True where the weight is not 0."""
    weights = per_token[3]
    assert weights is not None
    return weights != 0


def _softmax_of(options: ops.LossOptions) -> ops.SoftmaxOptions:
    return ops.SoftmaxOptions(
        options.temperature, options.logit_scale, options.softcap, options.backend
    )


def _loss_of_statistics(
    logprobs: Tensor,
    entropy: Tensor,
    full_kl: Tensor | None,
    per_token: tuple[Tensor | None, ...],
    options: ops.LossOptions,
) -> tuple[Tensor, ...]:
    """(loss, sums, logprobs, entropy, kl), as the fused operators return them."""
    loss, sums, kl = ops.TokenLoss.apply(logprobs, entropy, full_kl, options, *per_token[:-1])
    stats = (torch.where(_counts(per_token), x.detach(), 0.0) for x in (logprobs, entropy))
    return (loss, sums, *stats, kl)


def _refuse_shards(**tensors: Tensor | None) -> None:
    """A sharded tensor would be read as the part of it that this rank holds."""
    for name, value in tensors.items():
        if hasattr(value, "full_tensor"):
            raise TypeError(
                f"{name} is a DTensor, whose parts lie on several ranks; the fused lm-head takes "
                f"plain tensors: gather it first with {name}.full_tensor()"
            )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _head_arguments(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, chunk_size: int | None
) -> tuple[Tensor, tuple[bool, bool, bool], torch.dtype]:
    """(hidden as [N, H], which of the three need a gradient, the dtype of the GEMMs)."""
    _refuse_shards(hidden=hidden, weight=weight, bias=bias)
    validation.tensor("hidden", hidden)
    validation.tensor("weight", weight, like=hidden)
    if hidden.dim() < 2:
        raise ValueError(f"hidden must be (..., H) with at least 2 axes, got {list(hidden.shape)}")
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"weight must be [V, H] with H = {hidden.shape[-1]} as in hidden, "
            f"got {list(weight.shape)}"
        )
    if bias is not None:
        validation.tensor("bias", bias, shape=(weight.shape[0],), like=hidden)
    for name, part in (("weight", weight), ("bias", bias)):
        if part is not None and (part.dtype == torch.float64) != (hidden.dtype == torch.float64):
            raise ValueError(
                f"float64 goes with float64 alone: got {name} in {_short(part.dtype)} and hidden "
                f"in {_short(hidden.dtype)}"
            )
    if chunk_size is not None:
        if not isinstance(chunk_size, int):
            raise TypeError(f"chunk_size must be an int, got {type(chunk_size).__name__}")
        validation.at_least("chunk_size", chunk_size, 1)
    dtype = hidden.dtype
    if torch.is_autocast_enabled(hidden.device.type) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(hidden.device.type)
    need = (_is_asked(hidden), _is_asked(weight), _is_asked(bias))
    return hidden.reshape(-1, hidden.shape[-1]), need, dtype


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
    clip_ratio: float | tuple[float, float] | None = 0.2,
    dual_clip: float | None = None,
    ref_logprobs: Tensor | None = None,
    ref_hidden: Tensor | None = None,
    ref_weight: Tensor | None = None,
    ref_bias: Tensor | None = None,
    kl_coef: float = 0.0,
    kl_estimator: str = "k3",
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
            fp32 and cast once; `requires_grad=False` skips it.
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
    rows, need, dtype = _head_arguments(hidden, weight, bias, chunk_size)
    shape = hidden.shape[:-1]
    _refuse_shards(ref_hidden=ref_hidden, ref_weight=ref_weight, ref_bias=ref_bias)
    reference_head: list[Tensor | None] = [None, None, None]
    if (ref_hidden is None) != (ref_weight is None):
        raise ValueError("ref_hidden and ref_weight go together: pass both or neither")
    if ref_bias is not None and ref_weight is None:
        raise ValueError("ref_bias needs ref_hidden and ref_weight, got None")
    if ref_hidden is not None and ref_weight is not None:
        validation.tensor("ref_weight", ref_weight, like=hidden)
        if ref_weight.dim() != 2 or ref_weight.shape[0] != weight.shape[0]:
            raise ValueError(
                f"ref_weight must be [V, H'] with V = {weight.shape[0]}, "
                f"got {list(ref_weight.shape)}"
            )
        wants = (*shape, ref_weight.shape[1])
        validation.tensor("ref_hidden", ref_hidden, shape=wants, like=hidden)
        if ref_bias is not None:
            validation.tensor("ref_bias", ref_bias, shape=(weight.shape[0],), like=hidden)
        ref_hidden, ref_weight = ref_hidden.detach(), ref_weight.detach()
        flat = ref_hidden.reshape(-1, ref_weight.shape[1])
        reference_head = [flat, ref_weight, None if ref_bias is None else ref_bias.detach()]
    per_token, options = _loss_arguments(
        shape,
        hidden,
        tokens,
        old_logprobs,
        advantages,
        mask,
        clip_ratio=clip_ratio,
        dual_clip=dual_clip,
        ref_logprobs=ref_logprobs,
        has_full_reference=reference_head[0] is not None,
        kl_coef=kl_coef,
        kl_estimator=kl_estimator,
        entropy_coef=entropy_coef,
        temperature=temperature,
        importance_weights=importance_weights,
        aggregation=aggregation,
        denominator=denominator,
        weights=weights,
        logit_scale=logit_scale,
        softcap=softcap,
        backend=backend,
    )
    # Masked rows are worth a synchronisation; a graph of torch.compile may be replayed.
    compact = mask is not None and not torch.compiler.is_compiling()
    if kl_estimator != "full":
        if ref_logprobs is None and reference_head[0] is not None:
            of_reference, _ = _linear_statistics(
                reference_head, (False,) * 3, chunk_size, dtype, compact, per_token, options
            )
            per_token = (*per_token[:5], of_reference, *per_token[6:])
        reference_head = [None, None, None]
    if dtype == torch.float16 and any(need):
        if reference_head[0] is not None:
            raise ValueError(
                "kl_estimator='full' is not supported in fp16, where its gradient would underflow: "
                "got GEMMs in float16, use bfloat16 or float32, or ppo_loss on the logits"
            )
        # 8·N·H·V FLOP, because backward forms the logits again, after the loss scale.
        logprobs, entropy = _linear_statistics(
            [rows, weight, bias], need, chunk_size, dtype, compact, per_token, options
        )
        loss, sums, *stats = _loss_of_statistics(logprobs, entropy, None, per_token, options)
    else:
        loss, sums, *stats = ops.LinearPPOLoss.apply(
            rows,
            weight,
            bias,
            need,
            compact,
            chunk_size,
            dtype,
            options,
            *per_token,
            *reference_head,
        )
    logprobs, entropy, kl = (x.view(shape) for x in stats)
    return PPOLoss(loss, logprobs, entropy, kl, loss_metrics(sums), sums)


def _check_tokens_argument(tokens: Tensor, shape: torch.Size, like: Tensor) -> Tensor:
    validation.tensor("tokens", tokens, shape=shape, like=like, dtypes=(torch.int64,))
    return tokens.reshape(-1)


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
    """Logprob of each token, entropy and, given `ref_logits`, the exact KL(p‖q); differentiable.

    Args:
        logits: (..., V) bf16, fp16, fp32 or fp64, dense last axis; row t predicts tokens[t].
        tokens: (...) int64.
        ref_logits: (..., V), the reference's, same temperature, scale and soft-cap. No gradient.
        temperature, logit_scale, softcap, backend: see `ppo_loss`.

    Returns:
        TokenStats(logprobs, entropy, kl): (...) fp32, nats. Backward reads the logits once more.

    Raises:
        ValueError, TypeError: shapes, dtypes, devices or options disagree; a token outside the
            vocabulary.
    """
    rows = _rows_view("logits", logits)
    shape = logits.shape[:-1]
    flat_tokens = _check_tokens_argument(tokens, shape, logits)
    ref_rows = None
    if ref_logits is not None:
        validation.tensor("ref_logits", ref_logits, shape=logits.shape, like=logits)
        ref_rows = _rows_view("ref_logits", ref_logits.detach())
    options, temperatures = _softmax_options(
        shape, logits, temperature, logit_scale, softcap, backend
    )
    logprobs, entropy, kl = ops.TokenStats.apply(rows, flat_tokens, ref_rows, temperatures, options)
    return TokenStats(
        logprobs.view(shape), entropy.view(shape), kl.view(shape) if ref_rows is not None else None
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
    return token_stats(
        logits,
        tokens,
        temperature=temperature,
        logit_scale=logit_scale,
        softcap=softcap,
        backend=backend,
    ).logprobs


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
    """`token_logprobs(hidden @ weight.T + bias, tokens)` without holding the `[N, V]` logits.

    Args:
        hidden: (..., H); weight: [V, H]; bias: [V] or None; tokens: (...) int64.
        return_entropy: also return the entropy.
        chunk_size: rows of logits held at once; default by a memory budget.
        temperature, logit_scale, softcap, backend: see `ppo_loss`.

    Returns:
        logprobs, or (logprobs, entropy) with `return_entropy`: (...) fp32, nats, differentiable by
        hidden, weight and bias. Under `torch.no_grad()` it costs 2·N·H·V FLOP; the backward pass
        forms the logits again, because the upstream gradient is not known before.

    Raises:
        ValueError, TypeError: shapes, dtypes, devices or options disagree; a token outside the
            vocabulary; a DTensor is passed.
    """
    rows, need, dtype = _head_arguments(hidden, weight, bias, chunk_size)
    shape = hidden.shape[:-1]
    flat_tokens = _check_tokens_argument(tokens, shape, hidden)
    options, temperatures = _softmax_options(
        shape, hidden, temperature, logit_scale, softcap, backend
    )
    logprobs, entropy = ops.LinearTokenStats.apply(
        rows, weight, bias, flat_tokens, temperatures, need, chunk_size, dtype, options
    )
    if return_entropy:
        return logprobs.view(shape), entropy.view(shape)
    return logprobs.view(shape)


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    clip_ratio: float | tuple[float, float] | None = 0.2,
    dual_clip: float | None = None,
    importance_weights: Tensor | None = None,
    aggregation: str = "token-mean",
    denominator: float | Tensor | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """Clipped surrogate from logprobs: `Σ w·(−min(ratio·A, clip(ratio)·A))`, a 0-d tensor.

    Args:
        logprobs: (...) nats, differentiable; old_logprobs, advantages: (...). No gradient.
        The keywords are those of `ppo_loss`.

    Source: Schulman et al. 2017, eq. 7.
    """
    validation.tensor("logprobs", logprobs)
    shape = logprobs.shape
    for name, value in (("old_logprobs", old_logprobs), ("advantages", advantages)):
        validation.tensor(name, value, shape=shape, like=logprobs)
    wide = reference.accumulation_dtype(logprobs.dtype)
    w = _weights(shape, logprobs, mask, aggregation, denominator, weights)
    clip_low, clip_high = validation.clip_range(clip_ratio)
    difference = logprobs.to(wide) - old_logprobs.detach().to(wide)
    # Masked entries may hold anything: cut them out before the exponential, not after.
    difference = torch.where(w != 0, difference, 0.0)
    advantages = torch.where(w != 0, advantages.detach().to(wide), 0.0)
    ratio = torch.exp(difference.clamp(-reference.LOG_RATIO_LIMIT, reference.LOG_RATIO_LIMIT))
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    surrogate = torch.minimum(ratio * advantages, clipped * advantages)
    dual_clip = validation.dual_clip(dual_clip)
    if dual_clip is not None:
        bounded = torch.maximum(surrogate, dual_clip * advantages)
        surrogate = torch.where(advantages < 0, bounded, surrogate)
    if importance_weights is not None:
        validation.tensor("importance_weights", importance_weights, shape=shape, like=logprobs)
        surrogate = surrogate * importance_weights.detach().to(wide)
    return -(torch.where(w != 0, surrogate, 0.0) * w).sum()


def value_loss(
    values: Tensor,
    returns: Tensor,
    mask: Tensor | None = None,
    *,
    old_values: Tensor | None = None,
    clip_ratio: float | None = None,
    aggregation: str = "token-mean",
    denominator: float | Tensor | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """`Σ w·½(V − R)²`, or with value clipping `Σ w·½max((V−R)², (V_old + clip(V−V_old, ±c) − R)²)`.

    Args:
        values: (...), differentiable; returns: (...). No gradient.
        old_values, clip_ratio: (...) and c > 0 in units of the value; clipping needs both.
        mask, aggregation, denominator, weights: see `ppo_loss` and `aggregation_weights`.

    Returns:
        () fp32, differentiable by the values.

    Source: Schulman et al. 2017, eq. 9; the clipping, the PPO code of OpenAI baselines.
    """
    validation.tensor("values", values)
    shape = values.shape
    validation.tensor("returns", returns, shape=shape, like=values)
    wide = reference.accumulation_dtype(values.dtype)
    w = _weights(shape, values, mask, aggregation, denominator, weights)
    # Masked entries may hold anything: cut them out before the square, whose derivative is theirs.
    values = torch.where(w != 0, values.to(wide), 0.0)
    returns = torch.where(w != 0, returns.detach().to(wide), 0.0)
    error = (values - returns) ** 2
    if clip_ratio is not None:
        validation.at_least("clip_ratio", clip_ratio, 0.0, strictly=True)
        if old_values is None:
            raise ValueError("clip_ratio needs old_values, the values of the rollout")
        validation.tensor("old_values", old_values, shape=shape, like=values)
        old = torch.where(w != 0, old_values.detach().to(wide), 0.0)
        clipped = old + (values - old).clamp(-clip_ratio, clip_ratio)
        error = torch.maximum(error, (clipped - returns) ** 2)
    return 0.5 * (error * w).sum()


def entropy(
    logits: Tensor,
    mask: Tensor | None = None,
    *,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    aggregation: str = "token-mean",
    denominator: float | Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Mean entropy of `softmax(z/T)` over the unmasked rows of (..., V): a 0-d tensor, nats."""
    validation.tensor("logits", logits)
    tokens = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    stats = token_stats(
        logits,
        tokens,
        temperature=temperature,
        logit_scale=logit_scale,
        softcap=softcap,
        backend=backend,
    )
    w = _weights(tokens.shape, logits, mask, aggregation, denominator, None)
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
        vf_coef multiplies ½(V − R)².

    Returns:
        dict of 0-d tensors: total_loss, policy_loss, value_loss, entropy; differentiable by
        logprobs, values and logits.

    Source: Schulman et al. 2017, eq. 9.
    """
    validation.finite("vf_coef", vf_coef)
    validation.finite("entropy_coef", entropy_coef)
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
    value = value_loss(
        values, returns, mask, old_values=old_values, clip_ratio=value_clip, **shared
    )
    mean_entropy = entropy(logits, mask, temperature=temperature, **shared)
    return {
        "total_loss": policy + vf_coef * value - entropy_coef * mean_entropy,
        "policy_loss": policy,
        "value_loss": value,
        "entropy": mean_entropy,
    }
