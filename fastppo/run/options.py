"""Options as dataclass fields: one definition gives YAML key, flag, help and bounds.

    @dataclass(kw_only=True, frozen=True)
    class LoopOptions(Options):
        \"\"\"Loop.\"\"\"

        epochs: int = option(1, "Passes over the data", minimum=1)

    @dataclass(kw_only=True, frozen=True)
    class Config(LoopOptions, OptimizerOptions):
        ...

`Config(epochs="2")` converts what YAML and flags leave as text, and refuses what is out of bounds
with the option's name, what it got and what it wants. Options are frozen, and lists in them are
tuples: `dataclasses.replace` makes others, which are checked anew. Each class that a config is made
of is a section of its help and of its YAML, under the first line of its docstring.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from fastppo.data.files import write_whole
from fastppo.functional import scalars
from fastppo.functional.scalars import describe
from fastppo.run.counterparts import counterpart
from fastppo.run.removed import is_unset, removal

MAX_INTEGER = 2**63 - 1
"""The largest option that is an integer: what a tensor holds."""

BOOLS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
"""Texts that a flag may have for a bool."""

TRACKERS = ("wandb",)


def option(
    default: Any,
    help: str,
    *,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
) -> Any:
    """A field with its help and bounds: `minimum` and `maximum` are allowed values, `above` not. A
    maximum goes with one of the others."""
    metadata = {"help": help, "bounds": (minimum, above, maximum)}
    default = tuple(default) if isinstance(default, list) else default
    return field(default=default, metadata=metadata)


@dataclass(kw_only=True, frozen=True)
class Options:
    """Base of the option classes; subclasses add fields, and `check` where options depend."""

    def __post_init__(self) -> None:
        own: Any = type(self)
        hints = _hints(own)
        for member in fields(self):
            value = _converted(member.name, getattr(self, member.name), hints[member.name])
            object.__setattr__(self, member.name, value)
            check_bounds(type(self), member.name, value)
        self.check()

    @classmethod
    def types(cls) -> dict[str, Any]:
        """The type of each option by its name."""
        own: Any = cls
        return _hints(own)

    @classmethod
    def hint(cls, name: str) -> str:
        """The end of an error about an unknown option: what replaced it, what TRL's option is
        called here, or the option that was meant."""
        known = [member.name for member in fields(cls)]
        if sentence := removal(name) or counterpart(name, set(known)):
            return f"; {sentence}"
        near = difflib.get_close_matches(name, known, n=1)
        return f"; did you mean {near[0]}?" if near else ""

    def check(self) -> None:
        """Raises ValueError where options do not go together."""

    @classmethod
    def sections(cls) -> dict[str, list[Field]]:
        """The fields under the headings of the classes that define them, in their order."""
        by_name = {member.name: member for member in fields(cls)}
        members_of: dict[str, list[Field]] = {}
        for owner in _in_order(cls):
            names = [name for name in inspect.get_annotations(owner) if name in by_name]
            heading = (owner.__doc__ or "").split("\n")[0].rstrip(".")
            members_of.setdefault(heading, []).extend(by_name.pop(name) for name in names)
        return {heading: members for heading, members in members_of.items() if members}

    def to_dict(self) -> dict[str, Any]:
        """Every option by name, section by section."""
        names = [member.name for section in self.sections().values() for member in section]
        values = {name: getattr(self, name) for name in names}
        return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}

    def save(self, path: str | Path) -> None:
        """Writes every option, defaults included, as YAML."""
        text = yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)
        write_whole(path, text)


@functools.cache
def _hints(options: type[Options]) -> dict[str, Any]:
    return get_type_hints(options)


def _in_order(cls: type) -> list[type]:
    """The option classes that `cls` inherits from, in the order of its definition, then `cls`
    itself."""
    bases: list[type] = []
    for base in cls.__bases__:
        bases += [member for member in _in_order(base) if issubclass(member, Options)]
    return [*dict.fromkeys(bases), cls]


def check_bounds(options: type[Options], name: str, value: Any) -> None:
    """Raises ValueError if `value` is outside the bounds of the option `name`."""
    (defined,) = (member for member in fields(options) if member.name == name)
    minimum, above, maximum = defined.metadata["bounds"]
    if isinstance(value, tuple):
        for item in value:
            check_bounds(options, name, item)
    if not isinstance(value, (int, float)):
        return
    if maximum is not None:
        allowed = minimum <= value <= maximum if above is None else above < value <= maximum
        if not allowed:
            interval = f"[{minimum}, {maximum}]" if above is None else f"({above}, {maximum}]"
            raise ValueError(f"{name} must be in {interval}, got {describe(value)}")
    elif minimum is not None:
        scalars.at_least(name, value, minimum)
    elif above is not None:
        scalars.at_least(name, value, above, strictly=True)


def _converted(name: str, value: Any, hint: Any) -> Any:
    """`value` as the option's type. YAML reads 1e-5 as a string, and 1 where 1.0 is meant."""
    if get_origin(hint) is Literal:
        sentence = removal(f"{name}={value}") if isinstance(value, str) else None
        if sentence and value not in get_args(hint):
            raise ValueError(sentence)
        return scalars.choice(name, value, get_args(hint))
    if get_origin(hint) in (Union, UnionType):
        (inner,) = (choice for choice in get_args(hint) if choice is not type(None))
        return None if value is None else _converted(name, value, inner)
    if get_origin(hint) is Sequence:
        if not isinstance(value, (list, tuple)):
            raise ValueError(f"{name} must be a list, [a, b], got {describe(value)}")
        return tuple(_converted(name, item, get_args(hint)[0]) for item in value)
    if hint is bool and isinstance(value, str) and value.lower() in BOOLS:
        return BOOLS[value.lower()]
    if hint in (int, float):
        number = _number(value, hint)
        if number is not None:
            return number
    elif isinstance(value, hint):
        if hint is str:
            _check_text(name, value)
        return value
    names = {int: "an integer", float: "a finite number", bool: "true or false", str: "a text"}
    raise ValueError(f"{name} must be {names[hint]}, got {describe(value)}")


def _number(value: Any, hint: type) -> Any:
    """A value of YAML or a flag as a number of this type; None if it is not a number."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    if hint is int and not isinstance(value, float):
        # Not through a float, which would round integers above 2⁵³.
        with suppress(ValueError):
            integer = int(value)
            return integer if abs(integer) <= MAX_INTEGER else None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    if not math.isfinite(number) or (hint is int and number != int(number)):
        return None
    if hint is int:
        return int(number) if abs(number) <= 2**53 else None
    return number


def _check_text(name: str, value: str) -> None:
    """Raises ValueError for a text that no file or terminal can hold, or that names no place."""
    if name == "output_dir" and not value:
        raise ValueError("output_dir must name a directory, such as . for the current one, got ''")
    if "\0" in value or (not value.isprintable() and _has_half_character(value)):
        raise ValueError(
            f"{name} must be a text without NUL or half characters, got {describe(value)}"
        )


def _has_half_character(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return True
    return False


def read_yaml(path: str | Path, options: type[Options]) -> dict[str, Any]:
    """The keys of a YAML file of options.

    Raises:
        ValueError: not a mapping, removed options, or unknown keys, each with `Options.hint`.
    """
    loaded = load_yaml(path)
    known = {member.name for member in fields(options)}
    sentences = []
    for key, value in loaded.items():
        if key in known:
            continue
        sentence = removal(key) if isinstance(key, str) else None
        if sentence is None:
            hint = options.hint(key) if isinstance(key, str) else ""
            sentences.append(f"{path}: no option {describe(key)}{hint}")
        elif not is_unset(key, value):
            sentences.append(f"{path}: {sentence}")
    if sentences:
        raise ValueError("\n".join(sentences))
    return {key: value for key, value in loaded.items() if key in known}


def load_yaml(path: str | Path) -> dict[str, Any]:
    """A YAML file of `key: value` lines.

    Raises:
        ValueError: it cannot be read, or holds something else.
    """
    if not Path(path).is_file():
        raise ValueError(f"there is no config file {path}")
    try:
        loaded = yaml.safe_load(Path(path).read_bytes()) or {}
    except OSError as error:
        raise ValueError(f"config file {path} cannot be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {_first_line(error)}") from error
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        # An impossible date, a number too long, nesting too deep, a tag without its value.
        raise ValueError(
            f"{path} holds a value that cannot be read: {_first_line(error)}"
        ) from None
    if not isinstance(loaded, dict):
        raise ValueError(f"{path}: expected `option: value` lines, got {type(loaded).__name__}")
    return loaded


def _first_line(error: Exception) -> str:
    """The message of an error without the lines of the file that it quotes."""
    mark = getattr(error, "problem_mark", None)
    where = "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
    text = getattr(error, "problem", None) or next(iter(str(error).splitlines()), "")
    return f"{text[:200]}{where}"


@dataclass(kw_only=True, frozen=True)
class WeightOptions(Options):
    """Weights and adapters."""

    param_dtype: Literal["float32", "bfloat16"] = option(
        "float32",
        "Dtype of the model's weights; in PPO the optimiser keeps bfloat16's in float32 besides, "
        "in the stages before it small updates are rounded away",
    )
    precision: Literal["auto", "bf16", "fp16", "fp32"] = option(
        "auto",
        "Compute dtype: bf16 or fp16 (autocast), or fp32; auto is bf16 on a GPU, fp32 on a CPU; "
        "fp16, with a loss scale and in PPO alone, is for GPUs without bf16",
    )
    attn_implementation: str = option(
        "auto", "auto (flash-attn if installed, else sdpa), sdpa, eager or flash_attention_2"
    )
    gradient_checkpointing: bool = option(False, "Recompute activations in backward: less memory")
    lora_rank: int = option(0, "Rank of LoRA adapters; 0 trains all weights. Needs peft", minimum=0)
    lora_alpha: float = option(32.0, "LoRA scale: the update is alpha/rank · BA", above=0)
    lora_target_modules: Sequence[str] | None = option(
        None, "Modules that get adapters; none given means all linear layers"
    )


@dataclass(kw_only=True, frozen=True)
class RanksOptions(Options):
    """Many GPUs."""

    shard_size: int | None = option(
        None,
        "Processes that hold one copy of the weights between them; none given means all of them",
        minimum=1,
    )


@dataclass(kw_only=True, frozen=True)
class SharingOptions(Options):
    """Trackers."""

    report_to: Sequence[str] = option(
        [], "Tracker besides TensorBoard, which is always written: wandb"
    )

    def check_sharing(self) -> None:
        """Raises ValueError for a tracker that is not known."""
        for name in self.report_to:
            if name not in TRACKERS:
                raise ValueError(
                    f"report_to must be one of {', '.join(TRACKERS)}, got {describe(name)}; "
                    "TensorBoard is always written, and PPOTrainer(callbacks=[…]) takes "
                    "transformers' callback of another tracker"
                )
