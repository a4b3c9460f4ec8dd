"""The command line: the three stages `fastppo sft`, `reward` and `train`; `plan`, `generate`,
`demo`, `recipe`, `report`, `bench` and `completion`.

A command with options has one flag per option, whose definition is that of the option class, under
the class's sections; `--config FILE` reads them from YAML. The heavy imports wait until a command
needs them.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import logging
import os
import re
import signal
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from fastppo.generate import GenerateConfig
    from fastppo.ppo.config import PPOConfig
    from fastppo.run.options import Options
    from fastppo.stages.reward_model import RewardModelConfig
    from fastppo.stages.sft import SFTConfig

DESCRIPTION = "PPO for language models: the loss in one pass over the logits, or with no logits."

EPILOG = (
    "`fastppo demo` shows all three stages; `fastppo recipe` lists runs to begin with; "
    "`fastppo COMMAND --help` lists a command's options."
)

TRAIN = "Stage 3: PPO on your model, prompts and rewards."
PLAN = "The memory that `fastppo train` will need, by part and phase; loads config.json alone."
SFT = "Stage 1: supervised fine-tuning on prompts and completions, chats or plain text."
REWARD = "Stage 2: a reward model from preference pairs or ranked lists."
GENERATE = "Samples from one policy, or several side by side, with the reward of each."

EXAMPLES = {
    "train": "fastppo train --model runs/sft --prompts prompts.jsonl --rewards reward.py:score",
    "plan": "fastppo plan --config run.yaml --memory 80",
    "sft": "fastppo sft --model my-base-model --data demonstrations.jsonl",
    "reward": "fastppo reward --model runs/sft --data preferences.jsonl",
    "generate": "fastppo generate --models runs/sft runs/ppo/policy --prompts prompts.jsonl",
}

PROMPT_TOKENS = 512
"""Length of a prompt in a plan, unless it is given: the prompts are not read."""


def _count(text: str) -> int:
    """A number of things, for argparse."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a number of 0 or more, got {text!r}")
    return int(text)


SWITCHES: dict[str, dict[str, dict[str, Any]]] = {
    "train": {
        "--profile": {
            "type": _count,
            "default": 0,
            "metavar": "INT",
            "help": "Iterations after the first that torch.profiler traces into the run directory",
        }
    },
    "plan": {
        "--memory": {
            "type": float,
            "metavar": "NUMBER",
            "help": "Memory of the device, GB of 10^9 bytes; none: what its GPU has free",
        },
        "--prompt_tokens": {
            "type": _count,
            "default": PROMPT_TOKENS,
            "metavar": "INT",
            "help": f"Length of a prompt, tokens (default: {PROMPT_TOKENS})",
        },
    },
}
"""What a command takes besides the options of a run: it is in no config file."""

WRONG_INPUT = 2
"""Exit code where a file or a value cannot be used; argparse's too."""

FAILED = 1
"""Exit code of a run that began and did not come to its end."""

CHECKOUT = Path(__file__).resolve().parents[1]

PATHS = ("TEXT", "FILE", "DIR", "RUN")
"""Metavars of what may be a path, which the shell's completion then offers."""

FLAG_WIDTH = 32
"""Columns of a flag and its value in help texts."""


class _Parser(argparse.ArgumentParser):
    """Takes no abbreviated flag: it would change its meaning with the next option. The parsers of
    its commands are of its kind."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)


def build_parser() -> argparse.ArgumentParser:
    """The whole command line. Commands with an option class have one flag per option."""
    import fastppo

    parser = _Parser(prog="fastppo", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("--version", action="version", version=f"fastppo {fastppo.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    defaults = argparse.ArgumentDefaultsHelpFormatter

    demo = commands.add_parser(
        "demo",
        formatter_class=defaults,
        help="The whole pipeline on a built-in task: SFT, reward model, PPO",
        description="Supervised fine-tuning, a reward model and PPO on a small synthetic language. "
        "About two minutes on two CPU cores; nothing is downloaded.",
    )
    demo.add_argument(
        "--output_dir", metavar="DIR", default="runs/demo", help="directory of the run"
    )
    demo.add_argument("--seed", type=int, default=0, help="seed of data, models and sampling")
    demo.add_argument("--device", default="auto", help="auto (a GPU if there is one), cpu, cuda")
    demo.add_argument(
        "--iterations",
        type=int,
        default=argparse.SUPPRESS,
        help="PPO iterations (default: 40)",
    )
    demo.set_defaults(handler=_demo)

    recipe = commands.add_parser(
        "recipe",
        usage="fastppo recipe [NAME [--show] [--out DIR] [--OPTION VALUE ...]]",
        help="A run to begin with, or the list of them",
        description="Without a name, the list. With one, lays config, reward and data out in a "
        "folder, trains, and writes the report. Options are those of `fastppo train`; they win "
        "over the recipe's.",
    )
    recipe.add_argument("--show", action="store_true", help="print the recipe's YAML and stop")
    recipe.add_argument("--out", metavar="DIR", help="folder of the run (default: runs/NAME)")
    recipe.set_defaults(handler=_recipe, takes_options=True)

    for name, handler, description in (
        ("sft", _sft, SFT),
        ("reward", _reward, REWARD),
        ("train", _train, TRAIN),
        ("plan", _plan, PLAN),
        ("generate", _generate, GENERATE),
    ):
        command = commands.add_parser(
            name, add_help=False, help=description.rstrip("."), description=description
        )
        command.set_defaults(handler=handler, takes_options=True)
        for flag, keywords in SWITCHES.get(name, {}).items():
            command.add_argument(flag, **keywords)

    report = commands.add_parser(
        "report",
        formatter_class=defaults,
        help="Rebuild the HTML report of a run, or compare several",
        description="Rebuilds report.html from the records of a run directory; of several, "
        "writes a page with their curves in the same plots and the options in which they differ.",
    )
    report.add_argument("runs", metavar="RUN", nargs="+", help="run directory, say runs/ppo")
    report.add_argument(
        "--output",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="the page (default: report.html in the run, of several comparison.html)",
    )
    report.set_defaults(handler=_report)

    completion = commands.add_parser(
        "completion",
        help="Print the shell's completion of commands and options",
        description="Prints a script for the shell, which has to be made anew after an update: "
        'bash: eval "$(fastppo completion bash)"; zsh: fastppo completion zsh > '
        "a folder of $fpath/_fastppo. Needs shtab.",
    )
    completion.add_argument("shell", choices=("bash", "zsh", "tcsh"))
    completion.set_defaults(handler=_completion)

    bench = commands.add_parser("bench", add_help=False, help="Time every kernel and its peers")
    bench.set_defaults(handler=_bench, takes_options=True)
    return parser


def options_parser(command: str, options: type[Options], description: str) -> _Parser:
    """The parser of a command with options: `--config FILE` and a flag per option, by section."""
    parser = _Parser(
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(
            prog, max_help_position=FLAG_WIDTH
        ),
        prog=f"fastppo {command}",
        usage=f"fastppo {command} [--config FILE] [--OPTION VALUE ...]",
        description=f"{EXAMPLES[command]}\n\n{description}\nOptions come from a YAML file, from "
        "flags, or from both; flags win.",
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file of `option: value` lines")
    # argparse takes -1e-1 for a flag unless its pattern of a number allows exponents.
    parser._negative_number_matcher = re.compile(r"^-(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$")
    for flag, keywords in SWITCHES.get(command, {}).items():  # for the help alone
        parser.add_argument(flag, **(keywords | {"default": argparse.SUPPRESS}))
    hints, defaults = get_type_hints(options), options().to_dict()
    for heading, members in options.sections().items():
        section = parser.add_argument_group(heading)
        for member in members:
            default = defaults[member.name]
            section.add_argument(
                f"--{member.name}",
                help=(member.metadata["help"] + _default(default)).replace("%", "%%"),
                **_value(hints[member.name]),
            )
    return parser


def _default(value: Any) -> str:
    """The default as one would type it; nothing for an option that is not set."""
    if value in ("", [], None):
        return ""
    if isinstance(value, list):
        return f" (default: {', '.join(map(repr, value))})"
    return f" (default: {str(value).lower() if isinstance(value, bool) else value})"


def _value(hint: Any) -> dict[str, Any]:
    """argparse's keywords for an option of this type; the option class converts and checks."""
    if get_origin(hint) in (Union, UnionType):
        (hint,) = (choice for choice in get_args(hint) if choice is not type(None))
    if get_origin(hint) is Sequence:
        return {"nargs": "*", "metavar": _metavar(get_args(hint)[0])}
    if get_origin(hint) is Literal:
        return {"choices": get_args(hint), "metavar": "|".join(get_args(hint))}
    # A bare flag switches a bool on.
    return {"metavar": _metavar(hint)} | ({"nargs": "?", "const": "true"} if hint is bool else {})


def _metavar(hint: type) -> str:
    return {int: "INT", float: "NUMBER", bool: "true|false", str: "TEXT"}[hint]


def parse_options(
    parser: _Parser, options: type[Options], required: Sequence[str], arguments: Sequence[str]
) -> Any:
    """The options that the arguments of a command give; the option class checks file and flags
    alike. `--some-option` is `--some_option`."""
    from fastppo.run.options import read_yaml

    flags = [
        re.sub(r"^--[\w-]+", lambda m: "--" + m[0][2:].replace("-", "_"), a) for a in arguments
    ]
    known, unknown = parser.parse_known_args(flags)
    if unknown:
        hint = options.hint(unknown[0].removeprefix("--").partition("=")[0])
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    given = vars(known)
    file = given.pop("config", None)
    read = {} if file is None else read_yaml(file, options)
    try:
        chosen = options(**read | given)
    except ValueError as error:
        named = re.match(r"\w+", str(error))
        if named and named[0] in read and named[0] not in given:
            raise ValueError(f"{file}: {error}") from error
        raise
    for name in required:
        if not getattr(chosen, name):
            parser.error(f"--{name} is missing: give it as a flag or in --config FILE")
    return chosen


def parse_train(arguments: Sequence[str]) -> PPOConfig:
    """The PPOConfig of `fastppo train`'s arguments."""
    from fastppo.ppo.config import PPOConfig

    parser = options_parser("train", PPOConfig, TRAIN)
    config = parse_options(parser, PPOConfig, ("model", "prompts"), arguments)
    if not (config.rewards or config.reward_ensemble or config.environment):
        parser.error("--rewards is missing: give it as a flag or in --config FILE")
    return config


def parse_plan(arguments: Sequence[str]) -> PPOConfig:
    """The PPOConfig of `fastppo plan`'s arguments: those of `fastppo train`, the model alone
    required."""
    from fastppo.ppo.config import PPOConfig

    return parse_options(options_parser("plan", PPOConfig, PLAN), PPOConfig, ("model",), arguments)


def parse_sft(arguments: Sequence[str]) -> SFTConfig:
    """The SFTConfig of `fastppo sft`'s arguments."""
    from fastppo.stages.sft import SFTConfig

    parser = options_parser("sft", SFTConfig, SFT)
    return parse_options(parser, SFTConfig, ("model", "data"), arguments)


def parse_reward(arguments: Sequence[str]) -> RewardModelConfig:
    """The RewardModelConfig of `fastppo reward`'s arguments."""
    from fastppo.stages.reward_model import RewardModelConfig

    parser = options_parser("reward", RewardModelConfig, REWARD)
    return parse_options(parser, RewardModelConfig, ("model", "data"), arguments)


def parse_generate(arguments: Sequence[str]) -> GenerateConfig:
    """The GenerateConfig of `fastppo generate`'s arguments."""
    from fastppo.generate import GenerateConfig

    parser = options_parser("generate", GenerateConfig, GENERATE)
    return parse_options(parser, GenerateConfig, ("models",), arguments)


def _demo(options: argparse.Namespace, rest: list[str]) -> None:
    from fastppo.demo.run import run_demo

    run_demo(
        options.output_dir,
        seed=options.seed,
        device=options.device,
        iterations=getattr(options, "iterations", None),
    )


def _sft(options: argparse.Namespace, rest: list[str]) -> None:
    config = parse_sft(rest)
    from rich.console import Console

    from fastppo.data.world import is_first
    from fastppo.run.log import say
    from fastppo.stages.sft import train_sft

    console = Console(stderr=True, quiet=not is_first())
    result = train_sft(config, console=console)
    line = f"loss {result['loss']:.3f} nats per token"
    if "eval_loss" in result:
        line += f", held out {result['eval_loss']:.3f}"
    say(console, f"{line}\nmodel  {config.output_dir}")


def _reward(options: argparse.Namespace, rest: list[str]) -> None:
    config = parse_reward(rest)
    from rich.console import Console

    from fastppo.data.world import is_first
    from fastppo.run.log import say
    from fastppo.stages.reward_model import train_reward_model

    console = Console(stderr=True, quiet=not is_first())
    result = train_reward_model(config, console=console)
    say(console, f"loss {result['loss']:.3f} nats per pair")
    if "accuracy" in result:
        say(
            console,
            f"right on {result['accuracy']:.1%} of the held-out pairs, "
            f"calibration error {result['calibration_error']:.3f}\n"
            f"calibration  {config.output_dir}/calibration.png",
        )
    if "score_mean" in result:
        say(
            console,
            f"reference texts scored {result['score_mean']:.3f} ± {result['score_std']:.3f}; the "
            f"mean is subtracted from now on",
        )
    say(console, f"model  {config.output_dir}")


def _generate(options: argparse.Namespace, rest: list[str]) -> None:
    config = parse_generate(rest)
    from rich.console import Console

    from fastppo.generate import generate, rate, show, show_votes, write

    rows, policies = generate(config)
    if config.rate is None:
        show(rows, policies, config, Console())
    else:
        tally = rate(rows, policies, config, Console())
        show_votes(tally, policies, config, Console())
    if config.output is not None:
        write(config.output, rows, policies, config)


def _train(options: argparse.Namespace, rest: list[str]) -> None:
    config = parse_train(rest)
    from fastppo.ppo.build import world_of
    from fastppo.ppo.trainer import PPOTrainer
    from fastppo.run.lock import held
    from fastppo.run.profile import profiled

    world = world_of(config)
    with world.answering(), held(config.output_dir, world):  # before a model is loaded
        trainer = PPOTrainer(config, world=world)
        with profiled(trainer, options.profile):
            trainer.train()
    if options.profile:
        trainer.say(f"profile {config.output_dir}/profile.json, profile.txt")
    trainer.say(f"report  {config.output_dir}/report.html")
    trainer.say(f"policy  {config.output_dir}/policy")


def _recipe(options: argparse.Namespace, rest: list[str]) -> None:
    from rich.console import Console

    from fastppo.recipes.catalogue import find
    from fastppo.recipes.run import lay_out, run_recipe, show_recipes

    if not rest:
        if options.show or options.out is not None:
            raise ValueError("--show and --out are of a recipe: expected its name before them")
        show_recipes(Console())
        return
    # By its place: argparse would take an option's value for the name, or the name for a value.
    name, *flags = rest
    if name.startswith("-"):
        raise ValueError(f"expected the name of a recipe before its options, got {name}")
    if any(flag.partition("=")[0] == "--config" for flag in flags):
        raise ValueError("a recipe has a config of its own; `fastppo train --config` takes yours")
    recipe = find(name)
    out = Path(options.out or Path("runs") / name)
    if options.show:
        print(recipe.config(out), end="")
        return
    config = parse_train(["--config", str(lay_out(recipe, out)), *flags])
    run_recipe(recipe, out, config)


def _plan(options: argparse.Namespace, rest: list[str]) -> None:
    config = parse_plan(rest)
    from rich.console import Console

    from fastppo.ppo.memory import make_plan, show

    plan = make_plan(config, options.prompt_tokens, options.memory)
    show(plan, Console())


def _report(options: argparse.Namespace, rest: list[str]) -> None:
    from fastppo.run.report import write_comparison, write_report

    output = getattr(options, "output", None)
    if len(options.runs) == 1:
        print(write_report(options.runs[0], output))
    else:
        print(write_comparison(options.runs, output or "comparison.html"))


def _completion(options: argparse.Namespace, rest: list[str]) -> None:
    try:
        import shtab
    except ImportError as error:
        raise ImportError("completion needs shtab: pip install shtab") from error
    from fastppo.generate import GenerateConfig
    from fastppo.ppo.config import PPOConfig
    from fastppo.recipes.catalogue import RECIPES
    from fastppo.stages.reward_model import RewardModelConfig
    from fastppo.stages.sft import SFTConfig

    parser = build_parser()
    (commands,) = (each.choices for each in parser._actions if each.dest == "command")
    for name, config, description in (
        ("sft", SFTConfig, SFT),
        ("reward", RewardModelConfig, REWARD),
        ("train", PPOConfig, TRAIN),
        ("plan", PPOConfig, PLAN),
        ("generate", GenerateConfig, GENERATE),
    ):
        commands[name] = options_parser(name, config, description)  # type: ignore[index]
    # Of the completion alone: the command itself takes the name by its place.
    names = [recipe.name for recipe in RECIPES]
    commands["recipe"].add_argument("name", choices=names)  # type: ignore[index]
    for command in commands.values():  # type: ignore[union-attr]
        for action in command._actions:
            if action.metavar in PATHS and action.choices is None:
                action.complete = shtab.FILE
    print(shtab.complete(parser, options.shell))


def _bench(options: argparse.Namespace, rest: list[str]) -> int:
    return benchmark_suite().main(rest, prog="fastppo bench")


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


def _calm_libraries() -> None:
    """Progress and results, not the libraries' chatter, are what a person sees."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    for library in ("accelerate", "huggingface_hub"):  # the second tells of each attempt
        logging.getLogger(library).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="torch.utils.data")


def _nearest_command(parser: argparse.ArgumentParser, word: str) -> str | None:
    """The command that a word is a slip of."""
    (names,) = (each.choices for each in parser._actions if each.dest == "command")
    if word.startswith("-") or word in (names or ()):
        return None
    return next(iter(difflib.get_close_matches(word, list(names or ()), n=1)), None)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point. Errors that a person can mend are one sentence, not a traceback.

    FASTPPO_DEBUG=1 shows the traceback all the same.
    """
    parser = build_parser()
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments == ["help"]:
        parser.print_help()
        return 0 if arguments else WRONG_INPUT
    if near := _nearest_command(parser, arguments[0]):
        parser.error(f"there is no command {arguments[0]!r}; did you mean {near}?")
    options, rest = parser.parse_known_args(arguments)
    if rest and not getattr(options, "takes_options", False):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    debug = os.environ.get("FASTPPO_DEBUG")
    try:
        from fastppo.run.signals import stopping_at_once

        with stopping_at_once():
            _calm_libraries()
            return options.handler(options, rest) or 0
    except (ValueError, ImportError, OSError) as error:  # DataError is a ValueError
        if debug:
            raise
        print(f"fastppo: {error}", file=sys.stderr)
        return WRONG_INPUT
    except (RuntimeError, FloatingPointError) as error:
        # RewardError, CheckpointError, a failed self-check and torch's own are RuntimeErrors.
        if debug:
            raise
        print(f"fastppo: {error}", file=sys.stderr)
        return FAILED
    except Exception as error:
        # A disk that is full under safetensors; by its name, for --help must not import it.
        if debug or type(error).__name__ != "SafetensorError":
            raise
        print(f"fastppo: a file could not be written or read: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt as stopped:
        # Plain where signals are not handled: before the first import, or not in a main thread.
        print(f"fastppo: {str(stopped) or 'stopped by SIGINT'}", file=sys.stderr)
        return getattr(stopped, "exit_code", 128 + signal.SIGINT)


if __name__ == "__main__":
    sys.exit(main())
