"""What travels: the operands of the loss, of its softmax and of the advantages, and the results.

A record is made once, by the check of a public function's arguments. It goes unchanged through the
operators, the chunk loop, the backends and the launchers, and into the Triton kernels. The numbers
that the backends and the definition must agree on are here too.

Shapes: N tokens, V vocabulary, H wide hidden states, B sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""|logprob − old_logprob| is clamped here before the exponential: e^20 ≈ 5e8 is far outside any
clip range and still finite in fp32, even squared."""

LOWEST = -1e30
"""Stands in for −inf in shifted scores: e^LOWEST is exactly 0, and 0·LOWEST is 0 where 0·(−inf) is
NaN."""

WHITEN_EPSILON = 1e-8
"""Added to the variance (Ziegler et al. 2019)."""

KL_ESTIMATORS = ("k1", "k2", "k3")
"""The estimators on the sampled token; the other one, "full", reads the whole distribution."""

RATIO_WEIGHTED = ("k1", "k3")
"""The estimators that the ratio makes unbiased: over tokens of π_old, the means of ratio·k1 and of
ratio·k3 are KL(π‖reference), and the means of their gradients its gradient. k2 is biased however it
is weighted; the full KL samples no token."""


POLICY_TERMS = ("clip", "cispo", "sapo", "dis")
"""What a token's ratio and advantage make of its gradient; `definition.policy_term`."""


class Sums(NamedTuple):
    """What the metrics are made of, 0-d each; `sums` [len(SUMS)] holds them in this order.

    They add up over chunks, microbatches and ranks; `ratio_max` maxes (`combine_sums`).
    """

    loss: Tensor  # Σ w · token loss
    policy_loss: Tensor  # Σ w · policy term (with importance weights)
    tokens: Tensor  # from here on unweighted sums over the tokens with w ≠ 0
    entropy: Tensor
    kl: Tensor
    approx_kl: Tensor  # k3 of the policy against the old policy
    ratio: Tensor
    ratio_squared: Tensor
    above_positive: Tensor  # ratio above the clip range and A > 0: clipped, no gradient
    below_positive: Tensor  # ratio below the clip range and A > 0: pulled back
    above_negative: Tensor  # ratio above the clip range and A < 0: pushed back
    below_negative: Tensor  # ratio below the clip range and A < 0: clipped, no gradient
    dual_clipped: Tensor  # A < 0 and ratio beyond the dual clip: no gradient
    ratio_max: Tensor  # the one that combines by max


SUMS = Sums._fields
LOSS = SUMS.index("loss")
RATIO_MAX = SUMS.index("ratio_max")


def combine_sums(total: Tensor, part: Tensor) -> Tensor:
    """Joins the `sums` of two losses over disjoint sets of tokens, say of two chunks: [len(SUMS)]
    with the sums added, the largest ratio the larger of both."""
    joined = total + part
    joined[RATIO_MAX] = torch.maximum(total[RATIO_MAX], part[RATIO_MAX])
    return joined


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32 for every dtype but fp64, which stays (tests compare in it)."""
    return torch.float64 if dtype == torch.float64 else torch.float32


Selection = slice | Tensor
"""Some of N rows: a slice, int64 indices, or a mask [N] bool."""


def map_tensors(function: Callable[[Tensor], Tensor | None], record: Any) -> Any:
    """The record with what the function makes of each of its tensors, and its other fields as they
    are."""
    return type(record)(*(function(x) if isinstance(x, Tensor) else x for x in record))


def _at(record: Any, rows: Selection) -> Any:
    """The record with its tensors at these rows."""
    return map_tensors(lambda x: x[rows], record)


# ------------------------------------------------------------------------------ what the loss takes


class Softmax(NamedTuple):
    """How logits x become log softmax(z/T): z = logit_scale·x, then softcap·tanh(z/softcap).

    `temperatures` [N] in the accumulation dtype, one per token, replaces `temperature`.
    """

    temperature: float = 1.0
    temperatures: Tensor | None = None
    logit_scale: float = 1.0
    softcap: float | None = None

    def at(self, rows: Selection) -> Softmax:
        return self if self.temperatures is None else _at(self, rows)


class Objective(NamedTuple):
    """The scalars of the loss: w·(policy term·importance weight + kl_coef·KL − entropy_coef·H).

    The clip range is 1 − ε_low to 1 + ε_high, rounded once for every backend; −inf to inf is no
    clipping. `kl_estimator` is k1, k2, k3, or full, which needs the reference's logits.
    `kl_ratio_weighted`: the KL is times the ratio, gradient through both; of k1 and k3.
    `dual_clip` is of the policy term "clip" alone; of "sapo", which clips nothing and has an
    infinite range, are the gate's temperatures, for A > 0 and for the others.
    """

    lowest_ratio: float = -math.inf
    highest_ratio: float = math.inf
    dual_clip: float | None = None
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    entropy_coef: float = 0.0
    kl_ratio_weighted: bool = False
    policy_term: str = "clip"
    tau_positive: float | None = None
    tau_negative: float | None = None


class PerToken(NamedTuple):
    """The loss's operands of shape [N]: tokens int64, the others floats, logprobs in nats.

    A token of weight 0 counts for nothing, and the rest of its entries may be anything.
    """

    tokens: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    importance_weights: Tensor | None = None
    ref_logprobs: Tensor | None = None

    def at(self, rows: Selection) -> PerToken:
        return _at(self, rows)

    def where(self, counted: Tensor) -> PerToken:
        """With 0 in the place of what the other tokens have."""
        return map_tensors(lambda x: torch.where(counted, x, 0), self)


class Projection(NamedTuple):
    """Logits that are not formed yet: hidden [N, H] @ weight [V, H].T + bias [V]."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None


class Gemm(NamedTuple):
    """How a projection is formed: rows of logits held at once (None: what a budget allows), and the
    dtype of the products and of the logits (None: that of the hidden states)."""

    chunk_size: int | None = None
    dtype: torch.dtype | None = None

    def dtype_for(self, projection: Projection) -> torch.dtype:
        return projection.hidden.dtype if self.dtype is None else self.dtype


class GradientsWanted(NamedTuple):
    """The parts of a projection whose gradients are wanted."""

    hidden: bool = True
    weight: bool = True
    bias: bool = True


# ---------------------------------------------------------------------------- what the loss gives


class StatsRows(NamedTuple):
    """All [N] but the normalizers [N, 2]: (row maximum, log Σ e^t), which backward needs.

    `p_others` is 1 − p of the token, as a sum over the others: where p is near 1 it keeps digits
    that the difference does not have. `mean_gap` is Σ p (t − r), the KL without the log sums, t and
    r the shifted scores of policy and reference, and `token_gap` the token's t − r less that, which
    is log p_y − log q_y − KL, again from sums over the others; 0 where the policy rules the token
    out. Both are 0 without a reference. The maximum is that of the logits or, with a soft-cap,
    of tanh(z/softcap). Both numbers of a normalizer are −inf for a row of −inf alone, whose other
    statistics are NaN.
    """

    logprobs: Tensor
    entropy: Tensor
    kl: Tensor
    p_others: Tensor
    mean_gap: Tensor
    token_gap: Tensor
    normalizer: Tensor
    ref_normalizer: Tensor

    def at(self, rows: Selection) -> StatsRows:
        return _at(self, rows)


class StatsGradients(NamedTuple):
    """The loss's derivatives with respect to the statistics, [N] each; None for one that is not
    wanted."""

    logprobs: Tensor
    entropy: Tensor | None = None
    kl: Tensor | None = None

    def at(self, rows: Selection) -> StatsGradients:
        return _at(self, rows)


class PPORows(NamedTuple):
    """sums [len(SUMS)]; logprobs, entropy, kl [N], 0 where the weight is 0; grad [N, V] or None."""

    sums: Tensor
    logprobs: Tensor
    entropy: Tensor
    kl: Tensor
    grad: Tensor | None = None


class ProjectionGradients(NamedTuple):
    """[N, H], [V, H], [V], in the dtypes of a projection's parts; None where not wanted."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


class LinearPPORows(NamedTuple):
    """As PPORows, with the gradients of the projection in place of those of the logits."""

    sums: Tensor
    logprobs: Tensor
    entropy: Tensor
    kl: Tensor
    grads: ProjectionGradients


# --------------------------------------------------------------------------------------- advantages


class Trajectory(NamedTuple):
    """A batch of responses: [B, T], or packed [total] with `cu_seqlens` [B + 1] int32 or int64.

    `token_values` are those of the state before each token; `token_rewards`, None for 0, are added
    to the shaped ones where there are any. `mask` is True on the tokens that count; None means all.
    `bootstrap` [B] is the value after a sequence's last token.
    """

    # Not `values`: that word is taken by the tuples of Triton's kernels.
    token_values: Tensor
    token_rewards: Tensor | None = None
    mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    bootstrap: Tensor | None = None


class Discounts(NamedTuple):
    """γ and λ; `gammas` and `lams` [B], one per sequence, replace the numbers."""

    gamma: float = 1.0
    lam: float = 0.95
    gammas: Tensor | None = None
    lams: Tensor | None = None


class Shaping(NamedTuple):
    """Rewards r_t = −kl_coef·KL_t, plus the score [B] on a response's last token.

    logprobs, ref_logprobs: like the values, nats. Scores are clamped to ±score_clip first.
    """

    scores: Tensor
    logprobs: Tensor
    ref_logprobs: Tensor | None = None
    kl_coef: float = 0.0
    kl_estimator: str = "k1"
    score_clip: float | None = None


class Gae(NamedTuple):
    """Like the values, fp32 (fp64 for fp64), 0 where masked."""

    advantages: Tensor
    returns: Tensor


class ShapedAdvantages(NamedTuple):
    """advantages, returns: like the values, fp32, 0 where masked; kl [B] fp32, nats, the sum over
    each sequence; moments [3] fp64 of the advantages before whitening."""

    advantages: Tensor
    returns: Tensor
    kl: Tensor
    moments: Tensor
