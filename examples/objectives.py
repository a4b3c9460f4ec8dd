"""Objectives from papers, as functions for the option `objective`.

    fastppo recipe arithmetic --objective examples/objectives.py:clip_cov

    clip_cov, kl_cov             Cui et al. 2025, arXiv:2505.22617: against the collapse of entropy
    geometric_mean_rejection,    sequence rejection: no gradient from responses whose sampler and
    k3_rejection                 policy differ, with `old_logprobs: sampler`
    vapo                         Yue et al. 2025, arXiv:2504.05118; see examples/vapo.yaml

Selections and means are over a microbatch. All arguments are [N], cu_seqlens [B + 1].
"""

import torch
from torch import Tensor

CLIP_LOW = 0.2
CLIP_HIGH = 0.2

COV_SHARE = 2e-4
"""Share of the tokens that clip_cov and kl_cov select."""
COV_LOW, COV_HIGH = 1.0, 5.0
"""Range of the covariances that clip_cov selects from."""
KL_COEF = 1.0

GEOMETRIC_LOW, GEOMETRIC_HIGH = 0.999, 1.001
"""Range of the geometric mean of a response's ratios π_old/π."""
K3_LIMIT = 0.001
"""Largest mean k3 of a response, nats per token."""

NLL_COEF = 0.1
"""μ of VAPO."""


def surrogates(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, low=CLIP_LOW, high=CLIP_HIGH
) -> tuple[Tensor, Tensor]:
    """Return PPO's loss without and with the clip, [N] each."""
    ratio = (logprobs - old_logprobs).exp()
    return -ratio * advantages, -ratio.clamp(1 - low, 1 + high) * advantages


def covariances(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Return each token's term of the covariance of logprob and advantage, -inf where masked."""
    logprobs = logprobs.detach()
    products = (advantages - advantages[mask].mean()) * (logprobs - logprobs[mask].mean())
    return products.masked_fill(~mask, -torch.inf)


def clip_cov(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, share=COV_SHARE
) -> Tensor:
    """Return PPO's clipped loss without some tokens of high covariance, drawn at random."""
    plain, clipped = surrogates(logprobs, old_logprobs, advantages)
    cov = covariances(logprobs, advantages, mask)
    eligible = (cov > COV_LOW) & (cov < COV_HIGH) & ~(clipped > plain)
    (candidates,) = eligible.nonzero(as_tuple=True)
    count = max(int(share * int(mask.sum())), 1)
    chosen = candidates[torch.randperm(len(candidates))[:count].to(candidates.device)]
    return torch.maximum(plain, clipped).index_fill(0, chosen, 0.0)


def kl_cov(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, share=COV_SHARE
) -> Tensor:
    """Return the loss without a clip, with a penalty |log ratio| on tokens of high covariance."""
    plain, _ = surrogates(logprobs, old_logprobs, advantages)
    count = min(max(int(share * int(mask.sum())), 1), len(mask))
    chosen = torch.zeros_like(mask)
    chosen[covariances(logprobs, advantages, mask).topk(count).indices] = True
    return plain + KL_COEF * (logprobs - old_logprobs).abs() * (chosen & mask)


def response_means(values: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return the mean over each response, repeated for its tokens, [N]."""
    lengths = cu_seqlens.diff()
    counts = torch.segment_reduce(mask.to(values.dtype), "sum", lengths=lengths)
    sums = torch.segment_reduce(values * mask, "sum", lengths=lengths)
    return (sums / counts.clamp(min=1)).repeat_interleave(lengths)


def geometric_mean_rejection(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, cu_seqlens: Tensor
) -> Tensor:
    """Return PPO's clipped loss of responses whose geometric mean of π_old/π is in the range."""
    mean = response_means((old_logprobs - logprobs).detach(), mask, cu_seqlens).exp()
    kept = (mean >= GEOMETRIC_LOW) & (mean <= GEOMETRIC_HIGH)
    return torch.maximum(*surrogates(logprobs, old_logprobs, advantages)) * kept


def k3_rejection(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, cu_seqlens: Tensor
) -> Tensor:
    """Return PPO's clipped loss of responses whose mean k3 of KL(π_old, π) is within the limit."""
    log_ratio = (logprobs - old_logprobs).detach()
    mean = response_means(log_ratio.exp() - 1 - log_ratio, mask, cu_seqlens)
    return torch.maximum(*surrogates(logprobs, old_logprobs, advantages)) * (mean <= K3_LIMIT)


def vapo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, scores: Tensor
) -> Tensor:
    """Return PPO's loss with a higher upper bound, plus μ·NLL of responses with a score above 0."""
    loss = torch.maximum(*surrogates(logprobs, old_logprobs, advantages, high=0.28))
    positive = (scores > 0) & mask
    # The trainer divides by all tokens, the paper's NLL by those of the positive responses.
    return loss - NLL_COEF * logprobs * positive * (mask.sum() / positive.sum().clamp(min=1))
