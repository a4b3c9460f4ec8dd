"""Options of SFT and the reward model; reading them does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fastppo.run.options import Options, WeightOptions, option

if TYPE_CHECKING:
    import torch


@dataclass(kw_only=True, frozen=True)
class DataOptions(Options):
    """Model and data."""

    model: str = option("", "Required. Directory or hub name of the model to start from")
    data: str = option(
        "", "Required. Rows: .jsonl, .parquet, a save_to_disk directory or a hub name"
    )
    split: str = option("train", "Split of a datasets directory or hub dataset")
    eval_data: str | None = option(
        None, "Held-out rows in the same form; default: a share of the data"
    )
    eval_share: float = option(
        0.05,
        "Share of the rows to hold out, by prompt",
        minimum=0,
        maximum=0.9,
        needs="eval_data=none",
    )
    max_length: int | None = option(
        None, "Maximum length of a row, tokens; default: the model's context", minimum=2
    )


@dataclass(kw_only=True, frozen=True)
class StepOptions(Options):
    """Optimizer."""

    epochs: float = option(1.0, "Passes over the data", above=0)
    batch_size: int = option(16, "Rows per forward and backward pass", minimum=1)
    gradient_accumulation: int = option(
        4, "Batches per optimizer step; the loss is the mean over all of them", minimum=1
    )
    learning_rate: float = option(2e-5, "Peak learning rate of AdamW", above=0)
    lr_schedule: Literal["constant", "linear", "cosine"] = option(
        "cosine", "Learning rate after the warm-up: constant, or decay to 0"
    )
    warmup: float = option(
        0.03, "Linear warm-up, share of the optimizer steps", minimum=0, maximum=0.9
    )
    weight_decay: float = option(0.0, "Weight decay of AdamW, on matrices", minimum=0)
    max_grad_norm: float = option(1.0, "Maximum gradient norm", above=0)


@dataclass(kw_only=True, frozen=True)
class StageOptions(Options):
    """Run."""

    output_dir: str = option("runs/stage", "Run directory; the model is saved in it")
    seed: int = option(
        0, "Seed of shuffling, splitting and initialization", minimum=0, maximum=2**32 - 1
    )
    device: str = option("auto", "auto (a CUDA GPU if there is one), cpu, cuda, cuda:1, …, mps")
    checkpoint_interval: int = option(
        500, "Optimizer steps between checkpoints; 0 writes none", minimum=0
    )
    resume: bool | Literal["force"] = option(
        False,
        "Resume from the newest complete checkpoint of output_dir; force: although options, model "
        "or data have changed",
    )


@dataclass(kw_only=True, frozen=True)
class SupervisedConfig(DataOptions, WeightOptions, StepOptions, StageOptions):
    """Options shared by SFT and the reward model. Lengths are in tokens."""

    def check(self) -> None:
        if self.precision == "fp16":
            raise ValueError(
                "precision must be auto, bf16 or fp32, got fp16; only `fastppo train` supports fp16"
            )

    @property
    def torch_device(self) -> torch.device:
        """The device to train on."""
        from fastppo.models.device import choose_device

        return choose_device(self.device)

    @property
    def compute_dtype(self) -> torch.dtype | None:
        from fastppo.models.device import compute_dtype

        return compute_dtype(self.precision, self.torch_device)


@dataclass(kw_only=True, frozen=True)
class SFTConfig(SupervisedConfig):
    """Options of supervised fine-tuning. Lengths are in tokens."""

    model: str = option("", "Required. A causal LM: directory or hub name")
    epochs: float = option(2.0, "Passes over the data", above=0)
    output_dir: str = option("runs/sft", "Run directory; the model is saved in it")


@dataclass(kw_only=True, frozen=True)
class RewardModelConfig(SupervisedConfig):
    """Options of the reward model. Lengths are in tokens, scores in reward units."""

    model: str = option(
        "", "Required. The SFT model, or a sequence classifier of one label: directory or hub name"
    )
    eval_share: float = option(
        0.1,
        "Share of the rows to hold out, by prompt",
        minimum=0,
        maximum=0.9,
        needs="eval_data=none",
    )
    learning_rate: float = option(1e-5, "Peak learning rate of AdamW", above=0)
    center_coef: float = option(
        0.0, "Weight of (s_better + s_worse)² in the loss, per squared reward unit", minimum=0
    )
    output_dir: str = option("runs/reward", "Run directory; the model is saved in it")


IDENTITY = (
    "param_dtype",
    "lora_rank",
    "lora_alpha",
    "lora_target_modules",
    "split",
    "eval_data",
    "eval_share",
    "max_length",
    "seed",
    "batch_size",
    "gradient_accumulation",
    "center_coef",
)
"""Options that must not change on resume; model and data are compared by fingerprint."""
