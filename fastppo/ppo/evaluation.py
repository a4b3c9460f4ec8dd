"""Held-out evaluation: rewards on prompts that are not trained on.

Every `eval_interval` iterations, after the update, the policy answers `eval_prompts`, always with
the same random seed. The results are metrics under `eval/`, so `checkpoint_best`, `warn_if` and
`stop_if` can use them. The responses to the first prompts are in eval_samples.jsonl. The policy is
also evaluated before the first update, under `before/`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from transformers import set_seed

from fastppo.data.batch import Batch
from fastppo.data.microbatches import Limits, split
from fastppo.data.prompts import Prompts
from fastppo.ppo.metrics import policy_metrics, response_metrics, standard_errors
from fastppo.ppo.out_of_memory import explain_out_of_memory
from fastppo.rewards.scorer import Scorer, Scores
from fastppo.rollout import Rollout, Sampling
from fastppo.run.checkpoint import random_state, restore_random_state

LOGGED_SAMPLES = 8
"""Responses per iteration, and per evaluation, in the sample records."""

SHOWN = ("reward", "kl", "response_length", "eos_rate", "turns")
"""Evaluation metrics besides those of each reward, monitor, finish reason and tool call: means over
the responses. `reward_error`, NaN for a single prompt, and `monitor_error/NAME` are the standard
errors."""


@contextmanager
def random_state_restored(seed: int | None = None) -> Iterator[None]:
    """Restore the random state of torch, NumPy and Python after the block.

    Args:
        seed: seed for the block; None continues from the current state.
    """
    before = random_state()
    try:
        if seed is not None:
            set_seed(seed)
        yield
    finally:
        restore_random_state(before)


def evaluate_policy(
    trainer: Any,
    prompts: Prompts,
    sampling: Sampling,
    scorer: Scorer | None = None,
    *,
    first: int = 0,
) -> dict[str, Any]:
    """Generate and score responses without learning from them.

    Args:
        trainer: a `PPOTrainer`.
        scorer: by default the trainer's.
        first: number of the first prompt, if these are a part of all prompts. Every part has its
            own random numbers.

    Returns:
        dict: means of reward, each reward term and monitor, kl (nats per sequence, with a
        reference), entropy (nats per token), response_length and eos_rate; `completions`, the
        texts; `scores`; `rollout`.
    """
    options = trainer.config.at(trainer.state.iteration)
    with (
        random_state_restored((options.seed + first) % 2**32),
        explain_out_of_memory("evaluation", options),
    ):
        prompts, rollout = trainer.episode_runner.run(prompts, trainer.engine, sampling)
        scores = trainer.score(prompts, rollout, options, scorer)
    batch = Batch.of(prompts.token_ids, rollout.tokens, trainer.device, rollout.response_mask)

    def policy_means(limits: Limits) -> dict[str, float]:
        plan = split(batch, limits, trainer.world)
        return policy_metrics(
            batch, plan, options, model=trainer.model, reference=trainer.reference
        )

    return {
        **response_metrics(scores, rollout, {}),
        **trainer.in_microbatches(policy_means, batch, options),
        "completions": trainer.completions(prompts, rollout),
        "scores": scores,
        "rollout": rollout,
    }


@dataclass(slots=True)
class BestEvaluations:
    """Best held-out rewards of a run so far; None before the first evaluation."""

    best: float | None = None
    """The highest eval/reward."""
    best_greedy: float | None = None
    """The highest eval/greedy/reward."""

    def take(self, reward: float, *, greedy: bool = False) -> bool:
        """Record an evaluation and return whether it is the best so far."""
        name = "best_greedy" if greedy else "best"
        best = getattr(self, name)
        is_best = reward > (-math.inf if best is None else best)
        if is_best:
            setattr(self, name, reward)
        return is_best


class Evaluation:
    """Evaluates the policy during a run.

    Args:
        prompts: held-out prompts; None for no evaluation.
        scorer: computes rewards and monitored rewards.
        interval: iterations between evaluations.
        modes: sampled, greedy or both.
        batch_size: responses generated at a time.
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
        """Evaluate after an iteration's update if it is due or requested, and return the metrics.

        The trainer's state records the best rewards, and the log the first responses.
        """
        due = requested or (trainer.state.iteration + 1) % self.interval == 0
        if self.prompts is None or not due:
            return {}
        metrics, samples = self._in_modes(trainer, self.prompts, "eval/")
        is_best = self._take(trainer, metrics, "eval/")
        for prefix in self._prefixes("eval/"):
            trainer.say(
                f"iteration {trainer.state.iteration + 1}: {_line(metrics, prefix)}"
                + (", the best so far" if is_best[prefix] else "")
            )
        log.samples(trainer.state.iteration, samples, held_out=True)
        return metrics

    def before_update(self, trainer: Any) -> dict[str, float]:
        """Evaluate the initial policy before the first iteration, and return the metrics."""
        if self.prompts is None or trainer.state.iteration > 0:
            return {}
        trainer.say(f"before training: evaluating on {len(self.prompts)} held-out prompts")
        metrics, _ = self._in_modes(trainer, self.prompts, "before/")
        self._take(trainer, metrics, "before/")
        for prefix in self._prefixes("before/"):
            trainer.say(f"before training: {_line(metrics, prefix)}")
        return metrics

    def _take(self, trainer: Any, metrics: dict[str, float], prefix: str) -> dict[str, bool]:
        """Record the rewards in the trainer's state.

        Returns:
            By the prefix of each mode's metrics, whether its reward is the best so far.
        """
        best = trainer.state.evaluations
        is_best = {prefix: best.take(metrics[f"{prefix}reward"])}
        if self.modes != "sampled":
            greedy = f"{prefix}greedy/"
            is_best[greedy] = best.take(metrics[f"{greedy}reward"], greedy=True)
        return is_best

    def _prefixes(self, prefix: str) -> list[str]:
        """Return the prefix of each mode's metrics."""
        prefixes = {"sampled": [""], "greedy": ["greedy/"], "both": ["", "greedy/"]}
        return [prefix + mode_prefix for mode_prefix in prefixes[self.modes]]

    def _in_modes(
        self, trainer: Any, prompts: Prompts, prefix: str
    ) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Return (metrics of each mode under the prefix, records of the first responses)."""
        metrics: dict[str, float] = {}
        samples: list[dict[str, Any]] = []
        for mode_prefix in self._prefixes(prefix):
            greedy = mode_prefix.endswith("greedy/")
            sampling = replace(trainer.sampling, greedy=True) if greedy else trainer.sampling
            means, records = self._evaluate(trainer, prompts, sampling)
            metrics |= {f"{mode_prefix}{name}": value for name, value in means.items()}
            name = "greedy" if greedy else "sampled"
            samples += [{"sampling": name, **record} for record in records]
        if self.modes == "greedy":
            for name in ("reward", "reward_error"):
                metrics[f"{prefix}{name}"] = metrics[f"{prefix}greedy/{name}"]
        return metrics, samples

    def _evaluate(
        self, trainer: Any, prompts: Prompts, sampling: Sampling
    ) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Return (means over all responses, records of the first responses)."""
        sums: dict[str, float] = {}
        counts: dict[str, int] = {}
        scores: list[Scores] = []
        records: list[dict[str, Any]] = []
        for begin in range(0, len(prompts), self.batch_size):
            part = prompts.select(range(begin, min(begin + self.batch_size, len(prompts))))
            result = evaluate_policy(trainer, part, sampling, self.scorer, first=begin)
            applying = result["scores"].counts
            for name, value in result.items():
                if name in SHOWN or name.startswith(("reward/", "monitor/", "finish/", "tools/")):
                    count = applying.get(name, len(part))
                    sums[name] = sums.get(name, 0.0) + value * count
                    counts[name] = counts.get(name, 0) + count
            scores.append(result["scores"])
            wanted = min(len(part), LOGGED_SAMPLES - len(records))
            records += [_record(begin, row, part, result) for row in range(wanted)]
        means = {name: total / counts[name] for name, total in sums.items()}
        means |= {"reward_error": math.nan, **standard_errors(Scores.joined(scores))}
        return means, records


def _line(metrics: dict[str, float], prefix: str) -> str:
    """Return the console's line on an evaluation."""
    mode = "held out, greedy" if prefix.endswith("greedy/") else "held out"
    kl = metrics.get(f"{prefix}kl")  # absent without a reference
    return (
        f"{mode}: reward {metrics[f'{prefix}reward']:.3f} ± {metrics[f'{prefix}reward_error']:.3f}"
        f"{'' if kl is None else f', KL {round(kl, 2) + 0.0:.2f}'}, "
        f"length {metrics[f'{prefix}response_length']:.0f}"
    )


def _record(begin: int, row: int, prompts: Prompts, result: dict[str, Any]) -> dict[str, Any]:
    """Return a line of eval_samples.jsonl."""
    scores: Scores = result["scores"]
    rollout: Rollout = result["rollout"]
    scored = {**scores.terms, **scores.monitors}
    rewards = {name: values.or_none[row] for name, values in scored.items()}
    return {
        "row": begin + row,
        "prompt": prompts.prompts[row],
        "completion": result["completions"][row],
        "reward": scores.total[row].item(),
        "rewards": rewards,
        "tokens": rollout.generated_lengths[row],
        "finish_reason": rollout.finish_reasons[row],
        **rollout.turns_record(row),
    }
