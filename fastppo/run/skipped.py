"""What is kept of an optimiser step that was skipped, since its loss or gradient was not finite."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn


def non_finite_gradients(model: nn.Module) -> list[str]:
    """Names of the parameters whose gradient has an inf or NaN. Reads every gradient."""
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and not bool(_local(parameter.grad).isfinite().all())
    ]


def _local(gradient: Any) -> Tensor:
    """This rank's shard of a gradient that is sharded: a DTensor, whose import takes a second."""
    return gradient.to_local() if hasattr(gradient, "to_local") else gradient


def save_batch(
    path: str | Path,
    tensors: Mapping[str, Tensor | None],
    *,
    iteration: int,
    step: int,
    non_finite: Literal["loss", "grad_norm"],
    parameters: Sequence[str] = (),
) -> Path:
    """Keeps the minibatch of a skipped step, to look at or to run again: whole or not at all.

    Args:
        path: of a .safetensors file; its folder is made.
        tensors: the minibatch by name; None is left out.
        iteration, step: of the run, and the optimiser step.
        non_finite: what was not finite.
        parameters: names of those with a non-finite gradient (`non_finite_gradients`).

    Returns:
        Path: where it is.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "iteration": iteration,
        "step": step,
        "non_finite": non_finite,
        "parameters": list(parameters),
    }
    # Copies, because safetensors refuses tensors that share memory, as views of one batch do.
    copies = {
        name: value.detach().to("cpu", copy=True).contiguous()
        for name, value in tensors.items()
        if value is not None
    }
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    save_file(copies, temporary, metadata={"fastppo": json.dumps(record)})
    temporary.replace(path)
    return path


def load_batch(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `save_batch` wrote: the tensors on the CPU, and iteration, step, non_finite, parameters.

    Raises:
        ValueError: the file was not written by `save_batch`.
    """
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        if "fastppo" not in metadata:
            raise ValueError(f"{path} is not the batch of a skipped step: it has no record of one")
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return tensors, json.loads(metadata["fastppo"])
