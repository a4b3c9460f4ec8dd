"""Writes docs/api.md: the public names, their signatures and their docstrings.

    python docs/make_api.py

A test fails when the page is not what the code says.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

import fastppo

PAGE = Path(__file__).parent / "api.md"
GROUPS = {
    "Losses": ("ppo_loss", "linear_ppo_loss", "policy_loss", "value_loss", "entropy", "total_loss"),
    "Statistics": ("token_stats", "token_logprobs", "linear_token_stats", "linear_token_logprobs"),
    "Advantages": ("compute_advantages", "gae", "whiten"),
    "Weights": ("aggregation_weights", "head_weight"),
    "Metrics": ("loss_metrics", "combine_sums"),
    "Results": ("PPOLoss", "TokenStats", "Advantages"),
    "The trainer": ("PPOTrainer", "PPOConfig"),
}
METHODS = ("train", "step", "evaluate", "save_checkpoint", "save_policy")
SECTION = re.compile(r"^(Args|Returns|Raises|Source):\s*(.*)$")
ENTRY = re.compile(r"^    (\S[^:]*): (.*)$")
DEEPER = " " * 5
"""A line that goes on with the entry above it begins so; one with four spaces begins anew."""

INTRO = """# API

`python docs/make_api.py` writes this page from the docstrings: every name of `fastppo.__all__`.
`[B, T]` is a shape, `(..., V)` one with any leading axes. B is the batch, T time, N tokens, V the
vocabulary, H the hidden size. [What the numbers mean](definitions.md) has the
formulas in one place."""


def page() -> str:
    """The whole page."""
    lines = [INTRO, "", "| | |", "|---|---|"]
    for heading, names in GROUPS.items():
        links = ", ".join(f"[`{name}`](#{_anchor(name)})" for name in names)
        lines.append(f"| {heading} | {links} |")
    for heading, names in GROUPS.items():
        lines += ["", f"## {heading}"]
        for name in names:
            lines += ["", *_entry(f"fastppo.{name}", getattr(fastppo, name))]
    return "\n".join(lines) + "\n"


def _anchor(name: str) -> str:
    """The anchor that GitHub gives the heading of a name."""
    return f"fastppo{name}".lower()


def _entry(title: str, thing: Any) -> list[str]:
    lines = [f"### `{title}`", ""]
    if inspect.isclass(thing) and issubclass(thing, tuple):
        return [*lines, *_prose(thing.__doc__), "", "**Fields**", "", *_fields(thing)]
    if title.endswith("PPOConfig"):
        link = "Its fields are the options: [Defaults](defaults.md)."
        return [*lines, *_prose(thing.__doc__), "", link]
    lines += ["```py", _signature(title, thing), "```", "", *_prose(thing.__doc__)]
    if inspect.isclass(thing):
        for method in METHODS:
            function = getattr(thing, method)
            lines += ["", f"#### `{title}.{method}`", ""]
            lines += [
                "```py",
                _signature(method, function),
                "```",
                "",
                *_prose(function.__doc__),
            ]
    return lines


def _fields(record: type) -> list[str]:
    """The fields of a record, each with the string below it in the source."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(record))).body
    assert isinstance(definition, ast.ClassDef)
    lines: list[str] = []
    for node in definition.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            lines.append(f"- `{node.target.id}`")
        elif lines and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines[-1] += f": {' '.join(str(node.value.value).split())}"
    return lines


def _signature(name: str, function: Any) -> str:
    """One line where it fits, else one parameter a line, without annotations."""
    signature = inspect.signature(function)
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in signature.parameters.values()
        if parameter.name != "self"
    ]
    bare = signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty)
    text = f"{name}{bare}".replace("'", '"')
    if len(text) <= 100:
        return text
    inner = text.removeprefix(name)[1:-1]
    return f"{name}(\n    " + ",\n    ".join(_split(inner)) + ",\n)"


def _split(text: str) -> list[str]:
    """At the commas that are in no bracket."""
    pieces, depth, start = [], 0, 0
    for i, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            pieces.append(text[start:i].strip())
            start = i + 1
    return [*pieces, text[start:].strip()]


def _prose(docstring: str | None) -> list[str]:
    """Markdown of a docstring: names of its sections in bold, their entries as a list."""
    lines: list[str] = []
    section, in_list = "", False
    for line in inspect.cleandoc(docstring or "").splitlines():
        heading, entry = SECTION.match(line), ENTRY.match(line)
        if heading:
            section, in_list = heading[1], False
            lines.append(f"**{section}**" + (f": {heading[2]}" if heading[2] else ""))
            lines += [] if heading[2] else [""]
        elif section in ("Args", "Raises") and entry:
            lines.append(f"- `{entry[1]}`: {entry[2]}")
            in_list = True
        elif section and line.startswith(DEEPER):
            lines.append(f"  {line.strip()}" if in_list else line.strip())
        elif section and line:
            lines += ["", line.strip()] if in_list else [line.strip()]
            in_list = False
        else:
            lines.append(line)
    while lines and not lines[-1]:
        lines.pop()
    return lines


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
