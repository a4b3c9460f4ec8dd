"""Prompts from reasoning-gym, with its verifiers as the reward.

prompts: reasoning-gym:chain_sum?size=1000&seed=0
rewards: [reasoning-gym:score_answer]
"""

from __future__ import annotations

from typing import Any

from fastppo.data.datasets import Rows
from fastppo.plugins.adapters import Adapter, Address


def load_prompts(target: str) -> Rows:
    """Create a procedural dataset, with the columns `prompt`, `answer` and `metadata`.

    The verifier judges other answers by the metadata.
    """
    import reasoning_gym

    address = Address.of(target)
    dataset = reasoning_gym.create_dataset(address.name, **address.options)
    return [
        {"prompt": entry["question"], "answer": entry["answer"], "metadata": entry["metadata"]}
        for entry in dataset
    ]


def score_answer(
    prompts: list[str],
    completions: list[str],
    answer: list[str],
    metadata: list[dict[str, Any]],
    **columns: list[Any],
) -> list[float]:
    """Return the task's `score_answer` of each completion, in [0, 1].

    The answer is the text between <answer> and </answer>, or the whole text without such tags.
    """
    import reasoning_gym
    from reasoning_gym.utils import extract_answer

    scores = []
    for prompt, text, right, task in zip(prompts, completions, answer, metadata, strict=True):
        score = reasoning_gym.get_score_answer_fn(task["source_dataset"])
        given = extract_answer(text) or text.strip()
        entry = {"question": prompt, "answer": right, "metadata": task}
        scores.append(float(score(given, entry)))
    return scores


ADAPTER = Adapter(
    requirement="reasoning-gym", prompts=load_prompts, rewards={"score_answer": score_answer}
)
