"""Reward ensembles: mean, minimum, lower bound, and errors of members."""

from __future__ import annotations

import json

import pytest
import tiny

from fastppo.rewards.ensemble import RewardEnsemble
from fastppo.rewards.loading import make_terms
from fastppo.rewards.model import RewardModel
from fastppo.rewards.reward import RewardError, RewardTerm, Samples, score

PROMPTS = ["w1 w2 ", "w3 "]
COMPLETIONS = ["w7 w7", "w4"]
IDS = [[10, 10, 1], [7, 1]]
"""The responses of COMPLETIONS with their EOS: 3 and 2 tokens."""

SAMPLES = Samples(PROMPTS, COMPLETIONS)


def _constant(name: str, values: list[float]):
    def reward(prompts, completions):
        return values

    reward.__name__ = name
    return reward


MEMBERS = [_constant("a", [1.0, 2.0]), _constant("b", [3.0, 2.0]), _constant("c", [8.0, 2.0])]
"""Completion 0: mean 4, deviation √((9 + 1 + 16)/3). Completion 1: they agree."""


DEVIATION = (26 / 3) ** 0.5


@pytest.mark.parametrize(
    ("by", "expected"), [("mean", 4.0), ("min", 1.0), ("lcb", 4.0 - DEVIATION)]
)
def test_an_ensemble_combines_its_members(by: str, expected: float) -> None:
    terms = make_terms([RewardEnsemble(MEMBERS, by=by)])
    scored = score(terms[0], SAMPLES)
    assert terms[0].name == "ensemble"
    assert scored == pytest.approx([expected, 2.0], rel=1e-12)
    assert scored.disagreement == pytest.approx([DEVIATION, 0.0], rel=1e-12)


def test_members_get_the_columns_and_token_ids_they_name() -> None:
    def matches(prompts, completions, wanted):
        return [float(w in c) for w, c in zip(wanted, completions, strict=True)]

    def lengths(completions, completion_ids):
        return [len(ids) for ids in completion_ids]

    ensemble = RewardEnsemble([matches, lengths], by="min")
    columns = {"wanted": ["w7", "w9"], "other": [1, 2]}
    scored = score(RewardTerm("e", ensemble), Samples(PROMPTS, COMPLETIONS, columns, IDS))
    assert scored == [1.0, 0.0]


def test_a_failing_member_is_named_and_its_sample_saved(tmp_path) -> None:
    ensemble = RewardEnsemble([MEMBERS[0], _constant("broken", [1.0, float("nan")])])
    with pytest.raises(RewardError, match="'ensemble/broken' returned nan for completion 1"):
        score(make_terms([ensemble])[0], SAMPLES, tmp_path / "failed.json")
    record = json.loads((tmp_path / "failed.json").read_text())
    assert (record["reward"], record["completions"]) == ("ensemble/broken", COMPLETIONS[1:])


def test_a_member_without_one_number_is_refused() -> None:
    ensemble = RewardEnsemble([_constant("steps", [1.0, [(1, 1.0)]])])
    with pytest.raises(RewardError, match="'e/steps' returned rewards by token or step for compl"):
        score(RewardTerm("e", ensemble), SAMPLES)
    ensemble = RewardEnsemble([_constant("math", [1.0, None])])
    with pytest.raises(RewardError, match="'e/math' returned None for completion 1; expected a n"):
        score(RewardTerm("e", ensemble), SAMPLES)


def test_an_ensemble_of_saved_models_takes_options_of_load_reward(tmp_path) -> None:
    directory = tiny.saved_reward_model(tmp_path)
    alone = RewardModel(directory)(PROMPTS, COMPLETIONS)
    ensemble = RewardEnsemble([directory, directory], by="lcb", batch_size=1)
    scored = score(RewardTerm("e", ensemble), SAMPLES)
    assert scored == pytest.approx(alone, abs=1e-5)  # two of a kind agree
    assert scored.disagreement == [0.0, 0.0]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"members": []}, "must have at least one member, got none"),
        ({"members": MEMBERS, "by": "median"}, "by must be one of mean, min, lcb, got 'median'"),
        ({"members": ["nowhere.py:f"]}, "there is no file nowhere.py"),
    ],
)
def test_an_invalid_ensemble_is_refused(options, says) -> None:
    with pytest.raises(ValueError, match=says):
        RewardEnsemble(**options)
