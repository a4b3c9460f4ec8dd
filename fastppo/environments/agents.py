"""Agents written for an OpenAI-compatible server, as environments.

environment: chat:agent.py:run

    def run(base_url, api_key, prompt, answer):
        client = OpenAI(base_url=base_url, api_key=api_key)
        ...
        return reward

The function, or coroutine function, is called once per response, with `base_url`, `api_key`,
`prompt` and the columns of the row that it names. The key identifies the session, and a session is
an episode. Each answer is a turn of the policy. A request that repeats an earlier conversation,
answers included, and appends to it continues that conversation; any other request opens a further
row of the episode (`fastppo.environments.episodes`). Requests that are sent at the same time are
answered one after the other. The reward that the function returns goes to the last turn.

The tools of a request are shown by the chat template and called in the format of
`fastppo.environments.tools.ToolFormat`. A turn whose calls cannot be parsed is answered as text,
and counts as an invalid action. With `tool_choice: none` the tools are shown and calls are left in
the text.

A truncated answer has the finish reason `length`. After it, and after the last turn or at the end
of the context, requests are refused. The function may still return a reward; if it raises the
client's error (status 400) instead, the reward is 0. Any other error is a failure of the
environment, and so are `MAX_REFUSALS` refused requests.

A request whose client has disconnected before its turn is not answered.

The server implements `/v1/chat/completions` of OpenAI's API (version 1) while there are sessions.
It listens on a free port of 127.0.0.1, or at `chat:agent.py:run?host=…&port=…`. Keys are 256 random
bits, and requests without one are refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import inspect
import json
import secrets
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

from fastppo.data.chat import check_chat_template
from fastppo.environments.maker import Conversation, EnvironmentMaker, PolicyTurn, TurnFormat
from fastppo.environments.tools import ToolFormat, call_id
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
CALLS = "tool_calls"
TRUNCATED = "length"
"""Finish reasons of OpenAI's API."""

OVER = "the episode is over: it has reached its limit of turns or tokens"

ENDED = "the session has ended"

ABANDONED = "the client has disconnected"

UNSUPPORTED = ("functions", "logit_bias", "logprobs", "response_format")
"""Request options that are refused."""

RETRIES = "x-stainless-retry-count"
"""Header of OpenAI's clients with the number of earlier attempts of a request."""

MAX_REFUSALS = 32
"""Requests after the end of an episode. With more of them the agent has failed.

An agent may have sent many at the same time, so a few are no sign of an endless loop.
"""

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
    first_call: int = 0
    """Number of the answer's first tool call in the episode."""

    @property
    def message(self) -> dict[str, Any]:
        """The message in OpenAI's format."""
        message: dict[str, Any] = {"role": "assistant", "content": self.turn.text}
        if self.turn.tool_calls:
            message["tool_calls"] = [
                {"id": call_id(number), "type": "function", "function": _with_json(call)}
                for number, call in enumerate(self.turn.tool_calls, self.first_call)
            ]
        return message

    @property
    def usage(self) -> dict[str, int]:
        """The token counts in OpenAI's format."""
        return {
            "prompt_tokens": self.turn.prompt_tokens,
            "completion_tokens": self.turn.completion_tokens,
            "total_tokens": self.turn.prompt_tokens + self.turn.completion_tokens,
        }


def _with_json(call: Mapping[str, Any]) -> dict[str, str]:
    """Return the function of a call with its arguments as JSON."""
    function = call["function"]
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return {"name": function["name"], "arguments": arguments}


class AgentFormat(TurnFormat):
    """The policy's turns with the lengths that an answer reports, and with parsed tool calls.

    Args:
        tokenizer: the policy's.
        tools: the format of the calls; None without tools.
        may_call: whether calls are parsed. Otherwise they are left in the text.
    """

    def __init__(
        self, tokenizer: Any, tools: ToolFormat | None = None, *, may_call: bool = True
    ) -> None:
        self.tokenizer = tokenizer
        self.tools = tools
        self.may_call = may_call
        self._by_tools: dict[str, dict[bool, AgentFormat]] = {}

    def of(self, conversation: Conversation) -> TurnFormat:
        """Return the format of a conversation with these tools."""
        if not conversation.tools:
            return self
        key = json.dumps(conversation.tools, sort_keys=True)
        if key not in self._by_tools:
            where = "the tools of a request"
            tools = ToolFormat(self.tokenizer, conversation.tools, where=where)
            self._by_tools[key] = {
                may_call: AgentFormat(self.tokenizer, tools, may_call=may_call)
                for may_call in (True, False)
            }
        return self._by_tools[key][conversation.may_call]

    def has_tools_of(self, other: TurnFormat) -> bool:
        """Return whether the policy reads the same tools in both formats."""
        return isinstance(other, AgentFormat) and self.tools is other.tools

    @property
    def renders_calls(self) -> bool:  # type: ignore[override]
        """Whether the chat template must see the calls of a turn to write what follows it."""
        return self.tools is not None and self.tools.renders_calls

    @property
    def template_options(self) -> dict[str, Any]:
        """The tools, for chat templates that show them."""
        return {} if self.tools is None else self.tools.template_options

    def opening(self, messages: Any) -> Any:
        """Describe the tools in a system message if the chat template ignores them."""
        return messages if self.tools is None else self.tools.opening(messages)

    def parse(self, conversation: list[int], ids: list[int], text: str) -> PolicyTurn:
        """Return the turn with its lengths and tool calls."""
        turn = PolicyTurn(text, len(conversation), len(ids))
        if self.tools is None or not self.may_call:
            return turn
        parsed = self.tools.parse(conversation, ids, text)
        turn = turn._replace(is_malformed=bool(parsed.error))
        if not parsed.calls:
            return turn
        return turn._replace(text=parsed.text, tool_calls=parsed.tool_calls)

    def is_malformed(self, turn: PolicyTurn) -> bool | None:
        """Return whether the calls of a turn could not be parsed."""
        return turn.is_malformed

    def message(self, turn: PolicyTurn, text: str) -> dict[str, Any]:
        """Return the message that repeats a turn in a request."""
        message: dict[str, Any] = {"role": "assistant", "content": turn.text}
        return {**message, "tool_calls": turn.tool_calls} if turn.tool_calls else message


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
        """Return the format of the turns; raise DataError without a chat template."""
        check_chat_template(tokenizer.chat_template is not None, "the requests of an agent")
        return AgentFormat(tokenizer)

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


class Request(NamedTuple):
    """A request of an agent."""

    conversation: Conversation
    answer: asyncio.Future[ChatAnswer]
    clients: list[Any]
    """HTTP requests that wait for the answer: the first, and its retries."""

    async def is_abandoned(self) -> bool:
        """Return whether every client has disconnected."""
        gone = [await client.is_disconnected() for client in self.clients]
        return bool(gone) and all(gone)


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
        self.pending: list[Request] = []
        """Requests without an answer, in the order of their arrival."""
        self.arrival: asyncio.Event
        """Set while there is a pending request."""
        self.is_over = False
        self.refusals = 0
        """Requests that were refused because the episode is over."""
        self.refused_too_often: asyncio.Event
        self.calls = 0
        """Tool calls in the answers."""

    async def reset(self, prompt: Any, **columns: Any) -> Any:
        """Start the agent. Return the conversation of its first request."""
        await self._stop()
        base_url = await self.server.join(self)
        self.key = secrets.token_urlsafe(32)
        self.server.sessions[self.key] = self
        self.pending = []
        self.arrival = asyncio.Event()
        self.has_returned_reward = False
        self.is_over = False
        self.refusals = 0
        self.refused_too_often = asyncio.Event()
        self.calls = 0
        row = {**columns, "prompt": prompt, "base_url": base_url, "api_key": self.key}
        self.task = asyncio.create_task(self._call_agent(row))
        conversation = await self._next_conversation(self.task)
        if conversation is None:
            raise RuntimeError(f"{_result(self.task)!r} was returned without a request")
        return conversation

    async def step(self, turn: PolicyTurn) -> tuple[Any, Any, bool]:
        """Answer the oldest request.

        Returns:
            (the conversation of the next request, 0, False), or ("", reward, True) if the agent has
            returned.
        """
        assert self.task is not None
        self._answer(ChatAnswer(turn, CALLS if turn.tool_calls else FINISHED, self.calls))
        self.calls += len(turn.tool_calls)
        conversation = await self._next_conversation(self.task)
        if conversation is None:
            self._refuse(ENDED)
            self.has_returned_reward = True
            return "", _result(self.task), True
        return conversation, 0.0, False

    async def end(self, cut_off: PolicyTurn | None) -> Any:
        """End the episode. Return the agent's reward unless `step` has returned it.

        Args:
            cut_off: the policy's last turn if it was truncated.

        Raises:
            RuntimeError: the agent goes on sending requests after the end.
        """
        assert self.task is not None
        if self.has_returned_reward:
            return 0.0
        self.is_over = True
        if cut_off is not None:
            self._answer(ChatAnswer(cut_off, TRUNCATED))
        # An agent that has returned already did not wait for the answers.
        self.refusals += bool(self.pending) and not self.task.done()
        self._refuse(OVER)
        refused_too_often = asyncio.create_task(self.refused_too_often.wait())
        await asyncio.wait({self.task, refused_too_often}, return_when=asyncio.FIRST_COMPLETED)
        refused_too_often.cancel()
        if not self.task.done():
            raise RuntimeError(
                f"{self.refusals} requests were sent after the end of the episode: return the "
                "reward when a request is refused with status 400"
            )
        error = self.task.exception()
        if error is not None and self.refusals and _is_refusal(error):
            return 0.0
        return _result(self.task)

    async def close(self) -> None:
        """Stop the agent, and with the last session the server."""
        await self._stop()
        await self.server.leave(self)

    def ask(
        self, conversation: Conversation, *, is_retry: bool = False, client: Any = None
    ) -> asyncio.Future[ChatAnswer]:
        """Take a request. Return a future of its answer.

        Args:
            is_retry: whether the client has sent the request before, and reached its time limit.
                The same pending request is then answered once.
            client: the HTTP request.

        Raises:
            RefusedError: the episode is over.
        """
        if self.is_over:
            self.refusals += 1
            if self.refusals > MAX_REFUSALS:
                self.refused_too_often.set()
            raise RefusedError(OVER)
        clients = [] if client is None else [client]
        if is_retry:
            for request in self.pending:
                if request.conversation == conversation:
                    request.clients.extend(clients)
                    return request.answer
        answer: asyncio.Future[ChatAnswer] = asyncio.get_running_loop().create_future()
        self.pending.append(Request(conversation, answer, clients))
        self.arrival.set()
        return answer

    def _answer(self, answer: ChatAnswer) -> None:
        """Answer the oldest request."""
        self.pending.pop(0).answer.set_result(answer)

    def _refuse(self, sentence: str) -> None:
        """Refuse all pending requests."""
        for request in self.pending:
            request.answer.set_exception(RefusedError(sentence))
        self.pending = []

    async def _call_agent(self, row: Mapping[str, Any]) -> Any:
        """Call the agent, in a thread unless it is a coroutine function."""
        function = functools.partial(self.run, **keywords_for(self.run, row))
        if inspect.iscoroutinefunction(self.run):
            return await await_call(function)
        return await asyncio.wrap_future(call_in_thread(function))

    async def _next_conversation(self, task: asyncio.Task[Any]) -> Conversation | None:
        """Wait for a request. Return its conversation, or None if the agent has returned."""
        while True:
            if not self.pending:
                self.arrival.clear()
            arrival = asyncio.create_task(self.arrival.wait())
            await asyncio.wait({arrival, task}, return_when=asyncio.FIRST_COMPLETED)
            arrival.cancel()
            if task.done():
                return None
            while self.pending:
                if not await self.pending[0].is_abandoned():
                    return self.pending[0].conversation
                self.pending.pop(0).answer.set_exception(RefusedError(ABANDONED))

    async def _stop(self) -> None:
        """Stop the agent. A thread ends at its next request."""
        self.server.sessions.pop(self.key, None)
        self._refuse(ENDED)
        if self.task is not None:
            self.task.cancel()
            await asyncio.wait({self.task}, timeout=SHUTDOWN_TIMEOUT)


def _result(task: asyncio.Task[Any]) -> Any:
    """Return what an agent returned, or raise what it raised."""
    try:
        return task.result()
    except UserCodeError as error:
        raise error.__cause__ or error from None


def _is_refusal(error: BaseException | None) -> bool:
    """Return whether an error comes from a response with status 400, as of openai and httpx.

    Some packages, such as verifiers, keep only the text of the error.
    """
    while error is not None:
        if isinstance(error, BaseExceptionGroup) and any(map(_is_refusal, error.exceptions)):
            return True  # as of asyncio.TaskGroup
        if OVER in str(error):
            return True
        response = getattr(error, "response", None)
        if 400 in (getattr(error, "status_code", None), getattr(response, "status_code", None)):
            return True
        error = error.__cause__ or error.__context__
    return False


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
            is_retry = request.headers.get(RETRIES, "0") != "0"
            answer = await asyncio.shield(
                session.ask(_read_request(body), is_retry=is_retry, client=request)
            )
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
    """Yield an answer as server-sent events, with the whole message in one event."""
    message = answer.message
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
    chunks: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": message, "finish_reason": None}]},
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


def _read_request(body: Any) -> Conversation:
    """Return the messages and tools of a request in the format of chat templates.

    Raises:
        RefusedError: there are no messages, or an option is not supported.
    """
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
        raise RefusedError("expected an object with a list `messages`")
    for name in UNSUPPORTED:
        if body.get(name) and body[name] != TEXT:
            raise RefusedError(f"{name} is not supported: the policy answers with text")
    if body.get("n") not in (None, 1):
        raise RefusedError(f"n must be 1, got {body['n']}: send several requests instead")
    choice = body.get("tool_choice") or "auto"
    if choice not in ("auto", "none"):
        raise RefusedError(
            f"tool_choice must be auto or none, got {describe(choice)}: the policy is sampled "
            "without constraints"
        )
    if not body["messages"]:
        raise RefusedError("there are no messages")
    tools = [_read_tool(tool) for tool in body.get("tools") or ()]
    messages = [_read_message(message) for message in body["messages"]]
    return Conversation(messages, tools, may_call=choice != "none")


def _read_tool(tool: Any) -> dict[str, Any]:
    """Return the schema of a tool."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RefusedError(f"expected tools that are functions with a name, got {describe(tool)}")
    return tool


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
    if "tool_calls" in given:
        given["tool_calls"] = [_read_call(call) for call in given["tool_calls"]]
    # Chat templates have no role `developer`.
    role = "system" if message["role"] == "developer" else message["role"]
    return {**given, "role": role, "content": content}


def _read_call(call: Any) -> dict[str, Any]:
    """Return a tool call with its arguments parsed, unless they are not JSON."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RefusedError(f"expected tool calls that name a function, got {describe(call)}")
    arguments = function.get("arguments") or "{}"
    with contextlib.suppress(ValueError, TypeError):  # TypeError: parsed already
        arguments = json.loads(arguments)
    return {**call, "function": {"name": function["name"], "arguments": arguments}}


def _text_of(part: Any) -> str:
    """Return the text of a part of a message's content."""
    text = part.get("text") if isinstance(part, dict) else None
    if not isinstance(text, str) or part.get("type") != "text":
        raise RefusedError(
            f"expected parts of type text in a message's content, got {describe(part)}"
        )
    return text


def load_environment(target: str) -> Agent:
    """Return the agent of an address `file.py:name?host=…&port=…`."""
    name, options = Address.of(target)
    plugin = load_plugin(name, "agent")
    agent = Agent(plugin.function, **options)
    agent.fingerprint = plugin.fingerprint
    return agent


ADAPTER = Adapter(environment=load_environment)
