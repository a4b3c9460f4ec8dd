"""`python tests/pretended_run.py LIBRARY DIR OPTIONS`: a run on a pretended GPU, and the same run
resumed.

LIBRARY is what `pretended_gpu.compiled` gave; OPTIONS are those of `runs.make_trainer`, as JSON.
Prints what came of it, as JSON.
"""

# ruff: noqa: E402

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pretended_gpu
import torch

warnings.simplefilter("ignore")  # of the interpreter's arithmetic, and of kernels passed over
pretended_gpu.pretend(Path(sys.argv[1]))

import numpy as np
from replayed import Replayed
from rich.console import Console

from fastppo.models import attention
from fastppo.ppo.trainer import PPOTrainer
from fastppo.rollout import fixed_shapes
from runs import make_trainer


def _run(directory: Path, options: dict[str, Any], **more: Any) -> PPOTrainer:
    given: dict[str, Any] = {
        "device": "cuda",
        "checkpoint_interval": 1,
        "console": Console(quiet=True),
    }
    trainer = make_trainer(directory, **(given | options | more))
    trainer.train()
    return trainer


def main(directory: str, options: str) -> None:
    np.seterr(all="ignore")
    chosen = json.loads(options)
    # Neither is an operation of the CPU's: kernels of packed attention, and graphs.
    attention._has_kernels = lambda value: False
    replayed: list[Replayed] = []

    def recorded(step: Any, pool: Any, stream: Any) -> Replayed:
        replayed.append(Replayed(step, step.func.__self__.memory))
        return replayed[-1]

    fixed_shapes._recorded = recorded  # type: ignore[assignment]
    whole = _run(Path(directory) / "whole", chosen)
    _run(Path(directory) / "parts", chosen, iterations=1)
    resumed = _run(Path(directory) / "parts", chosen, resume=True, allow_config_change=True)
    pairs = zip(whole.model.parameters(), resumed.model.parameters(), strict=True)
    found = {
        "devices": sorted({p.device.type for p in whole.model.parameters()}),
        "steps": whole.state.optimizer_step,
        "graphs": len(replayed),
        "same_bits": all(torch.equal(one, other) for one, other in pairs),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[2:])
