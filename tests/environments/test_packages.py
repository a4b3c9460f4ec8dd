"""Addresses of reasoning-gym, TextArena and verifiers."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import re
import sys
import threading
import types
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from fastppo.data.datasets import DataError
from fastppo.environments.loading import load_environment
from fastppo.environments.pool import as_opening
from fastppo.plugins.adapters import (
    Address,
    is_address,
    load_prompts,
)
from fastppo.rewards.loading import load_reward


def test_an_address_has_a_name_and_yaml_options() -> None:
    assert Address.of("chain_sum?size=10&hard=true&name=a") == (
        "chain_sum",
        {"size": 10, "hard": True, "name": "a"},
    )
    assert is_address("textarena:Wordle-v0")
    assert not is_address("reward.py:function")


@pytest.mark.parametrize(
    ("load", "spec", "sentence"),
    [
        (
            load_environment,
            "reasoning-gym:chain_sum",
            "provides only prompts and reward",
        ),
        (load_reward, "verifiers:x", "verifiers provides only prompts and environment"),
    ],
)
def test_a_package_without_the_requested_kind_is_refused(
    load: Any, spec: str, sentence: str
) -> None:
    with pytest.raises(DataError, match=sentence):
        load(spec)


def test_a_missing_package_is_an_error_with_the_install_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "fastppo.environments.verifiers", raising=False)
    monkeypatch.setitem(sys.modules, "verifiers", types.ModuleType("verifiers"))
    sentence = r'prompts verifiers:x: .*verifiers.*: pip install "verifiers"'
    with pytest.raises(DataError, match=sentence):
        load_prompts("verifiers:x")


def test_the_first_observation_replaces_the_prompt_but_not_its_system_message() -> None:
    system = {"role": "system", "content": "Answer with a number."}
    user = {"role": "user", "content": "Begin."}
    assert as_opening("The board.", "Begin.") == "The board."
    assert as_opening("The board.", [system, user]) == [
        system,
        {"role": "user", "content": "The board."},
    ]


# ----------------------------------------------------------------------------------- reasoning-gym


def test_reasoning_gym_is_scored_by_its_verifier() -> None:
    gym = pytest.importorskip("reasoning_gym")
    dataset = gym.create_dataset("chain_sum", size=3, seed=7)
    rows = load_prompts("reasoning-gym:chain_sum?size=3&seed=7")
    assert [row["prompt"] for row in rows] == [entry["question"] for entry in dataset]

    completions = [f" {rows[0]['answer']}", "<answer>0.5</answer>", "no"]
    columns = {name: [row[name] for row in rows] for name in ("answer", "metadata")}
    scores = load_reward("reasoning-gym:score_answer")(
        prompts=[row["prompt"] for row in rows], completions=completions, **columns
    )
    answers = [rows[0]["answer"], "0.5", "no"]
    assert scores == [dataset.score_answer(a, e) for a, e in zip(answers, dataset, strict=True)]
    assert scores[0] == 1.0


@pytest.mark.parametrize(
    ("load", "spec", "sentence"),
    [
        (load_prompts, "reasoning-gym:no_such", "no_such"),
        (load_prompts, "reasoning-gym:chain_sum?size=[", r"option size: YAML cannot read '\['$"),
        (load_reward, "reasoning-gym:score", "expected one of score_answer, got 'score'$"),
    ],
)
def test_invalid_names_of_reasoning_gym_are_refused(load: Any, spec: str, sentence: str) -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(DataError, match=f"{re.escape(spec)}: .*{sentence}"):
        load(spec)


# --------------------------------------------------------------------------------------- TextArena


def test_a_game_of_textarena_returns_new_messages_and_its_reward() -> None:
    arena = pytest.importorskip("textarena")
    game = load_environment("textarena:GuessTheNumber-v0?max_turns=3").function()
    assert "[5]" in game.reset("GuessTheNumber-v0", seed=1)

    theirs = arena.make("GuessTheNumber-v0-raw", max_turns=3)
    theirs.reset(num_players=1, seed=1)
    number = theirs.state.game_state["game_number"]
    wrong = number % 20 + 1
    hint, reward, done = game.step(f"[{wrong}]")
    assert hint == f"\nThe target number is {'lower' if wrong > number else 'higher'}.\n"
    assert (reward, done) == (0.0, False)
    assert game.step(f"I say [{number}]") == ("", 1.0, True)


def test_the_opponent_of_a_two_player_game_moves() -> None:
    pytest.importorskip("textarena")
    from fastppo.environments.textarena import Game

    def lowest_free(text: str) -> str:
        board = text.split("Current Board")[-1]
        return next(f"[{cell}]" for cell in "012345678" if f" {cell} " in board)

    game = Game("TicTacToe-v0", opponent=lowest_free)
    game.reset("TicTacToe-v0", seed=0)
    observation, reward, done = game.step("[4]")
    assert " 0 " not in observation.split("Current Board")[-1]
    assert (reward, done) == (0.0, False)


def test_a_two_player_game_without_an_opponent_is_refused() -> None:
    pytest.importorskip("textarena")
    with pytest.raises(DataError, match=r"environment textarena:TicTacToe-v0: .*players"):
        load_environment("textarena:TicTacToe-v0")


def test_games_have_consecutive_seeds_and_may_be_chats() -> None:
    pytest.importorskip("textarena")
    rows = load_prompts("textarena:GuessTheNumber-v0?size=3&seed=5&chat=true")
    assert [row["seed"] for row in rows] == [5, 6, 7]
    game = load_environment("textarena:GuessTheNumber-v0").function()
    (rules,) = game.reset(**rows[0])
    assert rules["role"] == "user"
    assert "[5]" in rules["content"]


# --------------------------------------------------------------------------------------- verifiers


needs_verifiers = pytest.mark.skipif(
    importlib.util.find_spec("verifiers") is None, reason="verifiers is not installed"
)

COUNTING = "verifiers:counting_taskset?agent.runtime.type=subprocess"


def _sessions(spec: str = COUNTING) -> Any:
    term = load_environment(spec)
    assert term is not None
    return term.function


def _turn(text: str) -> Any:
    from fastppo.environments.maker import PolicyTurn

    return PolicyTurn(text, prompt_tokens=1, completion_tokens=1)


def _end_of(spec: str, row: dict[str, Any], turns: list[str]) -> Any:
    """Return the answer to the last of the policy's turns, the others being wrong."""

    async def run_episodes() -> Any:
        session = _sessions(spec)()
        try:
            assert (await session.reset(**row)).messages == row["prompt"]
            for turn in turns[:-1]:
                conversation, *others = await session.step(_turn(turn))
                assert conversation.messages[-2:] == [
                    {"role": "assistant", "content": turn},
                    {"role": "user", "content": "no, again"},
                ]
                assert others == [0.0, False]
            return await session.step(_turn(turns[-1]))
        finally:
            await session.close()

    return asyncio.run(run_episodes())


@contextlib.contextmanager
def _model_at_a_url(turns: list[str]) -> Iterator[str]:
    """Serve a model with these turns at a URL."""
    left = list(turns)

    class Model(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            message = {"role": "assistant", "content": left.pop(0)}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            answer = {"id": "0", "object": "chat.completion", "created": 0, "model": "scripted"}
            body = json.dumps({**answer, "choices": [choice]}).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Model) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1"
        finally:
            server.shutdown()


@needs_verifiers
@pytest.mark.parametrize(("turns", "reward"), [(["7", "1"], 0.75), (["7", "8", "9"], -0.375)])
def test_an_episode_of_verifiers_has_the_reward_of_its_own_run(
    turns: list[str], reward: float
) -> None:
    (row,) = load_prompts(f"{COUNTING}&size=1")
    assert [message["content"] for message in row["prompt"]] == ["Count.", "0 + 1?"]
    assert _end_of(COUNTING, row, turns) == ("", reward, True)
    assert asyncio.run(_run_by_verifiers(turns)) == reward
    assert _sessions().__name__ == "verifiers", "the name in a run's sentences"


@needs_verifiers
def test_a_truncated_or_failed_episode_of_verifiers_is_handled_like_an_agents() -> None:
    (row,) = load_prompts(f"{COUNTING}&size=1")

    async def run_episodes() -> None:
        many = _sessions()
        sessions = [many() for _ in range(3)]
        broken = _sessions(f"{COUNTING}&taskset.task.is_ill=true")()
        try:
            await asyncio.gather(*(session.reset(**row) for session in [*sessions, broken]))
            assert await sessions[0].end(_turn("7")) == 0.0
            assert await sessions[1].end(_turn("1")) == 0.875
            assert (await sessions[2].step(_turn("1")))[1] == 0.875
            with pytest.raises(RuntimeError, match="the judge is ill"):
                await broken.step(_turn("1"))
        finally:
            for session in [*sessions, broken]:
                await session.close()

    asyncio.run(run_episodes())


@needs_verifiers
def test_invalid_options_of_verifiers_are_refused() -> None:
    with pytest.raises(DataError, match=r"verifiers:no_such: .*taskset 'no_such' not found"):
        load_environment("verifiers:no_such")
    with pytest.raises(DataError, match=r"cuont"):
        load_prompts("verifiers:counting_taskset?taskset.cuont=1")
    with pytest.raises(DataError, match=r"(?s)num_tasks.*those of its taskset are taskset\.NAME"):
        load_environment("verifiers:counting_taskset?num_tasks=1")
    with pytest.raises(DataError, match=r"have no end: add size="):
        load_prompts(COUNTING)


async def _run_by_verifiers(turns: list[str]) -> float:
    """Return the reward of verifiers' own evaluation."""
    from verifiers.v1.clients import EvalClientConfig, ModelContext
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    config = {
        "taskset": {"id": "counting_taskset"},
        "agent": {"runtime": {"type": "subprocess"}},
    }
    environment = load_environment(resolve_env_config(config))
    with _model_at_a_url(turns) as url:
        context = ModelContext(model="scripted", client=EvalClientConfig(base_url=url))
        async with environment.serving():
            (slot,) = environment.slots(next(iter(environment.taskset)))
            episode = await environment.run_slot(slot, context)
    return episode.traces[0].reward
