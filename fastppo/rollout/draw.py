"""Sample tokens and their logprobs from logits, in one pass over the vocabulary.

The sampler inverts the CDF in two levels. With scores `s = z/T` and `e = exp(s − max s)`,

    total = Σ e      block = first b with Σ_{b' ≤ b} Σ e > u·total      token = the same inside it
    logprob = s_y − max s − log total

Sums of blocks and uniforms are fp64: with fp32 uniforms, tokens with a probability below 2⁻²⁴
would be sampled too often or never. `e` is the only [B, V] temporary, and the logprob needs no
second softmax. With a large vocabulary on a CPU, `torch.multinomial` and that softmax take more
than half of a rollout's time.

On a GPU, where these operations are some twenty launches per token, `fastppo_kernels.triton.draw`
does the same in one.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import NamedTuple

import torch
from fastppo_kernels.definition import wide
from torch import Tensor

from fastppo.rollout import Sampling

BLOCK = 256
"""Tokens per block: about the square root of a large vocabulary, so that both levels cost the
same."""

CANDIDATES = 1024
"""Number of likeliest tokens in which a CPU first looks for the nucleus. For 8 rows of 32000, top-k
takes 2.4 ms and a full sort 18 ms (one thread)."""


class Draws(NamedTuple):
    """One token per row and its logprobs, [B] each; logprobs are fp32, nats."""

    tokens: Tensor
    logprobs: Tensor
    """Logprobs under softmax(scores)."""
    sampler_logprobs: Tensor
    """Logprobs under softmax(scores) over the kept tokens."""


def draw_next(
    logits: Tensor, sampling: Sampling, uniforms: Tensor | None, *, scratch: Tensor
) -> Draws:
    """Sample one token per row of logits [B, V] fp32 with the options of `sampling`.

    The other arguments are those of `draw`.
    """
    scores = logits if sampling.temperature == 1 else logits / sampling.temperature
    return draw(scores, uniforms, keep=kept_tokens(scores, sampling), scratch=scratch)


def draw(
    scores: Tensor,
    uniforms: Tensor | None,
    *,
    keep: Tensor | None = None,
    scratch: Tensor | None = None,
) -> Draws:
    """Sample one token per row.

    Args:
        scores: [B, V] fp32 logits divided by the temperature; −inf is never drawn. A row with NaN
            or +inf, or with only −inf, gets token 0 and logprob NaN.
        uniforms: [B] fp64 in [0, 1); None takes the likeliest token.
        keep: [B, V] bool, False on excluded tokens; None keeps all.
        scratch: a buffer of `scratch_for` with at least B rows, to reuse.
    """
    if keep is not None:
        # Kept scores may be far below the excluded ones, so take the maximum over the kept ones.
        kept = draw(scores.masked_fill(~keep, -torch.inf), uniforms, scratch=scratch)
        chosen = scores.gather(1, kept.tokens.unsqueeze(1)).squeeze(1)
        return kept._replace(logprobs=chosen - scores.logsumexp(1))
    if scores.device.type == "cuda" and find_spec("triton") is not None:
        from fastppo_kernels.triton import draw as triton_draw

        tokens, logprobs = triton_draw.draw(scores, uniforms)
        return Draws(tokens, logprobs=logprobs, sampler_logprobs=logprobs)
    rows, vocabulary = scores.shape
    padded = (scratch_for(scores) if scratch is None else scratch)[:rows]
    exponentials = padded[:, :vocabulary]
    blocks = padded.view(rows, -1, BLOCK)
    highest = scores.amax(1, keepdim=True)
    torch.sub(scores, highest, out=exponentials).exp_()
    sums = wide(blocks.sum(2))
    if uniforms is None:
        tokens = exponentials.argmax(1, keepdim=True)
    else:
        tokens = _inverse_cdf(sums, blocks, uniforms.unsqueeze(1))
    above = wide((scores.gather(1, tokens) - highest).squeeze(1))
    logprobs = (above - sums.sum(1).log_()).float()
    return Draws(tokens.squeeze(1), logprobs=logprobs, sampler_logprobs=logprobs)


def kept_tokens(scores: Tensor, sampling: Sampling) -> Tensor | None:
    """Apply top-k, then top-p to the tokens kept, as Hugging Face `generate` does.

    Args:
        scores: [B, V] logits divided by the temperature.

    Returns:
        [B, V] bool, True on kept tokens; None if all are kept.
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
    """Return [B, V] bool, True on the smallest set of likeliest tokens with probability >= `top_p`.

    Source: Holtzman et al. 2020, section 3.1.
    """
    probabilities, tokens = _likeliest_first(scores, top_p)
    before = probabilities.cumsum(1) - probabilities
    inside = (before < top_p) & (probabilities > 0)
    inside[:, 0] = True
    return torch.zeros_like(scores, dtype=torch.bool).scatter(1, tokens, inside)


def _likeliest_first(scores: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """Return (probabilities, tokens) in descending order, [B, V] or [B, CANDIDATES]."""
    # On a GPU, testing whether the candidates suffice would synchronize.
    if scores.device.type == "cpu" and scores.shape[1] > CANDIDATES:
        likeliest, tokens = scores.topk(CANDIDATES, dim=1)
        probabilities = (likeliest - scores.logsumexp(1, keepdim=True)).exp()
        if (probabilities.sum(1) >= top_p).all():
            return probabilities, tokens
    ordered, tokens = scores.sort(dim=1, descending=True)
    return ordered.softmax(1), tokens


def scratch_for(scores: Tensor) -> Tensor:
    """Return fp32 zeros [B, V rounded up to whole blocks].

    Columns beyond V stay 0 and are never drawn.
    """
    rows, vocabulary = scores.shape
    return torch.zeros(rows, -(-vocabulary // BLOCK) * BLOCK, device=scores.device)


def _inverse_cdf(sums: Tensor, blocks: Tensor, uniforms: Tensor) -> Tensor:
    """Return [B, 1] tokens: find the block of u, then the token inside it.

    Args:
        sums: [B, blocks] fp64.
        blocks: [B, blocks, BLOCK].
        uniforms: [B, 1] fp64.
    """
    if sums.shape[1] == 1:
        return _first_beyond(wide(blocks.squeeze(1)).cumsum(1), uniforms)
    upto = sums.cumsum(1)
    block = _first_beyond(upto, uniforms)
    own = sums.gather(1, block)
    rest = (uniforms * upto[:, -1:] - upto.gather(1, block) + own) / own
    inside = blocks.gather(1, block.unsqueeze(2).expand(-1, 1, BLOCK)).squeeze(1)
    return block * BLOCK + _first_beyond(wide(inside).cumsum(1), rest)


def _first_beyond(upto: Tensor, uniforms: Tensor) -> Tensor:
    """Return [B, 1], the first index whose running sum in `upto` [B, n] exceeds u · total."""
    total = upto[:, -1:]
    target = (uniforms * total).clamp_(min=0)
    # `u·total` may round up to the total, behind the last token with a positive probability.
    target = torch.minimum(target, total * (1 - torch.finfo(total.dtype).eps))
    return (upto <= target).sum(1, keepdim=True)
