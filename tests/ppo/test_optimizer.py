"""AdamW over policy and value function, its learning rate by the step's number, and clipping."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from processes import ROOT
from tiny import CONFIGS, model_of
from transformers import LlamaConfig

from fastppo.models.policy import ActorCritic
from fastppo.models.value import critic_of_policy
from fastppo.ppo.optimizer import make_optimizer
from fastppo.ppo.options.config import PPOConfig
from fastppo.run.optimizer import schedule
from runs import adamw, make_trainer


def _model(kind: str = "shared") -> ActorCritic:
    causal_lm = tiny.model()
    value_function = None
    if kind == "critic":
        value_function = critic_of_policy(causal_lm)
    return ActorCritic(causal_lm, None, value_function)


# --------------------------------------------------------------------------------------- the groups


@pytest.mark.parametrize("kind", ["shared", "critic"])
def test_every_weight_is_in_one_group_with_its_rate_and_decay(kind: str) -> None:
    model = _model(kind)
    rates = {"learning_rate": 1e-4, "value_learning_rate": 3e-3}
    more = {"optimizer_options": {"betas": [0.9, 0.8]}}
    config = PPOConfig(value_head="gradient", weight_decay=0.1, **more, **rates)
    groups = make_optimizer(model, config).param_groups
    group_of = {id(p): g for g in groups for p in g["params"]}
    assert (
        sum(len(group["params"]) for group in groups) == len(group_of) == len([*model.parameters()])
    )
    for name, parameter in model.named_parameters():
        of_values = name.startswith("value_function.")
        group = group_of[id(parameter)]
        assert group["lr"] == group["peak_lr"] == (3e-3 if of_values else 1e-4), name
        decays = parameter.dim() >= 2 and not name.startswith("value_function.head.")
        assert group["weight_decay"] == (0.1 if decays else 0.0), name
        assert (group["betas"], group["eps"]) == ((0.9, 0.8), 1e-8)


@pytest.mark.parametrize(
    ("options", "rate"),
    [
        ({"value_head": "gradient"}, 1e-4),
        ({"value_model": "critic"}, 1e-3),
        ({"value_model": "critic", "value_learning_rate": 3e-4}, 3e-4),
    ],
)
def test_a_critic_has_ten_times_the_learning_rate_by_default(
    options: dict[str, Any], rate: float
) -> None:
    config = PPOConfig(learning_rate=1e-4, **options)
    model = _model(config.value_model)
    groups = make_optimizer(model, config).param_groups
    of_values = {id(parameter) for parameter in model.value_function.parameters()}
    rates = {group["lr"] for group in groups for p in group["params"] if id(p) in of_values}
    assert [*rates] == [pytest.approx(rate)]
    assert groups[0]["lr"] == 1e-4


@pytest.mark.parametrize("kind", ["shared", "critic"])
@pytest.mark.parametrize(
    ("options", "count"),
    [({}, 1), ({"value_learning_rate": 3e-3}, 2), ({"weight_decay": 0.1}, None)],
)
def test_groups_with_equal_options_are_merged(kind: str, options: dict, count: int | None) -> None:
    """In one order whatever the options are: by it a checkpoint finds its weights' moments."""
    model = _model(kind)
    plain = make_optimizer(model, PPOConfig())
    optimizer = make_optimizer(model, PPOConfig(value_head="gradient", **options))
    steps = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    assert all(one != other for one, other in itertools.pairwise(steps))
    assert len(steps) == (count or (2 if kind == "shared" else 3))
    orders = [[id(weight) for weight in stepped.weights] for stepped in (plain, optimizer)]
    assert orders[0] == orders[1]


# ----------------------------------------------------------------------------------------- the rate


@pytest.mark.parametrize(
    ("name", "step", "expected"),
    [
        ("constant", 0, 0.1),
        ("constant", 9, 1.0),
        ("constant", 90, 1.0),
        ("linear", 55, 0.5),
        ("cosine", 55, 0.5),
        ("cosine", 100, 0.0),
    ],
)
def test_the_learning_rate_is_a_function_of_the_step(name, step, expected) -> None:
    assert schedule(name, step, warmup=10, total=100) == pytest.approx(expected)


# ------------------------------------------------------------------------------------- the clipping


@pytest.mark.parametrize("kind", ["shared", "critic"])
def test_a_critics_gradient_is_clipped_separately(kind: str) -> None:
    model, config = _model(kind), PPOConfig(value_model=kind, max_grad_norm=0.5)
    optimizer = make_optimizer(model, config)
    for name, parameter in model.named_parameters():
        parameter.grad = torch.full_like(parameter, 2.0 if name.startswith("value") else 1.0)
    both = [[p.grad for p in part.parameters()] for part in (model.causal_lm, model.value_function)]

    def norm(gradients: list[torch.Tensor]) -> float:
        return torch.stack([gradient.norm() for gradient in gradients]).norm().item()

    policy, value = map(norm, both)
    norms = {name: value.item() for name, value in optimizer.clip_gradients(0.5).items()}
    if kind == "critic":
        assert norms == pytest.approx({"grad_norm": policy, "value_grad_norm": value})
        assert [norm(part) for part in both] == pytest.approx([0.5, 0.5], rel=1e-4)
    else:
        assert norms == pytest.approx({"grad_norm": (policy**2 + value**2) ** 0.5})
        assert norm(both[0] + both[1]) == pytest.approx(0.5, rel=1e-4)


# ------------------------------------------------------------------------------- another optimizer


def test_a_custom_optimizer_gets_groups_and_options(tmp_path: Path) -> None:
    options = {"optimizer": "torch.optim:SGD", "optimizer_options": {"momentum": 0.9}}
    trainer = make_trainer(tmp_path, learning_rate=0.1, weight_decay=0.01, **options)
    assert type(trainer.optimizer.inner) is torch.optim.SGD
    assert {group["momentum"] for group in trainer.optimizer.param_groups} == {0.9}
    assert {group["weight_decay"] for group in trainer.optimizer.param_groups} == {0.0, 0.01}
    trainer.train()
    resumed = make_trainer(tmp_path, learning_rate=0.1, weight_decay=0.01, resume=True, **options)
    resumed.checkpoints.resume()
    for weight, buffer in trainer.optimizer.state.items():
        (other,) = (
            w for w in resumed.optimizer.state if w.shape == weight.shape and w.equal(weight)
        )
        assert torch.equal(
            resumed.optimizer.state[other]["momentum_buffer"], buffer["momentum_buffer"]
        )


def without_the_last(groups: list[dict[str, Any]], **options: Any) -> torch.optim.Optimizer:
    last = groups[-1]
    names = last["param_names"][:-1]
    shorter = {**last, "params": last["params"][:-1], "param_names": names}
    return torch.optim.SGD([*groups[:-1], shorter], **options)


def flat_list(groups: list[dict[str, Any]], **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for g in groups for p in g["params"]], **options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_example_steps_layers_by_muon_and_resumes(dtype: str, tmp_path: Path) -> None:
    """Its groups have another order than the trainer's, and so has its state."""
    options: dict[str, Any] = {
        "optimizer": f"{ROOT}/examples/optimizer.py:MuonAdamW",
        "checkpoint_interval": 1,
        "param_dtype": dtype,
        "weight_decay": 0.01,
    }
    whole = make_trainer(tmp_path / "whole", model_dtype=dtype, iterations=2, **options)
    names = {id(p): name for name, p in whole.model.named_parameters()}
    weights = dict(zip(whole.optimizer.masters, whole.optimizer.weights, strict=True))
    whole.train()
    for master, weight in weights.items():
        is_muon = "momentum_buffer" in whole.optimizer.state[master]
        assert is_muon == (weight.dim() == 2 and "layers." in names[id(weight)])
    for iterations in (1, 2):
        part = {"iterations": iterations, "resume": iterations == 2}
        cut = make_trainer(tmp_path / "cut", model_dtype=dtype, **part, **options)
        cut.train()
    for one, other in zip(whole.model.parameters(), cut.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_another_optimizer_cannot_resume_a_checkpoint(tmp_path: Path) -> None:
    make_trainer(tmp_path, optimizer="torch.optim:SGD", iterations=1).train()
    resumed = make_trainer(tmp_path, resume="force")
    with pytest.raises(ValueError, match=r"optimizer was torch.optim:SGD, got adamw"):
        resumed.train()


@pytest.mark.parametrize(
    ("optimizer", "options", "says"),
    [
        (f"{__file__}:without_the_last", {}, "must keep the parameters of its groups"),
        (f"{__file__}:flat_list", {}, "must keep the groups that it is given"),
        ("adamw", {"lr": 1}, "optimizer_options: lr is an option of its own, learning_rate"),
        ("adamw", {"bogus": 1}, "optimizer=adamw: .*unexpected keyword"),
        ("torch.optim:Nothing", {}, "no function 'Nothing' there"),
        ("torch.optim:SGD", {"momenta": 1}, "optimizer=torch.optim:SGD: .*unexpected keyword"),
        ("torch.optim:SGD", {"momentum": -1}, "optimizer=torch.optim:SGD: Invalid momentum"),
        ("builtins:list", {}, "must return a torch.optim.Optimizer, got list"),
    ],
)
def test_an_invalid_optimizer_is_refused(
    optimizer: str, options: dict[str, Any], says: str
) -> None:
    config = PPOConfig(optimizer=optimizer, optimizer_options=options)
    with pytest.raises(ValueError, match=says):
        make_optimizer(_model(), config)


def test_eight_bit_moments_survive_a_resume(tmp_path: Path) -> None:
    """torchao keeps them in tensors of a class of its own."""
    pytest.importorskip("torchao")
    options: dict[str, Any] = {"optimizer": "torchao.optim:AdamW8bit", "checkpoint_interval": 1}
    wide = model_of(LlamaConfig(**{**CONFIGS["llama"]().to_dict(), "hidden_size": 64}))
    whole = make_trainer(tmp_path / "whole", causal_lm=wide, iterations=2, **options)
    whole.train()
    for iterations in (1, 2):
        wide = model_of(LlamaConfig(**{**CONFIGS["llama"]().to_dict(), "hidden_size": 64}))
        cut = make_trainer(
            tmp_path / "cut",
            causal_lm=wide,
            iterations=iterations,
            resume=iterations == 2,
            **options,
        )
        cut.train()
    for one, other in zip(whole.model.parameters(), cut.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_norm_of_no_gradients_is_on_the_device_of_the_weights() -> None:
    """As while only the critic trains: numbers of two devices cannot be read in one transfer."""
    weight = torch.nn.Parameter(torch.zeros(2, 2, device="meta"))
    norms = adamw([{"params": [weight]}]).clip_gradients(1.0)
    assert norms["grad_norm"].device == weight.device
