"""The device of a run and the precision of its matrix products."""

from __future__ import annotations

import pytest
import tiny
import torch

from fastppo.models.device import (
    busy_cpu,
    cast_frozen,
    choose_device,
    compute_dtype,
    device_name,
)
from fastppo.models.policy import LanguageModel

CPU, GPU, MPS = torch.device("cpu"), torch.device("cuda"), torch.device("mps")


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
        ("cuda:1", 2, torch.device("cuda", 1)),
    ],
)
def test_a_device_is_chosen_by_its_name(
    name: str, gpus: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    _gpus(monkeypatch, gpus)
    assert choose_device(name) == device


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("mps", "device=mps"),
        ("mps:1", "device .*'mps:1'"),
        ("cpu:1", "device .*'cpu:1'"),
        ("cuda:2", "device=cuda:2.* 2 GPU"),
    ],
)
def test_a_device_that_does_not_exist_is_refused(name, named, monkeypatch) -> None:
    _gpus(monkeypatch, 2)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: False)
    with pytest.raises(ValueError, match=named):
        choose_device(name)


def test_apples_gpu_is_chosen_by_name_alone(monkeypatch) -> None:
    _gpus(monkeypatch, 0)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: True)
    assert choose_device("mps") == MPS
    assert choose_device("auto") == CPU
    assert device_name(MPS).startswith("Apple GPU")


@pytest.mark.parametrize(
    ("threads", "load", "device", "warns"),
    [(2, 3.0, CPU, True), (2, 1.9, CPU, False), (1, 9.0, CPU, False), (2, 9.0, GPU, False)],
)
def test_a_busy_cpu_gives_a_warning(threads, load, device, warns, monkeypatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr("os.getloadavg", lambda: (load, load, load))
    monkeypatch.setattr("torch.get_num_threads", lambda: threads)
    assert bool(busy_cpu(device)) == warns
    if warns:
        assert busy_cpu(device)[0].startswith(
            "2 threads share 2 cores with other processes (load 3.0)"
        )


@pytest.mark.parametrize(
    ("precision", "device", "dtype"),
    [
        ("bf16", CPU, torch.bfloat16),
        ("fp32", GPU, None),
        ("auto", GPU, torch.bfloat16),
        ("auto", CPU, None),
        ("auto", MPS, None),
        ("bf16", MPS, torch.bfloat16),
    ],
)
def test_the_compute_dtype_follows_precision_and_device(precision, device, dtype) -> None:
    assert compute_dtype(precision, device) == dtype


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2"])
def test_casting_a_frozen_trunk_once_changes_no_bit(architecture: str) -> None:
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


def test_trained_weights_and_fp32_products_are_not_cast() -> None:
    trunk = tiny.model().base_model
    cast_frozen(trunk, torch.bfloat16)
    assert {p.dtype for p in trunk.parameters()} == {torch.float32}
    cast_frozen(trunk.requires_grad_(False), None)
    assert {p.dtype for p in trunk.parameters()} == {torch.float32}
    cast_frozen(trunk, torch.bfloat16)
    assert {p.dtype for p in trunk.parameters() if p.dim() < 2} == {torch.float32}
    assert trunk.embed_tokens.weight.dtype == torch.float32
