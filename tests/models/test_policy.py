"""One trunk and two heads."""

from __future__ import annotations

import pytest
import tiny
import torch

from fastppo.data.batch import Batch
from fastppo.models.policy import ActorCritic, LanguageModel
from fastppo.models.value import critic_of_file, critic_of_policy

BATCH = Batch.of([[5, 9], [7, 8, 6, 12]], [[10, 11, 1], [13, 3]])


LAYOUT = BATCH.layout()


def _plain(causal_lm, temperature: float = 1.0) -> torch.Tensor:
    """Return the logprobs [N] of the responses from the model's logits, row by row."""
    logprobs = []
    for row, length in enumerate(BATCH.lengths.tolist()):
        ids = LAYOUT.input_ids[row : row + 1, :length]
        start = int(BATCH.prompt_lengths[row])
        with torch.no_grad():
            p = (causal_lm(ids).logits[0, start - 1 : -1] / temperature).log_softmax(-1)
        logprobs.append(p.gather(1, ids[0, start:, None])[:, 0])
    return torch.cat(logprobs)


def test_the_trunk_runs_once_for_both_heads() -> None:
    actor = ActorCritic(tiny.model())
    calls = []
    actor.causal_lm.model.register_forward_hook(lambda *_: calls.append(1))
    hidden, values, _ = actor(LAYOUT)
    assert calls == [1]
    assert hidden.shape == (5, 32)
    assert values.shape == (5,)
    assert values.dtype == torch.float32


@pytest.mark.parametrize("architecture", tiny.TRAINED)
def test_response_logprobs_are_those_of_each_sequence_alone(architecture: str) -> None:
    model = LanguageModel(tiny.model(architecture))
    actual = model.response_logprobs(BATCH, temperature=0.7)
    wanted = _plain(model.causal_lm, temperature=0.7)
    # fp32, padded rows against rows alone
    torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-5)
    assert not actual.requires_grad


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "opt"])
def test_the_language_model_loss_is_transformers_own(architecture: str) -> None:
    model = LanguageModel(tiny.model(architecture))
    ids = torch.randint(3, 43, (3, 9))
    actual = model.language_model_loss(ids)
    wanted = model.causal_lm(input_ids=ids, labels=ids).loss
    torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-6)
    weight = model.head.weight
    (one,), (other,) = (torch.autograd.grad(loss, weight) for loss in (actual, wanted))
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_bf16_products_leave_weights_and_statistics_in_fp32() -> None:
    actor = ActorCritic(tiny.model(), compute_dtype=torch.bfloat16)
    seen = []
    actor.causal_lm.model.layers[0].mlp.down_proj.register_forward_hook(
        lambda _, args, out: seen.append(out.dtype)
    )
    actual = actor.evaluate(BATCH)
    assert seen == [torch.bfloat16]
    assert {part.dtype for part in actual} == {torch.float32}
    assert {p.dtype for p in actor.parameters()} == {torch.float32}
    # bf16 keeps 8 bits: logits near 10 are off by a few hundredths
    assert (actual.logprobs - _plain(actor.causal_lm)).abs().max() < 0.2


# ------------------------------------------------------------------------------- unsupported models


def test_a_model_with_an_unknown_logit_transform_is_refused() -> None:
    causal_lm = tiny.model("llama")
    forward = causal_lm.forward

    def shifted(*args: object, **kwargs: object) -> object:
        output = forward(*args, **kwargs)
        output.logits = output.logits * 1.5
        return output

    causal_lm.forward = shifted
    with pytest.raises(ValueError, match=r"LlamaForCausalLM.* lm-head"):
        LanguageModel(causal_lm).check_heads()


def test_a_model_with_nan_weights_is_refused() -> None:
    causal_lm = tiny.model()
    with torch.no_grad():
        causal_lm.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"LlamaForCausalLM.* NaN"):
        LanguageModel(causal_lm).check_heads()


# ------------------------------------------------------------------------------------------- saving


def test_a_critic_is_saved_and_loaded_with_its_trunk(tmp_path) -> None:
    causal_lm = tiny.model()
    policy = ActorCritic(causal_lm, None, critic_of_policy(causal_lm))
    with torch.no_grad():
        for parameter in policy.value_function.parameters():
            parameter.normal_()
    path = tmp_path / "value_function.safetensors"
    policy.save_value_function(path)
    critic = critic_of_file(causal_lm, str(path))
    written = [*policy.value_function.parameters()]
    torch.testing.assert_close([*critic.parameters()], written, rtol=0, atol=0)
