"""The scalar functions of the kernels have their documented accuracy, against fp64.

fp32 has 6e-8, and each function has some ten roundings: 1e-6 relative.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

import triton
import triton.language as tl
from fastppo_kernels import definition
from fastppo_kernels.records import Softmax
from fastppo_kernels.triton import jit

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [
    # NumPy warns about intended overflows: exponentials of ±1e30, which are not selected.
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
]
if DEVICE == "cuda":
    pytestmark.append(pytest.mark.gpu)
BLOCK = 64


@triton.jit
def _kernel(x, first, second, function: tl.constexpr, argument, BLOCK: tl.constexpr):  # noqa: N803
    at = tl.arange(0, BLOCK)
    value, slope = function(tl.load(x + at), argument)
    tl.store(first + at, value + tl.zeros([BLOCK], tl.float32))
    tl.store(second + at, slope + tl.zeros([BLOCK], tl.float32))


@triton.jit
def _expm1(x, argument):
    return jit.expm1(x), 0.0


@triton.jit
def _log1p(x, argument):
    return jit.log1p_below_one(x), 0.0


@triton.jit
def _between(x, argument):
    return jit.between(x, -1.0, 2.0), 0.0


@triton.jit
def _k1(x, argument):
    return jit.sampled_kl(x, "k1")


@triton.jit
def _k2(x, argument):
    return jit.sampled_kl(x, "k2")


@triton.jit
def _k3(x, argument):
    return jit.sampled_kl(x, "k3")


@triton.jit
def _capped(x, argument):
    return jit.capped(x, argument)


def run(function: Any, x: Tensor, argument: Any = None) -> tuple[Tensor, Tensor]:
    """Return (value, slope) of a jit function at each x, fp64."""
    padded = torch.zeros(BLOCK, device=DEVICE)
    padded[: len(x)] = x
    found = torch.empty(2, BLOCK, device=DEVICE)
    _kernel[(1,)](padded, found[0], found[1], function, argument, BLOCK, enable_fp_fusion=True)
    value, slope = found[:, : len(x)].cpu().double()
    return value, slope


MAGNITUDES = torch.tensor([1e-6, 1e-4, 1e-2, 0.1, 0.3, 0.49, 0.51, 0.62, 0.63, 0.9, 2.0, 7.0, 19.0])
BOTH_SIGNS = torch.cat([-MAGNITUDES, MAGNITUDES])


@pytest.mark.parametrize(
    ("function", "x", "exact"),
    [
        (_expm1, BOTH_SIGNS, torch.expm1),
        (_log1p, torch.cat([torch.zeros(1), MAGNITUDES[:-3], torch.ones(1)]), torch.log1p),
    ],
    ids=("expm1", "log1p"),
)
def test_small_numbers_keep_their_digits(
    function: Any, x: Tensor, exact: Callable[[Tensor], Tensor]
) -> None:
    value, _ = run(function, x)
    torch.testing.assert_close(value, exact(x.double()), rtol=1e-6, atol=0)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_sampled_kl_and_its_derivative_equal_the_definition(estimator: str) -> None:
    """Near 0, the usual case in training, and beyond the clamp at 20, where the gradient is 0."""
    d = torch.cat([BOTH_SIGNS, torch.tensor([25.0, -25.0])])
    value, slope = run({"k1": _k1, "k2": _k2, "k3": _k3}[estimator], d)
    exact = d.double().requires_grad_()
    wanted = definition.sampled_kl(exact, estimator)
    (wanted_slope,) = torch.autograd.grad(wanted.sum(), exact)
    if estimator == "k3":
        # expm1(−d) + d in fp64 loses digits to its own subtraction below: d²/2 − d³/6 there.
        series = exact**2 / 2 - exact**3 / 6
        wanted = torch.where(exact.abs() < 1e-3, series, wanted)
        wanted_slope = torch.where(exact.abs() < 20, -torch.expm1(-exact), wanted_slope)
    torch.testing.assert_close(value, wanted.detach(), rtol=2e-6, atol=0)
    torch.testing.assert_close(slope, wanted_slope.detach(), rtol=2e-6, atol=0)


def test_clamps_propagate_nan() -> None:
    value, _ = run(_between, torch.tensor([-5.0, 0.5, 5.0, torch.nan]))
    assert value[:3].tolist() == [-1.0, 0.5, 2.0]
    assert value[3].isnan()


@pytest.mark.parametrize("softcap", [None, 0.5, 30.0])
def test_the_soft_cap_and_its_slope(softcap: float | None) -> None:
    """Scores are in units of the cap, which is part of the row's scale. The slope keeps its digits
    near the cap, where 1 − tanh² has none."""
    softmax = Softmax(logit_scale=1.5, softcap=softcap)
    value, slope = run(_capped, BOTH_SIGNS, softmax)
    x = BOTH_SIGNS.double()
    if softcap is None:
        assert torch.equal(value, x)
        assert (slope == 1).all()
        return
    inner = 1.5 * x / softcap
    torch.testing.assert_close(value, torch.tanh(inner), rtol=1e-6, atol=0)
    # relative to the slope, whose exponent is rounded to fp32 before it is taken
    wanted = 1 / torch.cosh(inner) ** 2
    assert ((slope - wanted).abs() <= wanted * (1e-6 + 2.0**-22 * inner.abs()) + 1e-38).all()
