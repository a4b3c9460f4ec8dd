"""Advantages and returns of a batch, by the `advantage` option.

With a value function, every kind is GAE: λ = 1 is Monte Carlo (reward-to-go minus value), λ = 0 is
one-step TD. `sequence` gives every token the advantage of the first token at λ = 1. Without a value
function, let R be the reward of a response, KL penalty included, and R̄ its mean over the
n = samples_per_prompt responses to the prompt:

    reinforce   G_t, the reward-to-go                               Williams 1992
    rloo        R − mean of the other n − 1 = n/(n−1)·(R − R̄)       Ahmadian et al. 2024
    group       (R − R̄)/(standard deviation of the n + 1e-4)        Shao et al. 2024 (GRPO)

A user-defined function may replace all of them: `own_advantages`.

With the exact KL in the reward, each token's penalty is passed as a reward at that token.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastppo.data.batch import Batch, on_device
from fastppo.functional.advantages import Advantages, compute_advantages, gae, whiten
from fastppo.functional.statistics import sampled_kl
from fastppo.functional.user_functions import call_by_name, check_per_token, name_and_place
from fastppo.ppo.old_policy import OldPolicy, ReferenceStats
from fastppo.ppo.options.config import CRITIC_FREE, PPOConfig
from fastppo.rewards.scorer import Scores

ONE_PER_RESPONSE = ("sequence", "rloo", "group")
"""Kinds with one advantage for all tokens of a response."""

MONTE_CARLO = ("sequence", *CRITIC_FREE)
"""Kinds with λ = 1."""

GROUP_EPS = 1e-4
"""Added to a group's standard deviation, reward units. TRL's value."""

ROUNDING = 1e-5
"""Advantages of at most this size, in reward units, are set to 0. If all responses earn the same
and the policy still equals the reference, only a KL of a few 1e-6 nats distinguishes them. Adam
normalizes the gradient and would take a full step in its direction."""

LEAST_SIGNAL = 0.1
"""Smallest standard deviation of a batch's scores that is a signal, as a share of the usual one."""

SCALE_BATCHES = 10
"""Batches of which the usual standard deviation is the median."""


@dataclass(slots=True)
class ScoreScale:
    """The usual standard deviation of a run's scores, robust against single batches."""

    recent: list[float] = field(default_factory=list)
    """Of the latest batches with different scores, newest last."""

    @property
    def floor(self) -> float:
        """Smallest standard deviation of a batch with a signal; 0 before the first."""
        return LEAST_SIGNAL * statistics.median(self.recent) if self.recent else 0.0

    def add(self, deviation: float) -> None:
        """Add a batch's standard deviation."""
        self.recent = [*self.recent, deviation][-SCALE_BATCHES:]


class BatchAdvantages(NamedTuple):
    """Advantages and returns of a batch, packed [N] fp32."""

    advantages: Tensor
    returns: Tensor
    """Targets of the value loss."""
    spread: Tensor
    """Standard deviation of the advantages before whitening, 0-d."""
    monte_carlo_returns: Tensor
    """Monte Carlo returns: rewards-to-go with the KL penalty, the score and rewards within the
    response, discounted like GAE. They contain no values, except the bootstrap value after a
    truncated response if there is one."""


class RewardedBatch(NamedTuple):
    """A batch with its rewards and the other inputs of the advantages, on its device."""

    batch: Batch
    last: Tensor
    """[B], reward at the last token of each response."""
    within: Tensor | None
    """[N], rewards at each token, in addition to `last`."""
    old_logprobs: Tensor
    """[N], nats, like `ref_logprobs`."""
    ref_logprobs: Tensor | None
    kl_coef: float
    """β of the KL between the two."""
    kl_estimator: str
    values: Tensor
    """[N], value of the state before each token; 0 for kinds without a value function."""
    bootstrap: Tensor | None
    """[B], value after a truncated response."""


def make_advantages(
    batch: Batch,
    scores: Scores,
    options: PPOConfig,
    *,
    truncated: Sequence[bool],
    old: OldPolicy,
    ref_stats: ReferenceStats,
    kl_coef: float,
    score_scale: ScoreScale | None = None,
    function: Callable[..., Any] | None = None,
) -> BatchAdvantages:
    """Compute shaped rewards, advantages and returns of packed responses.

    Advantages are 0 if all responses have about the same discounted score, or if they are only
    rounding errors. Whitening divides by at least `score_scale.floor`: it would amplify errors of
    the value function otherwise. Advantages of a user's function are only compared with rounding
    errors, because their source and unit are unknown. With truncated=mask, truncated responses
    have advantages of 0 and count only in the baselines of `rloo` and `group`.

    Args:
        scores: rewards at the last tokens and within the responses.
        truncated: [B], whether a response was truncated.
        old: logprobs and values of the rollout policy.
        ref_stats: the reference's logprobs, and the exact KL if the reward uses it.
        kl_coef: β of the KL in the reward.
        score_scale: of the batches before; this batch is added. Default: a first batch.
        function: the user's advantage; see `own_advantages`.
    """
    within = None if scores.within is None else scores.within.to(batch.device)
    if ref_stats.logprobs is None:
        kl_coef = 0.0
    is_score_the_signal = function is None and (scores.has_rewards or kl_coef == 0)
    if ref_stats.exact_kl is not None:
        penalty = -kl_coef * ref_stats.exact_kl
        within = penalty if within is None else within + penalty
        kl_coef = 0.0
    bootstrap = None
    if options.bootstrap_truncated:
        assert old.final_values is not None
        bootstrap = old.final_values * torch.tensor(truncated, device=batch.device).float()
    has_values = options.advantage not in CRITIC_FREE
    rewarded = RewardedBatch(
        batch=batch,
        last=scores.last.to(batch.device),
        within=within,
        old_logprobs=old.logprobs,
        ref_logprobs=ref_stats.logprobs,
        kl_coef=kl_coef,
        # The exact KL is already in `within`.
        kl_estimator="k1" if options.kl_estimator == "full" else options.kl_estimator,
        values=old.values if has_values else torch.zeros_like(old.values),
        bootstrap=bootstrap,
    )
    masks = options.truncated == "mask"
    estimates = _estimates(
        rewarded, replace(options, whiten_advantages=False) if masks else options, function
    )
    learned = estimates.advantages
    spread = estimates.spread
    in_loss: slice | Tensor = slice(None)
    totals = _discounted_scores(rewarded, scores, options) if is_score_the_signal else None
    if masks:
        finished = ~torch.tensor(truncated)
        if not finished.any():
            nothing = torch.zeros_like(learned)
            return estimates._replace(advantages=nothing, spread=nothing.sum())
        in_loss = on_device(finished.repeat_interleave(batch.written_lengths), batch.device)
        totals = None if totals is None else totals[finished]
        spread = learned[in_loss].std(correction=0)
        learned = _whitened(learned[in_loss], options)
    advantages = torch.zeros_like(estimates.advantages)
    advantages[in_loss] = _with_signal(learned, spread, totals, options, score_scale)
    return estimates._replace(advantages=advantages, spread=spread)


def _estimates(
    rewarded: RewardedBatch, options: PPOConfig, function: Callable[..., Any] | None
) -> BatchAdvantages:
    if function is not None:
        return _own_estimates(rewarded, options, function)
    if options.advantage in ONE_PER_RESPONSE:
        return _response_advantages(rewarded, options)
    if options.advantage == "turn_gae":
        return _turn_advantages(rewarded, options)
    return _token_advantages(rewarded, options)


def _discounted_scores(rewarded: RewardedBatch, scores: Scores, options: PPOConfig) -> Tensor:
    """Return the discounted rewards of each response without the KL, [B] on the CPU.

    If they are equal, no action was better than another.
    """
    if options.gamma == 1:
        return scores.total
    within = None if scores.within is None else scores.within.to(rewarded.values.device)
    rewards_only = rewarded._replace(within=within, ref_logprobs=None, kl_coef=0.0, bootstrap=None)
    return _of_responses(monte_carlo_returns(rewards_only, options), rewarded).cpu()


def _of_responses(by_token: Tensor, rewarded: RewardedBatch) -> Tensor:
    """Return the entry of each response's first token, [B]. An empty response has its reward."""
    if len(by_token) == 0:
        return rewarded.last.to(by_token.dtype)
    starts = rewarded.batch.cu_seqlens
    at_first = by_token[starts[:-1].clamp(max=len(by_token) - 1)]
    return torch.where(starts.diff() > 0, at_first, rewarded.last.to(at_first.dtype))


def _with_signal(
    advantages: Tensor,
    spread: Tensor,
    totals: Tensor | None,
    options: PPOConfig,
    score_scale: ScoreScale | None,
) -> Tensor:
    """Return the advantages [n], scaled for `variance` and by the floor, 0 without a signal.

    Args:
        spread: standard deviation before whitening, 0-d.
        totals: discounted scores of the responses, reward units; None if they are not the signal.
        score_scale: see `make_advantages`.
    """
    if options.whiten_advantages:
        size = spread
    else:
        size = advantages.square().mean().sqrt()
    # NaN advantages stay visible: comparisons with NaN are False, and 0 · NaN is NaN.
    advantages = torch.where(size <= ROUNDING, 0.0, advantages)
    if totals is None:
        return advantages
    score_scale = score_scale or ScoreScale()
    floor = score_scale.floor
    if options.whiten_advantages and floor > 0:
        advantages = advantages * (size / floor).clamp(max=1)
    deviation = totals.std(correction=0).item()
    if len(totals) > 1 and deviation <= max(floor, ROUNDING):
        advantages = 0.0 * advantages
    if deviation > ROUNDING and math.isfinite(deviation):
        score_scale.add(deviation)
    return advantages


def monte_carlo_returns(rewarded: RewardedBatch, options: PPOConfig) -> Tensor:
    """Return `BatchAdvantages.monte_carlo_returns`, [N] fp32."""
    without_values = rewarded._replace(values=torch.zeros_like(rewarded.values))
    if options.advantage == "turn_gae":
        _, returns = turn_gae(without_values, shaped_rewards(rewarded), 1.0, options)
        return returns
    return _token_gae(without_values, options, lam=1.0, whiten=False).returns


def _token_advantages(rewarded: RewardedBatch, options: PPOConfig) -> BatchAdvantages:
    """GAE over tokens."""
    lam: float | Tensor = options.lam
    if options.advantage in MONTE_CARLO:
        lam = 1.0
    elif options.lam_alpha is not None:
        # λ = 1 − 1/(α·length) per response, Yue et al. 2025 (VAPO).
        lengths = rewarded.batch.written_lengths.to(rewarded.batch.device).float().clamp(min=1)
        lam = (1 - 1 / (options.lam_alpha * lengths)).clamp(min=0)
    result = _token_gae(rewarded, options, lam=lam, whiten=bool(options.whiten_advantages))
    returns = result.returns
    if options.value_lam is not None:
        returns = _token_gae(rewarded, options, lam=options.value_lam, whiten=False).returns
    # Returns are never whitened.
    spread = (result.returns - rewarded.values).std(correction=0)
    return BatchAdvantages(
        result.advantages, returns, spread, monte_carlo_returns(rewarded, options)
    )


def _token_gae(
    rewarded: RewardedBatch, options: PPOConfig, *, lam: float | Tensor, whiten: bool
) -> Advantages:
    return compute_advantages(
        rewarded.last,
        rewarded.values,
        rewarded.old_logprobs,
        rewarded.ref_logprobs,
        torch.ones_like(rewarded.values, dtype=torch.bool),
        cu_seqlens=rewarded.batch.cu_seqlens,
        kl_coef=rewarded.kl_coef,
        kl_estimator=rewarded.kl_estimator,
        gamma=options.gamma,
        lam=lam,
        whiten=whiten,
        bootstrap=rewarded.bootstrap,
        token_rewards=rewarded.within,
        backend=options.backend,
    )


def _response_advantages(rewarded: RewardedBatch, options: PPOConfig) -> BatchAdvantages:
    """One advantage per response, repeated for each of its tokens."""
    result = _token_gae(rewarded, options, lam=1.0, whiten=False)
    advantages = _against_group(_of_responses(result.advantages, rewarded), options)
    lengths = rewarded.batch.cu_seqlens.diff()
    advantages = advantages.repeat_interleave(lengths, output_size=len(rewarded.values))
    spread = advantages.std(correction=0)
    advantages = _whitened(advantages, options)
    complete = monte_carlo_returns(rewarded, options)
    return BatchAdvantages(advantages, result.returns, spread, complete)


def _own_estimates(
    rewarded: RewardedBatch, options: PPOConfig, function: Callable[..., Any]
) -> BatchAdvantages:
    """Compute advantages by a user-defined function."""
    complete = monte_carlo_returns(rewarded, options)
    advantages, returns = own_advantages(
        function,
        shaped_rewards(rewarded),
        rewarded.values.clone(),  # the function may work in place
        cu_seqlens=rewarded.batch.cu_seqlens,
        old_logprobs=rewarded.old_logprobs.clone(),
        ref_logprobs=None if rewarded.ref_logprobs is None else rewarded.ref_logprobs.clone(),
        samples_per_prompt=options.samples_per_prompt,
        gamma=options.gamma,
    )
    spread = advantages.std(correction=0)
    advantages = _whitened(advantages, options)
    return BatchAdvantages(advantages, complete if returns is None else returns, spread, complete)


def own_advantages(
    function: Callable[..., Any], rewards: Tensor, values: Tensor, **offered: Any
) -> tuple[Tensor, Tensor | None]:
    """Return the advantages [N] of a user-defined function, and the returns if it has both.

    Args:
        rewards, values: [N], arguments of the function, before a mask [N] bool.
        offered: keywords that the function may name.

    Raises:
        ValueError: the function takes other arguments, or returns something else, or NaN or
            infinity without having got any.
    """
    first = {"rewards": rewards, "values": values, "mask": torch.ones_like(rewards).bool()}
    tensors = [x for x in (*first.values(), *offered.values()) if isinstance(x, Tensor)]
    is_given_finite = all(x.isfinite().all() for x in tensors)
    result = call_by_name("advantage", function, first, offered)
    results = result if isinstance(result, tuple) and len(result) == 2 else (result,)
    checked = []
    for name, value in zip(("advantages", "returns"), results, strict=False):
        value = check_per_token("advantage", function, name, value, rewards)
        invalid = int((~value.isfinite()).sum())
        if invalid and is_given_finite:  # otherwise it is not the function's fault
            raise ValueError(
                f"advantage {name_and_place(function)}: NaN or infinite {name} of {invalid} of "
                f"{len(value)} tokens"
            )
        checked.append(value)
    return checked[0], checked[1] if len(checked) == 2 else None


def _against_group(rewards: Tensor, options: PPOConfig) -> Tensor:
    """Return the advantages [B] of whole responses. Responses to one prompt are adjacent.

    Raises:
        ValueError: the batch does not consist of whole groups.
    """
    if options.advantage == "sequence":
        return rewards
    count = options.samples_per_prompt
    if len(rewards) % count:
        raise ValueError(
            f"advantage={options.advantage} needs samples_per_prompt={count} adjacent responses "
            f"per prompt, got {len(rewards)} responses"
        )
    groups = rewards.view(-1, count)
    above = groups - groups.mean(dim=1, keepdim=True)
    deviation = groups.std(dim=1, keepdim=True)
    above = torch.where(deviation <= ROUNDING, 0.0, above)
    if options.advantage == "rloo":
        above = above * (count / (count - 1))
    else:
        above = above / (deviation + GROUP_EPS)
    return above.flatten()


def shaped_rewards(rewarded: RewardedBatch) -> Tensor:
    """Return per-token rewards [N] fp32, with the KL penalty and the score."""
    rewards = (
        torch.zeros_like(rewarded.values) if rewarded.within is None else rewarded.within.clone()
    )
    if rewarded.kl_coef:
        assert rewarded.ref_logprobs is not None
        kl = sampled_kl(rewarded.old_logprobs, rewarded.ref_logprobs, rewarded.kl_estimator)
        rewards -= rewarded.kl_coef * kl
    starts = rewarded.batch.cu_seqlens
    # An empty response has no token, and adds 0 to its neighbor's last one.
    last = torch.where(starts.diff() > 0, rewarded.last, 0.0).to(rewards.dtype)
    return rewards.index_put((starts[1:] - 1,), last, accumulate=True)


def _turn_advantages(rewarded: RewardedBatch, options: PPOConfig) -> BatchAdvantages:
    """GAE over turns."""
    rewards = shaped_rewards(rewarded)
    advantages, returns = turn_gae(rewarded, rewards, options.lam, options)
    spread = advantages.std(correction=0)
    if options.value_lam is not None:
        _, returns = turn_gae(rewarded, rewards, options.value_lam, options)
    advantages = _whitened(advantages, options)
    return BatchAdvantages(advantages, returns, spread, monte_carlo_returns(rewarded, options))


def turn_gae(
    rewarded: RewardedBatch, rewards: Tensor, lam: float, options: PPOConfig
) -> tuple[Tensor, Tensor]:
    """GAE over turns, with γ and λ per turn and V_k the value before turn k:

        δ_k = Σ r_t of the turn + γ·V_{k+1} − V_k,   A_k = δ_k + γλ·A_{k+1}

    Args:
        rewards: [N] fp32 from `shaped_rewards`.

    Returns:
        (advantages [N], one per turn, repeated for its tokens; returns [N]: the rewards from a
        token to the end of its turn, plus γ·(V_{k+1} + λ·A_{k+1})).
    """
    turn_counts, turn_lengths = rewarded.batch.turns()
    counts = on_device(turn_counts, rewarded.batch.device)
    lengths = on_device(turn_lengths, rewarded.batch.device)
    first = lengths.cumsum(0) - lengths
    advantages, returns = gae(
        torch.segment_reduce(rewards, "sum", lengths=lengths),
        rewarded.values[first],
        cu_seqlens=torch.nn.functional.pad(counts.cumsum(0), (1, 0)),
        gamma=options.gamma,
        lam=lam,
        bootstrap=rewarded.bootstrap,
        backend=options.backend,
    )

    def by_token(turn_values: Tensor) -> Tensor:
        return turn_values.repeat_interleave(lengths, output_size=len(rewards))

    # fp64, because both sums start at the beginning of the batch.
    before = rewards.double().cumsum(0) - rewards.double()
    earlier_in_turn = before - by_token(before[first])
    return by_token(advantages), (by_token(returns).double() - earlier_in_turn).float()


def _whitened(advantages: Tensor, options: PPOConfig) -> Tensor:
    """Whiten if the options say so, for kinds without a kernel that does."""
    if not options.whiten_advantages:
        return advantages
    return whiten(advantages, backend=options.backend)
