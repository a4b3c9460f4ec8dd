"""The environment of the recipe `calculator`. Copied into its folder, to be changed."""

import re

CALL = re.compile(r"\[(\d{1,6})\*(\d{1,6})\]")


class Calculator:
    """Answers a call such as `[34*57]` once; what comes next, or in its place, is the answer."""

    def reset(self, prompt: str, answer: str) -> None:
        """The prompt is read as it is."""
        self.answer = answer
        self.called = False

    def step(self, text: str) -> tuple[str, float, bool]:
        """(what the tool says, 1 for the right answer, whether the episode is over)."""
        call = CALL.fullmatch(text.strip())
        if call and not self.called:
            self.called = True
            return f"={int(call[1]) * int(call[2])};", 0.0, False
        return "", float(text.strip() == self.answer), True
