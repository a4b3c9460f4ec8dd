"""One trunk, two heads: a causal LM of transformers and a value function on its hidden states.

The trunk runs once per microbatch and returns the hidden states `[N, H]` that predict response
tokens. Both heads read them: the model's own lm-head, tied or not (`fastppo.models.head`), and a
linear value head in fp32 (`fastppo.models.value` has alternatives). `check_heads` rejects models
whose logits are not those of the lm-head on the trunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from fastppo.data.batch import Batch, Layout
from fastppo.data.microbatches import MicrobatchPlan
from fastppo.functional.statistics import TokenStats
from fastppo.models.adapters import full_state, merged_state
from fastppo.models.device import autocast
from fastppo.models.head import Head
from fastppo.models.quantized import is_quantized, without_quantization
from fastppo.models.trunk import (
    context_length,
    hidden_states,
    prepare,
    states_at,
    switch_dropout_off,
    text_lm_of,
    trunk_of,
)
from fastppo.models.value import CriticValue, SharedValue, ValueFunction


class LanguageModel(nn.Module):
    """A causal LM as trunk and head.

    Args:
        peft: the PEFT model around `causal_lm`, if it has adapters.
        compute_dtype: the dtype of the matrix products; None means the dtype of the weights.
    """

    def __init__(
        self,
        causal_lm: PreTrainedModel,
        peft: Any = None,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self.compute_dtype = compute_dtype
        self.packing = False
        """Whether batches are packed into one row; see `fastppo.models.packing`."""
        self.fixed_precision: bool | None = None
        """Value of `is_full_precision` before sharding, which may change the dtype of the
        parameters."""
        self._peft = [peft]  # a list, so that its modules are not registered twice
        if hasattr(causal_lm.get_output_embeddings(), "base_layer"):
            raise ValueError(
                "adapters on the lm_head are not supported, as the losses read its weight "
                "directly: leave it out of lora_target_modules"
            )
        switch_dropout_off(causal_lm)
        self.eval()
        prepare(trunk_of(causal_lm))

    @property
    def peft(self) -> Any:
        return self._peft[0]

    @property
    def config(self) -> Any:
        return self.causal_lm.config

    @property
    def context(self) -> int | None:
        """Longest sequence of the model, tokens, or None if its config has none."""
        return context_length(self.causal_lm)

    @property
    def device(self) -> torch.device:
        return next(self.causal_lm.parameters()).device

    @property
    def head(self) -> Head:
        """The lm-head; its tensors are the model's own parameters."""
        return Head.of(self.causal_lm)

    @property
    def is_full_precision(self) -> bool:
        """Whether weights and matrix products are fp32 throughout."""
        if self.fixed_precision is not None:
            return self.fixed_precision
        return self.compute_dtype is None and self.head.weight.dtype == torch.float32

    def autocast(self) -> AbstractContextManager:
        """Run the matrix products of forward pass and loss in the compute dtype."""
        return autocast(self.device, self.compute_dtype)

    def layout(self, batch: Batch) -> Layout:
        """Lay out a batch as input of the trunk."""
        return batch.packed_layout() if self.packing else batch.layout()

    def hidden(self, layout: Layout) -> Tensor:
        """Return the final hidden states [N, H] that predict response tokens."""
        return self._hidden(layout, layout.predicting)

    def _hidden(self, layout: Layout, positions: Tensor) -> Tensor:
        # In a sharded model `hidden` and `forward` gather weights, so neither may call the other
        # (`fastppo.models.sharding`).
        trunk = trunk_of(self.causal_lm)
        return states_at(
            trunk, positions, layout.input_ids, packing=layout.packing, images=layout.images
        )

    def padded_states(
        self, input_ids: Tensor, attention_mask: Tensor, *, row: Tensor, column: Tensor
    ) -> Tensor:
        """Return final hidden states [N, H] at positions [N] of right-padded rows [B, S]."""
        positions = row * input_ids.shape[1] + column
        return states_at(trunk_of(self.causal_lm), positions, input_ids, attention_mask)

    @torch.no_grad()
    def response_stats(
        self, batch: Batch, temperature: float = 1.0, backend: str = "auto"
    ) -> TokenStats:
        """Return logprobs and entropy of the response tokens, [N] fp32, nats."""
        with self.autocast():
            layout = self.layout(batch)
            hidden = self.hidden(layout)  # first: it gathers the head of a sharded model
            return self.head.token_stats(
                hidden, layout.response_tokens, temperature=temperature, backend=backend
            )

    def response_logprobs(
        self, batch: Batch, temperature: float = 1.0, backend: str = "auto"
    ) -> Tensor:
        """Return logprobs of the response tokens, [N] fp32, nats."""
        return self.response_stats(batch, temperature, backend).logprobs

    def stats_of_plan(self, plan: MicrobatchPlan, **options: Any) -> tuple[Tensor, Tensor]:
        """Return (logprobs, entropy) of a batch, [N] each, microbatch by microbatch."""
        stats = [self.response_stats(batch, **options) for batch in plan.batches]
        logprobs = torch.cat([x.logprobs for x in stats])
        entropy = torch.cat([x.entropy for x in stats])
        return plan.in_order(logprobs), plan.in_order(entropy)

    def language_model_loss(self, input_ids: Tensor, backend: str = "auto") -> Tensor:
        """Return the 0-d mean cross entropy of input_ids [B, S] except first tokens, nats."""
        states = hidden_states(trunk_of(self.causal_lm), input_ids)
        stats = self.head.token_stats(states[:, :-1], input_ids[:, 1:], backend=backend)
        return -stats.logprobs.mean()

    @contextmanager
    def adapters_off(self) -> Iterator[LanguageModel]:
        """Disable the adapters: a reference policy without a second model in memory."""
        with self.peft.disable_adapter():
            yield self

    def check_heads(self) -> None:
        """Compare trunk and head with the model's own logits on a small batch.

        Raises:
            ValueError: they cannot be computed, or differ, for example by a logit transform that
                FastPPO does not know.
        """
        length = min(8, self.context or 8)
        ids = torch.arange(2 * length, device=self.device).view(2, length)
        ids = (ids * 7 + 3) % self.head.vocabulary
        name = type(self.causal_lm).__name__
        try:
            with torch.no_grad():
                # The same matmuls on two paths agree to rounding; an unknown scale, cap or second
                # norm changes the first digit.
                text_lm = text_lm_of(self.causal_lm)
                theirs = text_lm(input_ids=ids, use_cache=False).logits.float()
                states = hidden_states(trunk_of(self.causal_lm), ids)
                ours = self.head.logits(states)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a model of another kind may fail in any way
            raise ValueError(
                f"{name} cannot be trained: expected a decoder of text whose trunk turns input_ids "
                "into last_hidden_state and whose head turns these into logits; on a small batch "
                f"they raise {type(error).__name__}: {error}"
            ) from error
        largest = theirs.abs().max().item()
        if not theirs.isfinite().all():
            raise ValueError(f"{name}: its logits are not finite; do its weights have NaN or inf?")
        tolerance = 1e-3 if states.dtype == torch.float32 else 5e-2
        worst = (theirs - ours).abs().max().item() if theirs.shape == ours.shape else float("inf")
        if not worst <= tolerance * (1 + largest):
            raise ValueError(
                f"{name}: the lm-head on the final hidden states differs from the model's own "
                f"logits by {worst:.3g} (logits up to {largest:.3g}). FastPPO applies "
                f"logit_scale={self.head.logit_scale:g} and softcap={self.head.softcap}; the model "
                "transforms its logits differently."
            )


class HeadInputs(NamedTuple):
    """Inputs of the two heads at N positions, and the values there."""

    hidden: Tensor
    """Final hidden states of the policy, [N, H]."""
    values: Tensor
    """Values at the positions, [N] fp32."""
    value_states: Tensor
    """Inputs of the value head, detached, [N, H']."""


class BatchEvaluation(NamedTuple):
    """Logprobs and values of a batch, fp32, detached."""

    logprobs: Tensor
    """Logprobs of the response tokens, [N], in nats."""
    values: Tensor
    """Values of the state before each response token, [N]."""
    final_values: Tensor
    """Values of the state after each sequence's last token, [B]."""


class ActorCritic(LanguageModel):
    """Policy and value function.

    Args:
        value_function: a class of `fastppo.models.value`; by default a head on the shared trunk.
    """

    def __init__(
        self,
        causal_lm: PreTrainedModel,
        peft: Any = None,
        value_function: ValueFunction | None = None,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(causal_lm, peft, compute_dtype)
        self.value_function = value_function or SharedValue(trunk_of(causal_lm), self.head.width)
        switch_dropout_off(self.value_function)
        self.eval()
        if isinstance(self.value_function, CriticValue):
            prepare(self.value_function.trunk)

    def forward(
        self, layout: Layout, positions: Tensor | None = None, *, detach_values: bool = False
    ) -> HeadInputs:
        """Return hidden states and values at the positions.

        Args:
            positions: defaults to those of `layout.predicting`.
            detach_values: stop gradients from the values into the policy's trunk.
        """
        if positions is None:
            positions = layout.predicting
        hidden = self._hidden(layout, positions)
        states = self.value_function.states(hidden, layout, positions, detach=detach_values)
        values = self.value_function.read(states)
        # FSDP registers hooks on the outputs, and a view would lose them.
        return HeadInputs(hidden, values.clone(), states.detach())

    @torch.no_grad()
    def evaluate(
        self, batch: Batch, temperature: float = 1.0, backend: str = "auto"
    ) -> BatchEvaluation:
        """Return logprobs and values of a batch, from one forward pass of the trunk."""
        layout = self.layout(batch)
        count = batch.response_count
        with self.autocast():
            out = self(layout, torch.cat([layout.predicting, layout.final]))
            stats = self.head.token_stats(
                out.hidden[:count], layout.response_tokens, temperature=temperature, backend=backend
            )
        return BatchEvaluation(
            logprobs=stats.logprobs,
            values=out.values[:count],
            final_values=out.values[count:],
        )

    def evaluate_plan(self, plan: MicrobatchPlan, **options: Any) -> BatchEvaluation:
        """Evaluate a batch microbatch by microbatch."""
        evaluations = [self.evaluate(batch, **options) for batch in plan.batches]
        return BatchEvaluation(
            logprobs=plan.in_order(torch.cat([x.logprobs for x in evaluations])),
            values=plan.in_order(torch.cat([x.values for x in evaluations])),
            final_values=plan.sequences_in_order(torch.cat([x.final_values for x in evaluations])),
        )

    def values(self, layout: Layout, positions: Tensor) -> Tensor:
        """Return values at the positions, [N] fp32. A critic does not run the policy's trunk."""
        hidden = torch.empty(0, device=self.device)
        if self.value_function.reads_final_hidden:
            hidden = self._hidden(layout, positions)
        states = self.value_function.states(hidden, layout, positions, detach=False)
        return self.value_function.read(states).clone()

    @torch.no_grad()
    def values_of_plan(self, plan: MicrobatchPlan) -> tuple[Tensor, Tensor]:
        """Return (values [N], final values [B]) of a batch, as `evaluate_plan` does."""
        values = []
        final_values = []
        for batch in plan.batches:
            layout = self.layout(batch)
            with self.autocast():
                both = self.values(layout, torch.cat([layout.predicting, layout.final]))
            values.append(both[: batch.response_count])
            final_values.append(both[batch.response_count :])
        return plan.in_order(torch.cat(values)), plan.sequences_in_order(torch.cat(final_values))

    def set_training(self, gradient_checkpointing: bool) -> None:
        """Enter training mode only for gradient checkpointing, which needs it; dropout is off."""
        self.train(gradient_checkpointing)

    def save_policy(self, directory: str | Path) -> None:
        """Save the policy, with merged adapters, for `AutoModelForCausalLM.from_pretrained`."""
        model = self.causal_lm
        state = full_state(model) if self.peft is None else merged_state(model)
        if any(map(is_quantized, model.modules())):
            model = without_quantization(model)
        model.save_pretrained(directory, state_dict=state)

    def save_value_function(self, path: str | Path) -> None:
        """Save the value head, and a critic's trunk without a vision tower, as safetensors."""
        left_out = self.value_function.shared_names(self.causal_lm)
        state = {
            name: value.contiguous().cpu()
            for name, value in full_state(self.value_function).items()
            if name not in left_out
        }
        save_file(state, path)
