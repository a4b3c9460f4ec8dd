"""The losses of tutorials equal the published formulas, transcribed in fp64 NumPy.

Tolerances: fp32 inputs of order 1 have a relative rounding error of 6e-8, and a loss sums some tens
of them: 1e-5 leaves a margin of two orders. fp64 has 1e-16, hence 1e-12.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

import fastppo
from benchmarks.conformance import formulas as paper

B, T, V = 5, 9, 13
LENGTHS = (9, 4, 1, 0, 7)
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}

dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=("fp32", "fp64"))


def draw(*shape: int) -> np.ndarray:
    """Draw numbers that are exact in fp32, so that both sides see the same input."""
    return torch.randn(*shape).double().numpy()


def close(actual: Tensor, expected: float, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype
    assert actual.item() == pytest.approx(expected, rel=TOLERANCE[dtype], abs=TOLERANCE[dtype])


@pytest.fixture
def mask() -> np.ndarray:
    return np.arange(T) < np.array(LENGTHS)[:, None]


@dtypes
@pytest.mark.parametrize(("clip", "dual_clip"), [((0.2, 0.2), None), ((0.1, 0.3), 1.5)])
def test_policy_loss_is_the_clipped_surrogate(
    dtype: torch.dtype, clip: tuple[float, float], dual_clip: float | None, mask: np.ndarray
) -> None:
    logprobs, old, advantages, importance = draw(B, T), draw(B, T), draw(B, T), draw(B, T)
    surrogate = paper.clipped_surrogate(np.exp(logprobs - old), advantages, clip, dual_clip)
    actual = fastppo.policy_loss(
        *(torch.from_numpy(x).to(dtype) for x in (logprobs, old, advantages)),
        torch.from_numpy(mask),
        clip_ratio=clip,
        dual_clip=dual_clip,
        importance_weights=torch.from_numpy(importance).to(dtype),
    )
    close(actual, -(surrogate * importance)[mask].mean(), dtype)


@dtypes
@pytest.mark.parametrize("value_clip", [None, 0.3])
def test_total_loss_is_equation_9(
    dtype: torch.dtype, value_clip: float | None, mask: np.ndarray
) -> None:
    logprobs, old, advantages, values, returns = (draw(B, T) for _ in range(5))
    logits = draw(B, T, V)
    old_values = values + 0.3 * draw(B, T)
    inputs = (logprobs, old, advantages, values, returns, logits)
    actual = fastppo.total_loss(
        *(torch.from_numpy(x).to(dtype) for x in inputs),
        torch.from_numpy(mask),
        clip_ratio=0.2,
        vf_coef=0.7,
        entropy_coef=0.03,
        temperature=0.8,
        old_values=torch.from_numpy(old_values).to(dtype),
        value_clip=value_clip,
    )
    surrogate = paper.clipped_surrogate(np.exp(logprobs - old), advantages)
    error = paper.value_error(values, returns, old_values, value_clip)
    entropies = paper.entropy(logits, 0.8)
    expected = -(surrogate - 0.7 * error + 0.03 * entropies)[mask].mean()
    close(actual["total_loss"], expected, dtype)
    close(actual["policy_loss"], -surrogate[mask].mean(), dtype)
    close(actual["value_loss"], error[mask].mean(), dtype)
    close(actual["entropy"], entropies[mask].mean(), dtype)


def test_gradcheck() -> None:
    old, advantages, returns = torch.randn(3, 2, 3, dtype=torch.float64)
    values = torch.randn(2, 3, dtype=torch.float64).requires_grad_()
    logits = torch.randn(2, 3, 5, dtype=torch.float64).requires_grad_()
    logprobs = (old + 0.5 * torch.randn(2, 3)).requires_grad_()
    mask = torch.tensor([[True, True, False], [True, True, True]])

    def total(logprobs: Tensor, values: Tensor, logits: Tensor) -> Tensor:
        return fastppo.total_loss(
            logprobs,
            old,
            advantages,
            values,
            returns,
            logits,
            mask,
            dual_clip=1.3,
            old_values=old,
            value_clip=0.5,
            temperature=0.6,
            aggregation="seq-mean-token-mean",
        )["total_loss"]

    assert gradcheck(total, (logprobs, values, logits))


@pytest.mark.parametrize("garbage", [float("nan"), float("inf")])
def test_masked_entries_may_hold_anything(garbage: float) -> None:
    mask = torch.tensor([True, False, True, False])
    names = ("logprobs", "old_logprobs", "advantages", "values", "returns", "old_values")
    inputs = {name: torch.randn(4, dtype=torch.float64) for name in names}
    inputs["logits"] = torch.randn(4, V, dtype=torch.float64)

    def results() -> list[Tensor]:
        copies: dict[str, Any] = {name: x.clone() for name, x in inputs.items()}
        trained = [copies[name].requires_grad_() for name in ("logprobs", "values", "logits")]
        out = fastppo.total_loss(**copies, mask=mask, value_clip=0.2, dual_clip=2.0)
        return [*out.values(), *torch.autograd.grad(out["total_loss"], trained)]

    expected = results()
    for x in inputs.values():
        x[~mask] = garbage
    torch.testing.assert_close(results(), expected, rtol=0, atol=0)
