"""The benchmark suite: floors by hand, wrong providers found out, what a run writes, the README."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import re
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import fastppo
from benchmarks import __main__ as command
from benchmarks import case as case_module
from benchmarks import (
    cases,
    claims,
    docs,
    flop,
    losses,
    measure,
    report,
    sequences,
    training,
    trl_grid,
    trl_iteration,
)
from benchmarks.run import check, run, run_case
from benchmarks.shapes import MODELS, SETS, Model, Sequences, Sweep, Tokens, Training, Work
from fastppo import cli

# torch lists the functions that a device context applies to when one is first entered. Entered
# behind conftest's poisoning it would list those, and models "on meta" would take real memory.
with torch.device("meta"):
    torch.empty(0)

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
MODEL = Model("tiny", 101, 16, "llama", 32, 2, 2, 1)
TINY = Work(
    "tiny",
    torch.float32,
    logits=(Tokens(MODEL, 12),),
    linear=(Tokens(MODEL, 12),),
    sequences=(Sequences(3, 20),),
    update=(Training(MODEL, 1, 4, 3, 4, 2),),
    sweeps=(
        Sweep("loss", "N", (Tokens(MODEL, 4), Tokens(MODEL, 8))),
        Sweep("gae", "T", (Sequences(2, 8), Sequences(2, 16))),
    ),
    seconds_per_provider=0.001,
    seconds=600.0,
)
CEILINGS = measure.Ceilings(1e9, {"float32": 1e12})


@pytest.fixture(autouse=True)
def _small_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes and times of the suite's constants, so that a run takes no longer than a test may."""
    monkeypatch.setattr(measure, "ROTATION_BYTES", 256)
    monkeypatch.setattr(measure, "CEILING_SECONDS", 0.001)
    monkeypatch.setitem(measure.COPY_BYTES, "cpu", 256)
    monkeypatch.setitem(measure.MATMUL_SHAPES, "cpu", ((16, 16, 16),))


@pytest.fixture
def no_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine that has none: importing them takes longer than the tests."""
    monkeypatch.setattr(case_module, "is_installed", lambda name: False)


def rows_of(case: case_module.Case, **changes: Any) -> dict[str, Any]:
    """The rows of a run of the case, by provider."""
    case = dataclasses.replace(case, **changes)
    result = run_case(case, CPU, CEILINGS, seconds=0.001, compiled=False)
    return {row.provider: row for row in result.rows}


# ----------------------------------------------------------------------------- floors and exponents


QWEN = Tokens(MODELS["qwen3-8b"], 8192)
QWEN_LOGITS = 8192 * 151936 * 2
"""2.49 GB of bf16."""
RESPONSES = Sequences(2, 8)
"""Of lengths 8 and 6: 16 entries, 14 of them count."""
BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("case", "bytes_moved", "flop_count"),
    [
        (losses.loss_case(QWEN, BF16), 2 * QWEN_LOGITS + 8192 * 16, 8192 * 151936 * 9),
        (losses.stats_case(QWEN, BF16), QWEN_LOGITS + 8192 * 16, 8192 * 151936 * 5),
        (
            losses.linear_loss_case(QWEN, BF16),
            2 * 2 * (8192 + 151936) * 4096 + 8192 * 16,
            6 * 8192 * 4096 * 151936,
        ),
        (
            losses.linear_logprobs_case(QWEN, BF16),
            2 * (8192 + 151936) * 4096 + 8192 * 12,
            2 * 8192 * 4096 * 151936,
        ),
        (sequences.gae_case(RESPONSES), 14 * 8 + 16 * 9, 14 * 6),
        (sequences.advantages_case(RESPONSES), 14 * 12 + 16 * 9 + 2 * 8, 14 * 14),
        (sequences.whiten_case(RESPONSES), 14 * 4 + 16 * 5, 14 * 5),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_floors_are_the_bytes_and_flop_that_one_counts_by_hand(
    case: case_module.Case, bytes_moved: int, flop_count: int
) -> None:
    assert case.bytes_moved == bytes_moved
    assert case.flop == flop_count


def test_an_updates_floor_is_five_forward_passes_and_the_optimisers_tensors() -> None:
    shape = Training(MODEL, 1, 4, 3, 4, 2)
    # Attention 16·16 for q and o, 16·8 for k and v; MLP 3·16·32; norms 16 each, 3 of them.
    trunk = 2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 32 + 3 * 16
    total = trunk + 2 * 101 * 16
    assert training.parameter_counts(shape) == (trunk, total)
    case = training.update_case(shape, torch.float32)
    assert case.bytes_moved == 7 * 4 * total
    # 4·4 of the 4·7 tokens are of the response.
    assert case.flop == 10 * (trunk * 4 * 7 + 101 * 16 * 4 * 4)


def test_the_floor_is_the_slower_of_bytes_and_flop() -> None:
    assert CEILINGS.floor(2 * 10**9, 10**12, torch.float32) == 2.0
    assert CEILINGS.floor(10**9, 3 * 10**12, torch.float32) == 3.0


def test_the_exponent_of_a_power_law_is_its_power() -> None:
    sizes = [100.0, 200.0, 800.0]
    assert measure.growth_exponent(sizes, [3e-6 * x**1.5 for x in sizes]) == pytest.approx(1.5)
    # y = 1, 1, 4 at log₂ x = 0, 1, 2: the least-squares slope is 1 by hand.
    assert measure.growth_exponent([1.0, 2.0, 4.0], [1.0, 1.0, 4.0]) == pytest.approx(1.0)
    assert measure.growth_exponent([100.0], [1.0]) is None
    assert measure.growth_exponent([100.0, 200.0], [0.0, 0.0]) is None


def test_a_ratio_is_the_median_of_quotients_of_neighbours() -> None:
    """A slow minute that hits both of a pair leaves the ratio as it is."""
    ratio = measure.Ratio.of_pairs([(2.0, 4.0), (100.0, 200.0), (2.0, 4.0)])
    assert ratio == (0.5, (0.5, 0.5), (2.0, 4.0))
    result = trl_iteration.Result({}, [1.0, 10.0, 1.0], [3.0, 30.0, 4.0], {})
    assert result.speed_up == 3.0
    calls: list[str] = []

    def call(name: str) -> Any:
        return lambda turn: calls.append(f"{name}{turn}")

    measure.ratio_in_turns(call("a"), call("b"), turns=2)
    assert calls == ["a0", "b0", "a0", "b0", "b1", "a1"]


# --------------------------------------------------------------------------- what gets timed or not


def test_a_wrong_provider_is_reported_wrong_and_never_timed() -> None:
    calls = []

    def slightly_wrong(inputs: measure.Inputs) -> case_module.Outputs:
        calls.append(1)
        advantages, returns = sequences.loop_gae(**inputs)
        return {"advantages": advantages, "returns": returns * 1.001}

    def raises(inputs: measure.Inputs) -> case_module.Outputs:
        raise RuntimeError("no such kernel\nand a long trace")

    right = sequences.gae_case(Sequences(3, 20))
    broken = (case_module.Provider("wrong", slightly_wrong), case_module.Provider("raises", raises))
    rows = rows_of(right, providers=(*right.providers, *broken), peers=(), notes={})
    assert rows["FastPPO"].status == rows["Python loop"].status == "timed"
    assert rows["wrong"].status == "wrong"
    assert rows["wrong"].error == pytest.approx(1e-3, rel=0.1)
    assert (rows["wrong"].timing, rows["wrong"].peak_extra_bytes) == (None, None)
    assert "returns is off by 1.0e-03" in rows["wrong"].detail
    assert len(calls) == 1  # the check, and nothing else
    assert (rows["raises"].status, rows["raises"].timing) == ("failed", None)
    assert rows["raises"].detail == "RuntimeError: no such kernel"


@pytest.mark.parametrize("build", [losses.loss_case, losses.linear_loss_case])
@pytest.mark.usefixtures("no_peers")
def test_in_bf16_too_a_gradient_without_the_entropy_bonus_is_wrong(build: Any) -> None:
    """The tokens' own entries are a hundred times the others', where the bonus shows."""
    shape = Tokens(MODELS["stories15m"], 64)
    case = build(shape, torch.bfloat16)
    inputs = case.draw(0, CPU)
    truth = case.truth(inputs)
    for other, status in (
        (case, "right"),
        (build(shape, torch.bfloat16, entropy_coef=0.0), "wrong"),
    ):
        provider = next(p for p in other.providers if p.name == "FastPPO")

        def gradients(inputs: measure.Inputs, call: Any = provider.call) -> case_module.Outputs:
            return {name: x for name, x in call(inputs).items() if name.endswith("_grad")}

        row = check(case, dataclasses.replace(provider, call=gradients), inputs, truth)
        assert row.status == status
        assert ("of its mean size" in row.detail) == (status == "wrong")


@pytest.mark.parametrize("phase", ["draw", "truth"])
@pytest.mark.usefixtures("no_peers")
def test_a_case_that_runs_out_of_memory_does_not_end_the_run(
    phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = sequences.whiten_case(Sequences(3, 20))

    def fail(*args: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory")

    ill = dataclasses.replace(right, **{phase: fail})
    monkeypatch.setattr("benchmarks.cases.cases", lambda *args: [ill, right])
    record = run(TINY, CPU, names=("whiten",), compiled=False)
    first, second = record["cases"]
    assert {row["status"] for row in first["rows"]} == {"failed"}
    assert {row["status"] for row in second["rows"]} - {"absent"} == {"timed"}
    assert any("out of memory" in line for line, _ in report.left_out(record))


@pytest.mark.usefixtures("no_peers")
def test_every_provider_of_ours_and_in_plain_pytorch_is_right() -> None:
    for case in cases.cases(TINY):
        inputs = case.draw(0, CPU)
        truth = case.truth(inputs)
        rows = [check(case, provider, inputs, truth) for provider in case.providers]
        case.release()
        assert {row.status for row in rows} == {"right"}, (case.name, rows)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_unwritten_output_is_wrong(value: float) -> None:
    assert measure.max_error(torch.tensor([1.0, value]), torch.ones(2)) == float("inf")


def test_an_absent_peer_is_named_as_absent_and_one_that_cannot_with_its_reason() -> None:
    def on_a_gpu(device: torch.device) -> tuple[case_module.Provider, ...]:
        raise case_module.UnsupportedError("its kernel needs a GPU")

    absent = case_module.Peer(
        "Nobody", "no-such-package", lambda device: pytest.fail("built though absent")
    )
    present = case_module.Peer("Somebody", "torch", on_a_gpu)
    rows = rows_of(sequences.whiten_case(Sequences(3, 20)), peers=(absent, present))
    assert rows["Nobody"][:3] == ("Nobody", "absent", "pip install no-such-package")
    assert rows["Somebody"][:3] == ("Somebody", "unsupported", "its kernel needs a GPU")
    assert rows["Nobody"].timing is rows["Somebody"].timing is None


def test_a_provider_gets_its_own_layout_outside_the_clock() -> None:
    """A layout in sequences is checked against the truth in tokens. What it writes over its inputs
    reaches no other provider."""
    prepared = []
    shapes = []

    def prepare(inputs: measure.Inputs) -> measure.Inputs:
        prepared.append(1)
        return {name: x.reshape(-1) for name, x in inputs.items()}

    def flat(inputs: measure.Inputs) -> case_module.Outputs:
        shapes.append(inputs["values"].shape)
        whitened = sequences.eager_whiten(inputs["values"], inputs["mask"])
        inputs["values"].zero_()
        return {"whitened": whitened}

    case = sequences.whiten_case(Sequences(3, 20))
    flattened = case_module.Provider("flat", flat, prepare=prepare, writes=("values",))
    rows = rows_of(case, providers=(flattened, *case.providers), peers=())
    assert {row.status for row in rows.values()} == {"timed"}
    assert set(shapes) == {torch.Size([60])}
    assert len(prepared) < len(shapes)  # not once per call


@pytest.mark.usefixtures("no_peers")
def test_a_bound_is_timed_and_not_taken_for_an_implementation() -> None:
    bound = rows_of(losses.linear_loss_case(TINY.linear[0], torch.float32))[losses.BOUND]
    assert (bound.status, bound.error) == ("bound", None)
    assert bound.timing is not None


def test_memory_counts_what_is_held_at_the_worst_moment() -> None:
    def call() -> torch.Tensor:
        a = torch.ones(1000)
        b = a + 1  # two are held
        del a
        return b * 2  # two again

    assert 8000 <= measure.peak_extra_memory(call, CPU) <= 8200


# ------------------------------------------------------------------------------------ sets and time


@pytest.mark.usefixtures("no_peers")
def test_what_does_not_fit_into_the_time_is_reported_as_skipped() -> None:
    record = run(TINY._replace(seconds=-1.0), CPU, names=("gae",), compiled=False)
    (row, _) = record["cases"][0]["rows"]
    assert (row["status"], row["median_seconds"]) == ("skipped", None)
    assert "spent before its turn" in row["detail"]


@pytest.mark.parametrize("name", MODELS)
def test_every_named_model_can_be_made(name: str) -> None:
    model = MODELS[name]
    config = training.make_config(model, 1, 32)
    made = training.make_model(config, torch.device("meta"))
    assert tuple(made.get_output_embeddings().weight.shape) == (model.vocab, model.hidden)


def test_the_rows_that_matter_come_first() -> None:
    order = [(case.name, case.shape) for case in cases.cases(SETS["cuda", "default"])]
    usual = ["loss", "statistics", "linear loss", "linear logprobs"]
    assert [name for name, _ in order[:4]] == usual
    assert {shape for _, shape in order[:4]} == {"qwen3-8b, N=8192"}
    assert {name for name, _ in order[4:8]} == {"gae", "advantages", "whiten", "PPO update"}
    assert len(order) == len(set(order))


# -------------------------------------------------------------------------------- what a run writes


@pytest.mark.usefixtures("no_peers")
def test_the_quick_set_writes_every_field_the_table_and_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(SETS, ("cpu", "quick"), TINY)
    chosen = ["loss", "linear-loss", "linear-logprobs", "gae", "sweeps"]
    flags = [f"--case={name}" for name in chosen]
    assert command.main(["--quick", "--device", "cpu", "--out", str(tmp_path), *flags]) == 0
    record = json.loads((tmp_path / "results.json").read_text("utf-8"))
    assert record["device"]["threads"] == torch.get_num_threads()
    assert record["packages"]["torch"] == torch.__version__
    names = {case["case"] for case in record["cases"]}
    assert names >= {"loss", "loss, forward", "linear loss", "linear logprobs", "gae"}
    points = [point for sweep in record["sweeps"] for point in sweep["points"]]
    assert [point["size"] for point in points] == [4, 8, 8, 16]
    for case in [*record["cases"], *points]:
        ours = case["rows"][0]
        assert (ours["provider"], ours["status"]) == ("FastPPO", "timed"), ours["detail"]
        for row in case["rows"]:
            if row["status"] == "timed":
                share = case["floor_seconds"] / row["median_seconds"]
                assert row["percent_of_floor"] == pytest.approx(100 * share)
                assert row["error"] < 1e-4
            elif row["status"] != "bound":
                assert row["median_seconds"] is row["peak_extra_bytes"] is None
    printed = capsys.readouterr().out
    for word in ("linear logprobs", "Python loop", "FastPPO, in place", "eager", "of floor", "N^a"):
        assert word in printed
    for name in ("floor", "memory", "growth"):
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000


def test_results_of_parts_make_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second part has a case anew and another one, and a third that its time did not reach."""
    monkeypatch.setattr("benchmarks.report.RESULTS", tmp_path / "results")
    (tmp_path / "results").mkdir()

    def part(name: str, date: str, **milliseconds: float | None) -> str:
        timed = [
            {
                "case": case,
                "shape": "N=2",
                "dtype": "float32",
                "rows": [{"status": "timed" if time else "skipped", "median_seconds": time}],
            }
            for case, time in milliseconds.items()
        ]
        record = {"format": 2, "set": "default", "packages": {"torch": "2"}, "date": date}
        record |= {"device": {"name": "Some GPU (R) 1"}, "cases": timed, "sweeps": []}
        (tmp_path / name).write_text(json.dumps(record))
        return str(tmp_path / name)

    first = part("a.json", "2026-01-02T10", loss=1.0, gae=2.0)
    second = part("b.json", "2026-01-02T11", gae=3.0, whiten=4.0, loss=None)
    assert command.main(["keep", first]) == command.main(["keep", second]) == 0
    kept = json.loads((tmp_path / "results" / "some-gpu-r-1.json").read_text())
    times = {case["case"]: case["rows"][0]["median_seconds"] for case in kept["cases"]}
    assert times == {"loss": 1.0, "gae": 3.0, "whiten": 4.0}
    for change, sentence in (
        ({"date": "2026-01-03T11"}, "the new results are of 2026-01-03"),
        ({"packages": {"torch": "3"}}, "its packages: {'torch': '2'}"),
        ({"set": "quick"}, "only results of the default set are kept, got the quick set"),
    ):
        path = Path(part("c.json", "2026-01-02T12", gae=5.0))
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
        with pytest.raises(SystemExit):
            command.main(["keep", str(path)])
        assert sentence in " ".join(capsys.readouterr().err.split())
    assert json.loads((tmp_path / "results" / "some-gpu-r-1.json").read_text()) == kept


@pytest.mark.usefixtures("no_peers")
def test_what_other_commands_measured_stays_in_a_results_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`claims` and `trl_grid` write into the file that the set has made."""
    monkeypatch.setitem(SETS, ("cpu", "default"), TINY._replace(seconds=-1.0))
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    assert command.main(["--keep", "--device", "cpu", "--out", str(tmp_path / "out")]) == 0
    (path,) = tmp_path.glob("*.json")
    added = {"claims": [1], "claims_measured": {"date": "x"}, "trl_grid": {}}
    report.write(report.read(path) | added | {"date": "older"}, path)
    assert command.main(["--keep", "--device", "cpu", "--out", str(tmp_path / "out")]) == 0
    record = report.read(path)
    assert record["date"] != "older"
    assert {name: record[name] for name in added} == added


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--device", "tpu"], "invalid choice: 'tpu'"),
        (["--threads", "0"], "--threads must be at least 1, got 0"),
        (["claims", "--device", "cuda"], "claims are for a CPU"),
        (["keep", "no-such.json"], "no-such.json is no results file"),
        (["keep", "README.md"], "README.md is no results file"),
        (["keep"], "a results file is what `keep` takes"),
        (["--quick", "--out", "README.md"], "--out README.md cannot be written"),
        (["--keep", "--seconds", "1"], "--keep is for the whole set"),
        (["--keep", "--case", "gae"], "--keep is for the whole set"),
    ],
)
def test_wrong_use_is_answered_in_a_sentence_before_anything_runs(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    if "--out" not in arguments:
        arguments = [*arguments, "--out", str(tmp_path)]
    with pytest.raises(SystemExit):
        command.main(arguments)
    assert sentence in " ".join(capsys.readouterr().err.split())


def test_a_narrow_terminal_gets_fewer_columns_and_whole_names() -> None:
    (record, *_) = docs.load()[::-1]
    for width in (80, 150):
        to = Console(width=width, record=True, file=io.StringIO())
        report.print_table(record, to)
        text = to.export_text()
        assert "FastPPO" in text
        assert "…" not in text
        assert ("GB/s │" in text or "GB/s ┃" in text) == (width == 150)


# ---------------------------------------------------------------------- the page and the README


def test_the_page_and_the_readme_are_what_the_results_say() -> None:
    """After a new results file: python -m benchmarks docs"""
    records = docs.load()
    assert docs.PAGE.read_text("utf-8") == docs.page(records)
    assert docs.current(docs.README.read_text("utf-8")) == docs.numbers(records)


@pytest.mark.usefixtures("no_peers")
def test_the_page_says_where_torch_compile_was_left_out() -> None:
    record = run(TINY, CPU, names=("whiten",), compiled=False)
    assert "`torch.compile` was left out" in docs.page([record])
    record["cases"][0]["rows"].append(record["cases"][0]["rows"][0] | {"provider": "torch.compile"})
    assert "`torch.compile` was left out" not in docs.page([record])


def of_the_readme(records: list[dict[str, Any]]) -> dict[str, Any]:
    """The results that its numbers are taken from."""
    cpus = [r for r in records if r["device"]["type"] == "cpu" and r.get("claims")]
    return max(cpus, key=lambda record: record["claims_measured"]["date"])


def test_a_results_file_that_changes_makes_the_page_and_the_readme_wrong() -> None:
    records = docs.load()
    for place in range(len(records)):
        changed = json.loads(json.dumps(records))
        changed[place]["cases"][0]["rows"][0]["median_seconds"] *= 2
        assert docs.page(changed) != docs.page(records)
    for claim in range(len(of_the_readme(records)["claims"])):
        changed = json.loads(json.dumps(records))
        other = of_the_readme(changed)["claims"][claim]
        other["measured"] *= 2
        in_place = "in place" in other["text"]  # on the page alone
        assert (docs.numbers(changed) == docs.numbers(records)) == in_place
        assert docs.page(changed) != docs.page(records)


def test_the_readme_shows_the_cpu_that_was_measured_last_and_names_the_gpus() -> None:
    newest = of_the_readme(docs.load())
    older = json.loads(json.dumps(newest))
    older["device"]["name"] = "a CPU of the year before"
    older["claims_measured"]["date"] = "2025-01-01T00:00:00+00:00"
    for records in ([older, newest], [newest, older]):
        assert docs.numbers(records) == docs.numbers([newest])
    gpu = json.loads(json.dumps(newest))
    gpu["device"] |= {"type": "cuda", "name": "NVIDIA H200"}
    assert "No GPU has run the suite yet" in docs.page([newest])
    assert "On GPUs: not measured." in docs.numbers([newest])
    assert "No GPU" not in docs.page([gpu, newest])
    assert "On GPUs: measured on NVIDIA H200." in docs.numbers([gpu, newest])


def test_a_number_of_the_readme_that_nobody_measured_is_refused() -> None:
    (cpu, *_) = docs.load()[::-1]
    with pytest.raises(ValueError, match="expected a CPU's results with claims"):
        docs.numbers([{**cpu, "claims": []}])
    unmeasured = [{**claim, "measured": None} for claim in cpu["claims"]]
    for wrong in (cpu["claims"][:-1], unmeasured):
        with pytest.raises(ValueError, match="expected one measured claim"):
            docs.numbers([{**cpu, "claims": wrong}])


def test_the_readmes_numbers_are_written_between_their_markers_and_nowhere_else(
    tmp_path: Path,
) -> None:
    readme, page = tmp_path / "README.md", tmp_path / "benchmarks.md"
    readme.write_text(f"before\n{docs.BEGIN}\nold\n{docs.END}\nafter\n")
    assert docs.update(readme, page) == [readme, page]
    assert docs.current(readme.read_text("utf-8")) == docs.numbers(docs.load())
    assert page.read_text("utf-8") == docs.page(docs.load())
    assert readme.read_text("utf-8").startswith("before\n")
    assert readme.read_text("utf-8").endswith("\nafter\n")
    assert docs.update(readme, page) == []
    readme.write_text("no markers")
    with pytest.raises(ValueError, match="must hold"):
        docs.update(readme, page)


# ------------------------------------------------------------------------------------- front doors


def test_fastppo_bench_is_the_suite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["bench", "--help"])
    assert "usage: fastppo bench" in capsys.readouterr().out
    monkeypatch.setattr(cli, "CHECKOUT", tmp_path)
    assert cli.main(["bench", "--quick"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "clone the repository" in error


def test_commands_of_the_suites_readme_are_commands() -> None:
    page = (ROOT / "benchmarks" / "README.md").read_text("utf-8")
    blocks = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 2
    for line in "".join(blocks).splitlines():
        words = shlex.split(line, comments=True)
        if words[:2] == ["fastppo", "bench"]:
            command.build_parser().parse_args(words[2:])
        elif words[0] == "bash":
            assert f"\n{words[2]})" in (ROOT / words[1]).read_text("utf-8"), "no such part"
        else:
            assert words[:2] == ["python", "-m"]
            assert (ROOT / f"{words[2].replace('.', '/')}.py").exists()


# ------------------------------------------------------------------------------ claims for a CPU


def test_the_comparison_with_trl_says_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "trl.experimental.ppo", None)
    assert trl_iteration.main([]) == 1
    assert "pip install trl==1.12.0" in capsys.readouterr().err


def test_flop_are_those_of_the_products_the_attention_and_the_fused_head() -> None:
    n, h, v = 6, 8, 10
    hidden, weight = torch.randn(n, h, requires_grad=True), torch.randn(v, h, requires_grad=True)
    tokens, zeros = torch.zeros(n, dtype=torch.int64), torch.zeros(n)
    with flop.counted() as counter:
        fastppo.linear_ppo_loss(hidden, weight, tokens, zeros, zeros + 1).loss.backward()
    assert counter.get_total_flops() == 6 * n * h * v
    with flop.counted() as counter:
        fastppo.linear_token_stats(hidden, weight, tokens)
    assert counter.get_total_flops() == 2 * n * h * v
    with flop.counted() as counter:
        (hidden @ weight.T).sum().backward()
    assert counter.get_total_flops() == 6 * n * h * v
    query = torch.randn(1, 2, n, 4, requires_grad=True)
    with flop.counted() as counter:
        torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
    assert counter.get_total_flops() == 2 * 2 * (2 * n * n * 4)


def test_a_row_of_the_grid_has_its_floor_and_what_equal_efficiency_would_give() -> None:
    result = trl_iteration.Result(
        dataclasses.asdict(trl_iteration.Options(prompt=16)),
        [2.0, 4.0],
        [6.0, 12.0],
        {"update": 1.0},
        fastppo_flop=10**10,
        trl_flop=2 * 10**10,
        matmul_flop_per_second=1e10,
    )
    row = trl_grid.describe(dataclasses.asdict(result) | {"speed_up": result.speed_up})
    cells = ["16 + 32 tokens, 2 × 64, V = 32000"]
    cells += ["3.00 s", "1.00 s", "33 %", "9.00 s", "3.00", "2.00"]
    assert trl_grid.cells(row) == cells
    (cpu, *_) = docs.load()[::-1]
    page = docs.page([cpu | {"trl_grid": {"date": "2026-01-02T00:00:00", "rows": [row]}}])
    assert f"| {' | '.join(cells)} |" in page


def test_options_of_the_iteration_come_back_from_their_own_flags() -> None:
    for options in trl_grid.SHAPES:
        parsed = vars(trl_iteration.build_parser().parse_args(options.flags()))
        del parsed["json"]
        assert trl_iteration.Options(**parsed) == options


def test_a_claim_passes_up_to_its_limit_and_fails_behind_it() -> None:
    assert claims.Claim("", 1.0, at_most=1.0).verdict == "PASS"
    assert claims.Claim("", 1.01, at_most=1.0).verdict == "FAIL"
    assert claims.Claim("", 10.0, at_least=10.0).verdict == "PASS"
    assert claims.Claim("", 9.9, at_least=10.0).verdict == "FAIL"
    assert claims.Claim("", math.nan, at_most=1.0).verdict == "FAIL"
    assert claims.Claim("", None, at_most=1.0).verdict == "NOT MEASURED"


def test_the_loss_takes_a_quarter_of_eagers_memory() -> None:
    case = losses.loss_case(Tokens(MODELS["tinyllama-1.1b"], 512), torch.float32)
    inputs = case.draw(0, CPU)
    providers = {provider.name: provider for provider in case.providers}
    extra = {
        name: measure.peak_extra_memory(partial(providers[name].call, inputs), CPU)
        for name in ("FastPPO", "eager PyTorch")
    }
    assert extra["FastPPO"] * 4 <= extra["eager PyTorch"]
