"""The lm-head gives the model's own logits, in full and in chunks."""

from __future__ import annotations

import pytest
import tiny
import torch

import fastppo
from fastppo.data.batch import Batch
from fastppo.models.head import Head, RefStates
from fastppo.models.policy import ActorCritic, LanguageModel

BATCH = Batch.of([[5, 9], [7, 8, 6, 12]], [[10, 11, 1], [13, 3]])


LAYOUT = BATCH.layout()


def _model_logits(causal_lm) -> torch.Tensor:
    """Return the model's own logits [N, V] that predict response tokens."""
    logits = causal_lm(input_ids=LAYOUT.input_ids).logits
    return logits.flatten(0, 1)[LAYOUT.predicting]


def _loss(head: Head, hidden: torch.Tensor, *operands: torch.Tensor, **options):
    """Compute the loss as the trainer does."""
    return fastppo.linear_ppo_loss(
        hidden, head.weight, *operands, bias=head.bias, **head.transform, **options
    )


@pytest.mark.parametrize("architecture", tiny.CONFIGS)
def test_the_loss_through_the_head_is_the_loss_of_the_models_own_logits(architecture: str) -> None:
    """Value and all gradients, with soft-caps, scales, ties and biases."""
    tokens = BATCH.response_tokens
    old = torch.full(tokens.shape, -3.0)
    advantages = torch.linspace(-1, 1, len(tokens))
    options = {"entropy_coef": 0.1, "clip_ratio": None}
    gradients = []
    for through_head in (False, True):
        causal_lm = tiny.model(architecture)
        actor = ActorCritic(causal_lm)
        if through_head:
            actor.check_heads()
            hidden = actor(LAYOUT).hidden
            out = _loss(actor.head, hidden, tokens, old, advantages, **options)
        else:
            out = fastppo.ppo_loss(_model_logits(causal_lm), tokens, old, advantages, **options)
        out.loss.backward()
        named = causal_lm.named_parameters()
        gradients.append(
            {name: p.grad for name, p in named if p.grad is not None} | {"loss": out.loss.detach()}
        )
    theirs, ours = gradients
    # fp32 through two layers and back, relative to the largest gradient: a key's bias, say, has a
    # gradient of exactly 0 in real numbers, and rounding noise of that scale in these.
    scale = max(gradient.abs().max().item() for gradient in theirs.values())
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-6 * scale)


def _states(architecture: str, seed: int = 0) -> tuple[torch.Tensor, Head, torch.Tensor]:
    """Return (hidden, head, the model's own logits) that predict response tokens."""
    causal_lm = tiny.model(architecture, seed)
    model = LanguageModel(causal_lm)
    with torch.no_grad():
        return model.hidden(LAYOUT), model.head, _model_logits(causal_lm)


@pytest.mark.parametrize("architecture", tiny.CONFIGS)
def test_token_stats_are_those_of_the_models_own_softmax(architecture: str) -> None:
    """Logprobs, entropy and, with a reference, the exact KL, in fp64 from both models' logits."""
    temperature = 0.6
    hidden, head, own = _states(architecture)
    ref_hidden, ref_head, ref_own = _states(architecture, seed=1)
    p, q = ((z.double() / temperature).log_softmax(1) for z in (own, ref_own))
    tokens = BATCH.response_tokens
    ref = RefStates(ref_hidden, ref_head)
    assert head.token_stats(hidden, tokens).kl is None
    stats = head.token_stats(hidden, tokens, ref=ref, temperature=temperature)
    logprobs = p.gather(1, tokens[:, None])[:, 0]
    kl = (p.exp() * (p - q)).sum(1)
    assert kl.min() > 1e-4, "the two models differ"
    # fp32 logits; a KL is a difference of such numbers
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(stats.logprobs.double(), logprobs, **close)
    torch.testing.assert_close(stats.entropy.double(), -(p.exp() * p).sum(1), **close)
    torch.testing.assert_close(stats.kl.double(), kl, **close)
