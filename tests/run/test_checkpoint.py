"""A checkpoint holds everything that a run needs to resume, and is complete or absent."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from fastppo.data.world import World
from fastppo.run import checkpoint, shards
from fastppo.run.checkpoint import random_state, restore_random_state
from fastppo.run.optimizer import Optimizer
from runs import adamw

STATE = {"iteration": 7, "scale": {"mean": 0.1}, "losses": [1.0, 2.5]}


class Model(torch.nn.Module):
    """A tied matrix, a vector, and a frozen weight."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.one = torch.nn.Linear(width, width)
        self.tied = torch.nn.Linear(width, width, bias=False)
        self.tied.weight = self.one.weight
        self.frozen = torch.nn.Linear(width, 1, bias=False).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.tied(self.one(x)))


def _adam(model: Model, rate: float = 0.1) -> Optimizer:
    return adamw([{"params": [p for p in model.parameters() if p.requires_grad]}], lr=rate)


def _step(model: Model, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(4, 3)).square().sum().backward()
    optimizer.step()


def _saved(
    directory: Path, number: int = 1, reference: dict[str, torch.Tensor] | None = None
) -> tuple[Model, torch.optim.Optimizer]:
    """Train a model for two steps and save a checkpoint."""
    model = Model()
    optimizer = _adam(model)
    for _ in range(2):
        _step(model, optimizer)
    path = checkpoint.path_of(directory, number)
    checkpoint.write(path, model, optimizer, STATE, world=World(), run={}, reference=reference)
    return model, optimizer


def _names(directory: Path) -> list[str]:
    return [path.name for path in checkpoint.checkpoints(directory)]


# ---------------------------------------------------------------------------------------- restoring


def test_the_random_states_of_all_three_generators_are_restored(tmp_path: Path) -> None:
    def draw() -> tuple[float, float, float, float]:
        return torch.rand(1).item(), random.random(), random.gauss(), float(np.random.randn())

    random.seed(3)
    np.random.seed(3)
    random.gauss()  # both keep the second of a pair of normal numbers
    np.random.randn()
    model, optimizer = _saved(tmp_path)
    wanted = [draw() for _ in range(3)]
    checkpoint.load(tmp_path / "checkpoint-000001", model, optimizer)
    assert [draw() for _ in range(3)] == wanted


def test_frozen_weights_are_not_saved_and_tied_weights_are_saved_once(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model, _ = _saved(tmp_path)
    saved = load_file(tmp_path / "checkpoint-000001" / "model.safetensors")
    assert saved.keys() == {"one.weight", "one.bias"}
    assert torch.equal(saved["one.weight"], model.tied.weight)


# ------------------------------------------------------------------------------------ other models


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    _saved(tmp_path)
    path = tmp_path / "checkpoint-000001"
    wide = Model(width=4)
    with pytest.raises(ValueError, match=r"one\.weight .*\[3, 3\] .*\[4, 4\]"):
        checkpoint.load(path, wide, _adam(wide))
    other = torch.nn.Linear(3, 3)
    with pytest.raises(ValueError, match=r"4 parameters .* bias"):
        checkpoint.load(path, other, _adam(other))


# ------------------------------------------------------------------------------ complete or absent


def test_old_checkpoints_are_deleted(tmp_path: Path) -> None:
    for number in (1, 2, 3, 10):
        _saved(tmp_path, number)
    assert _names(tmp_path) == ["checkpoint-000003", "checkpoint-000010"]
    _saved(tmp_path, 2)
    assert "checkpoint-000002" in _names(tmp_path), "the one just written is kept"


def test_an_unfinished_checkpoint_is_ignored_and_deleted(tmp_path: Path) -> None:
    _saved(tmp_path, 1)
    unfinished = tmp_path / ".checkpoint-000002.tmp-1"
    unfinished.mkdir()
    (unfinished / "model.safetensors").touch()
    assert _names(tmp_path) == ["checkpoint-000001"]
    _saved(tmp_path, 3)
    assert not list(tmp_path.glob(".checkpoint-*")), "the unfinished one is deleted"


def test_a_checkpoint_of_the_same_number_is_replaced(tmp_path: Path) -> None:
    _saved(tmp_path, 1)
    second, _ = _saved(tmp_path, 1)
    other = Model()
    checkpoint.load(tmp_path / "checkpoint-000001", other, _adam(other))
    assert torch.equal(other.one.weight, second.one.weight)


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize(
    ("key", "found"),
    [
        ("model.one.weight", r"one\.weight .*\[1, 3\] .*\[3, 3\]"),
        ("model.other", r"model\.other"),
    ],
)
def test_shards_of_another_model_are_refused(key: str, found: str, tmp_path: Path) -> None:
    model, optimizer = _saved(tmp_path)
    path = tmp_path / "checkpoint-000001"
    shards.write(shards.state_of(model, optimizer, {}) | {key: torch.zeros(1, 3)}, path)
    with pytest.raises(ValueError, match=found):
        checkpoint.load(path, model, optimizer)


def test_a_run_resumes_on_a_machine_with_fewer_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each GPU gets its own state, also with more than ten of them."""
    before = random_state()
    gpus = {f"cuda.{i}": torch.tensor([i], dtype=torch.uint8) for i in range(11)}
    restored: dict[int, int] = {}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "set_rng_state", lambda state, device: restored.update({device: int(state[0])})
    )
    monkeypatch.setattr(
        torch.cuda,
        "set_rng_state_all",
        lambda states: [torch.cuda.set_rng_state(state, i) for i, state in enumerate(states)],
    )
    restore_random_state(before._replace(tensors=before.tensors | gpus))
    assert restored == {0: 0, 1: 1, 2: 2}
