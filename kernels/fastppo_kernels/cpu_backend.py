"""The CPU backend: loops that numba compiles for the processor.

The operations, names and operands are those of `fastppo_kernels.definition`. fp64 logits use the
PyTorch backend.

    cpu/losses            PPO's loss from logits
    cpu/logprobs          logprobs, entropies and KLs, and their backward pass
    cpu/token_terms       the loss of one token: policy term, KL, metrics
    cpu/row_statistics    the statistics of one row, and its gradient
    cpu/row_sweeps        the sweeps over one row
    cpu/advantage_loops   GAE, reward shaping and whitening
    cpu/arithmetic        exponentials, tanh, conversions of 16-bit floats
    cpu/operands          tensors as arrays
    cpu/threads           compilation, memory and threads
"""

from __future__ import annotations

from fastppo_kernels.cpu.advantage_loops import gae, shaped_advantages, whiten
from fastppo_kernels.cpu.logprobs import token_stats, token_stats_backward
from fastppo_kernels.cpu.losses import chunk_ppo_loss, ppo_loss
from fastppo_kernels.cpu.threads import fresh

READS_VALUES = True
"""The host reads values between operations, which is free on a CPU: rows of weight 0 and rows
without a gradient skip the lm-head's GEMMs."""

__all__ = [
    "READS_VALUES",
    "chunk_ppo_loss",
    "fresh",
    "gae",
    "ppo_loss",
    "shaped_advantages",
    "token_stats",
    "token_stats_backward",
    "whiten",
]
