"""Where a run computes, and in which precision."""

from __future__ import annotations

import pytest
import tiny
import torch

from fastppo.models.device import (
    autocast,
    cast_frozen,
    cast_matrices,
    choose_device,
    compute_dtype,
    linear_layers,
)
from fastppo.models.policy import LanguageModel

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def _gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: count > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("gpu", "device must be auto, cpu, cuda, cuda:1, …, got 'gpu'"),
        ("cuda:2", "device=cuda:2: torch .* sees 2 GPUs here"),
    ],
)
def test_a_device_that_is_not_there_is_refused(name, says, monkeypatch) -> None:
    _gpus(monkeypatch, 2)
    with pytest.raises(ValueError, match=says):
        choose_device(name)


@pytest.mark.parametrize(
    ("precision", "device", "dtype"),
    [
        ("bf16", CPU, torch.bfloat16),
        ("fp32", GPU, None),
        ("auto", GPU, torch.bfloat16),
        ("auto", CPU, None),
    ],
)
def test_products_are_bf16_if_asked_for_or_on_a_gpu(precision, device, dtype) -> None:
    assert compute_dtype(precision, device) == dtype


@pytest.mark.parametrize(("dtype", "found"), [(torch.bfloat16, torch.bfloat16), (None, None)])
def test_matrix_products_are_in_the_compute_dtype(dtype, found) -> None:
    x = torch.ones(2, 2)
    with autocast(CPU, dtype):
        assert (x @ x).dtype == (found or torch.float32)
    assert (x @ x).dtype == torch.float32


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2"])
def test_a_frozen_trunk_cast_once_gives_the_bits_of_autocast(architecture: str) -> None:
    model = LanguageModel(tiny.model(architecture), compute_dtype=torch.bfloat16)
    model.requires_grad_(False)
    trunk = model.causal_lm.base_model
    size = sum(p.numel() * p.element_size() for p in trunk.parameters())
    batch = tiny.random_batch()
    wanted = model.response_logprobs(batch)
    cast_frozen(trunk, torch.bfloat16)
    assert torch.equal(model.response_logprobs(batch), wanted)
    assert sum(p.numel() * p.element_size() for p in trunk.parameters()) < 0.65 * size
    assert model.head.weight.dtype == torch.float32


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2"])
def test_cast_for_the_time_of_a_block_gives_the_bits_of_autocast(architecture: str) -> None:
    model = LanguageModel(tiny.model(architecture), compute_dtype=torch.bfloat16)
    trunk, batch = model.causal_lm.base_model, tiny.random_batch()
    parameters, held = dict(trunk.named_parameters()), {}
    addresses = set()
    for _ in range(2):
        wanted = model.response_logprobs(batch)
        with cast_matrices(trunk, torch.bfloat16, held):
            assert torch.equal(model.response_logprobs(batch), wanted)
            matrices = [module.weight for module in linear_layers(trunk)]
            assert {matrix.dtype for matrix in matrices} == {torch.bfloat16}
            addresses.add(tuple(matrix.data_ptr() for matrix in matrices))
        assert all(parameters[name] is p for name, p in trunk.named_parameters())
        with torch.no_grad():
            for p in parameters.values():
                p.mul_(1.1)
    assert len(addresses) == 1
    with cast_matrices(trunk, None, {}):
        assert {p.dtype for p in trunk.parameters()} == {torch.float32}
