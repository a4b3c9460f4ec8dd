"""Draw the learning curves of recipes by seed, from runs of `fastppo recipe`.

    for seed in 0 1 2; do fastppo recipe arithmetic --seed $seed --out runs/arithmetic-$seed; done
    python -m benchmarks.studies.recipe_curves runs

adds the runs in folders NAME-SEED to `benchmarks/results/studies/recipe-curves.json`, and draws all
kept curves as `recipe-curves.svg` into the folder of the runs.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.studies.common import column, figure_of
from fastppo.run.log import read_jsonl

KEPT = Path(__file__).parents[1] / "results" / "studies" / "recipe-curves.json"

Curves = dict[str, dict[str, list[float]]]
"""Reward of each iteration, by recipe and seed."""


def curves_of(runs: Path) -> Curves:
    """Return the curves of all runs in the folder."""
    curves: Curves = {}
    for metrics in sorted(runs.glob("*-*/ppo/metrics.jsonl")):
        recipe, _, seed = metrics.parts[-3].rpartition("-")
        rewards = column(read_jsonl(metrics), "reward")
        curves.setdefault(recipe, {})[seed] = [round(float(reward), 4) for reward in rewards]
    return curves


def draw(curves: Curves, path: Path) -> None:
    """Draw a panel per recipe with a curve per seed."""
    figure = figure_of([(recipe, "iteration", "reward on the prompts") for recipe in curves])
    for seeds, axis in zip(curves.values(), figure.axes, strict=True):
        for seed, rewards in seeds.items():
            iterations = range(1, len(rewards) + 1)
            axis.plot(iterations, rewards, linewidth=1.4, label=f"seed {seed}")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})


def add(runs: Path, kept: Path) -> Path:
    """Add the runs to the kept curves and draw all of them."""
    curves: Curves = json.loads(kept.read_text("utf-8")) if kept.exists() else {}
    for recipe, seeds in curves_of(runs).items():
        curves[recipe] = dict(sorted((curves.get(recipe, {}) | seeds).items()))
    curves = dict(sorted(curves.items()))
    kept.write_text(json.dumps(curves) + "\n", encoding="utf-8")
    draw(curves, runs / "recipe-curves.svg")
    return runs / "recipe-curves.svg"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, help="the folder of the runs, named NAME-SEED")
    print(add(parser.parse_args().runs, KEPT))


if __name__ == "__main__":
    main()
