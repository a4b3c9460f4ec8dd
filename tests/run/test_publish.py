"""A finished policy has its card, which cannot fail the run."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import tiny
import yaml
from huggingface_hub import ModelCard
from PIL import Image
from rich.console import Console

from fastppo.ppo.config import PPOConfig
from fastppo.run import publish
from fastppo.run.publish import draw_curves
from runs import make_trainer, records


def _card(run_dir: Path) -> tuple[dict[str, Any], str]:
    card = ModelCard.load(run_dir / "policy" / "README.md")
    return card.data.to_dict(), card.text


def test_the_policy_has_a_card_with_options_curves_data_and_versions(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, kl_coef=0.125, iterations=3)
    trainer.train()
    data, text = _card(tmp_path / "run")
    assert (data["library_name"], data["pipeline_tag"]) == ("transformers", "text-generation")
    assert {"fastppo", "ppo"} <= {*data["tags"]}
    assert "base_model" not in data, "no model was named"
    options = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])
    assert options["kl_coef"] == 0.125
    assert "clip_ratio" not in options, "it has its default"
    rewards = [line["reward"] for line in records(trainer)]
    assert f"| `reward` | {rewards[0]:.4g} | {rewards[-1]:.4g} |" in text
    assert "3 iterations of 16 responses" in text
    assert "- rewards: handed over as functions" in text
    assert " torch " in text
    with Image.open(tmp_path / "run" / "policy" / "curves.png") as picture:
        assert picture.width > picture.height > 100
    assert "](curves.png)" in text


def test_the_card_names_model_and_prompts_of_the_hub_and_no_directory(tmp_path: Path) -> None:
    model = tiny.saved_model(tmp_path / "sft")
    config = PPOConfig(model=model, prompts="org/prompts", rewards=["org/reward"])
    (tmp_path / "policy").mkdir()
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 0, "reward": 1.0}\n')
    publish.write_card(tmp_path, config)
    data, text = _card(tmp_path)
    assert data["datasets"] == "org/prompts"
    assert "base_model" not in data
    assert "rewards: `org/reward`" in text


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("gpt2", True),
        ("org/model-1.5b", True),
        ("~/models", False),
        ("p.jsonlx", False),
        ("./sft", False),
        ("/runs/sft", False),
        ("runs/a/sft", False),
        ("a model", False),
        ("", False),
    ],
)
def test_a_name_is_the_hubs_if_it_has_its_form(name: str, is_one: bool) -> None:
    assert publish._on_the_hub(name) == (name if is_one else None)


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        ({"rewards": ["a.py:f", "b.py:g"]}, ["- rewards: `a.py:f`, `b.py:g`"]),
        ({"environment": "e.py:E"}, ["- environment: `e.py:E`"]),
        (
            {"reward_ensemble": ["m1", "m2"], "monitor_rewards": ["c.py:gold"]},
            ["- ensemble of reward models: `m1`, `m2`", "- watched, never trained on: `c.py:gold`"],
        ),
    ],
)
def test_the_card_says_what_paid_and_what_was_watched(
    options: dict[str, Any], lines: list[str], tmp_path: Path
) -> None:
    (tmp_path / "policy").mkdir()
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 0, "reward": 1.0}\n')
    publish.write_card(tmp_path, PPOConfig(model="m", prompts="org/prompts", **options))
    _, text = _card(tmp_path)
    data = text[text.index("## Data") : text.index("## Training")].strip().splitlines()
    assert data[2:] == ["- prompts: `org/prompts`", *lines]


def test_a_metric_that_is_not_there_or_not_finite_is_not_drawn(tmp_path: Path) -> None:
    lines = [{"iteration": i, "reward": float(i), "kl": float("nan")} for i in range(3)]
    draw_curves(lines, tmp_path / "some.png")
    draw_curves([{"iteration": 0, "reward": 1.0}], tmp_path / "one.png")
    with Image.open(tmp_path / "some.png") as two, Image.open(tmp_path / "one.png") as one:
        assert two.width == 2 * one.width


def test_a_card_that_fails_is_a_sentence(tmp_path: Path, monkeypatch) -> None:
    def full(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(publish, "draw_curves", full)
    printed = io.StringIO()
    make_trainer(tmp_path, console=Console(file=printed, width=300)).train()
    assert "policy/README.md could not be written: disk full" in printed.getvalue()
