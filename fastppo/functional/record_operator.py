"""Custom operators of torch whose operands and results are records.

torch's operators take no records. `Operator` is the one place where a record is flattened into its
fields and put together again, by the annotations of the function it wraps: a field that is added to
a record needs no word here.

Where nothing looks on, no compiler, no transform and no mode that counts or traces, a function that
writes into none of its operands is called as it is: torch's dispatch of a custom operator takes the
host longer than a kernel's launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar, get_args, get_type_hints

import torch
from torch import Tensor
from torch.library import custom_op
from torch.nn import Parameter

P = ParamSpec("P")
R = TypeVar("R")

TYPES = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    float: "float",
    float | None: "float?",
    int | None: "int?",
    str: "str",
    bool: "bool",
    torch.dtype | None: "ScalarType?",
}
"""Annotations, and what torch's schemas call them."""


class _Layout(NamedTuple):
    """Where a value is among an operator's flat arguments."""

    start: int
    fields: list[tuple[str, Any]]  # (name, annotation) of each flat argument from there on
    record: Any = None  # the record that they make up, if it is not one value by itself
    optional: bool = False  # or None in place of the record
    parts: tuple[_Layout, ...] = ()  # of a record that holds records

    def spread(self, value: Any, into: list[Any]) -> None:
        if self.record is None:
            into.append(value)
        elif value is None and self.optional:
            into.extend([None] * len(self.fields))
        elif type(value) is not self.record:
            expected = self.record.__name__ + " or None" * self.optional
            raise TypeError(f"expected {expected}, got {type(value).__name__}")
        elif self.parts:
            for part, layout in zip(value, self.parts, strict=True):
                layout.spread(part, into)
        else:
            into.extend(value)

    def gathered(self, flat: Sequence[Any]) -> Any:
        if self.record is None:
            return flat[self.start]
        if self.parts:
            values: Sequence[Any] = [layout.gathered(flat) for layout in self.parts]
        else:
            values = flat[self.start : self.start + len(self.fields)]
        if self.optional and all(value is None for value in values):
            return None
        return self.record(*values)


def _layout(name: str, hint: Any, start: int, *, optional: bool = False) -> _Layout:
    """Of one argument: a tensor, a number, a string, or a record of these, which may be None."""
    record = next((x for x in (hint, *get_args(hint)) if hasattr(x, "_fields")), None)
    if record is None:
        return _Layout(start, [(name, hint | None if optional else hint)])
    optional = optional or record is not hint
    hints = {f"{name}_{field}": hint for field, hint in get_type_hints(record).items()}
    parts = _layouts(hints, start, optional=optional)
    fields = [field for part in parts for field in part.fields]
    nested = any(part.record is not None for part in parts)
    return _Layout(start, fields, record, optional, parts if nested else ())


def _layouts(
    hints: dict[str, Any], start: int = 0, *, optional: bool = False
) -> tuple[_Layout, ...]:
    """Of consecutive arguments."""
    layouts: list[_Layout] = []
    for name, hint in hints.items():
        layouts.append(_layout(name, hint, start, optional=optional))
        start += len(layouts[-1].fields)
    return tuple(layouts)


class Operator(Generic[P, R]):
    """A custom operator of a function that takes and gives records.

    The function takes records and returns a record or a tensor; torch sees `flat_operator`, whose
    schema has an argument for every field. A result that is None reaches the caller as an empty
    tensor.
    """

    def __init__(self, name: str, function: Callable[P, R], mutates: tuple[str, ...]) -> None:
        hints = get_type_hints(function)
        self.function, self.mutates = function, mutates
        self.result = _layout("result", hints.pop("return"), 0)
        self.names = tuple(hints)
        self.inputs = _layouts(hints)
        fields = [field for layout in self.inputs for field in layout.fields]
        operands = ", ".join(
            f"{'Tensor(a!)' if name in mutates else TYPES[hint]} {name}" for name, hint in fields
        )
        # One tensor for each, and no list: torch.compile functionalises no mutation beside a list.
        returned = ", ".join("Tensor" for _ in self.result.fields)
        returned = returned if self.result.record is None else f"({returned})"
        schema = f"({operands}) -> {returned}"
        self.flat_function = self._flat(function)
        self.flat_operator = custom_op(
            f"fastppo::{name}", self.flat_function, mutates_args=mutates, schema=schema
        )

    def _flat(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*flat: Any) -> Any:
            result = function(*[layout.gathered(flat) for layout in self.inputs])
            if self.result.record is None:
                return result
            tensors: list[Any] = []
            self.result.spread(result, tensors)
            like = next(x for x in tensors if x is not None)
            return tuple(like.new_empty(0) if x is None else x for x in tensors)

        return call

    def flat(self, *args: Any, **kwargs: Any) -> list[Any]:
        """The arguments of `flat_operator`."""
        if len(args) + len(kwargs) != len(self.names):
            wanted, got = ", ".join(self.names), len(args) + len(kwargs)
            raise TypeError(f"arguments must be {wanted}, got {got}")
        values = (*args, *[kwargs[name] for name in self.names[len(args) :]]) if kwargs else args
        flat: list[Any] = []
        for value, layout in zip(values, self.inputs, strict=True):
            layout.spread(value, flat)
        return flat

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        flat = self.flat(*args, **kwargs)
        if not self.mutates and _are_plain(flat):
            with torch.no_grad():
                result = self.flat_function(*flat)
        else:
            result = self.flat_operator(*flat)
        return result if self.result.record is None else self.result.gathered(result)

    def register_fake(self, function: Callable[..., R]) -> None:
        """What the operator returns for tensors without values: shapes, dtypes and strides."""
        self.flat_operator.register_fake(self._flat(function))


def _are_plain(flat: list[Any]) -> bool:
    """Whether every tensor has values of its own, and nothing looks on."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    if torch._C._len_torch_dispatch_stack() or torch._ops._len_torch_dispatch_stack_pre_dispatch():
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    return all(type(x) in (Tensor, Parameter) or not isinstance(x, Tensor) for x in flat)


def operator(name: str, *mutates: str) -> Callable[[Callable[P, R]], Operator[P, R]]:
    """Decorator: the function as the operator `fastppo::name`, which writes into `mutates`."""
    return lambda function: Operator(name, function, mutates)
