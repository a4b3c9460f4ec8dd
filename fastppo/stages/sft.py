"""Stage 1, supervised fine-tuning: a causal LM learns to continue prompts as demonstrations do.

    loss = −Σ logprob(token) / (tokens with a loss),   over a whole optimiser step

Logits are never formed in full: the loss is `linear_token_logprobs` on the trunk's hidden states.
Dropout is off, as it is in PPO. Rows are not packed. What a row may be: `demonstrations`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel, TrainerCallback, set_seed

from fastppo.data import fingerprint
from fastppo.data.rows import Rows, load_rows
from fastppo.data.world import World
from fastppo.models.adapters import add_adapters, whole_state
from fastppo.models.policy import LanguageModel
from fastppo.models.pretrained import (
    check_vocabulary,
    load_causal_lm,
    load_tokenizer,
    pad_token_id,
    written_whole,
)
from fastppo.models.sharding import unsharded
from fastppo.models.trunk import checkpoint_activations
from fastppo.run.log import say
from fastppo.run.manifest import permit
from fastppo.run.options import option
from fastppo.stages.demonstrations import IGNORED, Demonstrations, collate, encode_demonstrations
from fastppo.stages.supervised import (
    SupervisedConfig,
    SupervisedTrainer,
    holding_its_directory,
    open_run,
    row_limit,
    split_by_prompt,
)


@dataclass(kw_only=True, frozen=True)
class SFTConfig(SupervisedConfig):
    """Options of supervised fine-tuning. Lengths are in tokens."""

    model: str = option("", "Required. A causal LM: directory or hub name")
    epochs: float = option(2.0, "Passes over the data", above=0)
    output_dir: str = option("runs/sft", "Run directory; the model is saved in it")


class _SFTTrainer(SupervisedTrainer):
    """Cross entropy per token with a label."""

    title = "SFT"
    policy: LanguageModel
    entries = ("padded_states",)

    def items(self, batch: dict[str, Tensor]) -> float:
        return float((batch["labels"] != IGNORED).sum())

    def loss_sum(self, batch: dict[str, Tensor]) -> Tensor:
        labels = batch["labels"][:, 1:]
        row, column = (labels != IGNORED).nonzero(as_tuple=True)
        texts = batch["input_ids"], batch["attention_mask"]
        states = self.policy.padded_states(*texts, row, column)
        stats = self.policy.head.token_stats(states, labels[row, column])
        return -stats.logprobs.sum()

    def measure(self, rows: list[Any]) -> dict[str, float]:
        total, tokens = 0.0, 0.0
        for batch in self.batches(rows):
            total += self.loss_sum(batch).item()
            tokens += self.items(batch)
        totals, counts = zip(*self.world.gather((total, tokens)), strict=True)
        return {"loss": sum(totals) / sum(counts)}

    def without_items(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**batch, "labels": torch.full_like(batch["labels"], IGNORED)}


@holding_its_directory
def train_sft(
    config: SFTConfig,
    *,
    model: PreTrainedModel | None = None,
    tokenizer: Any = None,
    rows: Rows | None = None,
    eval_rows: Rows | None = None,
    callbacks: list[TrainerCallback] | None = None,
    console: Console | None = None,
    world: World | None = None,
) -> dict[str, float]:
    """Fine-tunes a causal LM and saves it with its tokenizer in `config.output_dir`.

    Args:
        model, tokenizer: instead of loading `config.model`; the model is trained in place.
        rows, eval_rows: instead of `config.data` and `config.eval_data`.
        world: the processes; always those of torchrun.

    Returns:
        dict: `loss`, mean cross entropy per token of the last tenth, nats; `eval_loss`, the same of
        the held-out rows at the end, if there are any.

    Raises:
        DataError: a row cannot be used.
        ValueError: model, tokenizer and options do not fit, or the directory holds a run already.
    """
    world = world or World()
    console = (console or Console(stderr=True)) if world.is_main else Console(quiet=True)
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
    weights = fingerprint.of_weights(model.named_parameters())
    peft = None
    if config.lora_rank > 0:
        peft = add_adapters(model, config.lora_rank, config.lora_alpha, config.lora_target_modules)
    policy = LanguageModel(model, peft)
    policy.check_heads()
    limit = row_limit(model, config.max_length)

    def encode(rows: Rows, source: str) -> Demonstrations:
        encoded = encode_demonstrations(rows, tokenizer, limit, source)
        if encoded.truncated:
            cut = f"{source}: {encoded.truncated} of {len(rows)} rows cut to {limit} tokens"
            dropped = f", {encoded.dropped} of them dropped: no loss left" * bool(encoded.dropped)
            say(console, cut + dropped, "yellow")
        return encoded

    rows = load_rows(config.data, config.split) if rows is None else rows
    fingerprints = {"model": weights, "data": fingerprint.of_rows(rows)}
    data = encode(rows, config.data or "data")
    fingerprints["tokens"] = fingerprint.of_rows(data.examples)
    if eval_rows is not None or config.eval_data is not None:
        held_rows = eval_rows
        if held_rows is None:
            held_rows = load_rows(config.eval_data or "", config.split)
        held_out = encode(held_rows, config.eval_data or "eval_data").examples
        train = data.examples
    else:
        train, held_out = split_by_prompt(
            data.examples, data.prompts, config.eval_share, config.seed
        )
    run_dir = open_run(config, world)
    tokens = sum(label != IGNORED for example in train for label in example["labels"])
    say(console, f"SFT on {len(train)} rows, {tokens} tokens with a loss; {len(held_out)} held out")
    if config.gradient_checkpointing:
        checkpoint_activations(model)
    filler = pad_token_id(tokenizer, model)
    trainer = _SFTTrainer(
        config,
        model if peft is None else peft,
        train,
        held_out,
        lambda examples: collate(examples, filler),
        callbacks,
        fingerprints,
        world,
    )
    trainer.policy = trainer.root = policy
    trainer.trunk = model.base_model
    result = trainer.run(console)
    _stop_at_eos(model, tokenizer)

    def save() -> None:
        merged = model if peft is None else peft.merge_and_unload()
        with written_whole(run_dir) as directory:
            merged.save_pretrained(directory, state_dict=whole_state(merged))
            tokenizer.save_pretrained(directory)
        permit(run_dir)

    with unsharded(policy):
        world.first(save)
    return result


def _stop_at_eos(model: PreTrainedModel, tokenizer: Any) -> None:
    """`generate` on the saved model ends where the demonstrations did."""
    known = model.generation_config.eos_token_id
    known = known if isinstance(known, list) else [] if known is None else [known]
    if tokenizer.eos_token_id not in known:
        known = [*known, tokenizer.eos_token_id]
        model.generation_config.eos_token_id = known if len(known) > 1 else known[0]
