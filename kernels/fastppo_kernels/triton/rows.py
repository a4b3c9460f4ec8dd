"""The Triton backend's functions of rows of logits, under the names of the definition.

views        rows of logits in a kernel, their tiles, and a launch's decisions
sweeps       the two sweeps over a row: statistics, gradient
token_loss   the loss of one token
full_kl      the first sweep over a row and its reference
loss         kernels and launcher of the loss
stats        kernels and launchers of the statistics and their backward pass
scale        scales a gradient in the backward pass
"""

from __future__ import annotations

from fastppo_kernels.triton.loss import ppo_loss
from fastppo_kernels.triton.scale import scale_
from fastppo_kernels.triton.stats import token_stats, token_stats_backward

READS_VALUES = False
"""The host reads no values, so the launchers can be captured in a CUDA graph."""

__all__ = [
    "READS_VALUES",
    "ppo_loss",
    "scale_",
    "token_stats",
    "token_stats_backward",
]
