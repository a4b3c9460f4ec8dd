"""Held-out evaluation: what the policy earns on prompts that it does not learn from.

Every `eval_interval` iterations, after the update, the policy answers `eval_prompts` and its
responses are scored, always with the same random numbers. What comes of it goes to the iteration's
metrics under `eval/`, so `checkpoint_best`, `warn_if` and `stop_if` may name it, and the responses
to the first prompts to eval_samples.jsonl. `eval_patience` ends a run whose `eval/reward` rises no
more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from fastppo.data.prompts import Prompts
from fastppo.rewards.scorer import Scorer, Scores
from fastppo.rollout import Rollout, Sampling

LOGGED_SAMPLES = 8
"""Responses of an iteration, and of an evaluation, that are written down as texts."""

SHOWN = ("reward", "kl", "response_length", "eos_rate", "turns")
"""Metrics of an evaluation, beside each reward, monitored reward and finish reason: means over its
responses."""


@dataclass(slots=True)
class Progress:
    """The evaluations of a run so far."""

    best: float | None = None
    """Of eval/reward."""
    since: int = 0
    """Evaluations after the best one."""

    def take(self, reward: float, waits: bool = False) -> None:
        """Notes an evaluation; one in which the run `waits` does not count against it."""
        # A reward that is not finite is never better.
        if reward > (-math.inf if self.best is None else self.best):
            self.best = reward
            self.since = 0
        elif not waits:
            self.since += 1

    def is_over(self, patience: int | None) -> bool:
        return patience is not None and self.since >= patience


class Evaluation:
    """The evaluations of a run.

    Args:
        prompts: None for no evaluation.
        scorer: of the run's rewards and monitored rewards.
        interval: iterations.
        modes: sampled, greedy or both.
        batch_size: responses that are generated at once.
    """

    def __init__(
        self,
        prompts: Prompts | None,
        scorer: Scorer,
        *,
        interval: int,
        modes: str,
        batch_size: int,
    ) -> None:
        self.prompts = prompts
        self.scorer = scorer
        self.interval = interval
        self.modes = modes
        self.batch_size = batch_size

    def after_update(self, trainer: Any, log: Any, *, requested: bool = False) -> dict[str, float]:
        """The metrics of an evaluation after an iteration's update, which the trainer's state takes
        note of; none where none is due or requested. Responses to the first prompts go to the
        log."""
        due = requested or (trainer.state.iteration + 1) % self.interval == 0
        if self.prompts is None or not due:
            return {}
        metrics: dict[str, float] = {}
        samples: list[dict[str, Any]] = []
        if self.modes != "greedy":
            means, records = self._evaluate(trainer, self.prompts, trainer.sampling)
            metrics |= {f"eval/{name}": value for name, value in means.items()}
            samples += [{"sampling": "sampled", **record} for record in records]
        if self.modes != "sampled":
            greedy = replace(trainer.sampling, greedy=True)
            means, records = self._evaluate(trainer, self.prompts, greedy)
            metrics |= {f"eval/greedy/{name}": value for name, value in means.items()}
            samples += [{"sampling": "greedy", **record} for record in records]
        if self.modes == "greedy":
            metrics["eval/reward"] = metrics["eval/greedy/reward"]
        # A policy that does not move yet gets no better.
        waits = trainer.state.is_warming_up(trainer.config)
        trainer.state.evaluations.take(metrics["eval/reward"], waits)
        log.samples(trainer.state.iteration, samples, held_out=True)
        return metrics

    def _evaluate(
        self, trainer: Any, prompts: Prompts, sampling: Sampling
    ) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """(means over all responses, of metrics that are themselves means over responses; the first
        responses)."""
        sums: dict[str, float] = {}
        records: list[dict[str, Any]] = []
        for begin in range(0, len(prompts), self.batch_size):
            part = prompts.select(range(begin, min(begin + self.batch_size, len(prompts))))
            result = trainer.evaluate(part, sampling, self.scorer)
            for name, value in result.items():
                if name in SHOWN or name.startswith(("reward/", "monitor/", "finish/")):
                    sums[name] = sums.get(name, 0.0) + value * len(part)
            wanted = min(len(part), LOGGED_SAMPLES - len(records))
            records += [_record(begin, row, part, result) for row in range(wanted)]
        return {name: total / len(prompts) for name, total in sums.items()}, records


def _record(begin: int, row: int, prompts: Prompts, result: dict[str, Any]) -> dict[str, Any]:
    """A line of eval_samples.jsonl: a response of an evaluation's part that begins at a prompt."""
    scores: Scores = result["scores"]
    rollout: Rollout = result["rollout"]
    scored = {**scores.terms, **scores.monitors}
    rewards = {name: values[row] for name, values in scored.items()}
    return {
        "row": begin + row,
        "prompt": prompts.prompts[row],
        "completion": result["completions"][row],
        "reward": scores.total[row].item(),
        "rewards": rewards,
        "tokens": rollout.written_lengths[row],
        "finish_reason": rollout.finish_reasons[row],
    }
