"""A recipe with several seeds: the rows of the table in docs/recipes.md.

    python docs/recipe_seeds.py arithmetic runs/seeds --seeds 20
    python docs/recipe_seeds.py arithmetic runs/seeds --first 20 --seeds 5 --kl_coef 0.01

Runs `fastppo recipe NAME` with one seed after another, each in a folder of its own, and adds a line
to results.jsonl for each that ends: responses to held-out prompts before and after, and processor
time. Prints least, median and most. Seeds that start from one model are held against the limit by
the samples of the base that all of them drew, since those of one show less of it. A seed that has
its line is not run again, one without begins anew; other flags are options of the recipe, for which
another directory is wanted.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from fastppo.cli import parse
from fastppo.recipes.catalogue import find
from fastppo.recipes.run import beside_the_limit, lay_out, run_recipe
from fastppo.run.log import read_jsonl
from fastppo.run.report import BASE_REWARDS

FORMS = {
    "trained": ("reward on the prompts, last iterations", ".3f"),
    "before": ("held-out reward before", ".3f"),
    "after": ("held-out reward after", ".3f"),
    "greedy": ("held-out reward after, greedy", ".3f"),
    "gold_before": ("gold before", ".3f"),
    "gold_after": ("gold after", ".3f"),
    "kl": ("KL, nats", ".2f"),
    "share_of_gain": ("share of the limit's gain", ".2f"),
    "most_of_gain": ("share of the limit's gain, at most", ".2f"),
    "processor_minutes": ("processor minutes", ".1f"),
}
"""Rows of the table: title and format."""

LAST = 10
"""Iterations whose reward is that of the end."""


def run_seed(name: str, directory: Path, seed: int, flags: Sequence[str]) -> dict[str, Any]:
    """The line of one seed."""
    recipe, out = find(name), directory / f"{name}-{seed}"
    started = time.process_time()
    config_path = lay_out(recipe, out)
    shutil.rmtree(out / "ppo", ignore_errors=True)  # what an interrupted run left
    config = parse("train", ["--config", str(config_path), "--seed", str(seed), *flags])
    result = run_recipe(recipe, out, config)
    before, after = result["before"], result["after"]
    line = {
        "recipe": name,
        "seed": seed,
        "flags": list(flags),
        "iterations": config.iterations,
        "before": before["reward"],
        "after": after["reward"],
        "kl": after["kl"],
        "processor_minutes": (time.process_time() - started) / 60,
    }
    for checkpoint in Path(config.output_dir).glob("checkpoint-*"):  # gigabytes each
        shutil.rmtree(checkpoint)
    records = read_jsonl(Path(config.output_dir) / "metrics.jsonl")
    line["trained"] = fmean(record["reward"] for record in records[-LAST:])
    if "eval/greedy/reward" in records[-1]:
        line["greedy"] = records[-1]["eval/greedy/reward"]
    for monitor in sorted(key for key in after if key.startswith("monitor/"))[:1]:
        line |= {"gold_before": before[monitor], "gold_after": after[monitor]}
    if "limit" in result:
        line |= {name: result["limit"][name] for name in ("share_of_gain", "most_of_gain")}
    return {key: value if _is_kept(value) else None for key, value in line.items()}


def against_the_limit(
    lines: Sequence[dict[str, Any]], directory: Path
) -> tuple[list[dict[str, Any]], int]:
    """The lines with their shares of the limit by the samples of all seeds, and how many samples to
    a prompt those are; as they are, and 0, where each seed has a model of its own, or where
    samples, a KL or a reward are missing."""
    recipe = find(lines[0]["recipe"])
    drawn = [directory / f"{recipe.name}-{line['seed']}" / "ppo" / BASE_REWARDS for line in lines]
    numbers = [line.get(key) for line in lines for key in ("kl", "after")]
    if recipe.seeded or None in numbers or not all(path.exists() for path in drawn):
        return [*lines], 0
    pool = np.concatenate([np.array(json.loads(path.read_text())) for path in drawn], axis=1)
    shares = ("share_of_gain", "most_of_gain")
    try:
        found = [
            beside_the_limit(pool.tolist(), line | {"reward": line["after"]}) for line in lines
        ]
    except ValueError:  # the reward dropped nearly all
        return [*lines], 0
    pooled = [{share: at[share] for share in shares} for at in found]
    return [line | held for line, held in zip(lines, pooled, strict=True)], pool.shape[1]


def table(lines: Sequence[dict[str, Any]]) -> list[str]:
    """Least, median and most of what the seeds have, as Markdown."""
    rows = [f"| {len(lines)} seeds | least | median | most |", "|---|---|---|---|"]
    for key, (title, form) in FORMS.items():
        values = [line[key] for line in lines if line.get(key) is not None]
        if not values:
            continue
        of = "" if len(values) == len(lines) else f" ({len(values)} of {len(lines)})"
        cells = (format(pick(values), form) for pick in (min, median, max))
        rows.append(f"| {title}{of} | {' | '.join(cells)} |")
    return rows


def _is_kept(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("recipe")
    parser.add_argument("directory", type=Path, help="where the runs go")
    parser.add_argument("--seeds", type=int, default=20, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first one")
    given, flags = parser.parse_known_args(arguments)
    for own in ("--seed", "--output_dir", "--config"):
        if any(flag.partition("=")[0] == own for flag in flags):
            parser.error(f"{own} is set for each seed; name other options of the recipe")
    given.directory.mkdir(parents=True, exist_ok=True)
    results = given.directory / "results.jsonl"
    lines = []
    for seed in range(given.first, given.first + given.seeds):
        there = [
            line
            for line in (read_jsonl(results) if results.exists() else [])
            if (line["recipe"], line["seed"]) == (given.recipe, seed)
        ]
        if there and there[-1]["flags"] != flags:
            parser.error(
                f"{results} has seed {seed} with the flags {' '.join(there[-1]['flags'])!r}, "
                f"expected {' '.join(flags)!r}: name another directory"
            )
        if not there:
            line = run_seed(given.recipe, given.directory, seed, flags)
            with results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, allow_nan=False) + "\n")
            there = [line]
        lines.append(there[-1])
    lines, samples = against_the_limit(lines, given.directory)
    print("\n".join(table(lines)))
    if samples:
        print(f"The limit is that of {samples} samples of the base to a prompt.")


if __name__ == "__main__":
    main()
