"""`fastppo generate`."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import architectures
import pytest
import tiny
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from fastppo import cli
from fastppo.data.datasets import DataError
from fastppo.generate import Completions, GenerateConfig, generate, show
from fastppo.rewards.reward import RewardError


def _policy(directory: Path, name: str, *, stops: bool = True) -> str:
    """Save a model that writes one word, then EOS or the same word forever."""
    model = tiny.model()
    word = tiny.VOCABULARY[name]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.zero_()
        # The hidden state is the normed embedding of the last token.
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
    """A file of rewards."""
    (tmp_path / "mine.py").write_text(
        "def wanted_word(prompts, completions, wanted):\n"
        "    return [c.split().count(w) for c, w in zip(completions, wanted)]\n"
        "def length(prompts, completions):\n"
        "    return [len(c.split()) for c in completions]\n"
        "def broken(prompts, completions):\n"
        "    return [float('nan')] * len(completions)\n"
    )
    return str(tmp_path / "mine.py")


def test_each_policy_generates_and_is_scored(two, reward, tmp_path) -> None:
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


def test_the_table_shows_completions_and_means(two, reward, tmp_path) -> None:
    config = _config(tmp_path, models=two, rewards=[f"{reward}:length"])
    text = _shown(*generate(config), config)
    for shown in ("before/policy", "after/policy", "w1 w2", "w20 w20 w20 w20", "length 4.000"):
        assert shown in text, shown
    assert "(cut off)" in text
    assert "ended by EOS" in text
    assert "1 completion each" in text
    alone = _config(tmp_path, models=two[:1], num_samples=2)
    assert re.search(r"\n2 completions *\n", _shown(*generate(alone), alone))


def test_control_characters_are_escaped(tmp_path) -> None:
    completions = [
        Completions("a", ["\x1b[31mred\x07 你好\u3000世界 می\u200cخواهم"], [[5, 1]], ["stop"])
    ]
    text = _shown([{"prompt": "\x1b[2Jw1"}], completions, _config(tmp_path, models=["a"]))
    assert "\\x1b[31mred\\x07 你好\u3000世界 می\u200cخواهم" in text
    assert r"\x1b[2Jw1" in text
    assert "\x07" not in text


def test_max_turns_without_an_environment_are_mentioned(two, tmp_path, capsys) -> None:
    flags = ["generate", "--models", two[0], "--prompt", "w1", "--max_turns", "2"]
    assert cli.main([*flags, "--device", "cpu", "--max_new_tokens", "2"]) == 0
    assert "max_turns, which needs environment" in capsys.readouterr().err


def test_wrong_input_raises(two, reward, tmp_path) -> None:
    with pytest.raises(ValueError, match="prompt or prompts"):
        _config(tmp_path, models=two, prompts="p.jsonl")
    with pytest.raises(ValueError, match="prompts"):
        generate(_config(tmp_path, models=two, prompt=None))
    with pytest.raises(DataError, match=r"before/policy: .*row 1: .* 2 tokens"):
        generate(_config(tmp_path, models=two, max_new_tokens=63))
    with pytest.raises(RewardError, match=r"'broken' .*nan"):
        generate(_config(tmp_path, models=two, rewards=[f"{reward}:broken"]))


def _greedy(model: Any, prompt: list[int], length: int) -> list[int]:
    """Return the likeliest tokens, each from a forward pass over the whole sequence."""
    ids = torch.tensor([prompt])
    for _ in range(length):
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits
        ids = torch.cat([ids, logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    return ids[0, len(prompt) :].tolist()


@pytest.mark.parametrize("model_type", ["rwkv", "xlstm", "jamba"])
def test_completions_are_the_models_own_where_padding_or_cache_are_faulty(
    model_type: str, tmp_path: Path
) -> None:
    words = tiny.tokenizer()
    architectures.model(model_type).save_pretrained(tmp_path / "policy")
    words.save_pretrained(tmp_path / "policy")
    prompts = [" ".join(f"w{(3 * i + j) % 40}" for j in range(1 + 2 * i)) for i in range(3)]
    (tmp_path / "p.jsonl").write_text("\n".join(json.dumps({"prompt": p}) for p in prompts))
    config = _config(
        tmp_path,
        models=[str(tmp_path / "policy")],
        prompt=None,
        prompts=str(tmp_path / "p.jsonl"),
        stop_token_ids=[],
    )
    _, (completions,) = generate(config)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "policy").eval()
    assert completions.token_ids == [
        _greedy(loaded, words(prompt)["input_ids"], 4) for prompt in prompts
    ]


@pytest.mark.parametrize("model_type", ["cpmant", "modernbert-decoder"])
def test_a_model_whose_completions_would_be_wrong_is_refused(
    model_type: str, tmp_path: Path
) -> None:
    architectures.model(model_type).save_pretrained(tmp_path / "policy")
    tiny.tokenizer().save_pretrained(tmp_path / "policy")
    with pytest.raises(ValueError, match=r"CpmAnt|ModernBert"):
        generate(_config(tmp_path, models=[str(tmp_path / "policy")]))


ENVIRONMENT = """
class Asks:
    def reset(self, prompt, wanted):
        self.wanted, self.turns = wanted, 0

    def step(self, text):
        self.turns += 1
        return "w1 w2", 0.5 * (text.strip() == self.wanted), self.turns == 2
"""


def test_turns_are_shown_with_role_text_and_reward(tmp_path: Path, capsys) -> None:
    (tmp_path / "game.py").write_text(ENVIRONMENT)
    (tmp_path / "p.jsonl").write_text('{"prompt": "w1", "wanted": "w10"}\n')
    model = _policy(tmp_path / "policy", "w10", stops=False)
    flags = f"generate --models {model} --device cpu --temperature 0 --max_new_tokens 4".split()
    flags += f"--environment {tmp_path}/game.py:Asks --stop_strings w10".split()
    flags += f"--prompts {tmp_path}/p.jsonl".split()
    assert cli.main(flags) == 0
    lines = [
        " ".join(re.findall(r"[^│┃\s]+", line)) for line in capsys.readouterr().out.split("\n")
    ]
    episode = ["prompt w1", "policy w10 +0.500", "environment w1 w2", "policy w10 +0.500"]
    begin = lines.index(episode[0])
    assert lines[begin : begin + 5] == [*episode, "environment 1.000"]
    assert "turns 2.0" in lines
    (tmp_path / "p.jsonl").write_text('{"prompt": "w1"}\n')
    assert cli.main(flags) == 1
    assert "wanted" in capsys.readouterr().err
