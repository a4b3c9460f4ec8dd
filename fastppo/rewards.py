"""Rewards: Python functions over text, and sequence-classification models with their own tokenizer.

A reward is a callable

    reward(prompts, completions, **columns) -> list

`prompts` are as the dataset holds them (strings, or lists of chat messages), `completions` strings
without special tokens, `columns` the other columns of the dataset, each a list with one entry per
prompt. `prompts` and `completions` are passed by name to a function that has such parameters, and
by position to one that calls them otherwise; a function without `**columns` is given the columns
that it names. A function with a parameter `completion_ids` is given the token ids of the responses,
their EOS included. For each completion a reward returns

    a number                          the reward of the whole response
    a list with a number per token    a reward for each response token
    a list of (end, value) pairs      a reward for each step; `end` is the character offset in the
                                      completion behind the step's last character

and one batch may hold all three. In a config a reward is

    path/to/file.py:function     a function of a file
    package.module:function      a function of an importable module
    directory or hub name        a model for AutoModelForSequenceClassification
"""

from __future__ import annotations

import bisect
import functools
import importlib
import importlib.util
import inspect
import itertools
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification

from fastppo import validation
from fastppo.pretrained import load_tokenizer, load_whole, model_config

Partial = list[float] | list[tuple[int, float]]
"""Rewards within one completion: one number per response token, or (end, value) pairs."""

Reward = Callable[..., Sequence[float | Partial]]

FP32_MAX = torch.finfo(torch.float32).max
"""Rewards are trained on in fp32, where more than this is infinite."""

ENSEMBLE_RULES = ("mean", "min", "lcb")

FUNCTION = re.compile(r"^(?P<where>.+):(?P<name>[A-Za-z_]\w*)$")


class RewardError(RuntimeError):
    """A reward raised, or returned something that cannot be trained on."""


class _TermError(RewardError):
    """A `RewardError` whose parts are still apart: `row` is the completion, or None for all."""

    def __init__(self, reward: str, sentence: str, row: int | None = None) -> None:
        super().__init__(f"reward {reward!r} {sentence}")
        self.reward, self.sentence, self.row = reward, sentence, row


class Scored(list[float]):
    """What a reward said of a batch: a list of the completions' totals, reward units.

    `partial` has, per completion, its rewards by token or by step, or None where the reward was one
    number; it is None if all were. `disagreement` has, per completion, the population standard
    deviation across the members of an ensemble; None for any other reward.
    """

    def __init__(
        self,
        values: Sequence[float],
        partial: Sequence[Partial | None] | None = None,
        disagreement: Sequence[float] | None = None,
    ) -> None:
        super().__init__(values)
        self.partial = None if partial is None else list(partial)
        self.disagreement = None if disagreement is None else list(disagreement)

    @property
    def values(self) -> list[float]:
        """[B] the total of each completion, for logs."""
        return list(self)

    @property
    def whole(self) -> list[float]:
        """[B] what belongs on the last token: the reward if it was one number, else 0, because
        `token_rewards` has placed it."""
        if self.partial is None:
            return list(self)
        rows = zip(self, self.partial, strict=True)
        return [value if part is None else 0.0 for value, part in rows]


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
    if spec.endswith(".py"):
        raise ValueError(f"reward {spec}: which function? Want {spec}:function")
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
    completion_ids: Sequence[Sequence[int]] | None = None,
) -> Scored:
    """The term's rewards of all completions, unweighted.

    `completion_ids` are the responses' token ids, for rewards that ask for them and to count the
    rewards of a list with one per token.

    Raises:
        RewardError: the reward raised, returned the wrong number of values, or one that is not a
            finite number. The samples are written to `failure_file` first.
    """
    columns = columns or {}
    try:
        return _score(term, prompts, completions, columns, completion_ids)
    except _TermError as error:
        rows = range(len(completions)) if error.row is None else [error.row]
        where = _save_failure(
            failure_file,
            error.reward,
            [prompts[i] for i in rows],
            [completions[i] for i in rows],
            {name: [column[i] for i in rows] for name, column in columns.items()},
            error.sentence,
        )
        raise RewardError(f"{error}{where}") from error.__cause__


def _score(
    term: RewardTerm,
    prompts: Sequence[Any],
    completions: Sequence[str],
    columns: dict[str, list[Any]],
    completion_ids: Sequence[Sequence[int]] | None,
) -> Scored:
    """`score` without the file; raises _TermError."""
    try:
        returned = _call(term.function, prompts, completions, columns, completion_ids)
    except _TermError as error:  # of a member of an ensemble: both names tell where to look
        name = f"{term.name}/{error.reward}"
        raise _TermError(name, error.sentence, error.row) from error.__cause__
    except Exception as error:
        raise _TermError(term.name, f"raised {error!r}") from error
    return _validated(term.name, returned, len(completions), completion_ids)


def _validated(
    name: str, returned: Any, count: int, completion_ids: Sequence[Sequence[int]] | None
) -> Scored:
    disagreement = None
    if isinstance(returned, Scored):  # of an ensemble, or of a reward that calls `score` itself
        disagreement = returned.disagreement
        parts = returned.partial or [None] * len(returned)
        returned = [v if p is None else p for v, p in zip(returned, parts, strict=True)]
    rows = _plain(returned)
    if not isinstance(rows, (list, tuple)):
        found = type(returned).__name__
        raise _TermError(name, f"returned {found}; want a list of {count} floats")
    if len(rows) != count:
        raise _TermError(name, f"returned {len(rows)} values for {count} completions")
    values: list[float] = []
    partial: list[Partial | None] = []
    for row, found in enumerate(map(_plain, rows)):
        tokens = None if completion_ids is None else len(completion_ids[row])
        try:
            if isinstance(found, (list, tuple)):
                part = _partial(found, tokens, row)
                partial.append(part)
                numbers = (item[1] if isinstance(item, tuple) else item for item in part)
                values.append(_finite(sum(numbers), f"in total for completion {row}"))
            else:
                partial.append(None)
                values.append(_finite(found, f"for completion {row}"))
        except ValueError as error:
            raise _TermError(name, str(error), row) from None
    some = any(part is not None for part in partial)
    return Scored(values, partial if some else None, disagreement)


def _plain(value: Any) -> Any:
    """Arrays, tensors and their scalars as lists and numbers."""
    return value.tolist() if hasattr(value, "tolist") else value


def _finite(value: Any, where: str) -> float:
    value = _plain(value)
    if not isinstance(value, (int, float)) or not abs(value) <= FP32_MAX:
        raise ValueError(f"returned {value!r} {where}; want a finite number (fp32)")
    return float(value)


def _partial(items: Sequence[Any], tokens: int | None, row: int) -> Partial:
    """One completion's rewards by token or by step; no steps at all are an empty list."""
    pairs = [isinstance(item, (list, tuple)) for item in items]
    if any(pairs) and not all(pairs):
        raise ValueError(
            f"returned numbers beside (end, value) pairs for completion {row}; "
            "want the one or the other"
        )
    if any(pairs):
        return [_step(item, row) for item in items]
    if items and tokens is not None and len(items) != tokens:
        raise ValueError(
            f"returned {len(items)} numbers for completion {row}, which has {tokens} response "
            "tokens; want one per token, or (end, value) pairs"
        )
    return [_finite(x, f"for token {t} of completion {row}") for t, x in enumerate(items)]


def _step(item: Sequence[Any], row: int) -> tuple[int, float]:
    end = _plain(item[0]) if len(item) == 2 else None
    if isinstance(end, bool) or not isinstance(end, int) or end < 1:
        raise ValueError(
            f"returned {tuple(item)!r} for a step of completion {row}; want (end, value) with end "
            "the character offset behind the step, a whole number from 1"
        )
    return end, _finite(item[1], f"for the step of completion {row} that ends at {end}")


def token_rewards(
    partial: Partial | None,
    completion: str,
    prompt_ids: Sequence[int],
    response_ids: Sequence[int],
    tokenizer: Any,
) -> list[float]:
    """One reward per response token, from rewards by token or by step.

    The value of an (end, value) pair goes to the first token with which the decoded response
    agrees with the first `end` characters of `completion`, so a character that takes several tokens
    counts from its last one. An end beyond the text goes to the last token, which is the EOS of a
    response that ended by itself. Several values on one token add up. None is zeros: a reward that
    was one number is not placed here.

    The response is decoded behind its prompt, as `PPOTrainer.completions` does. Each step decodes
    O(log T) prefixes, because the text only grows with the tokens.

    Raises:
        ValueError: not one number per response token, an end < 1, or a completion that is not the
            response's text.
    """
    count = len(response_ids)
    if partial is None or len(partial) == 0:
        return [0.0] * count
    if not isinstance(partial[0], tuple):
        if len(partial) != count:
            raise ValueError(
                f"got {len(partial)} token rewards for {count} response tokens; want one per token"
            )
        return [float(value) for value in partial]
    if count == 0:
        raise ValueError(f"got {len(partial)} step rewards for a response of 0 tokens")

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=True)

    before, response = list(prompt_ids), list(response_ids)
    head = decode(before)
    if not decode(before + response).startswith(head):  # the completion was decoded alone
        before, head = [], ""

    @functools.cache
    def reached(token: int) -> int:
        """Characters of the completion that stand once this token is there. The half of a
        character decodes to U+FFFD, which is not the completion's, so it does not count."""
        text = decode(before + response[: token + 1])[len(head) :]
        both = zip(text, completion, strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], both))

    if reached(count - 1) < len(completion):
        raise ValueError(
            f"completion must be the text of response_ids behind the prompt, got {completion!r}, "
            f"which leaves it at character {reached(count - 1)}"
        )
    rewards = [0.0] * count
    for end, value in partial:
        if end < 1:
            raise ValueError(f"a step must end at a character offset >= 1, got {end}")
        token = bisect.bisect_left(range(count), end, key=reached)
        rewards[min(token, count - 1)] += value
    return rewards


def place_rewards(
    terms: Sequence[RewardTerm],
    scored: Sequence[Scored],
    completions: Sequence[str],
    prompt_ids: Sequence[Sequence[int]],
    response_ids: Sequence[Sequence[int]],
    tokenizer: Any,
) -> tuple[list[float], list[float] | None]:
    """The weighted sum of the terms, as scores and as rewards of tokens: what `compute_advantages`
    takes as `scores` and `token_rewards`. Together they add up to the weighted totals.

    Returns:
        (scores, token_rewards): [B] of all that was one number; [N] over the response tokens laid
        end to end of all that came in parts, or None if nothing did.
    """
    scores = [0.0] * len(completions)
    per_token = [[0.0] * len(ids) for ids in response_ids]
    for term, result in zip(terms, scored, strict=True):
        for row, value in enumerate(result.whole):
            scores[row] += term.weight * value
        for row, part in enumerate(result.partial or ()):
            placed = token_rewards(
                part, completions[row], prompt_ids[row], response_ids[row], tokenizer
            )
            for token, value in enumerate(placed):
                per_token[row][token] += term.weight * value
    if all(result.partial is None for result in scored):
        return scores, None
    return scores, [value for row in per_token for value in row]


def _call(
    function: Reward,
    prompts: Sequence[Any],
    completions: Sequence[str],
    columns: dict[str, list[Any]],
    completion_ids: Sequence[Sequence[int]] | None = None,
) -> Any:
    """Calls the reward with what its signature has room for."""
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    positional = any(p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL) for p in parameters)
    wanted: dict[str, Any] = {
        name: column for name, column in columns.items() if takes_all or name in named
    }
    if completion_ids is not None and "completion_ids" in named:  # no column: `**columns` lacks it
        wanted["completion_ids"] = completion_ids
    if "completions" in named or not (named or positional):
        both: dict[str, Any] = {"prompts": prompts, "completions": completions}
        wanted |= {name: value for name, value in both.items() if takes_all or name in named}
        return function(**wanted)
    return function(prompts, completions, **wanted)


def _save_failure(
    path: Path | None,
    reward: str,
    prompts: Sequence[Any],
    completions: Sequence[str],
    columns: dict[str, list[Any]],
    reason: str,
) -> str:
    if path is None:
        return ""
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "reward": reward,
        "reason": reason,
        "prompts": list(prompts),
        "completions": list(completions),
        "columns": columns,
    }
    path.write_text(json.dumps(record, ensure_ascii=False, indent=2, default=str))
    return f" (samples saved to {path})"


class RewardEnsemble:
    """Several rewards of one thing as one: their mean, their minimum, or a lower bound.

        mean    μ over the members
        min     the worst member
        lcb     μ − std_coef·σ, σ the population standard deviation over the members

    Where reward models were never shown the right answer they disagree, and a policy that is
    trained on the one that errs in its favour learns the error. The minimum and the lower bound
    take that gain away. The result's `disagreement` is σ, per completion.

    Args:
        members: rewards or specs, each returning one number per completion. They want one scale:
            the minimum over members of different scales is one member.
        by: mean, min or lcb.
        std_coef: deviations below the mean of `lcb`, at least 0.
        model_options: of members that are models, as for `RewardModel`.

    Raises:
        ValueError: no members, another `by`, a negative `std_coef`, a member that is not there.
        RewardError: as from `score`, when called; it names the member.

    Source: Coste et al. 2023 (mean, worst case, and the mean less the *variance*); Eisenstein et
    al. 2023 (mean less the deviation, which has the reward's own unit).
    """

    def __init__(
        self,
        members: Sequence[str | Reward],
        by: str = "mean",
        std_coef: float = 1.0,
        **model_options: Any,
    ) -> None:
        self.__name__ = "ensemble"
        if not members:
            raise ValueError("an ensemble must have at least one member, got none")
        self.by = validation.choice("by", by, ENSEMBLE_RULES)
        self.std_coef = validation.finite("std_coef", validation.at_least("std_coef", std_coef, 0))
        self.terms = make_terms(members, **model_options)

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]] | None = None,
        **columns: list[Any],
    ) -> Scored:
        members = []
        for term in self.terms:
            scored = _score(term, prompts, completions, columns, completion_ids)
            if scored.partial is not None:
                row = next(i for i, part in enumerate(scored.partial) if part is not None)
                raise _TermError(
                    term.name,
                    f"returned rewards by token or step for completion {row}; want one number, "
                    "which is what an ensemble combines",
                    row,
                )
            members.append(scored.values)
        scores = torch.tensor(members, dtype=torch.float64)  # [members, B]
        mean, deviation = scores.mean(0), scores.std(0, correction=0)
        if self.by == "min":
            combined = scores.amin(0)
        else:
            combined = mean - self.std_coef * deviation if self.by == "lcb" else mean
        return Scored(combined.tolist(), disagreement=deviation.tolist())


class RewardModel:
    """A sequence-classification model with one label, and its own tokenizer.

    A prompt of strings is joined with its completion and tokenised as one text; a prompt of chat
    messages is rendered by the reward tokenizer's own chat template, the completion as the
    assistant's turn. Texts longer than `max_length` tokens lose their beginning, not their end.
    `score_mean` of the model's config, if there is one, is subtracted from every score.
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
        config = model_config(name, "reward")
        if config.num_labels != 1:
            kind = ", ".join(config.architectures or ["model"])
            raise ValueError(
                f"reward {name} is a {kind} with {config.num_labels} labels; want a sequence "
                "classifier with 1"
            )
        model, _ = load_whole(AutoModelForSequenceClassification, name, "reward", dtype=dtype)
        self.model = model.to(device).eval().requires_grad_(False)  # type: ignore[arg-type]
        self.tokenizer = load_tokenizer(name, "reward")
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        if self.model.config.pad_token_id is None:
            self.model.config.pad_token_id = self.tokenizer.pad_token_id
        limit = getattr(model.config, "max_position_embeddings", None)
        self.max_length = min(filter(None, (max_length, limit)), default=None)
        self.batch_size = batch_size
        # What `fastppo reward` writes there makes the mean score of its reference texts 0.
        self.score_mean = float(getattr(model.config, "score_mean", 0.0))

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
        return (sequence_scores(self.model, ids, mask) - self.score_mean).tolist()

    def _tokens(self, prompt: Any, completion: str) -> list[int]:
        """The text's ids. Too long a text loses its beginning, but for a leading special token."""
        text = self._text(prompt, completion)
        # A chat template writes its own special tokens.
        ids = self.tokenizer(text, add_special_tokens=isinstance(prompt, str))["input_ids"]
        if not ids:
            raise ValueError(f"the reward model's tokenizer has no token for {text!r}")
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
