"""Which prompts are asked: sorted, weighed or left out, the same in every run of one seed."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from fastppo.data.prompts import Prompts
from fastppo.data.rows import visiting_order
from fastppo.ppo.curriculum import WINDOW, Chosen, Curriculum
from fastppo.ppo.options.config import PPOConfig
from fastppo.ppo.state import RunState
from fastppo.ppo.trainer import PPOTrainer
from fastppo.rewards.scorer import Scores
from runs import make_trainer, records

COUNT = 10
DIFFICULTY = [3, 1, 2, 1, 5, 4, 9, 8, 7, 6]

FUNCTIONS = """
import numpy

def of_column(prompts, difficulty):
    difficulty.reverse()  # a copy
    return difficulty[::-1]

def of_numpy(prompts):
    return [numpy.int64(len(prompt)) for prompt in prompts]

def too_few(prompts):
    return [1.0]

def negative(prompts):
    return [-1.0] * len(prompts)

def raises(prompts):
    raise KeyError("no")
"""


def _prompts(**columns: list[Any]) -> Prompts:
    texts = [f"w{row}" for row in range(COUNT)]
    return Prompts(texts, [[row + 3] for row in range(COUNT)], columns)


def _curriculum(
    prompts: Prompts | None = None, **options: Any
) -> tuple[Curriculum, RunState, list]:
    config = PPOConfig(**options)
    said: list[str] = []
    prompts = prompts or _prompts(difficulty=DIFFICULTY)
    return Curriculum(prompts, config, said.append), RunState.of(config), said


def _asked(curriculum: Curriculum, state: RunState, iterations: int, count: int) -> list[list[int]]:
    """The rows of iterations in which every response earns as many as its row."""
    batches = []
    for _ in range(iterations):
        chosen = curriculum.at(state, count, 0, 1)
        batches.append(chosen.rows)
        curriculum.take(chosen, Scores(torch.tensor([float(row) for row in chosen.rows])), state)
        state.iteration += 1
    return batches


@pytest.fixture
def functions(tmp_path: Path) -> str:
    path = tmp_path / "difficulty.py"
    path.write_text(FUNCTIONS)
    return str(path)


# ---------------------------------------------------------------------------------- order, weights


def test_without_options_epochs_are_shuffled_as_ever() -> None:
    curriculum, state, _ = _curriculum()
    asked = _asked(curriculum, state, 5, 7)
    assert [*chain(*asked)] == visiting_order(COUNT, 0, 35, 0)
    assert state.prompts_seen == 35


@pytest.mark.parametrize("spec", ["difficulty", "of_column"])
def test_an_epoch_goes_from_the_least_to_the_greatest(spec: str, functions: str) -> None:
    order = spec if spec == "difficulty" else f"{functions}:{spec}"
    curriculum, state, _ = _curriculum(prompt_order=order)
    for _ in range(3):
        rows = [*chain(*_asked(curriculum, state, 2, 5))]
        assert sorted(rows) == list(range(COUNT))
        assert [DIFFICULTY[row] for row in rows] == sorted(DIFFICULTY)


def test_equal_ones_are_shuffled_in_each_epoch() -> None:
    curriculum, state, _ = _curriculum(_prompts(same=[1] * COUNT), prompt_order="same")
    assert [*chain(*_asked(curriculum, state, 4, 5))] == visiting_order(COUNT, 0, 20, 0)


def test_prompts_are_drawn_by_weight_each_once_in_an_iteration() -> None:
    """Of 4 weights, 1 to 4, the first of a draw has its share of 4000 within four deviations."""
    weights = [1.0, 2.0, 3.0, 4.0, 0, 0, 0, 0, 0, 0]
    curriculum, state, _ = _curriculum(_prompts(w=weights), prompt_weights="w")
    firsts: Counter[int] = Counter()
    for iteration in range(4000):
        state.iteration = iteration
        rows = curriculum.at(state, 3, 0, 1).rows
        assert len({*rows}) == 3
        assert {*rows} <= {0, 1, 2, 3}
        firsts[rows[0]] += 1
    for row in range(4):
        share = weights[row] / 10
        deviation = (share * (1 - share) * 4000) ** 0.5
        assert abs(firsts[row] - share * 4000) < 4 * deviation, row


def test_more_than_there_are_come_in_rounds() -> None:
    curriculum, state, _ = _curriculum(
        _prompts(w=[1, 1, 0, 0, 0, 0, 0, 0, 0, 0]), prompt_weights="w"
    )
    rows = curriculum.at(state, 5, 0, 1).rows
    assert {*rows[:2]} == {*rows[2:4]} == {0, 1}


def test_a_draw_follows_from_seed_and_iteration() -> None:
    def draws(seed: int) -> list[list[int]]:
        curriculum, state, _ = _curriculum(prompt_weights="difficulty")
        batches = []
        for state.iteration in range(3):
            torch.rand(7)
            batches.append(curriculum.at(state, 4, seed, 1).rows)
        return batches

    assert draws(0) == draws(0)
    assert draws(0) != draws(1)
    assert len({tuple(rows) for rows in draws(0)}) == 3


# ------------------------------------------------------------------------------------- leaving out


def test_a_prompt_whose_last_responses_all_solved_it_is_asked_no_more() -> None:
    curriculum, state, _ = _curriculum(solved_reward=6.0)
    state.successes = {0: "1" * WINDOW, 1: "0" + "1" * (WINDOW - 1), 2: "1" * (WINDOW - 1)}
    assert {*curriculum.at(state, COUNT - 1, 0, 1).rows} == {*range(1, COUNT)}


def test_a_reward_of_just_the_bound_has_solved_its_prompt() -> None:
    """0.9 in fp32 is less than in fp64."""
    curriculum, state, _ = _curriculum(solved_reward=0.9)
    metrics = curriculum.take(Chosen([3, 4], 2), Scores(torch.tensor([0.9, 0.89])), state)
    assert metrics["solved"] == 0.5
    assert state.successes == {3: "1", 4: "0"}


# ------------------------------------------------------------------------------------------ refused


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"prompt_order": "hardness"}, "no such column of the prompts; there are difficulty, text"),
        ({"prompt_order": "text"}, "prompt 1: expected a finite number, got 'easy'"),
        ({"prompt_weights": "sign"}, "prompt 2: expected a finite number >= 0, got -1"),
        ({"prompt_weights": "zero"}, "prompt_weights=zero: every weight is 0"),
        ({"prompt_weights": "PATH:too_few"}, "expected a number for each of 10 prompts, got "),
        ({"prompt_weights": "PATH:negative"}, "expected a finite number >= 0, got -1.0"),
        ({"prompt_order": "PATH:raises"}, r"raises raised KeyError\('no'\)"),
        ({"prompt_order": "PATH:nowhere"}, "no function 'nowhere' there; it has of_column, of_num"),
    ],
)
def test_what_gives_no_numbers_is_refused(
    options: dict[str, Any], says: str, functions: str
) -> None:
    columns = {"difficulty": DIFFICULTY, "text": ["easy"] * COUNT, "sign": [1, -1] * 5}
    options = {
        name: value.replace("PATH", functions) if isinstance(value, str) else value
        for name, value in options.items()
    }
    with pytest.raises(ValueError, match=says):
        _curriculum(_prompts(**columns, zero=[0] * COUNT), **options)


# -------------------------------------------------------------------------------------- in the run


def _trainer(directory: Path, asked: list[list[str]], **options: Any) -> PPOTrainer:
    """A run that solves prompts whose second word is above w19, and writes down what it asks."""

    def second(prompts: list[str], completions: list[str]) -> list[float]:
        asked.append(list(prompts))
        words = [prompt.split()[1] for prompt in prompts]
        # A part that is learned from, too small to matter to what is solved.
        shares = tiny.count_w7(prompts, completions)
        return [float(int(w[1:]) > 19) + x / 100 for w, x in zip(words, shares, strict=True)]

    own = {"solved_reward": 1.0, "iterations": 4}
    own |= {"rollout_batch_size": 8 * WINDOW, "samples_per_prompt": WINDOW, "max_new_tokens": 2}
    return make_trainer(directory, rewards=[second], **{**own, **options})


def test_a_run_asks_no_more_what_it_has_solved(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("weights", ["", "PATH:of_numpy"])
def test_a_resumed_run_asks_what_the_whole_one_asked(
    weights: str, tmp_path: Path, functions: str
) -> None:
    more = {"prompt_weights": weights.replace("PATH", functions)}
    asked: dict[str, list[list[str]]] = {"whole": [], "parts": []}
    uninterrupted = _trainer(tmp_path / "whole", asked["whole"], **more)
    uninterrupted.train()
    _trainer(tmp_path / "parts", asked["parts"], iterations=2, **more).train()
    resumed = _trainer(tmp_path / "parts", asked["parts"], resume=True, **more)
    resumed.train()
    assert asked["whole"] == asked["parts"]
    torch.testing.assert_close(
        resumed.model.state_dict(), uninterrupted.model.state_dict(), rtol=0, atol=0
    )
    assert uninterrupted.state.successes == resumed.state.successes


def test_another_order_is_another_run(tmp_path: Path) -> None:
    rows = [row | {"a": i, "b": -i} for i, row in enumerate(tiny.PROMPTS)]
    make_trainer(tmp_path, prompts=rows, iterations=1, prompt_order="a").train()
    other = make_trainer(tmp_path, prompts=rows, iterations=2, prompt_order="b", resume=True)
    with pytest.raises(ValueError, match="the content of prompt_order"):
        other.train()
