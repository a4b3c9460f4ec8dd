"""The kernel that samples tokens equals its definition, `fastppo.rollout.draw.draw`."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from fastppo_kernels.triton.draw import draw as triton_draw

from fastppo.rollout.draw import draw

# One tile, several with a remainder, and a whole number of tiles.
VOCABULARIES = (3, 4099, 8192, 13001)


def _scores(rows: int, vocabulary: int) -> torch.Tensor:
    """Return rows at several offsets, and one with a single likely token."""
    torch.manual_seed(vocabulary)
    scores = torch.randn(rows, vocabulary) * 2 + torch.tensor([[0.0], [-1000.0], [50.0]])
    scores[-1, vocabulary // 2] += 100
    return scores


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("kind", ["sampled", "greedy", "excluded"])
def test_the_kernel_draws_the_tokens_of_the_definition(vocabulary: int, kind: str) -> None:
    scores = _scores(3, vocabulary)
    if kind == "excluded":
        scores[:, 1:] = scores[:, 1:].masked_fill(torch.rand(3, vocabulary - 1) < 0.5, -torch.inf)
    columns = torch.rand(3, 4, dtype=torch.float64)
    columns[:, 0] = 0.0
    columns[:, 1] = 1 - 2**-53  # u·total rounds up to the total
    for column in range(4):
        uniforms = None if kind == "greedy" else columns[:, column]
        want = draw(scores, uniforms)
        tokens, logprobs = triton_draw(scores, uniforms)
        assert torch.equal(tokens, want.tokens)
        # The logarithm is fp32; it is at most log V, about 10.
        torch.testing.assert_close(logprobs, want.logprobs, rtol=1e-6, atol=2e-6)


def test_rows_without_a_distribution_get_token_0_and_nan() -> None:
    scores = torch.randn(4, 5000)
    scores[0, 4500] = torch.nan
    scores[1, 7] = torch.inf
    scores[2] = -torch.inf
    uniforms = torch.full((4,), 0.9, dtype=torch.float64)
    for u in (uniforms, None):
        want = draw(scores, u)
        tokens, logprobs = triton_draw(scores, u)
        assert tokens[:3].tolist() == [0, 0, 0]
        assert logprobs[:3].isnan().all()
        assert torch.equal(tokens[3], want.tokens[3])


def test_rows_and_uniforms_may_have_strides() -> None:
    scores = _scores(3, 9000)
    uniforms = torch.rand(3, 2, dtype=torch.float64)[:, 1]
    wide = torch.full((3, 9500), 1000.0)
    wide[:, :9000] = scores
    assert torch.equal(triton_draw(wide[:, :9000], uniforms)[0], draw(scores, uniforms).tokens)
    turned = scores.t().contiguous().t()
    assert torch.equal(triton_draw(turned, uniforms)[0], draw(scores, uniforms).tokens)


def test_a_draw_at_the_end_of_the_distribution_is_a_token_of_it() -> None:
    """A sum and a running sum add in another order: here, no running sum exceeds u·total."""
    torch.manual_seed(0)
    rows, tiles, tile = 2, 33, 4096
    scores = torch.full((rows, tiles, tile), -torch.inf)
    scores[:, :, 7] = -36.7 - 0.3 * torch.rand(rows, tiles)  # about 2⁻⁵³ of the likeliest token
    scores[:, 5, 9] = 0.0
    scores = scores.view(rows, tiles * tile)
    uniforms = torch.full((rows,), 1 - 2**-53, dtype=torch.float64)
    tokens, logprobs = triton_draw(scores, uniforms)
    assert (tokens < scores.shape[1]).all()
    assert torch.equal(logprobs, scores.gather(1, tokens[:, None])[:, 0])
