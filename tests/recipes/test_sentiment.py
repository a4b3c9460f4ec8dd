"""The prompts of the recipe `smollm2-sentiment`."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from fastppo.data.rows import load_rows
from fastppo.recipes import sentiment, smollm2


def test_prompts_are_open_sentences_and_none_is_held_out_and_trained_on() -> None:
    both = [*sentiment.PROMPTS, *sentiment.HELD_OUT]
    assert (len(sentiment.PROMPTS), len(sentiment.HELD_OUT)) == (90, 24)
    assert len(set(both)) == len(both)
    for text in both:
        assert text == text.strip(), text
        assert text[-1] not in ".!?,", text
        assert 3 <= len(text.split()) <= 10, text


def test_what_is_prepared_is_the_model_and_both_files(tmp_path: Path, monkeypatch) -> None:
    unpacked: list[Path] = []
    monkeypatch.setattr(smollm2, "unpack", unpacked.append)
    sentiment.prepare(tmp_path, 0, Console(file=io.StringIO()))
    assert unpacked == [tmp_path / "model"]
    assert [row["prompt"] for row in load_rows(str(tmp_path / "prompts.jsonl"))] == (
        sentiment.PROMPTS
    )
    assert len(load_rows(str(tmp_path / "held_out.jsonl"))) == 24
