"""Run Python on the simulated device: `python -m tests.simgpu.run -m MODULE …` or `… FILE …`."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from tests.simgpu import device


def main() -> None:
    device.install()
    import torch

    torch.set_num_threads(1)
    execute(sys.argv[1:])


def execute(arguments: list[str]) -> None:
    """Run a module or a file as `python` would."""
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()
