"""Stage 1, supervised fine-tuning: a causal LM learns to continue prompts as demonstrations do.

    loss = −Σ logprob(token) / (tokens with a loss),   over a whole optimiser step

A row is one of three forms, told by its columns (the first that fits):

    {messages}              a chat; the loss is on the assistant's turns alone
    {prompt, completion}    strings, or chat messages as the prompt and a string or messages as the
                            completion; the loss is on the completion
    {text}                  plain text; the loss is on every token

EOS ends each row with a loss of its own, so the model learns to stop. The assistant's turns are
those that the chat template marks with `{% generation %}`; under a template without marks, turn i
is what the rendering of i + 1 messages adds to that of i messages and the generation prompt, up to
its EOS. Logits are never formed in full: the loss is `linear_token_logprobs` on the trunk's hidden
states. Dropout is off, as it is in PPO. Rows are not packed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import jinja2
import torch
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel, TrainerCallback, set_seed
from transformers.utils.chat_template_utils import render_jinja_template

from fastppo.data import DataError, Rows, encode_prompt, is_chat, load_rows
from fastppo.losses import linear_token_logprobs
from fastppo.model import LanguageModel, add_adapters, checkpoint_activations
from fastppo.options import option
from fastppo.parts import pad_token_id
from fastppo.pretrained import load_causal_lm, load_tokenizer
from fastppo.supervised import (
    Records,
    SupervisedConfig,
    SupervisedTrainer,
    check_vocabulary,
    context_length,
    open_run,
    pad,
    padded_batch,
    progress,
    split_by_prompt,
)

IGNORED = -100
"""Label of the positions without a loss, as transformers' losses read it."""

GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(kw_only=True, slots=True)
class SFTConfig(SupervisedConfig):
    """Options of supervised fine-tuning. Lengths are in tokens."""

    model: str = option("", "Required. A causal LM: directory or hub name")
    epochs: float = option(2.0, "Passes over the data", above=0)
    output_dir: str = option("runs/sft", "Run directory; the model is saved in it")


# ---------------------------------------------------------------------------------------- the rows


@dataclass(slots=True)
class Demonstrations:
    """Encoded rows."""

    examples: list[dict[str, list[int]]] = field(default_factory=list)
    """{input_ids, labels} each, of one length; labels are IGNORED where there is no loss."""
    prompts: list[Any] = field(default_factory=list)
    """What each row answers: rows of one prompt are held out together."""
    truncated: int = 0
    """Rows cut at max_length, the dropped ones among them."""
    dropped: int = 0
    """Rows of which the cut left nothing with a loss."""


def encode_demonstrations(
    rows: Rows, tokenizer: Any, max_length: int | None = None, source: str = "data"
) -> Demonstrations:
    """Token ids and labels of all rows.

    Args:
        max_length: tokens; longer rows lose their end.

    Raises:
        DataError: a row of no known form or with an empty part, chat messages that the template
            cannot render or has no place for, each with the row's number; or no row is left.
        ValueError: the tokenizer has no EOS token.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no EOS token, and without one no row can end")
    found = Demonstrations()
    for number, row in enumerate(rows, 1):
        prompt, ids, labels = _encode_row(row, tokenizer, f"{source}, row {number}")
        labels[0] = IGNORED  # nothing stands before it to predict it
        if max_length is not None and len(ids) > max_length:
            found.truncated += 1
            ids, labels = ids[:max_length], labels[:max_length]
        if all(label == IGNORED for label in labels):
            found.dropped += 1
            continue
        found.examples.append({"input_ids": ids, "labels": labels})
        found.prompts.append(prompt)
    if not found.examples:
        raise DataError(
            f"{source}: of {len(rows)} rows none has a token with a loss within "
            f"max_length={max_length}"
        )
    return found


def _encode_row(row: dict[str, Any], tokenizer: Any, where: str) -> tuple[Any, list[int], list]:
    """(prompt, ids, labels)."""
    if row.get("messages") is not None:
        messages = row["messages"]
        if not is_chat(messages):
            raise DataError(f"{where}: messages must be a list of {{role, content}}")
        roles = [message["role"] for message in messages]
        if "assistant" not in roles:
            raise DataError(f"{where}: no turn of the assistant, got {', '.join(roles)}")
        before = messages[: roles.index("assistant")]
        return before, *encode_chat(list(messages), tokenizer, where)
    if row.get("prompt") is not None and row.get("completion") is not None:
        prompt, completion = row["prompt"], row["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            return prompt, *_encode_strings(prompt, completion, tokenizer, where)
        if not is_chat(prompt):
            raise DataError(
                f"{where}: a prompt is a string with a string as its completion, or a list of "
                f"{{role, content}} messages, got {type(prompt).__name__} and "
                f"{type(completion).__name__}"
            )
        if isinstance(completion, str):
            completion = [{"role": "assistant", "content": completion}]
        if not is_chat(completion) or completion[0]["role"] != "assistant":
            raise DataError(
                f"{where}: a completion is a string or messages that begin with the assistant's"
            )
        ids, labels = encode_chat([*prompt, *completion], tokenizer, where, len(prompt))
        return prompt, ids, labels
    if row.get("text") is not None:
        if not isinstance(row["text"], str) or not row["text"].strip():
            raise DataError(f"{where}: text must be a non-empty string, got {row['text']!r}")
        ids = list(tokenizer(row["text"])["input_ids"])
        if ids[-1] != tokenizer.eos_token_id:
            ids.append(tokenizer.eos_token_id)
        return row["text"], ids, list(ids)
    raise DataError(
        f"{where}: want messages, prompt and completion, or text; got {', '.join(row) or 'nothing'}"
    )


def _encode_strings(
    prompt: str, completion: str, tokenizer: Any, where: str
) -> tuple[list[int], list[int]]:
    """Tokenised apart: PPO meets them as prompt ids and, behind them, response ids."""
    head = encode_prompt(prompt, tokenizer, where)
    tail = list(tokenizer(completion, add_special_tokens=False)["input_ids"])
    if tail[-1:] != [tokenizer.eos_token_id]:
        tail.append(tokenizer.eos_token_id)
    return head + tail, [IGNORED] * len(head) + tail


def encode_chat(
    messages: list[dict[str, Any]], tokenizer: Any, where: str, first: int = 0
) -> tuple[list[int], list[int]]:
    """(ids, labels) of a conversation, with labels on the assistant's turns from message `first`.

    The conversation is tokenised as one text, as PPO tokenises a prompt of messages. A token
    belongs to a turn if its last character does.

    Raises:
        DataError: there is no template, it refuses the messages, or it renders them in a way that
            hides where a turn begins.
    """
    whole = render_chat(tokenizer, messages, where)
    if not tokenizer.is_fast:
        raise DataError(f"{where}: chat messages need a fast tokenizer, for its character offsets")
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    ids = list(encoded["input_ids"])
    ends = [end if end > start else -1 for start, end in encoded["offset_mapping"]]
    if GENERATION_MARK.search(tokenizer.get_chat_template()):
        spans = _marked_spans(whole, messages, tokenizer, where, first)
    else:
        spans = _unmarked_spans(whole, messages, tokenizer, where, first)
    mask = [any(start < end <= stop for start, stop in spans) for end in ends]
    if not any(mask):
        raise DataError(f"{where}: the chat template renders no token as the assistant's")
    labels = [token if is_loss else IGNORED for token, is_loss in zip(ids, mask, strict=True)]
    last = max(i for i, is_loss in enumerate(mask) if is_loss)
    if messages[-1]["role"] == "assistant" and tokenizer.eos_token_id not in ids[last:]:
        ids.append(tokenizer.eos_token_id)
        labels.append(tokenizer.eos_token_id)
    return ids, labels


def _marked_spans(
    whole: str, messages: list[dict[str, Any]], tokenizer: Any, where: str, first: int
) -> list[tuple[int, int]]:
    """(start, stop) in characters of what the template has between its generation marks.

    From the characters and not by `return_assistant_tokens_mask`, which stops at the first turn
    that begins with white space, where it finds no token.
    """
    head = render_chat(tokenizer, messages[:first], where) if first else ""
    if not whole.startswith(head):
        raise _inconsistent(where, first)
    rendered: Any = render_jinja_template(
        conversations=[[{k: v for k, v in m.items() if v is not None} for m in messages]],
        chat_template=tokenizer.get_chat_template(),
        return_assistant_tokens_mask=True,
        **tokenizer.special_tokens_map,
    )
    _, (found,) = rendered
    return [(start, stop) for start, stop in found if start >= len(head)]


def _unmarked_spans(
    whole: str, messages: list[dict[str, Any]], tokenizer: Any, where: str, first: int
) -> list[tuple[int, int]]:
    """(start, stop) in characters of each turn of the assistant, its EOS the last of it."""
    spans = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant" or i < first:
            continue
        if i == 0:
            raise DataError(
                f"{where}: the assistant speaks first; where its turn begins is seen only under a "
                "chat template with {% generation %} marks"
            )
        before = render_chat(tokenizer, messages[:i], where, add_generation_prompt=True)
        after = render_chat(tokenizer, messages[: i + 1], where)
        if not (after.startswith(before) and whole.startswith(after)):
            raise _inconsistent(where, i)
        start, stop = len(before), len(after)
        eos = whole.rfind(tokenizer.eos_token, start, stop)
        spans.append((start, stop if eos < 0 else eos + len(tokenizer.eos_token)))
    return spans


def _inconsistent(where: str, message: int) -> DataError:
    return DataError(
        f"{where}: the chat template renders the first {message} messages in another way inside "
        f"the longer conversation, so where the assistant's turn begins cannot be seen; mark it "
        "in the template with {% generation %}, or give each turn as a row of prompt and completion"
    )


def render_chat(tokenizer: Any, messages: list[dict[str, Any]], where: str, **options: Any) -> str:
    """The conversation as the tokenizer's chat template writes it.

    Raises:
        DataError: there is no template, or it refuses the messages.
    """
    if tokenizer.chat_template is None:
        raise DataError(f"{where}: chat messages, but the tokenizer has no chat template")
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
    except jinja2.TemplateError as error:
        raise DataError(f"{where}: the chat template refuses it: {error}") from error


def collate(examples: list[dict[str, list[int]]], pad_token_id: int) -> dict[str, Tensor]:
    """Right-padded input_ids, attention_mask and labels, [B, S] int64."""
    batch = padded_batch([example["input_ids"] for example in examples], pad_token_id)
    return {**batch, "labels": pad([example["labels"] for example in examples], IGNORED)}


# ------------------------------------------------------------------------------------ the training


class _SFTTrainer(SupervisedTrainer):
    """Cross entropy per token with a label."""

    policy: LanguageModel

    def items(self, batch: dict[str, Tensor]) -> float:
        return float((batch["labels"] != IGNORED).sum())

    def loss_sum(self, batch: dict[str, Tensor]) -> Tensor:
        labels = batch["labels"][:, 1:]
        row, column = (labels != IGNORED).nonzero(as_tuple=True)
        output = self.policy.causal_lm.base_model(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False
        )
        head = self.policy.head
        logprobs = linear_token_logprobs(
            output.last_hidden_state[row, column],
            head.weight,
            labels[row, column],
            bias=head.bias,
            logit_scale=head.logit_scale,
            softcap=head.softcap,
        )
        return -logprobs.sum()

    def measure(self, rows: list[Any]) -> dict[str, float]:
        total, tokens = 0.0, 0.0
        for batch in self.batches(rows):
            total += self.loss_sum(batch).item()
            tokens += self.items(batch)
        return {"loss": total / tokens}


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
    console = console or Console(stderr=True)
    set_seed(config.seed)
    if model is None:
        model = load_causal_lm(
            config.model,
            dtype=getattr(torch, config.param_dtype),
            attn_implementation=config.attn_implementation,
        )
    tokenizer = tokenizer or load_tokenizer(config.model)
    model = model.to(config.torch_device)  # type: ignore[arg-type]
    check_vocabulary(model, tokenizer)
    peft = None
    if config.lora_rank > 0:
        peft = add_adapters(model, config.lora_rank, config.lora_alpha, config.lora_target_modules)
    policy = LanguageModel(model, peft)
    policy.check_heads()
    limit = context_length(model, config.max_length)

    def encode(rows: Rows, source: str) -> Demonstrations:
        found = encode_demonstrations(rows, tokenizer, limit, source)
        if found.truncated:
            console.print(
                f"[yellow]{source}: {found.truncated} of {len(rows)} rows cut to {limit} tokens"
                + (f", {found.dropped} of them dropped: no loss left" if found.dropped else "")
            )
        return found

    data = encode(rows or load_rows(config.data, config.split), config.data or "data")
    if eval_rows is not None or config.eval_data is not None:
        held_rows = eval_rows or load_rows(config.eval_data or "", config.split)
        held_out = encode(held_rows, config.eval_data or "eval_data").examples
        train = data.examples
    else:
        train, held_out = split_by_prompt(
            data.examples, data.prompts, config.eval_share, config.seed
        )
    run_dir = open_run(config)
    tokens = sum(label != IGNORED for example in train for label in example["labels"])
    console.print(
        f"SFT on {len(train)} rows, {tokens} tokens with a loss; {len(held_out)} held out"
    )
    if config.gradient_checkpointing:
        checkpoint_activations(model)
    filler = pad_token_id(tokenizer, model)
    with progress("SFT", console) as bar:
        trainer = _SFTTrainer(
            config,
            model if peft is None else peft,
            train,
            held_out,
            lambda examples: collate(examples, filler),
            [Records(run_dir), bar, *(callbacks or [])],
        )
        trainer.policy = policy
        result = trainer.run(console)
    _stop_at_eos(model, tokenizer)
    merged = model if peft is None else peft.merge_and_unload()
    merged.save_pretrained(run_dir)
    tokenizer.save_pretrained(run_dir)
    return result


def _stop_at_eos(model: PreTrainedModel, tokenizer: Any) -> None:
    """`generate` on the saved model ends where the demonstrations did."""
    known = model.generation_config.eos_token_id
    known = known if isinstance(known, list) else [] if known is None else [known]
    if tokenizer.eos_token_id not in known:
        known = [*known, tokenizer.eos_token_id]
        model.generation_config.eos_token_id = known if len(known) > 1 else known[0]
