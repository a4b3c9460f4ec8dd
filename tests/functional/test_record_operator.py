"""Records as operands of torch's custom operators: all fields arrive, a miscount is refused."""

from __future__ import annotations

import warnings
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

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


@operator("test_layout")
def layout_op(x: Tensor, mixed: Mixed, other: Pair | None, flag: bool) -> Split:
    assert isinstance(mixed, Mixed)
    assert isinstance(mixed.pair, Pair)
    assert other is None or isinstance(other, Pair)
    total = (x + mixed.pair.first) * mixed.scale
    if other is not None:
        total = total + other.first
    second = mixed.pair.second
    return Split(total.sum(), Pair(total, None if second is None else second + flag))


@layout_op.register_fake
def _(x: Tensor, mixed: Mixed, other: Pair | None, flag: bool) -> Split:
    second = mixed.pair.second
    parts = Pair(torch.empty_like(x), None if second is None else torch.empty_like(second))
    return Split(x.new_empty(()), parts)


def test_a_schema_has_an_argument_for_every_field_of_every_record() -> None:
    schema = str(layout_op.flat_operator._opoverload._schema)
    assert schema == (
        "fastppo::test_layout(Tensor x, Tensor mixed_pair_first, Tensor? mixed_pair_second, "
        "float mixed_scale, str mixed_name, float? mixed_most, Tensor? other_first, "
        "Tensor? other_second, bool flag) -> (Tensor, Tensor, Tensor)"
    )


@pytest.mark.parametrize("second", [None, torch.ones(2)], ids=("absent", "present"))
@pytest.mark.parametrize("other", [None, Pair(torch.ones(2))], ids=("absent", "present"))
def test_records_arrive_as_they_were_sent(second: Tensor | None, other: Pair | None) -> None:
    """Nested or absent, by position or by name. A None in the result arrives as an empty tensor."""
    x = torch.tensor([1.0, 2.0])
    mixed = Mixed(Pair(x, second), 3.0)
    for result in (
        layout_op(x, mixed, other, True),
        layout_op(x, mixed, flag=True, other=other),
        torch.compile(layout_op, backend="aot_eager", fullgraph=True)(x, mixed, other, True),
    ):
        assert isinstance(result, Split)
        wanted = 6 * x + (0 if other is None else 1)
        assert torch.equal(result.parts.first, wanted)
        assert torch.equal(result.total, wanted.sum())
        assert result.parts.second is not None
        empty = torch.empty(0)
        assert torch.equal(result.parts.second, empty if second is None else second + 1)


def test_torch_is_passed_by_where_nothing_looks_on() -> None:
    """A mode that counts sees the operator, and so does a compiler; gradients are nobody's here."""
    x, mixed = torch.ones(2, requires_grad=True), Mixed(Pair(torch.ones(2)), 1.0)
    seen = []

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    with Counting():
        counted = layout_op(x.detach(), mixed, None, True)
    assert "fastppo.test_layout.default" in seen
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        plain = layout_op(x, mixed, None, True)
    assert "fastppo::test_layout" not in {event.name for event in profiled.events()}
    assert torch.equal(plain.total, counted.total)
    assert not plain.total.requires_grad
    fake = FakeTensorMode().from_tensor(torch.ones(2))
    found = layout_op(fake, Mixed(Pair(fake), 1.0), None, True)  # outside of its mode
    assert isinstance(found.total, FakeTensor)


@operator("test_writing", "into")
def writing_op(x: Tensor, into: Tensor) -> Tensor:
    into.untyped_storage().copy_((x + 1).untyped_storage())  # as a kernel does, unknown to torch
    return x + 1


@writing_op.register_fake
def _(x: Tensor, into: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_autograd_learns_of_what_an_operator_writes() -> None:
    x = torch.ones(2, requires_grad=True)
    saved = x.tanh()  # its derivative is made of its result
    writing_op(torch.ones(2), saved.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()


@operator("test_shifted")
def shifted_op(x: Tensor) -> Tensor:
    return x + 1 if x.sum() > 0 else x - 1


@shifted_op.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def shifted(x: Tensor) -> Tensor:
    return shifted_op(x)


def test_transforms_and_tracers_see_the_operator() -> None:
    """Whose function may look at values: they have none to look at."""
    x = torch.arange(6.0).view(2, 3)
    traced = torch.jit.trace(shifted, (x,), check_trace=False)
    graph = make_fx(shifted, pre_dispatch=True)(x)
    for found in (traced(-x), graph(-x)):
        assert torch.equal(found, shifted(-x))
    assert "fastppo.test_shifted" in graph.code
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no rule for batches makes it slow
        batched = torch.func.vmap(shifted)(torch.stack([x, -x]))
    assert torch.equal(batched, torch.stack([shifted(x), shifted(-x)]))


def test_a_miscount_does_not_pass_in_silence() -> None:
    x = torch.ones(2)
    flat = layout_op.flat(x, Mixed(Pair(x), 1.0), None, False)
    for wrong in (flat[:-1], [*flat, 1.0]):
        with pytest.raises((RuntimeError, TypeError)):
            layout_op.flat_operator(*wrong)
    with pytest.raises(TypeError, match="arguments must be x, mixed, other, flag, got 3"):
        layout_op(x, Mixed(Pair(x), 1.0), None)  # type: ignore[call-arg]
    with pytest.raises((RuntimeError, TypeError, ValueError)):
        layout_op(x, Pair(x), None, False)  # type: ignore[arg-type]


def test_an_annotation_that_torch_has_no_type_for_is_refused() -> None:
    with pytest.raises(KeyError):

        @operator("test_no_such_type")
        def _(x: Tensor, names: list[str]) -> Tensor:
            return x


@pytest.mark.parametrize(
    "mixed",
    [(Pair(torch.ones(2)), 2.0), Pair(torch.ones(2)), None, Mixed(None, 2.0), Mixed((1, 2), 2.0)],
)
def test_what_is_not_the_record_is_refused_though_it_has_as_many_fields(mixed: object) -> None:
    with pytest.raises(TypeError, match=r"expected (Mixed|Pair), got"):
        layout_op(torch.ones(2), mixed, None, True)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected Pair or None, got tuple"):
        layout_op(torch.ones(2), Mixed(Pair(torch.ones(2)), 2.0), (1, 2), True)  # type: ignore[arg-type]
