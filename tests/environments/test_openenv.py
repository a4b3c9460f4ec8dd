"""OpenEnv servers as environments, with OpenEnv's client."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny

from fastppo import cli
from fastppo.data.datasets import DataError
from fastppo.environments.loading import load_environment
from fastppo.run.log import read_jsonl

pytest.importorskip("openenv")
pytestmark = pytest.mark.slow

SERVER = Path(__file__).parents[1] / "helpers" / "openenv_server.py"


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextlib.contextmanager
def _server(port: int, sessions: int = 64, action: str = "text") -> Iterator[str]:
    process = subprocess.Popen([sys.executable, str(SERVER), str(port), str(sessions), action])
    try:
        while process.poll() is None:  # however long a busy machine takes to import openenv
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.1)
        yield f"openenv:http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


VALID = {"invalid": False}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with _server(_free_port()) as address:
        yield address


def test_sessions_are_independent_and_a_turn_is_the_actions_text_field(address: str) -> None:
    make = load_environment(address).function

    async def run_episodes() -> list[tuple[object, ...]]:
        first, second = make(), make()
        assert await first.reset("w1", seed=3) == await second.reset("w1", seed=4) == "w30 w31"
        answers = [await first.step("w9"), await second.step("w4"), await first.step("w1 w3")]
        assert (await first.state())["step_count"] == 2
        await first.close()
        await second.close()
        return answers

    assert asyncio.run(run_episodes()) == [
        ("w32", 0.0, False, VALID),
        ("w32", 1.0, True, VALID | {"success": True}),
        ("w32", 1.0, True, VALID | {"success": True}),
    ]


def test_an_unreachable_server_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastppo.environments.openenv.PAUSE", 4.0)
    port = _free_port()
    with _server(port) as address:
        environment = load_environment(address).function()

    async def begin() -> object:
        waiting = asyncio.create_task(environment.reset("w1"))
        await asyncio.sleep(0.5)
        with _server(port):
            said = await waiting
            await environment.close()
            return said

    assert asyncio.run(begin()) == "w30 w31"


def test_an_invalid_action_is_answered_with_the_error() -> None:
    with _server(_free_port(), action="number") as address:
        environment = load_environment(address).function()

        async def run_episodes() -> list[tuple[str, float, bool]]:
            await environment.reset("w1", seed=3)
            texts = ("w3", '{"no": 1}', '{"number": 3}')
            said = [await environment.step(text) for text in texts]
            await environment.close()
            return said

        no_json, other_fields, right = asyncio.run(run_episodes())
    assert no_json == (
        '{"error": "no action: Expecting value: line 1 column 1 (char 0)"}',
        0,
        False,
        {"invalid": True},
    )
    assert "Invalid message" in other_fields[0]
    assert other_fields[1:] == (0.0, False, {"invalid": True})
    assert right == ("w32", 1.0, True, VALID | {"success": True})


def _train(address: str, folder: Path) -> int:
    """Train from the command line."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "w{i}", "seed": {i}}}\n' for i in range(4)))
    options = {
        "model": tiny.saved_model(folder / "model"),
        "prompts": prompts,
        "environment": address,
        "output_dir": folder / "run",
        "iterations": 1,
        "rollout_batch_size": 4,
        "minibatches": 1,
        "max_turns": 3,
        "max_new_tokens": 2,
        "stop_token_ids": [*range(4, 40)],  # any word ends a turn
    }
    flags = [word for name, value in options.items() for word in (f"--{name}", value)]
    words = [str(w) for flag in flags for w in (flag if isinstance(flag, list) else [flag])]
    return cli.main(["train", *words])


def test_a_run_needs_a_session_per_episode(
    address: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fastppo.environments.openenv.PAUSE", 0.0)
    for name in ("enough", "one"):
        (tmp_path / name).mkdir()
    assert _train(address, tmp_path / "enough") == 0
    (line,) = read_jsonl(tmp_path / "enough" / "run" / "metrics.jsonl")
    # Every turn ends with a word, so no episode is truncated.
    assert line["outcome/success"] + line["outcome/failure"] == 1
    with _server(_free_port(), sessions=1) as small:
        assert _train(small, tmp_path / "one") == 1
    assert "max_concurrent_envs must be at least rollout_batch_size" in capsys.readouterr().err


def test_a_missing_server_is_an_error_with_its_address() -> None:
    with pytest.raises(
        DataError, match=r"no OpenEnv server answers at http://127\.0\.0\.1:9/schema"
    ):
        load_environment("openenv:http://127.0.0.1:9")
