"""Contents of messages in a form that the chat template shows.

A content is a string, or a list of parts such as `{"type": "text", "text": …}`. Templates of
vision-language models often take parts alone and render a string as nothing; others take strings
alone and render the `repr` of parts. Which forms a template shows is found once for each role, by
rendering the conversation with marks as contents, and contents of the other form are converted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from fastppo.data.datasets import DataError

Messages = Sequence[Mapping[str, Any]]

IMAGES = ("image", "image_url", "input_image")
"""Types of parts that are images."""

_known: dict[tuple[str, str], frozenset[type]] = {}
"""Forms that a template shows for a role, `str` or `list`, by template and role."""


def shown_contents(
    messages: Messages, template: str, render: Callable[[list[dict[str, Any]]], str], where: str
) -> list[dict[str, Any]]:
    """Return messages whose contents the chat template shows, and without null fields in parts.

    Args:
        template: the chat template.
        render: applies it to messages; raises DataError if it rejects them.
        where: the start of an error message.

    Raises:
        DataError: the template shows the content of a message in no form.
    """
    plain = [{**message, "content": _without_nulls(message["content"])} for message in messages]
    roles = dict.fromkeys(message["role"] for message in plain if _has_mark(message))
    if any((template, role) not in _known for role in roles):
        forms = _forms_shown(plain, list(roles), render)
        if forms is None:
            return plain  # the template rejects the conversation, and rendering it says why
        for role, shown in forms.items():
            if not shown:
                raise DataError(
                    f"{where}: the chat template ignores messages of the role {role}: it shows "
                    "their content neither as a string nor as parts"
                )
            _known[template, role] = frozenset(shown)
    return [
        _converted(message, _known.get((template, message["role"])), where) for message in plain
    ]


def refuse_images(messages: Messages, where: str) -> None:
    """Raise DataError if a message has an image, where only text is read."""
    if any(part.get("type") in IMAGES for message in messages for part in _parts(message)):
        raise DataError(
            f"{where}: a message has an image, but images are supported only in the data set of a "
            "vision-language model"
        )


def _forms_shown(
    messages: list[dict[str, Any]],
    roles: Sequence[str],
    render: Callable[[list[dict[str, Any]]], str],
) -> dict[str, set[type]] | None:
    """Return the forms of contents that are shown, by role; None if every form is rejected."""
    marks = {role: f"content{number}mark" for number, role in enumerate(roles)}
    as_strings = _roles_shown(messages, marks, (), render)
    as_parts = _roles_shown(messages, marks, roles, render)
    shown = [(as_strings, ()), (as_parts, roles)]
    strings = as_strings or []
    if not {*strings, *(as_parts or [])}.issuperset(roles):
        # Some roles need strings, and others parts.
        rest = [role for role in roles if role not in strings]
        shown.append((_roles_shown(messages, marks, rest, render), rest))
    if all(found is None for found, _ in shown):
        return None
    forms: dict[str, set[type]] = {role: set() for role in roles}
    for found, with_parts in shown:
        for role in found or ():
            forms[role].add(list if role in with_parts else str)
    return forms


def _roles_shown(
    messages: list[dict[str, Any]],
    marks: Mapping[str, str],
    with_parts: Collection[str],
    render: Callable[[list[dict[str, Any]]], str],
) -> list[str] | None:
    """Render marks as contents, as parts for the roles in `with_parts` and as strings for others.

    Returns:
        The roles whose marks are shown; None if the template rejects the conversation.
    """
    marked = []
    for message in messages:
        if _has_mark(message):
            content: Any = marks[message["role"]]
            if message["role"] in with_parts:
                content = [{"type": "text", "text": content}]
            message = {**message, "content": content}
        marked.append(message)
    try:
        text = render(marked)
    except DataError:
        return None
    for mark in marks.values():
        # A template of strings renders a list in Python or JSON.
        text = text.replace(f"'text': '{mark}'", "").replace(f'"text": "{mark}"', "")
    return [role for role, mark in marks.items() if mark in text]


def _has_mark(message: Mapping[str, Any]) -> bool:
    """Return whether a mark takes the place of a message's content.

    Some templates leave out the content of a turn with calls of tools, or of None.
    """
    content = message["content"]
    is_parts = isinstance(content, list) and len(content) == len(_parts(message)) > 0
    return (isinstance(content, str) or is_parts) and not message.get("tool_calls")


def _converted(
    message: dict[str, Any], forms: frozenset[type] | None, where: str
) -> dict[str, Any]:
    content = message["content"]
    if forms is None or type(content) in forms or not isinstance(content, (str, list)):
        return message
    if isinstance(content, str):
        return {**message, "content": [{"type": "text", "text": content}]}
    parts = _parts(message)
    if len(parts) < len(content) or any(part["type"] != "text" for part in parts):
        raise DataError(
            f"{where}: the chat template takes text alone in messages of the role "
            f"{message['role']}, got parts of another type"
        )
    return {**message, "content": "".join(part["text"] for part in parts)}


def _parts(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the parts of a message's content that have a type."""
    content = message["content"]
    if not isinstance(content, (list, tuple)):
        return []
    return [part for part in content if isinstance(part, Mapping) and "type" in part]


def without_nulls(part: Any) -> Any:
    """Return a part of a content without the null fields that Parquet adds for other types.

    Some templates take any part with a key `image` for an image.
    """
    if not isinstance(part, Mapping):
        return part
    if part.get("type") == "text":
        return {"type": "text", "text": part.get("text") or ""}
    return {name: value for name, value in part.items() if value is not None}


def _without_nulls(content: Any) -> Any:
    return list(map(without_nulls, content)) if isinstance(content, (list, tuple)) else content
