"""Call user-defined functions with the arguments that they name, and check their results.

Errors name the function, its file and line, and what was expected.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from fastppo_kernels.records import PerToken
from torch import Tensor


def name_and_place(function: Callable[..., Any]) -> str:
    """Return `name (file, line)` of a function, a class or a callable object."""
    while isinstance(function, functools.partial):
        function = function.func
    defined: Any = inspect.unwrap(function)
    if not (inspect.isroutine(defined) or inspect.isclass(defined)):
        defined = type(defined)
    name = f"`{defined.__qualname__}`"
    try:
        _, line = inspect.getsourcelines(defined)
        return f"{name} ({inspect.getsourcefile(defined)}, line {line})"
    except (OSError, TypeError):  # built in, or of an interactive session
        return name


class Offering(functools.partial[Any]):
    """A function with keywords that it gets only if it names them.

    A caller wraps an objective in it to offer more than `ppo_loss` does.
    """


def named_by(function: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """Return the offered keywords that a function has parameters for. None is not offered."""
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    known = {name: value for name, value in offered.items() if value is not None}
    return {name: value for name, value in known.items() if takes_all or name in parameters}


def call_by_name(
    option: str,
    function: Callable[..., Any],
    first: Mapping[str, Any],
    offered: Mapping[str, Any],
) -> Any:
    """Call a function with the arguments `first`, and with those of `offered` that it names.

    Raises:
        ValueError: the function takes other arguments.
    """
    named = named_by(function, offered)
    try:
        inspect.signature(function).bind(*first.values(), **named)
    except TypeError as error:
        others = [name for name, value in offered.items() if value is not None]
        raise ValueError(
            f"{option} {name_and_place(function)}: {error}; expected ({', '.join(first)}), and "
            f"any of {', '.join(others)} by name"
        ) from None
    return function(*first.values(), **named)


def check_per_token(
    option: str, function: Callable[..., Any], name: str, value: Any, like: Tensor
) -> Tensor:
    """Check a function's result, and return it in the dtype of `like`.

    Raises:
        ValueError: the result is not a float tensor shaped like `like`, [N].
    """
    got = type(value).__name__
    if isinstance(value, Tensor):
        if value.shape == like.shape and value.is_floating_point():
            return value.to(like.dtype)
        got = f"{str(value.dtype).removeprefix('torch.')} of shape {list(value.shape)}"
    raise ValueError(
        f"{option} {name_and_place(function)}: expected {name}, a float tensor of shape "
        f"{list(like.shape)}, one per token, got {got}"
    )


def token_loss(
    function: Callable[..., Tensor],
    logprobs: Tensor,
    entropy: Tensor,
    per_token: PerToken,
    *,
    cu_seqlens: Tensor | None,
) -> Tensor:
    """Call a user's objective, and return its loss of each token, [N].

    `ppo_loss` describes the arguments of the objective.

    Args:
        logprobs, entropy: [N], differentiable. They are 0 where masked.

    Raises:
        ValueError: the function takes other arguments, or returns something else.
    """
    weights = per_token.importance_weights
    first = {
        "logprobs": logprobs,
        "old_logprobs": per_token.old_logprobs,
        "advantages": per_token.advantages,
        "mask": per_token.weights != 0,
    }
    offered = {
        "entropy": entropy,
        "ref_logprobs": per_token.ref_logprobs,
        "importance_weights": torch.ones_like(logprobs) if weights is None else weights,
        "cu_seqlens": cu_seqlens,
    }
    if isinstance(function, Offering):
        offered |= function.keywords
        function = function.func
    loss = call_by_name("objective", function, first, offered)
    loss = check_per_token("objective", function, "token_loss", loss, logprobs)
    if torch.is_grad_enabled() and logprobs.requires_grad and not loss.requires_grad:
        raise ValueError(
            f"objective {name_and_place(function)}: expected a token_loss that is differentiable "
            "in logprobs or entropy, got one without a gradient"
        )
    if weights is None or "importance_weights" in named_by(function, offered):
        return loss
    return loss * weights
