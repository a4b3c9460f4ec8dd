"""Options of prompts, curriculum, pretraining text and evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastppo.run.options import Options, option


@dataclass(kw_only=True, frozen=True)
class PromptOptions(Options):
    """Prompts."""

    prompts: str = option(
        "", "Required. Prompts: a .jsonl or .parquet file, a save_to_disk directory or a hub name"
    )
    prompt_column: str = option("prompt", "Column with the prompt, a string or chat messages")
    chat_template_kwargs: Mapping[str, Any] | None = option(
        None,
        "Variables of the chat template, as a YAML mapping such as '{enable_thinking: false}'; "
        "they become defaults of the saved tokenizer",
    )
    split: str = option("train", "Split to use of a datasets directory or hub dataset")


@dataclass(kw_only=True, frozen=True)
class CurriculumOptions(Options):
    """Curriculum."""

    solved_reward: float | None = option(
        None, "Skip a prompt when its last 8 responses have all reached this reward"
    )


@dataclass(kw_only=True, frozen=True)
class PretrainingOptions(Options):
    """Pretraining text (PPO-ptx)."""

    ptx_coef: float = option(
        0.0, "Weight γ of the language-modeling loss on pretraining text", minimum=0
    )
    ptx_data: str = option(
        "", "Pretraining text: rows with a `text` column, in the form of prompts", needs="ptx_coef"
    )
    ptx_batch_size: int = option(
        8, "Number of blocks of text per optimizer step", minimum=1, needs="ptx_data"
    )


@dataclass(kw_only=True, frozen=True)
class EvaluationOptions(Options):
    """Evaluation."""

    eval_prompts: str = option("", "Held-out prompts, with the same columns as prompts")
    eval_interval: int = option(
        10, "Number of iterations between evaluations", minimum=1, needs="eval_prompts"
    )
