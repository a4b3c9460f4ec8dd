"""What is in a checkpoint of a stage, compared with what it is read into.

Trainer takes what fits of a checkpoint and logs the rest; an optimiser's tensor of another shape
would be read past its end. Here such a checkpoint is refused, before anything is trained.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor
from transformers import TrainerState

from fastppo.functional.scalars import describe
from fastppo.run.shards import shape_error

STATE = "trainer_state.json"

READ = ("optimizer.pt", "scheduler.pt", "rng_state.pth", STATE)
"""Files that Trainer reads if they are there, beside the weights."""

COUNTS = (
    "max_steps",
    "num_train_epochs",
    "train_batch_size",
    "logging_steps",
    "eval_steps",
    "save_steps",
)
"""Fields of Trainer's state that are whole numbers."""

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's states of a weight, as torch names them."""

ARGUMENTS = "training_args.bin"
"""A pickle that Trainer writes and does not read."""


def check_files(path: Path, number: int) -> None:
    """Checks which files there are, and the counters.

    Args:
        number: of the checkpoint, steps.

    Raises:
        ValueError: a file is missing, or Trainer does not write such a file.
    """
    for name in READ:
        if not (path / name).is_file():
            raise ValueError(f"{path}: {name} is not there")
    for entry in path.iterdir():
        if entry.is_dir() or (entry.suffix == ".bin" and entry.name != ARGUMENTS):
            raise ValueError(f"{path}: {entry.name} is none of a stage's files")
    state = TrainerState.load_from_json(str(path / STATE))
    is_state = (
        state.global_step == number
        and all(isinstance(getattr(state, name), int) for name in COUNTS)
        and isinstance(state.total_flos, (int, float))
        and isinstance(state.epoch, (int, float))
        and math.isfinite(state.epoch)
        and isinstance(state.log_history, list)
        and all(isinstance(record, dict) and "step" in record for record in state.log_history)
    )
    if not is_state:
        raise ValueError(f"{path}: {STATE} is none of checkpoint {number} that a run has written")


def check_weights(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Compares names and shapes of a checkpoint's weights with those that they are read into.

    Raises:
        ValueError: they are of another model.
    """
    shapes: dict[str, list[int]] = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as saved:
            names = saved.keys()
            shapes |= {name: saved.get_slice(name).get_shape() for name in names}
    for name, shape in shapes.items():
        if name not in weights:
            raise ValueError(f"{path} does not fit the model, which has no {name}")
        if shape != list(weights[name].shape):
            raise ValueError(shape_error(path, name, shape, weights[name].shape))
    places = {weights[name].data_ptr() for name in shapes}  # tied weights are written once
    for name, weight in weights.items():
        if weight.data_ptr() not in places:
            raise ValueError(f"{path} does not fit the model: it has no {name}")


def check_moments_are_real(optimizer: Any, states: Mapping[str, Any]) -> None:
    """Checks an optimiser's states before it loads them, which casts them to its weights' dtype.

    Raises:
        TypeError: a moment is complex or of integers.
    """
    for state in states["state"].values():
        for name in MOMENTS:
            moment = state.get(name)
            if isinstance(moment, Tensor) and not moment.is_floating_point():
                raise TypeError(f"the optimizer's {name} is {moment.dtype}")


def check_optimizer(path: Path, optimizer: Any, options: Sequence[Mapping[str, Any]]) -> None:
    """Checks an optimiser that a checkpoint was read into.

    Args:
        options: its parameter groups before that.

    Raises:
        ValueError: it has no moments, or some of another shape; an option is of another type.
    """
    has_moments = False
    for group, before in zip(optimizer.param_groups, options, strict=True):
        for name, value in before.items():
            if type(group.get(name)) is not type(value):
                got = describe(group.get(name))
                raise ValueError(f"{path} does not fit the optimizer: {name} is {got}")
        for weight in group["params"]:
            moments = optimizer.state.get(weight)
            if not moments:
                continue  # it had no gradient
            has_moments = True
            for name in MOMENTS:
                moment = moments.get(name)
                if not isinstance(moment, Tensor) or moment.shape != weight.shape:
                    raise ValueError(
                        f"{path} does not fit the optimizer: {name} of a weight is of another shape"
                    )
            if not isinstance(moments.get("step"), Tensor) or moments["step"].numel() != 1:
                raise ValueError(f"{path} does not fit the optimizer: step is no number")
    if not has_moments:
        raise ValueError(f"{path} does not fit the optimizer: it has no moments")


def check_schedule(path: Path, schedule: Any, before: Mapping[str, Any]) -> None:
    """Checks a schedule that a checkpoint was read into.

    Args:
        before: its state before that.

    Raises:
        ValueError: its state holds other kinds of values, or of rates another number.
    """
    state = schedule.state_dict()
    if not all(_is_alike(state.get(name), value) for name, value in before.items()):
        raise ValueError(f"{path}: scheduler.pt is none that a run has written")


def _is_alike(value: Any, before: Any) -> bool:
    """Whether two values are of one type; of lists, whether their entries are, one by one."""
    if not isinstance(value, list) or not isinstance(before, list):
        return type(value) is type(before)
    return [type(entry) for entry in value] == [type(entry) for entry in before]
