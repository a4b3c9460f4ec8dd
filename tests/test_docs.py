"""Every command and example in the README and the docs runs as printed."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import re
import runpy
import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import torch
import yaml
from processes import ROOT, torchrun
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForSequenceClassification

import fastppo
from benchmarks import __main__ as bench_command
from fastppo import cli, parser
from fastppo.ppo.options.config import PPOConfig
from fastppo.stages.demonstrations import encode_demonstrations
from fastppo.stages.preferences import encode_comparisons
from fastppo.stages.reward_model import RewardModelConfig
from fastppo.stages.sft import SFTConfig

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
EVERY_PAGE = [*PAGES, ROOT / "benchmarks" / "README.md", ROOT / "kernels" / "NOTES.md"]
every_page = pytest.mark.parametrize("page", EVERY_PAGE, ids=lambda p: str(p.relative_to(ROOT)))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
OWN_RUN = ROOT / "docs" / "your-own-run.md"
MODEL_OF_THE_README = "HuggingFaceTB/SmolLM2-135M"


def blocks(page: Path, language: str) -> list[str]:
    return [code for name, code in BLOCK.findall(page.read_text("utf-8")) if name == language]


def commands(page: Path) -> list[list[str]]:
    """The `fastppo` commands of a page, without the program's name."""
    return [
        shlex.split(line.removeprefix("$ "))[1:]
        for code in blocks(page, "console")
        for line in code.splitlines()
        if line.startswith("$ ")
    ]


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the models, data and files that the examples name."""
    monkeypatch.chdir(tmp_path)
    for name in ("my-base-model", "my-sft-model", MODEL_OF_THE_README):
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
    write_files_of(OWN_RUN, tmp_path)
    return tmp_path


def write_files_of(page: Path, folder: Path) -> None:
    """Write the blocks that start with a file name, such as `# reward.py`, to these files."""
    for language in ("python", "yaml"):
        for code in blocks(page, language):
            name = re.match(r"# (\S+\.(?:py|yaml))\n", code)
            if name:
                (folder / name[1]).write_text(code)


# --------------------------------------------------------------------------- examples and commands


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_examples_run(page: Path, workspace: Path) -> None:
    """The blocks of a page run in order, as if pasted one by one."""
    names: dict[str, object] = {}
    for code in blocks(page, "python"):
        exec(compile(code, str(page), "exec"), names)


def test_the_soft_length_penalty_is_dapos() -> None:
    """Yu et al. 2025, eq. 13, with a limit of 4096 tokens and a buffer of 1024."""
    names: dict[str, Callable[..., object]] = {}
    for code in blocks(ROOT / "docs" / "reasoning.md", "python"):
        exec(code, names)
    lengths = [1, 3072, 3073, 3584, 4096]
    paid = names["overlong"]([""] * 5, [""] * 5, completion_ids=[[0] * n for n in lengths])
    assert paid == [0.0, 0.0, -1 / 1024, -0.5, -1.0]


def test_the_readmes_diff_replaces_a_loss_by_the_same_loss() -> None:
    (code,) = blocks(ROOT / "README.md", "diff")
    before, after = (
        "".join(line[1:] for line in code.splitlines(keepends=True) if line[0] in kept)
        for kept in ("- ", "+ ")
    )
    torch.manual_seed(0)
    results = []
    for version in (before, after):
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(2, 5, 11, generator=generator, requires_grad=True)
        tokens = torch.randint(11, (2, 5), generator=generator)
        names = {
            "torch": torch,
            "fastppo": fastppo,
            "logits": logits,
            "tokens": tokens,
            "old_logprobs": fastppo.token_logprobs(logits.detach(), tokens)
            + 0.3 * torch.randn(2, 5, generator=generator),
            "advantages": torch.randn(2, 5, generator=generator),
            "mask": torch.arange(5) < torch.tensor([[5], [3]]),
        }
        exec(version, names)
        results.append((names["loss"].detach(), logits.grad))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)  # fp32 sums of 8 tokens


@pytest.mark.parametrize("name", ["your-own-run", "sft", "reward-model"])
def test_the_commands_of_a_page_run_as_printed(name: str, workspace: Path, capsys) -> None:
    for line in commands(ROOT / "docs" / f"{name}.md"):
        if line[0] == "train" and "--config" not in line:
            line += ["--iterations", "1"]  # instead of the default of 100
        assert cli.main(line) == 0, capsys.readouterr().err
    if name == "your-own-run":
        for file in re.findall(r"^\| `([^`]+/|[^`]+\.\w+)`", OWN_RUN.read_text("utf-8"), re.M):
            assert (workspace / "runs" / "mine" / file).exists(), file


def on_two_processes(line: list[str]) -> str:
    """Run a command under torchrun and return its output."""
    done = torchrun(2, "-m", "fastppo", *line)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_the_commands_of_the_docs_work_on_two_processes(workspace: Path) -> None:
    """The reward model starts from the model that SFT saved."""
    for command, speaks in (("sft", "model  "), ("reward", "model  "), ("train", "policy  ")):
        line = next(line for line in commands(OWN_RUN) if line[0] == command)
        assert on_two_processes(line).count(speaks) == 1, "one process speaks"
    AutoModelForCausalLM.from_pretrained(workspace / "runs" / "mine" / "policy")


def test_the_ten_minutes_run_as_printed(workspace: Path, capsys) -> None:
    """The example runs as printed, except for a tiny model and fewer iterations."""
    page = ROOT / "docs" / "ten-minutes.md"
    write_files_of(page, workspace)
    tiny.saved_model(workspace / "smollm2" / "model")
    runpy.run_path("prompts.py")
    lines = [line for line in commands(page) if line[0] in COMMANDS and line[0] != "recipe"]
    assert [line[0] for line in lines] == ["check", "train", "report", "generate"]
    for line in lines:
        more = ["--iterations", "1", "--eval_interval", "1"] if line[0] == "train" else []
        assert cli.main(line + more) == 0, capsys.readouterr().err
    assert (workspace / "runs" / "s" / "eval_samples.jsonl").read_text()
    reward = runpy.run_path("reward.py")["words_with_s"]
    assert reward([""], [" a Sea of salt"]) == [[(6, 0.1), (14, 0.1)]]


def test_the_memory_plan_of_the_docs_names_every_part(workspace: Path, capsys) -> None:
    (line,) = commands(ROOT / "docs" / "gpus.md")
    assert cli.main(line) == 0, capsys.readouterr().err
    shown = capsys.readouterr().out
    assert "fits 80 GB" in shown
    page = (ROOT / "docs" / "gpus.md").read_text("utf-8")
    *parts, total = re.findall(r"^│ (\S.*?) +│", shown, re.M)
    assert total == "total"
    for part in parts:
        assert f"\n| {part} | " in page


@pytest.mark.parametrize(
    ("name", "encode"), [("sft", encode_demonstrations), ("reward-model", encode_comparisons)]
)
def test_example_rows_of_a_stage_can_be_encoded(name: str, encode) -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
        "{% if add_generation_prompt %}assistant {% endif %}"
    )
    tokenizer.add_tokens(["2", "+", "4", "5", "four"])  # words not in its vocabulary
    code = "".join(blocks(ROOT / "docs" / f"{name}.md", "json"))
    rows = [json.loads(line) for line in code.splitlines()]
    assert len(encode(rows, tokenizer).examples) == len(rows)


# ----------------------------------------------------------------------------------- the options

MAIN_OPTIONS = "## Main options"


def shows(default: object) -> set[str]:
    """Return the ways in which a page may print a default."""
    if default in ("", (), None):
        return {"none", "null"}
    if isinstance(default, bool):
        return {str(default).lower()}
    if isinstance(default, tuple):
        return {", ".join(map(str, default))}
    if isinstance(default, float):
        return {f"{default:g}", str(default)}
    return {str(default)}


@pytest.mark.parametrize(
    ("name", "options", "least", "end"),
    [
        ("sft", SFTConfig, 6, "\n## "),
        ("reward-model", RewardModelConfig, 6, "\n## "),
        ("your-own-run", PPOConfig, 6, "\n## As a library"),
        ("defaults", PPOConfig, 6, ""),
    ],
)
def test_defaults_in_a_table_are_the_defaults_of_the_code(
    name: str, options: type, least: int, end: str
) -> None:
    page = (ROOT / "docs" / f"{name}.md").read_text("utf-8")
    table = page[page.index(MAIN_OPTIONS) :] if MAIN_OPTIONS in page else page
    if end:
        table = table.split(end)[0]
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", table, re.M)
    assert len(rows) >= least
    for option, shown in rows:
        default = getattr(options(), option)
        shown = shown.strip("`")
        same_number = isinstance(default, float) and float(shown) == default
        is_another_option = default is None and hasattr(options(), shown)
        assert same_number or is_another_option or shown in shows(default), (option, default)


def test_every_default_is_on_its_page_with_a_source() -> None:
    page = (ROOT / "docs" / "defaults.md").read_text("utf-8")
    rows = re.findall(r"^\| `(\w+)` \| .+? \| (.+) \|$", page, re.M)
    assert [name for name, _ in rows] == list(PPOConfig().to_dict())
    assert all(source for _, source in rows)


OTHER_FLAGS = {"--help", "--rdzv", "--master_port", "--master_addr", "--node_rank"}
"""Flags of every command, and of torchrun."""


@pytest.mark.parametrize("name", ["gpus", "ppo", "your-own-run", "sft", "reward-model"])
def test_options_and_flags_of_a_page_exist(name: str) -> None:
    page = (ROOT / "docs" / f"{name}.md").read_text("utf-8")
    assert set(re.findall(r"`(\w+): ", page)) <= PPOConfig().to_dict().keys()
    flags = set().union(*map(flags_of, ("train", "sft", "reward", "generate", "plan")))
    assert set(re.findall(r"--\w+", BLOCK.sub("", page))) <= flags | OTHER_FLAGS


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_between_pages_resolve() -> None:
    for page in [*EVERY_PAGE, ROOT / "CHANGELOG.md"]:
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


# ------------------------------------------------------------------------ every block of a page

COMMANDS = (*parser.COMMANDS,)


@functools.cache
def flags_of(command: str) -> set[str]:
    """Return the flags in `fastppo COMMAND --help`; for bench, those of the suite."""
    if command == "bench":
        text = bench_command.build_parser().format_help()
    else:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), pytest.raises(SystemExit, match="0"):
            cli.main([command, "--help"])
        text = printed.getvalue()
    return set(re.findall(r"--[a-z]\w+", text))


def check_flags(code: str) -> None:
    """Check the flags of `fastppo …`, also when torchrun, srun or a path starts it."""
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.split(line.removeprefix("$ "), comments=True)
        for place, word in enumerate(words[:-1]):
            command = words[place + 1]
            if word.split("/")[-1] == "fastppo" and command in COMMANDS:
                known = flags_of(command) | (flags_of("train") if command == "recipe" else set())
                flags = {word.split("=")[0] for word in words[place:] if word.startswith("--")}
                assert flags <= known, line


def check_imports(code: str) -> None:
    """Check the imports from fastppo in a fragment that does not run by itself."""
    lines = re.findall(r"^from (fastppo[\w.]*) import (\([^)]*\)|[^#\n]*)", code, re.M)
    for module, names in lines:
        path = ROOT / module.replace(".", "/")
        file = path.with_suffix(".py")
        text = file.read_text() if file.exists() else ""
        for name in re.findall(r"\w+", names):
            is_defined = re.search(rf"^(class|def) {name}\b|^{name} =", text, re.M)
            assert is_defined or (path / f"{name}.py").exists(), f"{module}.{name}"


def check_options(code: str) -> None:
    assert set(yaml.safe_load(code)) <= PPOConfig().to_dict().keys()


def check_rows(code: str) -> None:
    assert all(isinstance(json.loads(line), dict) for line in code.splitlines())


CHECKS: dict[str, Callable[[str], None]] = {
    "": lambda code: None,
    "python": lambda code: None,  # test_python_examples_run
    "diff": lambda code: None,  # test_the_readmes_diff_replaces_a_loss_by_the_same_loss
    "py": check_imports,
    "console": check_flags,
    "bash": check_flags,
    "yaml": check_options,
    "json": check_rows,
    "toml": lambda code: None if tomllib.loads(code) else pytest.fail(code),
}
"""By language of the block."""


@every_page
def test_every_block_of_a_page_is_checked(page: Path) -> None:
    for language, code in BLOCK.findall(page.read_text("utf-8")):
        CHECKS[language](code)


@every_page
def test_files_named_on_a_page_exist(page: Path) -> None:
    text = page.read_text("utf-8")
    top = "fastppo|fastppo_kernels|kernels|tests|docs|examples|benchmarks"
    for name in re.findall(rf"`(?:python |bash )?((?:{top})/[\w./-]+\.[a-z]+)\b", text):
        places = [ROOT / name, ROOT / "kernels" / name]
        assert any(place.exists() for place in places), f"{page.name}: {name}"


def test_the_folders_of_the_contributing_page_are_the_folders() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    named = set(re.findall(r"`(fastppo/\w+)/`", page))
    packages = (ROOT / "fastppo").glob("*/__init__.py")
    assert named == {f"fastppo/{package.parent.name}" for package in packages}


# -------------------------------------------------------------------- pictures, site, notebook


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason='pip install -e ".[docs]"')
    runpy.run_path(str(ROOT / "docs" / "make_site.py"))["build"](tmp_path / "site")
    page = (tmp_path / "site" / "docs" / "ppo.html").read_text()
    assert "importance_cap" in page
    assert 'href="definitions.html' in page
    assert "fonts.googleapis" not in page
    assert "site.css" in page


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path, monkeypatch) -> None:
    nbclient = pytest.importorskip("nbclient", reason='pip install -e ".[docs]"')
    pytest.importorskip("ipykernel", reason='pip install -e ".[docs]"')
    import nbformat

    here = [str(ROOT), str(ROOT / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(here))
    notebook = nbformat.read(ROOT / "docs" / "first_run.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3").execute(cwd=tmp_path)
    printed = json.dumps([cell.get("outputs", []) for cell in notebook.cells])
    assert "nats per token" in printed
    assert "held-out reward" in printed


def test_the_saved_notebook_is_one_complete_run() -> None:
    text = (ROOT / "docs" / "first_run.ipynb").read_text("utf-8")
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert "held-out reward" in text
    assert "Traceback" not in text
    assert not re.search(r"/(home|root|tmp|work)/", text), "an absolute path"
