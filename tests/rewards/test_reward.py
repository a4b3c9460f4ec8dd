"""Arguments and return values of rewards, and errors with saved samples."""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import re
from typing import Any

import pytest

from fastppo.data.prompts import Prompts
from fastppo.rewards.loading import make_terms
from fastppo.rewards.reward import (
    RewardError,
    RewardTerm,
    Samples,
    Scored,
    lacking_columns,
    score,
)

PROMPTS = ["w1 w2 ", "w3 "]
COMPLETIONS = ["w7 w7", "w4"]
IDS = [[10, 10, 1], [7, 1]]
"""The responses of COMPLETIONS with their EOS: 3 and 2 tokens."""

# ------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    "source",
    [
        "def f(prompts, completions): return [len(c) for c in completions]",
        "def f(completions, prompts): return [len(c) for c in completions]",
        "def f(completions, **kwargs): return [len(c) for c in completions]",
        "def f(p, c): return [len(x) for x in c]",
        "def f(*args): return [len(x) for x in args[1]]",
        "def f(**kw): return [len(x) for x in kw['completions']]",
        "def f(prompts, completions, wanted): return [len(c) for c in completions]",
        "async def f(prompts, completions): return [len(c) for c in completions]",
    ],
)
def test_common_signatures_get_the_right_arguments(source: str) -> None:
    names: dict = {}
    exec(source, names)
    samples = Samples(PROMPTS, COMPLETIONS, {"wanted": ["a", "b"]})
    assert score(RewardTerm("f", names["f"]), samples) == [5.0, 2.0]


def test_a_coroutine_is_awaited_inside_a_running_loop() -> None:
    """As in a notebook."""

    async def reward(prompts: list[str], completions: list[str]) -> list[float]:
        await asyncio.sleep(0)
        return [len(c) for c in completions]

    async def cell() -> Any:
        return score(RewardTerm("reward", reward), Samples(PROMPTS, COMPLETIONS, {}))

    assert asyncio.run(cell()) == [5.0, 2.0]


def test_a_reward_gets_copies_of_its_arguments() -> None:
    chat = [{"role": "user", "content": "w1"}]
    samples = Samples([chat, chat], list(COMPLETIONS), {"n": [[1], [2]]}, IDS)
    before = copy.deepcopy(samples)

    def changes(prompts, completions, completion_ids, n):
        prompts[0][0]["content"] = "x"
        completions.clear()
        completion_ids[0].clear()
        n[0].append(7)
        return [0.0, 1.0]

    assert score(RewardTerm("changes", changes), samples) == [0.0, 1.0]
    assert samples == before


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f(prompts, completions, completion_ids): return [len(i) for i in completion_ids]", 3),
        ("def f(completions, **columns): return ['completion_ids' in columns] * 2", 0),
    ],
)
def test_completion_ids_are_passed_by_name_only(source: str, expected: int) -> None:
    """They are not in `**columns`."""
    names: dict = {}
    exec(source, names)
    samples = Samples(PROMPTS, COMPLETIONS, {"wanted": ["a", "b"]}, IDS)
    assert score(RewardTerm("f", names["f"]), samples)[0] == expected


# -------------------------------------------------------------------------------- return values


@pytest.mark.parametrize(
    ("returned", "says", "saved"),
    [
        ([1.0], "returned 1 value for 2 completions", 2),
        ([1.0, float("nan")], "returned nan for completion 1", 1),
        ([1.0, "2"], "returned '2' for completion 1", 1),
        (1.0, "returned float; expected a list of 2 floats", 2),
    ],
)
def test_an_invalid_return_value_is_refused_and_the_sample_saved(
    returned, says, saved, tmp_path
) -> None:
    term = RewardTerm("broken", lambda prompts, completions: returned)
    samples = Samples(PROMPTS, COMPLETIONS, {"wanted": ["w7", "w9"], "when": [None, object()]})
    path = tmp_path / "new" / "failed.json"
    with pytest.raises(RewardError, match=rf"{says}.* \(samples saved to {path}\)$"):
        score(term, samples, path)
    record = json.loads(path.read_text())
    assert len(record["prompts"]) == len(record["completions"]) == saved
    assert len(record["columns"]["wanted"]) == saved
    assert record["reward"] == "broken"
    assert record["reason"].startswith(says)


@pytest.mark.parametrize(
    ("source", "lacking"),
    [
        ("lambda p, c, answer: 0", ["answer"]),
        ("lambda p, c, wanted, **columns: 0", []),
        ("lambda completions, *, answer, completion_ids: 0", ["answer"]),
        ("lambda completions, answer=None: 0", []),
        ("lambda *both, **columns: 0", []),
    ],
)
def test_missing_columns_are_found_from_the_signature(source, lacking) -> None:
    assert lacking_columns(inspect.signature(eval(source)), ["wanted"]) == lacking


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("lambda completion: 0", "takes (completion): too many positional arguments"),
        ("lambda: 0", "takes (): it has no parameters"),
    ],
)
def test_a_signature_without_completions_is_refused(source: str, says: str) -> None:
    prompts = Prompts(["w1"], [[1]], {"wanted": ["w2"]})
    with pytest.raises(ValueError, match=re.escape(f"reward f {says}")) as refused:
        RewardTerm("f", eval(source)).check("p.jsonl", prompts)
    assert "expected f(prompts, completions, **columns), which takes lists" in str(refused.value)


# ------------------------------------------------------------------------ rewards within a response


def _scored(returned, **more) -> Scored:
    term = RewardTerm("steps", lambda prompts, completions: returned)
    return score(term, Samples(PROMPTS, COMPLETIONS, completion_ids=IDS), **more)


def test_a_batch_may_mix_numbers_tokens_and_steps() -> None:
    tokens = _scored([[0.5, 0.25, 1.0], 3.0])
    assert tokens == [1.75, 3.0]
    assert tokens.steps == [[0.5, 0.25, 1.0], None]
    assert tokens.at_last_token == [0.0, 3.0]
    steps = _scored([[(2, 0.5), (5, -1)], [0.0, 2.0]])
    assert steps == [-0.5, 2.0]
    assert steps.steps == [[(2, 0.5), (5, -1.0)], [0.0, 2.0]]
    assert steps.at_last_token == [0.0, 0.0]


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        ([0.0, [1.0] * 3], "3 numbers for completion 1, which has 2 response tokens"),
        ([0.0, [1.0, float("nan")]], "nan for token 1 of completion 1; expected a number within"),
        ([0.0, [(1, 1.0), 2.0]], r"both numbers and \(end, value\) pairs for completion 1"),
        ([0.0, [(0, 1.0)]], r"\(0, 1.0\) for completion 1; .* whole number from 1"),
        ([0.0, [(1, float("inf"))]], "inf for the step of completion 1 that ends at 1"),
        ([0.0, [(1, 9e14), (2, 9e14)]], "in total for completion 1"),
    ],
)
def test_invalid_steps_are_refused_with_their_row(returned, says, tmp_path) -> None:
    with pytest.raises(RewardError, match=f"reward 'steps' .*{says}"):
        _scored(returned, failure_file=tmp_path / "failed.json")
    record = json.loads((tmp_path / "failed.json").read_text())
    assert record["completions"] == COMPLETIONS[1:]


def test_none_is_a_reward_that_does_not_apply() -> None:
    term = RewardTerm("math", lambda prompts, completions: [None, [1.0, 2.0]])
    scored = score(term, Samples(PROMPTS, COMPLETIONS, {}, [[1], [2, 3]]))
    assert scored.or_none == [None, 3.0]
    assert scored.steps == [None, [1.0, 2.0]]
    assert scored.at_last_token == [0.0, 0.0]
    assert scored.mean == 3.0
    again = score(RewardTerm("calls", lambda *_: scored), Samples(PROMPTS, COMPLETIONS))
    assert again.or_none == scored.or_none


def test_a_reward_that_reads_messages_is_told_that_completions_are_strings() -> None:
    def of_messages(prompts, completions, **columns):
        return [float(len(completion[0]["content"])) for completion in completions]

    (term,) = make_terms([of_messages])
    with pytest.raises(RewardError, match="strings"):
        score(term, Samples(["p"], ["a completion"]))
