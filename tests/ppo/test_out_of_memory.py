"""A microbatch that does not fit is halved, and the gradient is the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fastppo.data.microbatches import Limits
from fastppo.data.world import World
from fastppo.ppo import objective
from fastppo.ppo.out_of_memory import Halving, NoRoomError, agreed
from runs import first_experience, make_trainer


def _gradients(tmp_path: Path, room: int | None, **options: Any) -> tuple[dict, list[str], int]:
    """The gradients of an optimiser step on a device with room for so many sequences."""
    options = {"minibatches": 1, "ppo_epochs": 1, "max_grad_norm": 1e9, **options}
    trainer = make_trainer(tmp_path, **options)
    torch.manual_seed(5)
    # Of microbatches of one size: what a pass rounds may depend on how many rows it is of.
    experience = first_experience(make_trainer(tmp_path / "experience", microbatch_size=8))
    said: list[str] = []
    trainer._halving.say = said.append
    original, tries = objective.policy_loss, []

    def limited(head, hidden, micro, *more):
        tries.append(len(micro.batch))
        if room is not None and len(micro.batch) > room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        return original(head, hidden, micro, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(objective, "policy_loss", limited)
        metrics = trainer.update(experience, trainer.config)
    assert metrics["skipped_steps"] == 0
    found = {name: p.grad.clone() for name, p in trainer.model.named_parameters()}
    return found, said, trainer._halving.times


def test_the_gradient_is_that_of_the_smaller_microbatch_from_the_start(tmp_path: Path) -> None:
    found, said, times = _gradients(tmp_path / "a", room=3, microbatch_size=8)
    wanted, _, _ = _gradients(tmp_path / "b", room=None, microbatch_size=2)
    whole, _, _ = _gradients(tmp_path / "c", room=None, microbatch_size=16)
    assert times == 2
    assert said == [
        "out of memory: microbatches of at most 4 sequences from here on, same gradient",
        "out of memory: microbatches of at most 2 sequences from here on, same gradient",
    ]
    for name, gradient in found.items():
        assert torch.equal(gradient, wanted[name]), name
        # In another order of summation: fp32 sums of some hundred terms.
        torch.testing.assert_close(gradient, whole[name], rtol=1e-4, atol=1e-6)


def test_later_steps_begin_with_what_fits(tmp_path: Path) -> None:
    _, said, times = _gradients(tmp_path, room=4, microbatch_size=8, minibatches=2, ppo_epochs=3)
    assert times == 1
    assert len(said) == 1, "once"


def test_passes_without_a_gradient_are_halved_by_themselves(tmp_path: Path) -> None:
    """Before the update, and of an evaluation; the update's microbatches stay as they are."""

    def made(name: str, size: int, room: int) -> tuple[Any, list[int], list[str], int]:
        said: list[str] = []
        trainer = make_trainer(tmp_path / name, microbatch_size=size, kl_coef=0.1)
        assert trainer.reference is not None
        assert trainer.reference.frozen is not None
        trainer._reading.say = said.append
        sizes: list[int] = []

        def limited(module: Any, given: Any, output: Any) -> None:
            sizes.append(len(given[0]))
            if len(given[0]) > room:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")

        words = trainer.reference.frozen.causal_lm.get_input_embeddings()
        words.register_forward_hook(limited)
        experience = first_experience(trainer)
        assert trainer.prompts is not None
        trainer.evaluate(trainer.prompts.at(0, 8, 0))
        return experience, sizes, said, trainer._halving.times

    found, sizes, said, times = made("a", 8, 2)
    wanted, _, nothing, _ = made("b", 2, 8)
    assert sizes[:2] == [8, 4]
    assert {*sizes[2:]} == {2}
    sentence = "out of memory: passes without a gradient of at most {} sequences from here on"
    assert said == [f"{sentence.format(size)}, same numbers" for size in (4, 2)]
    assert (times, nothing) == (0, [])
    for name, value in found.tensors().items():
        other = wanted.tensors()[name]
        assert value is other or torch.equal(value, other), name


def test_advice_for_a_pass_without_a_gradient_names_its_options() -> None:
    def never(limits: Limits) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    halving = Halving(lambda sentence: None, reading=True)
    with pytest.raises(RuntimeError, match="one sequence per pass without a gradient") as error:
        halving.run(never, Limits(4), 4)
    assert "gradient_checkpointing" not in str(error.value)
    with pytest.raises(RuntimeError, match="a smaller microbatch_size"):
        Halving(print, alone=False, reading=True).run(never, Limits(4), 4)


def test_halving_starts_from_the_sequences_that_there_are() -> None:
    said: list[str] = []
    tried: list[int] = []

    def attempt(limits: Limits) -> int:
        tried.append(limits.sequences)
        if min(limits.sequences, 16) > 8:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return limits.sequences

    assert Halving(said.append).run(attempt, Limits(512), 16) == 8
    assert tried == [512, 8]
    assert len(said) == 1

    def never(limits: Limits) -> None:
        tried.append(limits.sequences)
        raise torch.OutOfMemoryError("CUDA out of memory")

    tried.clear()
    with pytest.raises(RuntimeError, match="one sequence per microbatch"):
        Halving(said.append).run(never, Limits(512), 1)
    assert tried == [512, 1], "of one sequence"


def test_limits_in_tokens_are_halved_too() -> None:
    halving = Halving(lambda sentence: None)
    halving.times = 3
    assert halving.limits(Limits(16, 4096, True)) == Limits(2, 512, True)
    assert halving.limits(Limits(4, None)) == Limits(1, None)
    assert halving.limits(Limits(4, 5)).tokens == 1


@pytest.mark.parametrize("limits", [Limits(4), Limits(4, 64)])
def test_a_single_sequence_that_does_not_fit_ends_the_run_with_advice(limits: Limits) -> None:
    tried: list[Limits] = []

    def never(limits: Limits) -> None:
        tried.append(limits)
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(RuntimeError, match=r"one sequence per microbatch.*gradient_checkpointing"):
        Halving(lambda sentence: None).run(never, limits, 4)
    assert tried[-1].sequences == 1
    assert len(tried) == len({*tried}), "nothing is tried twice"


def test_another_error_is_nobody_elses() -> None:
    def fails(limits: Limits) -> None:
        raise RuntimeError("shapes")

    with pytest.raises(RuntimeError, match=r"^shapes$"):
        Halving(print).run(fails, Limits(4), 4)


def test_several_processes_begin_again_where_all_know_that_one_has_no_room() -> None:
    settled: list[int] = []
    halving = Halving(lambda sentence: None, alone=False, settle=lambda: settled.append(1))

    def attempt(limits: Limits) -> int:
        if limits.sequences > 2:
            raise NoRoomError("rank 1: CUDA out of memory")
        return limits.sequences

    assert halving.run(attempt, Limits(8), 8) == 2
    assert settled == [1, 1], "what was gathered is freed each time"


def test_one_process_has_nobody_to_agree_with() -> None:
    def fails() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    assert agreed(World(), lambda: 3) == 3
    with pytest.raises(torch.OutOfMemoryError):
        agreed(World(), fails)


def test_one_of_several_processes_does_not_begin_again_alone() -> None:
    def attempt(limits: Limits) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(RuntimeError, match="out of memory on one of several processes"):
        Halving(print, alone=False).run(attempt, Limits(8), 8)
