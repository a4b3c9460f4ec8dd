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
    with pytest.raises(OSError, match=rf"No space left on device: '{path}'"):
        write_whole(path, "seed: 1\n")
    assert path.read_text() == "seed: 0\n"
    assert list(tmp_path.iterdir()) == [path], "nothing half written is left"
