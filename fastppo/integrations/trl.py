"""FastPPO's loss and statistics in TRL's GRPOTrainer.

    from fastppo.integrations.trl import GRPOTrainer  # in place of: from trl import GRPOTrainer

This is TRL's trainer with TRL's options, metrics and files. The lm-head's outputs are computed from
hidden states and the head's weight, so the full `[B, T, V]` logits are never stored:

- Logprobs and entropy of the policy, the old policy and the reference policy come from
  `fastppo.linear_token_stats`. All of TRL's losses use them: 8·N·H·V FLOP with the gradient.
- The whole loss comes from `fastppo.linear_ppo_loss`, 6·N·H·V FLOP, if the batch has old logprobs
  (several optimizer steps per generation) and the loss is PPO's clipped one, CISPO or SAPO with
  token-level ratios. Sequence-level ratios (GSPO) need every logprob before the first gradient, so
  they use the statistics.

Soft-caps, logit scales, and trained or LoRA- and DoRA-adapted heads are supported. TRL's own path,
with full logits, is used for models with images, prompt tuning, a load-balancing loss, an fp32
lm-head under lower precision, dropout or a bias in the head's adapters, and FSDP2 in mixed
precision. TRL 1.15 and 1.16 refuse adapters on the head.

Of TRL's private methods, only the one that computes statistics is overridden; everything else goes
through public attributes. Tested with TRL 1.12 to 1.16.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import trl
from packaging.version import Version
from torch import Tensor

from fastppo.functional.lm_head import head_weight, why_no_weight
from fastppo.functional.losses import PPOLoss, linear_ppo_loss
from fastppo.models.head import Head, lm_head_of
from fastppo.models.trunk import hidden_states, trunk_of

TESTED = ("1.12", "1.16")
"""The oldest and the newest tested release of TRL."""

if not Version(TESTED[0]) <= Version(trl.__version__) < Version(f"{TESTED[1]}.999"):
    raise ImportError(
        f"fastppo.integrations.trl is tested with TRL {TESTED[0]} to {TESTED[1]}, and TRL "
        f"{trl.__version__} is installed: pip install 'trl=={TESTED[1]}.*'"
    )

CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo")
"""Loss types that differ only in the weights of tokens."""

IMAGES = ("pixel_values", "image_grid_thw", "image_sizes", "image_position_ids")
"""Keys of a batch with images."""


class GRPOTrainer(trl.GRPOTrainer):
    """TRL's GRPOTrainer with FastPPO's loss and statistics; its arguments are TRL's."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._fused_metrics: defaultdict[str, list[float]] = defaultdict(list)

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], *args: Any, **options: Any
    ) -> Tensor:
        """Compute the loss of a microbatch, 0-d."""
        images = any(value is not None for name, value in inputs.items() if name in IMAGES)
        if images or not _is_fused(self, inputs):
            return super().compute_loss(model, inputs, *args, **options)
        plain = self.accelerator.unwrap_model(model)
        return self._inside(model, lambda: self._fused_loss(plain, inputs))

    def log(self, logs: dict[str, float], *args: Any, **options: Any) -> None:
        """Add the means of the fused loss's metrics under TRL's names."""
        prefix = "" if self.model.training else "eval_"
        means = {prefix + name: sum(x) / len(x) for name, x in self._fused_metrics.items()}
        self._fused_metrics.clear()
        super().log(logs | means, *args, **options)

    def _inside(self, model: Any, function: Callable[[], Any]) -> Any:
        """Call a function in the wrapper's forward pass, where FSDP and DeepSpeed gather weights.

        It takes no arguments, because a wrapper may round those to bf16.
        """
        plain = self.accelerator.unwrap_model(model)
        original = plain.forward

        def forward() -> Any:
            plain.forward = original  # the function may call it
            with self.accelerator.autocast():  # normally applied to the model's forward
                return function()

        plain.forward = forward
        try:
            return model()
        finally:
            plain.forward = original

    def _fused_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        mask = inputs["completion_mask"]
        if "tool_mask" in inputs:
            mask = mask * inputs["tool_mask"]
        mask = mask.bool()
        tokens = inputs["completion_ids"]
        hidden = _response_states(
            model,
            torch.cat([inputs["prompt_ids"], tokens], dim=1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
            tokens.shape[1],
        )
        head = _head_of(model)
        old_logprobs = inputs["old_per_token_logps"]
        advantages = inputs["advantages"]
        if advantages.dim() == 1:
            advantages = advantages.unsqueeze(1)
        advantages = advantages.expand_as(mask)
        importance_weights = None
        if self.use_vllm and self.vllm_importance_sampling_correction:
            importance_weights = inputs["importance_sampling_ratio"].expand_as(mask)
        aggregation, denominator = self._weights(mask, inputs)
        out = linear_ppo_loss(
            hidden,
            head.weight,
            tokens,
            old_logprobs,
            advantages,
            mask,
            bias=head.bias,
            **head.transform,
            **self._objective(),
            ref_logprobs=inputs["ref_per_token_logps"] if self.beta else None,
            kl_coef=self.beta,
            temperature=self.temperature,
            importance_weights=importance_weights,
            aggregation=aggregation,
            denominator=denominator,
        )
        self._record_metrics(out, old_logprobs, advantages, mask)
        return out.loss

    def _objective(self) -> dict[str, Any]:
        """Return the arguments of `linear_ppo_loss` for `loss_type`."""
        if self.loss_type == "cispo":
            # TRL bounds the ratio itself, from above only.
            return {"objective": "cispo", "clip_ratio": (1.0, self.epsilon_high - 1)}
        if self.loss_type == "sapo":
            taus = (self.args.sapo_temperature_pos, self.args.sapo_temperature_neg)
            return {"objective": "sapo", "sapo_tau": taus}
        clip = (self.epsilon_low, self.epsilon_high)
        return {"clip_ratio": clip, "dual_clip": self.args.delta}

    def _weights(self, mask: Tensor, inputs: dict[str, Any]) -> tuple[str, Tensor | float]:
        """Return (aggregation, denominator) of `loss_type`, over all microbatches of a step."""
        steps = self.current_gradient_accumulation_steps if self.model.training else 1
        if self.loss_type in ("grpo", "sapo"):
            return "seq-mean-token-mean", float(len(mask) * steps)
        if self.loss_type == "bnpo":
            return "token-mean", mask.sum().clamp(min=1) * steps
        if self.loss_type == "dr_grpo":
            return "token-mean", float(len(mask) * self.max_completion_length * steps)
        tokens = inputs["num_items_in_batch"].clamp(min=1) / self.accelerator.num_processes
        if self.model.training:  # tokens of the whole generation: take one optimizer step's share
            tokens = tokens * steps / self.args.steps_per_generation
        return "token-mean", tokens

    def _record_metrics(
        self, out: PPOLoss, old_logprobs: Tensor, advantages: Tensor, mask: Tensor
    ) -> None:
        """Log TRL's metrics."""
        metrics = self._fused_metrics
        ratio = torch.exp(torch.where(mask, out.logprobs - old_logprobs, 0.0))
        low = (ratio < 1 - self.epsilon_low) & (advantages < 0)
        high = (ratio > 1 + self.epsilon_high) & (advantages > 0)
        means = {"entropy": out.entropy}
        if self.beta:
            means["kl"] = out.kl
        if self.loss_type in CLIPPED:
            means["clip_ratio/low_mean"] = low
            means["clip_ratio/high_mean"] = high
            means["clip_ratio/region_mean"] = low | high
        if self.loss_type == "cispo":
            means["cispo_clip_ratio"] = (ratio > self.epsilon_high) & (advantages > 0)
        sums = torch.stack([(x.float() * mask).sum() for x in (*means.values(), mask)])
        *totals, tokens = self.accelerator.reduce(sums, reduction="sum").tolist()
        for name, total in zip(means, totals, strict=True):
            metrics[name].append(total / max(tokens, 1.0))
        if self.loss_type in CLIPPED:
            shares = torch.stack([(x * mask).sum(1) / mask.sum(1) for x in (low, high)], dim=1)
            shares = self.accelerator.gather(shares)
            shares = shares[~shares.isnan().any(1)]  # rows without tokens
            if len(shares):
                metrics["clip_ratio/low_min"].append(shares[:, 0].min().item())
                metrics["clip_ratio/high_max"].append(shares[:, 1].max().item())

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        **others: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return (logprobs, entropies, None), [B, T] each, `batch_size` sequences at a time.

        Both are differentiable.
        """
        if _needs_logits(self) or any(x is not None and x is not False for x in others.values()):
            return super()._get_per_token_logps_and_entropies(
                model,
                input_ids,
                attention_mask,
                logits_to_keep,
                batch_size=batch_size,
                compute_entropy=compute_entropy,
                **others,
            )
        plain = self.accelerator.unwrap_model(model)

        def statistics(ids: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
            hidden = _response_states(plain, ids, attended, logits_to_keep)
            stats = _head_of(plain).token_stats(
                hidden, ids[:, -logits_to_keep:], temperature=self.temperature
            )
            return stats.logprobs, stats.entropy

        size = batch_size or len(input_ids)
        parts = [
            self._inside(model, functools.partial(statistics, ids, attended))
            for ids, attended in zip(input_ids.split(size), attention_mask.split(size), strict=True)
        ]
        logprobs = torch.cat([part[0] for part in parts])
        entropies = torch.cat([part[1] for part in parts]) if compute_entropy else None
        return logprobs, entropies, None


def _response_states(model: Any, ids: Tensor, attended: Tensor, length: int) -> Tensor:
    """Return the hidden states [B, length, H] that predict the last `length` tokens."""
    causal_lm = model.get_base_model() if hasattr(model, "get_base_model") else model
    return hidden_states(trunk_of(causal_lm), ids, attended)[:, -length - 1 : -1]


def _head_of(model: Any) -> Head:
    """Return the model's head with its adapters."""
    return Head.of(model)._replace(weight=head_weight(lm_head_of(model)))


def _needs_logits(trainer: Any) -> bool:
    """Return whether the loss needs full logits.

    That is the case if the head is not a single linear layer, or a wrapper rounds its outputs.
    """
    accelerator = trainer.accelerator
    if accelerator.is_fsdp2 and accelerator.state.fsdp_plugin.mixed_precision_policy is not None:
        return True
    adapters = getattr(trainer.model, "peft_config", {}).values()
    if trainer.args.cast_lm_head_to_fp32 or any(x.is_prompt_learning for x in adapters):
        return True
    return why_no_weight(lm_head_of(trainer.model)) is not None


def _is_fused(trainer: Any, inputs: dict[str, Any]) -> bool:
    """Return whether `linear_ppo_loss` computes a batch's loss."""
    args = trainer.args
    is_cispo = trainer.loss_type == "cispo" and trainer.epsilon_high >= 1
    return (
        (trainer.loss_type in (*CLIPPED, "sapo") or is_cispo)
        and trainer.importance_sampling_level == "token"
        and inputs.get("old_per_token_logps") is not None
        and not (trainer.beta and args.use_bias_correction_kl)
        and (args.delta is None or args.delta >= 1 + trainer.epsilon_high)
        # TRL weights the entropy differently than the loss.
        and not (args.entropy_coef or args.use_adaptive_entropy)
        and trainer.top_entropy_quantile == 1.0
        and trainer.off_policy_mask_threshold is None
        and not trainer.aux_loss_enabled
        and not _needs_logits(trainer)
    )
