"""Every public function equals the published formula, transcribed apart in fp64 NumPy.

Tolerances: fp32 inputs of order 1 carry a relative rounding error of 6e-8, and a loss sums
some tens of them: 1e-5 leaves two orders of room. fp64 has 1e-16, hence 1e-12.
"""

from __future__ import annotations

import numpy as np
import published_formulas as paper
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fastppo
from fastppo.functional.statistics import sampled_kl

B, T, V = 5, 9, 13
LENGTHS = (9, 4, 1, 0, 7)
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}

dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=("fp32", "fp64"))


def draw(*shape: int) -> np.ndarray:
    """Numbers that fp32 holds exactly, so that both sides see the same input."""
    return torch.randn(*shape).double().numpy()


def tensor(x: np.ndarray, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(x).to(dtype)


def close(actual: Tensor, expected: np.ndarray | float, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype
    expected = torch.as_tensor(expected, dtype=torch.float64)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(actual.detach().double(), expected, rtol=tolerance, atol=tolerance)


@pytest.fixture
def mask() -> np.ndarray:
    return np.arange(T) < np.array(LENGTHS)[:, None]


@dtypes
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_logprobs_entropy_and_full_kl_are_the_softmax_s(
    dtype: torch.dtype, temperature: float
) -> None:
    logits, ref = draw(B, T, V), draw(B, T, V)
    tokens = np.random.default_rng(0).integers(V, size=(B, T))
    z, y = tensor(logits, dtype), torch.from_numpy(tokens)
    stats = fastppo.token_stats(z, y, ref_logits=tensor(ref, dtype), temperature=temperature)
    expected = paper.token_logprobs(logits, tokens, temperature)
    close(stats.logprobs, expected, dtype)
    close(fastppo.token_logprobs(z, y, temperature=temperature), expected, dtype)
    close(stats.entropy, paper.entropy(logits, temperature), dtype)
    assert stats.kl is not None
    close(stats.kl, paper.full_kl(logits, ref, temperature), dtype)
    close(
        fastppo.entropy(z, temperature=temperature),
        paper.entropy(logits, temperature).mean(),
        dtype,
    )


@dtypes
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_sampled_kl_is_the_estimator_of_the_note(dtype: torch.dtype, estimator: str) -> None:
    logprobs, ref = draw(50), draw(50)
    actual = sampled_kl(tensor(logprobs, dtype), tensor(ref, dtype), estimator)
    close(actual, paper.sampled_kl(logprobs, ref, estimator), dtype)


@dtypes
@pytest.mark.parametrize("dual_clip", [None, 1.5])
@pytest.mark.parametrize("clip", [(0.2, 0.2), (0.1, 0.3)])
def test_policy_loss_is_the_clipped_surrogate(
    dtype: torch.dtype, dual_clip: float | None, clip: tuple[float, float], mask: np.ndarray
) -> None:
    logprobs, old, a = draw(B, T), draw(B, T), draw(B, T)
    expected = -paper.clipped_surrogate(logprobs, old, a, clip, dual_clip)[mask].mean()
    inputs = (tensor(x, dtype) for x in (logprobs, old, a))
    actual = fastppo.policy_loss(
        *inputs, torch.from_numpy(mask), clip_ratio=clip, dual_clip=dual_clip
    )
    close(actual, expected, dtype)


@dtypes
@pytest.mark.parametrize("clip", [None, 0.3])
def test_value_loss_is_half_the_squared_error(
    dtype: torch.dtype, clip: float | None, mask: np.ndarray
) -> None:
    values, returns, old = draw(B, T), draw(B, T), draw(B, T)
    expected = 0.5 * paper.value_error(values, returns, old, clip)[mask].mean()
    v, r, o = (tensor(x, dtype) for x in (values, returns, old))
    actual = fastppo.value_loss(
        v, r, torch.from_numpy(mask), old_values=o if clip else None, clip_ratio=clip
    )
    close(actual, expected, dtype)


@pytest.mark.parametrize("value_clip", [None, 0.2])
def test_total_loss_is_what_a_tutorial_writes_by_hand(value_clip: float | None) -> None:
    """Mean squared error, log_softmax and a mean over everything, with a tutorial's defaults."""
    logprobs, old, a, values, returns = (tensor(draw(16), torch.float64) for _ in range(5))
    logits = tensor(draw(16, V), torch.float64)
    old_values = values + 0.3 * tensor(draw(16), torch.float64)
    ratio = (logprobs - old).exp()
    policy = -torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a).mean()
    value = F.mse_loss(values, returns)
    if value_clip is not None:
        clipped = old_values + (values - old_values).clamp(-value_clip, value_clip)
        value = torch.max((values - returns) ** 2, (clipped - returns) ** 2).mean()
    log_p = F.log_softmax(logits, -1)
    entropy = -(log_p.exp() * log_p).sum(-1).mean()

    given = {} if value_clip is None else {"old_values": old_values, "value_clip": value_clip}
    actual = fastppo.total_loss(logprobs, old, a, values, returns, logits, **given)
    close(actual["policy_loss"], policy.item(), torch.float64)
    close(actual["value_loss"], value.item(), torch.float64)
    close(actual["entropy"], entropy.item(), torch.float64)
    expected = policy + 0.5 * value - 0.01 * entropy
    close(actual["total_loss"], expected.item(), torch.float64)


@dtypes
def test_total_loss_is_equation_9(dtype: torch.dtype, mask: np.ndarray) -> None:
    logprobs, old, a, values, returns = (draw(B, T) for _ in range(5))
    logits = draw(B, T, V)
    actual = fastppo.total_loss(
        *(tensor(x, dtype) for x in (logprobs, old, a, values, returns, logits)),
        torch.from_numpy(mask),
        clip_ratio=0.2,
        vf_coef=0.7,
        entropy_coef=0.03,
    )
    surrogate = paper.clipped_surrogate(logprobs, old, a)
    error, entropies = paper.value_error(values, returns), paper.entropy(logits)
    expected = paper.total_loss(surrogate, error, entropies, c1=0.7, c2=0.03, mask=mask)
    close(actual["total_loss"], expected, dtype)
    close(actual["policy_loss"], -surrogate[mask].mean(), dtype)
    close(actual["value_loss"], error[mask].mean(), dtype)
    close(actual["entropy"], entropies[mask].mean(), dtype)


@dtypes
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "full"])
@pytest.mark.parametrize("linear", [False, True], ids=("logits", "linear"))
def test_ppo_loss_is_surrogate_minus_kl_penalty_plus_entropy_bonus(
    dtype: torch.dtype, estimator: str, linear: bool, mask: np.ndarray
) -> None:
    hidden, weight, ref = draw(B, T, 4), draw(V, 4), draw(B, T, V)
    logits = hidden @ weight.T
    tokens = np.random.default_rng(0).integers(V, size=(B, T))
    logprobs = paper.token_logprobs(logits, tokens, 0.8)
    old, a = logprobs + 0.3 * draw(B, T), draw(B, T)
    if estimator == "full":
        kl = paper.full_kl(logits, ref, 0.8)
    else:
        kl = paper.sampled_kl(logprobs, paper.token_logprobs(ref, tokens, 0.8), estimator)
    surrogate, entropies = paper.clipped_surrogate(logprobs, old, a), paper.entropy(logits, 0.8)
    expected = -(surrogate - 0.2 * kl + 0.05 * entropies)[mask].mean()
    keywords = {
        "mask": torch.from_numpy(mask),
        "kl_coef": 0.2,
        "kl_estimator": estimator,
        "entropy_coef": 0.05,
        "temperature": 0.8,
    }
    per_token = (torch.from_numpy(tokens), tensor(old, dtype), tensor(a, dtype))
    if linear:
        out = fastppo.linear_ppo_loss(
            tensor(hidden, dtype),
            tensor(weight, dtype),
            *per_token,
            # a head that is the identity makes the reference's hidden states its logits
            ref_hidden=tensor(ref, dtype),
            ref_weight=torch.eye(V, dtype=dtype),
            **keywords,
        )
    else:
        out = fastppo.ppo_loss(
            tensor(logits, dtype), *per_token, ref_logits=tensor(ref, dtype), **keywords
        )
    close(out.loss, expected, dtype)
    for actual, all_rows in ((out.logprobs, logprobs), (out.entropy, entropies), (out.kl, kl)):
        close(actual, np.where(mask, all_rows, 0.0), dtype)


@dtypes
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("shift_mean", [True, False])
def test_compute_advantages_shapes_rewards_then_estimates_then_whitens(
    dtype: torch.dtype, estimator: str, shift_mean: bool, mask: np.ndarray
) -> None:
    scores, values, logprobs, ref = draw(B), draw(B, T), draw(B, T), draw(B, T)
    advantages, returns, kl = np.zeros((B, T)), np.zeros((B, T)), np.zeros(B)
    for b, n in enumerate(LENGTHS):
        if n:
            p, q = logprobs[b, :n], ref[b, :n]
            rewards = paper.shaped_rewards(scores[b], p, q, 0.1, estimator)
            advantages[b, :n], returns[b, :n] = paper.gae(rewards, values[b, :n], 0.99, 0.95)
            kl[b] = paper.sampled_kl(p, q, estimator).sum()
    advantages[mask] = paper.whiten(advantages[mask], shift_mean)
    actual = fastppo.compute_advantages(
        *(tensor(x, dtype) for x in (scores, values, logprobs, ref)),
        torch.from_numpy(mask),
        kl_coef=0.1,
        kl_estimator=estimator,
        gamma=0.99,
        lam=0.95,
        shift_mean=shift_mean,
    )
    for one, other in zip(actual, (advantages, returns, kl), strict=True):
        close(one, other, dtype)


@dtypes
@pytest.mark.parametrize("shift_mean", [True, False])
def test_whiten_is_the_masked_standard_score(
    dtype: torch.dtype, shift_mean: bool, mask: np.ndarray
) -> None:
    x = 3 * draw(B, T) + 5
    expected = np.zeros_like(x)
    expected[mask] = paper.whiten(x[mask], shift_mean)
    actual = fastppo.whiten(tensor(x, dtype), torch.from_numpy(mask), shift_mean=shift_mean)
    close(actual, expected, dtype)
