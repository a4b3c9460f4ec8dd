"""Wrong input ends in one sentence with the file, line or option, and exit code 2; no traceback."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout

import pytest
import tiny
from command_line import Folder

from fastppo import cli


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return Folder(tmp_path_factory.mktemp("refusals"))


def _refused(arguments: list[str]) -> str:
    """Run `fastppo` on input that it refuses; return its only line."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        assert cli.main(arguments) == 2, err.getvalue()
    lines = [line for line in err.getvalue().splitlines() if line.startswith("fastppo: ")]
    assert len(lines) == 1, err.getvalue()
    assert "Traceback" not in err.getvalue()
    assert len(lines[0]) < 1000, "values are shortened"
    return lines[0]


def test_a_damaged_dataset_is_refused_by_name(folder: Folder) -> None:
    from datasets import Dataset

    parquet = folder.path / "broken.parquet"
    parquet.write_bytes(b"PAR1 and then nothing")
    saved = folder.path / "saved"
    Dataset.from_list(tiny.PROMPTS).save_to_disk(str(saved))
    arrow = next(saved.glob("*.arrow"))
    arrow.write_bytes(arrow.read_bytes()[:100])
    for path in (parquet, saved):
        assert f"fastppo: {path}: " in _refused(folder.flags(prompts=path))


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_truncated_file_of_a_model_is_refused(file: str, folder: Folder) -> None:
    model = folder.path / f"truncated-{file}"
    shutil.copytree(folder.model, model)
    content = (model / file).read_bytes()
    (model / file).write_bytes(content[: len(content) // 2])
    assert f"fastppo: model {model}: " in _refused(folder.flags(model=model))


def test_a_models_own_code_is_never_run(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    model = folder.path / "with-code"
    shutil.copytree(folder.model, model)
    ran = folder.path / "ran"
    (model / "odd.py").write_text(f"open({str(ran)!r}, 'w')\nclass Odd: pass\n")
    config = json.loads((model / "config.json").read_text())
    names = ("AutoConfig", "AutoModelForCausalLM")
    config |= {"model_type": "odd", "auto_map": dict.fromkeys(names, "odd.Odd")}
    (model / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("builtins.input", lambda *prompt: "yes")
    assert str(model) in _refused(folder.flags(model=model))
    assert not ran.exists()


@pytest.mark.slow
def test_too_little_memory_ends_with_a_sentence(folder: Folder) -> None:
    limited = ["sh", "-c", 'ulimit -v 716800; exec "$0" "$@"', sys.executable, "-m", "fastppo"]
    ended = subprocess.run([*limited, *folder.flags()], capture_output=True, text=True, check=False)
    assert ended.returncode in (1, 2)
    assert "Traceback" not in ended.stderr
    assert len([line for line in ended.stderr.splitlines() if line.startswith("fastppo: ")]) == 1
