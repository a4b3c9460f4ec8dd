"""Build the decoder or `generate` engine by name, after checking the decoder against `generate`."""

from __future__ import annotations

from typing import Any

from fastppo.models.policy import LanguageModel
from fastppo.rollout import Rollout, RolloutEngine, Sampling
from fastppo.rollout.decoder import DecoderEngine
from fastppo.rollout.generate import GenerateEngine

COMPARED_TOKENS = 6
"""Tokens drawn for each test prompt, enough to expose a wrong position, mask or cache."""


def make_engine(
    name: str,
    policy: LanguageModel,
    tokenizer: Any,
    pad_token_id: int,
    *,
    batch_size: int | None = None,
    final_values: bool = False,
    static_cache: bool = False,
) -> tuple[RolloutEngine, str | None]:
    """Return the engine, and a warning if it differs from the one asked for.

    Args:
        name: `decoder` or `generate`.
        batch_size: number of sequences decoded at once; None decodes all.
        final_values: an argument of `DecoderEngine`.
        static_cache: an argument of `GenerateEngine`.
    """
    generate = GenerateEngine(
        policy.causal_lm,
        pad_token_id,
        batch_size=batch_size,
        compute_dtype=policy.compute_dtype,
        tokenizer=tokenizer,
        static_cache=static_cache and name == "generate",
    )
    if name == "generate":
        return generate, None
    decoder = DecoderEngine(
        policy, batch_size=batch_size, final_values=final_values, tokenizer=tokenizer
    )
    wrong = difference(decoder, generate, policy)
    if wrong is None:
        return decoder, None
    return generate, (
        f"rollout=decoder does not decode {type(policy.causal_lm).__name__} as Hugging Face "
        f"generate does ({wrong}): using rollout=generate"
    )


def difference(engine: RolloutEngine, generate: RolloutEngine, policy: LanguageModel) -> str | None:
    """Compare a few greedy tokens of an engine with `generate`'s on the same weights.

    Equally likely tokens may differ by rounding. The comparison therefore uses the logprobs of the
    likeliest tokens, up to and including the first token that differs.

    Returns:
        The difference as a phrase, or None.
    """
    vocabulary = policy.head.vocabulary
    context = policy.context or 64
    steps = max(1, min(COMPARED_TOKENS, context - 5))
    lengths = [max(1, min(length, context - steps)) for length in (5, 2, 3)]
    prompts = [
        [(7 * row + 3 * i + 3) % vocabulary for i in range(n)] for row, n in enumerate(lengths)
    ]
    sampling = Sampling(max_new_tokens=steps, greedy=True)
    try:
        ours = engine.generate(prompts, sampling)
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
        return f"{type(error).__name__}: {error}"
    return _first_difference(ours, generate.generate(prompts, sampling), policy)


def _first_difference(ours: Rollout, theirs: Rollout, policy: LanguageModel) -> str | None:
    # Allows for rounding in fp32, or in bf16 for logprobs of a few nats; a wrong position changes
    # the first digit.
    relative = 1e-3 if policy.is_full_precision else 5e-2
    assert ours.sampler_logprobs is not None
    assert theirs.sampler_logprobs is not None
    for row, (mine, other) in enumerate(zip(ours.tokens, theirs.tokens, strict=True)):
        length = len(mine)
        for place, (token, other_token) in enumerate(zip(mine, other, strict=True)):
            if token != other_token:
                length = place + 1
                break
        other_logprobs = theirs.sampler_logprobs[row][:length]
        gap = (ours.sampler_logprobs[row][:length] - other_logprobs).abs()
        allowed = relative * (1 + other_logprobs.abs())
        wrong = (~(gap <= allowed)).nonzero().flatten().tolist()
        if wrong:
            first = wrong[0]
            return (
                f"greedy token {first} of a test prompt is {mine[first]} for {other[first]}, and "
                f"its logprob {gap[first].item():.3g} nats off"
            )
    return None
