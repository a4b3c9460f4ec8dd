"""Supervised fine-tuning: loss, learning, records, resume."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from rich.console import Console
from stage_runs import ROWS, interrupted, sft, sft_config
from transformers import AutoModelForCausalLM, AutoTokenizer

from fastppo.run.checkpoint import checkpoints
from fastppo.run.log import read_jsonl
from fastppo.run.options import read_yaml
from fastppo.stages.demonstrations import IGNORED, encode_demonstrations
from fastppo.stages.sft import SFTConfig, train_sft

EOS = 1


def _mean_cross_entropy(model: Any, rows: list[dict[str, str]]) -> float:
    """Σ −logprob / Σ tokens of the model's own logits, row by row."""
    model.eval()  # switches dropout off
    total = 0.0
    count = 0
    for example in encode_demonstrations(rows, tiny.tokenizer()).examples:
        ids = torch.tensor([example["input_ids"]])
        with torch.no_grad():
            logprobs = model(input_ids=ids).logits[0].double().log_softmax(-1)
        for i, label in enumerate(example["labels"]):
            if label != IGNORED:
                total -= logprobs[i - 1, label].item()
                count += 1
    return total / count


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_the_loss_equals_that_of_the_models_own_logits(architecture: str, tmp_path: Path) -> None:
    """Before and after one step over all rows in four uneven batches."""
    model = tiny.model(architecture)
    expected = _mean_cross_entropy(model, ROWS)
    config = sft_config(tmp_path, batch_size=2, gradient_accumulation=4)
    sft(config, model, eval_rows=ROWS)
    records = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert records[0]["step"] == 0
    # fp32 through two layers; a mean of means over batches differs by 1e-2 here
    assert records[0]["eval_loss"] == pytest.approx(expected, rel=1e-5)
    assert records[1]["loss"] == pytest.approx(expected, rel=1e-5)


def test_it_learns_its_demonstrations_and_to_stop(tmp_path: Path) -> None:
    rows = [{"prompt": f"w{i} w{j}", "completion": f"w{i} w30"} for i in range(8) for j in range(6)]
    config = sft_config(tmp_path, batch_size=8, epochs=12, eval_share=0.1, learning_rate=1e-2)
    result = sft(config, rows=rows)
    records = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    held_out = [record["eval_loss"] for record in records if "eval_loss" in record]
    assert len(held_out) == 13  # before the first epoch and after each
    assert held_out[0] > 2
    assert held_out[-1] == result["eval_loss"] < 0.5
    assert result["loss"] < 0.5

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run")
    output = model.generate(
        **tokenizer("w3 w5", return_tensors="pt"), max_new_tokens=8, do_sample=False
    )
    assert tokenizer.decode(output[0]) == "w3 w5 w3 w30 <eos>"


def test_the_saved_model_stops_at_the_tokenizers_eos(tmp_path: Path) -> None:
    """The generation config of a base model often has another EOS than its chat template."""
    model = tiny.model()
    model.generation_config.eos_token_id = 5
    sft(sft_config(tmp_path), model)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "run")
    assert saved.generation_config.eos_token_id == [5, EOS]


def test_a_run_writes_its_records(tmp_path: Path) -> None:
    config = sft_config(tmp_path, epochs=2)
    sft(config)
    run = tmp_path / "run"
    assert SFTConfig(**read_yaml(run / "config.yaml", SFTConfig)) == config
    records = read_jsonl(run / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert {"loss", "grad_norm", "learning_rate", "epoch"} <= records[0].keys()
    assert list((run / "tensorboard").glob("events*"))
    with pytest.raises(ValueError, match="output_dir"):
        sft(config)


def test_a_run_resumes_without_an_option_that_had_no_effect(tmp_path: Path) -> None:
    """lora_alpha has no effect without lora_rank; with it, it must stay the same."""
    options: dict[str, Any] = {"epochs": 1, "checkpoint_interval": 1}
    options |= {"model": tiny.saved_model(tmp_path / "base")}
    sft(sft_config(tmp_path, **options, lora_alpha=8.0))
    sft(sft_config(tmp_path, **options, resume=True))
    with pytest.raises(ValueError, match="lora_alpha was 8"):
        sft(sft_config(tmp_path, **options, lora_rank=2, lora_alpha=16.0, resume=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_ends_in_the_same_bits(dtype: str, tmp_path: Path) -> None:
    """After an interruption one step past a checkpoint, that step is repeated."""
    options: dict[str, Any] = {"epochs": 4, "checkpoint_interval": 3, "param_dtype": dtype}
    options |= {"model": tiny.saved_model(tmp_path / "base"), "eval_share": 0.2}
    sft(sft_config(tmp_path, **options, output_dir=str(tmp_path / "whole")))
    with interrupted(after=4):
        sft(sft_config(tmp_path, **options))
    assert checkpoints(tmp_path / "run")[-1].name == "checkpoint-000003"
    printed = io.StringIO()
    sft(sft_config(tmp_path, **options, resume=True), console=Console(file=printed, width=200))
    assert f"resuming from {tmp_path / 'run' / 'checkpoint-000003'}" in printed.getvalue()
    saved = [
        AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict()
        for name in ("whole", "run")
    ]
    torch.testing.assert_close(*saved, rtol=0, atol=0)
    records = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("whole", "run")]
    assert records[0] == records[1]
    losses = [r["step"] for r in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "loss" in r]
    assert losses == list(range(1, 9))


def test_lora_trains_adapters_and_saves_a_plain_model(tmp_path: Path) -> None:
    model = tiny.model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    sft(sft_config(tmp_path, lora_rank=4, epochs=4), model)
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "run").state_dict()
    assert after.keys() == before.keys()
    moved = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert moved
    assert not any("embed" in name or "lm_head" in name for name in moved)


@pytest.mark.slow
def test_bf16_weights_are_saved_in_bf16(tmp_path: Path) -> None:
    directory = tiny.saved_model(tmp_path / "base")
    config = sft_config(tmp_path, model=directory, param_dtype="bfloat16", precision="bf16")
    result = train_sft(config, rows=ROWS, console=Console(file=io.StringIO()))
    assert math.isfinite(result["loss"])
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "run", dtype="auto")
    assert saved.dtype == torch.bfloat16


def test_the_tokenizer_of_another_model_is_rejected(tmp_path: Path) -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens(["w99"])
    with pytest.raises(ValueError, match=r"44 tokens .* 43"):
        sft(sft_config(tmp_path), tokenizer=tokenizer)


def test_an_option_without_an_effect_is_mentioned(tmp_path: Path) -> None:
    shown = io.StringIO()
    console = Console(file=shown, width=200)
    sft(sft_config(tmp_path, lora_alpha=8.0), console=console)
    assert "lora_alpha, which needs lora_rank" in shown.getvalue()
