"""Settings of the tests of functions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fastppo_kernels import torch_backend


@pytest.fixture(scope="module", autouse=True)
def _small_chunks() -> Iterator[None]:
    """Compute fp64 on the torch backend in several chunks of rows, the last one smaller."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_backend, "CHUNK_ELEMENTS", 40)
        yield
