"""Random arguments of the public functions: the definition's result in fp64, or an error that names
an argument."""

from __future__ import annotations

import inspect
import math
import os
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fastppo_kernels.records import SUMS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import fastppo
from fastppo.functional.statistics import sampled_kl

CALLS = int(os.environ.get("FASTPPO_FUZZ", "10000"))
"""Total number of calls."""

BATCH = 25
"""Calls per hypothesis example, which is a seed."""

TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Relative to the largest entry of a result. fp32: a few roundings of logits of about 10. Half
precision: an lm-head's logits are rounded once."""


class Draw(random.Random):
    """Draws arguments, valid and invalid."""

    def floats(self, *shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        generator = torch.Generator().manual_seed(self.randrange(2**31))
        x = scale * torch.randn(shape, generator=generator, dtype=torch.float64)
        return x.to(dtype)

    def booleans(self, *shape: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.randrange(2**31))
        return torch.rand(shape, generator=generator) < 0.7

    def tokens(self, *shape: int, below: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.randrange(2**31))
        return torch.randint(0, below, shape, generator=generator)

    def maybe(self, **arguments: Any) -> dict[str, Any]:
        """Choose some of the arguments."""
        return {name: value for name, value in arguments.items() if self.random() < 0.3}

    def mistake(self, value: Any) -> Any:
        """Replace an argument by a plausible mistake."""
        if not isinstance(value, Tensor):
            return self.choice(
                [None, "x", 0, -1, 2, 0.5, -0.5, math.nan, math.inf, True, (0.1, 0.2)]
            )
        kinds: list[Callable[[], Any]] = [
            lambda: None,
            lambda: 0.5,
            value.tolist,
            lambda: value.to("meta"),
            lambda: value.to(self.choice([torch.int64, torch.bool])),
            lambda: value.to(self.choice(list(TOLERANCES))),
            lambda: value[None],
            lambda: value[:0] if value.dim() else value,
            lambda: value.T if value.dim() == 2 else value,
            lambda: torch.full_like(value, math.nan) if value.is_floating_point() else value,
            lambda: value.clone().fill_(-1) if value.dtype == torch.int64 else value,
        ]
        return self.choice(kinds)()


# -------------------------------------------------------------------------------- valid arguments


def _softmax(draw: Draw) -> dict[str, Any]:
    return draw.maybe(temperature=draw.uniform(0.2, 2), softcap=30.0, logit_scale=0.5)


def _loss(draw: Draw, shape: tuple[int, ...], dtype: torch.dtype, below: int) -> dict[str, Any]:
    chosen = {
        "tokens": draw.tokens(*shape, below=below),
        "old_logprobs": draw.floats(*shape, dtype=dtype).abs().neg(),
        "advantages": draw.floats(*shape, dtype=dtype),
        **_softmax(draw),
        **draw.maybe(
            mask=draw.booleans(*shape),
            clip_ratio=draw.choice([0.2, (0.1, 0.3), None]),
            dual_clip=3.0,
            entropy_coef=0.01,
            importance_weights=draw.floats(*shape, dtype=dtype).abs(),
            ref_logprobs=draw.floats(*shape, dtype=dtype).abs().neg(),
        ),
    }
    if "ref_logprobs" in chosen:
        chosen |= draw.maybe(kl_coef=0.1, kl_estimator=draw.choice(["k1", "k2", "k3"]))
    return chosen


def _rows(draw: Draw) -> tuple[tuple[int, ...], int, torch.dtype]:
    shape = draw.choice([(5,), (2, 3), (1,), (0,)])
    return shape, draw.randrange(1, 9), draw.choice([torch.float32, torch.float64])


def _logits(draw: Draw) -> tuple[dict[str, Any], tuple[int, ...], int, torch.dtype]:
    shape, vocabulary, dtype = _rows(draw)
    return (
        {"logits": draw.floats(*shape, vocabulary, dtype=dtype, scale=5)},
        shape,
        vocabulary,
        dtype,
    )


def _head(draw: Draw) -> tuple[dict[str, Any], tuple[int, ...], int, torch.dtype]:
    shape, vocabulary, dtype = _rows(draw)
    arguments = {
        "hidden": draw.floats(*shape, 4, dtype=dtype),
        "weight": draw.floats(vocabulary, 4, dtype=dtype),
        **draw.maybe(bias=draw.floats(vocabulary, dtype=dtype)),
    }
    return arguments, shape, vocabulary, dtype


def _of_logits(draw: Draw) -> dict[str, Any]:
    arguments, shape, vocabulary, _ = _logits(draw)
    return {**arguments, "tokens": draw.tokens(*shape, below=vocabulary), **_softmax(draw)}


def _of_head(draw: Draw) -> dict[str, Any]:
    arguments, shape, vocabulary, _ = _head(draw)
    return {**arguments, "tokens": draw.tokens(*shape, below=vocabulary), **_softmax(draw)}


def _ppo_loss(draw: Draw) -> dict[str, Any]:
    arguments, shape, vocabulary, dtype = _logits(draw)
    return {**arguments, **_loss(draw, shape, dtype, vocabulary)}


def _linear_ppo_loss(draw: Draw) -> dict[str, Any]:
    arguments, shape, vocabulary, dtype = _head(draw)
    return {**arguments, **_loss(draw, shape, dtype, vocabulary)}


def _tokens(draw: Draw, *names: str) -> dict[str, Any]:
    shape, _, dtype = _rows(draw)
    arguments = {name: draw.floats(*shape, dtype=dtype) for name in names}
    return {**arguments, **draw.maybe(mask=draw.booleans(*shape))}


def _total_loss(draw: Draw) -> dict[str, Any]:
    names = ("logprobs", "old_logprobs", "advantages", "values", "returns")
    arguments = _tokens(draw, *names)
    shape = arguments["values"].shape
    logits = draw.floats(*shape, 3, dtype=arguments["values"].dtype)
    return {**arguments, "logits": logits, **draw.maybe(vf_coef=0.5, entropy_coef=0.01)}


def _gae(draw: Draw) -> dict[str, Any]:
    shape = (draw.randrange(4), draw.randrange(5))
    dtype = draw.choice([torch.float32, torch.float64])
    return {
        "rewards": draw.floats(*shape, dtype=dtype),
        "values": draw.floats(*shape, dtype=dtype),
        **draw.maybe(
            mask=draw.booleans(*shape),
            bootstrap=draw.floats(shape[0], dtype=dtype),
            gamma=draw.random(),
            lam=draw.random(),
        ),
    }


def _compute_advantages(draw: Draw) -> dict[str, Any]:
    shape = (draw.randrange(1, 4), draw.randrange(1, 5))
    dtype = draw.choice([torch.float32, torch.float64])
    return {
        "scores": draw.floats(shape[0], dtype=dtype),
        "values": draw.floats(*shape, dtype=dtype),
        "logprobs": draw.floats(*shape, dtype=dtype),
        "ref_logprobs": draw.floats(*shape, dtype=dtype),
        "mask": draw.booleans(*shape),
        **draw.maybe(gamma=draw.random(), lam=draw.random(), kl_coef=0.1),
    }


def _sums(draw: Draw) -> Tensor:
    dtype = draw.choice([torch.float32, torch.float64])
    return draw.floats(len(SUMS), dtype=dtype).abs() + 0.1


def _aggregation(draw: Draw) -> dict[str, Any]:
    mask = draw.booleans(draw.randrange(4), draw.randrange(5))
    return {"mask": mask, **draw.maybe(aggregation="seq-mean-token-sum", denominator=3.0)}


ARGUMENTS: dict[Callable[..., Any], Callable[[Draw], dict[str, Any]]] = {
    fastppo.ppo_loss: _ppo_loss,
    fastppo.linear_ppo_loss: _linear_ppo_loss,
    fastppo.token_stats: _of_logits,
    fastppo.token_logprobs: _of_logits,
    fastppo.linear_token_stats: _of_head,
    fastppo.linear_token_logprobs: _of_head,
    fastppo.policy_loss: lambda draw: _tokens(draw, "logprobs", "old_logprobs", "advantages"),
    fastppo.value_loss: lambda draw: _tokens(draw, "values", "returns"),
    fastppo.total_loss: _total_loss,
    fastppo.entropy: lambda draw: _logits(draw)[0],
    fastppo.gae: _gae,
    fastppo.compute_advantages: _compute_advantages,
    fastppo.whiten: lambda draw: _tokens(draw, "x"),
    fastppo.aggregation_weights: _aggregation,
    fastppo.combine_sums: lambda draw: {"total": _sums(draw), "part": _sums(draw)},
    fastppo.loss_metrics: lambda draw: {"sums": _sums(draw), **draw.maybe(objective="cispo")},
    sampled_kl: lambda draw: {
        name: value
        for name, value in _tokens(draw, "logprobs", "ref_logprobs").items()
        if name != "mask"
    },
}


# ---------------------------------------------------------------------------------------- the test


def _leaves(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, dict):
        for name in sorted(result):
            yield from _leaves(result[name])
    elif isinstance(result, tuple):
        for part in result:
            yield from _leaves(part)


def _in_fp64(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().double().contiguous()
    return value


def _is_finite(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not value.is_meta and bool(value.detach().double().isfinite().all())
    return not isinstance(value, float) or math.isfinite(value)


def check(function: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Call the function; raise AssertionError for a wrong result or error."""
    names = list(inspect.signature(function).parameters)
    try:
        result = function(**arguments)
    except (ValueError, TypeError) as error:
        if any(re.search(rf"\b{name}\b", str(error)) for name in names):
            return
        raise AssertionError(f"{type(error).__name__} names no argument: {error}") from error
    if not all(map(_is_finite, arguments.values())):
        return
    exact = {name: _in_fp64(value) for name, value in arguments.items()}
    if "dtype" in names:
        exact["dtype"] = torch.float64
    if "backend" in names:
        exact["backend"] = "torch"
    dtypes = [x.dtype for x in arguments.values() if isinstance(x, Tensor)]
    tolerance = max(TOLERANCES[x] for x in (torch.float32, *dtypes) if x in TOLERANCES)
    found, expected = list(_leaves(result)), list(_leaves(function(**exact)))
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        scale = theirs.detach()[theirs.isfinite()].abs()
        largest = max(1.0, scale.max().item()) if scale.numel() else 1.0
        torch.testing.assert_close(
            ours.double(), theirs.double(), rtol=0, atol=tolerance * largest, equal_nan=True
        )


def describe(arguments: dict[str, Any]) -> str:
    """Format the arguments for a message."""
    texts = []
    for name, value in arguments.items():
        text = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
        texts.append(f"{name}={text}")
    return ", ".join(texts)


def drawn(seed: int) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Draw a call; half of them contain one or two mistakes."""
    draw = Draw(seed)
    function = draw.choice(list(ARGUMENTS))
    arguments = ARGUMENTS[function](draw)
    names = list(inspect.signature(function).parameters)
    for name in draw.sample(names, min(len(names), draw.choice([0, 0, 1, 2]))):
        arguments[name] = draw.mistake(arguments.get(name))
    return function, arguments


@pytest.mark.slow
@settings(
    max_examples=max(1, CALLS // BATCH),
    suppress_health_check=list(HealthCheck),
    derandomize=CALLS <= 10_000,
)
@given(st.integers(0, 2**40))
def test_any_arguments_give_the_exact_result_or_an_error_that_names_one(seed: int) -> None:
    for offset in range(BATCH):
        function, arguments = drawn(seed * BATCH + offset)
        try:
            check(function, arguments)
        except Exception as error:
            call = f"{function.__name__}({describe(arguments)})"
            raise AssertionError(f"seed {seed * BATCH + offset}, {call}: {error}") from error
