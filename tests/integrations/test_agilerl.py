"""FastPPO's loss inside AgileRL against AgileRL's fused one: values and gradients, in fp32.

Tolerance: sums of some hundred terms of order 1 in another order, 1e-6 of the largest number.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from allocations import allocations
from torch import Tensor

pytest.importorskip("agilerl", reason="AgileRL is not installed: docs/integrations.md")
adapter = pytest.importorskip("fastppo.integrations.agilerl")

pytestmark = pytest.mark.filterwarnings("default")  # AgileRL's are its own affair

B, T, H, V = 5, 9, 16, 37
LENGTHS = torch.tensor([9, 4, 1, 7, 6])


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(
        found, wanted, rtol=0, atol=1e-6 * max(1.0, float(wanted.abs().max()))
    )


def operands(vocabulary: int = V) -> dict[str, Any]:
    return {
        "policy_hidden": torch.randn(B, T, H),
        "head_w": torch.randn(vocabulary, H) / 4,
        "head_b": None,
        "target_ids": torch.randint(vocabulary, (B, T)),
        "attention_mask": (torch.arange(T) < LENGTHS[:, None]).float(),
        "advantages": torch.randn(B, T),
        "ref_per_token_logps": torch.randn(B, T) - 3,
        "old_per_token_logps": torch.randn(B, T) - 3,
        "beta": 0.0,
        "epsilon_low": 0.2,
        "epsilon_high": 0.28,
        "temperature": 1.0,
        "importance_sampling_level": "token",
    }


def results(function: Any, given: dict[str, Any]) -> list[Tensor]:
    """loss, metrics, gradients of hidden, weight and bias."""
    given = dict(given)
    names = ("policy_hidden", "head_w", "head_b")
    parts = [name for name in names if given[name] is not None]
    for name in parts:
        given[name] = given[name].clone().requires_grad_()
    loss, metrics = function(**given)
    (2 * loss).backward()
    return [loss.detach(), *metrics, *(given[name].grad for name in parts)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"beta": 0.1, "kl_clamp": 1e4},
        {"temperature": 0.7},
        {"ref_per_token_logps": None},
        {"head_b": torch.linspace(-1, 1, V)},
        {"vllm_is_ratio": torch.linspace(0.5, 1.5, B * T).view(B, T)},
        {"token_chunk_size": 8},
    ],
    ids=["plain", "beta", "temperature", "no-reference", "bias", "weights", "chunks"],
)
def test_the_loss_is_agilerls(options: dict[str, Any]) -> None:
    given = operands() | options
    found = results(adapter.apply_fused_policy_loss, given)
    for mine, wanted in zip(found, results(adapter.THEIRS, given), strict=True):
        close(mine, wanted)


@pytest.mark.parametrize("asked", [None, "auto", 8], ids=["default", "auto-tuned", "asked"])
def test_the_chunk_is_ours_unless_one_is_asked_for(
    asked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AgileRL's algorithms hand over one that they choose by the vocabulary."""
    chunks, loss = [], adapter.linear_ppo_loss

    def spy(*operands: Any, chunk_size: int | None, **options: Any) -> Any:
        chunks.append(chunk_size)
        return loss(*operands, chunk_size=chunk_size, **options)

    monkeypatch.setattr(adapter, "linear_ppo_loss", spy)
    chosen = adapter.LLMAlgorithm._resolve_fused_chunk_rows(V)
    given = {"auto": {"token_chunk_size": chosen}, 8: {"token_chunk_size": 8}, None: {}}[asked]
    adapter.apply_fused_policy_loss(**operands(), **given)
    assert chunks == [8 if asked == 8 else None]


def test_turns_beside_ratios_by_token_are_left_unread_as_by_agilerl() -> None:
    given = operands() | {"turn_ids": torch.zeros(B, T, dtype=torch.long)}
    close(adapter.apply_fused_policy_loss(**given)[0], adapter.THEIRS(**given)[0])


@pytest.mark.parametrize("how", ["by keyword", "by position"])
def test_arguments_are_taken_as_agilerl_takes_them(how: str) -> None:
    given = operands()
    wanted, _ = adapter.THEIRS(**given)
    if how == "by keyword":
        found, _ = adapter.apply_fused_policy_loss(**given)
    else:
        found, _ = adapter.apply_fused_policy_loss(*given.values())
    close(found, wanted)


@pytest.mark.parametrize(
    "options", [{"beta": 0.1, "kl_clamp": 0.5}, {"old_per_token_logps": None}], ids=["clamp", "old"]
)
def test_what_is_not_ours_stays_agilerls(options: dict[str, Any]) -> None:
    given = operands() | options
    found = results(adapter.apply_fused_policy_loss, given)
    for mine, wanted in zip(found, results(adapter.THEIRS, given), strict=True):
        assert torch.equal(mine, wanted)


def test_ratios_by_turn_stay_agilerls() -> None:
    turns = torch.where(operands()["attention_mask"].bool(), torch.arange(T) // 5, -1)
    given = operands() | {
        "importance_sampling_level": "turn",
        "advantages": torch.randn(B, 2),
        "turn_ids": turns,
        "full_turn_mask": torch.stack([(turns == i).any(1) for i in range(2)], 1).float(),
        "max_turns": 2,
    }
    found, wanted = adapter.apply_fused_policy_loss(**given), adapter.THEIRS(**given)
    assert torch.equal(found[0], wanted[0])


def test_it_is_installed_where_agilerl_looks() -> None:
    theirs = [module.apply_fused_policy_loss for module in adapter.PLACES]
    try:
        adapter.install()
        for module in adapter.PLACES:
            assert module.apply_fused_policy_loss is adapter.apply_fused_policy_loss
    finally:
        for module, function in zip(adapter.PLACES, theirs, strict=True):
            module.apply_fused_policy_loss = function
    assert set(theirs) == {adapter.THEIRS}


def test_it_allocates_less() -> None:
    given = operands(20_000)
    ours, theirs = (
        allocations(lambda f=function: results(f, given))[1]
        for function in (adapter.apply_fused_policy_loss, adapter.THEIRS)
    )
    assert ours < theirs / 1.3
