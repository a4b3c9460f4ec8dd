"""One step of asynchrony: the next batch is drawn while this one is learned from.

When the responses of an iteration are handed out, a thread begins to draw those of the next, with
the weights as they are then. So from the second iteration on a batch is of the weights before the
last update, and what an iteration takes is the longer of drawing and learning, where it was both:

    max(generate, score + experience + update)

The weights that a batch was drawn with do not change under it: the engine has a copy of them, which
is replaced when both the update and the drawing are done. What is random in it follows from a seed
that is taken before, so neither depends on which of the two is faster.

The trainer sees an engine with weights of its own: the ratio of the loss and its importance weights
are to logprobs that this engine gave. A batch that is drawn and not yet learned from is part of a
checkpoint, for the weights that drew it are gone by then.
"""

from __future__ import annotations

import concurrent.futures
import copy
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastppo.models.policy import LanguageModel
from fastppo.rollout import Rollout, RolloutEngine, Sampling, check_rollout


class DrawnBatch(NamedTuple):
    """Prompts, and the responses that were drawn to them or are being drawn."""

    prompt_ids: list[list[int]]
    rollout: Future[Rollout]


class AsyncEngine(RolloutEngine):
    """Draws one batch ahead of the learner.

    Args:
        engine: has weights of its own, and takes its random numbers from `Sampling.seed`.
        vocabulary: tokens of the policy.
        longest: tokens of a response at most.
    """

    holds_weights = True

    def __init__(self, engine: RolloutEngine, vocabulary: int, longest: int) -> None:
        self.engine = engine
        self.vocabulary = vocabulary
        self.longest = longest
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollout")
        self._is_training = False
        """Whether the next call is for an iteration of the run, and not of an evaluation."""
        self._next_prompts: list[list[int]] = []
        self._learned: DrawnBatch | None = None
        """What is learned from now."""
        self._ahead: DrawnBatch | None = None
        """What comes after it."""

    def prepare(self, next_prompts: list[list[int]]) -> None:
        """Called before each iteration.

        Args:
            next_prompts: those of the iteration after it, none where there is none.
        """
        self._is_training = True
        self._next_prompts = next_prompts

    def generate(self, prompt_ids: list[list[int]], sampling: Sampling) -> Rollout:
        """The responses that were drawn ahead to these prompts; to others, what is drawn now."""
        if not self._is_training:
            return self.engine.generate(prompt_ids, sampling)
        self._is_training = False
        # Two seeds in every iteration, so that one that is made again after a resume, when its
        # batch is there already, takes the same for the next.
        now = replace(sampling, seed=sampling.drawn_seed())
        later = replace(sampling, seed=sampling.drawn_seed())
        drawn = self._ahead
        self._ahead = None
        if drawn is None or drawn.prompt_ids != prompt_ids:
            drawn = DrawnBatch(prompt_ids, _done(self.engine.generate(prompt_ids, now)))
        rollout = drawn.rollout.result()
        self._learned = drawn
        if self._next_prompts:
            drawing = self._thread.submit(self.engine.generate, self._next_prompts, later)
            self._ahead = DrawnBatch(self._next_prompts, drawing)
        return rollout

    def weights_changed(self, policy: Any) -> None:
        """Hands the policy's weights over as soon as nothing is drawn with the old ones."""
        if self._ahead is not None:
            concurrent.futures.wait([self._ahead.rollout])  # a failure is told where it is read
        self.engine.weights_changed(policy)
        self._learned = None

    def close(self) -> None:
        """Ends what is drawn ahead; an engine that cannot end it is waited for."""
        self.engine.close()
        if self._ahead is not None and self._ahead.rollout.exception() is not None:
            self._ahead = None

    def state_dict(self) -> dict[str, Any]:
        """That of the engine, with the batch of the next iteration, or of this one where its update
        is not over."""
        state = {"engine": self.engine.state_dict()}
        batch = self._learned or self._ahead
        if batch is None or batch.rollout.exception() is not None:
            return state
        rollout = batch.rollout.result()
        return state | {
            "prompt_ids": batch.prompt_ids,
            "tokens": rollout.tokens,
            "finish_reasons": rollout.finish_reasons,
            "sampler_logprobs": _as_lists(rollout.sampler_logprobs),
            "logprobs": _as_lists(rollout.logprobs),
            "versions": rollout.versions,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` gave.

        Raises:
            ValueError: the responses are not of this policy.
        """
        self.engine.load_state_dict(state.get("engine", {}))
        self._ahead = None
        if "prompt_ids" in state:
            rollout = Rollout(
                state["tokens"],
                state["finish_reasons"],
                sampler_logprobs=_as_tensors(state["sampler_logprobs"]),
                logprobs=_as_tensors(state["logprobs"]),
                versions=state["versions"],
            )
            check_rollout(rollout, self.vocabulary, self.longest)
            self._ahead = DrawnBatch(state["prompt_ids"], _done(rollout))


def copy_of(policy: LanguageModel) -> LanguageModel:
    """The policy's causal LM with weights of its own."""
    return LanguageModel(copy.deepcopy(policy.causal_lm), compute_dtype=policy.compute_dtype)


class CopyEngine(RolloutEngine):
    """Decodes with a copy of the policy, which a handover of weights replaces.

    Args:
        engine: decodes the copy.
        policy_copy: what `copy_of` returned.
    """

    holds_weights = True

    def __init__(self, engine: RolloutEngine, policy_copy: LanguageModel) -> None:
        self.engine = engine
        self.policy_copy = policy_copy
        self.draws_by_row = engine.draws_by_row

    def generate(self, prompt_ids: list[list[int]], sampling: Sampling) -> Rollout:
        return self.engine.generate(prompt_ids, sampling)

    @torch.no_grad()
    def weights_changed(self, policy: Any) -> None:
        new = policy.causal_lm.parameters()
        for old, theirs in zip(self.policy_copy.causal_lm.parameters(), new, strict=True):
            if theirs.requires_grad:
                old.copy_(theirs)


def _done(rollout: Rollout) -> Future[Rollout]:
    future: Future[Rollout] = Future()
    future.set_result(rollout)
    return future


def _as_lists(logprobs: list[Tensor] | None) -> list[list[float]] | None:
    return None if logprobs is None else [row.tolist() for row in logprobs]


def _as_tensors(logprobs: list[list[float]] | None) -> list[Tensor] | None:
    if logprobs is None:
        return None
    return [torch.tensor(row, dtype=torch.float32) for row in logprobs]
