"""Tasks of reasoning-gym, games of TextArena and environments of verifiers, by address."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
import threading
import types
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from fastppo.data.addresses import (
    Address,
    is_address,
    load_prompts,
)
from fastppo.data.rows import DataError
from fastppo.environments.loading import load_environment
from fastppo.environments.pool import as_opening
from fastppo.rewards.loading import load_reward


def test_an_address_has_a_name_and_options_as_yaml_reads_them() -> None:
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
            "only provides prompts and reward",
        ),
        (load_reward, "verifiers:x", "verifiers only provides prompts and environment"),
    ],
)
def test_what_a_package_does_not_give_is_a_sentence(load: Any, spec: str, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        load(spec)


def test_a_package_that_is_missing_or_has_another_api_is_a_sentence_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "fastppo.environments.verifiers", raising=False)
    monkeypatch.setitem(sys.modules, "verifiers", types.ModuleType("verifiers"))
    sentence = r'prompts verifiers:x: .*verifiers.*: pip install "verifiers"'
    with pytest.raises(DataError, match=sentence):
        load_prompts("verifiers:x")


def test_an_environments_first_words_stand_in_the_place_of_the_prompt_but_not_of_its_system() -> (
    None
):
    system = {"role": "system", "content": "Answer with a number."}
    user = {"role": "user", "content": "Begin."}
    assert as_opening("The board.", "Begin.") == "The board."
    assert as_opening("The board.", [system, user]) == [
        system,
        {"role": "user", "content": "The board."},
    ]


# ----------------------------------------------------------------------------------- reasoning-gym


def test_tasks_of_reasoning_gym_are_scored_by_its_own_verifier() -> None:
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
def test_what_reasoning_gym_does_not_have_is_a_sentence(
    load: Any, spec: str, sentence: str
) -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(DataError, match=f"{re.escape(spec)}: .*{sentence}"):
        load(spec)


# --------------------------------------------------------------------------------------- TextArena


def test_a_game_of_textarena_says_what_is_new_and_pays_its_own_reward() -> None:
    arena = pytest.importorskip("textarena")
    game = load_environment("textarena:GuessTheNumber-v0?max_turns=3")()
    assert "[5]" in game.reset("GuessTheNumber-v0", seed=1)

    theirs = arena.make("GuessTheNumber-v0-raw", max_turns=3)
    theirs.reset(num_players=1, seed=1)
    number = theirs.state.game_state["game_number"]
    wrong = number % 20 + 1
    hint, reward, done = game.step(f"[{wrong}]")
    assert hint == f"\nThe target number is {'lower' if wrong > number else 'higher'}.\n"
    assert (reward, done) == (0.0, False)
    assert game.step(f"I say [{number}]") == ("", 1.0, True)


def test_the_opponent_of_a_game_of_two_moves_at_once() -> None:
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


def test_a_game_of_two_without_an_opponent_is_a_sentence() -> None:
    pytest.importorskip("textarena")
    with pytest.raises(DataError, match=r"environment textarena:TicTacToe-v0: .*players"):
        load_environment("textarena:TicTacToe-v0")


def test_no_games_are_a_sentence() -> None:
    pytest.importorskip("textarena")
    with pytest.raises(DataError, match=r"prompts textarena:.*size=0: there are no tasks"):
        load_prompts("textarena:GuessTheNumber-v0?size=0")


def test_games_are_told_apart_by_seed_and_are_chats_where_that_is_asked() -> None:
    pytest.importorskip("textarena")
    rows = load_prompts("textarena:GuessTheNumber-v0?size=3&seed=5&chat=true")
    assert [row["seed"] for row in rows] == [5, 6, 7]
    game = load_environment("textarena:GuessTheNumber-v0")()
    (rules,) = game.reset(**rows[0])
    assert rules["role"] == "user"
    assert "[5]" in rules["content"]


# --------------------------------------------------------------------------------------- verifiers


@pytest.fixture
def guessing(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An environment of three turns with a rubric of two functions, as a package would have it."""
    verifiers = pytest.importorskip("verifiers")
    if not hasattr(verifiers, "load_environment"):
        pytest.skip("this version of verifiers has no classic API")
    from datasets import Dataset

    class Guessing(verifiers.MultiTurnEnv):
        async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
            if messages[-1].content.strip() == state["answer"]:
                state["final_env_response"] = [verifiers.types.UserMessage(content="right")]
                return []
            return [verifiers.types.UserMessage(content="no, again")]

    def is_right(completion: Any, answer: str, **_: Any) -> float:
        return float(any(message.content.strip() == answer for message in completion))

    def turns(state: Any, **_: Any) -> float:
        return float(len(state["trajectory"]))

    def load(count: int = 2) -> Any:
        rows = [{"question": f"{i} + 1?", "answer": str(i + 1)} for i in range(count)]
        rubric = verifiers.Rubric(funcs=[is_right, turns], weights=[1.0, -0.125])
        return Guessing(dataset=Dataset.from_list(rows), rubric=rubric, max_turns=3)

    module = types.ModuleType("guessing")
    module.load_environment = load
    monkeypatch.setitem(sys.modules, "guessing", module)
    return load


COUNTING = "verifiers:counting_taskset?agent.runtime.type=subprocess"


@pytest.fixture
def needs_verifiers_v1() -> None:
    verifiers = pytest.importorskip("verifiers")
    if hasattr(verifiers, "load_environment"):
        pytest.skip("this version of verifiers has the classic API")


def _sessions(spec: str = COUNTING) -> Any:
    from fastppo.environments.loading import load_environment

    term = load_environment(spec)
    assert term is not None
    return term.function


def _said(text: str) -> Any:
    from fastppo.environments.agents import PolicyTurn

    return PolicyTurn(text, read=1, written=1)


def _end_of(spec: str, row: dict[str, Any], turns: list[str]) -> Any:
    """What a session answers to the last of the policy's turns, the others having been wrong."""

    async def play() -> Any:
        session = _sessions(spec)()
        try:
            assert await session.reset(**row) == row["prompt"]
            for turn in turns[:-1]:
                observation = [{"role": "user", "content": "no, again"}]
                assert await session.step(_said(turn)) == (observation, 0.0, False)
            return await session.step(_said(turns[-1]))
        finally:
            await session.close()

    return asyncio.run(play())


@contextlib.contextmanager
def _model_at_a_url(turns: list[str]) -> Iterator[str]:
    """A model that says these turns; its URL."""
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


SCORED = [(["1"], 0.875), (["7", "1"], 0.75), (["7", "8", "9"], -0.375)]
"""Turns of the policy, and what the episode earns."""


@pytest.mark.parametrize(("turns", "reward"), SCORED)
def test_an_episode_of_verifiers_has_the_score_of_its_own_evaluate(
    guessing: Any, turns: list[str], reward: float
) -> None:
    (row,) = load_prompts("verifiers:guessing?count=1")
    assert _end_of("verifiers:guessing?count=1", row, turns) == ("", reward, True)
    assert asyncio.run(_evaluated(guessing(1), turns)) == reward


async def _evaluated(environment: Any, turns: list[str]) -> float:
    """The reward by verifiers' own `evaluate`, of a model at a URL."""
    from openai import AsyncOpenAI
    from verifiers.clients import OpenAIChatCompletionsClient

    with _model_at_a_url(turns) as url:
        results = await environment.evaluate(
            client=OpenAIChatCompletionsClient(AsyncOpenAI(base_url=url, api_key="none")),
            model="scripted",
            num_examples=1,
            rollouts_per_example=1,
        )
    return results["outputs"][0]["reward"]


@pytest.mark.usefixtures("guessing")
def test_an_episode_of_verifiers_classic_api_that_is_cut_off_is_not_scored() -> None:
    (row,) = load_prompts("verifiers:guessing?count=1")

    async def play() -> None:
        many = _sessions("verifiers:guessing?count=1")
        sessions = [many() for _ in range(2)]
        try:
            await asyncio.gather(*(session.reset(**row) for session in sessions))
            assert await sessions[0].end(_said("1")) == 0.0
            await sessions[1].step(_said("7"))
            assert await sessions[1].end(None) == 0.0
        finally:
            for session in sessions:
                await session.close()

    asyncio.run(play())


@pytest.mark.usefixtures("needs_verifiers_v1")
@pytest.mark.parametrize(("turns", "reward"), SCORED)
def test_an_episode_of_verifiers_from_0_4_on_has_the_score_of_its_own_run(
    turns: list[str], reward: float
) -> None:
    (row,) = load_prompts(f"{COUNTING}&size=1")
    assert [message["content"] for message in row["prompt"]] == ["Count.", "0 + 1?"]
    assert _end_of(COUNTING, row, turns) == ("", reward, True)
    assert asyncio.run(_run_by_verifiers(turns)) == reward
    assert _sessions().__name__ == "verifiers", "the name in a run's sentences"


@pytest.mark.usefixtures("needs_verifiers_v1")
def test_an_episode_of_verifiers_that_is_cut_off_or_fails_is_as_with_any_agent() -> None:
    (row,) = load_prompts(f"{COUNTING}&size=1")

    async def play() -> None:
        many = _sessions()
        sessions = [many() for _ in range(3)]
        broken = _sessions(f"{COUNTING}&taskset.task.is_ill=true")()
        try:
            await asyncio.gather(*(session.reset(**row) for session in [*sessions, broken]))
            assert await sessions[0].end(_said("7")) == 0.0
            assert await sessions[1].end(_said("1")) == 0.875
            assert (await sessions[2].step(_said("1")))[1] == 0.875
            with pytest.raises(RuntimeError, match="the judge is ill"):
                await broken.step(_said("1"))
        finally:
            for session in [*sessions, broken]:
                await session.close()

    asyncio.run(play())


@pytest.mark.usefixtures("needs_verifiers_v1")
def test_what_verifiers_does_not_have_is_a_sentence() -> None:
    with pytest.raises(DataError, match=r"verifiers:no_such: .*taskset 'no_such' not found"):
        load_environment("verifiers:no_such")
    with pytest.raises(DataError, match=r"cuont"):
        load_prompts("verifiers:counting_taskset?taskset.cuont=1")
    with pytest.raises(DataError, match=r"(?s)num_tasks.*those of its taskset are taskset\.NAME"):
        load_environment("verifiers:counting_taskset?num_tasks=1")
    with pytest.raises(DataError, match=r"have no end: add size="):
        load_prompts(COUNTING)


async def _run_by_verifiers(turns: list[str]) -> float:
    """The reward by the run that verifiers' own evaluation does of a task, of a model at a URL."""
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
