"""Count by the phases of an iteration.

generate, score, experience     of the trainer's timer
microbatches                    gradient of a minibatch: forward and backward passes
optimizer step                  clipping, the step's numbers, the step
update                          the rest of the update
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.simgpu.counts import counts


def follow() -> None:
    """Count in phases from now on."""
    from fastppo.ppo.algorithm import PPO
    from fastppo.ppo.metrics import PhaseTimer
    from fastppo.ppo.step_control import StepControl

    time_phase = PhaseTimer.__call__

    @contextmanager
    def timed(self: PhaseTimer, phase: str) -> Iterator[None]:
        with counts.during(phase), time_phase(self, phase):
            yield

    PhaseTimer.__call__ = timed  # type: ignore[method-assign]
    _count_during(PPO, "accumulate_gradient", "microbatches")
    _count_during(StepControl, "step", "optimizer step")
    loss = PPO.loss

    @functools.wraps(loss)
    def counted(self: PPO, *args: Any, **more: Any) -> Any:
        counts.calls["microbatch"] += 1
        return loss(self, *args, **more)

    PPO.loss = counted  # type: ignore[method-assign]


def _count_during(cls: type, name: str, phase: str) -> None:
    method: Callable[..., Any] = getattr(cls, name)

    @functools.wraps(method)
    def counted(self: Any, *args: Any, **more: Any) -> Any:
        with counts.during(phase):
            return method(self, *args, **more)

    setattr(cls, name, counted)
