"""No file and no value of a user's ends in a traceback: one sentence with file, line or key, and
exit code 2."""

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
    """What `fastppo` says of input that it refuses: one line."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        assert cli.main(arguments) == code, err.getvalue()
    said = [line for line in err.getvalue().splitlines() if line.startswith("fastppo: ")]
    assert len(said) == 1, err.getvalue()
    assert "Traceback" not in err.getvalue()
    assert len(said[0]) < 1000, "values are shortened"
    return said[0]


LINES = {
    "not UTF-8": (b'{"prompt": "\xff"}', "line 2: not UTF-8 (byte 13 of the line)"),
    "cut": (b'{"prompt": "w', "line 2: not valid JSON"),
    "a long value": (b'{"prompt": {"a": "' + b"x" * 10_000 + b'"}}', "got {'a': 'xxx"),
}


@pytest.mark.parametrize("name", LINES)
def test_a_line_of_the_prompts_is_refused_with_file_and_line(name: str, folder: Folder) -> None:
    line, says = LINES[name]
    path = folder.path / "broken.jsonl"
    path.write_bytes(b'{"prompt": "w1"}\n' + line + b"\n")
    said = _refused(folder.flags(prompts=path))
    assert said.startswith(f"fastppo: {path}, ")
    assert says in said


FILES = {
    "broken.parquet": b"PAR1 and then nothing",
    "empty.jsonl": b"",
    "file.txt": b"w1",
    "folder.jsonl": None,
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_prompts_is_refused_by_name(name: str, folder: Folder) -> None:
    path, content = folder.path / name, FILES[name]
    if content is None:
        path.mkdir(exist_ok=True)
    else:
        path.write_bytes(content)
    assert f"fastppo: {path}: " in _refused(folder.flags(prompts=path))


def test_a_directory_of_datasets_that_is_damaged_is_refused_by_name(folder: Folder) -> None:
    from datasets import Dataset

    path = folder.path / "saved"
    Dataset.from_list(tiny.PROMPTS).save_to_disk(str(path))
    for file in sorted(path.iterdir()):
        before = file.read_bytes()
        file.write_bytes(before[: len(before) // 2])
        assert f"fastppo: {path}: " in _refused(folder.flags(prompts=path))
        file.write_bytes(before)


MODELS = {
    "tokenizer.json": [b"{", b'{"model": 7}'],
    "tokenizer_config.json": [b"[]"],
    "generation_config.json": [b"", b"[]"],
    "config.json": [b"", b"{}", b"\xff", b'{"model_type": "nowhere"}'],
    "model.safetensors": [b"", b"\0" * 64],
}


@pytest.mark.parametrize("file", MODELS)
def test_a_damaged_file_of_a_model_is_refused_by_its_directory(file: str, folder: Folder) -> None:
    model = folder.path / f"damaged-{file}"
    shutil.copytree(folder.model, model)
    for content in MODELS[file]:
        (model / file).write_bytes(content)
        assert f"fastppo: model {model}: " in _refused(folder.flags(model=model)), content


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_position_embeddings", 32.5),
        ("max_position_embeddings", "long"),
        ("hidden_size", 0),
        ("hidden_size", 31),
        ("num_attention_heads", 7),
        ("vocab_size", -2),
    ],
)
def test_a_config_of_a_model_is_refused(key: str, value: object, folder: Folder) -> None:
    model = folder.path / f"config-{key}-{value}"
    shutil.copytree(folder.model, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {key: value}))
    assert str(model) in _refused(folder.flags(model=model))


def test_a_models_own_code_is_never_run_and_nobody_is_asked(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_servers_words_do_not_steer_the_terminal(folder: Folder) -> None:
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


def test_a_file_that_cannot_be_written_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, before[1]))
    try:
        said = _refused(["recipe", "arithmetic", "--out", str(tmp_path / "out")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert f"File too large: '{tmp_path}" in said


def test_a_device_that_is_not_supported_is_refused(folder: Folder) -> None:
    said = _refused(folder.flags(device="xpu"))
    assert "device must be auto, cpu, cuda, cuda:1, …, got 'xpu'" in said


@pytest.mark.slow
def test_a_process_that_has_too_little_memory_ends_with_a_sentence(folder: Folder) -> None:
    limited = ["sh", "-c", 'ulimit -v 716800; exec "$0" "$@"', sys.executable, "-m", "fastppo"]
    ended = subprocess.run([*limited, *folder.flags()], capture_output=True, text=True, check=False)
    assert ended.returncode in (1, 2)
    assert "Traceback" not in ended.stderr
    assert len([line for line in ended.stderr.splitlines() if line.startswith("fastppo: ")]) == 1


YAML = {
    "seed: 2024-13-45": "is not valid YAML: month must be in 1..12",
    "seed: [1": "is not valid YAML",
    "seed: " + "x" * 10_000: "seed must be an integer, got 'xxx",
}


@pytest.mark.parametrize("text", YAML, ids=lambda text: text[:24])
def test_a_config_file_is_refused_by_name(text: str, folder: Folder) -> None:
    path = folder.path / "run.yaml"
    path.write_text(text)
    said = _refused(["train", "--config", str(path)])
    assert str(path) in said
    assert YAML[text] in said


RUN_FILES = [
    ("metrics.jsonl", '{"iteration": 0}\n[1]\n', ", line 2: expected a JSON object"),
    ("samples.jsonl", "\xff\n", ", line 1: expected a JSON object"),
    ("config.yaml", "model: [", " is not valid YAML"),
]


@pytest.mark.parametrize(("name", "content", "says"), RUN_FILES)
def test_a_damaged_file_of_a_run_is_refused_by_the_report(
    name: str, content: str, says: str, tmp_path: Path
) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 0, "reward": 1.0}\n')
    assert cli.main(["report", str(tmp_path)]) == 0
    (tmp_path / name).write_bytes(content.encode("latin-1"))
    assert f"{tmp_path / name}{says}" in _refused(["report", str(tmp_path)])
