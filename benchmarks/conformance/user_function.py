"""Ask a user's function the questions of an operation."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.conformance.adapter import Inputs, Policy, policy_outputs, with_gradient
from benchmarks.conformance.fixtures import Fixture, difference, fixtures

DEFAULTS: dict[str, Any] = {
    "objective": "clip",
    "aggregation": "token-mean",
    "estimator": "k1",
    "ratio_weighted": False,
    "dual_clip": None,
    "clip": None,
    "bootstrap": None,
}
"""Options and inputs that a function need not name if the fixture has this value of them."""

SAME = "="


def check(function: Callable[..., Any], operation: str) -> dict[str, str]:
    """Return a verdict per fixture: "=", "differs: …", "fails: …" or "not asked: …"."""
    return {
        name: _verdict(function, fixture)
        for name, fixture in fixtures().items()
        if fixture.operation == operation
    }


def _verdict(function: Callable[..., Any], fixture: Fixture) -> str:
    inputs = fixture.tensors()
    batch = {"batch_mask": inputs["mask"]} if "mask" in inputs else {}
    options = {name: x for name, x in fixture.options.items() if name != "microbatches"}
    missing = _not_named(function, {**inputs, **options})
    if missing:
        return f"not asked: it has no parameter {', '.join(missing)}"
    if fixture.options.get("microbatches") and not _names(function, "batch_mask"):
        return "not asked: it has no parameter batch_mask, the mask of all microbatches"

    absent = _required(function) - {*inputs, *options, *batch}
    if absent:
        return f"not asked: the fixture has no {', '.join(sorted(absent))}"

    def call(inputs: Inputs) -> Any:
        given = {**inputs, **options, **batch}
        return function(**{name: x for name, x in given.items() if _names(function, name)})

    try:
        outputs = _outputs(call, fixture, inputs)
    except Exception as error:  # of the user's function
        return f"fails: {type(error).__name__}: {error}"
    wrong = difference(fixture, outputs)
    return f"differs: {wrong}" if wrong else SAME


def _outputs(
    call: Callable[[Inputs], Any], fixture: Fixture, inputs: Inputs
) -> Mapping[str, Tensor]:
    """Return the outputs of a function, with the gradient if the answer has one."""

    def differentiable(inputs: Inputs) -> Tensor:
        returned = call(inputs)
        if not isinstance(returned, Tensor):
            raise TypeError(f"expected a tensor, got {type(returned).__name__}")
        if not returned.requires_grad:
            raise ValueError("expected a tensor with a gradient, got one without")
        return returned

    if fixture.operation == "policy":
        return policy_outputs(
            lambda logprobs, part: differentiable(part | {"logprobs": logprobs}),
            inputs,
            Policy(**fixture.options),
        )
    if "gradient" in fixture.answer:
        name = "values" if fixture.operation == "value" else "logprobs"
        value, gradient = with_gradient(lambda x: differentiable(inputs | {name: x}), inputs[name])
        return {"loss" if "loss" in fixture.answer else "kl": value, "gradient": gradient}
    returned = call(inputs)
    if isinstance(returned, Mapping):
        return returned
    if isinstance(returned, tuple):
        names = " and ".join(fixture.answer)
        raise TypeError(f"expected a tensor or a mapping of {names}, got a tuple")
    first = next(iter(fixture.answer))
    return {first: torch.as_tensor(returned)}


def _required(function: Callable[..., Any]) -> set[str]:
    """Return the parameters without a default."""
    parameters = inspect.signature(function).parameters.values()
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return {x.name for x in parameters if x.default is x.empty and x.kind not in variadic}


def _names(function: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(function).parameters
    return name in parameters or any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()
    )


def _not_named(function: Callable[..., Any], given: Mapping[str, Any]) -> list[str]:
    """Return the inputs and options that the function does not name and the fixture needs."""
    return [
        name
        for name, value in given.items()
        if not _names(function, name) and not (name in DEFAULTS and DEFAULTS[name] == value)
    ]
