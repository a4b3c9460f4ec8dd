"""One run directory, one run."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

import pytest

from fastppo.data.world import World
from fastppo.run import lock


def _take(path: Path) -> int:
    """The lock of a directory as another process would hold it."""
    path.mkdir(exist_ok=True)
    descriptor = os.open(path / lock.FILE, os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def test_a_directory_is_held_once_and_free_afterwards(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with lock.held(run):
        record = json.loads((run / lock.FILE).read_text())
        assert record["pid"] == os.getpid()
        assert record.keys() == {"pid", "host", "since"}
        with pytest.raises(BlockingIOError):
            _take(run)
        with lock.held(run):  # this process holds it already
            pass
        with pytest.raises(BlockingIOError):
            _take(run)
    os.close(_take(run))


def test_who_holds_it_is_named(tmp_path: Path) -> None:
    descriptor = _take(tmp_path)
    with pytest.raises(ValueError, match="it has not said who it is yet"), lock.held(tmp_path):
        pass
    os.write(descriptor, b'{"pid": 7, "host": "h", "since": "today"}')
    says = f"another run is at work in {tmp_path}: process 7 on h, since today"
    with pytest.raises(ValueError, match=says), lock.held(tmp_path):
        pass
    os.close(descriptor)
    with lock.held(tmp_path):
        assert json.loads((tmp_path / lock.FILE).read_text())["pid"] == os.getpid()


def test_an_error_inside_gives_it_back(tmp_path: Path) -> None:
    with pytest.raises(KeyError), lock.held(tmp_path):
        raise KeyError
    os.close(_take(tmp_path))


def test_a_child_that_outlives_the_run_does_not_hold_it(tmp_path: Path) -> None:
    (read_ready, ready), (read_done, done) = os.pipe(), os.pipe()
    with lock.held(tmp_path):
        child = os.fork()
        if child == 0:
            os.write(ready, b"x")
            os.read(read_done, 1)  # until the parent is done
            os._exit(0)
        os.read(read_ready, 1)
    os.close(_take(tmp_path))
    os.write(done, b"x")
    for descriptor in (read_ready, ready, read_done, done):
        os.close(descriptor)
    assert os.waitpid(child, 0)[1] == 0


def test_a_file_system_without_locks_is_used_without_one(tmp_path: Path, monkeypatch) -> None:
    def fails(*args: object) -> None:
        raise OSError(lock.errno.ENOLCK, "no locks available")

    monkeypatch.setattr(lock.fcntl, "flock", fails)
    with lock.held(tmp_path):
        assert json.loads((tmp_path / lock.FILE).read_text())["pid"] == os.getpid()


def test_a_file_in_the_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    with pytest.raises(ValueError, match="is a file"), lock.held(tmp_path / "run"):
        pass
    says = "output_dir .*run/in/it cannot be written: Not a directory"
    with pytest.raises(ValueError, match=says), lock.held(tmp_path / "run" / "in" / "it"):
        pass


def test_of_several_ranks_the_first_holds_it_and_what_it_says_all_say(tmp_path: Path) -> None:
    with lock.held(tmp_path, World(rank=0, size=1)), pytest.raises(BlockingIOError):
        _take(tmp_path)
