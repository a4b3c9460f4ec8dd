"""Stop strings: where in a response the text is complete that ends it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

MARGIN = 8
"""Tokens decoded beyond those that a stop string can have: some tokenizers drop a space before the
first token that they decode, and a character may be several tokens."""


class StopStrings:
    """Says which of several responses end with a stop string.

    A token stands for at least one byte of text, so a string of n bytes is in the last n tokens:
    each call decodes only those.

    Args:
        tokenizer: of the policy; may be None if there are no strings.
        strings: not empty, any of them ends a response.

    Raises:
        ValueError: strings without a tokenizer, or one with a special token in it.
    """

    def __init__(self, tokenizer: Any, strings: Sequence[str]) -> None:
        if strings and tokenizer is None:
            raise ValueError("stop_strings need a tokenizer to decode with; the engine has none")
        special = [token for token in getattr(tokenizer, "all_special_tokens", ()) if token]
        for string in strings:
            contained = next((token for token in special if token in string), None)
            if contained is not None:
                raise ValueError(
                    f"stop_strings: {string!r} holds the special token {contained!r}, and "
                    "responses are read without special tokens; put its id into stop_token_ids "
                    f"({tokenizer.convert_tokens_to_ids(contained)})"
                )
        self.tokenizer = tokenizer
        self.strings = tuple(strings)
        self.window = max((len(string.encode()) for string in strings), default=0) + MARGIN

    def ended(self, responses: Sequence[Sequence[int]]) -> list[bool]:
        """[B] whether the text of each response, whose tokens but the last were looked at before,
        now has a stop string."""
        tails = [list(response[-self.window :]) for response in responses]
        texts = self.tokenizer.batch_decode(tails, skip_special_tokens=True)
        return [any(string in text for string in self.strings) for text in texts]
