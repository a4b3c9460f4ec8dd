"""Sequence-classification models as rewards, each read with its own tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification

from fastppo.data.chat import render_chat
from fastppo.data.padding import padded_batch
from fastppo.data.rows import DataError
from fastppo.functional.scalars import describe
from fastppo.models.pretrained import load_tokenizer, load_whole, model_config
from fastppo.models.trunk import context_length, states_at

BATCH_SIZE = 32
"""Texts per forward pass."""


class RewardModel:
    """A sequence-classification model with one label, and its own tokenizer.

    A prompt of strings is joined with its completion and tokenised as one text; a prompt of chat
    messages is rendered by the reward tokenizer's own chat template, the completion as the
    assistant's turn. Texts longer than `score_max_length` of the model's config, or its context,
    lose their beginning, not their end. `score_mean` of the config, if there is one, is subtracted
    from every score; `fastppo reward` writes both.
    """

    def __init__(
        self, name: str, *, device: torch.device | str = "cpu", batch_size: int = BATCH_SIZE
    ) -> None:
        self.__name__ = Path(name).name
        check_reward_model(name)
        model, _ = load_whole(
            AutoModelForSequenceClassification, name, "reward", dtype=torch.float32
        )
        self.model = model.to(device).eval().requires_grad_(False)  # type: ignore[arg-type]
        self.tokenizer = load_tokenizer(name, "reward")
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        text_config = model.config.get_text_config()
        if getattr(text_config, "pad_token_id", None) is None:
            text_config.pad_token_id = self.tokenizer.pad_token_id
        limits = [getattr(model.config, "score_max_length", None), context_length(model)]
        self.max_length = min((limit for limit in limits if limit), default=None)
        self.batch_size = batch_size
        self.score_mean = float(getattr(model.config, "score_mean", 0.0))

    @torch.no_grad()
    def __call__(self, prompts: Sequence[Any], completions: Sequence[str]) -> list[float]:
        rows = []
        for prompt, completion in zip(prompts, completions, strict=True):
            ids = text_ids(self.tokenizer, prompt, completion, "the reward model")
            rows.append(cut_beginning(ids, self.tokenizer, self.max_length))
        scores: list[float] = []
        for start in range(0, len(rows), self.batch_size):
            scores += self._scores(rows[start : start + self.batch_size])
        return scores

    def _scores(self, rows: list[list[int]]) -> list[float]:
        batch = padded_batch(rows, self.tokenizer.pad_token_id)
        ids = batch["input_ids"].to(self.model.device)
        mask = batch["attention_mask"].to(self.model.device)
        return (sequence_scores(self.model, ids, mask) - self.score_mean).tolist()


def check_reward_model(name: str) -> None:
    """Raise ValueError unless a directory or hub name is a sequence classifier with one label."""
    config = model_config(name, "reward")
    if config.num_labels != 1:
        kind = ", ".join(config.architectures or ["model"])
        raise ValueError(
            f"reward {name} is a {kind} with {config.num_labels} labels; expected a sequence "
            "classifier with 1"
        )


def text_ids(tokenizer: Any, prompt: Any, completion: Any, where: str) -> list[int]:
    """Token ids of prompt and completion as a reward model reads them.

    Args:
        prompt: a string, or chat messages.
        completion: a string; after messages also messages (several of them never occur in PPO).
        where: opens the sentence of an error.

    Raises:
        DataError: no tokenizer takes the text, the template refuses it, or it has no token.
    """
    if isinstance(prompt, str):
        text = prompt + completion
    else:
        if isinstance(completion, str):
            completion = [{"role": "assistant", "content": completion}]
        if len(completion) == 1 and isinstance(completion[0]["content"], str):
            completion = [{**completion[0], "content": completion[0]["content"].strip()}]
        text = render_chat(tokenizer, [*prompt, *completion], where)
    # A chat template writes its own special tokens.
    ids = list(tokenizer(text, add_special_tokens=isinstance(prompt, str))["input_ids"])
    if not ids:
        raise DataError(f"{where}: the tokenizer has no token for {describe(text)}")
    return ids


def cut_beginning(ids: list[int], tokenizer: Any, max_length: int | None) -> list[int]:
    """Too long a text loses its beginning, but for a leading special token."""
    if max_length is None or len(ids) <= max_length:
        return ids
    first = ids[:1] if ids[0] in tokenizer.all_special_ids else []
    return first + ids[len(first) - max_length :]


def sequence_scores(model: Any, input_ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[B] fp32 scores of right-padded texts, read at each text's last token.

    transformers looks for that token by `input_ids != pad_token_id` and so reads too early where a
    text ends in the pad token (pad = eos); the mask knows better. Models without a `score` layer
    on their trunk (encoders) pool in their own way and are called as they are.
    """
    head = getattr(model, "score", None)
    if head is None:
        return model(input_ids=input_ids, attention_mask=mask).logits.float().squeeze(-1)
    count, length = input_ids.shape
    last = torch.arange(count, device=mask.device) * length + mask.sum(1) - 1
    return head(states_at(model.base_model, last, input_ids, mask)).float().squeeze(-1)
