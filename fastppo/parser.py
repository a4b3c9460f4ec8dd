"""Parsers of the commands, with one flag per field of an option class.

A command is a decorated function. `--config FILE` reads the options of its class from YAML; flags
override the file. Only the command in use imports its option class, so help is fast.
"""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args, get_origin

if TYPE_CHECKING:
    from fastppo.run.options import Options

DESCRIPTION = "PPO for language models: the loss in one pass over the logits, or without logits."

EPILOG = (
    "`fastppo demo` runs all three stages; `fastppo recipe` lists complete examples; "
    "`fastppo COMMAND --help` lists the options of a command."
)

FLAG_WIDTH = 32
"""Columns of a flag and its value in help texts."""

DEFAULT = "default"
"""Value of a flag that sets the option to its default, whatever the YAML file has."""

COMMANDS: dict[str, Command] = {}
"""All commands by name, in the order of the help."""


@dataclass(kw_only=True)
class Command:
    """Decorator that makes a function a command of its name.

    The function gets the flags as keywords. Its first argument is the options, if the command has
    an option class, or the remaining arguments, if it `takes_more`.
    """

    help: str
    description: str = ""
    """First lines of the command's help; default `help`."""
    options: str = ""
    """`module:class` of the options."""
    required: tuple[str, ...] = ()
    """Options without a default."""
    flags: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Flags that are not options, with the keywords of `add_argument`."""
    usage: str | None = None
    takes_more: bool = False
    """Pass unknown arguments to the function."""
    run: Callable[..., int | None] = field(init=False)

    def __call__(self, run: Callable[..., int | None]) -> Callable[..., int | None]:
        self.run = run
        COMMANDS[run.__name__] = self
        return run

    def option_class(self) -> Any:
        """Import the class of the options."""
        module, name = self.options.split(":")
        return getattr(importlib.import_module(module), name)


class Parsed(NamedTuple):
    """A parsed command line."""

    command: Command
    options: Any
    """The options, or the remaining arguments of a command without any."""
    flags: dict[str, Any]
    """The flags that are not options, by name."""
    config_file: str | None = None


class Parser(argparse.ArgumentParser):
    """A parser without abbreviated flags: a new option would change their meaning."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(allow_abbrev=False, argument_default=argparse.SUPPRESS, **keywords)
        self.sections: dict[str, list[argparse.Action]] = {}
        """Flags of an option class by heading."""


class _SectionHelp(argparse.Action):
    """`--help` prints all options, `--help kl` those with the word in section, name or help."""

    def __call__(self, parser: Any, namespace: Any, value: Any, option: Any = None) -> None:
        if value is None:
            parser.print_help()
            parser.exit()
        word = str(value).lower()
        formatter = parser.formatter_class(prog=parser.prog)
        has_matches = False
        for heading, flags in parser.sections.items():
            matches = [
                flag
                for flag in flags
                if any(word in text.lower() for text in (heading, *flag.option_strings, flag.help))
            ]
            if matches:
                has_matches = True
                formatter.start_section(heading)
                formatter.add_arguments(matches)
                formatter.end_section()
        if not has_matches:
            titles = ", ".join(parser.sections)
            parser.error(f"no option mentions {value!r}; the sections are: {titles}")
        print(formatter.format_help(), end="")
        parser.exit()


def build_parser(command_in_use: str | None = None) -> tuple[Parser, dict[str, Parser]]:
    """Build the parser of the program.

    Args:
        command_in_use: the only command that gets its flags, and imports its option class.

    Returns:
        (the parser, the parsers of the commands by name).
    """
    import fastppo

    parser = Parser(prog="fastppo", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("--version", action="version", version=f"fastppo {fastppo.__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    parsers: dict[str, Parser] = {}
    for name, command in COMMANDS.items():
        description = command.description or f"{command.help}."
        if command.options:
            description += (
                f"\n\n{command.help}.\nFlags override the options of a YAML file; "
                f"`--OPTION {DEFAULT}` unsets one."
            )
        parsers[name] = subparsers.add_parser(
            name,
            help=command.help,
            usage=f"fastppo {name} [--config FILE] [--OPTION VALUE ...]"
            if command.options
            else command.usage,
            description=description,
            formatter_class=_raw_formatter if command.options else argparse.HelpFormatter,
            # `bench` and `conformance` forward --help; options have _SectionHelp.
            add_help=name not in ("bench", "conformance") and not command.options,
        )
        if name != command_in_use:
            continue
        for flag, keywords in command.flags.items():
            parsers[name].add_argument(flag, **keywords)
        if command.options:
            add_options(parsers[name], command.option_class())
    return parser, parsers


def _raw_formatter(prog: str) -> argparse.HelpFormatter:
    return argparse.RawDescriptionHelpFormatter(prog, max_help_position=FLAG_WIDTH)


def add_options(parser: Parser, options: type[Options]) -> None:
    """Add `--help [WORD]`, `--config FILE` and one flag per option, by section.

    Flags stay strings: the option class converts and checks them.
    """
    parser.add_argument(
        "-h",
        "--help",
        action=_SectionHelp,
        nargs="?",
        metavar="WORD",
        help="show all options, or those with a word in section, name or help: --help kl",
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file of `option: value` lines")
    defaults = options().to_dict()
    types = options.types()
    for heading, members in options.sections().items():
        group = parser.add_argument_group(heading)
        flags = []
        for member in members:
            help = member.metadata["help"] + _default_text(defaults[member.name])
            if member.metadata["needs"]:
                help += f" [needs {member.metadata['needs']}]"
            keywords = _value_keywords(types[member.name], member.metadata["choices"])
            flag = group.add_argument(f"--{member.name}", help=help.replace("%", "%%"), **keywords)
            flags.append(flag)
        parser.sections[heading] = flags


def _default_text(value: Any) -> str:
    """Return the default as it is typed, or nothing for an unset option."""
    if value in ("", [], None):
        return ""
    if isinstance(value, list):
        return f" (default: {', '.join(map(repr, value))})"
    return f" (default: {str(value).lower() if isinstance(value, bool) else value})"


def _value_keywords(hint: Any, choices: Sequence[str] = ()) -> dict[str, Any]:
    """Return the keywords of `add_argument` for an option of this type."""
    from fastppo.run.options import inner_type

    if choices:
        return {"metavar": "|".join(choices)}
    hint, words = inner_type(hint)
    if get_origin(hint) is Mapping:
        return {"metavar": "YAML"}
    if get_origin(hint) is Literal:
        return {"metavar": "|".join(get_args(hint))}
    metavars = {int: "INT", float: "NUMBER", bool: "true|false", str: "TEXT"}
    if get_origin(hint) is Sequence:
        return {"nargs": "*", "metavar": metavars[get_args(hint)[0]]}
    if hint is bool:  # a bare flag means true
        return {"nargs": "?", "const": "true", "metavar": "|".join([metavars[bool], *words])}
    return {"metavar": "|".join([metavars[hint], *words])}


def parse(name: str, arguments: Sequence[str]) -> Any:
    """Parse the arguments of a command; return its options.

    Raises:
        ValueError: a value is invalid.
        SystemExit: a flag is unknown, or a required option is missing.
    """
    return parse_command([name, *arguments]).options


def parse_command(arguments: list[str]) -> Parsed:
    """Parse a command line. `--some-option` is the same as `--some_option`."""
    parser, parsers = build_parser(arguments[0])
    if arguments[0] in COMMANDS and COMMANDS[arguments[0]].options:
        flag = re.compile(r"^--[\w-]+")
        arguments = [flag.sub(lambda x: "--" + x[0][2:].replace("-", "_"), a) for a in arguments]
    namespace, unknown = parser.parse_known_args(arguments)
    flags = vars(namespace)
    name = flags.pop("command")
    command = COMMANDS[name]
    if not command.options:
        if unknown and not command.takes_more:
            parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        return Parsed(command, unknown, flags)
    options = command.option_class()
    if unknown:
        # Hydra's arguments, as verl's, have no dashes.
        words = [word for word in unknown if word.startswith("--") or "=" in word]
        names = [word.removeprefix("--").partition("=")[0] for word in words]
        sentences = [options.unknown(name, "--") for name in names]
        parsers[name].error("; ".join(sentences) or f"unrecognized arguments: {' '.join(unknown)}")
    values = {
        member.name: flags.pop(member.name) for member in fields(options) if member.name in flags
    }
    file = flags.pop("config", None)
    config = _make_options(options, file, values)
    missing = [option for option in command.required if not getattr(config, option)]
    if missing == ["rewards"] and (config.reward_ensemble or config.environment or config.distills):
        missing = []
    if missing:
        parsers[name].error(f"--{missing[0]} is missing: give it as a flag or in --config FILE")
    return Parsed(command, config, flags, file)


def _make_options(options: type[Options], file: str | None, values: dict[str, Any]) -> Any:
    """Return the options of a YAML file, overridden by the values of flags."""
    from fastppo.run.options import read_yaml

    unset = {name for name, value in values.items() if value in (DEFAULT, [DEFAULT])}
    values = {name: value for name, value in values.items() if name not in unset}
    if file is None:
        return options(**values)
    read = {name: value for name, value in read_yaml(file, options).items() if name not in unset}
    try:
        return options(**read | values)
    except ValueError as error:
        named = re.match(r"\w+", str(error))
        if named and named[0] in read and named[0] not in values:
            raise ValueError(f"{file}: {error}") from error
        raise
