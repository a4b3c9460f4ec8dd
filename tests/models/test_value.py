"""The three value functions: inputs and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from transformers import AutoModelForSequenceClassification

from fastppo.models.policy import ActorCritic
from fastppo.models.pretrained import load_whole
from fastppo.models.trunk import checkpoint_activations
from fastppo.models.value import (
    CriticValue,
    DetachedValue,
    SharedValue,
    critic_of_policy,
    critic_of_reward_model,
)

KINDS = ("shared", "detached", "critic")


def _actor(kind: str, architecture: str = "llama", *, recompute: bool = False) -> ActorCritic:
    causal_lm = tiny.model(architecture)
    if recompute:
        checkpoint_activations(causal_lm)
    trunk: Any = causal_lm.base_model
    width = causal_lm.get_output_embeddings().weight.shape[1]
    value_function = {
        "shared": lambda: SharedValue(trunk, width),
        "detached": lambda: DetachedValue(trunk, width),
        "critic": lambda: critic_of_policy(causal_lm),
    }[kind]()
    actor = ActorCritic(causal_lm, None, value_function)
    actor.set_training(recompute)
    return actor


def _classifier(name: str) -> Any:
    return load_whole(
        AutoModelForSequenceClassification, name, "critic_model", dtype=torch.float32
    )[0]


def _value_gradients(actor: ActorCritic, **options: bool) -> dict[str, torch.Tensor]:
    """Return the gradients of a value loss."""
    torch.nn.init.ones_(actor.value_function.head.weight)
    actor.zero_grad()
    values = actor(tiny.random_batch().layout(), **options).values
    values.square().sum().backward()
    return {n: p.grad for n, p in actor.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", KINDS)
def test_values_start_at_zero_and_are_fp32(kind: str) -> None:
    values = _actor(kind)(tiny.random_batch().layout()).values
    assert values.dtype == torch.float32
    assert values.tolist() == [0.0] * 9


def test_the_head_is_fp32_on_a_trunk_of_bf16() -> None:
    causal_lm = tiny.model().bfloat16()
    actor = ActorCritic(causal_lm)
    torch.nn.init.normal_(actor.value_function.head.weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden, values, _ = actor(tiny.random_batch().layout())
    assert (hidden.dtype, values.dtype) == (torch.bfloat16, torch.float32)
    wanted = hidden.float() @ actor.value_function.head.weight[0]
    torch.testing.assert_close(values, wanted, rtol=1e-5, atol=1e-5)


def test_only_a_shared_head_trains_the_policys_trunk() -> None:
    shared = _value_gradients(_actor("shared"))
    assert any(name.startswith("causal_lm.") for name in shared)
    detached = _value_gradients(_actor("detached"))
    assert detached.keys() == {"value_function.head.weight", "value_function.head.bias"}
    critic = _value_gradients(_actor("critic"))
    assert any(name.startswith("value_function.trunk.") for name in critic)
    assert all(name.startswith("value_function.") for name in critic)


@pytest.mark.parametrize("kind", KINDS)
def test_detached_values_leave_the_policys_trunk_alone(kind: str) -> None:
    """Iterations that only train the value function rely on it."""
    gradients = _value_gradients(_actor(kind), detach_values=True)
    assert gradients["value_function.head.weight"].abs().max() > 0
    assert all(name.startswith("value_function.") for name in gradients)


# ----------------------------------------------------------------------------------------- a critic


def test_a_critic_starts_from_the_policy() -> None:
    actor = _actor("critic")
    ours, theirs = actor.causal_lm.base_model, actor.value_function.trunk
    for mine, its in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, its)
        assert mine.data_ptr() != its.data_ptr()


def test_a_critic_starts_from_a_reward_model(tmp_path) -> None:
    """Its value before the last token is the reward model's score of the text so far."""
    name = tiny.saved_reward_model(tmp_path / "rm")
    model = AutoModelForSequenceClassification.from_pretrained(name).eval()
    model.config.score_mean = 0.7  # subtracted by FastPPO's reward models
    model.save_pretrained(name)
    critic = critic_of_reward_model(_classifier(name), name)
    assert isinstance(critic, CriticValue)
    layout = tiny.random_batch((5,)).layout()
    with torch.no_grad():
        values = ActorCritic(tiny.model(), None, critic)(layout).values
        score = model(input_ids=layout.input_ids[:, :-1]).logits[0, 0] - 0.7
    torch.testing.assert_close(values[-1], score)


def test_a_critic_needs_one_label(tmp_path) -> None:
    many = tiny.saved_reward_model(tmp_path / "many", labels=3)
    with pytest.raises(ValueError, match=f"{many}.* 3"):
        critic_of_reward_model(_classifier(many), many)
