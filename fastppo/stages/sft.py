"""Stage 1, supervised fine-tuning: a causal LM learns to continue prompts as demonstrations do.

    loss = −Σ logprob(token) / (tokens with a loss),   over a whole optimiser step

Logits are never formed in full: the loss is `linear_token_logprobs` on the trunk's hidden states.
Dropout is off, as it is in PPO. Rows are not packed. What a row may be: `demonstrations`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel, TrainerCallback, set_seed

from fastppo.data import fingerprint
from fastppo.data.rows import Rows
from fastppo.functional.scalars import counted
from fastppo.models.adapters import adapters_of
from fastppo.models.policy import LanguageModel
from fastppo.models.pretrained import (
    check_vocabulary,
    load_causal_lm,
    load_tokenizer,
    pad_token_id,
)
from fastppo.models.sharding import unsharded
from fastppo.models.trunk import checkpoint_activations
from fastppo.run.progress import console_of_first, say
from fastppo.stages.demonstrations import IGNORED, Demonstrations, collate, encode_demonstrations
from fastppo.stages.options import SFTConfig
from fastppo.stages.supervised import (
    SupervisedTrainer,
    load_data,
    open_run,
    row_limit,
    save_model,
    stage_world,
)


class _SFTTrainer(SupervisedTrainer):
    """Cross entropy per token with a label."""

    title = "SFT"
    entries = ("padded_states",)
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
    callbacks: list[TrainerCallback] | None = None,
    console: Console | None = None,
) -> dict[str, float]:
    """Fine-tunes a causal LM and saves it with its tokenizer in `config.output_dir`.

    Args:
        model, tokenizer: instead of loading `config.model`; the model is trained in place.
        rows, eval_rows: instead of `config.data` and `config.eval_data`.

    Returns:
        dict: `loss`, mean cross entropy per token of the last tenth, nats; `eval_loss`, the same of
        the held-out rows at the end, if there are any.

    Raises:
        DataError: a row cannot be used.
        ValueError: model, tokenizer and options do not fit, or the directory holds a run already.
    """
    with stage_world(config) as world:
        console = console_of_first(world, console)
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
        peft = adapters_of(model, config)
        policy = LanguageModel(model, peft)
        policy.check_heads()
        limit = row_limit(model, config.max_length)

        def encode(rows: Rows, source: str) -> Demonstrations:
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
        run_dir = open_run(config, world)
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
            model if peft is None else peft,
            data,
            root=policy,
            trunk=model.base_model,
            collate=functools.partial(collate, pad_token_id=pad_token_id(tokenizer, model)),
            callbacks=callbacks,
            world=world,
        )
        result = trainer.run(console)
        _stop_at_eos(model, tokenizer)

        def save() -> None:
            merged = model if peft is None else peft.merge_and_unload()
            save_model(run_dir, merged, tokenizer)

        with unsharded(policy):
            world.on_main_rank(save)
        return result


def _stop_at_eos(model: PreTrainedModel, tokenizer: Any) -> None:
    """`generate` on the saved model stops where the demonstrations did."""
    stop = model.generation_config.eos_token_id
    if stop is None:
        model.generation_config.eos_token_id = tokenizer.eos_token_id
        return
    stops = stop if isinstance(stop, list) else [stop]
    if tokenizer.eos_token_id not in stops:
        model.generation_config.eos_token_id = [*stops, tokenizer.eos_token_id]
