"""The loss of a microbatch equals the definition, and with objective=penalty the paper."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import draws
import pytest
import tiny
import torch
from torch import Tensor

from fastppo.ppo.experience import Experience
from fastppo.ppo.trainer import PPOTrainer
from runs import first_experience, make_trainer

TEMPERATURE = 0.8

WEIGHTS = torch.linspace(0.2, 2.0, 9)
"""Importance weights of tokens from another distribution."""


class Loss:
    """A trainer's loss of nine tokens, and its inputs.

    The old logprobs are so close to the policy's that some ratios are clipped and some not.
    """

    def __init__(
        self, tmp_path: Path, importance_weights: Tensor | None = None, **options: Any
    ) -> None:
        options = {"temperature": TEMPERATURE, "vf_coef": 0.0, **options}
        self.trainer = make_trainer(tmp_path, reference=tiny.model(seed=1), **options)
        batch = tiny.random_batch((5, 3, 1))
        zeros = torch.zeros(9)
        self.logits = self.trainer.model.head.logits(self.trainer.model.hidden(batch.layout()))
        logprobs = draws.token_logprobs(
            self.logits.detach(), batch.response_tokens, temperature=TEMPERATURE
        )
        old_logprobs = (logprobs - torch.linspace(-0.6, 0.6, 9)).float()
        self.micro = Experience(
            batch,
            old_logprobs=old_logprobs,
            old_values=zeros,
            advantages=torch.tensor([1.0, -1, 0.5, -2, 0.3, 1, -1, 2, -0.5]),
            returns=zeros,
            monte_carlo_returns=zeros,
            ref_logprobs=old_logprobs + 0.1,
            importance_weights=importance_weights,
        ).weighted("token-mean")

    def exact(self, **keywords: Any) -> Tensor:
        """Return the definition's loss for keywords of `fastppo.ppo_loss`."""
        batch = self.micro.batch
        if keywords.get("kl_estimator") == "full":
            assert self.trainer.reference is not None
            with self.trainer.reference.loaded() as reference, torch.no_grad():
                ref_logits = reference.head.logits(reference.hidden(batch.layout()))
            keywords["ref_logits"] = ref_logits
        elif "kl_coef" in keywords:
            keywords["ref_logprobs"] = self.micro.ref_logprobs
        if keywords.get("objective") == "gspo":
            keywords["cu_seqlens"] = batch.cu_seqlens
        return draws.exact(
            self.logits,
            batch.response_tokens,
            self.micro.old_logprobs,
            self.micro.advantages,
            self.micro.token_weights,
            importance_weights=self.micro.importance_weights,
            temperature=TEMPERATURE,
            **keywords,
        ).loss

    def check(self, wanted: Tensor) -> None:
        """Compare loss and gradient."""
        loss, sums, _ = self.trainer.loss(self.micro, self.trainer.begin_iteration())
        torch.testing.assert_close(loss, wanted.float(), rtol=1e-5, atol=1e-6)
        assert sums.loss == loss
        weights = [*self.trainer.model.causal_lm.parameters()]
        gradients = zip(
            torch.autograd.grad(loss, weights), torch.autograd.grad(wanted, weights), strict=True
        )
        for gradient, of_formula in gradients:
            scale = of_formula.abs().max().item()
            assert scale > 1e-4
            torch.testing.assert_close(gradient, of_formula, rtol=1e-3, atol=1e-5 * scale)


RANGE = {"clip_ratio": 0.1, "clip_ratio_high": 0.3, "entropy_coef": 0.1}
OF_RANGE = {"clip_ratio": (0.1, 0.3), "entropy_coef": 0.1}


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["on-policy", "weighted"])
@pytest.mark.parametrize(
    ("options", "keywords"),
    [
        ({}, {}),
        (RANGE | {"dual_clip": 1.5}, OF_RANGE | {"dual_clip": 1.5}),
        ({"kl_loss_coef": 0.5}, {"kl_coef": 0.5}),
        *(
            (
                {"kl_loss_coef": 0.5, "kl_loss_estimator": estimator},
                {"kl_coef": 0.5, "kl_estimator": estimator},
            )
            for estimator in ("k1", "k2", "full")
        ),
        (
            {"kl_loss_coef": 0.5, "kl_loss_estimator": "k3_by_ratio"},
            {"kl_coef": 0.5, "kl_ratio_weighted": True},
        ),
        *(
            (RANGE | {"objective": name}, OF_RANGE | {"objective": name})
            for name in ("cispo", "gspo", "dis")
        ),
        *(
            (
                {"objective": name, "clip_ratio": 1e-4, "clip_ratio_high": 2e-4},
                {"objective": name, "clip_ratio": (1e-4, 2e-4)},
            )
            for name in ("dppo_tv", "dppo_kl")
        ),
        ({"objective": "sapo"}, {"objective": "sapo"}),
    ],
    ids=lambda options: "-".join(map(str, options.values())) or "defaults",
)
def test_the_loss_equals_the_definition(
    options: dict[str, Any], keywords: dict[str, Any], weights: Tensor | None, tmp_path: Path
) -> None:
    """For each objective of `fastppo.ppo_loss`, with the KL and the entropy of the options."""
    loss = Loss(tmp_path, weights, **options)
    wanted = loss.exact(**keywords)
    if keywords.get("objective") != "sapo":
        assert wanted != loss.exact(**keywords | {"clip_ratio": None}), "no ratio is clipped"
    loss.check(wanted)


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["on-policy", "weighted"])
def test_the_penalty_objective_follows_the_paper(weights: Tensor | None, tmp_path: Path) -> None:
    """Schulman et al. 2017, eq. 8: −r·A + β·KL(old, new), by its estimator r − 1 − log r."""
    loss = Loss(tmp_path, weights, objective="penalty", entropy_coef=0.1)
    loss.trainer.state.coefficient_control.controllers["policy_kl_coef"].coef = 0.7
    log_p = draws.log_softmax(loss.logits, temperature=TEMPERATURE)
    logprobs = log_p.gather(1, loss.micro.batch.response_tokens[:, None])[:, 0]
    ratio = (logprobs - loss.micro.old_logprobs).exp()
    assert (ratio - 1).abs().max() > 0.3, "the clip of the other objective would act"
    advantages = loss.micro.advantages * (1 if weights is None else weights)
    kl = ratio - 1 - ratio.log()
    per_token = -ratio * advantages + 0.7 * kl + 0.1 * (log_p.exp() * log_p).sum(1)
    loss.check((per_token * loss.micro.token_weights).sum())


# ----------------------------------------------------------------------------------- the value loss


def _value_loss(trainer: PPOTrainer, micro: Experience, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return (value loss, number of clipped tokens) for a value function that returns `values`."""
    trainer.model.value_function.read = lambda states: values
    sums = trainer.loss(micro, trainer.begin_iteration()).sums
    return sums.value_loss, sums.value_clipped


@pytest.mark.parametrize("clip", [None, 0.3])
def test_value_clip_clips_and_counts(clip: float | None, tmp_path: Path) -> None:
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


def test_small_value_changes_are_not_counted_as_clipped(tmp_path: Path) -> None:
    """V_old + (V − V_old) differs from V by rounding, and makes some errors larger."""
    trainer = make_trainer(tmp_path, value_head="gradient", value_clip=0.2)
    micro = first_experience(trainer).weighted("token-mean")
    old_values, values = 0.04 * torch.rand(2, len(micro.old_values)) - 0.02
    micro = replace(micro, old_values=old_values, returns=values + 1e-4)
    again = micro.old_values + (values - micro.old_values).clamp(-0.2, 0.2)
    assert ((again - micro.returns) ** 2 > (values - micro.returns) ** 2).any()
    assert _value_loss(trainer, micro, values)[1] == 0


# ------------------------------------------------------------------------------------- in a trainer


def test_the_logged_penalty_loss_follows_the_paper(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path,
        objective="penalty",
        vf_coef=0.0,
        learning_rate=1e-9,
        minibatches=1,
        whiten_advantages=False,
    )
    trainer.state.coefficient_control.controllers["policy_kl_coef"].coef = 50.0
    experience = first_experience(trainer)
    metrics = trainer.update(experience, trainer.begin_iteration())
    mean = -experience.advantages.mean().item()  # on-policy, so the ratio is 1 and the KL 0
    assert metrics["policy_loss"] == pytest.approx(mean, abs=1e-4)
    assert metrics["loss"] == pytest.approx(mean, abs=1e-3)
    assert "clip_fraction" not in metrics
