"""Four value functions: which states each reads, and which weights its loss reaches."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from transformers import AutoModelForSequenceClassification

from fastppo.models.policy import ActorCritic
from fastppo.models.trunk import checkpoint_activations
from fastppo.models.value import (
    BranchValue,
    CriticValue,
    DetachedValue,
    SharedValue,
    critic_of_policy,
    critic_of_reward_model,
)

KINDS = ("shared", "detached", "branch", "critic")


def _actor(kind: str, architecture: str = "llama", *, recompute: bool = False) -> ActorCritic:
    """Policy and value function; a branch has one layer of its own."""
    causal_lm = tiny.model(architecture)
    if recompute:
        checkpoint_activations(causal_lm)
    trunk: Any = causal_lm.base_model
    width = causal_lm.get_output_embeddings().weight.shape[1]
    value_function = {
        "shared": lambda: SharedValue(trunk, width),
        "detached": lambda: DetachedValue(trunk, width),
        "branch": lambda: BranchValue(trunk, width, 1),
        "critic": lambda: critic_of_policy(causal_lm),
    }[kind]()
    actor = ActorCritic(causal_lm, None, value_function)
    actor.set_training(recompute)
    return actor


def _value_gradients(actor: ActorCritic, **how: bool) -> dict[str, torch.Tensor]:
    """Gradients of the value loss alone."""
    torch.nn.init.ones_(actor.value_function.head.weight)
    actor.zero_grad()
    _, values = actor(tiny.random_batch().layout(), **how)
    values.square().sum().backward()
    return {n: p.grad for n, p in actor.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", KINDS)
def test_values_start_at_zero_and_are_fp32(kind: str) -> None:
    _, values = _actor(kind)(tiny.random_batch().layout())
    assert values.dtype == torch.float32
    assert values.tolist() == [0.0] * 9


def test_the_head_is_fp32_on_a_trunk_of_bf16() -> None:
    causal_lm = tiny.model().bfloat16()
    actor = ActorCritic(causal_lm)
    torch.nn.init.normal_(actor.value_function.head.weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden, values = actor(tiny.random_batch().layout())
    assert (hidden.dtype, values.dtype) == (torch.bfloat16, torch.float32)
    wanted = hidden.float() @ actor.value_function.head.weight[0]
    torch.testing.assert_close(values, wanted, rtol=1e-5, atol=1e-5)


def test_by_default_the_head_is_on_the_shared_trunk() -> None:
    assert type(ActorCritic(tiny.model()).value_function) is SharedValue


def test_a_shared_head_trains_the_trunk_and_a_detached_one_does_not() -> None:
    shared = _value_gradients(_actor("shared"))
    assert any(name.startswith("causal_lm.") for name in shared)
    detached = _value_gradients(_actor("detached"))
    assert detached.keys() == {"value_function.head.weight", "value_function.head.bias"}


@pytest.mark.parametrize("kind", KINDS)
def test_detached_values_leave_the_policys_trunk_alone(kind: str) -> None:
    """As in iterations that train the value function alone."""
    gradients = _value_gradients(_actor(kind), detach_values=True)
    assert gradients["value_function.head.weight"].abs().max() > 0
    assert all(name.startswith("value_function.") for name in gradients)


# ----------------------------------------------------------------------------------------- a branch


@pytest.mark.parametrize("architecture", tiny.TRAINED)
def test_a_branch_starts_as_the_trunks_last_layers_and_trains_its_own(architecture: str) -> None:
    actor = _actor("branch", architecture)
    layout = tiny.random_batch().layout()
    torch.nn.init.ones_(actor.value_function.head.weight)
    hidden, values = actor(layout)
    torch.testing.assert_close(values, hidden.sum(1), rtol=1e-4, atol=1e-4)
    gradients = _value_gradients(actor)
    branch = [n for n in gradients if n.startswith("value_function.layers.0.")]
    own, below = ([n for n in gradients if f"layers.{i}." in n or f".h.{i}." in n] for i in (1, 0))
    assert branch
    assert not [n for n in own if n.startswith("causal_lm")], "the policy's last layer is its own"
    assert [n for n in below if n.startswith("causal_lm")], "what lies below is shared"


def test_a_branch_is_right_with_gradient_checkpointing() -> None:
    one = _value_gradients(_actor("branch"))
    other = _value_gradients(_actor("branch", recompute=True))
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-5, atol=1e-7)


def test_a_branch_leaves_no_hook_on_the_trunk() -> None:
    actor = _actor("branch")
    actor(tiny.random_batch().layout())
    assert not any(layer._forward_pre_hooks for layer in actor.causal_lm.model.layers)
    with pytest.raises(RuntimeError, match="broken"), actor.value_function.watching():
        raise RuntimeError("broken")
    assert not any(layer._forward_pre_hooks for layer in actor.causal_lm.model.layers)


@pytest.mark.parametrize("layers", [0, 3])
def test_a_branch_longer_than_the_trunk_is_refused(layers: int) -> None:
    trunk = tiny.model().base_model
    with pytest.raises(ValueError, match=rf"value_branch_layers must be in \[1, 2\], got {layers}"):
        BranchValue(trunk, 32, layers)


def test_a_trunk_that_is_no_list_of_layers_is_refused() -> None:
    trunk = tiny.model().base_model
    trunk.config.num_hidden_layers = 5
    says = "LlamaModel is not one list of 5 layers; use value_model=critic"
    with pytest.raises(ValueError, match=says):
        BranchValue(trunk, 32, 1)


# ----------------------------------------------------------------------------------------- a critic


def test_a_critic_has_a_trunk_of_its_own() -> None:
    actor = _actor("critic")
    gradients = _value_gradients(actor)
    assert gradients
    assert all(name.startswith("value_function.") for name in gradients)
    ours, theirs = actor.causal_lm.base_model, actor.value_function.trunk
    for mine, its in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, its)
        assert mine.data_ptr() != its.data_ptr()


def test_a_critic_may_start_as_the_reward_model(tmp_path) -> None:
    """Its value of the state before the last token is the reward model's score of that text."""
    name = tiny.saved_reward_model(tmp_path / "rm")
    model = AutoModelForSequenceClassification.from_pretrained(name).eval()
    model.config.score_mean = 0.7  # what FastPPO's reward models subtract
    model.save_pretrained(name)
    critic = critic_of_reward_model(name, dtype=torch.float32, device="cpu")
    assert isinstance(critic, CriticValue)
    layout = tiny.random_batch((5,)).layout()
    with torch.no_grad():
        _, values = ActorCritic(tiny.model(), None, critic)(layout)
        score = model(input_ids=layout.input_ids[:, :-1]).logits[0, 0] - 0.7
    torch.testing.assert_close(values[-1], score)


def test_what_is_no_reward_model_is_no_critic(tmp_path) -> None:
    many = tiny.saved_reward_model(tmp_path / "many", labels=3)
    with pytest.raises(ValueError, match=r"expected a decoder with one label, got .* with 3"):
        critic_of_reward_model(many, dtype=torch.float32, device="cpu")
    headless = tiny.without_weight(tiny.saved_reward_model(tmp_path / "rm"), "score.weight")
    says = r"critic_model .* lacks weights of LlamaForSequenceClassification: score\.weight"
    with pytest.raises(ValueError, match=says):
        critic_of_reward_model(headless, dtype=torch.float32, device="cpu")
