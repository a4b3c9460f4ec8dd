"""docs/benchmarks.md and the README's numbers from benchmarks/results: `python -m benchmarks docs`.

The page is generated whole; of the README, the text between two markers. Nothing in either is typed
by hand, and `tests/benchmarks/test_benchmarks.py` fails when they differ from the results files.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import predictions, report, trl_iteration
from benchmarks.report import RESULTS, device_title, is_ours, seconds, size
from benchmarks.shapes import MODELS

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGE = ROOT / "docs" / "benchmarks.md"
BEGIN = "<!-- python -m benchmarks docs: begin -->"
END = "<!-- python -m benchmarks docs: end -->"

NOT_MEASURED = predictions.NOT_MEASURED
PLAIN = ("eager PyTorch", "Python loop")
"""What one writes without a library: the second where there is no way without a loop."""

HEADER = [
    "work",
    "FastPPO",
    "of the floor",
    "plain PyTorch",
    "fastest other",
    "memory",
    "plain PyTorch's memory",
]

INTRO = """# Measured

What each operation takes beside plain PyTorch, `torch.compile` and the packages that offer the same
operation. `fastppo bench docs` writes this page and the numbers in the README from the files in
`benchmarks/results`. [The suite's README](../benchmarks/README.md#how-to-read-a-row) says how each
number is measured, what the floor and the memory are, and
[what they do not show](../benchmarks/README.md#what-these-numbers-are-not);
[the kernels' notes](../kernels/NOTES.md) have each kernel's floor and what was tried.

Times are medians of a call. Plain PyTorch is what one writes without a library. The fastest other
is "none" where none can run the case. Every provider timed here agreed with fp64 first."""


def load() -> list[dict[str, Any]]:
    """The results files, GPUs first, and the newest first."""
    records = [report.read(path) for path in RESULTS.glob("*.json")]
    records.sort(key=lambda record: record["date"], reverse=True)
    return sorted(records, key=lambda record: record["device"]["type"] == "cpu")


# ----------------------------------------------------------------------------------------- the page


def page(records: Sequence[dict[str, Any]]) -> str:
    """The whole of docs/benchmarks.md. Of several CPUs the newest alone has growth, claims, and the
    memory, which is the same on all."""
    newest = _newest_cpu(records)
    grids = [record for record in records if record.get("trl_grid")]
    newest_grid = max(grids, key=lambda record: record["trl_grid"]["date"], default=None)
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


def _newest_cpu(records: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The CPU whose claims were measured last."""
    cpus = [r for r in records if r["device"]["type"] == "cpu" and r.get("claims")]
    return max(cpus, key=lambda r: r["claims_measured"]["date"], default=None)


def _on_gpus(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [record for record in records if record["device"]["type"] == "cuda"]


def _gpu_not_measured() -> str:
    return (
        "## GPU\n\nNo GPU has run the suite yet, and the numbers of a CPU, whose backend is other "
        "code, say nothing of one. [The first half hour on a GPU]"
        "(../benchmarks/README.md#the-first-half-hour-on-a-gpu) writes a table here."
    )


def _predicted(records: Sequence[dict[str, Any]]) -> str:
    copies = " and ".join(f"{card.copy / 1e12:.1f} on an {card.name}" for card in predictions.CARDS)
    rates = " to ".join(f"{rate / 1e12:.0f}" for rate in predictions.MATMUL_RATES)
    works = predictions.works()
    named = [model for model in MODELS.values() if any(model.name in w.shape for w in works)]
    models = "; ".join(f"{m.name} {m.vocab} and {m.hidden}" for m in named)
    rows = [predictions.HEADER, *predictions.table(records)]
    if not _on_gpus(records):
        rows = [row[:-1] for row in rows]  # what was measured
    return "\n\n".join(
        [
            "## GPU, predicted",
            "Computed by `benchmarks/predictions.py`, in bf16, and not measured: bytes at the "
            f"speed of a copy (TB/s: {copies}), matrix products at {rates} TFLOP/s, which is what "
            "the best of others come to, and instructions as counted in the machine code. The low "
            "end of a range has the faster products and everything overlapped that can be, the "
            "high end the slower and nothing that may not be. Linear statistics with gradients "
            "form the logits twice (four products), as others do; the linear loss forms them once "
            "(three). What others have measured is their authors' word, on the card that is "
            f"named. V and H: {models}.",
            table(rows[0], rows[1:]),
        ]
    )


def _cases(record: dict[str, Any], *, with_memory: bool) -> str:
    packages = record["packages"]
    versions = f"torch {packages['torch']}"
    if record["device"]["type"] == "cuda":
        versions += f", Triton {packages['triton']}"
    providers = {row["provider"] for case in record["cases"] for row in case["rows"]}
    without = "" if "torch.compile" in providers else " `torch.compile` was left out."
    rows = [HEADER, *map(_row, record["cases"])]
    if not with_memory:
        rows = [row[: HEADER.index("memory")] for row in rows]
    return "\n\n".join(
        [
            f"## {device_title(record['device'])}",
            f"{record['date'][:10]}, {versions}; measured in the same run: "
            f"{report.ceilings_line(record)}.{without}",
            table(rows[0], rows[1:]),
        ]
    )


def _growths(record: dict[str, Any]) -> str:
    rows = [_growth(sweep) for sweep in record["sweeps"]]
    return "\n\n".join(
        [
            "How the time grows, as the exponent of a power law fitted over the sizes:",
            table(["growth of time", "FastPPO", "plain PyTorch"], rows),
        ]
    )


def _claims(record: dict[str, Any]) -> str:
    return "\n\n".join(
        [
            "What `fastppo bench claims` checks on a CPU. Each ratio is the median over "
            f"neighbouring calls in one run ({record['claims_measured']['date'][:10]}); eager is "
            "plain PyTorch:",
            table(
                ["ratio", "measured", "wanted", "verdict"],
                [_claim(claim) for claim in record["claims"]],
            ),
        ]
    )


def _grid(record: dict[str, Any]) -> str:
    return "\n\n".join(
        [
            "A PPO iteration of 16 episodes beside TRL 1.12's, on one thread in one process "
            f"(`python -m benchmarks.trl_iteration --grid`, {record['trl_grid']['date'][:10]}). "
            "The floor is the iteration's FLOP at the rate of a large matrix product; “at equal "
            "efficiency” is TRL's FLOP over FastPPO's:",
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

LOSSES = ("ppo_loss", "linear_ppo_loss")


def _percent(share: float) -> str:
    """Whole, but for less than one."""
    return f"{100 * share:.{0 if share >= 0.01 else 1}f} %"


def numbers(records: Sequence[dict[str, Any]]) -> str:
    """The README's text between the markers: a table from the claims of the CPU that was measured
    last.

    Raises:
        ValueError: no CPU's results hold the claims.
    """
    cpu = _newest_cpu(records)
    if cpu is None:
        raise ValueError(
            "expected a CPU's results with claims in benchmarks/results, got none: "
            "run `python -m benchmarks --keep` and `python -m benchmarks claims --keep`"
        )
    claims = cpu["claims"]
    rows = []
    for name in LOSSES:
        start = f"{name} with gradients"
        for bonus in (", entropy bonus", ", no entropy bonus"):
            time = _the_claim(claims, start, f"{bonus}: time over eager's")
            memory = _the_claim(claims, start, f"{bonus}: extra memory over eager's")
            tokens, vocabulary = re.findall(r"N=(\d+), V = (\d+)", time["text"])[0]
            rows.append(
                [
                    f"{name} and its gradient, {tokens} × {vocabulary}{bonus}",
                    "plain PyTorch",
                    _percent(time["measured"]),
                    _percent(memory["measured"]),
                ]
            )
    others = {
        "TRL's loop": _the_claim(claims, "gae", ": times as fast as TRL's loop"),
        "verl's": _the_claim(claims, "gae", ": times as fast as verl's"),
        "TRL 1.12": _the_claim(claims, "a PPO iteration", ": episodes per second over TRL's"),
    }
    for other, claim in others.items():
        work = claim["text"].partition(":")[0]
        rows.append([work, other, _percent(1 / claim["measured"]), ""])
    gpus = [device_title(record["device"]) for record in _on_gpus(records)]
    date = cpu["claims_measured"]["date"][:10]
    torch = cpu["packages"]["torch"]
    return "\n\n".join(
        [
            f"On a CPU ({device_title(cpu['device'])}, torch {torch}, {date}), FastPPO takes:",
            table(["work", "beside", "of its time", "of its memory"], rows),
            f"On GPUs: {'measured on ' + ', '.join(gpus) if gpus else NOT_MEASURED}. "
            "[All measurements](docs/benchmarks.md), also where we lose, and\n"
            "[what they do not show](benchmarks/README.md#what-these-numbers-are-not).",
        ]
    )


def _the_claim(claims: list[dict[str, Any]], start: str, end: str) -> dict[str, Any]:
    """The one claim whose text begins and ends so.

    Raises:
        ValueError: there is not exactly one, or it was not measured.
    """
    matching = [c for c in claims if c["text"].startswith(start) and c["text"].endswith(end)]
    if len(matching) != 1 or matching[0]["measured"] is None:
        values = [claim["measured"] for claim in matching]
        raise ValueError(f"expected one measured claim “{start} … {end}”, got {values}")
    return matching[0]


def current(text: str) -> str:
    """What is between the markers of a README.

    Raises:
        ValueError: the markers are not there.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"README.md must hold {BEGIN} and {END} once each")
    return text[text.index(BEGIN) + len(BEGIN) : text.index(END)].strip("\n")


def update(readme: Path = README, path: Path = PAGE) -> list[Path]:
    """Writes the page and the README's numbers; the files that changed."""
    records = load()
    text = readme.read_text(encoding="utf-8")
    current(text)  # refuses a README without markers before anything is written
    before = text[: text.index(BEGIN) + len(BEGIN)]
    after = text[text.index(END) :]
    contents = {readme: f"{before}\n{numbers(records)}\n{after}", path: page(records)}
    changed = []
    for file, content in contents.items():
        if not file.exists() or file.read_text(encoding="utf-8") != content:
            file.write_text(content, encoding="utf-8")
            changed.append(file)
    return changed
