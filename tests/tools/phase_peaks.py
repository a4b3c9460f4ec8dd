"""Measure the memory of a run with torch's CPU allocator: peaks by phase, and lasting parts."""

from __future__ import annotations

import gc
import warnings
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import tiny
import torch
from rich.console import Console
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import AutoModelForCausalLM, LlamaConfig

from fastppo.models.sharding import reshard
from fastppo.ppo.metrics import PhaseTimer
from fastppo.ppo.options.config import PPOConfig
from fastppo.ppo.trainer import PPOTrainer

PROMPT, RESPONSE = 12, 4
PREFIX = "phase/"


def llama(**more: Any) -> LlamaConfig:
    """Return a config large enough for weights and activations to dominate."""
    options = {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return LlamaConfig(**(options | more))


def options(tmp_path: Path, **more: Any) -> PPOConfig:
    """Return options of a run with responses of full length, on a model with a config only."""
    llama().save_pretrained(tmp_path / "model")
    return PPOConfig(
        **{
            "model": str(tmp_path / "model"),
            "output_dir": str(tmp_path / "run"),
            "device": "cpu",
            "rollout_batch_size": 16,
            "max_new_tokens": RESPONSE,
            "stop_token_ids": [],
            "ppo_epochs": 1,
            "minibatches": 1,
            "learning_rate": 1e-5,
            "microbatch_size": 8,
            **more,
        }
    )


class Measured(NamedTuple):
    """Measured bytes of one process."""

    peaks: dict[str, int]
    """Peak of each phase over two iterations."""
    parts: dict[str, int]
    """Bytes of the parts that last for the whole run."""


class RecordedPhases(PhaseTimer):
    """Name the phases of an iteration in a profile."""

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        with super().__call__(phase), record_function(PREFIX + phase):
            yield


@contextmanager
def _without_onednn() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TF32 acceleration")  # of Intel's GPUs
        with torch.backends.mkldnn.flags(enabled=False):
            yield


def measured(config: PPOConfig) -> Measured:
    """Measure two iterations of a run in this process.

    The profiler does not see memory freed by other threads, so peaks with gloo may be too high.
    oneDNN is off: its buffers depend on the CPU's instruction set.
    """
    gc.collect()  # garbage of earlier tests would be freed during this one
    with (
        _without_onednn(),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled,
    ):
        torch.manual_seed(0)
        dtype = getattr(torch, config.param_dtype)
        trainer = PPOTrainer(
            config,
            model=AutoModelForCausalLM.from_config(llama(), dtype=dtype),
            tokenizer=tiny.tokenizer(),
            # All different, since equal prompts are read once.
            prompts=[
                {"prompt": " ".join([f"w{1 + row}"] * PROMPT)}
                for row in range(config.rollout_batch_size)
            ],
            rewards=[tiny.every_other],
            console=Console(quiet=True),
        )
        assert trainer.parts.prompts is not None
        for _ in range(2):  # the optimizer states exist from the second rollout on
            coefficients = trainer.begin_iteration()
            trainer.iterate(trainer.parts.prompts, coefficients, RecordedPhases(config))
    return Measured(_peaks(profiled), _parts(trainer))


def _peaks(profiled: profile) -> dict[str, int]:
    assert profiled.profiler is not None
    assert profiled.profiler.kineto_results is not None
    events: list[Any] = profiled.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    times = [time for time, _ in changes]
    held = torch.tensor([size for _, size in changes]).cumsum(0).tolist()
    peaks: dict[str, int] = {}
    for event in events:
        if event.name().startswith(PREFIX):
            begin, end = bisect_left(times, event.start_ns()), bisect_right(times, event.end_ns())
            name = event.name().removeprefix(PREFIX)
            peaks[name] = max([peaks.get(name, 0), *held[begin - 1 : end]])
    return peaks


def _parts(trainer: PPOTrainer) -> dict[str, int]:
    reshard(trainer.model)
    policy = trainer.model.causal_lm
    value_function = trainer.model.value_function
    states = [x for state in trainer.optimizer.state.values() for x in state.values()]
    moments = list(trainer.value_head.tensors().values())[:1]
    weights = {id(weight) for weight in trainer.optimizer.weights}
    reference = trainer.reference.frozen if trainer.reference is not None else None
    parts: dict[str, list[Any]] = {
        "policy weights": [*policy.parameters(), *policy.buffers()],
        "value function": [*value_function.parameters(), *moments],
        "reference": [] if reference is None else [*reference.parameters(), *reference.buffers()],
        "fp32 masters": [x for x in trainer.optimizer.masters if id(x) not in weights],
        "optimizer states": states,
    }
    return {name: _bytes(tensors) for name, tensors in parts.items()}


def _bytes(tensors: Iterable[Tensor]) -> int:
    local = [x.to_local() if isinstance(x, DTensor) else x for x in tensors]
    return sum(x.numel() * x.itemsize for x in local)
