"""A microbatch that does not fit is halved: the gradient is the same, whatever the split.

Weights of the loss are those of the whole minibatch, so a minibatch whose memory ran out is begun
again with microbatches of half the size, and so are all that come after it. Passes without a
gradient, which keep no activations, are halved by a count of their own.

Several ranks begin again together. They can where memory runs out in the loss, which no rank leaves
before all have said whether they had room for it. In a pass of the trunk, forward or backward, the
others wait for the layers of the one that has none, and the run ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch

from fastppo.data.microbatches import Limits
from fastppo.data.world import World

Result = TypeVar("Result")


class NoRoomError(RuntimeError):
    """Memory ran out on a rank, and all ranks know it."""


def agreed(world: World, work: Callable[[], Result]) -> Result:
    """What `work` gives, which waits for no other rank.

    Raises:
        NoRoomError: on every rank, where memory ran out on one of several.
    """
    if world.size == 1:
        return work()
    found: list[Result] = []
    error = None
    try:
        found.append(work())
    except torch.OutOfMemoryError as raised:
        error = str(raised)
    errors = [(rank, text) for rank, text in enumerate(world.gather(error)) if text is not None]
    if errors:
        rank, text = errors[0]
        raise NoRoomError(f"rank {rank}: {text}")
    return found[0]


class Halving:
    """The limits of passes as the device has shown that it has room for them.

    Args:
        say: takes a sentence for the user.
        alone: whether this is the only process.
        settle: frees what a pass that did not come to its end has gathered.
        reading: the passes have no gradient.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        alone: bool = True,
        settle: Callable[[], None] = lambda: None,
        *,
        reading: bool = False,
    ) -> None:
        self.say, self.alone, self.settle = say, alone, settle
        self.times = 0
        self.reading = reading

    def limits(self, asked: Limits) -> Limits:
        """Those of the options, halved as often as was needed."""
        tokens = None if asked.tokens is None else max(1, asked.tokens >> self.times)
        return replace(asked, sequences=max(1, asked.sequences >> self.times), tokens=tokens)

    def run(self, attempt: Callable[[Limits], Result], asked: Limits, rows: int) -> Result:
        """What `attempt` gives with the first limits under which its memory does not run out.

        Args:
            rows: the sequences that there are; limits that hold as many change nothing.

        Raises:
            RuntimeError: it runs out with the smallest microbatch too, or on one of several ranks
                where the others do not know it.
        """
        while True:
            limits = self.limits(asked)
            try:
                return attempt(limits)
            except (torch.OutOfMemoryError, NoRoomError) as error:
                if not self.alone and not isinstance(error, NoRoomError):
                    raise RuntimeError(
                        f"out of memory on one of several processes: {error}. Go on by `--resume "
                        f"true` with a smaller microbatch_size or microbatch_tokens"
                    ) from None
                if limits == self._halved(asked):
                    raise RuntimeError(
                        f"out of memory with one sequence per {self._names[0]}: {error}. Try "
                        f"{'' if self.reading else 'gradient_checkpointing, '}a smaller "
                        "max_new_tokens, or LoRA (`fastppo plan`)"
                    ) from None
            # Outside of the handler, whose error keeps the failed attempt's tensors alive.
            self.times += 1
            while asked.tokens is None and self.limits(asked).sequences >= max(rows, 2):
                self.times += 1
            self.settle()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            size = self.limits(asked)
            shown = (
                f"{size.sequences} sequences" if size.tokens is None else f"{size.tokens} tokens"
            )
            same = "numbers" if self.reading else "gradient"
            self.say(
                f"out of memory: {self._names[1]} of at most {shown} from here on, same {same}"
            )

    @property
    def _names(self) -> tuple[str, str]:
        """Of one pass, and of several."""
        if self.reading:
            return "pass without a gradient", "passes without a gradient"
        return "microbatch", "microbatches"

    def _halved(self, asked: Limits) -> Limits:
        more = Halving(self.say, reading=self.reading)
        more.times = self.times + 1
        return more.limits(asked)
