"""Rewards: Python functions over text, and sequence-classification models with their own tokenizer.

A reward is a callable

    reward(prompts, completions, **columns) -> list[float]

`prompts` are as the dataset holds them (strings, or lists of chat messages), `completions` strings
without special tokens, `columns` the other columns of the dataset, each a list with one entry per
prompt. `prompts` and `completions` are passed by name to a function that has such parameters, and
by position to one that calls them otherwise; a function without `**columns` is given the columns
that it names. In a config a reward is

    path/to/file.py:function     a function of a file
    package.module:function      a function of an importable module
    directory or hub name        a model for AutoModelForSequenceClassification
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

Reward = Callable[..., Sequence[float]]

FUNCTION = re.compile(r"^(?P<where>.+):(?P<name>[A-Za-z_]\w*)$")


class RewardError(RuntimeError):
    """A reward raised, or returned something that cannot be trained on."""


@dataclass(slots=True)
class RewardTerm:
    """One reward under its name, with its weight in the sum."""

    name: str
    function: Reward
    weight: float = 1.0


def load_reward(spec: str, *, device: torch.device | str = "cpu", **model_options: Any) -> Reward:
    """The reward that `spec` names; see the module's docstring.

    Raises:
        ValueError: the file, module, function or model is not there.
    """
    match = FUNCTION.match(spec)
    if match and not Path(spec).exists():
        return _load_function(match["where"], match["name"])
    return RewardModel(spec, device=device, **model_options)


def _load_function(where: str, name: str) -> Reward:
    if where.endswith(".py"):
        path = Path(where)
        if not path.is_file():
            raise ValueError(f"reward {where}:{name}: there is no file {where}")
        module_spec = importlib.util.spec_from_file_location(path.stem, path)
        assert module_spec is not None
        assert module_spec.loader is not None
        module = importlib.util.module_from_spec(module_spec)
        sys.modules.setdefault(path.stem, module)
        _importable_from(path.parent)
        try:
            module_spec.loader.exec_module(module)
        except Exception as error:
            raise ValueError(
                f"reward {where}:{name}: importing {where} raised {error!r}"
            ) from error
    else:
        _importable_from(Path.cwd())
        try:
            module = importlib.import_module(where)
        except ModuleNotFoundError as error:
            raise ValueError(f"reward {where}:{name}: no module {error.name!r}") from error
    function = getattr(module, name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise ValueError(
            f"reward {where}:{name}: no function {name!r} there; "
            f"it has {', '.join(known) or 'none'}"
        )
    return function


def _importable_from(folder: Path) -> None:
    """A console script does not look for modules in the current folder by itself."""
    if str(folder.resolve()) not in sys.path:
        sys.path.insert(0, str(folder.resolve()))


def reward_name(spec: str) -> str:
    """A short name for logs: the function's, or the model directory's."""
    match = FUNCTION.match(spec)
    if match and not Path(spec).exists():
        return match["name"]
    return Path(spec).name


def make_terms(
    rewards: Sequence[str | Reward],
    weights: Sequence[float] | None = None,
    **options: Any,
) -> list[RewardTerm]:
    """Terms of specs and callables, each under a name of its own.

    Raises:
        ValueError: there are not as many weights as rewards.
    """
    if weights is not None and len(weights) != len(rewards):
        raise ValueError(f"got {len(rewards)} rewards and {len(weights)} reward_weights")
    terms: list[RewardTerm] = []
    taken: set[str] = set()
    for i, reward in enumerate(rewards):
        if isinstance(reward, str):
            name, function = reward_name(reward), load_reward(reward, **options)
        else:
            name, function = getattr(reward, "__name__", type(reward).__name__), reward
        unique, suffix = name, 2
        while unique in taken:
            unique, suffix = f"{name}_{suffix}", suffix + 1
        taken.add(unique)
        terms.append(RewardTerm(unique, function, 1.0 if weights is None else float(weights[i])))
    return terms


def score(
    term: RewardTerm,
    prompts: Sequence[Any],
    completions: Sequence[str],
    columns: dict[str, list[Any]] | None = None,
    failure_file: Path | None = None,
) -> list[float]:
    """The term's rewards of all completions, unweighted.

    Raises:
        RewardError: the reward raised, returned the wrong number of values, or one that is not a
            finite number. The samples are written to `failure_file` first.
    """
    columns = columns or {}
    try:
        values = _call(term.function, prompts, completions, columns)
    except Exception as error:
        where = _save_failure(failure_file, term, prompts, completions, columns, repr(error))
        raise RewardError(f"reward {term.name!r} raised {error!r}{where}") from error
    values = values.tolist() if hasattr(values, "tolist") else values
    problem = _problem(values, len(completions))
    if problem is not None:
        row, sentence = problem
        rows = range(len(completions)) if row is None else [row]
        where = _save_failure(
            failure_file,
            term,
            [prompts[i] for i in rows],
            [completions[i] for i in rows],
            {name: [column[i] for i in rows] for name, column in columns.items()},
            sentence,
        )
        raise RewardError(f"reward {term.name!r} {sentence}{where}")
    return [float(value) for value in values]


def _problem(values: Any, count: int) -> tuple[int | None, str] | None:
    """(the offending row or None for all, what is wrong), or None if nothing is."""
    if not isinstance(values, (list, tuple)):
        return None, f"returned {type(values).__name__}; want a list of {count} floats"
    if len(values) != count:
        return None, f"returned {len(values)} values for {count} completions"
    for row, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            number = getattr(value, "item", None)
            value = number() if number is not None else value
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            return row, f"returned {value!r} for completion {row}; want a finite number"
    return None


def _call(
    function: Reward,
    prompts: Sequence[Any],
    completions: Sequence[str],
    columns: dict[str, list[Any]],
) -> Any:
    """Calls the reward with what its signature has room for."""
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    positional = any(p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL) for p in parameters)
    wanted = {name: column for name, column in columns.items() if takes_all or name in named}
    if "completions" in named or not (named or positional):
        both: dict[str, Any] = {"prompts": prompts, "completions": completions}
        wanted |= {name: value for name, value in both.items() if takes_all or name in named}
        return function(**wanted)
    return function(prompts, completions, **wanted)


def _save_failure(
    path: Path | None,
    term: RewardTerm,
    prompts: Sequence[Any],
    completions: Sequence[str],
    columns: dict[str, list[Any]],
    reason: str,
) -> str:
    if path is None:
        return ""
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "reward": term.name,
        "reason": reason,
        "prompts": list(prompts),
        "completions": list(completions),
        "columns": columns,
    }
    path.write_text(json.dumps(record, ensure_ascii=False, indent=2, default=str))
    return f" (samples saved to {path})"


class RewardModel:
    """A sequence-classification model with one label, and its own tokenizer.

    A prompt of strings is joined with its completion and tokenised as one text; a prompt of chat
    messages is rendered by the reward tokenizer's own chat template, the completion as the
    assistant's turn. Texts longer than `max_length` tokens lose their beginning, not their end.
    """

    def __init__(
        self,
        name: str,
        *,
        device: torch.device | str = "cpu",
        batch_size: int = 32,
        max_length: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.__name__ = Path(name).name
        model = AutoModelForSequenceClassification.from_pretrained(name, dtype=dtype)
        if model.config.num_labels != 1:
            raise ValueError(f"reward model {name} has {model.config.num_labels} labels; want 1")
        self.model = model.to(device).eval().requires_grad_(False)
        self.tokenizer = AutoTokenizer.from_pretrained(name)
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        if self.model.config.pad_token_id is None:
            self.model.config.pad_token_id = self.tokenizer.pad_token_id
        limit = getattr(model.config, "max_position_embeddings", None)
        self.max_length = min(filter(None, (max_length, limit)), default=None)
        self.batch_size = batch_size

    @torch.no_grad()
    def __call__(self, prompts: Sequence[Any], completions: Sequence[str]) -> list[float]:
        rows = [self._tokens(p, c) for p, c in zip(prompts, completions, strict=True)]
        scores: list[float] = []
        for start in range(0, len(rows), self.batch_size):
            scores += self._scores(rows[start : start + self.batch_size])
        return scores

    def _scores(self, rows: list[list[int]]) -> list[float]:
        longest, device = max(map(len, rows)), self.model.device
        pad = self.tokenizer.pad_token_id
        ids = torch.tensor([row + [pad] * (longest - len(row)) for row in rows], device=device)
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        mask = mask.to(device)
        return sequence_scores(self.model, ids, mask).tolist()

    def _tokens(self, prompt: Any, completion: str) -> list[int]:
        """The text's ids. Too long a text loses its beginning, but for a leading special token."""
        text = self._text(prompt, completion)
        # A chat template writes its own special tokens.
        ids = self.tokenizer(text, add_special_tokens=isinstance(prompt, str))["input_ids"]
        if self.max_length is None or len(ids) <= self.max_length:
            return ids
        first = ids[:1] if ids[0] in self.tokenizer.all_special_ids else []
        return first + ids[len(first) - self.max_length :]

    def _text(self, prompt: Any, completion: str) -> str:
        if isinstance(prompt, str):
            return prompt + completion
        messages = [*prompt, {"role": "assistant", "content": completion.strip()}]
        return str(self.tokenizer.apply_chat_template(messages, tokenize=False))


def sequence_scores(model: Any, input_ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[B] fp32 scores of right-padded texts, read at each text's last token.

    transformers looks for that token by `input_ids != pad_token_id` and so reads too early where a
    text ends in the pad token (pad = eos); the mask knows better. Models without a `score` layer
    on their trunk (encoders) pool in their own way and are called as they are.
    """
    head = getattr(model, "score", None)
    if head is None:
        return model(input_ids=input_ids, attention_mask=mask).logits.float().squeeze(-1)
    hidden = model.base_model(input_ids=input_ids, attention_mask=mask).last_hidden_state
    last = mask.sum(1) - 1
    return head(hidden[torch.arange(len(last), device=last.device), last]).float().squeeze(-1)
