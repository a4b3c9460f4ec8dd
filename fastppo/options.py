"""Options as dataclass fields: one definition gives YAML key, flag, help and bounds.

    @dataclass(kw_only=True, slots=True)
    class Config(Options):
        epochs: int = option(1, "Passes over the data", minimum=1)

`Config(epochs="2")` converts what YAML and flags leave as text, and refuses what is out of bounds
with the option's name, what it got and what it wants.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from fastppo import validation


def option(
    default: Any,
    help: str,
    *,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
) -> Any:
    """A field with its help and bounds: `minimum` and `maximum` are allowed values, `above` not."""
    metadata = {"help": help, "bounds": (minimum, above, maximum)}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(kw_only=True, slots=True)
class Options:
    """Base of the option classes; subclasses add fields, and `check` where options depend."""

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for each in fields(self):
            value = _converted(each.name, getattr(self, each.name), hints[each.name])
            setattr(self, each.name, value)
            check_bounds(type(self), each.name, value)
        self.check()

    def check(self) -> None:
        """Raises ValueError where options do not go together."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def save(self, path: str | Path) -> None:
        """Writes every option, defaults included, as YAML."""
        text = yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)
        Path(path).write_text(text, encoding="utf-8")


def check_bounds(options: type[Options], name: str, value: Any) -> None:
    """Raises ValueError if `value` is outside the bounds of the option `name`."""
    (found,) = (each for each in fields(options) if each.name == name)
    minimum, above, maximum = found.metadata["bounds"]
    if not isinstance(value, (int, float)):
        return
    if maximum is not None:
        low = (minimum or 0) if above is None else above
        inside = low <= value <= maximum if above is None else low < value <= maximum
        if not inside:
            bracket = "[" if above is None else "("
            raise ValueError(f"{name} must be in {bracket}{low}, {maximum}], got {value!r}")
    elif minimum is not None:
        validation.at_least(name, value, minimum)
    elif above is not None:
        validation.at_least(name, value, above, strictly=True)


def _converted(name: str, value: Any, hint: Any) -> Any:
    """`value` as the option's type. YAML reads 1e-5 as a string, and 1 where 1.0 is meant."""
    if get_origin(hint) is Literal:
        return validation.choice(name, value, get_args(hint))
    if get_origin(hint) in (Union, UnionType):
        (inner,) = (choice for choice in get_args(hint) if choice is not type(None))
        return None if value is None else _converted(name, value, inner)
    if get_origin(hint) is list:
        if not isinstance(value, (list, tuple)):
            raise ValueError(f"{name} must be a list, got {value!r}")
        return [_converted(name, item, get_args(hint)[0]) for item in value]
    if hint in (int, float) and not isinstance(value, bool):
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if math.isfinite(number) and (hint is float or number == int(number)):
            return hint(number)
    elif isinstance(value, hint):
        return value
    names = {int: "an integer", float: "a finite number", bool: "true or false", str: "a text"}
    raise ValueError(f"{name} must be {names[hint]}, got {value!r}")


def read_yaml(path: str | Path, options: type[Options]) -> dict[str, Any]:
    """The keys of a YAML file of options.

    Raises:
        ValueError: no mapping, or a key that is no option; the nearest option is named.
    """
    if not Path(path).is_file():
        raise ValueError(f"there is no config file {path}")
    try:
        loaded = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(loaded, dict):
        raise ValueError(f"{path}: want `option: value` lines, got {type(loaded).__name__}")
    known = [each.name for each in fields(options)]
    for key in loaded:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"{path}: no option {key!r}{hint}")
    return loaded
