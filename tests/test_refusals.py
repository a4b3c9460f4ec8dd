"""Wrong input ends in one sentence with the file, line or option, and exit code 2; no traceback."""

from __future__ import annotations

import http.server
import io
import json
import resource
import shutil
import subprocess
import sys
import threading
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import tiny
from command_line import Folder

from fastppo import cli


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return Folder(tmp_path_factory.mktemp("refusals"))


def _refused(arguments: list[str], code: int = 2) -> str:
    """Run `fastppo` on input that it refuses; return its only line."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        assert cli.main(arguments) == code, err.getvalue()
    lines = [line for line in err.getvalue().splitlines() if line.startswith("fastppo: ")]
    assert len(lines) == 1, err.getvalue()
    assert "Traceback" not in err.getvalue()
    assert len(lines[0]) < 1000, "values are shortened"
    return lines[0]


def test_a_line_of_the_prompts_is_refused_with_file_and_line(folder: Folder) -> None:
    path = folder.path / "broken.jsonl"
    path.write_text('{"prompt": "w1"}\n{"prompt": "w')
    message = _refused(folder.flags(prompts=path))
    assert message.startswith(f"fastppo: {path}, line 2: not valid JSON")


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


@pytest.mark.parametrize(
    "file",
    [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "model.safetensors",
    ],
)
def test_a_truncated_file_of_a_model_is_refused(file: str, folder: Folder) -> None:
    model = folder.path / f"truncated-{file}"
    shutil.copytree(folder.model, model)
    content = (model / file).read_bytes()
    (model / file).write_bytes(content[: len(content) // 2])
    assert f"fastppo: model {model}: " in _refused(folder.flags(model=model))


def test_an_architecture_that_cannot_be_built_is_refused(folder: Folder) -> None:
    model = folder.path / "odd-config"
    shutil.copytree(folder.model, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"hidden_size": 31}))
    assert str(model) in _refused(folder.flags(model=model))


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


def test_a_servers_message_is_escaped(folder: Folder) -> None:
    class Red(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(418, "\x1b[31mno")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Red) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/score"
        said = _refused(folder.flags(rewards=url, iterations=1), code=1)
        server.shutdown()
    shutil.rmtree(folder.run)
    assert "answered 418 \\x1b[31mno" in said


def test_a_full_disk_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("sys.dont_write_bytecode", True)  # of modules first imported here
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, before[1]))
    try:
        message = _refused(["recipe", "arithmetic", "--out", str(tmp_path / "out")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert f"File too large: '{tmp_path}" in message


def test_an_unsupported_device_is_refused(folder: Folder) -> None:
    message = _refused(folder.flags(device="xpu"))
    assert "device must be auto, cpu, cuda, cuda:1, …, got 'xpu'" in message


@pytest.mark.slow
def test_too_little_memory_ends_with_a_sentence(folder: Folder) -> None:
    limited = ["sh", "-c", 'ulimit -v 716800; exec "$0" "$@"', sys.executable, "-m", "fastppo"]
    ended = subprocess.run([*limited, *folder.flags()], capture_output=True, text=True, check=False)
    assert ended.returncode in (1, 2)
    assert "Traceback" not in ended.stderr
    assert len([line for line in ended.stderr.splitlines() if line.startswith("fastppo: ")]) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: [1", "is not valid YAML"),
        ("seed: " + "x" * 10_000, "seed must be an integer, got 'xxx"),
    ],
)
def test_a_config_file_is_refused_by_name(text: str, message: str, folder: Folder) -> None:
    path = folder.path / "run.yaml"
    path.write_text(text)
    said = _refused(["train", "--config", str(path)])
    assert str(path) in said
    assert message in said


def test_a_damaged_file_of_a_run_is_refused_by_the_report(tmp_path: Path) -> None:
    records = tmp_path / "metrics.jsonl"
    records.write_text('{"iteration": 0, "reward": 1.0}\n')
    assert cli.main(["report", str(tmp_path)]) == 0
    records.write_text('{"iteration": 0}\n[1]\n')
    message = f"{records}, line 2: expected a JSON object"
    assert message in _refused(["report", str(tmp_path)])
