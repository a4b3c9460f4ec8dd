"""Experience: per-token tensors stay with their sequences, and each token has its weight."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fastppo.data.batch import ALIGNMENT, Batch
from fastppo.data.microbatches import Limits, microbatches
from fastppo.data.world import World
from fastppo.functional.aggregation import AGGREGATIONS
from fastppo.ppo.experience import Experience, token_weights
from fastppo.ppo.rows import Rows
from fastppo.ppo.trained import Trained
from fastppo.rewards.scorer import Scores
from fastppo.rollout import Rollout
from runs import tensors_of

PROMPTS = [[5, 6], [7], [8, 9, 10]]


RESPONSES = [[1, 1, 4], [2], [1, 3]]


BATCH = Batch.of(PROMPTS, RESPONSES)


def _experience(batch: Batch = BATCH) -> Experience:
    packed = torch.arange(batch.response_count, dtype=torch.float32)
    return Experience(
        batch,
        old_logprobs=packed,
        old_values=packed + 10,
        advantages=packed + 20,
        returns=packed + 30,
        monte_carlo_returns=packed + 40,
    )


@pytest.mark.parametrize("masks", [False, True])
def test_a_rollout_gives_scores_and_truncated_responses(masks: bool) -> None:
    rollout = Rollout(RESPONSES, ["stop", "length", "stop"])
    scores = Scores(torch.tensor([1.0, -2.0, 0.5]))
    experience = Experience.of_rows(BATCH, Rows(PROMPTS, rollout), scores, masks=masks)
    assert experience.scores is not None
    assert experience.scores.tolist() == [1.0] * 3 + [-2.0] + [0.5] * 2
    assert experience.truncated is not None
    assert experience.truncated.tolist() == [False, True, False]
    if masks:
        assert experience.masked is not None
        assert experience.masked.tolist() == experience.truncated.tolist()
    else:
        assert experience.masked is None


def test_what_is_trained_reaches_every_microbatch() -> None:
    trained = Trained(policy=False, has_signal=False)
    experience = replace(_experience(), trained=trained, masked=torch.tensor([False, True, False]))
    minibatches = experience.in_loss().minibatches(torch.arange(2), 2, "token-mean")
    micros = [micro for part in minibatches for micro in part.microbatches(Limits(1))]
    assert [micro.trained for micro in micros] == [trained, trained]


def test_select_keeps_the_tokens_of_the_sequences() -> None:
    part = _experience().select(torch.tensor([2, 0]))
    assert part.old_logprobs.tolist() == [4, 5, 0, 1, 2]
    assert part.returns.tolist() == [34, 35, 30, 31, 32]
    assert part.batch.response_tokens.tolist() == [1, 3, 1, 1, 4]
    assert part.ref_logprobs is None


@pytest.mark.parametrize("response_mask", [None, [[True, False, True], [False], [True, True]]])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_minibatches_follow_the_given_order(
    count: int, response_mask: list[list[bool]] | None
) -> None:
    """Each is what `select` and `weighted` return. All share the memory of one copy, in which each
    begins at an aligned address."""
    batch = Batch.of(PROMPTS, RESPONSES, response_mask=response_mask)
    experience = _experience(batch)
    order = torch.tensor([2, 0, 1])
    minibatches = experience.minibatches(order, count, "seq-mean-token-mean")
    assert len(minibatches) == min(count, 3)
    for part, rows in zip(minibatches, order.tensor_split(min(count, 3)), strict=True):
        wanted = experience.select(rows).weighted("seq-mean-token-mean")
        torch.testing.assert_close(tensors_of(part), tensors_of(wanted), rtol=0, atol=0)
    for name in ("old_values", "returns", "token_weights"):
        tensors = [getattr(part, name) for part in minibatches]
        assert len({x.untyped_storage().data_ptr() for x in tensors}) == 1
        assert all(x.data_ptr() % ALIGNMENT == 0 for x in tensors)
    assert experience.token_weights is None


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token-mean", [1 / 6] * 6),
        ("seq-mean-token-mean", [1 / 9] * 3 + [1 / 3] + [1 / 6] * 2),
        ("seq-mean-token-sum", [1 / 3] * 6),
        ("token-sum", [1.0] * 6),
    ],
)
def test_packed_weights_follow_the_aggregation(aggregation: str, expected: list[float]) -> None:
    weights = token_weights(torch.tensor([3, 1, 2]), aggregation)
    torch.testing.assert_close(weights, torch.tensor(expected))
    assert _experience().weighted(aggregation).token_weights.tolist() == weights.tolist()


def test_weights_belong_to_the_minibatch() -> None:
    """So their split into microbatches does not matter."""
    minibatch = _experience().weighted("seq-mean-token-mean")
    rows = microbatches(minibatch.batch.lengths, Limits(1))
    parts = {int(row): minibatch.select(row) for row in rows}
    joined = torch.cat([parts[row].token_weights for row in range(len(minibatch))])
    assert torch.equal(joined, minibatch.token_weights)
    assert joined.sum().item() == pytest.approx(1)


@pytest.mark.parametrize("limits", [Limits(1), Limits(3)])
def test_ranks_run_equally_many_microbatches(limits: Limits) -> None:
    """A rank with fewer microbatches runs a sequence without weight in place of the others."""
    minibatch = _experience().weighted("token-mean")
    by_rank = [[*minibatch.microbatches(limits, World(rank, 2))] for rank in (0, 1)]
    assert len(by_rank[0]) == len(by_rank[1])
    weights = torch.cat([micro.token_weights for parts in by_rank for micro in parts])
    assert weights.sum().item() == pytest.approx(1)
    values = torch.cat([micro.old_values for parts in by_rank for micro in parts])
    assert values[weights > 0].sort().values.tolist() == [*range(10, 16)]


# ------------------------------------------------------------------------------ truncated responses


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token-mean", [0.2] * 3 + [0.0] + [0.2] * 2),
        ("seq-mean-token-mean", [1 / 6] * 3 + [0.0] + [0.25] * 2),
    ],
)
def test_masked_responses_have_no_weight(aggregation: str, expected: list[float]) -> None:
    masked = replace(_experience(), masked=torch.tensor([False, True, False]))
    torch.testing.assert_close(masked.weighted(aggregation).token_weights, torch.tensor(expected))


def test_masked_responses_leave_the_update() -> None:
    masked = replace(_experience(), masked=torch.tensor([False, True, False]))
    assert masked.in_loss().old_values.tolist() == [10.0, 11.0, 12.0, 14.0, 15.0]
    everything = replace(_experience(), masked=torch.tensor([True] * 3)).in_loss()
    (minibatch,) = everything.minibatches(torch.arange(3), 1, "token-mean")
    assert not minibatch.token_weights.any()


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_an_episode_weighs_as_one_however_many_rows_it_has(aggregation: str) -> None:
    in_rows = replace(_experience(), episodes=torch.tensor([0, 0, 1])).weighted(aggregation)
    whole = Batch.of([[5], [8]], [[1, 1, 4, 2], [1, 3]])
    assert len(in_rows) == 2
    assert torch.equal(
        in_rows.token_weights, _experience(whole).weighted(aggregation).token_weights
    )


def test_minibatches_have_whole_episodes() -> None:
    experience = replace(_experience(), episodes=torch.tensor([0, 0, 1]))
    first, second = experience.minibatches(torch.tensor([1, 0]), 2, "token-mean")
    assert first.old_values.tolist() == [14.0, 15.0]
    assert second.old_values.tolist() == [10.0, 11.0, 12.0, 13.0]
    assert second.token_weights.tolist() == [0.25] * 4


def test_a_truncated_episode_is_masked_with_all_of_its_rows() -> None:
    rollout = Rollout(RESPONSES, ["stop", "length", "stop"])
    rows = Rows(PROMPTS, rollout, torch.tensor([0, 0, 1]))
    experience = Experience.of_rows(BATCH, rows, Scores(torch.zeros(3)), masks=True)
    assert experience.masked.tolist() == [True, True, False]


def test_each_row_ends_with_the_score_of_its_episode() -> None:
    scores = Scores(torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.25]), [1, 1])
    rows = scores.of_rows([0, 0, 1], [2, 1, 1])
    assert rows.last.tolist() == [1.5, 1.0, 2.0]
    assert rows.within.tolist() == [0.0, 0.0, 0.5, 0.25]
    assert rows.total.tolist() == [1.5, 1.5, 2.25]
