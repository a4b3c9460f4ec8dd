"""Values of the peers without a GPU: TRL's Triton kernel runs in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from benchmarks import losses, peers
from benchmarks.case import Case, UnsupportedError, check
from benchmarks.shapes import Model, Tokens

CPU = torch.device("cpu")
SHAPE = Tokens(Model("tiny", 1201, 16), 24)
"""More than one block of TRL's kernel."""
CASES = {
    case.name: case
    for case in (
        losses.stats_case(SHAPE, torch.float32),
        losses.loss_case(SHAPE, torch.float32),
        losses.linear_loss_case(SHAPE, torch.float32),
        losses.linear_loss_case(SHAPE, torch.float32, entropy_coef=0.0),
        losses.linear_logprobs_case(SHAPE, torch.float32),
    )
}


@pytest.mark.parametrize(
    ("case", "name"),
    [
        (case, peer.name)
        for case in CASES.values()
        for peer in case.peers
        if peer.name in ("TRL", losses.TRL_KERNEL, losses.LIGER_STATS)
    ],
    ids=lambda value: getattr(value, "name", value),
)
@pytest.mark.filterwarnings("ignore")  # packages of others
def test_a_peer_agrees_with_fp64(case: Case, name: str) -> None:
    try:
        provider = case.provider(name, CPU)
    except UnsupportedError as error:
        pytest.skip(str(error))
    inputs = case.draw(0, CPU)
    check(case, provider, inputs, case.truth(inputs))


def test_quack_needs_a_hopper_gpu() -> None:
    for scaled_exp in (False, True):
        with pytest.raises(UnsupportedError, match="Hopper"):
            peers.quack_linear_cross_entropy(CPU, scaled_exp=scaled_exp)
