"""Trackers: W&B, trackio and MLflow, by transformers' own callbacks.

What is added here is that a run which is resumed goes on in the tracker as the same run, which
`trackers.json` of the run directory knows, that W&B and MLflow get the samples as a table, and that
a run which failed is closed too. TensorBoard's events are written by `fastppo.run.log`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import TrainerCallback
from transformers.integrations import (
    MLflowCallback,
    TrackioCallback,
    WandbCallback,
    is_mlflow_available,
    is_trackio_available,
    is_wandb_available,
)

FILE = "trackers.json"


class Kept:
    """What the trackers call a run, in its directory.

    Its name is the directory's with the time of the first start, so that two runs in directories of
    one name are two.
    """

    def __init__(self, run_dir: str | Path) -> None:
        self.path = Path(run_dir) / FILE
        self.names: dict[str, str] = {}
        if self.path.exists():
            self.names = json.loads(self.path.read_text("utf-8"))
        started = f"{Path(run_dir).resolve().name}-{datetime.now():%Y%m%d-%H%M%S}"
        self.run_name = self.names.get("run_name", started)

    def keep(self, **names: str) -> None:
        self.names |= {"run_name": self.run_name, **names}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.names, indent=1), encoding="utf-8")


class Wandb(WandbCallback):
    def __init__(self, kept: Kept) -> None:
        super().__init__()
        self.kept, self._opened = kept, False

    def setup(self, args: Any, state: Any, model: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero and self._wandb.run is None:
            run = self._wandb.init(
                project=os.environ.get("WANDB_PROJECT", args.project),
                name=args.run_name,
                id=self.kept.names.get("wandb"),
                resume="allow",
                dir=args.output_dir,
            )
            self._opened = True
            self.kept.keep(wandb=run.id)
        super().setup(args, state, model, **kwargs)

    def on_samples(self, args: Any, state: Any, control: Any, samples: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            columns, rows = table(samples)
            found = {"samples": self._wandb.Table(columns=columns, data=rows)}
            self._wandb.log(found | {"train/global_step": state.global_step})

    def close(self) -> None:
        if self._opened:
            self._wandb.finish()
        self._opened = self._initialized = False


class Trackio(TrackioCallback):
    """Trackio continues the run of the same name."""

    def __init__(self, kept: Kept) -> None:
        super().__init__()
        self.kept = kept

    def setup(self, args: Any, state: Any, model: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self.kept.keep()
        super().setup(args, state, model, **kwargs)

    def close(self) -> None:
        if self._initialized:
            self._trackio.finish()
        self._initialized = False


class MLflow(MLflowCallback):
    def __init__(self, kept: Kept) -> None:
        super().__init__()
        self.kept, self._opened = kept, False

    def setup(self, args: Any, state: Any, model: Any) -> None:
        flow, known = self._ml_flow, self.kept.names.get("mlflow")
        if state.is_world_process_zero and flow.active_run() is None:
            if known:
                flow.set_experiment(experiment_id=flow.get_run(known).info.experiment_id)
                flow.start_run(run_id=known)
                # What a run was started with cannot be written again there.
                args, model = SimpleNamespace(run_name=args.run_name, to_dict=dict), None
            else:
                flow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", args.project))
                flow.start_run(run_name=args.run_name)
                self.kept.keep(mlflow=flow.active_run().info.run_id)
            self._opened = True
        super().setup(args, state, model)

    def on_samples(self, args: Any, state: Any, control: Any, samples: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            columns, rows = table(samples)
            by_column = dict(zip(columns, map(list, zip(*rows, strict=True)), strict=True))
            self._ml_flow.log_table(by_column, "samples.json")

    def close(self) -> None:
        if self._opened and self._ml_flow.active_run() is not None:
            self._ml_flow.end_run()
        self._opened = self._initialized = False


MAKERS: dict[str, tuple[Callable[[], bool], Callable[[Kept], TrainerCallback]]] = {
    "wandb": (is_wandb_available, Wandb),
    "trackio": (is_trackio_available, Trackio),
    "mlflow": (is_mlflow_available, MLflow),
}
"""(whether it is installed, what makes it) by name."""


def make_trackers(names: Sequence[str], kept: Kept) -> list[TrainerCallback]:
    """The trackers of these names.

    Raises:
        ImportError: one is not installed.
    """
    for name in names:
        if not MAKERS[name][0]():
            raise ImportError(f"report_to={name} needs {name}: pip install {name}")
    return [MAKERS[name][1](kept) for name in names]


def table(samples: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """(columns, rows) of samples.jsonl's records: a column for each reward, chats as JSON."""
    flat = []
    for sample in samples:
        row: dict[str, Any] = {}
        for name, value in sample.items():
            if isinstance(value, dict):
                row |= {f"{name}/{key}": each for key, each in value.items()}
            else:
                row[name] = (
                    json.dumps(value, ensure_ascii=False) if isinstance(value, list) else value
                )
        flat.append(row)
    columns = list(dict.fromkeys(name for row in flat for name in row))
    return columns, [[row.get(name) for name in columns] for row in flat]
