"""A user-defined objective: DPPO's binary TV mask (Qi et al. 2026, arXiv:2602.04879).

    fastppo recipe arithmetic --objective examples/objective.py:dppo_tv

A token has no gradient once its probability has moved by more than EPSILON in the direction of its
advantage. PPO's clip bounds the ratio instead, which stops rare tokens early and common ones late.
"""

import torch
from torch import Tensor

EPSILON = 0.15


def dppo_tv(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, epsilon=EPSILON
) -> Tensor:
    """Return the loss of each token [N], all arguments being [N]; `mask` is False for padding."""
    moved = (logprobs.exp() - old_logprobs.exp()) * advantages.sign()
    ratio = (logprobs - old_logprobs).exp()
    kept = torch.where(moved > epsilon, 0.0, ratio).detach()
    return -kept * advantages * logprobs
