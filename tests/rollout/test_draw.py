"""Sampling: distribution, logprobs and excluded tokens."""

from __future__ import annotations

import math

import pytest
import torch
from fastppo_kernels import definition
from torch import Tensor
from transformers import TopKLogitsWarper, TopPLogitsWarper

from fastppo.rollout import Sampling
from fastppo.rollout.draw import (
    BLOCK,
    CANDIDATES,
    _inverse_cdf,
    draw,
    kept_tokens,
    nucleus,
    scratch_for,
)

DRAWS = 200_000


def _uniforms(count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, dtype=torch.float64, generator=generator)


def _draws(scores: Tensor, keep: Tensor | None = None) -> Tensor:
    """Draw [DRAWS] tokens from scores [V] as `draw` does, with one softmax for all of them."""
    if keep is not None:
        scores = scores.masked_fill(~keep, -torch.inf)
    scratch = scratch_for(scores.unsqueeze(0))
    draw(scores.unsqueeze(0), _uniforms(1), scratch=scratch)
    blocks = scratch.view(1, -1, BLOCK)
    sums = blocks.sum(2).double()
    tokens = []
    for u in _uniforms(DRAWS).unsqueeze(1).split(20_000):
        tokens.append(
            _inverse_cdf(sums.expand(len(u), -1), blocks.expand(len(u), -1, -1), u).squeeze(1)
        )
    return torch.cat(tokens)


def _chi_squared(tokens: Tensor, probabilities: Tensor) -> tuple[float, int]:
    """Return (χ², degrees of freedom). Tokens expected fewer than ten times share classes."""
    expected = DRAWS * probabilities.double()
    order = expected.argsort()
    counts = torch.bincount(tokens, minlength=len(expected)).double()[order]
    classes = (expected[order].cumsum(0) / 10).floor().long()
    rare = expected[order] < 10
    classes = torch.where(rare, classes, classes.max() + 1 + torch.arange(len(order)))
    _, index = classes.unique(return_inverse=True)
    zeros = torch.zeros(int(index.max()) + 1, dtype=torch.float64)
    wanted = zeros.index_add(0, index, expected[order])
    drawn = zeros.index_add(0, index, counts)
    there = wanted > 1
    return (
        ((drawn - wanted)[there] ** 2 / wanted[there]).sum().item(),
        int(there.sum()) - 1,
    )


@pytest.mark.parametrize(
    ("vocabulary", "temperature"),
    [(3, 1.0), (1000, 0.5), (1000, 2.0), pytest.param(151936, 1.0, marks=pytest.mark.slow)],
)
def test_token_frequencies_follow_the_softmax(vocabulary: int, temperature: float) -> None:
    """χ² within five standard deviations of its mean, n ± 5·√(2n)."""
    logits = 3 * torch.randn(vocabulary, generator=torch.Generator().manual_seed(1))
    scores = logits / temperature
    statistic, freedom = _chi_squared(_draws(scores), scores.double().softmax(0))
    assert freedom >= min(vocabulary - 1, 20)
    assert abs(statistic - freedom) < 5 * math.sqrt(2 * freedom) + 3


def test_rows_of_a_batch_have_their_own_distributions() -> None:
    scores = 2 * torch.randn(2, 600, generator=torch.Generator().manual_seed(9))
    wide = scores.repeat_interleave(DRAWS // 100, 0)
    tokens = torch.cat(
        [
            draw(wide, uniforms).tokens.view(2, -1)
            for uniforms in _uniforms(2 * DRAWS).split(len(wide))
        ],
        1,
    )
    for row in range(2):
        statistic, freedom = _chi_squared(tokens[row], scores[row].double().softmax(0))
        assert abs(statistic - freedom) < 5 * math.sqrt(2 * freedom) + 3


@pytest.mark.parametrize("vocabulary", [3, 300, 50257])
def test_masked_logits_are_never_drawn(vocabulary: int) -> None:
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(2))
    out = torch.rand(vocabulary, generator=torch.Generator().manual_seed(3)) < 0.5
    out[-2:], out[0], out[1 if vocabulary > 3 else 0] = True, vocabulary > 3, False
    scores = logits.masked_fill(out, -torch.inf)
    assert not out[_draws(scores)].any()


def test_uniforms_at_0_and_below_1() -> None:
    """u·total may round up to total, and 0 is below every token's mass."""
    rows = torch.full((4, 3 * BLOCK + 7), -torch.inf)
    rows[:2, 5] = rows[:2, BLOCK + 3] = 0.0
    rows[2:, 0] = rows[2:, -1] = 0.0
    edge = torch.tensor([0.0, 1 - 2**-53, 0.0, 1 - 2**-53], dtype=torch.float64)
    assert draw(rows, edge).tokens.tolist() == [5, BLOCK + 3, 0, 3 * BLOCK + 6]


def test_probabilities_below_the_resolution_of_fp32() -> None:
    """The last token has p = e⁻²⁰; u is just before and just inside its interval."""
    scores = torch.zeros(1, 2 * BLOCK)
    scores[0, :-1] = -30.0
    scores[0, 0] = 20.0
    p = math.exp(-20) / (1 + math.exp(-20) + (2 * BLOCK - 2) * math.exp(-50))
    for share, wanted in ((0.9, 2 * BLOCK - 1), (1.1, 0)):
        u = torch.tensor([1 - share * p], dtype=torch.float64)
        assert draw(scores, u).tokens.item() == wanted, share
        assert u.float().double().item() != u.item(), "fp32 cannot resolve it"


@pytest.mark.parametrize(("vocabulary", "offset"), [(3, 0.0), (50257, 1000.0), (151936, -1000.0)])
def test_logprobs_are_those_of_fp64(vocabulary: int, offset: float) -> None:
    generator = torch.Generator().manual_seed(4)
    scores = 4 * torch.randn(8, vocabulary, generator=generator) + offset
    draws = draw(scores, _uniforms(8))
    exact = scores.double().log_softmax(1).gather(1, draws.tokens.unsqueeze(1)).squeeze(1)
    # fp32 block sums: a few 2⁻²⁴ of the total
    torch.testing.assert_close(draws.logprobs.double(), exact, rtol=1e-6, atol=1e-6)
    assert torch.equal(draws.sampler_logprobs, draws.logprobs)


@pytest.mark.parametrize("vocabulary", [5, 1000])
def test_restricted_logprobs_differ_by_the_kept_mass(vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(5)
    scores = 2 * torch.randn(64, vocabulary, generator=generator)
    keep = torch.rand(64, vocabulary, generator=generator) < 0.5
    keep[:, 1] = True
    draws = draw(scores, _uniforms(64), keep=keep)
    at = draws.tokens.unsqueeze(1)
    assert keep.gather(1, at).all()
    exact = scores.double().log_softmax(1)
    left = (exact.exp() * keep).sum(1).log()
    torch.testing.assert_close(
        draws.logprobs.double(), exact.gather(1, at).squeeze(1), rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(
        (draws.logprobs - draws.sampler_logprobs).double(), left, rtol=1e-5, atol=1e-5
    )


def test_restricted_frequencies_follow_the_kept_softmax() -> None:
    scores = 2 * torch.randn(700, generator=torch.Generator().manual_seed(6))
    keep = torch.arange(700) % 3 == 0
    statistic, freedom = _chi_squared(
        _draws(scores, keep), scores.masked_fill(~keep, -torch.inf).double().softmax(0)
    )
    assert abs(statistic - freedom) < 5 * math.sqrt(2 * freedom) + 3


def test_kept_scores_may_be_far_below_the_excluded_ones() -> None:
    scores = torch.full((1, 600), -500.0)
    scores[0, 7], scores[0, 400] = 0.0, -499.0
    keep = torch.ones(1, 600, dtype=torch.bool)
    keep[0, 7] = False
    draws = draw(scores, None, keep=keep)
    assert draws.tokens.item() == 400
    assert draws.logprobs.item() == pytest.approx(-499, rel=1e-6)
    assert draws.sampler_logprobs.item() == pytest.approx(-math.log(1 + 598 / math.e), rel=1e-5)


def test_logits_that_are_not_finite_give_nan_logprobs() -> None:
    """The run then stops at the check of the loss instead of failing with an index out of range."""
    scores = torch.zeros(4, 600)
    scores[0, 3], scores[1, 4], scores[2] = torch.nan, torch.inf, -torch.inf
    draws = draw(scores, _uniforms(4))
    assert draws.logprobs.isnan().tolist() == [True, True, True, False]
    assert ((draws.tokens >= 0) & (draws.tokens < 600)).all()


# ------------------------------------------------------------------------------- top-k and top-p

SCORES = 2 * torch.randn(6, 50, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("options", [{}, {"top_k": 50}, {"greedy": True, "top_k": 3, "top_p": 0.5}])
def test_unrestricted_sampling_has_no_mask(options: dict) -> None:
    assert kept_tokens(SCORES, Sampling(max_new_tokens=8, **options)) is None


@pytest.mark.parametrize(
    ("top_k", "top_p"), [(1, 1.0), (7, 1.0), (0, 0.01), (0, 0.5), (7, 0.5), (7, 0.93)]
)
def test_top_k_and_top_p_are_transformers(top_k: int, top_p: float) -> None:
    wanted = SCORES
    if top_k:
        wanted = TopKLogitsWarper(top_k)(None, wanted)
    if top_p < 1:
        wanted = TopPLogitsWarper(top_p)(None, wanted)
    keep = kept_tokens(SCORES, Sampling(max_new_tokens=8, top_k=top_k, top_p=top_p))
    assert keep is not None
    assert torch.equal(keep, wanted > -torch.inf)


@pytest.mark.parametrize("spread", [4.0, 0.1])
def test_a_nucleus_of_a_large_vocabulary_is_transformers(spread: float) -> None:
    """In peaked rows the nucleus is among the candidates; in flat rows it is larger."""
    generator = torch.Generator().manual_seed(10)
    scores = spread * torch.randn(4, 8 * CANDIDATES, generator=generator, dtype=torch.float64)
    keep = nucleus(scores, 0.9)
    assert torch.equal(keep, TopPLogitsWarper(0.9)(None, scores) > -torch.inf)
    assert ((keep.sum(1) < CANDIDATES) == (spread == 4.0)).all()


def test_the_nucleus_has_at_least_the_likeliest_token() -> None:
    scores = torch.tensor([[0.0, 5.0, -torch.inf, 1.0]])
    assert nucleus(scores, 1e-9).tolist() == [[False, True, False, False]]
    assert nucleus(scores, 0.999999).tolist() == [[True, True, False, True]]


def test_a_uniform_that_rounds_to_1_draws_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device without fp64 gets fp32 uniforms, and some of them are 1."""
    monkeypatch.setattr(definition, "WITHOUT_FP64", ("cpu",))
    for vocabulary in (BLOCK, 3 * BLOCK):
        drawn = draw(torch.zeros(1, vocabulary), torch.ones(1))
        assert drawn.tokens.item() == vocabulary - 1
