"""The self-check before the first update."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from rich.console import Console

from fastppo.data.batch import Batch
from fastppo.ppo.setup.checks import (
    CHECKED_PROMPTS,
    CHECKED_TOKENS,
    check_on_policy,
    few_prompts,
    self_check,
)
from fastppo.rollout.agreement import rounding_tolerance
from fastppo.rollout.generate import GenerateEngine
from runs import Watched, make_trainer


def test_a_reference_with_other_weights_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    assert trainer.parts.prompts is not None
    assert trainer.reference is not None
    with torch.no_grad(), trainer.reference.loaded() as reference:
        reference.head.weight.mul_(1.5)
    with pytest.raises(RuntimeError, match="fresh reference's logprobs differ"):
        self_check(trainer)


def test_a_sampler_of_another_policy_is_refused(tmp_path: Path) -> None:
    def lower(rollout, *_) -> None:
        rollout.logprobs = [logprobs - 0.5 for logprobs in rollout.logprobs]

    trainer = make_trainer(tmp_path)
    trainer.engine = Watched(trainer.engine, lower)
    with pytest.raises(RuntimeError, match=r"the sampler's logprobs differ .* by up to 0\.5 nats"):
        trainer.train()


def test_a_quantized_sampler_gets_a_sentence_in_place_of_an_error(tmp_path: Path) -> None:
    """Weights in fp8 differ from the policy's by more than rounding; other weights are refused."""
    console = Console(file=io.StringIO(), width=200)
    trainer = make_trainer(tmp_path, console=console)
    quantized = tiny.model()
    quantized.load_state_dict(trainer.model.causal_lm.state_dict())
    with torch.no_grad():
        for weight in quantized.parameters():
            weight.copy_(weight.to(torch.float8_e4m3fn).float())
    trainer.engine = GenerateEngine(quantized, 0)
    with pytest.raises(RuntimeError, match="the sampler's logprobs differ"):
        self_check(trainer)
    trainer.engine.is_quantized = True
    self_check(trainer)
    assert "quantized" in console.file.getvalue()
    with torch.no_grad():
        quantized.get_output_embeddings().weight.mul_(-3)
    with pytest.raises(RuntimeError, match="the sampler's logprobs differ"):
        self_check(trainer)


def test_the_self_check_is_short_and_leaves_the_random_state(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_new_tokens=20)
    asked = []

    def note(rollout, prompt_ids, sampling) -> None:
        asked.append((len(prompt_ids), sampling.max_new_tokens))

    state = torch.get_rng_state()
    check_on_policy(
        few_prompts(trainer.parts),
        trainer.config,
        model=trainer.model,
        engine=Watched(trainer.engine, note),
        sampling=trainer.parts.sampling,
        fresh_reference=trainer.reference,
    )
    assert asked == [(CHECKED_PROMPTS, CHECKED_TOKENS)]
    assert torch.equal(torch.get_rng_state(), state)


def _with_logits_up_to(model, batch: Batch, largest: float) -> None:
    """Scale the lm-head to a largest logit of this size, as in trained models."""
    with torch.no_grad(), model.autocast():
        now = model.head.logits(model.hidden(batch.layout())).abs().max()
        model.head.weight.mul_(largest / now)


@pytest.mark.parametrize("largest", [8, 67])
def test_large_logits_pass_in_bf16(largest: float, tmp_path: Path) -> None:
    """bf16 logits between 16 and 32 are 0.125 apart, so no fixed tolerance fits all models."""
    trainer = make_trainer(tmp_path, precision="bf16", rollout="generate", kl_coef=0.0)
    few = trainer.parts.prompts.token_ids[:CHECKED_PROMPTS]
    rollout = trainer.engine.generate(few, trainer.parts.sampling)
    batch = Batch.of(few, rollout.tokens)
    _with_logits_up_to(trainer.model, batch, largest)
    wanted = max(0.1, 4 * 2**-8 * largest)
    assert rounding_tolerance(trainer.model, batch) == pytest.approx(wanted, rel=0.02)
    for seed in range(2):
        torch.manual_seed(seed)
        trainer.parts.prompts.token_ids[:CHECKED_PROMPTS] = [
            [5 + seed, 9, 4],
            [7],
            [8, 3, 6, 12],
            [2],
        ]
        state = torch.get_rng_state()
        self_check(trainer)
        assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("largest", [8, 67])
@pytest.mark.parametrize("mistake", ["positions", "weights"])
def test_a_real_mistake_is_refused_in_bf16(mistake: str, largest: float, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, precision="bf16", rollout="generate", kl_coef=0.0)
    few = trainer.parts.prompts.token_ids[:CHECKED_PROMPTS]
    batch = Batch.of(few, trainer.engine.generate(few, trainer.parts.sampling).tokens)
    _with_logits_up_to(trainer.model, batch, largest)

    def mistake_them(rollout, prompt_ids, _) -> None:
        other = tiny.model(seed=1) if mistake == "weights" else trainer.model.causal_lm
        rollout.logprobs = []
        with torch.no_grad():
            if mistake == "weights":
                other.get_output_embeddings().weight.copy_(trainer.model.head.weight)
            # A larger effect than rounding in bf16.
            shift = 17 if mistake == "positions" else 0
            for prompt, response in zip(prompt_ids, rollout.tokens, strict=True):
                ids = torch.tensor([prompt + response])
                at = torch.arange(ids.shape[1]).unsqueeze(0)
                at[:, len(prompt) :] += shift
                logits = other(ids, position_ids=at).logits[0, len(prompt) - 1 : -1]
                logprobs = logits.float().log_softmax(-1)
                rollout.logprobs.append(logprobs[range(len(response)), response])

    trainer.engine = Watched(trainer.engine, mistake_them)
    with pytest.raises(RuntimeError, match="the sampler's logprobs differ"):
        self_check(trainer)


def test_top_k_may_raise_the_samplers_logprobs(tmp_path: Path) -> None:
    """With restricted logprobs only, higher ones are valid and lower ones a mistake."""
    trainer = make_trainer(tmp_path, top_k=5)
    added = 0.0

    def process(rollout, *_) -> None:
        rollout.logprobs = None
        rollout.sampler_logprobs = [logprobs + added for logprobs in rollout.sampler_logprobs]

    trainer.engine = Watched(trainer.engine, process)
    self_check(trainer)
    added = -9.0
    with pytest.raises(RuntimeError, match="the sampler's logprobs differ"):
        self_check(trainer)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"warmup_steps": 99}, "warmup_steps=99: the run has"),
        ({"lora_alpha": 8.0}, "set, but not used: lora_alpha, which needs lora_rank"),
        ({"max_turns": 3}, "max_turns, which needs environment"),
        ({"top_k": 5}, "top_k and top_p exclude tokens"),
        ({"top_p": 0.9}, "top_k and top_p exclude tokens"),
        ({"vf_coef": 0.0, "value_head": "gradient"}, "GRPO and RLOO need none"),
    ],
)
def test_unusual_or_unused_options_get_a_warning(
    options: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    told = []
    for chosen in ({}, options):
        console = Console(file=io.StringIO(), width=200)
        trainer = make_trainer(tmp_path, console=console, **chosen)
        self_check(trainer)
        told.append(sentence in console.file.getvalue())
    assert told == [False, True]
