"""Every command and example of the README and the docs runs as it is printed."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import yaml
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForSequenceClassification

import fastppo
from fastppo import cli
from fastppo.ppo.config import PPOConfig
from fastppo.stages.demonstrations import encode_demonstrations
from fastppo.stages.preferences import encode_comparisons
from fastppo.stages.reward_model import RewardModelConfig
from fastppo.stages.sft import SFTConfig

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    return [code for name, code in BLOCK.findall(page.read_text("utf-8")) if name == language]


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the examples speak of, and the examples that are files."""
    monkeypatch.chdir(tmp_path)
    for name in ("my-base-model", "my-sft-model"):
        tiny.saved_model(tmp_path / name)
    config = LlamaConfig(
        **{**tiny.CONFIGS["llama"]().to_dict(), "num_labels": 1, "architectures": None}
    )
    LlamaForSequenceClassification(config).save_pretrained(tmp_path / "my-reward-model")
    tiny.tokenizer().save_pretrained(tmp_path / "my-reward-model")
    rows = [{"prompt": row["prompt"], "answer": row["wanted"]} for row in tiny.PROMPTS]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    sft = [{"prompt": row["prompt"], "completion": f" {row['answer']}"} for row in rows]
    (tmp_path / "demonstrations.jsonl").write_text("\n".join(map(json.dumps, sft)))
    pairs = [{"prompt": r["prompt"], "chosen": " w7", "rejected": f" {r['answer']}"} for r in rows]
    (tmp_path / "preferences.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    for language in ("python", "yaml"):
        for code in blocks(ROOT / "README.md", language):
            name = re.match(r"# (\S+\.(?:py|yaml))\n", code)
            if name:
                (tmp_path / name[1]).write_text(code)
    return tmp_path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_examples_run(page: Path, workspace: Path) -> None:
    """The blocks of a page run one after another, as a reader would paste them."""
    names: dict[str, object] = {}
    for code in blocks(page, "python"):
        exec(compile(code, str(page), "exec"), names)


def commands(page: Path) -> list[list[str]]:
    """The `fastppo` commands of a page, without the program's name."""
    return [
        shlex.split(line.removeprefix("$ "))[1:]
        for code in blocks(page, "console")
        for line in code.splitlines()
        if line.startswith("$ ")
    ]


def test_the_readmes_own_run_works_as_printed(workspace: Path, capsys) -> None:
    lines = commands(ROOT / "README.md")
    assert [line[0] for line in lines] == ["train", "report", "sft", "reward", "train", "generate"]
    for line in lines:
        if line[0] == "train" and "--config" not in line:
            line += ["--iterations", "1"]  # as printed but for the default's 100
        assert cli.main(line) == 0, capsys.readouterr().err
    for name in re.findall(r"^\| `([^`]+)`", (ROOT / "README.md").read_text("utf-8"), re.M):
        assert (workspace / "runs" / "mine" / name).exists(), name


@pytest.mark.slow
def test_the_readmes_own_run_works_on_two_processes(workspace: Path) -> None:
    line = next(line for line in commands(ROOT / "README.md") if "--config" in line)
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    done = subprocess.run(
        [*TORCHRUN, "--nproc_per_node", "2", "-m", "fastppo", *line],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("policy  ") == 1, "one process speaks"
    AutoModelForCausalLM.from_pretrained(workspace / "runs" / "mine" / "policy")


@pytest.mark.slow
@pytest.mark.parametrize("command", ["sft", "reward"])
def test_the_readmes_stages_work_on_two_processes(command: str, workspace: Path) -> None:
    line = next(line for line in commands(ROOT / "README.md") if line[0] == command)
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    done = subprocess.run(
        [*TORCHRUN, "--nproc_per_node", "2", "-m", "fastppo", *line],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("model  ") == 1, "one process speaks"


def test_options_of_the_page_on_many_gpus_exist() -> None:
    page = (ROOT / "docs" / "many-gpus.md").read_text("utf-8")
    named = re.findall(r"`(\w+): ", page) + re.findall(r"^\| `(\w+)` \|", page, re.M)
    assert len(named) > 8
    for option in named:
        assert hasattr(PPOConfig(), option), option


@pytest.mark.parametrize("name", ["sft", "reward-model", "generate"])
def test_the_commands_of_a_stages_page_work_as_printed(name: str, workspace: Path, capsys) -> None:
    lines = commands(ROOT / "docs" / f"{name}.md")
    assert len(lines) == 2
    for line in lines:
        assert cli.main(line) == 0, capsys.readouterr().err


def test_the_command_of_the_memory_page_works_as_printed(workspace: Path, capsys) -> None:
    (line,) = commands(ROOT / "docs" / "memory.md")
    assert cli.main(line) == 0, capsys.readouterr().err
    assert "fits 80 GB" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "encode"), [("sft", encode_demonstrations), ("reward-model", encode_comparisons)]
)
def test_every_row_that_a_stages_page_shows_can_be_used(name: str, encode) -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
        "{% if add_generation_prompt %}assistant {% endif %}"
    )
    tokenizer.add_tokens(["2", "+", "4", "5", "four"])  # else all words are one, the unknown
    (code,) = blocks(ROOT / "docs" / f"{name}.md", "json")
    rows = [json.loads(line) for line in code.splitlines()]
    found = encode(rows, tokenizer)
    assert len(found.examples) == len(rows)


@pytest.mark.parametrize(
    ("name", "options"), [("sft", SFTConfig), ("reward-model", RewardModelConfig)]
)
def test_defaults_that_a_stages_page_tells_are_the_defaults(name: str, options) -> None:
    page = (ROOT / "docs" / f"{name}.md").read_text("utf-8")
    table = page[page.index("## The options that matter first") :].split("\n## ")[0]
    found = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", table, re.M)
    assert len(found) > 5
    for option, shown in found:
        default = getattr(options(), option)
        if default is None or isinstance(default, bool):
            assert shown == str(default).lower(), option
        else:
            assert float(shown) == default, option
    for option in re.findall(r"--(\w+)", page.split("## Rows")[1]):
        assert hasattr(options(), option) or option in ("model", "help"), option


def test_the_two_commands_are_what_ci_and_the_demo_test_run() -> None:
    first, second = blocks(ROOT / "README.md", "bash")
    assert first.strip().endswith("&& .venv/bin/fastppo demo")
    assert second.strip().endswith("&& .venv/bin/python -m pytest -q -n auto")
    assert "README.md" in (ROOT / ".ci" / "run").read_text()


def test_options_that_the_docs_name_exist() -> None:
    page = (ROOT / "docs" / "your-own-run.md").read_text("utf-8")
    table = page[page.index("## The options that matter first") : page.index("## As a library")]
    for option, default in re.findall(r"^\| `(\w+)` \| ([^|]+) \|", table, re.M):
        expected = getattr(PPOConfig(), option)
        shown = default.strip().strip("`")
        if expected is None:
            assert shown == "learning_rate"
        else:
            assert shown in (str(expected).lower(), f"{expected:g}", "1e-5"), option
    for option in re.findall(r"--(\w+)", page) + re.findall(r"`(\w+): ", page):
        assert hasattr(PPOConfig(), option), option


def test_every_default_is_on_its_page_with_a_source() -> None:
    page = (ROOT / "docs" / "defaults.md").read_text("utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+) \|$", page, re.M)
    config = PPOConfig()
    assert [name for name, _, _ in rows] == list(PPOConfig().to_dict())
    for name, shown, source in rows:
        default = getattr(config, name)
        if default in ("", (), None):
            wanted = "none"
        elif isinstance(default, tuple):
            wanted = ", ".join(default)
        else:
            wanted = f"{default:g}" if isinstance(default, float) else str(default)
        assert shown == (wanted.lower() if isinstance(default, bool) else wanted), name
        assert source, name


def test_options_of_the_menus_page_exist() -> None:
    page = (ROOT / "docs" / "ppo.md").read_text("utf-8")
    for option in re.findall(r"`(\w+): ", page):
        assert hasattr(PPOConfig(), option), option
    for code in blocks(ROOT / "docs" / "ppo.md", "yaml"):
        PPOConfig(**yaml.safe_load(code))


def test_the_api_page_is_what_the_docstrings_say() -> None:
    """After a change of a public docstring or signature: python docs/make_api.py"""
    make_api = runpy.run_path(str(ROOT / "docs" / "make_api.py"))
    assert make_api["PAGE"].read_text("utf-8") == make_api["page"]()
    on_the_page = [name for names in make_api["GROUPS"].values() for name in names]
    assert sorted(on_the_page) == sorted(fastppo.__all__)


def test_a_docstring_becomes_markdown() -> None:
    prose = runpy.run_path(str(ROOT / "docs" / "make_api.py"))["_prose"]
    docstring = """Does it.

    Args:
        x: [N], the first
            of two.
        y: [N].
        Both in nats.

    Returns:
        (sum, product): a tuple
        of two.

    Raises:
        ValueError: x disagrees
            with y.

    Source: Me 2020.
    """
    assert prose(docstring) == [
        *("Does it.", "", "**Args**", "", "- `x`: [N], the first", "  of two.", "- `y`: [N]."),
        *("", "Both in nats.", "", "**Returns**", "", "(sum, product): a tuple", "of two.", ""),
        *("**Raises**", "", "- `ValueError`: x disagrees", "  with y.", ""),
        "**Source**: Me 2020.",
    ]


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_between_pages_lead_somewhere() -> None:
    pages = [*PAGES, ROOT / "CHANGELOG.md", ROOT / "benchmarks" / "README.md"]
    for page in [*pages, ROOT / "kernels" / "NOTES.md"]:
        text = BLOCK.sub("", page.read_text("utf-8"))
        for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", text):
            if not target.startswith("http"):
                linked = page.parent / target if target else page
                assert linked.exists(), f"{page.name}: {target}"
                assert not anchor or anchor in anchors(linked), f"{page.name}: {target}#{anchor}"


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text("utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "README.md" or f"({page.name})" in index, page.name
