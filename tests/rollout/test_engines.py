"""`make_engine` takes the first engine whose logprobs are the learner's."""

from __future__ import annotations

import architectures
import pytest
import tiny
import torch

from fastppo.data.batch import Batch
from fastppo.models.cache import GrowingCache
from fastppo.models.policy import ActorCritic
from fastppo.rollout import Sampling
from fastppo.rollout.decoder import DecoderEngine
from fastppo.rollout.engines import make_engine
from fastppo.rollout.generate import GenerateEngine


def _engine(policy: ActorCritic, name: str = "decoder"):
    return make_engine(name, policy, tiny.tokenizer(), 0, batch_size=3, final_values=True)


@pytest.mark.parametrize("architecture", tiny.CONFIGS)
def test_the_decoder_decodes_every_architecture_in_bf16(architecture: str) -> None:
    policy = ActorCritic(tiny.model(architecture), compute_dtype=torch.bfloat16)
    engine, note = _engine(policy)
    assert isinstance(engine, DecoderEngine)
    assert (engine.batch_size, engine.final_values, note) == (3, True, None)


@pytest.mark.parametrize("wrong", ["positions", "no position ids"])
def test_a_model_that_the_decoder_gets_wrong_gets_generate_and_a_note(
    wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = ActorCritic(tiny.model())
    trunk = policy.causal_lm.base_model
    forward = trunk.forward

    def decoded(*args, position_ids=None, **keywords):
        if position_ids is None:  # the learner's forward pass
            return forward(*args, **keywords)
        if wrong == "no position ids":
            raise TypeError("forward() got an unexpected keyword argument 'position_ids'")
        return forward(*args, position_ids=position_ids * 3, **keywords)

    def generate(*args, **keywords):
        trunk.forward = forward
        return own_generate(*args, **keywords)

    own_generate = policy.causal_lm.generate
    monkeypatch.setattr(policy.causal_lm, "generate", generate)
    monkeypatch.setattr(trunk, "forward", decoded)
    engine, note = _engine(policy)
    assert isinstance(engine, GenerateEngine)
    assert "LlamaForCausalLM" in note
    assert "rollout=generate" in note
    assert ("TypeError" if wrong == "no position ids" else "nats off") in note


def test_a_model_that_loses_rows_which_end_gets_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    """No row of the first comparison ends early, so that only the second one can see it."""
    monkeypatch.setattr(GrowingCache, "select", lambda cache, rows: None)
    engine, note = _engine(ActorCritic(tiny.model()))
    assert isinstance(engine, GenerateEngine)
    assert "RuntimeError" in note


def test_a_model_that_ignores_mask_and_cache_generates_for_one_length_at_a_time() -> None:
    """RWKV has no attention mask, and does not read its state."""
    policy = ActorCritic(architectures.model("rwkv"))
    engine, note = _engine(policy)
    assert isinstance(engine, GenerateEngine)
    assert engine.equal_lengths
    assert "RwkvForCausalLM" in note
    prompts = [[5, 9, 4], [7, 6], [8, 3, 6, 12, 20], [11, 12], [5, 9, 4]]
    torch.manual_seed(0)
    rollout = engine.generate(prompts, Sampling(max_new_tokens=8, stop_token_ids=(1, 2, 3, 4)))
    wanted = policy.response_logprobs(Batch.of(prompts, rollout.tokens))
    torch.testing.assert_close(torch.cat(rollout.logprobs), wanted, rtol=1e-5, atol=1e-5)


def test_a_model_that_no_engine_gets_right_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = ActorCritic(tiny.model())
    monkeypatch.setattr(policy, "response_logprobs", lambda batch, **_: batch.response_tokens * 1.0)
    engine, note = _engine(policy)
    assert isinstance(engine, DecoderEngine)
    assert "no engine" in note
