"""Checkpoints: of PPO what has changed in it, as safetensors and JSON, whole or not at all.

A checkpoint is written to a temporary directory beside its place, brought to the disk with its
manifest and renamed, so a run that is killed while writing leaves the older one whole. It holds the
trained weights, the optimiser's state, the value head (among the weights, or as its regression's
moments, the heads of each ridge and their errors: `value_regression.safetensors`), a reference that
was refreshed, the random states of torch, NumPy and Python, and `RunState.state_dict`: counters,
controllers of β, the scores' running scale, histories. Schedules and the position in the prompts
follow from the counters. On a CPU a resumed run ends in the same bits as one that was never
stopped.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fastppo.models.sharding import reshard, sharded_like
from fastppo.run import identity, manifest, shards
from fastppo.run.lock import check_still_held

FORMAT = 3
"""Raised when an older reader would misread what is written."""

LONGEST_REASON = 200
"""Characters of why a checkpoint cannot be read."""

CHECKPOINTS_KEPT = 2
"""The newest ones; the best is kept too."""

NAME = re.compile(r"^checkpoint-\d+$")

STATE_DTYPES = (torch.float32, torch.float64, torch.uint8)
"""Dtypes of an optimiser's state; uint8 holds the codes of 8-bit moments."""


UNREADABLE = (
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    RecursionError,
    SafetensorError,
    TypeError,
    UnicodeDecodeError,
    UnpicklingError,
    json.JSONDecodeError,
)
"""What reading raises where a file agrees with the manifest and no run has written it."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; the older ones are as they were."""


class Best(NamedTuple):
    """The metric by which the best checkpoint is kept besides the newest, and its value there."""

    metric: str
    """Its name, as the option has it."""
    value: float | None
    """Higher is better; None where the run has not had the metric yet."""


class RandomState(NamedTuple):
    """The states of the generators of torch, CUDA, NumPy and Python."""

    tensors: dict[str, Tensor]
    record: dict[str, Any]
    """The rest, as JSON has it."""


class Snapshot(NamedTuple):
    """What a checkpoint holds, on the CPU."""

    files: dict[str, dict[str, Tensor]]
    """Tensors by the name of their file."""
    record: dict[str, Any]
    """state.json."""


def path_of(run_dir: str | Path, number: int) -> Path:
    """Where a checkpoint of PPO is, once it is whole."""
    return Path(run_dir) / f"checkpoint-{number:06d}"


def checkpoints(run_dir: str | Path) -> list[Path]:
    """Checkpoints of a run of any stage, oldest first."""
    complete = [path for path in Path(run_dir).glob("checkpoint-*") if NAME.match(path.name)]
    return sorted(complete, key=_number)


def _number(path: Path) -> int:
    return int(path.name.split("-")[1])


def resumable(
    run_dir: str | Path,
    run: Mapping[str, Any],
    *,
    essential: Iterable[str],
    allowed: bool,
    say: Callable[[str], None],
) -> manifest.Newest | None:
    """The newest whole checkpoint, if there is one. `say` gets a sentence for each damaged one, and
    for each difference between the runs that is allowed.

    Args:
        run: the identity of the run that resumes from it.
        essential: options that must be the same in both runs.
        allowed: whether they may differ all the same (`allow_config_change`).

    Raises:
        DamagedError: there are checkpoints, and none is whole.
        ValueError: it is of another run, and that is not allowed.
    """
    newest = manifest.newest(checkpoints(run_dir))
    if newest is None:
        say(f"no checkpoint in {run_dir}: starting from the beginning")
        return None
    for reason in newest.reasons:
        say(f"passed over {reason}")
    before: dict[str, Any] = newest.owner["run"]
    for sentence in identity.check_same_run(
        newest.path, before, run, essential=essential, allowed=allowed
    ):
        say(sentence)
    return newest


def snapshot(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    *,
    reference: dict[str, Tensor] | None = None,
    value_regression: dict[str, Tensor] | None = None,
    in_shards: bool = False,
) -> Snapshot:
    """What a checkpoint of the run as it is now holds.

    Args:
        reference: weights of a reference policy that is not the one the run started with.
        value_regression: the tensors of a value head's regression, which every rank has whole.
        in_shards: of what ranks hold shards of, `fastppo.run.shards` writes; this is the rest.
    """
    generators = random_state()
    files: dict[str, Mapping[str, Tensor]] = {"random.safetensors": generators.tensors}
    if not in_shards:
        files |= {
            "model.safetensors": dict(trained_parameters(model)),
            "optimizer.safetensors": _optimizer_state(optimizer),
        }
    if reference and not in_shards:
        files["reference.safetensors"] = reference
    if value_regression:
        files["value_regression.safetensors"] = value_regression
    return Snapshot(
        {
            file: {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
            for file, tensors in files.items()
        },
        {"format": FORMAT, "state": state, "random": generators.record},
    )


def begin(path: Path) -> Path:
    """The empty directory that the checkpoint `path` is written in.

    Raises:
        CheckpointError: there is no room for one.
    """
    check_still_held(path.parent)
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        remove_leftovers(path.parent)
        temporary.mkdir(parents=True)
    except OSError as error:
        raise failed(path, error) from error
    return temporary


def finish(
    path: Path,
    temporary: Path,
    snapshot: Snapshot,
    *,
    run: dict[str, Any] | None = None,
    best: Best | None = None,
) -> None:
    """Writes the files of a checkpoint into its directory of `begin`, beside what is there, gives
    it its name and removes all but the newest `CHECKPOINTS_KEPT` and the best.

    Args:
        run: the run's identity, for its manifest.
        best: what this checkpoint is worth, if the best one is kept.

    Raises:
        CheckpointError: the disk is full, or cannot be written to; nothing half written is left.
    """
    old = path.with_name(f".{path.name}.old")
    try:
        for file, tensors in snapshot.files.items():
            save_file(tensors, temporary / file)
        (temporary / "state.json").write_text(json.dumps(snapshot.record), encoding="utf-8")
        worth = None if best is None else best._asdict()
        manifest.write(temporary, _number(path), {"run": run or {}, "best": worth})
        if path.exists():
            path.rename(old)  # the new one first, then the old one goes
        temporary.rename(path)
        manifest.sync(path.parent)
        shutil.rmtree(old, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise failed(path, error) from error
    prune(path.parent, None if best is None else best.metric, never=path)


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turns the errors of reading a file with unexpected contents into a ValueError that names the
    checkpoint."""
    try:
        yield
    except UNREADABLE as error:
        reason = next(iter(str(error).splitlines()), "")[:LONGEST_REASON]
        sentence = f"{path} cannot be read: {type(error).__name__}: {reason}"
        raise ValueError(sentence) from error


def failed(path: Path, error: Exception) -> CheckpointError:
    """The error for a checkpoint that could not be written."""
    older = checkpoints(path.parent)
    stays = f"the newest is {older[-1]}" if older else "there is none yet"
    return CheckpointError(f"checkpoint {path} could not be written: {error}; {stays}")


def remove_leftovers(run_dir: Path) -> None:
    """Removes what a run left behind that was killed while it wrote. A checkpoint that was being
    replaced comes back, if the new one did not take its place."""
    for old in run_dir.glob(".checkpoint-*.old"):
        place = run_dir / old.name[1:].removesuffix(".old")
        if not place.exists():
            old.rename(place)
    for stale in run_dir.glob(".checkpoint-*"):
        if stale.is_dir() and not stale.is_symlink():
            shutil.rmtree(stale)
        else:
            stale.unlink()


def prune(run_dir: Path, metric: str | None = None, never: Path | None = None) -> None:
    """Removes all but the newest `CHECKPOINTS_KEPT` checkpoints, the best by `metric`, and
    `never`."""
    written = checkpoints(run_dir)
    kept = {*written[-CHECKPOINTS_KEPT:], never}
    if metric is not None:
        kept.add(best_of(run_dir, metric))
    for path in written:
        if path not in kept:
            shutil.rmtree(path, ignore_errors=True)


def best_of(run_dir: Path, metric: str) -> Path | None:
    """The checkpoint that is the best by a metric; None where none has it."""
    best = max(checkpoints(run_dir), key=lambda path: _worth(path, metric), default=None)
    return best if best is not None and math.isfinite(_worth(best, metric)) else None


def _worth(path: Path, metric: str) -> float:
    """The checkpoint's value of the metric; −∞ where it has none, or cannot be read."""
    try:
        best = json.loads((path / manifest.FILE).read_bytes())["about"]["best"]
        same = best["metric"] == metric and best["value"] is not None
        return float(best["value"]) if same else -math.inf
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError, RecursionError):
        return -math.inf


def load(
    path: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Restores the weights, the optimiser's state and the random states of a whole checkpoint.

    Returns:
        (state, reference): as they were saved; the reference is empty if none was.

    The optimiser's options (rates, decay, betas) stay those of `optimizer`: a resumed run follows
    its own config.

    Raises:
        ValueError: the checkpoint is of another format, or a tensor is of another model.
    """
    path = Path(path)
    record = _read_record(path)
    reshard(model)
    if (path / shards.FOLDER).is_dir():
        saved = shards.read(path, model, optimizer)
    else:
        file = path / "reference.safetensors"
        saved = shards.Read(
            model=load_file(path / "model.safetensors"),
            optimizer=load_file(path / "optimizer.safetensors"),
            reference=load_file(file) if file.exists() else {},
        )
    trained = dict(trained_parameters(model))
    if saved.model.keys() != trained.keys():
        unmatched = sorted(saved.model.keys() ^ trained.keys())
        raise ValueError(
            f"{path} does not fit the model: {len(unmatched)} parameters are only in "
            f"one of the two, such as {unmatched[0]}"
        )
    _restore_weights(path, saved.model, trained)
    _check_optimizer(path, saved.optimizer, optimizer, record["state"])
    _restore_optimizer(optimizer, shards.sharded(saved.optimizer, optimizer))
    random_tensors = load_file(path / "random.safetensors")
    try:
        restore_random_state(RandomState(random_tensors, record["random"]))
    except (RuntimeError, ValueError) as error:  # torch's and NumPy's, which name no file
        raise ValueError(f"{path}: the random states cannot be restored: {error}") from error
    return record["state"], saved.reference


def load_policy(path: Path, model: nn.Module) -> None:
    """Restores the policy's weights of a whole checkpoint, and nothing else.

    Args:
        model: an `ActorCritic`.

    Raises:
        ValueError: the checkpoint is of another format, or of another model.
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
    lacking = sorted(trained.keys() - saved.keys())
    if lacking:
        raise ValueError(f"{path} does not fit the model: it has no {lacking[0]}")
    _restore_weights(path, saved, trained)


def _read_record(path: Path) -> dict[str, Any]:
    """A checkpoint's state.json; raises ValueError for another version's."""
    try:
        record = json.loads((path / "state.json").read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    if record["format"] != FORMAT:
        raise ValueError(
            f"{path}: expected checkpoint format {FORMAT}, got {record['format']}, which another "
            "version of FastPPO wrote; finish the run with that version, or start from its policy"
        )
    return record


def _restore_weights(
    path: Path, saved: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]
) -> None:
    """Copies a checkpoint's weights into parameters; raises ValueError for one of another shape, or
    whose numbers are of another kind: precisions may differ."""
    with torch.no_grad():
        for name, parameter in parameters.items():
            weight = saved[name]
            if parameter.shape != weight.shape:
                raise ValueError(shards.shape_error(path, name, weight.shape, parameter.shape))
            if parameter.is_floating_point() != weight.is_floating_point():
                raise ValueError(f"{path} does not fit the model: {name} is {weight.dtype} there")
            parameter.copy_(sharded_like(weight, parameter))


def load_value_regression(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint's value regression; empty if it has none."""
    file = Path(path) / "value_regression.safetensors"
    return load_file(file) if file.exists() else {}


def trained_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The trained parameters by name; tied weights are one parameter and come once."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def _optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{index}.{name}": value
        for index, entry in optimizer.state_dict()["state"].items()
        for name, value in entry.items()
    }


def _check_optimizer(
    path: Path, tensors: Mapping[str, Tensor], optimizer: Any, state: Mapping[str, Any]
) -> None:
    """Raises ValueError unless the tensors are those of the optimiser: a fused step over one of
    another shape would write past its end."""
    shapes = {
        f"{index}.{name}": shape
        for index, weight_shapes in enumerate(optimizer.state_shapes())
        for name, shape in weight_shapes.items()
    }
    masters = {key for key in shapes if key.endswith(".master")}
    pairs = enumerate(zip(optimizer.weights, optimizer.masters, strict=True))
    masters_needed = {f"{index}.master" for index, (weight, own) in pairs if weight is not own}
    for key, tensor in tensors.items():
        if key not in shapes:
            raise ValueError(f"{path} does not fit the optimizer, which has no {key}")
        if tuple(tensor.shape) != shapes[key]:
            raise ValueError(
                shards.shape_error(path, f"optimizer {key}", tensor.shape, shapes[key])
            )
        if tensor.dtype not in STATE_DTYPES:
            raise ValueError(f"{path} does not fit the optimizer: {key} is {tensor.dtype} there")
    moments = {key for key in tensors if not key.endswith(".master")}
    stepped = {key.split(".")[0] for key in moments}  # a weight without a gradient has none
    wanted = {key for key in shapes.keys() - masters if key.split(".")[0] in stepped}
    missing = sorted((wanted | masters_needed) - tensors.keys())
    not_taken = state.get("skipped_steps", 0) + state.get("overflowed_steps", 0)
    taken = state.get("optimizer_step", 0) - not_taken
    if missing or (taken > 0 and not moments):
        raise ValueError(
            f"{path} does not fit the optimizer: it has no {missing[0] if missing else 'moments'}"
        )


def _restore_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        index, name = key.split(".", 1)
        state.setdefault(int(index), {})[name] = value
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def random_state() -> RandomState:
    """What the generators are at now."""
    tensors = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
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
    """Restores what `random_state` returned."""
    torch.set_rng_state(state.tensors["torch"])
    devices = [value for name, value in sorted(state.tensors.items()) if name.startswith("cuda.")]
    if devices and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(devices)
    position, has_gauss, gauss = state.record["numpy"]
    keys = state.tensors["numpy"].numpy().astype(np.uint32)
    if not 0 <= position <= len(keys):  # NumPy would read beyond them
        raise ValueError(f"NumPy's position is {position} of {len(keys)}")
    np.random.set_state(("MT19937", keys, position, has_gauss, gauss))
    version, internal, gauss_next = state.record["python"]
    random.setstate((version, tuple(internal), gauss_next))
