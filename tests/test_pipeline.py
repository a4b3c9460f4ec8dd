"""The three stages from raw JSONL files through the command line, each of which learns something.

The language has 40 words. Demonstrations answer a prompt of two words with three: w7, w8 or another
word, equally often. Labellers like w7 and dislike w8. So SFT learns the form, the reward model the
taste, and PPO moves the policy to w7.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from fastppo import cli
from fastppo.run.log import read_jsonl


def _answer(draw: random.Random) -> str:
    words = [draw.choice(["w7", "w8", f"w{draw.randrange(20, 24)}"]) for _ in range(3)]
    return "".join(f" {word}" for word in words)


def _liking(completion: str) -> int:
    words = completion.split()
    return words.count("w7") - words.count("w8")


def _write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def _data(directory: Path) -> dict[str, str]:
    """Raw files: demonstrations, pairs and ranked lists in one file, prompts."""
    draw = random.Random(0)
    prompts = [f"w{i} w{j}" for i in range(6) for j in range(10, 20)]
    sft = [{"prompt": draw.choice(prompts), "completion": _answer(draw)} for _ in range(480)]
    comparisons: list[dict[str, Any]] = []
    while len(comparisons) < 240:
        answers = sorted({_answer(draw) for _ in range(3)}, key=_liking, reverse=True)
        if len({_liking(answer) for answer in answers}) == 3:
            comparisons.append({"prompt": draw.choice(prompts), "completions": answers})
    for row in comparisons[::2]:  # half of them as pairs
        best, *_, worst = row.pop("completions")
        row |= {"chosen": best, "rejected": worst}
    return {
        "sft": _write(directory / "demonstrations.jsonl", sft),
        "comparisons": _write(directory / "comparisons.jsonl", comparisons),
        "prompts": _write(directory / "prompts.jsonl", [{"prompt": p} for p in prompts]),
    }


def _run(command: str, **options: Any) -> None:
    flags = [text for name, value in options.items() for text in (f"--{name}", *_words(value))]
    assert cli.main([command, *flags]) == 0, command


def _words(value: Any) -> list[str]:
    return [str(word) for word in value] if isinstance(value, list) else [str(value)]


@pytest.mark.slow
def test_three_stages_from_raw_files(tmp_path: Path) -> None:
    data = _data(tmp_path)
    torch.manual_seed(0)
    base = tmp_path / "base"
    AutoModelForCausalLM.from_config(tiny.CONFIGS["llama"]()).save_pretrained(base)
    tiny.tokenizer().save_pretrained(base)
    common = {"device": "cpu", "batch_size": 16, "gradient_accumulation": 1, "seed": 0}

    sft, rm, ppo = tmp_path / "sft", tmp_path / "rm", tmp_path / "ppo"
    _run(
        "sft",
        model=base,
        data=data["sft"],
        output_dir=sft,
        learning_rate=1e-2,
        epochs=3,
        eval_share=0.1,
        **common,
    )
    losses = [r["eval_loss"] for r in read_jsonl(sft / "metrics.jsonl") if "eval_loss" in r]
    assert losses[0] > 3.5  # log 43 = 3.76: nothing known
    # Each word, w7, w8 or one of four, holds log 3 + ⅓ log 4 = 1.56 nats, and the EOS behind the
    # three none: at best 1.17 per token.
    assert losses[-1] < 1.35

    _run(
        "reward",
        model=sft,
        data=data["comparisons"],
        output_dir=rm,
        learning_rate=3e-3,
        epochs=5,
        **common,
    )
    evaluations = [r for r in read_jsonl(rm / "metrics.jsonl") if "eval_accuracy" in r]
    assert evaluations[-1]["eval_accuracy"] > 0.8
    config = AutoModelForSequenceClassification.from_pretrained(rm).config
    assert config.num_labels == 1

    (tmp_path / "taste.py").write_text(
        "def liking(prompts, completions, **columns):\n"
        "    words = [c.split() for c in completions]\n"
        "    return [w.count('w7') - w.count('w8') for w in words]\n"
    )
    liking = f"{tmp_path / 'taste.py'}:liking"
    _run(
        "train",
        model=sft,
        prompts=data["prompts"],
        rewards=rm,
        monitor_rewards=liking,
        output_dir=ppo,
        max_new_tokens=6,
        rollout_batch_size=64,
        microbatch_size=64,
        iterations=12,
        ppo_epochs=2,
        minibatches=2,
        learning_rate=3e-3,
        kl_coef=0.02,
        checkpoint_interval=0,
        device="cpu",
    )
    records = read_jsonl(ppo / "metrics.jsonl")
    # The SFT policy likes w7 as much as w8, within the noise of 64 samples.
    assert abs(records[0]["monitor/liking"]) < 0.6
    assert records[-1]["reward"] > records[0]["reward"] + 1
    assert records[-1]["monitor/liking"] > 1.5

    _run(
        "generate",
        models=[sft, ppo / "policy"],
        prompts=data["prompts"],
        rewards=[rm, liking],
        num_samples=4,
        max_new_tokens=6,
        output=tmp_path / "samples.jsonl",
        device="cpu",
    )
    samples = read_jsonl(tmp_path / "samples.jsonl")
    means = {
        name: sum(s["rewards"]["liking"] for s in samples if s["model"] == name) / 32
        for name in ("sft", "policy")
    }
    assert len(samples) == 2 * 32
    assert means["policy"] > means["sft"] + 1
