"""Which engine a run gets: by name, after a check that it decodes the policy as `generate` does."""

from __future__ import annotations

from typing import Any

from fastppo.models.policy import LanguageModel
from fastppo.rollout import Rollout, RolloutEngine, Sampling
from fastppo.rollout.decoder import DecoderEngine
from fastppo.rollout.generate import GenerateEngine

COMPARED_TOKENS = 6
"""Tokens drawn for each prompt: enough for a wrong position, mask or cache to show."""


def make_engine(
    name: str,
    policy: LanguageModel,
    tokenizer: Any,
    pad_token_id: int,
    *,
    batch_size: int | None = None,
    final_values: bool = False,
    fixed_shapes: bool | None = None,
) -> tuple[RolloutEngine, str | None]:
    """The engine of that name, and a sentence where it is another one after all.

    Args:
        name: decoder or generate.
        batch_size: sequences decoded at once; None for all.
        final_values: the learner needs the value after a response that was cut off.
        fixed_shapes: of the decoder; by default on a GPU.
    """
    generate = GenerateEngine(
        policy.causal_lm,
        pad_token_id,
        batch_size=batch_size,
        compute_dtype=policy.compute_dtype,
        tokenizer=tokenizer,
    )
    if name == "generate":
        return generate, None
    decoder = DecoderEngine(
        policy,
        batch_size=batch_size,
        final_values=final_values,
        tokenizer=tokenizer,
        fixed_shapes=fixed_shapes,
    )
    note = None
    wrong = difference(decoder, generate, policy)
    if wrong is not None and decoder.fixed is not None:
        note = f"rollout=decoder decodes without CUDA graphs; with them {wrong}"
        decoder.fixed = None
        wrong = difference(decoder, generate, policy)
    decoder.release()
    if wrong is None:
        return decoder, note
    return generate, (
        f"rollout=decoder does not decode {type(policy.causal_lm).__name__} as Hugging Face "
        f"generate does ({wrong}): using rollout=generate"
    )


def difference(engine: RolloutEngine, generate: RolloutEngine, policy: LanguageModel) -> str | None:
    """How a few greedy tokens of an engine differ from `generate`'s on the same weights; None where
    they do not.

    Tokens may differ where two are equally likely but for rounding. So what is compared, up to the
    first token that differs and with it, is the logprob of the likeliest token.
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
    # Rounding of fp32, or of bf16 for logprobs of a few nats; a wrong position shows in the first
    # digit.
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
