"""The numbers of an iteration: means over tokens, and what is written down of the responses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch

from fastppo.data.batch import Batch
from fastppo.data.prompts import Prompts
from fastppo.data.world import World
from fastppo.functional.losses import ppo_loss
from fastppo.ppo import metrics as metrics_module
from fastppo.ppo.experience import Experience
from fastppo.ppo.metrics import (
    Clock,
    Meter,
    Microbatch,
    experience_metrics,
    explained_variance,
    response_metrics,
    sample_records,
    status,
    to_floats,
)
from fastppo.rewards.reward import Scored
from fastppo.rewards.scorer import Scores
from fastppo.rollout import Rollout
from runs import experience_of, first_experience, make_trainer

BATCH = Batch.of([[4], [5, 6]], [[7, 8, 1], [9]])
EXPERIENCE = Experience(
    BATCH,
    old_logprobs=torch.tensor([-1.0, -2.0, -3.0, -4.0]),
    old_values=torch.tensor([0.5, 1.5, 2.5, 3.5]),
    advantages=torch.zeros(4),
    returns=torch.tensor([1.0, 1.0, 3.0, 3.0]),
    ref_logprobs=torch.tensor([-1.5, -2.0, -2.0, -6.0]),
)
KL = [0.5 + 0.0 - 1.0, 2.0]
"""Per sequence: the sum of logprob − ref_logprob."""
ROLLOUT = Rollout([[7, 8, 1], [9]], ["stop", "length"], [])
SCORES = Scores(
    torch.tensor([1.0, 3.0]),
    terms={"a": Scored([1.0, 3.0])},
    monitors={"gold": Scored([0.25, 0.75])},
)


# ---------------------------------------------------------------------------------------- an update


def _loss(logits: torch.Tensor, advantages: torch.Tensor, weights: torch.Tensor):
    tokens = torch.zeros(len(logits), dtype=torch.int64)
    return ppo_loss(logits, tokens, torch.full((len(logits),), -1.6), advantages, weights=weights)


def _part(
    sums: torch.Tensor, value: float, clipped: float, useful: int, computed: int
) -> Microbatch:
    loss = torch.tensor(0.0)
    return Microbatch(loss, sums, torch.tensor(value), torch.tensor(clipped), useful, computed)


def test_metrics_are_means_over_all_tokens_however_they_were_cut() -> None:
    """A microbatch of one token counts for one token, not for half of the mean."""
    logits, advantages = torch.randn(6, 5), torch.randn(6)
    weights = torch.full((6,), 1 / 6)
    whole, parts = Meter(), Meter()
    whole.microbatch(_part(_loss(logits, advantages, weights).sums, 0.6, 3, 6, 8))
    for rows, value in ((slice(0, 5), 0.5), (slice(5, 6), 0.1)):
        sums = _loss(logits[rows], advantages[rows], weights[rows]).sums
        parts.microbatch(_part(sums, value, 1.5, 3, 4))
    for meter in (whole, parts):
        meter.minibatch(loss=0.25, grad_norm=2.0)
    assert whole.metrics() == pytest.approx(parts.metrics(), rel=1e-5)
    p = logits.log_softmax(1)
    assert whole.metrics()["entropy"] == pytest.approx(-(p.exp() * p).sum(1).mean().item())
    assert whole.metrics()["value_loss"] == pytest.approx(0.6)
    assert whole.metrics()["useful_share"] == 0.75
    assert whole.metrics()["value_clip_fraction"] == 0.5


def test_losses_and_what_a_step_reports_are_means_over_the_steps() -> None:
    meter = Meter()
    found = []
    for seed, (loss, value) in enumerate([(1.0, 0.5), (3.0, 0.7)]):
        torch.manual_seed(seed)
        out = _loss(torch.randn(4, 5), torch.randn(4), torch.full((4,), 0.25))
        found.append(out.metrics["policy_loss"].item())
        meter.microbatch(_part(out.sums, value, 0, 3, 4))
        meter.minibatch(loss=loss, learning_rate=1e-3)
    metrics = meter.metrics()
    assert metrics["policy_loss"] == pytest.approx(sum(found) / 2, rel=1e-5)
    assert metrics["value_loss"] == pytest.approx(0.6)
    assert (metrics["loss"], metrics["learning_rate"]) == (2.0, 1e-3)
    assert "ptx_loss" not in metrics
    meter.pretraining(torch.tensor(1.0))
    meter.pretraining(torch.tensor(2.0))
    assert meter.metrics()["ptx_loss"] == 1.5


def test_0d_tensors_become_numbers_by_their_names() -> None:
    given = {"a": torch.tensor(1.5), "b": torch.tensor(2, dtype=torch.int64)}
    assert to_floats(given) == {"a": 1.5, "b": 2.0}


def test_the_clock_tells_each_phase_and_tokens_per_second_of_the_whole(monkeypatch) -> None:
    times = iter([10.0, 12.0, 15.0])
    monkeypatch.setattr(metrics_module.time, "perf_counter", lambda: next(times))
    clock = Clock()
    clock.lap("generate")
    clock.lap("update")
    assert clock.metrics(100, World()) == {
        "seconds/generate": 2.0,
        "seconds/update": 3.0,
        "tokens_per_second": 20.0,
    }


# ----------------------------------------------------------------------------------- the experience


def test_metrics_of_the_experience_are_means_over_tokens_or_sequences() -> None:
    found = experience_metrics(EXPERIENCE, torch.tensor(0.25))
    assert found.pop("advantage_std") == 0.25
    assert found == pytest.approx(
        {
            "response_length": 2.0,
            "value": 2.0,
            "return": 2.0,
            "explained_variance": 1 - 0.25 / 1.0,
            "kl": sum(KL) / 2,
            "kl_per_token": sum(KL) / 4,
        }
    )
    assert "kl" not in experience_metrics(replace(EXPERIENCE, ref_logprobs=None), torch.tensor(1.0))


def test_a_perfect_value_function_explains_all_and_a_constant_one_nothing() -> None:
    returns = torch.tensor([1.0, 2.0, 4.0])
    assert explained_variance(returns, returns).item() == 1
    assert explained_variance(returns, torch.full((3,), 7.0)).item() == pytest.approx(0)
    assert explained_variance(returns, -returns).item() < 0
    assert explained_variance(torch.ones(3), torch.ones(3)).item() == 1, "and no division by 0"


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_the_logged_kl_is_k1_whatever_the_reward_uses(estimator: str, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, kl_estimator=estimator, reference=tiny.model(seed=1))
    experience = first_experience(trainer)
    _, metrics = experience_of(trainer, experience.batch, torch.zeros(len(experience)))
    assert experience.ref_logprobs is not None
    expected = (experience.old_logprobs - experience.ref_logprobs).sum() / len(experience)
    assert metrics["kl"] == pytest.approx(expected.item(), rel=1e-5)


# ------------------------------------------------------------------------------------ the responses


def test_the_share_of_responses_that_ended_by_themselves_is_beside_their_rewards() -> None:
    found = response_metrics(SCORES, ROLLOUT, {"kl": 3.0, "kl_coef": 0.1})
    assert found["non_score_reward"] == pytest.approx(-0.3)
    assert found["rlhf_reward"] == pytest.approx(found["reward"] - 0.3)
    assert "rlhf_reward" not in response_metrics(SCORES, ROLLOUT, {})
    assert found["eos_rate"] == 0.5
    assert found.items() >= SCORES.metrics().items()


def test_the_first_responses_are_written_down_with_all_that_they_got() -> None:
    prompts = Prompts(["w1", "w2 w3"], [[4], [5, 6]])
    args = (prompts, [" a", " b"], ROLLOUT, SCORES, EXPERIENCE)
    first, second = sample_records(*args)
    assert first == {
        "prompt": "w1",
        "completion": " a",
        "reward": 1.0,
        "rewards": {"a": 1.0},
        "monitors": {"gold": 0.25},
        "kl": pytest.approx(KL[0]),
        "tokens": 3,
        "finish_reason": "stop",
    }
    assert (second["kl"], second["finish_reason"]) == (pytest.approx(KL[1]), "length")
    assert sample_records(prompts, [" a"], *args[2:]) == [first]
    assert sample_records(prompts, [], *args[2:]) == []
    without = replace(EXPERIENCE, ref_logprobs=None)
    assert sample_records(*args[:-1], without)[0]["kl"] is None


def test_the_bar_shows_the_numbers_that_people_watch() -> None:
    assert status({"reward": 0.12345, "kl": 1.5, "entropy": 3.0}) == (
        "reward 0.123  KL 1.50  entropy 3.00"
    )
    assert status({"reward": 1.0, "entropy": 3.0}) == "reward 1.000  entropy 3.00"
    near = {"reward": 0.0, "kl": -0.001, "entropy": 3.0}
    assert status(near) == "reward 0.000  KL 0.00  entropy 3.00"
