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
    "decoded token": Limit(23, 44, 0.125),
    "rest of generation": Limit(12, 8, 1.5),
    "experience": Limit(330, 370, 1),
    "microbatch": Limit(80, 150, 0),
    "optimizer step": Limit(14, 0, 1),
    "rest of the update": Limit(100, 0, 1),
    "score": Limit(0, 0, 0),
    "rest of the iteration": Limit(0, 0, 0),
}
"""Of one call: experience and the rest of an update are for four microbatches of two rows."""
