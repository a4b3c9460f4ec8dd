"""A run directory holds one run."""

from __future__ import annotations

from pathlib import Path

import pytest
from filelock import FileLock, Timeout

from fastppo.run import directory
from fastppo.run.directory import check_no_run, holds_run, run_lock


def _other_process(run_dir: Path) -> FileLock:
    """A separate lock object, refused like that of another process."""
    return FileLock(run_dir / directory.LOCK, timeout=0)


def test_a_directory_is_locked_for_the_block(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with run_lock(run):
        with run_lock(run):  # the same process may lock it again
            pass
        with pytest.raises(Timeout), _other_process(run):
            pass
    with (
        _other_process(run),
        pytest.raises(ValueError, match=str(tmp_path)),
        run_lock(run),
    ):
        pass


def test_a_file_in_the_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    with pytest.raises(ValueError, match=str(tmp_path / "run")):
        check_no_run(tmp_path / "run")
    with (
        pytest.raises(ValueError, match=str(tmp_path / "run")),
        run_lock(tmp_path / "run" / "in" / "it"),
    ):
        pass


def test_a_directory_is_free_until_a_run_leaves_records_or_a_checkpoint(tmp_path: Path) -> None:
    check_no_run(tmp_path / "absent")
    (tmp_path / "config.yaml").write_text("seed: 3\n")
    (tmp_path / "metrics.jsonl").touch()  # the run failed before its first record
    check_no_run(tmp_path)
    assert not holds_run(tmp_path)
    (tmp_path / "checkpoint-000001").mkdir()
    assert holds_run(tmp_path)
    (tmp_path / "checkpoint-000001").rmdir()
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match="--resume true"):
        check_no_run(tmp_path)


@pytest.mark.parametrize("records", [["metrics.jsonl"], ["metrics.jsonl", "samples.jsonl"]])
def test_a_comparison_is_offered_for_ppo_runs_alone(records: list[str], tmp_path: Path) -> None:
    for name in records:
        (tmp_path / name).write_text("{}\n")
    with pytest.raises(ValueError, match=f"--output_dir {tmp_path}-2") as raised:
        check_no_run(tmp_path)
    assert ("fastppo report" in str(raised.value)) == ("samples.jsonl" in records)
