"""The model card names model and rewards, and has the curves and the options of the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard

from fastppo.run.report.card import write_card


def card_of(run: Path, config: dict[str, object], iterations: int | None = None) -> ModelCard:
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    (run / "policy").mkdir(exist_ok=True)
    write_card(run, run / "policy", iterations=iterations)
    return ModelCard.load(run / "policy" / "README.md")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    lines = [{"iteration": i, "reward": i / 10, "kl": 0.5, "entropy": 2.0} for i in range(40)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    return tmp_path


def test_a_card_has_metadata_of_the_hub(run: Path) -> None:
    card = card_of(run, {"model": "owner/base", "rewards": ["/home/me/reward.py:brief"]})
    assert card.data.base_model == "owner/base"
    assert card.data.library_name == "transformers"
    assert card.data.pipeline_tag == "text-generation"
    assert "- **Reward:** `reward.py:brief`\n" in card.text
    assert "`owner/base`, trained with PPO" in card.text


def test_a_card_of_a_local_model_names_no_base_model_and_no_folder(run: Path) -> None:
    (run / "sft").mkdir()
    card = card_of(run, {"model": str(run / "sft"), "output_dir": str(run), "seed": 3})
    assert card.data.base_model is None
    assert "`sft`, trained with PPO" in card.text
    assert str(run) not in card.content
    assert "seed: 3\n" in card.text


def test_the_curves_end_with_the_policy(run: Path) -> None:
    """At most twelve rows, from the first iteration to the policy's."""
    rows = [row for row in card_of(run, {}, 30).text.splitlines() if row.startswith("| ")]
    assert rows[0] == "| iteration | reward | KL, nats | entropy, nats |"
    assert rows[2] == "| 1 | 0 | 0.5 | 2 |"
    assert rows[-1] == "| 30 | 2.9 | 0.5 | 2 |"
    assert len(rows) == 14


def test_the_curves_show_the_iterations_with_an_evaluation(run: Path) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines[0] |= {"before/reward": 0.25, "before/reward_error": 0.1}
    for line in lines[9::10]:
        line |= {"eval/reward": 0.75, "eval/reward_error": 0.1, "eval/response_length": 3.0}
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    rows = [row for row in card_of(run, {}).text.splitlines() if row.startswith("| ")]
    assert rows[0] == "| iteration | reward | held-out reward | KL, nats | entropy, nats |"
    assert rows[2:] == [
        "| 0 |  | 0.25 |  |  |",
        "| 10 | 0.9 | 0.75 | 0.5 | 2 |",
        "| 20 | 1.9 | 0.75 | 0.5 | 2 |",
        "| 30 | 2.9 | 0.75 | 0.5 | 2 |",
        "| 40 | 3.9 | 0.75 | 0.5 | 2 |",
    ]
