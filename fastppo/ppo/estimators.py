"""Advantages and returns of a batch, by the `advantage` option.

With a value function, every kind is GAE: λ = 1 is Monte Carlo (reward-to-go minus value), λ = 0 is
one-step TD. `sequence` gives every token the advantage of the first token at λ = 1. Without a value
function, let R be the reward of a response, KL penalty included, and R̄ its mean over the
n = samples_per_prompt responses to the prompt:

    reinforce   G_t, the reward-to-go                               Williams 1992
    rloo        R − mean of the other n − 1 = n/(n−1)·(R − R̄)       Ahmadian et al. 2024
    group       (R − R̄)/(standard deviation of the n + GROUP_EPS·s) Shao et al. 2024 (GRPO)

with s, the root mean square of the n rewards, so that their scale does not matter.

A user-defined function may replace all of them: `user_advantages`.

With the exact KL in the reward, each token's penalty is passed as a reward at that token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from fastppo_kernels.definition import wide
from torch import Tensor

from fastppo.data.batch import on_device
from fastppo.functional import advantages as functional
from fastppo.functional.advantages import Advantages, compute_advantages, gae
from fastppo.functional.statistics import sampled_kl
from fastppo.functional.user_functions import (
    call_by_name,
    check_per_token,
    name_and_place,
    named_by,
)
from fastppo.ppo.coefficients import Coefficients
from fastppo.ppo.experience import Experience
from fastppo.ppo.options.config import CRITIC_FREE, PPOConfig
from fastppo.ppo.trained import Trained
from fastppo.rewards.scorer import Scores

ONE_PER_RESPONSE = ("sequence", "rloo", "group")
"""Kinds with one advantage for all tokens of a response."""

MONTE_CARLO = ("sequence", *CRITIC_FREE)
"""Kinds with λ = 1."""

GROUP_EPS = 1e-6
"""Added to a group's standard deviation, as a share of the size of its rewards. TRL adds 1e-4 in
reward units, with which the scale of the rewards matters."""

SCORE_ROUNDING = 2.5e-7
"""Scores that differ by at most this share of their size are equal: twice the relative rounding
error of fp32."""

KL_ROUNDING = 2e-4
"""KL penalties of at most this many nats are rounding errors. If all responses earn the same and
the policy still equals the reference, nothing else distinguishes them, and Adam would take a step
of full length in their direction."""

BY_EPISODE = ("samples_per_prompt", "episodes")
"""Arguments of a user's advantage that are about episodes."""


class Estimates(NamedTuple):
    """What an estimator computes, packed [N] fp32."""

    advantages: Tensor
    """In reward units, or in the unit of a user's function."""
    returns: Tensor
    """Targets of the value loss."""


def estimate_advantages(
    experience: Experience,
    scores: Scores,
    config: PPOConfig,
    coefficients: Coefficients,
    *,
    function: Callable[..., Any] | None = None,
) -> Experience:
    """Fill in the advantages and returns of packed responses.

    If all rewards, and `kl_coef` with them, are multiplied by a positive number, whitened
    advantages and those of `group` stay the same. They are 0 if all responses have the same
    discounted score, or if they differ by rounding errors only. With truncated=mask, truncated
    responses have advantages of 0 and count only in the baselines of `rloo` and `group`.

    Args:
        experience: has the statistics of the policies.
        scores: rewards at the last tokens and within the responses.
        coefficients: with β of the KL in the reward.
        function: the user's advantage; see `user_advantages`.
    """
    experience = with_rewards(experience, scores, config, coefficients.kl_coef)
    has_kl = coefficients.kl_coef != 0 and experience.ref_logprobs is not None
    kl_rounding = KL_ROUNDING * abs(coefficients.kl_coef) if has_kl else 0.0
    if function is None:
        estimates = _estimates(experience, config, kl_rounding)
    else:
        estimates = _user_estimates(experience, config, function)
    totals = _discounted_scores(experience, scores, config)
    in_loss: slice | Tensor = slice(None)
    masked = experience.masked
    if masked is not None:
        # Masked responses must not move the mean and the variance of the others.
        # The places are found on the CPU: for a mask on a GPU, the host would wait.
        lengths = experience.batch.generated_lengths
        tokens = (~masked).repeat_interleave(lengths).nonzero()[:, 0]
        in_loss = on_device(tokens, experience.batch.device)
        episodes = experience.by_episode(~masked).nonzero()[:, 0]
        totals = totals[on_device(episodes, totals.device)]
    rounding = SCORE_ROUNDING * _size(totals) + kl_rounding
    learned = estimates.advantages[in_loss]
    spread = learned.std(correction=0) if len(learned) else learned.sum()
    size = spread if config.whiten_advantages else learned.square().mean().sqrt()
    limit: float | Tensor = rounding
    if function is not None or config.advantage == "group":  # not in reward units
        limit = SCORE_ROUNDING * learned.square().mean().sqrt()
    if function is None and (scores.has_rewards or not has_kl) and len(totals) > 1:
        is_equal = totals.std(correction=0) <= rounding
        size = torch.where(on_device(is_equal, size.device), 0.0, size)
    if config.whiten_advantages:
        learned = functional.whiten(learned / spread, backend=config.backend)
    advantages = torch.zeros_like(estimates.advantages)
    # NaN advantages stay visible: comparisons with NaN are False.
    advantages[in_loss] = torch.where(size <= limit, 0.0, learned)
    return replace(
        experience,
        advantages=advantages,
        returns=estimates.returns,
        monte_carlo_returns=monte_carlo_returns(experience, config),
        advantage_std=spread,
    )


def _size(numbers: Tensor) -> float:
    """Return the root mean square of numbers; 0 of none."""
    return numbers.square().mean().sqrt().item() if len(numbers) else 0.0


def what_to_train(
    has_signal: bool, masked: Tensor | None, config: PPOConfig, coefficients: Coefficients
) -> Trained:
    """Decide what an iteration trains.

    The policy is left out during `value_warmup_iterations`, and if its loss has no term: all
    advantages are 0, and there is no KL, entropy bonus, pretraining text or objective of the user.

    Args:
        has_signal: whether an advantage differs from 0.
        masked: [B] bool on the CPU, responses left out of the loss.
    """
    is_warmup = coefficients.iteration < config.value_warmup_iterations
    others = (coefficients.kl_loss_coef, coefficients.entropy_coef, coefficients.ptx_coef)
    has_term = has_signal or any(others) or "objective" in config.user_functions
    return Trained(
        policy=not is_warmup and has_term,
        value=masked is None or not bool(masked.all()),
        has_signal=has_signal,
    )


def with_rewards(
    experience: Experience, scores: Scores, config: PPOConfig, kl_coef: float
) -> Experience:
    """Fill in the rewards, with the exact KL as a reward at each token.

    Kinds of advantages without a value function have values of 0.
    """
    device = experience.batch.device
    token_rewards = None if scores.within is None else on_device(scores.within, device)
    if experience.ref_logprobs is None:
        kl_coef = 0.0
    if experience.exact_kl is not None:
        penalty = -kl_coef * experience.exact_kl
        token_rewards = penalty if token_rewards is None else token_rewards + penalty
        kl_coef = 0.0
    bootstrap = None
    if config.bootstrap_truncated:
        assert experience.final_values is not None
        assert experience.truncated is not None
        bootstrap = experience.final_values * on_device(experience.truncated, device).float()
    values = experience.old_values
    return replace(
        experience,
        last_rewards=on_device(scores.last, device),
        token_rewards=token_rewards,
        kl_coef=kl_coef,
        bootstrap=bootstrap,
        old_values=torch.zeros_like(values) if config.advantage in CRITIC_FREE else values,
    )


def _estimates(experience: Experience, config: PPOConfig, kl_rounding: float) -> Estimates:
    """Compute advantages and returns by the kind of the options."""
    if config.advantage in ONE_PER_RESPONSE:
        return _response_advantages(experience, config, kl_rounding)
    if config.advantage == "turn_gae":
        return _turn_advantages(experience, config)
    return _token_advantages(experience, config)


def _discounted_scores(experience: Experience, scores: Scores, config: PPOConfig) -> Tensor:
    """Return the discounted rewards of each episode without the KL, [episodes].

    If they are equal, no action was better than another.
    """
    if config.gamma == 1:
        return experience.by_episode(scores.total)
    within = scores.within
    if within is not None:
        within = on_device(within, experience.batch.device)
    rewards_only = replace(
        experience, token_rewards=within, ref_logprobs=None, kl_coef=0.0, bootstrap=None
    )
    returns = monte_carlo_returns(rewards_only, config)
    return experience.by_episode(_of_responses(returns, experience))


def _of_responses(by_token: Tensor, experience: Experience) -> Tensor:
    """Return the entry of each response's first token, [B]. An empty response has its reward."""
    if len(by_token) == 0:
        return experience.last_rewards.to(by_token.dtype)
    starts = experience.batch.cu_seqlens
    at_first = by_token[starts[:-1].clamp(max=len(by_token) - 1)]
    return torch.where(starts.diff() > 0, at_first, experience.last_rewards.to(at_first.dtype))


def monte_carlo_returns(experience: Experience, config: PPOConfig) -> Tensor:
    """Return `Experience.monte_carlo_returns`, [N] fp32."""
    without_values = replace(experience, old_values=torch.zeros_like(experience.old_values))
    if config.advantage == "turn_gae":
        _, returns = turn_gae(without_values, shaped_rewards(experience, config), 1.0, config)
        return returns
    return _token_gae(without_values, config, lam=1.0).returns


def _token_advantages(experience: Experience, config: PPOConfig) -> Estimates:
    """GAE over tokens."""
    lam: float | Tensor = config.lam
    if config.advantage in MONTE_CARLO:
        lam = 1.0
    elif config.lam_alpha is not None:
        # λ = 1 − 1/(α·length) per response, Yue et al. 2025 (VAPO).
        lengths = experience.batch.generated_lengths.to(experience.batch.device)
        lengths = lengths.float().clamp(min=1)
        lam = (1 - 1 / (config.lam_alpha * lengths)).clamp(min=0)
    result = _token_gae(experience, config, lam=lam)
    returns = result.returns
    if config.value_lam is not None:
        returns = _token_gae(experience, config, lam=config.value_lam).returns
    return Estimates(result.advantages, returns)


def _token_gae(experience: Experience, config: PPOConfig, *, lam: float | Tensor) -> Advantages:
    return compute_advantages(
        experience.last_rewards,
        experience.old_values,
        experience.old_logprobs,
        experience.ref_logprobs,
        torch.ones_like(experience.old_values, dtype=torch.bool),
        cu_seqlens=experience.batch.cu_seqlens,
        kl_coef=experience.kl_coef,
        kl_estimator=_estimator(config),
        gamma=config.gamma,
        lam=lam,
        whiten=False,
        bootstrap=experience.bootstrap,
        token_rewards=experience.token_rewards,
        backend=config.backend,
    )


def _response_advantages(
    experience: Experience, config: PPOConfig, kl_rounding: float
) -> Estimates:
    """One advantage per response, repeated for each of its tokens.

    `rloo` and `group` compare episodes, by the mean over their rows.
    """
    result = _token_gae(experience, config, lam=1.0)
    advantages = _of_responses(result.advantages, experience)
    if config.advantage != "sequence":
        rewards = experience.mean_of_rows(advantages)
        advantages = experience.by_row(_against_group(rewards, config, kl_rounding))
    lengths = experience.batch.cu_seqlens.diff()
    advantages = advantages.repeat_interleave(lengths, output_size=len(experience.old_values))
    return Estimates(advantages, result.returns)


def _user_estimates(
    experience: Experience, config: PPOConfig, function: Callable[..., Any]
) -> Estimates:
    """Compute advantages by a user-defined function.

    Raises:
        ValueError: the function groups rows by `samples_per_prompt`, but an episode has several.
    """
    episodes = experience.episodes
    if episodes is None:
        episodes = torch.arange(len(experience.batch))
    elif (
        "samples_per_prompt" in (named := named_by(function, dict.fromkeys(BY_EPISODE, 0)))
        and "episodes" not in named
    ):
        raise ValueError(
            f"advantage {name_and_place(function)}: an episode has several rows, so that the "
            "responses to a prompt are not samples_per_prompt rows: take `episodes`, the episode "
            "of each row"
        )
    advantages, returns = user_advantages(
        function,
        shaped_rewards(experience, config),
        experience.old_values.clone(),  # the function may work in place
        cu_seqlens=experience.batch.cu_seqlens,
        old_logprobs=experience.old_logprobs.clone(),
        ref_logprobs=None if experience.ref_logprobs is None else experience.ref_logprobs.clone(),
        samples_per_prompt=config.samples_per_prompt,
        gamma=config.gamma,
        episodes=on_device(episodes, experience.batch.device),
    )
    if returns is None:
        returns = monte_carlo_returns(experience, config)
    return Estimates(advantages, returns)


def user_advantages(
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
    is_given_finite = torch.stack([x.isfinite().all() for x in tensors]).all()
    result = call_by_name("advantage", function, first, offered)
    results = result if isinstance(result, tuple) and len(result) == 2 else (result,)
    checked = {
        name: check_per_token("advantage", function, name, value, rewards)
        for name, value in zip(("advantages", "returns"), results, strict=False)
    }
    # One read of the device for all checks.
    counts = [(~value.isfinite()).sum() for value in checked.values()]
    given, *invalid = torch.stack([is_given_finite.long(), *counts]).tolist()
    for (name, value), count in zip(checked.items(), invalid, strict=True):
        if count and given:  # otherwise it is not the function's fault
            raise ValueError(
                f"advantage {name_and_place(function)}: NaN or infinite {name} of {count} of "
                f"{len(value)} tokens"
            )
    return checked["advantages"], checked.get("returns")


def _against_group(rewards: Tensor, config: PPOConfig, kl_rounding: float) -> Tensor:
    """Return the advantages of episodes, [B] like their rewards. Groups are adjacent.

    Args:
        kl_rounding: deviation of equal rewards by the KL in them, reward units.

    Raises:
        ValueError: the batch does not consist of whole groups.
    """
    count = config.samples_per_prompt
    if len(rewards) % count:
        raise ValueError(
            f"advantage={config.advantage} needs samples_per_prompt={count} adjacent responses "
            f"per prompt, got {len(rewards)} responses"
        )
    groups = rewards.view(-1, count)
    above = groups - groups.mean(dim=1, keepdim=True)
    deviation = groups.std(dim=1, keepdim=True)
    size = groups.square().mean(dim=1, keepdim=True).sqrt()
    above = torch.where(deviation <= SCORE_ROUNDING * size + kl_rounding, 0.0, above)
    if config.advantage == "rloo":
        above = above * (count / (count - 1))
    else:
        # The smallest normal number keeps 0/0 out of a group of zeros.
        least = (GROUP_EPS * size).clamp(min=torch.finfo(above.dtype).tiny)
        above = above / (deviation + least)
    return above.flatten()


def shaped_rewards(experience: Experience, config: PPOConfig) -> Tensor:
    """Return per-token rewards [N] fp32, with the KL penalty and the score."""
    if experience.token_rewards is None:
        rewards = torch.zeros_like(experience.old_values)
    else:
        rewards = experience.token_rewards.clone()
    if experience.kl_coef:
        assert experience.ref_logprobs is not None
        kl = sampled_kl(experience.old_logprobs, experience.ref_logprobs, _estimator(config))
        rewards -= experience.kl_coef * kl
    starts = experience.batch.cu_seqlens
    # An empty response has no token, and adds 0 to its neighbor's last one.
    last = torch.where(starts.diff() > 0, experience.last_rewards, 0.0).to(rewards.dtype)
    return rewards.index_put((starts[1:] - 1,), last, accumulate=True)


def _turn_advantages(experience: Experience, config: PPOConfig) -> Estimates:
    """GAE over turns."""
    rewards = shaped_rewards(experience, config)
    advantages, returns = turn_gae(experience, rewards, config.lam, config)
    if config.value_lam is not None:
        _, returns = turn_gae(experience, rewards, config.value_lam, config)
    return Estimates(advantages, returns)


def turn_gae(
    experience: Experience, rewards: Tensor, lam: float, config: PPOConfig
) -> tuple[Tensor, Tensor]:
    """GAE over turns, with γ and λ per turn and V_k the value before turn k:

        δ_k = Σ r_t of the turn + γ·V_{k+1} − V_k,   A_k = δ_k + γλ·A_{k+1}

    Args:
        rewards: [N] fp32 from `shaped_rewards`.

    Returns:
        (advantages [N], one per turn, repeated for its tokens; returns [N]: the rewards from a
        token to the end of its turn, plus γ·(V_{k+1} + λ·A_{k+1})).
    """
    turn_counts, turn_lengths = experience.batch.turns()
    counts = on_device(turn_counts, experience.batch.device)
    lengths = on_device(turn_lengths, experience.batch.device)
    first = lengths.cumsum(0) - lengths
    advantages, returns = gae(
        torch.segment_reduce(rewards, "sum", lengths=lengths, unsafe=True),
        experience.old_values[first],
        cu_seqlens=torch.nn.functional.pad(counts.cumsum(0), (1, 0)),
        gamma=config.gamma,
        lam=lam,
        bootstrap=experience.bootstrap,
        backend=config.backend,
    )

    def by_token(turn_values: Tensor) -> Tensor:
        return turn_values.repeat_interleave(lengths, output_size=len(rewards))

    # fp64, because both sums start at the beginning of the batch.
    before = wide(rewards).cumsum(0) - wide(rewards)
    earlier_in_turn = before - by_token(before[first])
    return by_token(advantages), (wide(by_token(returns)) - earlier_in_turn).float()


def _estimator(config: PPOConfig) -> str:
    """Return the estimator of the sampled KL. The exact KL is among the token rewards already."""
    return "k1" if config.kl_estimator == "full" else config.kl_estimator
