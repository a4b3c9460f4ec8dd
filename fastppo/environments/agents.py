"""Agents written for an OpenAI-compatible server, as environments.

environment: chat:agent.py:run

    def run(base_url, api_key, prompt, answer):
        client = OpenAI(base_url=base_url, api_key=api_key)
        ...
        return reward

The function, or coroutine function, is called once per response, with `base_url`, `api_key`,
`prompt` and the columns of the row that it names. The key identifies the session. A session is one
conversation: each request repeats all earlier messages, answers included, and appends to them. Each
answer is a turn of the policy. The reward that the function returns goes to the last turn.

A truncated answer has the finish reason `length`. After it, and after the last turn or at the end
of the context, requests are refused. The function may still return a reward; if it raises instead,
the reward is 0.

The server implements `/v1/chat/completions` of OpenAI's API (version 1) while there are sessions.
It listens on a free port of 127.0.0.1, or at `chat:agent.py:run?host=…&port=…`. Keys are 256 random
bits, and requests without one are refused.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import inspect
import json
import secrets
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

from fastppo.environments.maker import EnvironmentMaker, PolicyTurn, TurnFormat
from fastppo.functional.scalars import describe
from fastppo.plugins.adapters import Adapter, Address
from fastppo.plugins.calling import (
    SHUTDOWN_TIMEOUT,
    UserCodeError,
    await_call,
    call_in_thread,
    keywords_for,
)
from fastppo.plugins.loading import load_plugin

INSTALL = 'pip install -e ".[chat]"'

FINISHED = "stop"
TRUNCATED = "length"
"""Finish reasons of OpenAI's API."""

OVER = "the episode is over: it has reached its limit of turns or tokens"

ENDED = "the session has ended"

UNSUPPORTED = ("functions", "logit_bias", "logprobs", "response_format", "tools")
"""Request options that are refused."""

TEXT = {"type": "text"}
"""The supported `response_format`, which is the default."""

GRACEFUL_SHUTDOWN = 1
"""Seconds that the server waits for open requests at shutdown."""


class RefusedError(Exception):
    """A request that is answered with an error."""


class ChatAnswer(NamedTuple):
    """The answer to a request."""

    turn: PolicyTurn
    finish_reason: str

    @property
    def message(self) -> dict[str, str]:
        """The message in OpenAI's format."""
        return {"role": "assistant", "content": self.turn.text}

    @property
    def usage(self) -> dict[str, int]:
        """The token counts in OpenAI's format."""
        return {
            "prompt_tokens": self.turn.prompt_tokens,
            "completion_tokens": self.turn.completion_tokens,
            "total_tokens": self.turn.prompt_tokens + self.turn.completion_tokens,
        }


class AgentFormat(TurnFormat):
    """The policy's turns with the lengths that an answer reports."""

    def parse(self, conversation: list[int], ids: list[int], text: str) -> PolicyTurn:
        """Return the turn with its lengths."""
        return PolicyTurn(text, len(conversation), len(ids))


class Agent(EnvironmentMaker):
    """Make sessions of an agent.

    Args:
        run: the agent, see the module's docstring.
        host, port: address of the server. Port 0 is a free one.

    Raises:
        ImportError: starlette or uvicorn is not installed.
        TypeError: the port is not a number.
    """

    has_end = True
    can_be_tried = False  # it waits for the answers of a server
    expected = "any of base_url, api_key, prompt and the columns by name"

    def __init__(self, run: Callable[..., Any], *, host: str = "127.0.0.1", port: int = 0) -> None:
        super().__init__(run)
        for package in ("starlette", "uvicorn"):
            if importlib.util.find_spec(package) is None:
                raise ImportError(f"agents need {package}: {INSTALL}")
        if not isinstance(port, int):
            raise TypeError(f"expected a port that is a number, got {port!r}")
        self.server = ChatServer(host, port)

    def __call__(self) -> Session:
        return Session(self.make, self.server)

    def turn_format(self, tokenizer: Any) -> AgentFormat:
        """Return the format of the turns."""
        return AgentFormat()

    def check(self, source: str, columns: Collection[str], processes: int = 1) -> None:
        """Check the agent's arguments, and that processes do not share a port.

        Raises:
            ValueError: the agent needs another argument, or all processes would use one port.
        """
        offered = ["base_url", "api_key", "prompt", *columns]
        named = keywords_for(self.make, dict.fromkeys(offered))
        self.check_call("the agent", self.make, source, columns, [], named)
        if self.server.port and processes > 1:
            raise ValueError(
                f"{processes} processes: each serves the agents of its own rows, so leave out the "
                f"port, got port={self.server.port}"
            )


class Session:
    """An environment of `fastppo.environments.pool` that runs one call of an agent at a time.

    Args:
        run: the agent.
        server: the server for its requests.
    """

    def __init__(self, run: Callable[..., Any], server: ChatServer) -> None:
        self.run = run
        self.server = server
        self.key = ""
        self.task: asyncio.Task[Any] | None = None
        """The call of the agent."""
        self.has_returned_reward = False
        """Whether `step` has returned the agent's reward."""
        self.requests: asyncio.Queue[list[dict[str, Any]]]
        """Requests that the trainer has not read, at most one."""
        self.messages: list[dict[str, Any]] = []
        """The conversation up to the last request or answer."""
        self.answer: asyncio.Future[ChatAnswer] | None = None
        """The answer to the last request."""
        self.is_over = False
        self.was_refused = False
        """Whether a request was refused because the episode is over."""

    async def reset(self, prompt: Any, **columns: Any) -> Any:
        """Start the agent. Return the messages of its first request."""
        await self._stop()
        base_url = await self.server.join(self)
        self.key = secrets.token_urlsafe(32)
        self.server.sessions[self.key] = self
        self.requests = asyncio.Queue()
        self.messages = []
        self.answer = None
        self.has_returned_reward = False
        self.is_over = False
        self.was_refused = False
        row = {**columns, "prompt": prompt, "base_url": base_url, "api_key": self.key}
        self.task = asyncio.create_task(self._call_agent(row))
        messages = await self._next_request(self.task)
        if messages is None:
            raise RuntimeError(f"{_result(self.task)!r} was returned without a request")
        return messages

    async def step(self, turn: PolicyTurn) -> tuple[Any, Any, bool]:
        """Answer the request.

        Returns:
            (new messages of the next request, 0, False), or ("", reward, True) if the agent has
            returned.
        """
        assert self.task is not None
        known = self._reply(ChatAnswer(turn, FINISHED))
        messages = await self._next_request(self.task)
        if messages is None:
            self.has_returned_reward = True
            return "", _result(self.task), True
        return messages[known:], 0.0, False

    async def end(self, cut_off: PolicyTurn | None) -> Any:
        """End the episode. Return the agent's reward unless `step` has returned it.

        Args:
            cut_off: the policy's last turn if it was truncated.
        """
        assert self.task is not None
        if self.has_returned_reward:
            return 0.0
        self.is_over = True
        if cut_off is not None:
            self._reply(ChatAnswer(cut_off, TRUNCATED))
        elif self.answer is not None:
            # An agent that has returned already did not wait for the answer.
            self.was_refused = not self.task.done()
            self.answer.set_exception(RefusedError(OVER))
        await asyncio.wait({self.task})
        if self.task.exception() is not None and self.was_refused:
            return 0.0
        return _result(self.task)

    async def close(self) -> None:
        """Stop the agent, and with the last session the server."""
        await self._stop()
        await self.server.leave(self)

    def ask(self, messages: list[dict[str, Any]]) -> asyncio.Future[ChatAnswer]:
        """Take a request. Return a future of its answer.

        Raises:
            RefusedError: the request does not continue the conversation, or the episode is over.
        """
        if self.is_over:
            self.was_refused = True
            raise RefusedError(OVER)
        if self.answer is not None and not self.answer.done():
            if messages == self.messages:  # a client repeats the request after its time limit
                return self.answer
            raise RefusedError(
                "an earlier request of the session has no answer yet: a session is one "
                "conversation, and its requests come one after the other"
            )
        for place, (before, now) in enumerate(zip(self.messages, messages, strict=False), 1):
            if not _is_same(before, now):
                raise RefusedError(
                    f"message {place} differs from the earlier one: each request must continue "
                    f"the session's conversation; expected {_describe(before)}, got "
                    f"{_describe(now)}"
                )
        if len(messages) <= len(self.messages):
            raise RefusedError(
                f"got {len(messages)} messages, and the conversation has {len(self.messages)}: a "
                "request must repeat all of them, answers included, and append to them"
            )
        self.messages = messages
        self.answer = asyncio.get_running_loop().create_future()
        self.requests.put_nowait(messages)
        return self.answer

    def _reply(self, answer: ChatAnswer) -> int:
        """Answer the request. Return the number of messages, the answer included."""
        assert self.answer is not None
        self.messages = [*self.messages, answer.message]
        self.answer.set_result(answer)
        return len(self.messages)

    async def _call_agent(self, row: Mapping[str, Any]) -> Any:
        """Call the agent, in a thread unless it is a coroutine function."""
        function = functools.partial(self.run, **keywords_for(self.run, row))
        if inspect.iscoroutinefunction(self.run):
            return await await_call(function)
        return await asyncio.wrap_future(call_in_thread(function))

    async def _next_request(self, task: asyncio.Task[Any]) -> list[dict[str, Any]] | None:
        """Wait for the next request. Return its messages, or None if the agent has returned."""
        request = asyncio.create_task(self.requests.get())
        await asyncio.wait({request, task}, return_when=asyncio.FIRST_COMPLETED)
        if request.done():
            return request.result()
        request.cancel()
        return None

    async def _stop(self) -> None:
        """Stop the agent. A thread ends at its next request."""
        self.server.sessions.pop(self.key, None)
        if self.answer is not None and not self.answer.done():
            self.answer.set_exception(RefusedError(ENDED))
        if self.task is not None:
            self.task.cancel()
            await asyncio.wait({self.task}, timeout=SHUTDOWN_TIMEOUT)


def _result(task: asyncio.Task[Any]) -> Any:
    """Return what an agent returned, or raise what it raised."""
    try:
        return task.result()
    except UserCodeError as error:
        raise error.__cause__ or error from None


# -------------------------------------------------------------------------------------- the server


class ChatServer:
    """Serve sessions. It starts with the first session and stops with the last.

    Args:
        host, port: as for `Agent`.
    """

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.port = port
        self.sessions: dict[str, Session] = {}
        """Open sessions by key."""
        self._members: set[Session] = set()
        self._server: Any = None
        self._serving: asyncio.Task[None]
        self._base_url = ""

    async def join(self, session: Session) -> str:
        """Start the server if necessary. Return its base URL."""
        self._members.add(session)
        if self._server is None:
            self._start()
        return self._base_url

    async def leave(self, session: Session) -> None:
        """Stop the server after its last session."""
        self._members.discard(session)
        if self._server is not None and not self._members:
            self._server.should_exit = True
            self._server = None
            await self._serving

    def _start(self) -> None:
        import uvicorn
        from starlette.applications import Starlette
        from starlette.routing import Route

        app = Starlette(
            routes=[
                Route("/v1/chat/completions", self._complete, methods=["POST"]),
                Route("/v1/models", self._models),
            ]
        )
        # Bound here, so that requests queue until the server listens.
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        bound = socket.create_server((self.host, self.port), family=family)
        host = f"[{self.host}]" if ":" in self.host else self.host
        self._base_url = f"http://{host}:{bound.getsockname()[1]}/v1"
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                lifespan="off",
                ws="none",
                access_log=False,
                timeout_graceful_shutdown=GRACEFUL_SHUTDOWN,
                log_config=None,
                log_level="warning",
            )
        )
        self._serving = asyncio.create_task(self._server.serve(sockets=[bound]))

    def _session_of(self, request: Any) -> Session | None:
        """Return the session of a request's key."""
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        return self.sessions.get(key.strip()) if scheme.lower() == "bearer" else None

    async def _models(self, request: Any) -> Any:
        from starlette.responses import JSONResponse

        if self._session_of(request) is None:
            return _refusal("there is no session with this key", 401)
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "fastppo"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _complete(self, request: Any) -> Any:
        from starlette.responses import JSONResponse, StreamingResponse

        session = self._session_of(request)
        if session is None:
            return _refusal("there is no session with this key", 401)
        try:
            body = await request.json()
            answer = await asyncio.shield(session.ask(_read_request(body)))
        except (RefusedError, ValueError) as error:  # ValueError: invalid JSON
            return _refusal(str(error), 400)
        completion = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": body.get("model", "policy"),
        }
        if body.get("stream"):
            options = body.get("stream_options")
            has_usage = isinstance(options, dict) and bool(options.get("include_usage"))
            events = _stream(answer, completion, has_usage=has_usage)
            return StreamingResponse(events, media_type="text/event-stream")
        choice = {"index": 0, "message": answer.message, "finish_reason": answer.finish_reason}
        whole = {"object": "chat.completion", "choices": [choice], "usage": answer.usage}
        return JSONResponse(completion | whole)


def _stream(answer: ChatAnswer, completion: dict[str, Any], *, has_usage: bool) -> Iterator[str]:
    """Yield an answer as server-sent events, with the whole text in one event."""
    chunks: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": answer.message, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": answer.finish_reason}]},
    ]
    if has_usage:
        chunks.append({"choices": [], "usage": answer.usage})
    for chunk in chunks:
        event = completion | {"object": "chat.completion.chunk"} | chunk
        yield f"data: {json.dumps(event)}\n\n"
    yield "data: [DONE]\n\n"


def _refusal(sentence: str, status: int) -> Any:
    """Return an error in OpenAI's format."""
    from starlette.responses import JSONResponse

    error = {"message": sentence, "type": "invalid_request_error", "param": None, "code": None}
    return JSONResponse({"error": error}, status_code=status)


def _read_request(body: Any) -> list[dict[str, Any]]:
    """Return the messages of a request in the format of chat templates.

    Raises:
        RefusedError: there are no messages, or an option is not supported.
    """
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
        raise RefusedError("expected an object with a list `messages`")
    for name in UNSUPPORTED:
        if body.get(name) and body[name] != TEXT:
            raise RefusedError(f"{name} is not supported: the policy answers with text")
    if body.get("n") not in (None, 1):
        raise RefusedError(f"n must be 1, got {body['n']}: a session is one conversation")
    if not body["messages"]:
        raise RefusedError("there are no messages")
    return [_read_message(message) for message in body["messages"]]


def _read_message(message: Any) -> dict[str, Any]:
    """Return a message with its content as a string and without null values."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RefusedError(f"expected a message with a role, got {describe(message)}")
    content = message.get("content")
    if content is None:
        content = ""
    if isinstance(content, list):
        content = "".join(_text_of(part) for part in content)
    if not isinstance(content, str):
        raise RefusedError(f"the content of a {message['role']} message must be text")
    given = {name: value for name, value in message.items() if value is not None}
    # Chat templates have no role `developer`.
    role = "system" if message["role"] == "developer" else message["role"]
    return {**given, "role": role, "content": content}


def _text_of(part: Any) -> str:
    """Return the text of a part of a message's content."""
    text = part.get("text") if isinstance(part, dict) else None
    if not isinstance(text, str) or part.get("type") != "text":
        raise RefusedError(
            f"expected parts of type text in a message's content, got {describe(part)}"
        )
    return text


def _is_same(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Compare a message with an earlier one. Clients may strip an answer."""
    if before["role"] == "assistant" and now["role"] == "assistant":
        return before["content"].strip() == now["content"].strip()
    return before == now


def _describe(message: Mapping[str, Any]) -> str:
    return describe(f"{message['role']}: {message['content']}")


def load_environment(target: str) -> Agent:
    """Return the agent of an address `file.py:name?host=…&port=…`."""
    name, options = Address.of(target)
    plugin = load_plugin(name, "agent")
    agent = Agent(plugin.function, **options)
    agent.fingerprint = plugin.fingerprint
    return agent


ADAPTER = Adapter(environment=load_environment)
