"""The studies of the docs run from their commands, and what they compute is right."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fastppo.recipes import arithmetic, characters
from fastppo.rewards.limit import most_of_gain, share_of_gain
from fastppo.run.log import read_jsonl

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
    assert cell([0.5, float("nan")]) == "0.500 (1 of 2)"
    assert cell([float("nan")]) == "not reached"


def test_no_share_of_a_limit_that_the_samples_do_not_show() -> None:
    cells = _script("study_reward_kl")["_limit_cells"]
    rewards = np.random.default_rng(0).normal(size=(8, 64)).tolist()

    def of(reward: list[float], kl: list[float]) -> str:
        return cells(rewards, np.array(reward), np.array(kl))

    shares = [share_of_gain(rewards, 0.5, kl) for kl in (0.5, 0.25)]
    assert of([0.5], [0.5]).endswith(f" | {shares[0]:.2f}")
    assert of([0.5, 0.5], [0.5, 0.25]).endswith(f" | {np.mean(shares):.2f}"), "of each seed"
    most = most_of_gain(rewards, 0.5, 4.0)
    assert of([0.5], [4.0]) == f"not shown | ≤ {most:.2f}"
    assert of([0.5, 0.5], [0.5, 4.0]) == f"not shown | ≤ {(shares[0] + most) / 2:.2f}"
    assert of([9.0, 0.5], [4.0, 0.5]) == "not shown | no bound"
    assert of([0.5], [-0.01]) == f"{np.mean(rewards):.3f} | ", "no KL, no share"


def test_gold_and_proxy_go_by_the_names_that_the_metrics_have(tmp_path: Path) -> None:
    """A reward model's is its directory's, a function's is the function's."""
    script = _script("study_reward_kl")
    study_class = script["Study"]
    (tmp_path / "model").mkdir()
    config = SimpleNamespace(rewards=[str(tmp_path / "model")], monitor_rewards=["a.py:gold"])

    class Study(study_class):
        def config(self, **options: Any) -> Any:
            return config

    sizes = {"iterations": 2, "samples": 2, "base_samples": 2, "interval": 2}
    study = Study(directory=tmp_path, recipe="arithmetic", betas=(0.5,), seeds=1, **sizes)
    study.run_dir(0.5, 0).mkdir()
    record = {"eval/reward": 1.0, "eval/kl": 2.0, "eval/reward/model": 3.0, "eval/reward/gold": 4.0}
    (study.run_dir(0.5, 0) / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    assert [values.tolist() for values in script["curves"](study, 0.5)] == [[[2]], [[3]], [[4]]]


@pytest.mark.parametrize("name", ["study_reward_kl", "study_estimators"])
def test_a_study_that_is_refused_leaves_nothing(name: str, tmp_path: Path) -> None:
    """Neither in a directory of another study, nor where there was none."""
    main = _script(name)["main"]
    (tmp_path / "study.json").write_text('["another"]')
    with pytest.raises(SystemExit, match="holds a study of"):
        main([str(tmp_path), *QUICK])
    assert [path.name for path in tmp_path.iterdir()] == ["study.json"]
    with pytest.raises(SystemExit):
        main([str(tmp_path / "none"), "--seeds", "0"])
    assert not (tmp_path / "none").exists()


def test_a_cell_of_several_seeds_says_how_far_they_are_apart() -> None:
    cell = _script("study_reward_kl")["_spread"]
    assert cell(np.array([0.1, 0.2, 0.3])) == "0.200 ± 0.100"
    assert cell(np.array([1.5]), 2) == "1.50"


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arithmetic, "LARGEST", 9)
    monkeypatch.setattr(arithmetic, "HELD_OUT", 24)
    shape = characters.model_config
    monkeypatch.setattr(characters, "model_config", lambda: shape(hidden=32, layers=1))


def test_a_study_without_an_evaluation_is_refused_before_it_trains(tmp_path: Path, capsys) -> None:
    main = _script("study_reward_kl")["main"]
    with pytest.raises(SystemExit):
        main([str(tmp_path / "study"), "--iterations", "4"])
    assert "--iterations must be >= 5" in capsys.readouterr().err
    assert not (tmp_path / "study").exists()


@pytest.fixture(params=["study_reward_kl", "study_estimators"])
def stopped(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A script whose runs end before they begin, with what they were asked."""
    script = _script(request.param)
    names = script["main"].__globals__
    asked: list[Any] = []

    def trainer(config: Any, console: Any) -> None:
        asked.append(config)
        if Path(config.output_dir).name != "base":
            raise RuntimeError("a run")

    monkeypatch.setitem(names, "prepare", lambda *_: None)
    monkeypatch.setitem(names, "load_rows", lambda *_: [{"prompt": "1+1="}])
    monkeypatch.setitem(names, "PPOTrainer", trainer)
    return {"main": script["main"], "asked": asked, "name": request.param}


QUICK = ["--quick", "--recipe", "arithmetic"]


def test_a_study_takes_options_of_its_recipe(stopped: dict[str, Any], tmp_path: Path) -> None:
    """They reach the runs, and a directory keeps to one set of them and one size."""
    main, asked = stopped["main"], stopped["asked"]
    (tmp_path / "base_rewards.json").write_text(json.dumps([[0.0] * 16]))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="a run"):
            main([str(tmp_path), *QUICK, "--gamma", "0.3"])
    assert [config.gamma for config in asked] == [0.3, 0.3]
    for other in ([*QUICK, "--gamma", "0.4"], ["--recipe", "arithmetic", "--gamma", "0.3"]):
        with pytest.raises(SystemExit, match="name another directory"):
            main([str(tmp_path), *other])
    assert len(asked) == 2


def test_a_directory_of_an_unknown_study_is_refused(
    stopped: dict[str, Any], tmp_path: Path
) -> None:
    for left in ("beta-0.5-seed-0/look.json", "seed-0/PPO/times.json"):
        (tmp_path / left).parent.mkdir(parents=True)
        (tmp_path / left).write_text("[]")
    with pytest.raises(SystemExit, match="a study of unknown options, expected"):
        stopped["main"]([str(tmp_path), *QUICK])


@pytest.mark.parametrize("flag", ["--seed=4", "--output-dir", "--config"])
def test_an_option_that_the_study_sets_is_refused(
    flag: str, stopped: dict[str, Any], tmp_path: Path, capsys
) -> None:
    with pytest.raises(SystemExit):
        stopped["main"]([str(tmp_path / "study"), *QUICK, flag, "x"])
    assert "is set by the study" in capsys.readouterr().err
    assert not (tmp_path / "study").exists()


def test_an_option_that_one_run_refuses_costs_nothing(
    stopped: dict[str, Any], tmp_path: Path
) -> None:
    """It is found before anything is made, and the directory is not bound to it."""
    flags = {
        "study_reward_kl": ("kl_estimator", "full", "only with kl_coef > 0"),  # β = 0 is one
        "study_estimators": ("value_warmup_iterations", "2", "vf_coef must be > 0"),  # RLOO's is 0
    }
    name, value, error = flags[stopped["name"]]
    with pytest.raises(ValueError, match=error):
        stopped["main"]([str(tmp_path), *QUICK, f"--{name}", value])
    assert stopped["asked"] == []
    assert not (tmp_path / "study.json").exists()


def test_what_an_interrupted_run_left_is_not_gone_on_with(
    stopped: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "base_rewards.json").write_text(json.dumps([[0.0] * 16]))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="a run"):
            stopped["main"]([str(tmp_path), *QUICK])
        left = Path(stopped["asked"][-1].output_dir) / "metrics.jsonl"
        assert not left.exists()
        left.parent.mkdir(exist_ok=True)
        left.write_text("{}\n")


@pytest.mark.parametrize(("checkpoint", "resume"), [(True, True), (False, False)])
def test_a_study_goes_on_where_it_was_interrupted(
    checkpoint: bool, resume: bool, tmp_path: Path, monkeypatch
) -> None:
    """From the run's checkpoint; a run without one is begun again in an empty folder."""
    script = _script("study_reward_kl")
    asked: list[tuple[bool, bool]] = []

    class Trainer:
        evaluation = SimpleNamespace(prompts=[])

        def __init__(self, config: Any, console: Any) -> None:
            output = Path(config.output_dir)
            asked.append((config.resume, output.exists()))
            output.mkdir(exist_ok=True)

        def train(self) -> None:
            pass

    seen = {"reward": 1.0, "kl": 1.0, "prompts": [], "completions": []}
    parts = {"prepare": None, "load_rows": [], "look": seen}
    run = script["run"]
    for name, value in parts.items():
        monkeypatch.setitem(run.__globals__, name, lambda *_, value=value: value)
    monkeypatch.setitem(run.__globals__, "PPOTrainer", Trainer)
    sizes = {"seeds": 1, "iterations": 6, "samples": 2, "base_samples": 2, "interval": 2}
    study = script["Study"](directory=tmp_path, recipe="arithmetic", betas=(0.5,), **sizes)
    (tmp_path / "base_rewards.json").write_text("[[0.0, 1.0]]")
    output = study.run_dir(0.5, 0)
    output.mkdir()
    (output / "metrics.jsonl").write_text("{}\n")
    if checkpoint:
        (output / "checkpoint-2").mkdir()
    run(study)
    assert asked == [(resume, checkpoint)]
    assert (output / "look.json").exists()
    assert not any(output.glob("checkpoint-*"))  # a disk holds a dozen runs


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
    assert "| after 2, 4, 6 iterations |" in printed
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
    for label in ("PPO", "PPO, detached head"):
        assert f"\n{label}: the critic explains " in printed
    assert (tmp_path / "estimators.png").stat().st_size > 10_000


def test_the_seeds_of_a_recipe_make_a_table(tmp_path: Path, monkeypatch, capsys) -> None:
    """Each is run once; what is there is read."""
    script = _script("recipe_seeds")
    ran: list[int] = []

    def run_seed(name: str, directory: Path, seed: int, flags: list[str]) -> dict[str, Any]:
        ran.append(seed)
        share = {"share_of_gain": 0.5 if seed else None}
        return {"recipe": name, "seed": seed, "flags": flags, "kl": 1.0 + seed, **share}

    main = script["main"]
    monkeypatch.setitem(main.__globals__, "run_seed", run_seed)
    for seeds in ("2", "3"):
        main(["arithmetic", str(tmp_path), "--seeds", seeds, "--kl_coef", "0.1"])
    assert ran == [0, 1, 2]
    assert capsys.readouterr().out.endswith(
        "| 3 seeds | least | median | most |\n|---|---|---|---|\n"
        "| KL, nats | 1.00 | 2.00 | 3.00 |\n"
        "| share of the limit's gain (2 of 3) | 0.50 | 0.50 | 0.50 |\n"
    )
    with pytest.raises(SystemExit):
        main(["arithmetic", str(tmp_path), "--seeds", "1"])
    assert "has seed 0 with the flags '--kl_coef 0.1', expected ''" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["arithmetic", str(tmp_path / "other"), "--seed=7"])
    assert "--seed is set for each seed" in capsys.readouterr().err


def test_seeds_of_one_model_are_held_against_the_limit_of_all_their_samples(
    tmp_path: Path, capsys
) -> None:
    script = _script("recipe_seeds")
    draw, name = np.random.default_rng(0), "smollm2-sentiment"
    drawn = [draw.normal(size=(8, 64)) for _ in range(5)]
    lines = []
    for seed, rewards in enumerate(drawn):
        path = tmp_path / f"{name}-{seed}" / "ppo" / "base_rewards.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(rewards.tolist()))
        lines.append(
            {"recipe": name, "seed": seed, "flags": [], "after": 1.5, "kl": 2.0 + 2 * seed}
        )
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    script["main"]([name, str(tmp_path), "--seeds", "5"])
    printed = capsys.readouterr().out
    pool = np.concatenate(drawn, axis=1).tolist()
    share = f"{share_of_gain(pool, 1.5, 2.0):.2f}"
    assert f"| share of the limit's gain (1 of 5) | {share} | {share} | {share} |" in printed
    assert printed.endswith("The limit is that of 320 samples of the base to a prompt.\n")
    lines[2]["kl"] = None  # what was not finite: no reason to lose the table
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    script["main"]([name, str(tmp_path), "--seeds", "5"])
    assert "share" not in capsys.readouterr().out


@pytest.mark.usefixtures("_small")
def test_a_seed_is_a_run_of_the_recipe(tmp_path: Path) -> None:
    script = _script("recipe_seeds")
    run_seed = script["run_seed"]
    small = ["--iterations", "2", "--eval_interval", "2", "--rollout_batch_size", "16"]
    line = run_seed("arithmetic", tmp_path, 3, small)
    records = read_jsonl(tmp_path / "arithmetic-3" / "ppo" / "metrics.jsonl")
    assert line["greedy"] == records[-1]["eval/greedy/reward"]
    assert not any((tmp_path / "arithmetic-3" / "ppo").glob("checkpoint-*"))
    assert line["trained"] == (records[0]["reward"] + records[1]["reward"]) / 2
    assert (line["seed"], line["iterations"]) == (3, 2)
    assert line["kl"] != 0
    assert 0 <= line["before"] <= 1
    json.dumps(line, allow_nan=False)
    assert script["table"]([line])[0] == "| 1 seeds | least | median | most |"
    assert run_seed("arithmetic", tmp_path, 3, small)["after"] == line["after"]  # begun anew
