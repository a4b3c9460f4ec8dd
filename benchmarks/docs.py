"""Write docs/benchmarks.md, docs/speedups.svg and numbers of the README.

    python -m benchmarks.docs

The numbers come from the files in benchmarks/results. The page and the chart are written
completely; in the README, only the text between markers is replaced.
`tests/benchmarks/test_docs.py` fails if they differ from the results.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import plots, predictions, results, trl_iteration
from benchmarks.measure import growth_exponent
from benchmarks.results import Results, device_title, is_ours
from benchmarks.shapes import MODELS
from benchmarks.units import seconds, size, times

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGE = ROOT / "docs" / "benchmarks.md"
CHART = ROOT / "docs" / "speedups.svg"

NOT_MEASURED = predictions.NOT_MEASURED
PLAIN = ("eager PyTorch", "Python loop")
"""Names of the providers without a library; the second is used where eager PyTorch needs a loop."""

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

This page compares every operation with plain PyTorch, `torch.compile` and other packages that offer
it. `python -m benchmarks.docs` writes the page, and the numbers in the README, from the files in
`benchmarks/results`. [The suite's README](../benchmarks/README.md#how-to-read-a-row) explains the
columns and [their limits](../benchmarks/README.md#limits-of-these-numbers).
[Kernel notes](../kernels/NOTES.md) list the floor of each kernel and the attempts to reach it.

Times are medians of a call. Plain PyTorch is the code you would write without a library. The
fastest other is "none" if no other provider runs the case. Every provider agreed with fp64 before
it was timed.

On a CPU, instructions limit the losses in bf16, not memory. On the AMD EPYC, a call of GAE with
64 × 4096 tokens takes 0.35 ms in its loop and 0.1 ms in the Python around it. After 40 ms of sleep
or of other Python code, as between the calls of a promised ratio, it takes 0.5 ms and 0.4 to
0.8 ms. Whitening reads its input twice; in the run on Intel it still read it three times."""

# ----------------------------------------------------------------------------------------- the page


def page(devices: Sequence[Results]) -> str:
    """Return docs/benchmarks.md.

    Growth, promises and memory are shown for the newest CPU only; memory is the same on all CPUs.
    """
    newest = newest_cpu(devices)
    newest_grid = _newest_grid(devices)
    sections = [INTRO]
    for device in devices:
        is_older = not device.is_on_gpu and device is not newest
        sections.append(_cases(device, with_memory=not is_older))
        if device.having("variable") and not is_older:
            sections.append(_growths(device))
        if device is newest:
            sections.append(_promises(device))
        if device is newest_grid:
            sections.append(_grid(device))
    if not _on_gpus(devices):
        sections.append(_gpu_not_measured())
    sections.append(_predicted(devices))
    return "\n\n".join(sections) + "\n"


def newest_cpu(devices: Sequence[Results]) -> Results:
    """Return the CPU with the newest promised ratios.

    Raises:
        ValueError: no CPU has measured them.
    """
    cpus = _cpus(devices)
    if not cpus:
        raise ValueError(
            "expected promised ratios of a CPU in benchmarks/results, got none: see "
            "benchmarks/README.md for the command that keeps a run"
        )
    return max(cpus, key=lambda device: device.time_of("promised"))


def _cpus(devices: Sequence[Results]) -> list[Results]:
    """Return the CPUs with measured promises."""
    return [device for device in devices if not device.is_on_gpu and device.having("promised")]


def _newest_grid(devices: Sequence[Results]) -> Results:
    """Return the device with the newest comparison of iterations with TRL."""
    return max(devices, key=lambda device: device.time_of("iteration"))


def _on_gpus(devices: Sequence[Results]) -> list[Results]:
    return [device for device in devices if device.is_on_gpu]


def _gpu_not_measured() -> str:
    return (
        "## GPU\n\nNo GPU has been measured yet. CPU numbers say nothing about a GPU, since its "
        "backend is different code. [The first half hour on a GPU]"
        "(../benchmarks/README.md#the-first-half-hour-on-a-gpu) will fill this section."
    )


def _predicted(devices: Sequence[Results]) -> str:
    copies = " and ".join(f"{card.copy / 1e12:.1f} on an {card.name}" for card in predictions.CARDS)
    rates = " to ".join(f"{rate / 1e12:.0f}" for rate in predictions.MATMUL_RATES)
    works = predictions.works()
    named = [model for model in MODELS.values() if any(model.name in w.shape for w in works)]
    models = "; ".join(f"{m.name} {m.vocab} and {m.hidden}" for m in named)
    rows = [predictions.HEADER, *predictions.table(devices)]
    if not _on_gpus(devices):
        rows = [row[:-1] for row in rows]  # the measured column is empty
    return "\n\n".join(
        [
            "## GPU, predicted",
            "These times are predictions of `benchmarks/predictions.py` for bf16, not "
            f"measurements. They assume bytes at copy speed (TB/s: {copies}), matrix products at "
            f"{rates} TFLOP/s, the rate of the best other kernels, and instruction counts from the "
            "machine code. The "
            "low end assumes the faster products and full overlap, the high end the slower "
            "products and no optional overlap. `linear_token_stats` with gradients computes the "
            "logits twice (four products), like other packages; `linear_ppo_loss` computes them "
            "once (three). The last column quotes the authors' numbers for the card they name. "
            f"V and H: {models}.",
            table(rows[0], rows[1:]),
            _predicted_decoding(),
        ]
    )


def _predicted_decoding() -> str:
    rows = predictions.decoding_table()
    return "\n\n".join(
        [
            "### Decoding, predicted",
            f"Tokens per second of {predictions.DECODED_ROWS} rows with {predictions.CONTEXT} "
            "tokens in the cache of each, on an H100. A step reads the weights and the cache once "
            f"in bf16, at {predictions.PEAK / 1e12:.2f} TB/s (data sheet) to "
            f"{predictions.CARDS[0].copy / 1e12:.1f}, and the host needs "
            f"{predictions.LAUNCH * 1e6:.0f} µs per launch (assumed). The launches of the decoder "
            "were counted on a simulated device, under autocast. Because of them the decoder is "
            "more than ten times slower than one graph for the small model, and up to twice for "
            "the large one. So on a GPU take `rollout: vllm`, or `rollout: generate`, for which "
            "transformers compiles a step over its static cache into one CUDA graph, for models "
            "of up to a few billion parameters. The decoder has no graph of its own: its rows "
            "leave and its cache grows, so the shapes change, and what a graph computes could not "
            "be checked without a GPU.",
            table(rows[0], rows[1:]),
        ]
    )


def _cases(device: Results, *, with_memory: bool) -> str:
    by_case: dict[str, dict[str, Any]] = {}
    for _, test in device.having("floor_seconds"):
        info = test["extra_info"]
        if "variable" not in info:
            title = f"{info['case']}, {info['shape']}"
            by_case.setdefault(title, {})[info["provider"]] = test
    providers = {name for tests in by_case.values() for name in tests}
    without = "" if "torch.compile" in providers else " Without `torch.compile`."
    rows = [HEADER, *(_row(title, tests) for title, tests in by_case.items())]
    if not with_memory:
        rows = [row[: HEADER.index("memory")] for row in rows]
    return "\n\n".join(
        [f"## {device_title(device.device)}", _about(device) + without, table(rows[0], rows[1:])]
    )


def _about(device: Results) -> str:
    """Describe the runs: date, versions, ceilings, and the note on converted files."""
    lines = []
    for run in device.runs:
        if run.ceilings is not None:
            versions = f"torch {run.packages['torch']}"
            if device.is_on_gpu:
                versions += f", Triton {run.packages['triton']}"
            ceilings = results.ceilings_line(run.ceilings)
            note = f" {run.note}" if run.note else ""
            lines.append(f"{run.date}, {versions}. Ceilings of the same run: {ceilings}.{note}")
    return " ".join(lines)


def _row(title: str, tests: dict[str, Any]) -> list[str]:
    ours = tests.get("FastPPO")
    plain = _plain(tests)
    others = [
        test
        for name, test in tests.items()
        if not is_ours(name) and name not in PLAIN and not test["extra_info"]["is_bound"]
    ]
    best = min(others, key=_median, default=None)
    return [
        title,
        NOT_MEASURED if ours is None else f"**{seconds(_median(ours))}**",
        NOT_MEASURED if ours is None else f"{ours['extra_info']['percent_of_floor']:.0f} %",
        NOT_MEASURED if plain is None else seconds(_median(plain)),
        "none" if best is None else f"{best['extra_info']['provider']} {seconds(_median(best))}",
        NOT_MEASURED if ours is None else size(ours["extra_info"]["peak_extra_bytes"]),
        NOT_MEASURED if plain is None else size(plain["extra_info"]["peak_extra_bytes"]),
    ]


def _median(test: dict[str, Any]) -> float:
    return test["stats"]["median"]


def _plain(by_provider: dict[str, Any]) -> Any:
    return next((by_provider[name] for name in PLAIN if name in by_provider), None)


def _growths(device: Results) -> str:
    sweeps: dict[tuple[str, str], dict[str, list[tuple[int, float]]]] = {}
    for _, test in device.having("variable"):
        info = test["extra_info"]
        of_sweep = sweeps.setdefault((info["case"], info["variable"]), {})
        of_sweep.setdefault(info["provider"], []).append((info["size"], _median(test)))
    return "\n\n".join(
        [
            "Time grows with size as follows; the exponents are those of a fitted power law:",
            table(
                ["operation and sizes", "FastPPO", "plain PyTorch"],
                [_growth(*key, points) for key, points in sweeps.items()],
            ),
        ]
    )


def _growth(case: str, variable: str, points: dict[str, list[tuple[int, float]]]) -> list[str]:
    sizes = [size for size, _ in points["FastPPO"]]

    def power(measured: list[tuple[int, float]] | None) -> str:
        if measured is None:
            return NOT_MEASURED
        return f"{variable}^{growth_exponent(*zip(*measured, strict=True)):.2f}"

    title = f"{case}, {variable} from {sizes[0]} to {sizes[-1]}"
    return [title, power(points.get("FastPPO")), power(_plain(points))]


def _promises(device: Results) -> str:
    tests = device.having("promised")
    rows = []
    for _, test in tests:
        info = test["extra_info"]
        kept = "yes" if info["ratio"] >= info["promised"] else f"no{_quartiles(info)}"
        what = f"{info['operation']}, {info['shape']}: {info['kind']} than {info['against']}"
        rows.append([what, _factor(info["ratio"]), f"≥ {_factor(info['promised'])}", kept])
    date = device.time_of("promised")[:10]
    if any(run.note for run, _ in tests):
        date += ", measured with the earlier runner"
    return "\n\n".join(
        [
            "These ratios are promised (`pytest benchmarks -m promise`). A speed-up is the median "
            f"over pairs of neighboring calls in one run ({date}):",
            table(["promise", "measured", "promised", "kept"], rows),
        ]
    )


def _factor(ratio: float) -> str:
    return f"{ratio:.2f}×" if ratio < 1.05 else times(ratio)


def _quartiles(info: dict[str, Any]) -> str:
    if "quartiles" not in info:
        return ""
    low, high = map(times, info["quartiles"])
    return f": quartiles {low} to {high}"


def _grid(device: Results) -> str:
    return "\n\n".join(
        [
            "This table compares a PPO iteration of 16 episodes with TRL 1.12, on one thread "
            f"(`pytest benchmarks -m slow`, {device.time_of('iteration')[:10]}). The floor is the "
            "iteration's FLOP at the rate of a large matrix product. The last column is the ratio "
            "of FLOP, which is the speed-up at equal efficiency:",
            table(trl_iteration.HEADER, [trl_iteration.cells(row) for row in _iterations(device)]),
        ]
    )


def _iterations(device: Results) -> list[dict[str, Any]]:
    return [test["extra_info"]["iteration"] for _, test in device.having("iteration")]


def table(header: list[str], rows: list[list[str]]) -> str:
    aligned = ["---", *["---:"] * (len(header) - 1)]
    lines = [header, aligned, *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


# --------------------------------------------------------------------------------------- the README


class Comparison(NamedTuple):
    """Comparison of FastPPO with another implementation on one CPU."""

    what: str
    against: str
    speed_up: float
    memory_saved: float | None = None


def comparisons(cpu: Results) -> dict[str, Comparison]:
    """Return the comparisons that the README shows, by operation.

    Raises:
        ValueError: a promised ratio was not measured.
    """
    ratios: dict[tuple[str, ...], float] = {}
    for _, test in cpu.having("promised"):
        info = test["extra_info"]
        ratios[info["operation"], info["kind"], info["against"]] = info["ratio"]

    def ratio(*key: str) -> float:
        if ratios.get(key) is None:
            raise ValueError(
                f"{device_title(cpu.device)} has no measured ratio of {', '.join(key)}"
            )
        return float(ratios[key])

    shown = {}
    for function in ("ppo_loss", "linear_ppo_loss"):
        for operation in (function, f"{function}, no entropy"):
            faster = ratio(operation, "faster", "eager PyTorch")
            less = ratio(operation, "less memory", "eager PyTorch")
            shown[operation] = Comparison(function, "PyTorch", faster, less)
    for operation, other in (("PPO iteration", "TRL 1.12"), ("gae", "TRL's loop")):
        shown[operation] = Comparison(operation, other, ratio(operation, "faster", other))
    return shown


def span(ratios: Sequence[float]) -> str:
    """Format speed-ups of several machines: "9.4 to 17×"."""
    low, high = times(min(ratios)), times(max(ratios))
    return high if low == high else f"{low.removesuffix('×')} to {high}"


def bars(devices: Sequence[Results]) -> list[plots.Bar]:
    """Return the bars of the README's chart, measured on the newest CPU."""
    shown = comparisons(newest_cpu(devices))
    losses = [shown["ppo_loss"], shown["linear_ppo_loss"]]
    faster = [*losses, shown["PPO iteration"], shown["gae"]]
    return [
        *(plots.Bar("faster", c.what, c.against, c.speed_up, times(c.speed_up)) for c in faster),
        *(
            plots.Bar("less memory", c.what, c.against, c.memory_saved, times(c.memory_saved))
            for c in losses
            if c.memory_saved is not None
        ),
    ]


def machine(device: Results) -> str:
    """Return the label of the chart: the device, torch, and the date of the promised ratios."""
    (torch, *_) = [run.packages["torch"] for run in reversed(device.runs) if run.packages]
    version = str(torch).partition("+")[0]
    return f"{device_title(device.device)}, torch {version}, {device.time_of('promised')[:10]}"


def sections(devices: Sequence[Results]) -> dict[str, str]:
    """Return the README's text for each pair of markers.

    Raises:
        ValueError: no CPU has measured the promised ratios.
    """
    shown = bars(devices)
    alt = "; ".join(f"{bar.what} {bar.label} {bar.group} than {bar.against}" for bar in shown)
    gpus = [device_title(device.device) for device in _on_gpus(devices)]
    chart = f"""
![{alt}](docs/speedups.svg)

*{f"GPUs: {', '.join(gpus)}." if gpus else "No GPU has been measured yet."}
[All measurements](docs/benchmarks.md) include those where FastPPO loses; see also
[their limits](benchmarks/README.md#limits-of-these-numbers).*
"""
    measured = [comparisons(device) for device in _cpus(devices)]

    def faster(name: str) -> str:
        return span([of_cpu[name].speed_up for of_cpu in measured]) + " faster"

    def saved(name: str) -> str:
        ratios = [of_cpu[name].memory_saved for of_cpu in measured]
        return span([ratio for ratio in ratios if ratio is not None]) + " less memory"

    grid = span([row["speed_up"] for row in _iterations(_newest_grid(devices))])
    numbers = f"""
- **Fused loss.** `ppo_loss` returns the loss, its metrics and the gradient from one pass over the
  logits. It is {faster("ppo_loss")} than plain PyTorch and needs {saved("ppo_loss")};
  without an entropy bonus it is {faster("ppo_loss, no entropy")} with
  {saved("ppo_loss, no entropy")}.
- **No full logits.** `linear_ppo_loss` includes the lm-head and computes the logits in chunks. It
  needs {saved("linear_ppo_loss")} and is {faster("linear_ppo_loss")}.
- **One forward pass.** Policy and value function share a trunk. A PPO iteration of a tiny model is
  {faster("PPO iteration")} than TRL 1.12's, and {grid} faster over a grid of nine sizes.
"""
    return {"chart": chart[1:], "numbers": numbers[1:] + "  "}  # the end marker stays in the list


def split(text: str, section: str) -> tuple[str, str, str]:
    """Split the README into the text up to a section, the section, and the text after it.

    Raises:
        ValueError: the section's markers are missing.
    """
    begin, end = f"<!-- python -m benchmarks.docs: {section} -->\n", f"<!-- end of {section} -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"README.md must contain {begin.strip()} and {end} once each")
    before, _, rest = text.partition(begin)
    content, _, after = rest.partition(end)
    return before + begin, content, end + after


def update() -> None:
    """Write the README's sections, the page and the chart."""
    devices = results.load()
    readme = README.read_text(encoding="utf-8")
    for section, content in sections(devices).items():
        before, _, after = split(readme, section)
        readme = before + content + after
    README.write_text(readme, encoding="utf-8")
    PAGE.write_text(page(devices), encoding="utf-8")
    plots.draw_chart(bars(devices), machine(newest_cpu(devices)), CHART)
    print(f"written {', '.join(str(path.relative_to(ROOT)) for path in (README, PAGE, CHART))}")


if __name__ == "__main__":
    update()
