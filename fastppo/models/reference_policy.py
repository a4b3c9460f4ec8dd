"""The reference policy of the KL. Its weights are one of

    a frozen model     a copy of the initial policy, or another model
    adapters off       with LoRA, the policy without its adapters: no second model in memory
    an adapter copy    with LoRA after a refresh, the adapters of that moment

`refresh` makes the current policy the reference, and the KL becomes 0. Ouyang et al. 2022 keep the
SFT model; moving the reference lets a long run move further from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastppo.data.batch import Batch, Layout
from fastppo.models.device import cast_frozen, is_empty
from fastppo.models.head import RefStates
from fastppo.models.multimodal import copy_sharing_frozen, language_trunk
from fastppo.models.policy import ActorCritic, LanguageModel
from fastppo.models.sharding import is_sharded, reshard, sharded_like


class TokenKL(NamedTuple):
    """Logprobs and KL of the response tokens, [N] fp32 each, in nats."""

    ref_logprobs: Tensor
    kl: Tensor
    """Exact KL of policy p and reference q, Σ_j p_j (log p_j − log q_j)."""


class ReferencePolicy:
    """The reference of the KL.

    Args:
        policy: the reference is a frozen copy of it, or with LoRA the policy without adapters.
        model: a separate model to use instead.

    Attributes:
        is_given: whether `model` was given.
        frozen: the frozen model; None with LoRA.
    """

    def __init__(self, policy: ActorCritic, model: LanguageModel | None = None) -> None:
        self.policy = policy
        self.is_given = model is not None
        self.frozen: LanguageModel | None = None
        self._adapters: dict[str, Tensor] | None = None
        self.refreshed = False
        if model is not None:
            self.frozen = model.requires_grad_(False)
        elif policy.peft is None:
            self.frozen = frozen_copy(policy)
        if self.frozen is not None:
            cast_frozen(language_trunk(self.frozen.causal_lm), policy.compute_dtype)
            if not is_empty(policy):  # the meta device has no copies
                self.frozen.to(policy.device)

    @contextmanager
    def loaded(self) -> Iterator[LanguageModel]:
        """Yield the reference model for the block."""
        if self.frozen is not None:
            self.frozen.packing = self.policy.packing  # both read the same layout
            try:
                yield self.frozen
            finally:
                reshard(self.frozen)
        elif self._adapters is None:
            with self.policy.adapters_off() as model:
                yield model
        else:
            self._swap_adapters()
            try:
                yield self.policy
            finally:
                self._swap_adapters()

    @contextmanager
    def states(self, layout: Layout) -> Iterator[RefStates]:
        """Yield the hidden states and the head that a loss with the exact KL needs."""
        with self.loaded() as model:
            with torch.no_grad():
                hidden = model.hidden(layout)
            yield RefStates(hidden, model.head)

    @torch.no_grad()
    def logprobs(
        self, batches: Sequence[Batch], temperature: float = 1.0, backend: str = "auto"
    ) -> Tensor:
        """Return logprobs of the response tokens of all batches, [N] fp32, nats."""
        with self.loaded() as model:
            return torch.cat(
                [model.response_logprobs(batch, temperature, backend) for batch in batches]
            )

    @torch.no_grad()
    def token_kl(
        self, batches: Sequence[Batch], temperature: float = 1.0, backend: str = "auto"
    ) -> TokenKL:
        """Return logprobs of the response tokens of all batches, and the policy's exact KL."""
        options: dict[str, Any] = {"temperature": temperature, "backend": backend}
        logprobs = []
        kl = []
        with self.policy.autocast():
            # The policy's states come first: with LoRA, policy and reference share the trunk.
            states = [self.policy.hidden(self.policy.layout(batch)) for batch in batches]
            with self.loaded() as model:
                for batch, hidden in zip(batches, states, strict=True):
                    layout = model.layout(batch)
                    tokens = layout.response_tokens
                    ref = RefStates(model.hidden(layout), model.head)
                    logprobs.append(ref.head.token_stats(ref.hidden, tokens, **options).logprobs)
                    stats = self.policy.head.token_stats(hidden, tokens, ref=ref, **options)
                    assert stats.kl is not None
                    kl.append(stats.kl)
        return TokenKL(torch.cat(logprobs), torch.cat(kl))

    @torch.no_grad()
    def refresh(self) -> None:
        """Make the current policy the reference."""
        reshard(self.policy)
        if self.frozen is None:
            self._adapters = {name: p.detach().clone() for name, p in self._trained()}
        else:
            current = self.policy.causal_lm.state_dict()
            self.frozen.causal_lm.load_state_dict(current)
        self.refreshed = True

    def state_dict(self) -> dict[str, Tensor]:
        """Return the weights for a checkpoint; empty before the first refresh."""
        if not self.refreshed:
            return {}
        if self.frozen is None:
            assert self._adapters is not None
            return dict(self._adapters)
        return dict(self.frozen.causal_lm.named_parameters())

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore the state that `state_dict` returned."""
        if not state:
            return
        self.refreshed = True
        if self.frozen is None:
            trained = dict(self._trained())
            self._adapters = {
                name: sharded_like(value, trained[name]) for name, value in state.items()
            }
        else:
            for name, parameter in self.frozen.causal_lm.named_parameters():
                parameter.copy_(sharded_like(state[name], parameter))

    def _trained(self) -> list[tuple[str, torch.nn.Parameter]]:
        parameters = self.policy.causal_lm.named_parameters()
        return [(name, p) for name, p in parameters if p.requires_grad]

    def _swap_adapters(self) -> None:
        assert self._adapters is not None
        reshard(self.policy)
        for name, parameter in self._trained():
            adapter = self._adapters[name]
            if is_sharded(self.policy):  # FSDP gathers from the shards' fixed addresses
                self._adapters[name] = parameter.detach().clone()
                parameter.detach().copy_(adapter)
            else:  # swapping storages keeps the policy's graph valid
                self._adapters[name] = parameter.data
                parameter.data = adapter


def frozen_copy(model: LanguageModel) -> LanguageModel:
    """Return a copy of a model without gradients, which shares its vision tower."""
    copied = copy_sharing_frozen(model.causal_lm, model.causal_lm)
    frozen = LanguageModel(copied, compute_dtype=model.compute_dtype)
    return frozen.requires_grad_(False)
