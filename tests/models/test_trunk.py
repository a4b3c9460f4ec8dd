"""The trunk: dropout, context and activation checkpointing."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import tiny
import torch
from transformers import FalconMambaConfig

from fastppo.data.batch import Batch
from fastppo.models.policy import ActorCritic
from fastppo.models.trunk import checkpoint_activations, context_length

BATCH = Batch.of([[5, 9], [7, 8, 6, 12]], [[10, 11, 1], [13, 3]])


LAYOUT = BATCH.layout()


@pytest.mark.parametrize("architecture", tiny.TRAINED)
def test_dropout_is_off_even_in_training_mode(architecture: str) -> None:
    """OPT's config has a dropout of 0.3 here, and GPT-2's default is 0.1."""
    actor = ActorCritic(tiny.model(architecture))
    actor.set_training(gradient_checkpointing=True)
    with torch.no_grad():
        first, second = actor(LAYOUT)[0], actor(LAYOUT)[0]
    assert torch.equal(first, second)


def test_the_context_length_is_read_from_the_config() -> None:
    assert context_length(tiny.model()) == tiny.CONTEXT
    assert context_length(tiny.model("gpt2")) == tiny.CONTEXT
    assert context_length(SimpleNamespace(config=FalconMambaConfig())) is None


@pytest.mark.parametrize("architecture", tiny.TRAINED)
def test_recomputed_activations_give_the_same_gradients(architecture: str) -> None:
    gradients, calls = [], []
    for recompute in (False, True):
        actor = ActorCritic(tiny.model(architecture))
        torch.nn.init.ones_(actor.value_function.head.weight)
        if recompute:
            checkpoint_activations(actor.causal_lm)
        actor.set_training(recompute)
        calls.append(0)
        layer = next(m for n, m in actor.named_modules() if n.endswith((".layers.0", ".h.0")))
        next(layer.children()).register_forward_pre_hook(lambda *_: calls.append(calls.pop() + 1))
        hidden, values, _ = actor(LAYOUT)
        (hidden.square().mean() + values.square().mean()).backward()
        gradients.append({n: p.grad for n, p in actor.named_parameters() if p.grad is not None})
    assert calls == [1, 2], "once more in the backward pass"
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-7)
