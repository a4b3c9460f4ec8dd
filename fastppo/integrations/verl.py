"""FastPPO's functions in verl. Importing this module installs them.

    VERL_USE_EXTERNAL_MODULES=fastppo.integrations.verl python -m verl.trainer.main_ppo \\
        actor_rollout_ref.model.use_fused_kernels=true \\
        actor_rollout_ref.actor.policy_loss.loss_mode=fastppo …

verl imports the modules of that variable in its driver and its workers. Then

- `use_fused_kernels` computes logprobs and entropy with `fastppo.linear_token_stats` instead of
  verl's `FusedLinearForPPO`;
- `loss_mode: fastppo` is `fastppo.policy_loss` under verl's names for clips and aggregation;
- `adv_estimator: gae` is `fastppo.gae` and `fastppo.whiten`.

verl computes the loss after the model's forward pass, so a fused head recomputes the logits in the
backward pass: 8·N·H·V FLOP instead of the 6·N·H·V of `fastppo.linear_ppo_loss`. Tested with verl
0.9.1.
"""

from __future__ import annotations

from typing import Any

import torch
import verl.utils.experimental.torch_functional as verl_fused
from torch import Tensor, nn
from verl.trainer.ppo import core_algos

from fastppo.functional import tutorial_losses
from fastppo.functional.advantages import gae, whiten
from fastppo.functional.statistics import linear_token_stats

LOSS_MODE = "fastppo"
MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)
"""verl's aggregations of a loss over tokens."""


class FusedLinearForPPO(nn.Module):
    """Replace verl's module of the same name: logprobs and entropy without full logits.

    Args:
        chunk_size: rows of logits per chunk. None lets FastPPO choose.
    """

    def __init__(self, chunk_size: int | None = None, **_: Any) -> None:
        super().__init__()
        self.chunk_size = chunk_size

    def forward(
        self,
        hidden_states: Tensor,
        vocab_weights: Tensor,
        input_ids: Tensor,
        temperature: float | Tensor = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """Return differentiable logprobs and entropy, [...] fp32, in nats.

        Args:
            hidden_states: [..., H].
            vocab_weights: [V, H].
            input_ids: [...] the sampled tokens.
            temperature: one number, or one per token.
        """
        tokens = input_ids.long()
        if isinstance(temperature, Tensor):
            is_one = temperature.numel() == 1
            temperature = temperature.reshape(() if is_one else tokens.shape)
        stats = linear_token_stats(
            hidden_states,
            vocab_weights,
            tokens,
            chunk_size=self.chunk_size,
            temperature=temperature,
        )
        return stats.logprobs, stats.entropy


def policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """Compute verl's "vanilla" loss, including dual clip.

    Args:
        old_log_prob, log_prob, advantages, response_mask, rollout_is_weights: [B, T].
        config: verl's ActorConfig.

    Returns:
        (loss, metrics under verl's names).

    Raises:
        ValueError: `loss_agg_mode` is unknown.
    """
    mask = response_mask.bool()
    low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
    dual_clip = config.get("clip_ratio_c", 3.0)
    aggregation, denominator = _aggregation(loss_agg_mode, mask, **config.global_batch_info)
    loss = tutorial_losses.policy_loss(
        log_prob,
        old_log_prob,
        advantages,
        mask,
        clip_ratio=(low, high),
        dual_clip=dual_clip,
        importance_weights=rollout_is_weights,
        aggregation=aggregation,
        denominator=denominator,
    )
    with torch.no_grad():
        difference = torch.where(mask, log_prob - old_log_prob, 0.0).clamp(-20.0, 20.0)
        ratio = difference.exp()
        clipped = torch.where(advantages > 0, ratio > 1 + high, ratio < 1 - low)
        shares = {
            "actor/pg_clipfrac": clipped & (advantages != 0),
            "actor/ppo_kl": -difference,
            "actor/pg_clipfrac_lower": (advantages < 0) & (ratio > dual_clip),
        }
        tokens = mask.sum().clamp(min=1)
        metrics = {name: ((x * mask).sum() / tokens).item() for name, x in shares.items()}
    return loss, metrics


def _aggregation(
    mode: str,
    mask: Tensor,
    *,
    dp_size: int = 1,
    batch_num_tokens: Any = None,
    global_batch_size: Any = None,
    loss_scale_factor: Any = None,
) -> tuple[str, Any]:
    """Return (aggregation, denominator) of verl's `agg_loss`.

    The loss is the mean over all ranks times their number, because FSDP averages gradients.
    """
    if mode not in MODES:
        raise ValueError(f"loss_agg_mode must be one of {', '.join(MODES)}, got {mode!r}")
    if mode == "token-sum":
        return mode, 1 / dp_size
    by_token = mode == "token-mean"
    count = batch_num_tokens if by_token else global_batch_size
    if count is None and dp_size > 1:
        name = "batch_num_tokens" if by_token else "global_batch_size"
        raise ValueError(f"{name} must be that of all {dp_size} ranks, got None")
    if count is None:
        counted = mask if by_token else mask.any(-1)
        count = counted.sum().clamp(min=1)
    if mode == "seq-mean-token-sum-norm":
        return "seq-mean-token-sum", count * (loss_scale_factor or mask.shape[-1]) / dp_size
    return mode, count / dp_size


def gae_advantage_return(
    token_level_rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    gamma: float | Tensor,
    lam: float | Tensor,
) -> tuple[Tensor, Tensor]:
    """Replace verl's `compute_gae_advantage_return`.

    Returns:
        (whitened advantages, returns), [B, T] fp32 each, and 0 after the end of a response.
    """
    mask = response_mask.bool()
    advantages, returns = gae(token_level_rewards, values, mask, gamma=gamma, lam=lam)
    return whiten(advantages, mask), returns


def install() -> None:
    """Install all three functions."""
    verl_fused.FusedLinearForPPO = FusedLinearForPPO
    core_algos.register_policy_loss(LOSS_MODE)(policy_loss)
    core_algos.compute_gae_advantage_return = gae_advantage_return
    core_algos.ADV_ESTIMATOR_REGISTRY["gae"] = gae_advantage_return


install()
