"""Over-optimisation on the demo's task: gold and proxy reward against the distance from SFT.

Trains the demo's first two stages per seed, then PPO far longer than the demo does, with the KL
penalty and without. Gao et al. 2022 draw the same picture: as the policy moves away, the proxy
keeps rising and the gold reward turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.studies.common import (
    Records,
    cell,
    column,
    demo_stages,
    figure_of,
    kept,
    parser_of,
    print_table,
    train,
)
from fastppo.demo.run import ppo_config

KL_COEFS = {"no penalty, β = 0": 0.0, "β = 0.08": 0.08}
"""0.08 is the demo's."""

SMOOTH = 10


def run(directory: Path, seed: int, iterations: int) -> dict[str, Records]:
    stages = demo_stages(directory, seed)
    records = {}
    for label, kl_coef in KL_COEFS.items():
        output = stages / f"beta-{kl_coef}"
        config = ppo_config(
            stages,
            output,
            kl_coef=kl_coef,
            reference_model=str(stages / "sft"),  # without a penalty too: it is the x axis
            iterations=iterations,
            lr_schedule="constant",
            seed=seed,
            device="cpu",
        )
        records[label] = kept(
            output / "records.json", partial(train, config, iterations=iterations)
        )
    return records


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser_of(__doc__, seeds=3, iterations=150).parse_args(arguments)
    iterations = 10 if options.quick else options.iterations
    seeds = range(1 if options.quick else options.seeds)
    runs = [run(options.directory, seed, iterations) for seed in seeds]
    rows = {}
    for label in KL_COEFS:
        gold = [column(run[label], "monitor/gold_reward", SMOOTH) for run in runs]
        rows[label] = [
            cell((column(run[label], "kl", SMOOTH)[-1] for run in runs), 2),
            cell((column(run[label], "reward", SMOOTH)[-1] for run in runs), 2),
            cell((values[SMOOTH - 1 :].max() for values in gold), 2),
            cell((values[-1] for values in gold), 2),
        ]
    heads = ["KL at the end", "proxy at the end", "best gold", "gold at the end"]
    print_table(["setting", *heads], rows)
    distance = "√KL to the SFT model, √nats per response"
    figure = figure_of(
        [
            ("Proxy: what PPO is trained on", distance, "reward model's score"),
            ("Gold: never trained on", distance, "0 to 1"),
        ]
    )
    for label, colour in zip(KL_COEFS, ("#c8553d", "#1f5fa8"), strict=True):
        for axis, metric in zip(figure.axes, ("reward", "monitor/gold_reward"), strict=True):
            for place, records in enumerate(run[label] for run in runs):
                x = np.sqrt(np.maximum(column(records, "kl"), 0.0))
                name = label if place == 0 else None
                axis.plot(x, column(records, metric), ".-", color=colour, lw=0.5, label=name)
    figure.axes[0].legend(frameon=False, loc="lower right")
    figure.savefig(options.directory / "overoptimization.png", dpi=130)


if __name__ == "__main__":
    main()
