"""Generate the next batch while the learner trains on this one: one step of asynchrony.

After returning the responses of an iteration, the engine starts a thread that generates those of
the next one. From the second iteration on, a batch therefore comes from the weights before the last
update, and an iteration takes

    max(generate, score + experience + update)

The engine generates with a copy of the weights, which is replaced once both the update and the
generation are complete. Seeds are drawn before the thread starts, so results do not depend on
timing.

The trainer treats it as an engine with different weights: old logprobs and importance weights use
the sampler's logprobs. A checkpoint includes the generated batch, as its weights no longer exist.
"""

from __future__ import annotations

import concurrent.futures
import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from fastppo.models.policy import LanguageModel
from fastppo.rollout import Rollout, RolloutEngine, Sampling
from fastppo.rollout.saved import as_state, from_state


class _Batch(NamedTuple):
    """Prompts and the future of their responses."""

    prompt_ids: list[list[int]]
    rollout: Future[Rollout]


class AsyncEngine(RolloutEngine):
    """Generate one batch ahead of the learner.

    Args:
        engine: an engine with `holds_weights` and `draws_by_row`.
    """

    holds_weights = True

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine = engine
        self.is_quantized = engine.is_quantized
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollout")
        self.is_training = False
        """Whether the next call generates for training rather than for an evaluation."""
        self._next_prompts: list[list[int]] = []
        self._current: _Batch | None = None
        self._next: _Batch | None = None

    def prepare(self, next_prompts: list[list[int]]) -> None:
        """Prepare for an iteration.

        Args:
            next_prompts: the prompts of the following iteration; empty in the last iteration.
        """
        self.is_training = True
        self._next_prompts = next_prompts

    def generate(self, prompt_ids: list[list[int]], sampling: Sampling) -> Rollout:
        """Return the responses generated ahead for these prompts; generate those of others now."""
        if not self.is_training:
            return self.engine.generate(prompt_ids, sampling)
        following = self._next_prompts
        return self.ahead(
            prompt_ids,
            sampling,
            functools.partial(self.engine.generate, prompt_ids),
            functools.partial(self.engine.generate, following) if following else None,
        )

    def ahead(
        self,
        prompt_ids: list[list[int]],
        sampling: Sampling,
        generate: Callable[[Sampling], Rollout],
        generate_next: Callable[[Sampling], Rollout] | None,
    ) -> Rollout:
        """Return the responses generated ahead for these prompts, and start those of the next.

        Args:
            generate: generates the responses if they were not generated ahead.
            generate_next: generates those of the next prompts, in a thread; None if there are none.
        """
        self.is_training = False
        # Always two seeds, so a resumed iteration, which already has its batch, draws the same seed
        # for the next one.
        now = replace(sampling, seed=sampling.drawn_seed())
        later = replace(sampling, seed=sampling.drawn_seed())
        drawn = self._next
        self._next = None
        if drawn is None or drawn.prompt_ids != prompt_ids:
            drawn = _Batch(prompt_ids, _done(generate(now)))
        rollout = drawn.rollout.result()
        self._current = drawn
        if generate_next is not None:
            drawing = self._thread.submit(generate_next, later)
            self._next = _Batch(self._next_prompts, drawing)
        return rollout

    def weights_changed(self, policy: Any) -> None:
        """Hand over the policy's weights once the next batch is complete."""
        if self._next is not None:
            concurrent.futures.wait([self._next.rollout])  # `generate` raises its errors
        self.engine.weights_changed(policy)
        self._current = None

    def close(self) -> None:
        """Stop the thread's generation, or wait for it if the engine cannot be stopped."""
        self.engine.close()
        if self._next is not None and self._next.rollout.exception() is not None:
            self._next = None

    def state_dict(self) -> dict[str, Any]:
        """Return the engine's state and a batch: this iteration's until its update has ended, then
        the next one's."""
        state = {"engine": self.engine.state_dict()}
        batch = self._current or self._next
        if batch is None or batch.rollout.exception() is not None:
            return state
        return state | {"batch": [batch.prompt_ids, as_state(batch.rollout.result())]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.engine.load_state_dict(state.get("engine", {}))
        self._next = None
        if "batch" in state:
            prompt_ids, rollout = state["batch"]
            self._next = _Batch(prompt_ids, _done(from_state(rollout)))


class CopyEngine(RolloutEngine):
    """Decode with a copy of the policy.

    Args:
        engine: the engine that decodes with the copy.
        policy_copy: a copy of the policy's causal LM.
    """

    holds_weights = True

    def __init__(self, engine: RolloutEngine, policy_copy: LanguageModel) -> None:
        self.engine = engine
        self.policy_copy = policy_copy
        self.draws_by_row = engine.draws_by_row

    def generate(self, prompt_ids: list[list[int]], sampling: Sampling) -> Rollout:
        return self.engine.generate(prompt_ids, sampling)

    def conversations(self) -> AbstractContextManager[None]:
        return self.engine.conversations()

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
