"""Recovery from running out of memory: microbatches are halved, and the gradient stays the same.

The loss weights are those of the whole minibatch, so a minibatch that ran out of memory starts
again with microbatches of half the size. Later passes keep the smaller size, and so do passes
without a gradient.

This works in a single process. With several, the others wait in a collective for the one that ran
out, so the run ends with an error. Elsewhere too, running out of memory ends the run, with the
phase and an option that halves what it needs (`explain_out_of_memory`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import torch

import fastppo
from fastppo.data.microbatches import Limits
from fastppo.ppo.options.config import PPOConfig

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

CPU_ALLOCATOR = "DefaultCPUAllocator: "
"""Part of torch's message when a CPU allocation fails; the error has no class of its own."""


class OneSequenceError(RuntimeError):
    """A microbatch of one sequence does not fit."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device or the process ran out of memory."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and CPU_ALLOCATOR in str(error)


def _message(error: BaseException) -> str:
    """Return the allocator's message without its place in the C++ source."""
    first_line = str(error).split("\n")[0]
    return first_line.rpartition(CPU_ALLOCATOR)[2] or "the process has no more"


@contextmanager
def explain_out_of_memory(phase: str, config: PPOConfig) -> Iterator[None]:
    """Replace an out-of-memory error by one that names the phase and an option that helps.

    Raises:
        RuntimeError: memory ran out in the block.
    """
    try:
        yield
    except OneSequenceError as error:
        raise RuntimeError(f"{phase}: {error}") from error
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise RuntimeError(
            f"out of memory in {phase}: {_message(error)}. {remedy(phase, config)}; `fastppo plan` "
            "prints the memory of each phase"
        ) from error


def remedy(phase: str, config: PPOConfig) -> str:
    """Return advice on how to halve the memory of a phase."""
    rows = config.generated_at_once
    if phase == "generate" and rows > 1 and config.holds_cache:
        return f"--engine_options '{{batch_size: {rows // 2}}}' halves the memory of the rollout"
    if phase == "score":
        return "Use a smaller reward model, or serve it from another process"
    if phase == "update" and not config.lora_rank:
        return "--lora_rank 16 saves the gradients and moments of all other weights"
    if config.param_dtype == "float32":
        return "--param_dtype bfloat16 halves the weights"
    return "Use a smaller max_new_tokens or a smaller model"


class MicrobatchLimits:
    """The microbatch limits that fit in memory, as far as the run has found out.

    Args:
        processes: number of processes of the run.
    """

    def __init__(self, processes: int = 1) -> None:
        self.processes = processes
        self.halvings = 0

    def fit(self, run: Callable[[Limits], Result], wanted: Limits, sequences: int) -> Result:
        """Call `run` with microbatch limits, and again with half of them while memory runs out.

        Args:
            run: a pass over a batch. It must start over when it is called again.
            wanted: the limits of the options.
            sequences: size of the batch.

        Raises:
            OneSequenceError: a microbatch of one sequence does not fit.
            RuntimeError: memory ran out in one of several processes.
        """
        while True:
            limits = _halved(wanted, self.halvings)
            try:
                return run(limits)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                message = _message(error)  # the error itself would keep the pass's tensors alive
            if self.processes > 1:
                raise RuntimeError(
                    f"out of memory in one of several processes: {message}. Resume "
                    "(`--resume true`) with a smaller microbatch_size or microbatch_tokens"
                )
            if limits == _halved(wanted, self.halvings + 1):
                raise OneSequenceError(
                    f"out of memory with one sequence per microbatch: {message}. Try "
                    "gradient_checkpointing, a smaller max_new_tokens, or LoRA (`fastppo plan`)"
                )
            self._halve(wanted, sequences)

    def _halve(self, wanted: Limits, sequences: int) -> None:
        self.halvings += 1
        if wanted.tokens is None:
            # A limit above the number of sequences changes nothing.
            while _halved(wanted, self.halvings).sequences >= max(sequences, 2):
                self.halvings += 1
        fastppo.empty_cache()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        limits = _halved(wanted, self.halvings)
        size = f"{limits.tokens} tokens"
        if limits.tokens is None:
            size = f"{limits.sequences} sequences"
        logger.info(f"out of memory: microbatches of at most {size} from now on, same gradient")


def _halved(limits: Limits, times: int) -> Limits:
    """Return limits halved `times` times, of at least one sequence or token."""
    tokens = None if limits.tokens is None else max(1, limits.tokens >> times)
    return replace(limits, sequences=max(1, limits.sequences >> times), tokens=tokens)
