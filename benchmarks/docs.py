"""Write docs/benchmarks.md, docs/speedups.svg and numbers of the README: `fastppo bench docs`.

All of it comes from the files in benchmarks/results. The page and the chart are written whole; in
the README only the text between markers is. `tests/benchmarks/test_benchmarks.py` fails when they
differ from the results.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import plots, predictions, report, trl_iteration
from benchmarks.report import RESULTS, device_title, is_ours, seconds, size
from benchmarks.shapes import MODELS

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGE = ROOT / "docs" / "benchmarks.md"
CHART = ROOT / "docs" / "speedups.svg"
BONUS = "entropy bonus"

NOT_MEASURED = predictions.NOT_MEASURED
PLAIN = ("eager PyTorch", "Python loop")
"""Providers without a library: the second where eager PyTorch needs a loop."""

HEADER = [
    "operation",
    "FastPPO",
    "of the floor",
    "plain PyTorch",
    "fastest other",
    "memory",
    "plain PyTorch's memory",
]

INTRO = """# Benchmarks

Every operation next to plain PyTorch, `torch.compile` and other packages with the same operation.
`fastppo bench docs` writes this page, and the numbers in the README, from the files in
`benchmarks/results`. [The suite's README](../benchmarks/README.md#how-to-read-a-row) explains the
columns and [their limits](../benchmarks/README.md#limits-of-these-numbers).
[Kernel notes](../kernels/NOTES.md) list the floor of each kernel and the attempts to reach it.

Times are medians of a call. Plain PyTorch is the code you write without a library. The fastest
other is "none" if no other provider runs the case. Every provider agreed with fp64 before it was
timed."""


def load() -> list[dict[str, Any]]:
    """Return the results: GPUs first, then by date, newest first."""
    records = [report.read(path) for path in RESULTS.glob("*.json")]
    records.sort(key=lambda record: record["date"], reverse=True)
    return sorted(records, key=lambda record: record["device"]["type"] == "cpu")


# ----------------------------------------------------------------------------------------- the page


def page(records: Sequence[dict[str, Any]]) -> str:
    """Return docs/benchmarks.md.

    Among CPUs only the newest shows growth, claims and memory; memory is the same on all CPUs.
    """
    newest = newest_cpu(records)
    newest_grid = _newest_grid(records)
    sections = [INTRO]
    for record in records:
        is_older = record["device"]["type"] == "cpu" and record is not newest
        sections.append(_cases(record, with_memory=not is_older))
        if record.get("sweeps") and not is_older:
            sections.append(_growths(record))
        if record is newest:
            sections.append(_claims(record))
        if record is newest_grid:
            sections.append(_grid(record))
    if not _on_gpus(records):
        sections.append(_gpu_not_measured())
    sections.append(_predicted(records))
    return "\n\n".join(sections) + "\n"


def _cpus_with_claims(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [r for r in records if r["device"]["type"] == "cpu" and r.get("claims")]


def newest_cpu(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the CPU results with the newest claims.

    Raises:
        ValueError: no CPU results have claims.
    """
    cpus = _cpus_with_claims(records)
    if not cpus:
        raise ValueError(
            "expected a CPU's results with claims in benchmarks/results, got none: "
            "run `python -m benchmarks --keep` and `python -m benchmarks claims --keep`"
        )
    return max(cpus, key=lambda record: record["claims_measured"]["date"])


def _newest_grid(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the results with the newest comparison of iterations with TRL."""
    grids = [record for record in records if record.get("trl_grid")]
    return max(grids, key=lambda record: record["trl_grid"]["date"])


def _on_gpus(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [record for record in records if record["device"]["type"] == "cuda"]


def _gpu_not_measured() -> str:
    return (
        "## GPU\n\nNot measured. CPU numbers say nothing about a GPU, since its backend is "
        "different code. [The first half hour on a GPU]"
        "(../benchmarks/README.md#the-first-half-hour-on-a-gpu) fills this section."
    )


def _predicted(records: Sequence[dict[str, Any]]) -> str:
    copies = " and ".join(f"{card.copy / 1e12:.1f} on an {card.name}" for card in predictions.CARDS)
    rates = " to ".join(f"{rate / 1e12:.0f}" for rate in predictions.MATMUL_RATES)
    works = predictions.works()
    named = [model for model in MODELS.values() if any(model.name in w.shape for w in works)]
    models = "; ".join(f"{m.name} {m.vocab} and {m.hidden}" for m in named)
    rows = [predictions.HEADER, *predictions.table(records)]
    if not _on_gpus(records):
        rows = [row[:-1] for row in rows]  # the measured column is empty
    return "\n\n".join(
        [
            "## GPU, predicted",
            "Predicted by `benchmarks/predictions.py` for bf16, not measured. The prediction uses "
            f"bytes at copy speed (TB/s: {copies}), matrix products at {rates} TFLOP/s, the rate "
            "of the best other kernels, and instruction counts from the machine code. The low end "
            "assumes the faster products and full overlap, the high end the slower products and "
            "no optional overlap. Linear statistics with gradients form the logits twice (four "
            "products), like other packages; the linear loss forms them once (three). The last "
            f"column quotes the authors, on the card they name. V and H: {models}.",
            table(rows[0], rows[1:]),
        ]
    )


def _cases(record: dict[str, Any], *, with_memory: bool) -> str:
    packages = record["packages"]
    versions = f"torch {packages['torch']}"
    if record["device"]["type"] == "cuda":
        versions += f", Triton {packages['triton']}"
    providers = {row["provider"] for case in record["cases"] for row in case["rows"]}
    without = "" if "torch.compile" in providers else " Without `torch.compile`."
    rows = [HEADER, *map(_row, record["cases"])]
    if not with_memory:
        rows = [row[: HEADER.index("memory")] for row in rows]
    return "\n\n".join(
        [
            f"## {device_title(record['device'])}",
            f"{record['date'][:10]}, {versions}. Ceilings of the same run: "
            f"{report.ceilings_line(record)}.{without}",
            table(rows[0], rows[1:]),
        ]
    )


def _growths(record: dict[str, Any]) -> str:
    rows = [_growth(sweep) for sweep in record["sweeps"]]
    return "\n\n".join(
        [
            "Growth of time with size, as the exponent of a fitted power law:",
            table(["operation and sizes", "FastPPO", "plain PyTorch"], rows),
        ]
    )


def _claims(record: dict[str, Any]) -> str:
    return "\n\n".join(
        [
            "Claims, checked by `fastppo bench claims`. Each ratio is the median over pairs of "
            f"neighboring calls in one run ({record['claims_measured']['date'][:10]}). Eager is "
            "plain PyTorch:",
            table(
                ["ratio", "measured", "target", "result"],
                [_claim(claim) for claim in record["claims"]],
            ),
        ]
    )


def _grid(record: dict[str, Any]) -> str:
    return "\n\n".join(
        [
            "A PPO iteration of 16 episodes against TRL 1.12, on one thread "
            f"(`python -m benchmarks.trl_iteration --grid`, {record['trl_grid']['date'][:10]}). "
            "The floor is the iteration's FLOP at the rate of a large matrix product. The last "
            "column is the ratio of FLOP, the speed-up at equal efficiency:",
            table(
                trl_iteration.HEADER,
                [trl_iteration.cells(row) for row in record["trl_grid"]["rows"]],
            ),
        ]
    )


def _row(case: dict[str, Any]) -> list[str]:
    timed = {row["provider"]: row for row in case["rows"] if row["status"] == "timed"}
    ours = timed.get("FastPPO")
    plain = _plain(timed)
    others = [r for name, r in timed.items() if not is_ours(name) and name not in PLAIN]
    best = min(others, key=lambda row: row["median_seconds"], default=None)
    return [
        f"{case['case']}, {case['shape']}",
        NOT_MEASURED if ours is None else f"**{seconds(ours['median_seconds'])}**",
        NOT_MEASURED if ours is None else f"{ours['percent_of_floor']:.0f} %",
        NOT_MEASURED if plain is None else seconds(plain["median_seconds"]),
        "none" if best is None else f"{best['provider']} {seconds(best['median_seconds'])}",
        NOT_MEASURED if ours is None else size(ours["peak_extra_bytes"]),
        NOT_MEASURED if plain is None else size(plain["peak_extra_bytes"]),
    ]


def _plain(by_provider: dict[str, Any]) -> Any:
    return next((by_provider[name] for name in PLAIN if name in by_provider), None)


def _growth(sweep: dict[str, Any]) -> list[str]:
    variable = sweep["variable"]
    growth = sweep["growth"]
    sizes = [point["size"] for point in sweep["points"]]

    def power(fit: dict[str, Any] | None) -> str:
        if fit is None or fit["time"] is None:
            return NOT_MEASURED
        return f"{variable}^{fit['time']:.2f}"

    title = f"{sweep['case']}, {variable} from {sizes[0]} to {sizes[-1]}"
    return [title, power(growth.get("FastPPO")), power(_plain(growth))]


def _claim(claim: dict[str, Any]) -> list[str]:
    measured = claim["measured"]
    verdict = claim["verdict"].lower()
    if claim["verdict"] == "FAIL" and claim["detail"]:
        verdict += f": {claim['detail']}"
    shown = NOT_MEASURED if measured is None else f"{measured:.2f}"
    return [claim["text"], shown, claim["wanted"], verdict]


def table(header: list[str], rows: list[list[str]]) -> str:
    aligned = ["---", *["---:"] * (len(header) - 1)]
    lines = [header, aligned, *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


# --------------------------------------------------------------------------------------- the README


class Comparison(NamedTuple):
    """FastPPO against another implementation on one CPU."""

    what: str
    against: str
    speed_up: float
    memory_saved: float | None = None


def comparisons(cpu: dict[str, Any]) -> dict[str, Comparison]:
    """Return the comparisons that the README shows, by name.

    Raises:
        ValueError: a claim is missing or was not measured.
    """
    claims = cpu["claims"]
    found = {}
    for what in ("ppo_loss", "linear_ppo_loss"):
        for bonus in (BONUS, f"no {BONUS}"):
            start = f"{what} with gradients"
            time = _claim_value(claims, start, f", {bonus}: time over eager's")
            memory = _claim_value(claims, start, f", {bonus}: extra memory over eager's")
            found[f"{what}, {bonus}"] = Comparison(what, "PyTorch", 1 / time, 1 / memory)
    iteration = _claim_value(claims, "a PPO iteration", ": episodes per second over TRL's")
    found["iteration"] = Comparison("PPO iteration", "TRL 1.12", iteration)
    loop = _claim_value(claims, "gae", ": times as fast as TRL's loop")
    found["gae"] = Comparison("gae", "TRL's loop", loop)
    return found


def _claim_value(claims: list[dict[str, Any]], start: str, end: str) -> float:
    """Return the measured value of the one claim that starts and ends like this."""
    values = [
        claim["measured"]
        for claim in claims
        if claim["text"].startswith(start) and claim["text"].endswith(end)
    ]
    if len(values) != 1 or values[0] is None:
        raise ValueError(f"expected one measured claim “{start} … {end}”, got {values}")
    return float(values[0])


def span(ratios: Sequence[float]) -> str:
    """Format speed-ups of several machines: "9.4 to 17×"."""
    low, high = times(min(ratios)), times(max(ratios))
    return high if low == high else f"{low.removesuffix('×')} to {high}"


def times(ratio: float) -> str:
    """Format a speed-up: 17.4 as "17×", 4.98 as "5×"."""
    return f"{ratio:.0f}×" if ratio >= 9.95 else f"{ratio:.1f}".removesuffix(".0") + "×"


def bars(records: Sequence[dict[str, Any]]) -> list[plots.Bar]:
    """Return the bars of the README's chart, measured on the newest CPU."""
    shown = comparisons(newest_cpu(records))
    losses = [shown[f"ppo_loss, {BONUS}"], shown[f"linear_ppo_loss, {BONUS}"]]
    faster = [*losses, shown["iteration"], shown["gae"]]
    return [
        *(plots.Bar("faster", c.what, c.against, c.speed_up, times(c.speed_up)) for c in faster),
        *(
            plots.Bar("less memory", c.what, c.against, c.memory_saved, times(c.memory_saved))
            for c in losses
            if c.memory_saved is not None
        ),
    ]


def machine(record: dict[str, Any]) -> str:
    """Return the label of the chart: the device, torch, and the date of the claims."""
    date = record["claims_measured"]["date"][:10]
    torch = record["packages"]["torch"].partition("+")[0]
    return f"{device_title(record['device'])}, torch {torch}, {date}"


def sections(records: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return the README's text for each pair of markers.

    Raises:
        ValueError: no CPU has measured claims.
    """
    shown = bars(records)
    alt = "; ".join(f"{bar.what} {bar.label} {bar.group} than {bar.against}" for bar in shown)
    gpus = [device_title(record["device"]) for record in _on_gpus(records)]
    chart = f"""
![{alt}](docs/speedups.svg)

*GPU: {", ".join(gpus) or NOT_MEASURED}. [All measurements](docs/benchmarks.md),
including those where FastPPO loses, and
[their limits](benchmarks/README.md#limits-of-these-numbers).*
"""
    measured = [comparisons(record) for record in _cpus_with_claims(records)]

    def faster(name: str) -> str:
        return span([of_cpu[name].speed_up for of_cpu in measured]) + " faster"

    def saved(name: str) -> str:
        ratios = [of_cpu[name].memory_saved for of_cpu in measured]
        return span([ratio for ratio in ratios if ratio is not None]) + " less memory"

    with_bonus, without = f"ppo_loss, {BONUS}", f"ppo_loss, no {BONUS}"
    linear = f"linear_ppo_loss, {BONUS}"
    grid = span([row["speed_up"] for row in _newest_grid(records)["trl_grid"]["rows"]])
    numbers = f"""
- **Fused loss.** `ppo_loss` returns the loss, its metrics and the gradient from one pass over the
  logits: {faster(with_bonus)} than plain PyTorch with {saved(with_bonus)}.
  Without an entropy bonus: {faster(without)}, {saved(without)}.
- **No full logits.** `linear_ppo_loss` includes the lm-head and computes the logits in chunks:
  {saved(linear)}, {faster(linear)}.
- **One forward pass.** Policy and value function share a trunk. A PPO iteration of a tiny model is
  {faster("iteration")} than TRL 1.12's, and {grid} faster over a grid of nine sizes.
"""
    return {"chart": chart[1:], "numbers": numbers[1:] + "  "}  # the end marker stays in the list


def split(text: str, section: str) -> tuple[str, str, str]:
    """Split the README into the text up to a section, the section, and the text after it.

    Raises:
        ValueError: the section's markers are missing.
    """
    begin, end = f"<!-- fastppo bench docs: {section} -->\n", f"<!-- end of {section} -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"README.md must contain {begin.strip()} and {end} once each")
    before, _, rest = text.partition(begin)
    content, _, after = rest.partition(end)
    return before + begin, content, end + after


def update() -> list[Path]:
    """Write the README's sections, the page and the chart; return the changed files."""
    records = load()
    readme = README.read_text(encoding="utf-8")
    for section, content in sections(records).items():
        before, _, after = split(readme, section)
        readme = before + content + after
    changed = []
    for file, content in {README: readme, PAGE: page(records)}.items():
        if content != file.read_text(encoding="utf-8"):
            file.write_text(content, encoding="utf-8")
            changed.append(file)
    plots.draw_chart(bars(records), machine(newest_cpu(records)), CHART)
    return [*changed, CHART]
