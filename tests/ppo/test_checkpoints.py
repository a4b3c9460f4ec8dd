"""When a checkpoint is due, and what becomes of one that fails.

tests/test_survival.py has the rest, on the command line.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import tiny
import torch

from fastppo.ppo.checkpoints import Checkpoints
from fastppo.run import checkpoint
from fastppo.run.checkpoint import CheckpointError
from runs import make_trainer


def test_the_newest_checkpoint_is_the_one_that_is_loaded(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, checkpoint_limit=2)
    assert isinstance(trainer.checkpoints, Checkpoints)
    assert not trainer.checkpoints.resume()
    weight = trainer.model.value_function.head.bias
    for number in (1, 2, 3):
        trainer.state.iteration = number
        with torch.no_grad():
            weight.fill_(number)
        trainer.save_checkpoint()
    names = [path.name for path in checkpoint.checkpoints(tmp_path / "run")]
    assert names == ["checkpoint-000002", "checkpoint-000003"]
    other = make_trainer(tmp_path)
    assert other.checkpoints.resume()
    assert other.state.iteration == 3
    assert other.model.value_function.head.bias.item() == 3


def test_a_checkpoint_of_this_iteration_is_not_written_again(tmp_path: Path, monkeypatch) -> None:
    trainer = make_trainer(tmp_path)
    trainer.save_checkpoint()
    monkeypatch.setattr(checkpoint, "write", None)
    trainer.checkpoints.finish()


def test_a_thread_writes_what_the_run_was_when_it_was_asked(tmp_path: Path, monkeypatch) -> None:
    """The run goes on meanwhile, and the next checkpoint waits."""
    trainer = make_trainer(tmp_path, checkpoint_async=True)
    bias = trainer.model.value_function.head.bias
    write, go_on = checkpoint.write, threading.Event()

    def late(*args, **options):
        go_on.wait(60)
        return write(*args, **options)

    monkeypatch.setattr(checkpoint, "write", late)
    with torch.no_grad():
        bias.fill_(1)
    trainer.checkpoints.save()
    assert trainer.checkpoints.newest is None
    with torch.no_grad():
        bias.fill_(2)
    go_on.set()
    trainer.checkpoints.finish()
    trainer.checkpoints.close()
    assert trainer.checkpoints.newest == tmp_path / "run" / "checkpoint-000000"
    other = make_trainer(tmp_path)
    other.checkpoints.resume()
    assert other.model.value_function.head.bias.item() == 1


def test_what_goes_wrong_in_the_thread_comes_out_at_the_next_checkpoint(
    tmp_path: Path, monkeypatch
) -> None:
    trainer = make_trainer(tmp_path, checkpoint_async=True)

    def fails(*args, **options):
        raise CheckpointError("the disk is full")

    monkeypatch.setattr(checkpoint, "write", fails)
    trainer.checkpoints.save()
    with pytest.raises(CheckpointError, match="the disk is full"):
        trainer.checkpoints.finish()
    trainer.checkpoints.close()


@pytest.mark.parametrize("later", [True, False], ids=["a later one", "the same again"])
def test_a_disk_that_was_full_once_costs_no_later_checkpoint(
    later: bool, tmp_path: Path, monkeypatch
) -> None:
    trainer = make_trainer(tmp_path, checkpoint_async=True)
    write, fail = checkpoint.write, [True]

    def fails_once(*args, **options):
        if fail.pop() if fail else False:
            raise CheckpointError("the disk is full")
        return write(*args, **options)

    monkeypatch.setattr(checkpoint, "write", fails_once)
    trainer.state.iteration = 1
    trainer.checkpoints.save()
    if later:
        trainer.state.iteration = 2
        with pytest.raises(CheckpointError, match="the disk is full"):
            trainer.checkpoints.save()
    trainer.checkpoints.finish()
    trainer.checkpoints.close()
    names = [path.name for path in checkpoint.checkpoints(tmp_path / "run")]
    assert names == [f"checkpoint-00000{2 if later else 1}"]


def test_a_checkpoint_of_a_reward_that_was_edited_is_refused(tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    for text, refused in (("1.0", False), ("2.0", True)):
        reward.write_text(f"def f(prompts, completions): return [{text}] * len(prompts)\n")
        trainer = make_trainer(tmp_path, rewards=[f"{reward}:f"], model=str(tmp_path))
        if refused:
            with pytest.raises(ValueError, match="another run: the content of rewards/f was"):
                trainer.checkpoints.resume()
        else:
            trainer.save_checkpoint()
    assert tiny.PROMPTS
