"""What the launchers share: operands as kernels take them, and what they refuse."""

from __future__ import annotations

import contextlib

import pytest
import torch
from fastppo_kernels import launch
from fastppo_kernels.records import Softmax


def test_operands_become_contiguous_and_bools_bytes() -> None:
    x = torch.arange(12.0).view(3, 4)
    assert launch.dense(None) is None
    assert launch.dense(x) is x
    for strided in (x.T, x[:, ::2], torch.ones(()).expand(5)):
        found = launch.dense(strided)
        assert found is not None
        assert found.is_contiguous()
        assert torch.equal(found, strided)
    mask = (x > 4).T
    found = launch.dense(mask)
    assert found is not None
    assert found.dtype == torch.uint8
    assert torch.equal(found.bool(), mask)
    each = Softmax(temperatures=torch.ones(()).expand(5), softcap=3.0)
    softmax = launch.dense_record(each)
    assert softmax.temperatures is not None
    assert softmax.temperatures.is_contiguous()
    assert softmax.softcap == 3.0
    assert launch.dense_record(Softmax(0.7)) == Softmax(0.7)


def test_kernels_take_what_they_compute_in_fp32() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        launch.check_dtype("x", torch.zeros(1, dtype=dtype))
    for dtype in (torch.float64, torch.int32):
        with pytest.raises(ValueError, match="logits must be bfloat16, float16 or float32, got"):
            launch.check_dtype("logits", torch.zeros(1, dtype=dtype))


def test_a_cpu_has_made_up_limits_and_no_current_device() -> None:
    """For the interpreter: one multiprocessor, so that a program takes several rows."""
    multiprocessors, cache = launch.device_limits(torch.device("cpu"))
    assert (multiprocessors, cache) == (1, 2**20)
    assert isinstance(launch.current(torch.device("cpu")), contextlib.nullcontext)
