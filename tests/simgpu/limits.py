"""The most launches and waits of the host that a phase may take.

The launches are those of a Llama in the default precision of a GPU, by number of layers. They do
not depend on its width. kernels/NOTES.md has the history of these numbers.
"""

from __future__ import annotations

from typing import NamedTuple


class Limit(NamedTuple):
    """The most that one call of a phase may take."""

    launches: float
    per_layer: float
    waits: float


LIMITS = {
    "decoded token": Limit(46, 44, 1),
    "rest of generation": Limit(30, 25, 9),
    "experience": Limit(380, 370, 14),
    "microbatch": Limit(110, 150, 0),
    "optimizer step": Limit(17, 0, 1),
    "rest of the update": Limit(220, 0, 13),
    "score": Limit(0, 0, 0),
    "rest of the iteration": Limit(17, 0, 8),
}
"""Of one call: experience and the rest of an update are for four microbatches of two rows."""

WAITS_IN_MICROBATCHES = {"ptx": 1, "gemma2": 2, "generate_gemma2": 2, "sapo_fp16": 1}
"""Cases with waits in a microbatch: the most per microbatch."""

WAITS_PER_STEP = {"fp16": 3, "sapo_fp16": 3, "generate_fp16": 3, "critic_warmup": 2}
"""Cases with more than one wait per optimizer step."""
