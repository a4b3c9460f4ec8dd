"""The Triton backend on rows of logits, under the names of the definition.

triton_views        rows of logits in a kernel, their tiles, what a launch decides
triton_sweeps       the two sweeps over a row: statistics, gradient
triton_token_loss   the loss of one token
triton_full_kl      the first sweep over a row and the reference's beside it
triton_loss         the kernels and the launcher of the loss
triton_stats        of the statistics, and of their backward pass
triton_scale        a gradient times the factor that arrives in the backward pass
"""

from __future__ import annotations

from fastppo_kernels.triton.loss import ppo_loss
from fastppo_kernels.triton.scale import scale_
from fastppo_kernels.triton.stats import token_stats, token_stats_backward

READS_VALUES = False
"""The host looks at no value: the launchers can be captured in a CUDA graph."""

__all__ = [
    "READS_VALUES",
    "ppo_loss",
    "scale_",
    "token_stats",
    "token_stats_backward",
]
