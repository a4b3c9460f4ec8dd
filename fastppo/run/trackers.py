"""Logging to W&B by transformers' callback.

In addition, a resumed run continues the same W&B run (its id is in `trackers.json` of the run
directory), samples are logged as a table, and a failed run is closed. `fastppo.run.log` writes the
TensorBoard events.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.integrations import WandbCallback, is_wandb_available

from fastppo.data.files import write_whole

FILE = "trackers.json"


class TrackedRun:
    """The name and id of a run in the tracker, saved in its directory for a resume.

    The name is that of the directory with the time of the first start.
    """

    def __init__(self, run_dir: str | Path) -> None:
        self._path = Path(run_dir) / FILE
        self.ids: dict[str, str] = {}
        """The id of the run by tracker."""
        self.name = f"{Path(run_dir).resolve().name}-{datetime.now():%Y%m%d-%H%M%S}"
        if self._path.exists():
            self.ids = json.loads(self._path.read_text("utf-8"))
            self.name = self.ids.pop("run_name")

    def keep(self, **ids: str) -> None:
        """Add ids and save them with the name."""
        self.ids |= ids
        self._path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"run_name": self.name, **self.ids}, indent=1)
        write_whole(self._path, text)


class Wandb(WandbCallback):
    def __init__(self, run: TrackedRun) -> None:
        super().__init__()
        self.run = run
        self._opened = False

    def setup(self, args: Any, state: Any, model: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero and self._wandb.run is None:
            run = self._wandb.init(
                project=os.environ.get("WANDB_PROJECT", args.project),
                name=args.run_name,
                id=self.run.ids.get("wandb"),
                resume="allow",
                dir=args.output_dir,
            )
            self._opened = True
            self.run.keep(wandb=run.id)
        super().setup(args, state, model, **kwargs)

    def on_samples(self, args: Any, state: Any, control: Any, samples: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            columns, rows = table(samples)
            samples_table = self._wandb.Table(columns=columns, data=rows)
            self._wandb.log({"samples": samples_table, "train/global_step": state.global_step})

    def close(self) -> None:
        if self._opened:
            self._wandb.finish()
        self._opened = False
        self._initialized = False


def make_trackers(names: Sequence[str], run: TrackedRun) -> list[TrainerCallback]:
    """Return the trackers of `report_to`. The only one is W&B.

    Raises:
        ImportError: wandb is not installed.
    """
    if names and not is_wandb_available():
        raise ImportError("report_to=wandb needs wandb: pip install wandb")
    return [Wandb(run) for _ in names]


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
