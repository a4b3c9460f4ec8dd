"""docs/benchmarks.md and the README's numbers from benchmarks/results: `python -m benchmarks docs`.

The page is generated whole; of the README, the text between two markers. Nothing in either is typed
by hand, and `tests/benchmarks/test_benchmarks.py` fails when they differ from the results files.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import report, trl_grid
from benchmarks.cases import cases
from benchmarks.report import RESULTS
from benchmarks.shapes import SETS
from benchmarks.style import device_title, is_ours, seconds, size

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGE = ROOT / "docs" / "benchmarks.md"
BEGIN = "<!-- python -m benchmarks docs: begin -->"
END = "<!-- python -m benchmarks docs: end -->"

NOT_MEASURED = "not measured"
PLAIN = ("eager PyTorch", "Python loop")
"""What one writes without a library: the second where there is no way without a loop."""

WIDTH = 108
"""Columns of the README's lines."""

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

`python -m benchmarks docs` writes this page and the numbers in the README from the files in
`benchmarks/results`; `fastppo bench --keep` and `fastppo bench claims --keep` write those files.
[The suite's README](../benchmarks/README.md) says how each number is measured, and what it does not
show; [the kernels' notes](../kernels/NOTES.md) have each kernel's floor and what was tried.

- **FastPPO**, **plain PyTorch**, **fastest other**: median time of a call. Plain PyTorch is what
  one writes without a library. The fastest other is the fastest of `torch.compile` and the
  packages that offer the same operation, and "none" where none of them can run it. Every
  provider timed here agreed with fp64 first.
- **of the floor**: the floor over FastPPO's time. The floor is the larger of the compulsory
  bytes at the speed of a copy and the FLOP at the speed of a matrix product, both measured in
  the same run.
- **memory**: the most that was allocated at any moment of the call above its inputs, outputs
  included."""


def load() -> list[dict[str, Any]]:
    """The results files, GPUs first."""
    records = [report.read(path) for path in sorted(RESULTS.glob("*.json"))]
    return sorted(records, key=lambda record: record["device"]["type"] == "cpu")


# ----------------------------------------------------------------------------------------- the page


def page(records: Sequence[dict[str, Any]]) -> str:
    """The whole of docs/benchmarks.md."""
    sections = [INTRO, *(_device(record) for record in records)]
    if not _on_gpus(records):
        sections.append(_gpu_not_measured())
    return "\n\n".join(sections) + "\n"


def _on_gpus(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [record for record in records if record["device"]["type"] == "cuda"]


def _gpu_not_measured() -> str:
    """The cases of a GPU's set, none of them with a number."""
    work = SETS["cuda", "default"]
    rows = [
        [f"{case.name}, {case.shape}", *[NOT_MEASURED] * (len(HEADER) - 1)] for case in cases(work)
    ]
    text = (
        "No GPU has run the suite yet. On one, `fastppo bench --keep`, or "
        "`benchmarks/on_a_gpu.sh` and `fastppo bench keep`, and then `fastppo bench docs` fill "
        "this table."
    )
    return f"## GPU\n\n{text}\n\n{_table(HEADER, rows)}"


def _device(record: dict[str, Any]) -> str:
    packages = record["packages"]
    versions = f"torch {packages['torch']}"
    if record["device"]["type"] == "cuda":
        versions += f", Triton {packages['triton']}"
    providers = {row["provider"] for case in record["cases"] for row in case["rows"]}
    without = "" if "torch.compile" in providers else " `torch.compile` was left out."
    parts = [
        f"## {device_title(record['device'])}",
        f"{record['date'][:10]}, {versions}; measured in the same run: "
        f"{report.ceilings_line(record)}.{without}",
        _table(HEADER, [_row(case) for case in record["cases"]]),
    ]
    if record.get("sweeps"):
        rows = [_growth(sweep) for sweep in record["sweeps"]]
        parts += [
            "How the time grows, as the exponent of a power law fitted over the sizes:",
            _table(["growth of time", "FastPPO", "plain PyTorch"], rows),
        ]
    if record.get("claims"):
        parts += [
            "What `fastppo bench claims` checks on a CPU. Each ratio is the median over "
            f"neighbouring calls in one run ({record['claims_measured']['date'][:10]}); eager is "
            "plain PyTorch:",
            _table(
                ["ratio", "measured", "wanted", "verdict"],
                [_claim(claim) for claim in record["claims"]],
            ),
        ]
    if record.get("trl_grid"):
        parts += [
            "A PPO iteration of 16 episodes beside TRL 1.12's, on one thread in one process "
            f"(`python -m benchmarks.trl_grid`, {record['trl_grid']['date'][:10]}). The floor is "
            "the iteration's FLOP at the rate of a large matrix product; “at equal efficiency” is "
            "TRL's FLOP over FastPPO's:",
            _table(trl_grid.HEADER, [trl_grid.cells(row) for row in record["trl_grid"]["rows"]]),
        ]
    return "\n\n".join(parts)


def _row(case: dict[str, Any]) -> list[str]:
    timed = {row["provider"]: row for row in case["rows"] if row["status"] == "timed"}
    ours, plain = timed.get("FastPPO"), _plain(timed)
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


def _plain(by_provider: dict[str, Any]) -> Any:
    return next((by_provider[name] for name in PLAIN if name in by_provider), None)


def _time(row: dict[str, Any] | None, bold: bool = False) -> str:
    if row is None:
        return NOT_MEASURED
    text = seconds(row["median_seconds"])
    return f"**{text}**" if bold else text


def _growth(sweep: dict[str, Any]) -> list[str]:
    variable, growth = sweep["variable"], sweep["growth"]
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


def _table(header: list[str], rows: list[list[str]]) -> str:
    aligned = ["---", *["---:"] * (len(header) - 1)]
    lines = [header, aligned, *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


# --------------------------------------------------------------------------------------- the README


def sentences(records: Sequence[dict[str, Any]]) -> str:
    """The README's text between the markers: three sentences from the claims of the CPU that was
    measured last, and the GPU's.

    Raises:
        ValueError: no CPU's results hold the claims.
    """
    cpus = [r for r in records if r["device"]["type"] == "cpu" and r.get("claims")]
    cpu = max(cpus, key=lambda r: r["claims_measured"]["date"], default=None)
    if cpu is None:
        raise ValueError(
            "expected a CPU's results with claims in benchmarks/results, got none: "
            "run `python -m benchmarks --keep` and `python -m benchmarks claims --keep`"
        )
    claims = cpu["claims"]
    logits, bonus = _shares(claims, "ppo_loss with gradients", ", entropy bonus")
    _, no_bonus = _shares(claims, "ppo_loss with gradients", ", no entropy bonus")
    linear, linear_bonus = _shares(claims, "linear_ppo_loss with gradients", ", entropy bonus")
    _, linear_no_bonus = _shares(claims, "linear_ppo_loss with gradients", ", no entropy bonus")
    loop = _the_claim(claims, "gae", ": times as fast as TRL's loop")
    verl = _the_claim(claims, "gae", ": times as fast as verl's")
    iteration = _the_claim(claims, "a PPO iteration", ": episodes per second over TRL's")
    shape = loop["text"].partition(", ")[2].partition(":")[0]
    what = iteration["text"].partition(":")[0]
    threads = iteration["detail"].partition(";")[0]
    gpus = [device_title(record["device"]) for record in _on_gpus(records)]
    lines = [
        f"The loss with its gradients ({logits}) takes {bonus[0]} of plain PyTorch's time and "
        f"{bonus[1]} of its extra memory, without an entropy bonus {no_bonus[0]} and "
        f"{no_bonus[1]}; from hidden states, the lm-head included ({linear}), "
        f"{linear_bonus[0]} and {linear_bonus[1]}, without the bonus "
        f"{linear_no_bonus[0]} and {linear_no_bonus[1]}.",
        f"GAE ({shape}) is {loop['measured']:.1f} times as fast as TRL's loop and "
        f"{verl['measured']:.0f} times as fast as verl's function, which whitens as well.",
        f"{what[0].upper()}{what[1:]} handles {iteration['measured']:.1f} times as many episodes "
        f"per second as TRL's, both on {threads}.",
    ]
    closing = (
        f"On GPUs: {'measured on ' + ', '.join(gpus) if gpus else NOT_MEASURED}. "
        "[All measurements](docs/benchmarks.md), where we lose included, and "
        "[what they do not show](benchmarks/README.md#what-these-numbers-are-not)."
    )
    items = [textwrap.fill(f"- {line}", WIDTH, subsequent_indent="  ") for line in lines]
    date, torch = cpu["claims_measured"]["date"][:10], cpu["packages"]["torch"]
    intro = f"On a CPU ({device_title(cpu['device'])}, torch {torch}, measured on {date}):"
    return "\n\n".join([intro, "\n".join(items), textwrap.fill(closing, WIDTH)])


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


def _shares(claims: list[dict[str, Any]], loss: str, bonus: str) -> tuple[str, tuple[str, str]]:
    """(shape, (time, memory)) of a loss, the latter as shares of plain PyTorch's."""
    time, memory = (
        _the_claim(claims, loss, f"{bonus}: {quantity} over eager's")
        for quantity in ("time", "extra memory")
    )
    shape = time["text"].removeprefix(f"{loss}, ").partition(f"{bonus}:")[0]
    return shape, (_percent(time["measured"]), _percent(memory["measured"]))


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def current(text: str) -> str:
    """What is between the markers of a README.

    Raises:
        ValueError: the markers are not there.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"README.md must hold {BEGIN} and {END} once each")
    return text[text.index(BEGIN) + len(BEGIN) : text.index(END)].strip("\n")


def update(readme: Path = README, path: Path = PAGE) -> list[Path]:
    """Writes the page and the README's sentences; the files that changed."""
    records = load()
    text = readme.read_text(encoding="utf-8")
    current(text)  # refuses a README without markers before anything is written
    before, after = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    wanted = {readme: f"{before}\n{sentences(records)}\n{after}", path: page(records)}
    changed = []
    for file, content in wanted.items():
        if not file.exists() or file.read_text(encoding="utf-8") != content:
            file.write_text(content, encoding="utf-8")
            changed.append(file)
    return changed
