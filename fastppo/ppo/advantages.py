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
from torch import Tensor

from fastppo.data.batch import Batch, on_device
from fastppo.functional.advantages import Advantages, compute_advantages, gae, whiten
from fastppo.functional.statistics import sampled_kl
from fastppo.ppo.config import CRITIC_FREE, PPOConfig
from fastppo.ppo.old_policy import OldPolicy, Reference
from fastppo.rewards.scorer import Scores

OF_RESPONSES = ("sequence", "rloo", "group")
"""Kinds that have one advantage for all tokens of a response."""

COMPLETE_RETURNS = ("sequence", *CRITIC_FREE)
"""Kinds whose λ is 1."""

GROUP_EPS = 1e-4
"""Added to a group's deviation, in units of the reward; TRL's value."""

WHITEN_EPS = 1e-8
"""Added to the variance of the advantages, as in `fastppo.whiten`."""


class Learned(NamedTuple):
    """What an update learns from, packed [N] fp32."""

    advantages: Tensor
    returns: Tensor
    spread: Tensor
    """0-d: the advantages' standard deviation before whitening, which would hide that they hardly
    vary and there is nothing to learn."""


class Paid(NamedTuple):
    """What the responses of a batch are paid, on its device, and what it is compared with."""

    batch: Batch
    last: Tensor
    """[B], at the last token."""
    within: Tensor | None
    """[N], at each token."""
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
    rewards: Scores,
    options: PPOConfig,
    *,
    truncated: Sequence[bool],
    old: OldPolicy,
    reference: Reference,
    kl_coef: float,
) -> Learned:
    """Shaped rewards, advantages and returns of the packed responses.

    Args:
        rewards: paid at the last token and within the responses.
        truncated: [B], whether a response was cut off.
        old: the rollout policy's logprobs and values.
        reference: its logprobs, or none for no KL, and the exact KL in place of an estimate.
        kl_coef: β of the KL in the reward.
    """
    within = None if rewards.within is None else rewards.within.to(batch.device)
    if reference.logprobs is None:
        kl_coef = 0.0
    if reference.exact_kl is not None:
        penalty = -kl_coef * reference.exact_kl
        within = penalty if within is None else within + penalty
        kl_coef = 0.0
    bootstrap = None
    if options.bootstrap_truncated:
        assert old.final_values is not None
        bootstrap = old.final_values * torch.tensor(truncated, device=batch.device).float()
    has_values = options.advantage not in CRITIC_FREE
    paid = Paid(
        batch=batch,
        last=rewards.last.to(batch.device),
        within=within,
        old_logprobs=old.logprobs,
        ref_logprobs=reference.logprobs,
        kl_coef=kl_coef,
        # The exact KL is paid above; at a coefficient of 0 nobody formed it, and nothing is paid.
        kl_estimator="k1" if options.kl_estimator == "full" else options.kl_estimator,
        values=old.values if has_values else torch.zeros_like(old.values),
        bootstrap=bootstrap,
    )
    if options.advantage in OF_RESPONSES:
        learned = _of_responses(paid, options)
    elif options.gae_by == "turn":
        learned = _of_turns(paid, options)
    else:
        learned = _of_tokens(paid, options)
    if options.whiten_advantages == "variance" and len(learned.advantages) > 1:
        scale = (learned.advantages.var() + WHITEN_EPS).rsqrt()
        return learned._replace(advantages=learned.advantages * scale)
    return learned


def _of_tokens(paid: Paid, options: PPOConfig) -> Learned:
    """GAE whose steps are tokens."""
    lam: float | Tensor = options.lam
    if options.advantage in COMPLETE_RETURNS:
        lam = 1.0
    elif options.lam_alpha is not None:
        # λ = 1 − 1/(α·length) of each response, Yue et al. 2025 (VAPO).
        lengths = paid.batch.written_lengths.to(paid.batch.device).float().clamp(min=1)
        lam = (1 - 1 / (options.lam_alpha * lengths)).clamp(min=0)
    result = _token_gae(paid, options, lam=lam, whiten=options.whiten_advantages == "full")
    returns = result.returns
    if options.value_lam is not None:
        returns = _token_gae(paid, options, lam=options.value_lam, whiten=False).returns
    # Returns are never whitened.
    spread = (result.returns - paid.values).std(correction=0)
    return Learned(result.advantages, returns, spread)


def _token_gae(paid: Paid, options: PPOConfig, *, lam: float | Tensor, whiten: bool) -> Advantages:
    return compute_advantages(
        paid.last,
        paid.values,
        paid.old_logprobs,
        paid.ref_logprobs,
        torch.ones_like(paid.values, dtype=torch.bool),
        cu_seqlens=paid.batch.cu_seqlens,
        kl_coef=paid.kl_coef,
        kl_estimator=paid.kl_estimator,
        gamma=options.gamma,
        lam=lam,
        whiten=whiten,
        bootstrap=paid.bootstrap,
        token_rewards=paid.within,
        backend=options.backend,
    )


def _of_responses(paid: Paid, options: PPOConfig) -> Learned:
    """The advantage of a response for each of its tokens."""
    result = _token_gae(paid, options, lam=1.0, whiten=False)
    count = len(paid.values)
    first = paid.batch.cu_seqlens[:-1].clamp(max=max(0, count - 1))
    of_responses = _against_group(result.advantages[first], options)
    lengths = paid.batch.written_lengths.to(paid.batch.device)
    advantages = of_responses.repeat_interleave(lengths, output_size=count)
    spread = advantages.std(correction=0)
    return Learned(_whitened(advantages, options), result.returns, spread)


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
    if options.advantage == "rloo":
        above = above * (count / (count - 1))
    else:
        above = above / (groups.std(dim=1, keepdim=True) + GROUP_EPS)
    return above.flatten()


def _of_turns(paid: Paid, options: PPOConfig) -> Learned:
    """GAE whose steps are turns."""
    rewards = torch.zeros_like(paid.values) if paid.within is None else paid.within.clone()
    if paid.kl_coef:
        assert paid.ref_logprobs is not None
        kl = sampled_kl(paid.old_logprobs, paid.ref_logprobs, paid.kl_estimator)
        rewards -= paid.kl_coef * kl
    rewards[paid.batch.cu_seqlens[1:] - 1] += paid.last
    advantages, returns = turn_gae(paid, rewards, options.lam, options)
    spread = advantages.std(correction=0)
    if options.value_lam is not None:
        _, returns = turn_gae(paid, rewards, options.value_lam, options)
    return Learned(_whitened(advantages, options), returns, spread)


def turn_gae(paid: Paid, rewards: Tensor, lam: float, options: PPOConfig) -> tuple[Tensor, Tensor]:
    """GAE whose steps are turns, γ and λ per turn, with V_k the value before turn k:

        δ_k = Σ r_t of the turn + γ·V_{k+1} − V_k,   A_k = δ_k + γλ·A_{k+1}

    Args:
        rewards: [N] fp32, by token, with the KL's share and the score in them.

    Returns:
        ([N] advantages, that of its turn for every token; [N] returns: what is paid from a token to
        the end of its turn, and γ·(V_{k+1} + λ·A_{k+1})).
    """
    turn_counts, turn_lengths = paid.batch.turns()
    counts = on_device(turn_counts, paid.batch.device)
    lengths = on_device(turn_lengths, paid.batch.device)
    first = lengths.cumsum(0) - lengths
    advantages, returns = gae(
        torch.segment_reduce(rewards, "sum", lengths=lengths),
        paid.values[first],
        cu_seqlens=torch.nn.functional.pad(counts.cumsum(0), (1, 0)),
        gamma=options.gamma,
        lam=lam,
        bootstrap=paid.bootstrap,
        backend=options.backend,
    )

    def by_token(of_turns: Tensor) -> Tensor:
        return of_turns.repeat_interleave(lengths, output_size=len(rewards))

    # In fp64, since both sums go from the batch's beginning.
    before = rewards.double().cumsum(0) - rewards.double()
    earlier_in_turn = before - by_token(before[first])
    return by_token(advantages), (by_token(returns).double() - earlier_in_turn).float()


def _whitened(advantages: Tensor, options: PPOConfig) -> Tensor:
    """Whitened as the options say, where no kernel has done it."""
    if options.whiten_advantages != "full":
        return advantages
    return whiten(advantages, backend=options.backend)
