"""Checkpoints of a PPO run: what has changed in it, as safetensors and JSON, whole or not at all.

A checkpoint is written to a temporary directory beside its place and renamed into it, so a run
that is killed while writing leaves the older one whole. It holds the trained weights (value head
included), the optimiser's state, a reference that was refreshed, the random states of torch, NumPy
and Python, and `RunState.state_dict`: counters, controllers of β, the scores' running scale,
histories. Schedules and the position in the prompts follow from the counters. On a CPU a resumed
run ends in the same bits as one that was never stopped.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

FORMAT = 2
"""Raised when an older reader would misread what is written."""

NAME = re.compile(r"^checkpoint-(\d{6,})$")


def checkpoints(run_dir: str | Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first."""
    complete = [path for path in Path(run_dir).glob("checkpoint-*") if NAME.match(path.name)]
    return sorted(complete, key=lambda path: int(path.name.split("-")[1]))


def save(
    run_dir: str | Path,
    iteration: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    *,
    reference: dict[str, Tensor] | None = None,
    keep: int = 2,
) -> Path:
    """Writes `checkpoint-<iteration>` and removes all but the newest `keep`, at least 1.

    Args:
        reference: weights of a reference policy that is not the one the run started with.
    """
    run_dir = Path(run_dir)
    final = run_dir / f"checkpoint-{iteration:06d}"
    for stale in run_dir.glob(".checkpoint-*"):  # of a run that was killed while writing
        shutil.rmtree(stale)
    temporary = run_dir / f".{final.name}.tmp-{os.getpid()}"
    temporary.mkdir(parents=True)
    save_file(_trained(model), temporary / "model.safetensors")
    save_file(_optimizer_state(optimizer), temporary / "optimizer.safetensors")
    if reference:
        weights = {name: value.detach().cpu().contiguous() for name, value in reference.items()}
        save_file(weights, temporary / "reference.safetensors")
    random_tensors, random_json = _random_state()
    save_file(random_tensors, temporary / "random.safetensors")
    record = {"format": FORMAT, "state": state, "random": random_json}
    (temporary / "state.json").write_text(json.dumps(record))
    if final.exists():
        final.rename(run_dir / f".{final.name}.old")  # the new one first, then the old one goes
    temporary.rename(final)
    shutil.rmtree(run_dir / f".{final.name}.old", ignore_errors=True)
    for old in checkpoints(run_dir)[:-keep]:
        if old != final:
            shutil.rmtree(old)
    return final


def load(
    path: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Restores the weights, the optimiser's state and the random states.

    Returns:
        (state, reference): as they were saved; the reference is empty if none was.

    The optimiser's options (rates, decay, betas) stay those of `optimizer`: a resumed run follows
    its own config.

    Raises:
        ValueError: the checkpoint is of another format, or of another model.
    """
    path = Path(path)
    record = json.loads((path / "state.json").read_text())
    if record["format"] != FORMAT:
        raise ValueError(
            f"{path}: expected checkpoint format {FORMAT}, got {record['format']}, which another "
            "version of FastPPO wrote; finish the run with that version, or start from its policy"
        )
    saved = load_file(path / "model.safetensors")
    trained = dict(_trained_parameters(model))
    if saved.keys() != trained.keys():
        unmatched = sorted(saved.keys() ^ trained.keys())
        raise ValueError(
            f"{path} does not fit the model: {len(unmatched)} parameters are only in "
            f"one of the two, such as {unmatched[0]}"
        )
    with torch.no_grad():
        for name, parameter in trained.items():
            if parameter.shape != saved[name].shape:
                raise ValueError(
                    f"{path} does not fit the model: {name} is {list(saved[name].shape)} there "
                    f"and {list(parameter.shape)} here"
                )
            parameter.copy_(saved[name])
    _restore_optimizer(optimizer, load_file(path / "optimizer.safetensors"))
    _restore_random(load_file(path / "random.safetensors"), record["random"])
    reference = path / "reference.safetensors"
    return record["state"], load_file(reference) if reference.exists() else {}


def _trained_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def _trained(model: nn.Module) -> dict[str, Tensor]:
    # Tied weights are one parameter and come once.
    return {name: p.detach().cpu().contiguous() for name, p in _trained_parameters(model)}


def _optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{index}.{name}": value.detach().cpu().contiguous()
        for index, entry in optimizer.state_dict()["state"].items()
        for name, value in entry.items()
    }


def _restore_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        index, name = key.split(".", 1)
        state.setdefault(int(index), {})[name] = value
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _random_state() -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        for i, device_state in enumerate(torch.cuda.get_rng_state_all()):
            tensors[f"cuda.{i}"] = device_state
    _, keys, position, has_gauss, gauss = np.random.get_state()
    tensors["numpy"] = torch.from_numpy(np.asarray(keys).astype(np.int64))
    version, internal, gauss_next = random.getstate()
    return tensors, {
        "numpy": [int(position), int(has_gauss), float(gauss)],
        "python": [version, list(internal), gauss_next],
    }


def _restore_random(tensors: dict[str, Tensor], record: dict[str, Any]) -> None:
    torch.set_rng_state(tensors["torch"])
    devices = [value for name, value in sorted(tensors.items()) if name.startswith("cuda.")]
    if devices and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(devices)
    position, has_gauss, gauss = record["numpy"]
    keys = tensors["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, position, has_gauss, gauss))
    version, internal, gauss_next = record["python"]
    random.setstate((version, tuple(internal), gauss_next))
