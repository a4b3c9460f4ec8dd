"""The reward of the recipe `arithmetic`: the verifier. Copied into its folder, to be changed."""


def correct(prompts: list[str], completions: list[str], answer: list[str]) -> list[float]:
    """1 for the answer and nothing else, 0 otherwise."""
    pairs = zip(completions, answer, strict=True)
    return [float(text.strip() == right) for text, right in pairs]
