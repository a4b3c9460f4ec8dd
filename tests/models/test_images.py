"""The output of the vision tower, computed once, gives the model's own logits and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_vision
import torch
from torch import Tensor

from fastppo.data.batch import Batch
from fastppo.models.images import ImageEncoder
from fastppo.models.policy import ActorCritic
from fastppo.models.trunk import hidden_states
from fastppo.rollout import Sampling
from fastppo.rollout.decoder import DecoderEngine

FAMILIES = ("idefics3", "smolvlm", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "internvl")
ROUNDING = 2e-5
"""Relative: fp32 with sums in another order, through a tower and two layers."""
families = pytest.mark.parametrize("architecture", FAMILIES)


def _gradients(model: Any, logits: Tensor) -> dict[str, Tensor]:
    """Return the gradients of the language model for a sum with different weights."""
    model.zero_grad()
    weights = torch.linspace(-1, 1, logits.numel()).view_as(logits)
    (logits.float() * weights).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@families
def test_logits_and_gradients_are_the_models_own(architecture: str) -> None:
    encoder, prompts = tiny_vision.encoder(architecture)
    policy = encoder.policy
    model = policy.causal_lm
    for parameter in model.get_encoder(modality="image").parameters():
        parameter.requires_grad_(False)
    responses = [[5, 6, 7], [8], [9, 4]]
    for row in range(2):
        ids = prompts.token_ids[row]
        tokens = torch.tensor([[*ids, *responses[row]]])
        inputs = encoder.inputs(ids)
        own = {k: v for k, v in inputs.items() if k not in ("attention_mask", "mm_token_type_ids")}
        if "image_grid_thw" in own:
            own["mm_token_type_ids"] = (tokens == model.config.image_token_id).int()
        theirs = model(input_ids=tokens, use_cache=False, **own).logits
        their_gradients = _gradients(model, theirs)
        read = encoder(prompts.select([row]))
        layout = Batch.of(read.token_ids, [responses[row]]).layout()
        states = hidden_states(model.base_model, layout.input_ids, images=layout.images)
        ours = policy.head.logits(states)
        torch.testing.assert_close(ours, theirs, rtol=ROUNDING, atol=ROUNDING)
        for name, gradient in _gradients(model, ours).items():
            if "connector" in name:  # the projector is frozen in training
                continue
            size = their_gradients[name].norm()
            assert (gradient - their_gradients[name]).norm() <= ROUNDING * (1 + size), name


@families
def test_batches_packed_rows_and_the_decoder_agree(architecture: str) -> None:
    encoder, prompts = tiny_vision.encoder(architecture)
    policy = encoder.policy
    # Rows share prompts, leave at different steps, and one is text.
    ids = encoder(prompts.select([0, 1, 2, 0, 1])).token_ids
    sampling = Sampling(max_new_tokens=9, seed=3, stop_token_ids=(1, 2, 3, 4))
    rollout = DecoderEngine(policy).generate(ids, sampling)
    assert len(set(rollout.lengths)) > 2
    batch = Batch.of(ids, rollout.tokens)
    wanted = torch.cat(
        [policy.evaluate(batch.select(torch.tensor([i]))).logprobs for i in range(5)]
    )
    evaluation = policy.evaluate(batch)
    torch.testing.assert_close(evaluation.logprobs, wanted, rtol=ROUNDING, atol=ROUNDING)
    assert rollout.logprobs is not None
    sampled = torch.cat(rollout.logprobs)
    torch.testing.assert_close(sampled, wanted, rtol=ROUNDING, atol=ROUNDING)
    policy.packing = True
    packed = policy.evaluate(batch).logprobs
    torch.testing.assert_close(packed, wanted, rtol=ROUNDING, atol=ROUNDING)
    first, second = batch.split([2, 3])
    assert first.images == batch.images[:2]
    assert second.images == batch.images[2:]


@families
def test_the_policy_sees_the_image(architecture: str) -> None:
    encoder, prompts = tiny_vision.encoder(architecture)
    (seen,) = encoder(prompts.select([0])).token_ids
    other = seen.encoded._replace(features=-seen.encoded.features)
    batches = [Batch.of([ids], [[5, 6]]) for ids in (seen, seen.with_encoded(other))]
    one, two = (encoder.policy.evaluate(batch).logprobs for batch in batches)
    assert (one - two).abs().max() > 0.01


@pytest.mark.parametrize("architecture", ["idefics3", "qwen3_vl"])
def test_an_image_token_that_the_policy_drew_has_no_image(architecture: str) -> None:
    encoder, prompts = tiny_vision.encoder(architecture)
    policy = encoder.policy
    token = policy.config.image_token_id
    with torch.no_grad():  # the policy likes image tokens
        policy.causal_lm.lm_head.weight[token] = 0.3 * policy.causal_lm.lm_head.weight[5]
    ids = encoder(prompts.select([0, 1, 2] * 4)).token_ids
    rollout = DecoderEngine(policy).generate(ids, Sampling(max_new_tokens=12, seed=1))
    assert sum(tokens.count(token) for tokens in rollout.tokens) > 0
    assert rollout.logprobs is not None
    logprobs = policy.evaluate(Batch.of(ids, rollout.tokens)).logprobs
    torch.testing.assert_close(torch.cat(rollout.logprobs), logprobs, rtol=1e-4, atol=1e-4)


def test_the_tower_reads_each_prompt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, prompts = tiny_vision.encoder("idefics3")
    calls: list[int] = []
    original = encoder.trunk.get_image_features
    monkeypatch.setattr(
        encoder.trunk,
        "get_image_features",
        lambda *args, **more: calls.append(1) or original(*args, **more),
    )
    encoder(prompts.select([0, 1, 2, 0, 1, 0]))
    assert len(calls) == 2


def test_unread_images_are_not_ignored() -> None:
    _, prompts = tiny_vision.encoder("idefics3")
    with pytest.raises(RuntimeError, match="tower"):
        Batch.of(prompts.token_ids, [[5]] * 3)


def test_a_model_that_computes_other_logits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, prompts = tiny_vision.encoder("qwen2_5_vl")
    encoder.check(prompts)
    read = encoder.encode(prompts.token_ids[0])
    assert read.positions is not None
    for changed in (
        read._replace(features=read.features + 0.1),
        read._replace(positions=2 * read.positions),
    ):
        monkeypatch.setattr(encoder, "encode", lambda prompt, changed=changed: changed)
        with pytest.raises(ValueError, match="images"):
            encoder.check(prompts)


def test_a_model_whose_image_tokens_attend_in_both_directions_is_refused() -> None:
    encoder, prompts = tiny_vision.encoder("gemma3")
    with pytest.raises(ValueError, match="both directions"):
        encoder.check(prompts)


def test_a_trunk_that_fails_on_the_output_of_its_tower_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A list where the trunk expects a tensor raises an AttributeError there."""
    encoder, prompts = tiny_vision.encoder("internvl")
    read = encoder.encode(prompts.token_ids[0])
    monkeypatch.setattr(encoder, "encode", lambda prompt: read._replace(block=None))
    with pytest.raises(ValueError, match=r"images.* AttributeError"):
        encoder.check(prompts)


def test_a_trunk_without_the_operand_is_refused() -> None:
    import tiny

    with pytest.raises(ValueError, match="images"):
        ImageEncoder(ActorCritic(tiny.model()), tiny_vision.processor("idefics3"))
