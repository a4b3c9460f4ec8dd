"""Which tokens may be drawn: top-k, top-p, a minimum length, and the repetition guard.

Each is a mask over the vocabulary, so the draw can say what probability was left (`rollout.draw`).
They mean what they mean in Hugging Face `generate`, in its order: first what is forbidden, then
top-k, then top-p of what top-k left.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastppo.rollout import Sampling

NO_TOKEN = -1
"""Stands where a row has no token: in a history, padding on the left."""


def kept_tokens(
    scores: Tensor, sampling: Sampling, history: Tensor | None, drawn: int
) -> Tensor | None:
    """[B, V] bool, True where a token may be drawn; None where all may.

    Args:
        scores: [B, V] logits divided by the temperature.
        history: [B, L] int64, prompt and response so far, `NO_TOKEN` on the left; the repetition
            guard alone reads it.
        drawn: response tokens so far, the same for each row.
    """
    keep = None
    if drawn < sampling.min_new_tokens and sampling.stop_token_ids:
        keep = torch.ones_like(scores, dtype=torch.bool)
        for token in sampling.stop_token_ids:  # a list of them would be copied to the device
            keep[:, token] = False
    if sampling.no_repeat_ngram_size > 0:
        assert history is not None
        keep = torch.ones_like(scores, dtype=torch.bool) if keep is None else keep
        keep &= ~repeats(history, sampling.no_repeat_ngram_size, scores.shape[1])
    if keep is not None:
        keep |= ~keep.any(1, keepdim=True)  # something has to be drawn
    if sampling.greedy:
        return keep
    if 0 < sampling.top_k < scores.shape[1]:
        left = scores if keep is None else scores.masked_fill(~keep, -torch.inf)
        top = left >= left.topk(sampling.top_k, dim=1).values[:, -1:]
        keep = top if keep is None else keep & top
    if sampling.top_p < 1:
        left = scores if keep is None else scores.masked_fill(~keep, -torch.inf)
        keep = nucleus(left, sampling.top_p)
    return keep


def repeats(history: Tensor, size: int, vocabulary: int) -> Tensor:
    """[B, V] bool: tokens that would complete an n-gram of `size` that history [B, L] has."""
    found = torch.zeros(len(history), vocabulary, dtype=torch.bool, device=history.device)
    if history.shape[1] < size:
        return found
    ngrams = history.unfold(1, size, 1)
    last = history[:, history.shape[1] - size + 1 :]
    same = (ngrams[:, :, :-1] == last.unsqueeze(1)).all(-1)
    row, at = same.nonzero(as_tuple=True)
    found[row, ngrams[row, at, -1]] = True
    return found


def nucleus(scores: Tensor, top_p: float) -> Tensor:
    """[B, V] bool: the likeliest tokens up to the one with which their probability reaches
    `top_p`. Source: Holtzman et al. 2020, section 3.1."""
    ordered, index = scores.sort(dim=1, descending=True)
    probabilities = ordered.softmax(1)
    before = probabilities.cumsum(1) - probabilities
    inside = (before < top_p) & (ordered > -torch.inf)
    inside[:, 0] = True
    return torch.zeros_like(inside).scatter(1, index, inside)
