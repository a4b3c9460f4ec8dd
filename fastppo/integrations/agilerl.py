"""FastPPO's loss inside AgileRL's LLM algorithms, in place of its fused one.

    from fastppo.integrations import agilerl

    agilerl.install()  # before an LLMPPO or LLMREINFORCE learns

Then token-level ratios go through `fastppo.linear_ppo_loss`, which writes the gradient over each
chunk of the logits; AgileRL forms a log-softmax of each chunk and takes its gradient by autograd.
Ratios by turn or by trajectory, a batch without old logprobs and one with a token whose KL is
beyond `kl_clamp` stay AgileRL's. Tested with AgileRL 2.58.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from agilerl.algorithms import ppo_llm, reinforce_llm
from agilerl.algorithms.core.base import LLMAlgorithm
from agilerl.algorithms.core.llm_ops import fused_loss
from torch import Tensor

from fastppo.functional.losses import linear_ppo_loss

PLACES = (fused_loss, ppo_llm, reinforce_llm)
"""AgileRL's modules that call `apply_fused_policy_loss` by a name of their own."""

THEIRS: Any = fused_loss.apply_fused_policy_loss
_signature = inspect.signature(THEIRS)
CHUNK = _signature.parameters["token_chunk_size"].default
"""AgileRL's, in tokens, where it is given none."""


@functools.wraps(THEIRS)
def apply_fused_policy_loss(*arguments: Any, **keywords: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
    """AgileRL's function of that name, with its arguments: (loss (), metrics () each).

    The metrics: the KL, the share of clipped tokens, the policy's loss, the mean of −logprob, and
    the share of clamped KLs, 0.
    """
    given = _signature.bind(*arguments, **keywords)
    given.apply_defaults()
    named = given.arguments
    beta, ref_logprobs = named["beta"], named["ref_per_token_logps"]
    old_logprobs, clamp = named["old_per_token_logps"], named["kl_clamp"]
    if named["importance_sampling_level"] != "token" or old_logprobs is None:
        return THEIRS(*arguments, **keywords)
    mask, chunk = named["attention_mask"].bool(), named["token_chunk_size"]
    # Both are AgileRL's choice, of which its algorithms hand over the second: FastPPO's is its own.
    unasked = (CHUNK, LLMAlgorithm._resolve_fused_chunk_rows(len(named["head_w"])))
    out = linear_ppo_loss(
        named["policy_hidden"],
        named["head_w"],
        named["target_ids"],
        old_logprobs,
        named["advantages"],
        mask,
        bias=named["head_b"],
        clip_ratio=(named["epsilon_low"], named["epsilon_high"]),
        ref_logprobs=ref_logprobs,
        kl_coef=0.0 if ref_logprobs is None else beta,
        importance_weights=named["vllm_is_ratio"],
        temperature=named["temperature"],
        chunk_size=None if chunk in unasked else chunk,
    )
    if clamp is not None and bool((out.kl > clamp).any()):
        return THEIRS(*arguments, **keywords)
    with torch.no_grad():
        ratio = torch.where(mask, out.logprobs - old_logprobs, 0.0).exp()
        clipped = (ratio < 1 - named["epsilon_low"]) | (ratio > 1 + named["epsilon_high"])
        tokens = mask.sum().clamp(min=1)
        metrics = (
            out.kl.sum() / tokens,
            (clipped & mask).sum() / tokens,
            out.metrics["policy_loss"],
            -out.logprobs.sum() / tokens,
            torch.zeros_like(out.loss),
        )
    return out.loss, metrics


def install() -> None:
    """Puts the loss where AgileRL's modules look for theirs."""
    for module in PLACES:
        module.apply_fused_policy_loss = apply_fused_policy_loss
