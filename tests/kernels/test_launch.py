"""What the launchers share: operands as kernels take them, and what they refuse."""

from __future__ import annotations

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
