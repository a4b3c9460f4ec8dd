"""Compile device.cpp with g++ into a cache folder."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("device.cpp")
FLAGS = ("-std=c++20", "-O1", "-w", "-shared", "-fPIC")


def compiler() -> str | None:
    """Return the path of g++, or None."""
    return shutil.which(os.environ.get("CXX", "g++"))


def torch_folder() -> Path:
    """Return torch's folder, without importing torch."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


@functools.cache
def library() -> Path:
    """Return the compiled device; compile it if the source or torch has changed.

    The cache is `~/.cache/simgpu`, or the folder named by `SIMGPU_CACHE`.
    """
    gxx = compiler()
    if gxx is None:
        raise FileNotFoundError("the simulated device needs g++: install it, or set CXX")
    cache = Path(os.environ.get("SIMGPU_CACHE", Path.home() / ".cache" / "simgpu"))
    version = importlib.metadata.version("torch")
    parts = (SOURCE.read_text(), version, str(torch_folder()), gxx, *FLAGS)
    built = cache / f"{hashlib.sha256(' '.join(parts).encode()).hexdigest()[:16]}.so"
    if not built.exists():
        cache.mkdir(parents=True, exist_ok=True)
        # Several processes may compile at once: each into a file of its own.
        new = built.with_suffix(f".{os.getpid()}")
        torch = torch_folder()
        includes = [f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include"]
        libraries = [f"-L{torch}/lib", "-lc10", "-ltorch_cpu"]
        command = [gxx, *FLAGS, str(SOURCE), "-o", str(new), *includes, *libraries]
        subprocess.run(command, check=True)
        new.replace(built)
    return built
