"""A microbatch that does not fit is halved: the gradient is the same, whatever the split.

Weights of the loss are those of the whole minibatch, so a minibatch whose memory ran out is begun
again with microbatches of half the size, and so are all passes that come after it. Passes without
a gradient, which keep no activations, have the same limits.

One process can do that alone. Of several, all but one wait in a collective for the one whose memory
ran out, and the run ends with a sentence. Memory that runs out elsewhere ends the run too, with the
phase and the option that halves what it holds (`explain_out_of_memory`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType

import torch

from fastppo.data.microbatches import Limits
from fastppo.ppo.options.config import PPOConfig

CPU_ALLOCATOR = "DefaultCPUAllocator: "
"""In the text of torch's error where a CPU's memory runs out, which has no class of its own."""


class OneSequenceError(RuntimeError):
    """A microbatch of one sequence does not fit."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether a device's memory, or the process's, has run out."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and CPU_ALLOCATOR in str(error)


def sentence_of(error: BaseException) -> str:
    """What an allocator says, without where in its source it says it."""
    first_line = str(error).split("\n")[0]
    return first_line.rpartition(CPU_ALLOCATOR)[2] or "the process has no more"


@contextmanager
def explain_out_of_memory(phase: str, config: PPOConfig) -> Iterator[None]:
    """Memory that runs out in the block ends the run with the phase and what halves its need.

    Raises:
        RuntimeError: it has run out.
    """
    try:
        yield
    except OneSequenceError as error:
        raise RuntimeError(f"{phase}: {error}") from error
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise RuntimeError(
            f"out of memory in {phase}: {sentence_of(error)}. {remedy(phase, config)}; `fastppo "
            "plan` says what each phase needs"
        ) from error


def remedy(phase: str, config: PPOConfig) -> str:
    """The option that halves what a phase holds, with its value."""
    rows = config.generate_batch_size or config.rollout_batch_size
    if phase == "generate" and rows > 1 and config.holds_cache:
        return f"--generate_batch_size {rows // 2} halves what a rollout holds at once"
    if phase == "score":
        return "a smaller reward model, or one on a server, holds less in this process"
    if phase == "update" and not config.lora_rank:
        return "--lora_rank 16 leaves out the gradients and moments of all other weights"
    if config.param_dtype == "float32":
        return "--param_dtype bfloat16 halves the weights"
    return "a smaller max_new_tokens, or a smaller model, needs less"


class Attempt:
    """A pass that may run out of memory, as a context: gives its limits, and remembers the error in
    place of raising it."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.error: str | None = None

    def __enter__(self) -> Limits:
        return self.limits

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if error is None or not is_out_of_memory(error):
            return False
        # The sentence alone: the error itself keeps the failed attempt's tensors alive.
        self.error = sentence_of(error)
        return True


class MicrobatchLimits:
    """The limits of microbatches that fit in the device's memory, as far as the run has learned.

    Args:
        say: takes a sentence for the user.
        processes: of the run.
    """

    def __init__(self, say: Callable[[str], None], processes: int = 1) -> None:
        self.say = say
        self.processes = processes
        self.halvings = 0

    def attempts(self, wanted: Limits, sequences: int) -> Iterator[Attempt]:
        """Attempts at a pass over so many sequences, until one of them fits:

            for attempt in fitting.attempts(wanted, len(batch)):
                with attempt as limits:
                    ...

        Raises:
            OneSequenceError: a microbatch of one sequence does not fit either.
            RuntimeError: there are other processes, which cannot begin again.
        """
        while True:
            limits = self.halved(wanted, self.halvings)
            attempt = Attempt(limits)
            yield attempt
            if attempt.error is None:
                return
            if self.processes > 1:
                raise RuntimeError(
                    f"out of memory on one of several processes: {attempt.error}. Resume "
                    "(`--resume true`) with a smaller microbatch_size or microbatch_tokens"
                )
            if limits == self.halved(wanted, self.halvings + 1):
                raise OneSequenceError(
                    f"out of memory with one sequence per microbatch: {attempt.error}. Try "
                    "gradient_checkpointing, a smaller max_new_tokens, or LoRA (`fastppo plan`)"
                )
            self._halve(wanted, sequences)

    def _halve(self, wanted: Limits, sequences: int) -> None:
        self.halvings += 1
        if wanted.tokens is None:
            # Limits that hold every sequence there is change nothing.
            while self.halved(wanted, self.halvings).sequences >= max(sequences, 2):
                self.halvings += 1
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        limits = self.halved(wanted, self.halvings)
        size = f"{limits.tokens} tokens"
        if limits.tokens is None:
            size = f"{limits.sequences} sequences"
        self.say(f"out of memory: microbatches of at most {size} from here on, same gradient")

    @staticmethod
    def halved(limits: Limits, times: int) -> Limits:
        """Limits of half the size, so many times over, but at least of one sequence or token."""
        tokens = None if limits.tokens is None else max(1, limits.tokens >> times)
        return replace(limits, sequences=max(1, limits.sequences >> times), tokens=tokens)
