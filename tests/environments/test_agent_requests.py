"""Requests of agents that are refused, repeated or abandoned, and the ids of their tool calls."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import tiny
from environments import ScriptedTexts

from fastppo.data.prompts import Prompts
from fastppo.environments import agents
from fastppo.environments.agents import Agent, ChatServer, Session
from fastppo.environments.maker import Conversation, PolicyTurn
from fastppo.environments.turns import Turns
from fastppo.rewards.reward import RewardError
from fastppo.rollout import Rollout

httpx = pytest.importorskip("httpx", reason="the package httpx is not installed")
pytest.importorskip("uvicorn", reason="the package uvicorn is not installed")
pytest.importorskip("starlette", reason="the package starlette is not installed")

CALL = '<tool_call>{"name":  "add", "arguments": {}}</tool_call>'
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}
QUESTION = {"role": "user", "content": "question"}


class Engine(ScriptedTexts):
    """Write texts in a chat whose template shows the ids of tool calls."""

    def __init__(self, *texts: str) -> None:
        template = (
            "{% if tools %}T:{% endif %}{% for m in messages %}{{ m['role'][0] }}:"
            "{{ m['tool_call_id'] }}{{ m['content'] }}<eos>{% endfor %}"
            "{% if add_generation_prompt %}a:{% endif %}"
        )
        super().__init__(*texts, template=template)


def _run(engine: Engine, agent: Any, max_turns: int = 8) -> tuple[list[str], Rollout]:
    """Return what the policy read before each turn, and the rollout."""
    return engine.run(agent, Prompts(["p"], [[1]], {}), max_turns)


def _post(base_url: str, api_key: str, *messages: Any, timeout: float = 60, **options: Any) -> Any:
    """Send a request. Return the message of the answer."""
    response = httpx.post(
        f"{base_url}/chat/completions",
        headers={"Authorization": f"Bearer {api_key}"},
        json={"messages": messages, **options},
        timeout=timeout,
    )
    response.raise_for_status()
    return response.json()["choices"][0]["message"]


def test_without_a_choice_of_tools_the_row_continues_and_calls_are_text() -> None:
    said = []

    def agent(base_url: str, api_key: str) -> float:
        messages: list[Any] = [QUESTION]
        for choice in ("auto", "none", "none"):
            answer = _post(base_url, api_key, *messages, tools=[TOOL], tool_choice=choice)
            said.append((answer["content"], "tool_calls" in answer))
            messages += [answer, QUESTION]
        return 1.0

    read, rollout = _run(Engine(f"so {CALL}", f"and {CALL}", "done"), agent)
    assert said == [("so", True), (f"and {CALL}", False), ("done", False)]
    assert rollout.branches == [[]]
    asked = "u:question<eos>a:"
    assert read[2] == f"T:{asked}so {CALL}<eos>{asked}and {CALL}<eos>{asked}"


def _ask_twice(base_url: str, api_key: str) -> None:
    for _ in range(2):
        _post(base_url, api_key, QUESTION)


def _ends_with_the_refusal(base_url: str, api_key: str) -> None:
    try:
        _ask_twice(base_url, api_key)
    except httpx.HTTPStatusError as error:
        raise RuntimeError("no answer") from error


def _ends_with_the_text(base_url: str, api_key: str) -> None:
    text = ""
    try:
        _ask_twice(base_url, api_key)
    except httpx.HTTPStatusError as error:
        text = error.response.json()["error"]["message"]
    raise RuntimeError(f"ModelError: {text}")


async def _ends_with_a_group_of_errors(base_url: str, api_key: str) -> None:
    async def ask(client: httpx.AsyncClient) -> None:
        body = {"messages": [QUESTION]}
        headers = {"Authorization": f"Bearer {api_key}"}
        (await client.post("chat/completions", json=body, headers=headers)).raise_for_status()

    async with (
        httpx.AsyncClient(base_url=base_url, timeout=60) as client,
        asyncio.TaskGroup() as group,
    ):
        for _ in range(3):
            group.create_task(ask(client))


def _ends_with_another_error(base_url: str, api_key: str) -> None:
    with contextlib.suppress(httpx.HTTPStatusError):
        _ask_twice(base_url, api_key)
    raise KeyError("reward")


@pytest.mark.parametrize(
    "agent",
    [_ask_twice, _ends_with_the_refusal, _ends_with_the_text, _ends_with_a_group_of_errors],
)
def test_an_error_from_a_refusal_gives_a_reward_of_0(agent: Any) -> None:
    _, rollout = _run(Engine("so"), agent, max_turns=1)
    assert rollout.rewards == [[0.0] * 3]


def test_another_error_after_a_refusal_is_a_failure() -> None:
    with pytest.raises(RewardError, match="KeyError"):
        _run(Engine("so"), _ends_with_another_error, max_turns=1)


def test_equal_requests_without_a_retry_count_are_answered_each() -> None:
    said = []

    def agent(base_url: str, api_key: str) -> float:
        with ThreadPoolExecutor() as threads:
            answers = threads.map(lambda _: _post(base_url, api_key, QUESTION), range(3))
            said.extend(sorted(answer["content"] for answer in answers))
        return 1.0

    _run(Engine("1", "2", "3"), agent)
    assert said == ["1", "2", "3"]


def test_ids_of_calls_are_the_same_in_every_run() -> None:
    def run() -> tuple[list[str], list[str]]:
        ids = []

        def agent(base_url: str, api_key: str) -> float:
            messages: list[Any] = [QUESTION]
            for _ in range(3):
                answer = _post(base_url, api_key, *messages, tools=[TOOL])
                calls = [call["id"] for call in answer.get("tool_calls", ())]
                ids.extend(calls)
                messages.append(answer)
                messages += [{"role": "tool", "tool_call_id": i, "content": "2"} for i in calls]
            return 1.0

        read, _ = _run(Engine(CALL * 2, CALL, "done"), agent)
        return ids, read

    first, second = run(), run()
    assert first == second
    ids, read = first
    assert len(set(ids)) == 3
    assert all(len(i) == 9 and i.isalnum() for i in ids)
    assert all(i in read[2] for i in ids)


def test_an_agent_that_ignores_refusals_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "MAX_REFUSALS", 2)

    def agent(base_url: str, api_key: str) -> float:
        for _ in range(8):
            try:
                _post(base_url, api_key, QUESTION)
            except httpx.HTTPStatusError as error:
                if error.response.status_code == 401:  # the session has ended
                    break
        return 1.0

    with pytest.raises(RewardError, match="after the end of the episode"):
        _run(Engine("so"), agent, max_turns=1)


class Waiting(Engine):
    """Write the first turn when told to."""

    def __init__(self, *texts: str) -> None:
        super().__init__(*texts)
        self.is_asked = threading.Event()
        self.may_write = threading.Event()

    def generate(self, *arguments: Any) -> Rollout:
        self.is_asked.set()
        assert self.may_write.wait(60)
        return super().generate(*arguments)


def test_an_abandoned_request_is_not_answered() -> None:
    engine = Waiting("first", "second")

    def agent(base_url: str, api_key: str) -> float:
        with ThreadPoolExecutor() as threads:
            first = threads.submit(_post, base_url, api_key, QUESTION)
            assert engine.is_asked.wait(60)
            abandoned = {"role": "user", "content": "abandoned"}
            with pytest.raises(httpx.ReadTimeout):
                _post(base_url, api_key, abandoned, timeout=0.5)
            engine.may_write.set()
            assert first.result()["content"] == "first"
        assert _post(base_url, api_key, QUESTION)["content"] == "second"
        return 1.0

    read, _ = _run(engine, agent)
    assert read == ["u:question<eos>a:"] * 2


def test_requests_are_not_answered_after_the_agent_has_returned() -> None:
    async def check() -> None:
        may_return = asyncio.Event()

        async def agent() -> float:
            (session,) = server.sessions.values()
            session.ask(conversation)
            await may_return.wait()
            return 1.0

        conversation = Conversation([QUESTION], [])
        server = ChatServer("127.0.0.1", 0)
        session = Session(agent, server)
        assert await session.reset("p") == conversation
        pending = session.ask(conversation)
        may_return.set()
        assert session.task is not None
        await session.task
        assert await session.step(PolicyTurn("so", 4, 3)) == ("", 1.0, True)
        assert isinstance(pending.exception(), agents.RefusedError)
        await session.close()

    asyncio.run(check())


def test_an_agent_needs_a_chat_template() -> None:
    tokenizer = tiny.byte_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="chat template"):
        Turns(Agent(_ask_twice), tokenizer, max_turns=1)
