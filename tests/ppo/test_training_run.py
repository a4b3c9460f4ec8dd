"""A run: its records, thresholds and summary, and what a failed iteration leaves."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from rich.console import Console
from torch import Tensor

from fastppo.plugins.calling import PluginError
from fastppo.ppo.state import RunStoppedError
from fastppo.ppo.step_control import MOST_SKIPPED
from fastppo.rewards.reward import RewardError
from fastppo.rollout import Rollout, Sampling
from fastppo.run.log import read_jsonl
from fastppo.run.report.report import write_report
from runs import Watched, make_trainer, records, weights_of


def test_the_run_directory_has_its_records(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, monitor_rewards=[tiny.count_w7], max_new_tokens=24)
    trainer.train()
    run = tmp_path / "run"
    lines = read_jsonl(run / "metrics.jsonl")
    assert [line["iteration"] for line in lines] == [0, 1]
    logged = """
        reward kl entropy value_loss explained_variance clip_fraction ratio_mean response_length
        eos_rate learning_rate tokens_per_second policy_loss approx_kl grad_norm kl_coef
        monitor/count_w7 seconds/generate seconds/score seconds/experience seconds/update
        length_correlation distinct_1 distinct_2 unique_responses correlation/count_w7
        skipped_steps ratio_above_positive ratio_below_positive
    """
    assert {*logged.split()} <= lines[0].keys()
    assert lines[0]["correlation/count_w7"] == pytest.approx(1.0), "it is the trained reward itself"
    samples = read_jsonl(run / "samples.jsonl")
    assert samples[0].keys() >= {"prompt", "completion", "reward", "rewards", "kl", "tokens"}
    assert samples[0]["rewards"].keys() == samples[0]["monitors"].keys() == {"count_w7"}
    assert list((run / "tensorboard").iterdir())
    assert "learning_rate: 0.001" in (run / "config.yaml").read_text()
    assert [path.name for path in run.glob("checkpoint-*")] == ["checkpoint-000002"]
    with pytest.raises(ValueError, match=r"--resume true.*--output_dir \S*-2.*fastppo report"):
        make_trainer(tmp_path, iterations=1).train()


def test_a_run_prints_a_summary_before_the_first_iteration(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=200)
    trainer = make_trainer(tmp_path, console=console, iterations=2, monitor_rewards=[tiny.count_w7])
    trainer.train()
    text = console.file.getvalue()
    lines = text[: text.index("PPO 1/2")].splitlines()
    count = sum(p.numel() for p in trainer.model.parameters())
    for line in (
        f"model    LlamaForCausalLM: {count:,} parameters with the value function, "
        f"{count - 33:,} trained",
        "prompts  24 of those that were passed in",
        "rewards  count_w7; monitored: count_w7",
        "run      iterations 1 to 2, 16 responses of at most 8 tokens each",
        f"writes   {tmp_path / 'run'}",
    ):
        assert line in lines


# ------------------------------------------------------------------------------------- thresholds


def test_a_crossed_threshold_warns_on_the_console_and_in_the_records(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=200)
    trainer = make_trainer(
        tmp_path, warn_if=["entropy > 1", "kl > 1e6", "klx > 3"], console=console, iterations=3
    )
    trainer.reporter.notes.append("rollout=decoder does not decode it")
    trainer.train()
    lines = records(trainer)
    for line in lines:
        assert any(sentence.startswith("entropy = 3.") for sentence in line["warnings"])
        assert not any("1e+06" in sentence for sentence in line["warnings"])
    assert "no metric 'klx'" in lines[2]["warnings"][-1]
    terminal = console.file.getvalue()
    assert terminal.count("entropy = 3.") == terminal.count("iteration 1: entropy = 3.") == 1
    assert terminal.count("rollout=decoder does not decode it") == 1, "what is noted is said once"
    assert "rollout=decoder does not decode it" in lines[0]["warnings"]


def test_stop_if_stops_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, stop_if=["entropy > 1"], iterations=5)
    with pytest.raises(RunStoppedError, match=r"after 1 iteration: entropy = 3\.\d+ > 1"):
        trainer.train()
    run = tmp_path / "run"
    assert (run / "checkpoint-000001").is_dir()
    assert (run / "policy" / "config.json").is_file()
    assert records(trainer)[0]["warnings"][-1].startswith("stopped: entropy")
    assert "Ended after 1 of 5 iterations: entropy" in write_report(run).read_text()
    resumed = make_trainer(tmp_path, resume=True, iterations=2)
    assert resumed.train()
    assert [record["iteration"] for record in records(resumed)] == [0, 1]


# ------------------------------------------------------------------------------- a failed iteration


def test_a_failed_run_leaves_its_record(tmp_path: Path) -> None:
    def reward(prompts, completions):
        with torch.no_grad():
            trainer.model.value_function.head.bias.fill_(torch.nan)
        return tiny.count_w7(prompts, completions)

    trainer = make_trainer(
        tmp_path, rewards=[reward], ppo_epochs=MOST_SKIPPED, value_head="gradient"
    )
    with pytest.raises(FloatingPointError, match=f"{MOST_SKIPPED} optimizer steps in a row"):
        trainer.train()
    (record,) = records(trainer)
    assert record["skipped_steps"] == MOST_SKIPPED
    assert record["warnings"][0].startswith(f"stopped: {MOST_SKIPPED} optimizer steps")


RESTORED: dict[str, Any] = {
    "iterations": 4,
    "score_normalization": "running",
    "kl_controller": "adaptive",
    "kl_coef": 0.1,
    "reference_refresh": 2,
}


@pytest.mark.parametrize("phase", ["score", "update"])
def test_a_failure_before_the_first_step_leaves_the_state_before_the_iteration(
    phase: str, tmp_path: Path
) -> None:
    """Everything that the iteration has changed is restored, the scale of the scores and the random
    numbers too, so that the checkpoint resumes to the bits of a run without the failure."""
    uninterrupted = make_trainer(tmp_path / "whole", **RESTORED)
    uninterrupted.train()
    failing = make_trainer(tmp_path / "failing", **RESTORED)
    original = getattr(failing, phase)
    before: dict[str, Any] = {}

    def fail_in_third(*args: Any, **keywords: Any) -> Any:
        if failing.state.iteration == 2:
            torch.rand(3)
            before["changed"] = failing.state.state_dict()
            raise RewardError("it is gone")
        if phase == "update" and failing.state.iteration == 1:
            result = original(*args, **keywords)
            before["score_scale"] = failing.state.state_dict()["score_scale"]
            return result
        return original(*args, **keywords)

    setattr(failing, phase, fail_in_third)
    with pytest.raises(RewardError, match="it is gone; stopped after 2 of 4"):
        failing.train()
    if phase == "update":
        assert before["changed"]["score_scale"] != before["score_scale"], "it was updated before"
        assert failing.state.state_dict()["score_scale"] == before["score_scale"]
    resumed = make_trainer(tmp_path / "failing", resume=True, **RESTORED)
    resumed.train()
    assert all(map(torch.equal, weights_of(uninterrupted), weights_of(resumed)))
    assert uninterrupted.state.state_dict() == resumed.state.state_dict()
    rewards = [[line["reward"] for line in records(run)] for run in (uninterrupted, resumed)]
    assert rewards[0] == rewards[1]


class Gone(Watched):
    """A user's engine that raises an error of its own in the third iteration."""

    def generate(self, prompt_ids: list[list[int]], sampling: Sampling) -> Rollout:
        self.look()
        return self.engine.generate(prompt_ids, sampling)


def test_an_error_of_an_engine_or_a_wrong_result_keeps_the_iterations_before(
    tmp_path: Path,
) -> None:
    """Nothing has changed since, whatever the error is."""

    def gone() -> None:
        if trainer.state.iteration == 2:
            raise ConnectionError("server gone")

    trainer = make_trainer(tmp_path / "engine", iterations=4)
    trainer.engine = Gone(trainer.engine, gone)
    with pytest.raises(ConnectionError, match="server gone"):
        trainer.train()
    assert (tmp_path / "engine" / "run" / "checkpoint-000002").is_dir()

    calls: list[int] = []

    def advantage(rewards: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        calls.append(1)  # the first call tries it before the run
        return (rewards - values)[len(calls) // 4 :]

    trainer = make_trainer(tmp_path / "shape", iterations=4, advantage=advantage)
    with pytest.raises(ValueError, match="advantage"):
        trainer.train()
    assert (tmp_path / "shape" / "run" / "checkpoint-000002").is_dir()


@pytest.mark.parametrize("option", ["advantage", "objective"])
def test_a_failing_function_of_the_user_keeps_the_iterations_before(
    option: str, tmp_path: Path
) -> None:
    """It fails in the third iteration, before an optimizer step."""
    fails = False

    def advantage(rewards: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        return _fail_if(fails) or rewards - values

    def objective(
        logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor
    ) -> Tensor:
        return _fail_if(fails) or -(logprobs - old_logprobs).exp() * advantages

    def reward(prompts: list[Any], completions: list[str]) -> list[float]:
        nonlocal fails
        fails = failing.state.iteration == 2
        return tiny.count_w7(prompts, completions)

    function = {"advantage": advantage, "objective": objective}[option]
    options: dict[str, Any] = {"iterations": 4, option: function}
    uninterrupted = make_trainer(tmp_path / "whole", **options)
    uninterrupted.train()
    failing = make_trainer(tmp_path / "failing", **options, rewards=[reward])
    with pytest.raises(PluginError, match=rf"{option} .*stopped after 2 of 4 iterations"):
        failing.train()
    fails = False
    resumed = make_trainer(tmp_path / "failing", **options, resume="force")
    resumed.train()
    assert all(map(torch.equal, weights_of(uninterrupted), weights_of(resumed)))


def _fail_if(fails: bool) -> None:
    if fails:
        raise ValueError("it is gone")


def test_a_failure_within_an_update_writes_no_checkpoint(tmp_path: Path) -> None:
    """The weights have changed, so the run resumes from the checkpoint before."""
    options: dict[str, Any] = {"iterations": 4, "checkpoint_interval": 2}
    uninterrupted = make_trainer(tmp_path / "whole", **options)
    uninterrupted.train()
    failing = make_trainer(tmp_path / "failing", **options)
    step = failing.step_control.step
    steps: list[int] = []

    def fail_after_a_step(*args: Any) -> dict[str, float]:
        steps.append(1)
        if len(steps) == 14:  # the second of four steps of the fourth iteration
            raise RewardError("it is gone")
        return step(*args)

    failing.step_control.step = fail_after_a_step  # type: ignore[method-assign]
    with pytest.raises(RewardError, match="it is gone"):
        failing.train()
    checkpoints = [path.name for path in (tmp_path / "failing" / "run").glob("checkpoint-*")]
    assert checkpoints == ["checkpoint-000002"]
    resumed = make_trainer(tmp_path / "failing", resume=True, **options)
    resumed.train()
    assert all(map(torch.equal, weights_of(uninterrupted), weights_of(resumed)))
