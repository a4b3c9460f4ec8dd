"""Report resume instructions through torchrun.

torchrun ends with a summary of the first process that failed. It quotes the error that the process
recorded; without one, it shows only the exit code or the signal.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fastppo.run.directory import holds_run


@contextmanager
def telling_torchrun(run_dir: str | Path) -> Iterator[None]:
    """Record how to resume together with the block's error, or with the fact that it was killed.

    Does nothing without torchrun.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        yield
        return
    hint = f"`--resume true` continues from the newest checkpoint of {run_dir}"
    # This text remains if the process is killed; an error replaces it.
    _record(f"rank {os.environ['RANK']} was killed (by the system, if memory ran out); {hint}")
    try:
        yield
    except Exception as error:
        _record(f"{error}; {hint}" if holds_run(run_dir) else str(error))
        raise


def _record(sentence: str) -> None:
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    try:
        raise RuntimeError(sentence) from None
    except RuntimeError as error:  # torchrun shows the traceback, which ends with the sentence
        get_error_handler().record_exception(error)
