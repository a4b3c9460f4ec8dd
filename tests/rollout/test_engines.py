"""`make_engine` takes the decoder only for models that it decodes as `generate` does."""

from __future__ import annotations

import pytest
import tiny
import torch

from fastppo.models.policy import ActorCritic
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
def test_a_model_that_the_decoder_gets_wrong_gets_generate_and_a_warning(
    wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = ActorCritic(tiny.model())
    trunk = policy.causal_lm.base_model
    forward = trunk.forward

    def decoded(*args, position_ids=None, **keywords):
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
    assert note.startswith("rollout=decoder does not decode LlamaForCausalLM as Hugging Face")
    assert note.endswith("using rollout=generate")
    assert ("TypeError" if wrong == "no position ids" else "nats off") in note
