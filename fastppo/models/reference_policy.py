"""The reference policy of the KL, whatever holds its weights.

    a frozen model     a copy of the policy as it started, or another model
    adapters off       with LoRA the reference is the trunk without its adapters: no second model
    an adapter copy    the same after a refresh: the adapters as they were then

`refresh` makes the policy as it is now the reference (Ouyang et al. keep the SFT model; moving the
reference along lets a long run go further from it). KL to it is then 0.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastppo.data.batch import Batch, Layout
from fastppo.models.device import cast_frozen, is_empty
from fastppo.models.head import RefStates
from fastppo.models.policy import ActorCritic, LanguageModel
from fastppo.models.sharding import is_sharded, reshard, sharded_like


class TokenKL(NamedTuple):
    """[N] fp32, nats, of the response tokens."""

    ref_logprobs: Tensor
    kl: Tensor
    """Σ_j p_j (log p_j − log q_j) of policy p and reference q, exact."""


class ReferencePolicy:
    """What the KL is measured to.

    Args:
        policy: whose copy, or adapter-free trunk, it is.
        model: another model instead.

    Attributes:
        is_given: whether it is another model.
        frozen: the model of its own that it holds, if it does.
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
            cast_frozen(self.frozen.causal_lm.base_model, policy.compute_dtype)
            if not is_empty(policy):  # a model without weights is on no device
                self.frozen.to(policy.device)

    @contextmanager
    def loaded(self) -> Iterator[LanguageModel]:
        """The model that gives the reference's logprobs, for the time of the block."""
        if self.frozen is not None:
            self.frozen.packing = self.policy.packing  # one layout is read by both
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
        """Hidden states and head, for a loss with the exact KL that is formed within the block."""
        with self.loaded() as model:
            with torch.no_grad():
                hidden = model.hidden(layout)
            yield RefStates(hidden, model.head)

    @torch.no_grad()
    def logprobs(
        self, batches: Sequence[Batch], temperature: float = 1.0, backend: str = "auto"
    ) -> Tensor:
        """[N] fp32, nats: logprobs of the response tokens of all batches."""
        with self.loaded() as model:
            return torch.cat(
                [model.response_logprobs(batch, temperature, backend) for batch in batches]
            )

    @torch.no_grad()
    def token_kl(
        self, batches: Sequence[Batch], temperature: float = 1.0, backend: str = "auto"
    ) -> TokenKL:
        """Logprobs of the response tokens of all batches, and the policy's exact KL at each."""
        options: dict[str, Any] = {"temperature": temperature, "backend": backend}
        logprobs = []
        kl = []
        with self.policy.autocast():
            # Before the reference takes the trunk's place: with LoRA they are one model.
            states = [self.policy.hidden(self.policy.layout(batch)) for batch in batches]
            with self.loaded() as model:
                for batch, hidden in zip(batches, states, strict=True):
                    tokens = batch.response_tokens
                    ref = RefStates(model.hidden(model.layout(batch)), model.head)
                    logprobs.append(ref.head.token_stats(ref.hidden, tokens, **options).logprobs)
                    stats = self.policy.head.token_stats(hidden, tokens, ref=ref, **options)
                    assert stats.kl is not None
                    kl.append(stats.kl)
        return TokenKL(torch.cat(logprobs), torch.cat(kl))

    @torch.no_grad()
    def refresh(self) -> None:
        """The policy as it is now becomes the reference."""
        reshard(self.policy)
        if self.frozen is None:
            self._adapters = {name: p.detach().clone() for name, p in self._trained()}
        else:
            current = self.policy.causal_lm.state_dict()
            self.frozen.causal_lm.load_state_dict(current)
        self.refreshed = True

    def state_dict(self) -> dict[str, Tensor]:
        """What a checkpoint must hold: nothing, until the first refresh."""
        if not self.refreshed:
            return {}
        if self.frozen is None:
            assert self._adapters is not None
            return dict(self._adapters)
        return dict(self.frozen.causal_lm.named_parameters())

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restores what `state_dict` gave.

        Raises:
            ValueError: it is of another model.
        """
        if not state:
            return
        model = self.policy if self.frozen is None else self.frozen
        weights = dict(
            self._trained() if self.frozen is None else model.causal_lm.named_parameters()
        )
        shapes = {name: weight.shape for name, weight in weights.items()}
        is_real = all(value.is_floating_point() for value in state.values())
        if shapes != {name: value.shape for name, value in state.items()} or not is_real:
            raise ValueError("the checkpoint's reference does not fit the model")
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
            if is_sharded(self.policy):  # a gather reads the shards at the addresses that they have
                self._adapters[name] = parameter.detach().clone()
                parameter.detach().copy_(adapter)
            else:  # storages change places, nothing is written: an earlier graph stays valid
                self._adapters[name] = parameter.data
                parameter.data = adapter


def frozen_copy(model: LanguageModel) -> LanguageModel:
    """A copy of a model, without gradients."""
    frozen = LanguageModel(copy.deepcopy(model.causal_lm), compute_dtype=model.compute_dtype)
    return frozen.requires_grad_(False)
