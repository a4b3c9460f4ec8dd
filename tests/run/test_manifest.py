"""A checkpoint is whole, or it is refused with the file's name."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fastppo.run import manifest


def _written(path: Path, number: int = 3) -> Path:
    (path / "deep").mkdir(parents=True)
    (path / "a").write_bytes(b"one")
    (path / "deep" / "b").write_bytes(b"")
    manifest.write(path, number, {"run": {"seed": 1}})
    return path


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("a", b"two", "a has other bytes"),
        ("a", b"on", "a has 2 bytes; expected 3"),
        ("deep/b", None, "deep/b is not there"),
        ("new", b"", "new was not written with it"),
        ("deep/manifest.json", b"", "deep/manifest.json was not written with it"),
        ("manifest.json", b"{", "manifest.json cannot be read"),
        ("manifest.json", b"[" * 100_000, "manifest.json cannot be read"),
        ("manifest.json", b"\xff", "manifest.json cannot be read"),
        ("manifest.json", b"[]", "manifest.json has other bytes"),
        ("manifest.json", b"{}", "manifest.json has other bytes"),
        ("manifest.json", None, "no manifest.json, so it was never finished"),
    ],
)
def test_a_damage_is_named(file: str, content: bytes | None, says: str, tmp_path: Path) -> None:
    path = _written(tmp_path / "c")
    if content is None:
        (path / file).unlink()
    else:
        (path / file).write_bytes(content)
    with pytest.raises(manifest.DamagedError, match=says):
        manifest.read(path, 3)


@pytest.mark.parametrize("name", [manifest.FILE, "a", "deep/new", "deep/manifest.json"])
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to(__file__)])
def test_what_is_neither_a_file_nor_a_directory_is_not_read(
    make: Callable[[Path], None], name: str, tmp_path: Path
) -> None:
    """A pipe would be waited for without end, and a link leads elsewhere."""
    path = _written(tmp_path / "c")
    (path / name).unlink(missing_ok=True)
    make(path / name)
    with pytest.raises(manifest.DamagedError, match=f"{name} is neither a file nor a directory"):
        manifest.read(path, 3)


def test_a_checkpoint_under_another_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(manifest.DamagedError, match="expected checkpoint 4, got 3"):
        manifest.read(_written(tmp_path / "c"), 4)


def test_the_newest_whole_one_is_found_and_the_others_are_told_of(tmp_path: Path) -> None:
    paths = [_written(tmp_path / f"checkpoint-{n}", n) for n in (1, 2, 3)]
    (paths[2] / "a").unlink()
    newest = manifest.newest(paths)
    assert newest is not None
    assert (newest.path, newest.passed_over) == (paths[1], [paths[2]])
    assert "checkpoint-3: a is not there" in newest.reasons[0]
    assert manifest.newest([]) is None
    for path in paths:
        (path / manifest.FILE).unlink()
    with pytest.raises(manifest.DamagedError, match=r"checkpoint-3: .*/checkpoint-1: ") as error:
        manifest.newest(paths)
    assert "\n" not in str(error.value)


def test_what_is_set_aside_does_not_take_the_place_of_what_was(tmp_path: Path) -> None:
    names = []
    for _ in range(3):
        names.append(manifest.set_aside(_written(tmp_path / "checkpoint-3")).name)
    assert names == [
        "damaged-checkpoint-3",
        "damaged-2-checkpoint-3",
        "damaged-3-checkpoint-3",
    ]


def test_safetensors_get_the_mode_that_a_new_file_gets(tmp_path: Path) -> None:
    for name in ("a.safetensors", "b.safetensors", "c.bin"):
        (tmp_path / name).touch(mode=0o600)
    (tmp_path / "new").touch()
    manifest.permit(tmp_path, tmp_path / "nowhere.safetensors")
    wanted = (tmp_path / "new").stat().st_mode
    assert (tmp_path / "a.safetensors").stat().st_mode == wanted
    assert (tmp_path / "c.bin").stat().st_mode != wanted or wanted & 0o777 == 0o600
    assert len(list(tmp_path.iterdir())) == 4
