"""Checkpoints: everything that changes in a run, written completely or not at all.

A checkpoint is written to a temporary directory, synced to the disk with its manifest, and renamed.
A kill while writing leaves the older checkpoints intact. A checkpoint of any stage holds the
trained weights, the optimizer's state, the random states of torch, NumPy and Python, and a record
of the run: in PPO `RunState.state_dict`, in the supervised stages the number of steps. PPO adds the
moments and heads of the value head's regression, and a refreshed reference. Schedules and the
position in the data follow from the counters. On a CPU, a resumed run ends in the same bits as an
uninterrupted one.

With several processes, each rank writes its shards of the tensors (`fastppo.run.shards`), and the
main rank everything else. Tensors are stored as safetensors, records as JSON, and the optimizer's
state by `torch.save`. It is loaded with `weights_only=True`, so no file of a checkpoint can run
code.
"""

from __future__ import annotations

import json
import logging
import math
import os
import random
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fastppo.data.world import World
from fastppo.models.sharding import reshard, sharded_like
from fastppo.run import identity, manifest, shards
from fastppo.run.optimizer import Optimizer

logger = logging.getLogger(__name__)

FORMAT = 6
"""Increased whenever the files of a checkpoint change."""

CHECKPOINTS_KEPT = 2
"""The newest ones. The best one is kept as well."""

NAME = re.compile(r"^checkpoint-\d+$")

OPTIMIZER = "optimizer.pt"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written. The older ones are unchanged."""


class Best(NamedTuple):
    """The metric of the best checkpoint, and its value at one checkpoint."""

    metric: str
    """As in `checkpoint_best`."""
    value: float | None
    """Higher is better. None if the metric was never logged."""


class RandomState(NamedTuple):
    """The states of the generators of torch, CUDA, NumPy and Python."""

    tensors: dict[str, Tensor]
    record: dict[str, Any]
    """The other values, serializable as JSON."""


class Snapshot(NamedTuple):
    """The content of a checkpoint, on the CPU."""

    files: dict[str, dict[str, Tensor]]
    """Tensors by file name."""
    optimizer: dict[str, Any]
    """The content of optimizer.pt."""
    record: dict[str, Any]
    """The content of state.json."""


def path_of(run_dir: str | Path, number: int) -> Path:
    """Return the path of a checkpoint after `number` iterations or steps."""
    return Path(run_dir) / f"checkpoint-{number:06d}"


def checkpoints(run_dir: str | Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first."""
    complete = [path for path in Path(run_dir).glob("checkpoint-*") if NAME.match(path.name)]
    return sorted(complete, key=iteration_of)


def iteration_of(path: Path) -> int:
    """Return the number of completed iterations or steps at a checkpoint."""
    return int(path.name.split("-")[1])


def resumable(
    run_dir: str | Path,
    run: Mapping[str, Any],
    *,
    essential: Iterable[str],
    allowed: bool,
) -> manifest.Newest | None:
    """Return the newest intact checkpoint, or None if there is no checkpoint.

    Unfinished checkpoints of a killed run are deleted. Every damaged checkpoint and every allowed
    difference is logged.

    Args:
        run: the identity of the resumed run.
        essential: options that make it another run if they change.
        allowed: whether they may differ (`resume: force`).

    Raises:
        DamagedError: all checkpoints are damaged.
        ValueError: the checkpoint belongs to another run.
    """
    _remove_leftovers(Path(run_dir))
    newest = manifest.newest(checkpoints(run_dir))
    if newest is None:
        logger.info(f"no checkpoint in {run_dir}: starting from the beginning")
        return None
    for reason in newest.reasons:
        logger.info(f"passed over {reason}")
    before: dict[str, Any] = newest.owner["run"]
    for sentence in identity.check_same_run(
        newest.path, before, run, essential=essential, allowed=allowed
    ):
        logger.info(sentence)
    return newest


def tidy(newest: manifest.Newest, metric: str | None = None) -> None:
    """Rename the damaged checkpoints that a resumed run has passed over, and delete old ones.

    Args:
        metric: the best checkpoint by this metric is kept as well.
    """
    for path in newest.passed_over:
        logger.info(f"renamed {path.name} to {manifest.set_aside(path).name}")
    prune(newest.path.parent, metric, never=newest.path)


def write(
    path: Path,
    model: nn.Module,
    optimizer: Optimizer,
    state: dict[str, Any],
    *,
    world: World,
    run: dict[str, Any],
    best: Best | None = None,
    reference: dict[str, Tensor] | None = None,
    value_regression: dict[str, Tensor] | None = None,
) -> None:
    """Write a checkpoint. Every rank must call it.

    Args:
        state: the record of the run, serializable as JSON.
        run: the identity of the run, for the manifest.
        best: the metric at this checkpoint, if the best one is kept.
        reference: the weights of a refreshed reference policy.
        value_regression: the tensors of the value head's regression, the same on every rank.

    Raises:
        CheckpointError: a file could not be written; the older checkpoints are unchanged.
    """
    copied = _snapshot(
        model,
        optimizer,
        state,
        reference=reference,
        value_regression=value_regression,
        in_shards=world.size > 1,
    )
    temporary = world.on_main_rank(lambda: _begin(path))
    sharded: dict[str, Any] | None = None
    if world.size > 1:
        reshard(model)
        sharded = shards.state_of(model, optimizer, reference or {})

    def write_files() -> None:
        if sharded is not None:
            try:
                shards.write(sharded, temporary)
            except OSError as error:
                raise _failed(path, error) from error
        if world.is_main:
            _finish(path, temporary, copied, run=run, best=best)

    world.gather_results(write_files)


def _snapshot(
    model: nn.Module,
    optimizer: Optimizer,
    state: dict[str, Any],
    *,
    reference: dict[str, Tensor] | None,
    value_regression: dict[str, Tensor] | None,
    in_shards: bool,
) -> Snapshot:
    """Copy the current state of a run to the CPU; the arguments are those of `write`.

    Args:
        in_shards: leave the tensors to `fastppo.run.shards`.
    """
    generators = random_state()
    files: dict[str, Mapping[str, Tensor]] = {"random.safetensors": generators.tensors}
    if not in_shards:
        files["model.safetensors"] = dict(trained_parameters(model))
    if reference and not in_shards:
        files["reference.safetensors"] = reference
    if value_regression:
        files["value_regression.safetensors"] = value_regression
    return Snapshot(
        {
            file: {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
            for file, tensors in files.items()
        },
        _optimizer_state(optimizer, in_shards=in_shards),
        {"format": FORMAT, "state": state, "random": generators.record},
    )


def _optimizer_state(optimizer: Optimizer, *, in_shards: bool) -> dict[str, Any]:
    """Return the optimizer's `state_dict` on the CPU, without its options."""
    saved = optimizer.state_dict()
    del saved["param_groups"]
    saved["state"] = {
        index: {
            name: value.detach().cpu() if isinstance(value, Tensor) else value
            for name, value in entry.items()
            if not (in_shards and isinstance(value, Tensor))
        }
        for index, entry in saved["state"].items()
    }
    return saved


def _begin(path: Path) -> Path:
    """Create the temporary directory of the checkpoint `path`.

    Raises:
        CheckpointError: the directory cannot be created.
    """
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        _remove_leftovers(path.parent)
        temporary.mkdir(parents=True)
    except OSError as error:
        raise _failed(path, error) from error
    return temporary


def _finish(
    path: Path,
    temporary: Path,
    snapshot: Snapshot,
    *,
    run: dict[str, Any],
    best: Best | None,
) -> None:
    """Write a snapshot into the directory of `_begin` and give it its name.

    Afterwards all but the newest `CHECKPOINTS_KEPT` checkpoints and the best are deleted.

    Raises:
        CheckpointError: the disk is full or not writable. The temporary directory is deleted.
    """
    old = path.with_name(f".{path.name}.old")
    try:
        for file, tensors in snapshot.files.items():
            save_file(tensors, temporary / file)
        torch.save(snapshot.optimizer, temporary / OPTIMIZER)
        (temporary / "state.json").write_text(json.dumps(snapshot.record), encoding="utf-8")
        metric = None if best is None else best._asdict()
        manifest.write(temporary, {"run": run, "best": metric})
        if path.exists():
            path.rename(old)  # deleted once the new one is in place
        temporary.rename(path)
        manifest.sync(path.parent)
        shutil.rmtree(old, ignore_errors=True)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch.save raises RuntimeError
        shutil.rmtree(temporary, ignore_errors=True)
        raise _failed(path, error) from error
    prune(path.parent, None if best is None else best.metric, never=path)


def _failed(path: Path, error: Exception) -> CheckpointError:
    """Return the error for a checkpoint that could not be written."""
    older = checkpoints(path.parent)
    if isinstance(error, RuntimeError):  # torch.save's message names a line of C++
        error = RuntimeError(f"{OPTIMIZER} could not be written; is the disk full?")
    stays = f"the newest is {older[-1]}" if older else "there is none yet"
    return CheckpointError(f"checkpoint {path} could not be written: {error}; {stays}")


def _remove_leftovers(run_dir: Path) -> None:
    """Delete the unfinished checkpoints of a killed run.

    The old version of a checkpoint is restored if its replacement is missing.
    """
    for old in run_dir.glob(".checkpoint-*.old"):
        place = run_dir / old.name[1:].removesuffix(".old")
        if not place.exists():
            old.rename(place)
    for stale in run_dir.glob(".checkpoint-*"):
        shutil.rmtree(stale)


def prune(run_dir: Path, metric: str | None = None, never: Path | None = None) -> None:
    """Delete all but the newest `CHECKPOINTS_KEPT` checkpoints, the best by `metric`, and
    `never`."""
    written = checkpoints(run_dir)
    kept = {*written[-CHECKPOINTS_KEPT:], never}
    if metric is not None:
        kept.add(best_of(run_dir, metric))
    for path in written:
        if path not in kept:
            shutil.rmtree(path, ignore_errors=True)


def best_of(run_dir: Path, metric: str) -> Path | None:
    """Return the best checkpoint by a metric, or None if no checkpoint has it."""
    best = max(checkpoints(run_dir), key=lambda path: _metric_at(path, metric), default=None)
    return best if best is not None and math.isfinite(_metric_at(best, metric)) else None


def _metric_at(path: Path, metric: str) -> float:
    """Return the metric's value at a checkpoint; −∞ if it has none or is damaged."""
    try:
        best = json.loads((path / manifest.FILE).read_bytes())["about"]["best"]
        return float(best["value"]) if best["metric"] == metric else -math.inf
    except (OSError, ValueError, LookupError, TypeError):
        return -math.inf


def load(
    path: str | Path, model: nn.Module, optimizer: Optimizer
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Restore the weights, the optimizer's state and the random states of a checkpoint.

    The optimizer's options (rates, decay, betas) stay those of `optimizer`: a resumed run follows
    its own config.

    Returns:
        (state, reference): as they were saved. The reference is empty if none was saved.

    Raises:
        ValueError: the checkpoint has another format or belongs to another model.
    """
    path = Path(path)
    record = _read_record(path)
    try:
        optimizer_state = torch.load(path / OPTIMIZER, weights_only=True, map_location="cpu")
    except UnpicklingError as error:
        raise ValueError(f"{path} cannot be read: {str(error).splitlines()[0]}") from error
    reshard(model)
    if (path / shards.FOLDER).is_dir():
        weights, tensors, reference = shards.read(path, model, optimizer)
    else:
        file = path / "reference.safetensors"
        weights = load_file(path / "model.safetensors")
        tensors = {}
        reference = load_file(file) if file.exists() else {}
    trained = dict(trained_parameters(model))
    if weights.keys() != trained.keys():
        unmatched = sorted(weights.keys() ^ trained.keys())
        raise ValueError(
            f"{path} does not fit the model: {len(unmatched)} parameters are only in "
            f"one of the two, such as {unmatched[0]}"
        )
    _restore_weights(path, weights, trained)
    _restore_optimizer(optimizer, optimizer_state, tensors)
    random_tensors = load_file(path / "random.safetensors")
    restore_random_state(RandomState(random_tensors, record["random"]))
    return record["state"], reference


def load_policy(path: Path, model: nn.Module) -> None:
    """Restore only the policy's weights of a checkpoint.

    Args:
        model: an `ActorCritic`.

    Raises:
        ValueError: the checkpoint has another format or belongs to another model.
    """
    _read_record(path)
    reshard(model)
    trained = {
        name: parameter
        for name, parameter in trained_parameters(model)
        if name.startswith("causal_lm.")
    }
    if (path / shards.FOLDER).is_dir():
        saved = shards.read_weights(path, trained)
    else:
        saved = load_file(path / "model.safetensors")
    missing = sorted(trained.keys() - saved.keys())
    if missing:
        raise ValueError(f"{path} does not fit the model: it has no {missing[0]}")
    _restore_weights(path, saved, trained)


def _read_record(path: Path) -> dict[str, Any]:
    """Return the content of state.json.

    Raises:
        ValueError: another version of FastPPO wrote the checkpoint.
    """
    file = path / "state.json"
    record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if record.get("format") != FORMAT:
        raise ValueError(
            f"{path}: expected checkpoint format {FORMAT}, got {record.get('format')}: another "
            "version of FastPPO wrote it. Finish the run with that version, or start a new run "
            "from its model"
        )
    return record


def _restore_weights(
    path: Path, saved: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]
) -> None:
    """Copy weights into parameters of the same shapes; their dtypes may differ."""
    with torch.no_grad():
        for name, parameter in parameters.items():
            weight = saved[name]
            if parameter.shape != weight.shape:
                raise ValueError(shards.shape_error(path, name, weight.shape, parameter.shape))
            parameter.copy_(sharded_like(weight, parameter))


def load_value_regression(path: str | Path) -> dict[str, Tensor]:
    """Return the tensors of the value head's regression; empty if a checkpoint has none."""
    file = Path(path) / "value_regression.safetensors"
    return load_file(file) if file.exists() else {}


def trained_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the trained parameters with their names. Tied weights appear once."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def _restore_optimizer(
    optimizer: Optimizer, saved: dict[str, Any], tensors: Mapping[int, Mapping[str, Tensor]]
) -> None:
    """Load the state of optimizer.pt, with the tensors of shards."""
    state: dict[int, dict[str, Any]] = {}
    for part in (saved["state"], tensors):
        for index, entry in part.items():
            for name, value in entry.items():
                if isinstance(value, Tensor):
                    value = sharded_like(value, optimizer.weights[index])
                state.setdefault(index, {})[name] = value
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({**saved, "state": state, "param_groups": groups})


def random_state() -> RandomState:
    """Return the current states of the generators."""
    tensors = {"torch": torch.get_rng_state()}
    if torch.cuda.is_initialized():  # a run on a CPU does not start the GPUs
        for i, device_state in enumerate(torch.cuda.get_rng_state_all()):
            tensors[f"cuda.{i}"] = device_state
    _, keys, position, has_gauss, gauss = np.random.get_state()
    tensors["numpy"] = torch.from_numpy(np.asarray(keys).astype(np.int64))
    version, internal, gauss_next = random.getstate()
    record = {
        "numpy": [int(position), int(has_gauss), float(gauss)],
        "python": [version, list(internal), gauss_next],
    }
    return RandomState(tensors, record)


def restore_random_state(state: RandomState) -> None:
    """Restore the states that `random_state` returned."""
    torch.set_rng_state(state.tensors["torch"])
    for i in range(torch.cuda.device_count()):  # the run may have had more GPUs, or fewer
        if f"cuda.{i}" in state.tensors:
            torch.cuda.set_rng_state(state.tensors[f"cuda.{i}"], i)
    position, has_gauss, gauss = state.record["numpy"]
    keys = state.tensors["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, position, has_gauss, gauss))
    version, internal, gauss_next = state.record["python"]
    random.setstate((version, tuple(internal), gauss_next))
