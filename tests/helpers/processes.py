"""Python in separate processes."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATHS = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
"""PYTHONPATH of this tree."""

FORKSERVER = multiprocessing.get_context("forkserver")
"""One process imports torch and fastppo; the processes of tests are forks of it."""
FORKSERVER.set_forkserver_preload(["fastppo.ppo.trainer", "fastppo.stages.sft", "tiny"])


def python(
    *arguments: str, cwd: Path = ROOT, code: int = 0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run Python with this tree's packages, and check its exit code."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": PATHS} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr
    return done


def torchrun(count: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `count` processes by torchrun with this tree's packages."""
    variables = {
        "PYTHONPATH": PATHS,
        "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(count)]
    return subprocess.run(
        [*launch, "--standalone", *arguments],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )


def loaded_after(source: str) -> set[str]:
    """Return the modules loaded by a process that runs `source`."""
    printed = python("-c", f"import sys\n{source}\nprint(*sys.modules)").stdout
    return set(printed.splitlines()[-1].split())
