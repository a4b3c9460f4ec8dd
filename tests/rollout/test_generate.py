"""`generate` samples from the trained policy, and no tensor of size B·T·V is held."""

from __future__ import annotations

import pytest
import tiny
import torch
from allocations import allocations

from fastppo.data.batch import Batch
from fastppo.models.policy import LanguageModel
from fastppo.rollout import Sampling
from fastppo.rollout.generate import GenerateEngine

PROMPTS = [[5, 9, 4], [7], [8, 3, 6, 12, 20]]


def _rollout(architecture: str = "llama", pad: int = 0, **options: object):
    causal_lm = tiny.model(architecture)
    sampling = Sampling(**({"max_new_tokens": 10, "stop_token_ids": (1,)} | options))
    return causal_lm, GenerateEngine(causal_lm, pad).generate(PROMPTS, sampling)


@pytest.mark.parametrize("architecture", tiny.TRAINED)
def test_the_samplers_logprobs_are_the_learners(architecture: str) -> None:
    """Sampling pads on the left and learning on the right."""
    temperature = 0.6
    causal_lm, rollout = _rollout(architecture, temperature=temperature)
    batch = Batch.of(PROMPTS, rollout.tokens)
    learner = LanguageModel(causal_lm).response_logprobs(batch, temperature)
    # fp32, the same sums under other paddings
    torch.testing.assert_close(torch.cat(rollout.logprobs), learner, rtol=1e-4, atol=1e-4)
    assert torch.equal(torch.cat(rollout.sampler_logprobs), torch.cat(rollout.logprobs))


def test_pad_may_be_eos() -> None:
    torch.manual_seed(3)
    _, one = _rollout(pad=0, max_new_tokens=24)
    torch.manual_seed(3)
    _, other = _rollout(pad=1, max_new_tokens=24)
    assert one.tokens == other.tokens
    assert one.finish_reasons == other.finish_reasons


def test_the_models_own_generation_config_does_not_shape_the_samples() -> None:
    """A repetition penalty or top-k in it would sample from another policy than is trained."""
    causal_lm = tiny.model()
    engine = GenerateEngine(causal_lm, 0)
    sampling = Sampling(max_new_tokens=12, stop_token_ids=(1,))
    torch.manual_seed(0)
    plain = engine.generate(PROMPTS, sampling)
    causal_lm.generation_config.repetition_penalty = 5.0
    causal_lm.generation_config.top_k = 1
    own = causal_lm.generation_config
    torch.manual_seed(0)
    assert engine.generate(PROMPTS, sampling).tokens == plain.tokens
    assert causal_lm.generation_config is own


def test_batches_of_the_engine_keep_the_prompts_order() -> None:
    causal_lm = tiny.model()
    sampling = Sampling(max_new_tokens=6, greedy=True, stop_token_ids=(1,))
    at_once = GenerateEngine(causal_lm, 0).generate(PROMPTS, sampling)
    parts = GenerateEngine(causal_lm, 0, batch_size=2).generate(PROMPTS, sampling)
    assert parts.tokens == at_once.tokens


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt2"])
def test_the_static_cache_gives_the_same_tokens(architecture: str) -> None:
    causal_lm = tiny.model(architecture)
    sampling = Sampling(max_new_tokens=8, greedy=True, stop_token_ids=(1,))
    dynamic = GenerateEngine(causal_lm, 0).generate(PROMPTS, sampling)
    static = GenerateEngine(causal_lm, 0, static_cache=True).generate(PROMPTS, sampling)
    assert static.tokens == dynamic.tokens
    pair = torch.cat(static.logprobs), torch.cat(dynamic.logprobs)
    torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("weights", "cache"), [(torch.float32, None), (torch.bfloat16, "static")])
def test_the_static_cache_is_for_weights_in_the_dtype_of_the_products(
    weights: torch.dtype, cache: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under autocast of fp32 weights, a static layer of transformers 5.16 to 5.23 fails."""
    causal_lm = tiny.model().to(weights)
    engine = GenerateEngine(causal_lm, 0, static_cache=True, compute_dtype=torch.bfloat16)
    caches = []
    generate = causal_lm.generate

    def watched(**inputs: object) -> torch.Tensor:
        caches.append(causal_lm.generation_config.cache_implementation)
        return generate(**inputs)

    monkeypatch.setattr(causal_lm, "generate", watched)
    engine.generate(PROMPTS, Sampling(max_new_tokens=3))
    assert caches == [cache]


def test_full_logits_are_not_kept_during_generation() -> None:
    """TRL kept [B, T, V] logits."""
    from transformers import LlamaConfig, LlamaForCausalLM

    vocabulary, steps, rows = 5000, 24, 3
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    engine = GenerateEngine(LlamaForCausalLM(config), 0)
    largest, _ = allocations(lambda: engine.generate(PROMPTS, Sampling(max_new_tokens=steps)))
    # One step's logits in fp64, or the embedding matrix in fp32: [B, V] or [V, H].
    assert largest <= max(8 * rows * vocabulary, 4 * vocabulary * 16)


def test_an_empty_prompt_is_refused_and_no_prompts_give_no_responses() -> None:
    engine = GenerateEngine(tiny.model(), 0)
    with pytest.raises(ValueError, match="empty"):
        engine.generate([[4], []], Sampling(max_new_tokens=2))
    rollout = engine.generate([], Sampling(max_new_tokens=2))
    assert (rollout.tokens, rollout.finish_reasons, rollout.sampler_logprobs) == ([], [], [])
