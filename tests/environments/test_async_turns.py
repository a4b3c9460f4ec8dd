"""Episodes that run one batch ahead of the learner."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from environments import OPTIONS, PROMPTS, Calculator

from fastppo.ppo.trainer import PPOTrainer
from fastppo.rewards.reward import RewardError
from fastppo.rollout import Branch, Rollout
from fastppo.rollout.async_engine import AsyncEngine
from fastppo.rollout.saved import as_state, from_state
from runs import counting, make_trainer, records, weights_of

ASYNC: dict[str, Any] = {
    "async_steps": 1,
    "iterations": 4,
    "learning_rate": 1e-2,
    "checkpoint_interval": 2,
    "prompts": PROMPTS,
    "rewards": [],
    **OPTIONS,
}


class Watched(Calculator):
    """A calculator that records the threads that step it, and may be slow."""

    threads: set[int]
    seconds = 0.0

    def step(self, text: str) -> Any:
        type(self).threads.add(threading.get_ident())
        time.sleep(self.seconds)
        return super().step(text)


def _environment(seconds: float = 0.0) -> type[Watched]:
    return type("Watched", (Watched,), {"threads": set(), "seconds": seconds})


def _trained(directory: Path, environment: Any, **options: Any) -> PPOTrainer:
    trainer = make_trainer(directory, environment=environment, **{**ASYNC, **options})
    trainer.train()
    return trainer


def test_episodes_run_ahead_and_do_not_depend_on_timing(tmp_path: Path) -> None:
    trainers = []
    for seconds in (0.0, 0.01):
        environment = _environment(seconds)
        trainers.append(_trained(tmp_path / str(seconds), environment))
        assert len(environment.threads - {threading.get_ident()}) == 1
    assert all(map(torch.equal, *map(weights_of, trainers)))
    assert isinstance(trainers[0].engine, AsyncEngine)
    # From the second batch on, the weights are those before the last update.
    mismatches = [line["mismatch/worst"] for line in records(trainers[0])]
    assert mismatches[0] < 1e-4 < 1e-2 < max(mismatches[1:])


def test_each_turn_has_random_numbers_of_its_own(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, environment=_environment(), **ASYNC)
    seeds = []
    assert isinstance(trainer.engine, AsyncEngine)
    inner = trainer.engine.engine
    generate = inner.generate

    def watching(prompt_ids: Any, sampling: Any) -> Rollout:
        seeds.append(sampling.seed)
        return generate(prompt_ids, sampling)

    inner.generate = watching  # type: ignore[method-assign]
    trainer.train()
    drawn = [seed for seed in seeds if seed is not None]  # without the self-check
    assert len(drawn) == len(set(drawn)) >= 2 * 4 - 1


def _fail() -> None:
    raise RuntimeError("enough")


def test_a_resumed_run_continues_with_the_episodes_run_ahead(tmp_path: Path) -> None:
    whole = _trained(tmp_path / "whole", Calculator, rewards=[counting()])
    with pytest.raises(RewardError, match="enough"):
        _trained(tmp_path / "parts", Calculator, rewards=[counting(3, _fail)])
    resumed = _trained(tmp_path / "parts", Calculator, rewards=[counting()], resume=True)
    assert all(map(torch.equal, weights_of(whole), weights_of(resumed)))
    lines = [[line["reward"] for line in records(trainer)] for trainer in (whole, resumed)]
    assert lines[0] == lines[1]


def test_an_evaluation_runs_its_episodes_with_the_current_policy(tmp_path: Path) -> None:
    plain = _trained(tmp_path / "plain", _environment())
    evaluated = _trained(
        tmp_path / "evaluated", _environment(), eval_prompts=_saved(tmp_path), eval_interval=1
    )
    assert all(map(torch.equal, weights_of(plain), weights_of(evaluated)))
    assert all("eval/reward" in line for line in records(evaluated))


def _saved(directory: Path) -> str:
    path = directory / "held_out.jsonl"
    path.write_text('{"prompt": "w2 w2", "total": "w4"}\n' * 2)
    return str(path)


def test_dropped_episodes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="environment_failure"):
        make_trainer(tmp_path, environment=Calculator, environment_failure="drop", **ASYNC)


def test_a_rollout_is_the_same_after_a_checkpoint() -> None:
    one = Rollout([[5]], ["stop"], logprobs=[torch.tensor([-0.1])])
    rollout = Rollout(
        [[3, 4], [5]],
        ["stop", "turns"],
        values=[torch.tensor([0.1, 0.2]), torch.tensor([0.3])],
        final_values=torch.tensor([0.0, 0.7]),
        response_mask=[[True, False], [True]],
        outcomes=["success", None],
        prompt_ids=[[1], [2]],
        branches=[[Branch([9], one)], []],
    )
    again = from_state(as_state(rollout))
    assert as_state(again) == as_state(rollout)
    assert torch.equal(again.final_values, rollout.final_values)  # type: ignore[arg-type]
    assert again.branches is not None
    assert torch.equal(again.branches[0][0].rollout.logprobs[0], torch.tensor([-0.1]))  # type: ignore[index]
