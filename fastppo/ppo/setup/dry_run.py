"""Try the user's functions before a run, so that a broken one fails within seconds.

Reward servers are connected to, and get no completion to score.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastppo.data.chat import token_ids
from fastppo.data.prompts import Prompts
from fastppo.environments.episodes import POLICY, as_turns
from fastppo.environments.turns import Turns
from fastppo.plugins.calling import CallOptions
from fastppo.ppo.options.config import PPOConfig
from fastppo.rewards.ensemble import RewardEnsemble
from fastppo.rewards.reward import EXPECTED, RewardError, RewardTerm, Samples, score
from fastppo.rewards.url import RequestError, URLReward
from fastppo.rollout import FINISHED, Rollout, RolloutEngine, Sampling
from fastppo.run.progress import only_warnings

MADE_UP = "A made-up response"
"""Text on which rewards and the environment are tried."""


@dataclass(frozen=True, slots=True)
class FirstTurn:
    """The start of an episode, from the dry run."""

    tokens: int
    """Number of tokens before the turn."""
    text: str
    """Text of these tokens."""
    answer: str
    """Observation after the turn; "" if the episode ended."""
    has_prompt: bool
    """Whether the episode begins with the text of the prompt."""


class _MadeUpEngine(RolloutEngine):
    def __init__(self, tokenizer: Any) -> None:
        self.tokens = token_ids(tokenizer, MADE_UP) or [0]

    def generate(self, prompt_ids: list[list[int]], sampling: Sampling) -> Rollout:
        return Rollout([self.tokens for _ in prompt_ids], [FINISHED for _ in prompt_ids])


@only_warnings()  # the run makes environments of its own, which log the same messages again
def dry_run(
    config: PPOConfig,
    prompts: Prompts,
    rewards: Sequence[RewardTerm],
    maker: Any = None,
    *,
    tokenizer: Any,
    context: int | None,
) -> FirstTurn | None:
    """Score a made-up response to the first prompt, and play a made-up turn.

    Args:
        rewards: those that an option names as a function are called, each once.
        maker: an `EnvironmentMaker`; None if no environment is to be tried.

    Raises:
        RewardError: a reward or the environment raised, or returned something invalid, or a reward
            server does not answer.
    """
    for server in _servers(rewards):
        try:
            server.connect()
        except RequestError as error:
            raise RewardError(f"reward {server.__name__!r}: {error}") from error
    first = prompts.select([0])
    samples = Samples(first.prompts, [MADE_UP], first.columns, [[0]])
    calls = CallOptions(config.reward_timeout)
    expected = ""
    try:
        for term in (term for term in rewards if term.is_named_function):
            expected = f"{term.name}{EXPECTED}"
            score(term, samples, failure_file(config), calls)
        if maker is None or not maker.can_be_tried:
            return None
        expected = maker.expected
        saved = episode_file(config)
        turns = Turns(
            maker, tokenizer, max_turns=1, context=context, options=calls, failure_file=saved
        )
        with closing(turns):
            engine = _MadeUpEngine(tokenizer)
            first, rollout = turns.run(first, engine, Sampling(config.max_new_tokens))
    except RewardError as error:
        when = "it was tried with a made-up response, before the models are loaded"
        raise RewardError(f"{error}; {when}: expected {expected}") from error.__cause__
    return _first_turn(first, rollout, tokenizer)


def _servers(rewards: Sequence[RewardTerm]) -> Iterator[URLReward]:
    """Yield the reward servers, those in an ensemble included."""
    for term in rewards:
        if isinstance(term.function, URLReward):
            yield term.function
        elif isinstance(term.function, RewardEnsemble):
            yield from _servers(term.function.terms)


def _first_turn(prompts: Prompts, rollout: Rollout, tokenizer: Any) -> FirstTurn:
    assert rollout.turns is not None
    episode = rollout.turns[0]
    last = episode[-1]
    opening = itertools.takewhile(lambda turn: turn["role"] != POLICY, episode)
    prompt = str(as_turns(prompts.prompts[0], POLICY)[-1]["text"]).strip()
    return FirstTurn(
        tokens=len(prompts.token_ids[0]),
        text=tokenizer.decode(prompts.token_ids[0]),
        answer="" if last["role"] == POLICY else last["text"],
        has_prompt=any(prompt in str(turn["text"]) for turn in opening),
    )


def failure_file(config: PPOConfig) -> Path:
    """Return the path of the samples of a failed reward."""
    return Path(config.output_dir) / "failed_reward.json"


def episode_file(config: PPOConfig) -> Path:
    """Return the path of the episode of a failed environment."""
    return Path(config.output_dir) / "failed_episode.json"
