"""`fastppo generate`: what each policy wrote, beside the others, with its rewards."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from rich.console import Console

from fastppo.data.rows import DataError
from fastppo.generate import Completions, GenerateConfig, generate, show, win_rate, write
from fastppo.rewards.reward import RewardError


def _policy(directory: Path, name: str, *, stops: bool = True) -> str:
    """A model that writes one word after anything, then EOS or the word for ever."""
    model = tiny.model()
    word = tiny.VOCABULARY[name]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.zero_()
        # The hidden state is the last token's own embedding, normed: the head can tell words apart.
        model.model.embed_tokens.weight[:, 0] = 1.0
        model.model.embed_tokens.weight[word] = torch.eye(32)[1]
        model.lm_head.weight[word, 0] = 10.0
        model.lm_head.weight[1 if stops else word, 1] = 10.0
    model.save_pretrained(directory)
    tiny.tokenizer(chat=True).save_pretrained(directory)
    return str(directory)


def _config(tmp_path: Path, **more: Any) -> GenerateConfig:
    options = {"prompt": "w1 w2", "max_new_tokens": 4, "device": "cpu", "temperature": 0}
    return GenerateConfig(**{**options, **more})


def _shown(rows: Any, completions: Any, config: GenerateConfig, width: int = 100) -> str:
    printed = io.StringIO()
    show(rows, completions, config, Console(file=printed, width=width))
    return printed.getvalue()


@pytest.fixture
def two(tmp_path: Path) -> list[str]:
    return [
        _policy(tmp_path / "before" / "policy", "w10"),
        _policy(tmp_path / "after" / "policy", "w20", stops=False),
    ]


@pytest.fixture
def reward(tmp_path: Path) -> str:
    """Says how often the wanted word is in the completion."""
    (tmp_path / "mine.py").write_text(
        "def wanted_word(prompts, completions, wanted):\n"
        "    return [c.split().count(w) for c, w in zip(completions, wanted)]\n"
        "def length(prompts, completions):\n"
        "    return [len(c.split()) for c in completions]\n"
        "def broken(prompts, completions):\n"
        "    return [float('nan')] * len(completions)\n"
    )
    return str(tmp_path / "mine.py")


def test_each_policy_writes_what_it_writes_and_gets_its_rewards(two, reward, tmp_path) -> None:
    rows = [{"prompt": "w1", "wanted": "w10"}, {"prompt": "w2 w3", "wanted": "w20"}]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = _config(
        tmp_path,
        models=two,
        prompt=None,
        prompts=str(tmp_path / "p.jsonl"),
        rewards=[f"{reward}:wanted_word", f"{reward}:length"],
    )
    prompts, (before, after) = generate(config)
    assert prompts == rows
    assert (before.name, after.name) == ("before/policy", "after/policy")
    assert before.texts == [" w10", " w10"]
    assert after.texts == [" w20 w20 w20 w20"] * 2
    assert before.finish_reasons == ["stop", "stop"]
    assert after.finish_reasons == ["length", "length"]
    assert before.token_ids == [[13, 1]] * 2
    assert after.token_ids == [[23] * 4] * 2
    assert before.rewards == {"wanted_word": [1, 0], "length": [1, 1]}
    assert after.rewards == {"wanted_word": [0, 4], "length": [4, 4]}


def test_the_table_shows_completions_means_and_wins(two, reward, tmp_path) -> None:
    config = _config(tmp_path, models=two, rewards=[f"{reward}:length"])
    text = _shown(*generate(config), config)
    for shown in ("before/policy", "after/policy", "w1 w2", "w20 w20 w20 w20", "length 4.000"):
        assert shown in text, shown
    assert "(cut off)" in text
    assert "length: wins against before/policy" in text
    assert "100%" in text
    assert "ended by EOS" in text


def test_escape_codes_that_a_model_writes_are_spelt_out_and_other_text_is_not(tmp_path) -> None:
    completions = [
        Completions("a", ["\x1b[31mred\x07 你好\u3000世界 می\u200cخواهم"], [[5, 1]], ["stop"])
    ]
    text = _shown([{"prompt": "\x1b[2Jw1"}], completions, _config(tmp_path, models=["a"]))
    assert "\\x1b[31mred\\x07 你好\u3000世界 می\u200cخواهم" in text
    assert r"\x1b[2Jw1" in text
    assert "\x07" not in text


def test_the_file_has_a_line_per_completion_with_the_columns_of_its_prompt(
    two, reward, tmp_path
) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "w1", "wanted": "w10"}\n{"prompt": "w2"}')
    config = _config(
        tmp_path,
        models=two,
        prompt=None,
        prompts=str(tmp_path / "p.jsonl"),
        num_samples=3,
        rewards=[f"{reward}:length"],
    )
    rows, completions = generate(config)
    write(tmp_path / "out" / "out.jsonl", rows, completions, config)
    lines = (tmp_path / "out" / "out.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert len(records) == 2 * 2 * 3
    assert records[0] == {
        "prompt": "w1",
        "wanted": "w10",
        "model": "before/policy",
        "sample": 0,
        "completion": " w10",
        "tokens": 2,
        "finish_reason": "stop",
        "rewards": {"length": 1.0},
    }
    assert [record["sample"] for record in records[:6]] == [0, 1, 2, 0, 1, 2]
    assert [record["prompt"] for record in records[:6]] == ["w1"] * 3 + ["w2"] * 3


def test_the_win_rate_meets_every_sample_with_every_other() -> None:
    # prompt 1: 2 beats 1 and 0, ties with 2; 0 ties with 0; prompt 2: all lost
    assert win_rate([2, 0, 0, 0], [1, 2, 5, 5], num_samples=2) == (1 + 0.5) / 8
    assert win_rate([1, 2], [1, 2], num_samples=1) == 0.5


def test_wrong_input_is_refused(two, reward, tmp_path) -> None:
    with pytest.raises(ValueError, match="expected prompt or prompts, got both"):
        _config(tmp_path, models=two, prompts="p.jsonl")
    with pytest.raises(ValueError, match="expected a prompt or a file of prompts"):
        generate(_config(tmp_path, models=two, prompt=None))
    with pytest.raises(DataError, match=r"before/policy: prompt, row 1: the prompt has 2 tokens"):
        generate(_config(tmp_path, models=two, max_new_tokens=63))
    with pytest.raises(RewardError, match="'broken' returned nan"):
        generate(_config(tmp_path, models=two, rewards=[f"{reward}:broken"]))


def test_a_stop_string_ends_a_completion(two, tmp_path) -> None:
    longest = _config(tmp_path, models=two[:1], temperature=0.0, max_new_tokens=12)
    plain = generate(longest)[1][0].token_ids[0]
    stopped = generate(
        _config(
            tmp_path,
            models=two[:1],
            temperature=0.0,
            max_new_tokens=12,
            stop_strings=[tiny.tokenizer().decode(plain[0])],
        )
    )[1][0]
    assert stopped.token_ids[0] == plain[:1]
    assert stopped.finish_reasons[0] == "stop"
