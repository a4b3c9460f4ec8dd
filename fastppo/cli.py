"""The command line: the three stages `fastppo sft`, `reward` and `train`; `check`, `plan`,
`export`, `generate`, `demo`, `recipe`, `init`, `report` and `bench`.

A command with options has one flag per field of its option class, under the class's sections, and
`--config FILE`, a YAML file of the same names. A command is imported when it runs; options are
checked before that.
"""

from __future__ import annotations

import argparse
import atexit
import difflib
import importlib
import logging
import os
import re
import shlex
import signal
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from io import TextIOWrapper
from pathlib import Path
from tempfile import TemporaryDirectory
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Union, get_args, get_origin

if TYPE_CHECKING:
    from rich.console import Console

    from fastppo.run.options import Options

DESCRIPTION = "PPO for language models: the loss in one pass over the logits, or with no logits."

EPILOG = (
    "`fastppo demo` shows all three stages; `fastppo recipe` lists runs to begin with; "
    "`fastppo COMMAND --help` lists a command's options."
)

FROM_FILE_AND_FLAGS = "Options come from a YAML file, from flags, or from both; flags win."

PROMPT_TOKENS = 512
"""Length of a prompt in a plan, unless it is given: the prompts are not read."""

WRONG_INPUT = 2
"""Exit code where a file or a value cannot be used; argparse's too."""

FAILED = 1
"""Exit code of a run that began and did not come to its end."""

CHECKOUT = Path(__file__).resolve().parents[1]

FLAG_WIDTH = 32
"""Columns of a flag and its value in help texts."""

BARS = ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS")
"""Variables that switch progress bars off, read when their libraries are imported."""


COMMANDS: dict[str, Command] = {}
"""By name, in the order of the help."""


@dataclass(kw_only=True)
class Command:
    """Decorates a function, which becomes the command of its name.

    The function gets the flags as keywords. Before them it gets the options, where the command has
    an option class, or with `takes_more` the arguments that no flag took.
    """

    help: str
    description: str = ""
    """What its own help begins with; `help` where it is empty."""
    options: str = ""
    """`module:class` of its options, which is imported only for this command."""
    required: tuple[str, ...] = ()
    """Options that have to be given."""
    flags: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Its flags that are in no config file, with argparse's keywords."""
    usage: str | None = None
    takes_more: bool = False
    """Whether it takes arguments that are neither options nor flags."""
    run: Callable[..., int | None] = field(init=False)

    def __call__(self, run: Callable[..., int | None]) -> Callable[..., int | None]:
        self.run = run
        COMMANDS[run.__name__] = self
        return run

    def option_class(self) -> Any:
        """The class of its options."""
        module, name = self.options.split(":")
        return getattr(importlib.import_module(module), name)


class _Parser(argparse.ArgumentParser):
    """Takes no abbreviated flag: it would change its meaning with the next option. The parsers of
    its commands are of its kind."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(allow_abbrev=False, argument_default=argparse.SUPPRESS, **keywords)
        self.sections: dict[str, list[argparse.Action]] = {}
        """The flags of an option class, by heading."""
        # argparse takes -1e-1 for a flag unless its pattern of a number allows exponents.
        self._negative_number_matcher = re.compile(r"^-(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$")


class _SectionHelp(argparse.Action):
    """`--help` prints all options; `--help kl` those whose section or name has the word."""

    def __call__(self, parser: Any, namespace: Any, value: Any, option: Any = None) -> None:
        if value is None:
            parser.print_help()
            parser.exit()
        word = str(value).lower()
        formatter = parser.formatter_class(prog=parser.prog)
        has_matches = False
        for heading, flags in parser.sections.items():
            matches = [x for x in flags if word in heading.lower() or word in x.option_strings[0]]
            if matches:
                has_matches = True
                formatter.start_section(heading)
                formatter.add_arguments(matches)
                formatter.end_section()
        if not has_matches:
            titles = ", ".join(parser.sections)
            parser.error(f"no section or option has {value!r}; the sections are: {titles}")
        print(formatter.format_help(), end="")
        parser.exit()


def _count(text: str) -> int:
    """A number of things, for argparse."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a number of 0 or more, got {text!r}")
    return int(text)


# ------------------------------------------------------------------------------------- the commands


@Command(
    help="The whole pipeline on a built-in task: SFT, reward model, PPO",
    description="Supervised fine-tuning, a reward model and PPO on a small synthetic language. "
    "About two minutes on two CPU cores; nothing is downloaded.",
    flags={
        "--output_dir": {"metavar": "DIR", "help": "directory of the run (default: runs/demo)"},
        "--seed": {"type": int, "help": "seed of data, models and sampling (default: 0)"},
        "--device": {"help": "auto (a GPU if there is one), cpu, cuda (default: auto)"},
        "--iterations": {"type": int, "help": "PPO iterations (default: 40)"},
    },
)
def demo(**flags: Any) -> None:
    from fastppo.demo.run import run_demo

    _quiet_libraries()
    run_demo(**flags)


@Command(
    help="Run a complete example, or list them",
    description="Without a name, the list. With one, lays config, reward and data out in a folder, "
    "trains, and writes the report. Options are those of `fastppo train`; they win over the "
    "recipe's.",
    flags={
        "--show": {"action": "store_true", "help": "print the recipe's YAML and stop"},
        "--prepare": {"action": "store_true", "help": "make model and data, and train nothing"},
        "--out": {"metavar": "DIR", "help": "folder of the run (default: runs/NAME)"},
    },
    usage="fastppo recipe [NAME [--show] [--prepare] [--out DIR] [--OPTION VALUE ...]]",
    takes_more=True,
)
def recipe(
    arguments: list[str], show: bool = False, prepare: bool = False, out: str | None = None
) -> None:
    from rich.console import Console

    from fastppo.data.files import write_whole
    from fastppo.recipes.catalogue import find
    from fastppo.recipes.run import lay_out, run_recipe, show_recipes

    if not arguments:
        show_recipes(Console())
        return
    name, *options = arguments
    if any(option.partition("=")[0] == "--config" for option in options):
        raise ValueError("a recipe has its own config; `fastppo train --config` takes yours")
    chosen = find(name)
    folder = Path(out or Path("runs") / name)
    if show:
        if options:
            raise ValueError(f"--show takes no options, got {options[0]}")
        print(chosen.config(folder), end="")
        return
    with TemporaryDirectory() as temporary:  # wrong options leave no files in the folder
        file = Path(temporary) / "run.yaml"
        write_whole(file, chosen.config(folder))
        parse("train", ["--config", str(file), *options])
    config = parse("train", ["--config", str(lay_out(chosen, folder)), *options])
    _quiet_libraries()
    run_recipe(chosen, folder, config, only_prepare=prepare)


@Command(
    help="Write run.yaml and reward.py, commented templates for a run of your own",
    flags={
        "--out": {"metavar": "DIR", "help": "folder of the files (default: this one)"},
        "--model": {"metavar": "TEXT", "help": "directory or hub name"},
        "--prompts": {"metavar": "TEXT", "help": ".jsonl, .parquet or hub dataset"},
    },
)
def init(out: str = ".", model: str = "my-sft-model", prompts: str = "prompts.jsonl") -> None:
    from fastppo.init import write_run

    run, reward = write_run(Path(out), model, prompts)
    print(f"wrote {run} and {reward}; edit them, then run")
    print(f"fastppo check --config {shlex.quote(str(run))}")


@Command(
    help="Stage 1: supervised fine-tuning on prompts and completions, chats or plain text",
    description="fastppo sft --model my-base-model --data demonstrations.jsonl",
    options="fastppo.stages.options:SFTConfig",
    required=("model", "data"),
)
def sft(config: Any) -> None:
    from fastppo.run.progress import say
    from fastppo.stages.sft import train_sft

    _quiet_libraries()
    console = _console_of_first_rank()
    result = train_sft(config, console=console)
    line = f"loss {result['loss']:.3f} nats per token"
    if "eval_loss" in result:
        line += f", held out {result['eval_loss']:.3f}"
    say(console, line)
    say(console, f"model  {config.output_dir}")


@Command(
    help="Stage 2: a reward model from preference pairs or ranked lists",
    description="fastppo reward --model runs/sft --data preferences.jsonl",
    options="fastppo.stages.options:RewardModelConfig",
    required=("model", "data"),
)
def reward(config: Any) -> None:
    from fastppo.run.progress import say
    from fastppo.stages.reward_model import train_reward_model

    _quiet_libraries()
    console = _console_of_first_rank()
    result = train_reward_model(config, console=console)
    say(console, f"loss {result['loss']:.3f} nats per pair")
    if "accuracy" in result:
        say(
            console,
            f"right on {result['accuracy']:.1%} of the held-out pairs, "
            f"calibration error {result['calibration_error']:.3f}",
        )
    say(
        console,
        f"the best completions scored {result['score_mean']:.3f} ± {result['score_std']:.3f}; the "
        "mean is subtracted from now on",
    )
    say(console, f"model  {config.output_dir}")


@Command(
    help="Stage 3: PPO on your model, prompts and rewards",
    description="fastppo train --model runs/sft --prompts prompts.jsonl --rewards reward.py:score",
    options="fastppo.ppo.options.config:PPOConfig",
    required=("model", "prompts", "rewards"),
)
def train(config: Any) -> None:
    from fastppo.ppo.setup.build import world_of
    from fastppo.ppo.trainer import PPOTrainer
    from fastppo.run.directory import run_lock

    _quiet_libraries()
    world = world_of(config)
    with world.with_timeout(), run_lock(config.output_dir, world):  # before a model is loaded
        trainer = PPOTrainer(config, world=world)
        trainer.train()
    trainer.say(f"report  {config.output_dir}/report.html")
    trainer.say(f"policy  {config.output_dir}/policy")


@Command(
    help="Check what `fastppo train` would read, and say what it would run",
    description="fastppo check --config run.yaml",
    options="fastppo.ppo.options.config:PPOConfig",
    required=("model", "prompts", "rewards"),
)
def check(config: Any) -> None:
    from rich.console import Console

    from fastppo.ppo.setup.preflight import Given, preflight
    from fastppo.ppo.setup.summary import show

    _quiet_libraries()
    show(config, preflight(config, Given()), Console())


@Command(
    help="Write the policy of a checkpoint, as transformers reads it",
    description="Writes the policy of a checkpoint with its tokenizer into a new directory, which "
    "transformers, vLLM and every --model here load.",
    flags={
        "checkpoint": {"metavar": "CHECKPOINT", "help": "say runs/ppo/checkpoint-000050"},
        "out": {"metavar": "OUT", "help": "directory of the policy"},
        "--device": {"help": "auto (a GPU if there is one), cpu, cuda (default: auto)"},
    },
)
def export(checkpoint: str, out: str, device: str = "auto") -> None:
    if not Path(checkpoint).is_dir():
        raise ValueError(f"{checkpoint} is no checkpoint: expected RUN/checkpoint-NUMBER")
    from fastppo.ppo.checkpoints import export_checkpoint

    _quiet_libraries()
    export_checkpoint(Path(checkpoint), Path(out), device)
    print(out)


@Command(
    help="The memory that `fastppo train` will need, by part and phase; loads config.json alone",
    description="fastppo plan --config run.yaml --processes 8 --memory 80",
    options="fastppo.ppo.options.config:PPOConfig",
    required=("model",),
    flags={
        "--memory": {
            "type": float,
            "metavar": "NUMBER",
            "help": "Memory of each device, GB of 10^9 bytes; none: what its GPU has free",
        },
        "--prompt_tokens": {
            "type": _count,
            "metavar": "INT",
            "help": f"Length of a prompt, tokens (default: {PROMPT_TOKENS})",
        },
        "--processes": {
            "type": _count,
            "metavar": "INT",
            "help": "Processes that torchrun starts, a device each (default: 1)",
        },
    },
)
def plan(
    config: Any,
    memory: float | None = None,
    prompt_tokens: int = PROMPT_TOKENS,
    processes: int = 1,
) -> None:
    from rich.console import Console

    from fastppo.ppo.plan.plan import make_plan, show

    _quiet_libraries()
    show(make_plan(config, prompt_tokens, memory=memory, processes=processes), Console())


@Command(
    help="Samples from one policy, or several side by side, with the reward of each",
    description="fastppo generate --models runs/sft runs/ppo/policy --prompts prompts.jsonl",
    options="fastppo.generate_options:GenerateConfig",
    required=("models",),
)
def generate(config: Any) -> None:
    from rich.console import Console

    from fastppo import generate

    _quiet_libraries()
    rows, policies = generate.generate(config)
    generate.show(rows, policies, config, Console())


@Command(
    help="Rebuild the HTML report of a run",
    description="Rebuilds report.html from the records of a run directory. Several runs are "
    "compared in TensorBoard: tensorboard --logdir runs",
    flags={
        "run": {"metavar": "RUN", "help": "run directory, say runs/ppo"},
        "--output": {"metavar": "FILE", "help": "the page (default: report.html in the run)"},
    },
)
def report(run: str, output: str | None = None) -> None:
    if not Path(run).is_dir():
        raise ValueError(f"{run}: there is no such directory; expected that of a run")
    from fastppo.run.report.report import write_report

    print(write_report(run, output))


@Command(help="Time every kernel and its peers", takes_more=True)
def bench(arguments: list[str]) -> int:
    return benchmark_suite().main(arguments, prog="fastppo bench")


def benchmark_suite() -> Any:
    """The module behind `python -m benchmarks`. It times peers, stores results by device and writes
    the documentation's tables: work for a checkout, so it is not in the wheel.

    Raises:
        ImportError: there is no checkout around this package; says how to get one.
    """
    if not (CHECKOUT / "benchmarks" / "__main__.py").is_file():
        raise ImportError(
            "the benchmark suite is in the source, not in the wheel: clone the repository, "
            "`pip install -e '.[bench]'` there, and run `fastppo bench` again"
        )
    if str(CHECKOUT) not in sys.path:
        sys.path.insert(0, str(CHECKOUT))
    return importlib.import_module("benchmarks.__main__")


# -------------------------------------------------------------------------------------- the parsers


def build_parser(*filled: str) -> tuple[_Parser, dict[str, _Parser]]:
    """The whole command line, and the parsers of its commands; only those that are `filled` have
    their flags, so that the option class of no other is imported."""
    import fastppo

    parser = _Parser(prog="fastppo", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("--version", action="version", version=f"fastppo {fastppo.__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    parsers: dict[str, _Parser] = {}
    for name, command in COMMANDS.items():
        usage = command.usage
        description = command.description or f"{command.help}."
        if command.options:
            usage = f"fastppo {name} [--config FILE] [--OPTION VALUE ...]"
            description += f"\n\n{command.help}.\n{FROM_FILE_AND_FLAGS}"
        parsers[name] = subparsers.add_parser(
            name,
            help=command.help,
            usage=usage,
            description=description,
            formatter_class=_raw_formatter if command.options else argparse.HelpFormatter,
            # That of bench is the suite's; that of options has a section after it.
            add_help=name != "bench" and not command.options,
        )
        if command.options:
            parsers[name].add_argument(
                "-h",
                "--help",
                action=_SectionHelp,
                nargs="?",
                metavar="SECTION",
                help="show this, or the options whose section or name has the word: --help kl",
            )
        if name in filled:
            for flag, keywords in command.flags.items():
                parsers[name].add_argument(flag, **keywords)
            if command.options:
                add_options(parsers[name], command.option_class())
    return parser, parsers


def _raw_formatter(prog: str) -> argparse.HelpFormatter:
    return argparse.RawDescriptionHelpFormatter(prog, max_help_position=FLAG_WIDTH)


def add_options(parser: _Parser, options: type[Options]) -> None:
    """Adds `--config FILE` and a flag per option, by section. The option class converts and checks
    what they are given."""
    parser.add_argument("--config", metavar="FILE", help="YAML file of `option: value` lines")
    defaults = options().to_dict()
    types = options.types()
    for heading, members in options.sections().items():
        group = parser.add_argument_group(heading)
        flags = []
        for member in members:
            help = member.metadata["help"] + _default_text(defaults[member.name])
            keywords = _value_keywords(types[member.name])
            flag = group.add_argument(f"--{member.name}", help=help.replace("%", "%%"), **keywords)
            flags.append(flag)
        parser.sections[heading] = flags


def _default_text(value: Any) -> str:
    """The default as one would type it; nothing for an option that is not set."""
    if value in ("", [], None):
        return ""
    if isinstance(value, list):
        return f" (default: {', '.join(map(repr, value))})"
    return f" (default: {str(value).lower() if isinstance(value, bool) else value})"


def _value_keywords(hint: Any) -> dict[str, Any]:
    """argparse's keywords for an option of this type."""
    if get_origin(hint) in (Union, UnionType):
        (hint,) = (choice for choice in get_args(hint) if choice is not type(None))
    if get_origin(hint) is Literal:
        return {"choices": get_args(hint), "metavar": "|".join(get_args(hint))}
    metavars = {int: "INT", float: "NUMBER", bool: "true|false", str: "TEXT"}
    if get_origin(hint) is Sequence:
        return {"nargs": "*", "metavar": metavars[get_args(hint)[0]]}
    if get_origin(hint) is Mapping:
        return {"metavar": "YAML"}
    if hint is bool:  # a bare flag switches it on
        return {"nargs": "?", "const": "true", "metavar": metavars[bool]}
    return {"metavar": metavars[hint]}


def parse(name: str, arguments: Sequence[str]) -> Any:
    """The options that the arguments of a command give, such as those of `fastppo train`.

    Raises:
        ValueError: a value cannot be used.
        SystemExit: a flag is unknown, or a required option is missing.
    """
    return _parse([name, *arguments]).options


class Parsed(NamedTuple):
    """What was typed."""

    command: Command
    options: Any
    """Its options, or the arguments that no flag took."""
    flags: dict[str, Any]
    """The flags that are no options, by name."""
    config_file: str | None = None


def _parse(arguments: list[str]) -> Parsed:
    """The parsed command line; `--some-option` is `--some_option`."""
    parser, parsers = build_parser(arguments[0])
    if near := _nearest_command(arguments[0]):
        parser.error(f"there is no command {arguments[0]!r}; did you mean {near}?")
    if arguments[0] in COMMANDS and COMMANDS[arguments[0]].options:
        arguments = [re.sub(r"^--[\w-]+", _with_underscores, text) for text in arguments]
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
        names = [word[2:].partition("=")[0] for word in unknown if word.startswith("--")]
        parsers[name].error(
            "; ".join(map(options.unknown, names)) or f"unrecognized arguments: {' '.join(unknown)}"
        )
    values = {
        member.name: flags.pop(member.name) for member in fields(options) if member.name in flags
    }
    file = flags.pop("config", None)
    config = _make_options(options, file, values)
    missing = [option for option in command.required if not getattr(config, option)]
    if missing == ["rewards"] and (config.reward_ensemble or config.environment):
        missing = []  # which pay in their place
    if missing:
        parsers[name].error(f"--{missing[0]} is missing: give it as a flag or in --config FILE")
    return Parsed(command, config, flags, file)


def _check_paths(parsed: Parsed) -> None:
    """Check that the paths in the options exist, before torch is imported.

    Raises:
        ValueError: one does not; the message says if it exists beside the YAML file that names it.
    """
    from fastppo.data.files import MissingPathError
    from fastppo.run.paths import check_paths

    try:
        check_paths(parsed.options)
    except MissingPathError as error:
        beside = Path(parsed.config_file or "").parent / error.path
        if parsed.config_file is None or not error.path or not beside.exists():
            raise
        raise ValueError(
            f"{error}; paths in {parsed.config_file} are relative to the working directory, and "
            f"{beside} is there"
        ) from error


def _with_underscores(flag: re.Match[str]) -> str:
    return "--" + flag[0][2:].replace("-", "_")


def _make_options(options: type[Options], file: str | None, values: dict[str, Any]) -> Any:
    """Return the options of a YAML file and flags; flags win."""
    from fastppo.run.options import read_yaml

    if file is None:
        return options(**values)
    read = read_yaml(file, options)
    try:
        return options(**read | values)
    except ValueError as error:
        named = re.match(r"\w+", str(error))
        if named and named[0] in read and named[0] not in values:
            raise ValueError(f"{file}: {error}") from error
        raise


def _nearest_command(word: str) -> str | None:
    """The command that a word is a slip of."""
    if word.startswith("-") or word in COMMANDS:
        return None
    return next(iter(difflib.get_close_matches(word, COMMANDS, n=1)), None)


# -------------------------------------------------------------------------------------- the program


def _console_of_first_rank() -> Console:
    from rich.console import Console

    from fastppo.data.world import is_first

    return Console(stderr=True, quiet=not is_first())


def _quiet_libraries() -> None:
    """Keeps the libraries' own messages off the console."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    for library in ("accelerate", "huggingface_hub"):  # the second tells of each attempt
        logging.getLogger(library).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="torch.utils.data")


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point. Errors that a person can mend are one sentence, not a traceback.

    FASTPPO_DEBUG=1 shows the traceback too.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    # A log would get a line for every step of other libraries' bars. Started with `2>&-` there is
    # no stderr.
    if sys.stderr is None or not sys.stderr.isatty():
        for variable in BARS:
            os.environ.setdefault(variable, "1")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # what a terminal has no character for is escaped
            stream.reconfigure(errors="backslashreplace")
    if not arguments or arguments == ["help"]:
        build_parser()[0].print_help()
        return 0 if arguments else WRONG_INPUT
    try:
        if arguments[0] in ("-h", "--help", "--version"):  # need no signals
            build_parser()[0].parse_args(arguments)
        from fastppo.run.console import lasting_console
        from fastppo.run.signals import stopping_at_once

        with stopping_at_once():
            parsed = _parse(arguments)
            if parsed.command.options:
                _check_paths(parsed)
            with lasting_console():
                return _run(parsed)
    except KeyboardInterrupt as stopped:
        # Plain where signals are not handled: before the first import, or not in a main thread.
        _say_last(str(stopped) or "stopped by SIGINT")
        return getattr(stopped, "exit_code", 128 + signal.SIGINT)
    except MemoryError:
        _say_last("the process is out of memory")
        return FAILED
    except Exception as error:
        code = _exit_code(error)
        if code is None or os.environ.get("FASTPPO_DEBUG"):
            raise
        _say_last(str(error))
        return code


def _run(parsed: Parsed) -> int:
    """Runs a command; its exit code. A command with options never exits by itself."""
    command = parsed.command
    try:
        if command.options or command.takes_more:
            return command.run(parsed.options, **parsed.flags) or 0
        return command.run(**parsed.flags) or 0
    except SystemExit as ended:
        if command.options and not ended.code:
            raise RuntimeError("a library or a user's function called exit()") from ended
        raise


def _say_last(sentence: str) -> None:
    """Prints why the program ends, if stderr can still be written to."""
    from fastppo.run.console import lasting_console, printable

    with lasting_console():
        print(f"fastppo: {printable(sentence)}", file=sys.stderr)


def _exit_code(error: Exception) -> int | None:
    """The exit code for an error whose message is enough for the user; None for a bug, whose
    traceback is shown."""
    if isinstance(error, (ValueError, ImportError, OSError)):  # DataError is a ValueError
        return WRONG_INPUT
    # RewardError, CheckpointError, a failed self-check and torch's own are RuntimeErrors; what
    # safetensors raises on a full disk goes by its name, for --help must not import it.
    if isinstance(error, (RuntimeError, FloatingPointError)):
        return FAILED
    return FAILED if type(error).__name__ == "SafetensorError" else None


def _open_consoles() -> None:
    """Opens what a process was started without (`2>&-`) of stdin, stdout and stderr: the next file
    would take the number, and get what a signal's handler or a library says."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def program() -> int:
    """`main` in a process of its own.

    One of several ranks ends by `os._exit`, once every other `atexit` function has run, so that
    its groups are left and its files closed. Threads of gloo and of torch's store live as long as
    anything holds a group, as FSDP's modules do; one that meets the end of the interpreter or C++'s
    static destructors aborts a rank that has finished, and torchrun calls the run failed.
    """
    exit_code = FAILED  # where `main` raises

    def end() -> None:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):  # closed, taken away, full
                stream.flush()
        os._exit(exit_code)

    _open_consoles()
    if os.environ.get("WORLD_SIZE", "1") != "1":
        atexit.register(end)  # the first to be registered is the last to run
    try:
        exit_code = main()
    except SystemExit as ended:  # argparse's
        exit_code = ended.code if isinstance(ended.code, int) else FAILED
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        # It keeps what it could not write, and would fail again at the interpreter's end.
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        _say_last(f"stdout could not be written: {error.strerror}")
        exit_code = exit_code or FAILED
    return exit_code


if __name__ == "__main__":
    sys.exit(program())
