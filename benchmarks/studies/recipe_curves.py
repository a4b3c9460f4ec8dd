"""The curves of recipes by seed: the reward of every iteration, of runs that `fastppo recipe` made.

    for seed in 0 1 2; do fastppo recipe arithmetic --seed $seed --out runs/arithmetic-$seed; done
    python -m benchmarks.studies.recipe_curves runs arithmetic calculator

draws `recipe-curves.svg` into the folder of the runs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.studies.common import column, figure_of
from fastppo.run.log import read_jsonl


def draw(runs: Path, recipes: list[str]) -> Path:
    """A panel for each recipe, with a curve for each of its folders NAME-SEED."""
    panels = [(recipe, "iteration", "reward on the prompts") for recipe in recipes]
    figure = figure_of(panels)
    for recipe, axis in zip(recipes, figure.axes, strict=True):
        for folder in sorted(runs.glob(f"{recipe}-*")):
            records = read_jsonl(folder / "ppo" / "metrics.jsonl")
            seed = folder.name.removeprefix(f"{recipe}-")
            axis.plot(column(records, "reward"), linewidth=1.4, label=f"seed {seed}")
        axis.legend(frameon=False)
    figure.savefig(runs / "recipe-curves.svg", metadata={"Date": None})
    return runs / "recipe-curves.svg"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, help="the folder of the runs, named NAME-SEED")
    parser.add_argument("recipes", nargs="+", help="names of recipes")
    print(draw(**vars(parser.parse_args())))


if __name__ == "__main__":
    main()
