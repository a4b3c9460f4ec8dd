"""Detect stop strings in responses while they are decoded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

MARGIN = 8
"""Number of extra tokens to decode, because some tokenizers drop a space before the first token,
and a character may consist of several tokens."""


class StopStrings:
    """Find the responses that a stop string ends.

    A token is at least one byte of text, so a string of n bytes is within the last n tokens, and
    each call decodes only these.

    Args:
        tokenizer: the policy's tokenizer; may be None if there are no strings.
        strings: the non-empty strings that end a response.

    Raises:
        ValueError: there are strings and no tokenizer, or a string contains a special token.
    """

    def __init__(self, tokenizer: Any, strings: Sequence[str]) -> None:
        if strings and tokenizer is None:
            raise ValueError("stop_strings need a tokenizer to decode with; the engine has none")
        special = [token for token in getattr(tokenizer, "all_special_tokens", ()) if token]
        for string in strings:
            contained = next((token for token in special if token in string), None)
            if contained is not None:
                raise ValueError(
                    f"stop_strings: {string!r} contains the special token {contained!r}, and "
                    "responses are decoded without special tokens; put its id "
                    f"{tokenizer.convert_tokens_to_ids(contained)} into stop_token_ids"
                )
        self.tokenizer = tokenizer
        self.strings = tuple(strings)
        self.window = max((len(string.encode()) for string in strings), default=0) + MARGIN

    def ended(self, responses: Sequence[Sequence[int]]) -> list[bool]:
        """Return [B], whether the last token of each response completed a stop string."""
        tails = [list(response[-self.window :]) for response in responses]
        texts = self.tokenizer.batch_decode(tails, skip_special_tokens=True)
        return [any(string in text for string in self.strings) for text in texts]
