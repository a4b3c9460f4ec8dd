"""Reward of the recipe `circles`, copied into its folder for you to change."""


def right_count(prompts: list[str], completions: list[str], answer: list[str]) -> list[float]:
    """Return 1 for the right count, 0 otherwise."""
    pairs = zip(completions, answer, strict=True)
    return [float(text.strip() == right) for text, right in pairs]
