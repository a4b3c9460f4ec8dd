"""Measure the host time of a call on small tensors: `python -m benchmarks.host`.

Prints microseconds of CPU time per call: eager; under `torch.compile(fullgraph=True)`, without the
argument checks; and replayed in a CUDA graph, which contains only the launches. On a CPU, Triton
launches do nothing, and there are no graphs.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

import fastppo

HEADER = ("call", "launches", "eager", "compiled", "in a CUDA graph")
CALLS = 300
BLOCKS = 7
"""Number of blocks of `CALLS` calls, of which the median is taken."""


def calls(device: torch.device) -> dict[str, Callable[[], Any]]:
    logits = torch.randn(2, 1024, device=device)
    tokens = torch.randint(1024, (2,), device=device)
    old = fastppo.token_logprobs(logits, tokens, backend="torch")
    leaf = logits.clone().requires_grad_()
    advantages = torch.ones(2, device=device)
    x = torch.randn(4, 64, device=device)
    mask = x < 2
    scores = x[:, 0].contiguous()
    shaped: dict[str, Any] = {"kl_coef": 0.1, "gamma": 1.0, "lam": 0.95, "backend": "triton"}
    return {
        "ppo_loss": lambda: fastppo.ppo_loss(leaf, tokens, old, advantages, backend="triton").loss,
        "token_logprobs": lambda: fastppo.token_logprobs(logits, tokens, backend="triton"),
        "compute_advantages": lambda: fastppo.compute_advantages(scores, x, x, x, mask, **shaped),
        "gae": lambda: fastppo.gae(x, x, mask, backend="triton"),
        "whiten": lambda: fastppo.whiten(x, mask, backend="triton"),
    }


@contextlib.contextmanager
def launches(*, replaced: bool) -> Iterator[list[str]]:
    """Yield the names of launched kernels. With `replaced`, the kernels do not run."""
    from fastppo_kernels.triton.scale import _scale_kernel

    kind = type(_scale_kernel)  # of Triton or of its interpreter
    original = kind.__getitem__
    launched: list[str] = []

    def counted(kernel: Any, grid: Any) -> Callable[..., Any]:
        launched.append(kernel.__name__)
        return (lambda *args, **kwargs: None) if replaced else original(kernel, grid)

    with mock.patch.object(kind, "__getitem__", counted):
        yield launched


def microseconds(call: Callable[[], Any], count: int = CALLS) -> float:
    """Return the CPU time per call."""
    call()
    blocks = []
    for _ in range(BLOCKS):
        begin = time.process_time()
        for _ in range(count):
            call()
        blocks.append(1e6 * (time.process_time() - begin) / count)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    return statistics.median(blocks)


def _captured(call: Callable[[], Any]) -> Callable[[], None]:
    with torch.no_grad():
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
    return graph.replay


def table(device: torch.device, *, compiled: bool = True, count: int = CALLS) -> list[list[str]]:
    """Return a row per call, with the columns of `HEADER`."""
    on_gpu = device.type == "cuda"
    rows = []
    with launches(replaced=not on_gpu) as launched:
        for name, call in calls(device).items():
            call()
            launched.clear()
            call()
            row = [name, str(len(launched)), f"{microseconds(call, count):.0f}"]
            traced = torch.compile(call, fullgraph=True) if compiled else None
            row.append(f"{microseconds(traced, count):.0f}" if traced else "not compiled")
            row.append(f"{microseconds(_captured(call), count):.0f}" if on_gpu else "not measured")
            rows.append(row)
    return rows


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        # The launchers accept CPU tensors only in the interpreter. Triton reads this at import.
        os.environ.setdefault("TRITON_INTERPRET", "1")
    torch.set_num_threads(1)
    for cells in [HEADER, *table(device)]:
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
