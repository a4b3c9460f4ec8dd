"""Stage 2, the reward model: a score per text, learned from which of several completions was
preferred.

    loss = mean over prompts, then over a prompt's pairs, of
           −log σ(s_better − s_worse − margin) + center_coef·(s_better + s_worse)²

The first term is the likelihood of the labels under Bradley and Terry's model of paired comparisons
(1952), as in Stiennon et al. 2020, eq. 1; the margin is that of Touvron et al. 2023 (Llama 2, eq.
2), the second term that of Eisenstein et al. 2023, which keeps scores near 0 where the data leave
their level open. A ranked list of K completions is one row: each completion is run through the
model once and all K(K−1)/2 pairs are in one batch, weighted to a mean, because a completion that
entered several batches would be overfitted (Ouyang et al. 2022, section 3.5).

The model is a sequence classifier with one label. Its head starts from N(0, 1/(d + 1)), d its
width, as in Stiennon et al. 2020. After training the mean score of the best completions of the
training rows is written to the model's config as `score_mean`, which
`fastppo.rewards.model.RewardModel` subtracts, so that a good completion scores 0 on average, as the
reference texts of Stiennon et al. 2020 do. It is not in the weights because the classifiers of
decoders in transformers have no bias in their head, nor, with RMSNorm, any other constant to hold
it.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from transformers import (
    AutoModelForSequenceClassification,
    PreTrainedModel,
    TrainerCallback,
    set_seed,
)

from fastppo.data import fingerprint
from fastppo.data.rows import Rows, shuffled
from fastppo.functional.scalars import counted
from fastppo.models.adapters import adapters_of
from fastppo.models.pretrained import (
    attention_implementation,
    check_vocabulary,
    is_sequence_classifier,
    load_tokenizer,
    load_whole,
    model_config,
)
from fastppo.models.sharding import unsharded
from fastppo.models.trunk import checkpoint_activations, switch_dropout_off
from fastppo.rewards.model import sequence_scores
from fastppo.run.progress import console_of_first, say
from fastppo.stages.calibration import accuracy, calibration_error, log_loss
from fastppo.stages.options import RewardModelConfig
from fastppo.stages.preferences import (
    Comparison,
    Comparisons,
    collate,
    encode_comparisons,
)
from fastppo.stages.supervised import (
    SupervisedTrainer,
    load_data,
    open_run,
    row_limit,
    save_model,
    stage_world,
)

REFERENCE_TEXTS = 2048
"""Best completions, at most, whose mean score becomes 0."""

# ---------------------------------------------------------------------------------------- the loss


def bradley_terry_loss(
    chosen: Tensor,
    rejected: Tensor,
    margin: Tensor | float = 0.0,
    *,
    center_coef: float = 0.0,
    weights: Tensor | None = None,
) -> Tensor:
    """Σ w·(−log σ(chosen − rejected − margin) + center_coef·(chosen + rejected)²), 0-d.

    Args:
        chosen, rejected: [P] scores.
        margin: [P] or one number: how much better the chosen is said to be, reward units.
        weights: [P]; none given means the mean over pairs.

    Source: Touvron et al. 2023, eq. 2; Eisenstein et al. 2023, eq. 2.
    """
    losses = -nn.functional.logsigmoid(chosen - rejected - margin)
    if center_coef:
        losses = losses + center_coef * (chosen + rejected).square()
    return losses.mean() if weights is None else (weights * losses).sum()


# ----------------------------------------------------------------------------------- the model


def load_classifier(
    name: str, *, dtype: torch.dtype = torch.float32, attn_implementation: str = "auto"
) -> PreTrainedModel:
    """A sequence classifier with one label, from one of its kind or from a causal LM.

    A head that the files do not hold is drawn from N(0, 1/(d + 1)), d its width.

    Raises:
        ValueError: a classifier of several labels; a directory without a model, or without some
            of its trunk's weights; an architecture that has no classifier.
    """
    config = model_config(name)
    if is_sequence_classifier(config) and config.num_labels != 1:
        raise ValueError(f"{name} is a classifier of {config.num_labels} labels; expected 1")
    model, lacking = load_whole(
        AutoModelForSequenceClassification,
        name,
        "model",
        None if is_sequence_classifier(config) else _is_of_the_head,
        num_labels=1,
        dtype=dtype,
        attn_implementation=attention_implementation(attn_implementation, dtype),
    )
    for parameter_name in lacking:
        parameter = model.get_parameter(parameter_name)
        with torch.no_grad():
            if parameter.dim() == 2:
                parameter.normal_(std=head_std(parameter.shape[1]))
            else:
                parameter.zero_()
    return model


def _is_of_the_head(model: PreTrainedModel, weight: str) -> bool:
    """A pooler is between an encoder's trunk and its head; masked LMs have none."""
    return not weight.startswith(f"{model.base_model_prefix}.") or ".pooler." in weight


def head_std(width: int) -> float:
    """1/√(d + 1): untrained scores stay near 0 (Stiennon et al. 2020)."""
    return 1 / math.sqrt(width + 1)


# ------------------------------------------------------------------------------------ the training


class _Classifier(nn.Module):
    """A sequence classifier whose forward pass returns scores; several processes shard it."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """[B] fp32, of right-padded texts [B, S]."""
        # FSDP puts hooks on what is returned; a view would lose them.
        return sequence_scores(self.model, input_ids, attention_mask).clone()


class _PairTrainer(SupervisedTrainer):
    """The Bradley–Terry loss: the mean over prompts of the mean over a prompt's pairs."""

    title = "reward model"
    root: _Classifier
    center_coef: float

    def items(self, batch: dict[str, Tensor]) -> float:
        return float(batch["prompts"])

    def loss_sum(self, batch: dict[str, Tensor]) -> Tensor:
        scores = self.root(batch["input_ids"], batch["attention_mask"])
        return bradley_terry_loss(
            scores[batch["better"]],
            scores[batch["worse"]],
            batch["margin"],
            center_coef=self.center_coef,
            weights=batch["weight"],
        )

    def measure(self, rows: list[Any]) -> dict[str, float]:
        differences = [
            scores[batch["better"]] - scores[batch["worse"]] for batch, scores in self.scored(rows)
        ]
        difference = self.world.cat(torch.cat([torch.zeros(0), *differences]))
        return {
            "accuracy": accuracy(difference),
            "log_loss": log_loss(difference),
            "calibration_error": calibration_error(difference),
        }

    def reference_scores(self, rows: list[Comparison]) -> Tensor:
        """[N] fp32: the scores of the best completion of N rows, `REFERENCE_TEXTS` at most."""
        drawn = shuffled(len(rows), self.config.seed, epoch=0)[:REFERENCE_TEXTS]
        best = []
        for row in drawn:
            better, _ = rows[row].pairs[0]
            best.append(Comparison([rows[row].texts[better]], [], 0.0))
        scores = [scores for _, scores in self.scored(best)]
        return self.world.cat(torch.cat([torch.zeros(0), *scores]))

    @torch.no_grad()
    def scored(self, rows: list[Comparison]) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """This process's batches of the rows, with the scores of their texts; on the CPU."""
        for batch in self.batches(rows):
            scores = self.root(batch["input_ids"], batch["attention_mask"]).cpu()
            if self.items(batch):
                yield {name: value.cpu() for name, value in batch.items()}, scores

    def without_items(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            **batch,
            "weight": torch.zeros_like(batch["weight"]),
            "prompts": torch.zeros_like(batch["prompts"]),
        }


def train_reward_model(
    config: RewardModelConfig,
    *,
    model: PreTrainedModel | None = None,
    tokenizer: Any = None,
    rows: Rows | None = None,
    eval_rows: Rows | None = None,
    callbacks: list[TrainerCallback] | None = None,
    console: Console | None = None,
) -> dict[str, float]:
    """Trains a reward model and saves it with its tokenizer in `config.output_dir`.

    A text is prompt and completion joined as they are, as `RewardModel` reads them: a space
    between the two belongs to the completion.

    Args:
        model, tokenizer: instead of loading `config.model`; the model is trained in place.
        rows, eval_rows: instead of `config.data` and `config.eval_data`.

    Returns:
        dict: `loss`, mean of the last tenth, nats; with held-out rows `accuracy`, `log_loss`
        (nats) and `calibration_error` on their pairs; `score_mean`, which `RewardModel` subtracts,
        and `score_std`, both of the best completions of the training rows, reward units.

    Raises:
        DataError: a row cannot be used.
        ValueError: model, tokenizer and options do not fit, or the directory holds a run already.
    """
    with stage_world(config) as world:
        console = console_of_first(world, console)
        set_seed(config.seed)
        if model is None:
            model = load_classifier(
                config.model,
                dtype=getattr(torch, config.param_dtype),
                attn_implementation=config.attn_implementation,
            )
        if model.config.num_labels != 1:
            raise ValueError(f"expected a classifier of 1 label, got {model.config.num_labels}")
        tokenizer = _with_pad(model, tokenizer or load_tokenizer(config.model))
        device = world.device or config.torch_device
        model = model.to(device)  # type: ignore[arg-type]
        embeddings: Any = model.get_input_embeddings()
        check_vocabulary(tokenizer, len(embeddings.weight))
        switch_dropout_off(model)
        limit = row_limit(model, config.max_length)

        def encode(rows: Rows, source: str) -> Comparisons:
            comparisons = encode_comparisons(rows, tokenizer, limit, source)
            if comparisons.truncated:
                sentence = f"{source}: {comparisons.truncated} texts cut to {limit} tokens"
                say(console, sentence, "yellow")
            if comparisons.dropped:
                sentence = f"{source}: rows without a preference, dropped: {comparisons.dropped}"
                say(console, sentence, "yellow")
            return comparisons

        data = load_data(config, rows, eval_rows, encode)
        data.fingerprints["model"] = fingerprint.of_model(model)
        run_dir = open_run(config, world)
        pairs = sum(len(comparison.pairs) for comparison in data.train)
        held_pairs = sum(len(comparison.pairs) for comparison in data.held_out)
        say(
            console,
            f"reward model on {counted(len(data.train), 'row')}, {counted(pairs, 'pair')}; "
            f"{counted(held_pairs, 'pair')} held out",
        )
        peft = adapters_of(model, config, task_type="SEQ_CLS")
        if config.gradient_checkpointing:
            checkpoint_activations(model)
        classifier = _Classifier(model)
        trainer = _PairTrainer(
            config,
            model if peft is None else peft,
            data,
            root=classifier,
            trunk=model.base_model,
            collate=functools.partial(collate, pad_token_id=tokenizer.pad_token_id),
            callbacks=callbacks,
            world=world,
        )
        trainer.center_coef = config.center_coef
        result = {name.removeprefix("eval_"): value for name, value in trainer.run(console).items()}
        scores = trainer.reference_scores(data.train)
        result["score_mean"] = scores.mean().item()
        result["score_std"] = scores.std(correction=0).item()

        def save() -> None:
            trained = model if peft is None else peft.merge_and_unload()
            trained.config.score_mean = result["score_mean"]
            # Written also if the model that this started from had another.
            trained.config.score_max_length = config.max_length
            save_model(run_dir, trained, tokenizer)

        with unsharded(classifier):
            world.on_main_rank(save)
        return result


def _with_pad(model: PreTrainedModel, tokenizer: Any) -> Any:
    """The tokenizer with a pad token, and the model's config with the same: the classifiers of
    transformers need one for a batch of several texts."""
    if tokenizer.pad_token is None:
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token is None:
        raise ValueError("the tokenizer has neither a pad nor an EOS token to pad with")
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    return tokenizer
