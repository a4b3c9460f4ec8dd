"""A batch without the samples that have no score is the batch that never had them."""

from __future__ import annotations

import math

import pytest
import torch

from fastppo.data.prompts import Prompts
from fastppo.rewards.calling import CallOptions
from fastppo.rewards.dropping import without_dropped
from fastppo.rewards.reward import RewardError, RewardTerm
from fastppo.rewards.scorer import Scorer
from fastppo.rollout import Rollout

PROMPTS = Prompts(["a", "b", "c"], [[1], [2], [3]], {"n": [1, 2, 3]})
ROLLOUT = Rollout(
    [[7, 8], [9], [5, 6, 4]],
    ["stop", "length", "stop"],
    sampler_logprobs=[torch.zeros(2), torch.ones(1), torch.zeros(3)],
    final_values=torch.tensor([0.0, 5.0, 0.0]),
)


def _scores(returned, drop: bool = True, monitored=None):
    terms = [RewardTerm("r", lambda p, c: returned)]
    monitors = [RewardTerm("m", lambda p, c: monitored)] if monitored else []
    scorer = Scorer(terms, monitors, None, options=CallOptions(drop=drop))
    return scorer(PROMPTS, ["x", "y", "z"], ROLLOUT.tokens)


def test_what_has_no_score_is_left_out_of_everything() -> None:
    scores = _scores([1.0, None, 3.0])
    prompts, rollout, kept, metrics = without_dropped(PROMPTS, ROLLOUT, scores)
    assert prompts == Prompts(["a", "c"], [[1], [3]], {"n": [1, 3]})
    assert (rollout.tokens, rollout.finish_reasons) == ([[7, 8], [5, 6, 4]], ["stop", "stop"])
    assert [len(x) for x in rollout.sampler_logprobs] == [2, 3]
    assert rollout.final_values.tolist() == [0.0, 0.0]
    assert rollout.logprobs is None
    assert kept.total.tolist() == [1.0, 3.0]
    assert kept.terms == {"r": [1.0, 3.0]}
    assert kept.lengths == [2, 3]
    assert metrics == {"dropped_samples": pytest.approx(1 / 3)}
    assert kept.metrics()["reward"] == 2.0


def test_a_batch_of_which_nothing_is_left_is_an_error() -> None:
    with pytest.raises(RewardError, match="all 3 samples of a batch were dropped"):
        without_dropped(PROMPTS, ROLLOUT, _scores([None, math.nan, "x"]))
