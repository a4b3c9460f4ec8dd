"""Checks before a run and before a step, and what becomes of a step that is not finite."""

from __future__ import annotations

import io
import random
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from rich.console import Console
from transformers import set_seed

from fastppo.data.batch import Batch
from fastppo.data.world import World
from fastppo.ppo.checks import (
    CHECKED_PROMPTS,
    CHECKED_TOKENS,
    check_on_policy,
    check_responses,
    check_scores,
    odd_options,
    random_state_restored,
    rounding_tolerance,
    skip_step,
)
from fastppo.ppo.config import PPOConfig
from fastppo.ppo.state import RunState
from fastppo.rollout import Rollout, RolloutEngine
from fastppo.run.skipped import load_batch
from runs import first_experience, make_trainer, one_step

# ----------------------------------------------------------------------------------- before a run


def test_the_self_check_sees_a_reference_that_is_not_fresh(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    assert trainer.prompts is not None
    assert trainer.reference is not None
    with torch.no_grad(), trainer.reference.loaded() as reference:
        reference.head.weight.mul_(1.5)
    with pytest.raises(RuntimeError, match="fresh reference's logprobs differ"):
        trainer.self_check(trainer.prompts)


def test_the_self_check_sees_a_sampler_of_another_policy(tmp_path: Path) -> None:
    class Stale(RolloutEngine):
        def __init__(self, engine) -> None:
            self.engine = engine

        def generate(self, prompt_ids, sampling) -> Rollout:
            rollout = self.engine.generate(prompt_ids, sampling)
            rollout.logprobs = [logprobs - 0.5 for logprobs in rollout.logprobs]
            return rollout

    trainer = make_trainer(tmp_path)
    trainer.engine = Stale(trainer.engine)
    with pytest.raises(RuntimeError, match=r"the sampler's logprobs differ .* by up to 0\.5 nats"):
        trainer.train()


def test_the_self_check_takes_a_few_short_responses_and_no_random_numbers(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_new_tokens=20)
    asked = []

    class Recorded(RolloutEngine):
        def generate(self, prompt_ids, sampling) -> Rollout:
            asked.append((len(prompt_ids), sampling.max_new_tokens))
            return trainer.engine.generate(prompt_ids, sampling)

    state = torch.get_rng_state()
    check_on_policy(
        trainer.model,
        trainer.reference,
        Recorded(),
        trainer.prompts,
        trainer.sampling,
        trainer.config,
        reference_is_fresh=True,
    )
    assert asked == [(CHECKED_PROMPTS, CHECKED_TOKENS)]
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("kind", ["given", "not fresh"])
def test_a_reference_that_may_differ_is_not_compared(kind: str, tmp_path: Path) -> None:
    given = {"reference": tiny.model(seed=1)} if kind == "given" else {}
    trainer = make_trainer(tmp_path, **given)
    if kind == "not fresh":
        with torch.no_grad(), trainer.reference.loaded() as reference:
            reference.head.weight.mul_(1.5)
    check_on_policy(
        trainer.model,
        trainer.reference,
        trainer.engine,
        trainer.prompts,
        trainer.sampling,
        trainer.config,
        reference_is_fresh=kind == "given",
    )


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_the_tolerance_is_that_of_the_compute_dtype(precision: str, tmp_path: Path) -> None:
    """A difference of 0.05 nats may be rounding under bf16; under fp32 it is another policy."""
    trainer = make_trainer(tmp_path, precision=precision, kl_coef=0.0)
    engine = trainer.engine

    class Near(RolloutEngine):
        def generate(self, prompt_ids, sampling) -> Rollout:
            rollout = engine.generate(prompt_ids, sampling)
            own = trainer.model.evaluate(Batch.of(prompt_ids, rollout.tokens)).logprobs
            rollout.logprobs = list((own - 0.05).split(rollout.lengths))
            return rollout

    trainer.engine = Near()
    if precision == "bf16":
        trainer.self_check(trainer.prompts)
    else:
        with pytest.raises(RuntimeError, match=r"by up to 0\.05 nats \(tolerance 0\.001\)"):
            trainer.self_check(trainer.prompts)


def _with_logits_up_to(model, batch: Batch, largest: float) -> None:
    """Scales the lm-head so that the largest logit of the batch has this size, as trained models'
    have."""
    with torch.no_grad(), model.autocast():
        now = model.head.logits(model.hidden(batch.layout())).abs().max()
        model.head.weight.mul_(largest / now)


@pytest.mark.parametrize("largest", [8, 33, 67])
def test_logits_as_large_as_trained_ones_pass_under_bf16(largest: float, tmp_path: Path) -> None:
    """One step of bf16 is 0.125 for logits between 16 and 32, so no fixed bound fits them all."""
    trainer = make_trainer(tmp_path, precision="bf16", rollout="generate", kl_coef=0.0)
    few = trainer.prompts.token_ids[:CHECKED_PROMPTS]
    rollout = trainer.engine.generate(few, trainer.sampling)
    batch = Batch.of(few, rollout.tokens)
    _with_logits_up_to(trainer.model, batch, largest)
    wanted = max(0.1, 4 * 2**-8 * largest)
    assert rounding_tolerance(trainer.model, batch) == pytest.approx(wanted, rel=0.02)
    for seed in range(5):
        torch.manual_seed(seed)
        trainer.prompts.token_ids[:CHECKED_PROMPTS] = [[5 + seed, 9, 4], [7], [8, 3, 6, 12], [2]]
        state = torch.get_rng_state()
        trainer.self_check(trainer.prompts)
        assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("largest", [8, 33, 67])
@pytest.mark.parametrize("mistake", ["positions", "weights"])
def test_a_real_mistake_is_refused_under_bf16_too(
    mistake: str, largest: float, tmp_path: Path
) -> None:
    trainer = make_trainer(tmp_path, precision="bf16", rollout="generate", kl_coef=0.0)
    few = trainer.prompts.token_ids[:CHECKED_PROMPTS]
    batch = Batch.of(few, trainer.engine.generate(few, trainer.sampling).tokens)
    _with_logits_up_to(trainer.model, batch, largest)
    own = trainer.engine

    class Mistaken(RolloutEngine):
        def generate(self, prompt_ids, sampling) -> Rollout:
            rollout = own.generate(prompt_ids, sampling)
            other = tiny.model(seed=1) if mistake == "weights" else trainer.model.causal_lm
            with torch.no_grad():
                if mistake == "weights":
                    other.get_output_embeddings().weight.copy_(trainer.model.head.weight)
                shift = 9 if mistake == "positions" else 0
                found = []
                for prompt, response in zip(prompt_ids, rollout.tokens, strict=True):
                    ids = torch.tensor([prompt + response])
                    at = torch.arange(ids.shape[1]).unsqueeze(0)
                    at[:, len(prompt) :] += shift
                    logits = other(ids, position_ids=at).logits[0, len(prompt) - 1 : -1]
                    logprobs = logits.float().log_softmax(-1)
                    found.append(logprobs[range(len(response)), response])
            rollout.logprobs = found
            return rollout

    trainer.engine = Mistaken()
    with pytest.raises(RuntimeError, match="the sampler's logprobs differ"):
        trainer.self_check(trainer.prompts)


def test_what_a_restriction_adds_to_the_samplers_logprobs_is_no_mistake(tmp_path: Path) -> None:
    """An engine that tells only what it drew from: higher is a restriction, lower a mistake."""
    trainer = make_trainer(tmp_path, top_k=5)
    own, added = trainer.engine, 0.0

    class Processed(RolloutEngine):
        def generate(self, prompt_ids, sampling) -> Rollout:
            rollout = own.generate(prompt_ids, sampling)
            rollout.logprobs = None
            rollout.sampler_logprobs = [each + added for each in rollout.sampler_logprobs]
            return rollout

    trainer.engine = Processed()
    trainer.self_check(trainer.prompts)
    added = -9.0
    with pytest.raises(RuntimeError, match="the sampler's logprobs differ"):
        trainer.self_check(trainer.prompts)


def _drawn() -> list[float]:
    """Of every generator that a reward or an environment may draw from."""
    return [torch.rand(()).item(), float(np.random.rand()), random.random()]


def test_random_draws_inside_leave_no_trace_outside() -> None:
    set_seed(3)
    wanted = _drawn()
    set_seed(3)
    with random_state_restored():
        set_seed(99)
        assert _drawn() != wanted
    assert _drawn() == wanted


def test_a_seed_decides_what_is_drawn_inside() -> None:
    found = []
    for outside in (1, 2):
        set_seed(outside)
        with random_state_restored(7):
            found.append(_drawn())
        with random_state_restored():
            found.append(_drawn())
    assert found[0] == found[2]
    assert not {*found[1]} & {*found[3]}, "without a seed it goes on from where it was"


def test_a_warm_up_longer_than_the_run_is_odd() -> None:
    steps = PPOConfig(iterations=2, ppo_epochs=2, minibatches=2).optimizer_steps
    for warmup in (0, steps):
        options = {"iterations": 2, "ppo_epochs": 2, "minibatches": 2, "warmup_steps": warmup}
        assert odd_options(PPOConfig(**options)) == []
    (sentence,) = odd_options(PPOConfig(**{**options, "warmup_steps": steps + 1}))
    assert sentence.startswith("warmup_steps=9: the run has 8 optimiser steps")


def test_a_warm_up_longer_than_the_run_is_told(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=200)
    make_trainer(tmp_path, iterations=1, warmup_steps=99, console=console).train()
    assert "warmup_steps=99: the run has" in console.file.getvalue()


# ---------------------------------------------------------------------- before a step that is given

GOOD = ([[4, 5], [6]], [[7, 1], [8]], ["stop", "length"])


def test_responses_that_fit_pass() -> None:
    check_responses(GOOD[0], Rollout(*GOOD[1:]), vocabulary=9, context=4)
    check_responses(GOOD[0], Rollout(*GOOD[1:]), vocabulary=9, context=None)


@pytest.mark.parametrize(
    ("prompts", "responses", "reasons", "says"),
    [
        ([[4], [5]], [[6], []], ["stop"] * 2, "response 1 is empty"),
        ([[4, 4, 4]], [[5, 5]], ["stop"], "prompt and response 0 have 5 tokens; the model's conte"),
        ([[4]], [[9]], ["stop"], r"prompt or response 0 has tokens outside \[0, 9\)"),
        ([[9]], [[4]], ["stop"], r"prompt or response 0 has tokens outside \[0, 9\)"),
        ([[4]], [[-1]], ["stop"], r"prompt or response 0 has tokens outside \[0, 9\)"),
        ([[4]], [[5]], [], r"finish_reasons must be 1 of stop or length, got \[\]"),
        ([[4]], [[5]], ["eos"], r"finish_reasons must be 1 of stop or length, got \['eos'\]"),
    ],
)
def test_responses_that_do_not_fit_are_refused(prompts, responses, reasons, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check_responses(prompts, Rollout(responses, reasons), vocabulary=9, context=4)


@pytest.mark.parametrize("scores", [[1, 2.5], (1.0, 2.5), torch.tensor([1.0, 2.5]).double()])
def test_scores_of_any_kind_become_fp32_on_the_cpu(scores) -> None:
    found = check_scores(scores, 2)
    assert found.tolist() == [1.0, 2.5]
    assert (found.dtype, found.device.type) == (torch.float32, "cpu")


@pytest.mark.parametrize(
    ("scores", "says"),
    [
        ([1.0], r"scores must be \[2\], got \[1\]"),
        ([[1.0], [2.0]], r"scores must be \[2\], got \[2, 1\]"),
        (1.0, r"scores must be \[2\], got \[\]"),
        ([1.0, float("nan")], r"scores must be finite, got \[1.0, nan\]"),
        ([1.0, 1e39], r"scores must be finite, got \[1.0, inf\]"),
    ],
)
def test_scores_that_do_not_fit_are_refused(scores, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check_scores(scores, 2)


# --------------------------------------------------------------------------------- a step not taken


def test_a_non_finite_gradient_skips_the_step_and_at_last_stops_the_run(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    experience = first_experience(trainer)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    experience.advantages[0] = float("nan")
    trainer.update(experience, one_step(trainer))
    assert trainer.state.skipped_steps == 1
    for old, parameter in zip(before, trainer.model.parameters(), strict=True):
        assert torch.equal(old, parameter)
    with pytest.raises(FloatingPointError, match="5 optimiser steps in a row"):
        trainer.update(experience, one_step(trainer, ppo_epochs=9))


def test_the_batch_of_a_skipped_step_is_saved(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, ppo_epochs=1, minibatches=1)
    experience = first_experience(trainer)
    experience.advantages[0] = float("nan")
    metrics = trainer.update(experience, trainer.config)
    assert metrics["skipped_steps"] == 1
    tensors, record = load_batch(tmp_path / "run" / "skipped" / "step-000000.safetensors")
    assert record["non_finite"] == "loss"
    assert "causal_lm.lm_head.weight" in record["parameters"]
    assert tensors["advantages"].isnan().sum() == 1
    assert {"tokens", "old_logprobs", "returns", "response_lengths"} <= tensors.keys()


def test_the_sentence_names_what_was_not_finite_and_where_its_batch_is(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    state = RunState.of(trainer.config)
    state.iteration, state.optimizer_step = 4, 17
    experience = first_experience(trainer)
    norms = {"loss": 1.0, "grad_norm": float("inf"), "value_grad_norm": 2.0}
    sentence = skip_step(trainer.model, experience, state, norms, trainer.config, World())
    path = tmp_path / "run" / "skipped" / "step-000017.safetensors"
    assert sentence == f"optimiser step 17: grad_norm inf; skipped, batch in {path}"
    assert (state.skipped_steps, state.skipped_in_a_row) == (1, 1)
    tensors, record = load_batch(path)
    assert record == {"iteration": 4, "step": 17, "non_finite": "grad_norm", "parameters": []}
    assert torch.equal(tensors["tokens"], experience.batch.tokens)
