"""What `.ci/parity` says and does where a package cannot be had, or a test of it does not run."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PYTHON = """#!/bin/bash
# Stands for the interpreters and for pip: an environment holds a copy of it.
case "$*" in
  "-m venv"*) mkdir -p "${@: -1}/bin"; cp "$0" "${@: -1}/bin/python" ;;
  "-c"*) echo "$(dirname "$0")" ;;
  *pip*install*) PIP ;;
  *pytest*) echo "$0" "${@: -1}"; PYTEST ;;
esac
"""
BOTH = ["test_losses.py::test_the_kl", "test_from_others.py"]


def parity(folder: Path, pip: str = "true", pytest: str = "true") -> subprocess.CompletedProcess:
    """The script beside an interpreter that does as it is told."""
    python = folder / "bin" / "python"
    python.parent.mkdir()
    python.write_text(PYTHON.replace("PIP", pip).replace("PYTEST", pytest))
    python.chmod(0o755)
    return subprocess.run(
        [ROOT / ".ci" / "parity", folder], capture_output=True, text=True, check=False
    )


def test_each_package_has_its_tests(tmp_path: Path) -> None:
    done = parity(tmp_path)
    assert done.returncode == 0, done.stderr
    ran = [line for line in done.stdout.splitlines() if "/bin/python " in line]
    for name, tests, line in zip(["TRL", "verl"], BOTH, ran, strict=True):
        assert f"/{name}/bin/python" in line
        assert tests in line


def test_a_package_that_is_gone_is_named_at_the_end_and_the_rest_is_tested(tmp_path: Path) -> None:
    gone = "case \"$*\" in *verl==*) echo 'ERROR: No matching distribution found for verl==0.9.1'"
    done = parity(tmp_path, pip=f"{gone}; exit 1;; esac")
    assert done.returncode == 0, done.stderr
    said = "Not tested: parity with verl, because pip finds no verl==0.9.1."
    assert done.stdout.splitlines()[-1] == said
    assert "test_losses.py::test_the_kl" in done.stdout
    assert "test_from_others.py" not in done.stdout


@pytest.mark.parametrize(
    "said", ["WARNING: Retrying (Retry(total=4)) after connection broken by NewConnectionError", ""]
)
def test_an_index_that_has_none_of_them_is_a_failure(said: str, tmp_path: Path) -> None:
    none = "ERROR: No matching distribution found for $(echo ${@: -1})"
    done = parity(tmp_path, pip=f"echo '{said}'; echo \"{none}\"; exit 1")
    assert done.returncode == 1
    wanted = "pip cannot install" if said else "tested with neither package"
    assert wanted in done.stderr


def test_another_failure_of_pip_ends_it_with_its_words(tmp_path: Path) -> None:
    done = parity(tmp_path, pip="echo 'ERROR: no space left'; exit 1")
    assert done.returncode == 1
    assert "ERROR: no space left\nParity with TRL: pip cannot install trl==1.12.*" in done.stderr


@pytest.mark.parametrize(
    ("does", "said"),
    [("exit 1", ""), ("echo 'SKIPPED [1] a.py: no verl'", "the tests above were skipped.")],
    ids=["fails", "skips"],
)
def test_a_test_that_fails_or_is_skipped_ends_it(does: str, said: str, tmp_path: Path) -> None:
    done = parity(tmp_path, pytest=does)
    assert done.returncode == 1
    assert said in done.stderr
