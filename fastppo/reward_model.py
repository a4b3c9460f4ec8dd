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
width, as in Stiennon et al. 2020. A text is prompt and completion joined as they are, as
`fastppo.rewards.RewardModel` reads them: a space between the two belongs to the completion. After
training the mean score of reference texts is written to the model's config as `score_mean`, which
`RewardModel` subtracts, so a reference text scores 0 on average (Stiennon et al. 2020). It is not
in the weights because the classifiers of decoders in transformers have no bias in their head, nor,
with RMSNorm, any other constant to hold it.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import Tensor, nn
from transformers import (
    AutoModelForSequenceClassification,
    PreTrainedModel,
    TrainerCallback,
    set_seed,
)

from fastppo.data import DataError, Rows, is_chat, load_rows, shuffled
from fastppo.model import (
    add_adapters,
    checkpoint_activations,
    switch_dropout_off,
)
from fastppo.options import option
from fastppo.pretrained import (
    attention_implementation,
    is_sequence_classifier,
    load_tokenizer,
    load_whole,
    model_config,
)
from fastppo.rewards import sequence_scores
from fastppo.sft import render_chat
from fastppo.supervised import (
    Records,
    SupervisedConfig,
    SupervisedTrainer,
    check_vocabulary,
    context_length,
    open_run,
    padded_batch,
    progress,
    split_by_prompt,
)

CALIBRATION_BINS = 10


@dataclass(kw_only=True, slots=True)
class RewardModelConfig(SupervisedConfig):
    """Options of the reward model. Lengths are in tokens, scores in reward units."""

    model: str = option(
        "", "Required. The SFT model, or a sequence classifier of one label: directory or hub name"
    )
    eval_share: float = option(
        0.1, "Share of the rows held out, by prompt; 0 holds none out", minimum=0, maximum=0.9
    )
    learning_rate: float = option(1e-5, "Peak learning rate of AdamW", above=0)
    center_coef: float = option(
        0.0, "Weight of (s_better + s_worse)² in the loss, per squared reward unit", minimum=0
    )
    normalize: bool = option(
        True, "Shift scores to mean 0 on the reference texts; off: --normalize false"
    )
    reference: str | None = option(
        None,
        "Reference texts, say the SFT data: prompt and completion, messages, or text; none given "
        "means the best completion of each training row",
    )
    reference_size: int = option(2048, "Reference texts drawn at most, texts", minimum=1)
    output_dir: str = option("runs/reward", "Run directory; the model is saved in it")


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


# ---------------------------------------------------------------------------------------- the rows


class Comparison(NamedTuple):
    """The completions of one prompt, and which of them is better than which."""

    texts: list[list[int]]
    """Token ids of prompt and completion, one per completion."""
    pairs: list[tuple[int, int]]
    """(better, worse), indices of `texts`; the first pair begins with the best."""
    margin: float
    """Of each pair, reward units."""


@dataclass(slots=True)
class Comparisons:
    """Encoded rows."""

    examples: list[Comparison] = field(default_factory=list)
    prompts: list[Any] = field(default_factory=list)
    """Rows of one prompt are held out together."""
    truncated: int = 0
    """Texts cut at max_length."""
    dropped: int = 0
    """Rows that prefer nothing: all ranks tie, or the texts are the same."""


def encode_comparisons(
    rows: Rows, tokenizer: Any, max_length: int | None = None, source: str = "data"
) -> Comparisons:
    """Token ids and pairs of all rows: {prompt, chosen, rejected} with an optional `margin`, or
    {prompt, completions} from best to worst with optional `ranks`, lower better, equal for a tie.

    Args:
        max_length: tokens; longer texts lose their beginning, as `RewardModel` cuts them.

    Raises:
        DataError: a row of no known form, with the row's number; or no row is left.
    """
    found = Comparisons()
    for number, row in enumerate(rows, 1):
        where = f"{source}, row {number}"
        prompt, completions, ranks, margin = _comparison(row, where)
        texts = [text_ids(tokenizer, prompt, completion, where) for completion in completions]
        found.truncated += sum(max_length is not None and len(ids) > max_length for ids in texts)
        texts = [_cut(ids, tokenizer, max_length) for ids in texts]
        by_rank = sorted(range(len(texts)), key=ranks.__getitem__)
        pairs = [
            (i, j)
            for i, j in itertools.combinations(by_rank, 2)
            if ranks[i] < ranks[j] and texts[i] != texts[j]
        ]
        if not pairs:
            found.dropped += 1
            continue
        found.examples.append(Comparison(texts, pairs, margin))
        found.prompts.append(prompt)
    if not found.examples:
        raise DataError(f"{source}: none of {len(rows)} rows prefers one text to another")
    return found


def _comparison(row: dict[str, Any], where: str) -> tuple[Any, list[Any], list[float], float]:
    """(prompt, completions, ranks, margin) of a row of either form."""
    if row.get("completions") is not None:
        completions = row["completions"]
        if not isinstance(completions, list) or len(completions) < 2:
            raise DataError(f"{where}: completions must be a list of 2 or more, best to worst")
        ranks = row.get("ranks")
        if ranks is None:
            ranks = list(range(len(completions)))
        numbers = isinstance(ranks, list) and all(isinstance(r, (int, float)) for r in ranks)
        if not numbers or len(ranks) != len(completions):
            raise DataError(f"{where}: ranks must be {len(completions)} numbers, got {ranks!r}")
    elif row.get("chosen") is not None and row.get("rejected") is not None:
        completions, ranks = [row["chosen"], row["rejected"]], [0, 1]
    else:
        raise DataError(
            f"{where}: want prompt, chosen and rejected, or prompt and completions; "
            f"got {', '.join(row) or 'nothing'}"
        )
    margin = row.get("margin")
    if margin is None:
        margin = 0.0
    if not isinstance(margin, (int, float)) or not math.isfinite(margin):
        raise DataError(f"{where}: margin must be a finite number, got {margin!r}")
    if len(completions) > 2 and margin:
        raise DataError(f"{where}: a margin is that of one pair; a ranked list has several")
    return *_prompt_and_completions(row.get("prompt"), completions, where), ranks, float(margin)


def _prompt_and_completions(
    prompt: Any, completions: list[Any], where: str
) -> tuple[Any, list[Any]]:
    """Brings all ways to write them to strings behind a string, or to strings or messages behind
    messages."""
    chats = [is_chat(completion) for completion in completions]
    if any(not chat and not isinstance(c, str) for chat, c in zip(chats, completions, strict=True)):
        raise DataError(
            f"{where}: a completion is a string or a list of {{role, content}} messages"
        )
    if any(chats) and not all(chats):
        raise DataError(f"{where}: the completions are strings and chat messages; want one form")
    # Of chats, a whole conversation begins with the user's turn or the system's.
    whole = [c[0]["role"] != "assistant" for c in completions if not isinstance(c, str)]
    if whole and all(whole):
        return _shared_prefix(completions, where)
    if any(whole):
        raise DataError(
            f"{where}: some completions begin with the assistant's turn and some are whole "
            "conversations; want one form"
        )
    if prompt is None:
        raise DataError(
            f"{where}: no prompt; only whole conversations, lists of messages that begin with the "
            "user's or the system's, hold their own"
        )
    if isinstance(prompt, str):
        if not any(chats):
            return prompt, completions
        prompt = [{"role": "user", "content": prompt}]
    elif not is_chat(prompt):
        raise DataError(
            f"{where}: a prompt is a string or a list of {{role, content}} messages, "
            f"got {type(prompt).__name__}"
        )
    return list(prompt), completions


def _shared_prefix(conversations: list[Any], where: str) -> tuple[Any, list[Any]]:
    """The messages that whole conversations begin with, and the rest of each."""
    conversations = [list(messages) for messages in conversations]
    longest = min(len(messages) for messages in conversations) - 1  # a completion is left to each
    shared = 0
    while shared < longest and all(m[shared] == conversations[0][shared] for m in conversations):
        shared += 1
    if shared == 0:
        raise DataError(f"{where}: the conversations do not begin with the same messages")
    return conversations[0][:shared], [messages[shared:] for messages in conversations]


def text_ids(tokenizer: Any, prompt: Any, completion: Any, where: str = "text") -> list[int]:
    """Ids of prompt and completion as `fastppo.rewards.RewardModel` reads them.

    Args:
        prompt: a string, or chat messages.
        completion: a string; behind messages also messages, which have no match in PPO when there
            are several.
    """
    if isinstance(prompt, str):
        return list(tokenizer(prompt + completion)["input_ids"])
    if isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}]
    if len(completion) == 1 and isinstance(completion[0]["content"], str):
        completion = [{**completion[0], "content": completion[0]["content"].strip()}]
    text = render_chat(tokenizer, [*prompt, *completion], where)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _cut(ids: list[int], tokenizer: Any, max_length: int | None) -> list[int]:
    if max_length is None or len(ids) <= max_length:
        return ids
    first = ids[:1] if ids[0] in tokenizer.all_special_ids else []
    return first + ids[len(first) - max_length :]


def _reference_text(row: dict[str, Any], tokenizer: Any, where: str) -> list[int]:
    """Ids of a demonstration: {messages}, {prompt, completion} or {text}."""
    if is_chat(row.get("messages") or ()):
        text = render_chat(tokenizer, list(row["messages"]), where)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    if row.get("prompt") is not None and row.get("completion") is not None:
        prompt, (completion,) = _prompt_and_completions(row["prompt"], [row["completion"]], where)
        return text_ids(tokenizer, prompt, completion, where)
    if isinstance(row.get("text"), str):
        return list(tokenizer(row["text"])["input_ids"])
    raise DataError(
        f"{where}: want messages, prompt and completion, or text; got {', '.join(row) or 'nothing'}"
    )


def collate(examples: Sequence[Comparison], pad_token_id: int) -> dict[str, Tensor]:
    """All texts of several prompts in one right-padded batch, each once, with their pairs.

    Returns:
        dict: input_ids, attention_mask [ΣK, S] int64; better, worse [P] int64, rows of the batch;
        margin, weight [P] fp32: one over the number of the prompt's pairs; prompts [] int64.
    """
    batch = padded_batch([text for one in examples for text in one.texts], pad_token_id)
    pairs: list[tuple[int, int, float, float]] = []
    start = 0
    for one in examples:
        weight = 1 / len(one.pairs)
        pairs += [(start + i, start + j, one.margin, weight) for i, j in one.pairs]
        start += len(one.texts)
    better, worse, margin, weights = zip(*pairs, strict=True)
    return {
        **batch,
        "better": torch.tensor(better),
        "worse": torch.tensor(worse),
        "margin": torch.tensor(margin),
        "weight": torch.tensor(weights),
        "prompts": torch.tensor(len(examples)),
    }


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
        raise ValueError(f"{name} is a classifier of {config.num_labels} labels; want 1")
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
    """A pooler stands between an encoder's trunk and its head; masked LMs have none."""
    return not weight.startswith(f"{model.base_model_prefix}.") or ".pooler." in weight


def head_std(width: int) -> float:
    """1/√(d + 1): untrained scores stay near 0 (Stiennon et al. 2020)."""
    return 1 / math.sqrt(width + 1)


# ------------------------------------------------------------------------------------ the training


class _PairTrainer(SupervisedTrainer):
    """The Bradley–Terry loss: the mean over prompts of the mean over a prompt's pairs."""

    classifier: PreTrainedModel
    center_coef: float

    def items(self, batch: dict[str, Tensor]) -> float:
        return float(batch["prompts"])

    def loss_sum(self, batch: dict[str, Tensor]) -> Tensor:
        scores = sequence_scores(self.classifier, batch["input_ids"], batch["attention_mask"])
        return bradley_terry_loss(
            scores[batch["better"]],
            scores[batch["worse"]],
            batch["margin"],
            center_coef=self.center_coef,
            weights=batch["weight"],
        )

    def measure(self, rows: list[Any]) -> dict[str, float]:
        difference = self.differences(rows)
        return {"accuracy": accuracy(difference), "log_loss": log_loss(difference)}

    @torch.no_grad()
    def differences(self, rows: list[Any]) -> Tensor:
        """[P] fp32 on the CPU: s_better − s_worse of every pair."""
        found = []
        for batch in self.batches(rows):
            scores = sequence_scores(self.classifier, batch["input_ids"], batch["attention_mask"])
            found.append((scores[batch["better"]] - scores[batch["worse"]]).cpu())
        return torch.cat(found)


def train_reward_model(
    config: RewardModelConfig,
    *,
    model: PreTrainedModel | None = None,
    tokenizer: Any = None,
    rows: Rows | None = None,
    eval_rows: Rows | None = None,
    reference_rows: Rows | None = None,
    callbacks: list[TrainerCallback] | None = None,
    console: Console | None = None,
) -> dict[str, float]:
    """Trains a reward model and saves it with its tokenizer in `config.output_dir`.

    A text is prompt and completion joined as they are, as `fastppo.rewards.RewardModel` reads them:
    a space between the two belongs to the completion. With held-out rows, `calibration.json` and
    `calibration.png` are written beside the model. What is measured after training (calibration,
    the mean of the reference) is measured in fp32, as `RewardModel` runs.

    Args:
        model, tokenizer: instead of loading `config.model`; the model is trained in place.
        rows, eval_rows, reference_rows: instead of `config.data`, `eval_data` and `reference`.

    Returns:
        dict: `loss`, mean of the last tenth, nats; with held-out rows `accuracy`, `log_loss`
        (nats), `brier` and `calibration_error` on their pairs; with `normalize` `score_mean`, the
        mean that was subtracted, and `score_std`, both of the reference texts, reward units.

    Raises:
        DataError: a row cannot be used.
        ValueError: model, tokenizer and options do not fit, or the directory holds a run already.
    """
    console = console or Console(stderr=True)
    set_seed(config.seed)
    if model is None:
        model = load_classifier(
            config.model,
            dtype=getattr(torch, config.param_dtype),
            attn_implementation=config.attn_implementation,
        )
    if model.config.num_labels != 1:
        raise ValueError(f"a reward model has 1 label, got {model.config.num_labels}")
    tokenizer = tokenizer or load_tokenizer(config.model)
    tokenizer = _with_pad(model, tokenizer)
    model = model.to(config.torch_device)  # type: ignore[arg-type]
    check_vocabulary(model, tokenizer)
    switch_dropout_off(model)
    limit = context_length(model, config.max_length)

    def encode(rows: Rows, source: str) -> Comparisons:
        found = encode_comparisons(rows, tokenizer, limit, source)
        if found.truncated:
            console.print(f"[yellow]{source}: {found.truncated} texts cut to {limit} tokens")
        if found.dropped:
            console.print(f"[yellow]{source}: {found.dropped} rows without a preference dropped")
        return found

    data = encode(rows or load_rows(config.data, config.split), config.data or "data")
    if eval_rows is not None or config.eval_data is not None:
        held_rows = eval_rows or load_rows(config.eval_data or "", config.split)
        train = data.examples
        held_out = encode(held_rows, config.eval_data or "eval_data").examples
    else:
        train, held_out = split_by_prompt(
            data.examples, data.prompts, config.eval_share, config.seed
        )
    reference: list[list[int]] = []
    if config.normalize:
        reference = _reference(config, reference_rows, tokenizer, limit, train)
    run_dir = open_run(config)
    console.print(
        f"reward model on {len(train)} rows, {sum(len(one.pairs) for one in train)} pairs; "
        f"{sum(len(one.pairs) for one in held_out)} pairs held out"
    )
    peft = None
    if config.lora_rank > 0:
        peft = add_adapters(
            model, config.lora_rank, config.lora_alpha, config.lora_target_modules, "SEQ_CLS"
        )
    if config.gradient_checkpointing:
        checkpoint_activations(model)
    with progress("reward model", console) as bar:
        trainer = _PairTrainer(
            config,
            model if peft is None else peft,
            train,
            held_out,
            lambda examples: collate(examples, tokenizer.pad_token_id),
            [Records(run_dir), bar, *(callbacks or [])],
        )
        trainer.classifier, trainer.center_coef = model, config.center_coef
        result = {"loss": trainer.run(console)["loss"]}
    if peft is not None:
        trainer.classifier = model = peft.merge_and_unload()
    model.config.score_mean = 0.0  # also where the model that this one started from had another
    model.save_pretrained(run_dir)
    tokenizer.save_pretrained(run_dir)

    model.float().eval()
    if held_out:
        difference = trainer.differences(held_out)
        found = calibration(difference)
        result |= {name: value for name, value in found.items() if isinstance(value, float)}
        write_calibration(run_dir, found)
    if reference:
        scores = _scores(model, reference, tokenizer.pad_token_id, config.batch_size)
        result |= {"score_mean": scores.mean().item(), "score_std": scores.std(correction=0).item()}
        _write_score_mean(run_dir, result["score_mean"])
        model.config.score_mean = result["score_mean"]
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


def _reference(
    config: RewardModelConfig,
    rows: Rows | None,
    tokenizer: Any,
    limit: int | None,
    train: list[Comparison],
) -> list[list[int]]:
    """Token ids of the texts whose mean score is to be 0."""
    if rows is None and config.reference is not None:
        rows = load_rows(config.reference, config.split)
    count = len(train) if rows is None else len(rows)
    drawn = shuffled(count, config.seed, epoch=0)[: config.reference_size]
    if rows is None:
        return [train[i].texts[train[i].pairs[0][0]] for i in drawn]
    source = config.reference or "reference"
    texts = [_reference_text(rows[i], tokenizer, f"{source}, row {i + 1}") for i in drawn]
    return [_cut(text, tokenizer, limit) for text in texts]


@torch.no_grad()
def _scores(
    model: PreTrainedModel, texts: list[list[int]], pad_token_id: int, batch_size: int
) -> Tensor:
    """[N] fp32 on the CPU."""
    found = []
    for start in range(0, len(texts), batch_size):
        batch = padded_batch(texts[start : start + batch_size], pad_token_id)
        ids, mask = (batch[name].to(model.device) for name in ("input_ids", "attention_mask"))
        found.append(sequence_scores(model, ids, mask).cpu())
    return torch.cat(found)


def _write_score_mean(directory: Path, mean: float) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["score_mean"] = mean
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


# --------------------------------------------------------------------------------- the measurement


def accuracy(difference: Tensor) -> float:
    """Share of pairs [P] with s_better − s_worse > 0; equal scores count one half."""
    return ((difference > 0).double() + 0.5 * (difference == 0).double()).mean().item()


def log_loss(difference: Tensor) -> float:
    """Mean of −log P(label), nats; log 2 for a model that knows nothing."""
    return -nn.functional.logsigmoid(difference.double()).mean().item()


def calibration(difference: Tensor, bins: int = CALIBRATION_BINS) -> dict[str, Any]:
    """Whether P(first is better) = σ(s_first − s_second) comes true as often as it says.

    A row names the better text first, so as it stands every outcome is 1 and no bin could hold any
    other share. Each pair therefore enters in both orders: (p, outcome 1) and (1 − p, outcome 0).
    The curve is then symmetric about (½, ½), and its right half says: of the pairs that the model
    was p sure of, it was right on this share.

    Args:
        difference: [P], s_better − s_worse.
        bins: of equal width over [0, 1].

    Returns:
        dict: `accuracy`; `log_loss`, nats; `brier`, mean (1 − p)²; `calibration_error`, the
        expected one, Σ n_b/N·|mean p − share|; `pairs`; `bins`, each {low, high, count, predicted,
        observed} in that order, without the empty ones.

    Source: Guo et al. 2017 for the expected calibration error.
    """
    p = torch.sigmoid(difference.double())
    both = torch.cat([p, 1 - p])
    outcome = torch.cat([torch.ones_like(p), torch.zeros_like(p)])
    index = (both * bins).long().clamp(max=bins - 1)
    found, error = [], 0.0
    for b in range(bins):
        inside = index == b
        if count := int(inside.sum()):
            predicted, observed = both[inside].mean().item(), outcome[inside].mean().item()
            error += count / len(both) * abs(predicted - observed)
            found.append(
                {
                    "low": b / bins,
                    "high": (b + 1) / bins,
                    "count": count,
                    "predicted": predicted,
                    "observed": observed,
                }
            )
    return {
        "accuracy": accuracy(difference),
        "log_loss": log_loss(difference),
        "brier": (1 - p).square().mean().item(),
        "calibration_error": error,
        "pairs": len(p),
        "bins": found,
    }


def write_calibration(directory: str | Path, found: dict[str, Any]) -> None:
    """calibration.json and calibration.png: predicted against observed shares, and the counts."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    directory = Path(directory)
    (directory / "calibration.json").write_text(json.dumps(found, indent=2) + "\n")
    bins = found["bins"]
    with plt.rc_context({"font.size": 10}):
        figure, (curve, counts) = plt.subplots(
            2, 1, figsize=(4.5, 5.5), layout="constrained", sharex=True, height_ratios=(3, 1)
        )
        curve.plot([0, 1], [0, 1], color="#999999", linewidth=1, linestyle="--")
        x = [each["predicted"] for each in bins]
        curve.plot(x, [each["observed"] for each in bins], "o-", color="#1f5fa8", linewidth=2)
        curve.set_ylabel("observed share")
        curve.set_title(
            f"{found['pairs']} held-out pairs, accuracy {found['accuracy']:.1%}, "
            f"calibration error {found['calibration_error']:.3f}",
            loc="left",
            fontsize=9,
        )
        middle = [(each["low"] + each["high"]) / 2 for each in bins]
        width = [0.9 * (each["high"] - each["low"]) for each in bins]
        counts.bar(middle, [each["count"] for each in bins], width, color="#9db8d6")
        counts.set_ylabel("pairs, both orders")
        counts.set_xlabel("predicted P(first is better)")
        for axis in (curve, counts):
            axis.spines[["top", "right"]].set_visible(False)
            axis.grid(alpha=0.25, linewidth=0.6)
        figure.savefig(directory / "calibration.png", dpi=130)
        plt.close(figure)
