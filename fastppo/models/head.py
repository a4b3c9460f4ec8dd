"""The lm-head: logits of hidden states, or token statistics without logits.

The config of the model gives the scale and soft-cap of its logits:

    z = softcap · tanh(logit_scale · (h Wᵀ + b) / softcap)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fastppo.functional.lm_head import active_copy
from fastppo.functional.statistics import TokenStats, linear_token_stats


class Head(NamedTuple):
    """An lm-head; its tensors are the model's own parameters."""

    weight: Tensor
    """Weight of the lm-head, [V, H]."""
    bias: Tensor | None
    """Bias of the lm-head, [V]."""
    logit_scale: float
    softcap: float | None

    @classmethod
    def of(cls, causal_lm: PreTrainedModel) -> Head:
        """Return the head of a causal LM, with or without tied embeddings."""
        layer = lm_head_of(causal_lm)
        logit_scale, softcap = _logit_transform(causal_lm.config)
        return cls(
            weight=layer.weight,
            bias=getattr(layer, "bias", None),
            logit_scale=logit_scale,
            softcap=softcap,
        )

    @property
    def vocabulary(self) -> int:
        """Size V of the vocabulary."""
        return self.weight.shape[0]

    @property
    def width(self) -> int:
        """Width H of the hidden states."""
        return self.weight.shape[1]

    @property
    def transform(self) -> dict[str, Any]:
        """Scale and soft-cap of the logits, as keywords of the losses."""
        return {"logit_scale": self.logit_scale, "softcap": self.softcap}

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the model's logits, (..., V) fp32."""
        z = nn.functional.linear(hidden, self.weight, self.bias).float()
        z = z if self.logit_scale == 1 else z * self.logit_scale
        return z if self.softcap is None else self.softcap * torch.tanh(z / self.softcap)

    def token_stats(
        self,
        hidden: Tensor,
        tokens: Tensor,
        *,
        ref: RefStates | None = None,
        **options: Any,
    ) -> TokenStats:
        """Return logprobs and entropy at hidden states [N, H], and the exact KL to a reference.

        Args:
            tokens: [N] int64.
            options: further keywords of `fastppo.token_stats`.

        Returns:
            [N] fp32 each, nats, differentiable.
        """
        return linear_token_stats(
            hidden,
            self.weight,
            tokens,
            bias=self.bias,
            **({} if ref is None else ref.operands),
            **options,
            **self.transform,
        )


class RefStates(NamedTuple):
    """Hidden states [N, H'] and head of a reference policy."""

    hidden: Tensor
    head: Head

    @property
    def operands(self) -> dict[str, Any]:
        """Keywords of the linear losses and statistics for the exact KL."""
        return {
            "ref_hidden": self.hidden,
            "ref_weight": self.head.weight,
            "ref_bias": self.head.bias,
        }


def lm_head_of(causal_lm: PreTrainedModel) -> Any:
    """Return the lm-head layer, or the active adapter's copy of it (PEFT's `modules_to_save`).

    Raises:
        ValueError: the model has no lm-head.
    """
    layer: Any = causal_lm.get_output_embeddings()
    if layer is None:
        raise ValueError(
            f"{type(causal_lm).__name__} cannot be trained: expected a causal LM with an lm-head, "
            "and its get_output_embeddings() is None"
        )
    return active_copy(layer)


def _logit_transform(config: Any) -> tuple[float, float | None]:
    """Read (logit_scale, softcap) from a config of transformers."""
    text = config.get_text_config()
    scale = 1.0
    for name in ("logit_scale", "lm_head_multiplier"):  # Cohere; Falcon-H1
        scale *= getattr(text, name, None) or 1.0
    for name in ("logits_scaling", "logits_mup_width_multiplier"):  # Granite; Inkling
        scale /= getattr(text, name, None) or 1.0
    # Gemma; RecurrentGemma; xLSTM
    for name in ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"):
        softcap = getattr(text, name, None)
        if softcap is not None:
            return float(scale), softcap
    return float(scale), None
