"""The policy's objective on a microbatch, in closed form: clipped, and with a penalty."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from fastppo.models.head import Head, RefStates
from fastppo.ppo.config import PPOConfig
from fastppo.ppo.experience import Experience
from fastppo.ppo.objective import clipped_loss, penalty_loss, value_term
from runs import first_experience, make_trainer

BATCH = tiny.random_batch((5, 3, 1))


def _states(seed: int) -> torch.Tensor:
    return torch.randn(9, 32, generator=torch.Generator().manual_seed(seed))


HEAD = Head.of(tiny.model().requires_grad_(False))
REF = RefStates(_states(1), Head.of(tiny.model(seed=1).requires_grad_(False)))
TEMPERATURE = 0.8


def _log_softmax(head: Head, hidden: torch.Tensor) -> torch.Tensor:
    return (head.logits(hidden) / TEMPERATURE).log_softmax(1)


def _experience() -> Experience:
    """Old logprobs so near to those of the states that some ratios are clipped and some not."""
    p = _log_softmax(HEAD, _states(0))
    logprobs = p.gather(1, BATCH.response_tokens[:, None])[:, 0]
    old = logprobs - torch.linspace(-0.6, 0.6, 9)
    advantages = torch.tensor([1.0, -1, 0.5, -2, 0.3, 1, -1, 2, -0.5])
    zeros = torch.zeros(9)
    return Experience(BATCH, old, zeros, advantages, zeros, old + 0.1).weighted("token-mean")


def _gradient(loss: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(loss, hidden)[0]


def _kl(estimator: str, logprobs: torch.Tensor, ref: torch.Tensor) -> torch.Tensor:
    d = logprobs - ref
    return {"k1": d, "k2": d.square() / 2, "k3": (-d).exp() - 1 + d}[estimator]


WEIGHTS = torch.linspace(0.2, 2.0, 9)
"""Importance weights of tokens that another distribution drew."""


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["on-policy", "weighted"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clip_ratio": 0.1, "clip_ratio_high": 0.3},
        {"dual_clip": 1.5},
        {"entropy_coef": 0.3},
        {"kl_loss_coef": 0.5, "kl_loss_estimator": "k1"},
        {"kl_loss_coef": 0.5, "kl_loss_estimator": "k2"},
        {"kl_loss_coef": 0.5},
        {"kl_loss_coef": 0.5, "kl_loss_estimator": "full"},
        {"kl_loss_coef": 0.5, "kl_loss_ratio_weighted": True},
    ],
    ids=lambda options: "-".join(map(str, options.values())) or "defaults",
)
def test_the_clipped_objective_is_the_papers(
    options: dict[str, Any], weights: torch.Tensor | None
) -> None:
    """Schulman et al. 2017, eq. 7, with the KL and the entropy that the options weigh."""
    config = PPOConfig(temperature=TEMPERATURE, **options)
    micro, hidden = _experience(), _states(0).requires_grad_()
    micro = replace(micro, importance_weights=weights)
    ref = REF if config.kl_loss_estimator == "full" else None
    found = clipped_loss(HEAD, hidden, micro, ref, config).loss

    p = _log_softmax(HEAD, hidden)
    logprobs = p.gather(1, BATCH.response_tokens[:, None])[:, 0]
    ratio, a = (logprobs - micro.old_logprobs).exp(), micro.advantages
    low, high = config.clip_range
    clipped = torch.minimum(ratio * a, ratio.clamp(1 - low, 1 + high) * a)
    if config.dual_clip is not None:
        clipped = torch.where(a < 0, torch.maximum(clipped, config.dual_clip * a), clipped)
    assert (clipped != ratio * a).any()
    per_token = -clipped * (1 if weights is None else weights) + config.entropy_coef * (
        p.exp() * p
    ).sum(1)
    if ref is None:
        kl = _kl(config.kl_loss_estimator, logprobs, micro.ref_logprobs)
    else:
        kl = (p.exp() * (p - _log_softmax(ref.head, ref.hidden))).sum(1)
    kl = ratio * kl if config.kl_loss_ratio_weighted else kl
    per_token = per_token + config.kl_loss_coef * kl
    written = (per_token * micro.token_weights).sum()
    torch.testing.assert_close(found, written, rtol=1e-5, atol=1e-6)
    wanted = _gradient(written, hidden)
    assert wanted.abs().max() > 1e-3
    torch.testing.assert_close(_gradient(found, hidden), wanted, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["on-policy", "weighted"])
def test_the_penalty_objective_is_the_papers(weights: torch.Tensor | None) -> None:
    """Schulman et al. 2017, eq. 8: −r·A + β·KL(old, new), by its estimator r − 1 − log r."""
    config = PPOConfig(objective="penalty", temperature=TEMPERATURE, entropy_coef=0.1)
    micro, hidden, beta = _experience(), _states(0).requires_grad_(), 0.7
    micro = replace(micro, importance_weights=weights)
    out = penalty_loss(HEAD, hidden, micro, beta, config)

    p = _log_softmax(HEAD, hidden)
    log_ratio = p.gather(1, BATCH.response_tokens[:, None])[:, 0] - micro.old_logprobs
    ratio = log_ratio.exp()
    assert (ratio - 1).abs().max() > 0.3, "the clip of the other objective would act"
    kl = ratio - 1 - log_ratio
    advantages = micro.advantages * (1 if weights is None else weights)
    per_token = -ratio * advantages + beta * kl + 0.1 * (p.exp() * p).sum(1)
    written = (per_token * micro.token_weights).sum()
    torch.testing.assert_close(out.loss, written, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        _gradient(out.loss, hidden), _gradient(written, hidden), rtol=1e-3, atol=1e-6
    )


def test_weights_of_the_tokens_decide_the_loss() -> None:
    config, hidden = PPOConfig(temperature=TEMPERATURE), _states(0)
    once = _experience()
    twice = replace(once, token_weights=2 * once.token_weights)
    for objective in (
        lambda micro: clipped_loss(HEAD, hidden, micro, None, config),
        lambda micro: penalty_loss(HEAD, hidden, micro, 0.7, config),
    ):
        torch.testing.assert_close(objective(twice).loss, 2 * objective(once).loss)


# ------------------------------------------------------------------------------------- in a trainer


def test_the_penaltys_logged_losses_are_the_papers(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path,
        objective="penalty",
        vf_coef=0.0,
        learning_rate=1e-9,
        minibatches=1,
        whiten_advantages="none",
    )
    experience = first_experience(trainer)
    metrics = trainer.update(experience, trainer.config)
    mean = -experience.advantages.mean().item()  # on-policy, so the ratio is 1 and the KL 0
    assert metrics["policy_loss"] == pytest.approx(mean, abs=1e-4)
    assert metrics["loss"] == pytest.approx(mean, abs=1e-3)
    assert "clip_fraction" not in metrics


def test_a_kl_in_reward_and_loss_at_once(tmp_path: Path) -> None:
    metrics = make_trainer(tmp_path, kl_coef=0.1, kl_loss_coef=0.1).train()
    assert {"kl", "kl_coef", "kl_loss"} <= metrics.keys()


def test_the_exact_kl_in_the_loss_pulls_towards_the_reference(tmp_path: Path) -> None:
    """With advantages of 0 the KL falls."""
    trainer = make_trainer(
        tmp_path,
        kl_loss_coef=1.0,
        kl_loss_estimator="full",
        reference=tiny.model(seed=1),
        ppo_epochs=8,
    )
    torch.manual_seed(5)
    experience = first_experience(trainer)
    experience.advantages.zero_()
    torch.manual_seed(6)
    one_epoch = replace(trainer.config, ppo_epochs=1)
    first = trainer.update(experience, one_epoch)["kl_loss"]
    trainer.update(experience, trainer.config)
    last = trainer.update(experience, one_epoch)["kl_loss"]
    assert last < 0.8 * first


@pytest.mark.parametrize("clip", [None, 0.3])
def test_the_value_term_is_clipped_as_the_option_says_and_counts_it(
    clip: float | None, tmp_path: Path
) -> None:
    trainer = make_trainer(tmp_path, value_clip=clip)
    micro = first_experience(trainer).weighted("token-mean")
    micro = replace(micro, returns=micro.old_values + 2)
    values = micro.old_values + torch.linspace(-1, 1, len(micro.old_values))
    error, wanted = (values - micro.returns) ** 2, 0
    if clip is not None:
        near = micro.old_values + (values - micro.old_values).clamp(-clip, clip)
        error = torch.maximum(error, (near - micro.returns) ** 2)
        # Returns are above: clipped, a value that went up is the farther one from them.
        wanted = (values > micro.old_values + clip).sum().item()
        assert 0 < wanted < len(values) / 2
    loss, count = value_term(values, micro, trainer.config)
    assert loss.item() == pytest.approx(error.mean().item() / 2, rel=1e-6)
    assert count == wanted


def test_a_value_that_has_not_moved_far_is_never_counted_as_clipped(tmp_path: Path) -> None:
    """V_old + (V − V_old) is V but for a rounding, which makes some errors larger."""
    trainer = make_trainer(tmp_path, value_clip=0.2)
    micro = first_experience(trainer).weighted("token-mean")
    old_values, values = 0.04 * torch.rand(2, len(micro.old_values)) - 0.02
    micro = replace(micro, old_values=old_values, returns=values + 1e-4)
    again = micro.old_values + (values - micro.old_values).clamp(-0.2, 0.2)
    assert ((again - micro.returns) ** 2 > (values - micro.returns) ** 2).any()
    _, count = value_term(values, micro, trainer.config)
    assert count == 0


@pytest.mark.parametrize("clip", [None, 1e-9])
def test_the_trainers_update_clips_values_by_the_option(clip: float | None, tmp_path: Path) -> None:
    """Within so narrow a range every value that has moved away from its return is clipped."""
    metrics = make_trainer(
        tmp_path, value_clip=clip, iterations=1, value_learning_rate=1e-3
    ).train()
    if clip is None:
        assert "value_clip_fraction" not in metrics
    else:
        assert metrics["value_clip_fraction"] > 0.1
