"""Records as operands of custom operators: torch sees the operator, and wrong records raise errors.

test_operators.py tests the operators themselves.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fastppo_kernels.records import Gemm, Projection, Softmax
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fastppo.functional import operators as ops
from fastppo.functional.record_operator import operator


def shift(x: Tensor) -> Tensor:
    return x + 1 if x.sum() > 0 else x - 1


@operator("test_shift", like=shift)
def shift_op(**operands: Any) -> Callable[..., Tensor]:
    return shift


@shift_op.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_transforms_and_tracers_see_the_operator() -> None:
    """Its function may read values, which tracers do not have."""
    x = torch.arange(6.0).view(2, 3)

    def call(x: Tensor) -> Tensor:
        return shift_op(x=x, backend="")

    traced = torch.jit.trace(call, (x,), check_trace=False)
    graph = make_fx(call, pre_dispatch=True)(x)
    for result in (traced(-x), graph(-x)):
        assert torch.equal(result, shift(-x))
    assert "fastppo.test_shift" in graph.code
    assert isinstance(call(FakeTensorMode().from_tensor(x)), FakeTensor)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a missing batching rule
        batched = torch.func.vmap(call)(torch.stack([x, -x]))
    assert torch.equal(batched, torch.stack([shift(x), shift(-x)]))


def test_an_operator_records_no_gradient_and_ignores_autocast() -> None:
    """Its function chooses dtypes: an fp32 product in it stays fp32."""
    x = torch.ones(2, requires_grad=True)

    def product(x: Tensor) -> Tensor:
        return x[None] @ x

    @operator("test_product", like=product)
    def product_op(**operands: Any) -> Callable[..., Tensor]:
        return product

    with torch.autocast("cpu", torch.bfloat16):
        assert product(x).dtype == torch.bfloat16
        result = product_op(x=x, backend="")
    assert result.dtype == torch.float32
    assert not result.requires_grad


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"softmax": (1.0, None, 1.0, None)}, "Softmax"),
        ({"softmax": None}, "Softmax"),
        ({"ref_projection": (1, 2)}, "Projection"),
        ({"other": 1}, "other"),
    ],
    ids=str,
)
def test_wrong_operands_raise_an_error(changes: dict[str, Any], name: str) -> None:
    operands: dict[str, Any] = {
        "projection": Projection(torch.ones(2, 3), torch.ones(4, 3)),
        "tokens": torch.zeros(2, dtype=torch.int64),
        "softmax": Softmax(),
        "ref_projection": None,
        "gemm": Gemm(),
        "backend": "cpu",
    }
    ops.linear_token_stats_op(**operands)
    with pytest.raises(TypeError, match=name):
        ops.linear_token_stats_op(**operands | changes)
