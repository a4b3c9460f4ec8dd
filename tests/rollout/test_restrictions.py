"""Masks of tokens that may be drawn mean what they mean in Hugging Face's `generate`."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from fastppo.rollout import Sampling
from fastppo.rollout.restrictions import NO_TOKEN, kept_tokens, nucleus, repeats

SCORES = 2 * torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
HISTORY = torch.randint(0, 4, (6, 12), generator=torch.Generator().manual_seed(1))


def _kept(**options: object):
    drawn = options.pop("drawn", 0)
    sampling = Sampling(**({"max_new_tokens": 8} | options))
    return kept_tokens(SCORES, sampling, HISTORY, drawn)


def test_without_restrictions_there_is_no_mask() -> None:
    assert _kept() is None
    assert _kept(top_k=50, top_p=1.0) is None
    assert _kept(min_new_tokens=3, stop_token_ids=(1,), drawn=3) is None
    assert _kept(greedy=True, top_k=3, top_p=0.5) is None


@pytest.mark.parametrize("top_k", [0, 1, 7])
@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.93, 1.0])
def test_top_k_and_top_p_are_transformers(top_k: int, top_p: float) -> None:
    wanted = SCORES
    if top_k:
        wanted = TopKLogitsWarper(top_k)(HISTORY, wanted)
    if top_p < 1:
        wanted = TopPLogitsWarper(top_p)(HISTORY, wanted)
    found = _kept(top_k=top_k, top_p=top_p)
    if found is None:
        found = torch.ones_like(SCORES, dtype=torch.bool)
    assert torch.equal(found, wanted > -torch.inf)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_the_repetition_guard_is_transformers(size: int) -> None:
    wanted = NoRepeatNGramLogitsProcessor(size)(HISTORY, SCORES)
    found = _kept(no_repeat_ngram_size=size)
    assert torch.equal(found, wanted > -torch.inf)
    assert size == 5 or not found.all(), "there is something to forbid"


def test_padding_is_no_part_of_an_ngram() -> None:
    history = torch.tensor([[NO_TOKEN, NO_TOKEN, 3, 4], [NO_TOKEN, 3, 4, 3]])
    assert repeats(history, 2, 6).nonzero().tolist() == [[1, 4]]
    assert not repeats(history[:, -1:], 2, 6).any()


@pytest.mark.parametrize("drawn", [0, 2, 3])
def test_the_minimum_length_is_transformers(drawn: int) -> None:
    processor = MinNewTokensLengthLogitsProcessor(12, 3, [1, 4])
    wanted = processor(torch.cat([HISTORY, HISTORY[:, :drawn]], dim=1), SCORES.clone())
    found = _kept(min_new_tokens=3, stop_token_ids=(1, 4), drawn=drawn)
    assert (found is None) == (drawn == 3)
    if found is not None:
        assert torch.equal(found, wanted > -torch.inf)


def test_what_is_forbidden_is_not_among_the_top_k() -> None:
    both = _kept(top_k=3, min_new_tokens=3, stop_token_ids=tuple(range(40)))
    assert (both.sum(1) == 3).all()
    assert not both[:, :40].any()


def test_where_nothing_would_be_left_nothing_is_forbidden() -> None:
    assert _kept(min_new_tokens=3, stop_token_ids=tuple(range(50))).all()


def test_the_nucleus_has_the_likeliest_token_at_least() -> None:
    scores = torch.tensor([[0.0, 5.0, -torch.inf, 1.0]])
    assert nucleus(scores, 1e-9).tolist() == [[False, True, False, False]]
    assert nucleus(scores, 0.999999).tolist() == [[True, True, False, True]]
