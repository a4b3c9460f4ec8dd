"""Loading: missing, incomplete and unsuitable models are refused with the option's name."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
import tiny_vision
import torch
from transformers import AutoModelForSequenceClassification, Qwen2ForTokenClassification, T5Config

from fastppo.models.pretrained import (
    attention_implementation,
    check_vocabulary,
    load_causal_lm,
    load_tokenizer,
    load_whole,
    pad_token_id,
    stop_token_ids,
)


def _absent(path: Path) -> str:
    return str(path / "absent")


def _encoder_decoder(path: Path) -> str:
    T5Config(d_model=8, num_layers=1, num_heads=2, d_ff=8, vocab_size=10).save_pretrained(path)
    return str(path)


def _token_classifier(path: Path) -> str:
    """Its embeddings are tied, so a causal LM would lack no weight."""
    Qwen2ForTokenClassification(tiny.CONFIGS["qwen2"]()).save_pretrained(path)
    return str(path)


def _adapter(path: Path) -> str:
    name = tiny.saved_model(path)
    (path / "adapter_config.json").write_text("{}")
    return name


def _run(path: Path) -> str:
    tiny.saved_model(path / "policy")
    return str(path)


@pytest.mark.parametrize(
    ("save", "named"),
    [
        (_run, "/policy"),
        (str, r"config\.json"),
        (_absent, "directory"),
        (tiny.saved_reward_model, "LlamaForSequenceClassification"),
        (_token_classifier, "Qwen2ForTokenClassification"),
        (_encoder_decoder, "encoder–decoder"),
        (_adapter, "PEFT"),
    ],
)
def test_other_models_than_causal_lms_are_refused(save, named: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=named):
        load_causal_lm(save(tmp_path))


def test_missing_weights_are_refused(tmp_path) -> None:
    model = tiny.without_weight(tiny.saved_model(tmp_path / "sft"), "lm_head.weight")
    with pytest.raises(ValueError, match=r"lm_head\.weight"):
        load_causal_lm(model)


def test_allowed_missing_weights_are_returned(tmp_path) -> None:
    name = tiny.saved_model(tmp_path)
    kind = AutoModelForSequenceClassification
    model, lacking = load_whole(
        kind, name, "model", lambda model, weight: weight == "score.weight", num_labels=1
    )
    assert (type(model).__name__, lacking) == ("LlamaForSequenceClassification", ["score.weight"])
    with pytest.raises(ValueError, match=rf"{name} .*score\.weight"):
        load_whole(kind, name, "reward", num_labels=1)


def test_missing_weights_and_weights_of_another_size_are_named(tmp_path) -> None:
    model = Path(tiny.saved_model(tmp_path / "sft"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "intermediate_size": 50}))
    with pytest.raises(ValueError, match=r"down_proj.* \[32, 48\]"):
        load_causal_lm(str(model))
    (model / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=f"model {model}"):
        load_causal_lm(str(model))


def test_the_chat_template_may_be_the_processors(tmp_path: Path) -> None:
    """Older vision-language checkpoints have it in a file of their processor."""
    tiny_vision.model("smolvlm").save_pretrained(tmp_path)
    tiny_vision.tokenizer().save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path)).chat_template is None
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "w1"}))
    assert load_tokenizer(str(tmp_path)).chat_template == "w1"
    (tmp_path / "chat_template.json").write_text("{")
    with pytest.raises(ValueError, match=f"model {tmp_path}: .*chat template cannot be loaded"):
        load_tokenizer(str(tmp_path))


def test_a_missing_tokenizer_is_named(tmp_path) -> None:
    tiny.model().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"model {tmp_path} .*tokenizer"):
        load_tokenizer(str(tmp_path))


def test_flash_attention_is_chosen_where_it_can_run(monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert attention_implementation("auto", torch.bfloat16) == "flash_attention_2"
    assert attention_implementation("auto", torch.float32) is None
    with pytest.raises(ValueError, match="param_dtype"):
        attention_implementation("flash_attention_2", torch.float32)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert attention_implementation("auto", torch.bfloat16) is None
    assert attention_implementation("eager", torch.float32) == "eager"


# ------------------------------------------------------------------------------------------- tokens


def test_any_token_can_pad() -> None:
    model, tokenizer = tiny.model(), tiny.tokenizer(pad_is_eos=True)
    assert pad_token_id(tokenizer, model) == 1
    tokenizer.pad_token = None
    assert pad_token_id(tokenizer, model) == 0  # of the model's config
    model.config.pad_token_id = -1  # as some configs have it
    assert pad_token_id(tokenizer, model) == tokenizer.eos_token_id == 1
    tokenizer.eos_token = None
    assert pad_token_id(tokenizer, model) == 0
    parts = SimpleNamespace(get_text_config=lambda: SimpleNamespace(pad_token_id=7))
    assert pad_token_id(tokenizer, SimpleNamespace(config=parts)) == 7


def test_stop_tokens_are_those_of_the_option_or_of_model_and_tokenizer() -> None:
    model, tokenizer = tiny.model(), tiny.tokenizer()
    assert stop_token_ids([7, 8], tokenizer, model) == (7, 8)
    assert stop_token_ids([], tokenizer, model) == ()
    model.generation_config.eos_token_id = 5
    assert stop_token_ids(None, tokenizer, model) == (5, 1)
    model.generation_config.eos_token_id = [1, 5]
    assert stop_token_ids(None, tokenizer, model) == (1, 5)
    model.generation_config.eos_token_id = None
    tokenizer.eos_token = None
    assert stop_token_ids(None, tokenizer, model) == ()


def test_a_tokenizer_larger_than_the_vocabulary_is_refused() -> None:
    check_vocabulary(tiny.tokenizer(), 43)
    check_vocabulary(tiny.tokenizer(), 64)  # a vocabulary is often padded
    with pytest.raises(ValueError, match=r"43 .* 42"):
        check_vocabulary(tiny.tokenizer(), 42)
