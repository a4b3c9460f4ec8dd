"""The asynchronous engine: which weights generate a batch, and reproducible results."""

from __future__ import annotations

import copy
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from fastppo.ppo.experience import Experience
from fastppo.ppo.trainer import PPOTrainer
from fastppo.rewards.reward import RewardError
from fastppo.rollout import Rollout, RolloutEngine, RolloutError, Sampling
from fastppo.rollout.async_engine import AsyncEngine
from fastppo.stopped import Stopped
from runs import counting, logprobs_of, make_trainer, records, weights_of

OPTIONS: dict[str, Any] = {
    "async_steps": 1,
    "iterations": 4,
    "learning_rate": 1e-2,
    "checkpoint_interval": 2,
}


class Seen(NamedTuple):
    """An iteration's batch, and the policy before its update."""

    prompt_ids: list[list[int]]
    rollout: Rollout
    experience: Experience
    policy: Any


def _seen(trainer: PPOTrainer, monkeypatch: pytest.MonkeyPatch) -> list[Seen]:
    """Record the iterations of a run."""
    seen: list[Seen] = []
    make_experience = trainer.make_experience

    def remember(prompt_ids: Any, rollout: Rollout, *args: Any) -> Any:
        experience, metrics = make_experience(prompt_ids, rollout, *args)
        policy = copy.deepcopy(trainer.model.causal_lm)
        seen.append(Seen(prompt_ids, rollout, experience, policy))
        return experience, metrics

    monkeypatch.setattr(trainer, "make_experience", remember)
    return seen


def _logprobs(policy: Any, seen: Seen) -> Tensor:
    return logprobs_of(policy, seen.prompt_ids, seen.rollout.tokens)


def _slowed(engine: RolloutEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    generate = engine.generate

    def slowly(prompt_ids: list[list[int]], sampling: Sampling) -> Rollout:
        time.sleep(0.5)
        return generate(prompt_ids, sampling)

    monkeypatch.setattr(engine, "generate", slowly)


@pytest.mark.parametrize("old_logprobs", ["auto", "sampler"])
def test_a_batch_and_its_ratios_use_the_weights_before_the_last_update(
    old_logprobs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(tmp_path, **OPTIONS, old_logprobs=old_logprobs)
    seen = _seen(trainer, monkeypatch)
    trainer.train()
    for number, iteration in enumerate(seen):
        assert iteration.rollout.sampler_logprobs is not None
        sampled = torch.cat(iteration.rollout.sampler_logprobs)
        drew = seen[max(0, number - 1)].policy
        torch.testing.assert_close(sampled, _logprobs(drew, iteration), rtol=1e-4, atol=1e-4)
        old = iteration.experience.old_logprobs
        if old_logprobs == "sampler":
            assert torch.equal(old, sampled)
        else:
            now = _logprobs(iteration.policy, iteration)
            torch.testing.assert_close(old, now, rtol=1e-4, atol=1e-4)
            weights = (old - sampled).exp().clamp(max=trainer.config.importance_cap)
            torch.testing.assert_close(iteration.experience.importance_weights, weights)
    last = seen[-1]
    assert (_logprobs(last.policy, last) - _logprobs(seen[-2].policy, last)).abs().max() > 0.01


def test_results_do_not_depend_on_timing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = []
    for slow in ("nothing", "generation"):
        trainer = make_trainer(tmp_path / slow, **OPTIONS)
        assert isinstance(trainer.engine, AsyncEngine)
        if slow == "generation":
            _slowed(trainer.engine.engine, monkeypatch)
        trainer.train()
        weights.append(weights_of(trainer))
    assert all(map(torch.equal, *weights))


def _fail() -> None:
    raise RuntimeError("enough")


def _stop() -> None:
    signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize(("call", "act", "error"), [(3, _fail, RewardError), (1, _stop, Stopped)])
def test_a_resumed_run_continues_with_the_generated_batch(
    call: int, act: Callable[[], None], error: type[Exception], tmp_path: Path
) -> None:
    options = {**OPTIONS, "lora_rank": 2}
    uninterrupted = make_trainer(tmp_path / "whole", **options, rewards=[counting()])
    uninterrupted.train()
    parts = make_trainer(tmp_path / "parts", **options, rewards=[counting(call, act)])
    with pytest.raises(error):
        parts.train()
    resumed = make_trainer(tmp_path / "parts", **options, rewards=[counting()], resume=True)
    resumed.train()
    assert all(map(torch.equal, weights_of(uninterrupted), weights_of(resumed)))
    rewards = [
        [line["reward"] for line in records(trainer)] for trainer in (uninterrupted, resumed)
    ]
    assert rewards[0] == rewards[1]


def test_a_failing_run_ends_the_generation_of_the_next_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(tmp_path, **OPTIONS, rewards=[counting(1, _fail)])
    assert isinstance(trainer.engine, AsyncEngine)
    inner = trainer.engine.engine
    generate = inner.generate
    closed = threading.Event()

    def wait(prompt_ids: list[list[int]], sampling: Sampling) -> Rollout:
        if threading.current_thread() is threading.main_thread():
            return generate(prompt_ids, sampling)
        closed.wait()
        raise RolloutError("closed")

    monkeypatch.setattr(inner, "generate", wait)
    monkeypatch.setattr(inner, "close", closed.set)
    try:
        with pytest.raises(RewardError, match="enough"):
            trainer.train()
        assert closed.is_set()
    finally:
        closed.set()


def test_an_evaluation_uses_the_current_policy(tmp_path: Path) -> None:
    """An evaluation does not use up the batch generated ahead, even for the same prompts."""
    one_prompt = [{"prompt": "w1 w2"}]
    options = {**OPTIONS, "prompts": one_prompt}
    plain = make_trainer(tmp_path / "plain", **options)
    plain.train()
    trainer = make_trainer(tmp_path / "evaluated", **options)
    assert trainer.parts.prompts is not None
    evaluated = []

    def evaluate(*args: Any, **kwargs: Any) -> dict[str, float]:
        evaluated.append(trainer.evaluate(trainer.parts.prompts.select([0] * 16)))
        return {}

    trainer.evaluation.after_update = evaluate  # type: ignore[method-assign]
    trainer.train()
    assert len(evaluated) == 4
    assert all(map(torch.equal, weights_of(plain), weights_of(trainer)))
    last = evaluated[-1]["rollout"]
    seen = Seen([[4, 5]] * 16, last, None, None)  # type: ignore[arg-type]
    expected = _logprobs(trainer.model.causal_lm, seen)
    torch.testing.assert_close(torch.cat(last.sampler_logprobs), expected, rtol=1e-4, atol=1e-4)
