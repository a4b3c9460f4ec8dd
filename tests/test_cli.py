"""The command line: help, flags and YAML, error messages, exit codes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import tiny
import torch
from command_line import Folder
from huggingface_hub import ModelCard
from processes import python
from transformers import AutoModelForCausalLM

from fastppo import cli
from fastppo.generate_options import GenerateConfig
from fastppo.parser import COMMANDS, parse
from fastppo.ppo.options.config import PPOConfig
from fastppo.run.options import Options
from fastppo.stages.reward_model import RewardModelConfig
from fastppo.stages.sft import SFTConfig


def _help(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        cli.main([*arguments, "--help"])
    assert stopped.value.code == 0
    return re.sub(r"\s+", " ", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("train", PPOConfig),
        ("sft", SFTConfig),
        ("reward", RewardModelConfig),
        ("generate", GenerateConfig),
    ],
)
def test_help_has_every_option_with_its_default(
    command: str, options: type[Options], capsys
) -> None:
    text = _help(capsys, command).replace(" ", "")  # argparse breaks lines at hyphens
    for field in fields(options):
        default = getattr(options(), field.name)
        typed = str(default).lower() if isinstance(default, bool) else default
        if isinstance(default, tuple):
            typed = ", ".join(map(repr, default))
        shown = f" (default: {typed})" if default not in ("", (), None) else ""
        assert f"--{field.name}" in text
        assert (field.metadata["help"] + shown).replace(" ", "") in text, field.name


@pytest.mark.parametrize(("arguments", "code"), [([], 2), (["help"], 0)])
def test_without_a_command_the_help_lists_them(arguments: list[str], code: int, capsys) -> None:
    assert cli.main(arguments) == code
    text = capsys.readouterr().out
    for command in COMMANDS:
        assert re.search(rf"^ +{command}\b", text, re.M)


PROGRAM = """
import atexit, sys
from fastppo import cli

class Kept:
    def __del__(self, print=print):
        print("the interpreter's end")

kept = Kept()

def main():
    atexit.register(print, "left")
    return 3

cli.main = main
sys.exit(cli.program())
"""


@pytest.mark.parametrize(
    ("ranks", "says"), [("1", ["left", "the interpreter's end"]), ("2", ["left"])]
)
def test_one_of_several_ranks_skips_interpreter_shutdown(ranks: str, says: list[str]) -> None:
    assert python("-c", PROGRAM, code=3, WORLD_SIZE=ranks).stdout.splitlines() == says


def test_flags_and_yaml_mean_the_same(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: m\nprompts: p.jsonl\nrewards: [a.py:f, rm]\nreward_weights: [1, -0.5]\n"
        "learning_rate: 1e-6\nkl_coef: 0\nwhiten_advantages: false\nclip_ratio_high: 0.28\n"
    )
    from_file = parse("train", ["--config", str(file)])
    flags = "--model=m --prompts=p.jsonl --rewards a.py:f rm --reward_weights 1 -0.5 "
    flags += "--learning_rate=1e-6 --kl_coef=0 --whiten_advantages=false --clip-ratio-high=0.28"
    assert from_file == parse("train", flags.split())
    assert from_file.learning_rate == 1e-6
    assert from_file.reward_weights == (1.0, -0.5)
    assert from_file.whiten_advantages is False
    assert parse("train", ["--config", str(file), "--kl_coef", "0.5"]).kl_coef == 0.5
    from_file.save(file)
    assert parse("train", ["--config", str(file)]) == from_file


def test_an_environment_can_replace_rewards() -> None:
    flags = ["--model", "m", "--prompts", "p.jsonl", "--environment", "e.py:Game"]
    assert parse("train", flags).rewards == ()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["train", "--model", "m", "--prompts", "p"], "--rewards is missing"),
        (["sft", "--speed", "9"], "fastppo sft: error: no option '--speed'"),
        (["demo", "--speed", "9"], "unrecognized arguments: --speed 9"),
        (["trian"], "invalid choice: 'trian'"),
    ],
)
def test_a_wrong_flag_is_an_error(arguments: list[str], says: str, capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2
    assert says in capsys.readouterr().err


def test_a_wrong_value_of_a_flag_is_an_error_with_the_choices(capsys) -> None:
    assert cli.main(["train", "--kl_estimator", "k9"]) == 2
    said = capsys.readouterr().err
    assert "kl_estimator must be one of k1, " in said
    assert "default" not in said


def test_a_wrong_value_in_yaml_is_an_error_with_the_file(tmp_path: Path, capsys) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("seed: many")
    assert cli.main(["train", "--config", str(file)]) == 2
    assert f"{file}: seed must be an integer, got 'many'" in capsys.readouterr().err


def test_flags_may_have_dashes_and_no_value() -> None:
    flags = "--model m --data d --learning-rate 1e-3 --gradient-checkpointing --resume false"
    config = parse("sft", flags.split())
    assert config.learning_rate == 1e-3
    assert config.gradient_checkpointing
    assert not config.resume


def test_a_flag_may_unset_an_option_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: m\nprompts: p\nrewards: [r]\nlam: 0.5\nobjective: cispo\nwarn_if: [kl > 5]\n"
        "value_model: critic\n"
    )
    names = ("lam", "objective", "warn_if", "value_model")
    flags = [text for name in names for text in (f"--{name}", "default")]
    unset = parse("train", ["--config", str(file), *flags])
    assert unset == parse("train", ["--model", "m", "--prompts", "p", "--rewards", "r"])
    assert parse("train", ["--config", str(file)]).lam == 0.5


def test_a_report_is_written_to_the_run_or_to_a_file(tmp_path: Path, capsys) -> None:
    run, mine = tmp_path / "run", tmp_path / "pages" / "mine.html"
    for directory in (run, mine.parent):
        directory.mkdir()
    (run / "metrics.jsonl").write_text('{"iteration": 0, "reward": 1.0}\n')
    assert cli.main(["report", str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    assert (run / "report.html").exists()
    assert cli.main(["report", str(run), "--output", str(mine)]) == 0
    assert 'href="../run/metrics.jsonl"' in mine.read_text()


def test_a_wrong_option_of_the_demo_is_an_error_before_its_first_stage(
    tmp_path: Path, capsys
) -> None:
    assert cli.main(["demo", "--iterations", "0", "--output_dir", str(tmp_path / "demo")]) == 2
    assert "iterations must be >= 1, got 0" in capsys.readouterr().err
    assert not (tmp_path / "demo").exists()
    (tmp_path / "demo" / "ppo").mkdir(parents=True)
    assert cli.main(["demo", "--device", "cuda:99", "--output_dir", str(tmp_path / "demo")]) == 2
    assert (tmp_path / "demo" / "ppo").exists(), "an earlier demo's run is still there"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_an_error(tmp_path: Path, capsys) -> None:
    flags = ["--models", tiny.saved_model(tmp_path / "sft"), "--prompt", "w1"]
    assert cli.main(["generate", *flags, "--device", "cuda"]) == 2
    assert f"device=cuda: torch {torch.__version__} sees 0 GPUs here" in capsys.readouterr().err


def test_a_report_of_another_stage_is_an_error(tmp_path: Path, capsys) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    assert cli.main(["report", str(tmp_path)]) == 2
    assert "is not a PPO run, and only those have a report" in capsys.readouterr().err


# ------------------------------------------------------------------------- checks before a run


REWARDS = """
import json

def right(prompts, completions, wanted):
    return [float(word in text) for word, text in zip(wanted, completions)]

def parses(prompts, completions):
    return [json.loads(text) for text in completions]
"""


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Options of a run and their files."""
    monkeypatch.chdir(tmp_path)
    tiny.saved_model(tmp_path / "sft")
    Path("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in tiny.PROMPTS))
    Path("rewards.py").write_text(REWARDS)
    return {
        "model": "sft",
        "prompts": "prompts.jsonl",
        "rewards": "rewards.py:right",
        "max_new_tokens": "8",
    }


def _flags(options: dict[str, str]) -> list[str]:
    return [text for name, value in options.items() for text in (f"--{name}", value)]


NOWHERE = "runs/absent: there is no such"
MISSING = [
    ({"model": "runs/absent"}, f"model {NOWHERE}"),
    ({"value_model": "critic", "critic_model": "a.safetensors"}, "critic_model a.safetensors: "),
    ({"prompts": "absent.jsonl"}, "absent.jsonl: no such file"),
    ({"rewards": "runs/absent"}, f"reward {NOWHERE}"),
    ({"rewards": "absent.py:right"}, "reward absent.py:right: there is no file absent.py"),
    ({"environment": "chat:absent.py:play"}, "environment chat:absent.py:play: there is no file"),
    ({"rollout": "absent.py:Engine"}, "rollout absent.py:Engine: there is no file absent.py"),
    ({"objective": "absent.py:f"}, "objective absent.py:f: there is no file absent.py"),
    ({"advantage": "absent.py:f"}, "advantage absent.py:f: there is no file absent.py"),
    ({"optimizer": "absent.py:f"}, "optimizer absent.py:f: there is no file absent.py"),
    ({"output_dir": "begun"}, "begun holds a run already: resume it"),
    ({"output_dir": "prompts.jsonl"}, "output_dir prompts.jsonl cannot be created"),
    ({"kl_coef": "-1"}, "kl_coef must be >= 0, got -1"),
]
"""Options, and the message of `fastppo train`."""


def test_options_and_paths_are_checked_before_torch_is_imported(inputs: dict[str, str]) -> None:
    """Importing torch fails in this process."""
    Path("begun").mkdir()
    Path("begun/metrics.jsonl").write_text('{"iteration": 0}\n')
    commands = [["train", *_flags(inputs | options)] for options, _ in MISSING]
    others = {
        ("sft", "--model", "sft", "--data", "absent.jsonl"): "absent.jsonl: no such file",
        ("generate", "--models", "runs/absent", "--prompt", "w1"): f"models {NOWHERE}",
        ("report", "runs/absent"): "runs/absent: no such directory",
        ("export", "runs/absent", "out"): "runs/absent is not a checkpoint",
    }
    commands += [list(command) for command in others]
    code = (
        "import sys, json; sys.modules['torch'] = None\n"
        "from fastppo import cli\n"
        "codes = [cli.main(arguments) for arguments in json.loads(sys.argv[1])]\n"
        "print(codes, {'transformers', 'numpy'} & sys.modules.keys())"
    )
    done = python("-c", code, json.dumps(commands), cwd=Path())
    assert done.stdout.splitlines()[-1] == f"{[2] * len(commands)} set()"
    wanted = [says for _, says in MISSING] + [*others.values()]
    for line, says in zip(done.stderr.splitlines(), wanted, strict=True):
        assert says in line


def test_the_first_line_comes_before_torch_is_imported(inputs: dict[str, str]) -> None:
    """Importing torch, which takes seconds, fails in this process."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from fastppo import cli\n"
        "for command in ('check', 'train'): cli.main([command, *sys.argv[1:]])\n"
        "cli.main(['generate', '--models', 'sft', '--prompt', 'w1'])\n"
        "cli.main(['demo'])"
    )
    done = python("-c", code, *_flags(inputs), cwd=Path())
    lines = [line for line in done.stderr.splitlines() if line.startswith("loading")]
    assert lines == ["loading sft…"] * 3 + ["loading torch and transformers…"]


def test_a_path_in_yaml_is_relative_to_the_working_directory(inputs, capsys) -> None:
    Path("configs").mkdir()
    Path("configs/beside.jsonl").write_text('{"prompt": "w1", "wanted": "w7"}\n')
    file = Path("configs/run.yaml")
    file.write_text(
        "model: sft\nprompts: prompts.jsonl\nrewards: [rewards.py:right]\nmax_new_tokens: 8\n"
    )
    assert cli.main(["check", "--config", str(file)]) == 0
    assert cli.main(["check", "--config", str(file), "--prompts", "beside.jsonl"]) == 2
    said = capsys.readouterr().err
    assert "relative to the working directory, and configs/beside.jsonl is there" in said


def test_check_shows_the_run_without_loading_the_model(inputs, capsys) -> None:
    (Path("sft") / "model.safetensors").write_bytes(b"")  # of which nothing loads
    assert cli.main(["check", *_flags(inputs | {"kl_coef": "0.1"})]) == 0
    shown = capsys.readouterr().out
    assert f"prompts.jsonl, {len(tiny.PROMPTS)} rows with prompt, wanted" in shown
    assert f"to {len(tiny.PROMPTS)} prompts, with repetition" in shown
    assert "LlamaForCausalLM" in shown
    assert "kl_coef=0.1" in shown
    assert not Path("runs").exists()


def test_check_mentions_options_without_an_effect(inputs, capsys) -> None:
    assert cli.main(["check", *_flags(inputs | {"lora_alpha": "8", "eval_interval": "3"})]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for name, needs in (("lora_alpha", "lora_rank"), ("eval_interval", "eval_prompts")):
        assert f"set, but not used: {name}, which needs {needs}" in shown


def test_check_mentions_an_existing_run_and_writes_nothing(inputs, capsys) -> None:
    run = Path("begun")
    (run / "checkpoint-000002").mkdir(parents=True)
    (run / "metrics.jsonl").write_text('{"iteration": 0}\n')
    before = {path: path.stat().st_mtime_ns for path in (run, *run.iterdir())}
    assert cli.main(["check", *_flags(inputs | {"output_dir": "begun"}), "--resume"]) == 0
    shown = capsys.readouterr().out
    assert "resume=True" in shown
    assert "holds a run already" not in shown
    assert cli.main(["check", *_flags(inputs | {"output_dir": "begun"})]) == 0
    assert "it holds a run already: resume it, or" in " ".join(capsys.readouterr().out.split())
    assert cli.main(["check", *_flags(inputs | {"output_dir": "prompts.jsonl"})]) == 2
    assert {path: path.stat().st_mtime_ns for path in (run, *run.iterdir())} == before


def test_a_reward_is_tried_before_a_model_is_loaded(inputs, capsys) -> None:
    (Path("sft") / "model.safetensors").write_bytes(b"")  # of which nothing loads
    options = inputs | {"rewards": "rewards.py:parses"}
    assert cli.main(["train", *_flags(options), "--device", "cpu"]) == 1
    said = capsys.readouterr().err
    assert "rewards.py, line 8, in" in said
    assert "expected parses(prompts, completions, **columns)" in said


def test_export_writes_the_best_and_the_last_policy(tmp_path: Path, capsys) -> None:
    """A run or a checkpoint as a model is an error with the path of its policy."""
    folder = Folder(tmp_path)
    folder.write_reward("return [1.0 if calls == 1 else i % 2 for i in range(len(completions))]")
    assert cli.main(folder.flags(checkpoint_best="reward", iterations=4, learning_rate=0.1)) == 0
    assert "policy-best is the policy of checkpoint-000001" in capsys.readouterr().err
    best = (folder.run / "policy-best" / "model.safetensors").read_bytes()
    last = (folder.run / "policy" / "model.safetensors").read_bytes()
    assert best != last
    checkpoint = folder.run / "checkpoint-000001"
    for path, written in ((checkpoint, best), (folder.run / "checkpoint-000004", last)):
        out = tmp_path / f"exported-{path.name}"
        assert cli.main(["export", str(path), str(out)]) == 0
        assert (out / "model.safetensors").read_bytes() == written
    # Each directory is ready for `hf upload`: a model of transformers and a card of its iterations.
    for path, iteration in (
        (folder.run / "policy", 4),
        (folder.run / "policy-best", 1),
        (tmp_path / "exported-checkpoint-000001", 1),
    ):
        AutoModelForCausalLM.from_pretrained(path)
        card = ModelCard.load(path / "README.md")
        assert card.data.library_name == "transformers"
        assert f"\n| {iteration} | " in card.text
        assert f"\n| {iteration + 1} | " not in card.text
    capsys.readouterr()
    assert cli.main(["export", str(checkpoint), str(folder.run / "checkpoint-000004")]) == 2
    assert "exists already" in capsys.readouterr().err
    out = folder.run / "policy-000001"
    for path, says in (
        (checkpoint, f"is a checkpoint; export its policy: fastppo export {checkpoint} {out}"),
        (folder.run, f"its policy is {folder.run / 'policy'}"),
    ):
        assert cli.main(folder.flags(model=path, output_dir=tmp_path / "next")) == 2
        assert says in capsys.readouterr().err


def test_a_checkpoint_is_exported_from_another_folder(
    folder: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    """The run names its model by a path relative to where it was trained."""
    monkeypatch.chdir(tmp_path)
    flags = folder.flags(model="sft", output_dir="runs/ppo", iterations=1)
    assert cli.main(flags) == 0
    checkpoint = tmp_path / "runs" / "ppo" / "checkpoint-000001"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert cli.main(["export", str(checkpoint), "policy"]) == 0
    assert (tmp_path / "elsewhere" / "policy" / "config.json").exists()
    (tmp_path / "sft").rename(tmp_path / "moved")
    capsys.readouterr()
    assert cli.main(["export", str(checkpoint), "again"]) == 2
    said = capsys.readouterr().err
    assert "`model`" in said
    assert str(checkpoint) in said


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_a_checkpoint_generates_as_its_exported_policy(
    lora_rank: int, tmp_path: Path, capsys
) -> None:
    folder = Folder(tmp_path)
    assert cli.main(folder.flags(learning_rate=0.1, lora_rank=lora_rank)) == 0
    first, last = (folder.run / f"checkpoint-00000{number}" for number in (1, 2))
    assert cli.main(["export", str(last), str(tmp_path / "last")]) == 0

    def written_by(model: Path) -> list[str]:
        capsys.readouterr()
        flags = f"--prompt w1 --device cpu --temperature 0 --max_new_tokens 8 --models {model}"
        assert cli.main(["generate", *flags.split()]) == 0
        return re.findall(r"\bw\d+", capsys.readouterr().out)

    assert written_by(last) == written_by(tmp_path / "last")
    assert written_by(last) != written_by(first)
    assert written_by(last) != written_by(Path(folder.model))


def test_help_shows_the_options_of_a_word(capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["train", "--help", "kl"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    assert "KL to the reference" in shown
    for name in ("kl_coef", "kl_target", "early_stop_kl", "step_kl"):
        assert f"--{name} " in shown
    assert "--lam " not in shown
    with pytest.raises(SystemExit):
        cli.main(["train", "--help", "Truncated"])  # in help texts only
    shown = capsys.readouterr().out
    assert {"missing_eos_penalty", "truncated"} <= set(re.findall(r"--(\w+) ", shown))
    with pytest.raises(SystemExit):
        cli.main(["train", "--help", "nonsense"])
    assert "the sections are: Policy, Weights and adapters" in capsys.readouterr().err


def test_the_recipes_are_listed_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from fastppo import cli; sys.exit(cli.main(['recipe']))"
    )
    done = python("-c", code, COLUMNS="80")
    assert "2.8" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


CHATTY = """
from tqdm.auto import tqdm

def count(prompts, completions, **columns):
    return [text.split().count("w7") / 8 for text in tqdm(completions, "another library's bar")]
"""


def test_the_log_of_a_run_without_a_terminal(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.reward.write_text(CHATTY)
    more = {"iterations": 2, "eval_prompts": str(folder.prompts), "eval_interval": 1}
    done = subprocess.run(
        [sys.executable, "-m", "fastppo", *folder.flags(**more)],
        env={name: value for name, value in os.environ.items() if name not in cli.BARS},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "%|" not in done.stderr
    wanted = [
        "device   ",
        f"model    {folder.model}: ",
        f"prompts  {len(tiny.PROMPTS)} of {folder.prompts}; {len(tiny.PROMPTS)} held out",
        "rewards  count",
        "run      iterations 1 to 2, ",
        f"writes   {folder.run}",
        "before training: held out: reward ",
        "iteration 1: held out: reward ",
        "PPO 1/2",
        "iteration 2: held out: reward ",
        "report  ",
    ]
    lines = iter(done.stderr.splitlines())
    for beginning in wanted:
        assert any(line.startswith(beginning) for line in lines), (beginning, done.stderr)
