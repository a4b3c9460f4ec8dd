"""Over-optimisation on the demo's task: gold and proxy reward against the distance from SFT.

    python docs/study_overoptimization.py runs/overoptimization

Trains the demo's first two stages per seed, then PPO far longer than the demo does, with the KL
penalty and without. Gao et al. 2022 draw the same picture: as the policy moves away, the proxy
keeps rising and the gold reward turns. Draws docs/overoptimization.png from what was run; a run
that is there already is not run again.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import matplotlib.pyplot as plt
from rich.console import Console

from fastppo.demo.run import ppo_config, supervised_stages
from fastppo.ppo.trainer import PPOTrainer
from fastppo.run.log import read_jsonl

SETTINGS = {"no penalty, β = 0": (0.0, "#c8553d"), "β = 0.08": (0.08, "#1f5fa8")}
"""KL coefficients with their colours; 0.08 is the demo's."""


def run(directory: Path, seed: int, iterations: int) -> None:
    console = Console(stderr=True)
    stages = directory / f"seed-{seed}"
    if not (stages / "reward_model" / "config.json").exists():
        shutil.rmtree(stages, ignore_errors=True)  # what an interrupted run left
        supervised_stages(stages, seed=seed, device="cpu", console=console)
    for kl_coef, _ in SETTINGS.values():
        output = stages / f"beta-{kl_coef}"
        if (output / "policy").exists():
            continue
        resume = any(output.glob("checkpoint-*"))
        if not resume:  # what an interrupted run left
            shutil.rmtree(output, ignore_errors=True)
        options = {
            "resume": resume,
            "kl_coef": kl_coef,
            "reference_model": str(stages / "sft"),  # without a penalty too: it is the x axis
            "iterations": iterations,
            "lr_schedule": "constant",
            "seed": seed,
            "device": "cpu",
        }
        PPOTrainer(ppo_config(stages, output, **options), console=console).train()


def draw(directory: Path, path: Path) -> None:
    """Proxy and gold reward against √KL, every iteration of every seed."""
    plt.rcParams.update({"font.size": 10, "font.family": "sans-serif"})
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    panels = (
        ("Proxy: what PPO is trained on", "reward model's score", "reward"),
        ("Gold: never trained on", "0 to 1", "monitor/gold_reward"),
    )
    for axis, (title, unit, metric) in zip(axes, panels, strict=True):
        for label, (kl_coef, colour) in SETTINGS.items():
            for i, run_dir in enumerate(sorted(directory.glob(f"seed-*/beta-{kl_coef}"))):
                records = read_jsonl(run_dir / "metrics.jsonl")
                x = [max(record["kl"], 0.0) ** 0.5 for record in records]
                y = [record[metric] for record in records]
                axis.plot(x, y, color=colour, linewidth=0.6, alpha=0.35)
                name = label if i == 0 else None
                axis.scatter(x, y, color=colour, s=9, alpha=0.7, linewidths=0, label=name)
        axis.set_title(title, loc="left", fontweight="bold", fontsize=11)
        axis.set_xlabel("√KL to the SFT model, √nats per response")
        axis.set_ylabel(unit)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25, linewidth=0.6)
    axes[1].set_ylim(0, 1)
    axes[0].legend(frameon=False, loc="lower right", markerscale=2.5)
    figure.savefig(path, dpi=130)


def table(directory: Path) -> None:
    """Peak and last gold reward of each setting, mean over the seeds, as Markdown."""
    print("| setting | KL at the end | proxy at the end | best gold | gold at the end |")
    print("|---|---|---|---|---|")
    for label, (kl_coef, _) in SETTINGS.items():
        rows = []
        for run_dir in sorted(directory.glob(f"seed-*/beta-{kl_coef}")):
            records = read_jsonl(run_dir / "metrics.jsonl")
            last = records[-10:]
            gold = [record["monitor/gold_reward"] for record in records]
            rows.append(
                (
                    *(sum(r[name] for r in last) / len(last) for name in ("kl", "reward")),
                    max(sum(gold[i : i + 10]) / 10 for i in range(len(gold) - 9)),
                    sum(gold[-10:]) / 10,
                )
            )
        means = [sum(column) / len(column) for column in zip(*rows, strict=True)]
        print(f"| {label} | " + " | ".join(f"{mean:.2f}" for mean in means) + " |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, help="where the runs go")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=150)
    options = parser.parse_args()
    for seed in range(options.seeds):
        run(options.directory, seed, options.iterations)
    draw(options.directory, Path(__file__).parent / "overoptimization.png")
    table(options.directory)
