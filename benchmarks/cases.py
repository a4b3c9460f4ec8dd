"""List the suite's cases by set."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from benchmarks.case import COMPILED, Case
from benchmarks.losses import (
    linear_logprobs_case,
    linear_loss_case,
    loss_case,
    stats_case,
)
from benchmarks.sequences import advantages_case, gae_case, whiten_case
from benchmarks.shapes import MODELS, SETS, Sequences, Sweep, Tokens, Work
from benchmarks.training import update_case

_Build = Callable[[Tokens, torch.dtype], Case]

_LOGITS: dict[str, tuple[_Build, ...]] = {
    "ppo_loss": (
        loss_case,
        lambda shape, dtype: loss_case(shape, dtype, entropy_coef=0.0),
        lambda shape, dtype: loss_case(shape, dtype, with_gradient=False),
    ),
    "token_stats": (stats_case,),
}
_LINEAR: dict[str, tuple[_Build, ...]] = {
    "linear_ppo_loss": (
        linear_loss_case,
        lambda shape, dtype: linear_loss_case(shape, dtype, entropy_coef=0.0),
    ),
    "linear_token_logprobs": (linear_logprobs_case,),
}
_SEQUENCES = {"gae": gae_case, "compute_advantages": advantages_case, "whiten": whiten_case}


def cases_of(work: Work) -> list[Case]:
    """Return the cases of a set, without sweeps.

    The first shape of each operation comes first, since a run can be interrupted; variants and
    other shapes follow.
    """
    first: list[Case] = []
    later: list[Case] = []
    for builders, shapes in ((_LOGITS, work.logits), (_LINEAR, work.linear)):
        for shape in shapes:
            usual_cases = first if shape is shapes[0] else later
            for variants in builders.values():
                usual, *others = (build(shape, work.dtype) for build in variants)
                usual_cases.append(usual)
                later += others
    for sequences in work.sequences:
        built = [build(sequences) for build in _SEQUENCES.values()]
        if sequences is work.sequences[0]:
            first += built
        else:
            later += built
    first += [update_case(shape, work.dtype) for shape in work.update]
    return first + later


class Point(NamedTuple):
    """A case at one size of a sweep."""

    case: Case
    variable: str
    size: int

    @property
    def provider_names(self) -> list[str]:
        """Names of all providers except `torch.compile`, which would compile anew at each size."""
        return [name for name in self.case.provider_names if name != COMPILED]


def points_of(sweep: Sweep, dtype: torch.dtype) -> list[Point]:
    """Return the points of a sweep, for the case's first variant."""
    points = []
    for shape in sweep.shapes:
        if isinstance(shape, Sequences):
            points.append(Point(_SEQUENCES[sweep.case](shape), sweep.variable, shape.length))
        else:
            size = shape.n if sweep.variable == "N" else shape.model.vocab
            case = (_LOGITS | _LINEAR)[sweep.case][0](shape, dtype)
            points.append(Point(case, sweep.variable, size))
    return points


def promised_cases() -> list[Case]:
    """Return the cases of the promised ratios on a CPU."""
    logits = Tokens(MODELS["tinyllama-1.1b"], 512)
    linear = Tokens(MODELS["llama-68m"], 2048)
    return [
        loss_case(logits, torch.float32),
        loss_case(logits, torch.float32, entropy_coef=0.0),
        linear_loss_case(linear, torch.float32),
        linear_loss_case(linear, torch.float32, entropy_coef=0.0),
        gae_case(Sequences(64, 4096)),
    ]


LOSS, LOSS_NO_ENTROPY, LINEAR_LOSS, LINEAR_LOSS_NO_ENTROPY, GAE = (
    case.title for case in promised_cases()
)


class Suite(NamedTuple):
    """Everything that `pytest benchmarks` runs on a device."""

    cases: list[Case]
    points: list[Point]
    titled: dict[str, Case]
    """All cases by title."""


def slug(*parts: str) -> str:
    """Return a test's id without spaces and commas, for `-k`."""
    return "-".join(re.sub(r"[ ,+/]+", "-", part) for part in parts)


def device_of(config: pytest.Config) -> torch.device:
    chosen = config.getoption("device")
    if chosen == "auto":
        chosen = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(chosen)


def suite_of(config: pytest.Config) -> Suite:
    name = "quick" if config.getoption("quick") else "default"
    return _suite_of(SETS[device_of(config).type, name])


@functools.cache
def _suite_of(work: Work) -> Suite:
    cases = cases_of(work)
    points = [point for sweep in work.sweeps for point in points_of(sweep, work.dtype)]
    every = [*cases, *(point.case for point in points), *promised_cases()]
    return Suite(cases, points, {case.title: case for case in every})
