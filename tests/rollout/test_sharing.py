"""A distributed rollout equals that of one process."""

from __future__ import annotations

from pathlib import Path

import many_ranks
import pytest
import ranks
import torch
import vllm_ranks

from fastppo.rollout.sharing import SharedEngine


def test_two_ranks_generate_what_one_does_and_end_with_the_same_state(tmp_path: Path) -> None:
    """With one prompt instead of five, the second rank has no work."""
    results = {
        n: ranks.run(n, many_ranks.rollouts, tmp_path / str(n), str(tmp_path)) for n in (1, 2)
    }
    for one, two in zip(results[1]["rollouts"], results[2]["rollouts"], strict=True):
        assert one.tokens == two.tokens
        assert one.finish_reasons == two.finish_reasons
        for name in ("logprobs", "sampler_logprobs", "values"):
            for a, b in zip(getattr(one, name), getattr(two, name), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert torch.equal(results[1]["next"], results[2]["next"])
    assert results[2]["engine"] == SharedEngine.__name__
    assert results[2]["same"], "ranks have different rollouts"


@pytest.mark.slow
def test_ranks_that_share_an_engine_get_the_same_prompts_and_count_once(tmp_path: Path) -> None:
    """Four ranks in two groups; with one prompt the first group has none."""
    results = ranks.run(4, vllm_ranks.draw_in_groups, tmp_path, str(tmp_path))
    first, other = [[4, 5], [6]], [[7, 8, 9], [4], [5]]
    assert results["asked"] == [[first], [first], [other, [[4, 5]]], [other, [[4, 5]]]]
    (five, one), *others = results["got"]
    assert all(drawn == [five, one] for drawn in others)
    assert (len(five), len(one)) == (5, 1)
    assert five[:2] != five[2:4], "each group has its own seed"
    assert all(state == results["next"][0] for state in results["next"])
