"""The Triton backend: kernels for GPUs.

The operations, names and operands are those of `fastppo_kernels.definition`.

    triton/loss         PPO's loss from logits: kernels and launcher
    triton/stats        logprobs, entropies and KLs, and their backward pass: kernels and launchers
    triton/scale        scales a gradient in the backward pass
    triton/token_loss   the loss of one token
    triton/full_kl      the first sweep over a row and its reference
    triton/sweeps       the two sweeps over a row: statistics, gradient
    triton/views        rows of logits in a kernel, their tiles, and a launch's decisions
    triton/gae          GAE and reward shaping: kernels and launchers
    triton/gae_block    the maps of a block of tokens, and their scan
    triton/whitening    moments and whitening: kernels and launchers
    triton/draw         sampling; its definition is fastppo.rollout.draw
    triton/jit          scalar functions
    triton/programs     the sizes of all programs
    triton/launch       helpers of the launchers
"""

from __future__ import annotations

from fastppo_kernels.triton.gae import gae, shaped_advantages
from fastppo_kernels.triton.loss import ppo_loss
from fastppo_kernels.triton.scale import scale_
from fastppo_kernels.triton.stats import token_stats, token_stats_backward
from fastppo_kernels.triton.whitening import whiten

READS_VALUES = False
"""The host reads no values, so the launchers can be captured in a CUDA graph."""

__all__ = [
    "READS_VALUES",
    "gae",
    "ppo_loss",
    "scale_",
    "shaped_advantages",
    "token_stats",
    "token_stats_backward",
    "whiten",
]
