"""The specification: every operation in plain PyTorch, written to be read.

There are no chunks, buffers or hand-written gradients: autograd differentiates the code. The
backends have the same names, operands and results, and are compared with it in fp64. It is compared
with the papers' formulas.

    logprob = log p_y                        p = softmax(z/T), z the scaled and capped logits
    entropy = −Σ_j p_j log p_j
    KL      = Σ_j p_j (log p_j − log q_j)    q the reference's softmax; or an estimate at y alone
    ratio   = exp(clamp(logprob − old_logprob, −20, 20))
    loss    = Σ_t w_t · ( policy·importance_weight
                          + kl_coef·KL − entropy_coef·entropy )     KL, or ratio·KL
    policy  = −min(ratio·A, clip(ratio)·A), or another `policy_term`

Sources: Schulman et al. 2016 (GAE), 2017 (the clipped loss), 2020 (the KL estimators); Ziegler et
al. 2019 (shaped rewards, whitening); Ye et al. 2020 (dual clip); for other policy terms see
`policy_term`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from fastppo_kernels import records
from fastppo_kernels.records import LOG_RATIO_LIMIT, LOWEST, Objective, PerToken, Softmax

WITHOUT_FP64 = ("mps",)
"""Types of devices that have no fp64: Apple's GPUs."""


def scores(logits: Tensor, softmax: Softmax) -> tuple[Tensor, Tensor]:
    """Return ((z − max z)/T [N, V] in the accumulation dtype, row maximum [N]).

    The maximum is that of the logits or, with a soft-cap, of tanh(z/softcap). Shifting comes before
    scaling: rounding z/T at an offset of 900 would cost 1e-4 nats in fp32.
    """
    x = logits.flatten(0, -2).to(records.accumulation_dtype(logits.dtype))
    factor = softmax.logit_scale
    if softmax.softcap is not None:
        x = torch.tanh(softmax.logit_scale * x / softmax.softcap)
        factor = softmax.softcap
    row_max = x.detach().amax(-1)
    shift = row_max.masked_fill(row_max == -torch.inf, 0.0)
    t = factor * (x - shift.unsqueeze(-1))
    if softmax.temperatures is not None:
        return t / softmax.temperatures.unsqueeze(-1), row_max
    return t / softmax.temperature, row_max


def log_softmax(logits: Tensor, softmax: Softmax) -> Tensor:
    """Return log p [N, V]; LOWEST for ruled-out tokens, whose p is 0.

    The clamp gives a ruled-out token's logprob no gradient. The kernels give it [j = y] − p_j like
    any other.
    """
    return torch.log_softmax(scores(logits, softmax)[0], -1).clamp(min=LOWEST)


def entropy(log_p: Tensor) -> Tensor:
    return -(log_p.exp() * log_p).sum(-1)


def full_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return Σ p (log p − log q), infinite if only the reference rules out a token.

    An infinite KL has no gradient here. The kernels' gradient is then infinite if its coefficient
    is not 0, to be visible. For a reference row that is not finite, which entries of the kernels'
    gradient are NaN and which infinite is undefined.
    """
    p = log_p.exp()
    ruled_out = ((p > 0) & (log_q <= LOWEST)).any(-1)
    return (p * (log_p - log_q)).sum(-1).masked_fill(ruled_out, math.inf)


def sampled_kl(difference: Tensor, estimator: str) -> Tensor:
    """Return k1 = d, k2 = d²/2 or k3 = e^{−d} − 1 + d for d = logprob − ref_logprob."""
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference**2 / 2
    if estimator == "k3":
        return torch.expm1((-difference).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)) + difference
    raise ValueError(f"expected an estimator of {records.KL_ESTIMATORS}, got {estimator!r}")


def normalizer(logits: Tensor, softmax: Softmax) -> Tensor:
    """Return [N, 2]: (row maximum, log Σ_j e^{(z_j − max z)/T}).

    Both are −inf for a row of −inf only, and NaN for a row with NaN.
    """
    t, row_max = scores(logits, softmax)
    log_sum = torch.logsumexp(t, -1)
    return torch.stack([row_max, log_sum], -1).detach()


def token_stats(
    logits: Tensor, tokens: Tensor, softmax: Softmax, *, ref_logits: Tensor | None = None
) -> records.StatsRows:
    """Return the statistics of logits [N, V] or [B, T, V], differentiable in the logits."""
    log_p = log_softmax(logits, softmax)
    normalizers = normalizer(logits, softmax)
    column = tokens[:, None]
    logprobs = log_p.gather(1, column)[:, 0]
    others = log_p.exp().scatter(1, column, 0.0).sum(-1)
    kl = torch.zeros_like(logprobs)
    mean_gap = torch.zeros_like(logprobs)
    token_gap = torch.zeros_like(logprobs)
    ref_normalizers = torch.zeros_like(normalizers)
    if ref_logits is not None:
        log_q = log_softmax(ref_logits, softmax)
        kl = full_kl(log_p, log_q)
        ref_normalizers = normalizer(ref_logits, softmax)
        mean_gap = kl + normalizers[:, 1] - ref_normalizers[:, 1]
        token_gap = logprobs - log_q.gather(1, column)[:, 0] - kl
        token_gap = token_gap.masked_fill(logprobs <= LOWEST, 0.0)
    return records.StatsRows(
        logprobs=logprobs,
        entropy=entropy(log_p),
        kl=kl,
        p_others=others,
        mean_gap=mean_gap.detach(),
        token_gap=token_gap.detach(),
        normalizer=normalizers,
        ref_normalizer=ref_normalizers,
    )


def bounded_variable(
    logprobs: Tensor, old_logprobs: Tensor, ratio: Tensor, objective: Objective
) -> Tensor:
    """Return the variable that the clip range bounds [N], detached: the ratio, or for

        dppo_tv     1 + p − q
        dppo_kl     1 + KL if p ≥ q, otherwise 1 − KL, with
                    KL = q·log(q/p) + (1 − q)·log((1 − q)/(1 − p))

    p is the token's probability, q that under the old policy. Source: Qi et al. 2026 (DPPO), eq. 13
    and 14.
    """
    if objective.policy_term not in ("dppo_tv", "dppo_kl"):
        return ratio.detach()
    p = logprobs.detach().exp()
    q = old_logprobs.exp()
    if objective.policy_term == "dppo_tv":
        return 1 + (p - q)
    epsilon = records.DPPO_EPSILON
    others = (1 - q) * torch.log((1 - q + epsilon) / (1 - p + epsilon))
    kl = q * (old_logprobs - logprobs.detach()) + others
    return torch.where(p < q, 1 - kl, 1 + kl)


def policy_term(
    logprobs: Tensor, ratio: Tensor, bounded: Tensor, advantages: Tensor, objective: Objective
) -> Tensor:
    """Return the minimized term of each token [N], differentiable in its logprob:

        clip    −min(ratio·A, clip(ratio)·A)                        Schulman et al. 2017, eq. 7
        cispo   −[clip(ratio)]·A·logprob                            MiniMax 2025 (MiniMax-M1)
        sapo    −4/τ·sigmoid(τ·(ratio − 1))·A                       Gao et al. 2025 (SAPO)
        dis     −[ratio inside the range, 0 outside]·A·logprob      Hou et al. 2026 (SAO), eq. 1
        dppo_tv, dppo_kl
                −[0 if A > 0 and above the range, or A < 0 and below; otherwise ratio]·A·logprob
                                                                    Qi et al. 2026, eq. 11 and 12

    Terms in brackets are detached. At a ratio of 1 all gradients equal that of −ratio·A.

    Args:
        bounded: the `bounded_variable`, which decides for "dis" and DPPO what is out of the range.
    """
    lowest = objective.lowest_ratio
    highest = objective.highest_ratio
    clipped = ratio.clamp(lowest, highest)
    if objective.policy_term == "clip":
        surrogate = torch.minimum(ratio * advantages, clipped * advantages)
        if objective.dual_clip is not None:
            bounded = torch.maximum(surrogate, objective.dual_clip * advantages)
            surrogate = torch.where(advantages < 0, bounded, surrogate)
        return -surrogate
    if objective.policy_term == "sapo":
        tau_positive = objective.tau_positive
        tau_negative = objective.tau_negative
        assert tau_positive is not None
        assert tau_negative is not None
        tau = torch.where(advantages > 0, ratio.new_full((), tau_positive), tau_negative)
        # Autograd differentiates torch.sigmoid as s·(1 − s), which is 0 where s rounds to 1.
        gate = torch.nn.functional.logsigmoid(tau * (ratio - 1)).exp()
        return -4 / tau * gate * advantages
    if objective.policy_term == "cispo":
        return -clipped.detach() * advantages * logprobs
    above = bounded > highest
    below = bounded < lowest
    if objective.policy_term == "dis":
        masked = above | below
    elif objective.policy_term in ("dppo_tv", "dppo_kl"):
        masked = torch.where(advantages > 0, above, below)
    else:
        raise ValueError(
            f"expected a policy term of {records.POLICY_TERMS}, got {objective.policy_term!r}"
        )
    return -torch.where(masked, 0.0, ratio).detach() * advantages * logprobs


def sequence_ratio_logprobs(
    logprobs: Tensor, old_logprobs: Tensor, counted: Tensor, cu_seqlens: Tensor
) -> Tensor:
    """Return GSPO's replacement of the old logprobs [N], detached.

    With it a token's ratio is that of its sequence: the exponential of the mean of
    logprob − old_logprob over the sequence's counted tokens. A token's loss has a gradient only by
    its own logprob. Source: Zheng et al. 2025 (GSPO), eq. 14, GSPO-token; if all tokens of a
    sequence have one advantage and weight, its gradient equals that of eq. 5, GSPO.

    Args:
        counted: [N] bool.
        cu_seqlens: [B + 1], the start of each sequence, and N.
    """
    logprobs = logprobs.detach()
    log_ratio = torch.where(counted, logprobs - old_logprobs, 0.0)
    lengths = cu_seqlens.diff()
    # `unsafe` skips a check of the lengths that would make the host wait.
    total = torch.segment_reduce(log_ratio, "sum", lengths=lengths, unsafe=True)
    count = torch.segment_reduce(counted.to(total.dtype), "sum", lengths=lengths, unsafe=True)
    mean = total / count.clamp(min=1)
    return logprobs - mean.repeat_interleave(lengths, output_size=len(logprobs))


def loss_of_statistics(
    logprobs: Tensor,
    entropies: Tensor,
    kl: Tensor | None,
    per_token: PerToken,
    objective: Objective,
    token_loss: Callable[[Tensor, Tensor, PerToken], Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (loss, differentiable in the statistics [N]; `Sums`; KL [N], detached).

    Tokens of weight 0 are cut out, whatever their entries. `kl` is the full KL; the sampled
    estimators are computed here. `token_loss` of (logprobs, entropies, per_token) replaces the
    policy term and its importance weights; `Sums.outside` then counts the tokens with an advantage
    and no gradient.
    """
    counted = per_token.weights != 0
    t = per_token.where(counted)
    logprobs = torch.where(counted, logprobs, 0.0)
    h = torch.where(counted, entropies, 0.0)
    ratio = (logprobs - t.old_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    bounded = bounded_variable(logprobs, t.old_logprobs, ratio, objective)
    above = bounded > objective.highest_ratio
    below = bounded < objective.lowest_ratio
    outside = above | below
    if token_loss is not None:
        policy = torch.where(counted, token_loss(logprobs, h, t), 0.0)
        if policy.requires_grad:
            by_logprobs = _gradient_of_tokens(policy, logprobs, h.detach(), t, token_loss)
            outside = (t.advantages != 0) & (by_logprobs == 0)
    else:
        policy = policy_term(logprobs, ratio, bounded, t.advantages, objective)
        if t.importance_weights is not None:
            policy = policy * t.importance_weights
    if objective.kl_estimator != "full":
        kl = None
        if t.ref_logprobs is not None:
            kl = sampled_kl(logprobs - t.ref_logprobs, objective.kl_estimator)
    kl = torch.zeros_like(logprobs) if kl is None else torch.where(counted, kl, 0.0)
    # A KL that is only reported may be infinite, and 0·inf is NaN.
    penalty = objective.kl_coef * kl if objective.kl_coef else torch.zeros_like(kl)
    penalty = ratio * penalty if objective.kl_ratio_weighted else penalty
    total = (t.weights * (policy + penalty - objective.entropy_coef * h)).sum()
    positive = t.advantages > 0
    negative = t.advantages < 0
    sums = records.Sums(
        loss=total,
        policy_loss=(t.weights * policy).sum(),
        tokens=counted.sum(),
        entropy=h.sum(),
        kl=kl.sum(),
        approx_kl=sampled_kl(t.old_logprobs - logprobs, "k3").sum(),
        ratio=(ratio * counted).sum(),
        ratio_squared=(ratio**2 * counted).sum(),
        outside=outside.sum(),
        above_positive=(above & positive).sum(),
        below_positive=(below & positive).sum(),
        above_negative=(above & negative).sum(),
        below_negative=(below & negative).sum(),
        dual_clipped=(negative & (ratio > (objective.dual_clip or math.inf))).sum(),
        ratio_max=torch.cat([ratio * counted, ratio.new_zeros(1)]).max(),
    )
    return total, torch.stack([x.detach().to(total.dtype) for x in sums]), kl.detach()


def _gradient_of_tokens(
    policy: Tensor,
    logprobs: Tensor,
    entropies: Tensor,
    per_token: PerToken,
    token_loss: Callable[[Tensor, Tensor, PerToken], Tensor],
) -> Tensor:
    """Return the gradient [N] of a token loss by the logprobs, 0 where it has none.

    torch.compile traces `torch.func.grad`, which calls the function again, and not
    `torch.autograd.grad`.
    """
    if not torch.compiler.is_compiling():
        return torch.autograd.grad(
            policy.sum(), logprobs, retain_graph=True, materialize_grads=True
        )[0]
    counted = per_token.weights != 0

    def total(x: Tensor) -> Tensor:
        return torch.where(counted, token_loss(x, entropies, per_token), 0.0).sum()

    return torch.func.grad(total)(logprobs.detach())


def loss(
    logits: Tensor, per_token: PerToken, objective: Objective, softmax: Softmax, ref: Tensor | None
) -> tuple[Tensor, records.PPORows]:
    """Return (loss, differentiable in the logits; its rows, detached) without rows of weight 0."""
    counted = per_token.weights != 0
    t = per_token.at(counted)
    softmax = softmax.at(counted)
    log_p = log_softmax(logits.flatten(0, -2)[counted], softmax)
    logprobs = log_p.gather(1, t.tokens[:, None])[:, 0]
    h = entropy(log_p)
    kl = None
    if objective.kl_estimator == "full" and ref is not None:
        kl = full_kl(log_p, log_softmax(ref.flatten(0, -2)[counted], softmax))
    total, sums, kl = loss_of_statistics(logprobs, h, kl, t, objective)

    def of_all_rows(x: Tensor) -> Tensor:
        return log_p.new_zeros(len(counted)).masked_scatter(counted, x.detach())

    return total, records.PPORows(
        sums=sums,
        logprobs=of_all_rows(logprobs),
        entropy=of_all_rows(h),
        kl=of_all_rows(kl),
    )


def ppo_loss(
    logits: Tensor,
    per_token: PerToken,
    objective: Objective,
    softmax: Softmax,
    *,
    ref_logits: Tensor | None = None,
) -> records.PPORows:
    """Return the loss of logits [N, V] or [B, T, V] and its gradient."""
    x = logits.detach().requires_grad_()
    total, rows = loss(x, per_token, objective, softmax, ref_logits)
    return rows._replace(grad=torch.autograd.grad(total, x)[0])


def logits_of(projection: records.Projection) -> Tensor:
    logits = projection.hidden @ projection.weight.T
    return logits if projection.bias is None else logits + projection.bias


def linear_ppo_loss(
    projection: records.Projection,
    per_token: PerToken,
    objective: Objective,
    softmax: Softmax,
    *,
    ref_projection: records.Projection | None = None,
) -> records.LinearPPORows:
    """Return `ppo_loss` of the projected logits, with the gradients of the projection's parts."""
    ref = None if ref_projection is None else logits_of(ref_projection)
    bias = projection.bias
    leaves = records.Projection(
        hidden=projection.hidden.detach().requires_grad_(),
        weight=projection.weight.detach().requires_grad_(),
        bias=None if bias is None else bias.detach().requires_grad_(),
    )
    logits = logits_of(leaves)
    total, rows = loss(logits, per_token, objective, softmax, ref)
    hidden_grad, weight_grad = torch.autograd.grad(
        total, [leaves.hidden, leaves.weight], retain_graph=True
    )
    bias_grad = None
    if leaves.bias is not None:
        (bias_grad,) = torch.autograd.grad(total, leaves.bias)
    gradients = records.ProjectionGradients(hidden_grad, weight_grad, bias_grad)
    return records.LinearPPORows(rows.sums, rows.logprobs, rows.entropy, rows.kl, gradients)


def linear_token_stats(
    projection: records.Projection,
    tokens: Tensor,
    softmax: Softmax,
    *,
    ref_projection: records.Projection | None = None,
) -> records.StatsRows:
    """Return `token_stats` of the projected logits, differentiable in the projection."""
    ref = None if ref_projection is None else logits_of(ref_projection)
    return token_stats(logits_of(projection), tokens, softmax, ref_logits=ref)


def responses(trajectory: records.Trajectory) -> Iterator[list[int]]:
    """Yield the counted tokens of each sequence, as indices into the flattened batch."""
    values = trajectory.token_values
    ends = trajectory.cu_seqlens
    counted = torch.ones_like(values) if trajectory.mask is None else trajectory.mask
    ends = torch.arange(len(values) + 1) * values.shape[1] if ends is None else ends
    for start, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        yield [start + t for t in counted.flatten()[start:end].nonzero().flatten().tolist()]


def gae(trajectory: records.Trajectory, discounts: records.Discounts) -> records.Gae:
    """Return (advantages, returns), computed from the last token of each sequence to its first:

        δ_t = r_t + γ·V_next − V_t,   A_t = δ_t + γλ·A_next,   return_t = A_t + V_t

    "next" is the next counted token; after the last one V_next is `bootstrap`, or 0.
    """
    values = trajectory.token_values
    rewards = trajectory.token_rewards
    v = values.flatten().tolist()
    r = [0.0] * len(v) if rewards is None else rewards.flatten().tolist()
    advantages = [0.0] * len(v)
    returns = [0.0] * len(v)
    for i, tokens in enumerate(responses(trajectory)):
        gamma = discounts.gamma if discounts.gammas is None else discounts.gammas[i].item()
        lam = discounts.lam if discounts.lams is None else discounts.lams[i].item()
        next_value = 0.0 if trajectory.bootstrap is None else trajectory.bootstrap[i].item()
        next_advantage = 0.0
        for t in reversed(tokens):
            next_advantage = r[t] + gamma * next_value - v[t] + gamma * lam * next_advantage
            next_value = v[t]
            advantages[t] = next_advantage
            returns[t] = next_advantage + v[t]
    both = torch.tensor([advantages, returns], dtype=records.accumulation_dtype(values.dtype))
    return records.Gae(*both.view(2, *values.shape))


def shaped_advantages(
    trajectory: records.Trajectory, shaping: records.Shaping, discounts: records.Discounts
) -> records.ShapedAdvantages:
    """Return GAE of the rewards −kl_coef·KL_t plus the score on the last token, not whitened."""
    kls = wide(torch.zeros_like(trajectory.token_values))
    if shaping.ref_logprobs is not None:
        kls = sampled_kl(wide(shaping.logprobs) - shaping.ref_logprobs, shaping.kl_estimator)
    rewards = -shaping.kl_coef * kls.contiguous()
    bound = shaping.score_clip or math.inf
    rewards = rewards if trajectory.token_rewards is None else rewards + trajectory.token_rewards
    kl = kls.new_zeros(len(shaping.scores))
    for i, tokens in enumerate(responses(trajectory)):
        rewards.view(-1)[tokens[-1:]] += shaping.scores[i].clamp(-bound, bound)
        kl[i] = kls.flatten()[tokens].sum()
    advantages, returns = gae(trajectory._replace(token_rewards=rewards), discounts)
    moments = whitening_moments(advantages, trajectory.mask)
    return records.ShapedAdvantages(advantages, returns, kl.to(returns.dtype), moments)


def wide(x: Tensor) -> Tensor:
    """Return x in fp64, or in fp32 on a device without fp64."""
    return x.float() if x.device.type in WITHOUT_FP64 else x.double()


def whitening_moments(x: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return (count, Σx, Σx²) over the mask, fp64 [3]; fp32 on a device without fp64."""
    x = wide(x if mask is None else x[mask])
    return torch.stack([torch.ones_like(x).sum(), x.sum(), (x**2).sum()])


def whiten(
    x: Tensor, mask: Tensor | None = None, *, shift_mean: bool = True, moments: Tensor | None = None
) -> Tensor:
    """Return (x − mean)·rsqrt(variance + 1e-8) with Bessel's correction, 0 where masked."""
    count, total, squares = whitening_moments(x, mask) if moments is None else moments
    mean = total / count.clamp(min=1)
    variance = ((squares - count * mean**2) / (count - 1).clamp(min=1)).clamp(min=0)
    white = (wide(x) - mean) * torch.rsqrt(variance + records.WHITEN_EPSILON)
    white = white if shift_mean else white + mean
    white = white if mask is None else torch.where(mask, white, 0.0)
    return white.to(records.accumulation_dtype(x.dtype))
