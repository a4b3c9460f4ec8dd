"""Reward of the recipes with arithmetic in words, copied into their folders for you to change."""

import re

NUMBER = re.compile(r"-?\d+")


def correct(prompts: list, completions: list[str], answer: list[str]) -> list[float]:
    """Return 1 if the last number of the response is the answer, 0 otherwise."""
    return [float(_last(text) == right) for text, right in zip(completions, answer, strict=True)]


def _last(text: str) -> str:
    numbers = NUMBER.findall(text.replace(",", ""))
    return numbers[-1] if numbers else ""
