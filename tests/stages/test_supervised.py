"""Shared parts of the stages: split by prompt, trainer, checkpoints, records."""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from stage_runs import sft, sft_config

from fastppo.data.datasets import DataError
from fastppo.run import manifest
from fastppo.run.log import read_jsonl
from fastppo.stages.callbacks import Records
from fastppo.stages.data import row_limit, split_by_prompt
from fastppo.stages.sft import SFTConfig

ON_CPU = SimpleNamespace(device=torch.device("cpu"))
"""The arguments of Trainer read by `Records`."""


def test_training_and_held_out_rows_share_no_prompt() -> None:
    rows = [{"prompt": f"w{i % 10}", "n": i} for i in range(40)]
    split = split_by_prompt(rows, [row["prompt"] for row in rows], 0.2, seed=0)
    assert len(split.held_out) == 8  # two prompts of four rows
    assert len(split.train) == 32
    assert not {r["prompt"] for r in split.train} & {r["prompt"] for r in split.held_out}
    assert split == split_by_prompt(rows, [row["prompt"] for row in rows], 0.2, seed=0)
    assert split != split_by_prompt(rows, [row["prompt"] for row in rows], 0.2, seed=1)
    with pytest.raises(DataError, match="2 rows of 1 prompts cannot be split"):
        split_by_prompt([1, 2], ["w1", "w1"], 0.1, seed=0)


def test_a_share_of_0_holds_nothing_out_and_a_small_one_one_prompt() -> None:
    assert split_by_prompt([1, 2], ["w1", "w2"], 0, seed=0) == ([1, 2], [])
    assert len(split_by_prompt(range(50), range(50), 0.001, seed=0).held_out) == 1


def test_a_frequent_prompt_stays_in_training() -> None:
    """Unless every prompt has more rows than are wanted: then the rarest is held out."""
    prompts = ["often"] * 180 + [f"w{i}" for i in range(20)]
    for seed in range(12):
        assert len(split_by_prompt(prompts, prompts, 0.05, seed).held_out) == 10
    prompts = ["a"] * 60 + ["b"] * 40
    assert set(split_by_prompt(prompts, prompts, 0.05, seed=0).held_out) == {"b"}
    prompts = ["a"] * 100 + ["b"] * 100 + ["c"] * 100 + ["d"]
    assert len(split_by_prompt(prompts, prompts, 0.2, seed=0).held_out) == 101


def test_the_length_of_a_row_is_limited_by_the_context() -> None:
    model = tiny.model()
    assert row_limit(model, None) == tiny.CONTEXT
    assert row_limit(model, 8) == 8
    with pytest.raises(ValueError, match="max_length=65 exceeds the model's context of 64"):
        row_limit(model, 65)


# ------------------------------------------------------------------------------------- the training


# ---------------------------------------------------------------------------------- the checkpoints


class _Touch:
    """A pickle of this creates a file when it is executed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_a_pickle_in_a_checkpoint_is_not_executed(name: str, tmp_path: Path) -> None:
    sft(sft_config(tmp_path, checkpoint_interval=1))
    checkpoint = tmp_path / "run" / "checkpoint-2"
    owner = manifest.read(checkpoint)
    (checkpoint / name).write_bytes(pickle.dumps(_Touch(tmp_path / "executed"), protocol=2))
    manifest.write(checkpoint, owner)
    with pytest.raises(ValueError, match="holds objects other than tensors"):
        sft(sft_config(tmp_path, checkpoint_interval=1, epochs=2, resume=True))
    assert not (tmp_path / "executed").exists()


# -------------------------------------------------------------------------------------- the records


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_every_schedule_warms_up(schedule: str, tmp_path: Path) -> None:
    sft(sft_config(tmp_path, lr_schedule=schedule, warmup=0.5, epochs=4, learning_rate=1e-3))
    lines = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    rates = [line["learning_rate"] for line in lines if "learning_rate" in line]
    assert len(rates) == 8
    assert rates[:5] == pytest.approx([0.0, 2.5e-4, 5e-4, 7.5e-4, 1e-3])
    assert (rates[-1] == pytest.approx(1e-3)) == (schedule == "constant")


def test_a_nan_loss_ends_the_run(tmp_path: Path) -> None:
    records = Records(SFTConfig(output_dir=str(tmp_path)))
    state = SimpleNamespace(global_step=7)
    records.on_train_begin(ON_CPU, SimpleNamespace(global_step=0), None)
    with pytest.raises(FloatingPointError, match="the loss is nan at step 7"):
        records.on_log(None, state, None, logs={"loss": math.nan})
    line = (tmp_path / "metrics.jsonl").read_text()
    assert math.isnan(json.loads(line)["loss"])
