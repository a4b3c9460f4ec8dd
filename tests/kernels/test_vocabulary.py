"""Rows whose vocabulary lies in parts: joined they are the whole's, their gradients its columns.

Against the definition in fp64 on the whole row, with the tolerances of rows.py. `p_others`, and the
logprob of a sure policy, are held to 1e-5 of themselves: digits that 1 − p does not have.
"""

from __future__ import annotations

import math
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from fastppo_kernels import definition, torch_rows, vocabulary
from fastppo_kernels.records import (
    ELSEWHERE,
    LOWEST,
    Projection,
    Softmax,
    StatsGradients,
    TokenStats,
)
from rows import PLAIN, assert_gradient, assert_statistic
from torch import Tensor

triton_rows = pytest.importorskip("fastppo_kernels.triton_rows", reason="Triton is not installed")
triton_linear_stats = pytest.importorskip("fastppo_kernels.triton_linear_stats")

pytestmark = [
    # NumPy announces what the kernels mean to happen: see test_triton_rows.py.
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
    pytest.mark.filterwarnings("ignore:All-NaN:RuntimeWarning"),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cuda":  # there the same tests run the compiled kernels
    pytestmark.append(pytest.mark.gpu)

BACKENDS = pytest.mark.parametrize("backend", [torch_rows, triton_rows], ids=("torch", "triton"))
N, V = 4, 1004
CUTS = {"two parts": (0, 400, V), "three parts": (0, 16, 607, V)}
EACH = torch.linspace(0.5, 2.0, N)
SOFTMAX = {
    "plain": PLAIN,
    "temperature per token": Softmax(temperatures=EACH),
    "scale": Softmax(0.7, None, 1.5),
    "soft-cap": Softmax(1.0, EACH, 1.5, 8.0),
}


def draw(peak: float | None = None) -> tuple[Tensor, Tensor]:
    """(logits [N, V], tokens), a token in each part; `peak`: it stands as many nats above all."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(N, V, generator=g)
    tokens = torch.tensor([15, 399, 606, V - 1])
    if peak is not None:
        logits *= 0.5
        logits[torch.arange(N), tokens] = logits.amax(-1) + peak
    return logits, tokens


def here(tokens: Tensor, start: int, end: int) -> Tensor:
    """The tokens of the columns start to end − 1, as that part counts them."""
    return torch.where((tokens >= start) & (tokens < end), tokens - start, ELSEWHERE)


def parts_of(
    cut: tuple[int, ...], backend: ModuleType, logits: Tensor, tokens: Tensor, softmax: Softmax,
    ref_logits: Tensor | None = None,
) -> list[TokenStats]:  # fmt: skip
    found = []
    for start, end in pairwise(cut):
        ref = None if ref_logits is None else ref_logits[:, start:end].to(DEVICE)
        own, of = logits[:, start:end].to(DEVICE), on_device(softmax)
        at = here(tokens, start, end).to(DEVICE)
        found.append(backend.token_stats(own, at, of, ref_logits=ref))
    return found


def on_device(record: Any) -> Any:
    return type(record)(*(x.to(DEVICE) if isinstance(x, Tensor) else x for x in record))


def in_fp64(softmax: Softmax) -> Softmax:
    each = softmax.temperatures
    return softmax._replace(temperatures=None if each is None else each.double())


def gradient_of_parts(
    cut: tuple[int, ...], backend: ModuleType, grads: StatsGradients, logits: Tensor,
    tokens: Tensor, joined: TokenStats, softmax: Softmax, ref_logits: Tensor | None = None,
) -> Tensor:  # fmt: skip
    columns = [
        backend.token_stats_backward(
            on_device(grads),
            logits[:, start:end].to(DEVICE),
            here(tokens, start, end).to(DEVICE),
            joined,
            on_device(softmax),
            ref_logits=None if ref_logits is None else ref_logits[:, start:end].to(DEVICE),
        )
        for start, end in pairwise(cut)
    ]
    return torch.cat(columns, 1)


def check(
    cut: tuple[int, ...], backend: ModuleType, logits: Tensor, tokens: Tensor,
    softmax: Softmax = PLAIN, ref_logits: Tensor | None = None,
) -> TokenStats:  # fmt: skip
    """Joined statistics and their gradients against those of the whole rows."""
    whole = logits.double().requires_grad_()
    ref = None if ref_logits is None else ref_logits.double()
    wanted = definition.token_stats(whole, tokens, in_fp64(softmax), ref_logits=ref)
    parts = parts_of(cut, backend, logits, tokens, softmax, ref_logits)
    joined = vocabulary.join(parts, on_device(softmax), has_reference=ref is not None)
    for name, one, other in zip(wanted._fields, joined, wanted, strict=True):
        assert one.dtype == torch.float32
        assert_statistic(one, other, name)
    sure = wanted.logprobs > -0.5
    digits = {"rtol": 1e-5, "atol": 0.0, "check_dtype": False}
    torch.testing.assert_close(joined.p_others.cpu(), wanted.p_others.detach(), **digits)
    torch.testing.assert_close(
        joined.logprobs.cpu()[sure], wanted.logprobs.detach()[sure], **digits
    )
    g = torch.linspace(-1, 1, 3 * N).view(3, N)
    grads = StatsGradients(g[0], g[1], None if ref is None else g[2])
    pairs = [(x, y.double()) for x, y in zip(wanted[:3], grads, strict=True) if y is not None]
    (wanted_grad,) = torch.autograd.grad([x for x, _ in pairs], whole, [y for _, y in pairs])
    found = gradient_of_parts(cut, backend, grads, logits, tokens, joined, softmax, ref_logits)
    assert_gradient(found, wanted_grad)
    return joined


@BACKENDS
@pytest.mark.parametrize("softmax", SOFTMAX)
@pytest.mark.parametrize("cut", CUTS)
def test_parts_join_to_the_whole(cut: str, softmax: str, backend: ModuleType) -> None:
    logits, tokens = draw()
    check(CUTS[cut], backend, 3 * logits, tokens, SOFTMAX[softmax])


@BACKENDS
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("nats", [12.0, 20.0])
def test_a_sure_policy_keeps_its_digits(nats: float, cut: str, backend: ModuleType) -> None:
    logits, tokens = draw(nats)
    check(CUTS[cut], backend, logits, tokens)
    check(CUTS[cut], backend, logits, tokens.roll(1))


@BACKENDS
@pytest.mark.parametrize("offset", [-1000.0, 1000.0])
def test_an_offset_costs_no_digits(offset: float, backend: ModuleType) -> None:
    logits, tokens = draw(12.0)
    check(CUTS["three parts"], backend, (logits * 8).round() / 8 + offset, tokens)


@BACKENDS
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("distance", [1.0, 1e-3])
def test_the_full_kl_joins_too(distance: float, cut: str, backend: ModuleType) -> None:
    """Near the reference as well, where log sums would cancel."""
    logits, tokens = draw()
    ref = logits + distance * torch.randn(N, V, generator=torch.Generator().manual_seed(1))
    check(CUTS[cut], backend, logits, tokens, ref_logits=ref)


@BACKENDS
def test_a_part_that_is_ruled_out_has_no_share(backend: ModuleType) -> None:
    """Of the policy alone, of both, and of the reference alone, where the KL is infinite."""
    logits, tokens = draw()
    ref = logits.roll(1, 0).clone()
    start, end = CUTS["three parts"][1:3]
    logits[:2, start:end] = -torch.inf
    ref[1:3, start:end] = -torch.inf
    tokens[:3] = torch.tensor([3, 900, 4])
    of = on_device(PLAIN)
    parts = parts_of(CUTS["three parts"], backend, logits, tokens, PLAIN, ref)
    joined = vocabulary.join(parts, of, has_reference=True)
    wanted = definition.token_stats(logits.double(), tokens, PLAIN, ref_logits=ref.double())
    for name, one, other in zip(wanted._fields, joined, wanted, strict=True):
        assert_statistic(one, other, name)
    assert joined.kl.isinf().tolist() == [False, False, True, False]
    assert (parts[1].normalizer[:2, 1] == -torch.inf).all()


@BACKENDS
def test_a_part_that_is_not_a_number_shows(backend: ModuleType) -> None:
    logits, tokens = draw()
    logits[2, 5] = torch.nan
    joined = vocabulary.join(
        parts_of(CUTS["three parts"], backend, logits, tokens, PLAIN), on_device(PLAIN)
    )
    for x in (joined.logprobs, joined.entropy, joined.p_others):
        assert x.isnan().tolist() == [False, False, True, False]


@BACKENDS
@pytest.mark.parametrize("softmax", SOFTMAX)
def test_a_token_that_is_elsewhere_has_no_share_here(softmax: str, backend: ModuleType) -> None:
    """The other statistics are as if the row had some other token."""
    logits, tokens = draw()
    of = on_device(SOFTMAX[softmax])
    nowhere = torch.full_like(tokens, ELSEWHERE)
    found = backend.token_stats(logits.to(DEVICE), nowhere.to(DEVICE), of)
    with_token = backend.token_stats(logits.to(DEVICE), tokens.to(DEVICE), of)
    torch.testing.assert_close(found.logprobs, torch.full_like(found.logprobs, LOWEST))
    torch.testing.assert_close(found.p_others, torch.ones_like(found.p_others))
    for name in ("entropy", "normalizer"):
        assert_statistic(getattr(found, name), getattr(with_token, name), name)


@pytest.mark.parametrize("softmax", SOFTMAX)
@pytest.mark.parametrize("nats", [None, 12.0, 20.0])
def test_heads_in_parts_join_to_the_whole_one(nats: float | None, softmax: str) -> None:
    """The kernel that holds no logits. An identity for the hidden states: weights are logits."""
    logits, tokens = draw(nats)
    hidden, cut = torch.eye(16)[:N].to(DEVICE), CUTS["three parts"]
    weight = torch.zeros(V, 16)
    weight[:, :N] = logits.T
    of = on_device(SOFTMAX[softmax])
    parts = [
        triton_linear_stats.linear_token_stats(
            Projection(hidden, weight[start:end].to(DEVICE)),
            here(tokens, start, end).to(DEVICE),
            of,
        )
        for start, end in pairwise(cut)
    ]
    joined = vocabulary.join(parts, of)
    wanted = definition.token_stats(logits.double(), tokens, in_fp64(SOFTMAX[softmax]))
    for name, one, other in zip(wanted._fields, joined, wanted, strict=True):
        assert_statistic(one, other, name)
    torch.testing.assert_close(joined.p_others.cpu().double(), wanted.p_others, rtol=1e-5, atol=0.0)


def test_one_part_is_the_whole() -> None:
    logits, tokens = draw(12.0)
    whole = torch_rows.token_stats(logits, tokens, PLAIN)
    for one, other in zip(vocabulary.join([whole], PLAIN), whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("token", [-1, -2, -100])
def test_what_people_pad_with_is_not_a_number_in_the_kernels(token: int) -> None:
    """Nobody looks at the values of a GPU's tokens: a wrong one must show."""
    logits, tokens = draw()
    tokens[0] = token
    found = triton_rows.token_stats(logits.to(DEVICE), tokens.to(DEVICE), on_device(PLAIN))
    assert found.logprobs.isnan().tolist() == [True] + [False] * (N - 1)


@BACKENDS
def test_a_row_of_minus_infinity_alone_joins_to_what_it_is_in_one_piece(
    backend: ModuleType,
) -> None:
    logits, tokens = draw()
    logits[0] = -math.inf
    joined = vocabulary.join(parts_of(CUTS["two parts"], backend, logits, tokens, PLAIN), PLAIN)
    for name in ("logprobs", "entropy", "p_others"):
        assert getattr(joined, name).isnan().tolist() == [True] + [False] * (N - 1)
    assert joined.normalizer[0].tolist() == [-math.inf, -math.inf]
