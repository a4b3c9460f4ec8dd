"""Reward of the recipe `smollm2-tools`, copied into its folder for you to change."""


def right(prompts: list, completions: list[str], answer: list[str]) -> list[float]:
    """Return 1 if the policy's last turn is the product, 0 otherwise."""
    last_turns = [text.split("assistant\n")[-1].strip() for text in completions]
    return [float(turn == wanted) for turn, wanted in zip(last_turns, answer, strict=True)]
