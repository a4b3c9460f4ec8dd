"""Other libraries' names of the losses' keywords, and the error that translates them."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])

OTHER_NAMES = {
    # TRL
    "cliprange": "clip_ratio",
    "epsilon": "clip_ratio",
    "epsilon_low": "clip_ratio=(low, high)",
    "epsilon_high": "clip_ratio=(low, high)",
    "delta": "dual_clip",
    "beta": "kl_coef",
    "loss_type": "objective",
    "importance_sampling_ratio": "importance_weights",
    "ref_per_token_logps": "ref_logprobs",
    "old_per_token_logps": "old_logprobs",
    "completion_mask": "mask",
    "num_items_in_batch": "denominator",
    # verl
    "cliprange_low": "clip_ratio=(low, high)",
    "cliprange_high": "clip_ratio=(low, high)",
    "clip_ratio_low": "clip_ratio=(low, high)",
    "clip_ratio_high": "clip_ratio=(low, high)",
    "clip_ratio_c": "dual_clip",
    "entropy_coeff": "entropy_coef",
    "kl_loss_coef": "kl_coef",
    "kl_loss_type": "kl_estimator",
    "kl_penalty": "kl_estimator",
    "loss_agg_mode": "aggregation",
    "old_log_prob": "old_logprobs",
    "ref_log_prob": "ref_logprobs",
    "response_mask": "mask",
    # OpenRLHF
    "eps_clip": "clip_ratio",
    "clip_eps": "clip_ratio",
    "clip_eps_low": "clip_ratio=(low, high)",
    "clip_eps_high": "clip_ratio=(low, high)",
    "eps_clip_low_high": "clip_ratio=(low, high)",
    "init_kl_coef": "kl_coef",
    "entropy_loss_coef": "entropy_coef",
    "action_mask": "mask",
    # Stable Baselines3 and CleanRL
    "clip_range": "clip_ratio",
    "clip_coef": "clip_ratio",
    "ent_coef": "entropy_coef",
    # PyTorch and Liger Kernel
    "reduction": "aggregation",
    "labels": "tokens",
    "target": "tokens",
    "targets": "tokens",
    "input_ids": "tokens",
    "softcapping": "softcap",
    "loss_weight": "weights",
}
"""Our keyword, with the form of its value where that differs, by the other library's name."""


def explain_unknown_keywords(function: F) -> F:
    """Decorator: an unknown keyword raises a TypeError that names ours."""
    known = tuple(inspect.signature(function).parameters)

    @functools.wraps(function)
    def checked(*args: Any, **keywords: Any) -> Any:
        for name in keywords:
            if name not in known:
                raise TypeError(_explanation(function.__name__, name, known))
        return function(*args, **keywords)

    return cast(F, checked)


def _explanation(function: str, name: str, known: tuple[str, ...]) -> str:
    ours = OTHER_NAMES.get(name, "")
    if ours.partition("=")[0] not in known:
        ours = next(iter(difflib.get_close_matches(name, known, 1, 0.75)), "")
    hint = f": use {ours}" if ours else ""
    return f"{function} got an unexpected keyword argument {name!r}{hint}"
