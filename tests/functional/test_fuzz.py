"""Any arguments of the public functions: the number that the definition gives in fp64, or a
ValueError or TypeError that names an argument.

Of `PPOTrainer` these are the constructor, whose policy is the model that it was given, and `step`,
whose numbers are compared with those of the same arguments in fp64; where it refuses them, no
weight has changed. Its other methods take what the trainer itself has made, and options of the
command line are read in tests/test_refusals.py.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import math
import os
import random
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from fastppo_kernels.records import SUMS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console
from torch import Tensor
from transformers import TrainerCallback

import fastppo
from fastppo.data.world import World
from fastppo.functional.statistics import sampled_kl
from fastppo.rollout.generate import GenerateEngine

CALLS = int(os.environ.get("FASTPPO_FUZZ", "10000"))
"""Of all functions together; more of them for a long run."""

BATCH = 25
"""Calls that are made of one example: hypothesis draws the seeds."""

TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Of a result, relative to the largest number in it. In fp32 a few roundings of logits that are
about 10; in half precision the logits of an lm-head are rounded to it once."""


class Draw(random.Random):
    """Arguments of a call, right ones and others."""

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
        """Some of the arguments."""
        return {name: value for name, value in arguments.items() if self.random() < 0.3}

    def odd(self, value: Any) -> Any:
        """Something else in the place of an argument."""
        kinds = [*ODD_VALUES, *(ODD_TENSORS if isinstance(value, Tensor) else ())]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of kinds of tensors that torch is still trying out
            try:
                return self.choice(kinds)(value, self)
            except (RuntimeError, TypeError):  # of torch: not every tensor becomes every other
                return value


def _shaped(value: Any, draw: Draw) -> Tensor:
    shape = [draw.randrange(4) for _ in range(draw.randrange(4))]
    return torch.zeros(shape, dtype=value.dtype if isinstance(value, Tensor) else torch.float32)


ODD_VALUES: list[Callable[[Any, Draw], Any]] = [
    lambda value, draw: None,
    lambda value, draw: "x",
    lambda value, draw: draw.choice([0, 1, -1, 2, 10**400, -(10**5000), 2**63]),
    lambda value, draw: draw.choice([0.5, -0.5, math.nan, math.inf, -math.inf, 1e300, 1e-300]),
    lambda value, draw: draw.choice([True, False]),
    lambda value, draw: 1j,
    lambda value, draw: [1.0, 2.0],
    lambda value, draw: (0.1, 0.2),
    lambda value, draw: np.zeros(3),
    lambda value, draw: np.float32(0.5),
    lambda value, draw: object(),
    _shaped,
]
ODD_TENSORS: list[Callable[[Tensor, Draw], Any]] = [
    lambda value, draw: value.tolist(),
    lambda value, draw: value.numpy() if value.dtype != torch.bfloat16 else None,
    lambda value, draw: value.to_sparse() if value.dim() else value,
    lambda value, draw: value.to("meta"),
    lambda value, draw: value.to(draw.choice([torch.int64, torch.bool, torch.complex64])),
    lambda value, draw: value.to(draw.choice(list(TOLERANCES))),
    lambda value, draw: value[None],
    lambda value, draw: value[:0] if value.dim() else value,
    lambda value, draw: value.expand(2, *value.shape)[0],
    lambda value, draw: value.T if value.dim() == 2 else value.flip(0) if value.dim() else value,
    lambda value, draw: value.repeat_interleave(2, -1)[..., ::2] if value.dim() else value,
    lambda value, draw: torch.full_like(value, math.nan if value.is_floating_point() else 1),
    lambda value, draw: value.clone().fill_(-1) if value.dtype == torch.int64 else value,
    lambda value, draw: value.to(torch.float8_e4m3fn) if value.is_floating_point() else value,
    lambda value, draw: torch.nn.Parameter(value) if value.is_floating_point() else value,
    lambda value, draw: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(1)]),
    lambda value, draw: (
        torch.quantize_per_tensor(value.float(), 0.1, 0, torch.quint8)
        if value.is_floating_point()
        else value
    ),
]


# ---------------------------------------------------------------------------- arguments that fit


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


def _head_weight(draw: Draw) -> dict[str, Any]:
    peft = pytest.importorskip("peft")
    torch.manual_seed(draw.randrange(2**31))
    layer = torch.nn.Linear(4, draw.randrange(1, 9), dtype=draw.choice([*TOLERANCES]))
    if draw.random() < 0.7:
        model = torch.nn.ModuleDict({"lm_head": layer})
        lora = peft.LoraConfig(
            r=2,
            target_modules=["lm_head"],
            use_dora=draw.random() < 0.5,
            init_lora_weights=False,
        )
        layer = peft.inject_adapter_in_model(lora, model)["lm_head"]
    return {"lm_head": layer}


def _options(draw: Draw) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(fastppo.PPOConfig)]
    return {draw.choice(names): draw.odd(None)}


@functools.cache
def _trainer() -> tuple[fastppo.PPOTrainer, dict[str, Any]]:
    """A trainer, and how it begins."""
    config = fastppo.PPOConfig(
        device="cpu",
        minibatches=1,
        ppo_epochs=1,
        learning_rate=1e-3,
        iterations=10,
        kl_coef=0.1,
        value_head="gradient",
    )
    trainer = fastppo.PPOTrainer(
        config,
        model=tiny.model(),
        tokenizer=tiny.tokenizer(chat=True),
        console=Console(quiet=True),
    )
    parts = {"model": trainer.model, "optimizer": trainer.optimizer, "state": trainer.state}
    return trainer, {name: copy.deepcopy(part.state_dict()) for name, part in parts.items()}


def make_trainer(config: Any, **parts: Any) -> dict[str, Tensor]:
    """`PPOTrainer` itself: the weights of its policy."""
    return fastppo.PPOTrainer(config, **parts).model.causal_lm.state_dict()


make_trainer.__signature__ = inspect.signature(fastppo.PPOTrainer)  # type: ignore[attr-defined]


class Game:
    """An environment of one turn."""

    def reset(self, prompt: Any, **columns: Any) -> None:
        pass

    def step(self, text: str) -> tuple[str, float, bool]:
        return "", 1.0, True


def _make_trainer(draw: Draw) -> dict[str, Any]:
    rows: list[Any] = [{"prompt": "w1 w2", "n": 1}, {"prompt": "w3", "n": 2}]
    rewards: list[Any] = [tiny.count_w7]
    given = {
        "config": fastppo.PPOConfig(device="cpu", minibatches=1, max_new_tokens=4),
        "model": tiny.model(),
        "tokenizer": tiny.tokenizer(chat=True),
        "console": Console(quiet=True),
        **draw.maybe(
            prompts=rows,
            rewards=rewards,
            monitor_rewards=[tiny.count_w7],
            reference=tiny.model(seed=1),
            environment=Game,
            engine=GenerateEngine(tiny.model(), pad_token_id=0),
            callbacks=[TrainerCallback()],
            world=World(),
        ),
    }
    if draw.random() < 0.3:
        listed = draw.choice([rows, rewards, rows[0]])
        place = draw.choice(list(listed) if isinstance(listed, dict) else range(len(listed)))
        listed[place] = draw.odd(listed[place])
    return given


def step(
    prompts: Any,
    responses: Any,
    scores: Any,
    finish_reasons: Any = None,
    *,
    masks: Any = None,
    token_rewards: Any = None,
    old_logprobs: Any = None,
    values: Any = None,
) -> dict[str, Tensor]:
    """`PPOTrainer.step` as the first one of a trainer."""
    trainer, beginning = _trainer()
    for name, state in beginning.items():
        getattr(trainer, name).load_state_dict(copy.deepcopy(state))
    torch.manual_seed(0)
    try:
        metrics = trainer.step(
            prompts,
            responses,
            scores,
            finish_reasons,
            masks=masks,
            token_rewards=token_rewards,
            old_logprobs=old_logprobs,
            values=values,
        )
    except (ValueError, TypeError):
        for name, weight in trainer.model.state_dict().items():
            assert torch.equal(weight, beginning["model"][name]), f"{name} has changed"
        raise
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in metrics.items()}


def _step(draw: Draw) -> dict[str, Any]:
    count = draw.randrange(1, 4)
    lengths = [draw.randrange(1, 5) for _ in range(count)]
    kinds: list[Any] = ["w1 w2", [{"role": "user", "content": "w3"}], [4, 5], np.array([6])]
    dtype = draw.choice([*TOLERANCES])

    def by_token() -> list[Tensor]:
        return [draw.floats(length, dtype=dtype) for length in lengths]

    arguments = {
        "prompts": [draw.choice(kinds) for _ in lengths],
        "responses": [draw.tokens(length, below=tiny.WORDS) for length in lengths],
        "scores": draw.floats(count, dtype=dtype),
        **draw.maybe(
            finish_reasons=[draw.choice(["stop", "length"]) for _ in lengths],
            masks=[draw.booleans(length) for length in lengths],
            token_rewards=by_token(),
            old_logprobs=[-row.abs() for row in by_token()],
            values=by_token(),
        ),
    }
    if draw.random() < 0.3:
        rows = draw.choice([rows for rows in arguments.values() if isinstance(rows, list)])
        row = draw.randrange(count)
        rows[row] = draw.odd(rows[row])
    return arguments


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
    fastppo.head_weight: _head_weight,
    fastppo.PPOConfig: _options,
    make_trainer: _make_trainer,
    step: _step,
    sampled_kl: lambda draw: {
        name: value
        for name, value in _tokens(draw, "logprobs", "ref_logprobs").items()
        if name != "mask"
    },
}


# --------------------------------------------------------------------------------- what is claimed


def _leaves(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, dict):
        for name in sorted(result):
            yield from _leaves(result[name])
    elif isinstance(result, tuple | list):
        for part in result:
            yield from _leaves(part)


def _wide(value: Any) -> Any:
    """An argument in fp64."""
    if isinstance(value, torch.nn.Module):
        return copy.deepcopy(value).double()
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().double().contiguous()
    if isinstance(value, list):
        return [_wide(row) for row in value]
    return value


def _tensors_of(value: Any) -> list[Tensor]:
    if isinstance(value, torch.nn.Module):
        return list(value.parameters())
    if isinstance(value, list):
        return [tensor for row in value for tensor in _tensors_of(row)]
    return [value] if isinstance(value, Tensor) else []


def _is_finite(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.is_meta or bool(value.detach().to(torch.complex128).isfinite().all())
    return not isinstance(value, float) or math.isfinite(value)


def _names(argument: str, sentence: str, *, has_rows: bool) -> bool:
    """Whether a sentence names an argument or, of one with a row for each response, a row of it:
    `response 3`."""
    pattern = rf"\b{argument}\b"
    if has_rows:
        pattern += rf"|\b{argument.removesuffix('s')} \d"
    return re.search(pattern, sentence) is not None


def check(function: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Calls the function; raises AssertionError where it ends in another way than it should."""
    names = list(inspect.signature(function).parameters)
    try:
        result = function(**arguments)
    except Exception as error:
        is_refusal = isinstance(error, ValueError | TypeError)
        has_rows = function is step
        if is_refusal and any(_names(name, str(error), has_rows=has_rows) for name in names):
            return
        raise AssertionError(f"{type(error).__name__}, names no argument: {error}") from error
    tensors = [tensor for value in arguments.values() for tensor in _tensors_of(value)]
    if not all(map(_is_finite, arguments.values())) or any(tensor.is_meta for tensor in tensors):
        return
    numbers = [value for value in arguments.values() if isinstance(value, float) and value]
    if not all(1e-9 < abs(value) < 1e9 for value in numbers):
        return  # beyond what fp32 holds to a share of itself
    wide = {name: _wide(value) for name, value in arguments.items()}
    if "dtype" in names:
        wide["dtype"] = torch.float64
    if "backend" in names:
        wide["backend"] = "torch"
    right = list(_leaves(function(**wide)))
    dtypes = [tensor.dtype for tensor in tensors if tensor.dtype in TOLERANCES]
    tolerance = max([TOLERANCES[dtype] for dtype in dtypes] or [TOLERANCES[torch.float32]])
    if "dtype" in names:
        tolerance = TOLERANCES[torch.float32]
    got = list(_leaves(result))
    assert len(got) == len(right)
    for ours, theirs in zip(got, right, strict=True):
        assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
        ours = ours.detach().double()
        theirs = theirs.detach().double()
        assert torch.equal(ours.isfinite(), theirs.isfinite()), (ours, theirs)
        scale = max(1.0, theirs[theirs.isfinite()].abs().max().item() if theirs.numel() else 1.0)
        off = (ours - theirs)[theirs.isfinite()].abs().max().item() if theirs.numel() else 0.0
        assert off <= tolerance * scale, f"{ours} is not {theirs}"


def describe(arguments: dict[str, Any]) -> str:
    """The arguments for a message."""
    texts = []
    for name, value in arguments.items():
        text = type(value).__name__
        if isinstance(value, Tensor):
            text += f" {value.dtype} {value.layout}"
            text += "" if value.is_nested else f" {list(value.shape)}"
        elif isinstance(value, float | str | bool | tuple):
            text = repr(value)
        texts.append(f"{name}={text}")
    return ", ".join(texts)


def drawn(seed: int) -> tuple[Callable[..., Any], dict[str, Any]]:
    """A call: half of them with one argument or two that may not fit."""
    draw = Draw(seed)
    function = draw.choice(list(ARGUMENTS))
    arguments = ARGUMENTS[function](draw)
    names = list(inspect.signature(function).parameters)
    for _ in range(draw.choice([0, 0, 1, 2])):
        name = draw.choice(names)
        arguments[name] = draw.odd(arguments.get(name))
    return function, arguments


@pytest.mark.slow
@settings(
    max_examples=max(1, CALLS // BATCH),
    suppress_health_check=list(HealthCheck),
    derandomize=CALLS <= 10_000,
)
@given(st.integers(0, 2**40))
def test_any_arguments_give_the_right_number_or_an_error_that_names_one(seed: int) -> None:
    for offset in range(BATCH):
        function, arguments = drawn(seed * BATCH + offset)
        try:
            check(function, arguments)
        except AssertionError as error:
            call = f"{function.__name__}({describe(arguments)})"
            raise AssertionError(f"seed {seed * BATCH + offset}, {call}: {error}") from error
