"""Training and held-out rows of a stage."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fastppo.data import fingerprint
from fastppo.data.datasets import DataError, Rows, load_rows
from fastppo.models.trunk import context_length
from fastppo.stages.options import SupervisedConfig


@dataclass(slots=True)
class Encoded:
    """Tokenized rows."""

    examples: list[Any] = field(default_factory=list)
    prompts: list[Any] = field(default_factory=list)
    """Prompt of each example; rows with the same prompt are held out together."""
    truncated: int = 0
    """Number of texts cut at `max_length`."""
    dropped: int = 0
    """Number of rows without anything to learn from."""


class Split(NamedTuple):
    """Training rows and held-out rows."""

    train: list[Any]
    held_out: list[Any]


@dataclass(slots=True)
class StageData:
    """Training and held-out examples, with fingerprints of their source."""

    train: list[Any]
    held_out: list[Any]
    fingerprints: dict[str, str]


def load_data(
    config: SupervisedConfig,
    rows: Rows | None,
    eval_rows: Rows | None,
    encode: Callable[[Rows, str], Encoded],
) -> StageData:
    """Encode and split the given rows, or load those of the config.

    Args:
        encode: tokenizes rows; its second argument is the name of their source.

    Raises:
        DataError: a row is unusable.
    """
    rows = load_rows(config.data, config.split) if rows is None else rows
    data = encode(rows, config.data or "data")
    fingerprints = {
        "data": fingerprint.of_rows(rows),
        "tokens": fingerprint.of_rows(data.examples),
    }
    if eval_rows is None and config.eval_data is not None:
        eval_rows = load_rows(config.eval_data, config.split)
    if eval_rows is None:
        split = split_by_prompt(data.examples, data.prompts, config.eval_share, config.seed)
        return StageData(split.train, split.held_out, fingerprints)
    held_out = encode(eval_rows, config.eval_data or "eval_data").examples
    return StageData(data.examples, held_out, fingerprints)


def split_by_prompt(rows: Sequence[Any], prompts: Sequence[Any], share: float, seed: int) -> Split:
    """Hold out all rows of randomly drawn prompts, so that the two parts share no prompt.

    Prompts with more rows than are still wanted stay in the training part, unless one of them
    brings the held-out part closer to its share.

    Args:
        rows, prompts: of equal length; prompts are strings or chat messages.
        share: share of the rows to hold out, in [0, 1).

    Raises:
        DataError: no row would be left for training.
    """
    if share == 0:
        return Split(list(rows), [])
    keys = [json.dumps(prompt, sort_keys=True, default=str) for prompt in prompts]
    counts = Counter(keys)
    order = sorted(counts)
    random.Random(seed).shuffle(order)
    held_keys: set[str] = set()
    wanted = max(1, round(share * len(rows)))
    held_rows = 0
    for key in order:
        if held_rows + counts[key] <= wanted:
            held_keys.add(key)
            held_rows += counts[key]
    larger = [key for key in order if key not in held_keys]
    fewest = min(larger, key=lambda key: counts[key], default="")
    more = held_rows + counts[fewest]
    is_closer = more < len(rows) and abs(more - wanted) < wanted - held_rows
    if is_closer or not held_keys:
        held_keys.add(fewest)
        held_rows = more
    if held_rows == len(rows):
        raise DataError(
            f"{len(rows)} rows of {len(order)} prompts cannot be split by prompt with "
            f"eval_share={share:g}; give more prompts, a file of eval_data, or eval_share=0"
        )
    train = [row for row, key in zip(rows, keys, strict=True) if key not in held_keys]
    held_out = [row for row, key in zip(rows, keys, strict=True) if key in held_keys]
    return Split(train, held_out)


def row_limit(model: Any, max_length: int | None) -> int | None:
    """Return the maximum length of a row, tokens: `max_length`, or the context of the model.

    Raises:
        ValueError: `max_length` exceeds the context.
    """
    context = context_length(model)
    if max_length is not None and context is not None and max_length > context:
        raise ValueError(f"max_length={max_length} exceeds the model's context of {context}")
    return context if max_length is None else max_length
