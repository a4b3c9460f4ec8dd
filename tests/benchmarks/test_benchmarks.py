"""The benchmark suite: floors, wrong providers, output files, the page and the README."""

from __future__ import annotations

import dataclasses
import gc
import io
import json
import re
import shlex
from collections.abc import Iterator
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
    commands,
    docs,
    flop,
    losses,
    measure,
    report,
    sequences,
    training,
)
from benchmarks.run import check, run, run_case
from benchmarks.shapes import MODELS, SETS, Model, Sequences, Sweep, Tokens, Training, Work
from fastppo import cli

# torch caches its device functions on the first device context. After conftest replaces
# torch.empty, it would cache the replacement, and meta models would take real memory.
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
def _small_ceilings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Shrink the suite's constants."""
    monkeypatch.setattr(measure, "ROTATION_BYTES", 256)
    monkeypatch.setattr(measure, "CEILING_SECONDS", 0.001)
    monkeypatch.setitem(measure.COPY_BYTES, "cpu", 256)
    monkeypatch.setitem(measure.MATMUL_SHAPES, "cpu", ((16, 16, 16),))
    gc.freeze()  # collections before memory measurements skip imported modules
    yield
    gc.unfreeze()


@pytest.fixture
def no_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide installed peers, since their imports are slow."""
    monkeypatch.setattr(case_module, "is_installed", lambda name: False)


def rows_of(case: case_module.Case, **changes: Any) -> dict[str, Any]:
    """Run the case and return its rows by provider."""
    case = dataclasses.replace(case, **changes)
    result = run_case(case, CPU, CEILINGS, seconds=0.001, compiled=False)
    return {row.provider: row for row in result.rows}


# ----------------------------------------------------------------------------- floors and exponents


QWEN = Tokens(MODELS["qwen3-8b"], 8192)
QWEN_LOGITS = 8192 * 151936 * 2
"""2.49 GB of bf16."""
RESPONSES = Sequences(2, 8)
"""Lengths 8 and 6: 16 entries, 14 of them valid."""
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
def test_floors_are_the_bytes_and_flop_counted_by_hand(
    case: case_module.Case, bytes_moved: int, flop_count: int
) -> None:
    assert case.bytes_moved == bytes_moved
    assert case.flop == flop_count


def test_an_updates_floor_is_five_forward_passes_and_the_optimizers_tensors() -> None:
    shape = Training(MODEL, 1, 4, 3, 4, 2)
    # Attention 16·16 for q and o, 16·8 for k and v; MLP 3·16·32; norms 16 each, 3 of them.
    trunk = 2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 32 + 3 * 16
    total = trunk + 2 * 101 * 16
    assert training.parameter_counts(shape) == (trunk, total)
    case = training.update_case(shape, torch.float32)
    assert case.bytes_moved == 7 * 4 * total
    # 4·4 of the 4·7 tokens are of the response.
    assert case.flop == 10 * (trunk * 4 * 7 + 101 * 16 * 4 * 4)


def test_the_exponent_of_a_power_law_is_its_power() -> None:
    sizes = [100.0, 200.0, 800.0]
    assert measure.growth_exponent(sizes, [3e-6 * x**1.5 for x in sizes]) == pytest.approx(1.5)
    # y = 1, 1, 4 at log₂ x = 0, 1, 2: the least-squares slope is 1 by hand.
    assert measure.growth_exponent([1.0, 2.0, 4.0], [1.0, 1.0, 4.0]) == pytest.approx(1.0)
    assert measure.growth_exponent([100.0], [1.0]) is None
    assert measure.growth_exponent([100.0, 200.0], [0.0, 0.0]) is None


# ------------------------------------------------------------------------------ checks of providers


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
    """The bonus shows in small entries; those of the tokens are a hundred times larger."""
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


@pytest.mark.usefixtures("no_peers")
def test_a_case_out_of_memory_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    right = sequences.whiten_case(Sequences(3, 20))

    def fail(*args: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory")

    ill = dataclasses.replace(right, truth=fail)
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


def test_absent_and_unsupported_peers_are_reported_with_the_reason() -> None:
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


@pytest.mark.parametrize("load", [0.1, 7.9])
def test_a_busy_machine_is_reported(load: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    console = Console(file=io.StringIO(), width=200)
    commands.warn_if_busy(console)
    assert ("the machine is busy: load 7.9 on" in console.file.getvalue()) == (load > 1)


def test_memory_is_the_peak_during_the_call() -> None:
    def call() -> torch.Tensor:
        a = torch.ones(1000)
        b = a + 1  # two are held
        del a
        return b * 2  # two again

    assert 8000 <= measure.peak_extra_memory(call, CPU) <= 8200


# ------------------------------------------------------------------------------------ sets and time


@pytest.mark.parametrize("name", MODELS)
def test_every_named_model_can_be_made(name: str) -> None:
    model = MODELS[name]
    config = training.make_config(model, 1, 32)
    meta_model = training.make_model(config, torch.device("meta"))
    assert tuple(meta_model.get_output_embeddings().weight.shape) == (model.vocab, model.hidden)


# ---------------------------------------------------------------------------------- output of a run


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
    # All absent packages share one line.
    (line,) = re.findall("^.*absent.*$", capsys.readouterr().out, re.M)
    assert line.startswith("absent: ")
    assert "pip install" in line
    for name in ("floor", "memory", "growth"):
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000


@pytest.mark.usefixtures("no_peers")
def test_skipped_cases_share_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(SETS, ("cpu", "quick"), TINY)
    flags = ["--quick", "--seconds", "1e-9", "--case", "loss", "--case", "gae"]
    assert command.main([*flags, "--device", "cpu", "--out", str(tmp_path)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    late = ": skipped after the time limit of 0 s; raise it with --seconds"
    assert late in shown
    assert shown.count("skipped after") == 1
    cases = json.loads((tmp_path / "results.json").read_text())["cases"]
    first, *others = [{row["status"] for row in case["rows"]} for case in cases]
    assert "timed" in first, "the first case runs even if the ceilings took all the time"
    assert all(statuses == {"skipped"} for statuses in others)
    assert others


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--threads", "0"], "--threads must be at least 1, got 0"),
        (["claims", "--device", "cuda"], "claims are for a CPU"),
        (["keep", "no-such.json"], "no-such.json is not a results file"),
        (["--quick", "--out", "README.md"], "--out README.md cannot be written"),
        (["--keep", "--seconds", "1"], "--keep needs the whole set"),
    ],
)
def test_wrong_arguments_are_reported_before_anything_runs(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    if "--out" not in arguments:
        arguments = [*arguments, "--out", str(tmp_path)]
    with pytest.raises(SystemExit):
        command.main(arguments)
    assert sentence in " ".join(capsys.readouterr().err.split())


# ---------------------------------------------------------------------- the page and the README


def test_page_readme_and_chart_agree_with_the_results() -> None:
    """After new results: python -m benchmarks docs"""
    records = docs.load()
    assert docs.PAGE.read_text("utf-8") == docs.page(records)
    readme = docs.README.read_text("utf-8")
    for section, content in docs.sections(records).items():
        assert docs.split(readme, section)[1] == content
    chart = docs.CHART.read_text("utf-8")
    for bar in docs.bars(records):
        assert f">{bar.label} {bar.group}<" in chart
    assert f">{docs.machine(docs.newest_cpu(records))}<" in chart


def test_an_unmeasured_number_is_refused() -> None:
    cpu = docs.newest_cpu(docs.load())
    with pytest.raises(ValueError, match="expected a CPU's results with claims"):
        docs.sections([{**cpu, "claims": []}])
    unmeasured = [{**claim, "measured": None} for claim in cpu["claims"]]
    with pytest.raises(ValueError, match="expected one measured claim"):
        docs.sections([{**cpu, "claims": unmeasured}])


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


def test_flop_count_products_attention_and_the_fused_head() -> None:
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
