"""Metrics of an iteration: sums on the device, phase times, and sample records."""

from __future__ import annotations

import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from fastppo_kernels.definition import wide
from fastppo_kernels.records import SUMS, combine_sums
from torch import Tensor

from fastppo.activity import during
from fastppo.data.batch import Batch
from fastppo.data.microbatches import MicrobatchPlan
from fastppo.data.world import World
from fastppo.environments.tools import OUTCOMES
from fastppo.functional.loss_keywords import CUSTOM, OBJECTIVES
from fastppo.functional.losses import loss_metrics
from fastppo.functional.statistics import sampled_kl
from fastppo.models.policy import ActorCritic
from fastppo.models.reference_policy import ReferencePolicy
from fastppo.ppo.coefficients import Coefficients
from fastppo.ppo.experience import Experience, Responses
from fastppo.ppo.options.config import CRITIC_FREE, PPOConfig
from fastppo.ppo.out_of_memory import explain_out_of_memory
from fastppo.rewards.scorer import Scores
from fastppo.rollout import FAILURE, FINISHED, OUT_OF_TURNS, SUCCESS, TRUNCATED, Rollout

UNCLIPPED = ("penalty", "sapo")
"""Objectives without a clip range."""

CLIP_METRICS = (
    "clip_fraction",
    "dual_clip_fraction",
    "ratio_above_positive",
    "ratio_below_positive",
    "ratio_above_negative",
    "ratio_below_negative",
)
"""Metrics of objectives with a clip range."""

LOGGED_SAMPLES = 8
"""Responses per iteration, and per evaluation, in the sample records."""

OF_CRITIC = ("explained_variance", "value_calibration", "advantage_correlation")
"""Metrics of the critic that are not always defined."""

LEAST_DEVIATION = 1e-4
"""Reward units. A smaller standard deviation of returns or values comes from rounding and from KLs
near 0, and ratios to it are undefined. The default warnings use the same bound."""


class LossSums(NamedTuple):
    """Sums over microbatches for the loss and the metrics.

    Detached tensors on the device, 0-d except for `policy`.
    """

    policy: Tensor
    """[len(SUMS)]: the sums named in `SUMS`."""
    loss: Tensor
    value_loss: Tensor
    """Without `vf_coef`."""
    value_clipped: Tensor
    """Tokens with a clipped value loss."""
    computed: Tensor | int
    """Input tokens of the trunk, padding included."""
    ptx_loss: Tensor | None = None
    """Loss on pretraining text, without `ptx_coef`."""

    def plus(self, other: LossSums) -> LossSums:
        """Add two sums."""
        return LossSums(
            policy=combine_sums(self.policy, other.policy),
            loss=self.loss + other.loss,
            value_loss=self.value_loss + other.value_loss,
            value_clipped=self.value_clipped + other.value_clipped,
            computed=self.computed + other.computed,
        )

    @classmethod
    def joined(cls, parts: Sequence[LossSums], world: World) -> LossSums:
        """Add the sums of all microbatches of all ranks.

        Args:
            parts: this rank's sums, at least one.
        """
        own = functools.reduce(cls.plus, parts)
        if world.size == 1:
            return own
        # One row of numbers per rank needs a single collective.
        names = ("loss", "value_loss", "value_clipped", "computed")
        # The host would wait for a copy of `computed` to the device, but not for a fill.
        computed = torch.zeros_like(own.loss, dtype=torch.float64) + own.computed
        scalars = [own.loss.double(), own.value_loss.double(), own.value_clipped.double(), computed]
        row = torch.cat([torch.stack(scalars), own.policy.double()])
        ranks = []
        for numbers in world.cat(row.unsqueeze(0), [1] * world.size):
            by_name = dict(zip(names, numbers[: len(names)], strict=True))
            ranks.append(cls(policy=numbers[len(names) :], **by_name))
        return functools.reduce(cls.plus, ranks)

    @property
    def approx_kl(self) -> Tensor:
        """KL to the rollout policy before the step, 0-d, nats per token."""
        return self.policy[SUMS.index("approx_kl")] / self.tokens

    @property
    def tokens(self) -> Tensor:
        """Number of tokens in the loss, 0-d, at least 1."""
        return self.policy[SUMS.index("tokens")].clamp(min=1)


class UpdateMeter:
    """Collects the metrics of an update; sums stay on the device until its end."""

    def __init__(self) -> None:
        self.sums: LossSums | None = None
        self.ptx_losses: list[Tensor] = []
        self.steps: list[dict[str, float]] = []
        self.useful = 0

    def add(self, minibatch: Experience, sums: LossSums, step: dict[str, float]) -> None:
        """Add a minibatch.

        Args:
            sums: over its microbatches.
            step: metrics of its optimizer step.
        """
        self.useful += len(minibatch.batch.tokens)
        self.sums = sums if self.sums is None else self.sums.plus(sums)
        if sums.ptx_loss is not None:
            self.ptx_losses.append(sums.ptx_loss)
        self.steps.append(step)

    def metrics(
        self,
        config: PPOConfig,
        coefficients: Coefficients,
        more: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> dict[str, float]:
        """Return means over the tokens of all minibatches, or over the minibatches.

        Metrics of terms that are not in the loss are left out.

        Args:
            more: 0-d tensors to read in the same transfer, by other names.
        """
        sums = self.sums
        assert sums is not None
        steps = len(self.steps)
        objective = config.objective if config.objective in OBJECTIVES else CUSTOM
        means = loss_metrics(sums.policy, objective)
        # Each minibatch's policy loss is already normalized.
        means["policy_loss"] = means["policy_loss"] / steps
        means["value_loss"] = sums.value_loss / steps
        means["value_clip_fraction"] = sums.value_clipped / sums.tokens
        means["kl_loss"] = means.pop("kl")
        if self.ptx_losses:
            means["ptx_loss"] = torch.stack(self.ptx_losses).mean()
        for name in _outside_the_loss(config, coefficients):
            del means[name]
        if isinstance(sums.computed, Tensor):
            means["computed"] = sums.computed
        metrics = to_floats({**means, **more})
        computed = metrics.pop("computed", sums.computed)
        metrics["useful_share"] = self.useful / max(1, int(computed))
        for name in dict.fromkeys(name for step in self.steps for name in step):
            values = [step[name] for step in self.steps if name in step]
            metrics[name] = sum(values) / len(values)
        return metrics


def _outside_the_loss(config: PPOConfig, coefficients: Coefficients) -> list[str]:
    """Return the metrics of terms that the loss does not have."""
    names = []
    if not coefficients.kl_loss_coef:
        names.append("kl_loss")
    if config.advantage in CRITIC_FREE:
        names.append("value_loss")
    if coefficients.value_clip is None:
        names.append("value_clip_fraction")
    if config.objective in UNCLIPPED:
        names += CLIP_METRICS
    elif "objective" in config.user_functions:
        names += CLIP_METRICS[1:]  # without a clip range, clip_fraction counts zero gradients
    return names


PARTICIPLES = {
    "generate": "generating",
    "score": "scoring",
    "experience": "computing logprobs and values",
    "update": "updating",
}
"""Names of an iteration's phases on the console."""


class PhaseTimer:
    """Times the phases of an iteration: `with timer("generate"): …`.

    A phase that runs out of memory ends the run with advice (`explain_out_of_memory`).

    Args:
        config: the options.
        before: called with each phase's name before the phase.
    """

    def __init__(
        self, config: PPOConfig, before: Callable[[str], None] = lambda phase: None
    ) -> None:
        self.config = config
        self.before = before
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self.before(phase)
        start = time.perf_counter()
        with explain_out_of_memory(phase, self.config), during(PARTICIPLES[phase]):
            yield
        seconds = time.perf_counter() - start
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    def metrics(self, tokens: int, world: World) -> dict[str, float]:
        """Return the seconds of each phase, of the slowest rank, and response tokens per second."""
        ranks = world.gather({**self.seconds, "total": sum(self.seconds.values())})
        longest = {name: max(seconds[name] for seconds in ranks) for name in ranks[0]}
        total = longest.pop("total")
        phases = {f"seconds/{name}": seconds for name, seconds in longest.items()}
        return {**phases, "tokens_per_second": tokens / total}


def read(tensors: Sequence[Tensor]) -> list[list[float]]:
    """Return the entries of each tensor, in one transfer from each device.

    The host waits here for a GPU. Floats of all widths are converted exactly.
    """
    flat = [x.detach().flatten() for x in tensors]
    numbers = [x if x.is_floating_point() else wide(x) for x in flat]
    entries = {
        device: iter(torch.cat([x for x in numbers if x.device == device]).tolist())
        for device in {x.device for x in numbers}
    }
    return [list(itertools.islice(entries[x.device], len(x))) for x in numbers]


def to_floats(metrics: Mapping[str, Tensor]) -> dict[str, float]:
    """Convert 0-d tensors to floats in one transfer."""
    return {name: x for name, [x] in zip(metrics, read([*metrics.values()]), strict=True)}


def explained_variance(returns: Tensor, values: Tensor) -> Tensor:
    """Return 1 − Var(returns − values)/Var(returns): 1 if values are perfect, 0 if constant."""
    return 1 - (returns - values).var(correction=0) / returns.var(correction=0)


def critic_metrics(experience: Experience) -> dict[str, Tensor]:
    """Return the metrics of the critic, NaN where undefined, for example with constant returns.

    Returns:
        dict: 0-d tensors. `explained_variance` of the Monte Carlo returns; `value_calibration`, the
        slope of the regression of whole responses' returns on their values at the prompt;
        `advantage_correlation`, the correlation of advantages and returns (the advantages without
        a value function). Whitening does not change it.
    """
    returns = experience.monte_carlo_returns
    begins = experience.batch.cu_seqlens[:-1].clamp(max=max(0, len(returns) - 1))
    at_prompt = torch.stack([experience.old_values[begins], returns[begins]])
    (value_variance, calibrating), _ = covariance(at_prompt, correction=0)
    varies = value_variance > LEAST_DEVIATION**2
    metrics = {
        "explained_variance": explained_variance(returns, experience.old_values),
        "value_calibration": (calibrating / value_variance).where(varies, math.nan),
    }
    if len(returns) > 1:
        both = covariance(torch.stack([experience.advantages, returns]), correction=1)
        deviations = both.diagonal().sqrt()
        correlation = both[0, 1] / deviations[0] / deviations[1]
        metrics["advantage_correlation"] = correlation.clamp(-1, 1)
    spreads = returns.std(correction=0) > LEAST_DEVIATION
    return {name: x.where(spreads, math.nan) for name, x in metrics.items()}


def covariance(rows: Tensor, *, correction: int) -> Tensor:
    """Return the covariance [2, 2] of two rows [2, n], in fp64 if the device has it.

    The host would wait for a GPU in `torch.cov`.
    """
    rows = wide(rows)
    centred = rows - rows.mean(dim=1, keepdim=True)
    return centred @ centred.T / (rows.shape[1] - correction)


def experience_metrics(experience: Experience, config: PPOConfig) -> dict[str, Tensor]:
    """Return means over the batch, and with a critic its metrics, as 0-d tensors."""
    batch = experience.batch
    assert experience.advantage_std is not None
    metrics = {"advantage_std": experience.advantage_std}
    if experience.ref_logprobs is not None:
        # Always k1, the unbiased estimator, for comparison with targets and published runs.
        total_kl = sampled_kl(experience.old_logprobs, experience.ref_logprobs).sum()
        metrics["kl"] = total_kl / len(experience)
        metrics["kl_per_token"] = total_kl / max(1, batch.response_count)
    if config.advantage in CRITIC_FREE:
        return metrics
    metrics["value"] = experience.old_values.mean()
    metrics["return"] = experience.returns.mean()
    return metrics | critic_metrics(experience)


class ReadExperience(NamedTuple):
    """What the host reads of an experience."""

    metrics: dict[str, float]
    has_signal: bool
    """Whether an advantage differs from 0."""
    response_kl: list[float] | None
    """See `Experience.response_kl`."""


def read_experience(
    experience: Experience, config: PPOConfig, mismatch: Mapping[str, Tensor]
) -> ReadExperience:
    """Read the metrics of an experience, and what decides about its update, in one transfer.

    Undefined metrics of the critic are left out.

    Args:
        mismatch: further metrics, 0-d tensors.
    """
    lengths = experience.episode_lengths
    metrics = {**experience_metrics(experience, config), **mismatch}
    tensors = [*metrics.values(), experience.advantages.any()]
    if experience.ref_logprobs is not None:
        kl = sampled_kl(experience.old_logprobs, experience.ref_logprobs)
        logged = lengths[:LOGGED_SAMPLES].tolist()
        by_response = kl[: sum(logged)].split(logged)
        tensors.append(torch.stack([response.sum() for response in by_response]))
    entries = iter(read(tensors))
    numbers = {"response_length": lengths.float().mean().item()}
    for name, [x] in zip(metrics, entries, strict=False):
        if name not in OF_CRITIC or math.isfinite(x):
            numbers[name] = x
    [has_signal] = next(entries)
    return ReadExperience(numbers, bool(has_signal), next(entries, None))


def policy_metrics(
    batch: Batch,
    episodes: int,
    plan: MicrobatchPlan,
    config: PPOConfig,
    *,
    model: ActorCritic,
    reference: ReferencePolicy | None,
) -> dict[str, float]:
    """Return entropy (nats per token), response length (tokens) and KL (nats per sequence).

    Args:
        episodes: number of episodes, of which the batch has the rows.
        plan: the batch in microbatches.
        reference: None for no KL.
    """
    logprobs, entropy = model.stats_of_plan(plan, **config.softmax)
    sums = {"entropy": entropy.sum()}
    if reference is not None:
        ref_logprobs = plan.in_order(reference.logprobs(plan.batches, **config.softmax))
        sums["kl"] = sampled_kl(logprobs, ref_logprobs).sum()
    numbers = to_floats(sums)
    means = {
        "entropy": numbers["entropy"] / max(batch.response_count, 1),
        "response_length": batch.response_count / episodes,
    }
    if "kl" in numbers:
        means["kl"] = numbers["kl"] / episodes
    return means


def standard_errors(scores: Scores, samples_per_prompt: int = 1) -> dict[str, float]:
    """Return the standard errors of the mean reward and of each monitored reward.

    Prompts differ in difficulty, so only responses to different prompts are independent: with
    several samples per prompt, it is the error of the mean over the prompts' mean rewards.

    Args:
        samples_per_prompt: adjacent responses to the same prompt.

    Returns:
        dict: `reward_error` and `monitor_error/NAME`, over the prompts to which the reward applies;
        absent for a single one.
    """
    rewards = {"reward_error": scores.total.tolist()}
    for name, scored in scores.monitors.items():
        rewards[f"monitor_error/{name}"] = scored
    errors = {}
    for name, values in rewards.items():
        by_prompt = []
        for begin in range(0, len(values), samples_per_prompt):
            samples = values[begin : begin + samples_per_prompt]
            applying = [value for value in samples if not math.isnan(value)]
            if applying:
                by_prompt.append(statistics.fmean(applying))
        if len(by_prompt) > 1:
            errors[name] = statistics.stdev(by_prompt) / math.sqrt(len(by_prompt))
    return errors


def response_metrics(
    scores: Scores, rollout: Rollout, kl_metrics: Mapping[str, float], samples_per_prompt: int = 1
) -> dict[str, float]:
    """Return metrics of rewards and lengths, the share of finished responses, and those of turns.

    Args:
        kl_metrics: `kl` and `kl_coef` with a reference, for the reward minus the KL penalty.
        samples_per_prompt: adjacent responses to one prompt.
    """
    finished = len(rollout.tokens) - sum(rollout.truncated)
    metrics = {**scores.metrics(), "eos_rate": finished / max(1, len(rollout.tokens))}
    total = scores.total
    if len(total):
        metrics["reward_max"] = total.max().item()
    if samples_per_prompt > 1 and len(total) % samples_per_prompt == 0:
        groups = total.view(-1, samples_per_prompt)
        is_equal = groups.amin(dim=1) == groups.amax(dim=1)
        metrics["frac_reward_zero_std"] = is_equal.float().mean().item()
    metrics |= standard_errors(scores, samples_per_prompt)
    metrics |= length_metrics(rollout)
    if "kl_coef" in kl_metrics:
        metrics["non_score_reward"] = -kl_metrics["kl_coef"] * kl_metrics["kl"]
        metrics["rlhf_reward"] = metrics["reward"] + metrics["non_score_reward"]
    if rollout.versions:
        metrics["weights_version"] = float(min(rollout.versions))
    if rollout.rewards is not None:
        metrics |= turn_metrics(rollout)
    return metrics


def length_metrics(rollout: Rollout) -> dict[str, float]:
    """Return the shortest and the longest response, and the mean of finished ones, in tokens."""
    lengths = rollout.episode_lengths
    if not lengths:
        return {}
    metrics = {
        "response_length_min": float(min(lengths)),
        "response_length_max": float(max(lengths)),
    }
    finished = [n for n, cut in zip(lengths, rollout.truncated, strict=True) if not cut]
    if finished:
        metrics["finished_length"] = sum(finished) / len(finished)
    return metrics


def successes_per_minibatch(scores: Tensor, minibatches: int) -> dict[str, float]:
    """Return the responses per minibatch that earn more than the lowest reward.

    The metric is absent unless the reward is sparse: most responses earn the lowest one.

    Args:
        scores: [B].
    """
    successes = int((scores > scores.min()).sum()) if len(scores) > 1 else 0
    if len(scores) < 2 or 2 * successes > len(scores):
        return {}
    return {"successes_per_minibatch": successes / min(minibatches, len(scores))}


def turn_metrics(rollout: Rollout) -> dict[str, float]:
    """Return turns per episode, the share of each finish reason, and tool calls by outcome.

    If an episode has several rows, also the rows per episode. If the environment says so, also the
    invalid actions per episode and the share of each outcome of the episodes.
    """
    count = max(1, len(rollout.tokens))
    branches = list(itertools.chain.from_iterable(rollout.branches or ()))
    masks = [
        mask
        for one in (rollout, *(b.rollout for b in branches))
        for mask in one.response_mask or ()
    ]
    is_turn = [key for mask in masks for key, _ in itertools.groupby(mask)]
    rows = {"rows": 1 + len(branches) / count} if branches else {}
    reasons = (FINISHED, TRUNCATED, OUT_OF_TURNS)
    shares = {f"finish/{name}": rollout.finish_reasons.count(name) / count for name in reasons}
    calls = {}
    if rollout.calls is not None:
        made = list(itertools.chain.from_iterable(rollout.calls))
        calls = {f"tools/{name}": made.count(name) / count for name in OUTCOMES}
    if rollout.invalid is not None:
        calls["invalid_actions"] = sum(rollout.invalid) / count
    outcomes = rollout.outcomes or []
    names = {name for name in outcomes if name is not None}
    if names & {SUCCESS, FAILURE}:
        names |= {SUCCESS, FAILURE}  # a batch without a success has the metric too
    shares |= {f"outcome/{name}": outcomes.count(name) / count for name in sorted(names)}
    return {"turns": sum(is_turn) / count, **rows, **shares, **calls}


def sample_records(
    responses: Responses, experience: Experience, completions: list[str]
) -> list[dict[str, Any]]:
    """Return the records of samples.jsonl, one per completion."""
    prompts, rollout, scores = responses
    kl = experience.response_kl
    totals = scores.total.tolist()
    lengths = rollout.episode_lengths
    return [
        {
            **prompts.record(i),
            "completion": completion,
            "reward": totals[i],
            "rewards": {name: scored.or_none[i] for name, scored in scores.terms.items()},
            "monitors": {name: scored.or_none[i] for name, scored in scores.monitors.items()},
            "kl": None if kl is None else kl[i],
            "tokens": lengths[i],
            "finish_reason": rollout.finish_reasons[i],
            **rollout.turns_record(i),
        }
        for i, completion in enumerate(completions)
    ]


def status(metrics: dict[str, float]) -> str:
    """Return the text of the progress bar."""
    shown = [f"reward {metrics['reward']:.3f}"]
    if "kl" in metrics:
        shown.append(f"KL {round(metrics['kl'], 2) + 0.0:.2f}")  # a sampled KL near 0 may be -0.00
    return "  ".join([*shown, f"entropy {metrics['entropy']:.2f}"])
