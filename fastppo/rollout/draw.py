"""Drawing tokens from logits, with the logprob of each, in one pass over the vocabulary.

An inverse CDF in two levels. With `e = exp(s − max s)` of the scores `s = z/T`,

    total = Σ e      block = first b with Σ_{b' ≤ b} Σ e > u·total      token = the same inside it
    logprob = s_y − max s − log total

Sums of blocks are added in fp64, and the uniforms are fp64: with fp32 ones every token with a
probability below 2⁻²⁴ would be drawn too often or never. Nothing of size [B, V] is formed but `e`,
and no second softmax is needed for the logprob: `torch.multinomial` and that softmax are more than
half of a rollout on a CPU where the vocabulary is large.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastppo.rollout import Sampling

BLOCK = 256
"""Tokens of a block: about the square root of the larger vocabularies, so that the two levels cost
the same."""

CANDIDATES = 1024
"""On a CPU a nucleus is looked for among so many of the likeliest tokens first: to find them takes
2.4 ms of eight rows of 32000 where the whole sort takes 18 (one thread)."""


class Draws(NamedTuple):
    """[B] each: a token per row, and its logprobs in fp32, nats."""

    tokens: Tensor
    logprobs: Tensor
    """Under softmax(scores)."""
    sampler_logprobs: Tensor
    """Under softmax(scores) over the tokens that were left."""


def draw_next(
    logits: Tensor, sampling: Sampling, uniforms: Tensor | None, *, scratch: Tensor
) -> Draws:
    """One token per row, of logits [B, V] fp32, as `sampling` says; the other arguments are those
    of `draw`."""
    scores = logits if sampling.temperature == 1 else logits / sampling.temperature
    return draw(scores, uniforms, keep=kept_tokens(scores, sampling), scratch=scratch)


def draw(
    scores: Tensor,
    uniforms: Tensor | None,
    *,
    keep: Tensor | None = None,
    scratch: Tensor | None = None,
) -> Draws:
    """One token per row.

    Args:
        scores: [B, V] fp32 logits divided by the temperature; −inf is never drawn. A row with NaN
            or +inf, or with −inf alone, gets token 0 and logprob NaN.
        uniforms: [B] fp64 in [0, 1); None takes the likeliest token.
        keep: [B, V] bool, False on tokens that may not be drawn; None keeps all.
        scratch: of `scratch_for`, with B rows or more: memory that need not be allocated anew.
    """
    if keep is not None:
        # What is left may be far below what is not, so it gets a maximum of its own.
        left = draw(scores.masked_fill(~keep, -torch.inf), uniforms, scratch=scratch)
        chosen = scores.gather(1, left.tokens.unsqueeze(1)).squeeze(1)
        return left._replace(logprobs=chosen - scores.logsumexp(1))
    rows, vocabulary = scores.shape
    padded = (scratch_for(scores) if scratch is None else scratch)[:rows]
    exponentials = padded[:, :vocabulary]
    blocks = padded.view(rows, -1, BLOCK)
    highest = scores.amax(1, keepdim=True)
    torch.sub(scores, highest, out=exponentials).exp_()
    sums = blocks.sum(2).double()
    if uniforms is None:
        tokens = exponentials.argmax(1, keepdim=True)
    else:
        tokens = _inverse_cdf(sums, blocks, uniforms.unsqueeze(1))
    above = (scores.gather(1, tokens) - highest).squeeze(1).double()
    logprobs = (above - sums.sum(1).log_()).float()
    return Draws(tokens.squeeze(1), logprobs=logprobs, sampler_logprobs=logprobs)


def kept_tokens(scores: Tensor, sampling: Sampling) -> Tensor | None:
    """[B, V] bool, True where a token may be drawn; None where all may.

    As in Hugging Face `generate`: top-k first, then top-p of what top-k left.

    Args:
        scores: [B, V] logits divided by the temperature.
    """
    if sampling.greedy:
        return None
    keep = None
    if 0 < sampling.top_k < scores.shape[1]:
        keep = scores >= scores.topk(sampling.top_k, dim=1).values[:, -1:]
    if sampling.top_p < 1:
        left = scores if keep is None else scores.masked_fill(~keep, -torch.inf)
        keep = nucleus(left, sampling.top_p)
    return keep


def nucleus(scores: Tensor, top_p: float) -> Tensor:
    """[B, V] bool: the likeliest tokens up to the one with which their probability reaches
    `top_p`. Source: Holtzman et al. 2020, section 3.1."""
    probabilities, tokens = _likeliest_first(scores, top_p)
    before = probabilities.cumsum(1) - probabilities
    inside = (before < top_p) & (probabilities > 0)
    inside[:, 0] = True
    return torch.zeros_like(scores, dtype=torch.bool).scatter(1, tokens, inside)


def _likeliest_first(scores: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """(probabilities, tokens) in falling order: [B, V], or fewer columns that hold `top_p`."""
    # On a GPU the host would wait to learn whether the candidates are enough.
    if scores.device.type == "cpu" and scores.shape[1] > CANDIDATES:
        likeliest, tokens = scores.topk(CANDIDATES, dim=1)
        probabilities = (likeliest - scores.logsumexp(1, keepdim=True)).exp()
        if (probabilities.sum(1) >= top_p).all():
            return probabilities, tokens
    ordered, tokens = scores.sort(dim=1, descending=True)
    return ordered.softmax(1), tokens


def scratch_for(scores: Tensor) -> Tensor:
    """[B, whole blocks] fp32 zeros: the tokens beyond V stay at 0, and so are never drawn."""
    rows, vocabulary = scores.shape
    return torch.zeros(rows, -(-vocabulary // BLOCK) * BLOCK, device=scores.device)


def _inverse_cdf(sums: Tensor, blocks: Tensor, uniforms: Tensor) -> Tensor:
    """[B, 1] tokens: the block in which u falls, then the token inside it.

    Args:
        sums: [B, blocks] fp64; blocks: [B, blocks, BLOCK]; uniforms: [B, 1] fp64.
    """
    if sums.shape[1] == 1:
        return _first_beyond(blocks.squeeze(1).double().cumsum(1), uniforms)
    upto = sums.cumsum(1)
    block = _first_beyond(upto, uniforms)
    own = sums.gather(1, block)
    rest = (uniforms * upto[:, -1:] - upto.gather(1, block) + own) / own
    inside = blocks.gather(1, block.unsqueeze(2).expand(-1, 1, BLOCK)).squeeze(1)
    return block * BLOCK + _first_beyond(inside.double().cumsum(1), rest)


def _first_beyond(upto: Tensor, uniforms: Tensor) -> Tensor:
    """[B, 1]: the first index at which the running sum [B, n] is beyond u of the whole.

    What is there is not 0: the target is held below the whole sum, which `u·total` may round up to.
    """
    total = upto[:, -1:]
    target = (uniforms * total).clamp_(min=0)
    target = torch.minimum(target, total * (1 - 2**-52))
    return (upto <= target).sum(1, keepdim=True)
