"""Checkpoints written by several processes can be read by any number of processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import many_ranks
import pytest
import ranks
import torch
from torch.distributed.checkpoint import CheckpointException
from transformers import AutoModelForCausalLM

from fastppo.run import shards

WIDE = {"model_dtype": "float64"}


def _train(count: int, folder: Path, **variant: Any) -> dict[str, Any]:
    return ranks.run(count, many_ranks.train, folder, str(folder), variant)


@pytest.mark.slow
def test_two_processes_then_one_then_four_end_where_one_ends_that_never_stopped(
    tmp_path: Path,
) -> None:
    """Any number of ranks reads a checkpoint, whatever number wrote it."""
    uninterrupted = _train(1, tmp_path / "whole", **WIDE, iterations=4, reference_refresh=2)
    for count, iterations in ((2, 2), (1, 3), (4, 4)):
        parts = _train(
            count,
            tmp_path / "parts",
            **WIDE,
            reference_refresh=2,
            iterations=iterations,
            checkpoint_interval=1,
            resume=True,
        )
    off = many_ranks.difference(uninterrupted, parts)
    assert max(off.values()) <= 1e-12, off


@pytest.mark.slow
def test_weights_in_bf16_keep_their_fp32_masters_from_two_processes_to_one(tmp_path: Path) -> None:
    narrow = {"model_dtype": "bfloat16", "param_dtype": "bfloat16"}
    two = _train(2, tmp_path, **narrow)
    one = _train(1, tmp_path, **narrow, resume=True)
    for name, weight in two["weights"].items():
        dtype = torch.float64 if name == "value_function.head" else torch.float32
        assert weight.dtype == one["weights"][name].dtype == dtype
        assert torch.equal(weight, one["weights"][name]), name


def test_the_policy_of_two_processes_is_a_model_that_loads(tmp_path: Path) -> None:
    trained = _train(2, tmp_path, iterations=1, architecture="qwen2")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "policy")
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, trained["weights"][f"causal_lm.{name}"]), name


def test_a_disk_that_is_full_is_an_error_of_the_disk(tmp_path: Path, monkeypatch) -> None:
    def full(*args: object, **options: object) -> None:
        raise CheckpointException("", {1: (OSError(28, "No space left"), None)})  # type: ignore

    monkeypatch.setattr(shards.dcp, "save", full)
    with pytest.raises(OSError, match=r"rank 1: OSError: .*No space left"):
        shards.write({}, tmp_path)


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_no_file_of_shards_is_a_pickle(tmp_path: Path) -> None:
    shards.write({"model.w": torch.arange(6.0)}, tmp_path)
    files = list((tmp_path / shards.FOLDER).iterdir())
    assert {file.suffix for file in files} == {".safetensors"}
    read = shards.read_weights(tmp_path, {"w": torch.zeros(6)})
    assert torch.equal(read["w"], torch.arange(6.0))
