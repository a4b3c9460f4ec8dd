"""The benchmark suite: floors by hand, wrong providers found out, and the claims for a CPU."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import cases, measure, report
from benchmarks.run import describe, run, run_case
from benchmarks.shapes import MODELS, SETS, Model, Sequences, Tokens, Work

CPU = torch.device("cpu")
TINY = Work(
    "tiny",
    torch.float32,
    logits=(Tokens(Model("tiny", 101, 16), 12),),
    linear=(Tokens(Model("tiny", 101, 16), 12),),
    sequences=(Sequences(3, 20),),
    seconds_per_provider=0.0,
    min_calls=2,
)
CEILINGS = measure.Ceilings(1e9, {"float32": 1e12})


@pytest.fixture(autouse=True)
def _little_rotation(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ROTATION_BYTES", "COPY_BYTES", "MATMUL_SIZE"):
        monkeypatch.setitem(getattr(measure, name), "cpu", 256)


def test_floors_are_the_bytes_and_flop_that_one_counts_by_hand() -> None:
    qwen, bf16 = Tokens(MODELS["qwen3-8b"], 8192), torch.bfloat16
    logits = 8192 * 151936 * 2  # 2.49 GB
    assert cases.loss_case(qwen, bf16).bytes_moved == 2 * logits + 8192 * 16
    assert cases.loss_case(qwen, bf16, with_gradient=False).bytes_moved == logits + 8192 * 16
    assert cases.stats_case(qwen, bf16).bytes_moved == logits + 8192 * 16
    assert cases.loss_case(qwen, bf16).flop == 8192 * 151936 * 9
    assert cases.stats_case(qwen, bf16).flop == 8192 * 151936 * 5
    linear = cases.linear_loss_case(qwen, bf16)
    assert linear.flop == 6 * 8192 * 4096 * 151936
    assert linear.bytes_moved == 2 * 2 * (8192 + 151936) * 4096 + 8192 * 16
    logprobs = cases.linear_logprobs_case(qwen, bf16)
    assert logprobs.flop == 2 * 8192 * 4096 * 151936
    assert logprobs.bytes_moved == 2 * (8192 + 151936) * 4096 + 8192 * 12
    # Lengths 8, 6 (of 2 responses): 16 entries, 14 of them count.
    shape = Sequences(2, 8)
    assert cases.response_lengths(shape) == [8, 6]
    assert cases.gae_case(shape).bytes_moved == 14 * 8 + 16 * 9
    assert cases.gae_case(shape).flop == 14 * 6
    assert cases.advantages_case(shape).bytes_moved == 14 * 12 + 16 * 9 + 2 * 8
    assert cases.advantages_case(shape).flop == 14 * 14
    assert cases.whiten_case(shape).bytes_moved == 14 * 4 + 16 * 5
    assert cases.whiten_case(shape).flop == 14 * 5


def test_the_floor_is_the_slower_of_bytes_and_flop() -> None:
    assert CEILINGS.floor(2 * 10**9, 10**12, torch.float32) == 2.0
    assert CEILINGS.floor(10**9, 3 * 10**12, torch.float32) == 3.0


def test_a_wrong_provider_is_reported_wrong_and_never_timed() -> None:
    calls = []

    def slightly_wrong(inputs: measure.Inputs) -> cases.Outputs:
        calls.append(1)
        right = cases._gae_from(cases.loop_gae)(inputs)
        return right | {"returns": right["returns"] * 1.001}

    def raises(inputs: measure.Inputs) -> cases.Outputs:
        raise RuntimeError("no such kernel\nand a long trace")

    right = cases.gae_case(Sequences(3, 20))
    broken = (cases.Provider("wrong", slightly_wrong), cases.Provider("raises", raises))
    case = dataclasses.replace(right, providers=(*right.providers, *broken), peers=(), notes={})
    result = run_case(case, TINY, CPU, CEILINGS, compiled=False)
    rows = {row.provider: row for row in result.rows}
    assert rows["fastppo"].status == rows["loop over time"].status == "timed"
    assert rows["wrong"].status == "wrong"
    assert rows["wrong"].error == pytest.approx(1e-3, rel=0.1)
    assert rows["wrong"].timing is None
    assert rows["wrong"].peak_extra_bytes is None
    assert "returns is off by 1.0e-03" in rows["wrong"].detail
    assert len(calls) == 1  # the check, and nothing else
    assert (rows["raises"].status, rows["raises"].timing) == ("failed", None)
    assert rows["raises"].detail == "RuntimeError: no such kernel"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_unwritten_output_is_wrong(value: float) -> None:
    assert measure.max_error(torch.tensor([1.0, value]), torch.ones(2)) == float("inf")


def test_an_absent_peer_is_named_as_absent() -> None:
    peer = cases.Peer("no-such-package", lambda device: pytest.fail("built though absent"))
    case = dataclasses.replace(cases.whiten_case(Sequences(3, 20)), peers=(peer,))
    rows = run_case(case, TINY, CPU, CEILINGS, compiled=False).rows
    (row,) = (row for row in rows if row.provider == "no-such-package")
    assert (row.status, row.timing) == ("absent", None)
    assert row.detail == "pip install no-such-package"


def test_a_provider_that_writes_over_its_inputs_finds_them_restored() -> None:
    seen = []

    def spoil(inputs: measure.Inputs) -> cases.Outputs:
        seen.append(inputs["values"].clone())
        whitened = cases.eager_whiten(inputs["values"], inputs["mask"])
        inputs["values"].zero_()
        return {"whitened": whitened}

    case = cases.whiten_case(Sequences(3, 20))
    spoiler = cases.Provider("spoiler", spoil, writes=("values",))
    case = dataclasses.replace(case, providers=(spoiler, *case.providers), peers=())
    rows = run_case(case, TINY._replace(min_calls=8), CPU, CEILINGS, compiled=False).rows
    assert {row.status for row in rows} == {"timed"}
    assert len(seen) == 10  # check, memory, 8 timed
    assert all(x.abs().sum() > 0 for x in seen)


def test_memory_counts_what_is_held_at_the_worst_moment() -> None:
    def call() -> torch.Tensor:
        a = torch.ones(1000)
        b = a + 1  # two are held
        del a
        return b * 2  # two again

    assert 8000 <= measure.peak_extra_memory(call, CPU) <= 8200


FIELDS = {
    *("provider", "status", "detail", "median_seconds", "quartiles_seconds", "spread_seconds"),
    *("processor_seconds", "calls", "bytes_per_second", "flop_per_second", "percent_of_floor"),
    *("peak_extra_bytes", "error"),
}


def test_the_quick_set_writes_every_field_and_prints_the_table_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(SETS, ("cpu", "quick"), TINY)
    path = tmp_path / "results.json"
    arguments = ["--quick", "--device", "cpu", "--no-compile", "--json", str(path)]
    assert command.main(arguments) == 0
    record = json.loads(path.read_text("utf-8"))
    assert record.keys() == {
        *("format", "date", "set", "device", "packages", "load_average_before"),
        *("load_average_after", "ceilings", "cases"),
    }
    assert record["device"]["threads"] == torch.get_num_threads()
    assert record["packages"]["torch"] == torch.__version__
    assert len(record["cases"]) == 9
    for case in record["cases"]:
        assert case.keys() >= {"case", "shape", "dtype", "bytes", "flop", "floor_seconds", "rows"}
        ours = case["rows"][0]
        assert (ours["provider"], ours["status"]) == ("fastppo", "timed"), ours["detail"]
        for row in case["rows"]:
            assert row.keys() == FIELDS
            measured = [row[name] is not None for name in FIELDS - {"detail", "error"}]
            assert all(measured) == (row["status"] == "timed")
            if row["status"] == "timed":
                share = case["floor_seconds"] / row["median_seconds"]
                assert row["percent_of_floor"] == pytest.approx(100 * share)
                assert row["error"] < 1e-4
    printed = capsys.readouterr().out
    assert printed.index("written") < printed.index("of floor")
    for word in ("linear logprobs", "loop over time", "fastppo, in place", "eager"):
        assert word in printed


def test_a_results_file_is_named_by_device_and_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    record = {
        "date": "2026-01-31T12:30:00+00:00",
        "device": {"name": "Some CPU (R) 9", "type": "cpu", "threads": 2},
    }
    path = report.results_path(record)
    assert path == tmp_path / "some-cpu-r-9-2-threads" / "2026-01-31.json"
    report.write(record, path)
    assert report.results_path(record).name == "2026-01-31T123000.json"


def test_gae_takes_a_fifth_of_the_loops_processor_time() -> None:
    case = cases.gae_case(Sequences(64, 4096))
    inputs = case.draw(0, CPU)
    ours, loop = case.providers
    assert (ours.name, loop.name) == ("fastppo", "loop over time")
    timings = measure.time_in_turns(
        {ours.name: ours.call, loop.name: loop.call},
        [inputs],
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
    case = cases.loss_case(Tokens(MODELS["tinyllama-1.1b"], 512), torch.float32)
    inputs = case.draw(0, CPU)
    extra = {
        provider.name: measure.peak_extra_memory(partial(provider.call, inputs), CPU)
        for provider in (case.providers[0], case.providers[2])
    }
    assert extra["fastppo"] * 4 <= extra["eager"]


def test_describe_needs_no_timing() -> None:
    case = cases.whiten_case(Sequences(3, 20))
    result = run_case(case, TINY, CPU, CEILINGS, compiled=False)
    empty = result._replace(rows=[row for row in result.rows if row.timing is None])
    assert all(row["median_seconds"] is None for row in describe(empty)["rows"])


def test_a_restricted_run_holds_the_chosen_cases_alone() -> None:
    record, results = run(TINY, CPU, names=("gae", "whiten"), compiled=False)
    assert [case["case"] for case in record["cases"]] == ["gae", "whiten"]
    assert len(results) == 2
