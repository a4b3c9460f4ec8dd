"""The CPU's compiled loops: their cache, memory, threads, and the message on a terminal."""

from __future__ import annotations

import importlib
import io
import math
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fastppo_kernels
import numpy as np
import processes
import pytest
import torch
from fastppo_kernels import cpu_backend
from fastppo_kernels.cpu import threads as cpu_threads
from fastppo_kernels.cpu.threads import fresh
from fastppo_kernels.records import Discounts, Shaping, Trajectory
from logit_rows import arguments_of, operands
from processes import FORKSERVER
from torch import Tensor

import fastppo

DTYPES = ("f4", "i2", "u2")
COUNT = 8

LOOP = """
from fastppo_kernels.cpu.threads import compiled, kernel

@compiled
def _first_of_{i}(x):
    return x[0]

@kernel
def loop_{i}(x):
    return _first_of_{i}(x)
"""

LOGPROBS = """
import draws, fastppo, torch
batch = draws.batch((50,), 1009, torch.bfloat16)
print(fastppo.token_logprobs(batch.logits, batch.tokens, temperature=0.7).tolist())
"""


def behind(patch: pytest.MonkeyPatch, tensor: Tensor, gap: int) -> Tensor:
    """Copy a tensor so that NumPy's next buffers of its dtype start `gap` entries behind it."""
    empty = np.empty
    count = tensor.numel()
    memory = np.zeros(8192, tensor.numpy().dtype)

    def allocate(shape: Any, dtype: Any = np.float64) -> Any:
        if np.ndim(shape) or np.dtype(dtype) != memory.dtype:
            return empty(shape, dtype)
        return memory[count + gap :][:shape]

    patch.setattr(np, "empty", allocate)
    return torch.from_numpy(memory[:count]).view(tensor.shape).copy_(tensor)


@pytest.fixture
def loops(tmp_path: Path) -> Path:
    """Return a folder with an uncompiled module of kernels."""
    (tmp_path / "loops.py").write_text("".join(LOOP.format(i=i) for i in range(COUNT)))
    return tmp_path


def imported(loops: Path) -> Any:
    """Import the module again, as another process would."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(loops)
        patch.delitem(sys.modules, "loops", raising=False)
        return importlib.import_module("loops")


def run_all(loops: Path, dtype: str, barrier: Any = None) -> None:
    module = imported(loops)
    for i in range(COUNT):
        if barrier is not None:
            barrier.wait(timeout=300)
        assert getattr(module, f"loop_{i}")(np.array([3], dtype)) == 3


def test_processes_that_compile_at_once_leave_a_correct_cache(
    loops: Path,
) -> None:
    """numba's own cache may store the code of one dtype under another, permanently."""
    barrier = FORKSERVER.Barrier(len(DTYPES))
    cold = [FORKSERVER.Process(target=run_all, args=(loops, x, barrier)) for x in DTYPES]
    for process in cold:
        process.start()
    for process in cold:
        process.join()
        assert process.exitcode == 0
    module = imported(loops)
    for i in range(COUNT):
        loop = getattr(module, f"loop_{i}")
        for dtype in DTYPES:
            assert loop(np.array([3], dtype)) == 3
        assert sum(loop.stats.cache_hits.values()) == len(DTYPES)


@pytest.mark.parametrize("source", ["cpu/losses.py", "records.py"])
def test_code_is_cached_until_a_source_changes(
    source: str, loops: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hits() -> int:
        loop = imported(loops).loop_0
        loop(np.array([3.0]))
        return sum(loop.stats.cache_hits.values())

    assert [hits(), hits()] == [0, 1]
    package = tmp_path / "package"
    (package / "cpu").mkdir(parents=True)
    (package / "records.py").touch()
    before = cpu_threads._hash_of_sources(package)
    (package / source).write_text("LIMIT = 2")
    after = cpu_threads._hash_of_sources(package)
    assert after != before
    monkeypatch.setattr(cpu_threads, "SOURCES", after)
    assert [hits(), hits()] == [0, 1]


def test_a_full_disk_or_truncated_code_compiles_again(loops: Path) -> None:
    def hits() -> int:
        loop = imported(loops).loop_0
        assert loop(np.array([3.0])) == 3.0
        return sum(loop.stats.cache_hits.values())

    imported(loops)  # keeps its bytecode
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        assert hits() == 0
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    folder = loops / "__pycache__"
    assert not list(folder.glob("loops.loop_0*"))
    assert [hits(), hits()] == [0, 1]
    (kept,) = folder.glob("loops.loop_0*.nbc")
    for size in (0, kept.stat().st_size // 2):
        os.truncate(kept, size)
        assert [hits(), hits()] == [0, 1]


@pytest.mark.slow
def test_cached_code_gives_the_same_bits_as_compiled_code(tmp_path: Path) -> None:
    """A part that is called but not inlined would be compiled alone and with the loop, with two
    orders of its sums, depending on what was compiled before."""
    paths = f"{processes.PATHS}{os.pathsep}{processes.ROOT / 'tests' / 'helpers'}"

    def logprobs() -> str:
        return processes.python(
            "-c", LOGPROBS, NUMBA_CACHE_DIR=str(tmp_path), PYTHONPATH=paths
        ).stdout

    just_compiled = logprobs()
    assert list(tmp_path.rglob("*.nbc"))
    assert logprobs() == just_compiled


@pytest.mark.parametrize("seconds", [0.0, 1.2])
def test_a_slow_compilation_is_announced_on_a_terminal(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    class Kernel:
        signatures: tuple[str, ...] = ()

        def __call__(self, start: int, stop: int) -> None:
            time.sleep(seconds)
            self.signatures = ("compiled",)

    monkeypatch.setattr(sys, "stderr", Terminal())
    cpu_threads._say_that_it_compiles.cache_clear()
    cpu_threads.in_threads(Kernel(), 1, entries=1)
    cpu_threads.in_threads(Kernel(), 1, entries=1)
    assert sys.stderr.getvalue().count("\n") == (1 if seconds else 0)  # type: ignore[attr-defined]


# ---------------------------------------------------------------------------------- kept memory

LARGE = torch.empty(cpu_threads.LARGE, dtype=torch.uint8)
SMALL = LARGE[: cpu_threads.KEPT]
HELD = LARGE.nbytes + cpu_threads.ALIGNMENT


@pytest.fixture
def empty_cache() -> Iterator[None]:
    fastppo.empty_cache()
    yield
    fastppo.empty_cache()


@pytest.mark.parametrize("gap", [0, 5, 16])
def test_bits_of_a_loss_do_not_depend_on_where_its_buffers_are(
    gap: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    records, rest = operands(arguments_of("policy", 37, torch.float32))
    wanted = cpu_backend.ppo_loss(*records, **rest)
    logits = behind(monkeypatch, records.logits, gap)
    found = cpu_backend.ppo_loss(*records._replace(logits=logits), **rest)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("gap", [0, 1, 4])
def test_bits_of_a_kl_do_not_depend_on_where_its_buffers_are(
    gap: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    values, logprobs, ref_logprobs = torch.randn(3, 1, 13, dtype=torch.float64)

    def kl(logprobs: Tensor) -> Tensor:
        shaping = Shaping(torch.zeros(1), logprobs, ref_logprobs, kl_coef=0.1, kl_estimator="k1")
        return cpu_backend.shaped_advantages(Trajectory(values), shaping, Discounts(1.0, 1.0)).kl

    wanted = kl(logprobs)
    assert torch.equal(kl(behind(monkeypatch, logprobs, gap)), wanted)


@pytest.mark.usefixtures("empty_cache")
def test_the_memory_of_a_freed_tensor_is_used_again() -> None:
    first = fresh(LARGE)
    place = first.data_ptr()
    assert place % cpu_threads.ALIGNMENT == 0
    second = fresh(LARGE)
    assert second.data_ptr() != place
    del first
    assert fresh(LARGE).data_ptr() == place
    fastppo.empty_cache()
    assert held_bytes() == 0


@pytest.mark.usefixtures("empty_cache")
@pytest.mark.parametrize(
    "share", [lambda x: x.numpy(), lambda x: x.view(torch.int32)[3:], lambda x: x.detach()]
)
def test_memory_in_use_by_a_view_is_not_used_again(share: Any) -> None:
    tensor = fresh(LARGE).fill_(7)
    view = share(tensor)
    expected = view.copy() if isinstance(view, np.ndarray) else view.clone()
    del tensor
    fresh(LARGE).fill_(9)
    assert (view == expected).all()
    assert held_bytes() == HELD  # of the second tensor
    del view
    assert held_bytes() == 2 * HELD


@pytest.mark.usefixtures("empty_cache")
def test_kept_memory_is_bounded() -> None:
    several = [fresh(LARGE) for _ in range(5)]
    del several
    assert held_bytes() == cpu_threads.SPARES * HELD
    # Neither too small nor more than twice too large.
    larger = fresh(LARGE.repeat(2))
    assert held_bytes() == cpu_threads.SPARES * HELD
    del larger
    kept = HELD + 2 * LARGE.nbytes + cpu_threads.ALIGNMENT
    assert held_bytes() == kept
    smaller = [fresh(SMALL) for _ in range(7)]
    del smaller
    assert held_bytes() == kept + cpu_threads.SMALL_SPARES * SMALL.nbytes
    unkept = fresh(SMALL[:-1])
    del unkept
    assert held_bytes() == kept + cpu_threads.SMALL_SPARES * SMALL.nbytes


@pytest.mark.usefixtures("empty_cache")
def test_gradients_of_threads_do_not_share_memory() -> None:
    def work(value: int) -> bool:
        for _ in range(50):
            tensor = fresh(LARGE).fill_(value)
            if not (tensor == value).all():
                return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


@pytest.mark.usefixtures("empty_cache")
def test_a_gradient_is_right_in_memory_that_was_used_before() -> None:
    logits = torch.randn(128, 8192).requires_grad_()
    tokens = torch.randint(8192, (128,))
    arguments = (tokens, fastppo.token_logprobs(logits.detach(), tokens), torch.ones(128))
    mask = torch.arange(128) % 3 > 0  # masked rows have a gradient of zero
    gradients = []
    for _ in range(3):
        fastppo.ppo_loss(logits, *arguments, mask).loss.backward()
        assert logits.grad is not None
        gradients.append(logits.grad.clone())
        logits.grad.fill_(math.nan)
        logits.grad = None
    assert (gradients[0] == gradients[1]).all()
    assert (gradients[0] == gradients[2]).all()


def held_bytes() -> int:
    return sum(buffer.nbytes for buffer in cpu_threads._spares.values())


# ------------------------------------------------------------------------- callers, forks, no cache


def test_bits_do_not_depend_on_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_threads, "ENTRIES_PER_THREAD", 1)
    given, rest = operands(arguments_of("everything", 2051))
    wanted = cpu_backend.ppo_loss(*given, **rest)
    try:
        torch.set_num_threads(3)
        found = cpu_backend.ppo_loss(*given, **rest)
        with ThreadPoolExecutor(2) as callers:  # two at once
            at_once = list(callers.map(lambda _: cpu_backend.ppo_loss(*given, **rest), range(4)))
    finally:
        torch.set_num_threads(1)
    for again in (found, *at_once):
        for one, other in zip(again, wanted, strict=True):
            assert torch.equal(one, other)


AFTER_A_FORK = """
import os
import torch
from fastppo_kernels import cpu_backend
from fastppo_kernels.cpu import threads as cpu_threads
from fastppo_kernels.records import Softmax

cpu_threads.ENTRIES_PER_THREAD = 1
torch.set_num_threads(2)
logits, tokens = torch.randn(8, 100), torch.arange(8)
before = cpu_backend.token_stats(logits, tokens, Softmax()).logprobs
child = os.fork()
same = torch.equal(cpu_backend.token_stats(logits, tokens, Softmax()).logprobs, before)
if child == 0:
    os._exit(0 if same else 1)
assert same
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_it_runs_after_a_fork_and_without_a_writable_folder(tmp_path: Path) -> None:
    """Without a folder for compiled code it compiles again, without a warning. Files are in place
    of the folders, because a superuser can write to read-only folders."""
    shutil.copytree(
        Path(fastppo_kernels.__file__).parent,
        tmp_path / "fastppo_kernels",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    (tmp_path / "fastppo_kernels" / "__pycache__").touch()
    nowhere = str(tmp_path / "fastppo_kernels" / "__pycache__" / "cache")
    places = dict.fromkeys(("HOME", "XDG_CACHE_HOME", "NUMBA_CACHE_DIR"), nowhere)
    fork = "ignore:This process:DeprecationWarning"  # Python's own on threads
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-W", fork, "-c", AFTER_A_FORK],
        env={**os.environ, **places, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
