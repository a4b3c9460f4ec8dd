"""No file and no value of a user's ends in a traceback: one sentence with file, line or key, and
exit code 2. First what was found once, then what hypothesis finds."""

from __future__ import annotations

import io
import json
import math
import os
import random
import shutil
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import tiny
from command_line import Folder
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastppo import cli
from fastppo.data.prompts import encode_prompts
from fastppo.data.rows import DataError, load_rows
from fastppo.ppo.config import PPOConfig
from fastppo.run.options import read_yaml
from fastppo.stages.demonstrations import encode_demonstrations
from fastppo.stages.preferences import encode_comparisons
from fastppo.stages.sft import SFTConfig

EXAMPLES = int(os.environ.get("FASTPPO_FUZZ", "10000"))
"""Malformed inputs of all tests below together; more of them for a long run."""


BATCH = 10
"""Inputs that are made of one example: hypothesis draws the leaves and the seed of the rest."""

fuzz = settings(
    max_examples=EXAMPLES // BATCH // 4,
    suppress_health_check=list(HealthCheck),
    derandomize=EXAMPLES <= 10_000,
)
"""Hypothesis draws the same ones each time, unless more are asked for."""


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


# ------------------------------------------------------------------------------- what was found


HALF = "\\ud800"
LINES = {
    "an integer of 5000 digits": (
        b'{"prompt": ' + b"9" * 5000 + b"}",
        "a value that cannot be read",
    ),
    "half a surrogate pair": (f'{{"prompt": "w1 {HALF}"}}'.encode(), "half of a surrogate pair"),
    "not UTF-8": (b'{"prompt": "\xff"}', "line 2: not UTF-8 (byte 13 of the line)"),
    "deep": (b"[" * 100_000, "line 2: a value that cannot be read"),
    "cut": (b'{"prompt": "w', "line 2: not valid JSON"),
    "a long value": (b'{"prompt": {"a": "' + b"x" * 10_000 + b'"}}', "got dict"),
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


YAML = {
    "seed: 1e300": "seed must be an integer, got '1e300'",
    "seed: !!int": "a value that cannot be read",
    "seed: " + "9" * 5000: "a value that cannot be read",
    "learning_rate: " + "9" * 400: "learning_rate must be a finite number, got an integer of",
    "seed: 2024-13-45": "a value that cannot be read: month must be in 1..12",
    "a: &a [*a]": "no option 'a'",
    "model: [" * 5000: "",
    "seed: [1": "is not valid YAML: expected ',' or ']', but got '<stream end>', line 1, column 9",
    "\x00": "is not valid YAML",
    "seed: " + "x" * 10_000: "seed must be an integer, got 'xxx",
}


@pytest.mark.parametrize("text", YAML, ids=lambda text: text[:24])
def test_a_config_file_is_refused_by_name(text: str, folder: Folder) -> None:
    path = folder.path / "run.yaml"
    path.write_text(text)
    said = _refused(["train", "--config", str(path)])
    assert str(path) in said
    assert YAML[text] in said


RECORD = '{"iteration": 0, "reward": 1.0}\n'
SAMPLE = {"iteration": 0, "prompt": "a", "completion": "b", "reward": 1.0, "rewards": {"r": 1.0}}
SAMPLE |= {"monitors": {}, "kl": None, "tokens": 1, "finish_reason": "stop"}
HELD_OUT = SAMPLE | {"row": 0, "sampling": "greedy"}
RUN_FILES = [
    ("metrics.jsonl", RECORD + '{"iteration": "0"}\n', ", line 2: 'iteration' is '0'"),
    ("metrics.jsonl", RECORD + '{"iteration": 1, "kl": [1]}\n', ", line 2: 'kl' is [1]"),
    ("samples.jsonl", '{"iteration": 0}\n', ", line 1: expected a field kl"),
    ("samples.jsonl", json.dumps(SAMPLE) + "\n\xff\n", ", line 2: expected a JSON object"),
    ("eval_samples.jsonl", json.dumps(HELD_OUT | {"row": "a"}) + "\n", ", line 1: 'row' is 'a'"),
    (
        "eval_samples.jsonl",
        json.dumps(HELD_OUT | {"sampling": ["x"]}) + "\n",
        ", line 1: 'sampling' is ['x']",
    ),
    ("config.yaml", "model: [", " is not valid YAML"),
]


@pytest.mark.parametrize(("name", "content", "says"), RUN_FILES)
def test_a_damaged_file_of_a_run_is_refused_by_the_report(
    name: str, content: str, says: str, tmp_path: Path
) -> None:
    whole = {"metrics.jsonl": RECORD, "samples.jsonl": json.dumps(SAMPLE) + "\n", "config.yaml": ""}
    for file, text in whole.items():
        (tmp_path / file).write_text(text)
    assert cli.main(["report", str(tmp_path)]) == 0
    (tmp_path / name).write_bytes(content.encode("latin-1"))
    assert f"{tmp_path / name}{says}" in _refused(["report", str(tmp_path)])


def test_integers_are_what_they_are(tmp_path: Path) -> None:
    """Through a float those above 2⁵³ would be rounded."""
    large = 2**53 + 1
    assert PPOConfig(kl_coef=0.1, checkpoint_interval=large).checkpoint_interval == large
    assert PPOConfig(checkpoint_interval=str(large)).checkpoint_interval == large
    (tmp_path / "run.yaml").write_text(f"checkpoint_interval: {large}")
    assert read_yaml(tmp_path / "run.yaml", PPOConfig) == {"checkpoint_interval": large}
    assert PPOConfig(checkpoint_interval="1e3").checkpoint_interval == 1000
    with pytest.raises(ValueError, match="checkpoint_interval must be an integer"):
        PPOConfig(checkpoint_interval=2**63)


def test_a_seed_that_a_generator_does_not_take_is_refused(folder: Folder) -> None:
    assert "seed must be in [0, 4294967295], got 4294967296" in _refused(folder.flags(seed=2**32))


# ---------------------------------------------------------------------------- what hypothesis finds

LEAVES = st.one_of(
    st.sampled_from(["w1 w2", "user", "assistant", "", " ", "\ud800", "\u2028", "1e400", "no"]),
    st.sampled_from([None, True, 0, -1, 2**53 + 1, 10**400, -0.0, 1e308, math.inf, math.nan]),
    st.integers(),
    st.floats(),
    st.text(max_size=6),
)
NAMES = ("prompt", "completion", "messages", "text", "chosen", "rejected", "role", "content")


def _value(draw: random.Random, leaves: list[Any], depth: int = 0) -> Any:
    """A value of JSON, now and then one that is almost what a reader wants."""
    kind = draw.random()
    if kind < 0.6 or depth > 2:
        return draw.choice(leaves)
    if kind < 0.75:
        roles = ["user", "assistant", "system", draw.choice(leaves)]
        return [
            {"role": draw.choice(roles), "content": _value(draw, leaves, 3)}
            for _ in range(draw.randrange(3))
        ]
    if kind < 0.9:
        return [_value(draw, leaves, depth + 1) for _ in range(draw.randrange(4))]
    return {name: _value(draw, leaves, depth + 1) for name in draw.sample(NAMES, draw.randrange(4))}


def _row(draw: random.Random, leaves: list[Any]) -> dict[str, Any]:
    names = [*NAMES[:6], "completions", "ranks", "margin", "a"]
    row = {name: _value(draw, leaves) for name in draw.sample(names, draw.randrange(5))}
    if draw.random() < 0.5:
        row["prompt"] = "w1"
    return row


DRAWN = st.tuples(st.lists(LEAVES, min_size=4, max_size=8), st.integers(0, 2**32))
_folders: dict[str, Path] = {}


@pytest.fixture(scope="module", autouse=True)
def _scratch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A folder for what is drawn: a fixture per test would be one for all of its examples."""
    _folders["scratch"] = tmp_path_factory.mktemp("scratch")
    yield
    _folders.clear()


def _sentence(error: BaseException, name: str = "") -> None:
    assert str(error), "it says something"
    assert name in str(error)
    assert len(str(error)) < 2000, "values are shortened"


@pytest.mark.slow
@fuzz
@given(DRAWN)
def test_any_values_of_options_make_a_config_or_a_sentence(drawn: tuple[list[Any], int]) -> None:
    draw = random.Random(drawn[1])
    for _ in range(BATCH):
        options = draw.choice([PPOConfig, SFTConfig])
        names = draw.sample([field.name for field in fields(options)], draw.randrange(1, 4))
        values = {name: _value(draw, drawn[0]) for name in names}
        try:
            config = options(**values)
        except ValueError as error:
            _sentence(error)
        else:
            assert options(**config.to_dict()) == config


SYNTAX = ["seed", ": ", "\n", "- ", "[", "{", "&a ", "*a", "!!int ", "!!float ", "2024-13-45", "|"]
SYNTAX += ["!!bool ", "!!timestamp ", "!!binary ", "<<: ", "? ", "0b", "1_", "~", "'", "\0", "\x85"]


@pytest.mark.slow
@fuzz
@given(st.binary(max_size=40), DRAWN)
def test_any_config_file_is_read_or_refused(content: bytes, drawn: tuple[list[Any], int]) -> None:
    path, draw = _folders["scratch"] / "run.yaml", random.Random(drawn[1])
    for i in range(BATCH):
        if i:
            parts = [draw.choice([*SYNTAX, str(draw.choice(drawn[0]))]) for _ in range(6)]
            content = "".join(parts).encode("utf-8", "surrogatepass")
        path.write_bytes(content)
        try:
            PPOConfig(**read_yaml(path, PPOConfig))
        except ValueError as error:
            _sentence(error)


@pytest.mark.slow
@fuzz
@given(st.binary(max_size=40), DRAWN)
def test_any_lines_are_rows_or_refused_with_the_file(
    junk: bytes, drawn: tuple[list[Any], int]
) -> None:
    path, draw = _folders["scratch"] / "rows.jsonl", random.Random(drawn[1])
    for _ in range(BATCH):
        lines = [json.dumps(_value(draw, drawn[0])).encode() for _ in range(2)]
        lines += [json.dumps(_row(draw, drawn[0])).encode(), junk, lines[0][: len(lines[0]) // 2]]
        path.write_bytes(b"\n".join(draw.sample(lines, draw.randrange(1, 5))))
        try:
            rows = load_rows(str(path))
        except DataError as error:
            _sentence(error, str(path))
        else:
            assert all(isinstance(row, dict) for row in rows)


TOKENIZER = tiny.tokenizer(chat=True)


@pytest.mark.slow
@fuzz
@given(DRAWN)
def test_any_rows_are_encoded_or_refused(drawn: tuple[list[Any], int]) -> None:
    draw = random.Random(drawn[1])
    for _ in range(BATCH):
        rows = [_row(draw, drawn[0]) for _ in range(draw.randrange(1, 3))]
        encode = draw.choice(
            [
                lambda rows: encode_prompts(rows, TOKENIZER, max_prompt_tokens=64),
                lambda rows: encode_demonstrations(rows, TOKENIZER, 64),
                lambda rows: encode_comparisons(rows, TOKENIZER, 64),
            ]
        )
        try:
            encode(rows)
        except DataError as error:
            _sentence(error)
        except Exception as error:
            raise AssertionError(f"{rows!r} are not refused") from error
