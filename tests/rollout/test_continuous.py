"""Continuous batching draws from the weights as they are, and leaves nothing behind."""

from __future__ import annotations

import threading
from dataclasses import fields

import pytest
import tiny
import torch
from torch._dynamo.testing import CompileCounter
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from fastppo.data.batch import Batch
from fastppo.models.layers import compile_layers
from fastppo.models.policy import ActorCritic
from fastppo.rollout import FINISHED, TRUNCATED, Rollout, Sampling
from fastppo.rollout.continuous import ContinuousEngine
from fastppo.rollout.generate import GenerateEngine

PROMPTS = [[5, 9, 4, 3, 8, 6, 20, 31, 7, 2], [7], [8, 3, 6, 12, 20], [11, 12]]
PAGE = "page_size" if "page_size" in {f.name for f in fields(ContinuousBatchingConfig)} else None
SMALL = {PAGE or "block_size": 4, "num_blocks": 128, "max_batch_tokens": 64}
"""Pages that prompts of these tests fill."""


def _draw(policy: ActorCritic, seed: int = 0, **options: object) -> Rollout:
    torch.manual_seed(seed)
    sampling = Sampling(**({"max_new_tokens": 12, "stop_token_ids": (1, 2, 3, 4)} | options))
    return ContinuousEngine(policy, **SMALL).generate(PROMPTS, sampling)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2"])
def test_greedy_tokens_are_those_of_generate(architecture: str) -> None:
    policy = ActorCritic(tiny.model(architecture))
    sampling = Sampling(12, greedy=True, stop_token_ids=(1, 2, 3, 4))
    wanted = GenerateEngine(policy.causal_lm, 0).generate(PROMPTS, sampling)
    found = _draw(policy, greedy=True)
    assert found.tokens == wanted.tokens
    assert found.finish_reasons == wanted.finish_reasons


def test_logprobs_are_the_learners_and_the_seed_says_what_is_drawn() -> None:
    policy = ActorCritic(tiny.model())
    chosen = policy.causal_lm.config._attn_implementation
    policy.train()
    threads = set(threading.enumerate())
    found, again, other = (_draw(policy, seed, temperature=0.7) for seed in (1, 1, 2))
    assert found.tokens == again.tokens != other.tokens
    assert {*found.finish_reasons, *other.finish_reasons} == {FINISHED, TRUNCATED}
    wanted = policy.evaluate(Batch.of(PROMPTS, found.tokens), 0.7).logprobs
    torch.testing.assert_close(torch.cat(found.logprobs), wanted, rtol=1e-5, atol=1e-5)
    assert policy.causal_lm.training
    assert policy.causal_lm.config._attn_implementation == chosen
    assert set(threading.enumerate()) <= threads


def test_of_a_restricted_draw_only_the_samplers_logprobs_are_known() -> None:
    policy = ActorCritic(tiny.model())
    found = _draw(policy, top_k=3)
    assert found.logprobs is None
    wanted = policy.evaluate(Batch.of(PROMPTS, found.tokens)).logprobs
    assert (torch.cat(found.sampler_logprobs) > wanted + 1e-3).any()


def test_an_update_is_seen_and_no_stale_prefix_is_served() -> None:
    policy = ActorCritic(tiny.model())
    before = _draw(policy, greedy=True)
    with torch.no_grad():
        for parameter in policy.causal_lm.parameters():
            if parameter.dim() > 1:
                parameter.mul_(-1.1)
    found = _draw(policy, greedy=True)
    sampling = Sampling(12, greedy=True, stop_token_ids=(1, 2, 3, 4))
    assert found.tokens == GenerateEngine(policy.causal_lm, 0).generate(PROMPTS, sampling).tokens
    assert found.tokens != before.tokens


@pytest.mark.parametrize("batch_size", [None, 2])
def test_its_cache_has_the_size_of_the_call(batch_size, monkeypatch) -> None:
    """By itself transformers takes what memory there is."""
    sizes, empty = [], torch.empty

    def counted(*args, **more):
        found = empty(*args, **more)
        sizes.append(found.nbytes)
        return found

    policy = ActorCritic(tiny.model())
    sampling = Sampling(12, greedy=True, stop_token_ids=(1, 2, 3, 4))
    wanted = GenerateEngine(policy.causal_lm, 0).generate(PROMPTS, sampling)
    monkeypatch.setattr(torch, "empty", counted)
    found = ContinuousEngine(policy, batch_size=batch_size).generate(PROMPTS, sampling)
    assert found.tokens == wanted.tokens
    assert 0 < max(sizes) < 2**23


def test_one_call_takes_one_number_of_the_global_generator() -> None:
    policy = ActorCritic(tiny.model())
    _draw(policy, 1)
    after = torch.rand(3)
    _draw(policy, 1, max_new_tokens=3)
    assert torch.equal(torch.rand(3), after)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_layers_run_as_they_are() -> None:
    policy, counter = ActorCritic(tiny.model()), CompileCounter()
    wanted = _draw(policy, greedy=True).tokens
    compile_layers(policy.causal_lm.base_model, backend=counter)
    assert _draw(policy, greedy=True).tokens == wanted
    assert counter.frame_count == 0


@pytest.mark.parametrize(
    "option", [{"min_new_tokens": 2}, {"no_repeat_ngram_size": 2}, {"stop_strings": ("w1",)}]
)
def test_what_it_has_not_is_refused(option) -> None:
    with pytest.raises(ValueError, match=f"rollout=continuous has no {next(iter(option))}"):
        _draw(ActorCritic(tiny.model()), **option)


def test_weights_in_another_dtype_than_the_products_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected weights in torch.bfloat16, got torch.float32"):
        ContinuousEngine(ActorCritic(tiny.model(), compute_dtype=torch.bfloat16))
    policy = ActorCritic(tiny.model().bfloat16(), compute_dtype=torch.bfloat16)
    found = _draw(policy)
    wanted = policy.evaluate(Batch.of(PROMPTS, found.tokens)).logprobs
    # Two ways through bf16: a few roundings of the logits, which are below 16.
    torch.testing.assert_close(torch.cat(found.logprobs), wanted, rtol=0, atol=16 * 2**-7)
