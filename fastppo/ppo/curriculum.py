"""Which prompts an iteration asks: in what order, how often, and without those that are solved.

Without options an epoch is a shuffled pass over all prompts. `prompt_order` sorts each epoch by a
number of each prompt, least first; `prompt_weights` draws prompts in proportion to one, each once
before any comes twice in an iteration. Both are a column of the prompts or a function

    difficulty(prompts, **columns) -> list      one number per prompt

which is given the columns that it names. A function of weights that names `iteration` or `success`
is called in each iteration; `success` has, per prompt, the share of its last `WINDOW` responses
whose reward was at least `solved_reward`, None while there are none. With `solved_reward`, a prompt
whose last `WINDOW` responses all reached it is asked no more.

All of it follows from the seed, the iteration, the place in the epochs and what was solved, which a
checkpoint holds. Every rank has the same scores, and so the same prompts.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fastppo.data import fingerprint
from fastppo.data.prompts import Prompts
from fastppo.data.rows import shuffled
from fastppo.data.world import World
from fastppo.functional.arguments import shown
from fastppo.rewards.loading import load_callable
from fastppo.rewards.scorer import Scores
from fastppo.run.options import Options, option
from fastppo.run.signals import PhaseEndedError

WINDOW = 8
"""Last responses to a prompt that its success is counted over."""

SMALLEST = 1e-300
"""Uniform draws are kept above it: the logarithm of 0 would let a weight of 0 be drawn."""


@dataclass(kw_only=True, frozen=True)
class CurriculumOptions(Options):
    """Curriculum."""

    prompt_order: str = option(
        "", "Column of numbers, or file.py:function, by which an epoch is sorted, least first"
    )
    prompt_weights: str = option(
        "", "Column of numbers, or file.py:function, in proportion to which prompts are drawn"
    )
    solved_reward: float | None = option(
        None,
        "Reward that solves a prompt, which is asked no more when its last 8 responses reached it",
    )


class Chosen(NamedTuple):
    """The prompts of an iteration."""

    rows: list[int]
    """The prompt's row, for each response in order."""
    position: int
    """Where the next iteration begins in the endless sequence of epochs."""


class PromptNumbers:
    """A number for each prompt: a column, or what a function returns.

    Args:
        option_name: `prompt_order` or `prompt_weights`; spec: its value.
        prompts: every prompt of the run.
        world: the first rank calls the function, and every rank has what it returns.

    Raises:
        ValueError: there is no such column or function.
    """

    def __init__(self, option_name: str, spec: str, prompts: Prompts, world: World) -> None:
        self.option_name = option_name
        self.spec = spec
        self.prompts = prompts
        self.world = world
        self.function: Callable[..., Any] | None = None
        self.fingerprint = fingerprint.of_text(spec)  # a column's content is the prompts'
        if spec in prompts.columns:
            return
        if ":" not in spec:
            columns = ", ".join(prompts.columns) or "none"
            raise ValueError(
                f"{option_name}={spec}: no such column of the prompts; there are {columns}"
            )
        term = load_callable(spec, option_name)
        self.function = term.function
        self.fingerprint = term.fingerprint

    def names(self, argument: str) -> bool:
        """Whether the function names this argument."""
        return self.function is not None and argument in inspect.signature(self.function).parameters

    def values(self, **moving: Any) -> list[float]:
        """The numbers, [prompts].

        Args:
            moving: arguments beside the columns, for a function that names them.

        Raises:
            ValueError: the function raises, or there is no finite number for each prompt.
        """
        if self.function is None:
            return self._checked(self.prompts.columns[self.spec])
        return self.world.first(lambda: self._checked(self._call(moving)))

    def _call(self, moving: dict[str, Any]) -> Any:
        assert self.function is not None
        parameters = inspect.signature(self.function).parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        columns = {
            name: column
            for name, column in self.prompts.columns.items()
            if takes_all or name in parameters
        }
        named = {name: value for name, value in moving.items() if name in parameters}
        arguments = copy.deepcopy({**columns, **named})
        try:
            # What it draws leaves no trace, or the ranks would go on from different states.
            with torch.random.fork_rng(devices=[]):
                return self.function(copy.deepcopy([*self.prompts.prompts]), **arguments)
        except Exception as error:  # of whatever the function does
            raise ValueError(f"{self.option_name}={self.spec} raised {error!r}") from error

    def _checked(self, values: Any) -> list[float]:
        values = values.tolist() if hasattr(values, "tolist") else values
        count = len(self.prompts)
        if not isinstance(values, (list, tuple)) or len(values) != count:
            raise ValueError(
                f"{self.option_name}={self.spec}: expected a number for each of {count} prompts, "
                f"got {shown(values)}"
            )
        # A list may hold numbers of NumPy or torch.
        numbers = [value.item() if hasattr(value, "item") else value for value in values]
        is_weight = self.option_name == "prompt_weights"
        for row, number in enumerate(numbers, 1):
            is_number = isinstance(number, (int, float)) and math.isfinite(number)
            if not is_number or (is_weight and number < 0):
                wanted = "a finite number >= 0" if is_weight else "a finite number"
                raise ValueError(
                    f"{self.option_name}={self.spec}, prompt {row}: expected {wanted}, got "
                    f"{shown(number)}"
                )
        return [float(number) for number in numbers]


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
        """Of what sorts and weighs the prompts, by option."""
        self.order: list[float] | None = None
        self.weights: PromptNumbers | None = None
        world = world or World()
        if options.prompt_order:
            order = PromptNumbers("prompt_order", options.prompt_order, prompts, world)
            self.fingerprints["prompt_order"] = order.fingerprint
            self.order = order.values()
        if options.prompt_weights:
            self.weights = PromptNumbers("prompt_weights", options.prompt_weights, prompts, world)
            self.fingerprints["prompt_weights"] = self.weights.fingerprint
            if self.weights.names("success") and options.solved_reward is None:
                raise ValueError(
                    f"prompt_weights={options.prompt_weights} asks for success, which needs "
                    "solved_reward"
                )
        self._fixed_weights: list[float] | None = None
        if self.weights is not None and not (
            self.weights.names("iteration") or self.weights.names("success")
        ):
            self._fixed_weights = self.weights.values()
            self._check_weights(self._fixed_weights)

    def at(self, state: Any, count: int, seed: int, samples: int) -> Chosen:
        """`count` prompts, each `samples` times in a row.

        Args:
            state: the run's, `RunState`.

        Raises:
            PhaseEndedError: every prompt is solved; the user is told.
            ValueError: a function gives no numbers, or no prompt that is left has a weight.
        """
        unsolved = [not self._is_solved(row, state) for row in range(len(self.prompts))]
        if not any(unsolved):
            self.say("every prompt is solved (solved_reward); the run ends")
            raise PhaseEndedError
        if self.weights is None:
            rows, position = self._in_turn(state.prompts_seen, count, seed, unsolved)
        else:
            rows = self._drawn(state, count, seed, unsolved)
            position = state.prompts_seen + count
        return Chosen([row for row in rows for _ in range(samples)], position)

    def take(self, chosen: Chosen, scores: Scores, state: Any) -> dict[str, float]:
        """Notes what was solved and where the next iteration begins.

        Args:
            scores: of the responses, before any that have none are dropped.

        Returns:
            dict: with `solved_reward`, `solved`, the share of the responses, and `left_out`, the
            share of the prompts that are asked no more.
        """
        state.prompts_seen = chosen.position
        if self.solved_reward is None:
            return {}
        scored = range(len(chosen.rows)) if scores.kept is None else scores.kept
        # As tensors: a score has the bits of fp32, and 0.9 is not less than 0.9.
        solves = (scores.total >= self.solved_reward).tolist()
        for response in scored:
            row = chosen.rows[response]
            recent = state.successes.get(row, "") + ("1" if solves[response] else "0")
            state.successes[row] = recent[-WINDOW:]
        solved = sum(solves[response] for response in scored)
        left_out = sum(self._is_solved(row, state) for row in state.successes)
        return {
            "solved": solved / max(1, len(scored)),
            "left_out": left_out / len(self.prompts),
        }

    def _is_solved(self, row: int, state: Any) -> bool:
        return state.successes.get(row) == "1" * WINDOW

    def _in_turn(
        self, position: int, count: int, seed: int, unsolved: Sequence[bool]
    ) -> tuple[list[int], int]:
        """The next `count` unsolved prompts of the endless sequence, and the place after them."""
        rows: list[int] = []
        while len(rows) < count:
            epoch, offset = divmod(position, len(unsolved))
            order = shuffled(len(unsolved), seed, epoch)
            if self.order is not None:
                order.sort(key=self.order.__getitem__)  # equal ones stay shuffled
            for row in order[offset:]:
                position += 1
                if unsolved[row]:
                    rows.append(row)
                if len(rows) == count:
                    break
        return rows, position

    def _drawn(self, state: Any, count: int, seed: int, unsolved: Sequence[bool]) -> list[int]:
        """`count` by weight, without replacement until none is left: the largest of the logarithms
        plus Gumbel noise (Efraimidis and Spirakis 2006)."""
        weights = torch.tensor(self._weights_at(state), dtype=torch.float64)
        weights[~torch.tensor(unsolved)] = 0.0
        possible = self._check_weights(weights.tolist())
        # As for epochs: neighbouring seeds and iterations do not meet.
        generator = torch.Generator().manual_seed(seed * 1_000_003 + state.iteration)
        rows: list[int] = []
        while len(rows) < count:
            uniform = torch.rand(len(weights), generator=generator, dtype=torch.float64)
            noise = -(-uniform.clamp(min=SMALLEST).log()).log()
            best = (weights.log() + noise).topk(min(count - len(rows), possible))
            rows += best.indices.tolist()
        return rows

    def _weights_at(self, state: Any) -> list[float]:
        assert self.weights is not None
        if self._fixed_weights is not None:
            return self._fixed_weights
        success: list[float | None] = [None] * len(self.prompts)
        for row, recent in state.successes.items():
            success[row] = recent.count("1") / len(recent)
        return self.weights.values(iteration=state.iteration, success=success)

    def _check_weights(self, weights: Sequence[float]) -> int:
        """How many weights are above 0; raises ValueError for none."""
        assert self.weights is not None
        possible = sum(weight > 0 for weight in weights)
        if not possible:
            raise ValueError(
                f"prompt_weights={self.weights.spec}: the weight of every prompt that is not "
                "solved is 0"
            )
        return possible
