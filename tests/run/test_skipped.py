"""What is kept of a step that was skipped."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from fastppo.run.skipped import load_batch, non_finite_gradients, save_batch


def test_the_batch_of_a_skipped_step_comes_back_as_it_was(tmp_path) -> None:
    memory = torch.randn(6, 4)
    tensors = {
        "input_ids": torch.arange(12).view(2, 6),
        "values": memory[0],
        "returns": memory[0],  # the same memory, which safetensors refuses as it is
        "advantages": memory[:, 1],  # strided
        "logprobs": torch.tensor([float("nan"), -1.0]),
        "weights": torch.ones(3, dtype=torch.bfloat16),
        "ref_logprobs": None,
    }
    path = save_batch(
        tmp_path / "skipped" / "step-000012.safetensors",
        tensors,
        iteration=3,
        step=12,
        non_finite="grad_norm",
        parameters=["head.weight"],
    )
    loaded, record = load_batch(path)
    assert loaded.keys() == tensors.keys() - {"ref_logprobs"}
    for name, value in loaded.items():
        assert value.dtype == tensors[name].dtype
        torch.testing.assert_close(value, tensors[name], rtol=0, atol=0, equal_nan=True)
    assert record == {
        "iteration": 3,
        "step": 12,
        "non_finite": "grad_norm",
        "parameters": ["head.weight"],
    }
    assert [item.name for item in path.parent.iterdir()] == [path.name]  # nothing half-written


def test_a_file_of_another_kind_is_refused(tmp_path) -> None:
    save_file({"x": torch.ones(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"other\.safetensors is not the batch of a skipped step"):
        load_batch(tmp_path / "other.safetensors")


def test_parameters_with_a_broken_gradient_are_named() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    assert non_finite_gradients(model) == []
    model(torch.ones(1, 2)).sum().backward()
    assert non_finite_gradients(model) == []
    model[0].bias.grad[1] = float("nan")
    model[1].weight.grad[0, 0] = float("inf")
    assert non_finite_gradients(model) == ["0.bias", "1.weight"]
