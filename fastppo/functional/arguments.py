"""Check the public functions' arguments and put them into records.

Wrong input raises an error before any work starts, with the argument's name, the value found and
the value expected. The result is in the records of `fastppo_kernels.records`: flat, one entry per
token, in the accumulation dtype. Nothing is checked again after that.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from fastppo_kernels import records
from fastppo_kernels.records import (
    Discounts,
    Gemm,
    GradientsWanted,
    Objective,
    PerToken,
    Projection,
    Softmax,
    Trajectory,
    accumulation_dtype,
)
from torch import Tensor

from fastppo.functional.scalars import (
    CLIPPED_SURROGATES,
    SAPO_TAU,
    at_least,
    boolean,
    check_dual_clip,
    check_sapo_tau,
    choice,
    describe,
    finite,
    number,
)

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
NUMBERS = (*FLOATS, torch.int32, torch.int64)
KL_ESTIMATORS = (*records.KL_ESTIMATORS, "full")
OBJECTIVES = (*records.POLICY_TERMS, "gspo")
CUSTOM = "custom"
"""Name of a user-defined objective."""
AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "token-sum")
HAS_TRITON = importlib.util.find_spec("triton") is not None
BACKENDS = ("auto", "triton", "cpu", "torch")
POSITIVE_LOGPROB = 0.1
"""Nats, above the rounding of bf16 logits around 30: 30 · 2⁻⁹."""

# ------------------------------------------------------------------------------- single arguments


def tensor(
    name: str,
    value: object,
    *,
    shape: torch.Size | tuple[int, ...] | None = None,
    like: Tensor | None = None,
    dtypes: tuple[torch.dtype, ...] = FLOATS,
    wants: str = "",
) -> Tensor:
    """Check a tensor's shape, its device (that of `like`) and its dtype (one of `dtypes`)."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if hasattr(value, "full_tensor"):
        # The local part would be read. `full_tensor()` alone treats its gradient as replicated:
        # each rank would keep only its own rows' part of the sum.
        raise TypeError(
            f"{name} must be a plain tensor, got a DTensor, of which each rank holds a part: "
            "call the loss inside the wrapped model's forward, where FSDP has gathered it, or "
            f"gather it with {name}.full_tensor(grad_placements=[Partial()]) (Partial from "
            "torch.distributed.tensor: the gradient is the sum over the ranks)"
        )
    if value.dtype not in dtypes:
        expected = ", ".join(_short(dtype) for dtype in dtypes)
        hint = f": use {name}.bool()" if dtypes == (torch.bool,) else ""
        raise ValueError(f"{name} must be {expected}, got {_short(value.dtype)}{hint}")
    if shape is not None and value.shape != torch.Size(shape):
        raise ValueError(
            f"{name} must have shape {list(shape)}{wants and f' ({wants})'}, "
            f"got {list(value.shape)}"
        )
    if like is not None and value.device != like.device:
        raise ValueError(f"{name} must be on {like.device}, got {value.device}")
    return value


def check_unit_interval(name: str, x: Tensor) -> None:
    """Check that values are in [0, 1], if reading them is free."""
    if _values_are_free(x):
        least = x.min().item()
        most = x.max().item()
        if not 0 <= least <= most <= 1:
            raise ValueError(f"{name} must be in [0, 1], got values from {least} to {most}")


def check_positive(name: str, x: Tensor) -> None:
    """Check that values are finite and > 0, if reading them is free."""
    if _values_are_free(x):
        least = x.min().item()
        most = x.max().item()
        if not 0 < least <= most < math.inf:
            raise ValueError(f"{name} must be finite and > 0, got values from {least} to {most}")


def values_are_checked() -> bool:
    """Whether FASTPPO_CHECK_VALUES=1 asks for checks that read values and wait for a GPU.

    Not by default on a CPU either: the trainer skips a step with NaN, and counts it.
    """
    return os.environ.get("FASTPPO_CHECK_VALUES") == "1" and not torch.compiler.is_compiling()


def check_values(name: str, x: Tensor, counted: Tensor | None = None) -> None:
    """Raise ValueError for NaN, and for a positive one of `…logprobs`, if FASTPPO_CHECK_VALUES=1.

    Args:
        counted: the shape of x, bool; other values may be anything.
    """
    if not values_are_checked():
        return
    bad = ~(x <= POSITIVE_LOGPROB) if name.endswith("logprobs") else x.isnan()
    places = (bad if counted is None else bad & counted).nonzero().tolist()
    if places:
        value = x[tuple(places[0])].item()
        wants = "numbers" if math.isnan(value) else "logprobs, ≤ 0"
        raise ValueError(f"{name} must be {wants}, got {value:g} at {places[0]}")


def check_scores(scores: Tensor, mask: Tensor, cu_seqlens: Tensor | None) -> None:
    """Raise ValueError for NaN and scores of responses without a token, if
    FASTPPO_CHECK_VALUES=1."""
    if not values_are_checked():
        return
    check_values("scores", scores)
    if cu_seqlens is None:
        lengths = mask.sum(-1)
    else:
        lengths = torch.nn.functional.pad(mask.cumsum(0), (1, 0))[cu_seqlens.long()].diff()
    lost = ((lengths == 0) & (scores != 0)).nonzero().tolist()
    if lost:
        raise ValueError(f"scores{lost[0]} is lost: mask has no token of its response")


def _values_are_free(x: Tensor) -> bool:
    """Whether values can be read without waiting for a GPU, and outside torch.compile."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling() and x.numel() > 0


def clip_range(clip_ratio: float | tuple[float, float] | None) -> tuple[float, float]:
    """Return (1 − ε_low, 1 + ε_high) for a number, a pair, or None (infinite: no clipping)."""
    if clip_ratio is None:
        return -math.inf, math.inf
    if isinstance(clip_ratio, (tuple, list)):
        if len(clip_ratio) != 2:
            raise ValueError(f"clip_ratio must be ε or (ε_low, ε_high), got {describe(clip_ratio)}")
        low, high = clip_ratio
    else:
        low = clip_ratio
        high = clip_ratio
    number("clip_ratio", low)
    number("clip_ratio", high)
    if not (low >= 0 and high >= 0):
        raise ValueError(f"clip_ratio must not be negative, got {describe(clip_ratio)}")
    return 1.0 - float(low), 1.0 + float(high)


def check_tokens(tokens: Tensor, vocabulary: int, weights: Tensor | None = None) -> None:
    """Check that tokens of non-zero weight are in [0, vocabulary). Reads the tensor's values."""
    if tokens.numel() == 0:
        return
    least, most = (int(end) for end in tokens.aminmax())
    if least >= 0 and most < vocabulary:
        return
    if weights is not None:
        check_tokens(tokens[weights != 0], vocabulary)
        return
    raise ValueError(f"tokens must be in [0, {vocabulary}), got values from {least} to {most}")


def choose_backend(backend: str, x: Tensor) -> str:
    """Return the backend for `x`: "triton", "cpu" or "torch".

    On AMD GPUs the Triton kernels compile but have not been run: "auto" is "torch" there, and
    "triton" must be requested.

    Raises:
        ValueError: "triton" for fp64, or for CPU tensors without the interpreter; "cpu" for tensors
            on another device.
    """
    choice("backend", backend, BACKENDS)
    if backend == "auto":
        # Tensors on an AMD GPU are "cuda" too.
        is_nvidia = x.is_cuda and torch.version.hip is None
        runs = is_nvidia and x.dtype != torch.float64
        if runs and HAS_TRITON:
            return "triton"
        return "cpu" if x.device.type == "cpu" else "torch"
    if backend == "cpu" and x.device.type != "cpu":
        raise ValueError(f"backend='cpu' needs tensors on the CPU, got {x.device}; use 'auto'")
    if backend == "triton":
        if x.dtype == torch.float64:
            raise ValueError(
                "backend='triton' computes in fp32, got float64; use 'auto' or 'torch'"
            )
        if not x.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
            raise ValueError(
                f"backend='triton' needs CUDA tensors, got {x.device}; for Triton's (slow) "
                "interpreter set TRITON_INTERPRET=1 before the first import of triton"
            )
    return backend


# ---------------------------------------------------------------------------------- token weights


def aggregation_weights(
    mask: Tensor,
    aggregation: str = "token-mean",
    denominator: float | Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return the weight w_t of each token, for `loss = Σ w_t · token_loss_t`.

    | aggregation           | w_t                  | default denominator D              |
    |-----------------------|----------------------|------------------------------------|
    | `token-mean`          | mask / D             | Σ mask                             |
    | `seq-mean-token-mean` | mask / (length · D)  | sequences with at least one token  |
    | `seq-mean-token-sum`  | mask / D             | sequences with at least one token  |
    | `token-sum`           | mask / D             | 1                                  |

    With the *global* denominator (over all microbatches and ranks) the loss does not depend on how
    the batch is split.

    Args:
        mask: (...) bool; (..., T), with sequences along the last axis, for the seq modes.
        denominator: a number > 0 or a 0-d tensor, in place of the default.
        dtype: fp32, or fp64 for a loss in fp64, because 1/D in fp32 is off by 3e-8.

    Returns:
        (...) of `dtype`, 0 where masked; all 0 if everything is masked.

    Raises:
        ValueError, TypeError: a mask that is not bool, an unknown aggregation, a denominator that
            is not positive or not 0-d, or a seq mode without an axis of sequences.
    """
    choice("aggregation", aggregation, AGGREGATIONS)
    tensor("mask", mask, dtypes=(torch.bool,))
    if dtype not in FLOATS:
        raise TypeError(f"dtype must be a floating dtype of torch, got {describe(dtype)}")
    if isinstance(denominator, Tensor):
        tensor("denominator", denominator, shape=(), dtypes=NUMBERS)
        if denominator.device.type not in (mask.device.type, "cpu"):
            raise ValueError(
                f"denominator must be on {mask.device} like the mask, got {denominator.device}"
            )
        denominator = denominator.detach()
        check_positive("denominator", denominator)
    elif denominator is not None:
        finite("denominator", at_least("denominator", denominator, 0.0, strictly=True))
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


def token_weights(
    mask: Tensor | None,
    *,
    aggregation: str,
    denominator: float | Tensor | None,
    weights: Tensor | None,
    shape: torch.Size,
    like: Tensor,
) -> Tensor:
    """Return the weights (...) in the accumulation dtype of `like`, 0 where masked."""
    if mask is not None:
        tensor("mask", mask, shape=shape, like=like, dtypes=(torch.bool,))
    wide = accumulation_dtype(like.dtype)
    if weights is None:
        if mask is None:
            mask = torch.ones(shape, dtype=torch.bool, device=like.device)
        return aggregation_weights(mask, aggregation, denominator, dtype=wide)
    choice("aggregation", aggregation, AGGREGATIONS)
    if denominator is not None or aggregation != "token-mean":
        raise ValueError(
            "weights replace aggregation and denominator, which must be left out, got "
            f"aggregation={aggregation!r} and denominator={describe(denominator)}"
        )
    tensor("weights", weights, shape=shape, like=like)
    weights = weights.detach().to(wide)
    return weights if mask is None else torch.where(mask, weights, 0.0)


# ------------------------------------------------------------------------------ operands of losses


def rows_view(name: str, logits: Tensor) -> Tensor:
    """Return [N, V], or [B, T, V] if the leading axes do not collapse without a copy."""
    tensor(name, logits)
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


def token_ids(tokens: Tensor, shape: torch.Size, like: Tensor) -> Tensor:
    """Return the tokens (...) int64 as [N]."""
    tensor("tokens", tokens, shape=shape, like=like, dtypes=(torch.int64,))
    return tokens.reshape(-1)


def needs_gradient(x: Tensor | None) -> bool:
    return x is not None and x.requires_grad and torch.is_grad_enabled()


def softmax(
    temperature: float | Tensor,
    logit_scale: float,
    softcap: float | None,
    *,
    shape: torch.Size,
    like: Tensor,
    counted: Tensor | None = None,
) -> Softmax:
    """Check the softmax's arguments. Temperatures are checked where `counted` (...) is True."""
    at_least("logit_scale", logit_scale, 0.0, strictly=True)
    finite("logit_scale", logit_scale)
    if softcap is not None:
        finite("softcap", at_least("softcap", softcap, 0.0, strictly=True))
        softcap = float(softcap)
    if not isinstance(temperature, Tensor):
        finite("temperature", at_least("temperature", temperature, 0.0, strictly=True))
        return Softmax(float(temperature), None, float(logit_scale), softcap)
    temperature = temperature.detach()
    checked = temperature
    if temperature.dim() > 0:
        tensor("temperature", temperature, shape=shape, like=like, wants="one per token")
        if counted is not None:
            checked = torch.where(counted, temperature, 1)
    tensor("temperature", temperature, dtypes=NUMBERS)
    check_positive("temperature", checked)
    wide = accumulation_dtype(like.dtype)
    temperatures = temperature.to(like.device, wide).expand(shape).reshape(-1)
    return Softmax(1.0, temperatures, float(logit_scale), softcap)


class LossOperands(NamedTuple):
    """The checked keywords of `ppo_loss` and `linear_ppo_loss`.

    objective_name: the `objective` keyword, or CUSTOM for a function. shape: that of the tokens.
    sequence_starts: [B + 1] for "gspo" and functions, otherwise None.
    function: the objective's function, or None.
    """

    per_token: PerToken
    objective: Objective
    softmax: Softmax
    objective_name: str
    shape: torch.Size
    sequence_starts: Tensor | None
    backend: str
    function: Callable[..., Tensor] | None = None

    def with_per_token(self, **changes: Tensor) -> LossOperands:
        """Replace tensors of `per_token`."""
        return self._replace(per_token=self.per_token._replace(**changes))


def loss_operands(
    *,
    like: Tensor,
    shape: torch.Size,
    has_ref: bool,
    tokens: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor | None,
    objective: str | Callable[..., Tensor],
    clip_ratio: float | tuple[float, float] | None,
    dual_clip: float | None,
    sapo_tau: tuple[float, float] | None,
    cu_seqlens: Tensor | None,
    ref_logprobs: Tensor | None,
    kl_coef: float,
    kl_estimator: str,
    kl_ratio_weighted: bool,
    entropy_coef: float,
    temperature: float | Tensor,
    importance_weights: Tensor | None,
    aggregation: str,
    denominator: float | Tensor | None,
    weights: Tensor | None,
    logit_scale: float,
    softcap: float | None,
    backend: str,
) -> LossOperands:
    """Check the keywords that the losses share, and put them into records.

    Args:
        like: the logits or hidden states. shape: that of the tokens.
        has_ref: the reference's logits, or its hidden states and head, are given.
        The other arguments are those of `ppo_loss`.
    """
    name = CUSTOM if callable(objective) else objective
    checked_objective = _objective(
        name=name,
        clip_ratio=clip_ratio,
        dual_clip=dual_clip,
        sapo_tau=sapo_tau,
        kl_coef=kl_coef,
        kl_estimator=kl_estimator,
        kl_ratio_weighted=kl_ratio_weighted,
        entropy_coef=entropy_coef,
        has_ref_logprobs=ref_logprobs is not None,
        has_ref=has_ref,
    )
    weights = token_weights(
        mask,
        aggregation=aggregation,
        denominator=denominator,
        weights=weights,
        shape=shape,
        like=like,
    )
    wide = accumulation_dtype(like.dtype)

    counted = weights != 0

    def flat(name: str, value: Any) -> Tensor:
        tensor(name, value, shape=shape, like=like, wants="one per token")
        check_values(name, value, counted)
        return value.detach().to(wide).reshape(-1)

    per_token = PerToken(
        tokens=token_ids(tokens, shape, like),
        old_logprobs=flat("old_logprobs", old_logprobs),
        advantages=flat("advantages", advantages),
        weights=weights.reshape(-1),
        importance_weights=(
            None if importance_weights is None else flat("importance_weights", importance_weights)
        ),
        ref_logprobs=None if ref_logprobs is None else flat("ref_logprobs", ref_logprobs),
    )
    return LossOperands(
        per_token=per_token,
        objective=checked_objective,
        softmax=softmax(temperature, logit_scale, softcap, shape=shape, like=like, counted=counted),
        objective_name=name,
        shape=shape,
        sequence_starts=_sequence_starts(cu_seqlens, name, shape=shape, like=like),
        backend=choose_backend(backend, like),
        function=objective if callable(objective) else None,
    )


def _objective(
    *,
    name: str,
    clip_ratio: float | tuple[float, float] | None,
    dual_clip: float | None,
    sapo_tau: tuple[float, float] | None,
    kl_coef: float,
    kl_estimator: str,
    kl_ratio_weighted: bool,
    entropy_coef: float,
    has_ref_logprobs: bool,
    has_ref: bool,
) -> Objective:
    """Check the scalars of the loss."""
    choice("objective", name, (*OBJECTIVES, CUSTOM))
    if dual_clip is not None and name not in CLIPPED_SURROGATES:
        raise ValueError(
            f"dual_clip needs objective={' or '.join(map(repr, CLIPPED_SURROGATES))}, got {name!r}"
        )
    if sapo_tau is not None and name != "sapo":
        raise ValueError(f"sapo_tau needs objective='sapo', got {name!r}")
    tau_positive: float | None = None
    tau_negative: float | None = None
    if name in ("sapo", CUSTOM):
        clip_ratio = None
    if name == "sapo":
        tau_positive, tau_negative = check_sapo_tau(SAPO_TAU if sapo_tau is None else sapo_tau)
    choice("kl_estimator", kl_estimator, KL_ESTIMATORS)
    finite("kl_coef", kl_coef)
    finite("entropy_coef", entropy_coef)
    if kl_coef and kl_estimator == "full" and not has_ref:
        raise ValueError(
            "kl_estimator='full' needs ref_logits (ref_hidden and ref_weight in linear_ppo_loss), "
            "got None"
        )
    if kl_coef and not has_ref_logprobs and not has_ref:
        raise ValueError(
            f"kl_coef={kl_coef} with kl_estimator={kl_estimator!r} needs ref_logprobs, got None"
        )
    if boolean("kl_ratio_weighted", kl_ratio_weighted):
        if kl_estimator not in records.RATIO_WEIGHTED:
            raise ValueError(
                "kl_ratio_weighted=True needs kl_estimator='k1' or 'k3', which the ratio makes "
                f"unbiased, got {kl_estimator!r}"
            )
        if not kl_coef:
            raise ValueError("kl_ratio_weighted=True needs a kl_coef other than 0, got 0")
        if name == "gspo":
            raise ValueError(
                "kl_ratio_weighted=True needs token ratios, got objective='gspo' with sequence "
                "ratios"
            )
    lowest_ratio, highest_ratio = clip_range(clip_ratio)
    return Objective(
        lowest_ratio=lowest_ratio,
        highest_ratio=highest_ratio,
        dual_clip=check_dual_clip(dual_clip),
        kl_coef=float(kl_coef),
        kl_estimator=kl_estimator,
        entropy_coef=float(entropy_coef),
        kl_ratio_weighted=kl_ratio_weighted,
        policy_term="clip" if name == "gspo" else name,
        tau_positive=tau_positive,
        tau_negative=tau_negative,
    )


def _sequence_starts(
    cu_seqlens: Tensor | None, objective: str, *, shape: torch.Size, like: Tensor
) -> Tensor | None:
    """Return [B + 1], the start of each sequence in the flattened tokens, and N.

    For "gspo" and functions, None for others, and for a function of tokens without sequences.
    """
    if objective not in ("gspo", CUSTOM):
        if cu_seqlens is not None:
            raise ValueError(f"cu_seqlens needs objective='gspo', got {objective!r}")
        return None
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, shape.numel(), like=like)
        return cu_seqlens
    if len(shape) < 2:
        if objective == CUSTOM:
            return None
        raise ValueError(
            "objective='gspo' needs sequences along the last axis, (..., T), or cu_seqlens, got "
            f"tokens of shape {list(shape)}"
        )
    starts = torch.arange(shape[:-1].numel() + 1, device=like.device)
    return starts * shape[-1]


def projection(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Projection:
    """Check the lm-head, and return it with the hidden states as [N, H]."""
    tensor("hidden", hidden)
    tensor("weight", weight, like=hidden)
    if hidden.dim() < 2:
        raise ValueError(f"hidden must be (..., H) with at least 2 axes, got {list(hidden.shape)}")
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"weight must be [V, H] with H = {hidden.shape[-1]} as in hidden, "
            f"got {list(weight.shape)}"
        )
    if bias is not None:
        tensor("bias", bias, shape=(weight.shape[0],), like=hidden)
    for name, part in (("weight", weight), ("bias", bias)):
        if part is not None and (part.dtype == torch.float64) != (hidden.dtype == torch.float64):
            raise ValueError(
                f"{name} and hidden must both be float64 or neither, got {name} in "
                f"{_short(part.dtype)} and hidden in {_short(hidden.dtype)}"
            )
    return Projection(hidden.reshape(-1, hidden.shape[-1]), weight, bias)


def gradients_wanted(parts: Projection) -> GradientsWanted:
    hidden, weight, bias = (needs_gradient(part) for part in parts)
    return GradientsWanted(hidden, weight, bias)


def gemm(chunk_size: int | None, hidden: Tensor) -> Gemm:
    """Check the chunk size, and choose the GEMMs' dtype: under autocast, the autocast dtype."""
    if chunk_size is not None:
        if not isinstance(chunk_size, int):
            raise TypeError(f"chunk_size must be an int, got {type(chunk_size).__name__}")
        at_least("chunk_size", chunk_size, 1)
    dtype = hidden.dtype
    if torch.is_autocast_enabled(hidden.device.type) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(hidden.device.type)
    return Gemm(chunk_size, dtype)


def ref_projection(
    ref_hidden: Tensor | None,
    ref_weight: Tensor | None,
    ref_bias: Tensor | None,
    *,
    hidden: Tensor,
    weight: Tensor,
) -> Projection | None:
    """Check the reference's head, of any width H', and detach it."""
    if (ref_hidden is None) != (ref_weight is None):
        alone = "ref_hidden" if ref_weight is None else "ref_weight"
        raise ValueError(f"ref_hidden and ref_weight must be passed together, got only {alone}")
    if ref_bias is not None and ref_weight is None:
        raise ValueError("ref_bias needs ref_hidden and ref_weight, got None")
    if ref_hidden is None or ref_weight is None:
        return None
    tensor("ref_weight", ref_weight, like=hidden)
    if ref_weight.dim() != 2 or ref_weight.shape[0] != weight.shape[0]:
        raise ValueError(
            f"ref_weight must be [V, H'] with V = {weight.shape[0]}, got {list(ref_weight.shape)}"
        )
    expected_shape = (*hidden.shape[:-1], ref_weight.shape[1])
    tensor("ref_hidden", ref_hidden, shape=expected_shape, like=hidden)
    if ref_bias is not None:
        tensor("ref_bias", ref_bias, shape=(weight.shape[0],), like=hidden)
    return Projection(
        ref_hidden.detach().reshape(-1, ref_weight.shape[1]),
        ref_weight.detach(),
        None if ref_bias is None else ref_bias.detach(),
    )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# -------------------------------------------------------------------------------------- advantages


def trajectory(
    values: Tensor,
    *,
    rewards: Tensor | None,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    bootstrap: Tensor | None,
    rewards_name: str = "rewards",
) -> tuple[Trajectory, int]:
    """Return the detached trajectory and its number of sequences B."""
    batch = _sequences(values, mask, cu_seqlens)
    if rewards is not None:
        rewards = tensor(rewards_name, rewards, shape=values.shape, like=values).detach()
    if bootstrap is not None:
        bootstrap = tensor("bootstrap", bootstrap, shape=(batch,), like=values).detach()
    return Trajectory(values.detach(), rewards, mask, cu_seqlens, bootstrap), batch


def _sequences(values: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None) -> int:
    """Check the layout, and return the number of sequences B."""
    tensor("values", values)
    if mask is not None:
        tensor("mask", mask, shape=values.shape, like=values, dtypes=(torch.bool,))
    if cu_seqlens is None:
        if values.dim() != 2:
            raise ValueError(
                "values must be [B, T], or packed [total] with cu_seqlens, "
                f"got {list(values.shape)}"
            )
        return values.shape[0]
    if values.dim() != 1:
        raise ValueError(f"with cu_seqlens values must be packed [total], got {list(values.shape)}")
    check_cu_seqlens(cu_seqlens, values.numel(), like=values)
    return cu_seqlens.shape[0] - 1


def check_cu_seqlens(cu_seqlens: Tensor, count: int, *, like: Tensor) -> None:
    """Check the starts of the sequences in `count` packed tokens."""
    tensor("cu_seqlens", cu_seqlens, like=like, dtypes=(torch.int32, torch.int64))
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(f"cu_seqlens must be [B + 1], got {list(cu_seqlens.shape)}")
    if _values_are_free(cu_seqlens):
        begins_at_0 = int(cu_seqlens[0]) == 0
        ends_at_total = int(cu_seqlens[-1]) == count
        if not (begins_at_0 and ends_at_total and bool((cu_seqlens.diff() >= 0).all())):
            raise ValueError(
                f"cu_seqlens must rise from 0 to {count}, the number of packed tokens, "
                f"got {cu_seqlens.tolist()}"
            )


def discounts(gamma: float | Tensor, lam: float | Tensor, *, batch: int, like: Tensor) -> Discounts:
    """Check γ and λ, each a number in [0, 1] or [B], one per sequence."""
    per_sequence = {}
    for name, value in (("gamma", gamma), ("lam", lam)):
        if isinstance(value, Tensor):
            value = value.detach()
            value = value.expand(batch) if value.dim() == 0 else value
            tensor(name, value, shape=(batch,), like=like, wants="one per sequence")
            check_unit_interval(name, value)
            per_sequence[name] = value
        elif not 0 <= number(name, value) <= 1:
            raise ValueError(f"{name} must be in [0, 1], got {describe(value)}")
    return Discounts(
        gamma=0.0 if isinstance(gamma, Tensor) else float(gamma),
        lam=0.0 if isinstance(lam, Tensor) else float(lam),
        gammas=per_sequence.get("gamma"),
        lams=per_sequence.get("lam"),
    )
