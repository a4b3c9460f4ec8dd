"""The published formulas in fp64 NumPy, written from the papers.

They share no technique with the implementation: GAE is the explicit sum over future residuals, a
softmax a quotient of exponentials, and gradients are finite differences. The papers maximize;
losses are negated. Tests of `fastppo_kernels.definition` compare with these functions.

The functions of `OPERATIONS` map the inputs of a fixture to its outputs. Keywords that no fixture
has select a variant that a peer computes; their defaults are the published definition. Masked
entries may hold anything.

    GAE        Schulman et al. 2016, "High-dimensional continuous control using generalized
               advantage estimation", eq. 11-16
    PPO        Schulman et al. 2017, "Proximal policy optimization algorithms", eq. 6, 7, 9
    shaping    Ziegler et al. 2019, "Fine-tuning language models from human preferences", eq. 2,
               sec. 2.2 (adaptive β) and its code (whitening); Stiennon et al. 2020, "Learning to
               summarize from human feedback", sec. 3.4
    KL         Schulman 2020, "Approximating KL divergence" (k1, k2, k3); times the ratio,
               DeepSeek-AI 2025, "DeepSeek-V3.2", section 3.1
    dual clip  Ye et al. 2020, "Mastering complex control in MOBA games", eq. 3
    CISPO      MiniMax 2025, "MiniMax-M1", section 3.1
    SAPO       Gao et al. 2025, "Soft adaptive policy optimization"
    GSPO       Zheng et al. 2025, "Group sequence policy optimization", eq. 7, 13, 14
    DIS        Hou et al. 2026, "Single-rollout asynchronous optimization", eq. 1 to 3
    DPPO       Qi et al. 2026, "Rethinking the trust region in LLM reinforcement learning", eq. 11
               to 14; the value is that of the authors' code, −[M·r]·A·log π
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Array = np.ndarray
Arrays = dict[str, Array]

DETACHED = ("cispo", "dis", "dppo_tv", "dppo_kl")
"""Objectives with detached factors, whose value means nothing: only the gradient is compared."""

STEP = 8e-4
DIFFERENCES = ((1, 45 / 60), (2, -9 / 60), (3, 1 / 60))
"""Multiples of the step, and coefficients, of the central difference of sixth order. In fp64 its
error is some 1e-13 of a term, if the term is smooth within three steps."""


def gradient(terms: Callable[[Array], Array], x: Array, mask: Array | None = None) -> Array:
    """Return the derivative by x of the sum of terms, by finite differences; 0 where masked."""
    slope = np.zeros_like(x)
    for place in np.ndindex(x.shape):
        if mask is None or mask[place]:
            for steps, coefficient in DIFFERENCES:
                up, down = x.copy(), x.copy()
                up[place] += steps * STEP
                down[place] -= steps * STEP
                slope[place] += coefficient * (terms(up) - terms(down)).sum() / STEP
    return slope


# --------------------------------------------------------------------------------- token statistics


def log_softmax(logits: Array, temperature: float | Array = 1.0) -> Array:
    """log softmax(z/T); a temperature per token has the shape of the tokens."""
    z = logits / np.expand_dims(temperature, -1)
    shifted = z - z.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def token_logprobs(logits: Array, tokens: Array, temperature: float | Array = 1.0) -> Array:
    log_p = log_softmax(logits, temperature)
    return np.take_along_axis(log_p, tokens[..., None], -1)[..., 0]


def entropy(logits: Array, temperature: float | Array = 1.0) -> Array:
    """S[π] = −Σ_j p_j log p_j, with 0·log 0 = 0."""
    p = np.exp(log_softmax(logits, temperature))
    return -(p * np.log(np.where(p > 0, p, 1.0))).sum(-1)


def full_kl(logits: Array, ref_logits: Array, temperature: float | Array = 1.0) -> Array:
    """KL[p, q] = Σ_j p_j log(p_j / q_j)."""
    log_p, log_q = log_softmax(logits, temperature), log_softmax(ref_logits, temperature)
    return (np.exp(log_p) * (log_p - log_q)).sum(-1)


def token(inputs: Arrays, *, temperature: float, zero_times_infinity: bool = False) -> Arrays:
    """Logprob and entropy of softmax(z/T).

    zero_times_infinity: the entropy is NaN with a logit of −∞.
    """
    logits = inputs["logits"]
    entropies = entropy(logits, temperature)
    if zero_times_infinity:
        entropies = np.where(np.isinf(logits).any(-1), np.nan, entropies)
    return {
        "logprobs": token_logprobs(logits, inputs["tokens"], temperature),
        "entropy": entropies,
    }


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
        last = np.flatnonzero(mask)[-1:] if at == "last counted" else -1
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
    return {"kl": estimates(logprobs), "gradient": gradient(estimates, logprobs)}


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


def clipped_surrogate(
    ratio: Array,
    advantages: Array,
    clip: Sequence[float] = (0.2, 0.2),
    dual_clip: float | None = None,
) -> Array:
    """L^CLIP of each token: min(r·A, clip(r, 1−ε, 1+ε)·A); if A < 0 at least c·A (dual clip)."""
    clipped = np.clip(ratio, 1 - clip[0], 1 + clip[1])
    surrogate = np.minimum(ratio * advantages, clipped * advantages)
    if dual_clip is None:
        return surrogate
    return np.where(advantages < 0, np.maximum(surrogate, dual_clip * advantages), surrogate)


def sequence_ratio(logprobs: Array, old_logprobs: Array, mask: Array) -> Array:
    """(π(y|x)/π_old(y|x))^(1/|y|) of each row, repeated for its tokens."""
    difference = np.where(mask, logprobs - old_logprobs, 0.0)
    means = difference.sum(1, keepdims=True) / np.maximum(mask.sum(1, keepdims=True), 1)
    return np.exp(means) * np.ones_like(logprobs)


def binary_divergence(objective: str, logprobs: Array, old_logprobs: Array) -> Array:
    """D of "the sampled token or another": TV |μ − π|, or KL μ log(μ/π) + (1−μ) log((1−μ)/(1−π)).

    NaN if a probability is above 1.
    """
    new, old = np.exp(logprobs), np.exp(old_logprobs)
    if objective == "dppo_tv":
        return np.abs(old - new)
    with np.errstate(invalid="ignore", divide="ignore"):
        return old * np.log(old / new) + (1 - old) * np.log((1 - old) / (1 - new))


def policy_term(
    logprobs: Array,
    fixed: Array,
    inputs: Arrays,
    *,
    objective: str,
    clip: Sequence[float],
    **more: Any,
) -> Array:
    """Return the minimized term of each token. `fixed` are the logprobs in detached factors."""
    old = inputs["old_logprobs"]
    advantages = inputs["advantages"]
    low, high = 1 - clip[0], 1 + clip[1]
    ratio = np.exp(logprobs - old)
    if objective == "gspo":
        ratio = sequence_ratio(logprobs, old, inputs["mask"])
    detached = np.exp(fixed - old)
    if objective in ("clip", "gspo"):
        return -clipped_surrogate(ratio, advantages, clip, more.get("dual_clip"))
    if objective == "cispo":
        floor = 0.0 if more.get("no_lower_clip") else low
        return -np.clip(detached, floor, high) * advantages * logprobs
    if objective == "dis":
        inside = (detached > low) & (detached < high)
        return -np.where(inside, detached, 0.0) * advantages * logprobs
    if objective.startswith("dppo"):
        leaving = np.where(advantages > 0, fixed > old, fixed < old)
        divergence = binary_divergence(objective, fixed, old)
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

    def terms(x: Array) -> Array:
        return (w * policy_term(x, logprobs, inputs, **options))[mask]

    outputs = {"gradient": gradient(terms, logprobs, mask)}
    if "gradient" in nan:
        outputs["gradient"][np.isnan(logprobs)] = np.nan
    # The value of a surrogate with detached factors means nothing.
    if options["objective"] not in DETACHED:
        outputs["loss"] = np.array(np.nan if "loss" in nan else terms(logprobs).sum())
    return outputs


def value_error(
    values: Array, returns: Array, old_values: Array | None = None, clip: float | None = None
) -> Array:
    """L^VF of each token, (V − V_targ)²; clipped as in the code of OpenAI baselines."""
    error = (values - returns) ** 2
    if clip is None or old_values is None:
        return error
    near = np.clip(values, old_values - clip, old_values + clip)
    return np.maximum(error, (near - returns) ** 2)


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

    def terms(values: Array) -> Array:
        return w * value_error(values, returns, inputs.get("old_values"), clip)

    values = inputs["values"]
    return {"loss": np.array(terms(values).sum()), "gradient": gradient(terms, values, mask)}


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
