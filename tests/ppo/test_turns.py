"""Training on episodes: it learns, resumes to the bit, and gives each turn what it earned."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from environments import OPTIONS, PROMPTS, Calculator, Exact
from fastppo_kernels.definition import sampled_kl

from fastppo.data.batch import Batch
from fastppo.data.microbatches import split
from fastppo.models.cache import GrowingCache
from fastppo.ppo.coefficients import CoefficientControl
from fastppo.ppo.estimators import estimate_advantages
from fastppo.ppo.experience import Experience
from fastppo.ppo.options.config import PPOConfig
from fastppo.ppo.setup.summary import banner
from fastppo.ppo.trainer import PPOTrainer
from fastppo.rewards.reward import RewardError
from fastppo.rewards.scorer import Scores
from fastppo.rollout import FINISHED, Rollout, Sampling
from runs import Watched, first_prompts, make_trainer, records


def _trainer(directory: Path, **more: Any) -> PPOTrainer:
    parts = {"rewards": [], "prompts": PROMPTS, "environment": Calculator}
    return make_trainer(directory, **{**parts, **OPTIONS, **more})


@pytest.mark.slow
@pytest.mark.parametrize("advantage", ["gae", "turn_gae"])
def test_a_run_learns_a_two_turn_task(advantage: str, tmp_path: Path) -> None:
    """With a critic. A policy at random earns a half of 1/20 in each turn."""
    learning = {"learning_rate": 3e-3, "kl_coef": 0.0, "iterations": 25}
    trainer = _trainer(tmp_path, advantage=advantage, rollout_batch_size=64, **learning)
    trainer.train()
    lines = records(trainer)
    rewards = [line["reward"] for line in lines]
    assert sum(rewards[:3]) / 3 < 0.15
    assert sum(rewards[-3:]) / 3 > 0.45
    assert lines[-1]["reward/environment"] == rewards[-1]
    assert 1 < lines[-1]["turns"] <= 2
    shares = [lines[-1][f"finish/{reason}"] for reason in ("stop", "length", "turns")]
    assert sum(shares) == pytest.approx(1)
    assert lines[-1]["eos_rate"] == shares[0] > 0.5


def test_old_logprobs_and_values_of_turns_equal_a_full_pass(tmp_path: Path) -> None:
    """Those that the decoder gave turn by turn are those of one pass over the whole."""
    trainer = _trainer(tmp_path)
    prompts, rollout = trainer.parts.episode_runner.run(
        first_prompts(trainer, 16), trainer.engine, trainer.parts.sampling
    )
    assert rollout.response_mask is not None
    assert any(False in row for row in rollout.response_mask)
    batch = Batch.of(prompts.token_ids, rollout.tokens, response_mask=rollout.response_mask)
    wanted = trainer.model.evaluate_plan(split(batch, trainer.config.limits()))
    assert rollout.logprobs is not None
    assert rollout.values is not None
    logprobs, values = torch.cat(rollout.logprobs), torch.cat(rollout.values)
    torch.testing.assert_close(logprobs, wanted.logprobs, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(values, wanted.values, rtol=1e-4, atol=1e-4)


class _Eight(Exact):
    """Eight turns."""

    def step(self, text: str) -> tuple[str | None, float, bool]:
        observation, reward, _ = super().step(text)
        return observation, reward, self.turns == 8


def test_a_kept_cache_leaves_the_first_ratios_at_one(tmp_path: Path) -> None:
    """The decoder's logprobs are old logprobs in fp32, and as near to the learner's with the cache
    of earlier turns as without it."""
    trainer = _trainer(tmp_path, environment=_Eight, max_turns=8)
    rollouts = []
    for keeps in (True, False):
        if not keeps:
            trainer.engine.conversations = nullcontext
        torch.manual_seed(0)
        prompts, rollout = trainer.parts.episode_runner.run(
            first_prompts(trainer, 16), trainer.engine, trainer.parts.sampling
        )
        batch = Batch.of(prompts.token_ids, rollout.tokens, response_mask=rollout.response_mask)
        wanted = trainer.model.evaluate_plan(split(batch, trainer.config.limits()))
        ratios = (wanted.logprobs - torch.cat(rollout.logprobs)).exp()
        torch.testing.assert_close(ratios, torch.ones_like(ratios), rtol=0, atol=5e-6)
        rollouts.append(rollout)
    kept, read_again = rollouts
    assert max(sum(row) for row in kept.response_mask) > 8
    assert kept.tokens == read_again.tokens


def test_a_run_with_a_kept_cache_repeats_and_resumes_in_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    continued = []
    begin_with = GrowingCache.begin_with

    def counted(self: GrowingCache, prefixes: Any, *args: Any) -> None:
        continued.append(len(prefixes))
        begin_with(self, prefixes, *args)

    monkeypatch.setattr(GrowingCache, "begin_with", counted)
    options = {"environment": _Eight, "max_turns": 8, "checkpoint_interval": 1}
    trainers = [_trainer(tmp_path / name, iterations=3, **options) for name in ("one", "two")]
    _trainer(tmp_path / "cut", iterations=1, **options).train()
    trainers.append(_trainer(tmp_path / "cut", iterations=3, resume=True, **options))
    for trainer in trainers:
        continued.clear()
        trainer.train()
        assert len(continued) > 8, "turns continued kept entries"
    once, *others = [[*trainer.model.parameters()] for trainer in trainers]
    for weights in others:
        assert all(map(torch.equal, once, weights))


def test_a_turn_reads_the_whole_conversation_and_learning_reads_it_once(tmp_path: Path) -> None:
    """With an engine that keeps no cache, counted at the embedding: two prompts of three tokens,
    turns of four, observations of two."""

    class Three:
        def reset(self, prompt: Any) -> None:
            self.turn = 0

        def step(self, text: str) -> tuple[str, float, bool]:
            self.turn += 1
            return "w1 w2", 1.0, self.turn == 3

    trainer = make_trainer(
        tmp_path,
        rewards=[],
        prompts=[{"prompt": "w1 w2 w3"}, {"prompt": "w4 w5 w6"}],
        environment=Three,
        rollout_batch_size=2,
        max_new_tokens=4,
        stop_token_ids=[],
        old_logprobs="recompute",
        ppo_epochs=3,
        minibatches=1,
    )
    read: list[int] = [0]
    trainer.model.causal_lm.get_input_embeddings().register_forward_hook(
        lambda module, inputs, output: read.append(read.pop() + inputs[0].numel())
    )

    def ended(rollout: Rollout, prompt_ids: list[list[int]], sampling: Sampling) -> None:
        rollout.finish_reasons[:] = [FINISHED, FINISHED]
        read.append(0)

    trainer.engine = Watched(trainer.engine, ended)
    trainer.iterate(first_prompts(trainer, 2), trainer.begin_iteration())
    conversation = 3 + 3 * 4 + 2 * 2
    turns = [2 * (3 + earlier * (4 + 2) + (4 - 1)) for earlier in range(3)]
    assert read == [*turns, 2 * conversation * (1 + 3)]


def test_token_rewards_skip_environment_tokens(tmp_path: Path) -> None:
    def one_each(prompts: Any, completions: Any, completion_ids: Any) -> list[list[float]]:
        return [[1.0] * len(ids) for ids in completion_ids]

    trainer = _trainer(tmp_path, rewards=[one_each])
    prompts, rollout = trainer.parts.episode_runner.run(
        first_prompts(trainer, 16), trainer.engine, trainer.parts.sampling
    )
    scores = trainer.score(prompts, rollout, trainer.begin_iteration())
    assert scores.within is not None
    assert len(scores.within) == sum(rollout.generated_lengths) < sum(rollout.lengths)
    paid = [sum(row) for row in rollout.rewards or ()]
    wanted = [length + reward for length, reward in zip(rollout.lengths, paid, strict=True)]
    assert scores.total.tolist() == pytest.approx(wanted)


def test_a_truncated_episode_bootstraps_after_the_observation(tmp_path: Path) -> None:
    """With one turn allowed and no reward, λ = 0: V_next is the value after the answer."""
    more = {"truncated": "bootstrap", "lam": 0.0, "kl_coef": 0.0, "max_turns": 1}
    trainer = _trainer(tmp_path, **more, whiten_advantages=False)
    prompts, rollout = trainer.parts.episode_runner.run(
        first_prompts(trainer, 16), trainer.engine, trainer.parts.sampling
    )
    row = rollout.finish_reasons.index("turns")
    assert rollout.response_mask is not None
    assert rollout.response_mask[row][-2:] == [False, False]
    none = Scores(torch.zeros(16))
    coefficients = trainer.begin_iteration()
    experience, _ = trainer.make_experience(prompts.token_ids, rollout, none, coefficients)
    told = Batch.of([prompts.token_ids[row] + rollout.tokens[row]], [[5]])
    value = trainer.model.evaluate(told).values[0].item()
    last = experience.batch.cu_seqlens[row + 1] - 1
    assert experience.returns[last].item() == pytest.approx(value, abs=1e-4)


# -------------------------------------------------------------------------------- the environments


class _Server(Calculator):
    """Counts those that are open."""

    open: ClassVar[list[int]] = []
    fails: ClassVar[bool] = False

    def __init__(self) -> None:
        self.open.append(id(self))

    def step(self, text: str) -> Any:
        if self.fails and self.total == "w4":
            raise OSError("gone")
        return super().step(text)

    def close(self) -> None:
        self.open.remove(id(self))


def test_a_run_prints_its_maximum_of_turns(tmp_path: Path) -> None:
    assert "16 responses of at most 2 turns of 4 tokens each" in "".join(banner(_trainer(tmp_path)))


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_always_closes_its_environments(fails: bool, tmp_path: Path) -> None:
    """One that fails stops it, with its episode saved."""
    kind = type("_Mine", (_Server,), {"open": [], "fails": fails})
    addresses: list[int] = []

    def make() -> Any:
        server = kind()
        addresses.append(id(server))
        return server

    trainer = _trainer(tmp_path, iterations=1, environment=make)
    if not fails:
        trainer.train()
    else:
        with pytest.raises(RewardError, match=r"raised OSError\('gone'\) in step"):
            trainer.train()
        saved = json.loads((tmp_path / "run" / "failed_episode.json").read_text())
        assert saved["columns"] == {"total": "w4"}
    assert len(addresses) == 16
    assert kind.open == []


# --------------------------------------------------------------------------------- GAE by the turn


def _by_turn(batch: Batch, response_mask: list[list[bool]], more: dict[str, Any]) -> Any:
    """Turn by turn in plain Python, from the definition in `turn_gae`."""
    advantages, returns, begin = [], [], 0
    for row, mask in enumerate(response_mask):
        lengths, inside = [], False
        for is_generated in mask:
            if is_generated and not inside:
                lengths.append(0)
            lengths[-1:] = [lengths[-1] + 1] if is_generated else lengths[-1:]
            inside = is_generated
        starts = [begin + sum(lengths[:k]) for k in range(len(lengths))]
        begin += sum(lengths)
        follow, next_value, steps = 0.0, more["bootstrap"][row], []
        for start, length in zip(reversed(starts), reversed(lengths), strict=True):
            rewards = [more["rewards"][t] for t in range(start, start + length)]
            value = more["values"][start]
            rest = more["gamma"] * (next_value + more["lam"] * follow)
            follow, next_value = sum(rewards) + rest - value, value
            steps.append((follow, [sum(rewards[t:]) + rest for t in range(length)]))
        for advantage, of_tokens in reversed(steps):
            advantages += [advantage] * len(of_tokens)
            returns += of_tokens
    return advantages, returns


@pytest.mark.parametrize("bootstrap", [False, True])
def test_turn_gae_is_gae_over_turns(bootstrap: bool) -> None:
    mask = [[True, True, False, True, False], [True] * 3, [False, True, False, True, True]]
    tokens = [[7] * len(row) for row in mask]
    batch = Batch.of([[4]] * 3, tokens, response_mask=mask)
    count = batch.response_count
    draw = torch.Generator().manual_seed(0)
    values, logprobs, reference, within = torch.randn(4, count, generator=draw)
    last, final = torch.randn(2, 3, generator=draw)
    truncated = [True, False, True]
    options = PPOConfig(
        **{"advantage": "turn_gae", "gamma": 0.9, "lam": 0.7, "kl_coef": 0.3, "kl_estimator": "k3"},
        **{
            "whiten_advantages": False,
            "truncated": "bootstrap" if bootstrap else "learn",
            "value_lam": 0.4,
        },
    )
    experience = Experience(
        batch,
        truncated=torch.tensor(truncated),
        old_logprobs=logprobs,
        old_values=values,
        final_values=final,
        ref_logprobs=reference,
    )
    scores = Scores(last, within, batch.generated_lengths.tolist())
    actual = estimate_advantages(experience, scores, options, CoefficientControl(options).at(0))
    rewards = within - 0.3 * sampled_kl(logprobs - reference, "k3")
    rewards[batch.cu_seqlens[1:] - 1] += last
    ends = final * torch.tensor(truncated) if bootstrap else torch.zeros(3)
    given = {"rewards": rewards.tolist(), "values": values.tolist(), "bootstrap": ends.tolist()}
    advantages = _by_turn(batch, mask, given | {"gamma": 0.9, "lam": 0.7})[0]
    returns = _by_turn(batch, mask, given | {"gamma": 0.9, "lam": 0.4})[1]
    assert actual.advantages.tolist() == pytest.approx(advantages, abs=1e-5)
    assert actual.returns.tolist() == pytest.approx(returns, abs=1e-5)
