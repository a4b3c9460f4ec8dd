"""Small models over digits and signs."""

from __future__ import annotations

import io
from pathlib import Path

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from fastppo.recipes.characters import CHARACTERS, make_tokenizer, model_config, train_from_scratch


def test_the_tokenizer_has_one_token_per_character() -> None:
    tokenizer = make_tokenizer()
    ids = tokenizer("37+45=")["input_ids"]
    assert len(ids) == 6
    assert tokenizer.decode(ids) == "37+45="
    assert tokenizer.decode(tokenizer(CHARACTERS)["input_ids"]) == CHARACTERS
    assert tokenizer.unk_token_id not in tokenizer(CHARACTERS)["input_ids"]
    assert tokenizer("x")["input_ids"] == [tokenizer.unk_token_id]
    assert model_config().vocab_size == len(tokenizer)


def test_a_model_from_scratch_learns_its_demonstrations(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1=", "completion": "2"}, {"prompt": "2+2=", "completion": "4"}] * 8
    train_from_scratch(tmp_path / "m", rows, 0, Console(file=io.StringIO()), batch_size=4)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "m")
    for row in rows[:2]:
        ids = torch.tensor([tokenizer(row["prompt"])["input_ids"]])
        response = model.generate(ids, do_sample=False, max_new_tokens=4)[0, ids.shape[1] :]
        assert response.tolist() == [
            *tokenizer(row["completion"])["input_ids"],
            tokenizer.eos_token_id,
        ]
