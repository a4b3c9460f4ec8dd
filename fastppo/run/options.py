"""Options as dataclass fields: one definition gives the YAML key, the flag, its help and bounds.

    @dataclass(kw_only=True, frozen=True)
    class LoopOptions(Options):
        \"\"\"Loop.\"\"\"

        epochs: int = option(1, "Passes over the data", minimum=1)

    @dataclass(kw_only=True, frozen=True)
    class Config(LoopOptions, OptimizerOptions):
        ...

`Config(epochs="2")` converts the text that YAML and flags give. A wrong type, a value out of bounds
or an unknown name raises an error with the option's name. Options are frozen and their lists become
tuples: use `dataclasses.replace` to change one. Each base class of a config is a section of its
help and its YAML, under the first line of its docstring.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Self, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from fastppo.data.files import write_whole
from fastppo.functional import scalars
from fastppo.functional.scalars import describe
from fastppo.other_names import ANSWERS, OTHER_VALUES
from fastppo.plugins import entry_points
from fastppo.run.former_names import FORMER_NAMES, REMOVED
from fastppo.run.other_names import other_projects_option

BOOLS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
"""Flag values of a bool."""

Mapped = TypeVar("Mapped", bound="Options")


def option(
    default: Any,
    help: str,
    *,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    choices: Collection[str] = (),
    needs: str = "",
) -> Any:
    """Define a field with help and bounds.

    `minimum` and `maximum` are allowed values, `above` is not. `maximum` needs one of the others.

    Args:
        choices: the allowed values of a string that are known elsewhere; a `Literal` has its own.
        needs: condition without which the option has no effect, such as `lora_rank`, which must be
            on, `kl_controller=adaptive/penalty`, `learning_rate!=auto`, or several with `and`, and
            then `or`. `file.py:name` stands for any function of the user.
    """
    metadata = {
        "help": help,
        "bounds": (minimum, above, maximum),
        "choices": tuple(choices),
        "needs": needs,
    }
    default = tuple(default) if isinstance(default, list) else default
    return field(default=default, metadata=metadata)


@dataclass(kw_only=True, frozen=True)
class Options:
    """Base of the option classes. Subclasses add fields, and `check` for combinations."""

    def __new__(cls, **values: Any) -> Self:
        """Refuse unknown names with a suggestion; the generated `__init__` would not give one."""
        for name in values:
            if name not in cls.__dataclass_fields__:
                raise TypeError(f"{cls.__name__}: {cls.unknown(name)}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        types = self.types()
        for member in fields(self):
            value = _converted(member.name, getattr(self, member.name), types[member.name])
            object.__setattr__(self, member.name, value)
            check_bounds(type(self), member.name, value)
        self.check()

    @classmethod
    def types(cls) -> dict[str, Any]:
        """Return the type of each option."""
        own: Any = cls  # to mypy the class of a dataclass is not hashable
        return _type_hints(own)

    @classmethod
    def unknown(cls, name: str, dashes: str = "") -> str:
        """Return the error about an unknown option, with its successor or the nearest name.

        Args:
            dashes: `--` shows the names as flags.
        """
        known = [member.name for member in fields(cls)]
        sentence = f"no option {describe(dashes + name)}"
        belonged_to, answer = REMOVED.get(name, ("", ""))
        if belonged_to in known:
            return f"{sentence}: {answer}"
        if name in ANSWERS:
            return f"{sentence}: {ANSWERS[name]}"
        successor = FORMER_NAMES.get(name, "")
        if successor.partition("=")[0] in known:
            meant: list[str] | None = [successor]
        else:
            meant = other_projects_option(name, known)
        if meant is None:
            meant = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
        question = " or ".join(dashes + option for option in meant)
        return f"{sentence}; did you mean {question}?" if question else sentence

    def check(self) -> None:
        """Raise ValueError for options that exclude each other."""

    def is_set(self, name: str) -> bool:
        """Return whether an option differs from its default."""
        return getattr(self, name) != self.__dataclass_fields__[name].default

    def is_on(self, name: str) -> bool:
        """Return whether an option is not empty, 0, false or none."""
        return bool(getattr(self, name))

    @classmethod
    def sections(cls) -> dict[str, list[Field]]:
        """Return the fields by heading, in the order of the base classes."""
        by_name = {member.name: member for member in fields(cls)}
        members_of: dict[str, list[Field]] = {}
        for owner in _in_order(cls):
            names = [name for name in inspect.get_annotations(owner) if name in by_name]
            heading = (owner.__doc__ or "").split("\n")[0].rstrip(".")
            members_of.setdefault(heading, []).extend(by_name.pop(name) for name in names)
        return {heading: members for heading, members in members_of.items() if members}

    def to_dict(self) -> dict[str, Any]:
        """Return every option by name, section by section."""
        names = [member.name for section in self.sections().values() for member in section]
        values = {name: getattr(self, name) for name in names}
        return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}

    def save(self, path: str | Path) -> None:
        """Write every option, defaults included, as YAML."""
        text = yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)
        write_whole(path, text)


def has_effect(config: Options, name: str, passed: Container[str] = ()) -> bool:
    """Return whether the condition holds that an option needs.

    An option without an effect does not meet the condition of another one.

    Args:
        passed: options whose part is given in Python, and counts as on.
    """

    def holds(condition: str) -> bool:
        name, equals, values = condition.partition("=")
        if not equals:
            return name in passed or config.is_on(name)
        other = name.removesuffix("!")
        if not has_effect(config, other, passed):
            return False
        value = getattr(config, other)
        shown = "none" if value is None else str(value).lower()
        if ":" in shown:
            shown = "file.py:name"
        return (shown in values.split("/")) != name.endswith("!")

    needs = config.__dataclass_fields__[name].metadata["needs"]
    return not needs or any(all(map(holds, each.split(" and "))) for each in needs.split(" or "))


def unused(config: Options, passed: Container[str] = ()) -> list[str]:
    """Return a sentence for each option that is set and has no effect.

    Args:
        passed: options whose part is given in Python, and counts as on.
    """
    return [
        f"set, but not used: {member.name}, which needs {member.metadata['needs']}"
        for member in fields(config)
        if config.is_set(member.name) and not has_effect(config, member.name, passed)
    ]


def read_mapping(name: str, given: Mapping[str, Any] | None, options: type[Mapped]) -> Mapped:
    """Return the options in the mapping that the option `name` holds.

    Raises:
        ValueError: a key is unknown, or a value is wrong.
    """
    known = [member.name for member in fields(options)]
    for key in given or {}:
        if key not in known:
            raise ValueError(f"{name}: {options.unknown(key)}; it takes {', '.join(known)}")
    try:
        return options(**given or {})
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


@functools.cache
def _type_hints(options: type[Options]) -> dict[str, Any]:
    return get_type_hints(options)


def _in_order(cls: type) -> list[type]:
    """Return the option classes among the bases of `cls` as they are written, then `cls`."""
    bases: list[type] = []
    for base in cls.__bases__:
        bases += [member for member in _in_order(base) if issubclass(member, Options)]
    return [*dict.fromkeys(bases), cls]


def check_bounds(options: type[Options], name: str, value: Any) -> None:
    """Raise ValueError if `value` is not among the choices or outside the bounds of an option."""
    metadata = options.__dataclass_fields__[name].metadata
    minimum, above, maximum = metadata["bounds"]
    if metadata["choices"]:
        scalars.choice(name, value, metadata["choices"])
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


def inner_type(hint: Any) -> tuple[Any, tuple[str, ...]]:
    """Return the type of a value other than None, and the words allowed in its place.

    `float | Literal["auto"] | None` is (float, ("auto",)).
    """
    if get_origin(hint) not in (Union, UnionType):
        return hint, ()
    inner, *others = (choice for choice in get_args(hint) if choice is not type(None))
    return inner, tuple(word for other in others for word in get_args(other))


def _converted(name: str, value: Any, hint: Any, words: Sequence[str] = ()) -> Any:
    """Return `value` as the option's type. YAML reads 1e-5 as a string and 1 as an integer.

    Args:
        words: also allowed, for the error message.
    """
    if get_origin(hint) is Literal:
        meant = OTHER_VALUES.get(name, {}).get(value) if isinstance(value, str) else None
        if meant is not None:
            raise ValueError(f"{name} {describe(value)} is written {meant}")
        return scalars.choice(name, value, get_args(hint))
    if get_origin(hint) in (Union, UnionType):
        inner, words = inner_type(hint)
        nothing = (None, "none") if inner in (int, float) else (None,)
        if value in nothing and type(None) in get_args(hint):
            return None
        if value in words:
            return value
        return _converted(name, value, inner, words)
    if get_origin(hint) is Sequence:
        if value == "none":
            return ()
        if not isinstance(value, (list, tuple)):
            raise ValueError(f"{name} must be a list, [a, b], got {describe(value)}")
        return tuple(_converted(name, item, get_args(hint)[0]) for item in value)
    if get_origin(hint) is Mapping:
        value = yaml.safe_load(value) if isinstance(value, str) else value
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise ValueError(f"{name} must be a mapping, {{a: 1, b: 2}}, got {describe(value)}")
        return dict(value)
    if hint is bool and isinstance(value, str) and value.lower() in BOOLS:
        return BOOLS[value.lower()]
    if hint in (int, float):
        number = _number(value, hint)
        if number is not None:
            return number
    elif isinstance(value, hint):
        return value
    names = {int: "an integer", float: "a finite number", bool: "true or false", str: "a string"}
    expected = " or ".join([names[hint], *words])
    raise ValueError(f"{name} must be {expected}, got {describe(value)}")


def _number(value: Any, kind: type) -> float | None:
    """Return a value of YAML or a flag as an int or a float; None if it is neither."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    if not math.isfinite(number):
        return None
    if kind is int:
        return int(number) if number.is_integer() else None
    return number


def read_yaml(path: str | Path, options: type[Options]) -> dict[str, Any]:
    """Read the options of a YAML file.

    Raises:
        ValueError: the file is not a mapping, or holds unknown options.
    """
    loaded = load_yaml(path)
    known = {member.name for member in fields(options)}
    unknown = {key: value for key, value in loaded.items() if key not in known}
    if unknown:
        names = _dotted_names(unknown)
        raise ValueError("\n".join(f"{path}: {options.unknown(name)}" for name in names))
    return loaded


def _dotted_names(sections: Mapping[Any, Any]) -> list[str]:
    """Return the names of nested sections, as `algorithm.gamma` in verl's configs."""
    names = []
    for key, value in sections.items():
        if isinstance(value, Mapping) and value:
            names += [f"{key}.{name}" for name in _dotted_names(value)]
        else:
            names.append(str(key))
    return names


def load_yaml(path: str | Path) -> dict[str, Any]:
    """Read a YAML file of `key: value` lines.

    Raises:
        ValueError: the file is missing, is not valid YAML, or is not a mapping.
    """
    if not Path(path).is_file():
        raise ValueError(f"there is no config file {path}")
    try:
        with open(path, "rb") as file:
            loaded = yaml.safe_load(file) or {}
    except (yaml.YAMLError, ValueError) as error:  # ValueError: an impossible date
        raise ValueError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(loaded, dict):
        raise ValueError(f"{path}: expected `option: value` lines, got {type(loaded).__name__}")
    return loaded


@dataclass(kw_only=True, frozen=True)
class WeightOptions(Options):
    """Weights and adapters."""

    param_dtype: Literal["float32", "bfloat16"] = option(
        "float32",
        "Dtype of the weights. With bfloat16 the optimizer keeps float32 master weights",
    )
    precision: Literal["auto", "bf16", "fp16", "fp32"] = option(
        "auto",
        "Compute dtype: fp32, or autocast to bf16 or fp16. auto is bf16 on a GPU and fp32 on a "
        "CPU. fp16 uses a loss scale and is for PPO only, on GPUs without bf16",
    )
    attn_implementation: str = option(
        "auto",
        "Attention of transformers, such as sdpa; auto: flash_attention_2 on a GPU if it is "
        "installed and the weights are in bfloat16, else the model's default",
    )
    gradient_checkpointing: bool = option(
        False, "Recompute activations in the backward pass to save memory"
    )
    lora_rank: int = option(
        0, "Rank of the LoRA adapters, which need peft; 0 trains all weights", minimum=0
    )
    lora_alpha: float = option(
        32.0,
        "Scale of the LoRA adapters: the update is alpha/rank · BA",
        above=0,
        needs="lora_rank",
    )
    lora_target_modules: Sequence[str] | None = option(
        None, "Modules that get adapters; default: all linear layers", needs="lora_rank"
    )


@dataclass(kw_only=True, frozen=True)
class RanksOptions(Options):
    """Many GPUs."""

    shard_size: int | None = option(
        None,
        "Number of processes that share one copy of the weights; default: all of them",
        minimum=1,
    )


@dataclass(kw_only=True, frozen=True)
class SharingOptions(Options):
    """Trackers."""

    report_to: Sequence[str] = option([], "Trackers to use in addition to TensorBoard: wandb")

    def check_sharing(self) -> None:
        """Raise ValueError for an unknown tracker."""
        if self.report_to == ("none",):  # as in transformers
            object.__setattr__(self, "report_to", ())
        for name in self.report_to:
            trackers = entry_points.names(entry_points.TRACKERS)
            if name not in trackers:
                raise ValueError(
                    f"report_to must be one of {', '.join(trackers)}, got {describe(name)}; "
                    "TensorBoard is always on, and PPOTrainer(callbacks=[…]) takes transformers' "
                    "callbacks of other trackers"
                )
