"""A head that two processes share, each with its own half of the batch: whose gradient is right."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fastppo

N, V, H = 12, 10, 6


def batch() -> dict[str, Tensor]:
    """The operands of all rows; the same in every process."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    return {
        "hidden": draw(N, H),
        "weight": draw(V, H),
        "tokens": torch.arange(N) % V,
        "old_logprobs": draw(N) / 9 - 2,
        "advantages": draw(N),
    }


def loss(rows: slice, weight: Tensor) -> Tensor:
    """The share of some rows in the loss of all."""
    given = batch()
    parts = {name: given[name][rows] for name in given if name != "weight"}
    return fastppo.linear_ppo_loss(weight=weight, denominator=N, **parts).loss


def gradients(rank: int, rendezvous: str, out: str) -> None:
    """The weight's gradient, put together from both ranks, by the way that it was gathered."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Shard, distribute_tensor

    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2
    )
    mesh = init_device_mesh("cpu", (2,))
    rows = slice(0, N // 2) if rank == 0 else slice(N // 2, N)
    ways: dict[str, dict[str, Any]] = {"plain": {}, "partial": {"grad_placements": [Partial()]}}
    found = {}
    for name, how in ways.items():
        sharded = distribute_tensor(batch()["weight"], mesh, [Shard(0)]).requires_grad_()
        loss(rows, sharded.full_tensor(**how)).backward()
        assert sharded.grad is not None
        found[name] = sharded.grad.full_tensor()
    if rank == 0:
        torch.save(found, out)
    distributed.destroy_process_group()


def run(folder: Path) -> dict[str, Tensor]:
    """The gradients of two processes."""
    context = multiprocessing.get_context("forkserver")
    arguments = str(folder / "rendezvous"), str(folder / "out.pt")
    ranks = [context.Process(target=gradients, args=(rank, *arguments)) for rank in (0, 1)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
        assert process.exitcode == 0
    return torch.load(folder / "out.pt")
