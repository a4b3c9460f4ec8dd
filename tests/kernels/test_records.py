"""The records: what is picked out of them, and how sums of parts become sums of the whole."""

from __future__ import annotations

import pytest
import torch
from fastppo_kernels.records import (
    LOSS,
    RATIO_MAX,
    SUMS,
    PerToken,
    Softmax,
    StatsGradients,
    StatsRows,
    Sums,
    combine_sums,
)


@pytest.mark.parametrize(
    "rows",
    [slice(1, 3), torch.tensor([2, 0]), torch.tensor([False, True, True, False])],
    ids=("slice", "indices", "mask"),
)
def test_a_record_at_some_rows_has_those_rows_of_every_tensor(rows: slice | torch.Tensor) -> None:
    four = torch.arange(4.0)
    per_token = PerToken(torch.arange(4), four + 10, four + 20, four + 30, None, four + 40)
    picked = per_token.at(rows)
    for name, value in per_token._asdict().items():
        found = getattr(picked, name)
        assert (found is None) if value is None else torch.equal(found, value[rows])
    each = Softmax(1.0, four, 2.0, 3.0)
    assert torch.equal(each.at(rows).temperatures, four[rows])
    assert each.at(rows)._replace(temperatures=None) == each._replace(temperatures=None)
    scalar = Softmax(0.5)
    assert scalar.at(rows) is scalar
    grads = StatsGradients(four, None, four + 1).at(rows)
    assert torch.equal(grads.logprobs, four[rows])
    assert grads.entropy is None
    pairs = torch.stack([four, four], 1)
    stats = StatsRows(*[four] * 6, pairs, pairs).at(rows)
    assert torch.equal(stats.ref_normalizer, pairs[rows])


def test_sums_add_up_and_their_maximum_maxes() -> None:
    one, other = torch.arange(14.0), torch.arange(14.0).flip(0)
    joined = Sums(*combine_sums(one, other))
    assert joined.ratio_max == 13
    assert all(x == 13 for x in joined[:-1])
    assert combine_sums(one, one)[SUMS.index("tokens")] == 4
    assert (one == torch.arange(14.0)).all()  # neither is written over
    assert (SUMS[LOSS], SUMS[RATIO_MAX]) == ("loss", "ratio_max")
