"""Compiled layers give what they gave, and are compiled a few times; Liger's are compared first."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import tiny
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from fastppo.models.layers import COMPILED, compile_layers, layers_of, use_liger
from fastppo.models.policy import ActorCritic
from fastppo.rollout import Sampling
from fastppo.rollout.decoder import DecoderEngine
from fastppo.rollout.generate import GenerateEngine

pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"  # dynamo asks for it
)

LENGTHS = ((5, 3, 1), (12, 3, 7, 7), (13,), (3, 3, 8, 6, 11, 2), (17, 3, 8, 6, 11, 2, 20), (4, 9))
"""Responses of batches that differ in rows, width and longest sequence."""


@pytest.fixture(autouse=True)
def _forgotten():
    """Each test compiles anew."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _states_and_gradient(policy: ActorCritic, lengths, packed: bool):
    policy.packing = packed
    layout = policy.layout(tiny.random_batch(lengths))
    policy.zero_grad()
    with torch.no_grad():
        without = policy.hidden(layout)
    hidden = policy.hidden(layout)
    hidden.square().sum().backward()
    assert torch.equal(without, hidden)
    gradient = policy.causal_lm.get_input_embeddings().weight.grad.clone()
    return hidden.detach(), gradient


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt2", "qwen3"])
def test_shapes_that_differ_compile_nothing_after_the_first_few(architecture, packed) -> None:
    policy = ActorCritic(tiny.model(architecture))
    wanted = [_states_and_gradient(policy, each, packed) for each in LENGTHS]
    counter, counts = CompileCounter(), []
    compile_layers(policy.causal_lm.base_model, backend=counter)
    for lengths, expected in zip(LENGTHS, wanted, strict=True):
        found = _states_and_gradient(policy, lengths, packed)
        counts.append(counter.frame_count)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert 0 < counts[0] <= 4
    assert counts[-1] == counts[2] <= 10


def test_decoding_compiles_nothing() -> None:
    policy, counter = ActorCritic(tiny.model()), CompileCounter()
    prompts, sampling = [[5, 9, 4], [7]], Sampling(max_new_tokens=6, greedy=True)
    engines = [
        DecoderEngine(policy),
        DecoderEngine(policy, fixed_shapes=True),
        GenerateEngine(policy.causal_lm, 0),
    ]
    wanted = engines[0].generate(prompts, sampling).tokens
    compile_layers(policy.causal_lm.base_model, backend=counter)
    for engine in engines:
        assert engine.generate(prompts, sampling).tokens == wanted
    assert counter.frame_count == 0
    policy.hidden(tiny.random_batch().layout())
    assert counter.frame_count > 0


def test_a_trunk_that_is_no_list_of_layers_is_refused() -> None:
    trunk = tiny.model().base_model
    assert layers_of(trunk) == (trunk, trunk.layers)
    trunk.config.num_hidden_layers = 5
    with pytest.raises(ValueError, match=r"compile=true: LlamaModel is not one list of 5 layers"):
        compile_layers(trunk)
    assert not hasattr(trunk, COMPILED)


# ---------------------------------------------------------------------------------------- Liger


def _install(monkeypatch, apply) -> None:
    """A package of Liger's name, whose function for Llama is `apply`."""
    patches = ModuleType("liger_kernel.transformers.monkey_patch")
    patches.MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": apply}
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, patches.__name__, patches)


def test_liger_replaces_the_trunks_parts_and_not_the_loss(monkeypatch) -> None:
    called = {}

    def apply(
        rope=True, cross_entropy=False, fused_linear_cross_entropy=True, swiglu=True, model=None
    ):
        called.update({name: value for name, value in locals().items() if name != "called"})

    _install(monkeypatch, apply)
    causal_lm = tiny.model()
    use_liger(causal_lm)
    assert called.pop("model") is causal_lm
    assert called == {
        "rope": True,
        "swiglu": True,
        "cross_entropy": False,
        "fused_linear_cross_entropy": False,
    }


def test_kernels_that_compute_something_else_are_refused(monkeypatch) -> None:
    def apply(rms_norm=True, model=None):
        model.base_model.norm = nn.Identity()

    _install(monkeypatch, apply)
    with pytest.raises(ValueError, match=r"hidden states of LlamaModel differ by .* liger=false"):
        use_liger(tiny.model())


def test_liger_that_is_not_there_or_has_no_kernels_is_a_sentence(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(ImportError, match="pip install liger-kernel"):
        use_liger(tiny.model())
    _install(monkeypatch, lambda model: None)
    with pytest.raises(ValueError, match="nothing for gpt2 models"):
        use_liger(tiny.model("gpt2"))
