"""What makes the environments of a run, and the form in which they get the policy's turns.

A user's class or function makes plain environments, which read texts. What is special about
classes of tools and about agents is in the subclasses of `EnvironmentMaker` and `TurnFormat` next
to them; the runner of the turns knows neither.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from fastppo.plugins.calling import keywords_for


class PolicyTurn(NamedTuple):
    """A turn of the policy with its lengths."""

    text: str
    """The turn without its tool calls."""
    prompt_tokens: int
    """Tokens of the conversation before it."""
    completion_tokens: int
    """Tokens of the turn, stop token included."""
    tool_calls: Sequence[dict[str, Any]] = ()
    """Tool calls in the format of chat templates."""
    is_malformed: bool | None = None
    """Whether its tool calls could not be parsed; None without tools."""


class Conversation(NamedTuple):
    """A whole conversation that the next turn continues, in place of an observation.

    It need not continue the conversation of the last turn; see `fastppo.environments.episodes`.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    """Schemas of the tools that the policy reads."""
    may_call: bool = True
    """Whether calls in the next turn are parsed."""


SUCCESS_KEYS = ("is_success", "success")
"""Keys of an info dict that say whether an episode has reached its goal: the first is that of
Gymnasium-Robotics and Stable-Baselines3, the second that of Meta-World and ManiSkill."""


def success_in(info: Any) -> bool | None:
    """Return whether an episode has reached its goal; None if the info does not say so."""
    if isinstance(info, Mapping):
        for key in SUCCESS_KEYS:
            if key in info:
                return bool(info[key])
    return None


class StepInfo(NamedTuple):
    """What an environment says about an action, besides the reward."""

    invalid: bool | None = None
    """Whether the action was invalid; None if the environment does not say so."""
    outcome: str | None = None
    """Outcome of the episode, such as success."""


class TurnFormat:
    """The form in which an environment gets the policy's turns: plain texts."""

    has_calls = False
    """Whether observations have the outcomes of tool calls."""
    renders_calls = False
    """Whether the chat template must see the calls of a turn to write what follows it."""

    def of(self, conversation: Conversation) -> TurnFormat:
        """Return the format of a conversation's next turn."""
        return self

    def has_tools_of(self, other: TurnFormat) -> bool:
        """Return whether the policy reads the same tools in both formats."""
        return self is other

    @property
    def template_options(self) -> dict[str, Any]:
        """Keyword arguments of the chat template."""
        return {}

    def opening(self, messages: Any) -> Any:
        """Return the first observation as the policy reads it."""
        return messages

    def parse(self, conversation: list[int], ids: list[int], text: str) -> Any:
        """Convert a turn of the policy to the argument of `step`.

        Args:
            conversation: token ids before the turn.
            ids: token ids of the turn.
            text: the turn, without special tokens.
        """
        return text

    def message(self, turn: Any, text: str) -> dict[str, Any]:
        """Return the message that repeats a turn in a chat.

        Args:
            turn: as `parse` returned it.
            text: the turn, without special tokens.
        """
        return {"role": "assistant", "content": text}

    def is_malformed(self, turn: Any) -> bool | None:
        """Return whether a turn counts as an invalid action; None leaves it to the environment."""
        return None

    def outcomes(self, observation: Any) -> list[str]:
        """Return the outcomes of the tool calls that an observation answers."""
        return []


class EnvironmentMaker:
    """Makes environments by calling a user's class or function.

    Args:
        make: a class, or another callable without arguments, that returns an environment of
            `fastppo.environments.pool`.
    """

    has_rewards = True
    """Whether the environments pay rewards."""
    has_end = False
    """Whether environments have a method `end`, called after the last turn of every episode."""
    can_be_tried = True
    """Whether the dry run before a run may play a turn."""
    expected = (
        "a class without arguments that has reset(prompt, **columns), which returns a text, "
        "messages or None, and step(text), which returns (observation, reward, done)"
    )
    """Description of the interface in error messages."""
    fingerprint = ""
    """Fingerprint of the user's code, if it differs from that of `make`."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self.make = make
        named = make.func if isinstance(make, functools.partial) else make
        self.__name__ = getattr(named, "__name__", type(named).__name__)

    def __call__(self) -> Any:
        return self.make()

    def turn_format(self, tokenizer: Any) -> TurnFormat:
        """Return the form of the policy's turns.

        Args:
            tokenizer: the policy's.
        """
        return TurnFormat()

    def check(self, source: str, columns: Collection[str], processes: int = 1) -> None:
        """Check that the environments can be called with the columns of the prompts.

        Args:
            source: name of the prompts in error messages.
            columns: columns besides the prompt column.
            processes: number of processes, each with environments of its own.

        Raises:
            ValueError: a method is missing, or its signature does not fit.
        """
        self.check_call(self.__name__, self.make, source, columns)
        if not inspect.isclass(self.make):
            return
        for name in ("reset", "step"):
            method: Any = getattr(self.make, name, None)
            if method is None:
                raise ValueError(
                    f"environment: {self.__name__} has no method {name}; expected {self.expected}"
                )
            if inspect.isfunction(method):  # and not a static method or an object
                named = keywords_for(method, dict.fromkeys(columns)) if name == "reset" else {}
                self.check_call(name, method, source, columns, [None, ""], named)

    def check_call(
        self,
        name: str,
        function: Callable[..., Any],
        source: str,
        columns: Collection[str],
        arguments: Sequence[Any] = (),
        named: Mapping[str, Any] | None = None,
    ) -> None:
        """Raise ValueError unless a function can be called with these arguments."""
        signature = inspect.signature(function)
        try:
            signature.bind(*arguments, **named or {})
        except TypeError as error:
            if str(error).startswith("multiple values"):  # reset(self, seed), of Gymnasium
                error = TypeError("its first argument is the prompt, not a column")
            known = ", ".join(columns) or "none beside the prompt"
            raise ValueError(
                f"environment: {name} takes {signature}: {error}; expected {self.expected}; the "
                f"columns of {source} are: {known}"
            ) from None
