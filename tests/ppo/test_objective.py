"""The loss of a microbatch, in closed form: clipped, with a penalty, and the value's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor

from fastppo.ppo.experience import Experience
from fastppo.ppo.trainer import PPOTrainer
from runs import first_experience, make_trainer

TEMPERATURE = 0.8

WEIGHTS = torch.linspace(0.2, 2.0, 9)
"""Importance weights of tokens that another distribution drew."""


class Loss:
    """The trainer's loss of nine tokens, and what it is made of.

    Old logprobs are so near to the policy's that some ratios are clipped and some not.
    """

    def __init__(
        self, tmp_path: Path, importance_weights: Tensor | None = None, **options: Any
    ) -> None:
        options = {"temperature": TEMPERATURE, "vf_coef": 0.0, **options}
        self.trainer = make_trainer(tmp_path, reference=tiny.model(seed=1), **options)
        self.options = self.trainer.config
        batch = tiny.random_batch((5, 3, 1))
        zeros = torch.zeros(9)
        with torch.no_grad():
            old_logprobs = self._logprobs(batch) - torch.linspace(-0.6, 0.6, 9)
        self.micro = Experience(
            batch,
            old_logprobs=old_logprobs,
            old_values=zeros,
            advantages=torch.tensor([1.0, -1, 0.5, -2, 0.3, 1, -1, 2, -0.5]),
            returns=zeros,
            complete_returns=zeros,
            ref_logprobs=old_logprobs + 0.1,
            importance_weights=importance_weights,
        ).weighted("token-mean")
        self.log_softmax = self._log_softmax(batch)
        self.logprobs = self._logprobs(batch)

    def _log_softmax(self, batch: Any) -> Tensor:
        hidden = self.trainer.model.hidden(batch.layout())
        return (self.trainer.model.head.logits(hidden) / TEMPERATURE).log_softmax(1)

    def _logprobs(self, batch: Any) -> Tensor:
        return self._log_softmax(batch).gather(1, batch.response_tokens[:, None])[:, 0]

    @property
    def ratio(self) -> Tensor:
        return (self.logprobs - self.micro.old_logprobs).exp()

    @property
    def negative_entropy(self) -> Tensor:
        return (self.log_softmax.exp() * self.log_softmax).sum(1)

    def kl(self) -> Tensor:
        """To the reference, by the estimator of the options."""
        if self.options.kl_loss_estimator == "full":
            assert self.trainer.reference is not None
            with self.trainer.reference.loaded() as reference, torch.no_grad():
                hidden = reference.hidden(self.micro.batch.layout())
                q = (reference.head.logits(hidden) / TEMPERATURE).log_softmax(1)
            return (self.log_softmax.exp() * (self.log_softmax - q)).sum(1)
        d = self.logprobs - self.micro.ref_logprobs
        kls = {"k1": d, "k2": d.square() / 2, "k3": (-d).exp() - 1 + d}
        return kls[self.options.kl_loss_estimator[:2]]

    def check(self, per_token: Tensor) -> None:
        """Compares loss and gradient with those of a formula's token losses."""
        assert self.micro.token_weights is not None
        wanted = (per_token * self.micro.token_weights).sum()
        loss, sums, _ = self.trainer.loss(self.micro, self.options)
        torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-6)
        assert sums.loss == loss
        weights = [*self.trainer.model.causal_lm.parameters()]
        gradients = zip(
            torch.autograd.grad(loss, weights), torch.autograd.grad(wanted, weights), strict=True
        )
        for gradient, of_formula in gradients:
            scale = of_formula.abs().max().item()
            assert scale > 1e-4
            torch.testing.assert_close(gradient, of_formula, rtol=1e-3, atol=1e-5 * scale)


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["on-policy", "weighted"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clip_ratio": 0.1, "clip_ratio_high": 0.3, "dual_clip": 1.5, "entropy_coef": 0.3},
        {"kl_loss_coef": 0.5, "kl_loss_estimator": "k1"},
        {"kl_loss_coef": 0.5, "kl_loss_estimator": "k2"},
        {"kl_loss_coef": 0.5},
        {"kl_loss_coef": 0.5, "kl_loss_estimator": "full"},
        {"kl_loss_coef": 0.5, "kl_loss_estimator": "k3_by_ratio"},
    ],
    ids=lambda options: "-".join(map(str, options.values())) or "defaults",
)
def test_the_clipped_objective_is_the_papers(
    options: dict[str, Any], weights: Tensor | None, tmp_path: Path
) -> None:
    """Schulman et al. 2017, eq. 7, with the KL and the entropy that the options weigh."""
    loss = Loss(tmp_path, weights, **options)
    advantages = loss.micro.advantages
    low, high = loss.options.clip_range
    surrogate = loss.ratio * advantages
    clipped = torch.minimum(surrogate, loss.ratio.clamp(1 - low, 1 + high) * advantages)
    if loss.options.dual_clip is not None:
        bounded = torch.maximum(clipped, loss.options.dual_clip * advantages)
        clipped = torch.where(advantages < 0, bounded, clipped)
    assert (clipped != surrogate).any()
    per_token = -clipped * (1 if weights is None else weights)
    per_token = per_token + loss.options.entropy_coef * loss.negative_entropy
    kl = loss.kl()
    if loss.options.kl_loss_estimator == "k3_by_ratio":
        kl = loss.ratio * kl
    loss.check(per_token + loss.options.kl_loss_coef * kl)


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["on-policy", "weighted"])
def test_the_penalty_objective_is_the_papers(weights: Tensor | None, tmp_path: Path) -> None:
    """Schulman et al. 2017, eq. 8: −r·A + β·KL(old, new), by its estimator r − 1 − log r."""
    loss = Loss(tmp_path, weights, objective="penalty", entropy_coef=0.1)
    loss.trainer.state.policy_kl_control.coef = 0.7
    assert (loss.ratio - 1).abs().max() > 0.3, "the clip of the other objective would act"
    kl = loss.ratio - 1 - loss.ratio.log()
    advantages = loss.micro.advantages * (1 if weights is None else weights)
    loss.check(-loss.ratio * advantages + 0.7 * kl + 0.1 * loss.negative_entropy)


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["on-policy", "weighted"])
@pytest.mark.parametrize("objective", ["cispo", "sapo", "gspo", "dis"])
def test_other_objectives_are_their_papers(
    objective: str, weights: Tensor | None, tmp_path: Path
) -> None:
    """With a range for those that have one, the paper's τ for the other, and the entropy."""
    options: dict[str, Any] = {"clip_ratio": 0.1, "clip_ratio_high": 0.3}
    if objective == "sapo":
        options = {}
    loss = Loss(tmp_path, weights, objective=objective, entropy_coef=0.1, **options)
    a = loss.micro.advantages
    ratio = loss.ratio
    if objective == "sapo":
        tau = torch.where(a > 0, 1.0, 1.05)
        surrogate = 4 / tau * torch.sigmoid(tau * (ratio - 1)) * a
    elif objective == "gspo":
        by_response = (loss.logprobs - loss.micro.old_logprobs).detach().split((5, 3, 1))
        means = torch.cat([part.mean().expand(len(part)) for part in by_response])
        ratio = (means + loss.logprobs - loss.logprobs.detach()).exp()
        surrogate = torch.minimum(ratio * a, ratio.clamp(0.9, 1.3) * a)
    else:
        inside = ratio.clamp(0.9, 1.3)
        coefficient = inside if objective == "cispo" else ratio * (inside == ratio)
        assert ((inside != ratio) & (a > 0)).any()
        assert ((inside != ratio) & (a < 0)).any()
        surrogate = coefficient.detach() * a * loss.logprobs
    per_token = -surrogate * (1 if weights is None else weights)
    loss.check(per_token + 0.1 * loss.negative_entropy)


# ----------------------------------------------------------------------------------- the value loss


def _value_loss(trainer: PPOTrainer, micro: Experience, values: Tensor) -> tuple[Tensor, Tensor]:
    """(The value loss, how many tokens were clipped), where the value function gives `values`."""
    trainer.model.value_function.read = lambda states: values
    sums = trainer.loss(micro, trainer.config).sums
    return sums.value_loss, sums.value_clipped


@pytest.mark.parametrize("clip", [None, 0.3])
def test_the_value_term_is_clipped_as_the_option_says_and_counts_it(
    clip: float | None, tmp_path: Path
) -> None:
    trainer = make_trainer(tmp_path, value_head="gradient", value_clip=clip)
    micro = first_experience(trainer).weighted("token-mean")
    micro = replace(micro, returns=micro.old_values + 2)
    values = micro.old_values + torch.linspace(-1, 1, len(micro.old_values))
    error = (values - micro.returns) ** 2
    clipped = 0
    if clip is not None:
        near = micro.old_values + (values - micro.old_values).clamp(-clip, clip)
        error = torch.maximum(error, (near - micro.returns) ** 2)
        # Returns are above: clipped, a value that went up is the farther one from them.
        clipped = (values > micro.old_values + clip).sum().item()
        assert 0 < clipped < len(values) / 2
    loss, count = _value_loss(trainer, micro, values)
    assert loss.item() == pytest.approx(error.mean().item() / 2, rel=1e-6)
    assert count == clipped


def test_a_value_that_has_not_moved_far_is_never_counted_as_clipped(tmp_path: Path) -> None:
    """V_old + (V − V_old) is V but for a rounding, which makes some errors larger."""
    trainer = make_trainer(tmp_path, value_head="gradient", value_clip=0.2)
    micro = first_experience(trainer).weighted("token-mean")
    old_values, values = 0.04 * torch.rand(2, len(micro.old_values)) - 0.02
    micro = replace(micro, old_values=old_values, returns=values + 1e-4)
    again = micro.old_values + (values - micro.old_values).clamp(-0.2, 0.2)
    assert ((again - micro.returns) ** 2 > (values - micro.returns) ** 2).any()
    assert _value_loss(trainer, micro, values)[1] == 0


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
    trainer.state.policy_kl_control.coef = 50.0
    experience = first_experience(trainer)
    metrics = trainer.update(experience, trainer.config)
    mean = -experience.advantages.mean().item()  # on-policy, so the ratio is 1 and the KL 0
    assert metrics["policy_loss"] == pytest.approx(mean, abs=1e-4)
    assert metrics["loss"] == pytest.approx(mean, abs=1e-3)
    assert "clip_fraction" not in metrics
