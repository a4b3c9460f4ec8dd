"""Weights that go straight from files into shards are those of the ordinary way."""

from __future__ import annotations

import json
from pathlib import Path

import many_ranks
import pytest
import ranks
import tiny
import torch
from safetensors.torch import load_file, save_file

from fastppo.models.from_files import INDEX, Files, empty_causal_lm, is_empty, open_files
from fastppo.models.pretrained import load_causal_lm

ARCHITECTURES = ("llama", "qwen2", "gpt2", "gemma2", "opt")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_one_process_fills_a_model_as_it_would_have_been_loaded(
    architecture: str, tmp_path: Path
) -> None:
    """In bf16 from files in fp32; buffers, the dtype of each and what is tied are the same too."""
    name, dtype = tiny.saved_model(tmp_path, architecture), torch.bfloat16
    files = open_files(name, dtype, "auto")
    assert files is not None
    assert is_empty(files.lm)
    files.fill(files.lm, files.lm, torch.device("cpu"))
    wanted = load_causal_lm(name, dtype=dtype)
    assert not is_empty(files.lm)
    for found, ours in (
        (files.lm.named_parameters(), wanted.named_parameters()),
        (files.lm.named_buffers(), wanted.named_buffers()),
    ):
        for (name, value), (other, original) in zip(found, ours, strict=True):
            assert name == other
            assert value.dtype == original.dtype, name
            assert torch.equal(value, original), name
    ids = torch.tensor([[3, 4, 5]])
    assert torch.equal(files.lm(input_ids=ids).logits, wanted(input_ids=ids).logits)


def test_files_in_several_parts_are_read_by_their_index(tmp_path: Path) -> None:
    model = tiny.model()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len({*json.loads((tmp_path / INDEX).read_text())["weight_map"].values()}) > 1
    files = open_files(str(tmp_path), torch.float32, "auto")
    assert files is not None
    for (name, read), (_, weight) in zip(files.weights(), model.named_parameters(), strict=True):
        assert torch.equal(read, weight), name


def test_files_that_do_not_hold_the_model_are_left_to_transformers(tmp_path: Path) -> None:
    name = tiny.saved_model(tmp_path / "a")
    tiny.without_weight(name, "model.norm.weight")
    assert open_files(name, torch.float32, "auto") is None
    (tmp_path / "a" / "model.safetensors").write_bytes(b"nothing")
    assert open_files(name, torch.float32, "auto") is None
    with pytest.raises(ValueError, match="is a LlamaForSequenceClassification"):
        open_files(tiny.saved_reward_model(tmp_path / "b"), torch.float32, "auto")


def test_buffers_that_the_files_hold_are_left_to_transformers(tmp_path: Path) -> None:
    """Such as a scale of a layer, which may be another than the one that is computed."""
    name = tiny.saved_model(tmp_path)
    files = open_files(name, torch.float32, "auto")
    assert files is not None
    files.lm.base_model.layers[0].register_buffer("layer_scalar", torch.ones(1))
    assert files.fit(), "the files do not hold it"
    path = tmp_path / "model.safetensors"
    tensors = load_file(path) | {"model.layers.0.layer_scalar": torch.tensor([0.25])}
    save_file(tensors, path, metadata={"format": "pt"})
    again = Files(tmp_path, files.lm)
    assert not again.fit()


def test_an_empty_model_stops_where_the_saved_one_does(tmp_path: Path) -> None:
    model = tiny.model()
    model.generation_config.eos_token_id = [1, 5]
    model.save_pretrained(tmp_path)
    empty = empty_causal_lm(str(tmp_path), torch.float32, "auto")
    assert empty.generation_config.eos_token_id == [1, 5]


def test_two_processes_read_their_shards_and_train_what_they_would_have_trained(
    tmp_path: Path,
) -> None:
    """The same bits after an iteration, and the same fingerprint of the model; neither process has
    the whole model in memory before a rollout gathers it."""
    architectures = ("llama", "gpt2")  # with a head of its own, and tied
    for architecture in architectures:
        tiny.saved_model(tmp_path / architecture, architecture)
    found = ranks.run(2, many_ranks.load_both_ways, tmp_path, str(tmp_path), architectures)
    for architecture, (straight, whole) in found.items():
        assert straight["fingerprints"] == whole["fingerprints"]
        assert straight["marked"] == whole["marked"], architecture
        for name, weight in straight["weights"].items():
            assert torch.equal(weight, whole["weights"][name]), (architecture, name)
        total = sum(weight.nbytes for weight in straight["weights"].values())
        assert total / 2 <= straight["read"] < 0.6 * total
        assert whole["read"] == 0
