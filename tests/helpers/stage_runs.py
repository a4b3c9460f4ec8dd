"""Short runs of the stages before PPO on tiny models, with their data."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tiny
from rich.console import Console

from fastppo.stages.reward_model import RewardModelConfig, load_classifier, train_reward_model
from fastppo.stages.sft import SFTConfig, train_sft
from fastppo.stages.supervised import SupervisedTrainer

ROWS = [{"prompt": f"w{i} w{i + 1}", "completion": "w7" + " w8" * (i % 3)} for i in range(8)]
"""Demonstrations of one, two and three words."""

PAIRS = [
    {"prompt": f"w{i % 12}", "chosen": f" w{20 + i % 5} w7", "rejected": f" w{20 + i % 5} w8"}
    for i in range(36)
]
"""w7 is preferred to w8."""

SHORT: dict[str, Any] = {
    "gradient_accumulation": 1,
    "device": "cpu",
    "eval_share": 0,
    "checkpoint_interval": 0,
}


def sft_config(tmp_path: Path, **more: Any) -> SFTConfig:
    options = {"batch_size": 4, "learning_rate": 5e-3, "epochs": 1, **SHORT}
    return SFTConfig(**{**options, "output_dir": str(tmp_path / "run"), **more})


def sft(config: SFTConfig, model: Any = None, rows: Any = ROWS, **more: Any) -> dict[str, float]:
    """Train the model of the config, or a tiny Llama, on `rows`."""
    parts = {"tokenizer": tiny.tokenizer(), "console": Console(file=io.StringIO()), **more}
    if not config.model:
        parts["model"] = model or tiny.model()
    return train_sft(config, rows=rows, **parts)


def reward_config(tmp_path: Path, **more: Any) -> RewardModelConfig:
    options = {"batch_size": 8, "learning_rate": 3e-3, **SHORT}
    return RewardModelConfig(**{**options, "output_dir": str(tmp_path / "run"), **more})


def classifier(tmp_path: Path, architecture: str = "llama", **options: Any) -> Any:
    """Return a tiny reward model with a new head."""
    return load_classifier(tiny.saved_model(tmp_path / "sft", architecture, **options))


def reward_model(
    config: RewardModelConfig, tmp_path: Path, rows: Any = PAIRS, **more: Any
) -> dict[str, float]:
    """Train a tiny classifier on `rows`."""
    parts = {"tokenizer": tiny.tokenizer(), "console": Console(file=io.StringIO()), **more}
    if not config.model and "model" not in parts:
        parts["model"] = classifier(tmp_path)
    return train_reward_model(config, rows=rows, **parts)


@contextmanager
def before_steps(act: Callable[[int], None]) -> Iterator[None]:
    """Call `act` with the number of finished steps before each step of a run in this block."""
    original = SupervisedTrainer.step

    def step(self: Any, number: int, batches: Any) -> dict[str, float]:
        act(number - 1)
        return original(self, number, batches)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SupervisedTrainer, "step", step)
        yield


@contextmanager
def interrupted(after: int) -> Iterator[None]:
    """Expect that a run in this block is interrupted after so many steps."""

    def interrupt(steps: int) -> None:
        if steps == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), before_steps(interrupt):
        yield
