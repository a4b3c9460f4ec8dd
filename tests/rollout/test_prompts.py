"""Prompts on the left of what a decoder reads."""

from __future__ import annotations

import pytest

from fastppo.rollout.prompts import check_prompts, distinct, padded_left


def test_prompts_end_in_one_column() -> None:
    ids, mask = padded_left([[5, 9, 4], [7], [8, 0]], fill=-1)
    assert ids.tolist() == [[5, 9, 4], [-1, -1, 7], [-1, 8, 0]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1], [0, 1, 1]]


def test_an_empty_prompt_is_refused() -> None:
    check_prompts([[4], [0]])
    with pytest.raises(ValueError, match="a prompt is empty"):
        check_prompts([[4], []])


def test_rows_with_the_same_prompt_are_found_wherever_they_are() -> None:
    different, which = distinct([[7, 8], [9], [7, 8], [7], [9]])
    assert different.tolist() == [0, 1, 3]
    assert which.tolist() == [0, 1, 0, 2, 1]
