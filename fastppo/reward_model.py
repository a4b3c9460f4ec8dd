"""Stage 2, the reward model: a score per text, learned from which of two completions was preferred.

    loss = −log σ(s_chosen − s_rejected)

is the likelihood of the labels under Bradley and Terry's model of paired comparisons (1952), as in
Stiennon et al. 2020, eq. 1. A thin layer over `transformers.Trainer`; the saved model loads with
`AutoModelForSequenceClassification`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, Trainer, TrainerCallback

from fastppo.rewards import sequence_scores
from fastppo.sft import last_losses, quiet, training_arguments


def bradley_terry_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Mean of −log σ(chosen − rejected): scores [B] each, a 0-d tensor."""
    return -torch.nn.functional.logsigmoid(chosen - rejected).mean()


def _collate(rows: list[dict[str, list[int]]], pad_token_id: int) -> dict[str, Tensor]:
    """Chosen texts above rejected ones in one right-padded batch, [2B, S]."""
    texts = [row["chosen"] for row in rows] + [row["rejected"] for row in rows]
    longest = max(map(len, texts))
    ids = torch.tensor([text + [pad_token_id] * (longest - len(text)) for text in texts])
    lengths = torch.tensor([len(text) for text in texts])
    mask = torch.arange(longest) < lengths.unsqueeze(1)
    return {"input_ids": ids, "attention_mask": mask.long()}


class _PairTrainer(Trainer):
    """`Trainer` with the Bradley–Terry loss."""

    def compute_loss(
        self,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        scores = sequence_scores(model, inputs["input_ids"], inputs["attention_mask"])
        chosen, rejected = scores.chunk(2)
        loss = bradley_terry_loss(chosen, rejected)
        return (loss, {"scores": scores}) if return_outputs else loss


def train_reward_model(
    model: PreTrainedModel,
    tokenizer: Any,
    rows: list[dict[str, str]],
    output_dir: str | Path,
    *,
    epochs: float = 1.0,
    batch_size: int = 32,
    learning_rate: float = 1e-5,
    held_out: float = 0.1,
    seed: int = 0,
    callbacks: list[TrainerCallback] | None = None,
    use_cpu: bool = False,
) -> dict[str, float]:
    """Trains `model` (one label) in place on {prompt, chosen, rejected} rows and saves it.

    A text is prompt and completion joined as they are, as `fastppo.rewards.RewardModel` reads them:
    a space between the two belongs to the completion.

    Args:
        held_out: share of the rows, the last ones, kept to measure the accuracy on.

    Returns:
        dict: `loss`, mean over the last tenth, nats; `accuracy` on the held-out pairs.
    """
    examples = [
        {side: tokenizer(row["prompt"] + row[side])["input_ids"] for side in ("chosen", "rejected")}
        for row in rows
    ]
    split = len(examples) - max(1, round(held_out * len(examples)))
    trainer = _PairTrainer(
        model=model,
        args=training_arguments(
            output_dir, epochs, batch_size, learning_rate, seed=seed, use_cpu=use_cpu
        ),
        train_dataset=examples[:split],
        data_collator=lambda batch: _collate(batch, tokenizer.pad_token_id),
        callbacks=callbacks,
    )
    quiet(trainer)
    trainer.train()
    accuracy = pair_accuracy(model, examples[split:], tokenizer.pad_token_id, batch_size)
    model.save_pretrained(output_dir)
    tokenizer.save_pretrained(output_dir)
    return {"loss": last_losses(trainer), "accuracy": accuracy}


@torch.no_grad()
def pair_accuracy(
    model: PreTrainedModel,
    pairs: list[dict[str, list[int]]],
    pad_token_id: int,
    batch_size: int = 64,
) -> float:
    """Share of tokenised pairs whose chosen text scores higher."""
    model.eval()
    right = 0
    for start in range(0, len(pairs), batch_size):
        batch = _collate(pairs[start : start + batch_size], pad_token_id)
        batch = {name: value.to(model.device) for name, value in batch.items()}
        scores = sequence_scores(model, batch["input_ids"], batch["attention_mask"])
        chosen, rejected = scores.chunk(2)
        right += int((chosen > rejected).sum())
    return right / len(pairs)
