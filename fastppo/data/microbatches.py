"""How a batch is cut into the parts that are run at once.

The weights of a loss are those of the whole minibatch, so the cut decides memory and speed and not
the gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor


def microbatches(count: int, size: int) -> list[Tensor]:
    """Rows of consecutive microbatches of at most `size` of `count` sequences: int64 on the CPU."""
    return list(torch.arange(count).split(size)) if count else []
