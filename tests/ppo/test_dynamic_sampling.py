"""Dynamic sampling replaces prompts whose samples all have the same reward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from fastppo.data.prompts import Prompts
from fastppo.ppo.dynamic_sampling import with_replacements
from fastppo.ppo.experience import Responses
from fastppo.ppo.options.config import PPOConfig
from fastppo.ppo.trainer import PPOTrainer
from fastppo.rewards.reward import AllFailedError, Scored
from fastppo.rewards.scorer import Scores
from fastppo.rollout import Rollout
from runs import make_trainer, records


def _responses(names: str, rewards: list[float]) -> Responses:
    """Two samples for each prompt; a letter names the prompt."""
    rows = [name for name in names for _ in range(2)]
    within = torch.arange(2.0 * len(rows))
    return Responses(
        Prompts(rows, [[ord(name)] for name in rows], {"row": [*rows]}),
        Rollout(
            [[ord(name), row] for row, name in enumerate(rows)],
            ["stop"] * len(rows),
            final_values=torch.arange(float(len(rows))),
        ),
        Scores(
            torch.tensor(rewards) - within.view(-1, 2).sum(1),
            within,
            [2] * len(rows),
            {"paid": Scored(rewards, [None] * len(rows), rewards)},
        ),
    )


def test_replacements_fill_the_batch_in_the_order_of_drawing() -> None:
    asked = []
    draws = {
        2: _responses("de", [1.0, 1.0, 0.0, 1.0]),
        1: _responses("f", [2.0, 3.0]),
    }

    def draw(count: int) -> Responses:
        asked.append(count)
        return draws[count]

    first = _responses("abc", [1.0, 1.0, 0.0, 1.0, 5.0, 5.0])
    kept, drawn = with_replacements(first, draw, samples=2, rounds=9)
    assert asked == [2, 1]
    assert kept.prompts.prompts == [*"bbeeff"]
    assert kept.prompts.columns == {"row": [*"bbeeff"]}
    assert [tokens[0] for tokens in kept.rollout.tokens] == [ord(name) for name in "bbeeff"]
    assert kept.rollout.final_values.tolist() == [2.0, 3.0, 2.0, 3.0, 0.0, 1.0]
    rewards = [0.0, 1.0, 0.0, 1.0, 2.0, 3.0]
    assert kept.scores.total.tolist() == rewards
    assert [*kept.scores.terms["paid"]] == rewards
    assert kept.scores.terms["paid"].disagreement == rewards
    assert drawn.prompts.prompts == [*"aabbccddeeff"]


def test_a_draw_of_which_every_episode_failed_is_a_round_without_replacements() -> None:
    draws = iter([AllFailedError("no episode is left"), _responses("d", [0.0, 1.0])])

    def draw(count: int) -> Responses:
        drawn = next(draws)
        if isinstance(drawn, AllFailedError):
            raise drawn
        return drawn

    first = _responses("ab", [1.0, 1.0, 0.0, 1.0])
    kept, drawn = with_replacements(first, draw, samples=2, rounds=2)
    assert kept.prompts.prompts == [*"bbdd"]
    assert drawn.prompts.prompts == [*"aabbdd"]


def test_a_limit_ends_the_search_and_equal_prompts_fill_the_batch() -> None:
    first = _responses("ab", [1.0, 1.0, 2.0, 2.0])
    kept, drawn = with_replacements(
        first, lambda count: _responses("cd"[:count], [0.0, 1.0, 3.0, 3.0]), samples=2, rounds=1
    )
    assert kept.prompts.prompts == [*"aacc"]
    assert len(drawn.prompts) == 8


# -------------------------------------------------------------------------------------- in the run


def _trainer(directory: Path, **options: Any) -> PPOTrainer:
    """Half of the prompts pay the same for every response."""

    def half(prompts: list[str], completions: list[str]) -> list[float]:
        shares = tiny.count_w7(prompts, completions)
        varied = [int(prompt.split()[1][1:]) > 19 for prompt in prompts]
        lengths = [len(completion) / 100 for completion in completions]
        both = zip(shares, lengths, varied, strict=True)
        return [x + y if is_varied else 1.0 for x, y, is_varied in both]

    own = {
        "advantage": "rloo",
        "vf_coef": 0.0,
        "rollout_batch_size": 16,
        "samples_per_prompt": 4,
        "iterations": 4,
        "dynamic_sampling": 20,
    }
    return make_trainer(directory, rewards=[half], **{**own, **options})


def test_a_run_trains_on_prompts_with_different_rewards(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path)
    trainer.train()
    lines = records(trainer)
    assert all(line["frac_reward_zero_std"] == 0 for line in lines)
    drawn = sum(line["prompts_drawn"] for line in lines)
    assert drawn == trainer.state.prompts_seen > 4 * len(lines)


def test_a_resumed_run_draws_the_same_replacements(tmp_path: Path) -> None:
    whole = _trainer(tmp_path / "whole")
    whole.train()
    _trainer(tmp_path / "parts", iterations=2).train()
    resumed = _trainer(tmp_path / "parts", resume=True)
    resumed.train()
    assert resumed.state.prompts_seen == whole.state.prompts_seen
    torch.testing.assert_close(resumed.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)


def test_replaced_prompts_count_as_solved(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, solved_reward=1.0, iterations=1)
    trainer.train()
    assert len(trainer.state.successes) > 4
    assert "1111" in trainer.state.successes.values()


def test_a_critic_and_asynchronous_rollouts_refuse_it() -> None:
    with pytest.raises(ValueError, match="dynamic_sampling"):
        PPOConfig(dynamic_sampling=1)
    options = {"advantage": "rloo", "vf_coef": 0.0, "samples_per_prompt": 2}
    with pytest.raises(ValueError, match="async_steps"):
        PPOConfig(dynamic_sampling=1, async_steps=1, **options)
