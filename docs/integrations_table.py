"""Counts what docs/integrations.md says of memory: bytes at the peak of a loss and its gradient.

    PYTHONPATH=.:kernels python docs/integrations_table.py

verl's fused lm-head beside ours, in fp32 on a CPU: 1024 tokens, V = 32000, H = 256, so logits of
131 MB. TRL's numbers are printed by examples/trl_grpo.py.
"""

from __future__ import annotations

import functools
import importlib

import torch
from torch import Tensor, nn

from benchmarks.measure import peak_extra_memory

N, V, H = 1024, 32000, 256


def loss(fused: type[nn.Module], hidden: Tensor, weight: Tensor, old_logprobs: Tensor) -> Tensor:
    """Logprobs and entropy by the fused lm-head, and a policy loss of them."""
    tokens = torch.randint(V, (N,))
    advantages = torch.randn(N)
    logprobs, entropy = fused()(hidden, weight, tokens)
    return -((logprobs - old_logprobs).exp() * advantages + 0.01 * entropy).mean()


def peak(fused: type[nn.Module]) -> float:
    """MB."""
    torch.manual_seed(0)
    hidden = torch.randn(N, H, requires_grad=True)
    weight = torch.randn(V, H, requires_grad=True)
    old_logprobs = torch.randn(N) - 9
    forward = functools.partial(loss, fused, hidden, weight, old_logprobs)
    return peak_extra_memory(lambda: forward().backward(), torch.device("cpu")) / 1e6


if __name__ == "__main__":
    try:
        # Before ours takes its place.
        theirs = importlib.import_module(
            "verl.utils.experimental.torch_functional"
        ).FusedLinearForPPO
    except ModuleNotFoundError as error:
        raise SystemExit(f"verl is not counted: {error}") from None
    ours = importlib.import_module("fastppo.integrations.verl").FusedLinearForPPO
    print(f"verl   theirs {peak(theirs):6.1f} MB   ours {peak(ours):6.1f} MB")
