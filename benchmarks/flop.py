"""Count the FLOP of a block, operator by operator: `with counted() as counter`.

torch's counter knows matrix products and GPU attention. This module adds CPU attention and
FastPPO's fused lm-head. Masked entries of attention, and rows skipped because their
gradient is zero, count as if they were computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import flop_counter
from torch.utils.flop_counter import FlopCounterMode

Shape = Sequence[int]


@contextmanager
def counted() -> Iterator[FlopCounterMode]:
    """Yield a counter. After the block its `get_total_flops()` returns the FLOP."""
    import fastppo.functional.operators  # registers the operators

    aten = torch.ops.aten
    fastppo = torch.ops.fastppo
    of_operators = {
        aten._scaled_dot_product_flash_attention_for_cpu: _attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
        fastppo.linear_token_stats: _logits,
        fastppo.linear_ppo_loss: _logits_and_gradients,
    }
    with FlopCounterMode(display=False, custom_mapping=of_operators) as counter:
        yield counter


def _attention(query: Shape, key: Shape, value: Shape, *rest: Any, **more: Any) -> int:
    return flop_counter.sdpa_flop_count(query, key, value)


def _attention_backward(
    grad: Shape, query: Shape, key: Shape, value: Shape, *rest: Any, **more: Any
) -> int:
    return flop_counter.sdpa_backward_flop_count(grad, query, key, value)


def _logits(hidden: Shape, weight: Shape, *rest: Any, **more: Any) -> int:
    """Count the FLOP of the logits: 2·N·H·V."""
    return 2 * math.prod(hidden) * weight[0]


def _logits_and_gradients(hidden: Shape, weight: Shape, *rest: Any, **more: Any) -> int:
    """Count the FLOP of the logits, dX and dW: 6·N·H·V."""
    return 3 * _logits(hidden, weight)
