"""The value head in closed form solves a ridge regression, from a few tokens or many."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import environments
import pytest
import torch
from torch import Tensor, nn

from fastppo.data.world import World
from fastppo.ppo.metrics import to_floats
from fastppo.ppo.trainer import PPOTrainer
from fastppo.ppo.value_head import ClosedFormHead
from fastppo.ppo.value_regression import (
    DECAY,
    FIRST_RIDGE,
    RIDGES,
    ValueRegression,
    ridge_head,
)
from runs import ONE_STEP, first_experience, first_prompts, make_trainer


def ridge_regression(x: Tensor, y: Tensor, weights: Tensor, ridge: float) -> Tensor:
    """Return (w, bias) of min Σ weightᵢ (xᵢᵀw + bias − yᵢ)² + λ·scale·|w|², by a QR of all rows.

    The scale is the mean of Σ weightᵢ (x − x̄)² over the entries of x."""
    mean = (weights[:, None] * x).sum(0) / weights.sum()
    scale = (weights[:, None] * (x - mean) ** 2).sum(0).mean()
    rows = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], dim=1) * weights.sqrt()[:, None]
    width = x.shape[1]
    shrinking = torch.eye(width, width + 1, dtype=x.dtype) * (ridge * scale).sqrt()
    target = torch.cat([y * weights.sqrt(), torch.zeros(width, dtype=x.dtype)])
    return torch.linalg.lstsq(torch.cat([rows, shrinking]), target[:, None]).solution[:, 0]


def fit(regression: ValueRegression, head: nn.Linear) -> None:
    """Fit a head to the tokens added so far."""
    regression.end_fit(head, to_floats(regression.begin_fit(World())))


def fitted(x: Tensor, y: Tensor, *, times: int = 1) -> tuple[nn.Linear, ValueRegression]:
    """Return the head and the regression after `times` updates on the same tokens."""
    head = nn.Linear(x.shape[1], 1)
    head.requires_grad_(False)
    regression = ValueRegression()
    for _ in range(times):
        regression.begin_batch()
        regression.add(x, y, torch.ones(len(y)).bool())
        fit(regression, head)
    return head, regression


def fitted_by(trainer: PPOTrainer) -> ValueRegression:
    """Return the regression of a trainer with a value head in closed form."""
    assert isinstance(trainer.value_head, ClosedFormHead)
    return trainer.value_head.regression


def random_states(count: int = 40, width: int = 6) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(0))


# --------------------------------------------------------------------------------- what it solves


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"packing": "on", "microbatch_tokens": 40},
        {"lora_rank": 4, "lora_alpha": 8.0},
        {"precision": "bf16"},
        {"value_model": "detached"},
        {"value_model": "critic", "value_head": "closed_form"},
        {"gamma": 0.9, "truncated": "bootstrap"},
        {
            **environments.OPTIONS,
            "environment": environments.Exact,
            "prompts": environments.PROMPTS,
        },
    ],
    ids=["padded", "packed", "lora", "bf16", "detached", "critic", "bootstrap", "turns"],
)
def test_the_head_is_ridge_regression_over_all_batches(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """It regresses Monte Carlo returns on the states of the loss. An older batch has ρ times the
    weight. With a single epoch, the states are those of the weights before the update."""
    trainer = make_trainer(tmp_path, **ONE_STEP, **options)
    model = trainer.model
    states = []
    returns = []
    for _ in range(2):
        batch = first_experience(trainer)
        layout = model.layout(batch.batch)
        with torch.no_grad(), model.autocast():
            states.append(model(layout).value_states.double())
        returns.append(batch.monte_carlo_returns.double())
        trainer.update(batch, trainer.begin_iteration())
    counts = [torch.full_like(y, DECAY**age) for y, age in zip(returns, (1, 0), strict=True)]
    regression = fitted_by(trainer)
    wanted = ridge_regression(
        torch.cat(states), torch.cat(returns), torch.cat(counts), RIDGES[regression.best]
    )
    assert torch.cat(returns).unique().numel() > 2
    head = model.value_function.head
    actual = torch.cat([head.weight[0], head.bias]).double()
    # The states of another split differ by the rounding of their products.
    rounding = 2**-8 if "precision" in options else 1e-5
    torch.testing.assert_close(actual, wanted, rtol=rounding, atol=rounding * wanted.abs().max())


def test_complete_returns_are_rewards_to_go(tmp_path: Path) -> None:
    """They are the KL of each token and the score of the last one, and no values enter them."""
    trainer = make_trainer(tmp_path, kl_coef=0.1, lam=0.9, gamma=0.8)
    nn.init.normal_(trainer.model.value_function.head.weight)
    nn.init.normal_(trainer.model.causal_lm.lm_head.weight)  # away from the reference
    coefficients = trainer.begin_iteration()
    prompts = first_prompts(trainer, 4)
    rollout = trainer.engine.generate(prompts.token_ids, trainer.parts.sampling)
    scores = trainer.score(prompts, rollout, coefficients)
    actual, _ = trainer.make_experience(prompts.token_ids, rollout, scores, coefficients)
    kl = (actual.old_logprobs - actual.ref_logprobs).split(rollout.lengths)
    wanted = []
    for token_kl, score in zip(kl, scores.total.tolist(), strict=True):
        to_go = []
        value = 0.0
        rewards = (-0.1 * token_kl).tolist()
        rewards[-1] += score
        for reward in reversed(rewards):
            value = reward + 0.8 * value
            to_go.insert(0, value)
        wanted += to_go
    torch.testing.assert_close(
        actual.monte_carlo_returns, torch.tensor(wanted), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("stop", [{}, {"early_stop_kl": 1e-4, "learning_rate": 3e-2}])
def test_only_the_last_epoch_counts(stop: dict[str, Any], tmp_path: Path) -> None:
    """That is also so if an early stop decides which is the last."""
    trainer = make_trainer(tmp_path, ppo_epochs=3, minibatches=2, microbatch_size=3, **stop)
    batch = first_experience(trainer)
    metrics = trainer.update(batch, trainer.begin_iteration())
    assert metrics.get("early_stopped", 0.0) == bool(stop)
    moments = fitted_by(trainer).moments
    assert moments[-2, -2] == batch.batch.response_count
    assert moments[-1, -2].item() == pytest.approx(batch.monte_carlo_returns.sum().item())


def test_the_ridge_is_chosen_by_prediction() -> None:
    """It is large if the states do not predict the returns, and small if they do."""
    states = random_states(80, 60)
    noise = torch.randn(2, 80, generator=torch.Generator().manual_seed(1))
    chosen = {}
    for name, targets in {"noise": noise, "exact": (states @ torch.ones(60)).expand(2, -1)}.items():
        regression = ValueRegression()
        for x, y in zip((states, states.flip(0)), targets, strict=True):
            regression.begin_batch()
            returns = y if name == "noise" else x @ torch.ones(60)
            regression.add(x, returns, torch.ones(80).bool())
            fit(regression, nn.Linear(60, 1).requires_grad_(False))
        chosen[name] = RIDGES[regression.best]
    assert chosen == {"noise": RIDGES[-1], "exact": RIDGES[0]}


def test_a_small_first_batch_predicts_no_worse_than_the_mean() -> None:
    """The returns are noise. With enough tokens, the first fit has a smaller ridge."""
    states = random_states(120, 60)
    returns = torch.randn(120, generator=torch.Generator().manual_seed(1))
    head, regression = fitted(states[:60], returns[:60])
    assert RIDGES[regression.best] == RIDGES[-1]
    variance = (returns[60:] - returns[:60].mean()).square().mean()
    assert (head(states[60:]).squeeze(1) - returns[60:]).square().mean() < 1.05 * variance
    moments = regression.moments
    weight = ridge_head(moments, RIDGES[FIRST_RIDGE])[:-1].float()
    foreseen = states[60:] @ weight[:-1] + weight[-1]
    assert (foreseen - returns[60:]).square().mean() > 1.5 * variance
    _, regression = fitted(random_states(240, 60), torch.randn(240))
    assert regression.best == FIRST_RIDGE


# ------------------------------------------------------------------------- where little is known


def test_an_offset_of_the_returns_only_changes_the_bias() -> None:
    states = random_states()
    returns = states @ torch.ones(6)
    head, _ = fitted(states, returns)
    shifted, _ = fitted(states, returns + 1000)
    torch.testing.assert_close(shifted.weight, head.weight, rtol=1e-4, atol=1e-4)
    assert shifted.bias.item() == pytest.approx(head.bias.item() + 1000, rel=1e-6)


@pytest.mark.parametrize(
    ("states", "returns"),
    [
        (random_states(), torch.full((40,), 0.3)),
        (torch.zeros(40, 6), torch.arange(40.0)),
        (torch.full((40, 6), 7.3), torch.arange(40.0)),
        (random_states(1), torch.tensor([2.0])),
        (random_states(3, 50), torch.full((3,), -1.0)),
    ],
    ids=["equal rewards", "states of zeros", "equal states", "one token", "fewer than widths"],
)
def test_with_equal_states_the_value_is_the_mean(states: Tensor, returns: Tensor) -> None:
    for times in (1, 50):
        head, _ = fitted(states, returns, times=times)
        values = head(states).squeeze(1)
        torch.testing.assert_close(values, returns.mean().expand_as(values), rtol=1e-5, atol=1e-5)


def test_fewer_tokens_than_dimensions_do_not_blow_up() -> None:
    """The head is that of the definition, although the covariance is singular."""
    states = random_states(5, 64)
    returns = torch.tensor([1.0, -1.0, 2.0, 0.0, 3.0])
    head, regression = fitted(states, returns)
    wanted = ridge_regression(
        states.double(), returns.double(), torch.ones(5).double(), RIDGES[regression.best]
    )
    torch.testing.assert_close(head.weight[0].double(), wanted[:-1], rtol=1e-5, atol=1e-6)


def test_an_indefinite_covariance_gets_a_larger_ridge() -> None:
    """It grows from 1e-4 to 1e-2, which outweighs the variance of -5e-3."""
    covariance = torch.tensor([[2.005, 0.0], [0.0, -0.005]], dtype=torch.float64)
    products = torch.tensor([3.0, 0.1], dtype=torch.float64)
    moments = torch.zeros(4, 4, dtype=torch.float64)
    moments[:2, :2] = covariance
    moments[:2, 3] = products
    moments[3, :2] = products
    moments[2, 2] = 10.0  # tokens, whose states and returns have the mean 0
    wanted = torch.linalg.solve(covariance + 1e-2 * torch.eye(2, dtype=torch.float64), products)
    torch.testing.assert_close(ridge_head(moments, 1e-4)[:2], wanted)
    # A fit notices it after the host has read all its numbers.
    regression = ValueRegression()
    regression.batch = moments.clone()
    fit(regression, nn.Linear(2, 1).requires_grad_(False))
    assert regression.heads is not None
    for head, ridge in zip(regression.heads, RIDGES, strict=True):
        torch.testing.assert_close(head, ridge_head(moments, ridge), rtol=0, atol=0)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_nonfinite_batch_is_ignored(bad: float) -> None:
    states = random_states()
    head, regression = fitted(states, states.sum(1))
    before = head.weight.clone(), regression.tensors()["moments"].clone()
    regression.begin_batch()
    regression.add(states * bad, states.sum(1), torch.ones(40).bool())
    fit(regression, head)
    assert torch.equal(head.weight, before[0])
    assert torch.equal(regression.tensors()["moments"], before[1])


# --------------------------------------------------------------------------------- in the trainer


def test_step_fits_the_head_to_given_scores(tmp_path: Path) -> None:
    """It uses the tokens of the policy. Given values do not change the returns."""
    trainer = make_trainer(tmp_path, prompts=None, rewards=[], kl_coef=0.0)
    trainer.step(
        [[4, 5], [6]],
        [[7, 8, 20, 1], [9, 1]],
        [1.0, -0.5],
        masks=[[True, True, False, True], [True, True]],
        values=[[9.0] * 4, [9.0] * 2],
    )
    moments = fitted_by(trainer).moments
    assert moments[-2, -2] == 5
    assert moments[-1, -2].item() == pytest.approx(3 * 1.0 - 2 * 0.5)
    assert moments[-1, -1].item() == pytest.approx(3 * 1.0 + 2 * 0.25)
    assert trainer.model.value_function.head.weight.abs().max() > 0
