"""Rewards by name, under names of their own. In a config a reward is

path/to/file.py:function     a function of a file
package.module:function      a function of an importable module
directory or hub name        a model for AutoModelForSequenceClassification
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fastppo.rewards.model import RewardModel
from fastppo.rewards.reward import Reward, RewardTerm

FUNCTION = re.compile(r"^(?P<where>.+):(?P<name>[A-Za-z_]\w*)$")


def load_reward(spec: str, *, device: torch.device | str = "cpu", **model_options: Any) -> Reward:
    """The reward that `spec` names; see the module's docstring.

    Raises:
        ValueError: the file, module, function or model is not there.
    """
    match = FUNCTION.match(spec)
    if match and not Path(spec).exists():
        return _load_function(match["where"], match["name"])
    if spec.endswith(".py"):
        raise ValueError(f"reward {spec}: expected {spec}:function, got no function")
    return RewardModel(spec, device=device, **model_options)


def _load_function(where: str, name: str) -> Reward:
    if where.endswith(".py"):
        path = Path(where)
        if not path.is_file():
            raise ValueError(f"reward {where}:{name}: there is no file {where}")
        module_spec = importlib.util.spec_from_file_location(path.stem, path)
        assert module_spec is not None
        assert module_spec.loader is not None
        module = importlib.util.module_from_spec(module_spec)
        sys.modules.setdefault(path.stem, module)
        _importable_from(path.parent)
        try:
            module_spec.loader.exec_module(module)
        except Exception as error:
            raise ValueError(
                f"reward {where}:{name}: importing {where} raised {error!r}"
            ) from error
    else:
        _importable_from(Path.cwd())
        try:
            module = importlib.import_module(where)
        except ModuleNotFoundError as error:
            raise ValueError(f"reward {where}:{name}: no module {error.name!r}") from error
    function = getattr(module, name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise ValueError(
            f"reward {where}:{name}: no function {name!r} there; "
            f"it has {', '.join(known) or 'none'}"
        )
    return function


def _importable_from(folder: Path) -> None:
    """A console script does not look for modules in the current folder by itself."""
    if str(folder.resolve()) not in sys.path:
        sys.path.insert(0, str(folder.resolve()))


def reward_name(spec: str) -> str:
    """A short name for logs: the function's, or the model directory's."""
    match = FUNCTION.match(spec)
    if match and not Path(spec).exists():
        return match["name"]
    return Path(spec).name


def make_terms(
    rewards: Sequence[str | Reward],
    weights: Sequence[float] | None = None,
    **options: Any,
) -> list[RewardTerm]:
    """Terms of specs and callables, each under a name of its own.

    Raises:
        ValueError: there are not as many weights as rewards.
    """
    if weights is not None and len(weights) != len(rewards):
        raise ValueError(f"got {len(rewards)} rewards and {len(weights)} reward_weights")
    terms: list[RewardTerm] = []
    taken: set[str] = set()
    for i, reward in enumerate(rewards):
        if isinstance(reward, str):
            name, function = reward_name(reward), load_reward(reward, **options)
        else:
            name, function = getattr(reward, "__name__", type(reward).__name__), reward
        unique, suffix = name, 2
        while unique in taken:
            unique, suffix = f"{name}_{suffix}", suffix + 1
        taken.add(unique)
        terms.append(RewardTerm(unique, function, 1.0 if weights is None else float(weights[i])))
    return terms
