"""The numbers of an iteration: means over tokens, and what is written down of the responses."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from fastppo.data.batch import Batch
from fastppo.data.prompts import Prompts
from fastppo.data.world import World
from fastppo.functional.losses import ppo_loss
from fastppo.ppo.coefficients import CoefficientControl
from fastppo.ppo.experience import Experience, Responses
from fastppo.ppo.metrics import (
    OF_CRITIC,
    LossSums,
    PhaseTimer,
    UpdateMeter,
    explained_variance,
    read_experience,
    response_metrics,
    sample_records,
    standard_errors,
)
from fastppo.ppo.options.config import CRITIC_FREE, PPOConfig
from fastppo.rewards.reward import Scored
from fastppo.rewards.scorer import Scores
from fastppo.rollout import Rollout
from fastppo.run.report.panels import PANELS
from fastppo.run.report.report import write_report
from runs import experience_of, first_experience, make_trainer, records

BATCH = Batch.of([[4], [5, 6]], [[7, 8, 1], [9]])
EXPERIENCE = Experience(
    BATCH,
    old_logprobs=torch.tensor([-1.0, -2.0, -3.0, -4.0]),
    old_values=torch.tensor([0.5, 1.5, 2.5, 3.5]),
    advantages=torch.tensor([1.0, 1.0, 3.0, 3.0]),
    returns=torch.tensor([1.0, 1.0, 3.0, 3.0]),
    monte_carlo_returns=torch.tensor([0.0, 0.0, 4.0, 4.0]),
    ref_logprobs=torch.tensor([-1.5, -2.0, -2.0, -6.0]),
    advantage_std=torch.tensor(0.25),
    response_kl=[-0.5, 2.0],
)
CONFIG = PPOConfig(value_head="gradient", value_clip=0.2)
COEFFICIENTS = CoefficientControl(CONFIG).at(0)
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


def _sums(policy: torch.Tensor, *, value_loss: float, clipped: float, computed: int) -> LossSums:
    return LossSums(
        policy=policy,
        loss=torch.tensor(0.0),
        value_loss=torch.tensor(value_loss),
        value_clipped=torch.tensor(clipped),
        computed=computed,
    )


def test_metrics_do_not_depend_on_the_microbatches() -> None:
    """A microbatch of one token counts for one token, not for half of the mean."""
    logits, advantages = torch.randn(6, 5), torch.randn(6)
    weights = torch.full((6,), 1 / 6)
    policy = _loss(logits, advantages, weights).sums
    whole = _sums(policy, value_loss=0.6, clipped=3, computed=8)
    parts = []
    for rows, value_loss in ((slice(0, 5), 0.5), (slice(5, 6), 0.1)):
        policy = _loss(logits[rows], advantages[rows], weights[rows]).sums
        parts.append(_sums(policy, value_loss=value_loss, clipped=1.5, computed=4))
    actual = []
    for sums in (whole, parts[0].plus(parts[1])):
        meter = UpdateMeter()
        meter.add(EXPERIENCE, sums, {"loss": 0.25, "grad_norm": 2.0})
        actual.append(meter.metrics(CONFIG, COEFFICIENTS))
    assert actual[0] == pytest.approx(actual[1], rel=1e-5)
    p = logits.log_softmax(1)
    assert actual[0]["entropy"] == pytest.approx(-(p.exp() * p).sum(1).mean().item())
    assert actual[0]["value_loss"] == pytest.approx(0.6)
    assert actual[0]["useful_share"] == 7 / 8
    assert actual[0]["value_clip_fraction"] == 0.5


def test_losses_and_step_metrics_are_means_over_steps() -> None:
    meter = UpdateMeter()
    policy_losses = []
    for seed, (loss, value_loss) in enumerate([(1.0, 0.5), (3.0, 0.7)]):
        torch.manual_seed(seed)
        out = _loss(torch.randn(4, 5), torch.randn(4), torch.full((4,), 0.25))
        policy_losses.append(out.metrics["policy_loss"].item())
        sums = _sums(out.sums, value_loss=value_loss, clipped=0, computed=8)
        meter.add(EXPERIENCE, sums, {"loss": loss, "learning_rate": 1e-3})
    metrics = meter.metrics(CONFIG, COEFFICIENTS)
    assert metrics["policy_loss"] == pytest.approx(sum(policy_losses) / 2, rel=1e-5)
    assert metrics["value_loss"] == pytest.approx(0.6)
    assert (metrics["loss"], metrics["learning_rate"]) == (2.0, 1e-3)
    assert "ptx_loss" not in metrics
    for ptx_loss in (1.0, 2.0):
        meter.add(EXPERIENCE, sums._replace(ptx_loss=torch.tensor(ptx_loss)), {"loss": 0.0})
    assert meter.metrics(CONFIG, COEFFICIENTS)["ptx_loss"] == 1.5


def test_the_timer_reports_phases_and_tokens_per_second() -> None:
    begun: list[str] = []
    timer = PhaseTimer(PPOConfig(), begun.append)
    for phase in ("generate", "update"):
        with timer(phase):
            assert phase == begun[-1]
    assert all(seconds > 0 for seconds in timer.seconds.values())
    timer.seconds = {"generate": 2.0, "update": 3.0}
    assert timer.metrics(100, World()) == {
        "seconds/generate": 2.0,
        "seconds/update": 3.0,
        "tokens_per_second": 20.0,
    }


# ----------------------------------------------------------------------------------- the experience


def test_metrics_of_the_experience_are_means_over_tokens_or_sequences() -> None:
    actual = read_experience(EXPERIENCE, PPOConfig(), {}).metrics
    assert actual.pop("advantage_std") == 0.25
    assert actual == pytest.approx(
        {
            "response_length": 2.0,
            "value": 2.0,
            "return": 2.0,
            "explained_variance": 1 - 1.25 / 4.0,
            "value_calibration": 4 / 3,
            "advantage_correlation": 1.0,
            "kl": sum(KL) / 2,
            "kl_per_token": sum(KL) / 4,
        }
    )
    without = replace(EXPERIENCE, ref_logprobs=None)
    assert read_experience(EXPERIENCE, PPOConfig(), {}).response_kl == KL
    assert read_experience(without, PPOConfig(), {}).response_kl is None
    assert "kl" not in read_experience(without, PPOConfig(), {}).metrics


def test_explained_variance_is_1_if_perfect_and_0_if_constant() -> None:
    returns = torch.tensor([1.0, 2.0, 4.0])
    assert explained_variance(returns, returns).item() == 1
    assert explained_variance(returns, torch.full((3,), 7.0)).item() == pytest.approx(0)
    assert explained_variance(returns, -returns).item() < 0


def defined(experience: Experience) -> dict[str, float]:
    """Return the metrics of the critic that are defined."""
    metrics = read_experience(experience, PPOConfig(), {}).metrics
    return {name: x for name, x in metrics.items() if name in OF_CRITIC}


def test_returns_equal_up_to_rounding_have_no_critic_metrics() -> None:
    rounding = 1e-6 * torch.tensor([1.0, -1.0, 1.0, -1.0])
    assert defined(replace(EXPERIENCE, monte_carlo_returns=1 + rounding)) == {}
    values = defined(replace(EXPERIENCE, old_values=1 + rounding))
    assert values.keys() == {"explained_variance", "advantage_correlation"}


def test_equal_values_have_no_calibration() -> None:
    constant = replace(EXPERIENCE, old_values=torch.zeros(4), advantages=-EXPERIENCE.returns)
    actual = defined(constant)
    assert actual == pytest.approx({"explained_variance": 0.0, "advantage_correlation": -1.0})


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_the_logged_kl_is_k1_whatever_the_reward_uses(estimator: str, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, kl_estimator=estimator, reference=tiny.model(seed=1))
    experience = first_experience(trainer)
    _, metrics = experience_of(trainer, experience.batch, torch.zeros(len(experience)))
    assert experience.ref_logprobs is not None
    expected = (experience.old_logprobs - experience.ref_logprobs).sum() / len(experience)
    assert metrics["kl"] == pytest.approx(expected.item(), rel=1e-5)


# ------------------------------------------------------------------------------------ the responses


def test_response_metrics_have_rewards_and_eos_rate() -> None:
    actual = response_metrics(SCORES, ROLLOUT, {"kl": 3.0, "kl_coef": 0.1})
    assert actual["non_score_reward"] == pytest.approx(-0.3)
    assert actual["rlhf_reward"] == pytest.approx(actual["reward"] - 0.3)
    assert "rlhf_reward" not in response_metrics(SCORES, ROLLOUT, {})
    assert actual["eos_rate"] == 0.5
    assert actual.items() >= SCORES.metrics().items()
    lengths = {"response_length_min": 1, "response_length_max": 3, "finished_length": 3}
    assert actual.items() >= lengths.items()
    cut = Rollout([[7, 8]], ["length"], [])
    assert "finished_length" not in response_metrics(Scores(torch.ones(1)), cut, {})


@pytest.mark.parametrize(
    ("rewards", "share"),
    [([1.0, 1.0, 1.0, 2.0], 0.5), ([0.0] * 4, 1.0), ([1.0, 2.0, 3.0], None)],
)
def test_prompts_with_equal_rewards_are_counted(rewards: list[float], share: float | None) -> None:
    """As TRL's frac_reward_zero_std; responses of `step` need not come in groups."""
    scores = Scores(torch.tensor(rewards))
    rollout = Rollout([[1]] * len(rewards), ["stop"] * len(rewards), [])
    grouped = response_metrics(scores, rollout, {}, samples_per_prompt=2)
    assert grouped.get("frac_reward_zero_std") == share
    assert "frac_reward_zero_std" not in response_metrics(scores, rollout, {})


def test_standard_errors_are_of_the_mean_over_prompts() -> None:
    rewards = [1.0, 3.0, 4.0, 8.0]
    scores = Scores(torch.tensor(rewards), monitors={"gold": Scored([0.0, 0.0, 1.0, 1.0])})
    errors = standard_errors(scores)
    assert errors["reward_error"] == pytest.approx(torch.tensor(rewards).std().item() / 2)
    by_prompt = standard_errors(scores, samples_per_prompt=2)
    assert by_prompt == {"reward_error": 2.0, "monitor_error/gold": 0.5}  # of 2 and 6, of 0 and 1
    assert standard_errors(scores, samples_per_prompt=4) == {}
    rarely = Scores(
        torch.tensor(rewards), monitors={"gold": Scored([0.0, math.nan, 1.0, math.nan])}
    )
    assert standard_errors(rarely, samples_per_prompt=2)["monitor_error/gold"] == 0.5


def test_sample_records_hold_scores_and_metadata() -> None:
    responses = Responses(Prompts(["w1", "w2 w3"], [[4], [5, 6]]), ROLLOUT, SCORES)
    first, second = sample_records(responses, EXPERIENCE, [" a", " b"])
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
    assert sample_records(responses, EXPERIENCE, [" a"]) == [first]
    without = replace(EXPERIENCE, response_kl=None)
    assert sample_records(responses, without, [" a"])[0]["kl"] is None


# ----------------------------------------------------------------------------------- their meaning

RUNS: dict[str, dict[str, Any]] = {
    "critic": {"value_clip": 0.2, "dual_clip": 3.0, "early_stop_kl": 9.0, "value_model": "critic"},
    "kl": {"kl_loss_coef": 0.1, "kl_controller": "adaptive", "kl_target": 6.0, "solved_reward": 9},
    "group": {"advantage": "group", "vf_coef": 0.0, "samples_per_prompt": 2, "top_k": 5},
    "penalty": {"objective": "penalty", "monitor_rewards": "w7"},
    "held-out": {"eval_interval": 1, "importance_cap": 2.0},
}


@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS.keys())
def test_every_metric_of_a_run_is_documented(options: dict[str, Any], tmp_path: Path) -> None:
    options = dict(options)
    if "monitor_rewards" in options:
        options["monitor_rewards"] = [tiny.count_w7]
    if "eval_interval" in options:
        options["eval_prompts"] = str(tmp_path / "held-out.jsonl")
        (tmp_path / "held-out.jsonl").write_text(json.dumps(tiny.PROMPTS[0]) + "\n")
    trainer = make_trainer(tmp_path, iterations=1, **options)
    trainer.train()
    (record,) = records(trainer)
    told = _told()
    assert "reward" in told
    for name in record.keys() - {"iteration", "warnings"}:
        head, _, rest = name.partition("/")
        assert name in told or (rest and f"{head}/NAME" in told), name


@pytest.mark.parametrize("advantage", CRITIC_FREE)
def test_a_run_without_a_critic_reports_none(advantage: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"advantage": advantage, "vf_coef": 0.0}
    options |= {"samples_per_prompt": 2, "whiten_advantages": False}
    trainer = make_trainer(tmp_path, iterations=2, **options)
    trainer.train()
    for record in records(trainer):
        assert not {"value_loss", "value", "return", "explained_variance"} & record.keys()
    html = write_report(trainer.config.output_dir).read_text()
    shown = html[html.index('class="summary"') : html.index("<h2>Options</h2>")]
    assert "Policy" in shown
    assert not re.search("critic|value", shown, re.I)


def test_every_metric_in_the_report_is_documented() -> None:
    told = _told()
    for panel in PANELS:
        for name in panel.metrics:
            assert name in told or name.startswith("eval/"), name
        for prefix in panel.prefixes:
            assert f"{prefix}NAME" in told or prefix.startswith("eval/"), prefix


def _told() -> set[str]:
    """The metrics in the tables of docs/definitions.md."""
    page = (Path(__file__).parents[2] / "docs" / "definitions.md").read_text("utf-8")
    rows = re.findall(r"^\| (`.+?) \|", page[page.index("## Metrics") :], re.M)
    return {name for row in rows for name in re.findall(r"`([\w/]+)`", row)}
