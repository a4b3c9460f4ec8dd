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
        "", "Required. Prompts: .jsonl, .parquet, a save_to_disk directory or a hub name"
    )
    prompt_column: str = option("prompt", "Column of the prompt: a string or chat messages")
    chat_template_kwargs: Mapping[str, Any] | None = option(
        None,
        "Variables of the chat template, a YAML mapping such as '{enable_thinking: false}'; the "
        "saved tokenizer has them as defaults",
    )
    split: str = option("train", "Split of a datasets directory or hub dataset")


@dataclass(kw_only=True, frozen=True)
class CurriculumOptions(Options):
    """Curriculum."""

    solved_reward: float | None = option(
        None, "Skip a prompt once its last 8 responses all reached this reward"
    )


@dataclass(kw_only=True, frozen=True)
class PretrainingOptions(Options):
    """Pretraining text (PPO-ptx)."""

    ptx_coef: float = option(
        0.0, "γ: weight of the language-model loss on pretraining text", minimum=0
    )
    ptx_data: str = option(
        "", "Pretraining text: rows with a `text` column, given like prompts", needs="ptx_coef"
    )
    ptx_batch_size: int = option(
        8, "Blocks of text per optimizer step, sequences", minimum=1, needs="ptx_data"
    )


@dataclass(kw_only=True, frozen=True)
class EvaluationOptions(Options):
    """Evaluation."""

    eval_prompts: str = option("", "Held-out prompts, with the same columns as prompts")
    eval_interval: int = option(
        10, "Iterations between evaluations", minimum=1, needs="eval_prompts"
    )
