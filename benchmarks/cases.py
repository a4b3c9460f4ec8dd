"""The suite's cases by name and set."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks import CASES
from benchmarks.case import Case
from benchmarks.losses import (
    linear_logprobs_case,
    linear_loss_case,
    loss_case,
    stats_case,
)
from benchmarks.sequences import advantages_case, gae_case, whiten_case
from benchmarks.shapes import Sequences, Sweep, Tokens, Work
from benchmarks.training import update_case

_LOGITS: dict[str, tuple[Callable[[Tokens, torch.dtype], Case], ...]] = {
    "loss": (
        loss_case,
        lambda shape, dtype: loss_case(shape, dtype, entropy_coef=0.0),
        lambda shape, dtype: loss_case(shape, dtype, with_gradient=False),
    ),
    "statistics": (stats_case,),
}
_LINEAR: dict[str, tuple[Callable[[Tokens, torch.dtype], Case], ...]] = {
    "linear-loss": (
        linear_loss_case,
        lambda shape, dtype: linear_loss_case(shape, dtype, entropy_coef=0.0),
    ),
    "linear-logprobs": (linear_logprobs_case,),
}
_SEQUENCES = {"gae": gae_case, "advantages": advantages_case, "whiten": whiten_case}


def cases(work: Work, names: tuple[str, ...] = tuple(CASES)) -> list[Case]:
    """Return the cases of a set with these names, without sweeps.

    Each operation's first shape comes first, since a set can run out of time; then variants and
    other shapes.
    """
    first: list[Case] = []
    later: list[Case] = []
    for builders, shapes in ((_LOGITS, work.logits), (_LINEAR, work.linear)):
        for shape in shapes:
            usual_cases = first if shape is shapes[0] else later
            for name, variants in builders.items():
                if name in names:
                    usual, *others = (build(shape, work.dtype) for build in variants)
                    usual_cases.append(usual)
                    later += others
    for sequences in work.sequences:
        built = [build(sequences) for name, build in _SEQUENCES.items() if name in names]
        if sequences is work.sequences[0]:
            first += built
        else:
            later += built
    first += [update_case(shape, work.dtype) for shape in work.update if "update" in names]
    return first + later


def sweep_cases(sweep: Sweep, dtype: torch.dtype) -> list[tuple[int, Case]]:
    """Return (size, case) for each point of a sweep, for the case's first variant."""
    points: list[tuple[int, Case]] = []
    for shape in sweep.shapes:
        if isinstance(shape, Sequences):
            points.append((shape.length, _SEQUENCES[sweep.case](shape)))
        else:
            size = shape.n if sweep.variable == "N" else shape.model.vocab
            build = (_LOGITS | _LINEAR)[sweep.case][0]
            points.append((size, build(shape, dtype)))
    return points
