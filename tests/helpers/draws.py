"""Random inputs of tests, and the results of the definition for the public keywords."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from fastppo_kernels import definition
from fastppo_kernels.records import Objective, PerToken, Softmax
from torch import Tensor

from benchmarks.conformance import formulas as paper


def wide(value: Any) -> Any:
    """Convert to fp64."""
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def as_softmax(
    temperature: float | Tensor = 1.0, logit_scale: float = 1.0, softcap: float | None = None
) -> Softmax:
    """Convert the public keywords to a Softmax in fp64."""
    if isinstance(temperature, Tensor) and temperature.dim() > 0:
        return Softmax(1.0, temperature.double().reshape(-1), logit_scale, softcap)
    return Softmax(float(temperature), None, logit_scale, softcap)


def log_softmax(logits: Tensor, **keywords: Any) -> Tensor:
    """(..., V) log softmax(z/T), fp64, for the public keywords of the softmax."""
    return definition.log_softmax(logits.double(), as_softmax(**keywords)).view(logits.shape)


def token_logprobs(logits: Tensor, tokens: Tensor, **keywords: Any) -> Tensor:
    return log_softmax(logits, **keywords).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


class Exact(NamedTuple):
    """The definition's results in fp64: loss () is differentiable, the others [N] are not."""

    loss: Tensor
    logprobs: Tensor
    entropy: Tensor
    kl: Tensor


def exact(
    logits: Tensor,
    tokens: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    objective: str = "clip",
    clip_ratio: float | tuple[float, float] | None = 0.2,
    dual_clip: float | None = None,
    sapo_tau: tuple[float, float] = (1.0, 1.05),
    cu_seqlens: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    ref_logits: Tensor | None = None,
    kl_coef: float = 0.0,
    kl_estimator: str = "k3",
    kl_ratio_weighted: bool = False,
    entropy_coef: float = 0.0,
    importance_weights: Tensor | None = None,
    **softmax_keywords: Any,
) -> Exact:
    """Return PPO's loss over [N, V] counted rows, for the public keywords."""
    low, high = clip_range(clip_ratio)
    if ref_logits is not None and ref_logprobs is None and kl_estimator != "full":
        ref_logprobs = token_logprobs(ref_logits, tokens, **softmax_keywords)
    optional = (importance_weights, ref_logprobs)
    old_logprobs = old_logprobs.double()
    if objective == "gspo":
        assert cu_seqlens is not None
        logprobs = token_logprobs(logits.detach(), tokens, **softmax_keywords)
        every = torch.ones_like(tokens, dtype=torch.bool)
        old_logprobs = definition.sequence_ratio_logprobs(logprobs, old_logprobs, every, cu_seqlens)
    loss, rows = definition.loss(
        logits.double(),
        PerToken(tokens, *map(wide, (old_logprobs, advantages, weights, *optional))),
        Objective(
            1 - low,
            1 + high,
            dual_clip,
            kl_coef,
            kl_estimator,
            entropy_coef,
            kl_ratio_weighted,
            "clip" if objective == "gspo" else objective,
            *sapo_tau,
        ),
        as_softmax(**softmax_keywords),
        wide(ref_logits),
    )
    return Exact(loss, rows.logprobs, rows.entropy, rows.kl)


def clip_range(clip_ratio: float | tuple[float, float] | None) -> tuple[float, float]:
    """(ε_low, ε_high)"""
    if clip_ratio is None:
        return math.inf, math.inf
    return clip_ratio if isinstance(clip_ratio, tuple) else (clip_ratio, clip_ratio)


def metrics(
    found: Exact,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    clip_ratio: float | tuple[float, float] | None = 0.2,
    dual_clip: float | None = None,
    importance_weights: Tensor | None = None,
    objective: str = "clip",
) -> dict[str, float]:
    """Return every metric by the published formulas, in fp64."""
    low, high = clip_range(None if objective == "sapo" else clip_ratio)
    logprobs, old, a, w = (
        x.detach().double().numpy() for x in (found.logprobs, old_logprobs, advantages, weights)
    )
    difference = (logprobs - old).clip(-20.0, 20.0)
    limited = old + difference
    terms = paper.policy_term(
        logprobs if objective in paper.DETACHED else limited,
        limited,
        {"old_logprobs": old, "advantages": a},
        objective="clip" if objective == "gspo" else objective,
        clip=(low, high),
        dual_clip=dual_clip,
        tau=(1.0, 1.05),
    )
    if importance_weights is not None:
        terms = terms * importance_weights.double().numpy()
    ratio = bounded = np.exp(difference)
    if objective in ("dppo_tv", "dppo_kl"):
        divergence = paper.binary_divergence(objective, logprobs, old)
        bounded = 1 + np.where(difference >= 0, divergence, -divergence)
    above, below = bounded > 1 + high, bounded < 1 - low
    corners = {
        "above_positive": above & (a > 0),
        "below_positive": below & (a > 0),
        "above_negative": above & (a < 0),
        "below_negative": below & (a < 0),
    }
    clipped = corners["above_positive"] | corners["below_negative"]
    if objective in ("cispo", "dis"):
        clipped = above | below
    dual = (a < 0) & (ratio > (math.inf if dual_clip is None else dual_clip))
    exact = {
        "policy_loss": (w * terms).sum(),
        "entropy": found.entropy.mean(),
        "kl": found.kl.mean(),
        "approx_kl": (np.expm1(difference) - (logprobs - old)).mean(),
        "clip_fraction": clipped.mean(),
        "dual_clip_fraction": dual.mean(),
        "ratio_mean": ratio.mean(),
        "ratio_max": ratio.max(),
        "ratio_variance": ratio.var(),
        "effective_sample_size": ratio.mean() ** 2 / (ratio**2).mean(),
        **{f"ratio_{name}": where.mean() for name, where in corners.items()},
    }
    return {name: float(value) for name, value in exact.items()}


class Batch(NamedTuple):
    """N tokens of a policy that has moved away from the old policy: ratios on both sides of 1."""

    logits: Tensor
    tokens: Tensor
    old_logprobs: Tensor
    advantages: Tensor

    def leaf(self) -> Batch:
        return self._replace(logits=self.logits.detach().clone().requires_grad_())


def batch(
    shape: tuple[int, ...], vocab: int, dtype: torch.dtype = torch.float64, seed: int = 0
) -> Batch:
    """Draw a batch. Four of six tokens are outside the clip range, one in each corner of (ratio,
    sign of A)."""
    g = torch.Generator().manual_seed(seed)
    per_token = torch.float64 if dtype == torch.float64 else torch.float32
    logits = torch.randn(*shape, vocab, generator=g, dtype=torch.float64).mul(2).to(dtype)
    tokens = torch.randint(vocab, shape, generator=g)
    logprobs = token_logprobs(logits, tokens)
    draw, advantages = torch.randn(2, *shape, generator=g, dtype=torch.float64)
    place = torch.arange(tokens.numel()).view(shape) % 6
    outside = (0.35 + 0.3 * draw.abs()) * torch.where(place < 2, -1.0, 1.0)
    noise = torch.where(place < 4, outside, 0.05 * draw)
    advantages = advantages.abs().add(0.1) * torch.where(place % 2 == 0, -1.0, 1.0)
    return Batch(logits, tokens, (logprobs + noise).to(per_token), advantages.to(per_token))


def like(x: Tensor, seed: int, scale: float = 1.0, positive: bool = False) -> Tensor:
    """Draw a tensor of the shape of x, in fp32 (fp64 for fp64)."""
    g = torch.Generator().manual_seed(seed)
    draw = torch.randn(x.shape, generator=g, dtype=torch.float64) * scale
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return (draw.abs() + 0.1 if positive else draw).to(dtype)


def options(n: Batch, name: str) -> dict[str, Any]:
    """Return named sets of keywords, one per term of the loss and per change of the softmax."""
    ref = {"ref_logprobs": n.old_logprobs + like(n.old_logprobs, 7, 0.3)}
    ref_logits = {"ref_logits": n.logits.detach() + like(n.logits, 8, 0.5).to(n.logits.dtype)}
    per_token = like(n.old_logprobs, 9, 0.5, positive=True) + 0.3
    count = n.tokens.numel()
    return {
        "policy": {},
        "no clipping": {"clip_ratio": None},
        "asymmetric clip": {"clip_ratio": (0.1, 0.4)},
        "dual clip": {"dual_clip": 1.3},
        "cispo": {"objective": "cispo"},
        "sapo": {"objective": "sapo", "sapo_tau": (1.2, 2.5)},
        "gspo": {"objective": "gspo", "cu_seqlens": torch.tensor([0, 1, 1, count // 2, count])},
        "dis": {"objective": "dis"},
        "dppo_tv": {"objective": "dppo_tv", "clip_ratio": (0.004, 0.003)},
        "dppo_kl": {"objective": "dppo_kl", "clip_ratio": (0.001, 0.0015)},
        "entropy": {"entropy_coef": 0.3},
        "k1": {"kl_coef": 0.4, "kl_estimator": "k1", **ref},
        "k2": {"kl_coef": 0.4, "kl_estimator": "k2", **ref},
        "k3": {"kl_coef": 0.4, "kl_estimator": "k3", **ref},
        "k3 from ref_logits": {"kl_coef": 0.4, **ref_logits},
        "ratio·k1": {"kl_coef": 0.4, "kl_estimator": "k1", "kl_ratio_weighted": True, **ref},
        "ratio·k3": {"kl_coef": 0.4, "kl_ratio_weighted": True, **ref},
        "full KL": {"kl_coef": 0.4, "kl_estimator": "full", **ref_logits},
        "importance weights": {"importance_weights": like(n.old_logprobs, 10, 1.0, True)},
        "temperature": {"temperature": 0.6, "entropy_coef": 0.3},
        "temperature per token": {"temperature": per_token, "entropy_coef": 0.3},
        "logit scale": {"logit_scale": 0.25, "entropy_coef": 0.3},
        "soft-cap": {"softcap": 3.0, "entropy_coef": 0.3},
        "everything": {
            "clip_ratio": (0.15, 0.3),
            "dual_clip": 1.4,
            "entropy_coef": 0.2,
            "kl_coef": 0.4,
            "kl_estimator": "full",
            "importance_weights": like(n.old_logprobs, 10, 1.0, True),
            "temperature": per_token,
            "logit_scale": 1.5,
            "softcap": 4.0,
            **ref_logits,
        },
    }[name]


TERMS = (
    "policy",
    "no clipping",
    "asymmetric clip",
    "dual clip",
    "cispo",
    "sapo",
    "gspo",
    "dis",
    "dppo_tv",
    "dppo_kl",
    "entropy",
    "k1",
    "k2",
    "k3",
    "k3 from ref_logits",
    "ratio·k1",
    "ratio·k3",
    "full KL",
    "importance weights",
    "temperature",
    "temperature per token",
    "logit scale",
    "soft-cap",
    "everything",
)


DETACHED = ("cispo", "gspo", "dis", "dppo_tv", "dppo_kl")
"""Terms with detached parts, for which finite differences give another gradient."""


def as_linear(keywords: dict[str, Any]) -> dict[str, Any]:
    """Express reference logits as the output of an identity head."""
    keywords = dict(keywords)
    ref_logits = keywords.pop("ref_logits", None)
    if ref_logits is not None:
        identity = torch.eye(ref_logits.shape[-1], dtype=ref_logits.dtype)
        keywords |= {"ref_hidden": ref_logits, "ref_weight": identity}
    return keywords


def head(
    shape: tuple[int, ...], vocab: int, width: int, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """Return [hidden (*shape, width), weight, bias], leaves."""
    parts = (torch.randn(*shape, width), torch.randn(vocab, width), torch.randn(vocab))
    return [x.to(dtype).requires_grad_() for x in parts]
