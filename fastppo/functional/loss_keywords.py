"""The keywords that `ppo_loss` and `linear_ppo_loss` share, declared once.

`LossKeywords` annotates each keyword with its type, its default and its documentation. Editors and
type checkers read the types (PEP 692). `with_loss_keywords` shows all three in `help()` and in
`inspect.signature`, and answers an unknown keyword with a known one.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import textwrap
from collections.abc import Callable
from typing import Annotated, Any, TypedDict, TypeVar, cast, get_args, get_type_hints

from fastppo_kernels import records
from torch import Tensor

from fastppo import other_names

OBJECTIVES = (*records.POLICY_TERMS, "gspo")
CUSTOM = "custom"
"""Name of a user's function as the objective."""
KL_ESTIMATORS = (*records.KL_ESTIMATORS, "full")

F = TypeVar("F", bound=Callable[..., Any])


class LossKeywords(TypedDict, total=False):
    """Keywords of both losses: `Annotated[type, default, documentation]`."""

    objective: Annotated[
        str | Callable[..., Tensor],
        "clip",
        """The policy term. "clip" is PPO's. "cispo" is the detached clipped ratio times the
        logprob. "sapo" replaces the clip by a soft gate. "gspo" is "clip" with the ratio of the
        whole sequence. "dis" is the detached ratio times the logprob, and 0 outside the clip range.
        "dppo_tv" and "dppo_kl" are the same product, and 0 once the token's probability has moved
        in the direction of its advantage by more than a divergence. A function is called as
        objective(logprobs, old_logprobs, advantages, mask) with flattened tensors [N], and returns
        the term to minimize for each token, [N]. It may also have parameters named entropy,
        ref_logprobs, importance_weights and cu_seqlens. Autograd differentiates it in logprobs and
        entropy. The importance weights multiply its result unless it names them. The KL, the
        entropy bonus and the aggregation work as for the other objectives.""",
    ]
    clip_ratio: Annotated[
        float | tuple[float, float] | None,
        0.2,
        """ε, a pair (ε_low, ε_high), or None for no clipping. "sapo" and functions ignore it. For
        "dppo_tv" it bounds |p − q|, and for "dppo_kl" the binary KL(q‖p) in nats, where p and q are
        the token's probabilities under the policy and the old policy.""",
    ]
    dual_clip: Annotated[
        float | None,
        None,
        """c > 1 bounds the loss by −c·A where A < 0 (Ye et al. 2020). Only for "clip" and
        "gspo".""",
    ]
    sapo_tau: Annotated[
        tuple[float, float] | None,
        None,
        """Temperatures of SAPO's gate for A > 0 and for A ≤ 0. None means (1, 1.05).""",
    ]
    cu_seqlens: Annotated[
        Tensor | None,
        None,
        """[B + 1] int32 or int64, the start of each sequence in the flattened tokens, and N. Only
        for "gspo" and functions. By default, each sequence lies along the last axis.""",
    ]
    ref_logprobs: Annotated[
        Tensor | None,
        None,
        """(...) nats, the reference's logprobs of the tokens, for the estimators k1, k2 and k3. No
        gradient.""",
    ]
    kl_coef: Annotated[
        float,
        0.0,
        """Weight of the KL to the reference. The KL is reported whenever a reference is given.""",
    ]
    kl_estimator: Annotated[
        str,
        "k3",
        """k1 = d, k2 = d²/2 or k3 = e^{−d} − 1 + d with d = logprob − ref_logprob; or "full", the
        exact KL over the vocabulary.""",
    ]
    kl_ratio_weighted: Annotated[
        bool,
        False,
        """Whether the loss has kl_coef·r_t·KL_t, with the gradient through both factors, which
        makes k1 and k3 unbiased for tokens of the old policy. The reported KL is not weighted.""",
    ]
    entropy_coef: Annotated[float, 0.0, """Weight of the entropy bonus."""]
    temperature: Annotated[
        float | Tensor, 1.0, """A number > 0, or (...), one per token. No gradient."""
    ]
    importance_weights: Annotated[
        Tensor | None,
        None,
        """(...), factors of the policy term, which correct for tokens of another policy than that
        of old_logprobs. No gradient.""",
    ]
    aggregation: Annotated[
        str,
        "token-mean",
        """How the losses of the tokens are averaged; see `aggregation_weights`.""",
    ]
    denominator: Annotated[
        float | Tensor | None,
        None,
        """The number by which the average divides; see `aggregation_weights`.""",
    ]
    weights: Annotated[
        Tensor | None,
        None,
        """(...), the weight of each token, in place of aggregation and denominator. No
        gradient.""",
    ]
    logit_scale: Annotated[float, 1.0, """The factor of the logits x: z = logit_scale·x."""]
    softcap: Annotated[
        float | None, None, """Bounds the scaled logits to softcap·tanh(z/softcap)."""
    ]
    backend: Annotated[
        str,
        "auto",
        """"auto", "triton", "cpu", or "torch", the slow definition.""",
    ]


_DECLARED = {
    name: get_args(hint) for name, hint in get_type_hints(LossKeywords, include_extras=True).items()
}
"""(type, default, documentation) of each keyword."""
DEFAULTS = cast(LossKeywords, {name: default for name, (_, default, _) in _DECLARED.items()})


def with_loss_keywords(function: F) -> F:
    """Decorator: document the `LossKeywords` of a function, and check the keywords' names.

    An unknown keyword raises a TypeError that suggests a known one: the one for which another
    library has this name, or a similar one.
    """
    signature = inspect.signature(function)
    before = [x for x in signature.parameters.values() if x.kind is not x.VAR_KEYWORD]
    shared = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)
        for name, (hint, default, _) in _DECLARED.items()
    ]
    signature = signature.replace(parameters=[*before, *shared])
    known = frozenset(signature.parameters)

    @functools.wraps(function)
    def checked(*args: Any, **keywords: Any) -> Any:
        for name in keywords:
            if name not in known:
                raise TypeError(_unknown(function.__name__, name, known))
        return function(*args, **keywords)

    checked.__doc__ = f"{inspect.getdoc(function)}\n\n{_documentation()}"
    checked.__signature__ = signature  # type: ignore[attr-defined]
    return cast(F, checked)


def _documentation() -> str:
    """Return the section on the shared keywords for a docstring."""
    lines = ["Keywords of both losses:"]
    for name, (_, default, documentation) in _DECLARED.items():
        text = " ".join(f"{name} (default {default!r}): {documentation}".split())
        lines += textwrap.wrap(
            text,
            96,
            initial_indent="    ",
            subsequent_indent="        ",
            break_on_hyphens=False,
        )
    return "\n".join(lines)


def _unknown(function: str, name: str, known: frozenset[str]) -> str:
    ours = other_names.KEYWORDS.get(name, "")
    if ours.partition("=")[0] not in known:
        ours = next(iter(difflib.get_close_matches(name, sorted(known), 1, 0.75)), "")
    hint = f": use {ours}" if ours else ""
    return f"{function} got an unexpected keyword argument {name!r}{hint}"
