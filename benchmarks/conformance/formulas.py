"""The published formulas in fp64 NumPy, and the variants of them that peers compute.

Each function maps the inputs of a fixture to its outputs. Keywords that no fixture has select a
variant; their defaults are the published definition. Masked entries may hold anything. Gradients
are central differences.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray
Arrays = dict[str, Array]

DETACHED = ("cispo", "dis", "dppo_tv", "dppo_kl")
"""Objectives with detached factors, whose value means nothing: only the gradient is compared."""

STEP = 1e-6
"""Of the central differences: an error of 1e-10 in fp64."""


def gradient(function: Callable[[Array], float], x: Array, mask: Array | None = None) -> Array:
    """Return the derivative of the function at x, 0 where masked."""
    slope = np.zeros_like(x)
    for place in np.ndindex(x.shape):
        if mask is None or mask[place]:
            up, down = x.copy(), x.copy()
            up[place] += STEP
            down[place] -= STEP
            slope[place] = (function(up) - function(down)) / (2 * STEP)
    return slope


# --------------------------------------------------------------------------------------- advantages


def sequences(inputs: Arrays) -> list[Array]:
    """Return the flat indices of each sequence, masked tokens included."""
    if "cu_seqlens" in inputs:
        ends = inputs["cu_seqlens"]
        return [np.arange(start, end) for start, end in itertools.pairwise(ends)]
    rows, length = inputs["values"].shape
    return list(np.arange(rows * length).reshape(rows, length))


def gae(inputs: Arrays, *, gamma: float, lam: float, masked: str = "skip") -> Arrays:
    """A_t = Σ_l (γλ)^l δ_{t+l}, δ_t = r_t + γ·V_next − V_t.

    masked: "skip" masked tokens, "count" them like the others, or set their reward and value to
        "zero" and count them.
    """
    mask = inputs["mask"].ravel()
    values = inputs["values"].ravel()
    rewards = inputs["rewards"].ravel()
    if masked == "zero":
        values, rewards = np.where(mask, values, 0.0), np.where(mask, rewards, 0.0)
    bootstrap = inputs.get("bootstrap", np.zeros(len(sequences(inputs))))
    advantages = np.zeros_like(values)
    for tokens, end_value in zip(sequences(inputs), bootstrap, strict=True):
        kept = tokens[mask[tokens]] if masked == "skip" else tokens
        following = np.append(values[kept], end_value)[1:]
        delta = rewards[kept] + gamma * following - values[kept]
        for i, token in enumerate(kept):
            discounts = (gamma * lam) ** np.arange(len(kept) - i)
            advantages[token] = (discounts * delta[i:]).sum()
    shape = inputs["values"].shape
    return {
        "advantages": advantages.reshape(shape),
        "returns": (advantages + values).reshape(shape),
    }


def rewards(inputs: Arrays, *, kl_coef: float, estimator: str, at: str = "last counted") -> Arrays:
    """−β·KL_t, plus the score on the last counted token, or `at` the "last column"."""
    shaped = -kl_coef * sampled_kl(inputs["logprobs"], inputs["ref_logprobs"], estimator)
    for row, mask in enumerate(inputs["mask"]):
        last = np.flatnonzero(mask)[-1] if at == "last counted" else -1
        shaped[row, last] += inputs["scores"][row]
    return {"rewards": shaped}


def whiten(
    inputs: Arrays, *, shift_mean: bool, bessel: bool = True, epsilon_of_deviation: float = 0.0
) -> Arrays:
    """(x − mean)·rsqrt(var + 1e-8) over the mask; without the shift, plus the mean.

    epsilon_of_deviation: added to the deviation, in place of 1e-8 on the variance.
    """
    x = inputs["x"]
    counted = x[inputs["mask"]] if "mask" in inputs else x.ravel()
    mean = counted.mean()
    variance = counted.var(ddof=int(bessel))
    scale = np.sqrt(variance + 1e-8)
    if epsilon_of_deviation:
        scale = np.sqrt(variance) + epsilon_of_deviation
    white = (x - mean) / scale
    return {"whitened": white if shift_mean else white + mean}


def group(
    inputs: Arrays, *, kind: str, size: int, epsilon: float = 0.0, bessel: bool = True
) -> Arrays:
    """Scores minus the mean of the others (rloo), or of the group over its deviation (grpo)."""
    scores = inputs["scores"].reshape(-1, size)
    above = scores - scores.mean(1, keepdims=True)
    if kind == "rloo":
        above = scores - (scores.sum(1, keepdims=True) - scores) / (size - 1)
    elif kind == "grpo":
        deviation = scores.std(1, ddof=int(bessel), keepdims=True) + epsilon
        above = np.divide(above, deviation, out=np.zeros_like(above), where=deviation > 0)
    return {"advantages": above.ravel()}


# ----------------------------------------------------------------------------------------------- KL


def sampled_kl(logprobs: Array, ref_logprobs: Array, estimator: str) -> Array:
    """With r = q(x)/p(x) for x ~ p: k1 = −log r, k2 = (log r)²/2, k3 = (r − 1) − log r."""
    log_r = ref_logprobs - logprobs
    return {"k1": -log_r, "k2": log_r**2 / 2, "k3": np.exp(log_r) - 1 - log_r}[estimator]


def kl(
    inputs: Arrays, *, estimator: str, ratio_weighted: bool = False, limit: float = np.inf
) -> Arrays:
    """The estimate of each token, and the gradient of their sum by the logprobs.

    limit: clamp the estimate to ±limit, without gradient beyond.
    """

    def estimates(logprobs: Array) -> Array:
        estimate = sampled_kl(logprobs, inputs["ref_logprobs"], estimator).clip(-limit, limit)
        weighted = np.exp(logprobs - inputs["old_logprobs"]) if ratio_weighted else 1.0
        return estimate * weighted

    logprobs = inputs["logprobs"]
    total = gradient(lambda x: estimates(x).sum(), logprobs)
    return {"kl": estimates(logprobs), "gradient": total}


def kl_control(inputs: Arrays, *, coef: float, target: float, horizon: float) -> Arrays:
    """β ← β·(1 + clip(KL/target − 1, −0.2, 0.2)·n/horizon), after each KL of n sequences."""
    coefs = []
    for divergence, count in zip(inputs["kl"], inputs["sequences"], strict=True):
        coef *= 1 + np.clip(divergence / target - 1, -0.2, 0.2) * count / horizon
        coefs.append(coef)
    return {"coefs": np.array(coefs)}


# ------------------------------------------------------------------------------------------- losses


def weights(mask: Array, aggregation: str, length: int | None = None) -> Array:
    """Return the weight of each token; the loss is their weighted sum."""
    lengths = mask.sum(1, keepdims=True)
    return {
        "token-mean": mask / mask.sum(),
        "seq-mean-token-mean": mask / np.maximum(lengths, 1) / (lengths > 0).sum(),
        "seq-mean-token-sum": mask / (lengths > 0).sum(),
        "constant": mask / (len(mask) * (length or 1)),
    }[aggregation]


def policy_term(
    logprobs: Array, fixed: Array, inputs: Arrays, *, objective: str, clip: list[float], **more: Any
) -> Array:
    """Return the minimized term of each token. `fixed` are the logprobs in detached factors."""
    old = inputs["old_logprobs"]
    advantages = inputs["advantages"]
    mask = inputs["mask"]
    low, high = 1 - clip[0], 1 + clip[1]
    if objective == "gspo":
        difference = np.where(mask, logprobs - old, 0.0)
        means = difference.sum(1, keepdims=True) / np.maximum(mask.sum(1, keepdims=True), 1)
        ratio = np.exp(means) * np.ones_like(logprobs)
    else:
        ratio = np.exp(logprobs - old)
    detached = np.exp(fixed - old)
    if objective in ("clip", "gspo"):
        surrogate = np.minimum(ratio * advantages, np.clip(ratio, low, high) * advantages)
        if more.get("dual_clip"):
            bounded = np.maximum(surrogate, more["dual_clip"] * advantages)
            surrogate = np.where(advantages < 0, bounded, surrogate)
        return -surrogate
    if objective == "cispo":
        floor = 0.0 if more.get("no_lower_clip") else low
        return -np.clip(detached, floor, high) * advantages * logprobs
    if objective == "dis":
        inside = (detached > low) & (detached < high)
        return -np.where(inside, detached, 0.0) * advantages * logprobs
    if objective.startswith("dppo"):
        p, q = np.exp(fixed), np.exp(old)
        divergence = np.abs(p - q)
        if objective == "dppo_kl":
            divergence = q * np.log(q / p) + (1 - q) * np.log((1 - q) / (1 - p))
        leaving = np.where(advantages > 0, p > q, p < q)
        beyond = divergence > np.where(advantages > 0, clip[1], clip[0])
        return -np.where(leaving & beyond, 0.0, detached) * advantages * logprobs
    tau_positive, tau_negative = more["tau"]
    tau = np.where(advantages > 0, tau_positive, tau_negative)
    return -4 / tau / (1 + np.exp(-tau * (ratio - 1))) * advantages


def policy(
    inputs: Arrays,
    *,
    aggregation: str = "token-mean",
    length: int | None = None,
    microbatches: list[list[int]] | None = None,
    mean_of_means: bool = False,
    nan: tuple[str, ...] = (),
    **options: Any,
) -> Arrays:
    """The loss of a batch, and its gradient by the logprobs.

    mean_of_means: the mean of the microbatches' own losses.
    nan: outputs that are NaN where a logprob is: the "loss", the "gradient" of these entries.
    """
    mask = inputs["mask"]
    w = weights(mask, aggregation, length)
    if mean_of_means:
        assert microbatches is not None
        for rows in microbatches:
            w[rows] = weights(mask[rows], aggregation, length) / len(microbatches)
    if "importance_weights" in inputs:
        w = w * inputs["importance_weights"]
    logprobs = inputs["logprobs"]

    def loss(x: Array) -> float:
        term = policy_term(x, logprobs, inputs, **options)
        return float((w * np.where(mask, term, 0.0))[mask].sum())

    outputs = {"gradient": gradient(loss, logprobs, mask)}
    if "gradient" in nan:
        outputs["gradient"][np.isnan(logprobs)] = np.nan
    # The value of a surrogate with detached factors means nothing.
    if options["objective"] not in DETACHED:
        outputs["loss"] = np.array(np.nan if "loss" in nan else loss(logprobs))
    return outputs


def value(
    inputs: Arrays,
    *,
    clip: float | None = None,
    half: bool = True,
    aggregation: str = "token-mean",
) -> Arrays:
    """½(V − R)², clipped as in OpenAI baselines, and its gradient by the values."""
    mask = inputs["mask"]
    returns = inputs["returns"]
    w = weights(mask, aggregation) * (0.5 if half else 1.0)

    def loss(values: Array) -> float:
        error = (values - returns) ** 2
        if clip is not None:
            old = inputs["old_values"]
            near = np.clip(values, old - clip, old + clip)
            error = np.maximum(error, (near - returns) ** 2)
        return float((w * error).sum())

    values = inputs["values"]
    return {"loss": np.array(loss(values)), "gradient": gradient(loss, values, mask)}


def token(inputs: Arrays, *, temperature: float, zero_times_infinity: bool = False) -> Arrays:
    """Logprob and entropy of softmax(z/T).

    zero_times_infinity: the entropy is NaN with a logit of −∞.
    """

    def log_softmax(z: Array) -> Array:
        shifted = z - z.max(-1, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))

    log_p = log_softmax(inputs["logits"] / temperature)
    logprobs = np.take_along_axis(log_p, inputs["tokens"][..., None], -1)[..., 0]
    ruled_out = np.nan if zero_times_infinity else 0.0
    finite = np.where(np.isfinite(log_p), log_p, ruled_out)
    return {"logprobs": logprobs, "entropy": -(np.exp(log_p) * finite).sum(-1)}


def importance(
    inputs: Arrays,
    *,
    level: str,
    mode: str,
    floor: float | None,
    cap: float,
    geometric: bool = False,
    keep_token_ratio: bool = False,
) -> Arrays:
    """Weights π/π_sampler, by token or as the product over a sequence, truncated or masked.

    geometric: the geometric mean over a sequence, in place of the product.
    keep_token_ratio: a sequence that is kept has the ratios of its tokens.
    """
    mask = inputs["mask"]
    log_ratio = np.where(mask, inputs["logprobs"] - inputs["sampler_logprobs"], 0.0)
    by_token = np.exp(log_ratio)
    if level == "sequence":
        count = mask.sum(1, keepdims=True) if geometric else 1.0
        log_ratio = log_ratio.sum(1, keepdims=True) / count * np.ones_like(log_ratio)
    ratio = np.exp(log_ratio)
    if mode == "truncate":
        return {"weights": ratio.clip(floor, cap)}
    inside = (ratio <= cap) & (ratio >= (floor or 0.0))
    return {"weights": np.where(inside, by_token if keep_token_ratio else ratio, 0.0)}


OPERATIONS: dict[str, Callable[..., Arrays]] = {
    "gae": gae,
    "rewards": rewards,
    "whiten": whiten,
    "group": group,
    "kl": kl,
    "kl_control": kl_control,
    "policy": policy,
    "value": value,
    "token": token,
    "importance": importance,
}
