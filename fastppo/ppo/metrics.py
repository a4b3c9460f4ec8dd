"""Numbers of an iteration: sums that stay on the device until they are read once, the clock, and
what is written down of the responses."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from fastppo_kernels.records import SUMS, combine_sums
from torch import Tensor

from fastppo.data.batch import Batch
from fastppo.data.microbatches import Limits, deal, longest_over_mean, split
from fastppo.data.prompts import Prompts
from fastppo.data.world import World
from fastppo.functional.losses import loss_metrics
from fastppo.functional.statistics import sampled_kl
from fastppo.models.policy import ActorCritic
from fastppo.models.reference_policy import ReferencePolicy
from fastppo.ppo.config import PPOConfig
from fastppo.ppo.experience import Experience
from fastppo.rewards.scorer import Scores
from fastppo.rollout import FINISHED, OUT_OF_TURNS, TRUNCATED, Rollout

CLIP_METRICS = (
    *("clip_fraction", "dual_clip_fraction", "ratio_above_positive", "ratio_below_positive"),
    *("ratio_above_negative", "ratio_below_negative"),
)
"""Metrics of the clipped objective alone."""


class Microbatch(NamedTuple):
    """What one microbatch adds to its minibatch, detached."""

    loss: Tensor
    """0-d, its share of the loss."""
    sums: Tensor
    """`SUMS` of the policy's loss."""
    value: Tensor
    """0-d, its share of the value loss."""
    value_clipped: Tensor
    """0-d, its tokens whose value loss is that of the clipped value."""
    useful: int
    computed: int
    """Tokens of the sequences, and all that the trunk was given."""


def of_all_ranks(found: list[Microbatch], world: World, device: torch.device) -> list[Microbatch]:
    """The microbatches of every rank, on every rank; one has none where there are few rows."""
    if world.size == 1:
        return found
    numbers = torch.zeros(len(found), 5 + len(SUMS), dtype=torch.float64, device=device)
    for row, each in zip(numbers, found, strict=True):
        row[0], row[1], row[2], row[3], row[4] = each.loss, *each[2:]
        row[5:] = each.sums
    joined = world.cat(numbers)
    sizes = joined[:, 3:5].long().tolist()
    pairs = zip(joined, sizes, strict=True)
    return [Microbatch(row[0], row[5:], row[1], row[2], *of_row) for row, of_row in pairs]


class Meter:
    """Metrics of an update, which stay on the device until its end."""

    def __init__(self) -> None:
        self.sums: Tensor | None = None
        self.value_losses: list[Tensor] = []
        self.value_clipped: list[Tensor] = []
        self.ptx_losses: list[Tensor] = []
        self.steps: list[dict[str, float]] = []
        self.work: list[Tensor] = []
        self.useful = self.computed = 0

    def microbatch(self, part: Microbatch) -> None:
        self.useful += part.useful
        self.computed += part.computed
        self.sums = part.sums if self.sums is None else combine_sums(self.sums, part.sums)
        self.value_losses.append(part.value)
        self.value_clipped.append(part.value_clipped)

    def pretraining(self, loss: Tensor) -> None:
        self.ptx_losses.append(loss)

    def microbatches(self, found: list[Microbatch]) -> None:
        for part in found:
            self.microbatch(part)

    def dealt(self, lengths: Tensor, limits: Limits, world: World) -> None:
        """Notes how the sequences of a minibatch, of these lengths [B], were dealt to the ranks."""
        if world.size > 1:
            self.work.append(deal(lengths, limits, world).work(lengths, limits))

    def minibatch(self, overflowed: bool = False, **numbers: float) -> None:
        """Of a step. A norm is no metric where a loss scale that was too large made it."""
        is_of_scale = {n for n, x in numbers.items() if n.endswith("norm") and not math.isfinite(x)}
        left_out = is_of_scale if overflowed else set()
        self.steps.append({n: x for n, x in numbers.items() if n not in left_out})

    def metrics(self) -> dict[str, float]:
        """Means over the tokens of all minibatches, or over the minibatches."""
        assert self.sums is not None
        steps = len(self.steps)
        means = loss_metrics(self.sums)
        # Each minibatch's policy loss is whole, being weighted; the sum over minibatches is not.
        means["policy_loss"] = means["policy_loss"] / steps
        means["value_loss"] = torch.stack(self.value_losses).sum() / steps
        tokens = self.sums[SUMS.index("tokens")].clamp(min=1)
        means["value_clip_fraction"] = torch.stack(self.value_clipped).sum() / tokens
        means["kl_loss"] = means.pop("kl")
        if self.ptx_losses:
            means["ptx_loss"] = torch.stack(self.ptx_losses).mean()
        metrics = to_floats(means)
        metrics["useful_share"] = self.useful / max(1, self.computed)
        if self.work:
            metrics["straggler/update"] = longest_over_mean(torch.cat(self.work))
        for name in dict.fromkeys(name for step in self.steps for name in step):
            values = [step[name] for step in self.steps if name in step]
            metrics[name] = sum(values) / len(values)
        return metrics


def update_metrics(meter: Meter, taken: int, too_far: bool, options: PPOConfig) -> dict[str, float]:
    """Of the update of an iteration: what is in its loss.

    Args:
        taken: optimiser steps; too_far: whether its KL ended it.
    """
    metrics = meter.metrics() | options.scheduled_values()
    if not options.kl_loss_coef:
        del metrics["kl_loss"]  # a term that is not in the loss
    if options.value_clip is None:
        del metrics["value_clip_fraction"]
    if options.early_stop_kl is not None:
        metrics["early_stopped"] = float(too_far)
        metrics["optimizer_steps"] = float(taken)
    if options.objective == "penalty":
        for name in CLIP_METRICS:
            metrics.pop(name, None)  # nothing is clipped
    return metrics


class Clock:
    """Seconds of each phase of an iteration."""

    def __init__(self) -> None:
        self.start = self.last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[f"seconds/{name}"] = now - self.last
        self.last = now

    def metrics(self, tokens: int, world: World) -> dict[str, float]:
        """The laps, and the response tokens per second of the whole iteration; of several ranks
        the longest, which all of them then know, and `World.stragglers`."""
        ranks = world.gather({**self.laps, "total": self.last - self.start})
        longest = {name: max(laps[name] for laps in ranks) for name in ranks[0]}
        total = longest.pop("total")
        return {**longest, "tokens_per_second": tokens / total, **world.stragglers}


def to_floats(metrics: dict[str, Tensor]) -> dict[str, float]:
    """0-d tensors as numbers, in one transfer."""
    flat = torch.stack([value.detach().double() for value in metrics.values()]).tolist()
    return dict(zip(metrics, flat, strict=True))


def explained_variance(returns: Tensor, values: Tensor) -> Tensor:
    """1 − Var(returns − values)/Var(returns): 1 is a perfect value function, 0 a constant one."""
    residual = (returns - values).var(correction=0)
    return 1 - residual / returns.var(correction=0).clamp(min=1e-8)


def experience_metrics(experience: Experience, spread: Tensor) -> dict[str, float]:
    """Means over the batch that the update learns from.

    Args:
        spread: 0-d, the deviation of the advantages before they were whitened.
    """
    batch, count = experience.batch, experience.batch.response_count
    metrics = {
        "response_length": batch.written_lengths.float().mean().to(batch.device),
        "value": experience.old_values.mean(),
        "return": experience.returns.mean(),
        "explained_variance": explained_variance(experience.returns, experience.old_values),
        "advantage_std": spread,
    }
    if experience.ref_logprobs is not None:
        # k1, whatever the estimator in the reward: the unbiased one, and the one that targets
        # and published runs speak of.
        total_kl = sampled_kl(experience.old_logprobs, experience.ref_logprobs).sum()
        metrics["kl"] = total_kl / len(batch)
        metrics["kl_per_token"] = total_kl / max(1, count)
    return to_floats(metrics)


def policy_metrics(
    model: ActorCritic,
    reference: ReferencePolicy | None,
    batch: Batch,
    options: PPOConfig,
    world: World,
    limits: Limits,
) -> dict[str, float]:
    """Of the policy on responses: the KL to the reference, 0 without one, nats per sequence; the
    entropy, nats per token; the length, tokens. `limits` are of a pass."""
    how = options.softmax
    parts = split(batch, limits, world)
    logprobs, entropy = model.stats_of_plan(parts, **how)
    kl = 0.0
    if reference is not None:
        ref_logprobs = parts.in_order(reference.logprobs(parts.batches, **how))
        kl = sampled_kl(logprobs, ref_logprobs).sum().item() / len(batch)
    return {
        "kl": kl,
        "entropy": entropy.sum().item() / max(batch.response_count, 1),
        "response_length": batch.response_count / len(batch),
    }


def response_metrics(
    scores: Scores, rollout: Rollout, metrics: Mapping[str, float]
) -> dict[str, float]:
    """Means of the rewards over a batch, and the share of responses that ended by themselves.

    Args:
        metrics: of the experience: the KL and β, for the reward less what the KL costs.
    """
    finished = len(rollout.tokens) - sum(rollout.truncated)
    found = {**scores.metrics(), "eos_rate": finished / max(1, len(rollout.tokens))}
    if "kl_coef" in metrics:
        found["non_score_reward"] = -metrics["kl_coef"] * metrics["kl"]
        found["rlhf_reward"] = found["reward"] + found["non_score_reward"]
    if rollout.rewards is not None:
        found |= turn_metrics(rollout)
    return found


def turn_metrics(rollout: Rollout) -> dict[str, float]:
    """Of the episodes of an environment: turns, and the share that ended for each reason."""
    count = max(1, len(rollout.tokens))
    runs = [key for row in rollout.written or () for key, _ in itertools.groupby(row)]
    reasons = (FINISHED, TRUNCATED, OUT_OF_TURNS)
    shares = {f"finish/{name}": rollout.finish_reasons.count(name) / count for name in reasons}
    return {"turns": sum(runs) / count, **shares}


def sample_records(
    prompts: Prompts,
    completions: list[str],
    rollout: Rollout,
    scores: Scores,
    experience: Experience,
) -> list[dict[str, Any]]:
    """The responses as samples.jsonl has them, as many as there are completions."""
    token_kl = None
    if experience.ref_logprobs is not None:
        difference = sampled_kl(experience.old_logprobs, experience.ref_logprobs)
        token_kl = difference.split(rollout.written_lengths)
    total = scores.total.tolist()
    return [
        {
            "prompt": prompts.prompts[i],
            "completion": completions[i],
            "reward": total[i],
            "rewards": {name: values[i] for name, values in scores.terms.items()},
            "monitors": {name: values[i] for name, values in scores.monitors.items()},
            "kl": None if token_kl is None else token_kl[i].sum().item(),
            "tokens": rollout.written_lengths[i],
            "finish_reason": rollout.finish_reasons[i],
        }
        for i in range(len(completions))
    ]


def status(metrics: dict[str, float]) -> str:
    """The numbers that people watch, for the progress bar."""
    shown = [f"reward {metrics['reward']:.3f}"]
    if "kl" in metrics:
        shown.append(f"KL {round(metrics['kl'], 2) + 0.0:.2f}")  # a sampled KL near 0 may be -0.00
    return "  ".join([*shown, f"entropy {metrics['entropy']:.2f}"])
