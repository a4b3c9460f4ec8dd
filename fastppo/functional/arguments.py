"""The checks of the public functions' arguments, and the records that they are put into.

Wrong input is refused before any work starts, with the argument's name, what it got and what it
wants. What passes is put into the records of `fastppo_kernels.records`, flat, one entry per token,
in the accumulation dtype; from there on nothing is checked again.
"""

from __future__ import annotations

import importlib.util
import math
import os

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
FP32_MAX = torch.finfo(torch.float32).max
NUMBERS = (*FLOATS, torch.int32, torch.int64)
KL_ESTIMATORS = (*records.KL_ESTIMATORS, "full")
OBJECTIVES = (*records.POLICY_TERMS, "gspo")
AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "token-sum")
HAS_TRITON = importlib.util.find_spec("triton") is not None
BACKENDS = ("auto", "triton", "cpu", "torch")

# ---------------------------------------------------------------------------- one value at a time


def tensor(
    name: str,
    value: object,
    *,
    shape: torch.Size | tuple[int, ...] | None = None,
    like: Tensor | None = None,
    dtypes: tuple[torch.dtype, ...] = FLOATS,
    wants: str = "",
) -> Tensor:
    """`value` as a Tensor of the given shape, device (that of `like`) and one of `dtypes`."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if hasattr(value, "full_tensor"):
        # A sharded tensor would be read as the part of it that this rank holds. `full_tensor()`
        # alone takes its gradient for replicated: each rank would keep its own rows' part of a
        # gradient that is the sum over all ranks.
        raise TypeError(
            f"{name} must be a plain tensor, got a DTensor, of which each rank holds a part: "
            "call the loss inside the wrapped model's forward, where FSDP has gathered it, or "
            f"gather it with {name}.full_tensor(grad_placements=[Partial()]) (Partial of "
            "torch.distributed.tensor: the gradient is the sum over the ranks)"
        )
    if value.layout != torch.strided or value.is_nested:
        kind = "a nested tensor" if value.is_nested else _short(value.layout)
        raise TypeError(f"{name} must be a dense tensor, got {kind}")
    if value.dtype not in dtypes:
        expected = ", ".join(_short(dtype) for dtype in dtypes)
        raise ValueError(f"{name} must be {expected}, got {_short(value.dtype)}")
    if shape is not None and value.shape != torch.Size(shape):
        raise ValueError(
            f"{name} must have shape {list(shape)}{wants and f' ({wants})'}, "
            f"got {list(value.shape)}"
        )
    if like is not None and value.device != like.device:
        raise ValueError(f"{name} must be on {like.device}, got {value.device}")
    return value


def check_unit_interval(name: str, x: Tensor) -> None:
    """Refuses values outside [0, 1], where looking is free."""
    if _values_are_free(x):
        least = x.min().item()
        most = x.max().item()
        if not 0 <= least <= most <= 1:
            raise ValueError(f"{name} must be in [0, 1], got values from {least} to {most}")


def check_positive(name: str, x: Tensor) -> None:
    """Refuses values that are not finite and > 0, where looking is free."""
    if _values_are_free(x):
        least = x.min().item()
        most = x.max().item()
        if not 0 < least <= most < math.inf:
            raise ValueError(f"{name} must be finite and > 0, got values from {least} to {most}")


def _values_are_free(x: Tensor) -> bool:
    """Whether values can be read for free: on a GPU the host would wait for them, and a graph of
    torch.compile has none."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling() and x.numel() > 0


def clip_range(clip_ratio: float | tuple[float, float] | None) -> tuple[float, float]:
    """(1 − ε_low, 1 + ε_high) of a number, a pair, or None (no clipping: both infinite)."""
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
    # A ratio in fp32 is never beyond its range, where torch refuses a bound.
    lowest = 1.0 - float(low) if low <= FP32_MAX else -math.inf
    highest = 1.0 + float(high) if high <= FP32_MAX else math.inf
    return lowest, highest


def check_tokens(tokens: Tensor, vocabulary: int, weights: Tensor | None = None) -> None:
    """Refuses tokens outside [0, vocabulary), unless their weight is 0. Reads the tensor's values:
    call it where that is free."""
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
    """The backend, "triton", "cpu" or "torch", that runs an operation on `x`.

    For an AMD GPU the Triton kernels compile and have not been run: "triton" asks for them there,
    and "auto" is "torch".

    Raises:
        ValueError: "triton" where it cannot run: fp64, or a CPU without the interpreter; "cpu" for
            tensors of another device.
    """
    choice("backend", backend, BACKENDS)
    if backend == "auto":
        # An AMD GPU's tensors are "cuda" too.
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


# ------------------------------------------------------------------------------ weights of tokens


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
    choice("aggregation", aggregation, AGGREGATIONS)
    tensor("mask", mask, dtypes=(torch.bool,))
    if not isinstance(dtype, torch.dtype) or dtype not in FLOATS:
        raise TypeError(f"dtype must be a floating dtype of torch, got {describe(dtype)}")
    if isinstance(denominator, Tensor):
        tensor("denominator", denominator, shape=(), dtypes=NUMBERS)
        if denominator.device.type not in (mask.device.type, "cpu"):
            raise ValueError(
                f"denominator must be on {mask.device} as mask is, got {denominator.device}"
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
    """(...) in the accumulation dtype of `like`, 0 where masked; of `weights`, where given, in
    place of aggregation and denominator."""
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
            "aggregation and denominator must be left out where weights replace them, got "
            f"aggregation={aggregation!r} and denominator={describe(denominator)}"
        )
    tensor("weights", weights, shape=shape, like=like)
    weights = weights.detach().to(wide)
    return weights if mask is None else torch.where(mask, weights, 0.0)


# ---------------------------------------------------------------------------- records of arguments


def rows_view(name: str, logits: Tensor) -> Tensor:
    """[N, V] where the leading axes collapse without a copy, [B, T, V] where they do not."""
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
    """[N] of (...) int64."""
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
    """`counted`: (...) bool, the tokens whose temperatures are checked; the others may hold
    anything. None: all."""
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


def objective(
    *,
    name: str,
    sapo_tau: tuple[float, float] | None,
    clip_ratio: float | tuple[float, float] | None,
    dual_clip: float | None,
    kl_coef: float,
    kl_estimator: str,
    kl_ratio_weighted: bool,
    entropy_coef: float,
    has_ref_logprobs: bool,
    has_ref_logits: bool,
) -> Objective:
    """`has_ref_logits`: the reference's logits, or what they are formed from, are there."""
    choice("objective", name, OBJECTIVES)
    if dual_clip is not None and name not in CLIPPED_SURROGATES:
        raise ValueError(f"dual_clip bounds a clipped surrogate, which objective={name!r} is not")
    if sapo_tau is not None and name != "sapo":
        raise ValueError(f"sapo_tau needs objective='sapo', got {name!r}")
    tau_positive: float | None = None
    tau_negative: float | None = None
    if name == "sapo":
        clip_ratio = None
        tau_positive, tau_negative = check_sapo_tau(SAPO_TAU if sapo_tau is None else sapo_tau)
    choice("kl_estimator", kl_estimator, KL_ESTIMATORS)
    finite("kl_coef", kl_coef)
    finite("entropy_coef", entropy_coef)
    if kl_coef and kl_estimator == "full" and not has_ref_logits:
        raise ValueError(
            "kl_estimator='full' needs ref_logits (ref_hidden and ref_weight in linear_ppo_loss), "
            "got None"
        )
    if kl_coef and not has_ref_logprobs and not has_ref_logits:
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
            raise ValueError("kl_ratio_weighted=True needs a kl_coef that is not 0, got 0")
        if name == "gspo":
            raise ValueError(
                "kl_ratio_weighted=True needs the ratios of tokens, and objective='gspo' has those "
                "of sequences"
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


def sequence_starts(
    cu_seqlens: Tensor | None, objective: str, *, shape: torch.Size, like: Tensor
) -> Tensor | None:
    """[B + 1], where each sequence of the flattened tokens (...) begins, and N; None for an
    objective that reads none. Without `cu_seqlens` the last axis runs along a sequence."""
    if objective != "gspo":
        if cu_seqlens is not None:
            raise ValueError(f"cu_seqlens needs objective='gspo', got {objective!r}")
        return None
    count = shape.numel()
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, count, like=like)
        return cu_seqlens
    if len(shape) < 2:
        raise ValueError(
            "objective='gspo' needs sequences along the last axis, (..., T), or cu_seqlens, got "
            f"tokens of shape {list(shape)}"
        )
    starts = torch.arange(shape[:-1].numel() + 1, device=like.device)
    return starts * shape[-1]


def per_token(
    *,
    tokens: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    importance_weights: Tensor | None,
    ref_logprobs: Tensor | None,
    shape: torch.Size,
    like: Tensor,
) -> PerToken:
    """The operands of the loss, given as (...) each, checked and flat; `weights` are those of
    `token_weights`."""
    wide = accumulation_dtype(like.dtype)

    def flat(name: str, value: Tensor) -> Tensor:
        tensor(name, value, shape=shape, like=like, wants="one per token")
        return value.detach().to(wide).reshape(-1)

    def flat_if_given(name: str, value: Tensor | None) -> Tensor | None:
        return None if value is None else flat(name, value)

    return PerToken(
        tokens=token_ids(tokens, shape, like),
        old_logprobs=flat("old_logprobs", old_logprobs),
        advantages=flat("advantages", advantages),
        weights=weights.reshape(-1),
        importance_weights=flat_if_given("importance_weights", importance_weights),
        ref_logprobs=flat_if_given("ref_logprobs", ref_logprobs),
    )


def projection(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Projection:
    """The lm-head, and the hidden states as [N, H]."""
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
                f"{name} must be float64 if hidden is, and only then, got {name} in "
                f"{_short(part.dtype)} and hidden in {_short(hidden.dtype)}"
            )
    return Projection(hidden.reshape(-1, hidden.shape[-1]), weight, bias)


def gradients_wanted(parts: Projection) -> GradientsWanted:
    hidden, weight, bias = (needs_gradient(part) for part in parts)
    return GradientsWanted(hidden, weight, bias)


def gemm(chunk_size: int | None, hidden: Tensor) -> Gemm:
    """How the logits of `hidden` are formed: under autocast in its dtype."""
    if chunk_size is not None:
        if not isinstance(chunk_size, int):
            raise TypeError(f"chunk_size must be an int, got {type(chunk_size).__name__}")
        if not 1 <= chunk_size < 2**63:
            raise ValueError(f"chunk_size must be >= 1 and below 2^63, got {describe(chunk_size)}")
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
    """The reference's head, whose width may differ from the policy's, without gradient."""
    if (ref_hidden is None) != (ref_weight is None):
        alone = "ref_hidden" if ref_weight is None else "ref_weight"
        raise ValueError(f"ref_hidden and ref_weight must both be passed, got {alone} alone")
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


def _short(dtype: torch.dtype | torch.layout) -> str:
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
    """(the trajectory without gradients, its number of sequences B)."""
    batch = _sequences(values, mask, cu_seqlens)
    if rewards is not None:
        rewards = tensor(rewards_name, rewards, shape=values.shape, like=values).detach()
    if bootstrap is not None:
        bootstrap = tensor("bootstrap", bootstrap, shape=(batch,), like=values).detach()
    return Trajectory(values.detach(), rewards, mask, cu_seqlens, bootstrap), batch


def _sequences(values: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None) -> int:
    """Number of sequences B; refuses shapes that do not fit the layout."""
    tensor("values", values)
    if mask is not None:
        tensor("mask", mask, shape=values.shape, like=values, dtypes=(torch.bool,))
    if cu_seqlens is None:
        if values.dim() != 2:
            raise ValueError(
                f"values must be [B, T], or packed [total] with cu_seqlens, "
                f"got {list(values.shape)}"
            )
        return values.shape[0]
    if values.dim() != 1:
        raise ValueError(f"with cu_seqlens values must be packed [total], got {list(values.shape)}")
    check_cu_seqlens(cu_seqlens, values.numel(), like=values)
    return cu_seqlens.shape[0] - 1


def check_cu_seqlens(cu_seqlens: Tensor, count: int, *, like: Tensor) -> None:
    """Refuses what does not say where sequences begin among `count` packed tokens."""
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
    """γ and λ, each a number in [0, 1] or [B], one per sequence, checked."""
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
