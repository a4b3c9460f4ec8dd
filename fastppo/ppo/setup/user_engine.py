"""The user's rollout engine: `rollout: file.py:Engine`.

It is a class or function, called as `Engine(policy, tokenizer, **engine_options)`. The result has
`generate(prompt_ids, sampling) -> Rollout`, as a `fastppo.rollout.RolloutEngine`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from fastppo.models.policy import ActorCritic
from fastppo.plugins.calling import place_of
from fastppo.ppo.options.config import PPOConfig
from fastppo.rollout import RolloutEngine, as_engine


def check_user_engine(config: PPOConfig, make: Callable[..., Any]) -> None:
    """Raise ValueError if the class or function does not take `engine_options`."""
    signature = inspect.signature(make)
    try:
        signature.bind(None, None, **config.engine_keywords)
    except TypeError as error:
        raise ValueError(
            f"engine_options: rollout={config.rollout} takes {signature}: {error}; it is called "
            "with the policy, the tokenizer and these options"
        ) from None


def make_user_engine(
    config: PPOConfig, make: Callable[..., Any], *, policy: ActorCritic, tokenizer: Any
) -> RolloutEngine:
    """Return the engine that the class or function makes.

    Raises:
        ValueError: it raised an exception, or its result has no `generate`.
    """
    try:
        return as_engine(make(policy, tokenizer, **config.engine_keywords))
    except Exception as error:
        raise ValueError(f"rollout={config.rollout}: {error}{place_of(error)}") from error
