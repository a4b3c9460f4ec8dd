"""Cases of the losses: from logits, and from hidden states and the lm-head.

Rows are tokens, with one logprob and one loss each. Advantages are equal within a sequence, since
some GRPO kernels support no others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import fastppo
from benchmarks import peers
from benchmarks.case import (
    COMPILED,
    FLOAT_BYTES,
    TOKEN_BYTES,
    Case,
    Inputs,
    Outputs,
    Peer,
    Provider,
    Truth,
    compiled,
    draw_normal,
)
from benchmarks.peers import CLIP_RATIO, Stats, clipped_loss
from benchmarks.shapes import Tokens

ENTROPY_COEF = 0.01

TRUTH_ELEMENTS = 2**26
"""Number of logits converted to fp64 at once."""

STATS_FLOP = 5  # per logit: subtract the maximum, exp, add; multiply and add for the entropy
GRADIENT_FLOP = 4  # per logit, once the statistics are known: subtract, exp, multiply-add, multiply

TRL_KERNEL = "TRL, Triton kernel"
VERL_KERNEL = "verl, Triton kernel"
CCE = "Cut Cross-Entropy"
LIGER_STATS = "Liger-Kernel, scaled cross-entropy"


# ---------------------------------------------------------------------------------------- inputs


def _token_inputs(logprobs: Tensor, generator: torch.Generator) -> Inputs:
    """Return old logprobs and advantages.

    A third of the ratios is above the clip range, a third below, and none near its bounds, where
    the gradient jumps.
    """
    n = logprobs.numel()
    device = logprobs.device
    draw = torch.rand(n, generator=generator).to(device)
    place = torch.arange(n, device=device) % 3
    log_ratio = torch.where(place == 0, 0.35 + 0.3 * draw, 0.2 * draw - 0.1)
    log_ratio = torch.where(place == 1, -0.35 - 0.3 * draw, log_ratio)
    length = peers.sequence_length(n)
    advantages = torch.randn(n // length, generator=generator).repeat_interleave(length)
    return {
        "old_logprobs": (logprobs - log_ratio).float(),
        "advantages": advantages.to(device),
    }


def _row_slices(rows: int, vocab: int) -> Iterator[slice]:
    step = max(1, TRUTH_ELEMENTS // vocab)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _logprobs(logits_of: Callable[[slice], Tensor], tokens: Tensor, vocab: int) -> Tensor:
    parts = []
    for rows in _row_slices(tokens.numel(), vocab):
        log_p = torch.log_softmax(logits_of(rows), -1)
        parts.append(log_p.gather(-1, tokens[rows].unsqueeze(-1)).squeeze(-1))
    return torch.cat(parts)


def draw_logits(shape: Tokens, dtype: torch.dtype, seed: int, device: torch.device) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    logits = draw_normal((shape.n, shape.model.vocab), dtype, device, seed).mul_(2)
    tokens = torch.randint(shape.model.vocab, (shape.n,), generator=generator).to(device)
    # fp32 is exact enough to place the ratios.
    logprobs = _logprobs(lambda rows: logits[rows].float(), tokens, shape.model.vocab)
    inputs = _token_inputs(logprobs, generator)
    return {"logits": logits.requires_grad_(), "tokens": tokens, **inputs}


def draw_hidden(shape: Tokens, dtype: torch.dtype, seed: int, device: torch.device) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    vocab = shape.model.vocab
    width = shape.model.hidden
    hidden = draw_normal((shape.n, width), dtype, device, seed)
    weight = draw_normal((vocab, width), dtype, device, seed + 2**20).mul_(2 / width**0.5)
    tokens = torch.randint(vocab, (shape.n,), generator=generator).to(device)
    logprobs = _logprobs(lambda rows: (hidden[rows] @ weight.T).float(), tokens, vocab)
    inputs = _token_inputs(logprobs, generator)
    hidden = hidden.requires_grad_()
    weight = weight.requires_grad_()
    return {"hidden": hidden, "weight": weight, "tokens": tokens, **inputs}


# ------------------------------------------------------------------------------- loss from logits


def token_losses(
    logits: Tensor, tokens: Tensor, old_logprobs: Tensor, advantages: Tensor, entropy_coef: float
) -> Tensor:
    """Compute PPO's clipped loss per token in plain PyTorch, in the dtype of the logits."""
    log_p = torch.log_softmax(logits, -1)
    logprobs = log_p.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    ratio = torch.exp(logprobs - old_logprobs)
    clipped = ratio.clamp(1 - CLIP_RATIO, 1 + CLIP_RATIO)
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    if entropy_coef:
        loss = loss + entropy_coef * (log_p.exp() * log_p).sum(-1)
    return loss


def _exact_loss(entropy_coef: float, with_gradient: bool) -> Callable[[Inputs], dict[str, Truth]]:
    def truth(inputs: Inputs) -> dict[str, Truth]:
        logits = inputs["logits"].detach()
        n = inputs["tokens"].numel()
        # Storing a gradient in fp32 costs 6e-8 per entry, far below the tolerances.
        grad = torch.empty_like(logits, dtype=torch.float32) if with_gradient else None
        total = 0.0
        size = 0.0
        for rows in _row_slices(n, logits.shape[-1]):
            x = logits[rows].double().requires_grad_(with_gradient)
            old, advantages = (inputs[k][rows].double() for k in ("old_logprobs", "advantages"))
            losses = token_losses(x, inputs["tokens"][rows], old, advantages, entropy_coef)
            total = total + losses.sum().item()
            size = size + losses.abs().sum().item()
            if grad is not None:
                grad[rows] = torch.autograd.grad(losses.sum() / n, x)[0].float()
        loss = torch.tensor(total / n, dtype=torch.float64, device=logits.device)
        truths = {"loss": Truth(loss, size / n)}
        if grad is not None:
            truths["logits_grad"] = Truth(grad, grad.abs().max().item())
        return truths

    return truth


def loss_from(
    function: Callable[..., Tensor], entropy_coef: float, leaves: tuple[str, ...]
) -> Callable[[Inputs], Outputs]:
    """Wrap a loss function: its value and the gradients of the named inputs."""

    def call(inputs: Inputs) -> Outputs:
        with torch.set_grad_enabled(bool(leaves)):
            loss = function(*inputs.values(), entropy_coef)
        if not leaves:
            return {"loss": loss}
        grads = torch.autograd.grad(loss, [inputs[name] for name in leaves])
        named = {f"{name}_grad": grad for name, grad in zip(leaves, grads, strict=True)}
        return {"loss": loss.detach(), **named}

    return call


def eager_loss(
    logits: Tensor, tokens: Tensor, old_logprobs: Tensor, advantages: Tensor, entropy_coef: float
) -> Tensor:
    # bf16 logprobs would be useless. In fp32, .float() makes no copy.
    return token_losses(logits.float(), tokens, old_logprobs, advantages, entropy_coef).mean()


def our_loss(
    logits: Tensor,
    tokens: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    entropy_coef: float,
    inplace: bool = False,
) -> Tensor:
    return fastppo.ppo_loss(
        logits,
        tokens,
        old_logprobs,
        advantages,
        clip_ratio=CLIP_RATIO,
        entropy_coef=entropy_coef,
        inplace=inplace,
    ).loss


def _around(stats: Stats) -> Callable[..., Tensor]:
    """Return the case's loss with a peer's logprobs and entropy."""

    def loss(*arguments: Tensor | float) -> Tensor:
        *operands, old, advantages, entropy_coef = arguments
        logprobs, entropy = stats(*operands, with_entropy=bool(entropy_coef))
        return clipped_loss(logprobs, entropy, old, advantages, entropy_coef)  # type: ignore[arg-type]

    return loss


GRADIENT_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2}
"""Tolerance in units of a gradient's largest entry. fp32: sums of 10⁵ terms and exponentials. bf16:
rounding of 2⁻⁹ per entry, twice in the token's column (1 − p, then the product)."""


def loss_case(
    shape: Tokens,
    dtype: torch.dtype,
    *,
    entropy_coef: float = ENTROPY_COEF,
    with_gradient: bool = True,
) -> Case:
    leaves = ("logits",) if with_gradient else ()
    n = shape.n
    logits_bytes = n * shape.model.vocab * dtype.itemsize
    name = "ppo_loss" if with_gradient else "ppo_loss, forward"

    def provider(label: str, function: Callable[..., Tensor]) -> Provider:
        return Provider(label, loss_from(function, entropy_coef, leaves))

    def liger(device: torch.device) -> Provider:
        loss = peers.liger_loss(device)
        call = loss_from(loss.call, entropy_coef, leaves)

        def without_the_last_rows(inputs: Inputs) -> Outputs:
            outputs = call(inputs)
            if leaves:
                outputs["logits_grad"] = outputs["logits_grad"][:, :-1]
            return outputs

        return Provider("Liger-Kernel", without_the_last_rows, prepare=loss.prepare)

    providers = [
        provider("FastPPO", our_loss),
        provider("eager PyTorch", eager_loss),
        provider(COMPILED, lambda *a: compiled(eager_loss)(*a)),
    ]
    if with_gradient:
        inplace = loss_from(partial(our_loss, inplace=True), entropy_coef, leaves)
        providers.insert(1, Provider("FastPPO, in place", inplace, writes=("logits",)))
    peers_of_case = [
        Peer("TRL", "trl", lambda d: provider("TRL", _around(peers.trl_stats(d)))),
        Peer(TRL_KERNEL, "trl", lambda d: provider(TRL_KERNEL, _around(peers.trl_kernel_stats(d)))),
        Peer("verl", "verl", lambda d: provider("verl", peers.verl_loss(d))),
    ]
    if not entropy_coef:  # Liger's loss has no entropy term
        peers_of_case.append(Peer("Liger-Kernel", "liger-kernel", liger))
    return Case(
        name if entropy_coef else f"{name}, no entropy",
        str(shape),
        dtype,
        # logits read (and their gradient written); tokens, old logprobs and advantages read
        bytes_moved=(2 if with_gradient else 1) * logits_bytes
        + n * (TOKEN_BYTES + 2 * FLOAT_BYTES),
        flop=n * shape.model.vocab * (STATS_FLOP + (GRADIENT_FLOP if with_gradient else 0)),
        bytes_and_flop="logits read"
        + (", gradient written" if with_gradient else "")
        + f"; {STATS_FLOP + (GRADIENT_FLOP if with_gradient else 0)} FLOP per logit",
        draw=lambda seed, device: draw_logits(shape, dtype, seed, device),
        truth=_exact_loss(entropy_coef, with_gradient),
        providers=tuple(providers),
        tolerance=GRADIENT_TOLERANCE[dtype],
        peers=tuple(peers_of_case),
    )


# --------------------------------------------------------------------- statistics without gradient

STATS_TOLERANCE = 1e-4
"""Tolerance in units of the largest entry, about 20 nats: fp32 sums over 10⁵ logits."""


def eager_stats(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    log_p = torch.log_softmax(logits.float(), -1)
    logprobs = log_p.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return logprobs, -(log_p.exp() * log_p).sum(-1)


def _our_stats(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    stats = fastppo.token_stats(logits, tokens)
    return stats.logprobs, stats.entropy


def _named(logprobs: Tensor, entropy: Tensor | None) -> Outputs:
    return {"logprobs": logprobs} if entropy is None else {"logprobs": logprobs, "entropy": entropy}


def _exact_stats(inputs: Inputs) -> dict[str, Truth]:
    logits = inputs["logits"].detach()
    tokens = inputs["tokens"]
    parts = []
    for rows in _row_slices(tokens.numel(), logits.shape[-1]):
        log_p = torch.log_softmax(logits[rows].double(), -1)
        logprobs = log_p.gather(-1, tokens[rows].unsqueeze(-1)).squeeze(-1)
        parts.append(torch.stack([logprobs, -(log_p.exp() * log_p).sum(-1)]))
    logprobs, entropy = torch.cat(parts, 1)
    return {
        "logprobs": Truth(logprobs, logprobs.abs().max().item()),
        "entropy": Truth(entropy, entropy.abs().max().item()),
    }


def stats_case(shape: Tokens, dtype: torch.dtype) -> Case:
    def provider(label: str, function: Stats) -> Provider:
        @torch.no_grad()
        def call(inputs: Inputs) -> Outputs:
            return _named(*function(inputs["logits"], inputs["tokens"]))

        return Provider(label, call)

    return Case(
        "token_stats",
        str(shape),
        dtype,
        # logits and tokens read; logprobs and entropy written
        bytes_moved=shape.n * shape.model.vocab * dtype.itemsize
        + shape.n * (TOKEN_BYTES + 2 * FLOAT_BYTES),
        flop=shape.n * shape.model.vocab * STATS_FLOP,
        bytes_and_flop=f"logits read; {STATS_FLOP} FLOP per logit",
        draw=lambda seed, device: draw_logits(shape, dtype, seed, device),
        truth=_exact_stats,
        providers=(
            provider("FastPPO", _our_stats),
            provider("eager PyTorch", eager_stats),
            provider(COMPILED, lambda *a: compiled(eager_stats)(*a)),
        ),
        tolerance=STATS_TOLERANCE,
        peers=(
            Peer("TRL", "trl", lambda d: provider("TRL", peers.trl_stats(d))),
            Peer(TRL_KERNEL, "trl", lambda d: provider(TRL_KERNEL, peers.trl_kernel_stats(d))),
            Peer("verl", "verl", lambda d: provider("verl", peers.verl_stats(d))),
        ),
    )


# --------------------------------------------------------------------------------- fused lm-head


def _exact_linear_loss(
    losses_of: Callable[[Tensor, Inputs], Tensor],
) -> Callable[[Inputs], dict[str, Truth]]:
    """Return the fp64 truth of the mean of `losses_of(logits, inputs of the rows)`."""

    def truth(inputs: Inputs) -> dict[str, Truth]:
        n = inputs["tokens"].numel()
        weight = inputs["weight"].detach().double()
        grad_hidden = torch.empty_like(inputs["hidden"], dtype=torch.float64)
        grad_weight = torch.zeros_like(weight)
        total = 0.0
        size = 0.0
        for rows in _row_slices(n, weight.shape[0]):
            hidden = inputs["hidden"].detach()[rows].double()
            logits = (hidden @ weight.T).requires_grad_()
            losses = losses_of(logits, {name: inputs[name][rows] for name in _PER_TOKEN})
            total = total + losses.sum().item()
            size = size + losses.abs().sum().item()
            (grad,) = torch.autograd.grad(losses.sum() / n, logits)
            grad_hidden[rows] = grad @ weight
            grad_weight.addmm_(grad.T, hidden)
        loss = torch.tensor(total / n, dtype=torch.float64, device=weight.device)
        return {
            "loss": Truth(loss, size / n),
            "hidden_grad": Truth(grad_hidden, grad_hidden.abs().max().item()),
            "weight_grad": Truth(grad_weight, grad_weight.abs().max().item()),
        }

    return truth


_PER_TOKEN = ("tokens", "old_logprobs", "advantages")


def _ppo_losses(entropy_coef: float) -> Callable[[Tensor, Inputs], Tensor]:
    def losses(logits: Tensor, rows: Inputs) -> Tensor:
        old = rows["old_logprobs"].double()
        return token_losses(logits, rows["tokens"], old, rows["advantages"].double(), entropy_coef)

    return losses


def _cross_entropies(logits: Tensor, rows: Inputs) -> Tensor:
    return torch.nn.functional.cross_entropy(logits, rows["tokens"], reduction="none")


exact_cross_entropy = _exact_linear_loss(_cross_entropies)
"""Truth of the mean −logprob, which some peers fuse with the lm-head."""


def eager_linear_loss(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    entropy_coef: float,
) -> Tensor:
    return eager_loss(hidden @ weight.T, tokens, old_logprobs, advantages, entropy_coef)


def our_linear_loss(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    entropy_coef: float,
) -> Tensor:
    return fastppo.linear_ppo_loss(
        hidden,
        weight,
        tokens,
        old_logprobs,
        advantages,
        clip_ratio=CLIP_RATIO,
        entropy_coef=entropy_coef,
    ).loss


BOUND = "matrix products alone"


def _gemms(gradients: bool) -> Provider:
    """Return the vendor library's matrix products, a bound for every fused lm-head."""

    @torch.no_grad()
    def call(inputs: Inputs) -> Outputs:
        hidden = inputs["hidden"]
        weight = inputs["weight"]
        logits = hidden @ weight.T
        if not gradients:
            return {"logits": logits}
        return {"hidden_grad": logits @ weight, "weight_grad": logits.T @ hidden}

    return Provider(BOUND, call, is_bound=True)


LINEAR_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Tolerance in the units of GRADIENT_TOLERANCE. bf16 logits from a GEMM are off by up to 2⁻⁹ of 10,
so the worst probability is off by 2 %."""


def _cross_entropy(label: str, device: torch.device, *, scaled_exp: bool) -> Provider:
    """Return QuACK's cross-entropy: the same three products with a simpler loss, a bound."""
    function = peers.quack_linear_cross_entropy(device, scaled_exp=scaled_exp)

    def call(inputs: Inputs) -> Outputs:
        loss = function(inputs["hidden"], inputs["weight"], inputs["tokens"])
        by_hidden, by_weight = torch.autograd.grad(loss, [inputs["hidden"], inputs["weight"]])
        return {"loss": loss.detach(), "hidden_grad": by_hidden, "weight_grad": by_weight}

    return Provider(label, call, is_bound=True, truth=exact_cross_entropy)


def linear_loss_case(
    shape: Tokens, dtype: torch.dtype, *, entropy_coef: float = ENTROPY_COEF
) -> Case:
    n = shape.n
    vocab = shape.model.vocab
    width = shape.model.hidden
    leaves = ("hidden", "weight")

    def provider(label: str, function: Callable[..., Tensor]) -> Provider:
        return Provider(label, loss_from(function, entropy_coef, leaves))

    def peer(label: str, distribution: str, stats: Callable[..., Stats], **options: Any) -> Peer:
        """Return a peer whose logprobs and entropy go into the case's loss."""
        return Peer(label, distribution, lambda d: provider(label, _around(stats(d, **options))))

    def liger(device: torch.device) -> Provider:
        loss = peers.liger_linear_loss(device)
        call = loss_from(loss.call, entropy_coef, leaves)
        return Provider("Liger-Kernel", call, prepare=loss.prepare)

    def quack(label: str, *, scaled_exp: bool) -> Peer:
        build = partial(_cross_entropy, label, scaled_exp=scaled_exp)
        return Peer(label, "quack-kernels", build)

    peers_of_case = [
        peer("verl", "verl", peers.verl_linear_stats),
        peer(VERL_KERNEL, "verl", peers.verl_linear_kernel),
        peer("TRL", "trl", peers.trl_linear_stats, entropy_gradient=bool(entropy_coef)),
        peer(LIGER_STATS, "liger-kernel", peers.liger_linear_stats),
    ]
    if not entropy_coef:  # the others have no entropy term
        peers_of_case += [
            Peer("Liger-Kernel", "liger-kernel", liger),
            peer(CCE, "cut-cross-entropy", peers.cce_linear_stats),
            peer(f"{CCE}, unfiltered", "cut-cross-entropy", peers.cce_unfiltered_stats),
            peer("QuACK", "quack-kernels", peers.quack_linear_stats),
            quack("QuACK, mean logprob", scaled_exp=False),
            quack("QuACK, scaled-exp, mean logprob", scaled_exp=True),
        ]
    return Case(
        "linear_ppo_loss" if entropy_coef else "linear_ppo_loss, no entropy",
        str(shape),
        dtype,
        # hidden and weight read, their gradients written; three numbers per token read
        bytes_moved=2 * (n + vocab) * width * dtype.itemsize + n * (TOKEN_BYTES + 2 * FLOAT_BYTES),
        flop=6 * n * width * vocab,  # logits, the gradient of hidden, the gradient of weight
        bytes_and_flop="hidden and weight read, their gradients written; three matrix products",
        draw=lambda seed, device: draw_hidden(shape, dtype, seed, device),
        truth=_exact_linear_loss(_ppo_losses(entropy_coef)),
        providers=(
            provider("FastPPO", our_linear_loss),
            provider("eager PyTorch", eager_linear_loss),
            provider(COMPILED, lambda *a: compiled(eager_linear_loss)(*a)),
            _gemms(gradients=True),
        ),
        tolerance=LINEAR_TOLERANCE[dtype],
        peers=tuple(peers_of_case),
    )


def eager_linear_stats(
    hidden: Tensor, weight: Tensor, tokens: Tensor
) -> tuple[Tensor, Tensor | None]:
    logits = (hidden @ weight.T).float()
    token_logits = logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return token_logits - torch.logsumexp(logits, -1), None


def _our_linear_stats(
    hidden: Tensor, weight: Tensor, tokens: Tensor
) -> tuple[Tensor, Tensor | None]:
    return fastppo.linear_token_logprobs(hidden, weight, tokens), None


def _exact_linear_stats(inputs: Inputs) -> dict[str, Truth]:
    hidden = inputs["hidden"].detach()
    weight = inputs["weight"].detach().double()
    tokens = inputs["tokens"]
    parts = []
    for rows in _row_slices(tokens.numel(), weight.shape[0]):
        log_p = torch.log_softmax(hidden[rows].double() @ weight.T, -1)
        logprobs = log_p.gather(-1, tokens[rows].unsqueeze(-1)).squeeze(-1)
        parts.append(torch.stack([logprobs, -(log_p.exp() * log_p).sum(-1)]))
    logprobs, entropy = torch.cat(parts, 1)
    return {
        "logprobs": Truth(logprobs, logprobs.abs().max().item()),
        "entropy": Truth(entropy, entropy.abs().max().item()),
    }


LINEAR_STATS_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-3}
"""Tolerance in units of the largest logprob, 15 to 20 nats. bf16: half a unit in the last place of
a logit of 8 to 16 is 0.03."""


def linear_logprobs_case(shape: Tokens, dtype: torch.dtype) -> Case:
    """Return the case of logprobs. If a provider returns the entropy, it is checked, too."""
    n = shape.n
    vocab = shape.model.vocab
    width = shape.model.hidden

    def provider(label: str, function: Stats) -> Provider:
        @torch.no_grad()
        def call(inputs: Inputs) -> Outputs:
            return _named(*function(inputs["hidden"], inputs["weight"], inputs["tokens"]))

        return Provider(label, call)

    def peer(label: str, distribution: str, stats: Callable[[torch.device], Stats]) -> Peer:
        return Peer(label, distribution, lambda d: provider(label, stats(d)))

    return Case(
        "linear_token_logprobs",
        str(shape),
        dtype,
        # hidden, weight and tokens read; logprobs written
        bytes_moved=(n + vocab) * width * dtype.itemsize + n * (TOKEN_BYTES + FLOAT_BYTES),
        flop=2 * n * width * vocab,
        bytes_and_flop="hidden and weight read; one matrix product",
        draw=lambda seed, device: draw_hidden(shape, dtype, seed, device),
        truth=_exact_linear_stats,
        providers=(
            provider("FastPPO", _our_linear_stats),
            provider("eager PyTorch", eager_linear_stats),
            provider(COMPILED, lambda *a: compiled(eager_linear_stats)(*a)),
            _gemms(gradients=False),
        ),
        tolerance=LINEAR_STATS_TOLERANCE[dtype],
        peers=(
            peer("TRL", "trl", peers.trl_linear_stats),
            peer("verl", "verl", peers.verl_linear_stats),
            peer(VERL_KERNEL, "verl", peers.verl_linear_kernel),
            peer(LIGER_STATS, "liger-kernel", peers.liger_linear_stats),
            peer(CCE, "cut-cross-entropy", peers.cce_linear_stats),
            peer("QuACK", "quack-kernels", peers.quack_linear_stats),
        ),
    )
