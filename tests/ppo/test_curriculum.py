"""Which prompts are asked: shuffled epochs without solved prompts, reproducibly."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from fastppo.data.datasets import visiting_order
from fastppo.ppo.curriculum import WINDOW, Chosen, Curriculum
from fastppo.ppo.options.config import PPOConfig
from fastppo.ppo.state import RunState
from fastppo.ppo.trainer import PPOTrainer
from fastppo.rewards.scorer import Scores
from fastppo.run.signals import PhaseEndedError
from runs import fresh_state, make_trainer, records

COUNT = 10


def _state() -> RunState:
    return fresh_state(PPOConfig())


def test_without_options_epochs_are_shuffled() -> None:
    curriculum = Curriculum(COUNT)
    state = _state()
    asked = []
    for _ in range(5):
        chosen = curriculum.at(state, 7, 0, 1)
        asked.append(chosen.rows)
        assert curriculum.take(chosen, Scores(torch.zeros(7)), state) == {}
    assert [*chain(*asked)] == visiting_order(COUNT, 0, 35, 0)
    assert state.prompts_seen == 35


def test_a_prompt_whose_last_responses_all_solved_it_is_skipped() -> None:
    curriculum = Curriculum(COUNT, solved_reward=6.0)
    state = _state()
    state.successes = {0: "1" * WINDOW, 1: "0" + "1" * (WINDOW - 1), 2: "1" * (WINDOW - 1)}
    assert {*curriculum.at(state, COUNT - 1, 0, 1).rows} == {*range(1, COUNT)}
    state.successes = dict.fromkeys(range(COUNT), "1" * WINDOW)
    with pytest.raises(PhaseEndedError, match="every prompt is solved"):
        curriculum.at(state, 1, 0, 1)


def test_a_reward_equal_to_the_bound_solves_its_prompt() -> None:
    """0.9 in fp32 is less than in fp64."""
    curriculum = Curriculum(COUNT, solved_reward=0.9)
    state = _state()
    metrics = curriculum.take(Chosen([3, 4], 2), Scores(torch.tensor([0.9, 0.89])), state)
    assert metrics["solved"] == 0.5
    assert state.successes == {3: "1", 4: "0"}


# -------------------------------------------------------------------------------------- in the run


def _trainer(directory: Path, asked: list[list[str]], **options: Any) -> PPOTrainer:
    """A run that solves prompts with a second word above w19, and appends them to `asked`."""

    def second(prompts: list[str], completions: list[str]) -> list[float]:
        asked.append(list(prompts))
        words = [prompt.split()[1] for prompt in prompts]
        # A signal to learn from, too small to solve a prompt.
        shares = tiny.count_w7(prompts, completions)
        return [float(int(w[1:]) > 19) + x / 100 for w, x in zip(words, shares, strict=True)]

    own = {"solved_reward": 1.0, "iterations": 4}
    own |= {"rollout_batch_size": 8 * WINDOW, "samples_per_prompt": WINDOW, "max_new_tokens": 2}
    return make_trainer(directory, rewards=[second], **{**own, **options})


def test_a_run_skips_the_prompts_that_it_has_solved(tmp_path: Path) -> None:
    asked: list[list[str]] = []
    trainer = _trainer(tmp_path, asked)
    trainer.train()
    solved = {row["prompt"] for row in tiny.PROMPTS if int(row["prompt"].split()[1][1:]) > 19}
    assert 0 < len(solved) < 24
    before: set[str] = set()
    for prompts in asked:
        assert not solved & before & {*prompts}
        before |= {*prompts}
    assert solved < before
    lines = records(trainer)
    assert lines[-1]["left_out"] == pytest.approx(len(solved) / 24)
    assert [line["left_out"] for line in lines] == sorted(line["left_out"] for line in lines)


def test_a_run_that_has_solved_every_prompt_ends_with_its_policy(tmp_path: Path) -> None:
    options = {"rollout_batch_size": 16 * WINDOW, "samples_per_prompt": WINDOW}
    trainer = make_trainer(tmp_path, iterations=9, solved_reward=0.0, **options)
    trainer.train()
    assert trainer.state.iteration == 2, "16 prompts of 24, then the other 8 among them"
    assert (tmp_path / "run" / "policy" / "config.json").exists()
    assert records(trainer)[-1]["left_out"] == 1.0


def test_a_resumed_run_asks_the_same_prompts(tmp_path: Path) -> None:
    asked: dict[str, list[list[str]]] = {"whole": [], "parts": []}
    uninterrupted = _trainer(tmp_path / "whole", asked["whole"])
    uninterrupted.train()
    _trainer(tmp_path / "parts", asked["parts"], iterations=2).train()
    resumed = _trainer(tmp_path / "parts", asked["parts"], resume=True)
    resumed.train()
    assert asked["whole"] == asked["parts"]
    torch.testing.assert_close(
        resumed.model.state_dict(), uninterrupted.model.state_dict(), rtol=0, atol=0
    )
    assert uninterrupted.state.successes == resumed.state.successes
