"""Build the decoder or `generate` engine by name, after checking it against the learner."""

from __future__ import annotations

from typing import Any

from fastppo.models.policy import LanguageModel
from fastppo.models.trunk import text_lm_of
from fastppo.rollout import RolloutEngine
from fastppo.rollout.agreement import difference
from fastppo.rollout.decoder import DecoderEngine
from fastppo.rollout.generate import GenerateEngine


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
    """Return the first engine with the learner's logprobs, and a note if it is not the named one.

    The decoder is followed by `generate`, and that by `generate` without padding, for models whose
    recurrent states the padding would reach. Last comes `generate` without a cache, which computes
    what the learner computes.

    Args:
        name: `decoder` or `generate`.
        batch_size: number of sequences decoded at once; None decodes all.
        final_values: an argument of `DecoderEngine`.
        static_cache: an argument of `GenerateEngine`.
    """

    def generate(*, equal_lengths: bool, use_cache: bool = True) -> GenerateEngine:
        return GenerateEngine(
            text_lm_of(policy.causal_lm),
            pad_token_id,
            batch_size=batch_size,
            compute_dtype=policy.compute_dtype,
            tokenizer=tokenizer,
            static_cache=static_cache and name == "generate" and not equal_lengths,
            equal_lengths=equal_lengths,
            use_cache=use_cache,
        )

    candidates: dict[str, RolloutEngine] = {
        "decoder": DecoderEngine(
            policy, batch_size=batch_size, final_values=final_values, tokenizer=tokenizer
        ),
        "generate": generate(equal_lengths=False),
        "generate, with prompts of one length at a time": generate(equal_lengths=True),
        "generate, with prompts of one length at a time and without a cache": generate(
            equal_lengths=True, use_cache=False
        ),
    }
    if name == "generate":
        del candidates["decoder"]
    reasons = []
    for used, engine in candidates.items():
        wrong = difference(engine, policy)
        if wrong is None:
            break
        reasons.append(f"rollout={used}: {wrong}")
    model = type(policy.causal_lm).__name__
    if not reasons:
        return engine, None
    if wrong is None:
        return engine, (
            f"{model}: using rollout={used}, because the logprobs of the usual engine are not "
            f"those of the trainer ({'; '.join(reasons)})"
        )
    return candidates[name], (
        f"{model}: no engine of FastPPO has the trainer's logprobs ({'; '.join(reasons)}); "
        "rollout=vllm or rollout=server may support this model"
    )
