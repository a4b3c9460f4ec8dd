"""Which prompts an iteration asks: in what order, how often, and without those that are solved.

Without options an epoch is a shuffled pass over all prompts. `prompt_order` sorts each epoch by a
number of each prompt, least first; `prompt_weights` draws prompts in proportion to one, each once
before any comes twice in an iteration. Both are a column of the prompts or a function

    difficulty(prompts, **columns) -> list      one number per prompt

which is given the columns that it names. With `solved_reward`, a prompt whose last `WINDOW`
responses all reached it is no longer asked.

All of it follows from the seed, the iteration, the place in the epochs and what was solved, which a
checkpoint holds. Every rank has the same scores, and so the same prompts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fastppo.data import fingerprint
from fastppo.data.prompts import Prompts
from fastppo.data.rows import visited
from fastppo.data.world import World
from fastppo.ppo.options.prompts import CurriculumOptions
from fastppo.ppo.prompt_numbers import checked_numbers, column_numbers
from fastppo.rewards.calling import UserCodeError, call, keywords_for, place_of
from fastppo.rewards.loading import load_callable
from fastppo.rewards.reward import plain_values
from fastppo.rewards.scorer import Scores
from fastppo.run.signals import PhaseEndedError

WINDOW = 8
"""Last responses to a prompt that its success is counted over."""

SMALLEST = 1e-300
"""Uniform draws are kept above it: the logarithm of 0 would let a weight of 0 be drawn."""


class Chosen(NamedTuple):
    """The prompts of an iteration."""

    rows: list[int]
    """The prompt's row, for each response in order."""
    position: int
    """Where the next iteration begins in the endless sequence of epochs."""


class Curriculum:
    """The prompts of each iteration.

    Args:
        prompts: every prompt of the run.
        options: of the run.
        say: takes a sentence for the user.
        world: the ranks, for functions that are called.

    Raises:
        ValueError: a column or function is not there, or gives no numbers.
    """

    def __init__(
        self,
        prompts: Prompts,
        options: CurriculumOptions,
        say: Callable[[str], None] = print,
        world: World | None = None,
    ) -> None:
        self.prompts = prompts
        self.solved_reward = options.solved_reward
        self.say = say
        self.fingerprints: dict[str, str] = {}
        """Fingerprints of `prompt_order` and `prompt_weights`."""
        world = world or World()
        self.order = self._load("prompt_order", options.prompt_order, world)
        self.weights = self._load("prompt_weights", options.prompt_weights, world)

    def _load(self, option_name: str, spec: str | None, world: World) -> list[float] | None:
        """The number of each prompt, of a column or a function; None where the option is not set.

        Raises:
            ValueError: there is no such column or function, or it has no number for each prompt.
        """
        if not spec:
            return None
        columns = self.prompts.columns
        if spec in columns or ":" not in spec:
            # What the column holds is in the fingerprint of the prompts.
            self.fingerprints[option_name] = fingerprint.of_text(spec)
            return column_numbers(option_name, spec, columns)
        term = load_callable(spec, option_name)
        self.fingerprints[option_name] = term.fingerprint
        return world.on_main_rank(lambda: self._call(option_name, spec, term.function))

    def _call(self, option_name: str, spec: str, function: Callable[..., Any]) -> list[float]:
        """What a function returns for copies of the prompts and of the columns that it names;
        raises as `_load` does."""
        prompts = copy.deepcopy(list(self.prompts.prompts))
        columns = keywords_for(function, self.prompts.columns)
        try:
            numbers = call(lambda: plain_values(function(prompts, **columns)))
        except UserCodeError as error:
            place = place_of(error.__cause__)
            raise ValueError(f"{option_name}={spec} {error}{place}") from error
        return checked_numbers(option_name, spec, numbers, len(self.prompts))

    def at(self, state: Any, count: int, seed: int, samples: int) -> Chosen:
        """`count` prompts, each `samples` times in a row.

        Args:
            state: the run's, `RunState`.

        Raises:
            PhaseEndedError: every prompt that may be asked is solved.
        """
        weights = self.weights or [1.0] * len(self.prompts)
        may_be_asked = [
            weight > 0 and not self._is_solved(row, state) for row, weight in enumerate(weights)
        ]
        if not any(may_be_asked):
            raise PhaseEndedError("every prompt is solved (solved_reward)")
        if self.weights is None:
            rows, position = self._in_turn(state.prompts_seen, count, seed, may_be_asked)
        else:
            # As for epochs: neighbouring seeds and iterations do not meet.
            rows = self._drawn(count, seed * 1_000_003 + state.iteration, may_be_asked)
            position = state.prompts_seen + count
        return Chosen([row for row in rows for _ in range(samples)], position)

    def take(self, chosen: Chosen, scores: Scores, state: Any) -> dict[str, float]:
        """Notes what was solved and where the next iteration begins.

        Args:
            scores: of the responses.

        Returns:
            dict: with `solved_reward`, `solved`, the share of the responses, and `left_out`, the
            share of the prompts that are no longer asked.
        """
        state.prompts_seen = chosen.position
        if self.solved_reward is None:
            return {}
        # As tensors: a score has the bits of fp32, and 0.9 is not less than 0.9.
        solves = (scores.total >= self.solved_reward).tolist()
        for row, is_solved in zip(chosen.rows, solves, strict=True):
            recent = state.successes.get(row, "") + ("1" if is_solved else "0")
            state.successes[row] = recent[-WINDOW:]
        left_out = sum(self._is_solved(row, state) for row in state.successes)
        return {
            "solved": sum(solves) / len(solves),
            "left_out": left_out / len(self.prompts),
        }

    def _is_solved(self, row: int, state: Any) -> bool:
        return state.successes.get(row) == "1" * WINDOW

    def _in_turn(
        self, position: int, count: int, seed: int, may_be_asked: Sequence[bool]
    ) -> tuple[list[int], int]:
        """The next `count` of the endless sequence that may be asked, and the place after them."""
        key = None if self.order is None else self.order.__getitem__
        following = visited(len(may_be_asked), position, seed, key)
        rows: list[int] = []
        while len(rows) < count:
            row = next(following)
            position += 1
            if may_be_asked[row]:
                rows.append(row)
        return rows, position

    def _drawn(self, count: int, seed: int, may_be_asked: Sequence[bool]) -> list[int]:
        """`count` by weight, without replacement until none is left: the largest of the logarithms
        plus Gumbel noise (Efraimidis and Spirakis 2006)."""
        assert self.weights is not None
        weights = torch.tensor(self.weights, dtype=torch.float64)
        weights[~torch.tensor(may_be_asked)] = 0.0
        generator = torch.Generator().manual_seed(seed)
        rows: list[int] = []
        while len(rows) < count:
            uniform = torch.rand(len(weights), generator=generator, dtype=torch.float64)
            noise = -(-uniform.clamp(min=SMALLEST).log()).log()
            left = min(count - len(rows), sum(may_be_asked))
            rows += (weights.log() + noise).topk(left).indices.tolist()
        return rows
