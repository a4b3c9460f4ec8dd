"""Whether an engine's logprobs are the learner's on the same tokens.

The first update of PPO is on-policy only if they are. `difference` draws a few tokens at start-up,
from prompts of different lengths, so that they are padded; with a prompt that occurs twice, which
the decoder reads once; and once more with a stop token, so that some rows end before others. A
wrong position, mask or cache, and padding that reaches recurrent states, change the first digit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastppo.data.batch import Batch
from fastppo.models.policy import LanguageModel
from fastppo.rollout import RolloutEngine, Sampling

COMPARED_TOKENS = 6
"""Tokens drawn for each test prompt."""

FULL_TOLERANCE = 1e-3
"""Nats, with fp32 products: a rounding error of 2⁻²³ per step, summed over the layers."""
LEAST_TOLERANCE = 0.1
"""Nats, in bf16 with small logits: rounding errors of the layers below the head."""
LOGIT_STEPS = 4 * 2**-8
"""Share of the largest logit, in bf16. A logit is rounded to 2⁻⁹ of itself, and its hidden state
several times before. Logits of 16 to 32 are an eighth apart."""


@torch.no_grad()
def rounding_tolerance(model: LanguageModel, batch: Batch) -> float:
    """Return how far two computations of a batch's logprobs may differ, nats at temperature 1."""
    if model.is_full_precision:
        return FULL_TOLERANCE
    with model.autocast():
        logits = model.head.logits(model.hidden(batch.layout())).abs()
    largest = logits[logits.isfinite()].amax().item() if logits.numel() else 0.0
    return max(LEAST_TOLERANCE, LOGIT_STEPS * largest)


def difference(engine: RolloutEngine, policy: LanguageModel) -> str | None:
    """Compare the logprobs of an engine's greedy tokens with the learner's.

    Returns:
        The difference as a phrase, or None.
    """
    context = policy.context or 64
    steps = max(1, min(COMPARED_TOKENS, context - 5))
    lengths = [max(1, min(length, context - steps)) for length in (5, 2, 3)]
    prompts = [
        [(7 * row + 3 * i + 3) % policy.head.vocabulary for i in range(n)]
        for row, n in enumerate(lengths)
    ]
    prompts.append(prompts[0])
    try:
        drawn, wrong = _compared(engine, policy, prompts, Sampling(steps, greedy=True))
        stop = _stop_of_some_rows(drawn)
        if wrong is None and stop is not None:
            sampling = Sampling(steps, greedy=True, stop_token_ids=(stop,))
            wrong = _compared(engine, policy, prompts, sampling)[1]
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
        return f"{type(error).__name__}: {error}"
    return wrong


def _compared(
    engine: RolloutEngine, policy: LanguageModel, prompts: list[list[int]], sampling: Sampling
) -> tuple[list[list[int]], str | None]:
    """Return an engine's responses, and how its logprobs differ from the learner's, or None."""
    rollout = engine.generate(prompts, sampling)
    assert rollout.logprobs is not None
    batch = Batch.of(prompts, rollout.tokens, policy.device)
    wanted = policy.response_logprobs(batch, backend="torch").cpu()
    gaps: Tensor = (torch.cat(rollout.logprobs) - wanted).abs()
    if (gaps <= rounding_tolerance(policy, batch)).all():
        return rollout.tokens, None
    return rollout.tokens, f"logprobs are up to {gaps.max().item():.3g} nats off"


def _stop_of_some_rows(responses: list[list[int]]) -> int | None:
    """Return a token that ends some responses before others; None if there is none."""
    for token in dict.fromkeys(token for response in responses for token in response):
        ends = {row.index(token) if token in row else len(row) for row in responses}
        if len(ends) > 1:
            return token
    return None
