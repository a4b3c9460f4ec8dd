"""What every rollout engine is asked for and gives."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest
import torch

from fastppo.rollout import FINISHED, TRUNCATED, Rollout, Sampling


def test_a_shortened_sampling_is_the_same_but_for_its_length() -> None:
    sampling = Sampling(max_new_tokens=10, temperature=0.7, top_k=3, stop_token_ids=(1,))
    assert sampling.shortened(4) == Sampling(4, temperature=0.7, top_k=3, stop_token_ids=(1,))
    assert sampling.shortened(99) == sampling
    with pytest.raises(FrozenInstanceError):
        sampling.max_new_tokens = 4


def test_lengths_and_what_was_cut_off_follow_from_the_responses() -> None:
    rollout = Rollout([[4, 1], [5, 6, 7]], [FINISHED, TRUNCATED], [torch.zeros(2), torch.zeros(3)])
    assert rollout.lengths == [2, 3]
    assert rollout.truncated == [False, True]


def test_a_rollout_is_extended_in_the_prompts_order() -> None:
    rollout = Rollout([[4, 1]], [FINISHED], [torch.zeros(2)])
    rollout.extend(Rollout([[5], [6]], [TRUNCATED, FINISHED], [torch.ones(1), torch.ones(1)]))
    assert rollout.tokens == [[4, 1], [5], [6]]
    assert rollout.finish_reasons == [FINISHED, TRUNCATED, FINISHED]
    assert torch.cat(rollout.logprobs).tolist() == [0, 0, 1, 1]
