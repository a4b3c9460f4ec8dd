"""One trunk, two heads: the heads are the model's own, whatever it does to its logits."""

from __future__ import annotations

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM

import fastppo
from fastppo.batch import Sequences
from fastppo.model import (
    ActorCritic,
    LanguageModel,
    add_adapters,
    frozen_copy,
)

SEQUENCES = Sequences.pack([[5, 9], [7, 8, 6, 12]], [[10, 11, 1], [13, 3]], pad_token_id=1)


@pytest.mark.parametrize("architecture", tiny.CONFIGS)
def test_the_head_on_the_trunk_gives_the_models_own_logits(architecture: str) -> None:
    causal_lm = tiny.model(architecture)
    ours = LanguageModel(causal_lm)
    with torch.no_grad():
        own = causal_lm(
            input_ids=SEQUENCES.input_ids, attention_mask=SEQUENCES.attention_mask
        ).logits[SEQUENCES.predicting_positions]
        hidden = ours.hidden(SEQUENCES, SEQUENCES.predicting_positions)
    # fp32, two orders of the same sums
    torch.testing.assert_close(ours.head.finished_logits(hidden), own, rtol=1e-5, atol=1e-5)
    ours.check_heads()


@pytest.mark.parametrize("architecture", tiny.CONFIGS)
@pytest.mark.parametrize("loss_path", ["linear", "logits"])
def test_the_loss_through_the_head_is_the_loss_of_the_models_own_logits(
    architecture: str, loss_path: str
) -> None:
    """Value and every gradient of the trunk, soft-caps, scales, ties and biases included."""
    tokens = SEQUENCES.response_tokens
    old = torch.full(tokens.shape, -3.0)
    advantages = torch.linspace(-1, 1, len(tokens))
    gradients = []
    for own in (True, False):
        causal_lm = tiny.model(architecture)
        actor = ActorCritic(causal_lm)
        hidden, _ = actor(SEQUENCES)
        head = actor.head
        options = {"entropy_coef": 0.1, "clip_ratio": None}
        if own:
            logits = causal_lm(
                input_ids=SEQUENCES.input_ids, attention_mask=SEQUENCES.attention_mask
            ).logits[SEQUENCES.predicting_positions]
            out = fastppo.ppo_loss(logits, tokens, old, advantages, **options)
        elif loss_path == "linear":
            out = fastppo.linear_ppo_loss(
                hidden,
                head.weight,
                tokens,
                old,
                advantages,
                bias=head.bias,
                logit_scale=head.logit_scale,
                softcap=head.softcap,
                **options,
            )
        else:
            out = fastppo.ppo_loss(
                head.logits(hidden),
                tokens,
                old,
                advantages,
                logit_scale=head.logit_scale,
                softcap=head.softcap,
                inplace=True,
                **options,
            )
        out.loss.backward()
        named = causal_lm.named_parameters()
        gradients.append(
            {name: p.grad for name, p in named if p.grad is not None} | {"loss": out.loss.detach()}
        )
    own_gradients, ours = gradients
    assert own_gradients.keys() == ours.keys()
    # fp32 through two layers and back, relative to the largest gradient: a key's bias, say, has a
    # gradient of exactly 0 in real numbers, and rounding noise of that scale in these.
    scale = max(gradient.abs().max().item() for gradient in own_gradients.values())
    for name, gradient in own_gradients.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=2e-6 * scale, msg=name)


def test_a_model_with_an_unknown_logit_transform_is_refused() -> None:
    causal_lm = tiny.model("llama")
    forward = causal_lm.forward

    def shifted(*args: object, **kwargs: object) -> object:
        output = forward(*args, **kwargs)
        output.logits = output.logits * 1.5
        return output

    causal_lm.forward = shifted
    with pytest.raises(ValueError, match=r"LlamaForCausalLM: the lm-head .* differs"):
        LanguageModel(causal_lm).check_heads()


def test_the_trunk_runs_once_for_both_heads() -> None:
    actor = ActorCritic(tiny.model())
    calls = []
    actor.causal_lm.model.register_forward_hook(lambda *_: calls.append(1))
    hidden, values = actor(SEQUENCES)
    assert calls == [1]
    assert hidden.shape == (5, 32)
    assert values.shape == (5,)
    assert values.dtype == torch.float32


def test_the_value_loss_reaches_the_trunk() -> None:
    actor = ActorCritic(tiny.model())
    torch.nn.init.ones_(actor.value_function.head.weight)
    _, values = actor(SEQUENCES)
    fastppo.value_loss(values, torch.ones_like(values)).backward()
    layer = actor.causal_lm.model.layers[0].mlp.down_proj.weight
    assert layer.grad is not None
    assert layer.grad.abs().max() > 0


@pytest.mark.parametrize("architecture", tiny.TRAINED)
def test_dropout_is_off_even_in_training_mode(architecture: str) -> None:
    """OPT's config here asks for a dropout of 0.3, GPT-2's default is 0.1."""
    actor = ActorCritic(tiny.model(architecture))
    actor.set_training(gradient_checkpointing=True)
    with torch.no_grad():
        first, second = actor(SEQUENCES)[0], actor(SEQUENCES)[0]
    assert torch.equal(first, second)


def test_padding_does_not_change_what_a_sequence_sees() -> None:
    """pad = eos, and a short row beside a long one, give the numbers of the row alone."""
    actor = ActorCritic(tiny.model())
    alone = Sequences.pack([[5, 9]], [[10, 11, 1]], pad_token_id=0)
    with torch.no_grad():
        together = actor(SEQUENCES)[0][:3]
        by_itself = actor(alone)[0]
    torch.testing.assert_close(together, by_itself, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "opt"])
def test_lora_saves_a_plain_policy_and_its_reference_is_the_trunk_without_adapters(
    architecture: str, tmp_path
) -> None:
    plain = tiny.model(architecture)
    before = {name: p.clone() for name, p in plain.state_dict().items()}
    peft = add_adapters(plain, rank=4, alpha=8.0, target_modules=None)
    actor = ActorCritic(plain, peft)
    trained = [name for name, p in plain.named_parameters() if p.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)
    untouched = actor.response_logprobs(SEQUENCES)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    adapted = actor.response_logprobs(SEQUENCES)
    with actor.adapters_off() as reference:
        assert torch.equal(reference.response_logprobs(SEQUENCES), untouched)
    assert (adapted - untouched).abs().max() > 1e-2

    actor.save_policy(tmp_path / "policy")
    loaded = LanguageModel(AutoModelForCausalLM.from_pretrained(tmp_path / "policy"))
    assert loaded.causal_lm.state_dict().keys() == before.keys()
    torch.testing.assert_close(loaded.response_logprobs(SEQUENCES), adapted, rtol=1e-5, atol=1e-5)


def test_adapters_on_the_lm_head_are_refused() -> None:
    plain = tiny.model("llama")
    peft = add_adapters(plain, rank=4, alpha=8.0, target_modules=["lm_head", "q_proj"])
    with pytest.raises(ValueError, match="lm_head"):
        ActorCritic(plain, peft)


def test_a_frozen_copy_shares_nothing_and_has_no_gradient() -> None:
    actor = ActorCritic(tiny.model())
    reference = frozen_copy(actor)
    with torch.no_grad():
        actor.head.weight.add_(1.0)
    assert not torch.equal(actor.head.weight, reference.head.weight)
    assert not any(p.requires_grad for p in reference.parameters())
