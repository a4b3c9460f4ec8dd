"""The decoder gives `generate`'s greedy tokens and the learner's logprobs and values, and a row's
draws do not depend on the other rows."""

from __future__ import annotations

from typing import Any

import architectures
import pytest
import tiny
import torch
import waits
from torch import nn

from fastppo.data.batch import Batch
from fastppo.models.adapters import add_adapters
from fastppo.models.policy import ActorCritic, LanguageModel
from fastppo.models.value import critic_of_policy
from fastppo.rollout import FINISHED, TRUNCATED, Rollout, Sampling
from fastppo.rollout.decoder import DecoderEngine
from fastppo.rollout.generate import GenerateEngine

PROMPTS = [[5, 9, 4], [7], [8, 3, 6, 12, 20], [11, 12]]
STOP = (1, 2, 3, 4, 5, 6, 7)
"""Many stop tokens, so that rows end at different steps."""


def make_policy(architecture: str = "llama", *, lora: bool = False, **parts: Any) -> ActorCritic:
    """Return a policy with nonzero value head and adapters."""
    causal_lm = tiny.model(architecture)
    peft = None
    if lora:
        peft = add_adapters(causal_lm, rank=4, alpha=8)
        torch.manual_seed(3)
        tiny.stir_adapters(causal_lm)
    policy = ActorCritic(causal_lm, peft, **parts)
    torch.manual_seed(5)
    nn.init.normal_(policy.value_function.head.weight)
    nn.init.constant_(policy.value_function.head.bias, 0.3)
    return policy


def _sampling(**options: object) -> Sampling:
    return Sampling(**({"max_new_tokens": 16, "stop_token_ids": STOP} | options))


def _draw(policy: LanguageModel, seed: int = 0, prompts=PROMPTS, **options: object) -> Rollout:
    engine = {name: options.pop(name) for name in ("batch_size", "tokenizer") if name in options}
    torch.manual_seed(seed)
    return DecoderEngine(policy, final_values=True, **engine).generate(
        prompts, _sampling(**options)
    )


def test_a_policy_in_fp64_is_decoded_with_its_final_values() -> None:
    policy = make_policy("llama").double()
    rollout = _draw(policy, stop_token_ids=())
    wanted = policy.evaluate(Batch.of(PROMPTS, rollout.tokens))
    assert rollout.final_values.dtype == torch.float32
    torch.testing.assert_close(
        rollout.final_values.double(), wanted.final_values, check_dtype=False
    )


@pytest.mark.parametrize("architecture", tiny.CONFIGS)
def test_greedy_tokens_are_those_of_generate(architecture: str) -> None:
    policy = make_policy(architecture)
    sampling = _sampling(greedy=True)
    wanted = GenerateEngine(policy.causal_lm, 0).generate(PROMPTS, sampling)
    actual = DecoderEngine(policy).generate(PROMPTS, sampling)
    assert actual.tokens == wanted.tokens
    assert actual.finish_reasons == wanted.finish_reasons
    torch.testing.assert_close(
        torch.cat(actual.logprobs), torch.cat(wanted.logprobs), rtol=1e-5, atol=1e-5
    )


def test_greedy_tokens_with_adapters_are_those_of_generate() -> None:
    policy = make_policy(lora=True)
    sampling = _sampling(greedy=True)
    wanted = GenerateEngine(policy.causal_lm, 0).generate(PROMPTS, sampling)
    assert DecoderEngine(policy).generate(PROMPTS, sampling).tokens == wanted.tokens
    with policy.adapters_off():
        assert DecoderEngine(policy).generate(PROMPTS, sampling).tokens != wanted.tokens


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        *((architecture, {}) for architecture in tiny.TRAINED),
        ("llama", {"temperature": 0.6}),
        ("llama", {"top_k": 4}),
        ("llama", {"top_p": 0.7}),
    ],
    ids=str,
)
def test_logprobs_and_values_are_the_learners(architecture: str, options) -> None:
    """Under top-k and top-p the logprobs are of the whole softmax; truncated responses have a final
    value."""
    policy = make_policy(architecture)
    rollout = _draw(policy, **options)
    wanted = policy.evaluate(Batch.of(PROMPTS, rollout.tokens), options.get("temperature", 1.0))
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(torch.cat(rollout.logprobs), wanted.logprobs, **close)
    torch.testing.assert_close(torch.cat(rollout.values), wanted.values, **close)
    truncated = torch.tensor(rollout.truncated)
    final = torch.where(truncated, wanted.final_values, 0.0)
    torch.testing.assert_close(rollout.final_values, final, **close)
    gap = torch.cat(rollout.sampler_logprobs) - torch.cat(rollout.logprobs)
    restricted = _sampling(**options).is_restricted
    assert (gap > 1e-3).any() == restricted
    assert (gap >= -1e-6).all()


RECURRENT = (
    "bamba",
    "falcon_h1",
    "falcon_mamba",
    "granitemoehybrid",
    "jamba",
    "lfm2",
    "mamba",
    "mamba2",
    "nemotron_h",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
    "zaya",
)
"""Models with recurrent or convolution states beside, or instead of, attention."""


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_states_leave_with_their_rows_and_never_see_padding(name: str) -> None:
    """Prompts are ragged and some occur twice, and rows end at different steps."""
    policy = ActorCritic(architectures.model(name))
    prompts = [*PROMPTS, PROMPTS[0], PROMPTS[2]]
    rollout = _draw(policy, prompts=prompts)
    assert len({*rollout.lengths}) > 2
    wanted = policy.evaluate(Batch.of(prompts, rollout.tokens))
    # Scans in chunks begin a chunk at another token when prompts are padded.
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(torch.cat(rollout.logprobs), wanted.logprobs, **close)
    torch.testing.assert_close(torch.cat(rollout.values), wanted.values, **close)


def test_a_critic_gives_no_values() -> None:
    causal_lm = tiny.model()
    critic = critic_of_policy(causal_lm)
    for policy in (ActorCritic(causal_lm, None, critic), LanguageModel(causal_lm)):
        rollout = _draw(policy)
        assert rollout.values is None
        assert rollout.final_values is None
        assert rollout.logprobs is not None


def test_a_rows_draws_do_not_depend_on_the_batch_size() -> None:
    policy = make_policy()
    together = _draw(policy)
    assert {*together.finish_reasons} == {FINISHED, TRUNCATED}
    for batch_size in (1, 3):
        assert _draw(policy, batch_size=batch_size).tokens == together.tokens


def test_rows_that_end_leave_the_batch() -> None:
    policy, rows = make_policy("opt"), []
    policy.causal_lm.base_model.register_forward_pre_hook(
        lambda module, args, keywords: rows.append(len(keywords["input_ids"])), with_kwargs=True
    )
    lengths = _draw(policy).lengths
    steps = max(lengths)
    assert len({*lengths}) > 1
    wanted = [sum(length > step for length in lengths) for step in range(steps)]
    truncated = sum(length == 16 for length in lengths)
    assert rows[:steps] == wanted
    assert rows[steps:] in ([], [truncated])


def test_a_stop_string_ends_a_response_at_the_token_that_completes_it() -> None:
    policy, tokenizer = make_policy(), tiny.tokenizer()
    plain = _draw(policy, stop_token_ids=())
    texts = [tokenizer.decode(tokens[3:5]) for tokens in plain.tokens]
    actual = _draw(policy, stop_token_ids=(), stop_strings=(texts[0],), tokenizer=tokenizer)
    assert actual.tokens[0] == plain.tokens[0][:5]
    assert actual.finish_reasons[0] == FINISHED
    assert actual.finish_reasons.count(FINISHED) < len(PROMPTS)
    assert [len(row) for row in actual.values] == actual.lengths
    engine = GenerateEngine(policy.causal_lm, 0, tokenizer=tokenizer)
    greedy = _sampling(greedy=True, stop_token_ids=(), stop_strings=(texts[0], "w3 "))
    ours = DecoderEngine(policy, tokenizer=tokenizer).generate(PROMPTS, greedy)
    theirs = engine.generate(PROMPTS, greedy)
    assert (ours.tokens, ours.finish_reasons) == (theirs.tokens, theirs.finish_reasons)


def test_under_autocast_logprobs_are_the_learners_to_bf16() -> None:
    policy = make_policy(compute_dtype=torch.bfloat16)
    rollout = _draw(policy)
    wanted = policy.evaluate(Batch.of(PROMPTS, rollout.tokens))
    assert torch.cat(rollout.values).dtype == torch.float32
    # A logit z of bf16 is off by 2⁻⁸·z at most; the two ways differ by a few such steps.
    with policy.autocast():
        largest = policy.causal_lm(torch.tensor([PROMPTS[0]])).logits.abs().max().item()
    bound = 4 * 2**-8 * max(1.0, largest)
    torch.testing.assert_close(torch.cat(rollout.logprobs), wanted.logprobs, rtol=0, atol=bound)


def test_an_empty_prompt_is_refused_and_no_prompts_give_no_responses() -> None:
    with pytest.raises(ValueError, match="empty"):
        _draw(make_policy(), prompts=[[4], []])
    assert _draw(make_policy(), prompts=[]).tokens == []


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt2"])
def test_a_prompt_of_several_rows_is_read_once(architecture: str) -> None:
    policy = make_policy(architecture)
    prompts = [prompt for prompt in PROMPTS for _ in range(3)] + PROMPTS[:1]
    read = []
    policy.causal_lm.base_model.register_forward_pre_hook(
        lambda module, args, keywords: read.append(tuple(keywords["input_ids"].shape)),
        with_kwargs=True,
    )

    def draw(batch_size: int | None) -> Rollout:
        torch.manual_seed(0)
        engine = DecoderEngine(policy, batch_size=batch_size, final_values=True)
        return engine.generate(prompts, _sampling())

    alone = draw(1)
    read.clear()
    together = draw(None)
    assert read[0] == (len(PROMPTS), max(map(len, PROMPTS)))
    assert {tokens for _, tokens in read[1:]} == {1}
    assert together.tokens == alone.tokens
    assert len({tuple(tokens) for tokens in together.tokens}) > len(PROMPTS), "rows share draws"
    for name in ("logprobs", "values"):
        torch.testing.assert_close(
            torch.cat(getattr(together, name)),
            torch.cat(getattr(alone, name)),
            rtol=1e-5,
            atol=1e-5,
        )
    torch.testing.assert_close(together.final_values, alone.final_values, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("prompts", [PROMPTS, [[5, 9, 4], [7, 3, 8]]], ids=["ragged", "equal"])
def test_looking_at_tokens_less_often_changes_no_token(prompts: list[list[int]]) -> None:
    policy = make_policy()
    tokenizer = tiny.tokenizer()
    strings = {"stop_strings": ("w9",), "tokenizer": tokenizer}
    for options in ({}, {"top_k": 4}, strings):
        wanted = _draw(policy, prompts=prompts, **options)
        engine = DecoderEngine(policy, final_values=True, tokenizer=options.get("tokenizer"))
        engine.look = 8
        sampling = {key: value for key, value in options.items() if key != "tokenizer"}
        torch.manual_seed(0)
        actual = engine.generate(prompts, _sampling(**sampling))
        assert actual.tokens == wanted.tokens
        assert actual.finish_reasons == wanted.finish_reasons
        close = {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(torch.cat(actual.logprobs), torch.cat(wanted.logprobs), **close)
        torch.testing.assert_close(actual.final_values, wanted.final_values, **close)


def test_no_step_reads_a_value_of_the_device_but_its_tokens() -> None:
    """A call reads a few values at its beginning and end, however many tokens it draws."""
    engine = DecoderEngine(make_policy(), final_values=True)
    engine.look = 8
    reads = []
    for tokens in (8, 24):
        with waits.counted() as seen:
            engine.generate(PROMPTS, _sampling(max_new_tokens=tokens, stop_token_ids=()))
        reads.append(seen)
    assert reads[0] == reads[1]


TURNS = 8


def _conversations(engine: DecoderEngine, first: list[list[int]]) -> tuple[list[Rollout], int]:
    """Return the rollouts of each turn, and the prompt tokens that the trunk computed."""
    computed = []
    handle = engine.policy.causal_lm.base_model.register_forward_pre_hook(
        lambda module, args, keywords: computed.append(keywords["input_ids"]), with_kwargs=True
    )
    conversations, rollouts = first, []
    for turn in range(TURNS):
        # Some turns end at once, some conversations end, and one forgets its last tokens.
        sampling = Sampling(4, stop_token_ids=(1, 2, 3, 4), seed=turn)
        rollouts.append(engine.generate(conversations, sampling))
        conversations = [
            [*conversation, *response, 10 + turn]
            for conversation, response in zip(conversations, rollouts[-1].tokens, strict=True)
        ]
        if turn == 4:
            conversations = [conversations[1], conversations[0][:-4]]
    handle.remove()
    return rollouts, sum(ids.numel() for ids in computed if ids.shape[1] > 1)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen3", "gemma3"])
def test_the_cache_of_earlier_turns_saves_tokens_and_changes_none(architecture: str) -> None:
    policy = make_policy(architecture)
    first = [[5, 9, 4], [7], [8, 3, 6, 12, 20]]
    plain, computed = _conversations(DecoderEngine(policy), first)
    engine = DecoderEngine(policy)
    with engine.conversations():
        kept, computed_with_cache = _conversations(engine, first)
    assert engine.kept is None, "the entries are released"
    for ours, theirs in zip(kept, plain, strict=True):
        assert ours.tokens == theirs.tokens
        # The products of a prompt and of its last tokens are rounded differently.
        close = {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(torch.cat(ours.logprobs), torch.cat(theirs.logprobs), **close)
    if architecture == "gemma3":  # a sliding window cannot go back to an earlier token
        assert computed_with_cache == computed
    else:
        assert computed_with_cache < computed / 3


def test_kept_entries_take_no_more_than_the_largest_cache() -> None:
    engine = DecoderEngine(make_policy())
    with engine.conversations():
        for row in range(4):  # conversations that have nothing in common
            engine.generate([[5 + row, 9, 4, 8]], Sampling(4, seed=row))
        kept = [prefix.tokens for prefix in engine.kept._by_age]
    assert len(kept) == 1
    assert kept[0][:4] == (8, 9, 4, 8)
