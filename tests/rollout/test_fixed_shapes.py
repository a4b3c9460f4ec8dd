"""At fixed shapes the decoder draws what its loop draws, waits for nothing between two looks, and
holds its memory until it is released."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import tiny
import torch
import waits
from policies import make_policy
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fastppo.data.batch import Batch
from fastppo.models.device import linear_layers
from fastppo.models.policy import LanguageModel
from fastppo.rollout import FINISHED, TRUNCATED, Rollout, Sampling, fixed_shapes
from fastppo.rollout.decoder import DecoderEngine
from fastppo.rollout.fixed_shapes import LOOK, FixedShapes
from fastppo.rollout.prompts import PromptBatch
from fastppo.rollout.stopping import StopStrings

PROMPTS = [[5, 9, 4], [7], [8, 3, 6, 12, 20], [11, 12]]
STOP = (1,)
"""Some rows end, at different steps."""
RESTRICTED = {"top_p": 0.9, "stop_strings": ("w7 w2", "w9")}
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
STEPS = 2 * LOOK + 4


def _sampling(**options: object) -> Sampling:
    return Sampling(**({"max_new_tokens": STEPS, "stop_token_ids": STOP} | options))


def _engine(policy: LanguageModel, fixed: bool = True, **options: object) -> DecoderEngine:
    tokenizer = tiny.tokenizer()
    return DecoderEngine(
        policy, final_values=True, tokenizer=tokenizer, fixed_shapes=fixed, **options
    )


def _draw(engine: DecoderEngine, seed: int = 0, prompts=PROMPTS, **options: object) -> Rollout:
    torch.manual_seed(seed)
    return engine.generate(prompts, _sampling(**options))


def _assert_same(actual: Rollout, wanted: Rollout, **tolerance: float) -> None:
    assert actual.tokens == wanted.tokens
    assert actual.finish_reasons == wanted.finish_reasons
    for name in ("logprobs", "sampler_logprobs", "values"):
        pair = (torch.cat(getattr(rollout, name)) for rollout in (actual, wanted))
        torch.testing.assert_close(*pair, **tolerance)
    torch.testing.assert_close(actual.final_values, wanted.final_values, **tolerance)


def _memory(engine: DecoderEngine):
    return engine.fixed._memory


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stop_token_ids": (1, 2, 30)},
        {"temperature": 0.6},
        {"top_k": 4},
        {"top_p": 0.7},
        {"stop_strings": ("w7 w2", "w9")},
        {"max_new_tokens": 1},
    ],
    ids=str,
)
def test_one_seed_draws_the_tokens_of_the_loop(options) -> None:
    policy = make_policy()
    reasons = []
    for seed in range(3):
        wanted = _draw(_engine(policy, fixed=False), seed, **options)
        after = torch.get_rng_state()
        _assert_same(_draw(_engine(policy), seed, **options), wanted, **CLOSE)
        assert torch.equal(torch.get_rng_state(), after)
        reasons += wanted.finish_reasons
    if not options:
        assert {*reasons} == {FINISHED, TRUNCATED}


def test_ended_rows_leave_by_halves_and_the_others_draw_the_same(monkeypatch) -> None:
    policy, shapes = make_policy("opt"), []
    wanted = _draw(_engine(policy, fixed=False))
    for name, value in {"LOOK": 2, "ROWS": 1, "TOKENS": 4}.items():
        monkeypatch.setattr(fixed_shapes, name, value)
    policy.causal_lm.base_model.register_forward_pre_hook(
        lambda module, args, keywords: shapes.append(
            (len(keywords["input_ids"]), keywords["attention_mask"].shape[1])
        ),
        with_kwargs=True,
    )
    _assert_same(_draw(_engine(policy)), wanted, **CLOSE)
    rows, tokens = zip(*shapes[1:], strict=True)
    assert len({*rows}) > 1
    assert all(after == before or 2 * after <= before for before, after in pairwise(rows))
    width = max(map(len, PROMPTS))
    assert list(tokens) == [-(-(width + i) // 4) * 4 for i in range(1, len(tokens) + 1)]
    for step, count in enumerate(rows, start=1):
        live = sum(length > step for length in wanted.lengths)
        assert count >= live
        looked = sum(length > step // 2 * 2 for length in wanted.lengths)
        assert count < 2 * max(looked, 1) or looked == 0


class _FromHost(TorchDispatchMode):
    """Operations that have a tensor of the CPU among tensors of another device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)]
        if any(x.device.type == "cpu" for x in tensors):
            self.seen.append(func.name())
        return out


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt2", "opt"])
def test_a_step_needs_nothing_of_the_host(architecture: str, monkeypatch) -> None:
    """On a device without memory, where reading a value raises, and a tensor made on the host would
    have to be copied: neither can be recorded. (An index that is a list is made out of sight.)"""
    policy = LanguageModel(tiny.model(architecture)).to("meta")
    policy.config.pad_token_id = None  # GPT-2 looks for it in prompts, to warn
    decoder = FixedShapes(policy, None, final_values=False)
    sampling = _sampling(temperature=0.7, top_k=4, top_p=0.9)
    uniforms = torch.empty(2, STEPS, dtype=torch.float64, device="meta")
    prompts = PromptBatch([[4, 5], [6, 7]], sampling, StopStrings(None, ()), uniforms)
    made_on_host, tensor = [], torch.tensor
    with torch.no_grad():
        memory = decoder._memory_for(2, 64)
        decoding = fixed_shapes._Decoding(decoder, policy.head, memory, prompts)
        with pytest.MonkeyPatch.context() as patch:  # the prompts' pass may look at its mask
            patch.setattr(Tensor, "__bool__", lambda x: False)
            decoding._draw(decoding._read_prompts())
        decoding.slots = memory.rows
        monkeypatch.setattr(
            torch,
            "tensor",
            lambda *args, **more: made_on_host.append(args) or tensor(*args, **more),
        )
        with _FromHost() as from_host:
            decoding._step(128)
    assert from_host.seen == made_on_host == []


def test_memory_is_used_again_grows_where_it_must_and_is_given_up() -> None:
    policy = make_policy(compute_dtype=torch.bfloat16)
    engine = _engine(policy)
    _draw(engine)
    memory = _memory(engine)
    assert (memory.rows, memory.tokens) == (8, 128)
    keys = memory.cache.layers[0].all_keys.data_ptr()
    _draw(engine, prompts=[[3, 4]] * 7, max_new_tokens=100)
    assert _memory(engine) is memory
    assert memory.cache.layers[0].all_keys.data_ptr() == keys
    _draw(engine, prompts=[[3, 4]] * 9)
    assert (_memory(engine).rows, _memory(engine).tokens) == (16, 128)
    held = [weakref.ref(memory.cache), weakref.ref(_memory(engine).cache)]
    held += [weakref.ref(weight) for weight in engine.fixed._cast.values()]
    assert len(held) > 10
    del memory
    gc.collect()
    gc.disable()  # nothing waits for it
    try:
        engine.release()
        given_up = [reference() for reference in held]
    finally:
        gc.enable()
    assert given_up == [None] * len(held)
    again = _draw(engine)
    _assert_same(again, _draw(_engine(policy)), rtol=0, atol=0)


@pytest.mark.parametrize("moved", ["a weight", "adapters", "nothing"])
def test_graphs_are_of_the_weights_that_they_were_recorded_of(moved: str) -> None:
    policy = make_policy(lora=True)
    engine = _engine(policy)
    _draw(engine)
    _memory(engine).graphs["recorded"] = None
    with torch.no_grad():
        weight = policy.causal_lm.base_model.layers[0].mlp.up_proj.base_layer.weight
        weight.mul_(1.01)  # as an optimiser does
        if moved == "a weight":
            weight.data = weight.data.clone()
    if moved == "adapters":
        with policy.adapters_off():
            _draw(engine)
    else:
        _draw(engine)
    assert ("recorded" in _memory(engine).graphs) == (moved == "nothing")


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "with adapters"])
def test_under_autocast_weights_are_cast_once_a_call_and_follow_an_update(architecture) -> None:
    policy = (
        make_policy(lora=True) if architecture == "with adapters" else make_policy(architecture)
    )
    policy.compute_dtype = torch.bfloat16
    engine, dtypes = _engine(policy), set()
    for module in linear_layers(policy.causal_lm.base_model):
        module.register_forward_pre_hook(lambda module, args: dtypes.add(module.weight.dtype))
    before = {name: p.data_ptr() for name, p in policy.named_parameters()}
    for scale in (1.0, 1.5):
        with torch.no_grad():
            for parameter in policy.causal_lm.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(scale)
        dtypes.clear()
        actual = _draw(engine, max_new_tokens=6)
        assert dtypes == {torch.bfloat16}
        wanted = policy.evaluate(Batch.of(PROMPTS, actual.tokens))
        # A logit z of bf16 is off by 2⁻⁸·z at most; the two ways differ by a few such steps.
        with policy.autocast():
            largest = policy.causal_lm(torch.tensor([PROMPTS[0]])).logits.abs().max().item()
        bound = 4 * 2**-8 * max(1.0, largest)
        torch.testing.assert_close(torch.cat(actual.logprobs), wanted.logprobs, rtol=0, atol=bound)
    assert {name: p.data_ptr() for name, p in policy.named_parameters()} == before
    assert {p.dtype for p in policy.parameters()} == {torch.float32}


class Replayed:
    """A decoding step as the operations that it is of, on the tensors that it reads and writes.

    With a CUDA graph it has in common that no line of Python runs again and no number of the host's
    changes.

    Args:
        step: of a batch at fixed shapes.
        memory: what the step writes to, with its cache.
    """

    def __init__(self, step: Callable[[], None], memory: Any) -> None:
        held = [x for x in vars(memory).values() if isinstance(x, Tensor)]
        held += [x for x in vars(memory.record).values() if isinstance(x, Tensor)]
        held.append(memory.cache.position)
        for layer in memory.cache.layers:
            held += [layer.all_keys, layer.all_values] if layer.is_initialized else []
        before = [x.clone() for x in held]
        self._operations = make_fx(step)()  # runs the step, and a capture runs nothing
        for x, value in zip(held, before, strict=True):
            x.copy_(value)
        self._device = memory.next.device.type

    def replay(self) -> None:
        with torch.autocast(self._device, enabled=False):  # its casts are among the operations
            self._operations()


@pytest.mark.parametrize(
    ("architecture", "dtype", "samplings"),
    [
        ("llama", None, [{}, RESTRICTED]),
        ("with adapters", torch.bfloat16, [{}]),
        pytest.param("gemma3", torch.bfloat16, [{}, RESTRICTED], marks=pytest.mark.slow),
        pytest.param("opt", torch.bfloat16, [{}, RESTRICTED], marks=pytest.mark.slow),
    ],
    ids=lambda value: "" if isinstance(value, list) else str(value),
)
def test_a_step_leaves_nothing_to_the_host(
    architecture: str, dtype, samplings: list[dict[str, Any]], monkeypatch
) -> None:
    """Replayed as operations it draws what it draws when Python runs it, over buckets and looks."""
    policy = (
        make_policy(lora=True) if architecture == "with adapters" else make_policy(architecture)
    )
    policy.compute_dtype = dtype
    engine, plain = _engine(policy), _engine(policy)
    monkeypatch.setattr(FixedShapes, "records", property(lambda self: self is engine.fixed))
    monkeypatch.setattr(
        FixedShapes, "record", lambda self, step, pool: Replayed(step, _memory(engine))
    )
    monkeypatch.setattr(fixed_shapes, "TOKENS", 16)
    monkeypatch.setattr(fixed_shapes, "ROWS", 4)
    several = PROMPTS * 2
    for options in samplings:
        for seed in range(2):  # the second from graphs alone, except for new buckets
            actual = _draw(engine, seed, several, **options)
            wanted = _draw(plain, seed, several, **options)
            assert not _memory(plain).graphs
            _assert_same(actual, wanted, rtol=0, atol=0)
    kinds = [kind for kind, graph in _memory(engine).graphs.items() if graph is not None]
    assert len({kind[0] for kind in kinds}) > 1  # buckets of rows
    assert len({kind[1] for kind in kinds}) > 1  # and of tokens


@pytest.mark.gpu
def test_graphs_follow_an_update_and_their_memory_is_given_up() -> None:
    policy = make_policy().cuda()
    engine = DecoderEngine(policy)
    first = _draw(engine)
    with torch.no_grad():
        policy.causal_lm.base_model.layers[0].mlp.up_proj.weight.mul_(-1)
    assert _draw(engine).tokens != first.tokens
    layers = _memory(engine).cache.layers
    caches = sum(states.nbytes for layer in layers for states in (layer.all_keys, layer.all_values))
    del layers
    before = torch.cuda.memory_allocated()
    engine.release()
    assert torch.cuda.memory_allocated() <= before - caches


@pytest.mark.gpu
def test_between_two_looks_a_gpu_is_not_waited_for() -> None:
    engine = DecoderEngine(make_policy().cuda())
    step = fixed_shapes._Decoding._step

    def forbidden(self, tokens: int) -> None:
        with waits.refused_by_torch():
            step(self, tokens)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fixed_shapes._Decoding, "_step", forbidden)
        assert _draw(engine).tokens
