"""The fixtures, the page, and planted faults: each turns a fixture red."""

# A row of the faults is easier to read on one line.
# ruff: noqa: E501

from __future__ import annotations

import inspect
import json
import re
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fastppo_kernels import definition

from benchmarks.conformance import docs, generate, grid, ours
from benchmarks.conformance.adapter import NotOfferedError
from benchmarks.conformance.differences import DIFFERENCES
from benchmarks.conformance.fixtures import FOLDER, difference, fixtures
from benchmarks.conformance.peers import PEERS
from benchmarks.conformance.user_function import check
from fastppo import cli
from fastppo.functional import aggregation, value_loss
from fastppo.ppo import controllers, estimators

WRITTEN = ("fixtures.json", "fixtures.safetensors")


def test_the_fixtures_are_those_of_the_formulas() -> None:
    """If this fails after a change, run python -m benchmarks.conformance.generate."""
    records, arrays = generate.generate()
    assert json.loads((FOLDER / "fixtures.json").read_text("utf-8")) == records
    kept = {
        f"{name}/{kind}/{key}": x
        for name, fixture in fixtures().items()
        for kind, tensors in (("inputs", fixture.inputs), ("answer", fixture.answer))
        for key, x in tensors.items()
    }
    assert kept.keys() == arrays.keys()
    for key, x in arrays.items():
        # Central differences of another libm.
        np.testing.assert_allclose(kept[key], x, rtol=1e-7, atol=1e-8)
    assert sum((FOLDER / name).stat().st_size for name in WRITTEN) < 1e6


def test_the_page_shows_the_kept_results() -> None:
    """If this fails after new results, run python -m benchmarks.conformance.docs."""
    page = docs.PAGE.read_text("utf-8")
    for section, content in docs.sections(grid.load()).items():
        assert docs.split(page, section)[1] == content


def test_a_fixture_without_a_result_is_marked() -> None:
    kept = grid.load()
    name, column = next(iter(kept.items()))
    missing = next(iter(column.cells))
    rest = {fixture: cell for fixture, cell in column.cells.items() if fixture != missing}
    some = kept | {name: column._replace(cells=rest)}
    assert "?" not in docs.sections(kept)["grid"]
    assert docs.sections(some)["grid"].count("?") == 1
    assert "? not run" in grid.text(some)


def test_every_package_of_the_grid_was_run() -> None:
    kept = grid.load()
    assert kept.keys() == set(grid.COLUMNS)
    for name, column in kept.items():
        assert column.cells.keys() == fixtures().keys()
        differs = {
            fixture for fixture, cell in column.cells.items() if cell.status == grid.DIFFERENT
        }
        assert differs == DIFFERENCES.get(name, {}).keys()


def test_recorded_differences_name_packages_and_are_no_answers() -> None:
    assert DIFFERENCES.keys() <= {peer.name for peer in PEERS}
    for recorded in DIFFERENCES.values():
        for name, entry in recorded.items():
            fixture = fixtures()[name]
            assert difference(fixture, fixture.variant(**entry.variant)), name


def test_an_output_without_an_answer_is_refused() -> None:
    with pytest.raises(ValueError, match="'logprobs'"):
        difference(fixtures()["gae-gap"], {"logprobs": torch.zeros(3, 6)})


# -------------------------------------------------------------------------- a function of the user's

PAGE_VERDICTS = {"clip-both": "=", "token-mean": "=", "masked-nan": "differs", "gspo": "not asked"}


def test_a_loss_of_the_users_is_compared_with_its_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = re.findall(r"```python\n(# my_loss.py.*?)```", docs.PAGE.read_text("utf-8"), re.S)
    (tmp_path / "my_loss.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["conformance", "my_loss.py:loss"]) == 1
    shown = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    for name, verdict in PAGE_VERDICTS.items():
        assert shown[name].startswith(verdict), name
    (tmp_path / "exact.py").write_text(
        code.replace("batch_mask.sum()", "(1.01 * batch_mask.sum())")
    )
    assert cli.main(["conformance", "exact.py:loss"]) == 1
    assert re.search(r"^clip-both +differs: loss", capsys.readouterr().out, re.M)


def test_other_operations_return_a_tensor_or_outputs_by_name() -> None:
    def whiten(x: torch.Tensor, shift_mean: bool, mask: torch.Tensor | None = None) -> torch.Tensor:
        return definition.whiten(x, mask, shift_mean=shift_mean)

    verdicts = check(whiten, "whiten")
    assert verdicts["whiten-mask"] == "="
    assert verdicts["whiten-all"] == "=", "a fixture without a mask"
    needs_mask = check(lambda x, mask, shift_mean: x, "whiten")
    assert needs_mask["whiten-all"] == "not asked: the fixture has no mask"
    gae = check(lambda **given: {"advantages": 0 * given["values"]}, "gae")
    assert gae["gae-padded"].startswith("differs: advantages")


@pytest.mark.parametrize(
    ("returned", "verdict"),
    [
        (lambda loss: loss.detach(), "fails: ValueError: .*gradient"),
        (lambda loss: (loss, {}), "fails: TypeError: .*tuple"),
        (lambda loss: loss.nothing, "fails: AttributeError"),
        (lambda loss: -loss, "differs: "),
    ],
    ids=["no gradient", "a tuple", "an error", "a wrong sign"],
)
def test_a_function_that_fails_gets_a_verdict(returned: Any, verdict: str) -> None:
    def loss(logprobs, old_logprobs, advantages, mask, clip, batch_mask):
        ratio = (logprobs - old_logprobs).exp()
        clipped = ratio.clamp(1 - clip[0], 1 + clip[1])
        surrogate = (ratio * advantages).minimum(clipped * advantages)
        return returned(-surrogate[mask].sum() / batch_mask.sum())

    assert re.match(verdict, check(loss, "policy")["clip-both"])


def test_a_function_that_was_asked_nothing_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("other.py").write_text("def loss(logprobs, eps):\n    return logprobs.sum()\n")
    assert cli.main(["conformance", "other.py:loss"]) == 1
    assert re.search(r"^0 of 0 .*; \d+ were not asked", capsys.readouterr().out, re.M)


def test_only_the_questions_that_were_asked_are_printed() -> None:
    (name, column), *_ = grid.load().items()
    some = {name: column._replace(cells={"gspo": column.cells["gspo"]})}
    text = grid.text(some)
    assert "gspo" in text
    assert "gae-padded" not in text


# ------------------------------------------------------------------------------------ planted faults

# (owner, function, text, replacement, the fixtures that turn red)
FAULTS: list[tuple[Any, str, str, str, set[str]]] = [
    (definition, "gae", "in reversed(tokens)", "in reversed(range(tokens[0], tokens[-1] + 1))", {"gae-gap", "gae-packed"}),
    (definition, "gae", "trajectory.bootstrap[i].item()", "0.0", {"gae-bootstrap"}),
    (definition, "gae", "gamma * lam * next_advantage", "lam * next_advantage", {"gae-padded", "gae-gamma-0"}),
    (definition, "shaped_advantages", "tokens[-1:]", "tokens[:1]", {"score-tail", "score-gap"}),
    (definition, "whiten", "(count - 1).clamp(min=1)", "count", {"whiten-bessel", "whiten-mask"}),
    (definition, "whiten", "else white + mean", "else white", {"whiten-keep-mean"}),
    (definition, "sampled_kl", "torch.expm1((-difference)", "torch.expm1((difference)", {"kl-k3", "kl-reward-k3"}),
    (definition, "policy_term", "ratio.clamp(lowest, highest)", "ratio.clamp(max=highest)", {"clip-both", "cispo-below"}),
    (definition, "policy_term", "-clipped.detach()", "-clipped", {"cispo"}),
    (definition, "policy_term", "torch.where(advantages < 0, bounded, surrogate)", "surrogate", {"dual-clip"}),
    (definition, "sequence_ratio_logprobs", "total / count.clamp(min=1)", "total", {"gspo", "gspo-uneven"}),
    (definition, "entropy", "    return", "    log_p = (0.7 * log_p).log_softmax(-1)\n    return", {"entropy-temperature"}),
    (aggregation, "aggregation_weights", "    if denominator is None:", "    if True:", {"token-mean", "seq-mean-token-mean-rows"}),
    (value_loss.ValueLossFunction, "forward", "0.5 * (weights", "(weights", {"value-half", "value-clip"}),
    (ours, "importance", '"sum", lengths', '"mean", lengths', {"weights-sequence-truncate"}),
    (estimators, "_against_group", "count / (count - 1)", "1.0", {"rloo"}),
    (controllers.AdaptiveKL, "update", "-0.2), 0.2)", "-0.5), 0.5)", {"kl-adaptive"}),
]  # fmt: skip


def plant(patch: pytest.MonkeyPatch, owner: Any, name: str, text: str, replacement: str) -> None:
    """Replace the function by a copy with another text."""
    function = inspect.unwrap(getattr(owner, name))
    source = textwrap.dedent(inspect.getsource(function))
    assert text in source
    space: dict[str, Any] = {}
    exec(
        "from __future__ import annotations\n" + source.replace(text, replacement, 1),
        function.__globals__,
        space,
    )
    patch.setattr(owner, name, space[name])


def wrong_fixtures() -> set[str]:
    """Return the fixtures that FastPPO's definition does not answer."""
    (adapter,) = [backend for backend in ours.backends() if backend.name == "FastPPO, torch"]
    calls = adapter.build()
    found = set()
    for name, fixture in fixtures().items():
        try:
            outputs = calls[fixture.operation](fixture.tensors(), **fixture.options)
        except NotOfferedError:
            continue
        if difference(fixture, outputs):
            found.add(name)
    return found


def test_without_a_fault_every_fixture_is_answered() -> None:
    assert wrong_fixtures() == set()


@pytest.mark.parametrize(
    ("owner", "name", "text", "replacement", "red"),
    FAULTS,
    ids=[f"{row[1]}-{i}" for i, row in enumerate(FAULTS)],
)
def test_a_planted_fault_turns_its_fixtures_red(
    owner: Any,
    name: str,
    text: str,
    replacement: str,
    red: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch, owner, name, text, replacement)
    assert red <= wrong_fixtures()
