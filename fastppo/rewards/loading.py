"""Load rewards by name. In a config, a reward is one of

path/to/file.py:function     a function in a file
package.module:function      a function in an importable module
directory or hub name        a model for AutoModelForSequenceClassification
https://host/path            a reward server
package:name                 a reward of another package, see `fastppo.plugins.adapters`
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastppo.data import fingerprint
from fastppo.plugins import adapters
from fastppo.plugins.loading import FUNCTION, code_fingerprint, load_plugin
from fastppo.rewards.reward import Reward, RewardTerm, RewardWithWeights
from fastppo.rewards.url import URLReward, address_name

if TYPE_CHECKING:
    import torch

URL = re.compile(r"^https?://", re.IGNORECASE)


def load_reward(
    spec: str,
    *,
    device: torch.device | str | None = "cpu",
    batch_size: int = 32,
    timeout: float | None = None,
) -> Reward:
    """Load a reward by its spec; see the module's docstring.

    Args:
        device: device of a reward model; with None, its weights are not loaded yet.
        batch_size: texts per forward pass of a reward model, or per request.
        timeout: seconds per request; None means the default of `URLReward`.

    Raises:
        ValueError: the file, module, function or model does not exist.
    """
    if URL.match(spec):
        return URLReward(spec, batch_size=batch_size, timeout=timeout)
    if adapters.is_address(spec):
        return adapters.load_reward(spec)
    if names_function(spec):
        return load_plugin(spec, "reward").function
    from fastppo.rewards.model import RewardModel  # imports transformers

    return RewardModel(spec, device=device, batch_size=batch_size)


def names_function(spec: str) -> bool:
    """Return whether a spec names a function, and not a model, a server or an address.

    Raises:
        ValueError: the spec is a Python file without a function.
    """
    if URL.match(spec) or Path(spec).is_dir():
        return False
    if spec.endswith(".py"):
        raise ValueError(f"reward {spec}: expected {spec}:function, got no function")
    return FUNCTION.match(spec) is not None and not adapters.is_address(spec)


def reward_name(spec: str) -> str:
    """Return a short name for logs: of the function, the model directory or the URL."""
    if URL.match(spec):
        return address_name(spec)
    match = FUNCTION.match(spec)
    return Path(spec).name if match is None or Path(spec).exists() else match["name"]


def make_terms(
    rewards: Sequence[str | Reward], weights: Sequence[float] | None = None, **options: Any
) -> list[RewardTerm]:
    """Load rewards and give each a unique name.

    Args:
        options: options of `load_reward`.

    Raises:
        ValueError: the number of weights is not the number of rewards.
    """
    if weights is not None and len(weights) != len(rewards):
        raise ValueError(f"got {len(rewards)} rewards and {len(weights)} reward_weights")
    terms: dict[str, RewardTerm] = {}
    for i, reward in enumerate(rewards):
        if isinstance(reward, str):
            name = reward_name(reward)
            function = load_reward(reward, **options)
        else:
            name = getattr(reward, "__name__", type(reward).__name__)
            function = reward
        unique = name
        suffix = 2
        while unique in terms:
            unique = f"{name}_{suffix}"
            suffix += 1
        terms[unique] = RewardTerm(
            unique,
            function,
            fingerprint=_fingerprint(reward, function),
            weight=1.0 if weights is None else float(weights[i]),
            is_named_function=isinstance(reward, str) and names_function(reward),
        )
    return list(terms.values())


def _fingerprint(reward: str | Reward, function: Reward) -> str:
    """Fingerprint the weights of a reward model, the address of a server, or a function's code."""
    if isinstance(function, RewardWithWeights):
        return function.fingerprint()
    if isinstance(reward, str) and not names_function(reward):
        return fingerprint.of_text(reward)
    return code_fingerprint(reward, function)
