"""Whether a run may begin in a directory, which is asked before torch is imported."""

from __future__ import annotations

from pathlib import Path


def check_no_run(run_dir: str | Path) -> None:
    """Raises ValueError where a run has left records, or something is there that is no directory.

    A run that failed before its first record leaves nothing that is worth keeping.
    """
    run_dir = Path(run_dir)
    if run_dir.exists() and not run_dir.is_dir():
        raise ValueError(f"output_dir {run_dir} is a file")
    for parent in run_dir.parents:
        if parent.is_file():
            raise ValueError(f"output_dir {run_dir} cannot be made: {parent} is a file")
    if holds_run(run_dir):
        raise ValueError(
            f"{run_dir} holds a run already: resume it with `resume: true`, or choose another "
            "output_dir"
        )


def holds_run(run_dir: str | Path) -> bool:
    """Whether a run has left records or checkpoints there."""
    records = Path(run_dir) / "metrics.jsonl"
    left = records.exists() and records.stat().st_size > 0
    return left or any(Path(run_dir).glob("checkpoint-*"))
