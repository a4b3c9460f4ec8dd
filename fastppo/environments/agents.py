"""Agents that know nothing of FastPPO but the URL of a chat model, as environments.

environment: chat:agent.py:play

    def play(base_url, api_key, prompt, answer):
        client = OpenAI(base_url=base_url, api_key=api_key)
        ...
        return reward

The function is called once for each response of a batch, with `base_url`, `api_key`, `prompt` and
those of the row's columns that it names; it may be a coroutine function. Its key is its session: a
conversation that grows from request to request, each of which repeats the messages before, answers
included, and goes on from them. What the policy answers is a turn; what is between two answers
stands between the turns. The reward, which the function returns, is paid at the last turn.

A response that is cut off is answered with the finish reason `length`, and after it, or where turns
or room have run out, every request is refused. What the function returns then is the reward still;
if it raises instead, the reward is 0.

The server answers to `/v1/chat/completions` in the form of OpenAI's API (version 1) while there are
sessions, on a port of 127.0.0.1 that is free, or at `chat:agent.py:play?host=…&port=…`. A key is
256 random bits, without which nothing is answered.
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
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from fastppo.rewards.calling import (
    SHUTDOWN_TIMEOUT,
    UserCodeError,
    await_call,
    call_in_thread,
    keywords_for,
)

SCHEME = "chat:"
"""Begins the address of an agent."""

INSTALL = 'pip install -e ".[chat]"'

FINISHED = "stop"
TRUNCATED = "length"
"""The finish reasons of OpenAI's API."""

OVER = "the episode is over: it has as many turns or tokens as it may have"

ENDED = "the session has ended"

UNSUPPORTED = ("functions", "logit_bias", "logprobs", "response_format", "tools")
"""Options of a request that ask for what is not done here."""

TEXT = {"type": "text"}
"""The `response_format` that is done, which is the default."""

LONGEST_SHUTDOWN = 1
"""Seconds that the server waits at shutdown for open requests."""


class RefusedError(Exception):
    """A request that cannot be answered: says why."""


class PolicyTurn(NamedTuple):
    """A turn of the policy, the answer to a request of an agent."""

    text: str
    read: int
    """Tokens of the conversation before it."""
    written: int
    """Tokens of the turn, a stop token included."""


class ChatAnswer(NamedTuple):
    """The answer to a request."""

    turn: PolicyTurn
    finish_reason: str

    @property
    def message(self) -> dict[str, str]:
        """The message in the form of OpenAI's API."""
        return {"role": "assistant", "content": self.turn.text}

    @property
    def usage(self) -> dict[str, int]:
        """The token counts in the form of OpenAI's API."""
        return {
            "prompt_tokens": self.turn.read,
            "completion_tokens": self.turn.written,
            "total_tokens": self.turn.read + self.turn.written,
        }


class Agent:
    """Makes sessions of an agent.

    Args:
        play: called as the module says.
        host, port: where the server listens; port 0 is one that is free. `base_url` has both.

    Raises:
        ImportError: starlette or uvicorn is not installed.
        TypeError: the port is no number.
    """

    def __init__(self, play: Callable[..., Any], *, host: str = "127.0.0.1", port: int = 0) -> None:
        for package in ("starlette", "uvicorn"):
            if importlib.util.find_spec(package) is None:
                raise ImportError(f"agents need {package}: {INSTALL}")
        if not isinstance(port, int):
            raise TypeError(f"expected a port that is a number, got {port!r}")
        self.play = play
        self.__name__ = getattr(play, "__name__", type(play).__name__)
        self.server = ChatServer(host, port)

    def __call__(self) -> Session:
        return Session(self.play, self.server)


class Session:
    """An environment of `fastppo.environments.pool` that runs an agent's calls one at a time.

    Args:
        play: the agent.
        server: where it sends its requests.
    """

    def __init__(self, play: Callable[..., Any], server: ChatServer) -> None:
        self.play = play
        self.server = server
        self.key = ""
        self.playing: asyncio.Task[Any] | None = None
        """The call of the agent."""
        self.is_paid = False
        """Whether what it returned was read."""
        self.requests: asyncio.Queue[list[dict[str, Any]]]
        """Requests that the trainer has not read: one at most."""
        self.messages: list[dict[str, Any]] = []
        """The conversation, up to the last request or answer."""
        self.answer: asyncio.Future[ChatAnswer] | None = None
        """What the last request waits for."""
        self.is_over = False
        self.was_refused = False
        """Whether there was a request after the end."""

    async def reset(self, prompt: Any, **columns: Any) -> Any:
        """Calls the agent; the messages of its first request."""
        await self._stop()
        base_url = await self.server.opened_by(self)
        self.key = secrets.token_urlsafe(32)
        self.server.sessions[self.key] = self
        self.requests = asyncio.Queue()
        self.messages = []
        self.answer = None
        self.is_paid = False
        self.is_over = False
        self.was_refused = False
        row = {**columns, "prompt": prompt, "base_url": base_url, "api_key": self.key}
        self.playing = asyncio.create_task(self._called(row))
        messages = await self._next_request(self.playing)
        if messages is None:
            raise RuntimeError(f"{_result(self.playing)!r} was returned without a request")
        return messages

    async def step(self, turn: PolicyTurn) -> tuple[Any, Any, bool]:
        """Answers the request: (the messages of the next that are new, 0, False), or where the
        agent has returned ("", the reward, True)."""
        assert self.playing is not None
        known = self._reply(ChatAnswer(turn, FINISHED))
        messages = await self._next_request(self.playing)
        if messages is None:
            self.is_paid = True
            return "", _result(self.playing), True
        return messages[known:], 0.0, False

    async def end(self, cut_off: PolicyTurn | None) -> Any:
        """What an agent returns, unless `step` has paid it.

        Args:
            cut_off: the policy's last turn, where it was cut off.
        """
        assert self.playing is not None
        if self.is_paid:
            return 0.0
        self.is_over = True
        if cut_off is not None:
            self._reply(ChatAnswer(cut_off, TRUNCATED))
        elif self.answer is not None:
            # An agent that has returned already did not wait for the answer.
            self.was_refused = not self.playing.done()
            self.answer.set_exception(RefusedError(OVER))
        await asyncio.wait({self.playing})
        if self.playing.exception() is not None and self.was_refused:
            return 0.0
        return _result(self.playing)

    async def close(self) -> None:
        """Ends the call of the agent, and with the last session the server."""
        await self._stop()
        await self.server.left_by(self)

    def ask(self, messages: list[dict[str, Any]]) -> asyncio.Future[ChatAnswer]:
        """What will be the answer to a request.

        Raises:
            RefusedError: it does not go on from what was said, or the episode is over.
        """
        if self.is_over:
            self.was_refused = True
            raise RefusedError(OVER)
        if self.answer is not None and not self.answer.done():
            if messages == self.messages:  # a client that was tired of waiting sends it again
                return self.answer
            raise RefusedError(
                "an earlier request of the session has no answer yet: a session is one "
                "conversation, whose requests come one after the other"
            )
        for place, (before, now) in enumerate(zip(self.messages, messages, strict=False), 1):
            if not _is_same(before, now):
                raise RefusedError(
                    f"message {place} is not the one that it was: a session is one conversation, "
                    f"which each request goes on with; expected {_shown(before)}, got {_shown(now)}"
                )
        if len(messages) <= len(self.messages):
            raise RefusedError(
                f"got {len(messages)} messages, and the conversation has {len(self.messages)}: a "
                "request must hold all of them, answers included, and go on"
            )
        self.messages = messages
        self.answer = asyncio.get_running_loop().create_future()
        self.requests.put_nowait(messages)
        return self.answer

    def _reply(self, answer: ChatAnswer) -> int:
        """Answers the request; the number of messages with the answer."""
        assert self.answer is not None
        self.messages = [*self.messages, answer.message]
        self.answer.set_result(answer)
        return len(self.messages)

    async def _called(self, row: Mapping[str, Any]) -> Any:
        """The agent, in a thread of its own unless it is a coroutine function."""
        play = functools.partial(self.play, **keywords_for(self.play, row))
        if inspect.iscoroutinefunction(self.play):
            return await await_call(play)
        return await asyncio.wrap_future(call_in_thread(play))

    async def _next_request(self, run: asyncio.Task[Any]) -> list[dict[str, Any]] | None:
        """The messages of the next request; None where the agent has returned."""
        request = asyncio.create_task(self.requests.get())
        await asyncio.wait({request, run}, return_when=asyncio.FIRST_COMPLETED)
        if request.done():
            return request.result()
        request.cancel()
        return None

    async def _stop(self) -> None:
        """Ends a call that goes on: its thread, if it has one, at its next request."""
        self.server.sessions.pop(self.key, None)
        if self.answer is not None and not self.answer.done():
            self.answer.set_exception(RefusedError(ENDED))
        if self.playing is not None:
            self.playing.cancel()
            await asyncio.wait({self.playing}, timeout=SHUTDOWN_TIMEOUT)  # it may take no end


def _result(run: asyncio.Task[Any]) -> Any:
    """What an agent returned; raises what it raised."""
    try:
        return run.result()
    except UserCodeError as error:
        raise error.__cause__ or error from None


# -------------------------------------------------------------------------------------- the server


class ChatServer:
    """Serves sessions, from the first that opens it to the last that leaves.

    Args:
        host, port: as of `Agent`.
    """

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.port = port
        self.sessions: dict[str, Session] = {}
        """The open sessions by key."""
        self._users: set[Session] = set()
        self._server: Any = None
        self._serving: asyncio.Task[None]
        self._base_url = ""

    async def opened_by(self, user: Session) -> str:
        """The base URL of the server, which is started where it is not there."""
        self._users.add(user)
        if self._server is None:
            self._start()
        return self._base_url

    async def left_by(self, user: Session) -> None:
        """Stops the server when its last user leaves."""
        self._users.discard(user)
        if self._server is not None and not self._users:
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
        # Bound here, so that requests wait for a server that has not begun to listen.
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
                timeout_graceful_shutdown=LONGEST_SHUTDOWN,
                log_config=None,
                log_level="warning",
            )
        )
        self._serving = asyncio.create_task(self._server.serve(sockets=[bound]))

    def _session_of(self, request: Any) -> Session | None:
        """The session whose key a request has."""
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
        except (RefusedError, ValueError) as error:  # the second of what is no JSON
            return _refusal(str(error), 400)
        completion = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": body.get("model", "policy"),
        }
        if body.get("stream"):
            options = body.get("stream_options")
            has_usage = isinstance(options, dict) and bool(options.get("include_usage"))
            events = _streamed(answer, completion, has_usage=has_usage)
            return StreamingResponse(events, media_type="text/event-stream")
        choice = {"index": 0, "message": answer.message, "finish_reason": answer.finish_reason}
        whole = {"object": "chat.completion", "choices": [choice], "usage": answer.usage}
        return JSONResponse(completion | whole)


def _streamed(answer: ChatAnswer, completion: dict[str, Any], *, has_usage: bool) -> Iterator[str]:
    """The answer as server-sent events, in one piece: a turn is drawn before it is answered."""
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
    """An error in the form of OpenAI's API."""
    from starlette.responses import JSONResponse

    error = {"message": sentence, "type": "invalid_request_error", "param": None, "code": None}
    return JSONResponse({"error": error}, status_code=status)


def _read_request(body: Any) -> list[dict[str, Any]]:
    """The messages of a request, as a chat template takes them.

    Raises:
        RefusedError: there are none, or the request asks for what is not done here.
    """
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
        raise RefusedError("expected an object with a list `messages`")
    for name in UNSUPPORTED:
        if body.get(name) and body[name] != TEXT:
            raise RefusedError(f"{name} is not supported: a request has a policy's text for answer")
    if body.get("n") not in (None, 1):
        raise RefusedError(f"n must be 1, got {body['n']}: a session is one conversation")
    if not body["messages"]:
        raise RefusedError("there are no messages")
    return [_read_message(message) for message in body["messages"]]


def _read_message(message: Any) -> dict[str, Any]:
    """A message with a content that is a text, and without what is null."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RefusedError(f"expected a message with a role, got {message!r}")
    content = message.get("content")
    if content is None:
        content = ""
    if isinstance(content, list):
        content = "".join(_text_of(part) for part in content)
    if not isinstance(content, str):
        raise RefusedError(f"a {message['role']} message has content that is no text")
    given = {name: value for name, value in message.items() if value is not None}
    # A newer name, which chat templates do not have.
    role = "system" if message["role"] == "developer" else message["role"]
    return {**given, "role": role, "content": content}


def _text_of(part: Any) -> str:
    """The text of a part of a message's content."""
    text = part.get("text") if isinstance(part, dict) else None
    if not isinstance(text, str) or part.get("type") != "text":
        raise RefusedError(f"expected parts of type text in a message's content, got {part!r}")
    return text


def _is_same(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether a message is one that was sent or answered; clients may trim an answer."""
    if before["role"] == "assistant" and now["role"] == "assistant":
        return before["content"].strip() == now["content"].strip()
    return before == now


def _shown(message: Mapping[str, Any]) -> str:
    content = message["content"]
    return repr(f"{message['role']}: {content if len(content) < 80 else content[:80] + '…'}")
