"""Advantages of each kind equal their closed form, and so do the KL and the rewards in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import random_batch

from fastppo import gae
from fastppo.data.batch import Batch
from fastppo.models.policy import BatchEvaluation
from fastppo.ppo.coefficients import CoefficientControl
from fastppo.ppo.estimators import estimate_advantages
from fastppo.ppo.experience import Experience
from fastppo.ppo.options.config import CRITIC_FREE, PPOConfig
from fastppo.rewards.scorer import Scores
from runs import experience_of, make_trainer, perturb, records

LENGTHS = [5, 3, 1]
BATCH = random_batch(LENGTHS)
GENERATOR = torch.Generator().manual_seed(0)
OLD = BatchEvaluation(*(torch.randn(n, generator=GENERATOR) for n in (9, 9, 3)))
SCORES = torch.tensor([1.0, -2.0, 0.5])
VALUES = list(OLD.values.split(LENGTHS))
REF = OLD.logprobs - torch.linspace(-0.5, 0.8, 9)


def _made(
    kind: str = "gae",
    *,
    rewards: Scores | None = None,
    truncated: tuple[bool, ...] = (False, False, False),
    ref: torch.Tensor | None = None,
    exact_kl: torch.Tensor | None = None,
    kl_coef: float = 0.0,
    masks: bool = False,
    bootstraps: bool = False,
    **options: Any,
) -> Experience:
    handling = "bootstrap" if bootstraps else "mask" if masks else "learn"
    options = {"whiten_advantages": False, "truncated": handling, **options}
    config = PPOConfig(advantage=kind, kl_coef=kl_coef, **options)
    experience = _experience(BATCH, truncated, config, ref_logprobs=ref, exact_kl=exact_kl)
    scores = Scores(SCORES) if rewards is None else rewards
    return estimate_advantages(experience, scores, config, CoefficientControl(config).at(0))


def _experience(
    batch: Batch, truncated: Sequence[bool], config: PPOConfig, **tensors: torch.Tensor | None
) -> Experience:
    """Return an experience with the statistics of the policies, by default those of OLD."""
    cut = torch.tensor(truncated)
    old = {"old_logprobs": OLD.logprobs, "old_values": OLD.values, "final_values": OLD.final_values}
    masked = cut if config.truncated == "mask" else None
    return Experience(batch, truncated=cut, masked=masked, **{**old, **tensors})


# ---------------------------------------------------------------------------------------- the kinds


def test_sequence_advantages_are_reward_minus_value_of_the_prompt() -> None:
    wanted = [(r - v[0]).expand(len(v)) for r, v in zip(SCORES, VALUES, strict=True)]
    torch.testing.assert_close(_made("sequence").advantages, torch.cat(wanted))


@pytest.mark.parametrize("lam", [0.0, 0.7, 1.0])
def test_gae_places_scores_at_last_tokens_and_uses_gamma_and_lam(lam: float) -> None:
    rewards = torch.zeros(9).index_copy(0, BATCH.cu_seqlens[1:].long() - 1, SCORES)
    wanted = gae(rewards, OLD.values, cu_seqlens=BATCH.cu_seqlens, gamma=0.9, lam=lam)
    learned = _made("gae", gamma=0.9, lam=lam)
    torch.testing.assert_close((learned.advantages, learned.returns), tuple(wanted))


# ------------------------------------------------------------------------ without a value function

GROUPED = random_batch([3, 1, 2, 2])
GROUPED_SCORES = torch.tensor([1.0, -2.0, 0.5, 0.5])
STD_OF_FOUR = (
    torch.tensor([10.0, 1.0, 2.0, 3.0]).std()
    + 1e-6 * torch.tensor([10.0, 1.0, 2.0, 3.0]).square().mean().sqrt()
).item()
GROUPED_OLD = {
    "old_logprobs": torch.linspace(-3, -1, 8),
    "old_values": torch.linspace(5, -5, 8),
    "final_values": None,
}


def _of_groups(kind: str, scores: torch.Tensor = GROUPED_SCORES, **options: Any) -> Experience:
    """Estimate the advantages of two responses to each of two prompts."""
    ref = options.pop("ref", None)
    cut = options.pop("cut", [False] * 4)
    config = PPOConfig(
        advantage=kind,
        **{"vf_coef": 0.0, "samples_per_prompt": 2, "whiten_advantages": False, **options},
    )
    return estimate_advantages(
        _experience(GROUPED, cut, config, ref_logprobs=ref, **GROUPED_OLD),
        Scores(scores),
        config,
        CoefficientControl(config).at(0),
    )


def _each(values: list[float]) -> torch.Tensor:
    return torch.tensor(values).repeat_interleave(GROUPED.response_lengths)


def test_reinforce_is_the_reward_to_go() -> None:
    estimates = _of_groups("reinforce", gamma=0.5)
    wanted = torch.tensor([0.25, 0.5, 1.0, -2.0, 0.25, 0.5, 0.25, 0.5])
    torch.testing.assert_close(estimates.advantages, wanted)


def test_rloo_is_the_reward_minus_the_mean_of_the_others() -> None:
    torch.testing.assert_close(_of_groups("rloo").advantages, _each([3.0, -3.0, 0.0, 0.0]))
    scores = torch.tensor([1.0, 4.0, -2.0, 7.0])
    config = {"samples_per_prompt": 4, "rollout_batch_size": 64}
    wanted = _each([1 - 3.0, 4 - 2.0, -2 - 4.0, 7 - 1.0])
    torch.testing.assert_close(_of_groups("rloo", scores, **config).advantages, wanted)


def test_a_group_is_normalized_by_its_mean_and_standard_deviation() -> None:
    least = 1e-6 * (5.0 / 2) ** 0.5
    unit = 1.5 / (4.5**0.5 + least)
    estimates = _of_groups("group").advantages
    torch.testing.assert_close(estimates, _each([unit, -unit, 0.0, 0.0]))


def _rows_of(kind: str, function: Any = None, **options: Any) -> Experience:
    """Return two episodes of one prompt, the first with two rows, with rewards of 1 and -2."""
    config = PPOConfig(
        advantage=kind,
        kl_coef=0.0,
        whiten_advantages=False,
        **{"samples_per_prompt": 2, "rollout_batch_size": 8, "minibatches": 1, **options},
    )
    experience = _experience(BATCH, (False,) * 3, config)
    experience = replace(experience, episodes=torch.tensor([0, 0, 1]))
    scores = Scores(torch.tensor([1.0, 1.0, -2.0]))
    coefficients = CoefficientControl(config).at(0)
    return estimate_advantages(experience, scores, config, coefficients, function=function)


@pytest.mark.parametrize(
    ("kind", "first"),
    [("rloo", 3.0), ("group", 1.5 / (4.5**0.5 + 1e-6 * 2.5**0.5)), ("reinforce", 1.0)],
)
def test_the_rows_of_an_episode_have_its_advantage(kind: str, first: float) -> None:
    second = -2.0 if kind == "reinforce" else -first
    wanted = torch.tensor([first] * (LENGTHS[0] + LENGTHS[1]) + [second] * LENGTHS[2])
    torch.testing.assert_close(_rows_of(kind, vf_coef=0.0).advantages, wanted)


def test_each_row_of_an_episode_has_its_own_values() -> None:
    with_rows = _rows_of("gae")
    scores = Scores(torch.tensor([1.0, 1.0, -2.0]))
    torch.testing.assert_close(with_rows.advantages, _made("gae", rewards=scores).advantages)


def test_an_advantage_that_groups_rows_must_know_their_episodes() -> None:
    def by_rows(rewards: Any, values: Any, mask: Any, samples_per_prompt: int) -> Any:
        return rewards

    def by_episodes(
        rewards: Any, values: Any, mask: Any, samples_per_prompt: int, episodes: Any
    ) -> Any:
        assert episodes.tolist() == [0, 0, 1]
        return rewards

    with pytest.raises(ValueError, match=r"by_rows.*episodes"):
        _rows_of("gae", by_rows)
    assert _rows_of("gae", by_episodes).advantages.any()


def test_part_of_a_group_is_refused() -> None:
    options = {"samples_per_prompt": 3, "rollout_batch_size": 12, "minibatches": 1}
    with pytest.raises(
        ValueError, match=r"samples_per_prompt=3 adjacent responses.*got 4 responses"
    ):
        _of_groups("rloo", **options)


@pytest.mark.parametrize("whitening", [False, True])
@pytest.mark.parametrize("kind", ["gae", "sequence", "turn_gae", "reinforce", "rloo"])
def test_advantages_from_rounding_are_zero(kind: str, whitening: bool, tmp_path: Path) -> None:
    """All rewards are 0, and policy and reference differ only by the rounding of their logprobs.
    Adam normalizes the gradient, so its step in their direction would have full length."""
    trainer = make_trainer(
        tmp_path,
        rewards=[lambda prompts, completions: [0.0] * len(completions)],
        advantage=kind,
        vf_coef=0.0 if kind in CRITIC_FREE else 0.5,
        whiten_advantages=whitening,
        samples_per_prompt=2,
        kl_coef=0.1,
    )
    before = [weight.detach().clone() for weight in trainer.model.causal_lm.parameters()]
    metrics = trainer.train()
    assert metrics["advantage_std"] < 1e-5
    after = trainer.model.causal_lm.parameters()
    assert all(torch.equal(weight, start) for weight, start in zip(after, before, strict=True))


def test_a_group_with_equal_rewards_has_zero_advantages() -> None:
    scores = torch.tensor([1.0, 1.0, 0.5, 2.0])
    reference = GROUPED_OLD["old_logprobs"] + torch.linspace(-1e-6, 1e-6, 8)
    for kind in ("rloo", "group"):
        advantages = _of_groups(kind, scores, ref=reference, kl_coef=0.1).advantages
        assert (advantages == 0).tolist() == [True] * 4 + [False] * 4


@pytest.mark.parametrize("kind", ["rloo", "group"])
def test_an_outlier_leaves_the_other_groups_alone(kind: str) -> None:
    scores = torch.tensor([1.0, 0.0, 0.0, 1.0])
    others = _of_groups(kind, scores).advantages[:4]
    for outlier in (-1e4, -1e7):
        scores[2] = outlier
        assert torch.equal(_of_groups(kind, scores).advantages[:4], others)


def test_a_small_difference_on_a_large_offset_is_a_signal() -> None:
    scores = 1e6 + torch.tensor([1.0, 0.0, 0.0, 1.0])
    assert _of_groups("rloo", scores).advantages.any()


@pytest.mark.parametrize("whitening", [False, True])
def test_equal_scores_have_zero_advantages(whitening: bool) -> None:
    """The scores differ from the values, but that is an error of the value function."""
    same = torch.full((4,), 3.0)
    assert not _of_groups("reinforce", same, whiten_advantages=whitening).advantages.any()
    assert not _made("gae", rewards=Scores(same[:3]), whiten_advantages=whitening).advantages.any()


def test_with_a_discount_an_earlier_reward_is_a_signal() -> None:
    """Equal scores of responses of different lengths are a signal; discounted to equal ones, they
    are not."""
    same = torch.ones(3)
    made = _made("reinforce", rewards=Scores(same), vf_coef=0.0, gamma=0.5)
    wanted = [0.5**to_end for length in LENGTHS for to_end in range(length - 1, -1, -1)]
    assert made.advantages.tolist() == pytest.approx(wanted)
    as_early = Scores(2.0 ** torch.tensor([4.0, 2.0, 0.0]))
    assert not _made("reinforce", rewards=as_early, vf_coef=0.0, gamma=0.5).advantages.any()


def test_nan_advantages_stay_nan() -> None:
    rewards = Scores(torch.tensor([1.0, torch.nan, 0.5]))
    assert _made("gae", rewards=rewards, whiten_advantages=True).advantages.isnan().all()


@pytest.mark.parametrize("kind", ["gae", "sequence"])
def test_spread_is_measured_before_whitening(kind: str) -> None:
    raw = _made(kind).advantages
    for whitening in (False, True):
        estimates = _made(kind, whiten_advantages=whitening)
        torch.testing.assert_close(estimates.advantage_std, raw.std(correction=0))
    same = Scores(torch.full((4,), 3.0))
    assert _of_groups("group", same.last).advantage_std == 0


EMPTY_SECOND = random_batch([2, 0, 1, 1])


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("gae", [10.0, 10.0, 2.0, 3.0]),
        ("turn_gae", [10.0, 10.0, 2.0, 3.0]),
        ("sequence", [10.0, 10.0, 2.0, 3.0]),
        ("reinforce", [10.0, 10.0, 2.0, 3.0]),
        ("rloo", [8.0, 8.0, 2 - 14 / 3, 3 - 13 / 3]),
        ("group", [6 / STD_OF_FOUR, 6 / STD_OF_FOUR, -2 / STD_OF_FOUR, -1 / STD_OF_FOUR]),
    ],
)
def test_an_empty_response_leaves_its_neighbors_rewards(kind: str, wanted: list[float]) -> None:
    """In a group, an empty response counts with its reward. All values are 0."""
    options: dict[str, Any] = {"lam": 1.0} if kind.endswith("gae") else {}
    if kind in CRITIC_FREE:
        options["vf_coef"] = 0.0
    config = PPOConfig(advantage=kind, samples_per_prompt=4, whiten_advantages=False, **options)
    zeros = torch.zeros(4)
    estimates = estimate_advantages(
        _experience(EMPTY_SECOND, [False] * 4, config, old_logprobs=zeros, old_values=zeros),
        Scores(torch.tensor([10.0, 1.0, 2.0, 3.0])),
        config,
        CoefficientControl(config).at(0),
    )
    torch.testing.assert_close(estimates.advantages, torch.tensor(wanted))


# ------------------------------------------------------------------------------------------------ λ


def test_lam_alpha_sets_lambda_per_response() -> None:
    """α = 0.5: λ = 1 − 2/5, 1 − 2/3, and 0 for one token, where it would be negative."""
    estimates = _made("gae", lam_alpha=0.5, gamma=0.9).advantages.split(LENGTHS)
    for row, lam in enumerate((0.6, 1 / 3, 0.0)):
        alone = _made("gae", lam=lam, gamma=0.9).advantages.split(LENGTHS)[row]
        torch.testing.assert_close(estimates[row], alone)


def test_value_lam_changes_only_the_returns() -> None:
    estimates = _made("gae", lam=0.7, value_lam=1.0, gamma=0.9)
    assert torch.equal(estimates.advantages, _made("gae", lam=0.7, gamma=0.9).advantages)
    assert torch.equal(estimates.returns, _made("gae", lam=1.0, gamma=0.9).returns)
    assert not torch.equal(estimates.returns, _made("gae", lam=0.7, gamma=0.9).returns)


# ------------------------------------------------------------------------------------ the whitening


@pytest.mark.parametrize("kind", ["gae", "sequence"])
def test_whitening_on_and_off(kind: str) -> None:
    raw, full = (_made(kind, whiten_advantages=whitening).advantages for whitening in (False, True))
    assert raw.mean().abs() > 0.01
    torch.testing.assert_close(full, (raw - raw.mean()) / raw.std())


# -------------------------------------------------------------------------------------- the rewards


def test_bootstrapping_adds_the_last_value() -> None:
    truncated = (True, False, True)
    plain = _made(truncated=truncated)
    assert torch.equal(plain.returns, _made().returns)
    last = BATCH.cu_seqlens[1:] - 1
    boot = _made(truncated=truncated, bootstraps=True, gamma=0.9)
    wanted = SCORES + 0.9 * OLD.final_values * torch.tensor(truncated)
    torch.testing.assert_close(boot.returns[last], wanted)


def test_token_rewards_apply_at_their_tokens() -> None:
    within = torch.linspace(-1, 1, 9)
    estimates = _made(lam=1.0, rewards=Scores(SCORES, within, LENGTHS))
    wanted = [
        score + part.flip(0).cumsum(0).flip(0)
        for score, part in zip(SCORES, within.split(LENGTHS), strict=True)
    ]
    torch.testing.assert_close(estimates.returns, torch.cat(wanted))


@pytest.mark.parametrize(
    ("estimator", "penalty"),
    [
        ("k1", lambda d: d),
        ("k2", lambda d: d.square() / 2),
        ("k3", lambda d: (-d).exp() - 1 + d),
    ],
)
def test_the_kl_penalty_uses_its_estimator(estimator: str, penalty) -> None:
    estimates = _made(lam=1.0, ref=REF, kl_coef=0.4, kl_estimator=estimator)
    kl = penalty(OLD.logprobs - REF)
    wanted = [
        score - 0.4 * part.flip(0).cumsum(0).flip(0)
        for score, part in zip(SCORES, kl.split(LENGTHS), strict=True)
    ]
    torch.testing.assert_close(estimates.returns, torch.cat(wanted))


def test_without_a_reference_there_is_no_kl_penalty() -> None:
    assert torch.equal(_made(kl_coef=0.4).returns, _made().returns)


def test_an_exact_kl_replaces_the_estimate() -> None:
    """Rewards within the responses are added to it."""
    kl, within = torch.linspace(0.1, 0.9, 9), torch.linspace(-1, 1, 9)
    rewards = Scores(SCORES, within, LENGTHS)
    estimates = _made(
        "gae", rewards=rewards, ref=REF, exact_kl=kl, kl_coef=0.4, kl_estimator="full"
    )
    wanted = _made("gae", rewards=Scores(SCORES, within - 0.4 * kl, LENGTHS))
    torch.testing.assert_close(estimates.advantages, wanted.advantages)
    alone = _made("gae", ref=REF, exact_kl=kl, kl_coef=0.4, kl_estimator="full")
    wanted = _made("gae", rewards=Scores(SCORES, -0.4 * kl, LENGTHS))
    torch.testing.assert_close(alone.advantages, wanted.advantages)


# ------------------------------------------------------------------------------------- in a trainer


def test_equal_rewards_warn_once_per_iteration(tmp_path: Path) -> None:
    """After whitening, the run would look stable."""
    options: dict[str, Any] = {"advantage": "group", "vf_coef": 0.0, "samples_per_prompt": 4}
    options |= {"whiten_advantages": False, "iterations": 1, "kl_coef": 0.0}
    trainer = make_trainer(
        tmp_path, rewards=[lambda completions, **_: [1.0] * len(completions)], **options
    )
    assert trainer.train()["advantage_std"] == 0
    (record,) = records(trainer)
    assert record["warnings"].count("reward_std = 0 < 0.0001") == 1
    assert not record.keys() & {"explained_variance", "value_calibration", "advantage_correlation"}


def test_the_exact_kl_in_the_reward(tmp_path: Path) -> None:
    """The return of the first token is the score minus β times the sum of the exact KL."""
    trainer = make_trainer(
        tmp_path, kl_estimator="full", kl_coef=0.4, lam=1.0, whiten_advantages=False
    )
    perturb(trainer)
    batch = random_batch()
    scores = torch.tensor([1.0, -2.0, 0.5])
    experience, _ = experience_of(trainer, batch, scores)
    with torch.no_grad(), trainer.reference.loaded() as reference:
        layout = batch.layout()
        p = (trainer.model.hidden(layout) @ trainer.model.head.weight.T).log_softmax(1)
        q = (reference.hidden(layout) @ reference.head.weight.T).log_softmax(1)
    kl = (p.exp() * (p - q)).sum(1)
    assert kl.min() > 0
    wanted = scores - 0.4 * torch.stack([part.sum() for part in kl.split([5, 3, 1])])
    first = batch.cu_seqlens[:-1]
    torch.testing.assert_close(experience.returns[first], wanted, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------ truncated responses


@pytest.mark.parametrize("whitening", [False, True])
@pytest.mark.parametrize("kind", ["gae", "sequence", "turn_gae"])
def test_masked_responses_do_not_change_the_others(kind: str, whitening: bool) -> None:
    """The others have the advantages of a batch without them."""
    cut = (False, False, True)
    made = _made(kind, truncated=cut, masks=True, whiten_advantages=whitening)
    config = PPOConfig(advantage=kind, whiten_advantages=whitening)
    finished = _experience(
        BATCH.select(torch.tensor([0, 1])),
        (False, False),
        config,
        old_logprobs=OLD.logprobs[:8],
        old_values=OLD.values[:8],
    )
    others = estimate_advantages(
        finished, Scores(SCORES[:2]), config, CoefficientControl(config).at(0)
    )
    torch.testing.assert_close(made.advantages[:8], others.advantages)
    torch.testing.assert_close(made.advantage_std, others.advantage_std)
    assert made.advantages[8:].tolist() == [0.0]


def test_masked_responses_count_in_the_baseline() -> None:
    made = _of_groups("rloo", truncated="mask", cut=[False, True, False, False])
    torch.testing.assert_close(made.advantages, _each([3.0, 0.0, 0.0, 0.0]))


def test_a_batch_of_masked_responses_has_no_signal() -> None:
    made = _made("gae", truncated=(True, True, True), masks=True)
    assert not made.advantages.any()
    assert made.advantage_std == 0


def test_without_rewards_the_kl_is_the_signal() -> None:
    nothing = Scores(torch.zeros(3), has_rewards=False)
    made = _made("reinforce", rewards=nothing, vf_coef=0.0, ref=REF, kl_coef=2.0, gamma=0.0)
    torch.testing.assert_close(made.advantages, -2 * (OLD.logprobs - REF))
    assert not _made("gae", rewards=nothing, ref=REF, kl_coef=0.0).advantages.any()
    equal = Scores(torch.zeros(3))
    assert not _made("reinforce", rewards=equal, vf_coef=0.0, ref=REF, kl_coef=2.0).advantages.any()
