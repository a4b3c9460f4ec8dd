"""The advantages of a batch, by the config's kind.

With a value function all kinds are GAE: the sequence's advantage is that of its first token at
λ = 1 (the reward less the value of the prompt), for every token. Without one, R is the reward of a
response, the KL's share in it, and Ḡ the mean over the n = samples_per_prompt responses to its
prompt:

    reinforce   G_t, the reward to go                               Williams 1992
    rloo        R − the mean of the other n − 1, n/(n−1)·(R − Ḡ)    Ahmadian et al. 2024
    group       (R − Ḡ)/(deviation of the n + 1e-4)                 Shao et al. 2024 (GRPO)

With the exact KL in the reward, the
penalty of each token is handed over as a reward at that token.
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
from fastppo.ppo.old_policy import OldPolicy
from fastppo.rewards.scorer import Scores

LAM = dict.fromkeys(("sequence", *CRITIC_FREE), 1.0)
"""λ of the kinds that fix it."""

GROUP_EPS = 1e-4
"""Added to a group's deviation, in units of the reward; TRL's value."""


class Learned(NamedTuple):
    """What an update learns from, packed [N] fp32."""

    advantages: Tensor
    returns: Tensor
    spread: Tensor
    """0-d: the advantages' standard deviation before whitening, which would hide that they hardly
    vary and there is nothing to learn."""


def make_advantages(
    batch: Batch,
    rewards: Scores,
    truncated: Sequence[bool],
    old: OldPolicy,
    ref_logprobs: Tensor | None,
    exact_kl: Tensor | None,
    kl_coef: float,
    options: PPOConfig,
) -> Learned:
    """Shaped rewards, advantages and returns of the packed responses.

    Args:
        rewards: paid at the last token and within the responses.
        truncated: [B], whether a response was cut off.
        old: the rollout policy's logprobs and values.
        ref_logprobs: [N] the reference's, or None for no KL.
        exact_kl: [N] in place of an estimate of the KL.
        kl_coef: β of the KL in the reward.
    """
    device, values = batch.device, old.values
    if options.advantage in CRITIC_FREE:
        values = torch.zeros_like(values)
    within = None if rewards.within is None else rewards.within.to(device)
    if ref_logprobs is None:
        kl_coef = 0.0
    if exact_kl is not None:
        penalty = -kl_coef * exact_kl
        within = penalty if within is None else within + penalty
        kl_coef = 0.0
    bootstrap = None
    if options.bootstrap_truncated:
        assert old.final_values is not None
        bootstrap = old.final_values * torch.tensor(truncated, device=device).float()
    by_sequence = options.advantage in ("sequence", "rloo", "group")
    # The exact KL is paid above; at a coefficient of 0 nobody formed it, and nothing is paid.
    estimator = "k1" if options.kl_estimator == "full" else options.kl_estimator

    def by_token(lam: float | Tensor, whiten: bool) -> Advantages:
        return compute_advantages(
            rewards.last.to(device),
            values,
            old.logprobs,
            ref_logprobs,
            torch.ones_like(values, dtype=torch.bool),
            cu_seqlens=batch.cu_seqlens,
            kl_coef=kl_coef,
            kl_estimator=estimator,
            gamma=options.gamma,
            lam=lam,
            whiten=whiten,
            bootstrap=bootstrap,
            token_rewards=within,
            backend=options.backend,
        )

    def by_turn(lam: float) -> tuple[Tensor, Tensor]:
        paid = torch.zeros_like(values) if within is None else within.clone()
        if kl_coef:
            assert ref_logprobs is not None
            paid -= kl_coef * sampled_kl(old.logprobs, ref_logprobs, options.kl_estimator)
        paid[batch.cu_seqlens[1:] - 1] += rewards.last.to(device)
        return turn_gae(batch, paid, values, lam, bootstrap, options)

    # What is made of all tokens' advantages at once, below, is not whitened in the kernel.
    in_kernel = options.whiten_advantages == "full" and not by_sequence
    if options.gae_by == "turn":
        advantages, returns = by_turn(options.lam)
        spread = advantages.std(correction=0)
        if options.value_lam is not None:
            returns = by_turn(options.value_lam)[1]
        if options.whiten_advantages == "full":
            advantages = whiten(advantages, backend=options.backend)
    else:
        result = by_token(_lam(batch, options), in_kernel)
        advantages, returns = result.advantages, result.returns
        spread = (returns - values).std(correction=0)  # returns are never whitened
        if options.value_lam is not None:
            returns = by_token(options.value_lam, False).returns
    if by_sequence:
        first = batch.cu_seqlens[:-1].clamp(max=max(0, len(values) - 1))
        lengths = batch.written_lengths.to(device)
        of_responses = _against_group(advantages[first], options)
        advantages = of_responses.repeat_interleave(lengths, output_size=len(values))
        spread = advantages.std(correction=0)
        if options.whiten_advantages == "full":
            advantages = whiten(advantages, backend=options.backend)
    if options.whiten_advantages == "variance" and len(advantages) > 1:
        advantages = advantages * (advantages.var() + 1e-8).rsqrt()
    return Learned(advantages, returns, spread)


def turn_gae(
    batch: Batch,
    rewards: Tensor,
    values: Tensor,
    lam: float,
    bootstrap: Tensor | None,
    options: PPOConfig,
) -> tuple[Tensor, Tensor]:
    """GAE whose steps are turns, γ and λ per turn, with V_k the value before turn k:

        δ_k = Σ r_t of the turn + γ·V_{k+1} − V_k,   A_k = δ_k + γλ·A_{k+1}

    Args:
        rewards, values: [N] fp32, by token; rewards with the KL's share and the score in them.

    Returns:
        ([N] advantages, that of its turn for every token; [N] returns: what is paid from a token to
        the end of its turn, and γ·(V_{k+1} + λ·A_{k+1})).
    """
    counts, lengths = (on_device(each, batch.device) for each in batch.turns())
    first = lengths.cumsum(0) - lengths
    advantages, returns = gae(
        torch.segment_reduce(rewards, "sum", lengths=lengths),
        values[first],
        cu_seqlens=torch.nn.functional.pad(counts.cumsum(0), (1, 0)),
        gamma=options.gamma,
        lam=lam,
        bootstrap=bootstrap,
        backend=options.backend,
    )
    # In fp64, since both sums go from the batch's beginning.
    before = rewards.double().cumsum(0) - rewards.double()
    paid = before - before[first].repeat_interleave(lengths, output_size=len(values))
    advantages, returns = (
        each.repeat_interleave(lengths, output_size=len(values)) for each in (advantages, returns)
    )
    return advantages, (returns.double() - paid).float()


def _lam(batch: Batch, options: PPOConfig) -> float | Tensor:
    """λ, or [B] one of each response: 1 − 1/(α·length), at least 0, of Yue et al. 2025 (VAPO)."""
    if options.lam_alpha is None:
        return LAM.get(options.advantage, options.lam)
    lengths = batch.written_lengths.to(batch.device).float().clamp(min=1)
    return (1 - 1 / (options.lam_alpha * lengths)).clamp(min=0)


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
