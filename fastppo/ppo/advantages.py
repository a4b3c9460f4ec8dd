"""The advantages of a batch, by the config's kind.

All kinds are GAE: Monte Carlo is λ = 1 (reward to go less the value), one-step is λ = 0, and the
sequence's advantage is the Monte Carlo one of its first token, for every token. With the exact KL
in the reward, the penalty of each token is handed over as a reward at that token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastppo.data.batch import Batch
from fastppo.functional.advantages import Advantages, compute_advantages, whiten
from fastppo.ppo.config import PPOConfig
from fastppo.ppo.old_policy import OldPolicy
from fastppo.rewards.scorer import Scores

LAM = {"sequence": 1.0, "monte_carlo": 1.0, "one_step": 0.0}
"""λ of the kinds that fix it."""


def make_advantages(
    batch: Batch,
    rewards: Scores,
    truncated: Sequence[bool],
    old: OldPolicy,
    ref_logprobs: Tensor | None,
    exact_kl: Tensor | None,
    kl_coef: float,
    options: PPOConfig,
) -> Advantages:
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
    by_sequence = options.advantage == "sequence"
    # What is made of all tokens' advantages at once, below, is not whitened in the kernel.
    in_kernel = options.whiten_advantages == "full" and not by_sequence
    result = compute_advantages(
        rewards.last.to(device),
        values,
        old.logprobs,
        ref_logprobs,
        torch.ones_like(values, dtype=torch.bool),
        cu_seqlens=batch.cu_seqlens,
        kl_coef=kl_coef,
        kl_estimator="k1" if exact_kl is not None else options.kl_estimator,
        gamma=options.gamma,
        lam=LAM.get(options.advantage, options.lam),
        whiten=in_kernel,
        bootstrap=bootstrap,
        token_rewards=within,
        backend=options.backend,
    )
    advantages = result.advantages
    if by_sequence:
        first = batch.cu_seqlens[:-1].clamp(max=max(0, len(values) - 1))
        lengths = batch.response_lengths.to(device)
        advantages = advantages[first].repeat_interleave(lengths, output_size=len(values))
        if options.whiten_advantages == "full":
            advantages = whiten(advantages, backend=options.backend)
    if options.whiten_advantages == "variance":
        advantages = advantages * (advantages.var() + 1e-8).rsqrt()
    return result._replace(advantages=advantages)
