"""Check the arguments that `ppo_loss` and `linear_ppo_loss` share, and put them into records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from fastppo_kernels.records import (
    RATIO_WEIGHTED,
    Objective,
    PerToken,
    Softmax,
    accumulation_dtype,
)
from torch import Tensor

from fastppo.functional.aggregation import token_weights
from fastppo.functional.arguments import check_cu_seqlens, check_values, choose_backend, tensor
from fastppo.functional.loss_keywords import (
    CUSTOM,
    DEFAULTS,
    KL_ESTIMATORS,
    OBJECTIVES,
    LossKeywords,
)
from fastppo.functional.operands import softmax, token_ids
from fastppo.functional.scalars import (
    CLIPPED_SURROGATES,
    SAPO_TAU,
    boolean,
    check_dual_clip,
    check_sapo_tau,
    choice,
    clip_range,
    finite,
)


class LossOperands(NamedTuple):
    """The checked arguments of a loss."""

    per_token: PerToken
    objective: Objective
    softmax: Softmax
    objective_name: str
    """The keyword `objective`, or CUSTOM for a function."""
    shape: torch.Size
    """Shape of the tokens."""
    sequence_starts: Tensor | None
    """[B + 1] for "gspo" and functions, otherwise None."""
    backend: str
    function: Callable[..., Tensor] | None = None
    """The user's function as the objective."""

    def with_per_token(self, **changes: Tensor) -> LossOperands:
        """Replace tensors of `per_token`."""
        return self._replace(per_token=self.per_token._replace(**changes))


def loss_operands(
    *,
    like: Tensor,
    shape: torch.Size,
    has_ref: bool,
    tokens: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor | None,
    keywords: LossKeywords,
) -> LossOperands:
    """Check the arguments of a loss, and put them into records.

    Args:
        like: the logits or hidden states.
        shape: the shape of the tokens.
        has_ref: whether the loss has the reference's logits, or its hidden states and head.
        tokens, old_logprobs, advantages, mask: see `ppo_loss`.
        keywords: the given ones. The others have their defaults.
    """
    options = DEFAULTS | keywords
    function = None
    name = options["objective"]
    if callable(name):
        function = name
        name = CUSTOM
    else:
        choice("objective", name, OBJECTIVES)
    objective = _objective(options, name, has_ref=has_ref)
    weights = token_weights(
        mask,
        aggregation=options["aggregation"],
        denominator=options["denominator"],
        weights=options["weights"],
        shape=shape,
        like=like,
    )
    wide = accumulation_dtype(like.dtype)
    counted = weights != 0

    def flat(name: str, value: Any) -> Tensor:
        tensor(name, value, shape=shape, like=like, wants="one per token")
        check_values(name, value, counted)
        return value.detach().to(wide).reshape(-1)

    def flat_or_none(name: str, value: Tensor | None) -> Tensor | None:
        return None if value is None else flat(name, value)

    per_token = PerToken(
        tokens=token_ids(tokens, shape, like),
        old_logprobs=flat("old_logprobs", old_logprobs),
        advantages=flat("advantages", advantages),
        weights=weights.reshape(-1),
        importance_weights=flat_or_none("importance_weights", options["importance_weights"]),
        ref_logprobs=flat_or_none("ref_logprobs", options["ref_logprobs"]),
    )
    return LossOperands(
        per_token=per_token,
        objective=objective,
        softmax=softmax(
            options["temperature"],
            options["logit_scale"],
            options["softcap"],
            shape=shape,
            like=like,
            counted=counted,
        ),
        objective_name=name,
        shape=shape,
        sequence_starts=_sequence_starts(options["cu_seqlens"], name, shape=shape, like=like),
        backend=choose_backend(options["backend"], like),
        function=function,
    )


def _objective(options: LossKeywords, name: str, *, has_ref: bool) -> Objective:
    """Check the scalars of a loss."""
    if options["dual_clip"] is not None and name not in CLIPPED_SURROGATES:
        raise ValueError(
            f"dual_clip needs objective={' or '.join(map(repr, CLIPPED_SURROGATES))}, got {name!r}"
        )
    if options["sapo_tau"] is not None and name != "sapo":
        raise ValueError(f"sapo_tau needs objective='sapo', got {name!r}")
    tau_positive: float | None = None
    tau_negative: float | None = None
    if name == "sapo":
        tau_positive, tau_negative = check_sapo_tau(
            SAPO_TAU if options["sapo_tau"] is None else options["sapo_tau"]
        )
    has_clip = name not in ("sapo", CUSTOM)
    lowest_ratio, highest_ratio = clip_range(options["clip_ratio"] if has_clip else None)
    _check_kl(options, name, has_ref=has_ref)
    return Objective(
        lowest_ratio=lowest_ratio,
        highest_ratio=highest_ratio,
        dual_clip=check_dual_clip(options["dual_clip"]),
        kl_coef=float(options["kl_coef"]),
        kl_estimator=options["kl_estimator"],
        entropy_coef=float(finite("entropy_coef", options["entropy_coef"])),
        kl_ratio_weighted=options["kl_ratio_weighted"],
        policy_term="clip" if name == "gspo" else name,
        tau_positive=tau_positive,
        tau_negative=tau_negative,
    )


def _check_kl(options: LossKeywords, objective: str, *, has_ref: bool) -> None:
    """Check that the loss has what its KL to the reference needs."""
    estimator = choice("kl_estimator", options["kl_estimator"], KL_ESTIMATORS)
    coef = finite("kl_coef", options["kl_coef"])
    if coef and not has_ref:
        if estimator == "full":
            raise ValueError(
                "kl_estimator='full' needs ref_logits (ref_hidden and ref_weight in "
                "linear_ppo_loss), got None"
            )
        if options["ref_logprobs"] is None:
            raise ValueError(
                f"kl_coef={coef} with kl_estimator={estimator!r} needs ref_logprobs, got None"
            )
    if boolean("kl_ratio_weighted", options["kl_ratio_weighted"]):
        if estimator not in RATIO_WEIGHTED:
            raise ValueError(
                "kl_ratio_weighted=True needs kl_estimator='k1' or 'k3', which the ratio makes "
                f"unbiased, got {estimator!r}"
            )
        if not coef:
            raise ValueError("kl_ratio_weighted=True needs a kl_coef other than 0, got 0")
        if objective == "gspo":
            raise ValueError(
                "kl_ratio_weighted=True needs token ratios, got objective='gspo' with sequence "
                "ratios"
            )


def _sequence_starts(
    cu_seqlens: Tensor | None, objective: str, *, shape: torch.Size, like: Tensor
) -> Tensor | None:
    """Return [B + 1], the start of each sequence in the flattened tokens, and N.

    Only "gspo" and functions need them. A function may also get tokens without sequences.
    """
    if objective not in ("gspo", CUSTOM):
        if cu_seqlens is not None:
            raise ValueError(f"cu_seqlens needs objective='gspo', got {objective!r}")
        return None
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, shape.numel(), like=like)
        return cu_seqlens
    if len(shape) < 2:
        if objective == CUSTOM:
            return None
        raise ValueError(
            "objective='gspo' needs sequences along the last axis, (..., T), or cu_seqlens, got "
            f"tokens of shape {list(shape)}"
        )
    starts = torch.arange(shape[:-1].numel() + 1, device=like.device)
    return starts * shape[-1]
