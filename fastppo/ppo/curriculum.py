"""Prompts of each iteration: shuffled epochs without solved prompts.

An epoch is a shuffled pass over all prompts. With `solved_reward`, a prompt whose last `WINDOW`
responses all reached it is skipped from then on.

The prompts follow from the seed, the position in the epochs, and the solved prompts. A checkpoint
holds all three, and every rank has the same scores, so all ranks choose the same prompts.
"""

from __future__ import annotations

from typing import NamedTuple

from fastppo.data.datasets import visited
from fastppo.ppo.state import RunState
from fastppo.rewards.scorer import Scores
from fastppo.run.signals import PhaseEndedError

WINDOW = 8
"""Consecutive responses to a prompt that must reach `solved_reward`."""


class Chosen(NamedTuple):
    """Prompts of an iteration."""

    rows: list[int]
    """Row of the prompt of each response, in order."""
    position: int
    """Position of the next iteration in the endless sequence of epochs."""


class Curriculum:
    """Choose the prompts of each iteration.

    Args:
        count: prompts of the run.
        solved_reward: reward of a solution; None skips no prompt.
    """

    def __init__(self, count: int, solved_reward: float | None = None) -> None:
        self.count = count
        self.solved_reward = solved_reward

    def at(self, state: RunState, count: int, seed: int, samples: int) -> Chosen:
        """Choose `count` prompts, each `samples` times in a row.

        Args:
            state: of the run.

        Raises:
            PhaseEndedError: every prompt is solved.
        """
        if all(self._is_solved(row, state) for row in range(self.count)):
            raise PhaseEndedError("every prompt is solved (solved_reward)")
        position = state.prompts_seen
        following = visited(self.count, position, seed)
        rows: list[int] = []
        while len(rows) < count * samples:
            row = next(following)
            position += 1
            if not self._is_solved(row, state):
                rows += [row] * samples
        return Chosen(rows, position)

    def take(self, chosen: Chosen, scores: Scores, state: RunState) -> dict[str, float]:
        """Record solved prompts and the position of the next iteration.

        Args:
            scores: of the responses.

        Returns:
            dict: with `solved_reward`, the share of responses that reached it (`solved`), and the
            share of prompts to skip from now on (`left_out`).
        """
        state.prompts_seen = chosen.position
        if self.solved_reward is None:
            return {}
        # Compared as fp32 tensors: as a Python float, a score of 0.9 would be less than 0.9.
        solves = (scores.total >= self.solved_reward).tolist()
        for row, is_solved in zip(chosen.rows, solves, strict=True):
            recent = state.successes.get(row, "") + ("1" if is_solved else "0")
            state.successes[row] = recent[-WINDOW:]
        left_out = sum(self._is_solved(row, state) for row in state.successes)
        return {
            "solved": sum(solves) / len(solves),
            "left_out": left_out / self.count,
        }

    def _is_solved(self, row: int, state: RunState) -> bool:
        return state.successes.get(row) == "1" * WINDOW
