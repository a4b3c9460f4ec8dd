"""Stage 1: supervised fine-tuning of a causal LM on demonstrations.

    loss = −Σ logprob(token) / (tokens with a loss),   over a whole optimizer step

Full logits are never materialized: the loss is `linear_token_logprobs` of the trunk's hidden
states. Dropout is off, as in PPO. Rows are not packed. Their format: see `demonstrations`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel, set_seed

from fastppo.data import fingerprint
from fastppo.data.datasets import Rows
from fastppo.data.images import have_images
from fastppo.functional.scalars import counted
from fastppo.models.adapters import adapters_of
from fastppo.models.multimodal import freeze, is_multimodal
from fastppo.models.policy import LanguageModel
from fastppo.models.pretrained import (
    check_vocabulary,
    load_causal_lm,
    load_tokenizer,
    pad_token_id,
)
from fastppo.models.sharding import unsharded
from fastppo.models.trunk import checkpoint_activations, trunk_of
from fastppo.run.options import unused
from fastppo.run.progress import console_of_first, say, show_messages
from fastppo.stages.data import Encoded, load_data, row_limit
from fastppo.stages.demonstrations import IGNORED, collate, encode_demonstrations
from fastppo.stages.options import SFTConfig
from fastppo.stages.supervised import SupervisedTrainer, save_model, stage_world


class _SFTTrainer(SupervisedTrainer):
    """A training loop with the mean cross entropy over labeled tokens."""

    title = "SFT"
    passes = ("padded_states",)
    root: LanguageModel

    def items(self, batch: dict[str, Tensor]) -> float:
        return float((batch["labels"] != IGNORED).sum())

    def loss_sum(self, batch: dict[str, Tensor]) -> Tensor:
        labels = batch["labels"][:, 1:]
        row, column = (labels != IGNORED).nonzero(as_tuple=True)
        states = self.root.padded_states(
            batch["input_ids"], batch["attention_mask"], row=row, column=column
        )
        stats = self.root.head.token_stats(states, labels[row, column])
        return -stats.logprobs.sum()

    def measure(self, rows: list[Any]) -> dict[str, float]:
        loss = 0.0
        tokens = 0.0
        for batch in self.batches(rows):
            loss += self.loss_sum(batch).item()
            tokens += self.items(batch)
        losses, counts = zip(*self.world.gather((loss, tokens)), strict=True)
        return {"loss": sum(losses) / sum(counts)}

    def without_items(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**batch, "labels": torch.full_like(batch["labels"], IGNORED)}


def train_sft(
    config: SFTConfig,
    *,
    model: PreTrainedModel | None = None,
    tokenizer: Any = None,
    rows: Rows | None = None,
    eval_rows: Rows | None = None,
    console: Console | None = None,
) -> dict[str, float]:
    """Fine-tune a causal LM and save it with its tokenizer in `config.output_dir`.

    Args:
        model, tokenizer: used instead of `config.model`; the model is trained in place.
        rows, eval_rows: used instead of `config.data` and `config.eval_data`.

    Returns:
        dict: `loss`, the mean cross entropy per token over the last tenth of the steps, nats; with
        held-out rows `eval_loss`, their cross entropy at the end.

    Raises:
        DataError: a row is unusable.
        ValueError: model, tokenizer and options do not fit together, or the directory holds a run.
    """
    with stage_world(config) as world:
        console = console_of_first(world, console)
        show_messages(console)
        for sentence in unused(config):
            say(console, sentence, "yellow")
        set_seed(config.seed)
        if model is None:
            model = load_causal_lm(
                config.model,
                dtype=getattr(torch, config.param_dtype),
                attn_implementation=config.attn_implementation,
            )
        tokenizer = tokenizer or load_tokenizer(config.model)
        model = model.to(world.device or config.torch_device)  # type: ignore[arg-type]
        embeddings: Any = model.get_input_embeddings()
        check_vocabulary(tokenizer, len(embeddings.weight))
        before = fingerprint.of_model(model)
        freeze(model)
        peft = adapters_of(model, config)
        policy = LanguageModel(model, peft)
        policy.check_heads()
        limit = row_limit(model, config.max_length)

        def encode(rows: Rows, source: str) -> Encoded:
            if is_multimodal(model.config) and have_images(rows):
                raise ValueError(f"{source}: fastppo sft reads no images; TRL's SFTTrainer does")
            encoded = encode_demonstrations(rows, tokenizer, limit, source)
            if encoded.truncated:
                sentence = (
                    f"{source}: {encoded.truncated} of {len(rows)} rows cut to {limit} tokens"
                )
                if encoded.dropped:
                    sentence += f", {encoded.dropped} of them dropped: no loss left"
                say(console, sentence, "yellow")
            return encoded

        data = load_data(config, rows, eval_rows, encode)
        data.fingerprints["model"] = before
        tokens = sum(label != IGNORED for example in data.train for label in example["labels"])
        say(
            console,
            f"SFT on {counted(len(data.train), 'row')}, {tokens} tokens with a loss; "
            f"{len(data.held_out)} held out",
        )
        if config.gradient_checkpointing:
            checkpoint_activations(model)
        trainer = _SFTTrainer(
            config,
            data,
            root=policy,
            trunk=trunk_of(model),
            collate=functools.partial(collate, pad_token_id=pad_token_id(tokenizer, model)),
            world=world,
        )
        result = trainer.run(console)
        _stop_at_eos(model, tokenizer)

        def save() -> None:
            merged = model if peft is None else peft.merge_and_unload()
            save_model(config.output_dir, merged, tokenizer)

        with unsharded(policy):
            world.on_main_rank(save)
        return result


def _stop_at_eos(model: PreTrainedModel, tokenizer: Any) -> None:
    """Add the tokenizer's EOS to the stop tokens of the generation config."""
    stop = model.generation_config.eos_token_id
    if stop is None:
        model.generation_config.eos_token_id = tokenizer.eos_token_id
        return
    stops = stop if isinstance(stop, list) else [stop]
    if tokenizer.eos_token_id not in stops:
        model.generation_config.eos_token_id = [*stops, tokenizer.eos_token_id]
