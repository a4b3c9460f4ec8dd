"""Counts what docs/integrations.md says of memory: bytes at the peak of a loss and its gradient.

    PYTHONPATH=.:kernels python docs/integrations_table.py

A line for each package that is installed, theirs beside ours, in fp32 on a CPU: 1024 tokens,
V = 32000, H = 256, so logits of 131 MB. TRL's numbers are printed by examples/trl_grpo.py.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import peak_extra_memory

N, V, H = 1024, 32000, 256


def verl(kind: type, hidden: Tensor, weight: Tensor, *operands: Tensor) -> Tensor:
    """Logprobs and entropy by the fused lm-head, and a policy loss of them."""
    tokens, old, advantages = operands
    logprobs, entropy = kind()(hidden, weight, tokens)
    return -((logprobs - old).exp() * advantages + 0.01 * entropy).mean()


def agilerl(function: Any, hidden: Tensor, weight: Tensor, *operands: Tensor) -> Tensor:
    """The fused policy loss."""
    tokens, old, advantages = (x.view(8, -1) for x in operands)
    mask = torch.ones_like(old)
    given = (hidden.view(8, -1, H), weight, None, tokens, mask, advantages, None, old)
    # The chunk that LLMPPO hands over unless its user names one.
    base = importlib.import_module("agilerl.algorithms.core.base")
    chunk = base.LLMAlgorithm._resolve_fused_chunk_rows(len(weight))
    return function(*given, 0.0, 0.2, 0.2, 1.0, "token", token_chunk_size=chunk)[0]


def count(package: str) -> tuple[float, float]:
    """(theirs, ours) in MB."""
    if package == "verl":
        fused = importlib.import_module("verl.utils.experimental.torch_functional")
        theirs = fused.FusedLinearForPPO  # before ours takes its place
        ours = importlib.import_module("fastppo.integrations.verl").FusedLinearForPPO
    else:
        adapter = importlib.import_module("fastppo.integrations.agilerl")
        theirs, ours = adapter.THEIRS, adapter.apply_fused_policy_loss
    peaks = []
    for each in (theirs, ours):
        torch.manual_seed(0)
        hidden = torch.randn(N, H, requires_grad=True)
        weight = torch.randn(V, H, requires_grad=True)
        operands = hidden, weight, torch.randint(V, (N,)), torch.randn(N) - 9, torch.randn(N)

        def work(function: Any = each, operands: Any = operands) -> None:
            globals()[package](function, *operands).backward()

        peaks.append(peak_extra_memory(work, torch.device("cpu")) / 1e6)
    return peaks[0], peaks[1]


if __name__ == "__main__":
    for package in ("verl", "agilerl"):
        try:
            theirs, ours = count(package)
        except ModuleNotFoundError as error:
            print(f"{package:8s} not counted: {error}")
        else:
            print(f"{package:8s} theirs {theirs:6.1f} MB   ours {ours:6.1f} MB")
