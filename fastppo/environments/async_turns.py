"""Run the next batch's episodes while the learner trains on this one.

`fastppo.rollout.async_engine` describes the order of weights and batches. Here a whole batch of
episodes runs in its thread, environments included. What the environments wait for (tools, servers,
games) overlaps with the update, and so does the generation if it has a device of its own. On the
learner's device both share the time, so that the overlap is small.

Each turn has a seed of its own, drawn from the batch's. torch's global generator belongs to the
update meanwhile: an environment that draws from it makes the run irreproducible, and is not
isolated from it as in other runs.
"""

from __future__ import annotations

import functools

from fastppo.data.prompts import Prompts
from fastppo.environments.turns import Turns
from fastppo.plugins.calling import shares_random_state
from fastppo.rollout import Rollout, RolloutEngine, Sampling
from fastppo.rollout.async_engine import AsyncEngine


class AsyncTurns:
    """Run episodes one batch ahead.

    Args:
        turns: runs a batch of episodes.
    """

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        self.name = turns.name
        self.has_rewards = turns.has_rewards
        self.max_turns = turns.max_turns
        self.metrics = turns.metrics
        self.close = turns.close
        self._following: Prompts | None = None

    def prepare(self, following: Prompts, engine: RolloutEngine) -> None:
        """Prepare for an iteration; see `AsyncEngine.prepare`."""
        self._following = following if len(following) else None
        engine.prepare(following.token_ids)

    def run(
        self, prompts: Prompts, engine: RolloutEngine, sampling: Sampling, *, held_out: bool = False
    ) -> tuple[Prompts, Rollout]:
        """Run an episode for each prompt; see `Turns.run`. Evaluations run theirs now."""
        assert isinstance(engine, AsyncEngine)
        if not engine.is_training:
            return self.turns.run(prompts, engine.engine, sampling, held_out=held_out)
        rollout = engine.ahead(
            prompts.token_ids,
            sampling,
            functools.partial(self._episodes, prompts, engine.engine),
            None if self._following is None else self._in_thread(self._following, engine.engine),
        )
        assert rollout.prompt_ids is not None
        return Prompts(prompts.prompts, rollout.prompt_ids, prompts.columns), rollout

    def _episodes(self, prompts: Prompts, engine: RolloutEngine, sampling: Sampling) -> Rollout:
        """Run episodes, and return them with the token ids of their prompts."""
        begun, rollout = self.turns.run(prompts, engine, sampling)
        rollout.prompt_ids = begun.token_ids
        return rollout

    def _in_thread(self, prompts: Prompts, engine: RolloutEngine) -> functools.partial[Rollout]:
        """Return a function that runs episodes while the learner draws random numbers."""
        return functools.partial(shares_random_state(self._episodes), prompts, engine)
