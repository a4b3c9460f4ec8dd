"""A file is there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fastppo.data.files import write_whole


def test_a_full_disk_leaves_what_was_there_and_is_named_with_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.yaml"
    write_whole(path, "seed: 0\n")

    def fails(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match=f"'{path}'"):
        write_whole(path, "seed: 1\n")
    assert path.read_text() == "seed: 0\n"
    assert list(tmp_path.iterdir()) == [path], "nothing half written is left"


def test_a_link_stays_and_a_device_is_written_to(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_whole(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "text"
    write_whole(os.devnull, "text")
    assert not Path(os.devnull).is_file()
