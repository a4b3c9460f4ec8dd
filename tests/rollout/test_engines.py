"""An engine by name, and `generate` for a model that the decoder would decode wrongly."""

from __future__ import annotations

import pytest
import tiny
import torch

from fastppo.models.policy import ActorCritic
from fastppo.rollout.decoder import DecoderEngine
from fastppo.rollout.engines import make_engine
from fastppo.rollout.fixed_shapes import FixedShapes
from fastppo.rollout.generate import GenerateEngine


def _engine(policy: ActorCritic, name: str = "decoder", *, fixed_shapes: bool | None = None):
    options = {"batch_size": 3, "final_values": True, "fixed_shapes": fixed_shapes}
    return make_engine(name, policy, tiny.tokenizer(), 0, **options)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("architecture", tiny.CONFIGS)
def test_the_decoder_is_taken_where_it_decodes_as_generate_does(architecture: str, dtype) -> None:
    policy = ActorCritic(tiny.model(architecture), compute_dtype=dtype)
    engine, note = _engine(policy)
    assert isinstance(engine, DecoderEngine)
    assert (engine.batch_size, engine.final_values, note) == (3, True, None)


@pytest.mark.parametrize("wrong", ["positions", "no position ids"])
def test_a_model_that_decodes_otherwise_gets_generate_with_a_sentence(wrong: str) -> None:
    policy = ActorCritic(tiny.model())
    trunk, own = policy.causal_lm.base_model, policy.causal_lm.base_model.forward

    def forward(*args, position_ids=None, **keywords):
        if wrong == "no position ids":
            raise TypeError("forward() got an unexpected keyword argument 'position_ids'")
        return own(*args, position_ids=position_ids, **keywords)

    def generated(*args, **keywords):
        trunk.forward = own
        try:
            return generate(*args, **keywords)
        finally:
            trunk.forward = forward

    def shifted(*args, position_ids=None, **keywords):
        return forward(*args, position_ids=position_ids * 3, **keywords)

    generate = policy.causal_lm.generate
    policy.causal_lm.generate = generated
    trunk.forward = forward if wrong == "no position ids" else shifted
    engine, note = _engine(policy)
    assert isinstance(engine, GenerateEngine)
    assert note.startswith("rollout=decoder does not decode LlamaForCausalLM as Hugging Face")
    assert note.endswith("using rollout=generate")
    assert ("TypeError" if wrong == "no position ids" else "nats off") in note


@pytest.mark.parametrize("fails", [True, False])
def test_fixed_shapes_that_fail_leave_the_loop_with_a_sentence(fails: bool, monkeypatch) -> None:
    def capture(self, *args):
        raise RuntimeError("operation not permitted when stream is capturing")

    if fails:
        monkeypatch.setattr(FixedShapes, "decode", capture)
    engine, note = _engine(ActorCritic(tiny.model()), fixed_shapes=True)
    assert isinstance(engine, DecoderEngine)
    assert (engine.fixed is None, note) == (
        fails,
        "rollout=decoder decodes without CUDA graphs; with them RuntimeError: operation not "
        "permitted when stream is capturing"
        if fails
        else None,
    )
    if not fails:
        assert engine.fixed._memory is None
