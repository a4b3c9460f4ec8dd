"""PPO's loss by autograd in fp64, one line per definition, and the inputs that tests draw.

Nothing here is shared with the implementation: `torch.log_softmax` and autograd do the work that
the library does by hand.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Naive(NamedTuple):
    loss: Tensor
    logprobs: Tensor
    entropy: Tensor
    kl: Tensor
    ratio: Tensor
    policy: Tensor


def distribution(
    logits: Tensor,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> Tensor:
    """log softmax(z/T), fp64."""
    z = logits.double() * logit_scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    t = temperature.double().unsqueeze(-1) if isinstance(temperature, Tensor) else temperature
    return torch.log_softmax(z / t, -1)


def ppo_loss(
    logits: Tensor,
    tokens: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
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
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> Naive:
    """Over flat [N, V] rows, all of which count; differentiable by logits."""
    softmax = {"temperature": temperature, "logit_scale": logit_scale, "softcap": softcap}
    log_p = distribution(logits, **softmax)
    logprobs = log_p.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    p = log_p.exp()
    entropy = -torch.where(p > 0, p * log_p.clamp(min=-1e30), 0.0).sum(-1)
    ratio = (logprobs - old_logprobs.double()).clamp(-20, 20).exp()
    a = advantages.double()
    surrogate = ratio * a
    if clip_ratio is not None:
        low, high = clip_ratio if isinstance(clip_ratio, tuple) else (clip_ratio, clip_ratio)
        surrogate = torch.minimum(surrogate, ratio.clamp(1 - low, 1 + high) * a)
    if dual_clip is not None:
        surrogate = torch.where(a < 0, torch.maximum(surrogate, dual_clip * a), surrogate)
    policy = -surrogate
    if importance_weights is not None:
        policy = policy * importance_weights.double()
    kl = torch.zeros_like(logprobs)
    if ref_logits is not None:
        log_q = distribution(ref_logits, **softmax)
        if kl_estimator == "full":
            kl = (p * (log_p - log_q)).sum(-1)
        elif ref_logprobs is None:
            ref_logprobs = log_q.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    if kl_estimator != "full" and ref_logprobs is not None:
        d = logprobs - ref_logprobs.double()
        inverse = (-d).clamp(-20, 20).exp()
        kl = {"k1": d, "k2": d * d / 2, "k3": inverse - 1 + d}[kl_estimator]
    token = policy + kl_coef * kl - entropy_coef * entropy
    return Naive((weights.double() * token).sum(), logprobs, entropy, kl, ratio, policy)


def metrics(
    naive: Naive,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    clip_ratio: float | tuple[float, float] | None = 0.2,
    dual_clip: float | None = None,
) -> dict[str, float]:
    """Every metric token by token in a Python loop, over rows that all count."""
    low, high = (math.inf, math.inf) if clip_ratio is None else (0.0, 0.0)
    if clip_ratio is not None:
        low, high = clip_ratio if isinstance(clip_ratio, tuple) else (clip_ratio, clip_ratio)
    names = ("above_positive", "below_positive", "above_negative", "below_negative")
    corners = dict.fromkeys(names, 0)
    clipped = dual = 0
    ratios = naive.ratio.tolist()
    for ratio, a in zip(ratios, advantages.double().tolist(), strict=True):
        if a == 0:
            continue
        sign = "positive" if a > 0 else "negative"
        if ratio > 1 + high:
            corners[f"above_{sign}"] += 1
        if ratio < 1 - low:
            corners[f"below_{sign}"] += 1
        clipped += (a > 0 and ratio > 1 + high) or (a < 0 and ratio < 1 - low)
        dual += dual_clip is not None and a < 0 and ratio > dual_clip
    n = len(ratios)
    d = old_logprobs.double() - naive.logprobs
    return {
        "policy_loss": (weights.double() * naive.policy).sum().item(),
        "entropy": naive.entropy.mean().item(),
        "kl": naive.kl.mean().item(),
        "approx_kl": ((-d).exp() - 1 + d).mean().item(),
        "clip_fraction": clipped / n,
        "dual_clip_fraction": dual / n,
        "ratio_mean": sum(ratios) / n,
        "ratio_max": max(ratios),
        "effective_sample_size": sum(ratios) ** 2 / (n * sum(r * r for r in ratios)),
        **{f"ratio_{name}": count / n for name, count in corners.items()},
    }


class Batch(NamedTuple):
    """N tokens of a policy that has moved away from the rollout's: ratios on both sides of 1."""

    logits: Tensor
    tokens: Tensor
    old_logprobs: Tensor
    advantages: Tensor

    def leaf(self) -> Batch:
        return self._replace(logits=self.logits.detach().clone().requires_grad_())


def batch(
    shape: tuple[int, ...], vocab: int, dtype: torch.dtype = torch.float64, seed: int = 0
) -> Batch:
    """Of six tokens four lie outside the clip range, one in each corner of (ratio, sign of A)."""
    g = torch.Generator().manual_seed(seed)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    logits = torch.randn(*shape, vocab, generator=g, dtype=torch.float64).mul(2).to(dtype)
    tokens = torch.randint(vocab, shape, generator=g)
    logprobs = distribution(logits).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    draw, advantages = torch.randn(2, *shape, generator=g, dtype=torch.float64)
    place = torch.arange(tokens.numel()).view(shape) % 6
    outside = (0.35 + 0.3 * draw.abs()) * torch.where(place < 2, -1.0, 1.0)
    noise = torch.where(place < 4, outside, 0.05 * draw)
    advantages = advantages.abs().add(0.1) * torch.where(place % 2 == 0, -1.0, 1.0)
    return Batch(logits, tokens, (logprobs + noise).to(wide), advantages.to(wide))


def like(x: Tensor, seed: int, scale: float = 1.0, positive: bool = False) -> Tensor:
    """A draw of the shape of x, in fp32 (fp64 for fp64)."""
    g = torch.Generator().manual_seed(seed)
    draw = torch.randn(x.shape, generator=g, dtype=torch.float64) * scale
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return (draw.abs() + 0.1 if positive else draw).to(wide)


def options(n: Batch, name: str) -> dict[str, Any]:
    """Named sets of keywords, one for each term of the loss and each change of the softmax."""
    ref = {"ref_logprobs": n.old_logprobs + like(n.old_logprobs, 7, 0.3)}
    ref_logits = {"ref_logits": n.logits.detach() + like(n.logits, 8, 0.5).to(n.logits.dtype)}
    per_token = like(n.old_logprobs, 9, 0.5, positive=True) + 0.3
    return {
        "policy": {},
        "no clipping": {"clip_ratio": None},
        "asymmetric clip": {"clip_ratio": (0.1, 0.4)},
        "dual clip": {"dual_clip": 1.3},
        "entropy": {"entropy_coef": 0.3},
        "k1": {"kl_coef": 0.4, "kl_estimator": "k1", **ref},
        "k2": {"kl_coef": 0.4, "kl_estimator": "k2", **ref},
        "k3": {"kl_coef": 0.4, "kl_estimator": "k3", **ref},
        "k3 from ref_logits": {"kl_coef": 0.4, **ref_logits},
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
    "entropy",
    "k1",
    "k2",
    "k3",
    "k3 from ref_logits",
    "full KL",
    "importance weights",
    "temperature",
    "temperature per token",
    "logit scale",
    "soft-cap",
    "everything",
)
