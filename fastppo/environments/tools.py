"""Classes whose public methods are tools, in the form of TRL's `environment_factory`.

    class Shop:
        def reset(self, **row) -> str | None:   what it returns is appended to the prompt
        def price(self, item: str) -> float:    a tool: signature and docstring describe it
        def get_reward(self) -> float:          optional: what an episode earns, once it is over
        def close(self) -> None:                optional: at the end of the run
        stop_on = (ConnectionError,)            optional: exceptions of a tool that stop the run
        tool_schemas = {"price": {…}}           optional: in place of signatures and docstrings

Any of the methods may be a coroutine function. A turn without a call ends the episode. Each call of
any other is answered by a message of the role `tool`: what the method returned, or `{'error': …}`
where there is no such tool, the arguments do not fit or the method raised. Where the calls of a
turn cannot be read, none is made and one such message says why.

Calls are read by transformers' `parse_response`, by the tokenizer's response template or, where it
has none, in the form `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.

Sources: TRL 1.16, `GRPOTrainer.environment_factory`; transformers 5.24, "Response parsing".
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from fastppo.data.chat import is_chat, render_chat
from fastppo.data.rows import DataError
from fastppo.rewards.calling import UserCodeError, await_call, call, keywords_for

NO_TOOLS = ("reset", "step", "get_reward", "close")
"""Public methods that are no tools."""

ANSWERED = "answered"
UNKNOWN = "unknown"
"""There is no such tool."""
MALFORMED = "malformed"
"""The call cannot be read, or its arguments do not fit."""
RAISED = "raised"
OUTCOMES = (ANSWERED, UNKNOWN, MALFORMED, RAISED)
"""What may become of a call."""

UNNAMED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
"""Kinds of parameters that no call can give."""

JSON_FORM = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<tool_call>",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"content": "text"},
    },
}
"""A response template for tokenizers that have none."""

INSTRUCTIONS = """You may call these tools:
{tools}
A call is <tool_call>{{"name": "…", "arguments": {{…}}}}</tool_call>"""
"""What a system message says under a chat template that leaves tools out."""


class ToolCall(NamedTuple):
    """A call that the policy wrote."""

    name: str
    arguments: dict[str, Any]


class ToolTurn(NamedTuple):
    """What the policy wrote."""

    calls: Sequence[ToolCall]
    error: str = ""
    """Why the calls cannot be read."""


# ------------------------------------------------------------------------------------ the tokenizer


class ToolForm:
    """How a tokenizer writes tools and reads calls.

    Args:
        tokenizer: with a chat template.
        schemas: of the tools, as `get_json_schema` gives them.
        where: opens the sentences of errors.
        say: shows a sentence to the user.

    Raises:
        DataError: the chat template leaves out messages of the role `tool`.
    """

    def __init__(
        self,
        tokenizer: Any,
        schemas: Sequence[dict[str, Any]],
        *,
        where: str,
        say: Callable[[str], None],
    ) -> None:
        self.tokenizer = tokenizer
        self.schemas = list(schemas)
        self.template = getattr(tokenizer, "response_template", None)
        question = [{"role": "user", "content": "question"}]
        with_answer = [
            *question,
            {"role": "assistant", "content": "call"},
            {"role": "tool", "name": "tool", "content": "toolanswer"},
        ]
        if "toolanswer" not in render_chat(tokenizer, with_answer, where, tools=self.schemas):
            raise DataError(f"{where}: the chat template leaves out messages of the role tool")
        with_tools = render_chat(tokenizer, question, where, tools=self.schemas)
        self.shows_tools = with_tools != render_chat(tokenizer, question, where)
        if not self.shows_tools:
            say(f"{where}: the chat template leaves out tools: a system message describes them")
        if self.template is None:
            say(
                f"{where}: the tokenizer has no response template: calls are read as "
                '<tool_call>{"name": …, "arguments": {…}}</tool_call>'
            )

    def opening(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The first messages, with what describes the tools where the chat template does not."""
        if self.shows_tools:
            return list(messages)
        lines = [json.dumps(schema["function"], ensure_ascii=False) for schema in self.schemas]
        text = INSTRUCTIONS.format(tools="\n".join(lines))
        first = messages[0]
        if first["role"] != "system":
            return [{"role": "system", "content": text}, *messages]
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *messages[1:]]

    def read(self, prompt_ids: list[int], ids: list[int], text: str) -> ToolTurn:
        """The calls of a turn.

        Args:
            prompt_ids: what the policy read; ids: what it wrote.
            text: the same without special tokens.
        """
        try:
            if self.template is None:
                message = self.tokenizer.parse_response(text, schema=JSON_FORM, prefix="")
            else:
                message = self.tokenizer.parse_response(ids, prefix=prompt_ids, tools=self.schemas)
            return ToolTurn([_as_call(parsed) for parsed in message.get("tool_calls") or ()])
        except Exception as error:  # whatever a parser makes of such a text
            return ToolTurn((), str(error))


def _as_call(parsed: Any) -> ToolCall:
    """A call in the form of transformers; raises ValueError for what is none."""
    function = parsed.get("function", parsed) if isinstance(parsed, dict) else parsed
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError("A call must be an object with a name.")
    arguments = function.get("arguments")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise ValueError("The arguments of a call must be an object.")
    return ToolCall(function["name"], arguments)


# ---------------------------------------------------------------------------------- the environment


class Tools:
    """Makes environments of a class whose public methods are tools.

    Args:
        make: the class, or `functools.partial` of it.

    Raises:
        ValueError: a tool has no docstring, or none of a parameter, or no type of one.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        kind = _class_of(make)
        assert kind is not None
        self.make = make
        self.__name__ = kind.__name__
        self.functions = _tool_functions(kind)
        given = getattr(kind, "tool_schemas", {})
        self.schemas = [
            given[name] if name in given else _schema(name, function)
            for name, function in self.functions.items()
        ]
        self.has_rewards = hasattr(kind, "get_reward")
        methods = [getattr(kind, name, None) for name in NO_TOOLS]
        methods += self.functions.values()
        waits = any(inspect.iscoroutinefunction(method) for method in methods)
        self.episode = _WaitingEpisode if waits else _Episode

    def __call__(self) -> _Episode:
        return self.episode(self.make(), self.functions.keys())


def is_tool_class(make: Any) -> bool:
    """Whether it makes objects with `reset` and tools, and without `step`."""
    kind = _class_of(make)
    if kind is None or hasattr(kind, "step") or not callable(getattr(kind, "reset", None)):
        return False
    return bool(_tool_functions(kind))


def _class_of(make: Any) -> type | None:
    if isinstance(make, functools.partial):
        make = make.func
    return make if inspect.isclass(make) else None


def _tool_functions(kind: type) -> dict[str, Callable[..., Any]]:
    return {
        name: function
        for name, function in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_") and name not in NO_TOOLS
    }


def _schema(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    """The JSON schema of a tool."""
    # Slow to import; options are read without it.
    from transformers.utils import get_json_schema

    for parameter in inspect.signature(function).parameters.values():
        is_self = parameter.name == "self"
        if parameter.kind in UNNAMED and not is_self:
            raise ValueError(
                f"tool {name!r}: calls give arguments by name, so it can have no {parameter}"
            )
    try:
        return get_json_schema(function)
    except Exception as error:  # its own, and whatever a type hint raises when it is looked up
        raise ValueError(f"tool {name!r}: {error}") from error


class _Episode:
    """An environment of `fastppo.environments.pool` whose turns are `ToolTurn`s.

    Args:
        environment: of a user's class.
        tools: the names of its methods that are tools.
    """

    def __init__(self, environment: Any, tools: Collection[str]) -> None:
        self.environment = environment
        self.tools = tools

    def reset(self, prompt: Any, **columns: Any) -> Any:
        """The prompt as messages, the last of which ends with what the environment says."""
        return _extended(prompt, self._bound_reset(prompt, columns)())

    def step(self, turn: ToolTurn) -> Any:
        """(a message for each call, a reward of 0, done if there was no call)."""
        return _answers(turn, [self._answer(tool_call) for tool_call in turn.calls])

    def end(self, cut_off: Any) -> Any:
        """What the episode earns; called once. Of a turn that was cut off no call is made."""
        get_reward = getattr(self.environment, "get_reward", None)
        return 0.0 if get_reward is None else get_reward()

    def close(self) -> Any:
        """Closes the user's object."""
        close = getattr(self.environment, "close", None)
        return None if close is None else close()

    def _bound_reset(self, prompt: Any, columns: Mapping[str, Any]) -> Callable[[], Any]:
        """The user's `reset`, with those parts of the row that it names."""
        reset = self.environment.reset
        row = {"prompt": prompt, **columns}
        return functools.partial(reset, **keywords_for(reset, row))

    def _answer(self, tool_call: ToolCall) -> dict[str, Any]:
        """The message that answers a call."""
        if refusal := self._refusal(tool_call):
            return refusal
        try:
            return _message(tool_call.name, call(self._bound(tool_call)), ANSWERED)
        except UserCodeError as error:
            return self._failure(tool_call, error)

    def _bound(self, tool_call: ToolCall) -> Callable[[], Any]:
        return functools.partial(getattr(self.environment, tool_call.name), **tool_call.arguments)

    def _refusal(self, tool_call: ToolCall) -> dict[str, Any] | None:
        """The message of a call that cannot be made."""
        if tool_call.name not in self.tools:
            return _error(tool_call.name, f"Tool {tool_call.name} not found.", UNKNOWN)
        try:
            inspect.signature(getattr(self.environment, tool_call.name)).bind(**tool_call.arguments)
        except TypeError as error:
            return _error(tool_call.name, str(error), MALFORMED)
        return None

    def _failure(self, tool_call: ToolCall, error: UserCodeError) -> dict[str, Any]:
        """The message of a tool that raised; raises what is to stop the run."""
        cause = error.__cause__
        stop_on = getattr(self.environment, "stop_on", ())
        if not isinstance(cause, Exception) or isinstance(cause, stop_on):
            raise cause or error
        return _error(tool_call.name, str(cause), RAISED)


class _WaitingEpisode(_Episode):
    """An `_Episode` for classes with a method that is a coroutine function."""

    async def reset(self, prompt: Any, **columns: Any) -> Any:
        return _extended(prompt, await _awaited(self._bound_reset(prompt, columns)()))

    async def step(self, turn: ToolTurn) -> Any:
        # One after the other: the next may depend on what the one before did.
        return _answers(turn, [await self._answer_later(tool_call) for tool_call in turn.calls])

    async def end(self, cut_off: Any) -> Any:
        return await _awaited(super().end(cut_off))

    async def close(self) -> Any:
        return await _awaited(super().close())

    async def _answer_later(self, tool_call: ToolCall) -> dict[str, Any]:
        if refusal := self._refusal(tool_call):
            return refusal
        try:
            return _message(tool_call.name, await await_call(self._bound(tool_call)), ANSWERED)
        except UserCodeError as error:
            return self._failure(tool_call, error)


async def _awaited(returned: Any) -> Any:
    return await returned if inspect.isawaitable(returned) else returned


def _extended(prompt: Any, said: str | None) -> list[dict[str, Any]]:
    """The prompt as messages, what the environment says at the end of the last."""
    messages = list(prompt) if is_chat(prompt) else [{"role": "user", "content": prompt}]
    if said is None:
        return messages
    if not isinstance(said, str):
        raise TypeError(f"reset must return a text or None, got {type(said).__name__}")
    last = messages[-1]
    return [*messages[:-1], {**last, "content": f"{last['content']}{said}"}]


def _answers(turn: ToolTurn, messages: list[dict[str, Any]]) -> tuple[Any, float, bool]:
    if turn.error:
        messages = [_error("unknown", turn.error, MALFORMED)]
    return messages, 0.0, not messages


def _message(name: str, returned: Any, outcome: str) -> dict[str, Any]:
    content = _encodable(str(returned))
    return {"role": "tool", "name": _encodable(name), "content": content, "outcome": outcome}


def _encodable(text: str) -> str:
    """The text without halves of surrogate pairs, which a policy may write into JSON, and which no
    tokenizer takes."""
    return text.encode(errors="replace").decode()


def _error(name: str, sentence: str, outcome: str) -> dict[str, Any]:
    return _message(name, {"error": sentence}, outcome)
