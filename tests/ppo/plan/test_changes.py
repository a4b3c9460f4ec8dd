"""What a plan proposes if a run does not fit, and the prompts that it reads."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import tiny
import tiny_vision
from phase_peaks import options

from fastppo import cli
from fastppo.data.prompts import encode_prompts
from fastppo.ppo.plan.changes import SHOWN, helpful_changes
from fastppo.ppo.plan.plan import make_plan
from fastppo.ppo.plan.prompts import ASSUMED, prompt_length


def test_the_changes_that_save_the_most_come_first(tmp_path: Path) -> None:
    config = options(tmp_path, value_model="critic")
    plan = make_plan(config, 8, memory=1e-6)
    changes = helpful_changes(plan)
    assert 0 < len(changes) <= SHOWN
    needs = [float(re.findall(r"needs ([\d.]+) [MG]B", change)[0]) for change in changes]
    assert needs == sorted(needs)
    name, value = re.findall(r"^--(\w+) (\S+) needs", changes[0])[0]
    changed = make_plan(options(tmp_path, **{"value_model": "critic", name: value}), 8)
    unit = 1e6 if "MB" in changes[0] else 1e9
    assert changed.peak.total / unit == pytest.approx(needs[0], rel=0.01)


def test_prompts_are_read_for_their_length(tmp_path: Path, capsys) -> None:
    config = options(tmp_path)
    tiny.tokenizer().save_pretrained(config.model)
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"prompt": " ".join(["w1"] * count)} for count in (3, 9, 5)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert prompt_length(options(tmp_path, prompts=str(prompts))).tokens == 9
    assert prompt_length(options(tmp_path, prompts="")).tokens == ASSUMED
    absent = prompt_length(options(tmp_path, prompts=str(tmp_path / "absent.jsonl")))
    assert absent.tokens == ASSUMED
    assert "absent.jsonl" in absent.source
    flags = ["--model", config.model, "--prompts", str(prompts), "--max_new_tokens", "4"]
    assert cli.main(["plan", *flags, "--memory", "0.000001"]) == 0
    said = capsys.readouterr().out
    assert " sequences of 9 + 4 tokens" in said
    assert " less" in said
    flags[3] = str(tmp_path / "absent.jsonl")
    flags[5] = "2000"  # with the assumed prompts, longer than the context
    assert cli.main(["plan", *flags]) != 0
    assert "absent.jsonl" in capsys.readouterr().err, "why the length is assumed"


def test_image_tokens_are_counted(tmp_path: Path) -> None:
    model = tiny_vision.saved_model(tmp_path / "vision", "qwen2_5_vl")
    tiny_vision.image(40, 24).save(tmp_path / "image.png")
    placeholder = tiny_vision.placeholder("qwen2_5_vl")
    row = {"prompt": f"w1 {placeholder} w2", "image": str(tmp_path / "image.png")}
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps(row) + "\n")
    found = prompt_length(options(tmp_path, model=model, prompts=str(prompts)))
    processor = tiny_vision.processor("qwen2_5_vl")
    (ids,) = encode_prompts(
        [row], processor.tokenizer, max_prompt_tokens=100, processor=processor
    ).token_ids
    assert found.tokens == len(ids) > len(processor.tokenizer(row["prompt"])["input_ids"])
