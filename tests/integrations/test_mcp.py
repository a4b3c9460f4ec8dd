"""Tools of a real MCP server, which the tests start."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
from environments import Scripted

from fastppo.data.prompts import Prompts
from fastppo.data.rows import DataError
from fastppo.ppo.config import PPOConfig
from fastppo.ppo.trainer import PPOTrainer
from fastppo.rewards.environment import Turns
from fastppo.rewards.loading import load_environment
from fastppo.rewards.reward import RewardError
from fastppo.rollout import Rollout, Sampling
from runs import records

pytest.importorskip("mcp", reason="the package mcp is not installed")

SERVER = Path(__file__).parents[1] / "mcp_server.py"
COMMAND = f"mcp:{sys.executable} {SERVER}"
EOS = 0
TEMPLATE = (
    "{% for t in tools or [] %}<{{ t['function']['name'] }}: {{ t['function']['description'] }}>"
    "{% endfor %}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def tokenizer() -> Any:
    tokenizer = tiny.byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture
def make() -> Any:
    term = load_environment(COMMAND)
    assert term is not None
    return term.function


def _play(player: Turns, turns: list[str], count: int = 1) -> tuple[Rollout, list[str]]:
    ids = [[*player.tokenizer(turn)["input_ids"], EOS] for turn in turns]
    engine = Scripted(ids, stop=(EOS,))
    prompts = Prompts([[{"role": "user", "content": "6 times 7?"}]] * count, [[1]] * count, {})
    sampling = Sampling(max_new_tokens=300, stop_token_ids=(EOS,))
    _, rollout = player.play(prompts, engine, sampling)
    return rollout, [player.tokenizer.decode(asked[0]) for asked in engine.asked]


def _call(name: str, arguments: str = "{}") -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def test_tools_of_a_server_are_described_called_and_answer(make: Any, tokenizer: Any) -> None:
    player = Turns(make, tokenizer, max_turns=3)
    assert not player.pays
    calls = _call("multiply", '{"a": 6, "b": 7}') + _call("multiply", '{"a": "six", "b": 7}')
    for _ in range(2):  # the second time the server is started anew
        rollout, read = _play(player, [calls, _call("fail"), "42"], count=3)
        assert "<multiply: Multiplies two numbers.>" in read[0]
        assert "<tool>42<eos>" in read[1]
        assert "unable to parse string as an integer" in read[1]
        assert "out of order" in read[2]
        assert rollout.calls == [["answered", "raised", "raised"]] * 3
        player.close()


def test_a_run_reads_the_tools_and_counts_their_calls(tokenizer: Any, tmp_path: Path) -> None:
    config = tiny.CONFIGS["llama"]()
    config.vocab_size = len(tokenizer)
    config.max_position_embeddings = 1024
    trainer = PPOTrainer(
        PPOConfig(
            environment=COMMAND,
            max_new_tokens=4,
            max_turns=2,
            rollout_batch_size=4,
            minibatches=1,
            iterations=1,
            checkpoint_interval=0,
            output_dir=str(tmp_path),
        ),
        model=tiny.model_of(config),
        tokenizer=tokenizer,
        prompts=[{"prompt": [{"role": "user", "content": "6 times 7?"}]}],
        rewards=[lambda prompts, completions: [float(len(text)) for text in completions]],
    )
    trainer.train()
    (line,) = records(trainer)
    assert line["tools/answered"] == 0.0


def test_a_server_that_is_gone_stops_the_run(make: Any, tokenizer: Any) -> None:
    player = Turns(make, tokenizer, max_turns=3)
    with pytest.raises(RewardError, match=r"the MCP server .*mcp_server\.py has ended"):
        _play(player, [_call("leave")])
    player.close()


@pytest.mark.parametrize(
    ("names", "says"),
    [("", "the MCP server has no tools"), ("_secret", "tool '_secret' has a name that is taken")],
)
def test_a_server_whose_tools_cannot_be_used_is_refused(names: str, says: str) -> None:
    with pytest.raises(DataError, match=says):
        load_environment(f"{COMMAND} --only {names}")


@pytest.mark.parametrize("command", ["no-such-program", f"{sys.executable} -c pass"])
def test_a_command_that_starts_no_server_is_a_sentence(command: str) -> None:
    with pytest.raises(DataError, match=f"^{command} does not start an MCP server: "):
        load_environment(f"mcp:{command}")


def test_a_command_that_says_something_else_is_a_sentence_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("fastppo.integrations.mcp.START_TIMEOUT", 2.0)
    (tmp_path / "talks.py").write_text(
        "import time\nfor _ in range(3):\n    print('Hello.', flush=True)\ntime.sleep(60)\n"
    )
    command = f"{sys.executable} {tmp_path / 'talks.py'}"
    with pytest.raises(DataError, match="start an MCP server: no list of its tools within 2 s"):
        load_environment(f"mcp:{command}")
    (record,) = caplog.records
    assert record.message.startswith(f"{command} writes to stdout what is no message")
    assert record.exc_info is None
    with pytest.raises(DataError, match="expected mcp:COMMAND, got no command"):
        load_environment("mcp:")
