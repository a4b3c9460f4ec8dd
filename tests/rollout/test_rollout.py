"""The records of a rollout, and engines without the base class."""

from __future__ import annotations

import pytest
import torch

from fastppo.rollout import FINISHED, TRUNCATED, Rollout, Sampling, as_engine


def test_joined_concatenates_rollouts() -> None:
    ones = [torch.ones(1), torch.ones(1)]
    first = Rollout([[4, 1]], [FINISHED], [torch.zeros(2)], final_values=torch.zeros(1))
    other = Rollout([[5], [6]], [TRUNCATED, FINISHED], ones, ones, final_values=torch.ones(2))
    rollout = Rollout.joined([first, other])
    assert rollout.tokens == [[4, 1], [5], [6]]
    assert rollout.finish_reasons == [FINISHED, TRUNCATED, FINISHED]
    assert torch.cat(rollout.sampler_logprobs).tolist() == [0, 0, 1, 1]
    assert rollout.final_values.tolist() == [0, 1, 1]
    assert rollout.logprobs is None, "the first has none"
    assert rollout.values is None
    assert Rollout.joined([other, other]).logprobs == ones + ones


def test_an_object_with_only_generate_becomes_an_engine() -> None:
    rollout = Rollout([[4]], [FINISHED], [torch.zeros(1)])

    class Own:
        def generate(self, prompt_ids, sampling) -> Rollout:
            return rollout

    engine = as_engine(Own())
    assert engine.generate([[1]], Sampling(1)) is rollout
    assert not engine.same_weights
    engine.release()
    engine.weights_changed(None)
    assert as_engine(engine) is engine


def test_an_object_without_generate_is_refused() -> None:
    with pytest.raises(TypeError, match="generate"):
        as_engine(object())
