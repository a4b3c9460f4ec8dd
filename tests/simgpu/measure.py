"""Print launches and waits of an iteration by phase, and where they are.

    python -m tests.simgpu.measure                        totals, then the lines of each phase
    python -m tests.simgpu.measure --lines 0              totals alone
    python -m tests.simgpu.measure ptx_coef=0.5 …         with other options of PPOConfig

The model is a small Llama in the precision of a GPU's default (fp32 weights, bf16 autocast), with
one and with two layers. Launches are split into a fixed part and one per layer, and depend on
neither the width nor, except for the waits at finished rows, the number of rows.
"""

from __future__ import annotations

import argparse
import collections
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.simgpu import device
from tests.simgpu.counts import counts


class Cost(NamedTuple):
    """Launches and waits of one call of a phase, by operation and place."""

    launches: Mapping[tuple[str, str], float]
    waits: Mapping[tuple[str, str], float]

    @classmethod
    def of(cls, phase: str, calls: int) -> Cost:
        """Return the mean of what was counted."""
        return cls(counts.launches[phase], counts.waits[phase]).over(calls)

    def minus(self, other: Cost, times: float = 1) -> Cost:
        """Return this cost less `times` another one."""

        def less(mine: Mapping[Any, float], its: Mapping[Any, float]) -> dict[Any, float]:
            return {key: mine.get(key, 0) - times * its.get(key, 0) for key in {**mine, **its}}

        return Cost(less(self.launches, other.launches), less(self.waits, other.waits))

    def over(self, calls: int) -> Cost:
        """Return the cost of one of several calls."""
        return Cost(
            {key: n / calls for key, n in self.launches.items()},
            {key: n / calls for key, n in self.waits.items()},
        )


LENGTHS = (4, 12)
"""Response lengths whose difference is the cost of a decoded token."""

OPTIONS: dict[str, Any] = {
    "device": "cuda",
    "rollout_batch_size": 8,
    "microbatch_size": 2,
    "ppo_epochs": 1,
    "minibatches": 2,
    "max_new_tokens": LENGTHS[0],
    "stop_token_ids": [],
}


def small_llama(layers: int) -> Any:
    """Return a model of this many layers."""
    import tiny

    config = tiny.CONFIGS["llama"]()
    config.num_hidden_layers = layers
    return tiny.model_of(config)


def costs(layers: int, options: Mapping[str, Any]) -> dict[str, Cost]:
    """Return the cost of each phase of a second iteration, and of a decoded token."""
    import tiny

    import runs
    from benchmarks.training import iterate

    found = {}
    generated = {}
    for length in LENGTHS:
        with tempfile.TemporaryDirectory() as folder:
            chosen = {**OPTIONS, **options, "max_new_tokens": length}
            trainer = runs.make_trainer(
                Path(folder), causal_lm=small_llama(layers), rewards=[tiny.every_other], **chosen
            )
            for _ in range(2):  # the first iteration fills caches
                counts.clear()
                with counts.during("iteration"):
                    iterate(trainer)
        generated[length] = Cost.of("generate", 1)
        if length != LENGTHS[0]:
            continue
        found = {
            "experience": Cost.of("experience", 1),
            "microbatch": Cost.of("microbatches", counts.calls["microbatch"]),
            "optimizer step": Cost.of("optimizer step", counts.calls["optimizer step"]),
            "rest of the update": Cost.of("update", 1),
            "score": Cost.of("score", 1),
            "rest of the iteration": Cost.of("iteration", 1),
        }
    short, long = (generated[length] for length in LENGTHS)
    token = long.minus(short).over(LENGTHS[1] - LENGTHS[0])
    rest = short.minus(token, LENGTHS[0])
    return {"decoded token": token, "rest of generation": rest, **found}


def print_lines(cost: Cost, most: int) -> None:
    """Print the lines with the most launches, and all with waits."""
    for (operation, place), n in sorted(cost.waits.items(), key=lambda item: -item[1]):
        if n:
            print(f"    wait   {n:6.2f}  {operation:40s} {place}")
    by_place: collections.Counter[str] = collections.Counter()
    operations: dict[str, list[str]] = collections.defaultdict(list)
    for (operation, place), n in sorted(cost.launches.items(), key=lambda item: -item[1]):
        if n:
            by_place[place] += n  # type: ignore[assignment]
            operations[place].append(f"{n:g} {operation.rpartition('::')[2]}")
    for place, n in by_place.most_common(most):
        print(f"    launch {n:6.2f}  {place}  ({', '.join(operations[place][:6])})")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.simgpu.measure", description=__doc__)
    parser.add_argument("options", nargs="*", metavar="NAME=VALUE", help="options of PPOConfig")
    parser.add_argument("--json", action="store_true", help="totals as a last line of JSON")
    parser.add_argument("--lines", type=int, default=20, help="lines shown per phase")
    arguments = parser.parse_args()
    device.install()
    import torch
    import yaml

    from tests.simgpu import phases

    torch.set_num_threads(1)
    phases.follow()
    options = {
        name: yaml.safe_load(value)
        for name, _, value in (item.partition("=") for item in arguments.options)
    }
    one, two = (costs(layers, options) for layers in (1, 2))
    rows = {}
    print(f"{'phase':24s} {'launches':>22s} {'waits':>8s}")
    for phase in one:
        first, second = (sum(cost[phase].launches.values()) for cost in (one, two))
        rows[phase] = (2 * first - second, second - first, sum(two[phase].waits.values()))
        fixed, per_layer, waits = rows[phase]
        print(f"{phase:24s} {f'{fixed:.4g} + {per_layer:.4g} L':>22s} {waits:8.4g}")
    if arguments.json:
        print(json.dumps(rows))
        return
    for phase, cost in two.items() if arguments.lines else ():
        print(f"\n{phase}, 2 layers")
        print_lines(cost, arguments.lines)


if __name__ == "__main__":
    main()
