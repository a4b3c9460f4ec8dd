"""Reward of the recipe `arithmetic`, copied into its folder for you to change."""


def correct(prompts: list[str], completions: list[str], answer: list[str]) -> list[float]:
    """Return 1 for the bare answer, 0 otherwise."""
    pairs = zip(completions, answer, strict=True)
    return [float(text.strip() == right) for text, right in pairs]
