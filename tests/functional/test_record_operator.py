"""Records as operands of torch's custom operators: all fields arrive, torch sees the operator."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fastppo.functional.record_operator import operator


class Pair(NamedTuple):
    first: Tensor
    second: Tensor | None = None


class Mixed(NamedTuple):
    pair: Pair
    scale: float
    name: str = "sum"
    most: float | None = None


class Split(NamedTuple):
    total: Tensor
    parts: Pair


def split(x: Tensor, mixed: Mixed, other: Pair | None, flag: bool, unused: int) -> Split:
    assert isinstance(mixed, Mixed)
    assert isinstance(mixed.pair, Pair)
    assert other is None or isinstance(other, Pair)
    total = (x + mixed.pair.first) * mixed.scale
    if other is not None:
        total = total + other.first
    second = mixed.pair.second
    return Split(total.sum(), Pair(total, None if second is None else second + flag))


@operator("test_split", like=split, without=("unused",))
def split_op(**operands: Any) -> Callable[..., Split]:
    return functools.partial(split, unused=1)


@split_op.register_fake
def _(x: Tensor, mixed: Mixed) -> Split:
    second = mixed.pair.second
    parts = Pair(torch.empty_like(x), None if second is None else torch.empty_like(second))
    return Split(x.new_empty(()), parts)


def test_a_schema_has_an_argument_for_every_field_of_every_record() -> None:
    assert str(split_op.flat_operator._schema) == (
        "fastppo::test_split(Tensor x, Tensor mixed_pair_first, Tensor? mixed_pair_second, "
        "float mixed_scale, str mixed_name, float? mixed_most, Tensor? other_first, "
        "Tensor? other_second, bool flag, str backend) -> (Tensor, Tensor, Tensor)"
    )


@pytest.mark.parametrize("second", [None, torch.ones(2)], ids=("absent", "present"))
@pytest.mark.parametrize("other", [None, Pair(torch.ones(2))], ids=("absent", "present"))
def test_records_arrive_as_they_were_sent(second: Tensor | None, other: Pair | None) -> None:
    """Nested or absent, in any order. A None in the result arrives as an empty tensor."""
    x = torch.tensor([1.0, 2.0])

    def call() -> Split:
        mixed = Mixed(Pair(x, second), 3.0)
        return split_op(backend="", other=other, flag=True, x=x, mixed=mixed)

    for result in (call(), torch.compile(call, backend="aot_eager", fullgraph=True)()):
        assert isinstance(result, Split)
        expected = 6 * x + (0 if other is None else 1)
        assert torch.equal(result.parts.first, expected)
        assert torch.equal(result.total, expected.sum())
        assert result.parts.second is not None
        empty = torch.empty(0)
        assert torch.equal(result.parts.second, empty if second is None else second + 1)


def test_an_operator_records_no_gradient_and_knows_no_autocast() -> None:
    x = torch.ones(2, requires_grad=True)

    def product(x: Tensor) -> Tensor:
        return x[None] @ x

    @operator("test_product", like=product)
    def product_op(**operands: Any) -> Callable[..., Tensor]:
        return product

    with torch.autocast("cpu", torch.bfloat16):
        result = product_op(x=x, backend="")
        assert product(x).dtype == torch.bfloat16
    assert result.dtype == torch.float32
    assert not result.requires_grad


def shift(x: Tensor) -> Tensor:
    return x + 1 if x.sum() > 0 else x - 1


@operator("test_shift", like=shift)
def shift_op(**operands: Any) -> Callable[..., Tensor]:
    return shift


@shift_op.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_transforms_and_tracers_see_the_operator() -> None:
    """Whose function may look at values: they have none to look at."""
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
        warnings.simplefilter("ignore")  # that no rule for batches makes it slow
        batched = torch.func.vmap(call)(torch.stack([x, -x]))
    assert torch.equal(batched, torch.stack([shift(x), shift(-x)]))


def test_wrong_operands_do_not_pass_in_silence() -> None:
    x = torch.ones(2)
    with pytest.raises(TypeError, match=r"test_shift expected the operands x, backend, got x$"):
        shift_op(x=x)
    with pytest.raises(TypeError, match="got x, y, backend"):
        shift_op(x=x, y=x, backend="")
    for wrong in ((Pair(x), 2.0), None, Mixed((1, 2), 2.0)):  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"expected (Mixed|Pair), got"):
            split_op(x=x, mixed=wrong, other=None, flag=True, backend="")
    with pytest.raises(TypeError, match="expected Pair or None, got tuple"):
        split_op(x=x, mixed=Mixed(Pair(x), 2.0), other=(1, 2), flag=True, backend="")
