"""Sequence-classification models as rewards."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification

from fastppo.data import fingerprint
from fastppo.data.chat import check_chat_template, render_chat
from fastppo.data.datasets import DataError
from fastppo.data.padding import padded_batch
from fastppo.data.prompts import Prompts
from fastppo.functional.scalars import describe
from fastppo.models.pretrained import load_tokenizer, load_whole, model_config
from fastppo.models.trunk import context_length, states_at
from fastppo.rewards.reward import RewardWithWeights

BATCH_SIZE = 32
"""Texts per forward pass."""


class RewardModel(RewardWithWeights):
    """A sequence-classification model with one label, and its own tokenizer.

    A text prompt and its completion are joined and tokenized as one text. Chat messages go through
    the reward tokenizer's chat template, with the completion as the assistant's turn. Texts longer
    than the context, or than `score_max_length` of the model's config, are truncated from the left.
    `score_mean` of the config is subtracted from every score. `fastppo reward` writes both.
    """

    def __init__(
        self, name: str, *, device: torch.device | str | None = "cpu", batch_size: int = BATCH_SIZE
    ) -> None:
        """Read config and tokenizer, and load the weights onto the device unless it is None.

        Raises:
            ValueError: the model is missing, has no tokenizer, or has not one label.
        """
        self.name = name
        self.__name__ = Path(name).name
        config = model_config(name, "reward")
        if config.num_labels != 1:
            kind = ", ".join(config.architectures or ["model"])
            raise ValueError(
                f"reward {name} is a {kind} with {config.num_labels} labels; expected a sequence "
                "classifier with 1"
            )
        self.tokenizer = load_tokenizer(name, "reward")
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.batch_size = batch_size
        self.model: Any = None
        if device is not None:
            self.load(device)

    def load(self, device: torch.device | str) -> None:
        """Load the weights onto a device, unless they are loaded already."""
        if self.model is not None:
            return
        model, _ = load_whole(
            AutoModelForSequenceClassification, self.name, "reward", dtype=torch.float32
        )
        self.model = model.to(device).eval().requires_grad_(False)  # type: ignore[arg-type]
        text_config = model.config.get_text_config()
        if getattr(text_config, "pad_token_id", None) is None:
            text_config.pad_token_id = self.tokenizer.pad_token_id
        limits = [getattr(model.config, "score_max_length", None), context_length(model)]
        self.max_length = min((limit for limit in limits if limit), default=None)
        self.score_mean = float(getattr(model.config, "score_mean", 0.0))

    def fingerprint(self) -> str:
        """Return a fingerprint of weights and tokenizer; "" before the weights are loaded."""
        if self.model is None:
            return ""
        tokenizer = fingerprint.of_tokenizer(self.tokenizer)
        return fingerprint.of_text(f"{fingerprint.of_model(self.model)} {tokenizer}")

    def check(self, source: str, prompts: Prompts) -> None:
        """Raise DataError if a prompt is a chat and the tokenizer has no chat template."""
        for number, prompt in enumerate(prompts.prompts, 1):
            if not isinstance(prompt, str):
                where = f"reward {self.name}: {source}, row {number}"
                check_chat_template(self.tokenizer.chat_template is not None, where)

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


def text_ids(tokenizer: Any, prompt: Any, completion: Any, where: str) -> list[int]:
    """Return the token ids of a prompt and its completion.

    Args:
        prompt: a string, or chat messages.
        completion: a string, or, after messages, one or more messages.
        where: prefix of error messages.

    Raises:
        DataError: the text is not valid Unicode, the chat template refuses it, or it has no token.
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
    """Truncate from the left, keeping a leading special token."""
    if max_length is None or len(ids) <= max_length:
        return ids
    first = ids[:1] if ids[0] in tokenizer.all_special_ids else []
    return first + ids[len(first) - max_length :]


def sequence_scores(model: Any, input_ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the scores of right-padded texts at each text's last token, [B] fp32.

    transformers finds that token by `input_ids != pad_token_id`, which is wrong for a text that
    ends in the pad token (pad = eos), so this uses the mask. Encoders without a `score` layer pool
    in their own way and are called as they are.
    """
    head = getattr(model, "score", None)
    if head is None:
        return model(input_ids=input_ids, attention_mask=mask).logits.float().squeeze(-1)
    count, length = input_ids.shape
    last = torch.arange(count, device=mask.device) * length + mask.sum(1) - 1
    return head(states_at(model.base_model, last, input_ids, mask)).float().squeeze(-1)
