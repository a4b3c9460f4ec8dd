"""One run directory, one run."""

from __future__ import annotations

from pathlib import Path

import pytest
from filelock import FileLock, Timeout

from fastppo.run import lock


def _other_process(run_dir: Path) -> FileLock:
    """A lock object of its own, which is refused by ours as another process's would be."""
    return FileLock(run_dir / lock.FILE, timeout=0)


def test_a_directory_is_held_once_and_free_afterwards(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with lock.run_lock(run):
        with lock.run_lock(run):  # this process holds it already
            pass
        with pytest.raises(Timeout), _other_process(run):
            pass
    with _other_process(run):
        pass


def test_a_lock_that_is_deleted_is_made_anew_unless_another_has_made_it(tmp_path: Path) -> None:
    with lock.run_lock(tmp_path):
        (tmp_path / lock.FILE).unlink()
        lock.check_still_held(tmp_path)
        with pytest.raises(Timeout), _other_process(tmp_path):
            pass
        (tmp_path / lock.FILE).unlink()
        with (
            _other_process(tmp_path),
            pytest.raises(RuntimeError, match="was deleted, and another"),
        ):
            lock.check_still_held(tmp_path)
    with _other_process(tmp_path):
        pass


def test_a_run_that_has_come_and_gone_meanwhile_is_noticed(tmp_path: Path) -> None:
    with lock.run_lock(tmp_path):
        (tmp_path / lock.FILE).unlink()
        with _other_process(tmp_path):
            pass
        assert (tmp_path / lock.FILE).exists()
        with pytest.raises(RuntimeError, match="was deleted, and another"):
            lock.check_still_held(tmp_path)


def test_a_directory_that_is_renamed_or_removed_is_not_made_anew(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with lock.run_lock(run):
        run.rename(tmp_path / "other")
        with pytest.raises(RuntimeError, match=f"{run} was removed or renamed while"):
            lock.check_still_held(run)
        assert not run.exists()


def test_a_file_in_the_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    with pytest.raises(ValueError, match="is a file"), lock.run_lock(tmp_path / "run"):
        pass
    expected = "output_dir .*run/in/it cannot be written: Not a directory"
    with pytest.raises(ValueError, match=expected), lock.run_lock(tmp_path / "run" / "in" / "it"):
        pass
