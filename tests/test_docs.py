"""Every command and example of the README and the docs runs as it is printed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import tiny
from transformers import LlamaConfig, LlamaForSequenceClassification

from fastppo import cli
from fastppo.config import PPOConfig

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    return [code for name, code in BLOCK.findall(page.read_text("utf-8")) if name == language]


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the examples speak of, and the examples that are files."""
    import json

    monkeypatch.chdir(tmp_path)
    tiny.saved_model(tmp_path / "my-sft-model")
    config = LlamaConfig(
        **{**tiny.CONFIGS["llama"]().to_dict(), "num_labels": 1, "architectures": None}
    )
    LlamaForSequenceClassification(config).save_pretrained(tmp_path / "my-reward-model")
    tiny.tokenizer().save_pretrained(tmp_path / "my-reward-model")
    rows = [{"prompt": row["prompt"], "answer": row["wanted"]} for row in tiny.PROMPTS]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
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


def test_the_readmes_own_run_works_as_printed(workspace: Path, capsys) -> None:
    lines = [
        line.removeprefix("$ ")
        for code in blocks(ROOT / "README.md", "console")
        for line in code.splitlines()
        if line.startswith("$ ")
    ]
    assert [line.split()[1] for line in lines] == ["train", "report"]
    for line in lines:
        assert cli.main(shlex.split(line)[1:]) == 0, capsys.readouterr().err
    for name in re.findall(r"^\| `([^`]+)`", (ROOT / "README.md").read_text("utf-8"), re.M):
        assert (workspace / "runs" / "mine" / name).exists(), name


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


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text("utf-8")):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"
