"""Which prompts an iteration asks: in what order, how often, and which are left out.

Without options an epoch is a shuffled pass over all prompts. `prompt_order` sorts each epoch by a
number of each prompt, least first; `prompt_weights` draws prompts in proportion to one, each once
before any comes twice in an iteration. Both are a column of the prompts or a function

    difficulty(prompts, **columns) -> list      one number per prompt

which is given the columns that it names. A function of weights that names `iteration` or `success`
is called anew in each iteration; `success` has, per prompt, the share of its last `success_window`
responses whose reward was at least `solved_reward`, None while there are none. `leave_out` leaves
out prompts of which all of those, or none, were solved.

All of it follows from the seed, the iteration, the place in the epochs and what was solved, which a
checkpoint holds. Every rank has the same scores, and so the same prompts.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

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

MOVING = ("iteration", "success")
"""Parameters of a function of weights that is called in each iteration."""

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
        None, "Reward from which on a response has solved its prompt, reward units"
    )
    success_window: int = option(
        8, "Last responses of a prompt that its success is counted over", minimum=1
    )
    leave_out: Literal["none", "solved", "unsolved", "both"] = option(
        "none",
        "Leave out prompts of which all of success_window responses were solved, none, or either",
    )
    leave_out_for: int | None = option(
        None,
        "Iterations after which a prompt that is left out is asked again; none given means never",
        minimum=1,
    )

    def curriculum_combinations(self) -> Iterator[tuple[bool, str]]:
        """(whether options do not go together, why)."""
        yield (
            bool(self.prompt_order and self.prompt_weights),
            "prompt_order goes through all prompts in turn and prompt_weights draws them: expected "
            "one of them",
        )
        yield (
            self.leave_out != "none" and self.solved_reward is None,
            f"leave_out={self.leave_out} needs solved_reward, the reward of a response that has "
            "solved its prompt",
        )


class Seen(NamedTuple):
    """What is known of a prompt that was asked."""

    recent: str
    """Its last responses, newest last: 1 for solved, 0 for not."""
    iteration: int
    """When it was last asked."""


class Chosen(NamedTuple):
    """The prompts of an iteration."""

    rows: list[int]
    """Of each response, in order."""
    position: int
    """Where the next iteration begins in the endless sequence of epochs."""


class Numbers:
    """A number of each prompt: of a column, or of a function.

    Args:
        what: the option; spec: its value.
        prompts: every prompt of the run.
        world: the first rank calls the function, and every rank has what it returns.

    Raises:
        ValueError: there is no such column or function, or it gives no numbers.
    """

    def __init__(self, what: str, spec: str, prompts: Prompts, world: World) -> None:
        self.what, self.spec, self.prompts, self.world = what, spec, prompts, world
        self.function: Callable[..., Any] | None = None
        self.moving: tuple[str, ...] = ()
        self.fixed: list[float] = []
        self.fingerprint = fingerprint.of_text(spec)  # a column's content is the prompts'
        if spec in prompts.columns:
            self.fixed = self._checked(prompts.columns[spec])
            return
        if ":" not in spec:
            columns = ", ".join(prompts.columns) or "none"
            raise ValueError(f"{what}={spec}: no such column of the prompts; there are {columns}")
        term = load_callable(spec, what)
        self.function, self.fingerprint = term.function, term.fingerprint
        named = inspect.signature(term.function).parameters
        if what == "prompt_weights":
            self.moving = tuple(name for name in MOVING if name in named)
        if not self.moving:
            self.fixed = self._asked({})

    def at(self, iteration: int, success: Callable[[], list[float | None]]) -> list[float]:
        """Those of an iteration."""
        if not self.moving:
            return self.fixed
        return self._asked({"iteration": iteration, "success": success()})

    def _asked(self, moving: dict[str, Any]) -> list[float]:
        def ask() -> list[float]:
            function: Any = self.function
            parameters = inspect.signature(function).parameters
            takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
            given = {k: v for k, v in self.prompts.columns.items() if takes_all or k in parameters}
            given |= {name: value for name, value in moving.items() if name in parameters}
            try:
                # What it draws leaves no trace, or the ranks would go on from different states.
                with torch.random.fork_rng(devices=[]):
                    found = function(
                        *copy.deepcopy(([*self.prompts.prompts],)), **copy.deepcopy(given)
                    )
            except Exception as error:  # of whatever the function does
                raise ValueError(f"{self.what}={self.spec} raised {error!r}") from error
            return self._checked(found)

        return self.world.first(ask)

    def _checked(self, found: Any) -> list[float]:
        found = found.tolist() if hasattr(found, "tolist") else found
        count = len(self.prompts)
        if not isinstance(found, (list, tuple)) or len(found) != count:
            raise ValueError(
                f"{self.what}={self.spec}: expected a number for each of {count} prompts, got "
                f"{shown(found)}"
            )
        # Numbers of NumPy or torch among them.
        found = [value.item() if hasattr(value, "item") else value for value in found]
        least = 0.0 if self.what == "prompt_weights" else -math.inf
        for row, value in enumerate(found, 1):
            is_number = isinstance(value, (int, float)) and math.isfinite(value)
            if not is_number or value < least:
                wanted = "a finite number" + (" >= 0" if least == 0 else "")
                raise ValueError(
                    f"{self.what}={self.spec}, prompt {row}: expected {wanted}, got {shown(value)}"
                )
        numbers = [float(value) for value in found]
        if least == 0 and not any(numbers):
            raise ValueError(f"{self.what}={self.spec}: every weight is 0")
        return numbers


class Curriculum:
    """The prompts of each iteration.

    Args:
        prompts: every prompt of the run.
        options: of the run.
        say: takes a sentence for the user.
        world: the ranks, for functions that are called.
    """

    def __init__(
        self,
        prompts: Prompts,
        options: CurriculumOptions,
        say: Callable[[str], None] = print,
        world: World | None = None,
    ) -> None:
        self.prompts, self.options, self.say = prompts, options, say
        world = world or World()
        self.order, self.weights = (
            Numbers(what, spec, prompts, world) if spec else None
            for what, spec in (
                ("prompt_order", options.prompt_order),
                ("prompt_weights", options.prompt_weights),
            )
        )
        names = self.weights.moving if self.weights is not None else ()
        if "success" in names and options.solved_reward is None:
            raise ValueError(
                f"prompt_weights={options.prompt_weights} asks for success, which needs "
                "solved_reward"
            )
        if options.solved_reward is not None and not ("success" in names or self.leaves):
            raise ValueError(
                "solved_reward has an effect only with leave_out, or with a function of "
                "prompt_weights that names success"
            )

    @property
    def leaves(self) -> bool:
        return self.options.leave_out != "none"

    @property
    def fingerprints(self) -> dict[str, str]:
        """Of what sorts and weighs the prompts, by option."""
        both = (self.order, self.weights)
        return {each.what: each.fingerprint for each in both if each is not None}

    # ---------------------------------------------------------------------- which prompts are asked

    def at(self, state: Any, count: int, seed: int, samples: int) -> Chosen:
        """`count` prompts, each `samples` times in a row.

        Args:
            state: the run's, `RunState`.

        Raises:
            PhaseEndedError: every prompt is left out for good; the user is told.
            ValueError: a function gives no numbers, or a weight to none that is asked.
        """
        out = self._left_out(state.successes, state.iteration)
        asked = [row not in out for row in range(len(self.prompts))]
        if not any(asked):
            self.say(f"leave_out={self.options.leave_out}: every prompt is left out; the run ends")
            raise PhaseEndedError
        if self.weights is None:
            rows, position = self._in_turn(state.prompts_seen, count, seed, asked)
        else:
            rows = self._drawn(state, count, seed, asked)
            position = state.prompts_seen + count
        return Chosen([row for row in rows for _ in range(samples)], position)

    def _in_turn(
        self, position: int, count: int, seed: int, asked: Sequence[bool]
    ) -> tuple[list[int], int]:
        """The next `count` of the endless sequence that are asked, and the place after them."""
        rows: list[int] = []
        while len(rows) < count:
            epoch, offset = divmod(position, len(asked))
            order = shuffled(len(asked), seed, epoch)
            if self.order is not None:
                order.sort(key=self.order.fixed.__getitem__)  # equal ones stay shuffled
            for row in order[offset:]:
                position += 1
                if asked[row]:
                    rows.append(row)
                if len(rows) == count:
                    break
        return rows, position

    def _drawn(self, state: Any, count: int, seed: int, asked: Sequence[bool]) -> list[int]:
        """`count` by weight, without replacement until none is left: the largest of the logarithms
        plus Gumbel noise (Efraimidis and Spirakis 2006)."""
        assert self.weights is not None
        weights = torch.tensor(
            self.weights.at(state.iteration, lambda: self._success(state)), dtype=torch.float64
        )
        weights[~torch.tensor(asked)] = 0.0
        possible = int((weights > 0).sum())
        if not possible:
            raise ValueError(
                f"prompt_weights={self.weights.spec}: every prompt that is not left out has weight "
                f"0 in iteration {state.iteration}"
            )
        # As for epochs: neighbouring seeds and iterations do not meet.
        generator = torch.Generator().manual_seed(seed * 1_000_003 + state.iteration)
        rows: list[int] = []
        while len(rows) < count:
            uniform = torch.rand(len(weights), generator=generator, dtype=torch.float64)
            noise = -(-uniform.clamp(min=SMALLEST).log()).log()
            best = (weights.log() + noise).topk(min(count - len(rows), possible))
            rows += best.indices.tolist()
        return rows

    def _success(self, state: Any) -> list[float | None]:
        found: list[float | None] = [None] * len(self.prompts)
        for row, seen in state.successes.items():
            found[row] = seen.recent.count("1") / len(seen.recent)
        return found

    # --------------------------------------------------------------------------- what is left out

    def _left_out(self, successes: Mapping[int, Seen], iteration: int) -> dict[int, str]:
        """Of each prompt that is left out in an iteration, `solved` or `unsolved`; where
        leave_out_for lets prompts come back and none would be asked, those that have been out
        longest do now."""
        kinds = {"solved": "0", "unsolved": "1"}  # what is not among its responses
        wanted = self.options.leave_out
        found: dict[int, str] = {}
        again = self.options.leave_out_for
        for row, seen in successes.items() if self.leaves else ():
            if len(seen.recent) < self.options.success_window:
                continue
            if again is not None and iteration - seen.iteration > again:
                continue
            for kind, absent in kinds.items():
                if wanted in (kind, "both") and absent not in seen.recent:
                    found[row] = kind
        if again is not None and len(found) == len(self.prompts):
            longest = min(successes[row].iteration for row in found)
            found = {row: kind for row, kind in found.items() if successes[row].iteration > longest}
        return found

    def take(self, chosen: Chosen, scores: Scores, state: Any) -> dict[str, float]:
        """Notes what was solved and where the next iteration begins.

        Args:
            scores: of the responses, before any that have none are dropped.

        Returns:
            dict: `solved`, the share of the responses; `left_out`, and `left_out/KIND`, shares of
            the prompts in the next iteration. Only what the options ask for.
        """
        state.prompts_seen = chosen.position
        bound, window = self.options.solved_reward, self.options.success_window
        if bound is None:
            return {}
        kept = range(len(chosen.rows)) if scores.kept is None else scores.kept
        # As tensors: a score has the bits of fp32, and 0.9 is not less than 0.9.
        is_solved = (scores.total >= bound).tolist()
        for place in kept:
            row = chosen.rows[place]
            before = state.successes.get(row, Seen("", 0)).recent
            recent = (before + "01"[is_solved[place]])[-window:]
            state.successes[row] = Seen(recent, state.iteration)
        solved = sum(is_solved[place] for place in kept)
        metrics = {"solved": solved / max(1, len(kept))}
        if self.leaves:
            out = [*self._left_out(state.successes, state.iteration + 1).values()]
            count = len(self.prompts)
            metrics["left_out"] = len(out) / count
            if self.options.leave_out == "both":
                for kind in ("solved", "unsolved"):
                    metrics[f"left_out/{kind}"] = out.count(kind) / count
        return metrics
