"""A row's statistics from those of parts of its vocabulary.

Where a head's columns are spread over devices, each forms `token_stats` of its own columns, with
ELSEWHERE for the tokens that it does not have. Here they become those of the whole row. With m_s
the maximum of part s, c = 1/T, and L_s = log Σ_{j in s} e^{(z_j − m_s)·c},

    m        = max_s m_s                    mass_s = (m_s − m)·c + L_s
    log S    = log Σ_s e^{mass_s}           w_s    = e^{mass_s − log S}, the part's share of p
    p_others = Σ_s w_s · p_others_s         1 where the token is not
    logprob  = log(1 − p_others) above ½, else logprob_s + log w_s of the part that has the token
    entropy  = Σ_s w_s · (entropy_s − log w_s)
    γ        = Σ_s w_s · (γ_s + ((m_s − m) − (m'_s − m'))·c)           KL = γ − log S + log S'

γ is `mean_gap`, and ' the reference's. log w_s is log(1 − the other shares) above ½. So nothing
small is the difference of two numbers near 1, and a row keeps its digits however sure the policy
is. Nothing else has to travel: the joined statistics are what `token_stats_backward` of each part
takes, and what it gives are that part's columns of the gradient.

Parts are added in their order: devices that have gathered the same parts join them to the same
bits. Nothing here communicates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastppo_kernels.records import LOWEST, Softmax, TokenStats


class _Shares(NamedTuple):
    """Of P parts; `shift` is (m_s − m)·c."""

    row_max: Tensor  # [N]
    log_sum: Tensor  # [N]
    shift: Tensor  # [P, N]
    log_share: Tensor  # [P, N]
    empty: Tensor  # [P, N] bool: −inf alone


def _shares(normalizer: Tensor, scale: float | Tensor) -> _Shares:
    """Of normalizers [P, N, 2]."""
    maxima, log_sums = normalizer.unbind(-1)
    empty = log_sums == -math.inf
    row_max = maxima.amax(0)
    shift = ((maxima - row_max) * scale).masked_fill(empty, LOWEST)
    mass = shift + log_sums
    rare = mass - mass.logsumexp(0)
    share = rare.exp()
    rest = torch.stack([share[:s].sum(0) + share[s + 1 :].sum(0) for s in range(len(share))])
    log_share = torch.where(share > 0.5, torch.log1p(-rest), rare)
    # The largest part's has the most digits.
    log_sum = (mass - log_share).gather(0, share.argmax(0, keepdim=True))[0]
    nothing = empty.all(0)
    row_max, log_sum = (x.masked_fill(nothing, -math.inf) for x in (row_max, log_sum))
    return _Shares(row_max, log_sum, shift, log_share, empty)


def join(
    parts: Sequence[TokenStats], softmax: Softmax, *, has_reference: bool = False
) -> TokenStats:
    """The statistics of rows whose vocabulary lies in `parts`, each [N].

    Args:
        has_reference: the parts were formed with `ref_logits`.
    """
    each = TokenStats(*(torch.stack(field) for field in zip(*parts, strict=True)))
    inverse = 1 / (softmax.temperature if softmax.temperatures is None else softmax.temperatures)
    scale = inverse if softmax.softcap is not None else softmax.logit_scale * inverse
    policy = _shares(each.normalizer, scale)
    share = policy.log_share.exp()

    def mean(x: Tensor) -> Tensor:
        """Σ_s w_s x_s; a part without mass may hold anything."""
        return torch.where(share == 0, 0.0, share * x).sum(0)

    p_others = mean(each.p_others)
    at_token = (each.logprobs + policy.log_share).masked_fill(policy.empty, LOWEST).amax(0)
    at_token = at_token.masked_fill(policy.empty.all(0), math.nan)
    kl, mean_gap, ref_normalizer = each.kl[0], each.mean_gap[0], each.ref_normalizer[0]
    if has_reference:
        ref = _shares(each.ref_normalizer, scale)
        # Where the reference rules out all of a part that has mass, the KL is infinite.
        gap = (each.mean_gap + policy.shift - ref.shift).masked_fill(ref.empty, math.inf)
        mean_gap = mean(gap)
        kl = mean_gap - policy.log_sum + ref.log_sum
        ref_normalizer = torch.stack([ref.row_max, ref.log_sum], -1)
    return TokenStats(
        torch.where(p_others < 0.5, torch.log1p(-p_others), at_token),
        mean(each.entropy - policy.log_share),
        kl,
        p_others,
        mean_gap,
        torch.stack([policy.row_max, policy.log_sum], -1),
        ref_normalizer,
    )
