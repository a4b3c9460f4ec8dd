"""What a trunk's last layer does on the rows that are read is what it does on all of them."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import tiny
import torch
from torch import nn
from transformers import (
    GptOssConfig,
    LlamaForSequenceClassification,
    MixtralConfig,
    Phi3Config,
)
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from fastppo.models import last_layer
from fastppo.models.adapters import add_adapters
from fastppo.models.cache import GrowingCache
from fastppo.models.last_layer import FOUND, last_states, prepare, states_at
from fastppo.models.layers import layers_of
from fastppo.models.policy import ActorCritic, LanguageModel
from fastppo.models.trunk import checkpoint_activations, hidden_states, next_states
from fastppo.models.value import critic_of_policy
from fastppo.rewards.model import RewardModel, sequence_scores

CUT = ("llama", "mistral", "qwen2", "qwen3")
WHOLE = ("gemma2", "gemma3", "gpt2", "gpt_neox", "opt", "phi", "cohere", "granite")
IDS = torch.tensor([[5, 9, 4, 7], [8, 3, 6, 2]])
ROWS = torch.tensor([6, 1, 2, 7])


def _trunk(architecture: str = "llama"):
    trunk = tiny.model(architecture).eval().base_model
    prepare(trunk)
    return trunk


@contextmanager
def _rows_of_the_mlp(trunk) -> Iterator[list[int]]:
    """How many rows each call of the last layer's MLP has."""
    seen: list[int] = []
    mlp = layers_of(trunk)[1][-1].mlp
    hook = mlp.register_forward_pre_hook(lambda _, args: seen.append(args[0][..., 0].numel()))
    yield seen
    hook.remove()


def _gradients(trunk, states: torch.Tensor) -> dict[str, torch.Tensor]:
    trunk.zero_grad()
    (states * torch.linspace(-1, 1, states.numel()).view_as(states)).sum().backward()
    return {name: p.grad.clone() for name, p in trunk.named_parameters()}


@pytest.mark.parametrize("architecture", CUT)
@pytest.mark.parametrize("packed", [False, True])
def test_states_and_every_gradient_are_those_of_the_whole_layer(architecture, packed) -> None:
    trunk, batch = _trunk(architecture), tiny.random_batch()
    layout = batch.packed_layout() if packed else batch.layout()
    rows = layout.predicting
    whole = hidden_states(trunk, layout.input_ids, packing=layout.packing).flatten(0, 1)[rows]
    wanted = _gradients(trunk, whole)
    with _rows_of_the_mlp(trunk) as seen:
        states = states_at(trunk, rows, layout.input_ids, packing=layout.packing)
    found = _gradients(trunk, states)
    assert seen == [len(rows)]
    assert len(rows) < layout.input_ids.numel()
    torch.testing.assert_close(states, whole, rtol=1e-5, atol=1e-6)
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("architecture", WHOLE)
def test_a_layer_that_is_built_otherwise_runs_whole(architecture: str) -> None:
    trunk = _trunk(architecture)
    assert getattr(trunk, FOUND) == []
    with torch.no_grad():
        states = states_at(trunk, ROWS, IDS)
        assert torch.equal(states, hidden_states(trunk, IDS).flatten(0, 1)[ROWS])


OTHERS = {
    "phi3": Phi3Config(**tiny._decoder(), resid_pdrop=0.5),
    "mixtral": MixtralConfig(**tiny._decoder(), num_local_experts=3, num_experts_per_tok=2),
    "gpt_oss": GptOssConfig(
        **tiny._decoder(head_dim=8), num_local_experts=3, num_experts_per_tok=2
    ),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_dropout_that_is_off_and_experts_are_no_hindrance(kind: str) -> None:
    policy = ActorCritic(tiny.model_of(OTHERS[kind]))
    trunk = policy.causal_lm.base_model
    with torch.no_grad(), _rows_of_the_mlp(trunk) as seen:
        states = states_at(trunk, ROWS, IDS)
        assert seen == [len(ROWS)]
        whole = hidden_states(trunk, IDS).flatten(0, 1)[ROWS]
    torch.testing.assert_close(states, whole, rtol=1e-5, atol=1e-6)


class _Gated(LlamaDecoderLayer):
    """Reads a weight of its own, which does nothing yet."""

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, hidden_states, **more):
        attended = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **more)[0]
        hidden_states = hidden_states + attended
        found = self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states + found + self.gate * hidden_states


class _Scaled(LlamaDecoderLayer):
    def forward(self, hidden_states, **more):
        attended = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **more)[0]
        hidden_states = hidden_states + attended
        return hidden_states + 0.97 * self.mlp(self.post_attention_layernorm(hidden_states))


class _Twice(LlamaDecoderLayer):
    def forward(self, hidden_states, **more):
        attended = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **more)[0]
        hidden_states = hidden_states + attended
        found = self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states + found + found


class _Viewed(LlamaDecoderLayer):
    def forward(self, hidden_states, **more):
        attended = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **more)[0]
        hidden_states = hidden_states + attended
        found = self.mlp(self.post_attention_layernorm(hidden_states)).view(len(IDS), -1, 32)
        return hidden_states + found


def _with(kind: type, dtype: torch.dtype = torch.float32):
    """A trunk whose last layer is of a class of its own."""
    trunk = tiny.model().eval().base_model
    layers = layers_of(trunk)[1]
    last = kind(trunk.config, 1)
    last.load_state_dict(layers[-1].state_dict(), strict=False)
    layers[-1] = last
    return trunk.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [_Gated, _Scaled, _Twice, _Viewed])
def test_a_layer_that_does_more_or_gives_other_states_is_not_trusted(kind, dtype) -> None:
    trunk = _with(kind, dtype)
    prepare(trunk)
    assert getattr(trunk, FOUND) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_of_its_own_class_is_trusted(dtype) -> None:
    trunk = _with(LlamaDecoderLayer, dtype)
    prepare(trunk)
    assert getattr(trunk, FOUND)


def test_a_layer_whose_forward_another_library_has_put_there_is_left_alone() -> None:
    trunk = tiny.model().eval().base_model
    last = layers_of(trunk)[1][-1]
    last.forward = last.forward
    prepare(trunk)
    assert getattr(trunk, FOUND) == []


def test_a_layer_that_is_replaced_is_the_one_that_runs() -> None:
    trunk = _trunk()
    layers = layers_of(trunk)[1]
    layers[-1] = copy.deepcopy(layers[-1])
    layers[-1].mlp.down_proj.weight.data.zero_()
    with torch.no_grad():
        wanted = hidden_states(trunk, IDS).flatten(0, 1)[ROWS]
        torch.testing.assert_close(states_at(trunk, ROWS, IDS), wanted, rtol=1e-5, atol=1e-6)


def test_threads_that_read_one_trunk_get_their_own_rows() -> None:
    """A reward that came too late may still run when it is asked again."""
    trunk, inside, done = _trunk(), threading.Event(), threading.Event()
    found = []

    def held_up(module, args) -> None:
        if threading.current_thread() is late:
            inside.set()
            assert done.wait(60)

    def read() -> None:
        with torch.no_grad():
            found.append(states_at(trunk, ROWS, IDS))

    layers_of(trunk)[1][0].register_forward_pre_hook(held_up)
    late = threading.Thread(target=read)
    late.start()
    assert inside.wait(60)
    with torch.no_grad():
        whole = hidden_states(trunk, IDS).flatten(0, 1)
        torch.testing.assert_close(states_at(trunk, ROWS[:2], IDS), whole[ROWS[:2]])
    done.set()
    late.join()
    torch.testing.assert_close(found[0], whole[ROWS], rtol=1e-5, atol=1e-6)
    with _rows_of_the_mlp(trunk) as seen:
        read()
    assert seen == [len(ROWS)], "a thread alone runs the last layer on its rows again"


@pytest.mark.parametrize("is_on", [True, False])
def test_adapters_of_the_mlp_are_trained_as_in_the_whole_layer(is_on: bool) -> None:
    causal_lm = tiny.model()
    peft = add_adapters(causal_lm, 2, 4.0, ["gate_proj", "down_proj", "q_proj"])
    for name, p in causal_lm.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p.data)
    policy = ActorCritic(causal_lm, peft)
    trunk = causal_lm.base_model
    with nullcontext() if is_on else policy.adapters_off(), _rows_of_the_mlp(trunk) as seen:
        states = states_at(trunk, ROWS, IDS)
        assert seen == [len(ROWS)]
        whole = hidden_states(trunk, IDS).flatten(0, 1)[ROWS]
    torch.testing.assert_close(states, whole, rtol=1e-5, atol=1e-6)
    if is_on:
        trained = [p for p in trunk.parameters() if p.requires_grad]
        of = [torch.autograd.grad(each.square().sum(), trained) for each in (states, whole)]
        torch.testing.assert_close(*of, rtol=1e-4, atol=1e-5)


def test_the_layer_is_as_it_was_when_a_pass_fails() -> None:
    trunk = _trunk()
    with pytest.raises(IndexError):
        states_at(trunk, torch.tensor([99]), IDS)
    assert "forward" not in vars(layers_of(trunk)[1][-1])


def test_activations_are_recomputed_on_the_same_rows() -> None:
    policy = ActorCritic(tiny.model())
    trunk = policy.causal_lm.base_model
    wanted = _gradients(trunk, states_at(trunk, ROWS, IDS))
    checkpoint_activations(policy.causal_lm)
    policy.set_training(True)
    with _rows_of_the_mlp(trunk) as seen:
        states = states_at(trunk, ROWS, IDS)
        states_at(trunk, ROWS[:1], IDS)  # another pass, before the first one's backward
        found = _gradients(trunk, states)
    assert seen == [len(ROWS), 1, len(ROWS)]
    assert all(torch.equal(found[name], gradient) for name, gradient in wanted.items())
    with _rows_of_the_mlp(trunk) as seen:
        hidden_states(trunk, IDS).sum().backward()
    assert seen == [IDS.numel()] * 2, "a pass over all rows is checkpointed as before"


def test_prompts_are_read_for_their_last_token_alone() -> None:
    trunk = _trunk()
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    caches = [GrowingCache(trunk.config, None) for _ in range(2)]
    with torch.no_grad(), _rows_of_the_mlp(trunk) as seen:
        wanted = next_states(trunk, IDS, mask, positions, caches[0])[:, -1]
        found = last_states(trunk, IDS, mask, positions, caches[1])
        assert seen == [8, 2]
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
        step = IDS[:, :1], torch.cat([mask, mask[:, :1] | 1], 1), positions[:, -1:] + 1
        after = [last_states(trunk, *step, cache) for cache in caches]
    torch.testing.assert_close(*after, rtol=1e-5, atol=1e-6)


def test_a_score_is_read_at_the_last_token_alone() -> None:
    config = tiny.CONFIGS["llama"]()
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(config).eval()
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    with torch.no_grad():
        wanted = sequence_scores(model, IDS, mask)
        prepare(model.base_model)
        with _rows_of_the_mlp(model.base_model) as seen:
            found = sequence_scores(model, IDS, mask)
    assert seen == [2]
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_policy_and_critic_read_what_predicts_a_response_alone() -> None:
    causal_lm = tiny.model()
    policy = ActorCritic(causal_lm, value_function=critic_of_policy(causal_lm))
    layout = tiny.random_batch().layout()
    of_policy, of_critic = causal_lm.base_model, policy.value_function.trunk
    with torch.no_grad(), _rows_of_the_mlp(of_policy) as one, _rows_of_the_mlp(of_critic) as other:
        policy(layout)
    assert one == other == [len(layout.predicting)]


def test_a_reward_model_reads_each_texts_end_alone(tmp_path: Path) -> None:
    reward = RewardModel(tiny.saved_reward_model(tmp_path / "reward"))
    with _rows_of_the_mlp(reward.model.base_model) as seen:
        reward(["w1 w2", "w3"], [" w4", " w5 w6"])
    assert seen == [2]


def test_a_copy_reads_its_own_layer() -> None:
    """A frozen reference is a copy of the policy: it must not run the policy's last layer."""
    trunk = _trunk()
    other = copy.deepcopy(trunk)
    with torch.no_grad():
        wanted = states_at(other, ROWS, IDS)
        layers_of(trunk)[1][-1].mlp.down_proj.weight.zero_()
        assert torch.equal(states_at(other, ROWS, IDS), wanted)
        last_layer.take_from(trunk, other)
        assert torch.equal(states_at(other, ROWS, IDS), wanted)
    setattr(trunk, FOUND, [])
    last_layer.take_from(trunk, other)
    assert getattr(other, FOUND) == []


def test_a_trunk_without_weights_is_not_trusted_whatever_was_assumed_of_it() -> None:
    causal_lm = tiny.model().to("meta")
    last_layer.assume(causal_lm.base_model)
    assert getattr(causal_lm.base_model, FOUND)
    assert getattr(LanguageModel(causal_lm).causal_lm.base_model, FOUND) == []


@pytest.mark.parametrize("kind", ["llama", "gpt2", "granite"])
def test_what_is_assumed_is_what_is_found(kind: str) -> None:
    trunk = _trunk(kind)
    found = getattr(trunk, FOUND)
    last_layer.assume(trunk)
    assert getattr(trunk, FOUND) == found
