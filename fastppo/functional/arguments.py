"""Arguments of the public functions: their keywords and defaults, refusals, and records of them.

Wrong input is refused before any work starts, with the argument's name, what it got and what it
wants. What is left is put into the records of `fastppo_kernels.records`, flat, one entry per token,
in the accumulation dtype; from there on nothing is checked and nothing is spelled out again.
"""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import math
import numbers
import os
import reprlib
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple, TypedDict, TypeVar, cast, get_type_hints

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

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
NUMBERS = (*FLOATS, torch.int32, torch.int64)
KL_ESTIMATORS = (*records.KL_ESTIMATORS, "full")
AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "token-sum")
HAS_TRITON = importlib.util.find_spec("triton") is not None
BACKENDS = ("auto", "triton", "torch")

# ---------------------------------------------------------------------------- one value at a time


class _Short(reprlib.Repr):
    """A user's value may be of any size, and nested in any depth."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 160
        self.maxlevel, self.maxlong = 3, 60
        self.maxlist = self.maxtuple = self.maxdict = 4

    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to write a number of more than 4300 digits.
        return f"an integer of {x.bit_length()} bits" if x.bit_length() > 400 else repr(x)


def shown(value: Any) -> str:
    """A user's value for a sentence: its repr, shortened."""
    return _Short().repr(value)


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
    refuse_shards(**{name: value})
    if value.dtype not in dtypes:
        wanted = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{name} must be {wanted}, got {str(value.dtype).removeprefix('torch.')}")
    if shape is not None and value.shape != torch.Size(shape):
        raise ValueError(
            f"{name} must have shape {list(shape)}{wants and f' ({wants})'}, "
            f"got {list(value.shape)}"
        )
    if like is not None and value.device != like.device:
        raise ValueError(f"{name} must be on {like.device}, got {value.device}")
    return value


def refuse_shards(**tensors: Tensor | None) -> None:
    """A sharded tensor would be read as the part of it that this rank holds.

    `full_tensor()` alone takes its gradient for replicated, and each rank then keeps its own rows'
    part of a gradient that is the sum over all ranks.
    """
    for name, value in tensors.items():
        if hasattr(value, "full_tensor"):
            raise TypeError(
                f"{name} must be a plain tensor, got a DTensor, of which each rank holds a part: "
                "call the loss inside the wrapped model's forward, where FSDP has gathered it, or "
                f"gather it with {name}.full_tensor(grad_placements=[Partial()]) (Partial of "
                "torch.distributed.tensor: the gradient is the sum over the ranks)"
            )


def share(name: str, x: Tensor) -> Tensor:
    """Refuses values outside [0, 1], where looking is free: on a CPU, and not while a graph is
    made."""
    if x.device.type == "cpu" and not torch.compiler.is_compiling() and x.numel():
        least, most = x.min().item(), x.max().item()
        if not 0 <= least <= most <= 1:
            raise ValueError(f"{name} must be in [0, 1], got values from {least} to {most}")
    return x


def positive(name: str, x: Tensor) -> Tensor:
    """Refuses values that are not finite and > 0, where looking is free."""
    if x.device.type == "cpu" and not torch.compiler.is_compiling() and x.numel():
        least, most = x.min().item(), x.max().item()
        if not 0 < least <= most < math.inf:
            raise ValueError(f"{name} must be finite and > 0, got values from {least} to {most}")
    return x


def boolean(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {shown(value)}")
    return value


def choice(name: str, value: str, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {shown(value)}")
    return value


def number(name: str, value: object) -> float:
    """A Python or NumPy number. A tensor would have to be read, which waits for a GPU."""
    if not isinstance(value, (int, float, numbers.Real)):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    return value  # type: ignore[return-value]


def at_least(name: str, value: float, low: float, *, strictly: bool = False) -> float:
    number(name, value)
    if not (value > low if strictly else value >= low):
        raise ValueError(f"{name} must be {'>' if strictly else '>='} {low:g}, got {value!r}")
    return value


def finite(name: str, value: float) -> float:
    number(name, value)
    # Comparisons, unlike math.isfinite, are traced by torch.compile for a float that varies.
    if not -math.inf < value < math.inf:
        raise ValueError(f"{name} must be finite, got {value!r}")
    return value


def clip_range(clip_ratio: float | tuple[float, float] | None) -> tuple[float, float]:
    """(1 − ε_low, 1 + ε_high) of a number, a pair, or None (no clipping: both infinite)."""
    if clip_ratio is None:
        return -math.inf, math.inf
    if isinstance(clip_ratio, (tuple, list)):
        if len(clip_ratio) != 2:
            raise ValueError(f"clip_ratio must be ε or (ε_low, ε_high), got {clip_ratio!r}")
        low, high = clip_ratio
    else:
        low = high = clip_ratio
    number("clip_ratio", low)
    number("clip_ratio", high)
    if not (low >= 0 and high >= 0):
        raise ValueError(f"clip_ratio must not be negative, got {clip_ratio!r}")
    return 1.0 - float(low), 1.0 + float(high)


def dual_clip(value: float | None) -> float | None:
    if value is not None and not 1 < number("dual_clip", value) < math.inf:
        raise ValueError(
            f"dual_clip must be > 1 and finite (it bounds ratio·A from below), got {value!r}"
        )
    return value


def vocabulary(tokens: Tensor, vocab: int, weights: Tensor | None = None) -> None:
    """Refuses tokens outside [0, vocab), unless their weight is 0. Reads the tensor's values: call
    it where that is free."""
    if tokens.numel() == 0:
        return
    low, high = (int(end) for end in tokens.aminmax())
    if low >= 0 and high < vocab:
        return
    if weights is not None:
        vocabulary(tokens[weights != 0], vocab)
        return
    raise ValueError(f"tokens must be in [0, {vocab}), got values from {low} to {high}")


def choose_backend(backend: str, x: Tensor) -> str:
    """The backend, "torch" or "triton", that runs an operation on `x`.

    Raises:
        ValueError: "triton" where it cannot run: fp64, an AMD GPU, or a CPU without the
            interpreter.
    """
    choice("backend", backend, BACKENDS)
    # An AMD GPU's tensors are "cuda" too.
    is_amd = x.is_cuda and torch.version.hip is not None
    if backend == "auto":
        runs = x.is_cuda and not is_amd and x.dtype != torch.float64
        return "triton" if runs and HAS_TRITON else "torch"
    if backend == "triton":
        if is_amd:
            raise ValueError(
                "backend='triton' needs an NVIDIA GPU, whose instructions some of the kernels "
                f"hold, got ROCm {torch.version.hip}; use 'auto' or 'torch'"
            )
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


# -------------------------------------------------------------------------------- keywords, once


class SoftmaxOptions(TypedDict, total=False):
    """How logits become a distribution. The second half of each annotation is the default."""

    # a number > 0, or (...) one per token
    temperature: Annotated[float | Tensor, 1.0]
    # z = logit_scale·x, then softcap·tanh(z/softcap)
    logit_scale: Annotated[float, 1.0]
    softcap: Annotated[float | None, None]
    # "auto", "triton" or "torch"
    backend: Annotated[str, "auto"]


class AggregationOptions(TypedDict, total=False):
    """What each token's loss weighs; see `aggregation_weights`."""

    aggregation: Annotated[str, "token-mean"]
    # the global normaliser, a number > 0 or a 0-d tensor
    denominator: Annotated[float | Tensor | None, None]
    # (...) the weight of each token, in place of the two above
    weights: Annotated[Tensor | None, None]


class LossOptions(SoftmaxOptions, AggregationOptions, total=False):
    """The keywords of PPO's loss."""

    # ε, or (ε_low, ε_high), or None for no clipping
    clip_ratio: Annotated[float | tuple[float, float] | None, 0.2]
    # c > 1: where A < 0 the surrogate is at least c·A
    dual_clip: Annotated[float | None, None]
    # (...) nats, of the reference, for k1, k2 and k3
    ref_logprobs: Annotated[Tensor | None, None]
    kl_coef: Annotated[float, 0.0]
    # k1, k2, k3, or full
    kl_estimator: Annotated[str, "k3"]
    # the KL of k1 or k3 times the ratio, gradient through both
    kl_ratio_weighted: Annotated[bool, False]
    entropy_coef: Annotated[float, 0.0]
    # (...) times the policy term
    importance_weights: Annotated[Tensor | None, None]


Options = TypeVar("Options", bound=Mapping[str, Any])
Function = TypeVar("Function", bound=Callable[..., Any])

DEFAULTS: dict[type, dict[str, Any]] = {
    kind: {
        name: hint.__metadata__[0]
        for name, hint in get_type_hints(kind, include_extras=True).items()
    }
    for kind in (SoftmaxOptions, AggregationOptions, LossOptions)
}


def takes(kind: type) -> Callable[[Function], Function]:
    """For a function with `**options: Unpack[kind]`: its signature shows each keyword, with its
    default, as `help` and editors read it. The function itself is left as it is."""

    def show(function: Function) -> Function:
        signature = inspect.signature(function)
        named = [x for x in signature.parameters.values() if x.kind is not x.VAR_KEYWORD]
        hints = get_type_hints(kind)
        shared = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[name]
            )
            for name, default in DEFAULTS[kind].items()
        ]
        function.__signature__ = signature.replace(parameters=named + shared)  # type: ignore[attr-defined]
        return function

    return show


def completed(options: Options, kind: type[Options], function: Callable[..., Any]) -> Options:
    """The options, completed by the defaults.

    Raises:
        TypeError: the function knows no such keyword.
    """
    whole = DEFAULTS[kind] | dict(options)
    if len(whole) > len(DEFAULTS[kind]):
        unknown = next(name for name in options if name not in DEFAULTS[kind])
        known = list(inspect.signature(function).parameters)
        nearest = difflib.get_close_matches(unknown, known, n=1, cutoff=0.0)
        raise TypeError(
            f"{function.__name__}() got an unexpected keyword argument {unknown!r}; the nearest "
            f"that it knows is {nearest[0]!r}"
        )
    return cast(Options, whole)


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
    if isinstance(denominator, Tensor):
        tensor("denominator", denominator, shape=(), dtypes=NUMBERS)
        denominator = positive("denominator", denominator.detach())
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
    options: AggregationOptions, shape: torch.Size, like: Tensor, mask: Tensor | None
) -> Tensor:
    """(...) in the accumulation dtype, 0 where masked. `options` are complete."""
    if mask is not None:
        tensor("mask", mask, shape=shape, like=like, dtypes=(torch.bool,))
    wide = accumulation_dtype(like.dtype)
    weights, denominator = options["weights"], options["denominator"]
    if weights is None:
        if mask is None:
            mask = torch.ones(shape, dtype=torch.bool, device=like.device)
        return aggregation_weights(mask, options["aggregation"], denominator, dtype=wide)
    if denominator is not None or options["aggregation"] != "token-mean":
        raise ValueError(
            "aggregation and denominator must be left out where weights replace them, got "
            f"aggregation={options['aggregation']!r} and denominator={denominator!r}"
        )
    tensor("weights", weights, shape=shape, like=like)
    weights = weights.detach().to(wide)
    return weights if mask is None else torch.where(mask, weights, 0.0)


def counted_tokens(tokens: Tensor, mask: Tensor | None, weights: Tensor | None) -> Tensor:
    """`tokens` with 0 in place of those that count for nothing, which may be anything."""
    for counts in (mask, None if weights is None else weights != 0):
        if counts is not None:
            tokens = torch.where(counts, tokens, 0)
    return tokens


def counted_temperature(
    temperature: float | Tensor, mask: Tensor | None, weights: Tensor | None
) -> float | Tensor:
    """`temperature` with 1 in place of those of tokens that count for nothing."""
    if not isinstance(temperature, Tensor) or temperature.dim() == 0:
        return temperature
    for counts in (mask, None if weights is None else weights != 0):
        if counts is not None:
            temperature = torch.where(counts, temperature, 1.0)
    return temperature


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


def is_asked(x: Tensor | None) -> bool:
    """Whether a gradient of x is wanted."""
    return x is not None and x.requires_grad and torch.is_grad_enabled()


def softmax_of(
    options: SoftmaxOptions, shape: torch.Size, like: Tensor, counts: Tensor | None = None
) -> Softmax:
    """`counts`: (...) bool, whose temperatures are looked at; the others may be anything."""
    at_least("logit_scale", options["logit_scale"], 0.0, strictly=True)
    finite("logit_scale", options["logit_scale"])
    softcap = options["softcap"]
    if softcap is not None:
        finite("softcap", at_least("softcap", softcap, 0.0, strictly=True))
    temperature, temperatures = options["temperature"], None
    if isinstance(temperature, Tensor):
        if temperature.dim() > 0:
            tensor("temperature", temperature, shape=shape, like=like, wants="one per token")
        tensor("temperature", temperature, dtypes=NUMBERS)
        looked_at = temperature.detach()
        if counts is not None and temperature.dim() > 0:
            looked_at = torch.where(counts, looked_at, 1)
        positive("temperature", looked_at)
        wide = accumulation_dtype(like.dtype)
        temperatures = temperature.detach().to(like.device, wide).expand(shape).reshape(-1)
        temperature = 1.0
    else:
        finite("temperature", at_least("temperature", temperature, 0.0, strictly=True))
    return Softmax(
        float(temperature),
        temperatures,
        float(options["logit_scale"]),
        None if softcap is None else float(softcap),
    )


class LossArguments(NamedTuple):
    per_token: PerToken
    objective: Objective
    softmax: Softmax
    backend: str


def loss_arguments(
    options: LossOptions,
    shape: torch.Size,
    like: Tensor,
    tokens: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor | None,
    *,
    has_full_reference: bool,
) -> LossArguments:
    """What `ppo_loss` and `linear_ppo_loss` have in common. `options` are complete.

    `like` is the logits or the hidden states; `has_full_reference`: the reference's logits are
    there for the full KL.
    """
    wide = accumulation_dtype(like.dtype)

    def flat(name: str, value: Tensor) -> Tensor:
        tensor(name, value, shape=shape, like=like, wants="one per token")
        return value.detach().to(wide).reshape(-1)

    importance, ref_logprobs = options["importance_weights"], options["ref_logprobs"]
    kl_estimator, kl_coef = options["kl_estimator"], options["kl_coef"]
    flat_tokens = token_ids(tokens, shape, like)
    operands = {
        "old_logprobs": flat("old_logprobs", old_logprobs),
        "advantages": flat("advantages", advantages),
        "importance_weights": None
        if importance is None
        else flat("importance_weights", importance),
        "ref_logprobs": None if ref_logprobs is None else flat("ref_logprobs", ref_logprobs),
    }
    choice("kl_estimator", kl_estimator, KL_ESTIMATORS)
    finite("kl_coef", kl_coef)
    finite("entropy_coef", options["entropy_coef"])
    if kl_estimator == "full" and kl_coef and not has_full_reference:
        raise ValueError(
            "kl_estimator='full' needs ref_logits (ref_hidden and ref_weight in linear_ppo_loss), "
            "got None"
        )
    if kl_estimator != "full" and kl_coef and ref_logprobs is None and not has_full_reference:
        raise ValueError(
            f"kl_coef={kl_coef} with kl_estimator={kl_estimator!r} needs ref_logprobs, got None"
        )
    if boolean("kl_ratio_weighted", options["kl_ratio_weighted"]):
        if kl_estimator not in records.RATIO_WEIGHTED:
            raise ValueError(
                "kl_ratio_weighted=True needs kl_estimator='k1' or 'k3', which the ratio makes "
                f"unbiased, got {kl_estimator!r}"
            )
        if not kl_coef:
            raise ValueError("kl_ratio_weighted=True needs a kl_coef that is not 0, got 0")
    weights = token_weights(options, shape, like, mask)
    softmax = softmax_of(options, shape, like, weights != 0)
    weights = weights.reshape(-1)
    lowest_ratio, highest_ratio = clip_range(options["clip_ratio"])
    objective = Objective(
        lowest_ratio,
        highest_ratio,
        dual_clip=dual_clip(options["dual_clip"]),
        kl_coef=float(kl_coef),
        kl_estimator=kl_estimator,
        entropy_coef=float(options["entropy_coef"]),
        kl_ratio_weighted=options["kl_ratio_weighted"],
    )
    per_token = PerToken(flat_tokens, weights=weights, **operands)  # type: ignore[arg-type]
    return LossArguments(per_token, objective, softmax, choose_backend(options["backend"], like))


class ProjectionArguments(NamedTuple):
    projection: Projection
    asked: GradientsWanted
    gemm: Gemm


def projection_arguments(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    chunk_size: int | None,
) -> ProjectionArguments:
    """The lm-head and the hidden states as [N, H], their gradients, the dtype of the GEMMs."""
    refuse_shards(hidden=hidden, weight=weight, bias=bias)
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
    if chunk_size is not None:
        if not isinstance(chunk_size, int):
            raise TypeError(f"chunk_size must be an int, got {type(chunk_size).__name__}")
        at_least("chunk_size", chunk_size, 1)
    dtype = hidden.dtype
    if torch.is_autocast_enabled(hidden.device.type) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(hidden.device.type)
    return ProjectionArguments(
        Projection(hidden.reshape(-1, hidden.shape[-1]), weight, bias),
        GradientsWanted(is_asked(hidden), is_asked(weight), is_asked(bias)),
        Gemm(chunk_size, dtype),
    )


def ref_projection_argument(
    ref_hidden: Tensor | None,
    ref_weight: Tensor | None,
    ref_bias: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
) -> Projection | None:
    """The reference's head, whose width may be another; without gradient."""
    refuse_shards(ref_hidden=ref_hidden, ref_weight=ref_weight, ref_bias=ref_bias)
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
    wants = (*hidden.shape[:-1], ref_weight.shape[1])
    tensor("ref_hidden", ref_hidden, shape=wants, like=hidden)
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


def trajectory_of(
    values: Tensor,
    rewards: Tensor | None,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    bootstrap: Tensor | None,
    *,
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
    tensor("cu_seqlens", cu_seqlens, like=values, dtypes=(torch.int32, torch.int64))
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


def discounts_of(gamma: float | Tensor, lam: float | Tensor, batch: int, like: Tensor) -> Discounts:
    """Numbers in [0, 1], or [B], one per sequence."""
    number_of_gamma, gammas = _discount("gamma", gamma, batch, like)
    number_of_lam, lams = _discount("lam", lam, batch, like)
    return Discounts(number_of_gamma, number_of_lam, gammas, lams)


def _discount(
    name: str, value: float | Tensor, batch: int, like: Tensor
) -> tuple[float, Tensor | None]:
    """A scalar, or one per sequence: (the scalar, [B] or None)."""
    if isinstance(value, Tensor):
        if value.dim() == 0:
            value = value.expand(batch)
        tensor(name, value, shape=(batch,), like=like, wants="one per sequence")
        return 0.0, share(name, value.detach())
    if not 0 <= number(name, value) <= 1:
        raise ValueError(f"{name} must be in [0, 1], got {value!r}")
    return float(value), None
