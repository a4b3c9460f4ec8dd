"""The studies of the docs run from their commands, and what they compute is right."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastppo.recipes import arithmetic, characters

ROOT = Path(__file__).parents[1]


def _script(name: str) -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "docs" / f"{name}.py"))


def test_the_reward_at_a_kl_is_read_where_the_run_first_reached_it() -> None:
    at_kl = _script("study_estimators")["at_kl"]
    kl, reward = np.array([0.0, 1.0, 0.5, 3.0]), np.array([0.1, 0.3, 0.2, 0.9])
    assert at_kl(kl, reward, 0.5) == pytest.approx(0.2)
    assert at_kl(kl, reward, 2.0) == pytest.approx(0.2 + 0.6 * 0.7)
    assert np.isnan(at_kl(kl, reward, 4.0))
    assert at_kl(kl + 1, reward, 0.5) == 0.1


def test_a_cell_says_how_many_runs_it_is_of() -> None:
    cell = _script("study_estimators")["_cell"]
    assert cell([0.5, 0.7]) == "0.600 ± 0.141"
    assert cell([0.5, float("nan")]) == "0.500 ± 0.000 (1 of 2)"
    assert cell([float("nan")]) == "not reached"


def test_the_settings_of_the_second_study_are_options_of_the_recipe() -> None:
    import yaml

    from fastppo.ppo.config import PPOConfig
    from fastppo.recipes.catalogue import find

    read = yaml.safe_load(find("arithmetic").config("x"))
    for label, (options, _) in _script("study_estimators")["SETTINGS"].items():
        assert PPOConfig(**read | options), label


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arithmetic, "LARGEST", 9)
    monkeypatch.setattr(arithmetic, "HELD_OUT", 24)
    shape = characters.model_config
    monkeypatch.setattr(characters, "model_config", lambda: shape(hidden=32, layers=1))


@pytest.mark.slow
@pytest.mark.usefixtures("_small")
def test_the_first_study_draws_its_table_and_picture(tmp_path: Path, capsys) -> None:
    main = _script("study_reward_kl")["main"]
    command = [str(tmp_path), "--quick", "--recipe", "arithmetic"]
    main(command)
    printed = capsys.readouterr().out
    for row in ("| the base | 0 |", "| β = 0 |", "| β = 0.05 |", "| best of 16 |", "β = 0: KL"):
        assert row in printed
    base = np.array(json.loads((tmp_path / "base_rewards.json").read_text()))
    assert base.shape == (24, 16)
    assert f"{base.mean():.3f}" in printed
    assert (tmp_path / "reward-kl.png").stat().st_size > 10_000
    before = (tmp_path / "beta-0-seed-0" / "metrics.jsonl").stat().st_mtime_ns
    main(command)
    assert (tmp_path / "beta-0-seed-0" / "metrics.jsonl").stat().st_mtime_ns == before
    assert capsys.readouterr().out == printed


@pytest.mark.slow
@pytest.mark.usefixtures("_small")
def test_the_second_study_compares_at_equal_compute_and_equal_kl(tmp_path: Path, capsys) -> None:
    main = _script("study_estimators")["main"]
    main([str(tmp_path), "--quick", "--kls", "0.01", "1e9"])
    printed = capsys.readouterr().out
    for label in ("PPO", "REINFORCE", "RLOO", "GRPO"):
        (row,) = (line for line in printed.splitlines() if line.startswith(f"| {label} |"))
        assert row.endswith("| not reached |")
        times = json.loads((tmp_path / "seed-0" / label / "times.json").read_text())
        assert times == sorted(times)
        assert times[-1] >= 10.0
    assert "| best of 16 |" in printed
    assert (tmp_path / "estimators.png").stat().st_size > 10_000
