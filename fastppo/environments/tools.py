"""Classes with tools as methods, compatible with TRL's `environment_factory`.

    class Shop:
        def reset(self, **row) -> str | None:   the returned text is appended to the prompt
        def price(self, item: str) -> float:    a tool, described by its signature and docstring
        def get_reward(self) -> float:          optional: the reward, called once at the end
        def close(self) -> None:                optional: called at the end of the run
        stop_on = (ConnectionError,)            optional: exceptions of a tool that stop the run
        tool_schemas = {"price": {…}}           optional: replaces signatures and docstrings

Any method may be a coroutine function. A turn without a call ends the episode. Any other turn is
answered by one message of the role `tool` per call, with the method's result, or with
`{'error': …}` if the tool is unknown, the arguments do not match, or the method raised. If the
calls of a turn cannot be parsed, none is made, and one such message has the error.

Calls are parsed by transformers' `parse_response`, with the tokenizer's response template or, if it
has none, in the format `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.

Sources: TRL 1.16, `GRPOTrainer.environment_factory`; transformers 5.24, "Response parsing".
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from fastppo.data.chat import encodable, is_chat, render_chat, text_of, with_text
from fastppo.data.datasets import DataError
from fastppo.environments.between import text_between
from fastppo.environments.maker import EnvironmentMaker, TurnFormat
from fastppo.plugins.calling import UserCodeError, await_call, call, keywords_for

logger = logging.getLogger(__name__)

NOT_TOOLS = ("reset", "step", "get_reward", "close")
"""Public methods that are not tools."""

ANSWERED = "answered"
UNKNOWN = "unknown"
"""The tool does not exist."""
MALFORMED = "malformed"
"""The call cannot be parsed, or its arguments do not match."""
RAISED = "raised"
OUTCOMES = (ANSWERED, UNKNOWN, MALFORMED, RAISED)
"""Outcomes of a call."""

NO_TOOL = "unknown"
"""Name in the answer to calls that cannot be parsed."""

DEFAULT_RESPONSE_TEMPLATE = {
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
"""Response template for tokenizers without one."""

INSTRUCTIONS = """You may call these tools:
{tools}
A call is <tool_call>{{"name": "…", "arguments": {{…}}}}</tool_call>"""
"""System message for chat templates that ignore tools."""


class ToolCall(NamedTuple):
    """A call by the policy."""

    name: str
    arguments: dict[str, Any]
    id: str = ""
    """The id that the policy wrote, if it wrote one."""


class ToolTurn(NamedTuple):
    """A parsed turn of the policy."""

    calls: Sequence[ToolCall]
    error: str = ""
    """Parse error of the calls."""
    text: str = ""
    """The turn without its calls; "" after a parse error."""

    @property
    def call_ids(self) -> list[str]:
        """Ids for the answers: those that the policy wrote, or numbers."""
        written = [""] if self.error else [tool_call.id for tool_call in self.calls]
        return [name or call_id(number) for number, name in enumerate(written)]

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """The calls in the format of chat templates. An error is a call, since it is answered."""
        made = [ToolCall(NO_TOOL, {})] if self.error else self.calls
        return [
            {"id": name, "type": "function", "function": {"name": x.name, "arguments": x.arguments}}
            for name, x in zip(self.call_ids, made, strict=True)
        ]


FORMS = ((False, False), (True, False), (True, True))
"""Values of `separates_calls` and `renders_calls`, the plainest first.

The second is for templates such as Mistral's, which reject a second text of the assistant after an
answer, and the third for those such as gpt-oss's, which take the tool's name from the turn.
"""

STRICT_ID = re.compile("[A-Za-z0-9]{9}")
"""The only ids that Mistral's chat templates accept."""


def call_id(number: int) -> str:
    """Return an id for a tool call: a `STRICT_ID`.

    Ids enter the prompt of some chat templates, so they are the same in every run.
    """
    return f"call{number:05d}"


# ------------------------------------------------------------------------------------ the tokenizer


class ToolFormat(TurnFormat):
    """Describe tools in the prompt and parse calls, in a tokenizer's format.

    Args:
        tokenizer: with a chat template.
        schemas: schemas of the tools, as from `get_json_schema`.
        where: prefix of error messages.

    Raises:
        DataError: the chat template rejects or ignores messages of the role `tool`.
    """

    has_calls = True

    def __init__(self, tokenizer: Any, schemas: Sequence[dict[str, Any]], *, where: str) -> None:
        self.tokenizer = tokenizer
        self.schemas = list(schemas)
        self.template = getattr(tokenizer, "response_template", None)
        self.separates_calls: bool
        """Whether a turn that is repeated has its calls apart from its text."""
        self._choose_form(where)
        question = [{"role": "user", "content": "question"}]
        with_tools = render_chat(tokenizer, question, where, tools=self.schemas)
        self.shows_tools = with_tools != render_chat(tokenizer, question, where)
        if not self.shows_tools:
            logger.info(
                f"{where}: the chat template ignores tools: a system message describes them"
            )
        if self.template is None:
            logger.info(
                f"{where}: the tokenizer has no response template: calls are parsed as "
                '<tool_call>{"name": …, "arguments": {…}}</tool_call>'
            )

    def _choose_form(self, where: str) -> None:
        """Choose the plainest form in which the template shows answers; or raise DataError."""
        errors = []
        for form in FORMS:
            self.separates_calls, self.renders_calls = form
            try:
                return self._check_answers(where)
            except DataError as error:
                errors.append(error)
        raise errors[0]

    def _check_answers(self, where: str) -> None:
        """Raise DataError if the template does not show the answer to a second call."""
        # Some templates move the text behind the answers, so such a turn must have one.
        turn = ToolTurn([ToolCall("tool", {})], text="text" if self.renders_calls else "")
        first, *_ = _answers(turn, [_message("tool", "answer", ANSWERED)])
        second, *_ = _answers(turn, [_message("tool", "secondanswer", ANSWERED)])
        message = self.message(turn, "call")
        text = text_between(
            self.tokenizer,
            [{"role": "user", "content": "question"}, message, *first, message],
            second,
            where,
            renders_calls=self.renders_calls,
            tools=self.schemas,
        )
        if "secondanswer" not in text:
            raise DataError(f"{where}: the chat template ignores messages of the role tool")

    @property
    def template_options(self) -> dict[str, Any]:
        """The schemas, for chat templates that show tools."""
        return {"tools": self.schemas}

    def opening(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Describe the tools in a system message if the chat template ignores them."""
        if self.shows_tools:
            return list(messages)
        lines = [json.dumps(schema["function"], ensure_ascii=False) for schema in self.schemas]
        text = INSTRUCTIONS.format(tools="\n".join(lines))
        first = messages[0]
        if first["role"] != "system":
            return [{"role": "system", "content": text}, *messages]
        return [{**first, "content": with_text(first["content"], f"\n\n{text}")}, *messages[1:]]

    def parse(self, conversation: list[int], ids: list[int], text: str) -> ToolTurn:
        """Parse the calls of a turn."""
        try:
            if self.template is None:
                message = self.tokenizer.parse_response(
                    text, schema=DEFAULT_RESPONSE_TEMPLATE, prefix=""
                )
            else:
                message = self.tokenizer.parse_response(
                    ids, prefix=conversation, tools=self.schemas
                )
            calls = [_as_call(parsed) for parsed in message.get("tool_calls") or ()]
            if self.separates_calls:  # such a template may reject other ids
                calls = [
                    made if STRICT_ID.fullmatch(made.id) else made._replace(id="") for made in calls
                ]
            return ToolTurn(calls, text=text_of(message.get("content")))
        except Exception as error:  # the parser may raise anything on arbitrary text
            return ToolTurn((), str(error))

    def message(self, turn: ToolTurn, text: str) -> dict[str, Any]:
        """Return the message that repeats a turn in a chat."""
        if not self.separates_calls or not turn.tool_calls:
            return super().message(turn, text)
        return {"role": "assistant", "content": turn.text, "tool_calls": turn.tool_calls}

    def outcomes(self, observation: Any) -> list[str]:
        """Return the outcome of each call."""
        return [message["outcome"] for message in observation]


def _as_call(parsed: Any) -> ToolCall:
    """Convert a call from transformers' format. Raises ValueError if it is invalid."""
    function = parsed.get("function", parsed) if isinstance(parsed, dict) else parsed
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError("A call must be an object with a name.")
    arguments = function.get("arguments")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise ValueError("The arguments of a call must be an object.")
    written = parsed.get("id", function.get("id"))
    name = encodable(written) if isinstance(written, str) else ""
    return ToolCall(function["name"], arguments, name)


# ---------------------------------------------------------------------------------- the environment


class Tools(EnvironmentMaker):
    """Make environments from a class with tools as methods.

    Args:
        make: the class, or `functools.partial` of it.

    Raises:
        ValueError: a tool has no docstring, or a parameter has no description or type.
    """

    has_end = True
    expected = "a class with reset(**row), which returns a text or None, and tools"

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__(make)
        kind = _class_of(make)
        assert kind is not None
        self.kind = kind
        self.functions = _tool_functions(kind)
        given = getattr(kind, "tool_schemas", {})
        self.schemas = [
            given[name] if name in given else _schema(name, function)
            for name, function in self.functions.items()
        ]
        self.has_rewards = hasattr(kind, "get_reward")
        methods = [getattr(kind, name, None) for name in NOT_TOOLS]
        methods += self.functions.values()
        is_async = any(inspect.iscoroutinefunction(method) for method in methods)
        self.episode = _AsyncEpisode if is_async else _Episode

    def __call__(self) -> _Episode:
        return self.episode(self.make(), self.functions.keys())

    def turn_format(self, tokenizer: Any) -> ToolFormat:
        """Return the format of the calls; see `ToolFormat`."""
        where = f"environment {self.__name__!r}"
        return ToolFormat(tokenizer, self.schemas, where=where)

    def check(self, source: str, columns: Collection[str], processes: int = 1) -> None:
        """Raise ValueError if `reset` needs an argument that is no column of the prompts."""
        reset: Any = getattr(self.kind, "reset", None)
        if inspect.isfunction(reset):
            named = keywords_for(reset, dict.fromkeys(["prompt", *columns]))
            self.check_call("reset", reset, source, columns, [None], named)


def is_tool_class(make: Any) -> bool:
    """Return whether a class has `reset` and tools, but no `step`."""
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
        if not name.startswith("_") and name not in NOT_TOOLS
    }


def _schema(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    """Return the JSON schema of a tool."""
    from transformers.utils import get_json_schema  # slow to import

    for parameter in inspect.signature(function).parameters.values():
        unnamed = parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL)
        if unnamed and parameter.name != "self":
            raise ValueError(
                f"tool {name!r}: calls give arguments by name, so it can have no {parameter}"
            )
    try:
        return get_json_schema(function)
    except Exception as error:  # its own, or that of resolving a type hint
        raise ValueError(f"tool {name!r}: {error}") from error


class _Episode:
    """An environment of `fastppo.environments.pool` with `ToolTurn`s as turns.

    Args:
        environment: object of the user's class.
        tools: names of its tools.
    """

    def __init__(self, environment: Any, tools: Collection[str]) -> None:
        self.environment = environment
        self.tools = tools

    def reset(self, prompt: Any, /, **columns: Any) -> Any:
        """Return the prompt as messages, with the text that `reset` returned at its end."""
        return _append_text(prompt, self._bound_reset(prompt, columns)())

    def step(self, turn: ToolTurn) -> Any:
        """Return (one message per call, a reward of 0, whether there was no call)."""
        return _answers(turn, [self._answer(tool_call) for tool_call in turn.calls])

    def end(self, cut_off: Any) -> Any:
        """Return the reward of the episode. Calls of a truncated turn are not made."""
        get_reward = getattr(self.environment, "get_reward", None)
        return 0.0 if get_reward is None else get_reward()

    def close(self) -> Any:
        """Close the user's object."""
        close = getattr(self.environment, "close", None)
        return None if close is None else close()

    def _bound_reset(self, prompt: Any, columns: Mapping[str, Any]) -> Callable[[], Any]:
        reset = self.environment.reset
        return functools.partial(reset, **keywords_for(reset, {**columns, "prompt": prompt}))

    def _answer(self, tool_call: ToolCall) -> dict[str, Any]:
        """Call a tool. Return its message."""
        if refusal := self._refusal(tool_call):
            return refusal
        try:
            return _message(tool_call.name, call(self._bound(tool_call)), ANSWERED)
        except UserCodeError as error:
            return self._failure(tool_call, error)

    def _bound(self, tool_call: ToolCall) -> Callable[[], Any]:
        return functools.partial(getattr(self.environment, tool_call.name), **tool_call.arguments)

    def _refusal(self, tool_call: ToolCall) -> dict[str, Any] | None:
        """Return an error message if the tool is unknown or the arguments do not match."""
        if tool_call.name not in self.tools:
            return _error(tool_call.name, f"Tool {tool_call.name} not found.", UNKNOWN)
        try:
            inspect.signature(getattr(self.environment, tool_call.name)).bind(**tool_call.arguments)
        except TypeError as error:
            return _error(tool_call.name, str(error), MALFORMED)
        return None

    def _failure(self, tool_call: ToolCall, error: UserCodeError) -> dict[str, Any]:
        """Return the message of a tool that raised. Raise exceptions that stop the run."""
        cause = error.__cause__
        stop_on = getattr(self.environment, "stop_on", ())
        if not isinstance(cause, Exception) or isinstance(cause, stop_on):
            raise cause or error
        return _error(tool_call.name, str(cause), RAISED)


class _AsyncEpisode(_Episode):
    """An `_Episode` for classes with coroutine methods."""

    async def reset(self, prompt: Any, /, **columns: Any) -> Any:
        return _append_text(prompt, await _awaited(self._bound_reset(prompt, columns)()))

    async def step(self, turn: ToolTurn) -> Any:
        # In order: a call may depend on the effects of the one before.
        return _answers(turn, [await self._answer_async(tool_call) for tool_call in turn.calls])

    async def end(self, cut_off: Any) -> Any:
        return await _awaited(super().end(cut_off))

    async def close(self) -> Any:
        return await _awaited(super().close())

    async def _answer_async(self, tool_call: ToolCall) -> dict[str, Any]:
        if refusal := self._refusal(tool_call):
            return refusal
        try:
            return _message(tool_call.name, await await_call(self._bound(tool_call)), ANSWERED)
        except UserCodeError as error:
            return self._failure(tool_call, error)


async def _awaited(returned: Any) -> Any:
    return await returned if inspect.isawaitable(returned) else returned


def _append_text(prompt: Any, text: str | None) -> list[dict[str, Any]]:
    """Return the prompt as messages, with a text appended to the last one."""
    messages = list(prompt) if is_chat(prompt) else [{"role": "user", "content": prompt}]
    if text is None:
        return messages
    if not isinstance(text, str):
        raise TypeError(f"reset must return a text or None, got {type(text).__name__}")
    last = messages[-1]
    return [*messages[:-1], {**last, "content": with_text(last["content"], text)}]


def _answers(turn: ToolTurn, messages: list[dict[str, Any]]) -> tuple[Any, float, bool]:
    if turn.error:
        messages = [_error(NO_TOOL, turn.error, MALFORMED)]
    answers = [
        {**message, "tool_call_id": name}
        for name, message in zip(turn.call_ids, messages, strict=True)
    ]
    return answers, 0.0, not answers


def _message(name: str, returned: Any, outcome: str) -> dict[str, Any]:
    return {
        "role": "tool",
        "name": encodable(name),
        "content": encodable(str(returned)),
        "outcome": outcome,
    }


def _error(name: str, sentence: str, outcome: str) -> dict[str, Any]:
    return _message(name, {"error": sentence}, outcome)
