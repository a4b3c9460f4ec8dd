"""Tools of an MCP server."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
from environments import Scripted

from fastppo.data.datasets import DataError
from fastppo.data.prompts import Prompts
from fastppo.environments.loading import load_environment
from fastppo.environments.turns import Turns
from fastppo.rewards.reward import RewardError
from fastppo.rollout import Rollout, Sampling

pytest.importorskip("mcp", reason="the package mcp is not installed")

SERVER = Path(__file__).parents[1] / "helpers" / "mcp_server.py"
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


def _run(episode_runner: Turns, turns: list[str], count: int = 1) -> tuple[Rollout, list[str]]:
    ids = [[*episode_runner.tokenizer(turn)["input_ids"], EOS] for turn in turns]
    engine = Scripted(ids, stop=(EOS,))
    prompts = Prompts([[{"role": "user", "content": "6 times 7?"}]] * count, [[1]] * count, {})
    sampling = Sampling(max_new_tokens=300, stop_token_ids=(EOS,))
    _, rollout = episode_runner.run(prompts, engine, sampling)
    return rollout, [episode_runner.tokenizer.decode(asked[0]) for asked in engine.asked]


def _call(name: str, arguments: str = "{}") -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def test_tools_are_described_and_called(make: Any, tokenizer: Any) -> None:
    episode_runner = Turns(make, tokenizer, max_turns=3)
    assert not episode_runner.has_rewards
    calls = _call("multiply", '{"a": 6, "b": 7}') + _call("multiply", '{"a": "six", "b": 7}')
    for _ in range(2):  # the second time the server starts again
        rollout, read = _run(episode_runner, [calls, _call("fail"), "42"], count=3)
        assert "<multiply: Multiplies two numbers.>" in read[0]
        assert "<tool>42<eos>" in read[1]
        assert "unable to parse string as an integer" in read[1]
        assert "out of order" in read[2]
        assert rollout.calls == [["answered", "raised", "raised"]] * 3
        episode_runner.close()


def test_a_server_that_ends_stops_the_run(make: Any, tokenizer: Any) -> None:
    episode_runner = Turns(make, tokenizer, max_turns=3)
    with pytest.raises(RewardError, match=r"the MCP server .*mcp_server\.py has ended"):
        _run(episode_runner, [_call("leave")])
    episode_runner.close()


@pytest.mark.parametrize(
    ("names", "says"),
    [("", "the MCP server has no tools"), ("_secret", "tool '_secret' has a reserved name")],
)
def test_a_server_without_usable_tools_is_refused_and_stopped(
    names: str, says: str, tmp_path: Path
) -> None:
    server = f"{sys.executable} {SERVER} --only {names}"
    with pytest.raises(DataError, match=says):
        load_environment(f"mcp:{_with_process_id(server, tmp_path)}")
    _has_ended(tmp_path)


def _with_process_id(command: str, folder: Path) -> str:
    """Make a command write its process id into a folder."""
    return f"sh -c 'echo $$ > {folder / 'process'}; exec {command}'"


def _has_ended(folder: Path) -> None:
    with pytest.raises(ProcessLookupError):
        os.kill(int((folder / "process").read_text()), 0)


@pytest.mark.parametrize("command", ["no-such-program", f"{sys.executable} -c pass"])
def test_a_command_that_starts_no_server_is_refused(command: str) -> None:
    with pytest.raises(DataError, match=f"^{command} does not start an MCP server: "):
        load_environment(f"mcp:{command}")


def test_a_command_that_prints_something_else_is_refused_after_the_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("fastppo.environments.mcp_client.START_TIMEOUT", 2.0)
    (tmp_path / "talks.py").write_text(
        "import time\nfor _ in range(3):\n    print('Hello.', flush=True)\ntime.sleep(60)\n"
    )
    command = f"{sys.executable} {tmp_path / 'talks.py'}"
    says = "start an MCP server: no list of its tools within 2 s; stdout must have messages only"
    with pytest.raises(DataError, match=says):
        load_environment(f"mcp:{command}")
    assert not caplog.records
    with pytest.raises(DataError, match="expected mcp:COMMAND, got no command"):
        load_environment("mcp:")
