"""The advantages of a batch, by the config's kind.

With a value function every kind is GAE: λ = 1 is Monte Carlo (reward to go less the value), λ = 0
one step, and the sequence's advantage is that of its first token at λ = 1, for every token. Without
one, R is the reward of a response, the KL's share in it, and Ḡ the mean over the
n = samples_per_prompt responses to its prompt:

    reinforce   G_t, the reward to go                               Williams 1992
    rloo        R − the mean of the other n − 1, n/(n−1)·(R − Ḡ)    Ahmadian et al. 2024
    group       (R − Ḡ)/(deviation of the n + 1e-4)                 Shao et al. 2024 (GRPO)

With the exact KL in the reward, the penalty of each token is handed over as a reward at that token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from fastppo_kernels.records import WHITEN_EPSILON
from torch import Tensor

from fastppo.data.batch import Batch, on_device
from fastppo.functional.advantages import Advantages, compute_advantages, gae, whiten
from fastppo.functional.statistics import sampled_kl
from fastppo.ppo.old_policy import OldPolicy, ReferenceStats
from fastppo.ppo.options.config import CRITIC_FREE, PPOConfig
from fastppo.rewards.scorer import Scores

ONE_PER_RESPONSE = ("sequence", "rloo", "group")
"""Kinds that have one advantage for all tokens of a response."""

COMPLETE_RETURNS = ("sequence", *CRITIC_FREE)
"""Kinds whose λ is 1."""

GROUP_EPS = 1e-4
"""Added to a group's deviation, in units of the reward; TRL's value."""

ROUNDING = 1e-5
"""Advantages of this size and below, in units of the reward, are taken for rounding: where all
responses earn the same and the policy is still the reference, the KL of a few 1e-6 nats is all that
differs between them. An optimiser that divides by the size of the gradient would take a whole step
in its direction."""


class BatchAdvantages(NamedTuple):
    """Advantages and returns of a batch, packed [N] fp32."""

    advantages: Tensor
    returns: Tensor
    """What the value loss regresses to."""
    spread: Tensor
    """0-d: the advantages' standard deviation before whitening, which would hide that they hardly
    vary and there is nothing to learn."""
    complete_returns: Tensor
    """Monte Carlo: the shaped rewards to go, the KL's share, the score and what is paid within a
    response, discounted as GAE's steps are; of the values only the bootstrap value after a response
    that was cut off, where one is taken."""


class RewardedBatch(NamedTuple):
    """A batch with its rewards and all else that its advantages depend on, on its device."""

    batch: Batch
    last: Tensor
    """[B] rewards at the last token of each response."""
    within: Tensor | None
    """[N] rewards at each token, added to those of the last ones."""
    old_logprobs: Tensor
    """[N], nats; `ref_logprobs` likewise."""
    ref_logprobs: Tensor | None
    kl_coef: float
    """β of the KL between the two."""
    kl_estimator: str
    values: Tensor
    """[N], of the state before each token; 0 for the kinds that have no value function."""
    bootstrap: Tensor | None
    """[B], the value after a response that was cut off."""


def make_advantages(
    batch: Batch,
    scores: Scores,
    options: PPOConfig,
    *,
    truncated: Sequence[bool],
    old: OldPolicy,
    ref_stats: ReferenceStats,
    kl_coef: float,
) -> BatchAdvantages:
    """Shaped rewards, advantages and returns of the packed responses.

    Args:
        scores: of the responses, paid at their last tokens and within them.
        truncated: [B], whether a response was cut off.
        old: the rollout policy's logprobs and values.
        ref_stats: the reference's logprobs, or none for no KL, and the exact KL in place of an
            estimate.
        kl_coef: β of the KL in the reward.
    """
    within = None if scores.within is None else scores.within.to(batch.device)
    if ref_stats.logprobs is None:
        kl_coef = 0.0
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
        # The exact KL is among the rewards already; at a coefficient of 0 nobody computed it.
        kl_estimator="k1" if options.kl_estimator == "full" else options.kl_estimator,
        values=old.values if has_values else torch.zeros_like(old.values),
        bootstrap=bootstrap,
    )
    if options.advantage in ONE_PER_RESPONSE:
        estimates = _response_advantages(rewarded, options)
    elif options.advantage == "turn_gae":
        estimates = _turn_advantages(rewarded, options)
    else:
        estimates = _token_advantages(rewarded, options)
    advantages = estimates.advantages
    if options.whiten_advantages == "full":
        size = estimates.spread
    else:
        size = advantages.square().mean().sqrt()
    if options.whiten_advantages == "variance" and len(advantages) > 1:
        advantages = advantages * (advantages.var() + WHITEN_EPSILON).rsqrt()
    # Not `size > ROUNDING`: what is no number stays to be seen.
    return estimates._replace(advantages=torch.where(size <= ROUNDING, 0.0, advantages))


def complete_returns(rewarded: RewardedBatch, options: PPOConfig) -> Tensor:
    """[N] fp32: `BatchAdvantages.complete_returns`, the returns at λ = 1 without values."""
    without_values = rewarded._replace(values=torch.zeros_like(rewarded.values))
    if options.advantage == "turn_gae":
        _, returns = turn_gae(without_values, shaped_rewards(rewarded), 1.0, options)
        return returns
    return _token_gae(without_values, options, lam=1.0, whiten=False).returns


def _token_advantages(rewarded: RewardedBatch, options: PPOConfig) -> BatchAdvantages:
    """GAE whose steps are tokens."""
    lam: float | Tensor = options.lam
    if options.advantage in COMPLETE_RETURNS:
        lam = 1.0
    elif options.lam_alpha is not None:
        # λ = 1 − 1/(α·length) of each response, Yue et al. 2025 (VAPO).
        lengths = rewarded.batch.written_lengths.to(rewarded.batch.device).float().clamp(min=1)
        lam = (1 - 1 / (options.lam_alpha * lengths)).clamp(min=0)
    result = _token_gae(rewarded, options, lam=lam, whiten=options.whiten_advantages == "full")
    returns = result.returns
    if options.value_lam is not None:
        returns = _token_gae(rewarded, options, lam=options.value_lam, whiten=False).returns
    # Returns are never whitened.
    spread = (result.returns - rewarded.values).std(correction=0)
    return BatchAdvantages(result.advantages, returns, spread, complete_returns(rewarded, options))


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
    """The advantage of a response for each of its tokens."""
    result = _token_gae(rewarded, options, lam=1.0, whiten=False)
    count = len(rewarded.values)
    first = rewarded.batch.cu_seqlens[:-1].clamp(max=max(0, count - 1))
    by_response = _against_group(result.advantages[first], options)
    lengths = rewarded.batch.written_lengths.to(rewarded.batch.device)
    advantages = by_response.repeat_interleave(lengths, output_size=count)
    spread = advantages.std(correction=0)
    advantages = _whitened(advantages, options)
    complete = complete_returns(rewarded, options)
    return BatchAdvantages(advantages, result.returns, spread, complete)


def _against_group(rewards: Tensor, options: PPOConfig) -> Tensor:
    """[B] advantages of whole responses; those to one prompt are neighbours.

    Raises:
        ValueError: the batch is not made of whole groups.
    """
    if options.advantage == "sequence":
        return rewards
    count = options.samples_per_prompt
    if len(rewards) % count:
        raise ValueError(
            f"advantage={options.advantage} compares the {count} responses to a prompt "
            f"(samples_per_prompt), which follow one another: got {len(rewards)} responses"
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
    """[N] fp32 by token, with the KL's share and the score in them."""
    rewards = (
        torch.zeros_like(rewarded.values) if rewarded.within is None else rewarded.within.clone()
    )
    if rewarded.kl_coef:
        assert rewarded.ref_logprobs is not None
        kl = sampled_kl(rewarded.old_logprobs, rewarded.ref_logprobs, rewarded.kl_estimator)
        rewards -= rewarded.kl_coef * kl
    rewards[rewarded.batch.cu_seqlens[1:] - 1] += rewarded.last
    return rewards


def _turn_advantages(rewarded: RewardedBatch, options: PPOConfig) -> BatchAdvantages:
    """GAE whose steps are turns."""
    rewards = shaped_rewards(rewarded)
    advantages, returns = turn_gae(rewarded, rewards, options.lam, options)
    spread = advantages.std(correction=0)
    if options.value_lam is not None:
        _, returns = turn_gae(rewarded, rewards, options.value_lam, options)
    advantages = _whitened(advantages, options)
    return BatchAdvantages(advantages, returns, spread, complete_returns(rewarded, options))


def turn_gae(
    rewarded: RewardedBatch, rewards: Tensor, lam: float, options: PPOConfig
) -> tuple[Tensor, Tensor]:
    """GAE whose steps are turns, γ and λ per turn, with V_k the value before turn k:

        δ_k = Σ r_t of the turn + γ·V_{k+1} − V_k,   A_k = δ_k + γλ·A_{k+1}

    Args:
        rewards: [N] fp32, as `shaped_rewards` gives them.

    Returns:
        ([N] advantages, that of its turn for every token; [N] returns: the rewards from a token to
        the end of its turn, and γ·(V_{k+1} + λ·A_{k+1})).
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

    # In fp64, since both sums go from the batch's beginning.
    before = rewards.double().cumsum(0) - rewards.double()
    earlier_in_turn = before - by_token(before[first])
    return by_token(advantages), (by_token(returns).double() - earlier_in_turn).float()


def _whitened(advantages: Tensor, options: PPOConfig) -> Tensor:
    """Whitened as the options say, where no kernel has done it."""
    if options.whiten_advantages != "full":
        return advantages
    return whiten(advantages, backend=options.backend)
