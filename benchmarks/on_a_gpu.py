"""Measurements of `on_a_gpu.sh`: launchers, row kernels, the fused head, a trainer's iteration.

    python -m benchmarks.on_a_gpu smoke | rows | head | trainer | once

`--tiny` runs each at toy size, also on a CPU in Triton's interpreter, to test this file. README.md
explains the use of each number.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import math
import statistics
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import fastppo
from benchmarks import host, measure

CLIPPED: dict[str, Any] = {"clip_ratio": 0.2, "backend": "triton"}
SHAPED: dict[str, Any] = {"kl_coef": 0.1, "gamma": 1.0, "lam": 0.95, "backend": "triton"}


class Bench:
    """Printer of one line per measurement until the time is up."""

    def __init__(self, device: torch.device, seconds: float) -> None:
        self.device = device
        self.end = time.monotonic() + seconds

    def line(
        self, name: str, call: Callable[[], object], *, bytes_: int = 0, flop: int = 0
    ) -> float | None:
        """Print the times of a call with these bytes or FLOP; return the best, in seconds."""
        if time.monotonic() > self.end:
            print(f"{name:56s} skipped: the time is up")
            return None
        try:
            call()
            times = self._times(call)
        except Exception as error:  # the other lines still run
            print(f"{name:56s} FAILED {type(error).__name__}: {str(error)[:90]}")
            return None
        best = measure.quartiles(times)[0]
        rate = ""
        if bytes_:
            rate = f"{bytes_ / best / 1e12:6.2f} TB/s"
        elif flop:
            rate = f"{flop / best / 1e12:6.0f} TFLOP/s"
        shown = f"{1e3 * statistics.median(times):9.3f} ms  best {1e3 * best:9.3f}"
        print(f"{name:56s} {shown}  {rate}", flush=True)
        return best

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _times(self, call: Callable[[], object]) -> list[float]:
        if self.device.type == "cuda":
            return measure.call_times(call, self.device, seconds=0.05)
        begin = time.perf_counter()  # in Triton's interpreter once is enough
        call()
        return [time.perf_counter() - begin]


def rows_of(n: int, vocab: int, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Return operands of `fastppo.ppo_loss` close to the rollout policy."""
    logits = torch.empty(n, vocab, dtype=dtype, device=device).normal_(0, 3)
    tokens = torch.randint(vocab, (n,), device=device)
    old = fastppo.token_logprobs(logits, tokens, backend="triton")
    noise = 0.3 * torch.randn(n, device=device)
    return {
        "logits": logits,
        "tokens": tokens,
        "old_logprobs": old + noise,
        "advantages": torch.randn(n, device=device),
    }


def loss(operands: dict[str, Any], **more: Any) -> None:
    """Run the loss and the gradient of the logits, written by the forward pass."""
    logits = operands["logits"].detach().requires_grad_()
    fastppo.ppo_loss(**operands | {"logits": logits}, **CLIPPED, **more).loss.backward()


def smoke(bench: Bench, tiny: bool) -> None:
    """Run every launcher once, to find mistakes before the tests compile for minutes."""
    device = bench.device
    operands = rows_of(2 if tiny else 64, 1040 if tiny else 151936, device, torch.bfloat16)
    logits = operands["logits"]
    tokens = operands["tokens"]
    reference = torch.randn_like(logits)
    old = operands["old_logprobs"]
    hidden, weight = (torch.randn(s, 64, device=device).bfloat16() for s in (64, 2048))
    few = torch.randint(2048, (64,), device=device)
    flat = torch.randn(64, device=device)
    values = torch.randn(4, 300, device=device)
    mask = torch.rand(4, 300, device=device) < 0.9

    def head(**more: Any) -> None:
        leaves = [x.detach().clone().requires_grad_() for x in (hidden, weight)]
        fastppo.linear_ppo_loss(
            leaves[0], leaves[1], few, flat, flat, **CLIPPED, **more
        ).loss.backward()

    def statistics_backward() -> None:
        leaf = logits.detach().requires_grad_()
        stats = fastppo.token_stats(leaf, tokens, backend="triton")
        (stats.logprobs.sum() + stats.entropy.sum()).backward()

    calls: dict[str, Callable[[], object]] = {
        "loss": lambda: loss(operands),
        "loss, entropy and k3": lambda: loss(
            operands, ref_logprobs=old, kl_coef=0.1, kl_estimator="k3", entropy_coef=0.01
        ),
        "loss, full KL": lambda: loss(
            operands, ref_logits=reference, kl_coef=0.1, kl_estimator="full"
        ),
        "loss, soft-cap": lambda: loss(operands, softcap=30.0),
        "statistics and their backward": statistics_backward,
        "fused head, one chunk": head,
        "fused head, four chunks": lambda: head(chunk_size=16),
        "statistics of the head, by chunks": lambda: fastppo.linear_token_logprobs(
            hidden, weight, few, backend="triton"
        ),
        "gae": lambda: fastppo.gae(values, values, mask, backend="triton"),
        "shaped advantages": lambda: fastppo.compute_advantages(
            values[:, 0], values, values, values, mask, **SHAPED
        ),
        "whiten": lambda: fastppo.whiten(values, mask, backend="triton"),
    }
    for name, call in calls.items():
        try:
            call()
            bench.wait()
            print("ok    ", name, flush=True)
        except Exception as error:  # the other launchers still run
            print("FAILED", name, type(error).__name__, str(error)[:300])
            traceback.print_exc(limit=-2)


def rows(bench: Bench, tiny: bool) -> None:
    """Time the row kernels against their floors, and the host."""
    n, vocab = (2, 1040) if tiny else (8192, 151936)
    operands = rows_of(n, vocab, bench.device, torch.bfloat16)
    size = operands["logits"].nbytes
    stats = partial(fastppo.token_stats, operands["logits"], operands["tokens"], backend="triton")
    copy = bench.line("copy", partial(torch.clone, operands["logits"]), bytes_=2 * size)
    rate = math.nan if copy is None else 2 * size / copy
    floors = "floors {:.2f} and {:.2f} ms".format(*(1e3 * n * size / rate for n in (1, 2)))
    print(f"--- N = {n}, V = {vocab}, bf16; {floors} at the copy's rate")
    bench.line("statistics", stats, bytes_=size)
    bench.line("loss", partial(loss, operands), bytes_=2 * size)
    k3 = {"ref_logprobs": operands["old_logprobs"], "kl_coef": 0.1, "kl_estimator": "k3"}
    both = partial(loss, operands, entropy_coef=0.01, **k3)
    bench.line("loss, entropy and k3", both, bytes_=2 * size)
    _full_kl(bench, operands)
    bench.line("loss, soft-cap", partial(loss, operands, softcap=30.0), bytes_=2 * size)
    del operands, stats, k3, both
    odd = rows_of(n, 1003 if tiny else 50257, bench.device, torch.bfloat16)
    print(f"--- rows not aligned to 16 bytes; floor {2e3 * odd['logits'].nbytes / rate:.2f} ms")
    bench.line("loss, V = 50257", partial(loss, odd), bytes_=2 * odd["logits"].nbytes)
    print("--- microseconds of host time of a call on small tensors")
    count = 2 if tiny else host.CALLS
    for cells in [host.HEADER, *host.table(bench.device, compiled=False, count=count)]:
        print(" | ".join(cells))


def _full_kl(bench: Bench, operands: dict[str, Any]) -> None:
    reference = torch.empty_like(operands["logits"]).normal_()
    call = partial(loss, operands, ref_logits=reference, kl_coef=0.1, kl_estimator="full")
    bench.line("loss, full KL", call, bytes_=3 * reference.nbytes)


def head(bench: Bench, tiny: bool) -> None:
    """Time the fused head by chunk size: the loss with gradients, and the statistics."""
    n, vocab = (8, 512) if tiny else (8192, 151936)
    for width in (32,) if tiny else (4096, 896):
        hidden = torch.randn(n, width, device=bench.device).bfloat16()
        weight = (torch.randn(vocab, width, device=bench.device) * 3 / width**0.5).bfloat16()
        tokens = torch.randint(vocab, (n,), device=bench.device)
        flat = torch.randn(n, device=bench.device)
        flop = 2 * n * width * vocab

        loss_of = partial(_head_loss, hidden, weight, tokens, flat)
        stats = partial(fastppo.linear_token_logprobs, hidden, weight, tokens, backend="triton")
        for chunk_size in (4,) if tiny else (1024, 2048, 4096, 8192):
            name = f"H = {width}, by chunks of {chunk_size}"
            bench.line(f"loss, {name}", partial(loss_of, chunk_size), flop=3 * flop)
            forward = partial(stats, chunk_size=chunk_size)
            bench.line(f"statistics, {name}", forward, flop=flop)


def _head_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    tokens: torch.Tensor,
    flat: torch.Tensor,
    chunk_size: int,
) -> None:
    x = hidden.detach().requires_grad_()
    w = weight.detach().requires_grad_()
    out = fastppo.linear_ppo_loss(x, w, tokens, flat, flat, chunk_size=chunk_size, **CLIPPED)
    out.loss.backward()


def trainer(bench: Bench, tiny: bool) -> None:
    """Run an iteration of a 0.5B model: seconds and peak memory by phase, host waits, kernels."""
    from rich.console import Console
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    from benchmarks.shapes import MODELS
    from benchmarks.training import iterate, make_config, make_model, make_tokenizer, prompt_texts
    from fastppo.ppo.options.config import PPOConfig
    from fastppo.ppo.trainer import PPOTrainer

    on_gpu = bench.device.type == "cuda"
    shape = MODELS["qwen2.5-0.5b"]
    batch, prompt, response = (4, 8, 8) if tiny else (64, 128, 192)
    if tiny:
        shape = shape._replace(vocab=512, hidden=64, intermediate=128, heads=4)
    model = make_model(
        make_config(shape, 2 if tiny else shape.layers, prompt + response), bench.device
    )
    with tempfile.TemporaryDirectory() as folder:
        config = PPOConfig(
            device=str(bench.device),
            rollout_batch_size=batch,
            max_new_tokens=response,
            microbatch_size=max(2, batch // 4),
            ppo_epochs=1,
            minibatches=2,
            entropy_coef=0.01,
            stop_token_ids=[],
            learning_rate=1e-6,
            output_dir=folder,
        )
        texts = prompt_texts(batch, prompt, shape.vocab)
        ours = PPOTrainer(
            config,
            model=model,
            tokenizer=make_tokenizer(shape.vocab),
            prompts=[{"prompt": text} for text in texts],
            rewards=[
                lambda prompts, completions, **columns: [len(c) % 16 / 8 for c in completions]
            ],
            console=Console(quiet=True),
        )
        begin = time.perf_counter()
        iterate(ours)
        print(f"first iteration, with compilation: {time.perf_counter() - begin:.2f} s")
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        metrics = iterate(ours)
        for name, value in metrics.items():
            if name.startswith("seconds/") or name in ("tokens_per_second", "useful_share"):
                print(f"  {name:24s} {value:10.3f}")
        print(f"  ms per decoding step     {1e3 * metrics['seconds/generate'] / response:10.2f}")
        if on_gpu:
            print(f"  peak memory              {torch.cuda.max_memory_allocated() / 1e9:10.2f} GB")
            for place, count in _host_waits(lambda: iterate(ours)):
                print(f"  {count:6d} waits at {place}")
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        with profile(activities=kinds) as traced:
            iterate(ours)
        # Operators and annotations include the time of their kernels, so count kernels only.
        key = "self_device_time_total" if on_gpu else "self_cpu_time_total"
        kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
        alone = [
            event
            for event in traced.key_averages()
            if event.device_type == kind and not event.is_user_annotation
        ]
        table = sorted(alone, key=lambda event: -getattr(event, key))
        total = sum(getattr(event, key) for event in table)
        for event in itertools.islice(table, 20):
            spent = getattr(event, key)
            print(
                f"  {spent / 1e3:9.2f} ms {spent / total:6.1%} {event.count:7d}  {event.key[:80]}"
            )


def _host_waits(call: Callable[[], object]) -> list[tuple[str, int]]:
    """Return (line of FastPPO, number of waits for the device)."""
    import fastppo_kernels

    packages = [Path(package.__path__[0]) for package in (fastppo, fastppo_kernels)]
    waits: collections.Counter[str] = collections.Counter()

    def count(message: Any, *rest: Any, **more: Any) -> None:
        if "called a synchronizing" in str(message):  # no other warnings
            frames = traceback.extract_stack()
            own = [f for f in frames if any(map(Path(f.filename).is_relative_to, packages))]
            waits[f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else "elsewhere"] += 1

    before = warnings.showwarning
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = count
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
            warnings.showwarning = before
    return waits.most_common(12)


def once(bench: Bench, tiny: bool) -> None:
    """Run the loss alone, for a profiler with hardware counters."""
    n, vocab = (2, 1040) if tiny else (8192, 151936)
    operands = rows_of(n, vocab, bench.device, torch.bfloat16)
    for _ in range(3):
        loss(operands)


PARTS = {"smoke": smoke, "rows": rows, "head": head, "trainer": trainer, "once": once}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.on_a_gpu", description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--seconds", type=float, default=240, help="time limit for the start of a measurement"
    )
    parser.add_argument("--tiny", action="store_true", help="toy sizes, to test the code")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    PARTS[options.part](Bench(torch.device(options.device), options.seconds), options.tiny)


if __name__ == "__main__":
    main()
