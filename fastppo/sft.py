"""Stage 1, supervised fine-tuning: a causal LM learns to continue prompts as demonstrations do.

A thin layer over `transformers.Trainer`: rows become token ids with the loss on the completion
alone, EOS included, so the model learns to stop.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

IGNORED = -100
"""Label of the positions without a loss, as transformers' losses read it."""


def encode_demonstration(row: dict[str, str], tokenizer: Any) -> dict[str, list[int]]:
    """{input_ids, labels} of a {prompt, completion} row; labels are IGNORED on the prompt."""
    prompt = tokenizer(row["prompt"])["input_ids"]
    completion = tokenizer(row["completion"], add_special_tokens=False)["input_ids"]
    completion = [*completion, tokenizer.eos_token_id]
    return {"input_ids": prompt + completion, "labels": [IGNORED] * len(prompt) + completion}


def collate(rows: list[dict[str, list[int]]], pad_token_id: int) -> dict[str, Tensor]:
    """Right-padded input_ids, attention_mask and labels, [B, S] int64."""
    longest = max(len(row["input_ids"]) for row in rows)

    def padded(values: list[list[int]], filler: int) -> Tensor:
        return torch.tensor([value + [filler] * (longest - len(value)) for value in values])

    ids = [row["input_ids"] for row in rows]
    return {
        "input_ids": padded(ids, pad_token_id),
        "attention_mask": padded([[1] * len(row) for row in ids], 0),
        "labels": padded([row["labels"] for row in rows], IGNORED),
    }


def train_sft(
    model: PreTrainedModel,
    tokenizer: Any,
    rows: list[dict[str, str]],
    output_dir: str | Path,
    *,
    epochs: float = 1.0,
    batch_size: int = 32,
    learning_rate: float = 2e-5,
    seed: int = 0,
    callbacks: list[TrainerCallback] | None = None,
    use_cpu: bool = False,
) -> dict[str, float]:
    """Fine-tunes `model` in place on {prompt, completion} rows and saves it with its tokenizer.

    Returns:
        dict: `loss`, the mean cross entropy per completion token of the last tenth, nats.
    """
    examples = [encode_demonstration(row, tokenizer) for row in rows]
    trainer = Trainer(
        model=model,
        args=training_arguments(
            output_dir, epochs, batch_size, learning_rate, seed=seed, use_cpu=use_cpu
        ),
        train_dataset=examples,
        data_collator=lambda batch: collate(batch, tokenizer.pad_token_id),
        callbacks=callbacks,
    )
    quiet(trainer)
    trainer.train()
    model.save_pretrained(output_dir)
    tokenizer.save_pretrained(output_dir)
    return {"loss": last_losses(trainer)}


def training_arguments(
    output_dir: str | Path,
    epochs: float,
    batch_size: int,
    learning_rate: float,
    *,
    seed: int,
    use_cpu: bool,
) -> TrainingArguments:
    """What the two supervised stages have in common: cosine decay, no files but the model."""
    return TrainingArguments(
        output_dir=str(output_dir),
        num_train_epochs=epochs,
        per_device_train_batch_size=batch_size,
        learning_rate=learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=10,
        logging_steps=5,
        save_strategy="no",
        report_to="none",
        seed=seed,
        use_cpu=use_cpu,
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=not use_cpu,
    )


def quiet(trainer: Trainer) -> None:
    """Without the callback that prints every log record: the caller shows progress."""
    from transformers import PrinterCallback

    trainer.remove_callback(PrinterCallback)


def last_losses(trainer: Trainer) -> float:
    """Mean logged loss over the last tenth of training."""
    losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    tail = losses[-max(1, len(losses) // 10) :]
    return sum(tail) / max(1, len(tail))
