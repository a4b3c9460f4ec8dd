"""Loading: what is absent, incomplete or of another kind is refused, under its option's name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    Qwen2ForTokenClassification,
    T5Config,
)

from fastppo import cli
from fastppo.model import LanguageModel
from fastppo.pretrained import attention_implementation, load_causal_lm, load_tokenizer
from fastppo.reward_model import load_classifier
from fastppo.rewards import load_reward
from fastppo.value_function import critic_of_reward_model


def _without(directory: str, name: str) -> str:
    """The checkpoint with one of its tensors gone."""
    path = Path(directory) / "model.safetensors"
    tensors = load_file(path)
    del tensors[name]
    save_file(tensors, path, metadata={"format": "pt"})
    return directory


def _reward_model(directory: Path) -> str:
    config = LlamaConfig(**tiny._decoder(num_labels=1))
    AutoModelForSequenceClassification.from_config(config).save_pretrained(directory)
    tiny.tokenizer().save_pretrained(directory)
    return str(directory)


def test_what_is_no_causal_lm_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"no config\.json"):
        load_causal_lm(str(tmp_path))
    with pytest.raises(ValueError, match="there is no such directory"):
        load_causal_lm(str(tmp_path / "absent"))
    with pytest.raises(ValueError, match="is a LlamaForSequenceClassification; want a causal LM"):
        load_causal_lm(_reward_model(tmp_path / "reward"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file; want a directory"):
        load_causal_lm(str(tmp_path / "file"))
    T5Config(d_model=8, num_layers=1, num_heads=2, d_ff=8, vocab_size=10).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="encoder–decoder"):
        load_causal_lm(str(tmp_path))


def test_weights_that_would_be_random_are_refused(tmp_path) -> None:
    model = _without(tiny.saved_model(tmp_path / "sft"), "lm_head.weight")
    with pytest.raises(ValueError, match=r"lacks weights of LlamaForCausalLM: lm_head\.weight"):
        load_causal_lm(model)
    headless = _without(_reward_model(tmp_path / "reward"), "score.weight")
    says = r"lacks weights of LlamaForSequenceClassification: score\.weight"
    with pytest.raises(ValueError, match=f"reward .* {says}"):
        load_reward(headless)
    with pytest.raises(ValueError, match=f"critic_model .* {says}"):
        critic_of_reward_model(headless, dtype=torch.float32, device="cpu")


def test_a_reward_model_may_lack_its_head_and_nothing_else(tmp_path) -> None:
    sft = tiny.saved_model(tmp_path / "sft")
    load_classifier(sft)
    hole = "model.layers.0.self_attn.q_proj.weight"
    with pytest.raises(ValueError, match="lacks weights of LlamaForSequenceClassification: model"):
        load_classifier(_without(sft, hole))
    reward = _without(_reward_model(tmp_path / "reward"), "score.weight")
    with pytest.raises(ValueError, match=r"lacks weights of .*: score\.weight"):
        load_classifier(reward)


def test_an_encoder_of_a_masked_lm_may_lack_its_pooler(tmp_path) -> None:
    config = BertConfig(
        vocab_size=43, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=8,
    )  # fmt: skip
    BertForMaskedLM(config).save_pretrained(tmp_path)
    assert load_classifier(str(tmp_path)).config.num_labels == 1
    with pytest.raises(ValueError, match="lacks weights of BertForSequenceClassification"):
        load_classifier(_without(str(tmp_path), "bert.embeddings.word_embeddings.weight"))


def test_files_that_cannot_be_read_are_named(tmp_path) -> None:
    model = Path(tiny.saved_model(tmp_path / "sft"))
    whole = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(whole[:1000])
    with pytest.raises(ValueError, match=f"model {model}: the weights cannot be read"):
        load_causal_lm(str(model))
    (model / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=f"model {model}: the weights cannot be read"):
        load_causal_lm(str(model))
    (model / "model.safetensors").write_bytes(whole)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "intermediate_size": 50}))
    with pytest.raises(ValueError, match=r"disagree; the files have .*down_proj.* \[32, 48\]"):
        load_causal_lm(str(model))
    (model / "config.json").write_text("{")
    with pytest.raises(ValueError, match=f"model {model}: .*not a valid JSON"):
        load_causal_lm(str(model))


def test_an_adapter_is_no_model(tmp_path) -> None:
    model = tiny.saved_model(tmp_path / "sft")
    (tmp_path / "sft" / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="holds a PEFT adapter; merge it first"):
        load_causal_lm(model)


def test_a_token_classifier_with_a_tied_trunk_is_no_policy(tmp_path) -> None:
    Qwen2ForTokenClassification(tiny.CONFIGS["qwen2"]()).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is a Qwen2ForTokenClassification; want a causal LM"):
        load_causal_lm(str(tmp_path))


def test_a_causal_lm_is_no_reward_model(tmp_path) -> None:
    with pytest.raises(ValueError, match="is a LlamaForCausalLM with 2 labels; want a sequence"):
        load_reward(tiny.saved_model(tmp_path / "sft"))


def test_a_tied_head_is_not_missing(tmp_path) -> None:
    tied = load_causal_lm(tiny.saved_model(tmp_path, "gpt2"))
    LanguageModel(tied).check_heads()


@pytest.mark.parametrize(
    ("option", "others"),
    [
        ("model", {}),
        ("reference_model", {}),
        ("critic_model", {"value_model": "critic"}),
        ("rewards", {}),
    ],
)
def test_a_wrong_path_is_named_with_its_option(option, others, tmp_path, capsys) -> None:
    options = tiny.options(tmp_path, model=tiny.saved_model(tmp_path / "sft"), **others)
    (tmp_path / "p.jsonl").write_text('{"prompt": "w1"}\n')
    options |= {"prompts": tmp_path / "p.jsonl", "rewards": "tiny:count_w7"}
    options |= {option: tmp_path / "no" / "where"}
    flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    assert cli.main(["train", *flags]) == 1
    says = f"{option.removesuffix('s')} {tmp_path / 'no' / 'where'}: there is no such directory"
    assert says in capsys.readouterr().err


def test_a_missing_tokenizer_is_named(tmp_path) -> None:
    tiny.model().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"model {tmp_path}: no tokenizer"):
        load_tokenizer(str(tmp_path))


def test_attention_is_flash_where_it_can_run_and_transformers_choice_elsewhere(monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert attention_implementation("auto", torch.bfloat16) == "flash_attention_2"
    assert attention_implementation("auto", torch.float32) is None
    with pytest.raises(ValueError, match="needs param_dtype=bfloat16"):
        attention_implementation("flash_attention_2", torch.float32)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert attention_implementation("auto", torch.bfloat16) is None
    assert attention_implementation("eager", torch.float32) == "eager"
