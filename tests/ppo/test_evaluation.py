"""Held-out evaluations have the same random numbers each time, and do not change the run."""

from __future__ import annotations

import json
import math
import os
import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from fastppo.ppo import evaluation
from fastppo.ppo.trainer import PPOTrainer
from fastppo.rewards.reward import RewardError
from fastppo.rollout import RolloutError
from fastppo.run.log import read_jsonl, why_ended
from fastppo.run.report.report import write_report
from fastppo.stopped import Stopped
from runs import make_trainer, records


def _trainer(directory: Path, **more: Any) -> PPOTrainer:
    directory.mkdir(parents=True, exist_ok=True)
    held_out = directory / "held-out.jsonl"
    held_out.write_text("\n".join(map(json.dumps, tiny.PROMPTS[:20])))
    return make_trainer(directory, eval_prompts=str(held_out), **more)


def test_evaluations_follow_eval_interval(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """There is one before the first update, too; the console shows each, and which is the best."""
    trainer = _trainer(tmp_path, iterations=5, eval_interval=2)
    trainer.train()
    lines = records(trainer)
    assert ["eval/reward" in line for line in lines] == [False, True, False, True, False]
    evaluated = {name for name in lines[1] if name.startswith("eval/")}
    names = {"reward", "reward_error", "reward/count_w7", "kl", "response_length", "eos_rate"}
    assert evaluated == {f"eval/{name}" for name in names}
    assert lines[3]["eval/kl"] != lines[1]["eval/kl"]
    before = {name for name in lines[0] if name.startswith("before/")}
    assert before == {name.replace("eval/", "before/") for name in evaluated}
    assert lines[0]["before/kl"] == pytest.approx(0, abs=1e-5)
    said = [line for line in capsys.readouterr().err.splitlines() if "held out" in line]
    shown = [
        f"held out: reward {line[f'{prefix}reward']:.3f} ± {line[f'{prefix}reward_error']:.3f}"
        for line, prefix in ((lines[0], "before/"), (lines[1], "eval/"), (lines[3], "eval/"))
    ]
    assert all(part in line for part, line in zip(shown, said[-3:], strict=True)), said
    rewards = [lines[0]["before/reward"], lines[1]["eval/reward"], lines[3]["eval/reward"]]
    are_best = [line.endswith(", the best so far") for line in said[-3:]]
    assert are_best == [False, rewards[1] > rewards[0], rewards[2] > max(rewards[:2])]


def test_an_evaluation_without_a_reference_has_no_kl(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A KL of 0.00 would say that the policy has not moved."""
    trainer = _trainer(tmp_path, iterations=1, eval_interval=1, kl_coef=0.0)
    trainer.train()
    (line,) = records(trainer)
    assert not {"kl", "before/kl", "eval/kl"} & line.keys()
    said = [line for line in capsys.readouterr().err.splitlines() if "held out: reward" in line]
    assert len(said) == 2
    assert "KL" not in "".join(said)


def test_evaluation_means_do_not_depend_on_the_batch_size(tmp_path: Path) -> None:
    """Twenty prompts in parts of eight. The policy samples greedily, because the parts have
    different random numbers."""
    trainer = _trainer(tmp_path, rollout_batch_size=8, eval_interval=1, iterations=1)
    prompts = trainer.evaluation.prompts
    assert prompts is not None
    trainer.parts.sampling = replace(trainer.parts.sampling, greedy=True)
    metrics = trainer.train()
    whole = trainer.evaluate(prompts)
    for name in ("reward", "kl", "response_length", "eos_rate"):
        assert metrics[f"eval/{name}"] == pytest.approx(whole[name], abs=1e-5), name
    error = whole["scores"].total.std().item() / len(prompts) ** 0.5
    assert metrics["eval/reward_error"] == pytest.approx(error, abs=1e-6)


def test_the_parts_of_an_evaluation_have_their_own_random_numbers(tmp_path: Path) -> None:
    """The same prompts get other responses in the second part."""
    held_out = tmp_path / "same.jsonl"
    held_out.write_text(8 * '{"prompt": "w1"}\n')
    options = {"rollout_batch_size": 4, "eval_interval": 1, "iterations": 1}
    trainer = make_trainer(tmp_path, eval_prompts=str(held_out), **options)
    trainer.train()
    lines = read_jsonl(Path(trainer.config.output_dir) / "eval_samples.jsonl")
    completions = [line["completion"] for line in lines]
    assert completions[:4] != completions[4:]


def test_a_single_prompt_has_no_standard_error(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, eval_interval=1, iterations=1)
    trainer.evaluation.prompts = trainer.evaluation.prompts.select([0])
    assert math.isnan(trainer.train()["eval/reward_error"])
    report = write_report(trainer.config.output_dir).read_text()
    assert re.search("Held-out reward .*too few to tell", report)


RANDOM = """
import random

import numpy
import torch


def noise(prompts, completions, **columns):
    return [random.random() + numpy.random.rand() + torch.rand(()).item() for _ in prompts]


class Lottery:
    def reset(self, prompt, **columns):
        return f"w{random.randrange(9)} w{numpy.random.randint(9)}"

    def step(self, completion):
        return "", random.random() + torch.rand(()).item(), True
"""


@pytest.mark.parametrize("kind", ["reward", "environment"])
def test_an_evaluation_does_not_change_the_random_state(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its own random numbers are the same each time, and so are the rewards of a fixed policy."""
    (tmp_path / "chance.py").write_text(RANDOM)
    options: dict[str, Any] = {"iterations": 3, "learning_rate": 1e-12}
    if kind == "reward":
        options["rewards"] = [f"{tmp_path / 'chance.py'}:noise"]
    else:
        options["environment"] = f"{tmp_path / 'chance.py'}:Lottery"
        options["rewards"] = []
    one = _trainer(tmp_path / "with", eval_interval=1, **options)
    other = make_trainer(tmp_path / "without", **options)
    one.train()
    other.train()
    assert [line["reward"] for line in records(one)] == [line["reward"] for line in records(other)]
    rewards = {line["eval/reward"] for line in records(one)}
    assert len(rewards) == 1
    assert len({line["reward"] for line in records(one)}) == 3
    assert "the best so far" not in capsys.readouterr().err  # nor better than before training


@pytest.mark.parametrize("kind", [RolloutError, RewardError])
def test_a_failed_evaluation_ends_the_run_after_its_iteration(
    kind: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"iterations": 3, "eval_interval": 2}
    uninterrupted = _trainer(tmp_path / "uninterrupted", **options)
    uninterrupted.train()
    parts = _trainer(tmp_path / "parts", **options)
    evaluate = evaluation.evaluate_policy

    def fail_after_updates(*args: Any, **options: Any) -> dict[str, Any]:
        if parts.state.iteration:
            raise kind("it is gone")
        return evaluate(*args, **options)

    monkeypatch.setattr(evaluation, "evaluate_policy", fail_after_updates)
    with pytest.raises(kind, match=r"it is gone; stopped after 2 of 3 .*checkpoint-000002"):
        parts.train()
    assert why_ended(parts.config.output_dir) == "it is gone"
    resumed = _trainer(tmp_path / "parts", **options, resume=True)
    resumed.train()
    rewards = [
        [line["reward"] for line in records(trainer)] for trainer in (uninterrupted, resumed)
    ]
    assert rewards[0] == rewards[1]
    assert all(map(torch.equal, uninterrupted.model.parameters(), resumed.model.parameters()))


@pytest.mark.usefixtures("default_signals")
def test_a_failed_evaluation_of_a_run_that_stops_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = _trainer(tmp_path, iterations=3, eval_interval=1)
    evaluate = evaluation.evaluate_policy

    def fail_after_updates(*args: Any, **options: Any) -> dict[str, Any]:
        if records(trainer):
            os.kill(os.getpid(), signal.SIGTERM)
            raise RewardError("it is gone")
        return evaluate(*args, **options)

    monkeypatch.setattr(evaluation, "evaluate_policy", fail_after_updates)
    with pytest.raises(Stopped, match="stopped by SIGTERM after 2 of 3"):
        trainer.train()
    assert "the evaluation failed: it is gone" in capsys.readouterr().err


def test_an_evaluation_records_the_first_responses(tmp_path: Path) -> None:
    """The prompts are the same each time, also if the evaluation has several parts."""
    options = {"eval_interval": 1, "rollout_batch_size": 6}
    trainer = _trainer(tmp_path, **options, iterations=2)
    trainer.train()
    lines = read_jsonl(Path(trainer.config.output_dir) / "eval_samples.jsonl")
    assert [(line["iteration"], line["row"]) for line in lines] == [
        (iteration, row) for iteration in (0, 1) for row in range(8)
    ]
    for line in lines:
        assert line["prompt"] == tiny.PROMPTS[line["row"]]["prompt"]
        assert line["reward"] == pytest.approx(line["completion"].split().count("w7") / 8)
        assert line["rewards"] == {"count_w7": pytest.approx(line["reward"])}
    again = _trainer(tmp_path, **options, iterations=3, resume=True)
    again.train()
    assert read_jsonl(Path(again.config.output_dir) / "eval_samples.jsonl")[:16] == lines


def test_a_reward_that_does_not_apply_is_left_out_of_means_and_samples(tmp_path: Path) -> None:
    """Evaluated in two batches, of which the second has twice as many applicable prompts."""

    def count_w7(prompts: list[str], completions: list[str]) -> list[float]:
        return [float(text.count("w7")) for text in completions]

    def sometimes(prompts: list[str], completions: list[str]) -> list[float | None]:
        return [float(row) if row % 3 == 0 else None for row in range(len(prompts))]

    def never(prompts: list[str], completions: list[str]) -> list[None]:
        return [None] * len(prompts)

    trainer = _trainer(
        tmp_path,
        iterations=1,
        eval_interval=1,
        rewards=[count_w7, sometimes],
        monitor_rewards=[never],
        rollout_batch_size=16,  # 16 and 4 prompts
    )
    trainer.train()
    line = records(trainer)[0]
    assert line["eval/reward/sometimes"] == pytest.approx((0 + 3 + 6 + 9 + 12 + 15 + 0 + 3) / 8)
    assert not any("never" in name for name in line)
    run = Path(trainer.config.output_dir)
    samples = read_jsonl(run / "eval_samples.jsonl")
    assert samples[1]["rewards"]["sometimes"] is samples[0]["rewards"]["never"] is None
    assert read_jsonl(run / "samples.jsonl")[0]["monitors"] == {"never": None}
    report = Path(write_report(run)).read_text("utf-8")
    assert "<span>sometimes" in report
    assert "<span>never" not in report
