"""The benchmark suite: floors, wrong providers, cases, exponents and FLOP."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import fastppo
from benchmarks import case as case_module
from benchmarks import (
    cases,
    flop,
    losses,
    measure,
    sequences,
    training,
)
from benchmarks.case import Case, Inputs, Outputs, Peer, Provider, UnsupportedError, check
from benchmarks.shapes import MODELS, Model, Sequences, Tokens, Training, Work

# torch caches its device functions on the first device context. After conftest replaces
# torch.empty, it would cache the replacement, and meta models would take real memory.
with torch.device("meta"):
    torch.empty(0)

CPU = torch.device("cpu")
MODEL = Model("tiny", 101, 16, "llama", 32, 2, 2, 1)
TINY = Work(
    torch.float32,
    logits=(Tokens(MODEL, 12),),
    linear=(Tokens(MODEL, 12),),
    sequences=(Sequences(3, 20),),
    update=(Training(MODEL, 1, 4, 3, 4, 2),),
    sweeps=(),
)


@pytest.fixture
def gc_frozen() -> Iterator[None]:
    """Collections before memory measurements skip imported modules."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def no_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide installed peers, since their imports are slow."""
    monkeypatch.setattr(case_module, "version", lambda name: None)


# ----------------------------------------------------------------------------- floors and exponents


QWEN = Tokens(MODELS["qwen3-8b"], 8192)
QWEN_LOGITS = 8192 * 151936 * 2
"""2.49 GB of bf16."""
RESPONSES = Sequences(2, 8)
"""Lengths 8 and 6: 16 entries, 14 of them valid."""
BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("case", "bytes_moved", "flop_count"),
    [
        (losses.loss_case(QWEN, BF16), 2 * QWEN_LOGITS + 8192 * 16, 8192 * 151936 * 9),
        (losses.stats_case(QWEN, BF16), QWEN_LOGITS + 8192 * 16, 8192 * 151936 * 5),
        (
            losses.linear_loss_case(QWEN, BF16),
            2 * 2 * (8192 + 151936) * 4096 + 8192 * 16,
            6 * 8192 * 4096 * 151936,
        ),
        (
            losses.linear_logprobs_case(QWEN, BF16),
            2 * (8192 + 151936) * 4096 + 8192 * 12,
            2 * 8192 * 4096 * 151936,
        ),
        (sequences.gae_case(RESPONSES), 14 * 8 + 16 * 9, 14 * 6),
        (sequences.advantages_case(RESPONSES), 14 * 12 + 16 * 9 + 2 * 8, 14 * 14),
        (sequences.whiten_case(RESPONSES), 14 * 4 + 16 * 5, 14 * 5),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_floors_are_the_bytes_and_flop_counted_by_hand(
    case: case_module.Case, bytes_moved: int, flop_count: int
) -> None:
    assert case.bytes_moved == bytes_moved
    assert case.flop == flop_count


def test_an_updates_floor_is_five_forward_passes_and_the_optimizers_tensors() -> None:
    shape = Training(MODEL, 1, 4, 3, 4, 2)
    # Attention 16·16 for q and o, 16·8 for k and v; MLP 3·16·32; norms 16 each, 3 of them.
    trunk = 2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 32 + 3 * 16
    total = trunk + 2 * 101 * 16
    assert training.parameter_counts(shape) == (trunk, total)
    case = training.update_case(shape, torch.float32)
    assert case.bytes_moved == 7 * 4 * total
    # 4·4 of the 4·7 tokens are of the response.
    assert case.flop == 10 * (trunk * 4 * 7 + 101 * 16 * 4 * 4)


def test_the_exponent_of_a_power_law_is_its_power() -> None:
    sizes = [100.0, 200.0, 800.0]
    assert measure.growth_exponent(sizes, [3e-6 * x**1.5 for x in sizes]) == pytest.approx(1.5)
    # y = 1, 1, 4 at log₂ x = 0, 1, 2: the least-squares slope is 1 by hand.
    assert measure.growth_exponent([1.0, 2.0, 4.0], [1.0, 1.0, 4.0]) == pytest.approx(1.0)
    assert measure.growth_exponent([100.0], [1.0]) is None
    assert measure.growth_exponent([100.0, 200.0], [0.0, 0.0]) is None


# ------------------------------------------------------------------------------ checks of providers


def checked(case: Case, provider: Provider) -> float | None:
    inputs = case.draw(0, CPU)
    return check(case, provider, inputs, case.truth(inputs))


def test_a_wrong_provider_fails() -> None:
    def slightly_wrong(inputs: Inputs) -> Outputs:
        advantages, returns = sequences.loop_gae(**inputs)
        returns[2, 4] += 1e-3 * returns.abs().max()
        return {"advantages": advantages, "returns": returns}

    case = sequences.gae_case(Sequences(3, 20))
    error = checked(case, case.providers[1])
    assert error is not None
    assert 0 < error < 1e-6
    with pytest.raises(
        AssertionError,
        match=r"wrong: returns .*1\.0e-03.* row 2, column 4$",
    ):
        checked(case, Provider("wrong", slightly_wrong))
    with pytest.raises(AssertionError, match=r"empty: .*\[\]"):
        checked(case, Provider("empty", lambda inputs: {}))


@pytest.mark.parametrize("build", [losses.loss_case, losses.linear_loss_case])
def test_in_bf16_too_a_gradient_without_the_entropy_bonus_is_wrong(build: Any) -> None:
    """A bonus changes the small entries; those of the tokens are a hundred times larger."""
    shape = Tokens(MODELS["stories15m"], 64)
    case = build(shape, torch.bfloat16)

    def gradients_of(other: Case) -> Provider:
        provider = other.provider("FastPPO", CPU)

        def gradients(inputs: Inputs) -> Outputs:
            outputs = provider.call(inputs)
            return {name: x for name, x in outputs.items() if name.endswith("_grad")}

        return dataclasses.replace(provider, call=gradients)

    checked(case, gradients_of(case))
    without = build(shape, torch.bfloat16, entropy_coef=0.0)
    with pytest.raises(AssertionError, match="of its mean size"):
        checked(case, gradients_of(without))


def test_every_provider_of_ours_and_in_plain_pytorch_is_right() -> None:
    for case in cases.cases_of(TINY):
        inputs = case.draw(0, CPU)
        truth = case.truth(inputs)
        for provider in case.providers:
            if provider.name != case_module.COMPILED:
                check(case, provider, inputs, truth)
        case.release()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_unwritten_output_is_wrong(value: float) -> None:
    wrong = measure.worst_entry(torch.tensor([1.0, value]), torch.ones(2))
    assert wrong == (float("inf"), "row 1")


def test_the_worst_entry_is_found_in_a_later_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "COMPARE_ELEMENTS", 5)
    truth = torch.zeros(3, 4)
    x = truth.clone()
    x[0, 1], x[2, 3] = 1.0, -2.0
    assert measure.worst_entry(x.flatten(), truth) == (2.0, "row 2, column 3")


def test_a_case_is_named_after_its_operation() -> None:
    names = {case.name.split(",")[0] for case in cases.cases_of(TINY)}
    assert all(hasattr(fastppo, name) for name in names - {"PPO update"}), names


def test_absent_and_unsupported_peers_say_why() -> None:
    def on_a_gpu(device: torch.device) -> Provider:
        raise UnsupportedError("its kernel needs a GPU")

    peers = (
        Peer("Nobody", "no-such-package", lambda device: pytest.fail("built though absent")),
        Peer("Somebody", "torch", on_a_gpu),
    )
    case = dataclasses.replace(sequences.whiten_case(Sequences(3, 20)), peers=peers)
    assert case.provider_names[-2:] == ["Nobody", "Somebody"]
    with pytest.raises(UnsupportedError, match="pip install no-such-package"):
        case.provider("Nobody", CPU)
    with pytest.raises(UnsupportedError, match="GPU"):
        case.provider("Somebody", CPU)


@pytest.mark.usefixtures("gc_frozen")
def test_memory_is_the_peak_during_the_call() -> None:
    def call() -> torch.Tensor:
        a = torch.ones(1000)
        b = a + 1  # two are held
        del a
        return b * 2  # two again

    assert 8000 <= measure.peak_extra_memory(call, CPU) <= 8200


# ------------------------------------------------------------------------------------ sets and time


@pytest.mark.parametrize("name", MODELS)
def test_every_named_model_can_be_made(name: str) -> None:
    model = MODELS[name]
    config = training.make_config(model, 1, 32)
    meta_model = training.make_model(config, torch.device("meta"))
    assert tuple(meta_model.get_output_embeddings().weight.shape) == (model.vocab, model.hidden)


def test_flop_count_products_attention_and_the_fused_head() -> None:
    n, h, v = 6, 8, 10
    hidden, weight = torch.randn(n, h, requires_grad=True), torch.randn(v, h, requires_grad=True)
    tokens, zeros = torch.zeros(n, dtype=torch.int64), torch.zeros(n)
    with flop.counted() as counter:
        fastppo.linear_ppo_loss(hidden, weight, tokens, zeros, zeros + 1).loss.backward()
    assert counter.get_total_flops() == 6 * n * h * v
    with flop.counted() as counter:
        fastppo.linear_token_stats(hidden, weight, tokens)
    assert counter.get_total_flops() == 2 * n * h * v
    with flop.counted() as counter:
        (hidden @ weight.T).sum().backward()
    assert counter.get_total_flops() == 6 * n * h * v
    query = torch.randn(1, 2, n, 4, requires_grad=True)
    with flop.counted() as counter:
        torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
    assert counter.get_total_flops() == 2 * 2 * (2 * n * n * 4)
