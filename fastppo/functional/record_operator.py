"""Custom torch operators with records as operands and results.

torch's operators take tensors and scalars. `Operator` flattens records into their fields and
restores them, following the annotations of the backends' functions: a new field of a record or a
new operand of a function needs no change here.

Gradients are in `gradients.py`, so operators use `torch.library.define` and `impl`.
`torch.library.custom_op` adds an autograd function, which doubles the host's time; only an operator
that mutates an operand uses it, since it informs autograd of the mutation.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar, get_args, get_type_hints

import torch
from torch import Tensor

R = TypeVar("R")

NAMESPACE = "fastppo"
"""The operators are `torch.ops.fastppo.…`."""

SCHEMA_TYPES = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    float: "float",
    float | None: "float?",
    int | None: "int?",
    str: "str",
    bool: "bool",
    torch.dtype | None: "ScalarType?",
}
"""Types in torch's schemas, by annotation."""


class _Slot(NamedTuple):
    """The flat values of one annotated value: itself, or the fields of a record."""

    schema: tuple[tuple[str, str], ...]  # (name, type) of the flat values
    record: Any = None
    optional: bool = False  # whether the record may be None
    parts: tuple[_Slot, ...] = ()  # of the record's fields

    def flatten(self, value: Any) -> list[Any]:
        if self.record is None:
            return [value]
        if value is None and self.optional:
            return [None] * len(self.schema)
        if type(value) is not self.record:
            or_none = " or None" if self.optional else ""
            raise TypeError(f"expected {self.record.__name__}{or_none}, got {type(value).__name__}")
        fields = zip(self.parts, value, strict=True)
        return [flat_value for part, field in fields for flat_value in part.flatten(field)]

    def restore(self, flat: Iterator[Any]) -> Any:
        """Restore the value from the next entries of `flat`."""
        if self.record is None:
            return next(flat)
        fields = [part.restore(flat) for part in self.parts]
        if self.optional and all(field is None for field in fields):
            return None
        return self.record(*fields)


def _slot(name: str, annotation: Any, *, optional: bool = False) -> _Slot:
    """Return the slot of a tensor, a scalar, or a record of these.

    Args:
        optional: the value is a field of a record that may be None.

    Raises:
        KeyError: torch's schemas have no such type.
    """
    candidates = (annotation, *get_args(annotation))
    record = next((x for x in candidates if hasattr(x, "_fields")), None)
    if record is None:
        schema_type = SCHEMA_TYPES[annotation]
        if optional and not schema_type.endswith("?"):
            schema_type += "?"
        return _Slot(((name, schema_type),))
    optional = optional or record is not annotation
    parts = tuple(
        _slot(f"{name}_{field}", field_annotation, optional=optional)
        for field, field_annotation in get_type_hints(record).items()
    )
    schema = tuple(entry for part in parts for entry in part.schema)
    return _Slot(schema, record, optional, parts)


class Operator(Generic[R]):
    """A custom torch operator that takes keywords, including records, and returns a record or
    tensor.

    torch sees `flat_operator`, whose schema has an argument for every field. Results that are None
    become empty tensors.

    Args:
        choose: checks the operands, including `backend`, and returns the function to call with the
            others.
    """

    def __init__(
        self,
        name: str,
        choose: Callable[..., Callable[..., R]],
        *,
        annotations: dict[str, Any],
        result: Any,
        mutates: str | None,
    ) -> None:
        self.name = f"{NAMESPACE}::{name}"
        self.choose = choose
        self.operands = {name: _slot(name, hint) for name, hint in annotations.items()}
        self.result = _slot("result", result)
        flat_operands = [entry for slot in self.operands.values() for entry in slot.schema]
        parameters = ", ".join(
            f"{'Tensor(a!)' if name == mutates else schema_type} {name}"
            for name, schema_type in flat_operands
        )
        # Single tensors, because torch.compile does not functionalise mutations next to a list.
        results = ", ".join("Tensor" for _ in self.result.schema)
        if self.result.record is not None:
            results = f"({results})"
        schema = f"({parameters}) -> {results}"

        def run(*flat: Any) -> Any:
            operands = self._restored(flat)
            compute = choose(**operands)
            del operands["backend"]
            device = _first_tensor(flat).device.type
            if not torch.is_autocast_enabled(device):
                return self._flat_result(compute(**operands))
            # Operators choose their own dtypes.
            with torch.autocast(device, enabled=False):
                return self._flat_result(compute(**operands))

        if mutates is not None:
            torch.library.custom_op(self.name, run, mutates_args=(mutates,), schema=schema)
        else:
            torch.library.define(self.name, schema, tags=torch.Tag.pt2_compliant_tag)
            torch.library.impl(self.name, "default", run)
        self.flat_operator = getattr(getattr(torch.ops, NAMESPACE), name).default

    def flatten(self, **operands: Any) -> list[Any]:
        """Return the arguments of `flat_operator`."""
        if operands.keys() != self.operands.keys():
            expected = ", ".join(self.operands)
            got = ", ".join(operands)
            raise TypeError(f"{self.name} expects the operands {expected}, got {got}")
        return [
            flat_value
            for name, slot in self.operands.items()
            for flat_value in slot.flatten(operands[name])
        ]

    def __call__(self, **operands: Any) -> R:
        """Call the operator without recording a gradient."""
        with torch.no_grad():
            result = self.flat_operator(*self.flatten(**operands))
        return result if self.result.record is None else self.result.restore(iter(result))

    def register_fake(self, function: Callable[..., R]) -> None:
        """Register the results' shapes, dtypes and strides for tensors without values.

        `function` takes the operands that they depend on, by name.
        """
        names = inspect.signature(function).parameters

        def fake(*flat: Any) -> Any:
            operands = self._restored(flat)
            return self._flat_result(function(**{name: operands[name] for name in names}))

        torch.library.register_fake(self.name, fake)

    def _restored(self, flat: tuple[Any, ...]) -> dict[str, Any]:
        values = iter(flat)
        return {name: slot.restore(values) for name, slot in self.operands.items()}

    def _flat_result(self, result: Any) -> Any:
        if self.result.record is None:
            return result
        flat = self.result.flatten(result)
        empty = _first_tensor(flat).new_empty(0)
        return tuple(empty.clone() if x is None else x for x in flat)


def _first_tensor(flat: Sequence[Any]) -> Tensor:
    return next(x for x in flat if isinstance(x, Tensor))


def operator(
    name: str, *, like: Callable[..., R], without: tuple[str, ...] = (), mutates: str | None = None
) -> Callable[[Callable[..., Callable[..., R]]], Operator[R]]:
    """Decorator: define the operator `fastppo::name` from a function that chooses the
    implementation.

    Args:
        like: a function with the operator's parameters and result. `backend: str` is added.
        without: parameters of `like` to leave out.
        mutates: the operand that the operator writes to.
    """
    annotations = get_type_hints(like)
    result = annotations.pop("return")
    operands = {name: hint for name, hint in annotations.items() if name not in without}
    operands["backend"] = str
    return lambda choose: Operator(
        name, choose, annotations=operands, result=result, mutates=mutates
    )
