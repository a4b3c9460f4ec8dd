"""The studies: what bounds a policy, by hand, and each study in small."""

from __future__ import annotations

import importlib
import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig

from benchmarks.studies import common, credit, critic_limit, recipe_curves
from benchmarks.studies.estimators import at_kl
from fastppo.ppo.config import PPOConfig
from fastppo.recipes import arithmetic, characters
from fastppo.recipes.catalogue import Recipe


def test_the_tilted_base_is_the_one_that_one_counts_by_hand() -> None:
    """Rewards of 0 and log 3 at β = 1: weights of 1/4 and 3/4."""
    kl, reward, effective = common.tilted([[0.0, math.log(3)]], beta=1.0)
    assert reward == pytest.approx(0.75 * math.log(3))
    assert kl == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5))
    assert effective == pytest.approx(1 / (0.25**2 + 0.75**2))


def test_the_limit_rises_from_the_base_and_nothing_that_is_drawn_exceeds_it() -> None:
    rewards = np.random.default_rng(0).normal(size=(8, 64))
    kls, limits = common.limit(rewards)
    assert kls[0] == pytest.approx(0.0, abs=1e-5)
    assert limits[0] == pytest.approx(rewards.mean(), abs=1e-2)
    assert (np.diff(kls) > 0).all()
    assert (np.diff(limits) > 0).all()
    for n in (2, 4):
        kl, reward = common.best_of(rewards, n)
        assert 0.8 < common.share_of_gain(rewards, reward, kl) <= 1.0
    assert math.isnan(common.share_of_gain(rewards, 3.0, 100.0))  # beyond what the samples show
    pairs = [max(pair) for pair in itertools.combinations([0.0, 1.0, 5.0, 2.0], 2)]
    kl, reward = common.best_of([[0.0, 1.0, 5.0, 2.0]], 2)
    assert reward == pytest.approx(np.mean(pairs))
    assert kl == pytest.approx(math.log(2) - 0.5)


def test_the_reward_at_a_kl_is_on_the_line_between_two_iterations() -> None:
    kl, reward = np.array([0.1, 0.3, 0.2, 0.9]), np.array([0.0, 1.0, 2.0, 3.0])
    assert at_kl(kl, reward, 0.2) == pytest.approx(0.5)
    assert at_kl(kl, reward, 0.05) == 0.0
    assert math.isnan(at_kl(kl, reward, 1.0))


def test_the_curves_of_a_recipe_are_those_of_its_seeds(tmp_path: Path) -> None:
    for seed in (0, 3):
        run = tmp_path / f"arithmetic-{seed}" / "ppo"
        run.mkdir(parents=True)
        (run / "metrics.jsonl").write_text('{"reward": 0.5}\n{"reward": 0.75}\n')
    figure = recipe_curves.draw(tmp_path, ["arithmetic"])
    assert figure.read_text().count("<!-- seed") == 2
    assert "<!-- seed 3 -->" in figure.read_text()


def test_two_continuations_say_how_much_of_a_return_can_be_foreseen() -> None:
    """Prefixes of variance 3, and noise of variance 1 behind each."""
    draw = np.random.default_rng(0)
    expected = draw.normal(0, 3**0.5, 100_000)
    noise = draw.normal(0, 1, (2, 100_000))
    returns = critic_limit.Returns(expected, expected, *(expected + noise))
    assert critic_limit.share_at_most(returns, noise[0] < np.inf) == pytest.approx(0.75, abs=0.01)


def test_the_critic_of_each_task_of_credit_is_the_head_in_closed_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the recipe too, whose own is another; and no other setting has one."""
    configs: dict[str, PPOConfig] = {}

    def not_trained(config: PPOConfig, *, seconds: float) -> common.Records:
        configs[Path(config.output_dir).name] = config
        return []

    monkeypatch.setattr(credit, "train", not_trained)
    monkeypatch.setattr(common, "prepare", lambda *arguments: None)
    monkeypatch.setattr(Recipe, "check_packages", lambda recipe: None)
    for label in credit.SETTINGS:
        credit.run(tmp_path, credit.TASKS["smollm2-sentiment"], label, 0, 1.0)
    with_critic = [label for label, config in configs.items() if config.fits_value_head]
    assert with_critic == ["PPO"]
    assert configs["PPO"].value_model == "shared"


@pytest.mark.slow
def test_the_quick_study_of_the_critics_limit_prints_its_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    critic_limit.main([str(tmp_path), "--quick"])
    printed = capsys.readouterr().out
    for name in ("the run's head", "any function", "a fit of 1024", "9 to 11 tokens written"):
        assert f"| {name}" in printed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "flags", "words"),
    [
        ("critic", [], ["| critic, closed form |", "| GRPO |", "gold ahead of"]),
        ("overoptimization", [], ["| β = 0.08 |"]),
        ("estimators", [], ["| GRPO |", "best of 16", "the critic explains"]),
        ("credit", [], ["| RLOO |", "| PPO − GRPO |", "the critic explains |"]),
        ("reward_kl", ["--recipe", "arithmetic"], ["| β = 0.05 |", "| best of 16 |"]),
    ],
)
def test_a_quick_study_prints_its_table_draws_and_is_not_run_again(
    name: str,
    flags: list[str],
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    of_sizes = characters.model_config

    def small(hidden: int, layers: int, vocabulary: int, context: int) -> LlamaConfig:
        return of_sizes(32, 1, vocabulary, context)

    monkeypatch.setattr(arithmetic, "LARGEST", 9)
    monkeypatch.setattr(arithmetic, "HELD_OUT", 24)
    monkeypatch.setattr(characters, "model_config", small)
    study: Any = importlib.import_module(f"benchmarks.studies.{name}")
    study.main([str(tmp_path), "--quick", *flags])
    printed = capsys.readouterr().out
    assert all(word in printed for word in words)
    (picture,) = tmp_path.glob("*.png")
    assert picture.stat().st_size > 10_000
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json")}
    study.main([str(tmp_path), "--quick", *flags])
    assert capsys.readouterr().out == printed
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json")} == files
