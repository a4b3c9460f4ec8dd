"""A microbatch that does not fit is halved: the gradient is the same, whatever the split.

Weights of the loss are those of the whole minibatch, so a minibatch whose memory ran out is begun
again with microbatches of half the size, and so are all that come after it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch

from fastppo.data.microbatches import Limits

Result = TypeVar("Result")


class Halving:
    """The limits of microbatches as the device has shown that it has room for them.

    Args:
        say: takes a sentence for the user.
        alone: whether this is the only process; others would wait where one begins again.
    """

    def __init__(self, say: Callable[[str], None], alone: bool = True) -> None:
        self.say, self.alone = say, alone
        self.times = 0

    def limits(self, asked: Limits) -> Limits:
        """Those of the options, halved as often as was needed."""
        tokens = None if asked.tokens is None else max(1, asked.tokens >> self.times)
        return replace(asked, sequences=max(1, asked.sequences >> self.times), tokens=tokens)

    def run(self, attempt: Callable[[Limits], Result], asked: Limits) -> Result:
        """What `attempt` gives with the first limits under which its memory does not run out.

        Raises:
            RuntimeError: it runs out with the smallest microbatch too, or on one of several ranks.
        """
        while True:
            limits = self.limits(asked)
            try:
                return attempt(limits)
            except torch.OutOfMemoryError as error:
                if not self.alone:
                    raise RuntimeError(
                        f"out of memory on one of several processes: {error}. Go on by `--resume "
                        "true` with a smaller microbatch_size or microbatch_tokens"
                    ) from None
                if limits == self._halved(asked):
                    raise RuntimeError(
                        f"out of memory with one sequence per microbatch: {error}. Try "
                        "gradient_checkpointing, a smaller max_new_tokens, or LoRA (`fastppo plan`)"
                    ) from None
            # Outside of the handler, whose error keeps the failed attempt's tensors alive.
            self.times += 1
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            size = self.limits(asked)
            shown = (
                f"{size.sequences} sequences" if size.tokens is None else f"{size.tokens} tokens"
            )
            self.say(f"out of memory: microbatches of at most {shown} from here on, same gradient")

    def _halved(self, asked: Limits) -> Limits:
        more = Halving(self.say)
        more.times = self.times + 1
        return more.limits(asked)
