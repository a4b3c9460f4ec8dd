"""`fastppo demo` on the CPU."""

from __future__ import annotations

import io
import json
import signal
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from fastppo.demo.run import run_demo
from fastppo.stopped import Stopped

PROMPT = "tell me about the red fox ."


def test_a_stopped_demo_keeps_the_earlier_run_and_starts_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def stopped(*arguments: Any, **options: Any) -> None:
        raise Stopped(signal.SIGTERM, " after 3 of 9 steps; `--resume true` continues from there")

    monkeypatch.setattr("fastppo.demo.run.supervised_stages", stopped)
    (tmp_path / "ppo").mkdir()
    printed = io.StringIO()
    with pytest.raises(Stopped, match=r"SIGTERM; `fastppo demo` starts over$"):
        run_demo(tmp_path, console=Console(file=printed, width=200))
    assert (tmp_path / "ppo").is_dir()
    assert "an earlier demo" in printed.getvalue()


@pytest.mark.slow
def test_the_demo_closes_half_of_the_gap_in_gold_reward(tmp_path: Path) -> None:
    printed = io.StringIO()
    result = run_demo(tmp_path, seed=0, device="cpu", console=Console(file=printed, width=100))
    before, after = (result[when]["monitor/gold_reward"] for when in ("before", "after"))
    assert after - before >= 0.5 * (1 - before)
    assert result["after"]["reward"] > result["before"]["reward"]
    assert result["before"]["kl"] == pytest.approx(0, abs=1e-3)
    assert 0 < result["after"]["kl"] < 20
    assert result["reward_model"]["accuracy"] > 0.7

    text = printed.getvalue()
    for shown in ("reward (proxy", "gold reward", "KL", "entropy", "response length"):
        assert shown in text
    assert text.count("before  ") == 3
    for path in ("ppo/report.html", "ppo/policy"):
        assert (tmp_path / path).exists()
    for name in ("demonstrations", "pairs", "prompts", "held_out"):
        first = (tmp_path / "data" / f"{name}.jsonl").read_text().splitlines()[0]
        assert "prompt" in json.loads(first)

    # transformers loads the model of each stage.
    AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward_model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "ppo" / "policy")
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "ppo" / "policy")
    output = policy.generate(
        **tokenizer(PROMPT, return_tensors="pt"), max_new_tokens=40, do_sample=False
    )
    completion = tokenizer.decode(output[0, len(PROMPT.split()) :], skip_special_tokens=True)
    assert "fox" in completion
