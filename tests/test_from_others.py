"""The pages for users of TRL, verl and OpenRLHF name the options and defaults of the code."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import tiny
import yaml

from fastppo import cli
from fastppo.other_names import ANSWERS, OPTIONS, WITHOUT
from fastppo.ppo.options.config import PPOConfig
from fastppo.run.options import read_yaml

ROOT = Path(__file__).resolve().parents[1]
PAGES = ["from-verl.md", "from-openrlhf.md"]
OURS = {field.name for field in fields(PPOConfig)}
NEEDS_VERL = "expected verl==0.9.1, installed as in benchmarks/README.md"
NUMBER = re.compile(r"^-?[\d.]+(e[-+]?\d+)?$")


def rows(page: str, heading: str) -> list[list[str]]:
    """Return the cells of the table under a heading, without its header."""
    section = (ROOT / "docs" / page).read_text("utf-8").split(f"## {heading}\n")[1]
    lines = [line for line in section.split("\n## ")[0].splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


@pytest.mark.parametrize("page", PAGES)
def test_the_page_has_our_options_with_their_defaults(page: str) -> None:
    defaults = PPOConfig().to_dict()
    count = 0
    for _, here, _, shown in rows(page, "Options"):
        names = re.findall(r"`(\w+)`", here)
        assert set(names) <= OURS, here
        for name, value in zip(names, shown.split(", "), strict=False):
            if "×" in here or "/" in here or value == "required":
                continue
            default = defaults[name]
            if NUMBER.match(value):
                assert float(value) == default, here
            elif value in ("true", "false"):
                assert (value == "true") == default, here
            else:
                assert value == ("none" if default in (None, "", ()) else default), here
            count += 1
    assert count > 20
    for _, _, _, setting in rows(page, "Silent differences"):
        assert set(re.findall(r"`(\w+)", setting)) <= OURS, setting
    text = (ROOT / "docs" / page).read_text("utf-8")
    (command,) = re.findall(r"^\$ (fastppo train .*)$", text, re.M)
    flags = [word.removeprefix("--") for word in shlex.split(command) if word.startswith("--")]
    assert len(flags) > 8
    assert set(flags) <= OURS


def test_verl_accepts_the_command_of_its_page(tmp_path: Path) -> None:
    """Compose it with verl's configs and run the checks of verl's trainer."""
    pytest.importorskip("requests", reason="Ray imports requests and does not ask for it")
    verl = pytest.importorskip("verl", reason=NEEDS_VERL)
    hydra = pytest.importorskip("hydra", reason=NEEDS_VERL)
    checks = pytest.importorskip("verl.utils.config")
    page = (ROOT / "docs" / "from-verl.md").read_text("utf-8").split("## Move a run\n")[1]
    command = page.split("```bash\n")[1].split("```")[0]
    command = command.replace("my-sft-model", tiny.saved_model(tmp_path / "model"))
    overrides = [word for word in shlex.split(command.replace("\\\n", " ")) if "=" in word]
    assert len(overrides) > 10
    configs = Path(verl.__file__).parent / "trainer" / "config"
    with hydra.initialize_config_dir(str(configs), version_base=None):
        config = hydra.compose("ppo_trainer", overrides)
    assert config.actor_rollout_ref.rollout.name is not None
    checks.validate_config(config, use_reference_policy=True, use_critic=True)


def test_the_page_for_trl_has_our_options_with_their_defaults() -> None:
    defaults = PPOConfig().to_dict()
    count = 0
    for row in rows("from-trl.md", "Options"):
        names = [name for name in re.findall(r"`(\w+)`", row[1]) if name in OURS]
        shown_defaults = re.split(r" and |, ", row[3])
        for name, shown in zip(names, shown_defaults, strict=False):
            if NUMBER.match(shown) and len(names) == len(shown_defaults):
                assert float(shown) == defaults[name], row
                count += 1
            elif shown in ("true", "false"):
                assert (shown == "true") == defaults[name], row
                count += 1
    assert count >= 20


def _quoted(cell: str) -> set[str]:
    """Return the words in backticks."""
    return {word for text in re.findall(r"`([^`]*)`", cell) for word in re.findall(r"\w+", text)}


def test_other_names_suggest_the_options_of_the_pages() -> None:
    page: dict[str, set[str]] = {}
    tables = [("from-trl.md", "Arguments of the script")]
    tables += [(name, "Options") for name in ("from-trl.md", *PAGES)]
    tables += [("from-trl.md", "Options of GRPOConfig")]
    for name, heading in tables:
        for row in rows(name, heading):
            for theirs in _quoted(row[0]):
                page.setdefault(theirs, set()).update(_quoted(row[1]) & OURS)
    page["target_kl"].add("early_stop_kl")  # its meaning in CleanRL and Stable-Baselines3
    for theirs, ours in OPTIONS.items():
        assert set(ours) & OURS <= page[theirs], theirs
    for heading in ("Options", "Options of GRPOConfig"):
        for row in rows("from-trl.md", heading):
            names = _quoted(row[0]) - OURS
            if row[1].startswith("`"):
                assert names <= OPTIONS.keys(), row


def test_an_option_without_a_counterpart_gets_no_suggestion() -> None:
    none = set()
    for heading in ("Options", "Options of GRPOConfig"):
        for row in rows("from-trl.md", heading):
            if row[1].startswith(("none", "derived")):
                none |= _quoted(row[0]) - OPTIONS.keys()
    assert len(none) > 40
    of_transformers = {"local_rank", "optim_target_modules"}
    assert none | ANSWERS.keys() >= WITHOUT - of_transformers
    for name in (none | of_transformers) - ANSWERS.keys():
        assert PPOConfig.unknown(name) == f"no option {name!r}"


def test_an_option_that_is_not_needed_is_answered_with_the_reason(capsys) -> None:
    named = _quoted((ROOT / "docs" / "from-trl.md").read_text("utf-8"))
    for name, answer in ANSWERS.items():
        assert name in named
        assert PPOConfig.unknown(name) == f"no option {name!r}: {answer}"
    with pytest.raises(ValueError, match=r"lr_schedule.*constant, with warmup_steps"):
        PPOConfig(lr_schedule="constant_with_warmup")
    assert PPOConfig(report_to="none") == PPOConfig(report_to=["none"]) == PPOConfig()


def test_an_unknown_flag_of_another_project_is_answered_with_ours(capsys) -> None:
    flags = ["--per-device-train-batch-size", "4", "--cliprange=0.2"]
    answers = {
        "train": "did you mean --microbatch_size?; no option '--cliprange'; "
        "did you mean --clip_ratio?",
        "sft": "did you mean --batch_size?; no option '--cliprange'",
    }
    for command, answer in answers.items():
        with pytest.raises(SystemExit):
            cli.main([command, *flags])
        said = capsys.readouterr().err
        assert f"no option '--per_device_train_batch_size'; {answer}\n" in said


def test_verls_arguments_and_sections_are_answered_with_ours(tmp_path: Path, capsys) -> None:
    with pytest.raises(SystemExit):
        cli.main(["train", "algorithm.adv_estimator=gae", "--data.max_response_length=64"])
    said = capsys.readouterr().err
    assert "no option '--algorithm.adv_estimator'; did you mean --advantage?" in said
    assert "no option '--data.max_response_length'; did you mean --max_new_tokens?" in said
    config = tmp_path / "verl.yaml"
    config.write_text("algorithm:\n  adv_estimator: gae\n  kl_ctrl:\n    target_kl: 6\n")
    assert cli.main(["train", "--config", str(config)]) == 2
    said = capsys.readouterr().err
    assert "no option 'algorithm.adv_estimator'; did you mean advantage?" in said
    assert "no option 'algorithm.kl_ctrl.target_kl'; did you mean kl_target or early_stop" in said


def test_the_yaml_has_trls_defaults_as_on_the_page() -> None:
    chosen = PPOConfig(**read_yaml(ROOT / "examples" / "trl_defaults.yaml", PPOConfig))
    assert chosen.max_grad_norm == 1e9, "TRL's PPO does not clip"
    assert (chosen.rewards, chosen.critic_model) == (("rewards.py:my_reward",), None)
    for row in rows("from-trl.md", "Silent differences"):
        for name, value in re.findall(r"`(\w+): ([^`]+)`", row[3]):
            if (name, value) not in [("stop_token_ids", "[]"), ("old_logprobs", "sampler")]:
                assert getattr(chosen, name) == yaml.safe_load(value), row


def test_the_page_has_trls_options_with_their_defaults(monkeypatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    theirs = pytest.importorskip("trl.experimental.ppo", reason="TRL 1.12 is not installed")
    from transformers import TrainingArguments

    of_trainer = {field.name for field in fields(TrainingArguments)}
    defaults = {field.name: field.default for field in fields(theirs.PPOConfig)}
    options = [(re.findall(r"`(\w+)`", row[0]), row) for row in rows("from-trl.md", "Options")]
    named = {name for names, _ in options for name in names}
    assert {name for name in defaults if name not in of_trainer} <= named
    count = 0
    for names, row in options:
        for name, shown in zip(names, row[2].split(", "), strict=False):
            if NUMBER.match(shown):
                assert float(shown) == defaults[name], row
                count += 1
    assert count > 15


def _grpo() -> dict[str, Any]:
    """Return the options of a GRPO script on the page about tools."""
    section = (ROOT / "docs" / "tools.md").read_text("utf-8").split("## From a GRPO script\n")[1]
    (block,) = re.findall(r"```yaml\n(.*?)```", section, re.S)
    return yaml.safe_load(block)


def test_the_options_of_a_grpo_script_are_valid(tmp_path: Path, capsys) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text("def reward(completions, **columns):\n    return [1.0] * len(completions)\n")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "w1"}\n' * 8)
    run = {
        "model": tiny.saved_model(tmp_path / "model"),
        "prompts": str(tmp_path / "prompts.jsonl"),
        "rewards": [f"{reward}:reward"],
        "output_dir": str(tmp_path / "run"),
        "max_new_tokens": 8,  # the tiny model has a context of 64
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**_grpo(), **run}))
    assert cli.main(["check", "--config", str(tmp_path / "run.yaml")]) == 0
    assert "to 8 prompts; 1 optimizer step" in " ".join(capsys.readouterr().out.split())


def test_the_options_of_a_grpo_script_are_trls_defaults() -> None:
    trl = pytest.importorskip("trl", "1.16", reason="expected pip install trl==1.16.*")
    theirs = {field.name: field.default for field in fields(trl.GRPOConfig)}
    from transformers import TrainingArguments

    headings = ("Options", "Options of GRPOConfig")
    named = {x for name in headings for row in rows("from-trl.md", name) for x in _quoted(row[0])}
    own = theirs.keys() - {field.name for field in fields(TrainingArguments)}
    assert len(own) > 70
    assert own <= named
    ours = _grpo()
    same = {
        "learning_rate": "learning_rate",
        "num_generations": "samples_per_prompt",
        "num_iterations": "ppo_epochs",
    }
    for name, here in same.items():
        assert theirs[name] == ours[here], name
    assert ours["optimizer_options"] == {"betas": [theirs["adam_beta1"], theirs["adam_beta2"]]}
    assert theirs["scale_rewards"] == ours["advantage"] == "group"
    assert theirs["steps_per_generation"] is None, "minibatches"
    assert theirs["lr_scheduler_type"] == ours["lr_schedule"] == "linear"
    assert theirs["loss_type"] == "dapo"
    assert PPOConfig().aggregation == "token-mean"
    assert theirs["use_bias_correction_kl"]
    for name in ("epsilon", "max_grad_norm"):
        assert theirs[name] == getattr(PPOConfig(), {"epsilon": "clip_ratio"}.get(name, name))
