"""A microbatch that does not fit is halved, and the gradient is the same."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fastppo.data.microbatches import Limits
from fastppo.ppo.options.config import PPOConfig
from fastppo.ppo.out_of_memory import MicrobatchLimits, explain_out_of_memory, remedy
from runs import first_experience, first_prompts, make_trainer, tensors_of


def _limit(model: nn.Module, room: int) -> list[int]:
    """Let passes of the trunk fail above `room` sequences, and record the sizes of all passes."""
    sizes: list[int] = []

    def limited(module: Any, args: Any, output: Any) -> None:
        sizes.append(len(args[0]))
        if len(args[0]) > room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")

    model.causal_lm.get_input_embeddings().register_forward_hook(limited)
    return sizes


LOGGER = "fastppo.ppo.out_of_memory"


@pytest.fixture(autouse=True)
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Capture the messages about microbatches."""
    with caplog.at_level(logging.INFO, LOGGER):
        yield


def _messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == LOGGER]


def _gradients(tmp_path: Path, room: int, **options: Any) -> dict[str, torch.Tensor]:
    """Return the gradients of an update with memory for `room` sequences."""
    options = {"minibatches": 1, "ppo_epochs": 1, "max_grad_norm": 1e9, **options}
    trainer = make_trainer(tmp_path, **options)
    torch.manual_seed(5)
    # Both use this experience, because rounding depends on the size of a microbatch.
    experience = first_experience(make_trainer(tmp_path / "experience", microbatch_size=8))
    _limit(trainer.model, room)
    metrics = trainer.update(experience, trainer.begin_iteration())
    assert metrics["skipped_steps"] == 0
    return {name: p.grad.clone() for name, p in trainer.model.causal_lm.named_parameters()}


def test_halving_gives_the_gradient_of_smaller_microbatches(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    halved = _gradients(tmp_path / "a", room=3, microbatch_size=8)
    small = _gradients(tmp_path / "b", room=16, microbatch_size=2)
    unsplit = _gradients(tmp_path / "c", room=16, microbatch_size=16)
    assert _messages(caplog) == [
        "out of memory: microbatches of at most 4 sequences from now on, same gradient",
        "out of memory: microbatches of at most 2 sequences from now on, same gradient",
    ]
    torch.testing.assert_close(halved, small, rtol=0, atol=0)
    # In another order of summation: fp32 sums of some hundred terms.
    torch.testing.assert_close(halved, unsplit, rtol=1e-4, atol=1e-6)


def test_later_steps_start_with_the_size_that_fits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _gradients(tmp_path, room=4, microbatch_size=8, minibatches=2, ppo_epochs=3)
    assert len(_messages(caplog)) == 1, "once"


def test_passes_without_a_gradient_are_halved_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The passes before the update and of an evaluation give the same numbers."""
    experiences = []
    for name, size in (("halved", 8), ("small", 2)):
        trainer = make_trainer(tmp_path / name, microbatch_size=size, kl_coef=0.1)
        sizes = _limit(trainer.reference.frozen, 2)
        experiences.append(first_experience(trainer))
        trainer.evaluate(first_prompts(trainer, 8))
        if name == "halved":
            assert sizes[:2] == [8, 4]
            assert len(_messages(caplog)) == 2
            assert {*sizes[2:]} == {2}
    torch.testing.assert_close(*map(tensors_of, experiences), rtol=0, atol=0)


def _tried(fitting: MicrobatchLimits, wanted: Limits, sequences: int, room: int) -> list[Limits]:
    """Return the limits of all attempts at a pass with memory for `room` sequences."""
    tried: list[Limits] = []

    def run(limits: Limits) -> None:
        tried.append(limits)
        if min(limits.sequences, sequences) > room:
            raise torch.OutOfMemoryError("CUDA out of memory")

    fitting.fit(run, wanted, sequences)
    return tried


def test_halving_starts_from_the_actual_batch_size(caplog: pytest.LogCaptureFixture) -> None:
    tried = _tried(MicrobatchLimits(), Limits(512), 16, room=8)
    assert [limits.sequences for limits in tried] == [512, 8]
    assert len(_messages(caplog)) == 1


@pytest.mark.parametrize("limits", [Limits(4), Limits(4, 64), Limits(512)])
def test_a_sequence_that_does_not_fit_ends_the_run_with_advice(
    limits: Limits, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(RuntimeError, match=r"one sequence per microbatch.*gradient_checkpointing"):
        _tried(MicrobatchLimits(), limits, 4, room=0)
    messages = _messages(caplog)
    assert len(messages) == len({*messages}), "nothing is tried twice"


@pytest.mark.parametrize(
    ("phase", "says"),
    [
        ("generate", "--engine_options '{batch_size: 8}' halves"),
        ("score", "Use a smaller reward model"),
        ("loading", "--param_dtype bfloat16 halves"),
    ],
)
def test_running_out_of_memory_gives_advice_for_the_phase(phase: str, says: str) -> None:
    allocator = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate"
    config = PPOConfig(rollout_batch_size=16)
    with (
        pytest.raises(RuntimeError, match=f"^out of memory in {phase}: can't allocate. {says}"),
        explain_out_of_memory(phase, config),
    ):
        raise RuntimeError(allocator)


def test_rollout_servers_do_not_count_for_the_advice() -> None:
    assert "--engine_options" in remedy("generate", PPOConfig())
    drawn = PPOConfig(rollout="server", engine_options={"urls": ["http://localhost:8000"]})
    assert "--engine_options" not in remedy("generate", drawn)


def test_one_of_several_processes_does_not_retry() -> None:
    with pytest.raises(RuntimeError, match="out of memory in one of several processes: CUDA"):
        _tried(MicrobatchLimits(processes=2), Limits(8), 8, room=4)
