"""Rewards of a batch: weights, both parts of a reward, and normalization."""

from __future__ import annotations

import pytest
import tiny
import torch

from fastppo.data.prompts import Prompts
from fastppo.rewards.processing import RunningScale
from fastppo.rewards.reward import RewardError, RewardTerm, Scored
from fastppo.rewards.scorer import Scorer, Scores

PROMPTS = ["w1 w2 ", "w3 "]
COMPLETIONS = ["w7 w7", "w4"]
IDS = [[10, 10, 1], [7, 1]]
"""The responses of COMPLETIONS with their EOS: 3 and 2 tokens."""


BYTES = tiny.byte_tokenizer()

LENGTHS = [3, 1, 2, 4]
SCORES = Scores(
    last=torch.tensor([1.0, -2.0, 0.5, 3.0]),
    within=torch.tensor([0.5, 0.0, 1.0, 0.25, 0.0, 0.0, -1.0, 0.5, 0.5, 2.0]),
    lengths=LENGTHS,
    terms={"a": Scored([2.5, -1.75, 0.5, 5.0])},
)
"""The third response has a reward at its last token only."""
TOTAL = torch.tensor([2.5, -1.75, 0.5, 5.0])
WHOLE = Scores(TOTAL)
"""The same totals, at the last token."""


def _sum_within(scores: Scores) -> torch.Tensor:
    """Sum the rewards within each response, [B]."""
    assert scores.within is not None
    return torch.stack([part.sum() for part in scores.within.split(LENGTHS)])


# ---------------------------------------------------------------------------------------- the parts


def test_the_penalty_of_a_missing_eos_is_at_the_last_token() -> None:
    truncated = [False, True, False, True]
    assert SCORES.with_eos_penalty(truncated, None) is SCORES
    wanted = TOTAL - torch.tensor([0.0, 3.0, 0.0, 3.0])
    penalized = SCORES.with_eos_penalty(truncated, 3.0)
    torch.testing.assert_close(penalized.total, wanted)
    torch.testing.assert_close(penalized.within, SCORES.within)
    torch.testing.assert_close(WHOLE.with_eos_penalty(truncated, 3.0).last, wanted)


@pytest.mark.parametrize("method", ["none", "running"])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_normalization_scales_both_parts(method: str, clip: float | None) -> None:
    """Both parts have the same factor."""
    seen = torch.tensor([1.0, 2.0, 6.0])
    running = RunningScale()
    running.update(seen)
    deviation = torch.cat([seen, TOTAL]).std(correction=0)
    factor, wanted = {
        "none": (torch.ones(4), TOTAL),
        "running": (torch.ones(4) / deviation, TOTAL / deviation),
    }[method]
    if clip is not None:
        clipped = wanted.clamp(-clip, clip)
        assert (clipped != wanted).any()
        assert (clipped == wanted).any()
        factor = factor * clipped / wanted
        wanted = clipped
    scaled = SCORES.normalized(method, clip, running)
    torch.testing.assert_close(scaled.total, wanted)
    torch.testing.assert_close(
        scaled.within, SCORES.within * factor.repeat_interleave(torch.tensor(LENGTHS))
    )
    torch.testing.assert_close(scaled.last, wanted - _sum_within(scaled))
    assert scaled.within[4:6].tolist() == [0.0, 0.0], "one number is at the last token"
    assert running.count == (7 if method == "running" else 3), "updated once"


def test_metrics_are_means_over_the_batch() -> None:
    scores = Scores(
        torch.tensor([1.0, 3.0]),
        terms={"a": Scored([2.0, 4.0]), "ensemble": Scored([0.0, 2.0], None, [0.5, 0.0])},
        monitors={"gold": Scored([0.25, 0.75])},
    )
    assert scores.metrics() == {
        "reward": 2.0,
        "reward_std": 1.0,
        "reward/a": 3.0,
        "reward/ensemble": 1.0,
        "ensemble_disagreement": 0.25,
        "monitor/gold": 0.5,
    }


def test_the_largest_disagreement_of_several_ensembles_is_reported() -> None:
    terms = {name: Scored([1.0], None, [spread]) for name, spread in (("a", 2.0), ("b", 1.0))}
    assert Scores(torch.ones(1), terms=terms).metrics()["ensemble_disagreement"] == 2.0


# --------------------------------------------------------------------------------------- the scorer


def test_step_rewards_add_up_with_their_weights() -> None:
    """Rewards by token, by step and as one number."""
    texts = ["ab cd", "xy"]
    prompts = [BYTES("p: ")["input_ids"]] * 2
    responses = [[*BYTES(text)["input_ids"], BYTES.eos_token_id] for text in texts]
    terms = [
        RewardTerm("steps", lambda p, c: [[(2, 1.0), (5, -3.0)], 4.0], weight=0.5),
        RewardTerm("tokens", lambda p, c: [0.25, [1.0, 0.0, 0.0]], weight=2.0),
    ]
    scores = Scorer(terms, [], BYTES)(Prompts(["p: "] * 2, prompts), texts, responses)
    assert scores.last.tolist() == [0.5, 2.0]
    assert scores.within.tolist() == [0, 0.5, 0, 0, -1.5, 0, 2.0, 0, 0]
    first, second = scores.terms.values()
    assert scores.total.tolist() == [0.5 * first[i] + 2.0 * second[i] for i in range(2)]
    assert scores.total.tolist() == [-0.5, 4.0]


def test_each_reward_is_called_once_and_monitors_are_only_logged() -> None:
    calls = []

    def named(name: str, value: float) -> RewardTerm:
        def reward(prompts, completions, wanted, completion_ids):
            calls.append((name, prompts, completions, wanted, completion_ids))
            return [value] * len(prompts)

        return RewardTerm(name, reward, weight=2.0)

    scorer = Scorer([named("a", 1.0), named("b", -0.25)], [named("gold", 100.0)], BYTES)
    prompts = Prompts(PROMPTS, [[5], [5]], {"wanted": ["w7", "w9"]})
    scores = scorer(prompts, COMPLETIONS, IDS)
    arguments = (PROMPTS, COMPLETIONS, ["w7", "w9"], IDS)
    assert calls == [("a", *arguments), ("b", *arguments), ("gold", *arguments)]
    assert scores.total.tolist() == [1.5, 1.5]
    assert (scores.terms, scores.monitors) == (
        {"a": [1.0, 1.0], "b": [-0.25, -0.25]},
        {"gold": [100.0, 100.0]},
    )
    assert scores.lengths == [3, 2]


def test_a_reward_that_does_not_apply_counts_as_zero() -> None:
    """TRL's rewards return None for completions of another task."""
    terms = [
        RewardTerm("math", lambda p, c: [4.0, None, 2.0], weight=0.5),
        RewardTerm("style", lambda p, c: [1.0, 3.0, None]),
    ]
    never = RewardTerm("never", lambda p, c: [None] * len(p))
    scorer = Scorer(terms, [never], BYTES)
    scores = scorer(Prompts(["p"] * 3, [[5]] * 3), ["a", "b", "c"], [[1], [2], [3]])
    assert scores.total.tolist() == [3.0, 3.0, 1.0]
    metrics = scores.metrics()
    assert (metrics["reward/math"], metrics["reward/style"]) == (3.0, 2.0)
    assert "monitor/never" not in metrics
    assert scores.counts == {"reward/math": 2, "reward/style": 2, "monitor/never": 0}


def test_some_reward_must_apply() -> None:
    terms = [
        RewardTerm("math", lambda p, c: [1.0, None]),
        RewardTerm("no", lambda p, c: [None] * 2),
    ]
    prompts = Prompts(["p", "q"], [[5], [5]])
    scorer = Scorer(terms, [], BYTES)
    with pytest.raises(
        RewardError, match=r"no reward applies to completion 1 .*, to the prompt 'q'"
    ):
        scorer(prompts, ["a", "b"], [[1], [2]])
    mask = [[True], [True]]  # an environment may have rewarded it
    assert scorer(prompts, ["a", "b"], [[1], [2]], mask).total.tolist() == [1.0, 0.0]
