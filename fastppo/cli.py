"""The command line: `fastppo demo`, `fastppo train`, `fastppo report`, `fastppo bench`."""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
import warnings
from collections.abc import Sequence
from typing import Any

DESCRIPTION = "PPO for language models: the loss in one pass over the logits, or with no logits."


def build_parser() -> argparse.ArgumentParser:
    """The whole command line. `train` has one flag per option of `PPOConfig`."""
    import fastppo

    parser = argparse.ArgumentParser(prog="fastppo", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"fastppo {fastppo.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    defaults = argparse.ArgumentDefaultsHelpFormatter

    demo = commands.add_parser(
        "demo",
        formatter_class=defaults,
        help="the whole pipeline on a built-in task: SFT, reward model, PPO",
        description="Supervised fine-tuning, a reward model and PPO on a small synthetic language. "
        "Two to three minutes on two CPU cores; nothing is downloaded.",
    )
    demo.add_argument("--output_dir", default="runs/demo", help="directory of the run")
    demo.add_argument("--seed", type=int, default=0, help="seed of data, models and sampling")
    demo.add_argument("--device", default="auto", help="auto (a GPU if there is one), cpu, cuda")
    demo.add_argument(
        "--iterations", type=int, default=None, help="PPO iterations; None means the recipe's 40"
    )
    demo.set_defaults(handler=_demo)

    train = commands.add_parser(
        "train",
        add_help=False,
        help="PPO on your model, prompts and rewards",
        description="PPO on your model, prompts and rewards.",
    )
    train.set_defaults(handler=_train)

    report = commands.add_parser(
        "report",
        formatter_class=defaults,
        help="rebuild the HTML report of a run",
        description="Rebuilds report.html from the records of a run directory.",
    )
    report.add_argument("run", metavar="RUN", help="run directory, say runs/ppo")
    report.set_defaults(handler=_report)

    bench = commands.add_parser("bench", add_help=False, help="every kernel beside its peers")
    bench.set_defaults(handler=_bench)
    return parser


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Help with defaults, where there is one to tell."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in ("", []):
            return action.help
        return super()._get_help_string(action)


def train_parser() -> Any:
    """The parser of `fastppo train`: `--config FILE` and a flag per option."""
    from transformers import HfArgumentParser

    from fastppo.config import PPOConfig

    parser = HfArgumentParser(
        PPOConfig,  # type: ignore[arg-type]
        formatter_class=_Formatter,
        prog="fastppo train",
        usage="fastppo train [--config FILE] [--OPTION VALUE ...]",
        description="PPO on your model, prompts and rewards. Options come from a YAML file, from "
        "flags, or from both; flags win.",
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file of `option: value` lines")
    # argparse takes -1e-1 for a flag unless it is told that numbers may have exponents.
    parser._negative_number_matcher = re.compile(r"^-(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$")
    return parser


def parse_train(arguments: Sequence[str]) -> Any:
    """The PPOConfig of `fastppo train`'s arguments.

    The file's values stand in for the defaults of the flags; the config checks both alike.
    """
    from fastppo.config import read_yaml

    parser = train_parser()
    first = argparse.ArgumentParser(add_help=False)
    first.add_argument("--config")
    file = first.parse_known_args(arguments)[0].config
    if file:
        parser.set_defaults(**read_yaml(file))
    config, _ = parser.parse_args_into_dataclasses(list(arguments))  # _ holds --config alone
    for name in ("model", "prompts", "rewards"):
        if not getattr(config, name):
            parser.error(f"--{name} is missing: give it as a flag or in --config FILE")
    return config


def _demo(options: argparse.Namespace, rest: list[str]) -> None:
    from fastppo.demo import run_demo

    run_demo(
        options.output_dir,
        seed=options.seed,
        device=options.device,
        iterations=options.iterations,
    )


def _train(options: argparse.Namespace, rest: list[str]) -> None:
    config = parse_train(rest)
    from fastppo.trainer import PPOTrainer

    trainer = PPOTrainer(config)
    trainer.train()
    trainer.console.print(f"report  {config.output_dir}/report.html")
    trainer.console.print(f"policy  {config.output_dir}/policy")


def _report(options: argparse.Namespace, rest: list[str]) -> None:
    from fastppo.report import write_report

    print(write_report(options.run))


def _bench(options: argparse.Namespace, rest: list[str]) -> int:
    from fastppo.bench import suite

    return suite().main(rest, prog="fastppo bench")


def _calm_libraries() -> None:
    """Progress and results, not the libraries' chatter, are what a person sees."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="torch.utils.data")


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point. Errors that a person can mend are one sentence, not a traceback.

    FASTPPO_DEBUG=1 shows the traceback all the same.
    """
    parser = build_parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and options.command not in ("train", "bench"):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    _calm_libraries()
    try:
        return options.handler(options, rest) or 0
    except (ValueError, ImportError, OSError, RuntimeError, FloatingPointError) as error:
        # DataError is a ValueError; RewardError, a failed self-check and torch's own are
        # RuntimeErrors.
        if os.environ.get("FASTPPO_DEBUG"):
            raise
        print(f"fastppo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(
            "fastppo: interrupted; `--resume true` goes on from the newest checkpoint",
            file=sys.stderr,
        )
        return 130


if __name__ == "__main__":
    sys.exit(main())
