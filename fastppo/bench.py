"""`fastppo bench`: finds the benchmark suite, which lives in a checkout and not in the wheel.

The suite times peers, keeps results by device and writes the README's table: work for a checkout.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[1]


def suite() -> Any:
    """The module behind `python -m benchmarks`.

    Raises:
        ImportError: there is no checkout around this package; says how to get one.
    """
    if not (CHECKOUT / "benchmarks" / "__main__.py").is_file():
        raise ImportError(
            "the benchmark suite is in the source, not in the wheel: clone the repository, "
            "`pip install -e '.[bench]'` there, and run `fastppo bench` again"
        )
    if str(CHECKOUT) not in sys.path:
        sys.path.insert(0, str(CHECKOUT))
    return importlib.import_module("benchmarks.__main__")
