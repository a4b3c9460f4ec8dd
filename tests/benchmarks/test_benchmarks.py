"""The benchmark suite: floors by hand, wrong providers found out, what a run writes, the README."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import re
import shlex
import subprocess
import sys
import tomllib
from functools import partial
from pathlib import Path
from types import SimpleNamespace
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
from benchmarks import conftest as pytest_front_door
from benchmarks.page import write_page
from benchmarks.run import (
    check,
    describe,
    describe_sweep,
    estimate_seconds,
    for_sweeps,
    run,
    run_case,
)
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
    iteration=(Training(MODEL, 1, 4, 3, 4, 2),),
    sweeps=(
        Sweep("loss", "N", (Tokens(MODEL, 4), Tokens(MODEL, 8))),
        Sweep("gae", "T", (Sequences(2, 8), Sequences(2, 16))),
    ),
    seconds_per_provider=0.0,
    min_calls=2,
    seconds=600.0,
)
CEILINGS = measure.Ceilings(1e9, {"float32": 1e12})


@pytest.fixture(autouse=True)
def _little_rotation(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ROTATION_BYTES", "COPY_BYTES"):
        monkeypatch.setitem(getattr(measure, name), "cpu", 256)
    monkeypatch.setitem(measure.MATMUL_SHAPES, "cpu", ((16, 16, 16),))


@pytest.fixture
def no_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine that has none: importing them takes longer than the tests."""
    monkeypatch.setattr(case_module, "is_installed", lambda name: False)


# ----------------------------------------------------------------------------- floors and exponents


def test_floors_are_the_bytes_and_flop_that_one_counts_by_hand() -> None:
    qwen, bf16 = Tokens(MODELS["qwen3-8b"], 8192), torch.bfloat16
    logits = 8192 * 151936 * 2  # 2.49 GB
    assert losses.loss_case(qwen, bf16).bytes_moved == 2 * logits + 8192 * 16
    assert losses.loss_case(qwen, bf16, with_gradient=False).bytes_moved == logits + 8192 * 16
    assert losses.cross_entropy_case(qwen, bf16).bytes_moved == 2 * logits + 8192 * 8
    assert losses.stats_case(qwen, bf16).bytes_moved == logits + 8192 * 16
    assert losses.loss_case(qwen, bf16).flop == 8192 * 151936 * 9
    assert losses.stats_case(qwen, bf16).flop == 8192 * 151936 * 5
    linear = losses.linear_loss_case(qwen, bf16)
    assert linear.flop == 6 * 8192 * 4096 * 151936
    assert linear.bytes_moved == 2 * 2 * (8192 + 151936) * 4096 + 8192 * 16
    logprobs = losses.linear_logprobs_case(qwen, bf16)
    assert logprobs.flop == 2 * 8192 * 4096 * 151936
    assert logprobs.bytes_moved == 2 * (8192 + 151936) * 4096 + 8192 * 12
    # Lengths 8, 6 (of 2 responses): 16 entries, 14 of them count.
    shape = Sequences(2, 8)
    assert sequences.response_lengths(shape) == [8, 6]
    assert sequences.gae_case(shape).bytes_moved == 14 * 8 + 16 * 9
    assert sequences.gae_case(shape).flop == 14 * 6
    assert sequences.advantages_case(shape).bytes_moved == 14 * 12 + 16 * 9 + 2 * 8
    assert sequences.advantages_case(shape).flop == 14 * 14
    assert sequences.whiten_case(shape).bytes_moved == 14 * 4 + 16 * 5
    assert sequences.whiten_case(shape).flop == 14 * 5


def test_an_updates_floor_is_five_forward_passes_and_the_optimisers_tensors() -> None:
    shape = Training(MODEL, 1, 4, 3, 4, 2)
    # Attention 16·16 for q and o, 16·8 for k and v; MLP 3·16·32; norms 16 each, 3 of them.
    mlp = 3 * 16 * 32
    trunk = 2 * 16 * 16 + 2 * 16 * 8 + mlp + 3 * 16
    total = trunk + 2 * 101 * 16
    assert training.parameter_counts(shape) == (trunk, mlp, total)
    case = training.update_case(shape, torch.float32)
    assert case.bytes_moved == 7 * 4 * total
    # The only layer is the last: 4·4 of the 4·7 tokens predict a response token.
    assert case.flop == 10 * (trunk * 4 * 7 - mlp * 4 * 3 + 101 * 16 * 4 * 4)


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


def test_a_ratio_is_the_median_of_quotients_of_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow minute that hits both of a pair leaves the ratio as it is."""
    slowness = iter([1.0, 1.0, 50.0, 50.0, 1.0, 1.0])
    monkeypatch.setattr(measure, "_seconds", lambda call, device: (call() * next(slowness), None))
    ratio = measure.ratio_in_turns(lambda turn: 2.0, lambda turn: 4.0, turns=3)
    assert ratio.median == 0.5
    assert ratio.quartiles == (0.5, 0.5)
    assert ratio.seconds == (2.0, 4.0)


# --------------------------------------------------------------------------- what gets timed or not


def test_a_wrong_provider_is_reported_wrong_and_never_timed() -> None:
    calls = []

    def slightly_wrong(inputs: measure.Inputs) -> case_module.Outputs:
        calls.append(1)
        right = sequences._gae_from(sequences.loop_gae)(inputs)
        return right | {"returns": right["returns"] * 1.001}

    def raises(inputs: measure.Inputs) -> case_module.Outputs:
        raise RuntimeError("no such kernel\nand a long trace")

    right = sequences.gae_case(Sequences(3, 20))
    broken = (case_module.Provider("wrong", slightly_wrong), case_module.Provider("raises", raises))
    case = dataclasses.replace(right, providers=(*right.providers, *broken), peers=(), notes={})
    result = run_case(case, TINY, CPU, CEILINGS, compiled=False)
    rows = {row.provider: row for row in result.rows}
    assert rows["FastPPO"].status == rows["Python loop"].status == "timed"
    assert rows["wrong"].status == "wrong"
    assert rows["wrong"].error == pytest.approx(1e-3, rel=0.1)
    assert rows["wrong"].timing is None
    assert rows["wrong"].peak_extra_bytes is None
    assert "returns is off by 1.0e-03" in rows["wrong"].detail
    assert len(calls) == 1  # the check, and nothing else
    assert (rows["raises"].status, rows["raises"].timing) == ("failed", None)
    assert rows["raises"].detail == "RuntimeError: no such kernel"


@pytest.mark.parametrize("build", [losses.loss_case, losses.linear_loss_case])
@pytest.mark.usefixtures("no_peers")
def test_in_bf16_too_a_gradient_without_the_entropy_bonus_is_wrong(build: Any) -> None:
    """The tokens' own entries are a hundred times the others', where the bonus shows."""
    shape = Tokens(MODELS["stories15m"], 64)
    case, without = (
        build(shape, torch.bfloat16, entropy_coef=coef) for coef in (losses.ENTROPY_COEF, 0.0)
    )
    inputs = case.draw(0, CPU)
    truth = case.truth(inputs)
    for of, right in ((case, True), (without, False)):
        provider = next(found for found in of.providers if found.name == "FastPPO")

        def call(inputs: measure.Inputs, call: Any = provider.call) -> case_module.Outputs:
            return {name: x for name, x in call(inputs).items() if name.endswith("_grad")}

        found = check(case, dataclasses.replace(provider, call=call), inputs, truth)
        assert isinstance(found, float) == right
        if not right:
            assert found.status == "wrong"
            assert "of its mean size" in found.detail


@pytest.mark.parametrize("phase", ["draw", "truth", "weigh", "time"])
@pytest.mark.usefixtures("no_peers")
def test_a_case_that_runs_out_of_memory_does_not_end_the_run(
    phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = sequences.whiten_case(Sequences(3, 20))

    def fail(*args: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory")

    ill = right
    if phase in ("draw", "truth"):
        ill = dataclasses.replace(right, **{phase: fail})
    elif phase == "weigh":
        monkeypatch.setattr(measure, "peak_extra_memory", fail)
    else:
        monkeypatch.setattr(measure, "time_in_turns", fail)
    monkeypatch.setattr("benchmarks.cases.cases", lambda *args: [ill, right])
    record, _ = run(TINY, CPU, names=("whiten",), compiled=False)
    first, second = record["cases"]
    assert {row["status"] for row in first["rows"]} - {"absent"} == {"failed"}
    assert "out of memory" in first["rows"][0]["detail"]
    if phase in ("draw", "truth"):
        assert {row["status"] for row in second["rows"]} - {"absent"} == {"timed"}
    assert any("out of memory" in line for line, _ in report.left_out(record))


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
    case = dataclasses.replace(sequences.whiten_case(Sequences(3, 20)), peers=(absent, present))
    rows = {row.provider: row for row in run_case(case, TINY, CPU, CEILINGS, compiled=False).rows}
    assert (rows["Nobody"].status, rows["Nobody"].timing) == ("absent", None)
    assert rows["Nobody"].detail == "pip install no-such-package"
    assert (rows["Somebody"].status, rows["Somebody"].timing) == ("unsupported", None)
    assert rows["Somebody"].detail == "its kernel needs a GPU"


def test_a_provider_that_writes_over_its_inputs_finds_them_restored() -> None:
    seen = []

    def spoil(inputs: measure.Inputs) -> case_module.Outputs:
        seen.append(inputs["values"].clone())
        whitened = sequences.eager_whiten(inputs["values"], inputs["mask"])
        inputs["values"].zero_()
        return {"whitened": whitened}

    case = sequences.whiten_case(Sequences(3, 20))
    spoiler = case_module.Provider("spoiler", spoil, writes=("values",))
    case = dataclasses.replace(case, providers=(spoiler, *case.providers), peers=())
    rows = run_case(case, TINY._replace(min_calls=8), CPU, CEILINGS, compiled=False).rows
    assert {row.status for row in rows} == {"timed"}
    assert len(seen) == 10  # check, memory, 8 timed
    assert all(x.abs().sum() > 0 for x in seen)


def test_a_provider_gets_its_own_layout_outside_the_clock() -> None:
    """A layout in sequences is checked against the truth in tokens."""
    prepared, shapes = [], []

    def prepare(inputs: measure.Inputs) -> measure.Inputs:
        prepared.append(1)
        return {name: x.reshape(-1) for name, x in inputs.items()}

    def flat(inputs: measure.Inputs) -> case_module.Outputs:
        shapes.append(inputs["values"].shape)
        return {"whitened": sequences.eager_whiten(inputs["values"], inputs["mask"])}

    case = sequences.whiten_case(Sequences(3, 20))
    flattened = case_module.Provider("flat", flat, prepare=prepare)
    case = dataclasses.replace(case, providers=(flattened,), peers=())
    (row,) = run_case(case, TINY, CPU, CEILINGS, compiled=False).rows
    assert row.status == "timed"
    assert set(shapes) == {torch.Size([60])}
    assert len(prepared) < 2 + len(shapes)  # not once per call


@pytest.mark.usefixtures("no_peers")
def test_a_bound_is_timed_and_not_taken_for_an_implementation() -> None:
    result = run_case(losses.linear_loss_case(*_tiny()), TINY, CPU, CEILINGS, compiled=False)
    rows = {row.provider: row for row in result.rows}
    bound = rows[losses.BOUND]
    assert (bound.status, bound.error) == ("bound", None)
    assert bound.timing is not None


def _tiny() -> tuple[Tokens, torch.dtype]:
    return TINY.linear[0], torch.float32


def test_memory_counts_what_is_held_at_the_worst_moment() -> None:
    def call() -> torch.Tensor:
        a = torch.ones(1000)
        b = a + 1  # two are held
        del a
        return b * 2  # two again

    assert 8000 <= measure.peak_extra_memory(call, CPU) <= 8200


@pytest.mark.usefixtures("no_peers")
def test_an_update_reports_what_fp64_does() -> None:
    case = training.update_case(Training(MODEL, 1, 4, 3, 4, 2), torch.float32)
    result = run_case(case, TINY, CPU, CEILINGS, compiled=False)
    rows = {row.provider: row for row in result.rows if row.status != "unsupported"}
    assert rows.keys() == {"FastPPO", "FastPPO, loss from logits", "eager PyTorch"}
    for row in rows.values():
        assert row.status == "timed", row.detail
        assert row.error is not None
        assert row.error < 1e-4


@pytest.mark.usefixtures("no_peers")
def test_an_iteration_draws_from_the_model_that_fp64_knows() -> None:
    case = training.iteration_case(Training(MODEL, 1, 4, 3, 4, 2), torch.float32)
    result = run_case(case, TINY, CPU, CEILINGS, compiled=False)
    for row in result.rows:
        if row.status != "unsupported":
            assert row.status == "timed", row.detail
            assert row.error is not None
            assert row.error < 1e-4


def test_a_recorded_engine_is_told_what_a_run_tells_its_engine() -> None:
    """Else a sampler's caches and graphs would stay in memory through every update."""
    told: list[object] = []
    engine = SimpleNamespace(
        same_weights=True, release=lambda: told.append("release"), weights_changed=told.append
    )
    recorder = training._Recorder(engine)
    recorder.release()
    recorder.weights_changed("policy")
    assert told == ["release", "policy"]


# ------------------------------------------------------------------------------------ sets and time

H200 = measure.Ceilings(4.3e12, {"bfloat16": 788e12, "float32": 50e12})


@pytest.mark.parametrize(("name", "minutes"), [("default", 10), ("quick", 1)])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_set_begins_no_case_after_its_time(device: str, name: str, minutes: int) -> None:
    assert SETS[device, name].seconds < 60 * minutes


def test_the_gpu_set_is_estimated_at_less_than_its_time() -> None:
    work = SETS["cuda", "default"]
    total = sum(estimate_seconds(c, work, H200, compiled=True) for c in cases.cases(work))
    for sweep in work.sweeps:
        for _, case in cases.sweep_cases(sweep, work.dtype):
            total += estimate_seconds(case, for_sweeps(work), H200, compiled=False)
    assert total < work.seconds


@pytest.mark.usefixtures("no_peers")
def test_what_does_not_fit_into_the_time_is_reported_as_skipped() -> None:
    record, _ = run(TINY._replace(seconds=-1.0), CPU, names=("gae",), compiled=False)
    (row, _) = record["cases"][0]["rows"]
    assert (row["status"], row["median_seconds"]) == ("skipped", None)
    assert "spent before its turn" in row["detail"]


def test_the_gpu_set_covers_the_sizes_that_a_fused_lm_head_meets() -> None:
    work = SETS["cuda", "default"]
    shapes = list(work.linear)
    for sweep in work.sweeps:
        shapes += [x for x in sweep.shapes if sweep.case == "linear-loss" and isinstance(x, Tokens)]
    assert {shape.model.vocab for shape in shapes} >= {32000, 128256, 151936}
    assert {shape.model.hidden for shape in shapes} >= {896, 2048, 4096}
    assert {shape.n for shape in shapes} >= {2048, 8192, 32768}


@pytest.mark.parametrize("name", MODELS)
def test_every_named_model_can_be_made(name: str) -> None:
    model = MODELS[name]
    config = training.make_config(model, 1, 32)
    made = training.make_model(config, torch.device("meta"))
    assert tuple(made.get_output_embeddings().weight.shape) == (model.vocab, model.hidden)


# -------------------------------------------------------------------------------- what a run writes

FIELDS = {
    *("provider", "status", "detail", "median_seconds", "quartiles_seconds", "spread_seconds"),
    *("processor_seconds", "calls", "bytes_per_second", "flop_per_second", "percent_of_floor"),
    *("peak_extra_bytes", "error"),
}


@pytest.mark.usefixtures("no_peers")
def test_the_quick_set_writes_every_field_table_pictures_and_page(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(SETS, ("cpu", "quick"), TINY)
    assert command.main(["--quick", "--device", "cpu", "--out", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "results.json").read_text("utf-8"))
    assert record.keys() == {
        *("format", "date", "set", "device", "packages", "load_average_before", "sweeps"),
        *("load_average_after", "ceilings", "cases", "seconds", "estimated_seconds"),
    }
    assert record["device"]["threads"] == torch.get_num_threads()
    assert record["packages"]["torch"] == torch.__version__
    assert len(record["cases"]) == 13
    points = [point for sweep in record["sweeps"] for point in sweep["points"]]
    assert [point["size"] for point in points] == [4, 8, 8, 16]
    for case in [*record["cases"], *points]:
        assert case.keys() >= {"case", "shape", "dtype", "bytes", "flop", "floor_seconds", "rows"}
        ours = case["rows"][0]
        assert (ours["provider"], ours["status"]) == ("FastPPO", "timed"), ours["detail"]
        for row in case["rows"]:
            assert row.keys() == FIELDS
            measured = [row[name] is not None for name in FIELDS - {"detail", "error"}]
            assert all(measured) == (row["status"] in ("timed", "bound"))
            if row["status"] == "timed":
                share = case["floor_seconds"] / row["median_seconds"]
                assert row["percent_of_floor"] == pytest.approx(100 * share)
                assert row["error"] < 1e-4
    printed = capsys.readouterr().out
    for word in ("linear logprobs", "Python loop", "FastPPO, in place", "eager", "of floor", "N^a"):
        assert word in printed
    for name in ("floor", "memory", "growth"):
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
    page = (tmp_path / "index.html").read_text("utf-8")
    assert page.count("data:image/png;base64,") == 3
    assert not re.search(r"(src|href)=\"(?!data:)", page)  # one file that loads nothing
    for word in ("PPO iteration", "matrix products alone", torch.__version__):
        assert word in page


def test_growth_is_fitted_over_the_sizes_that_were_timed() -> None:
    sweep = Sweep("gae", "T", (Sequences(2, 8), Sequences(2, 16)))
    points = []
    for size, case in cases.sweep_cases(sweep, torch.float32):
        case = dataclasses.replace(case, peers=())
        result = run_case(case, TINY, CPU, CEILINGS, compiled=False)
        timed = [
            row._replace(timing=row.timing._replace(median=1e-6 * size**2), peak_extra_bytes=size)
            for row in result.rows
            if row.timing is not None
        ]
        points.append((size, result._replace(rows=timed)))
    growth = describe_sweep(sweep, points)["growth"]
    assert growth["FastPPO"]["time"] == pytest.approx(2.0)
    assert growth["FastPPO"]["memory"] == pytest.approx(1.0)


def test_a_results_file_is_named_by_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = {"name": "Some CPU (R) 9", "type": "cpu", "threads": 2}
    assert report.slug(cpu) == "some-cpu-r-9"
    assert report.slug({"name": "NVIDIA H200", "type": "cuda", "threads": 16}) == "nvidia-h200"


def test_part_of_a_set_is_not_kept(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--keep", "--case", "gae"])
    assert "whole set" in capsys.readouterr().err


def test_what_other_commands_measured_stays_in_a_results_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`claims` and `trl_grid` write into the file that the set has made."""
    path = tmp_path / "some-cpu.json"
    older = {"date": "older", "claims": [1], "claims_measured": {"date": "x"}, "trl_grid": {}}
    report.write(older, path)
    monkeypatch.setattr(command, "run", lambda *arguments, **options: ({"date": "newer"}, None))
    monkeypatch.setattr(command, "_write_page", lambda *arguments: None)
    monkeypatch.setattr(report, "print_table", lambda *arguments: None)
    monkeypatch.setattr(report, "results_path", lambda record: path)
    assert command.main(["--keep", "--device", "cpu", "--out", str(tmp_path)]) == 0
    assert report.read(path) == older | {"date": "newer"}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--device", "tpu"], "--device must be auto, cpu or cuda, got 'tpu'"),
        (["--threads", "0"], "--threads must be at least 1, got 0"),
        (["claims", "--device", "cuda"], "claims are for a CPU"),
        (["page", "no-such.json"], "no-such.json is no results file"),
        (["page", "README.md"], "README.md is no results file"),
        (["keep", "README.md"], "README.md is no results file"),
        (["keep"], "a results file is what `page` and `keep` take"),
        (["--quick", "--out", "README.md"], "--out README.md cannot be written"),
        (["--keep", "--seconds", "1"], "--keep is for the whole set"),
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


def test_describe_needs_no_timing() -> None:
    case = dataclasses.replace(sequences.whiten_case(Sequences(3, 20)), peers=())
    result = run_case(case, TINY, CPU, CEILINGS, compiled=False)
    empty = result._replace(rows=[row for row in result.rows if row.timing is None])
    assert all(row["median_seconds"] is None for row in describe(empty)["rows"])


@pytest.mark.usefixtures("no_peers")
def test_a_restricted_run_holds_the_chosen_cases_alone() -> None:
    record, results = run(TINY, CPU, names=("gae", "whiten"), compiled=False)
    assert [case["case"] for case in record["cases"]] == ["gae", "whiten"]
    assert record["sweeps"] == []
    assert len(results) == 2


@pytest.mark.usefixtures("no_peers")
def test_what_is_compiled_comes_last_where_compiling_takes_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turns: list[str] = []
    monkeypatch.setattr(sequences, "compiled", lambda function: function)
    how: dict[str, Any] = {"names": ("gae", "whiten"), "progress": turns.append}
    last, _ = run(TINY, CPU, **how, compiled_last=True)
    begun = [line for line in turns if "/3  " in line and ":" not in line]
    assert begun == [
        "1/3  gae, B=3, T=20", "2/3  whiten, B=3, T=20", "3/3  whiten, B=3, T=20"
    ]  # fmt: skip
    assert turns[-3:] == [f"{begun[-1]}: {what}" for what in (
        "checking torch.compile", "weighing torch.compile", "timing"
    )]  # fmt: skip
    in_turns, _ = run(TINY, CPU, **how)
    for one, other in zip(last["cases"], in_turns["cases"], strict=True):
        assert [row["provider"] for row in one["rows"]] == [
            row["provider"] for row in other["rows"]
        ]
        assert [row["status"] for row in one["rows"]] == [row["status"] for row in other["rows"]]
    alone = [row for row in last["cases"][1]["rows"] if row["provider"] == "torch.compile"]
    assert [row["status"] for row in alone] == ["timed"]
    ended, _ = run(TINY._replace(seconds=-1.0), CPU, **how, compiled_last=True)
    assert all(row["status"] in ("skipped", "unsupported") for row in ended["cases"][1]["rows"])


def test_the_rows_that_matter_come_first() -> None:
    work = SETS["cuda", "default"]
    order = [(case.name, case.shape) for case in cases.cases(work)]
    usual = ["loss", "statistics", "linear loss", "linear logprobs"]
    assert [name for name, _ in order[:4]] == usual
    assert {shape for _, shape in order[:4]} == {"qwen3-8b, N=8192"}
    assert {name.split(",")[0] for name, _ in order[4:9]} == {
        "gae", "advantages", "whiten", "PPO update", "PPO iteration"
    }  # fmt: skip
    assert len(order) == len(set(order)) == 30


@pytest.mark.usefixtures("no_peers")
def test_a_page_can_be_made_of_results_without_sweeps(tmp_path: Path) -> None:
    record, _ = run(TINY, CPU, names=("gae",), compiled=False)
    page = write_page(record, tmp_path).read_text("utf-8")
    assert page.count("data:image/png;base64,") == 2


# ---------------------------------------------------------------------- the page and the README


def test_the_page_and_the_readme_are_what_the_results_say() -> None:
    """After a new results file: python -m benchmarks docs"""
    records = docs.load()
    assert docs.PAGE.read_text("utf-8") == docs.page(records)
    assert docs.current(docs.README.read_text("utf-8")) == docs.sentences(records)


@pytest.mark.usefixtures("no_peers")
@pytest.mark.parametrize("compiled", [True, False])
def test_the_page_says_where_torch_compile_was_left_out(compiled: bool) -> None:
    record, _ = run(TINY, CPU, names=("whiten",), compiled=compiled)
    assert ("`torch.compile` was left out" in docs.page([record])) != compiled


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
        assert (docs.sentences(changed) == docs.sentences(records)) == in_place
        assert docs.page(changed) != docs.page(records)


def test_the_readme_says_what_the_cpu_shows_that_was_measured_last() -> None:
    newest = of_the_readme(docs.load())
    older = json.loads(json.dumps(newest))
    older["device"]["name"] = "a CPU of the year before"
    older["claims_measured"]["date"] = "2025-01-01T00:00:00+00:00"
    for records in ([older, newest], [newest, older]):
        assert docs.sentences(records) == docs.sentences([newest])


def test_a_gpu_is_not_measured_until_there_is_a_file_for_one() -> None:
    cpu = of_the_readme(docs.load())
    gpu = json.loads(json.dumps(cpu))
    gpu["device"] |= {"type": "cuda", "name": "NVIDIA H200"}
    page = docs.page([cpu])
    table = page[page.index("## GPU") :]
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")][2:]
    assert len(rows) == len(cases.cases(SETS["cuda", "default"]))
    for _, *cells in rows:
        assert {cell.rstrip(" |") for cell in cells} == {"not measured"}
    assert "On GPUs: not measured." in docs.sentences([cpu])
    assert "## GPU" not in docs.page([gpu, cpu])
    assert "On GPUs: measured on NVIDIA H200." in docs.sentences([gpu, cpu])


def test_a_number_of_the_readme_that_nobody_measured_is_refused() -> None:
    (cpu, *_) = docs.load()[::-1]
    with pytest.raises(ValueError, match="expected a CPU's results with claims"):
        docs.sentences([{**cpu, "claims": []}])
    with pytest.raises(ValueError, match="expected one measured claim"):
        docs.sentences([{**cpu, "claims": cpu["claims"][:-1]}])
    unmeasured = [{**claim, "measured": None} for claim in cpu["claims"]]
    with pytest.raises(ValueError, match="expected one measured claim"):
        docs.sentences([{**cpu, "claims": unmeasured}])


def test_the_readmes_sentences_are_written_between_their_markers_and_nowhere_else(
    tmp_path: Path,
) -> None:
    readme, page = tmp_path / "README.md", tmp_path / "benchmarks.md"
    readme.write_text(f"before\n{docs.BEGIN}\nold\n{docs.END}\nafter\n")
    assert docs.update(readme, page) == [readme, page]
    assert docs.current(readme.read_text("utf-8")) == docs.sentences(docs.load())
    assert page.read_text("utf-8") == docs.page(docs.load())
    assert readme.read_text("utf-8").startswith("before\n")
    assert readme.read_text("utf-8").endswith("\nafter\n")
    assert docs.update(readme, page) == []
    readme.write_text("no markers")
    with pytest.raises(ValueError, match="must hold"):
        docs.update(readme, page)


# ------------------------------------------------------------------------------------- front doors


def test_fastppo_bench_is_the_suite(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        cli.main(["bench", "--help"])
    assert done.value.code == 0
    assert "usage: fastppo bench" in capsys.readouterr().out


def test_fastppo_bench_says_what_to_do_without_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "CHECKOUT", tmp_path)
    assert cli.main(["bench", "--quick"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "clone the repository" in said


def test_plain_pytest_does_not_run_the_benchmarks() -> None:
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert options["testpaths"] == ["tests"]


def test_pytest_benchmarks_without_the_plugin_is_refused_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pytest_front_door.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(pytest.UsageError, match=r"pip install -e '\.\[bench\]'"):
        pytest_front_door.pytest_configure(None)


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
        elif words[0] == "python":
            assert words[1] == "-m"
            assert words[2] in {trl_iteration.__name__, trl_grid.__name__}
        else:
            assert words[:2] == ["pytest", "benchmarks"]


# ------------------------------------------------------------------------------ claims for a CPU


def test_the_comparison_with_trl_says_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "trl.experimental.ppo", None)
    assert trl_iteration.main([]) == 1
    assert "pip install trl==1.12.0" in capsys.readouterr().err
    sentence = "this comparison needs TRL's PPOTrainer"
    failed = subprocess.CompletedProcess([], 1, stderr=f"warning\n{sentence}\n")
    monkeypatch.setattr(claims.subprocess, "run", lambda *arguments, **more: failed)
    (claim,) = claims._iteration(lambda line: None, trl_iteration.Options())
    assert (claim.verdict, claim.detail) == ("NOT MEASURED", sentence)


def test_a_speed_up_is_the_median_over_neighbouring_iterations() -> None:
    result = trl_iteration.Result({}, [1.0, 10.0, 1.0], [3.0, 30.0, 4.0], {})
    assert result.speed_up == 3.0


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
    assert row["percent_of_floor"] == pytest.approx(100 / 3)
    assert trl_grid.cells(row) == [
        "16 + 32 tokens, 2 × 64, V = 32000",
        *["3.00 s", "1.00 s", "33 %", "9.00 s", "3.00", "2.00"],
    ]
    (cpu, *_) = docs.load()[::-1]
    page = docs.page([cpu | {"trl_grid": {"date": "2026-01-02T00:00:00", "rows": [row]}}])
    assert f"| {' | '.join(trl_grid.cells(row))} |" in page
    compiled = row | {"options": row["options"] | {"compile": True}}
    assert trl_grid.cells(compiled)[0] == f"{trl_grid.cells(row)[0]}, compiled"
    shapes = [dataclasses.asdict(each) for each in trl_grid.SHAPES]
    assert len({tuple(each.values()) for each in shapes}) >= 8


def test_options_of_the_iteration_come_back_from_their_own_flags() -> None:
    for options in trl_grid.shapes_of(compiled_too=True):
        given = vars(trl_iteration.build_parser().parse_args(options.flags()))
        del given["json"]
        assert trl_iteration.Options(**given) == options
    plain, compiled = trl_grid.shapes_of(compiled_too=True)[:2]
    assert not plain.compile
    assert compiled == dataclasses.replace(plain, compile=True)
    assert compiled.warm_up > plain.warm_up
    assert trl_grid.shapes_of(compiled_too=False) == trl_grid.SHAPES


def test_a_claim_passes_up_to_its_limit_and_fails_behind_it() -> None:
    assert claims.Claim("", 1.0, at_most=1.0).verdict == "PASS"
    assert claims.Claim("", 1.01, at_most=1.0).verdict == "FAIL"
    assert claims.Claim("", 10.0, at_least=10.0).verdict == "PASS"
    assert claims.Claim("", 9.9, at_least=10.0).verdict == "FAIL"
    assert claims.Claim("", math.nan, at_most=1.0).verdict == "FAIL"
    assert claims.Claim("", None, at_most=1.0).verdict == "NOT MEASURED"


def test_gae_takes_a_fifth_of_the_loops_processor_time() -> None:
    case = sequences.gae_case(Sequences(64, 4096))
    inputs = case.draw(0, CPU)
    ours, loop = case.providers
    assert (ours.name, loop.name) == ("FastPPO", "Python loop")
    timings = measure.time_in_turns(
        {ours.name: ours.call, loop.name: loop.call},
        {ours.name: [inputs], loop.name: [inputs]},
        lambda name, index: None,
        CPU,
        seconds=0.0,
        min_calls=5,
    )
    taken = {name: timing.processor for name, timing in timings.items()}
    assert taken[ours.name] is not None
    assert taken[loop.name] is not None
    assert taken[ours.name] * 5 <= taken[loop.name]


def test_the_loss_takes_a_quarter_of_eagers_memory() -> None:
    case = losses.loss_case(Tokens(MODELS["tinyllama-1.1b"], 512), torch.float32)
    inputs = case.draw(0, CPU)
    providers = {provider.name: provider for provider in case.providers}
    extra = {
        name: measure.peak_extra_memory(partial(providers[name].call, inputs), CPU)
        for name in ("FastPPO", "eager PyTorch")
    }
    assert extra["FastPPO"] * 4 <= extra["eager PyTorch"]
