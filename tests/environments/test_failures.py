"""Failed episodes: left out and counted, or the end of the run. Outcomes and invalid actions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import tiny
from environments import OPTIONS, PROMPTS, Calculator, Scripted

from fastppo.data.prompts import Prompts
from fastppo.environments.failures import DropFailures
from fastppo.environments.turns import Turns
from fastppo.rewards.reward import AllFailedError, RewardError
from fastppo.rollout import Sampling
from fastppo.run.log import read_jsonl
from runs import make_trainer, records

EOS = 1


class Fragile:
    """Fail in a method for the prompts that are named, and otherwise end after two turns."""

    made: ClassVar[list[Fragile]] = []

    def __init__(self) -> None:
        self.is_closed = False
        Fragile.made.append(self)

    def reset(self, prompt: str, fails: str) -> None:
        self.fails = fails
        self.turns = 0
        if fails == "reset":
            raise OSError("no connection")

    def step(self, text: str) -> Any:
        self.turns += 1
        if self.fails == "step":
            raise OSError("no connection")
        return "" if self.fails == "observation" else "w9", 0.5, self.turns == 2

    def close(self) -> None:
        self.is_closed = True


class FragileAsync(Fragile):
    """A `Fragile` whose steps run concurrently."""

    async def step(self, text: str) -> Any:
        return Fragile.step(self, text)


def _prompts(fails: list[str]) -> Prompts:
    texts = [f"w{i}" for i in range(len(fails))]
    return Prompts(texts, [[i + 3] for i in range(len(fails))], {"fails": fails})


def _runner(make: Any = Fragile, samples: int = 1, **options: Any) -> Turns:
    Fragile.made = []
    failures = DropFailures(samples)
    return Turns(make, tiny.tokenizer(), max_turns=4, failures=failures, **options)


def _run(runner: Turns, fails: list[str], **options: Any) -> Any:
    sampling = Sampling(max_new_tokens=4, stop_token_ids=(EOS,))
    return runner.run(_prompts(fails), Scripted([[7, EOS], [8, EOS]]), sampling, **options)


@pytest.mark.parametrize("make", [Fragile, FragileAsync])
@pytest.mark.parametrize("method", ["reset", "step", "observation"])
def test_a_failed_episode_is_left_out_and_counted(method: str, make: Any, tmp_path: Path) -> None:
    saved = tmp_path / "failed_episode.json"
    runner = _runner(make, failure_file=saved)
    prompts, rollout = _run(runner, ["", method, "", ""])
    assert prompts.prompts == ["w0", "w2", "w3"]
    assert prompts.columns == {"fails": [""] * 3}
    assert rollout.tokens == [[7, EOS, 12, 8, EOS]] * 3
    assert runner.metrics() == {"failed_episodes": 1.0}
    assert runner.metrics() == {"failed_episodes": 0.0}
    assert json.loads(saved.read_text())["columns"] == {"fails": method}
    # An environment that raised is closed and replaced.
    raised = method != "observation"
    assert [one.is_closed for one in Fragile.made] == [False, raised, False, False]
    _run(runner, [""] * 4)
    assert len(Fragile.made) == 4 + raised
    runner.close()


def test_the_samples_of_a_prompt_are_left_out_together() -> None:
    prompts, _ = _run(_runner(samples=2), ["", "", "", "step", "", ""])
    assert prompts.prompts == ["w0", "w1", "w4", "w5"]


def test_an_evaluation_leaves_out_the_failed_episodes_alone() -> None:
    """Its prompts have one sample, and it does not count for the end of the run."""
    runner = _runner(samples=4)
    for _ in range(4):
        prompts, rollout = _run(runner, ["", "step", "", ""], held_out=True)
        assert prompts.prompts == ["w0", "w2", "w3"]
        assert rollout.rows == [0, 2, 3]
        assert runner.metrics() == {"failed_episodes": 1.0}
    with pytest.raises(AllFailedError):
        _run(runner, ["step"], held_out=True)


def test_a_run_ends_if_more_than_a_tenth_fail_in_three_iterations() -> None:
    runner = _runner()
    for fails in (["step", *[""] * 9], [""] * 10, ["step", *[""] * 9], ["step", *[""] * 9]):
        _run(runner, fails)  # at most 3 of 30 in any three
        runner.metrics()
    with pytest.raises(RewardError, match=r"environment_failure=drop: 4 of the 30 .*no connection"):
        _run(runner, ["step", "reset", *[""] * 8])


def test_the_draws_of_an_iteration_count_together() -> None:
    runner = _runner()
    for _ in range(2):
        _run(runner, [""] * 20)
        _run(runner, ["step", ""])
        runner.metrics()
    for _ in range(3):
        _run(runner, ["step", ""])
    with pytest.raises(RewardError, match=r"environment_failure=drop: 6 of the 52 "):
        _run(runner, ["step", ""])


def test_a_run_ends_if_all_episodes_of_a_batch_fail() -> None:
    with pytest.raises(AllFailedError, match=r"no episode is left.*no connection"):
        _run(_runner(), ["step", "reset"])


class Flaky(Calculator):
    """A calculator that fails for one of the totals, and says how an episode went."""

    def step(self, text: str) -> Any:
        observation, reward, done = super().step(text)
        if self.total == "w7":
            raise OSError("no connection")
        info = {"invalid": "w1" not in text, "won": True}
        return observation, reward, done, {**info, "success": reward > 0} if done else info


def test_a_run_goes_on_without_the_failed_episodes(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path,
        environment=Flaky,
        prompts=PROMPTS * 2,
        rewards=[],
        iterations=2,
        environment_failure="drop",
        **OPTIONS,
    )
    trainer.train()
    lines = records(trainer)
    assert sum(line["failed_episodes"] for line in lines) > 0
    for line in lines:
        assert 0 < line["outcome/success"] + line["outcome/failure"] <= 1
        assert 0 < line["invalid_actions"] <= 2


def test_a_run_ends_at_the_first_failure_by_default(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path, environment=Flaky, prompts=PROMPTS, rewards=[], iterations=1, **OPTIONS
    )
    with pytest.raises(RewardError, match="no connection"):
        trainer.train()


def test_solved_prompts_are_not_counted_with_failures(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="solved_reward"):
        make_trainer(
            tmp_path, environment=Flaky, environment_failure="drop", solved_reward=1.0, **OPTIONS
        )


class FailsFor:
    """Fail for prompts of a few names."""

    fails: ClassVar[set[str]] = set()

    def reset(self, prompt: str) -> None:
        if prompt in self.fails:
            raise OSError("no connection")

    def step(self, text: str) -> Any:
        return "", 0.1 * len(text), True


@pytest.mark.parametrize("fails", [{"w21"}, {"w21", "w36"}], ids=["one", "a whole part"])
def test_an_evaluation_counts_and_names_what_is_left(
    fails: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FailsFor, "fails", fails)
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("".join(f'{{"prompt": "w{i}"}}\n' for i in range(20, 37)))
    trainer = make_trainer(
        tmp_path,
        environment=FailsFor,
        prompts=PROMPTS,
        eval_prompts=str(held_out),  # a part of 16, and one of 1
        rewards=[],
        iterations=1,
        eval_interval=1,
        environment_failure="drop",
        **OPTIONS,
    )
    assert trainer.config.rollout_batch_size == 16
    trainer.train()
    (line,) = records(trainer)
    assert line["eval/failed_episodes"] == len(fails)
    assert line["failed_episodes"] == 0
    rows = read_jsonl(Path(trainer.config.output_dir) / "eval_samples.jsonl")
    assert {row["prompt"] for row in rows} == {f"w{20 + row['row']}" for row in rows}
    assert not fails & {row["prompt"] for row in rows}
