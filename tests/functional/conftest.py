"""What the tests of the functions run under."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fastppo_kernels.torch import rows as torch_rows


@pytest.fixture(scope="module", autouse=True)
def _small_chunks() -> Iterator[None]:
    """fp64, which the torch backend has, is computed in chunks of some rows and a last one of
    fewer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_rows, "CHUNK_ELEMENTS", 40)
        yield
