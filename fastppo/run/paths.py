"""Check that paths in the options exist, before torch is imported.

The loaders check the rest: names on the Hugging Face Hub, and the contents of files.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fastppo.data.datasets import check_source, is_missing_path
from fastppo.data.files import MissingPathError
from fastppo.plugins.adapters import is_address
from fastppo.plugins.loading import FUNCTION
from fastppo.rewards.loading import URL
from fastppo.run.directory import check_is_directory, check_no_run
from fastppo.run.options import Options

MODELS = ("model", "models", "reference_model", "critic_model")
DATA = ("prompts", "eval_prompts", "ptx_data", "data", "eval_data")
REWARDS = ("rewards", "monitor_rewards", "reward_ensemble")
CODE = (*REWARDS, "environment", "rollout", "objective", "advantage", "optimizer")


def check_paths(config: Options, *, is_new: bool = True) -> None:
    """Check the paths of models, data and the user's code, and the run directory.

    Args:
        is_new: whether the run directory must not hold a run.

    Raises:
        MissingPathError: a path does not exist.
        ValueError: the run directory holds another run, or is a file.
    """
    options = config.to_dict()
    for option, name in _named(options, MODELS):
        is_missing_file = name.endswith(".safetensors") and not Path(name).is_file()
        if is_missing_file or is_missing_path(name):
            raise MissingPathError(f"{option} {name}: there is no such file or directory", name)
    for _, name in _named(options, DATA):
        if not is_address(name):
            check_source(name)
    for option, name in _named(options, CODE):
        if URL.match(name):
            continue
        option = "reward" if option in REWARDS else option
        # The target of an address may be a function in a file, as in chat:agent.py:run?port=8123.
        target = name.partition(":")[2].partition("?")[0] if is_address(name) else name
        match = FUNCTION.match(target)
        if match is None:
            if target == name and is_missing_path(name):
                raise MissingPathError(f"{option} {name}: there is no such directory", name)
        elif match["where"].endswith(".py") and not Path(match["where"]).is_file():
            where = match["where"]
            raise MissingPathError(f"{option} {name}: there is no file {where}", where)
    if "resume" in options:
        check_is_directory(options["output_dir"])
        if is_new and not options["resume"]:
            check_no_run(options["output_dir"])


def _named(options: dict[str, Any], names: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield (option, value) for each value of these options."""
    for option in names:
        values = options.get(option) or []
        for value in values if isinstance(values, list) else [values]:
            yield option, value
