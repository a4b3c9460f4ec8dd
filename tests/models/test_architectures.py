"""Every causal LM of transformers, as a tiny model, trains as docs/models.md says."""

from __future__ import annotations

from pathlib import Path

import architectures
import models_page
import pytest
import tiny
import torch
import transformers

from fastppo.models.policy import ActorCritic, LanguageModel
from fastppo.models.trunk import trunk_of

QUICK = (
    "falcon_h1",
    "gemma3_text",
    "gpt2",
    "gpt_oss",
    "llama4_text",
    "mamba",
    "nemotron_h",
    "opt",
    "qwen3_5_text",
    "recurrent_gemma",
)
"""Architectures that differ in attention, positions, experts, recurrent states or their trunk."""

PAGE = models_page.PAGE.read_text("utf-8")
ROWS = architectures.page_rows(PAGE)


@pytest.mark.filterwarnings("default:::transformers")
@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in architectures.known_types()
        if name in ROWS
    ],
)
def test_a_tiny_model_trains_as_the_page_says(model_type: str, tmp_path: Path) -> None:
    found = architectures.examine(model_type, tmp_path)
    if architectures.version_of(PAGE) == transformers.__version__:
        assert found[:3] == ROWS[model_type][:3], found
    else:  # another release may need the other engine
        assert not (ROWS[model_type].engine and found.failure), found.failure


def test_the_page_has_the_architectures_of_its_transformers_and_their_counts() -> None:
    assert models_page.counts_of(ROWS, architectures.version_of(PAGE)) in PAGE
    if architectures.version_of(PAGE) == transformers.__version__:
        assert [*ROWS] == architectures.known_types()
        assert models_page.page_of(PAGE, ROWS) == PAGE


def test_a_model_without_a_trunk_is_named() -> None:
    causal_lm = tiny.model()
    causal_lm.base_model_prefix = "absent"
    causal_lm.model = torch.nn.Identity()
    with pytest.raises(ValueError, match=r"LlamaForCausalLM .*trunk"):
        trunk_of(causal_lm)


def test_a_model_without_a_head_is_named(monkeypatch) -> None:
    causal_lm = tiny.model()
    monkeypatch.setattr(causal_lm, "get_output_embeddings", lambda: None)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM .*get_output_embeddings"):
        ActorCritic(causal_lm)


def test_a_trunk_of_another_kind_is_named(monkeypatch) -> None:
    """It raises an AttributeError: its output has no last_hidden_state."""
    policy = LanguageModel(tiny.model())
    monkeypatch.setattr(trunk_of(policy.causal_lm), "forward", lambda **keywords: object())
    with pytest.raises(ValueError, match=r"LlamaForCausalLM .*AttributeError"):
        policy.check_heads()
