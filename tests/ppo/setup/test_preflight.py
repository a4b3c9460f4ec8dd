"""Preflight reads rows, configs, tokenizers and functions, and refuses what does not fit."""

from __future__ import annotations

import json
import logging
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_vision
from rich.console import Console

from fastppo.ppo.options.config import PPOConfig
from fastppo.ppo.setup.dry_run import FirstTurn
from fastppo.ppo.setup.preflight import Given, RunInputs, check_packages, preflight
from fastppo.ppo.setup.summary import show
from fastppo.rewards.reward import RewardError

CODE = """
def right(prompts, completions, wanted):
    return [float(word in text) for word, text in zip(wanted, completions)]

def of_one(completion):
    return 1.0

def needs_more(prompts, completions, price):
    return [0.0] * len(prompts)

def returns_one(prompts, completions):
    return 1.0

class Game:
    def reset(self, prompt, price): ...
    def step(self, text): ...

class Gym:
    def reset(self, wanted): ...
    def step(self, text): ...

class NoStep:
    def reset(self, prompt): ...

class Shop:
    def reset(self, price): ...
    def buy(self) -> None:
        'Buys.'

class FiveValues:
    def reset(self, prompt, wanted):
        return prompt + wanted
    def step(self, text):
        return text, 0.0, False, False, {}

class Raises(FiveValues):
    def step(self, text):
        return {}[text]

class Played(FiveValues):
    played = []
    def step(self, text):
        self.played.append(text)
        return "w2", 0.0, False
    def close(self):
        self.played.append("closed")

class Replaces(Played):
    def reset(self, prompt):
        return "w3"

class Keeps(Played):
    def reset(self, prompt):
        return None

class CannotClose(FiveValues):
    def step(self, text):
        return "w2", 0.0, True
    def close(self):
        raise OSError("stuck")
"""
CHAT = {"prompt": [{"role": "user", "content": "w1"}], "wanted": "w1"}
ROWS = {
    "odd.jsonl": [tiny.PROMPTS[0], {"prompt": 5, "wanted": "w1"}],
    "chats.jsonl": [tiny.PROMPTS[0], CHAT],
    "long.jsonl": [{"prompt": "w1 " * 57, "wanted": "w1"}],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, rows and functions."""
    folder = tmp_path_factory.mktemp("preflight")
    tiny.saved_model(folder / "sft")
    tiny.saved_model(folder / "chat", chat=True)
    tiny.saved_reward_model(folder / "rm")
    tiny.saved_reward_model(folder / "labels", labels=3)

    def copy(source: str, name: str, without: str = "", **values: object) -> None:
        shutil.copytree(folder / source, folder / name, ignore=shutil.ignore_patterns(without))
        config = json.loads((folder / name / "config.json").read_text())
        (folder / name / "config.json").write_text(json.dumps(config | values))

    copy("sft", "no-tokenizer", without="tokenizer*")
    copy("sft", "translator", is_encoder_decoder=True, model_type="t5")
    copy("sft", "short", max_position_embeddings=8)
    copy("sft", "damaged")
    (folder / "damaged" / "config.json").write_text("{")
    copy("rm", "untold", without="chat_template*")
    for name, rows in {"prompts.jsonl": tiny.PROMPTS, **ROWS}.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "code.py").write_text(CODE)
    return folder


def _preflight(folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> RunInputs:
    monkeypatch.chdir(folder)
    chosen: dict[str, Any] = {
        "model": "sft",
        "prompts": "prompts.jsonl",
        "rewards": ["code.py:right"],
        "max_new_tokens": 8,
    }
    return preflight(PPOConfig(**chosen | options), Given())


def test_inputs_are_read_without_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "sft" / "model.safetensors").write_bytes(b"")  # cannot be loaded
    inputs = _preflight(folder, monkeypatch, monitor_rewards=["rm"], eval_prompts="prompts.jsonl")
    assert inputs.context == tiny.CONTEXT
    for prompts in (inputs.prompts, inputs.held_out):
        assert prompts is not None
        assert prompts.token_ids[0] == tiny.tokenizer()(tiny.PROMPTS[0]["prompt"])["input_ids"]
        assert list(prompts.columns) == ["wanted"]
    assert [term.name for term in inputs.rewards.all] == ["right", "rm"]
    assert inputs.rewards.all[1].function.model is None, "its weights are loaded later"
    assert inputs.fingerprints.keys() == {"tokenizer", "prompts", "rewards/right"}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"prompt_column": "question"}, "prompts.jsonl.*question"),
        ({"prompts": "odd.jsonl"}, "odd.jsonl, row 2"),
        ({"eval_prompts": "long.jsonl"}, "long.jsonl, row 1.*57.*max_new_tokens"),
        ({"prompts": "chats.jsonl"}, "chats.jsonl, row 2"),
        (
            {"model": "chat", "prompts": "chats.jsonl", "monitor_rewards": ["untold"]},
            "reward untold: chats.jsonl, row 2",
        ),
        ({"model": "no-tokenizer"}, "model no-tokenizer"),
        ({"model": "rm"}, "model rm .*LlamaForSequenceClassification"),
        ({"model": "translator"}, "model translator .*t5"),
        ({"model": "damaged"}, "model damaged"),
        ({"model": "gtp2"}, "model gtp2"),
        ({"reference_model": "short"}, "max_new_tokens=8 .*context of 8"),
        ({"rewards": ["sft"]}, "reward sft .*LlamaForCausalLM"),
        ({"rewards": ["labels"]}, "reward labels .*3 labels"),
        ({"rewards": ["code.py:wright"]}, "reward code.py:wright: .*right, of_one"),
        ({"rewards": ["code.py:of_one"]}, r"reward of_one takes \(completion\)"),
        ({"rewards": ["code.py:needs_more"]}, "reward needs_more .*'price'.*prompts.jsonl"),
        ({"environment": "code.py:Game"}, r"environment: reset takes \(self, prompt, price\)"),
        (
            {"environment": "code.py:Gym"},
            r"environment: reset takes \(self, wanted\)",
        ),
        ({"environment": "code.py:NoStep"}, "environment: NoStep has no method step"),
        ({"environment": "code.py:Shop"}, r"environment: reset takes \(self, price\)"),
        ({"environment": "code.py:right"}, r"environment: right takes"),
        ({"optimizer": "torch.optim:Adamw"}, "optimizer torch.optim:Adamw"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(
    options: dict[str, Any], says: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=says):
        _preflight(folder, monkeypatch, **options)


def test_a_reward_is_called_once_before_the_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RewardError, match=r"reward 'returns_one' .*made-up"):
        _preflight(folder, monkeypatch, rewards=["code.py:returns_one"], output_dir="refused")
    assert (folder / "refused" / "failed_reward.json").exists()


@pytest.mark.parametrize("option", ["rewards", "reward_ensemble"])
def test_a_dead_reward_server_is_refused(
    option: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/judge"
    with pytest.raises(RewardError, match=f"'judge'.*{url}"):
        _preflight(folder, monkeypatch, **{"rewards": [], option: [url, url]})


def test_a_template_that_only_the_processor_reads_renders_prompts_of_text(tmp_path: Path) -> None:
    """It takes parts alone, and is in a file of older checkpoints."""
    model = Path(tiny_vision.saved_model(tmp_path / "model", "smolvlm"))
    template = "{% for m in messages %}{% for part in m['content'] %}{{ part['text'] }}"
    (model / "chat_template.jinja").unlink()
    legacy = {"chat_template": template + " w0{% endfor %}{% endfor %}"}
    (model / "chat_template.json").write_text(json.dumps(legacy))
    config = PPOConfig(**tiny.options(tmp_path, model=str(model)))
    rows = [{"prompt": [{"role": "user", "content": "w1 w2"}]}]
    inputs = preflight(config, Given(prompts=rows, rewards=[tiny.every_other]))
    assert inputs.prompts is not None
    assert inputs.prompts.token_ids == [tiny.tokenizer()("w1 w2 w0")["input_ids"]]


def test_variables_of_the_chat_template_reach_prompts_and_the_saved_tokenizer(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "chat.jsonl").write_text(json.dumps(CHAT) + "\n")
    template = (folder / "chat" / "chat_template.jinja").read_text()
    (folder / "chat" / "chat_template.jinja").write_text(template + " {{ word }}")
    chat = {"model": "chat", "prompts": "chat.jsonl"}
    plain, chosen = (
        _preflight(folder, monkeypatch, **chat, chat_template_kwargs=variables)
        for variables in (None, {"word": "w9"})
    )
    assert plain.prompts is not None
    assert chosen.prompts is not None
    (w9,) = tiny.tokenizer()("w9")["input_ids"]
    assert chosen.prompts.token_ids[0] == [*plain.prompts.token_ids[0], w9]
    assert chosen.fingerprints["tokenizer"] != plain.fingerprints["tokenizer"]
    with pytest.raises(ValueError, match="the chat template does not read 'enable_thinking'"):
        _preflight(folder, monkeypatch, **chat, chat_template_kwargs={"enable_thinking": False})


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("FiveValues", r"returned .* in step; expected \(observation, reward, done\)"),
        ("Raises", r"raised KeyError\(''\) in step .*code\.py, line \d+"),
    ],
)
def test_an_environment_that_fails_a_made_up_turn_is_refused(
    name: str, says: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    says += ".*made-up response, before the models are loaded"
    with pytest.raises(RewardError, match=f"environment '{name}' {says}"):
        _preflight(folder, monkeypatch, environment=f"code.py:{name}", max_turns=2)


def test_an_environment_plays_one_turn_and_is_closed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = _preflight(folder, monkeypatch, environment="code.py:Played", max_turns=2)
    term = inputs.rewards.environment
    assert term is not None
    assert term.function.make.played == ["", "closed"]  # the tiny tokenizer has none of its words
    assert inputs.first_turn == FirstTurn(tokens=2, text="w0 <unk>", answer="w2", has_prompt=True)


def test_check_shows_the_first_turn_of_an_episode(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {"environment": "code.py:Played", "max_turns": 2}
    inputs = _preflight(folder, monkeypatch, stop_strings=["!"], **options)
    config = PPOConfig(model="sft", stop_strings=["!"], max_new_tokens=8, **options)
    show(config, inputs, Console(width=200))
    shown = capsys.readouterr().out
    assert "ends at a stop token or '!'; cut off at 8 tokens, it ends the episode" in shown
    assert "begins with 2 tokens: 'w0 <unk>'" in shown
    assert "'A made-up response' is answered by 'w2'" in shown


def test_messages_are_left_to_the_environments_of_the_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"environment": "code.py:CannotClose", "max_turns": 2}
    with caplog.at_level(logging.INFO, "fastppo"):
        inputs = _preflight(folder, monkeypatch, **options)
        assert inputs.first_turn is not None, "the environment was tried"
        assert caplog.messages == []
        assert logging.getLogger("fastppo").level == logging.INFO


@pytest.mark.parametrize(("name", "replaces"), [("Replaces", True), ("Keeps", False)])
def test_check_warns_if_an_environment_replaces_the_prompts(
    name: str, replaces: bool, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    options: dict[str, Any] = {"environment": f"code.py:{name}", "max_turns": 2}
    config = PPOConfig(model="sft", prompts="prompts.jsonl", max_new_tokens=8, **options)
    show(config, _preflight(folder, monkeypatch, **options), Console(width=200))
    says = "the policy does not see the prompts of prompts.jsonl"
    assert (says in capsys.readouterr().out) == replaces


def test_a_prompt_of_content_parts_is_found_in_its_episode(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = [{"type": "text", "text": "w1"}]
    chat = [{"role": "system", "content": "w5"}, {"role": "user", "content": content}]
    (folder / "parts.jsonl").write_text(json.dumps({"prompt": chat, "wanted": "w2"}))
    options = {"model": "chat", "prompts": "parts.jsonl", "environment": "code.py:Keeps"}
    inputs = _preflight(folder, monkeypatch, max_turns=2, **options)
    assert inputs.first_turn is not None
    assert inputs.first_turn.has_prompt


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, ""),
        ({"value_head": "gradient"}, "the value function that advantage=gae uses is not trained"),
        ({"advantage": "rloo", "samples_per_prompt": 2}, ""),
    ],
    ids=["closed form", "gradient", "without values"],
)
def test_check_warns_of_values_without_a_loss(
    options: dict[str, Any], says: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    config = PPOConfig(model="sft", vf_coef=0, **options)
    show(config, _preflight(folder, monkeypatch), Console(width=200))
    shown = capsys.readouterr().out
    assert says in shown
    assert ("GRPO" in shown) == bool(says)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"rollout=vllm .*pip install vllm"):
        check_packages(PPOConfig(rollout="vllm"))
