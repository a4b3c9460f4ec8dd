"""What is checked before a run, before a step on given responses, and when a step is not finite."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import set_seed

from fastppo.data.batch import Batch
from fastppo.data.chat import encode_prompt, is_chat, token_ids
from fastppo.data.prompts import Prompts
from fastppo.data.world import World
from fastppo.functional.arguments import shown
from fastppo.models.policy import ActorCritic, LanguageModel
from fastppo.models.reference_policy import ReferencePolicy
from fastppo.ppo.config import PPOConfig
from fastppo.ppo.experience import Experience
from fastppo.ppo.old_policy import GivenPolicy
from fastppo.ppo.state import RunState
from fastppo.rewards.placing import paid_where_written
from fastppo.rewards.scorer import Scores
from fastppo.rollout import FINISHED, TRUNCATED, Rollout, RolloutEngine, Sampling
from fastppo.run.checkpoint import random_state, restore_random_state
from fastppo.run.skipped import non_finite_gradients, save_batch

MAX_SKIPPED_STEPS = 5
"""Optimiser steps in a row that may be skipped for a non-finite loss or gradient."""

CHECKED_PROMPTS = 4
CHECKED_TOKENS = 8
"""Of each response: enough for a wrong position or cache to show."""

FULL_TOLERANCE = 1e-3
"""Nats, where products are formed in fp32: rounding of 2⁻²³ a step, summed over the layers."""
LEAST_TOLERANCE = 0.1
"""Nats, under bf16, where logits are small: the rounding of the layers below the head."""
LOGIT_STEPS = 4 * 2**-8
"""Of the largest logit, under bf16: a logit is rounded to 2⁻⁹ of itself, and the hidden states that
it is made of have been several times. Logits of 16 to 32 are an eighth apart."""


@contextmanager
def random_state_restored(seed: int | None = None) -> Iterator[None]:
    """Draws inside from torch's, NumPy's and Python's generators leave no trace outside.

    Args:
        seed: of what is drawn inside; None draws on from where they are.
    """
    before = random_state()
    try:
        if seed is not None:
            set_seed(seed)
        yield
    finally:
        restore_random_state(*before)


def check_on_policy(
    model: ActorCritic,
    reference: ReferencePolicy | None,
    engine: RolloutEngine,
    prompts: Prompts,
    sampling: Sampling,
    config: PPOConfig,
    *,
    reference_is_fresh: bool,
) -> None:
    """Before the first step: the sampler's logprobs are the learner's, and KL to a fresh reference
    is 0. Otherwise the ratio of the first update would not be 1.

    Raises:
        RuntimeError: says which of the two fails, and by how much.
    """
    few = prompts.select(range(min(CHECKED_PROMPTS, len(prompts))))
    with random_state_restored():
        rollout = engine.generate(few.token_ids, sampling.shortened(CHECKED_TOKENS))
    batch = Batch.of(few.token_ids, rollout.tokens, model.device)
    how = config.softmax
    logprobs = model.evaluate(batch, **how).logprobs
    tolerance = rounding_tolerance(model, batch) / min(1.0, config.temperature)
    # Sampler and learner run the same weights with other paddings, so they agree to rounding.
    sampled = torch.cat(_sampled_logprobs(rollout)).to(model.device)
    if rollout.logprobs is None and sampling.is_restricted:
        sampled = sampled.minimum(logprobs)  # the restriction raises them by an unknown amount
    _compare("the sampler's logprobs", sampled, logprobs, tolerance)
    if reference is not None and reference_is_fresh and not reference.is_given:
        ref_logprobs = reference.logprobs([batch], **how)
        _compare("the fresh reference's logprobs", ref_logprobs, logprobs, tolerance)


def _sampled_logprobs(rollout: Rollout) -> list[Tensor]:
    """Those that an engine gives of the whole softmax, or else of what it drew from."""
    sampled = rollout.logprobs if rollout.logprobs is not None else rollout.sampler_logprobs
    if sampled is None:
        raise RuntimeError(
            "self-check: the rollout engine gives no sampler_logprobs, so nothing says whether it "
            "samples from the policy"
        )
    return sampled


@torch.no_grad()
def rounding_tolerance(model: LanguageModel, batch: Batch) -> float:
    """Nats at temperature 1 by which two ways to the logprobs of a batch may differ."""
    if model.is_full_precision:
        return FULL_TOLERANCE
    with model.autocast():
        logits = model.head.logits(model.hidden(batch.layout())).abs()
    largest = logits[logits.isfinite()].amax().item() if logits.numel() else 0.0
    return max(LEAST_TOLERANCE, LOGIT_STEPS * largest)


def _compare(what: str, theirs: Tensor, ours: Tensor, tolerance: float) -> None:
    worst = (theirs - ours).abs().max().item() if ours.numel() else 0.0
    if not worst <= tolerance:
        raise RuntimeError(
            f"self-check: {what} differ from the policy's by up to {worst:.3g} nats (tolerance "
            f"{tolerance:.3g}), so the first update would not be on-policy. Look for dropout, "
            f"position ids under padding, a logit transform, or another model as the reference."
        )


def odd_options(config: PPOConfig) -> list[str]:
    """Sentences on options that can be run and hardly are meant."""
    if config.warmup_steps <= config.optimizer_steps:
        return []
    return [
        f"warmup_steps={config.warmup_steps}: the run has {config.optimizer_steps} optimiser steps "
        "and ends before its peak learning rate"
    ]


TokenRows = Sequence[Sequence[float] | Tensor]
"""A number for each token of each response."""


class GivenResponses(NamedTuple):
    """Responses that somebody else generated and scored."""

    prompt_ids: list[list[int]]
    rollout: Rollout
    """Without the sampler's logprobs: nobody says how they were drawn."""
    scores: Scores
    old: GivenPolicy


def given_responses(
    prompts: Sequence[str | Sequence[Any]],
    responses: Sequence[str | Sequence[int]],
    scores: Sequence[float] | Tensor,
    finish_reasons: Sequence[str] | None,
    tokenizer: Any,
    stop_token_ids: Sequence[int],
    room: tuple[int, int | None],
    masks: Sequence[Sequence[bool] | Tensor] | None = None,
    token_rewards: TokenRows | None = None,
    old_logprobs: TokenRows | None = None,
    values: TokenRows | None = None,
) -> GivenResponses:
    """Texts, chat messages or ids as tokens; without finish reasons, whether a stop token is last.

    Args:
        room: the vocabulary's and the context's size.

    Raises:
        ValueError: see `check_counts` and `check_responses`; the scores are not one per prompt, or
            not finite; what there is by token does not fit the responses, or is not finite.
    """
    check_counts(len(prompts), len(responses))
    prompt_ids = [
        encode_prompt(prompt, tokenizer, f"prompt {row}")
        if isinstance(prompt, str) or is_chat(prompt)
        else list(prompt)
        for row, prompt in enumerate(prompts)
    ]
    response_ids = [token_ids(tokenizer, each) for each in responses]
    if finish_reasons is None:
        ended = [{*response[-1:]} <= {*stop_token_ids} for response in response_ids]
        finish_reasons = [FINISHED if each else TRUNCATED for each in ended]
    total = check_scores(scores, len(prompt_ids))
    written = None if masks is None else check_masks(masks, response_ids)
    rollout = Rollout(response_ids, list(finish_reasons), written=written)
    within = None if token_rewards is None else packed_rewards(token_rewards, rollout)
    old = GivenPolicy(
        None if old_logprobs is None else packed_values("old_logprobs", old_logprobs, rollout),
        None if values is None else packed_values("values", values, rollout),
    )
    check_responses(prompt_ids, rollout, *room)
    paid = Scores(total, within, rollout.written_lengths)
    return GivenResponses(prompt_ids, rollout, paid, old)


def check_masks(
    masks: Sequence[Sequence[bool] | Tensor], responses: Sequence[Sequence[int]]
) -> list[list[bool]]:
    """Each response's as a list; raises ValueError where one does not fit its response, is not
    bool, or is never True."""
    rows = _rows("masks", masks, responses)
    for row, mask in enumerate(rows):
        if not all(isinstance(each, bool) for each in mask):
            raise ValueError(f"masks of response {row} must be bool, got {shown(mask)}")
        if not any(mask):
            raise ValueError(f"masks of response {row} is never True: the policy wrote none of it")
    return rows


def packed_values(name: str, values: TokenRows, rollout: Rollout) -> Tensor:
    """[N] fp32 on the CPU, of the tokens that the policy wrote; raises ValueError where a row does
    not fit its response, or has what is not a finite number for one of them."""
    rows = _rows(name, values, rollout.tokens)
    if rollout.written is not None:
        both = zip(rows, rollout.written, strict=True)
        rows = [list(itertools.compress(*each)) for each in both]
    return _finite_numbers(name, rows)


def packed_rewards(values: TokenRows, rollout: Rollout) -> Tensor:
    """[N] fp32 on the CPU, each paid where the policy wrote; raises ValueError as `packed_values`
    does."""
    rows = _rows("token_rewards", values, rollout.tokens)
    _finite_numbers("token_rewards", rows)
    if rollout.written is not None:
        both = zip(rows, rollout.written, strict=True)
        rows = [paid_where_written(*each) for each in both]
    return _finite_numbers("token_rewards", rows)


def _finite_numbers(name: str, rows: list[list[Any]]) -> Tensor:
    found = []
    for row, numbers in enumerate(rows):
        kinds = {type(number) for number in numbers}
        packed = torch.tensor(numbers if kinds <= {int, float} else [math.nan])
        if not packed.float().isfinite().all():
            raise ValueError(
                f"{name} of response {row} must be finite numbers, got {shown(numbers)}"
            )
        found.append(packed.float())
    return torch.cat(found)


def _rows(name: str, values: Any, responses: Sequence[Sequence[int]]) -> list[list[Any]]:
    """A list for each response, of as many as it has tokens."""
    rows = [each.tolist() if hasattr(each, "tolist") else each for each in values]
    if len(rows) != len(responses):
        raise ValueError(
            f"{name} must be one list per response, got {len(rows)} for {len(responses)}"
        )
    for row, (given, response) in enumerate(zip(rows, responses, strict=True)):
        if not isinstance(given, (list, tuple)) or len(given) != len(response):
            count = len(given) if isinstance(given, (list, tuple)) else shown(given)
            raise ValueError(
                f"{name} of response {row} must be one per token: expected {len(response)}, got "
                f"{count}"
            )
    return [list(given) for given in rows]


def check_counts(prompts: int, responses: int) -> None:
    """Raises ValueError where there are not as many responses as prompts, or none."""
    if not prompts or prompts != responses:
        raise ValueError(
            f"expected as many responses as prompts, at least one, got {prompts} prompts and "
            f"{responses} responses"
        )


def check_responses(
    prompts: Sequence[Sequence[int]], rollout: Rollout, vocabulary: int, context: int | None
) -> None:
    """Raises ValueError where responses do not fit their prompts, the context or the vocabulary."""
    responses, finish_reasons = rollout.tokens, rollout.finish_reasons
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        if not response:
            raise ValueError(f"response {row} is empty")
        if context is not None and len(prompt) + len(response) > context:
            raise ValueError(
                f"prompt and response {row} have {len(prompt) + len(response)} tokens; the "
                f"model's context has {context}"
            )
        if prompt and not 0 <= min(*prompt, *response) <= max(*prompt, *response) < vocabulary:
            raise ValueError(f"prompt or response {row} has tokens outside [0, {vocabulary})")
    if len(finish_reasons) != len(prompts) or {*finish_reasons} - {FINISHED, TRUNCATED}:
        raise ValueError(
            f"finish_reasons must be {len(prompts)} of {FINISHED} or {TRUNCATED}, "
            f"got {finish_reasons}"
        )


def check_scores(scores: Sequence[float] | Tensor, count: int) -> Tensor:
    """[count] fp32 on the CPU; raises ValueError where there are not as many, or one is not
    finite."""
    total = torch.as_tensor(scores, dtype=torch.float32, device="cpu")
    if total.shape != (count,):
        raise ValueError(f"scores must be [{count}], got {list(total.shape)}")
    if not total.isfinite().all():
        raise ValueError(f"scores must be finite, got {total.tolist()}")
    return total


def take_step(
    optimizer: Any,
    model: ActorCritic,
    minibatch: Experience,
    state: RunState,
    numbers: dict[str, float],
    config: PPOConfig,
    world: World,
) -> str | None:
    """Takes an optimiser step if its numbers are finite, and counts it; a sentence if it is skipped
    and no loss scale was too large.

    Args:
        numbers: loss and norms of the gradient.

    Raises:
        FloatingPointError: too many in a row were not finite.
    """
    sentence = None
    if all(map(math.isfinite, numbers.values())):
        optimizer.step()
        state.skipped_in_a_row = 0
    elif state.overflowed and math.isfinite(numbers["loss"]):
        state.overflowed_steps += 1
    else:
        sentence = skip_step(model, minibatch, state, numbers, config, world)
    state.optimizer_step += 1
    return sentence


def skip_step(
    model: ActorCritic,
    minibatch: Experience,
    state: RunState,
    numbers: dict[str, float],
    config: PPOConfig,
    world: World,
) -> str:
    """Counts an optimiser step that is not taken and saves its batch; a sentence about it.

    Args:
        numbers: loss and norms of the gradient, of which one at least is not finite.

    Raises:
        FloatingPointError: too many in a row.
    """
    state.skipped_steps += 1
    state.skipped_in_a_row += 1
    wrong = [name for name, value in numbers.items() if not math.isfinite(value)]
    values = ", ".join(f"{name} {numbers[name]}" for name in wrong)
    saved = Path(config.output_dir) / "skipped" / f"step-{state.optimizer_step:06d}.safetensors"
    of_ranks = world.gather(non_finite_gradients(model))
    world.first(
        lambda: save_batch(
            saved,
            minibatch.tensors(),
            iteration=state.iteration,
            step=state.optimizer_step,
            non_finite="loss" if "loss" in wrong else "grad_norm",
            parameters=list(dict.fromkeys(name for names in of_ranks for name in names)),
        )
    )
    if state.skipped_in_a_row >= MAX_SKIPPED_STEPS:
        raise FloatingPointError(
            f"{state.skipped_in_a_row} optimiser steps in a row had a non-finite loss or "
            f"gradient, the last one {values} with the batch in {saved}; lower the learning rate, "
            f"or look for inf in the rewards or logits"
        )
    return f"optimiser step {state.optimizer_step}: {values}; skipped, batch in {saved}"
