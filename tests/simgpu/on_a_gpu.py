"""Stand in for Python under `benchmarks/on_a_gpu.sh`: the simulated device, and toy sizes.

    TINY=cuda PYTHON=… bash benchmarks/on_a_gpu.sh 1    where … runs this module

The suite's shapes for a GPU would take days in Triton's interpreter, and its timer fills the cache
of a GPU between calls. So the shapes are replaced here, and each function is called once and timed
as one millisecond. The GPU tests are collected, and the demo runs one iteration of PPO.
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


def _shorten_demo() -> None:
    from fastppo.demo import run as demo

    config_of = demo.ppo_config
    toy = {"iterations": 1, "rollout_batch_size": 8, "max_new_tokens": 8, "ppo_epochs": 1}

    def ppo_config(stages_dir: Any, output_dir: Any, **options: Any) -> Any:
        return config_of(stages_dir, output_dir, **{**options, **toy, "microbatch_size": 8})

    demo.ppo_config = ppo_config


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
