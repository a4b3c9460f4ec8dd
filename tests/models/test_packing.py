"""Packed, padded and single sequences give the same values and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch

from fastppo.models.packing import choose_packing, difference
from fastppo.models.policy import ActorCritic, LanguageModel
from fastppo.models.trunk import checkpoint_activations
from fastppo.models.value import critic_of_policy

PACKED = ("llama", "qwen3", "mistral", "mistral-window", "gpt2", "gpt_neox", "gemma2", "gemma3")
BATCH = tiny.random_batch((5, 1, 9, 3))


def _actor(kind: str, architecture: str, packed: bool, recompute: bool = False) -> ActorCritic:
    causal_lm = tiny.model(architecture)
    if recompute:
        checkpoint_activations(causal_lm)
    value_function: Any = None
    if kind == "critic":
        value_function = critic_of_policy(causal_lm)
    actor = ActorCritic(causal_lm, None, value_function)
    torch.manual_seed(1)
    torch.nn.init.normal_(actor.value_function.head.weight)
    actor.packing = packed
    actor.set_training(recompute)
    return actor


def _count(rows: torch.Tensor) -> int:
    return BATCH.select(rows).response_count


def _run(actor: ActorCritic, rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return states, values and all gradients of a loss summed over the batches of these rows.

    Random weights in the loss, since the mean or norm of a normalized state is constant, and its
    gradient would be rounding noise.
    """
    states, values = [], []
    weights = torch.randn(BATCH.response_count, 33, generator=torch.Generator().manual_seed(2))
    for sequences, weight in zip(
        rows, weights.split([_count(sequences) for sequences in rows]), strict=True
    ):
        hidden, value, _ = actor(actor.layout(BATCH.select(sequences)))
        ((hidden * weight[:, 1:]).sum() + (value * weight[:, 0]).sum()).backward()
        states.append(hidden.detach())
        values.append(value.detach())
    gradients = {n: p.grad for n, p in actor.named_parameters() if p.grad is not None}
    return {"states": torch.cat(states), "values": torch.cat(values)} | gradients


@pytest.mark.parametrize("kind", ["shared", "critic"])
@pytest.mark.parametrize(
    ("architecture", "recompute"),
    [
        *((architecture, False) for architecture in PACKED),
        ("llama", True),
        ("mistral-window", True),
    ],
)
def test_packed_equals_padded_equals_one_by_one(
    architecture: str, kind: str, recompute: bool
) -> None:
    together = [torch.arange(len(BATCH))]
    packed = _run(_actor(kind, architecture, True, recompute), together)
    assert packed["states"].shape[0] == 18
    for rows in (together, list(torch.arange(len(BATCH)).split(1))):
        other = _run(_actor(kind, architecture, False), rows)
        assert other.keys() == packed.keys()
        for name, wanted in other.items():
            scale = wanted.abs().max().item()
            # fp32 sums in another order, relative to the largest entry
            torch.testing.assert_close(packed[name], wanted, rtol=0, atol=1e-5 * scale, msg=name)


def test_packing_refuses_opt() -> None:
    actor = ActorCritic(tiny.model("opt"))
    with pytest.raises(ValueError, match=r"packing=on: OPTModel .*packing=off"):
        choose_packing("on", actor, None)
    assert not actor.packing


def test_a_wrong_gradient_is_found(monkeypatch) -> None:
    trunk = ActorCritic(tiny.model()).causal_lm.base_model

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad

    forward = trunk.layers[0].forward

    def wrong(x, **keywords):
        return forward(Doubled.apply(x) if "cu_seq_lens_q" in keywords else x, **keywords)

    monkeypatch.setattr(trunk.layers[0], "forward", wrong)
    assert "its gradients differ" in (difference(trunk) or "")


@pytest.mark.parametrize(
    ("choice", "packs"),
    [("on", True), ("off", False), ("auto", False)],  # auto packs only on a GPU
)
def test_the_option_decides(choice: str, packs: bool) -> None:
    actor = ActorCritic(tiny.model())
    assert choose_packing(choice, actor, None) is None
    assert actor.packing == packs
    assert all(p.grad is None for p in actor.parameters()), "the comparison leaves no gradient"


@pytest.mark.parametrize("who", ["policy", "critic", "reference"])
def test_auto_warns_of_the_model_without_packing(who: str, monkeypatch) -> None:
    """A GPU is simulated by a device's name and by a trunk that takes the mark."""
    from fastppo.models import packing

    opt = LanguageModel(tiny.model("opt"))
    policy = tiny.model("opt" if who == "policy" else "llama")
    value = critic_of_policy(opt.causal_lm) if who == "critic" else None
    actor = ActorCritic(policy, None, value, compute_dtype=torch.bfloat16)
    monkeypatch.setattr(packing, "takes_mark", lambda trunk: True)
    monkeypatch.setattr(ActorCritic, "device", torch.device("cuda"))
    monkeypatch.setattr(ActorCritic, "autocast", lambda self: torch.autocast("cpu", torch.bfloat16))
    sentence = choose_packing("auto", actor, opt if who == "reference" else None)
    assert sentence is not None
    assert f"OPTModel (the {who})" in sentence
    assert not actor.packing
