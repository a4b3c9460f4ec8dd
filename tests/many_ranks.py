"""What the ranks of a shared run do in tests, and what is compared of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tiny
import torch
from torch import Tensor

from fastppo.models.sharding import reshard, whole
from fastppo.ppo.trainer import PPOTrainer
from fastppo.run.log import read_jsonl
from runs import make_trainer

COMPARED = ("loss", "grad_norm", "kl", "reward", "approx_kl", "value_loss", "entropy")


def weights(trainer: PPOTrainer) -> dict[str, Tensor]:
    """The whole trained weights, as the optimiser has them."""
    reshard(trainer.model)
    names = {id(p): name for name, p in trainer.model.named_parameters()}
    masters = [p for group in trainer.optimizer.param_groups for p in group["params"]]
    both = zip(trainer.optimizer.weights, masters, strict=True)
    return {names[id(weight)]: whole(master.detach()).clone() for weight, master in both}


def train(folder: str, variant: Mapping[str, Any]) -> dict[str, Any]:
    """A run's weights at its end, and its metrics."""
    import fastppo.ppo.trainer as module

    module.write_report = lambda run_dir: None  # plots take longer than the runs
    options = dict(variant)
    if "ptx_coef" in options:
        options["ptx_data"] = tiny.saved_text(Path(folder) / "text.jsonl")
    trainer = make_trainer(Path(folder), **options)
    trainer.train()
    return {"weights": weights(trainer), "metrics": read_jsonl(Path(folder) / "run/metrics.jsonl")}


def train_all(folder: str, variants: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The same of several runs, one after another in the same processes."""
    found = {}
    for name, variant in variants.items():
        place = Path(folder) / name
        place.mkdir(parents=True, exist_ok=True)
        found[name] = train(str(place), variant)
    return found


def train_divided(folder: str, variants: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The same with the gradient's division by the ranks, torch's default, put back."""
    from torch.distributed.fsdp import FSDPModule

    right = FSDPModule.set_gradient_divide_factor
    FSDPModule.set_gradient_divide_factor = lambda self, factor: right(self, 2.0)  # type: ignore
    return train_all(folder, variants)


def difference(one: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """The largest difference of the weights, and of each metric in any iteration, relative where a
    number is larger than 1."""
    found = {
        "weights": max(
            (one["weights"][name] - other["weights"][name]).abs().max().item()
            for name in one["weights"]
        )
    }
    assert one["weights"].keys() == other["weights"].keys()
    assert len(one["metrics"]) == len(other["metrics"])
    for name in COMPARED:
        pairs = [
            (a[name], b[name])
            for a, b in zip(one["metrics"], other["metrics"], strict=True)
            if name in a
        ]
        if pairs:
            found[name] = max(abs(a - b) / max(1.0, abs(a)) for a, b in pairs)
    assert torch.tensor([*found.values()]).isfinite().all(), found
    return found
