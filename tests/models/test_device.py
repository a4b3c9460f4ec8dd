"""Where a run computes, and in which precision."""

from __future__ import annotations

import pytest
import tiny
import torch

from fastppo.models.device import (
    busy_cpu,
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
    ("name", "gpus", "device"),
    [
        ("auto", 0, CPU),
        ("auto", 1, GPU),
        ("cpu", 2, CPU),
        ("cpu:0", 2, torch.device("cpu", 0)),
        ("cuda", 2, GPU),
        ("cuda:1", 2, torch.device("cuda", 1)),
    ],
)
def test_a_device_is_taken_by_its_name_and_auto_is_a_gpu_if_there_is_one(
    name: str, gpus: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    _gpus(monkeypatch, gpus)
    assert choose_device(name) == device


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("gpu", "device must be auto, cpu, cuda, cuda:1, …, got 'gpu'$"),
        ("mps", "device must be auto, cpu, cuda, cuda:1, …, got 'mps'$"),
        ("cpu:1", "device must be auto, cpu, cuda, cuda:1, …, got 'cpu:1'$"),
        ("cuda:01", "device must be auto, cpu, cuda, cuda:1, …, got 'cuda:01'$"),
        ("cuda:2", "device=cuda:2: torch .* sees 2 GPUs here"),
        ("cuda:256", "device=cuda:256: torch .* sees 2 GPUs here"),  # torch takes it for cuda:0
    ],
)
def test_a_device_that_is_not_there_is_refused(name, says, monkeypatch) -> None:
    _gpus(monkeypatch, 2)
    with pytest.raises(ValueError, match=says):
        choose_device(name)


def test_a_run_takes_a_device_by_each_of_its_names(run) -> None:
    code, said = run(device="cpu:0")
    assert code == 0, said


@pytest.mark.parametrize(
    ("threads", "load", "device", "warns"),
    [(2, 3.0, CPU, True), (2, 1.9, CPU, False), (1, 9.0, CPU, False), (2, 9.0, GPU, False)],
)
def test_threads_that_share_their_cores_are_warned_of(
    threads, load, device, warns, monkeypatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr("os.getloadavg", lambda: (load, load, load))
    monkeypatch.setattr("torch.get_num_threads", lambda: threads)
    assert bool(busy_cpu(device)) == warns
    if warns:
        assert busy_cpu(device)[0].startswith("2 threads on 2 cores that others use too (load 3.0)")


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


def test_what_is_trained_or_computed_in_fp32_is_not_cast() -> None:
    trunk = tiny.model().base_model
    cast_frozen(trunk, torch.bfloat16)
    assert {p.dtype for p in trunk.parameters()} == {torch.float32}
    cast_frozen(trunk.requires_grad_(False), None)
    assert {p.dtype for p in trunk.parameters()} == {torch.float32}
    cast_frozen(trunk, torch.bfloat16)
    assert {p.dtype for p in trunk.parameters() if p.dim() < 2} == {torch.float32}
    assert trunk.embed_tokens.weight.dtype == torch.float32
