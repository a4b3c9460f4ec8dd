"""Options of the prompts: where they are, which of them an iteration takes, and held-out
evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fastppo.run.options import Options, option


@dataclass(kw_only=True, frozen=True)
class PromptOptions(Options):
    """Prompts."""

    prompts: str = option(
        "", "Required. Prompts: .jsonl, .parquet, a save_to_disk directory or a hub name"
    )
    prompt_column: str = option("prompt", "Column of the prompt: a string or chat messages")
    split: str = option("train", "Split of a datasets directory or hub dataset")


@dataclass(kw_only=True, frozen=True)
class CurriculumOptions(Options):
    """Curriculum."""

    prompt_order: str = option(
        "", "Column of numbers, or file.py:function, by which an epoch is sorted, least first"
    )
    prompt_weights: str = option(
        "", "Column of numbers, or file.py:function, in proportion to which prompts are drawn"
    )
    solved_reward: float | None = option(
        None,
        "Reward that solves a prompt: once its last 8 responses reached it, it is not drawn again",
    )


@dataclass(kw_only=True, frozen=True)
class EvaluationOptions(Options):
    """Evaluation."""

    eval_prompts: str = option(
        "", "Prompts that are answered and not learned from, with the columns of prompts"
    )
    eval_interval: int = option(10, "Iterations between evaluations", minimum=1)
    eval_sampling: Literal["sampled", "greedy", "both"] = option(
        "sampled",
        "Draw responses as in training, take the likeliest tokens (eval/greedy/), or both",
    )
