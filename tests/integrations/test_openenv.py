"""An OpenEnv server as the environment, by its own client over its own websocket."""

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

import fastppo
from fastppo.data.rows import DataError
from fastppo.integrations.addresses import load_environment
from runs import records

pytest.importorskip("openenv")
pytestmark = pytest.mark.slow

SERVER = Path(__file__).parents[1] / "openenv_server.py"


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextlib.contextmanager
def _server(port: int, sessions: int = 64) -> Iterator[str]:
    process = subprocess.Popen([sys.executable, str(SERVER), str(port), str(sessions)])
    try:
        while process.poll() is None:  # however long a busy machine takes to import openenv
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.1)
        yield f"openenv:http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with _server(_free_port()) as address:
        yield address


def test_sessions_are_apart_and_a_turn_is_the_one_text_field_of_an_action(address: str) -> None:
    make = load_environment(address)

    async def play() -> list[tuple[object, float, bool]]:
        first, second = make(), make()
        assert await first.reset("w1", seed=3) == await second.reset("w1", seed=4) == "w30 w31"
        answers = [await first.step("w9"), await second.step("w4"), await first.step("w1 w3")]
        assert (await first.state())["step_count"] == 2
        await first.close()
        await second.close()
        return answers

    assert asyncio.run(play()) == [("w32", 0.0, False), ("w32", 1.0, True), ("w32", 1.0, True)]


def test_a_run_trains_on_a_server(address: str, tmp_path: Path) -> None:
    config = fastppo.PPOConfig(
        environment=address,
        prompts="w1",
        max_new_tokens=2,
        max_turns=3,
        rollout_batch_size=8,
        iterations=2,
        output_dir=str(tmp_path),
    )
    trainer = fastppo.PPOTrainer(
        config,
        model=tiny.model(),
        tokenizer=tiny.tokenizer(),
        prompts=[{"prompt": f"w{i}", "seed": i} for i in range(8)],
    )
    trainer.train()
    assert [row["iteration"] for row in records(trainer)] == [0, 1]


def test_a_server_that_comes_back_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastppo.integrations.openenv.PAUSE", 4.0)
    port = _free_port()
    with _server(port) as address:
        environment = load_environment(address)()

    async def begin() -> object:
        waiting = asyncio.create_task(environment.reset("w1"))
        await asyncio.sleep(0.5)
        with _server(port):
            said = await waiting
            await environment.close()
            return said

    assert asyncio.run(begin()) == "w30 w31"


def test_no_server_is_one_sentence_with_its_address() -> None:
    with pytest.raises(
        DataError, match=r"no OpenEnv server answers at http://127\.0\.0\.1:9/schema"
    ):
        load_environment("openenv:http://127.0.0.1:9")
