"""The training of the value function: by the optimizer, in closed form, or with extra epochs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from fastppo_kernels import definition
from torch import Tensor

from fastppo.ppo.trainer import PPOTrainer
from fastppo.ppo.value_head import (
    ClosedFormHead,
    ClosedFormWithLoss,
    ExtraCriticEpochs,
    GradientHead,
    ValueHead,
)
from runs import first_experience, make_trainer, weights_of


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, ClosedFormHead),
        ({"vf_coef": 0.5}, ClosedFormWithLoss),
        ({"schedules": ["vf_coef=linear:0.1"]}, ClosedFormWithLoss),
        ({"vf_coef": 0.5, "value_model": "detached"}, ClosedFormHead),
        ({"value_head": "gradient"}, GradientHead),
        ({"value_model": "critic"}, GradientHead),
        ({"value_model": "critic", "critic_options": {"epochs": 4}}, ExtraCriticEpochs),
        ({"value_model": "critic", "value_head": "closed_form"}, ClosedFormWithLoss),
        ({"advantage": "reinforce"}, ValueHead),
    ],
    ids=lambda options: "-".join(map(str, options.values())) if isinstance(options, dict) else "",
)
def test_the_options_choose_how_the_head_is_trained(
    options: dict[str, Any], kind: type, tmp_path: Path
) -> None:
    assert type(make_trainer(tmp_path, **options).value_head) is kind


@pytest.mark.parametrize(
    "value_function",
    [
        {"value_model": "shared"},
        {"value_model": "detached"},
        {"value_model": "critic"},
        {"value_model": "critic", "value_head": "closed_form"},
        {"value_model": "shared", "vf_coef": 0.5},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_warm_up_trains_only_the_value_function(
    value_function: dict[str, Any], tmp_path: Path
) -> None:
    options = value_function | {"value_warmup_iterations": 2, "weight_decay": 0.1}
    options |= {"rewards": [tiny.every_other]}
    trainer = make_trainer(tmp_path, iterations=2, **options)
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    trainer.train()
    changed = {n for n, p in trainer.model.named_parameters() if not torch.equal(p, before[n])}
    assert changed
    assert all(name.startswith("value_function.") for name in changed)
    longer = make_trainer(tmp_path, iterations=3, resume=True, **options)
    longer.train()
    after = {n for n, p in longer.model.named_parameters() if not torch.equal(p, before[n])}
    assert any(name.startswith("causal_lm.") for name in after)


def test_a_critic_can_start_from_an_earlier_one(tmp_path: Path) -> None:
    earlier = make_trainer(tmp_path, value_model="critic")
    assert earlier.train()["value_grad_norm"] > 0
    saved = str(tmp_path / "run" / "value_function.safetensors")
    options = {"value_model": "critic", "critic_model": saved}
    actual = make_trainer(tmp_path / "next", **options).model.value_function.state_dict()
    torch.testing.assert_close(actual, earlier.model.value_function.state_dict(), rtol=0, atol=0)
    make_trainer(tmp_path / "shared").train()
    options["critic_model"] = str(tmp_path / "shared" / "run" / "value_function.safetensors")
    with pytest.raises(ValueError, match="does not fit the policy"):
        make_trainer(tmp_path / "wrong", **options)


def test_a_head_in_closed_form_takes_over_the_values_of_an_earlier_critic(tmp_path: Path) -> None:
    """The optimizer's head has learned in units of the returns' deviation."""
    options: dict[str, Any] = {"value_model": "critic", "rewards": [tiny.every_other]}
    earlier = make_trainer(tmp_path, **options)
    earlier.train()
    saved = str(tmp_path / "run" / "value_function.safetensors")
    options |= {"critic_model": saved, "value_head": "closed_form"}
    value_function = make_trainer(tmp_path / "next", **options).model.value_function
    before = earlier.model.value_function
    assert before.scale != 1
    states = torch.randn(5, before.head.in_features)
    torch.testing.assert_close(value_function.read(states), before.read(states))
    torch.testing.assert_close(value_function.head(states)[:, 0], before.read(states))


@pytest.mark.parametrize("head", ["gradient", "closed_form"])
def test_a_device_without_fp64_has_the_moments_of_returns_in_fp32(
    head: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(definition, "WITHOUT_FP64", ("cpu",))
    trainer = make_trainer(tmp_path, value_model="critic", value_head=head)
    trainer.update(first_experience(trainer), trainer.begin_iteration())
    assert trainer.value_head.tensors()["return_moments"].dtype == torch.float32


def test_critic_frozen_freezes_attention(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, value_model="critic", critic_options={"frozen": "attention"})
    before = {n: p.clone() for n, p in trainer.model.value_function.trunk.named_parameters()}
    trainer.train()
    after = dict(trainer.model.value_function.trunk.named_parameters())
    moved = {name for name, value in before.items() if not torch.equal(after[name], value)}
    assert any(".mlp." in name for name in moved)
    assert not any(".self_attn." in name for name in moved)


def test_a_critic_with_a_head_in_closed_form_learns(tmp_path: Path) -> None:
    options = {"value_model": "critic", "value_head": "closed_form", "iterations": 2}
    trainer = make_trainer(tmp_path, **options)
    before = [p.detach().clone() for p in trainer.model.value_function.trunk.parameters()]
    trainer.train()
    after = trainer.model.value_function.trunk.parameters()
    assert not all(map(torch.equal, before, after))


def test_the_trunk_of_a_head_in_closed_form_learns_by_the_value_loss_on_request(
    tmp_path: Path,
) -> None:
    """Without advantages, nothing else moves it, once the first fit has given values."""
    moved = []
    for weight in (None, 0.5):
        trainer = make_trainer(tmp_path / str(weight), vf_coef=weight, rewards=[tiny.every_other])
        experience = first_experience(trainer)
        experience = replace(experience, advantages=torch.zeros_like(experience.advantages))
        before = [p.detach().clone() for p in trainer.model.causal_lm.parameters()]
        for _ in range(2):
            trainer.update(experience, trainer.begin_iteration())
        moved.append(not all(map(torch.equal, before, trainer.model.causal_lm.parameters())))
    assert moved == [False, True]


@pytest.mark.parametrize("weights", [(0.5, None), (None, 0.5)])
def test_the_value_loss_on_the_trunk_may_change_when_a_run_resumes(
    weights: tuple[float | None, float | None], tmp_path: Path
) -> None:
    before, after = weights
    make_trainer(tmp_path, iterations=2, vf_coef=before).train()
    resumed = make_trainer(tmp_path, iterations=3, vf_coef=after, resume=True)
    resumed.train()
    assert resumed.value_head.metrics["value_ridge"] > 0


def test_value_epochs_train_only_the_critic(tmp_path: Path) -> None:
    """They come before the epochs of the policy, so the value loss of those starts lower."""
    losses = []
    for epochs in (1, 5):
        options = {"ppo_epochs": 1, "minibatches": 1, "critic_options": {"epochs": epochs}}
        options |= {"value_model": "critic", "value_learning_rate": 1e-2}
        trainer = make_trainer(tmp_path, **options)
        experience = first_experience(trainer)
        metrics = trainer.update(experience, trainer.begin_iteration())
        losses.append(metrics["value_loss"])
    assert losses[1] < 0.9 * losses[0]
    before = [p.detach().clone() for p in trainer.model.causal_lm.parameters()]
    trainer.value_head.begin_update(experience, trainer.begin_iteration())
    torch.testing.assert_close(before, [*trainer.model.causal_lm.parameters()], rtol=0, atol=0)


# --------------------------------------------------------------- observations of the closed form


def _observed(trainer: PPOTrainer) -> Tensor:
    assert isinstance(trainer.value_head, ClosedFormHead)
    moments = trainer.value_head.regression.moments
    assert moments is not None
    return moments


def _fail_once(trainer: PPOTrainer, at: int) -> list[int]:
    """Let memory run out in pass `at` of the trunk, counted from 1; return the passes' sizes."""
    sizes: list[int] = []

    def limited(module: Any, args: Any, output: Any) -> None:
        sizes.append(len(args[0]))
        if len(sizes) == at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")

    trainer.model.causal_lm.get_input_embeddings().register_forward_hook(limited)
    return sizes


def _halve_after_first_step(trainer: PPOTrainer) -> None:
    """Halve the microbatches from the second step on, as after a retry, but without one."""
    step = trainer.step_control.step

    def halving(*args: Any) -> dict[str, float]:
        trainer.limits.halvings = 1
        return step(*args)

    trainer.step_control.step = halving  # type: ignore[method-assign]


@pytest.mark.parametrize("minibatch", [1, 2])
def test_a_retry_replaces_what_the_head_observed(minibatch: int, tmp_path: Path) -> None:
    """Memory runs out in the second microbatch of a minibatch: the fit and all weights have the
    bits of an update whose microbatches were small enough from that minibatch on."""
    trainers = []
    for retries in (True, False):
        size = 4 if retries or minibatch == 2 else 2
        trainer = make_trainer(
            tmp_path, ppo_epochs=1, minibatches=2, microbatch_size=size, vf_coef=0.7
        )
        torch.manual_seed(5)
        experience = first_experience(make_trainer(tmp_path / "other", microbatch_size=4))
        if retries:
            sizes = _fail_once(trainer, at=2 * minibatch)
        elif minibatch == 2:
            _halve_after_first_step(trainer)
        torch.manual_seed(6)
        trainer.update(experience, trainer.begin_iteration())
        trainers.append(trainer)
    assert sizes == [4, 4] * minibatch + [2] * 4 * (3 - minibatch)
    retried, direct = trainers
    assert _observed(retried)[-2, -2] == experience.batch.response_count
    assert torch.equal(_observed(retried), _observed(direct))
    assert all(map(torch.equal, weights_of(retried), weights_of(direct)))
