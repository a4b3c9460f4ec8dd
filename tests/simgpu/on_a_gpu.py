"""Stand in for Python under `benchmarks/on_a_gpu.sh`: the simulated device, and toy sizes.

    TINY=cuda PYTHON=… bash benchmarks/on_a_gpu.sh 1, 2 or 3    where … runs this module

The suite's shapes for a GPU would take days in Triton's interpreter, and its timer fills the cache
of a GPU between calls. So the shapes are replaced here, and each function is called once and timed
as one millisecond. The GPU tests are collected, and the demo trains on eight rows, with one
iteration of PPO.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

from tests.simgpu import device, run


def main() -> None:
    device.install()
    import torch
    import triton.testing

    torch.set_num_threads(1)
    triton.testing.do_bench = _called_once
    torch.cuda.CUDAGraph = _Graph  # type: ignore[misc]
    torch.cuda.graph = contextlib.nullcontext  # type: ignore[misc]
    torch.compiler.reset = lambda: None  # imports CUDA graphs; nothing was compiled
    _replace_profiler()
    from benchmarks import measure, shapes

    measure.COPY_BYTES["cuda"] = 2**16
    measure.MATMUL_SHAPES["cuda"] = ((16, 16, 16),)
    for name in ("quick", "default"):
        shapes.SETS["cuda", name] = _toy_work()
    arguments = sys.argv[1:]
    if arguments[1] in ("benchmarks.on_a_gpu", "benchmarks.tune"):
        arguments += ["--seconds", "36000"]  # a busy machine must not leave out a line
    elif arguments[:3] == ["-m", "pytest", "-q"]:
        arguments.append("--collect-only")
    elif arguments[:3] == ["-m", "fastppo", "demo"]:
        _shorten_demo()
    run.execute(arguments)


class _Graph:
    """A CUDA graph for `benchmarks.host`: its block runs once, and a replay does nothing."""

    def replay(self) -> None: ...


def _replace_profiler() -> None:
    """Let the operations of a CPU's profile stand for the kernels of the device."""
    from torch import profiler
    from torch.autograd import DeviceType

    class Profile(profiler.profile):
        def __init__(self, **options: Any) -> None:
            super().__init__(**{**options, "activities": [profiler.ProfilerActivity.CPU]})

        def key_averages(self, *args: Any, **options: Any) -> Any:
            events = super().key_averages(*args, **options)
            for event in events:
                event.device_type = DeviceType.CUDA
                event.self_device_time_total = event.self_cpu_time_total
            return events

    profiler.profile = Profile  # type: ignore[misc]


def _shorten_demo() -> None:
    from fastppo.demo import run as demo

    config_of = demo.ppo_config
    toy = {"iterations": 1, "rollout_batch_size": 8, "max_new_tokens": 8, "ppo_epochs": 1}

    def ppo_config(stages_dir: Any, output_dir: Any, **options: Any) -> Any:
        return config_of(stages_dir, output_dir, **{**options, **toy, "microbatch_size": 8})

    make_data = demo.make_data

    def few(seed: int) -> dict[str, list[dict[str, Any]]]:
        return {name: rows[:8] for name, rows in make_data(seed).items()}

    demo.ppo_config = ppo_config
    demo.make_data = few


def _called_once(call: Callable[[], object], **options: Any) -> Any:
    call()
    return [1.0, 1.0] if options.get("return_mode") == "all" else 1.0


def _toy_work() -> Any:
    import torch

    from benchmarks.shapes import Model, Sequences, Tokens, Training, Work, over_time

    model = Model("toy", 300, 32, "llama", 48, 2, 4, 2)
    tokens = (Tokens(model, 4),)
    return Work(
        torch.bfloat16,
        logits=tokens,
        linear=tokens,
        sequences=(Sequences(2, 40),),
        update=(Training(model, 1, 2, 4, 4, 2),),
        sweeps=(over_time("gae", 2, (16, 64)),),
    )


if __name__ == "__main__":
    main()
