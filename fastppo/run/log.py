"""A run directory's records: `metrics.jsonl`, `samples.jsonl`, TensorBoard events, W&B if asked.

One line of JSON per iteration (or optimiser step, in the supervised stages), so that a run can be
read with any tool while it is going. After a resume the lines past the checkpoint are cut off: they
are about to be written again. `progress` is what a terminal shows of the same numbers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fastppo.run.options import Options


class RunLog:
    """Appends to the records of a run directory.

    Args:
        index: what a record is numbered by: iteration, or step.
        first: the number of the first record to come; older ones from there on are cut off.
        wandb_project: also log to this project.
    """

    def __init__(
        self,
        directory: str | Path,
        config: Options,
        *,
        index: str = "iteration",
        first: int = 0,
        wandb_project: str | None = None,
    ) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.directory = Path(directory)
        self.index = index
        self.directory.mkdir(parents=True, exist_ok=True)
        config.save(self.directory / "config.yaml")
        for name in ("metrics.jsonl", "samples.jsonl"):
            _cut(self.directory / name, index, first)
        self._writer = SummaryWriter(str(self.directory / "tensorboard"), purge_step=first or None)
        self._wandb: Any = None
        if wandb_project is not None:
            try:
                import wandb
            except ImportError as error:
                raise ImportError("wandb_project needs wandb: pip install wandb") from error
            self._wandb = wandb.init(
                project=wandb_project,
                name=self.directory.name,
                dir=str(self.directory),
                config=config.to_dict(),
            )

    def metrics(self, number: int, metrics: dict[str, float], warnings: Sequence[str] = ()) -> None:
        """One line of metrics.jsonl, and the same numbers as TensorBoard scalars. The sentences of
        warnings are written under `warnings`, if there are any."""
        record: dict[str, Any] = {self.index: number, **metrics}
        if warnings:
            record["warnings"] = list(warnings)
            self._writer.add_text("warnings", "\n\n".join(warnings), number)
        _append(self.directory / "metrics.jsonl", [record])
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, number)
        self._writer.flush()
        if self._wandb is not None:
            self._wandb.log(metrics, step=number)

    def samples(self, number: int, samples: list[dict[str, Any]]) -> None:
        """Lines of samples.jsonl: prompt, completion, each reward term, KL."""
        records = [{self.index: number, **sample} for sample in samples]
        _append(self.directory / "samples.jsonl", records)

    def close(self) -> None:
        self._writer.close()
        if self._wandb is not None:
            self._wandb.finish()


@contextmanager
def progress(
    title: str, console: Console, *, total: int | None = None, completed: int = 0
) -> Iterator[Callable[..., None]]:
    """A progress bar: gives `update(completed=…, total=…, status=…)`."""
    columns = (
        TextColumn(title),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[status]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bars:
        task = bars.add_task(title, total=total, completed=completed, status="")

        def update(**fields: Any) -> None:
            bars.update(task, **fields)

        yield update


def check_no_run(run_dir: str | Path) -> None:
    """Raises ValueError where a run has left records, or something is there that is no directory.

    A run that failed before its first record leaves nothing that is worth keeping.
    """
    run_dir = Path(run_dir)
    if run_dir.exists() and not run_dir.is_dir():
        raise ValueError(f"output_dir {run_dir} is a file")
    records = run_dir / "metrics.jsonl"
    if (records.exists() and records.stat().st_size) or any(run_dir.glob("checkpoint-*")):
        raise ValueError(
            f"{run_dir} holds a run already: go on with `resume: true`, or choose another "
            "output_dir"
        )


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """The records of a JSONL file; a last line that was cut off while being written is left out."""
    path = Path(path)
    if not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


def _append(path: Path, records: list[dict[str, Any]]) -> None:
    with path.open("a", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record, ensure_ascii=False, default=str) + "\n")


def _cut(path: Path, index: str, first: int) -> None:
    if not path.exists():
        return
    remaining = [record for record in read_jsonl(path) if record[index] < first]
    temporary = path.with_suffix(".tmp")
    temporary.unlink(missing_ok=True)
    _append(temporary, remaining)
    temporary.replace(path)
