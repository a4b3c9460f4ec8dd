"""Stage 2: a reward model, trained on preferences between completions.

    loss = mean over prompts and over the pairs of a prompt of
           −log σ(s_better − s_worse − margin) + center_coef·(s_better + s_worse)²

The first term is the negative log likelihood of the Bradley–Terry model (1952), as in Stiennon et
al. 2020, eq. 1, with the margin of Llama 2 (Touvron et al. 2023, eq. 2). The second term
(Eisenstein et al. 2023, eq. 2) keeps scores near 0, since preferences determine only their
differences. A ranked list of K completions is one row: each completion passes through the model
once, and all K(K−1)/2 pairs are in the same batch. Spread over batches, the completions would be
overfitted (Ouyang et al. 2022, section 3.5).

The model is a sequence classifier with one label. Its head is initialized from N(0, 1/(d + 1)), d
its width (Stiennon et al. 2020). After training, the mean score of the best completions of the
training rows is saved in the config as `score_mean`, and `fastppo.rewards.model.RewardModel`
subtracts it: a good completion scores 0 on average, like the reference texts of Stiennon et al.
2020. It cannot be part of the weights, because decoder classifiers in transformers have no bias in
their head.
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
    set_seed,
)

from fastppo.data import fingerprint
from fastppo.data.datasets import Rows, shuffled
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
from fastppo.run.options import unused
from fastppo.run.progress import console_of_first, say, show_messages
from fastppo.stages.data import Encoded, load_data, row_limit
from fastppo.stages.options import RewardModelConfig
from fastppo.stages.preferences import Comparison, collate, encode_comparisons
from fastppo.stages.supervised import SupervisedTrainer, save_model, stage_world

REFERENCE_TEXTS = 2048
"""Maximum number of completions in `score_mean`."""

CALIBRATION_BINS = 10

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
        margin: [P] or one number, reward units.
        weights: [P]; default 1/P, the mean over pairs.

    Source: Touvron et al. 2023, eq. 2; Eisenstein et al. 2023, eq. 2.
    """
    losses = -nn.functional.logsigmoid(chosen - rejected - margin)
    if center_coef:
        losses = losses + center_coef * (chosen + rejected).square()
    return losses.mean() if weights is None else (weights * losses).sum()


# -------------------------------------------------------------------------------------- the metrics


def accuracy(difference: Tensor) -> float:
    """Share of pairs [P] with s_better − s_worse > 0; ties count one half."""
    return ((difference > 0).double() + 0.5 * (difference == 0).double()).mean().item()


def log_loss(difference: Tensor) -> float:
    """Mean of −log σ(s_better − s_worse) over pairs [P], nats; log 2 for equal scores."""
    return -nn.functional.logsigmoid(difference.double()).mean().item()


def calibration_error(difference: Tensor) -> float:
    """Expected calibration error of P(first is better) = σ(s_first − s_second).

        Σ n_b/N·|mean P − observed share|,   over `CALIBRATION_BINS` bins of equal width in [0, 1]

    Each pair [P] counts in both orders: the first text of a row is always the better one.

    Source: Guo et al. 2017.
    """
    p = torch.sigmoid(difference.double())
    if not p.isfinite().all():
        return math.nan
    predicted = torch.cat([p, 1 - p])
    outcome = torch.cat([torch.ones_like(p), torch.zeros_like(p)])
    index = (predicted * CALIBRATION_BINS).long().clamp(max=CALIBRATION_BINS - 1)
    sums = torch.zeros(CALIBRATION_BINS, dtype=torch.float64, device=p.device)
    sums.index_add_(0, index, predicted - outcome)
    return sums.abs().sum().item() / len(predicted)


# ---------------------------------------------------------------------------------------- the model


def load_classifier(
    name: str, *, dtype: torch.dtype = torch.float32, attn_implementation: str = "auto"
) -> PreTrainedModel:
    """Load a sequence classifier with one label, or build one from a causal LM.

    A missing head is initialized from N(0, 1/(d + 1)), d its width.

    Raises:
        ValueError: the model has several labels, lacks weights of its trunk, cannot be found, or
            has an architecture without a classifier.
    """
    config = model_config(name)
    if is_sequence_classifier(config) and config.num_labels != 1:
        raise ValueError(f"{name}: expected a classifier with 1 label, got {config.num_labels}")
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
    """Return whether a weight belongs to the head; the pooler of an encoder does."""
    return not weight.startswith(f"{model.base_model_prefix}.") or ".pooler." in weight


def head_std(width: int) -> float:
    """1/√(d + 1): untrained scores are close to 0 (Stiennon et al. 2020)."""
    return 1 / math.sqrt(width + 1)


# ------------------------------------------------------------------------------------ the training


class _Classifier(nn.Module):
    """Module whose forward pass returns scores; sharded if there are several processes."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return scores [B] fp32 of right-padded texts [B, S]."""
        # FSDP registers hooks on the output; a view would lose them.
        return sequence_scores(self.model, input_ids, attention_mask).clone()


class _PairTrainer(SupervisedTrainer):
    """A training loop with the Bradley–Terry loss, averaged over prompts and over their pairs."""

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
        """Return the scores [N] fp32 of the best completions of up to `REFERENCE_TEXTS` rows."""
        drawn = shuffled(len(rows), self.config.seed, epoch=0)[:REFERENCE_TEXTS]
        best = []
        for row in drawn:
            better, _ = rows[row].pairs[0]
            best.append(Comparison([rows[row].texts[better]], [], 0.0))
        scores = [scores for _, scores in self.scored(best)]
        return self.world.cat(torch.cat([torch.zeros(0), *scores]))

    @torch.no_grad()
    def scored(self, rows: list[Comparison]) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """Yield this process's batches and the scores of their texts, on the CPU."""
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
    console: Console | None = None,
) -> dict[str, float]:
    """Train a reward model and save it with its tokenizer in `config.output_dir`.

    Args:
        model, tokenizer: used instead of `config.model`; the model is trained in place.
        rows, eval_rows: used instead of `config.data` and `config.eval_data`; see `preferences`.

    Returns:
        dict: `loss`, the mean over the last tenth of the steps, nats; with held-out rows their
        `accuracy`, `log_loss` (nats) and `calibration_error`; `score_mean` and `score_std` of the
        best completions of the training rows, reward units.

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
            model = load_classifier(
                config.model,
                dtype=getattr(torch, config.param_dtype),
                attn_implementation=config.attn_implementation,
            )
        if model.config.num_labels != 1:
            raise ValueError(f"expected a classifier with 1 label, got {model.config.num_labels}")
        tokenizer = _with_pad(model, tokenizer or load_tokenizer(config.model))
        device = world.device or config.torch_device
        model = model.to(device)  # type: ignore[arg-type]
        embeddings: Any = model.get_input_embeddings()
        check_vocabulary(tokenizer, len(embeddings.weight))
        switch_dropout_off(model)
        limit = row_limit(model, config.max_length)

        def encode(rows: Rows, source: str) -> Encoded:
            encoded = encode_comparisons(rows, tokenizer, limit, source)
            if encoded.truncated:
                sentence = f"{source}: {encoded.truncated} texts cut to {limit} tokens"
                say(console, sentence, "yellow")
            if encoded.dropped:
                sentence = f"{source}: rows without a preference, dropped: {encoded.dropped}"
                say(console, sentence, "yellow")
            return encoded

        data = load_data(config, rows, eval_rows, encode)
        data.fingerprints["model"] = fingerprint.of_model(model)
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
            data,
            root=classifier,
            trunk=model.base_model,
            collate=functools.partial(collate, pad_token_id=tokenizer.pad_token_id),
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
            # Also if it is None: the initial model may have another one.
            trained.config.score_max_length = config.max_length
            save_model(config.output_dir, trained, tokenizer)

        with unsharded(classifier):
            world.on_main_rank(save)
        return result


def _with_pad(model: PreTrainedModel, tokenizer: Any) -> Any:
    """Return the tokenizer with a pad token, and set it in the model's config.

    Classifiers in transformers need it for batches of several texts.
    """
    if tokenizer.pad_token is None:
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token is None:
        raise ValueError("the tokenizer has neither a pad nor an EOS token")
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    return tokenizer
