"""The command line of FastPPO.

`fastppo sft`, `reward` and `train` are the three stages of training. `check`, `plan`, `export`,
`generate`, `report` and `bench` work around a run; `demo`, `recipe` and `init` start one. A command
imports its modules when it runs, after its options and paths are checked: importing torch takes
seconds.
"""

from __future__ import annotations

import atexit
import importlib
import logging
import os
import shlex
import signal
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from fastppo.parser import COMMANDS, Command, Parsed, build_parser, parse, parse_command

if TYPE_CHECKING:
    from rich.console import Console

WRONG_INPUT = 2
"""Exit code of a wrong option or input, as argparse's."""

FAILED = 1
"""Exit code of a run that started and failed."""

CHECKOUT = Path(__file__).resolve().parents[1]

BARS = ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS")
"""Environment variables that disable progress bars; libraries read them when imported."""


# ------------------------------------------------------------------------------------- the commands


@Command(
    help="All three stages on a built-in task: SFT, reward model, PPO",
    description="Supervised fine-tuning, a reward model and PPO on a small synthetic language. "
    "About two minutes on two CPU cores; nothing is downloaded.",
    flags={
        "--output_dir": {"metavar": "DIR", "help": "directory of the run (default: runs/demo)"},
        "--seed": {"type": int, "help": "seed of data, models and sampling (default: 0)"},
        "--device": {"help": "auto (a CUDA GPU if there is one), cpu, cuda, mps (default: auto)"},
        "--iterations": {"type": int, "help": "PPO iterations (default: 40)"},
    },
)
def demo(**flags: Any) -> None:
    _say_first("loading torch and transformers…")
    from fastppo.demo.run import run_demo

    _quiet_libraries()
    run_demo(**flags)


@Command(
    help="Run a complete example, or list them",
    description="Without a name, list the recipes. With one, write its config, reward and data to "
    "a folder, train, and write the report. Options of `fastppo train` override the recipe's.",
    flags={
        "--show": {"action": "store_true", "help": "print the recipe's YAML"},
        "--prepare": {"action": "store_true", "help": "make model and data without training"},
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
    from fastppo.recipes.run import run_recipe, show_recipes, write_files

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
    config = parse("train", ["--config", str(write_files(chosen, folder)), *options])
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
    console = _console_of_main_rank()
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
    console = _console_of_main_rank()
    result = train_reward_model(config, console=console)
    say(console, f"loss {result['loss']:.3f} nats per pair")
    if "accuracy" in result:
        say(
            console,
            f"held-out accuracy {result['accuracy']:.1%}, "
            f"calibration error {result['calibration_error']:.3f}",
        )
    say(
        console,
        f"scores of the best completions {result['score_mean']:.3f} ± {result['score_std']:.3f}; "
        "the saved model subtracts the mean",
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
    from fastppo.run.torchrun import telling_torchrun

    _quiet_libraries()
    world = world_of(config)
    locked = run_lock(config.output_dir, world)
    with world.with_timeout(), telling_torchrun(config.output_dir), locked:
        trainer = PPOTrainer(config, world=world)
        trainer.train()
    trainer.say(f"report  {config.output_dir}/report.html")
    trainer.say(f"policy  {config.output_dir}/policy")


@Command(
    help="Check the inputs of `fastppo train` and show the run",
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
    help="Export the policy of a checkpoint for transformers",
    description="Write the policy of a checkpoint and its tokenizer to a new directory for "
    "transformers, vLLM and --model.",
    flags={
        "checkpoint": {"metavar": "CHECKPOINT", "help": "for example runs/ppo/checkpoint-000050"},
        "out": {"metavar": "OUT", "help": "directory of the policy"},
        "--device": {"help": "auto (a CUDA GPU if there is one), cpu, cuda, mps (default: auto)"},
    },
)
def export(checkpoint: str, out: str, device: str = "auto") -> None:
    if not Path(checkpoint).is_dir():
        raise ValueError(f"{checkpoint} is not a checkpoint: expected RUN/checkpoint-NUMBER")
    from fastppo.ppo.checkpoints import export_checkpoint
    from fastppo.run.report.card import write_card_of_checkpoint

    _quiet_libraries()
    export_checkpoint(Path(checkpoint), Path(out), device)
    write_card_of_checkpoint(Path(checkpoint), Path(out))
    print(out)


@Command(
    help="Estimate the memory of `fastppo train` by part and phase, without its weights",
    description="fastppo plan --config run.yaml --processes 8 --memory 80",
    options="fastppo.ppo.options.config:PPOConfig",
    required=("model",),
    flags={
        "--memory": {
            "type": float,
            "metavar": "NUMBER",
            "help": "Memory of each device, GB of 10^9 bytes (default: the free memory of its GPU)",
        },
        "--prompt_tokens": {
            "type": int,
            "metavar": "INT",
            "help": "Length of a prompt, tokens (default: the longest of --prompts, else 512)",
        },
        "--processes": {
            "type": int,
            "metavar": "INT",
            "help": "Processes of torchrun, one device each (default: 1)",
        },
    },
)
def plan(
    config: Any,
    memory: float | None = None,
    prompt_tokens: int | None = None,
    processes: int = 1,
) -> None:
    from rich.console import Console

    from fastppo.ppo.plan.changes import helpful_changes
    from fastppo.ppo.plan.plan import make_plan, show
    from fastppo.ppo.plan.prompts import prompt_length

    _quiet_libraries()
    source = ""
    if prompt_tokens is None:
        prompt_tokens, source = prompt_length(config)
    try:
        made = make_plan(config, prompt_tokens, memory=memory, processes=processes)
    except ValueError as error:
        raise ValueError(f"{error} ({source})" if source else str(error)) from error
    if source:
        made.notes.append(source)
    show(made, Console(), [] if made.fits else helpful_changes(made))


@Command(
    help="Show completions of one or several policies with their rewards",
    description="fastppo generate --models runs/sft runs/ppo/policy --prompts prompts.jsonl",
    options="fastppo.generate_options:GenerateConfig",
    required=("models",),
)
def generate(config: Any) -> None:
    from rich.console import Console

    from fastppo import generate
    from fastppo.run.options import unused
    from fastppo.run.progress import say

    _quiet_libraries()
    for sentence in unused(config):
        say(Console(stderr=True), sentence, "yellow")
    rows, policies = generate.generate(config)
    generate.show(rows, policies, config, Console())


@Command(
    help="Rebuild the HTML report of a run, or compare several runs",
    description="With one run directory, rebuild its report.html. With several, write their curves "
    "over each other and the options that differ to comparison.html.",
    flags={
        "runs": {
            "metavar": "RUN",
            "nargs": "+",
            "help": "run directory, for example runs/ppo; several to compare them",
        },
        "--output": {
            "metavar": "FILE",
            "help": "output file (default: report.html in the run, or comparison.html in the "
            "folder that holds the runs)",
        },
    },
)
def report(runs: list[str], output: str | None = None) -> None:
    for run in runs:
        if not Path(run).is_dir():
            raise ValueError(f"{run}: no such directory; expected the directory of a run")
    from fastppo.run.report.comparison import write_comparison
    from fastppo.run.report.report import write_report

    print(write_comparison(runs, output) if len(runs) > 1 else write_report(runs[0], output))


@Command(help="Time every kernel and its baselines", takes_more=True)
def bench(arguments: list[str]) -> int:
    return benchmark_suite().main(arguments, prog="fastppo bench")


@Command(help="Compare a loss or advantage function of yours with the papers", takes_more=True)
def conformance(arguments: list[str]) -> int:
    return benchmark_suite("conformance.__main__").main(arguments, prog="fastppo conformance")


def benchmark_suite(module: str = "__main__") -> Any:
    """Import a module of `benchmarks`, which is in a clone of the repository and not in the wheel.

    Raises:
        ImportError: the package is not installed from a clone.
    """
    if not (CHECKOUT / "benchmarks" / "__main__.py").is_file():
        raise ImportError(
            "the benchmark suite is not in the wheel: clone the repository, run "
            "`pip install -e '.[bench]'` there, and the command again"
        )
    if str(CHECKOUT) not in sys.path:
        sys.path.insert(0, str(CHECKOUT))
    return importlib.import_module(f"benchmarks.{module}")


# -------------------------------------------------------------------------------------- the program


def _console_of_main_rank() -> Console:
    from rich.console import Console

    from fastppo.data.world import is_first

    return Console(stderr=True, quiet=not is_first())


def _say_first(sentence: str) -> None:
    """Print a line before torch and transformers are imported, which takes many seconds."""
    from fastppo.run.console import printable

    if os.environ.get("RANK", "0") == "0":
        print(printable(sentence), file=sys.stderr, flush=True)


def _quiet_libraries() -> None:
    """Silence the progress bars and log messages of libraries."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it logs every retry
    warnings.filterwarnings("ignore", module="torch.utils.data")


def _check_paths(parsed: Parsed) -> None:
    """Check that the paths in the options exist, before torch is imported.

    Raises:
        ValueError: one does not; the message says if it exists beside the YAML file that names it.
    """
    from fastppo.data.files import MissingPathError
    from fastppo.run.paths import check_paths

    try:
        check_paths(parsed.options, is_new=parsed.command is not COMMANDS["check"])
    except MissingPathError as error:
        beside = Path(parsed.config_file or "").parent / error.path
        if parsed.config_file is None or not error.path or not beside.exists():
            raise
        raise ValueError(
            f"{error}; paths in {parsed.config_file} are relative to the working directory, and "
            f"{beside} is there"
        ) from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    Errors of the user's input are one sentence; FASTPPO_DEBUG=1 shows their tracebacks.
    """
    from fastppo.run.console import lasting_console, printable
    from fastppo.run.signals import stopping_at_once

    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not sys.stderr.isatty():  # bars would fill a log file
        for variable in BARS:
            os.environ.setdefault(variable, "1")
    if not arguments or arguments == ["help"]:
        build_parser()[0].print_help()
        return 0 if arguments else WRONG_INPUT
    with lasting_console():
        try:
            with stopping_at_once():
                parsed = parse_command(arguments)
                command = parsed.command
                if command.options and command is not COMMANDS["plan"]:  # reads model configs only
                    _check_paths(parsed)
                if command.options:
                    models = getattr(parsed.options, "models", None) or [parsed.options.model]
                    _say_first(f"loading {', '.join(models)}…")
                positional = [parsed.options] if command.options or command.takes_more else []
                return command.run(*positional, **parsed.flags) or 0
        except KeyboardInterrupt as stopped:
            sentence = str(stopped) or "stopped by SIGINT"
            code = getattr(stopped, "exit_code", 128 + signal.SIGINT)
        except MemoryError:
            sentence = "the process is out of memory"
            code = FAILED
        except Exception as error:
            exit_code = _exit_code(error)
            if exit_code is None or os.environ.get("FASTPPO_DEBUG"):
                raise
            sentence = str(error)
            code = exit_code
        print(f"fastppo: {printable(sentence)}", file=sys.stderr)
        return code


def _exit_code(error: Exception) -> int | None:
    """Return the exit code of an error with a message for the user; None for a bug."""
    if isinstance(error, (ValueError, ImportError, OSError)):  # DataError is a ValueError
        return WRONG_INPUT
    # RewardError, CheckpointError and torch's own errors are RuntimeErrors. SafetensorError (a full
    # disk) is compared by name: importing safetensors here would slow down every start.
    if isinstance(error, (RuntimeError, FloatingPointError)):
        return FAILED
    return FAILED if type(error).__name__ == "SafetensorError" else None


def program() -> int:
    """Run `main` in its own process.

    A rank of several ends with `os._exit` after all other `atexit` functions. Threads of gloo and
    of torch's store live as long as a process group, which FSDP modules keep; at interpreter
    shutdown they abort a rank that has finished, and torchrun reports a failed run.
    """
    exit_code = FAILED

    def end() -> None:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # closed, or a full disk
                stream.flush()
        os._exit(exit_code)

    if os.environ.get("WORLD_SIZE", "1") != "1":
        atexit.register(end)  # registered first, so it runs last
    try:
        exit_code = main()
    except SystemExit as ended:  # of argparse
        exit_code = ended.code if isinstance(ended.code, int) else FAILED
    return exit_code


if __name__ == "__main__":
    sys.exit(program())
