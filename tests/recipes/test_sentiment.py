"""The prompts of the recipe `smollm2-sentiment`."""

from __future__ import annotations

from fastppo.recipes import sentiment


def test_prompts_are_open_sentences_and_none_is_held_out_and_trained_on() -> None:
    both = [*sentiment.PROMPTS, *sentiment.HELD_OUT]
    assert (len(sentiment.PROMPTS), len(sentiment.HELD_OUT)) == (90, 24)
    assert len(set(both)) == len(both)
    for text in both:
        assert text == text.strip(), text
        assert text[-1] not in ".!?,", text
        assert 3 <= len(text.split()) <= 10, text
