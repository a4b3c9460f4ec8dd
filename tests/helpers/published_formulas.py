"""The published formulas, transcribed from the papers in plain fp64 NumPy.

Sums are written as in the papers (GAE as the explicit sum over future residuals, a softmax as a
quotient of exponentials), so they share no technique with the implementation. The papers maximize;
losses are negated.

    GAE        Schulman et al. 2016, "High-dimensional continuous control using generalized
               advantage estimation", eq. 11-16
    PPO        Schulman et al. 2017, "Proximal policy optimization algorithms", eq. 6, 7, 9, sec. 4
    shaping    Ziegler et al. 2019, "Fine-tuning language models from human preferences", eq. 2,
               sec. 2.2 (adaptive β) and its code (whitening); Stiennon et al. 2020, "Learning to
               summarize from human feedback", sec. 3.4
    KL         Schulman 2020, "Approximating KL divergence" (k1, k2, k3); times the ratio,
               DeepSeek-AI 2025, "DeepSeek-V3.2", section 3.1
    dual clip  Ye et al. 2020, "Mastering complex control in MOBA games", eq. 3
    CISPO      MiniMax 2025, "MiniMax-M1", section 3.1
    SAPO       Gao et al. 2025, "Soft adaptive policy optimization", and its gradient's weight
    GSPO       Zheng et al. 2025, "Group sequence policy optimization", eq. 7, 13, 14
    DIS        Hou et al. 2026, "Single-rollout asynchronous optimization", eq. 1 to 3
    DPPO       Qi et al. 2026, "Rethinking the trust region in LLM reinforcement learning", eq. 11
               to 14
"""

from __future__ import annotations

import numpy as np

Array = np.ndarray


def softmax(logits: Array, temperature: float | Array = 1.0) -> Array:
    z = np.asarray(logits, np.float64) / np.expand_dims(temperature, -1)
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def token_logprobs(logits: Array, tokens: Array, temperature: float | Array = 1.0) -> Array:
    z = np.asarray(logits, np.float64) / np.expand_dims(temperature, -1)
    peak = z.max(-1, keepdims=True)
    log_p = z - peak - np.log(np.exp(z - peak).sum(-1, keepdims=True))
    return np.take_along_axis(log_p, tokens[..., None], -1)[..., 0]


def entropy(logits: Array, temperature: float | Array = 1.0) -> Array:
    """S[π] = −Σ_j p_j log p_j, with 0·log 0 = 0."""
    p = softmax(logits, temperature)
    return -(p * np.log(np.where(p > 0, p, 1.0))).sum(-1)


def full_kl(logits: Array, ref_logits: Array, temperature: float | Array = 1.0) -> Array:
    """KL[p, q] = Σ_j p_j log(p_j / q_j)."""
    p, q = softmax(logits, temperature), softmax(ref_logits, temperature)
    return (p * np.log(p / q)).sum(-1)


def sampled_kl(logprobs: Array, ref_logprobs: Array, estimator: str) -> Array:
    """With r = q(x)/p(x) for x ~ p: k1 = −log r, k2 = (log r)²/2, k3 = (r − 1) − log r."""
    log_r = ref_logprobs - logprobs
    return {"k1": -log_r, "k2": log_r**2 / 2, "k3": np.exp(log_r) - 1 - log_r}[estimator]


def ratio_weighted_kl(
    logprobs: Array, old_logprobs: Array, ref_logprobs: Array, estimator: str
) -> Array:
    """π/π_old times the estimate; for k3, π_θ/π_old·(π_ref/π_θ − log(π_ref/π_θ) − 1)."""
    ratio = np.exp(logprobs) / np.exp(old_logprobs)
    return ratio * sampled_kl(logprobs, ref_logprobs, estimator)


def clipped_surrogate(
    logprobs: Array,
    old_logprobs: Array,
    advantages: Array,
    clip: tuple[float, float] = (0.2, 0.2),
    dual_clip: float | None = None,
) -> Array:
    """L^CLIP of each token: min(r·A, clip(r, 1−ε, 1+ε)·A); if A < 0 at least c·A (dual clip)."""
    ratio = np.exp(logprobs) / np.exp(old_logprobs)
    surrogate = np.minimum(
        ratio * advantages, np.clip(ratio, 1 - clip[0], 1 + clip[1]) * advantages
    )
    if dual_clip is None:
        return surrogate
    return np.where(advantages < 0, np.maximum(surrogate, dual_clip * advantages), surrogate)


def cispo_coefficient(logprobs: Array, old_logprobs: Array, clip: tuple[float, float]) -> Array:
    """The detached factor of the advantage and log π: clip(r, 1−ε, 1+ε)."""
    return np.clip(np.exp(logprobs) / np.exp(old_logprobs), 1 - clip[0], 1 + clip[1])


def dis_coefficient(logprobs: Array, old_logprobs: Array, clip: tuple[float, float]) -> Array:
    """The detached factor: r for 1 − ε_low < r < 1 + ε_high, otherwise 0."""
    ratio = np.exp(logprobs) / np.exp(old_logprobs)
    return np.where((ratio > 1 - clip[0]) & (ratio < 1 + clip[1]), ratio, 0.0)


def binary_divergence(name: str, logprobs: Array, old_logprobs: Array) -> Array:
    """D of "the sampled token or another": TV |μ − π|, or KL μ log(μ/π) + (1−μ) log((1−μ)/(1−π)).

    NaN if a probability is above 1.
    """
    new, old = np.exp(logprobs), np.exp(old_logprobs)
    if name == "dppo_tv":
        return np.abs(old - new)
    with np.errstate(invalid="ignore", divide="ignore"):
        return old * np.log(old / new) + (1 - old) * np.log((1 - old) / (1 - new))


def dppo_coefficient(
    name: str, logprobs: Array, old_logprobs: Array, advantages: Array, clip: tuple[float, float]
) -> Array:
    """M·r: M is 0 if the update would move the policy further than δ, and D > δ already."""
    ratio = np.exp(logprobs) / np.exp(old_logprobs)
    divergence = binary_divergence(name, logprobs, old_logprobs)
    too_high = (advantages > 0) & (ratio > 1) & (divergence > clip[1])
    too_low = (advantages < 0) & (ratio < 1) & (divergence > clip[0])
    return np.where(too_high | too_low, 0.0, ratio)


def sapo_surrogate(
    logprobs: Array, old_logprobs: Array, advantages: Array, tau: tuple[float, float]
) -> Array:
    """f(r)·A with f(x) = σ(τ(x − 1))·4/τ, and the first τ for A > 0."""
    ratio = np.exp(logprobs) / np.exp(old_logprobs)
    taus = np.where(advantages > 0, *tau)
    return 4 / taus / (1 + np.exp(-taus * (ratio - 1))) * advantages


def policy_term(
    name: str,
    logprobs: Array,
    old_logprobs: Array,
    advantages: Array,
    clip: tuple[float, float],
    tau: tuple[float, float] = (1.0, 1.05),
) -> tuple[Array, Array]:
    """The minimized term of each token and its derivative by log π, for every name in
    `POLICY_TERMS`.

    The derivative of `clip` is −r·A where the minimum is r·A, otherwise 0. That of `sapo` has the
    weight 4·σ(x)·(1 − σ(x)) = 1/cosh²(x/2), x = τ(r − 1). The other factors are detached. DPPO's
    derivative is that of −M·r·A (eq. 11); its value is that of the authors' code, −[M·r]·A·log π.
    """
    unclipped = np.exp(logprobs) / np.exp(old_logprobs) * advantages
    if name == "clip":
        surrogate = clipped_surrogate(logprobs, old_logprobs, advantages, clip)
        return -surrogate, -np.where(surrogate == unclipped, unclipped, 0.0)
    if name == "sapo":
        x = np.where(advantages > 0, *tau) * (np.exp(logprobs - old_logprobs) - 1)
        surrogate = sapo_surrogate(logprobs, old_logprobs, advantages, tau)
        return -surrogate, -unclipped / np.cosh(x / 2) ** 2
    if name in ("dppo_tv", "dppo_kl"):
        coefficient = dppo_coefficient(name, logprobs, old_logprobs, advantages, clip)
    else:
        coefficients = {"cispo": cispo_coefficient, "dis": dis_coefficient}
        coefficient = coefficients[name](logprobs, old_logprobs, clip)
    by_logprob = -coefficient * advantages
    return by_logprob * logprobs, by_logprob


def gspo_ratio(logprobs: Array, old_logprobs: Array) -> Array:
    """The ratio of one sequence: (π(y|x)/π_old(y|x))^(1/|y|)."""
    return np.exp((logprobs - old_logprobs).sum() / len(logprobs))


def value_error(
    values: Array, returns: Array, old_values: Array | None = None, clip: float | None = None
) -> Array:
    """L^VF of each token, (V − V_targ)²; clipped as in the code of OpenAI baselines."""
    error = (values - returns) ** 2
    if clip is None:
        return error
    near = np.clip(values, old_values - clip, old_values + clip)
    return np.maximum(error, (near - returns) ** 2)


def total_loss(
    surrogate: Array, error: Array, entropies: Array, c1: float, c2: float, mask: Array
) -> float:
    """−E[L^CLIP − c1·L^VF + c2·S] over the tokens of the mask (eq. 9)."""
    return -float((surrogate - c1 * error + c2 * entropies)[mask].mean())


def gae(
    rewards: Array, values: Array, gamma: float, lam: float, end_value: float = 0.0
) -> tuple[Array, Array]:
    """A_t = Σ_l (γλ)^l δ_{t+l} of one sequence, δ_t = r_t + γV(s_{t+1}) − V(s_t); targets A+V."""
    length = len(values)
    following = np.append(values[1:], end_value)[:length]
    delta = rewards + gamma * following - values
    advantages = np.array(
        [sum((gamma * lam) ** (u - t) * delta[u] for u in range(t, length)) for t in range(length)],
        dtype=np.float64,
    )
    return advantages, advantages + values


def shaped_rewards(
    score: float, logprobs: Array, ref_logprobs: Array, beta: float, estimator: str = "k1"
) -> Array:
    """R(x, y) = r(x, y) − β·log(π(y|x)/ρ(y|x)), spread over the tokens of one response."""
    rewards = -beta * sampled_kl(logprobs, ref_logprobs, estimator)
    rewards[-1] += score
    return rewards


def whiten(x: Array, shift_mean: bool = True) -> Array:
    """(x − mean)/sqrt(var + 1e-8) with Bessel's correction; without the shift, plus the mean."""
    white = (x - x.mean()) / np.sqrt(x.var(ddof=1) + 1e-8)
    return white if shift_mean else white + x.mean()


def adaptive_beta(beta: float, kl: float, target: float, n: int, horizon: float) -> float:
    error = np.clip((kl - target) / target, -0.2, 0.2)
    return beta * (1 + error * n / horizon)


def penalty_beta(beta: float, kl: float, target: float) -> float:
    if kl < target / 1.5:
        return beta / 2
    return beta * 2 if kl > target * 1.5 else beta
