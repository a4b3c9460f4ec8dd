"""One trunk, two heads: a causal LM of transformers with a value function on its hidden states.

The trunk runs once per microbatch and gives the hidden states of the positions that predict
response tokens, `[N, H]`, already behind the model's final norm. Both heads read those: the
policy's is the model's own lm-head (tied or not), applied by `fastppo.linear_ppo_loss` without
holding all logits; the value's is one linear layer in fp32 (`fastppo.value_function` has the
others). What a model does to its logits behind the lm-head, a scale or a soft-cap, is read off its
config, and `check_heads` refuses a model for which that is not all.

Dropout is off everywhere: with it the ratio of the first update would not be 1.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from fastppo.batch import Sequences
from fastppo.losses import linear_token_logprobs
from fastppo.value_function import BranchValue, SharedValue


class Head(NamedTuple):
    """The lm-head as the losses take it: z = softcap·tanh(logit_scale·(h Wᵀ + b)/softcap)."""

    weight: Tensor
    bias: Tensor | None
    logit_scale: float
    softcap: float | None

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., V) logits before scale and soft-cap, which the loss applies itself."""
        return nn.functional.linear(hidden, self.weight, self.bias)

    def finished_logits(self, hidden: Tensor) -> Tensor:
        """(..., V) logits as the model's own forward pass returns them."""
        z = self.logits(hidden).float() * self.logit_scale
        return z if self.softcap is None else self.softcap * torch.tanh(z / self.softcap)


def _logit_transform(config: Any) -> tuple[float, float | None]:
    """(logit_scale, softcap) by the names that transformers' configs use for them."""
    text = config.get_text_config()
    scale = 1.0
    for name in ("logit_scale", "lm_head_multiplier"):  # Cohere; Falcon-H1
        scale *= getattr(text, name, None) or 1.0
    scale /= getattr(text, "logits_scaling", None) or 1.0  # Granite
    return float(scale), getattr(text, "final_logit_softcapping", None)  # Gemma


class LanguageModel(nn.Module):
    """A causal LM seen as trunk and head. `causal_lm` may carry PEFT adapters (`peft`)."""

    def __init__(self, causal_lm: PreTrainedModel, peft: Any = None) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self._peft = [peft]  # in a list, so that its modules are not registered a second time
        self.logit_scale, self.softcap = _logit_transform(causal_lm.config)
        if hasattr(causal_lm.get_output_embeddings(), "base_layer"):
            raise ValueError(
                "adapters on the lm_head are not supported: the losses read its weight directly; "
                "leave it out of lora_target_modules"
            )
        switch_dropout_off(causal_lm)
        self.eval()

    @property
    def peft(self) -> Any:
        return self._peft[0]

    @property
    def config(self) -> Any:
        return self.causal_lm.config

    @property
    def context(self) -> int | None:
        """The longest sequence that the model takes, tokens, if its config says."""
        return getattr(self.config.get_text_config(), "max_position_embeddings", None)

    @property
    def device(self) -> torch.device:
        return next(self.causal_lm.parameters()).device

    @property
    def head(self) -> Head:
        """The lm-head; its tensors are the model's own parameters."""
        layer = self.causal_lm.get_output_embeddings()
        return Head(layer.weight, getattr(layer, "bias", None), self.logit_scale, self.softcap)

    def hidden(self, sequences: Sequences, positions: tuple[Tensor, Tensor]) -> Tensor:
        """Final hidden states [N, H] at the (row, column) positions."""
        output = self.causal_lm.base_model(
            input_ids=sequences.input_ids,
            attention_mask=sequences.attention_mask,
            use_cache=False,
        )
        return output.last_hidden_state[positions]

    def token_stats(
        self,
        hidden: Tensor,
        sequences: Sequences,
        temperature: float = 1.0,
        backend: str = "auto",
    ) -> tuple[Tensor, Tensor]:
        """([N] logprobs, [N] entropy), fp32, nats, of the response tokens hidden [N, H] predict."""
        head = self.head
        return linear_token_logprobs(
            hidden,
            head.weight,
            sequences.response_tokens,
            bias=head.bias,
            logit_scale=head.logit_scale,
            softcap=head.softcap,
            temperature=temperature,
            return_entropy=True,
            backend=backend,
        )

    @torch.no_grad()
    def response_logprobs(self, sequences: Sequences, temperature: float = 1.0) -> Tensor:
        """[N] fp32, nats: logprobs of the response tokens, from a forward pass of the trunk."""
        hidden = self.hidden(sequences, sequences.predicting_positions)
        return self.token_stats(hidden, sequences, temperature)[0]

    def language_model_loss(self, input_ids: Tensor, backend: str = "auto") -> Tensor:
        """0-d mean cross entropy of every token but the first, nats, of input_ids [B, S]."""
        output = self.causal_lm.base_model(input_ids=input_ids, use_cache=False)
        head = self.head
        logprobs = linear_token_logprobs(
            output.last_hidden_state[:, :-1],
            head.weight,
            input_ids[:, 1:],
            bias=head.bias,
            logit_scale=head.logit_scale,
            softcap=head.softcap,
            backend=backend,
        )
        return -logprobs.mean()

    @contextmanager
    def adapters_off(self) -> Iterator[LanguageModel]:
        """The model without its adapters: the reference, with no second copy in memory."""
        with self.peft.disable_adapter():
            yield self

    def check_heads(self) -> None:
        """Compares trunk + head with the model's own logits on a small batch.

        Raises:
            ValueError: they differ: the model does something to its logits that is not known here.
        """
        vocab = self.head.weight.shape[0]
        length = min(8, getattr(self.config.get_text_config(), "max_position_embeddings", 8))
        ids = (torch.arange(2 * length, device=self.device).view(2, length) * 7 + 3) % vocab
        with torch.no_grad():
            # Two paths through the same matmuls, so they agree to rounding; what is looked for, a
            # scale or a cap or a second norm, shows in the first digit.
            own = self.causal_lm(input_ids=ids, use_cache=False).logits.float()
            trunk = self.causal_lm.base_model(input_ids=ids, use_cache=False).last_hidden_state
            ours = self.head.finished_logits(trunk)
        if not own.isfinite().all():
            raise ValueError(
                f"{type(self.causal_lm).__name__}: its logits are not finite; do its weights hold "
                "NaN or inf?"
            )
        tolerance = 1e-3 if trunk.dtype == torch.float32 else 5e-2
        worst = (own - ours).abs().max().item() if own.shape == ours.shape else float("inf")
        if not worst <= tolerance * (1 + own.abs().max().item()):
            raise ValueError(
                f"{type(self.causal_lm).__name__}: the lm-head on the final hidden states differs "
                f"from the model's own logits by {worst:.3g} (logits up to "
                f"{own.abs().max().item():.3g}). The model changes its logits in a way that is not "
                f"known here; FastPPO applies logit_scale={self.logit_scale:g} and "
                f"softcap={self.softcap}."
            )


class ActorCritic(LanguageModel):
    """Policy and value function: one call gives what both heads need.

    Args:
        value_function: see `fastppo.value_function`; by default a head on the shared trunk.
    """

    def __init__(
        self,
        causal_lm: PreTrainedModel,
        peft: Any = None,
        value_function: SharedValue | None = None,
    ) -> None:
        super().__init__(causal_lm, peft)
        width = self.head.weight.shape[1]
        self.value_function = value_function or SharedValue(causal_lm.base_model, width)
        switch_dropout_off(self.value_function)
        self.eval()

    def forward(
        self,
        sequences: Sequences,
        positions: tuple[Tensor, Tensor] | None = None,
        *,
        detach_values: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """(hidden [N, H], values [N] fp32) at the (row, column) positions.

        Args:
            positions: by default those that predict response tokens.
            detach_values: no gradient from the values into the policy's trunk.
        """
        if positions is None:
            positions = sequences.predicting_positions
        with self.value_function.watching():
            hidden = self.hidden(sequences, positions)
        return hidden, self.value_function(hidden, sequences, positions, detach=detach_values)

    def check_heads(self) -> None:
        super().check_heads()
        if isinstance(self.value_function, BranchValue):
            self._check_branch(self.value_function)

    @torch.no_grad()
    def _check_branch(self, branch: BranchValue) -> None:
        """A branch that was just copied gives the trunk's own final hidden states."""
        prompt = [token % self.head.weight.shape[0] for token in range(3, 8)]
        sequences = Sequences.pack([prompt], [prompt[:2]], 0, self.device)
        positions = sequences.predicting_positions
        with branch.watching():
            hidden = self.hidden(sequences, positions)
        copied = branch.states(hidden, sequences, positions, False)
        if not torch.allclose(copied.float(), hidden.float(), rtol=1e-3, atol=1e-3):
            raise ValueError(
                f"value_model=branch: the copied layers of {type(self.causal_lm).__name__} do not "
                "give its final hidden states; its trunk does more than call its layers in turn. "
                "Use value_model=critic"
            )

    def set_training(self, gradient_checkpointing: bool) -> None:
        """transformers checkpoints activations in training mode only; dropout is off in both."""
        self.train(gradient_checkpointing)

    def save_policy(self, directory: str | Path) -> None:
        """Writes the policy alone, adapters merged, for `AutoModelForCausalLM.from_pretrained`."""
        merged = _merged_state(self.causal_lm) if self.peft is not None else None
        self.causal_lm.save_pretrained(directory, state_dict=merged)

    def save_value_function(self, path: str | Path) -> None:
        """Writes the value function alone, as safetensors: its head, and the layers it owns."""
        state = self.value_function.state_dict()
        save_file({name: value.contiguous().cpu() for name, value in state.items()}, path)

    def load_value_function(self, path: str | Path) -> None:
        self.value_function.load_state_dict(load_file(path))


def _merged_state(causal_lm: PreTrainedModel) -> dict[str, Tensor]:
    """State of the plain model with each adapter's weights added in; the model is left as it is."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers: dict[str, Any] = {
        name: m for name, m in causal_lm.named_modules() if isinstance(m, BaseTunerLayer)
    }
    state = {}
    for name, value in causal_lm.state_dict().items():
        owner = next((layer for layer in layers if name.startswith(f"{layer}.")), None)
        if owner is None:
            state[name] = value
        elif name.startswith(f"{owner}.base_layer."):
            leaf = name.removeprefix(f"{owner}.base_layer.")
            if leaf == "weight":
                layer = layers[owner]
                for adapter in layer.active_adapters:
                    delta = layer.get_delta_weight(adapter)
                    value = value + delta.to(value.dtype)
            state[f"{owner}.{leaf}"] = value
    return state


def switch_dropout_off(model: nn.Module) -> None:
    """Sets every dropout probability in the model to 0, modules and plain attributes alike."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and "drop" in name:
                setattr(module, name, 0.0)


def checkpoint_activations(causal_lm: PreTrainedModel) -> None:
    """Recomputes activations in the backward pass, in training mode."""
    # The method's name changed in the course of transformers 5.
    enable = getattr(causal_lm, "activation_checkpointing_enable", None)
    (enable or causal_lm.gradient_checkpointing_enable)({"use_reentrant": False})


def add_adapters(
    model: PreTrainedModel,
    rank: int,
    alpha: float,
    target_modules: list[str] | None,
    task_type: str = "CAUSAL_LM",
) -> Any:
    """LoRA adapters on the model, in place: returns the PEFT model around it.

    Args:
        task_type: CAUSAL_LM, or SEQ_CLS, which trains the classifier's head in full.

    Raises:
        ImportError: peft is not installed.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ImportError("lora_rank > 0 needs peft: pip install peft") from error
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]
        lora_dropout=0.0,
        target_modules=target_modules or "all-linear",
        # GPT-2 keeps its weights transposed, and PEFT wants to be told.
        fan_in_fan_out=any(type(module).__name__ == "Conv1D" for module in model.modules()),
        task_type=task_type,
    )
    return get_peft_model(model, config)


def frozen_copy(model: LanguageModel) -> LanguageModel:
    """A reference: the same weights, without gradients."""
    reference = LanguageModel(copy.deepcopy(model.causal_lm))
    return reference.requires_grad_(False)


def autocast(device: torch.device, dtype: torch.dtype | None) -> Any:
    """bf16 autocast on the device, or nothing for None."""
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)
