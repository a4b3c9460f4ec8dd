"""Every kind of reference policy gives the numbers of a plain softmax."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import tiny
import torch

from fastppo import linear_ppo_loss
from fastppo.models.adapters import add_adapters
from fastppo.models.policy import ActorCritic, LanguageModel
from fastppo.models.reference_policy import ReferencePolicy

BATCHES = [tiny.random_batch((5, 3, 1)), tiny.random_batch((2, 6))]
TOKENS = torch.cat([batch.response_tokens for batch in BATCHES])
TEMPERATURE = 0.7


def _log_softmax(causal_lm: Any) -> torch.Tensor:
    """Return [N, V] of all response tokens, from the model's own logits."""
    rows = []
    for batch in BATCHES:
        layout = batch.layout()
        with torch.no_grad():
            logits = causal_lm(input_ids=layout.input_ids).logits
        rows.append(logits.flatten(0, 1)[layout.predicting])
    return (torch.cat(rows) / TEMPERATURE).log_softmax(1)


def _policy(lora: bool = False) -> ActorCritic:
    causal_lm = tiny.model()
    return ActorCritic(causal_lm, add_adapters(causal_lm, rank=4, alpha=8.0) if lora else None)


def _move(policy: ActorCritic, seed: int) -> None:
    """Change the trained weights."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.causal_lm.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


class Case(NamedTuple):
    policy: ActorCritic
    reference: ReferencePolicy
    q: torch.Tensor
    """[N, V] log-softmax of the reference."""


def _case(kind: str) -> Case:
    """Make a policy that has moved away from its reference."""
    policy = _policy(lora="adapters" in kind)
    if kind == "given":
        other = tiny.model(seed=1)
        reference = ReferencePolicy(policy, LanguageModel(other))
        q = _log_softmax(other)
    else:
        q = _log_softmax(policy.causal_lm)
        reference = ReferencePolicy(policy)
    _move(policy, 1)
    if "refreshed" in kind:
        reference.refresh()
        q = _log_softmax(policy.causal_lm)
        _move(policy, 2)
    return Case(policy, reference, q)


KINDS = ("frozen", "given", "adapters", "frozen, refreshed", "adapters, refreshed")


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_and_exact_kl_are_those_of_a_plain_log_softmax(kind: str) -> None:
    policy, reference, q = _case(kind)
    p = _log_softmax(policy.causal_lm)
    ref_logprobs = q.gather(1, TOKENS[:, None])[:, 0]
    kl = (p.exp() * (p - q)).sum(1)
    assert kl.min() > 1e-4, "the policy has moved"
    actual = reference.token_kl(BATCHES, TEMPERATURE)
    # fp32, the same products in other shapes
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(reference.logprobs(BATCHES, TEMPERATURE), ref_logprobs, **close)
    torch.testing.assert_close(actual.ref_logprobs, ref_logprobs, **close)
    torch.testing.assert_close(actual.kl, kl, **close)
    assert torch.equal(_log_softmax(policy.causal_lm), p), "the policy is unchanged"


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_with_reference_states_has_the_policys_gradient(kind: str) -> None:
    """With adapters, policy and reference share a model, and the policy's graph must stay valid."""
    policy, reference, q = _case(kind)
    (batch, _), trained = BATCHES, [p for p in policy.causal_lm.parameters() if p.requires_grad]
    tokens, count = batch.response_tokens, batch.response_count
    layout, zeros = batch.layout(), torch.zeros(count)
    hidden = policy.hidden(layout)
    with reference.states(layout) as ref:
        assert not ref.hidden.requires_grad
        out = linear_ppo_loss(
            hidden,
            policy.head.weight,
            tokens,
            zeros,
            zeros,
            **ref.operands,
            kl_coef=1.0,
            kl_estimator="full",
            temperature=TEMPERATURE,
        )
    actual = torch.autograd.grad(out.loss, trained, allow_unused=True)
    p = (policy.head.logits(policy.hidden(layout)) / TEMPERATURE).log_softmax(1)
    written = (p.exp() * (p - q[:count])).sum(1).mean()
    torch.testing.assert_close(out.loss, written, rtol=1e-4, atol=1e-6)
    wanted = torch.autograd.grad(written, trained, allow_unused=True)
    scale = max(gradient.abs().max().item() for gradient in wanted if gradient is not None)
    for one, other in zip(actual, wanted, strict=True):
        # fp32 through two layers and back, relative to the largest gradient
        if other is not None:
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5 * scale)


@pytest.mark.parametrize("kind", ["frozen", "adapters"])
def test_a_reference_has_no_state_before_its_first_refresh(kind: str) -> None:
    _, reference, _ = _case(kind)
    assert reference.state_dict() == {}
    reference.load_state_dict({})
    assert not reference.refreshed
    reference.refresh()
    assert reference.refreshed
    assert reference.state_dict()
