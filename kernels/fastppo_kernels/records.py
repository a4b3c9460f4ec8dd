"""Operand and result records, and the constants shared by the definition and the backends.

The argument checks of the public functions create the operand records. They pass unchanged through
the operators, the chunk loop, the backends and the launchers into the Triton kernels.

Shapes: N tokens, V vocabulary, H width of the hidden states, B sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Bound of |logprob − old_logprob| before the exponential. e^20 ≈ 5e8 is far outside any clip range
and finite in fp32 even when squared."""

LOWEST = -1e30
"""Replaces −inf in shifted scores: e^LOWEST is exactly 0, and 0·LOWEST is 0, unlike 0·(−inf)."""

WHITEN_EPSILON = 1e-8
"""Added to the variance (Ziegler et al. 2019)."""

KL_ESTIMATORS = ("k1", "k2", "k3")
"""Estimators from the sampled token. "full" reads the whole distribution."""

RATIO_WEIGHTED = ("k1", "k3")
"""Estimators that weighting by the ratio makes unbiased: over tokens of π_old, the means of
ratio·k1 and ratio·k3 are KL(π‖reference), and so are their gradients. k2 stays biased; "full"
samples no token."""


POLICY_TERMS = ("clip", "cispo", "sapo", "dis", "dppo_tv", "dppo_kl")
"""Policy terms; see `definition.policy_term`."""

DPPO_EPSILON = 1e-8
"""Added to 1 − p in the KL of "dppo_kl", as in verl: p may round to 1."""


class Sums(NamedTuple):
    """The sums behind the metrics, 0-d each. `sums` [len(SUMS)] has this order.

    Sums over chunks, microbatches and ranks add up, except `ratio_max` (`combine_sums`). From
    `tokens` on they are unweighted sums over the tokens with w ≠ 0.
    """

    loss: Tensor  # Σ w · token loss
    policy_loss: Tensor  # Σ w · policy term (with importance weights)
    tokens: Tensor
    entropy: Tensor
    kl: Tensor
    approx_kl: Tensor  # k3 of the policy against the old policy
    ratio: Tensor
    ratio_squared: Tensor
    # The ratio, or another `definition.bounded_variable`,
    outside: Tensor  # outside the clip range, whatever the advantage
    above_positive: Tensor  # above the clip range and A > 0: clipped, no gradient
    below_positive: Tensor  # below the clip range and A > 0: pulled back
    above_negative: Tensor  # above the clip range and A < 0: pushed back
    below_negative: Tensor  # below the clip range and A < 0: clipped, no gradient
    dual_clipped: Tensor  # A < 0 and ratio beyond the dual clip: no gradient
    ratio_max: Tensor


SUMS = Sums._fields
LOSS = SUMS.index("loss")
RATIO_MAX = SUMS.index("ratio_max")


def combine_sums(total: Tensor, part: Tensor) -> Tensor:
    """Combine the sums [len(SUMS)] of two losses over disjoint tokens, such as two chunks."""
    joined = total + part
    joined[RATIO_MAX] = torch.maximum(total[RATIO_MAX], part[RATIO_MAX])
    return joined


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return fp64 for fp64, which tests compare in, and fp32 otherwise."""
    return torch.float64 if dtype == torch.float64 else torch.float32


Selection = slice | Tensor
"""A selection of N rows: a slice, int64 indices, or a mask [N] bool."""


def map_tensors(function: Callable[[Tensor], Tensor | None], record: Any) -> Any:
    """Apply the function to each tensor of the record."""
    return type(record)(*(function(x) if isinstance(x, Tensor) else x for x in record))


def _at(record: Any, rows: Selection) -> Any:
    """Select rows of each tensor of the record."""
    return map_tensors(lambda x: x[rows], record)


# -------------------------------------------------------------------------------- operands of
# losses


class Softmax(NamedTuple):
    """log softmax(z/T) of logits x, with z = logit_scale·x, then softcap·tanh(z/softcap).

    temperatures: [N] in the accumulation dtype, one per token, in place of `temperature`.
    """

    temperature: float = 1.0
    temperatures: Tensor | None = None
    logit_scale: float = 1.0
    softcap: float | None = None

    def at(self, rows: Selection) -> Softmax:
        return self if self.temperatures is None else _at(self, rows)


class Objective(NamedTuple):
    """The scalars of the loss w·(policy term·importance weight + kl_coef·KL − entropy_coef·H).

    lowest_ratio, highest_ratio: 1 − ε_low and 1 + ε_high, rounded once for all backends; infinite
        for no clipping.
    dual_clip: only of the policy term "clip".
    kl_estimator: k1, k2, k3, or full, which needs the reference's logits.
    kl_ratio_weighted: multiply the KL by the ratio, with the gradient through both; for k1 and k3.
    tau_positive, tau_negative: the gate's temperatures of "sapo", for A > 0 and for A ≤ 0. "sapo"
        clips nothing and has an infinite range.
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

    Tokens of weight 0 are ignored, and their other entries may hold anything.
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
        """Set the entries of the other tokens to 0."""
        return map_tensors(lambda x: torch.where(counted, x, 0), self)


class Projection(NamedTuple):
    """Logits to be computed: hidden [N, H] @ weight [V, H].T + bias [V]."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None


class Gemm(NamedTuple):
    """How a projection is computed.

    chunk_size: rows of logits in memory; None: a memory budget decides.
    dtype: of the products and the logits; None: that of the hidden states.
    """

    chunk_size: int | None = None
    dtype: torch.dtype | None = None

    def dtype_for(self, projection: Projection) -> torch.dtype:
        return projection.hidden.dtype if self.dtype is None else self.dtype


class GradientsWanted(NamedTuple):
    """The parts of a projection that need gradients."""

    hidden: bool = True
    weight: bool = True
    bias: bool = True


# --------------------------------------------------------------------------------- results of
# losses


class StatsRows(NamedTuple):
    """Statistics of tokens, [N] each, and the normalizers [N, 2] that backward needs.

    p_others: 1 − p of the token as a sum over the others, which keeps the digits where p is near 1.
    mean_gap: Σ p (t − r), the KL without the log sums; t and r are the shifted scores of policy and
        reference. 0 without a reference.
    token_gap: log p_y − log q_y − KL, the token's t − r minus mean_gap, from sums over the others.
        0 without a reference, or if the policy rules the token out.
    normalizer, ref_normalizer: (row maximum, log Σ e^t). The maximum is that of the logits or, with
        a soft-cap, of tanh(z/softcap). Both are −inf for a row of −inf only, whose other statistics
        are NaN.
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
    """The loss's derivatives by the statistics, [N] each; None if not needed."""

    logprobs: Tensor
    entropy: Tensor | None = None
    kl: Tensor | None = None

    def at(self, rows: Selection) -> StatsGradients:
        return _at(self, rows)


class PPORows(NamedTuple):
    """sums [len(SUMS)]; logprobs, entropy, kl [N], 0 for weight 0; grad [N, V] or None."""

    sums: Tensor
    logprobs: Tensor
    entropy: Tensor
    kl: Tensor
    grad: Tensor | None = None


class ProjectionGradients(NamedTuple):
    """[N, H], [V, H], [V] in the dtypes of the projection's parts; None if not needed."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


class LinearPPORows(NamedTuple):
    """PPORows with the projection's gradients in place of the logits'."""

    sums: Tensor
    logprobs: Tensor
    entropy: Tensor
    kl: Tensor
    grads: ProjectionGradients


# --------------------------------------------------------------------------------------- advantages


class Trajectory(NamedTuple):
    """A batch of responses: [B, T], or packed [total] with `cu_seqlens` [B + 1] int32 or int64.

    token_values: the value of the state before each token.
    token_rewards: None for 0; added to shaped rewards.
    mask: True on the counted tokens; None for all.
    bootstrap: [B], the value after a sequence's last token.
    """

    # Not `values`: tuples in Triton kernels have an attribute of that name.
    token_values: Tensor
    token_rewards: Tensor | None = None
    mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    bootstrap: Tensor | None = None


class Discounts(NamedTuple):
    """γ and λ, or `gammas` and `lams` [B], one per sequence."""

    gamma: float = 1.0
    lam: float = 0.95
    gammas: Tensor | None = None
    lams: Tensor | None = None


class Shaping(NamedTuple):
    """Rewards r_t = −kl_coef·KL_t, plus the score [B] on a response's last token.

    logprobs, ref_logprobs: shaped like the values, nats.
    score_clip: clamp scores to ±score_clip first.
    """

    scores: Tensor
    logprobs: Tensor
    ref_logprobs: Tensor | None = None
    kl_coef: float = 0.0
    kl_estimator: str = "k1"
    score_clip: float | None = None


class Gae(NamedTuple):
    """Shaped like the values, fp32 (fp64 for fp64), 0 where masked."""

    advantages: Tensor
    returns: Tensor


class ShapedAdvantages(NamedTuple):
    """Shaped advantages before whitening.

    advantages, returns: shaped like the values, fp32, 0 where masked.
    kl: [B] fp32, nats, the sum over each sequence.
    moments: [3] fp64, of the advantages.
    """

    advantages: Tensor
    returns: Tensor
    kl: Tensor
    moments: Tensor
