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
from typing import Any

from transformers import set_seed

from fastppo.activity import begin_stage, during
from fastppo.data.microbatches import Limits, split
from fastppo.data.prompts import Prompts
from fastppo.ppo.algorithm import PPO
from fastppo.ppo.metrics import LOGGED_SAMPLES, policy_metrics, response_metrics, standard_errors
from fastppo.ppo.out_of_memory import explain_out_of_memory
from fastppo.ppo.rows import Rows
from fastppo.rewards.reward import AllFailedError
from fastppo.rewards.scorer import Scorer, Scores
from fastppo.rollout import Rollout, Sampling
from fastppo.run.checkpoint import random_state, restore_random_state

SHOWN = ("reward", "kl", "response_length", "eos_rate", "turns", "rows", "invalid_actions")
"""Evaluation metrics besides those of each reward, monitor, finish reason and tool call: means over
the responses. `reward_error`, NaN for a single prompt, and `monitor_error/NAME` are the standard
errors."""


SHOWN_GROUPS = ("reward/", "monitor/", "finish/", "outcome/", "tools/")
"""Beginnings of the names of evaluation metrics with several members."""


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
    ppo: PPO,
    prompts: Prompts,
    sampling: Sampling,
    scorer: Scorer | None = None,
    *,
    first: int = 0,
) -> dict[str, Any]:
    """Generate and score responses without learning from them.

    Args:
        ppo: the algorithm with the parts of the run.
        scorer: by default that of the run.
        first: number of the first prompt, if these are a part of all prompts. Every part has its
            own random numbers.

    Returns:
        dict: means of reward, each reward term and monitor, kl (nats per sequence, with a
        reference), entropy (nats per token), response_length and eos_rate; `completions`, the
        texts; `prompts`, `scores`, `rollout`, without failed episodes that are dropped.

    Raises:
        AllFailedError: all episodes failed, and failed ones are dropped.
    """
    config = ppo.config
    coefficients = ppo.state.coefficient_control.at(ppo.state.iteration)
    with (
        random_state_restored((config.seed + first) % 2**32),
        explain_out_of_memory("evaluation", config),
        during("evaluating"),
    ):
        begin_stage(f"from prompt {first + 1}" if first else "")
        prompts, rollout = ppo.parts.episode_runner.run(
            prompts, ppo.engine, sampling, held_out=True
        )
        scores = ppo.score(prompts, rollout, coefficients, scorer)
    batch = Rows.of(prompts.token_ids, rollout).batch(ppo.parts.device)

    def policy_means(limits: Limits) -> dict[str, float]:
        plan = split(batch, limits, ppo.world)
        return policy_metrics(
            batch, len(prompts), plan, config, model=ppo.model, reference=ppo.reference
        )

    return {
        **response_metrics(scores, rollout, {}),
        **ppo.parts.episode_runner.metrics(),
        **ppo.in_microbatches(policy_means, batch),
        "prompts": prompts,
        "completions": ppo.completions(prompts, rollout),
        "scores": scores,
        "rollout": rollout,
    }


class Evaluation:
    """Evaluates the policy during a run.

    Args:
        ppo: the algorithm with the parts and the state of the run.
        prompts: held-out prompts; None for no evaluation.
    """

    def __init__(self, ppo: PPO, prompts: Prompts | None) -> None:
        self.ppo = ppo
        self.prompts = prompts
        self.interval = ppo.config.eval_interval
        self.batch_size = ppo.config.rollout_batch_size

    def before_update(self) -> dict[str, float]:
        """Evaluate the initial policy before the first iteration, and return the metrics."""
        if self.prompts is None or self.ppo.state.iteration > 0:
            return {}
        say = self.ppo.reporter.say
        say(f"before training: evaluating on {len(self.prompts)} held-out prompts")
        means, _ = self._evaluate(self.prompts)
        self.ppo.state.take_evaluation(means["reward"])
        say(f"before training: {_line(means)}")
        return {f"before/{name}": value for name, value in means.items()}

    def after_update(self, log: Any, *, requested: bool = False) -> dict[str, float]:
        """Evaluate after an iteration's update if it is due or requested, and return the metrics.

        Args:
            log: its `samples` records the first responses.
        """
        iteration = self.ppo.state.iteration
        due = requested or (iteration + 1) % self.interval == 0
        if self.prompts is None or not due:
            return {}
        means, samples = self._evaluate(self.prompts)
        is_best = self.ppo.state.take_evaluation(means["reward"])
        best = ", the best so far" if is_best else ""
        self.ppo.reporter.say(f"iteration {iteration + 1}: {_line(means)}{best}")
        log.samples(iteration, samples, held_out=True)
        return {f"eval/{name}": value for name, value in means.items()}

    def _evaluate(self, prompts: Prompts) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Return (means over all responses, records of the first responses)."""
        sums: dict[str, float] = {}
        counts: dict[str, int] = {}
        scores: list[Scores] = []
        records: list[dict[str, Any]] = []
        failed: list[float] = []
        error: AllFailedError | None = None
        for begin in range(0, len(prompts), self.batch_size):
            part = prompts.select(range(begin, min(begin + self.batch_size, len(prompts))))
            try:
                result = evaluate_policy(self.ppo, part, self.ppo.parts.sampling, first=begin)
            except AllFailedError as all_failed:
                error = all_failed
                failed.append(self.ppo.parts.episode_runner.metrics()["failed_episodes"])
                continue
            if "failed_episodes" in result:
                failed.append(result["failed_episodes"])
            part = result["prompts"]
            applying = result["scores"].counts
            for name, value in result.items():
                if name in SHOWN or name.startswith(SHOWN_GROUPS):
                    count = applying.get(name, len(part))
                    sums[name] = sums.get(name, 0.0) + value * count
                    counts[name] = counts.get(name, 0) + count
            scores.append(result["scores"])
            wanted = min(len(part), LOGGED_SAMPLES - len(records))
            records += [_record(begin, row, part, result) for row in range(wanted)]
        if error is not None and not scores:
            raise error
        means = {name: total / counts[name] for name, total in sums.items()}
        if failed:
            means["failed_episodes"] = sum(failed)
        means |= {"reward_error": math.nan, **standard_errors(Scores.joined(scores))}
        return means, records


def _line(means: dict[str, float]) -> str:
    """Return the console's line on an evaluation."""
    kl = ""  # absent without a reference
    if "kl" in means:
        kl = f", KL {round(means['kl'], 2) + 0.0:.2f}"
    return (
        f"held out: reward {means['reward']:.3f} ± {means['reward_error']:.3f}{kl}, "
        f"length {means['response_length']:.0f}"
    )


def _record(begin: int, row: int, prompts: Prompts, result: dict[str, Any]) -> dict[str, Any]:
    """Return a line of eval_samples.jsonl."""
    scores: Scores = result["scores"]
    rollout: Rollout = result["rollout"]
    scored = {**scores.terms, **scores.monitors}
    rewards = {name: values.or_none[row] for name, values in scored.items()}
    return {
        "row": begin + (row if rollout.rows is None else rollout.rows[row]),
        **prompts.record(row),
        "completion": result["completions"][row],
        "reward": scores.total[row].item(),
        "rewards": rewards,
        "tokens": rollout.episode_lengths[row],
        "finish_reason": rollout.finish_reasons[row],
        **rollout.turns_record(row),
    }
