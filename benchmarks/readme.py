"""The README's performance section, made from the results files: `python -m benchmarks readme`.

It stands between two markers, and `tests/test_benchmarks.py` fails when it is not what the files in
benchmarks/results say. Nothing in it is typed by hand.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.case import Case
from benchmarks.report import RESULTS
from benchmarks.style import device_title, is_ours, seconds, size

README = Path(__file__).parents[1] / "README.md"
BEGIN = "<!-- python -m benchmarks readme: begin -->"
END = "<!-- python -m benchmarks readme: end -->"

NOT_MEASURED = "not measured"
PLAIN = ("eager PyTorch", "Python loop")
"""What one writes without a library: the second where there is no way without a loop."""

HEADER = ["work", "FastPPO", "of the floor", "plain PyTorch", "fastest other", "memory", "plain's"]


def load() -> list[dict[str, Any]]:
    """The results files, GPUs first."""
    records = [report.read(path) for path in sorted(RESULTS.glob("*.json"))]
    return sorted(records, key=lambda record: record["device"]["type"] == "cpu")


def section(records: list[dict[str, Any]]) -> str:
    """The text between the markers."""
    parts = []
    if not any(record["device"]["type"] == "cuda" for record in records):
        parts.append(
            f"**A GPU**: {NOT_MEASURED} yet. `fastppo bench --keep` on one, then `fastppo bench "
            "readme`, puts its table here."
        )
    parts += [_device(record) for record in records]
    return "\n\n".join(parts)


def _first_shapes(found: list[Any]) -> list[Any]:
    """The first of each kind of case: the table shows one shape, the results file all."""
    seen: dict[str, Any] = {}
    for case in found:
        seen.setdefault(case.name if isinstance(case, Case) else case["case"], case)
    return list(seen.values())


def _device(record: dict[str, Any]) -> str:
    packages = record["packages"]
    versions = f"torch {packages['torch']}"
    if record["device"]["type"] == "cuda":
        versions += f", Triton {packages['triton']}"
    rows = [_row(case) for case in _first_shapes(record["cases"])]
    intro = (
        f"**{device_title(record['device'])}** ({record['date'][:10]}, {versions}; "
        f"{report.ceilings_line(record)})"
    )
    parts = [intro, _table(HEADER, rows)]
    if record.get("sweeps"):
        growth = [_growth(sweep) for sweep in record["sweeps"]]
        parts.append(_table(["growth of time", "FastPPO", "plain PyTorch"], growth))
    if record.get("claims"):
        parts.append(
            _table(
                ["ratio, one run", "measured", "wanted", ""],
                [_claim(claim) for claim in record["claims"]],
            )
        )
    return "\n\n".join(parts)


def _row(case: dict[str, Any]) -> list[str]:
    timed = {row["provider"]: row for row in case["rows"] if row["status"] == "timed"}
    ours = timed.get("FastPPO")
    plain = next((timed[name] for name in PLAIN if name in timed), None)
    others = [r for name, r in timed.items() if not is_ours(name) and name not in PLAIN]
    best = min(others, key=lambda row: row["median_seconds"], default=None)
    return [
        f"{case['case']}, {case['shape']}",
        _time(ours, bold=True),
        NOT_MEASURED if ours is None else f"{ours['percent_of_floor']:.0f} %",
        _time(plain),
        "none" if best is None else f"{best['provider']} {_time(best)}",
        NOT_MEASURED if ours is None else size(ours["peak_extra_bytes"]),
        NOT_MEASURED if plain is None else size(plain["peak_extra_bytes"]),
    ]


def _time(row: dict[str, Any] | None, bold: bool = False) -> str:
    if row is None:
        return NOT_MEASURED
    text = seconds(row["median_seconds"])
    return f"**{text}**" if bold else text


def _growth(sweep: dict[str, Any]) -> list[str]:
    variable, growth = sweep["variable"], sweep["growth"]
    plain = next((growth[name] for name in PLAIN if name in growth), None)
    sizes = [point["size"] for point in sweep["points"]]

    def power(found: dict[str, Any] | None) -> str:
        known = found is not None and found["time"] is not None
        return f"{variable}^{found['time']:.2f}" if known else NOT_MEASURED  # type: ignore[index]

    title = f"{sweep['case']}, {variable} from {sizes[0]} to {sizes[-1]}"
    return [title, power(growth.get("FastPPO")), power(plain)]


def _claim(claim: dict[str, Any]) -> list[str]:
    measured = claim["measured"]
    found = NOT_MEASURED if measured is None else f"{measured:.2f}"
    verdict = claim["verdict"].lower()
    if claim["verdict"] == "FAIL" and claim["detail"]:
        verdict += f": {claim['detail']}"
    return [claim["text"], found, claim["wanted"], verdict]


def _table(header: list[str], rows: list[list[str]]) -> str:
    aligned = ["---", *["---:"] * (len(header) - 1)]
    lines = [header, aligned, *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def current(text: str) -> str:
    """What stands between the markers of a README.

    Raises:
        ValueError: the markers are not there.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"README.md must hold {BEGIN} and {END} once each")
    return text[text.index(BEGIN) + len(BEGIN) : text.index(END)].strip("\n")


def update(path: Path = README) -> bool:
    """Writes the section into the README; whether it changed."""
    text = path.read_text(encoding="utf-8")
    old, new = current(text), section(load())
    if old == new:
        return False
    before, after = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    path.write_text(f"{before}\n{new}\n{after}", encoding="utf-8")
    return True
