"""A checkpoint agrees with its manifest, or it is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastppo.run import manifest


def _written(path: Path) -> Path:
    (path / "deep").mkdir(parents=True)
    (path / "a").write_bytes(b"one")
    (path / "deep" / "b").write_bytes(b"")
    manifest.write(path, {"run": {"seed": 1}})
    return path


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("a", b"two", "a has changed since it was written"),
        ("deep/b", None, "deep/b is missing"),
        ("new", b"", "new is not in manifest.json"),
        ("manifest.json", b"{", "cannot be read: Expecting"),
        ("manifest.json", None, "no manifest.json, so it was never finished"),
    ],
)
def test_a_damaged_file_is_named(file: str, content: bytes | None, says: str, tmp_path) -> None:
    path = _written(tmp_path / "c")
    assert manifest.read(path) == {"run": {"seed": 1}}
    if content is None:
        (path / file).unlink()
    else:
        (path / file).write_bytes(content)
    with pytest.raises(manifest.DamagedError, match=says):
        manifest.read(path)


def test_the_newest_intact_checkpoint_is_found(tmp_path: Path) -> None:
    paths = [_written(tmp_path / f"checkpoint-{n}") for n in (1, 2, 3)]
    (paths[2] / "a").unlink()
    newest = manifest.newest(paths)
    assert newest is not None
    assert (newest.path, newest.passed_over) == (paths[1], [paths[2]])
    assert "checkpoint-3: a is missing" in newest.reasons[0]
    assert manifest.newest([]) is None
    for path in paths:
        (path / manifest.FILE).unlink()
    with pytest.raises(manifest.DamagedError, match=r"checkpoint-3: .*/checkpoint-1: ") as error:
        manifest.newest(paths)
    assert "\n" not in str(error.value)


def test_damaged_checkpoints_are_renamed_without_replacing_one_another(tmp_path: Path) -> None:
    names = [manifest.set_aside(_written(tmp_path / "checkpoint-3")).name for _ in range(2)]
    assert names == ["damaged-checkpoint-3", "damaged-2-checkpoint-3"]


def test_safetensors_get_the_permissions_of_a_new_file(tmp_path: Path) -> None:
    for name in ("a.safetensors", "c.bin"):
        (tmp_path / name).touch(mode=0o600)
    (tmp_path / "new").touch()
    manifest.permit(tmp_path, tmp_path / "nowhere.safetensors")
    wanted = (tmp_path / "new").stat().st_mode
    assert (tmp_path / "a.safetensors").stat().st_mode == wanted
    assert (tmp_path / "c.bin").stat().st_mode != wanted or wanted & 0o777 == 0o600
    assert len(list(tmp_path.iterdir())) == 3
