"""The value loss has the derivatives of its formula.

test_tutorial_losses.py compares its value with the published formula.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import gradgradcheck

import fastppo


@pytest.mark.parametrize("clip_ratio", [None, 0.5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_gradient_by_the_values_is_that_of_the_formula(
    clip_ratio: float | None, dtype: torch.dtype
) -> None:
    """On, below and above the clip range, times an incoming gradient; masked entries are NaN."""
    old, returns = torch.randn(2, 200, dtype=dtype)
    values = (old + 1.5 * torch.randn(200, dtype=dtype)).requires_grad_()
    mask = torch.rand(200) < 0.8
    plain = values.detach().double().requires_grad_()
    error = (plain - returns.double()) ** 2
    if clip_ratio is not None:
        near = old.double() + (plain - old.double()).clamp(-clip_ratio, clip_ratio)
        error = torch.maximum(error, (near - returns.double()) ** 2)
    expected = 0.5 * error[mask].mean()
    (expected_grad,) = torch.autograd.grad(3 * expected, plain)
    actual = fastppo.value_loss(
        values,
        returns.masked_fill(~mask, torch.nan),
        mask,
        clip_ratio=clip_ratio,
        old_values=old.masked_fill(~mask, torch.nan),
    )
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    assert actual.item() == pytest.approx(expected.item(), rel=tolerance, abs=tolerance)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 4e-3}[dtype]
    for _ in range(2):
        (grad,) = torch.autograd.grad(3 * actual, values, retain_graph=True)
        torch.testing.assert_close(
            grad.double(), expected_grad, rtol=tolerance, atol=tolerance * 0.03
        )


def test_the_value_loss_has_a_second_derivative() -> None:
    values, old, returns = torch.randn(3, 2, 40, dtype=torch.float64)
    values.requires_grad_()

    def loss(values: Tensor) -> Tensor:
        return fastppo.value_loss(
            values, returns, old_values=old, clip_ratio=0.5, aggregation="token-sum"
        )

    assert gradgradcheck(loss, values)
    (grad,) = torch.autograd.grad(loss(values), values, create_graph=True)
    (second,) = torch.autograd.grad(grad.square().sum(), values)
    assert torch.equal(second, 2 * grad.detach())
