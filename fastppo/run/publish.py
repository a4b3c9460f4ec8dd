"""What a finished policy is published with: its model card.

`policy/README.md` says what it was made from and how: data, options, how the metrics went (a
picture beside it), device and versions. A run that took days does not fail for its card.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.utils import HFValidationError, validate_repo_id
from transformers import TrainerCallback

from fastppo.run.log import read_jsonl
from fastppo.run.report import summary

TEMPLATE = Path(__file__).parent / "page" / "card.md.jinja"
CURVES = (
    ("reward", "reward"),
    ("eval/reward", "reward on held-out prompts"),
    ("kl", "KL to the reference, nats"),
    ("entropy", "entropy, nats per token"),
    ("response_length", "response length, tokens"),
)
"""(metric, title) of the card's picture; a metric that the run does not have is left out."""


class Publisher(TrainerCallback):
    """Writes the card when all else is written.

    Args:
        say: takes a sentence for the user.
    """

    def __init__(self, config: Any, say: Callable[[str], None]) -> None:
        self.config = config
        self.say = say

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        run_dir = Path(self.config.output_dir)
        try:
            write_card(run_dir, self.config)
        except Exception as error:  # the policy is worth more than its card
            self.say(f"{run_dir}/policy/README.md could not be written: {error}")


def write_card(run_dir: Path, config: Any) -> Path:
    """Writes `policy/README.md` and `policy/curves.png` from the records of a run."""
    records = read_jsonl(run_dir / "metrics.jsonl")
    parts = read_jsonl(run_dir / "parts.jsonl")
    directory = run_dir / "policy"
    draw_curves(records, directory / "curves.png")
    defaults = type(config)().to_dict()
    changed = {name: value for name, value in config.to_dict().items() if value != defaults[name]}
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["fastppo", "ppo", "reinforcement-learning", "rlhf"],
        base_model=_on_the_hub(config.model),
        datasets=_on_the_hub(config.prompts),
    )
    card = ModelCard.from_template(
        data,
        template_str=TEMPLATE.read_text("utf-8"),
        name=run_dir.resolve().name,
        address=directory,
        config=config,
        options=yaml.safe_dump(changed, sort_keys=False, allow_unicode=True),
        summary=summary(records),
        iterations=len(records),
        rewards=_rewards(config),
        last=parts[-1] if parts else {},
        first=parts[0] if parts else {},
    )
    path = directory / "README.md"
    card.save(path)
    return path


def _on_the_hub(name: str) -> str | None:
    """The name if it can be a repository's on the hub: of its form, and no file or directory here.
    A name without an owner and with a dot is taken for a file."""
    if not name or Path(name).exists() or ("/" not in name and "." in name):
        return None
    try:
        validate_repo_id(name)
    except HFValidationError:
        return None
    return name


def _rewards(config: Any) -> list[tuple[str, list[str]]]:
    """(what it is, its names) of each kind of reward that the run has; no names where rewards were
    handed over as functions."""
    kinds = [
        ("environment", [config.environment] if config.environment else []),
        ("ensemble of reward models", [*config.reward_ensemble]),
        ("rewards", [*config.rewards]),
    ]
    paid = [(title, names) for title, names in kinds if names] or [("rewards", [])]
    watched = [*config.monitor_rewards]
    return paid + ([("watched, never trained on", watched)] if watched else [])


def draw_curves(records: list[dict[str, Any]], path: Path) -> None:
    """Draws the metrics that people look at first, side by side."""
    from matplotlib.figure import Figure  # slow to import, and needed once

    shown = [(name, title) for name, title in CURVES if any(name in r for r in records)]
    figure = Figure(figsize=(3.4 * len(shown), 2.6), layout="constrained")
    axes = figure.subplots(1, len(shown), squeeze=False)[0]
    for axis, (name, title) in zip(axes, shown, strict=True):
        points = [
            (record["iteration"], record[name])
            for record in records
            if math.isfinite(record.get(name, math.nan))
        ]
        axis.plot(*zip(*points, strict=True), color="#1f5fa8", linewidth=1.6)
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_xlabel("iteration")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25, linewidth=0.6)
    figure.savefig(path, dpi=110)
