"""Weights & Biases: metrics, and samples as a table.

Names and steps are those of transformers' callback: `train/reward`, `eval/reward`, and
`train/global_step`, the number of completed iterations. A resumed run continues the same W&B run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from fastppo.run.options import Options
from fastppo.run.trackers import PROJECT, TrackedRun, Tracker

STEP = "train/global_step"


class Wandb(Tracker):
    """Log to the open W&B run of the process, or else to one of its own."""

    requirement = "wandb"

    def __init__(self, run: TrackedRun, config: Options, *, first: int = 0) -> None:
        import wandb

        self._wandb = wandb
        self._has_opened = wandb.run is None
        if self._has_opened:
            opened = wandb.init(
                project=os.environ.get("WANDB_PROJECT", PROJECT),
                name=run.name,
                id=run.ids.get("wandb"),
                resume="allow",
                dir=str(run.directory),
            )
            run.keep(wandb=opened.id)
        wandb.config.update(config.to_dict(), allow_val_change=True)
        wandb.define_metric(STEP)
        wandb.define_metric("*", step_metric=STEP, step_sync=True)

    def metrics(self, number: int, metrics: dict[str, float], warnings: Sequence[str]) -> None:
        """Log the metrics of an iteration."""
        named = {
            name if name.startswith("eval/") else f"train/{name}": value
            for name, value in metrics.items()
        }
        self._wandb.log({**named, STEP: number + 1})

    def samples(self, number: int, samples: Sequence[dict[str, Any]]) -> None:
        """Log a table of samples."""
        columns, rows = table(samples)
        logged = self._wandb.Table(columns=list[str | int](columns), data=rows)
        self._wandb.log({"samples": logged, STEP: number + 1})

    def close(self) -> None:
        """Finish the run, unless it was open before."""
        if self._has_opened:
            self._wandb.finish()


def table(samples: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Return (columns, rows) of samples: one column per reward, chats as JSON."""
    flat = []
    for sample in samples:
        row: dict[str, Any] = {}
        for name, value in sample.items():
            if isinstance(value, dict):
                row |= {f"{name}/{key}": term for key, term in value.items()}
            elif isinstance(value, list):
                row[name] = json.dumps(value, ensure_ascii=False)
            else:
                row[name] = value
        flat.append(row)
    columns = list(dict.fromkeys(name for row in flat for name in row))
    return columns, [[row.get(name) for name in columns] for row in flat]
