"""Coefficients that move over a run: `name=shape:final`."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from fastppo.functional import scalars

SCHEDULED = (
    "clip_ratio",
    "clip_ratio_high",
    "dual_clip",
    "value_clip",
    "entropy_coef",
    "vf_coef",
    "kl_coef",
    "kl_loss_coef",
    "ptx_coef",
    "missing_eos_penalty",
    "early_stop_kl",
)
"""Options that `schedules` may move; the learning rate has `lr_schedule`."""


class Schedule(NamedTuple):
    """`name=shape:final`: from the option's own value to `final` over the run's iterations."""

    name: str
    shape: str
    final: float

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Raises ValueError with the accepted form."""
        match = re.fullmatch(r"\s*(\w+)\s*=\s*(\w+)\s*:\s*(\S+)\s*", text)
        if match is None:
            raise ValueError(
                f"schedules: expected name=linear:final or name=cosine:final, got {text!r}"
            )
        name, shape, last = match.groups()
        scalars.choice("schedules: the name", name, SCHEDULED)
        scalars.choice("schedules: the shape", shape, ("constant", "linear", "cosine"))
        try:
            final = float(last)
        except ValueError:
            raise ValueError(f"schedules: {last!r} in {text!r} is not a number") from None
        return cls(name, shape, final)

    def value(self, start: float, progress: float) -> float:
        """The value at `progress` in [0, 1] of the run."""
        if self.shape == "constant":
            return start
        left = 1 - progress if self.shape == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
        return self.final + (start - self.final) * left
