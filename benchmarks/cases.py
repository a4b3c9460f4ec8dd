"""What is measured: each operation with its inputs, its truth, its bytes and FLOP, its providers.

- Truth is computed here, in fp64, by autograd and by loops, from the definitions; it shares no code
  with the library or with a provider.
- Bytes are compulsory traffic: every input that counts read once, every output written once. A
  provider that passes over its data twice moves more, and shows a lower share of the floor.
- FLOP of a matrix product count 2 per multiply-add; of elementwise work, one per operation on an
  entry, an exponential included. Beside the matrix ceiling the latter never decide the floor.

A provider is a function from the inputs to its outputs by name. It may give fewer outputs than the
truth has (a peer without an entropy), at least one, and all that it gives are checked.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import fastppo
from benchmarks.measure import Inputs, dtype_name
from benchmarks.shapes import Sequences, Tokens, Work

Outputs = dict[str, Tensor]

CLIP_RATIO = 0.2
ENTROPY_COEF = 0.01
KL_COEF = 0.05
GAMMA, LAM = 1.0, 0.95

TRUTH_ELEMENTS = 2**26
"""Logits taken to fp64 at once."""

TOKEN_BYTES = 8  # int64
FLOAT_BYTES = 4  # fp32: old logprobs, advantages, statistics
MASK_BYTES = 1

STATS_FLOP = 5  # per logit: subtract the maximum, exp, add; multiply and add for the entropy
GRADIENT_FLOP = 4  # per logit, once the statistics are known: subtract, exp, multiply-add, multiply


class Truth(NamedTuple):
    """An output in fp64 (a large gradient may be kept in fp32), and the size of its entries, in
    which errors are stated."""

    values: Tensor
    scale: float


@dataclass(frozen=True)
class Provider:
    """Someone's implementation of a case."""

    name: str
    call: Callable[[Inputs], Outputs]
    writes: tuple[str, ...] = ()
    """Inputs that it writes over; they are restored between calls."""


@dataclass(frozen=True)
class Peer:
    """A package that implements the case; `build` imports it, and runs only if it is installed."""

    distribution: str
    build: Callable[[torch.device], tuple[Provider, ...]]


@dataclass(frozen=True)
class Case:
    name: str
    shape: str
    dtype: torch.dtype
    bytes_moved: int
    flop: int
    draw: Callable[[int, torch.device], Inputs]
    """Inputs from a seed."""
    truth: Callable[[Inputs], dict[str, Truth]]
    providers: tuple[Provider, ...]
    tolerance: float
    """Of an output's error, in units of its scale."""
    compiled: tuple[Provider, ...] = ()
    peers: tuple[Peer, ...] = ()
    notes: Mapping[str, str] = field(default_factory=dict)
    """Providers that do not exist for this case, and why."""


def is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


# ------------------------------------------------------------------------------- loss from logits


def _token_inputs(logprobs: Tensor, generator: torch.Generator) -> Inputs:
    """Old logprobs and advantages. A third of the ratios is above the clip range, a third below.

    None is near its borders, where the gradient jumps: rounding would decide which side is taken.
    """
    n, device = logprobs.numel(), logprobs.device
    draw = torch.rand(n, generator=generator).to(device)
    place = torch.arange(n, device=device) % 3
    log_ratio = torch.where(place == 0, 0.35 + 0.3 * draw, 0.2 * draw - 0.1)
    log_ratio = torch.where(place == 1, -0.35 - 0.3 * draw, log_ratio)
    return {
        "old_logprobs": (logprobs - log_ratio).float(),
        "advantages": torch.randn(n, generator=generator).to(device),
    }


def _draw_normal(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int
) -> Tensor:
    """Drawn on the device: large inputs would take long on a CPU."""
    on_device = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=on_device, device=device, dtype=dtype)


def _row_slices(rows: int, vocab: int) -> Iterator[slice]:
    step = max(1, TRUTH_ELEMENTS // vocab)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _exact_logprobs(logits_of: Callable[[slice], Tensor], tokens: Tensor, vocab: int) -> Tensor:
    parts = []
    for rows in _row_slices(tokens.numel(), vocab):
        log_p = torch.log_softmax(logits_of(rows), -1)
        parts.append(log_p.gather(-1, tokens[rows].unsqueeze(-1)).squeeze(-1))
    return torch.cat(parts)


def draw_logits(shape: Tokens, dtype: torch.dtype, seed: int, device: torch.device) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    logits = _draw_normal((shape.n, shape.model.vocab), dtype, device, seed).mul_(2)
    tokens = torch.randint(shape.model.vocab, (shape.n,), generator=generator).to(device)
    logprobs = _exact_logprobs(lambda rows: logits[rows].double(), tokens, shape.model.vocab)
    inputs = _token_inputs(logprobs, generator)
    return {"logits": logits.requires_grad_(), "tokens": tokens, **inputs}


def token_losses(
    logits: Tensor, tokens: Tensor, old_logprobs: Tensor, advantages: Tensor, entropy_coef: float
) -> Tensor:
    """PPO's clipped loss per token as one writes it in PyTorch, in the dtype of the logits."""
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
        logits, n = inputs["logits"].detach(), inputs["tokens"].numel()
        # fp32 holds a stored gradient to 6e-8 of each entry: far below every tolerance here.
        grad = torch.empty_like(logits, dtype=torch.float32) if with_gradient else None
        total = size = 0.0
        for rows in _row_slices(n, logits.shape[-1]):
            x = logits[rows].double().requires_grad_(with_gradient)
            old, advantages = (inputs[k][rows].double() for k in ("old_logprobs", "advantages"))
            losses = token_losses(x, inputs["tokens"][rows], old, advantages, entropy_coef)
            total, size = total + losses.sum().item(), size + losses.abs().sum().item()
            if grad is not None:
                grad[rows] = torch.autograd.grad(losses.sum() / n, x)[0].float()
        loss = torch.tensor(total / n, dtype=torch.float64, device=logits.device)
        found = {"loss": Truth(loss, size / n)}
        if grad is not None:
            found["logits_grad"] = Truth(grad, grad.abs().max().item())
        return found

    return truth


def _loss_from(
    function: Callable[..., Tensor], entropy_coef: float, of: tuple[str, ...]
) -> Callable[[Inputs], Outputs]:
    """Calls `function(*inputs, entropy_coef)` and takes the gradient by the inputs in `of`."""

    def call(inputs: Inputs) -> Outputs:
        with torch.set_grad_enabled(bool(of)):
            loss = function(*inputs.values(), entropy_coef)
        if not of:
            return {"loss": loss}
        grads = torch.autograd.grad(loss, [inputs[name] for name in of])
        named = {f"{name}_grad": grad for name, grad in zip(of, grads, strict=True)}
        return {"loss": loss.detach(), **named}

    return call


def eager_loss(
    logits: Tensor, tokens: Tensor, old_logprobs: Tensor, advantages: Tensor, entropy_coef: float
) -> Tensor:
    # .float() is what keeps bf16 logits' logprobs usable, and copies nothing in fp32.
    return token_losses(logits.float(), tokens, old_logprobs, advantages, entropy_coef).mean()


def _our_loss(inplace: bool) -> Callable[..., Tensor]:
    def loss(
        logits: Tensor, tokens: Tensor, old: Tensor, advantages: Tensor, entropy_coef: float
    ) -> Tensor:
        return fastppo.ppo_loss(
            logits,
            tokens,
            old,
            advantages,
            clip_ratio=CLIP_RATIO,
            entropy_coef=entropy_coef,
            inplace=inplace,
        ).loss

    return loss


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)


def _trl_loss(
    logits: Tensor, tokens: Tensor, old_logprobs: Tensor, advantages: Tensor, entropy_coef: float
) -> Tensor:
    """TRL's logprobs and entropy; its clipped loss is inlined in its trainers and written out."""
    utils = importlib.import_module("trl.trainer.utils")
    batched = logits.float().unsqueeze(0)  # it loops over the first axis, a batch
    logprobs = utils.selective_log_softmax(batched, tokens.unsqueeze(0)).squeeze(0)
    ratio = torch.exp(logprobs - old_logprobs)
    clipped = ratio.clamp(1 - CLIP_RATIO, 1 + CLIP_RATIO)
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    if entropy_coef:
        loss = loss - entropy_coef * utils.entropy_from_logits(batched).squeeze(0)
    return loss.mean()


GRADIENT_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2}
"""Of a gradient's largest entry. fp32: sums of 10⁵ terms and exponentials; bf16: its rounding is
2⁻⁹ of an entry, and the token's own column meets it twice (1 − p, then the product)."""


def loss_case(
    shape: Tokens,
    dtype: torch.dtype,
    *,
    entropy_coef: float = ENTROPY_COEF,
    with_gradient: bool = True,
) -> Case:
    of = ("logits",) if with_gradient else ()
    n, logits_bytes = shape.n, shape.n * shape.model.vocab * dtype.itemsize
    name = "loss" if with_gradient else "loss, forward"
    providers = [
        Provider("fastppo", _loss_from(_our_loss(False), entropy_coef, of)),
        Provider("eager", _loss_from(eager_loss, entropy_coef, of)),
    ]
    if with_gradient:
        inplace = _loss_from(_our_loss(True), entropy_coef, of)
        providers.insert(1, Provider("fastppo, in place", inplace, writes=("logits",)))
    trl = Provider("trl", _loss_from(_trl_loss, entropy_coef, of))
    return Case(
        name if entropy_coef else f"{name}, no entropy",
        str(shape),
        dtype,
        # logits read (and their gradient written); tokens, old logprobs and advantages read
        bytes_moved=(2 if with_gradient else 1) * logits_bytes
        + n * (TOKEN_BYTES + 2 * FLOAT_BYTES),
        flop=n * shape.model.vocab * (STATS_FLOP + (GRADIENT_FLOP if with_gradient else 0)),
        draw=lambda seed, device: draw_logits(shape, dtype, seed, device),
        truth=_exact_loss(entropy_coef, with_gradient),
        providers=tuple(providers),
        compiled=(
            Provider(
                "torch.compile",
                _loss_from(lambda *arguments: _compiled(eager_loss)(*arguments), entropy_coef, of),
            ),
        ),
        tolerance=GRADIENT_TOLERANCE[dtype],
        peers=(Peer("trl", lambda device: (trl,)),),
    )


# --------------------------------------------------------------------- statistics without gradient

STATS_TOLERANCE = 1e-4
"""Of the largest entry, about 20 nats: fp32 sums over 10⁵ logits. bf16 logits are exact inputs."""


def eager_stats(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    log_p = torch.log_softmax(logits.float(), -1)
    logprobs = log_p.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return logprobs, -(log_p.exp() * log_p).sum(-1)


def _our_stats(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    stats = fastppo.token_stats(logits, tokens)
    return stats.logprobs, stats.entropy


def _trl_stats(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    utils = importlib.import_module("trl.trainer.utils")
    batched = logits.float().unsqueeze(0)
    logprobs = utils.selective_log_softmax(batched, tokens.unsqueeze(0)).squeeze(0)
    return logprobs, utils.entropy_from_logits(batched).squeeze(0)


def _stats_from(function: Callable[..., tuple[Tensor, Tensor]]) -> Callable[[Inputs], Outputs]:
    def call(inputs: Inputs) -> Outputs:
        with torch.no_grad():
            logprobs, entropy = function(inputs["logits"], inputs["tokens"])
        return {"logprobs": logprobs, "entropy": entropy}

    return call


def _exact_stats(inputs: Inputs) -> dict[str, Truth]:
    logits, tokens = inputs["logits"].detach(), inputs["tokens"]
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
    trl = Provider("trl", _stats_from(_trl_stats))
    return Case(
        "statistics",
        str(shape),
        dtype,
        # logits and tokens read; logprobs and entropy written
        bytes_moved=shape.n * shape.model.vocab * dtype.itemsize
        + shape.n * (TOKEN_BYTES + 2 * FLOAT_BYTES),
        flop=shape.n * shape.model.vocab * STATS_FLOP,
        draw=lambda seed, device: draw_logits(shape, dtype, seed, device),
        truth=_exact_stats,
        providers=(
            Provider("fastppo", _stats_from(_our_stats)),
            Provider("eager", _stats_from(eager_stats)),
        ),
        compiled=(Provider("torch.compile", _stats_from(lambda *a: _compiled(eager_stats)(*a))),),
        tolerance=STATS_TOLERANCE,
        peers=(Peer("trl", lambda device: (trl,)),),
    )


# --------------------------------------------------------------------------------- fused lm-head


def draw_hidden(shape: Tokens, dtype: torch.dtype, seed: int, device: torch.device) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    vocab, width = shape.model.vocab, shape.model.hidden
    hidden = _draw_normal((shape.n, width), dtype, device, seed)
    weight = _draw_normal((vocab, width), dtype, device, seed + 2**20).mul_(2 / width**0.5)
    tokens = torch.randint(vocab, (shape.n,), generator=generator).to(device)
    head = weight.double()
    logprobs = _exact_logprobs(lambda rows: hidden[rows].double() @ head.T, tokens, vocab)
    inputs = _token_inputs(logprobs, generator)
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    return {"hidden": hidden, "weight": weight, "tokens": tokens, **inputs}


def _exact_linear_loss(inputs: Inputs) -> dict[str, Truth]:
    n = inputs["tokens"].numel()
    weight = inputs["weight"].detach().double()
    grad_hidden = torch.empty_like(inputs["hidden"], dtype=torch.float64)
    grad_weight = torch.zeros_like(weight)
    total = size = 0.0
    for rows in _row_slices(n, weight.shape[0]):
        hidden = inputs["hidden"].detach()[rows].double()
        logits = (hidden @ weight.T).requires_grad_()
        old, advantages = (inputs[k][rows].double() for k in ("old_logprobs", "advantages"))
        losses = token_losses(logits, inputs["tokens"][rows], old, advantages, ENTROPY_COEF)
        total, size = total + losses.sum().item(), size + losses.abs().sum().item()
        (grad,) = torch.autograd.grad(losses.sum() / n, logits)
        grad_hidden[rows] = grad @ weight
        grad_weight.addmm_(grad.T, hidden)
    loss = torch.tensor(total / n, dtype=torch.float64, device=weight.device)
    return {
        "loss": Truth(loss, size / n),
        "hidden_grad": Truth(grad_hidden, grad_hidden.abs().max().item()),
        "weight_grad": Truth(grad_weight, grad_weight.abs().max().item()),
    }


def eager_linear_loss(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    entropy_coef: float,
) -> Tensor:
    return eager_loss(hidden @ weight.T, tokens, old_logprobs, advantages, entropy_coef)


def _our_linear_loss(
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


LINEAR_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""As GRADIENT_TOLERANCE; bf16 logits of a GEMM are off by up to 2⁻⁹ of 10, so probabilities by 2 %
in the worst entry."""


def linear_loss_case(shape: Tokens, dtype: torch.dtype) -> Case:
    n, (_, vocab, width) = shape.n, shape.model
    of = ("hidden", "weight")
    return Case(
        "linear loss",
        str(shape),
        dtype,
        # hidden and weight read, their gradients written; three numbers per token read
        bytes_moved=2 * (n + vocab) * width * dtype.itemsize + n * (TOKEN_BYTES + 2 * FLOAT_BYTES),
        flop=6 * n * width * vocab,  # logits, the gradient of hidden, the gradient of weight
        draw=lambda seed, device: draw_hidden(shape, dtype, seed, device),
        truth=_exact_linear_loss,
        providers=(
            Provider("fastppo", _loss_from(_our_linear_loss, ENTROPY_COEF, of)),
            Provider("eager", _loss_from(eager_linear_loss, ENTROPY_COEF, of)),
        ),
        compiled=(
            Provider(
                "torch.compile",
                _loss_from(lambda *a: _compiled(eager_linear_loss)(*a), ENTROPY_COEF, of),
            ),
        ),
        tolerance=LINEAR_TOLERANCE[dtype],
    )


def eager_linear_logprobs(hidden: Tensor, weight: Tensor, tokens: Tensor) -> Tensor:
    logits = (hidden @ weight.T).float()
    token_logits = logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return token_logits - torch.logsumexp(logits, -1)


def _linear_logprobs_from(function: Callable[..., Tensor]) -> Callable[[Inputs], Outputs]:
    def call(inputs: Inputs) -> Outputs:
        with torch.no_grad():
            logprobs = function(inputs["hidden"], inputs["weight"], inputs["tokens"])
        return {"logprobs": logprobs}

    return call


def _cut_cross_entropy(device: torch.device) -> tuple[Provider, ...]:
    function = importlib.import_module("cut_cross_entropy").linear_cross_entropy
    # Its kernels need a GPU; elsewhere it has a compiled fallback of the same signature.
    path = "cce" if device.type == "cuda" else "torch_compile"

    def logprobs(hidden: Tensor, weight: Tensor, tokens: Tensor) -> Tensor:
        return -function(hidden, weight, tokens, reduction="none", impl=path).float()

    return (Provider(f"cut-cross-entropy ({path})", _linear_logprobs_from(logprobs)),)


def _exact_linear_logprobs(inputs: Inputs) -> dict[str, Truth]:
    hidden, weight = inputs["hidden"].detach(), inputs["weight"].detach().double()
    exact = _exact_logprobs(
        lambda rows: hidden[rows].double() @ weight.T, inputs["tokens"], weight.shape[0]
    )
    return {"logprobs": Truth(exact, exact.abs().max().item())}


LINEAR_STATS_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-3}
"""Of the largest logprob, 15 to 20 nats; bf16: half a unit in the last place of a logit of 8 to 16
is 0.03."""


def linear_logprobs_case(shape: Tokens, dtype: torch.dtype) -> Case:
    n, (_, vocab, width) = shape.n, shape.model
    return Case(
        "linear logprobs",
        str(shape),
        dtype,
        # hidden, weight and tokens read; logprobs written
        bytes_moved=(n + vocab) * width * dtype.itemsize + n * (TOKEN_BYTES + FLOAT_BYTES),
        flop=2 * n * width * vocab,
        draw=lambda seed, device: draw_hidden(shape, dtype, seed, device),
        truth=_exact_linear_logprobs,
        providers=(
            Provider("fastppo", _linear_logprobs_from(fastppo.linear_token_logprobs)),
            Provider("eager", _linear_logprobs_from(eager_linear_logprobs)),
        ),
        compiled=(
            Provider(
                "torch.compile",
                _linear_logprobs_from(lambda *a: _compiled(eager_linear_logprobs)(*a)),
            ),
        ),
        tolerance=LINEAR_STATS_TOLERANCE[dtype],
        peers=(Peer("cut-cross-entropy", _cut_cross_entropy),),
    )


# ------------------------------------------------------------------------------------- advantages

SEQUENCE_TOLERANCE = 1e-4
"""Of the largest advantage: a sum of up to 10⁵ fp32 terms, of which λ keeps some tens."""


def response_lengths(shape: Sequences) -> list[int]:
    """From T down to half of it, evenly: the same in every run, so that bytes are known."""
    return [shape.length - b * shape.length // (2 * shape.batch) for b in range(shape.batch)]


def response_mask(shape: Sequences, device: torch.device) -> Tensor:
    lengths = torch.tensor(response_lengths(shape), device=device)
    return torch.arange(shape.length, device=device) < lengths.unsqueeze(1)


def draw_sequences(shape: Sequences, seed: int, device: torch.device) -> Inputs:
    """Padded entries of what a model computes there are noise, and have to be ignored."""
    size = (shape.batch, shape.length)
    names = ("rewards", "values", "logprobs", "ref_logprobs")
    drawn = {
        name: _draw_normal(size, torch.float32, device, 4 * seed + i)
        for i, name in enumerate(names)
    }
    return {
        **drawn,
        "mask": response_mask(shape, device),
        "scores": _draw_normal((shape.batch,), torch.float32, device, seed + 2**20),
    }


def loop_gae(rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """GAE by a loop over time, as TRL's PPOTrainer writes it: padding is zeroed beforehand."""
    rewards, values = rewards.masked_fill(~mask, 0.0), values.masked_fill(~mask, 0.0)
    length = values.shape[1]
    last: Tensor | float = 0.0
    reversed_advantages = []
    for t in reversed(range(length)):
        next_values = values[:, t + 1] if t < length - 1 else 0.0
        delta = rewards[:, t] + GAMMA * next_values - values[:, t]
        last = delta + GAMMA * LAM * last
        reversed_advantages.append(last)
    advantages = torch.stack(reversed_advantages[::-1], dim=1)
    return advantages, advantages + values


def _exact_gae(rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """In fp64 with NumPy, over time-major arrays; [B, T], 0 where masked."""
    r, v = (x.detach().cpu().double().numpy().T.copy() for x in (rewards, values))
    m = mask.cpu().numpy().T
    advantages = np.zeros_like(v)
    next_value, next_advantage = np.zeros(v.shape[1]), np.zeros(v.shape[1])
    for t in reversed(range(v.shape[0])):
        advantage = r[t] + GAMMA * next_value - v[t] + GAMMA * LAM * next_advantage
        next_value = np.where(m[t], v[t], next_value)
        next_advantage = np.where(m[t], advantage, next_advantage)
        advantages[t] = np.where(m[t], advantage, 0.0)
    return advantages.T, np.where(m, advantages + v, 0.0).T


def _sequence_truth(device: torch.device, **arrays: np.ndarray) -> dict[str, Truth]:
    return {
        name: Truth(torch.from_numpy(x.copy()).to(device), float(np.abs(x).max()))
        for name, x in arrays.items()
    }


def _gae_truth(inputs: Inputs) -> dict[str, Truth]:
    advantages, returns = _exact_gae(inputs["rewards"], inputs["values"], inputs["mask"])
    return _sequence_truth(inputs["mask"].device, advantages=advantages, returns=returns)


def _gae_from(function: Callable[..., tuple[Tensor, Tensor]]) -> Callable[[Inputs], Outputs]:
    def call(inputs: Inputs) -> Outputs:
        advantages, returns = function(inputs["rewards"], inputs["values"], inputs["mask"])
        return {"advantages": advantages, "returns": returns}

    return call


def _our_gae(rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return fastppo.gae(rewards, values, mask, gamma=GAMMA, lam=LAM)


def _verl_gae(device: torch.device) -> tuple[Provider, ...]:
    function = importlib.import_module("verl.trainer.ppo.core_algos").compute_gae_advantage_return

    def call(inputs: Inputs) -> Outputs:
        mask = inputs["mask"].float()
        _, returns = function(inputs["rewards"], inputs["values"], mask, GAMMA, LAM)
        return {"returns": returns * mask}  # its advantages come out whitened

    return (Provider("verl (whitens too)", call),)


NO_COMPILED_LOOP = {"torch.compile": "the loop over T unrolls into a graph of T steps"}


def _valid(shape: Sequences) -> tuple[int, int]:
    """(all entries, those that count)."""
    return shape.batch * shape.length, sum(response_lengths(shape))


def gae_case(shape: Sequences) -> Case:
    entries, valid = _valid(shape)
    return Case(
        "gae",
        str(shape),
        torch.float32,
        # rewards and values read where they count; the mask read, two results written everywhere
        bytes_moved=valid * 2 * FLOAT_BYTES + entries * (MASK_BYTES + 2 * FLOAT_BYTES),
        flop=valid * 6,  # δ: 3; A = δ + γλ·A_next: 2; A + V: 1
        draw=lambda seed, device: _only(
            draw_sequences(shape, seed, device), "rewards", "values", "mask"
        ),
        truth=_gae_truth,
        providers=(
            Provider("fastppo", _gae_from(_our_gae)),
            Provider("loop over time", _gae_from(loop_gae)),
        ),
        tolerance=SEQUENCE_TOLERANCE,
        peers=(Peer("verl", _verl_gae),),
        notes=NO_COMPILED_LOOP,
    )


def _only(inputs: Inputs, *names: str) -> Inputs:
    return {name: inputs[name] for name in names}


def eager_whiten(x: Tensor, mask: Tensor) -> Tensor:
    count = mask.sum()
    mean = torch.where(mask, x, 0.0).sum() / count
    variance = torch.where(mask, (x - mean) ** 2, 0.0).sum() / (count - 1)
    return torch.where(mask, (x - mean) * torch.rsqrt(variance + 1e-8), 0.0)


def loop_advantages(
    scores: Tensor, values: Tensor, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Reward shaping with the k1 estimator, GAE by the loop, whitening: as trainers write it."""
    rewards = -KL_COEF * (logprobs - ref_logprobs)
    last = mask.sum(1) - 1  # right padding
    rewards[torch.arange(len(scores), device=scores.device), last] += scores
    advantages, returns = loop_gae(rewards, values, mask)
    return eager_whiten(advantages, mask), returns


def _our_advantages(
    scores: Tensor, values: Tensor, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor]:
    out = fastppo.compute_advantages(
        scores, values, logprobs, ref_logprobs, mask, kl_coef=KL_COEF, gamma=GAMMA, lam=LAM
    )
    return out.advantages, out.returns


def _advantages_from(
    function: Callable[..., tuple[Tensor, Tensor]],
) -> Callable[[Inputs], Outputs]:
    def call(inputs: Inputs) -> Outputs:
        advantages, returns = function(*inputs.values())
        return {"advantages": advantages, "returns": returns}

    return call


def _exact_whitened(x: np.ndarray, mask: np.ndarray) -> np.ndarray:
    kept = x[mask]
    return np.where(mask, (x - kept.mean()) / np.sqrt(kept.var(ddof=1) + 1e-8), 0.0)


def _advantages_truth(inputs: Inputs) -> dict[str, Truth]:
    mask = inputs["mask"].cpu().numpy()
    rewards = -KL_COEF * (inputs["logprobs"].double() - inputs["ref_logprobs"].double())
    for b, length in enumerate(inputs["mask"].sum(1).tolist()):
        rewards[b, length - 1] += inputs["scores"][b].double()
    advantages, returns = _exact_gae(rewards, inputs["values"], inputs["mask"])
    white = _exact_whitened(advantages, mask)
    return _sequence_truth(inputs["mask"].device, advantages=white, returns=returns)


def advantages_case(shape: Sequences) -> Case:
    entries, valid = _valid(shape)
    return Case(
        "advantages",
        str(shape),
        torch.float32,
        # values, logprobs and ref logprobs read where they count; the mask read and two results
        # written everywhere; a score read and a KL written per sequence
        bytes_moved=valid * 3 * FLOAT_BYTES
        + entries * (MASK_BYTES + 2 * FLOAT_BYTES)
        + shape.batch * 2 * FLOAT_BYTES,
        flop=valid * 14,  # shaping: 2; the KL's sum: 1; GAE: 6; moments: 3; whitening: 2
        draw=lambda seed, device: _only(
            draw_sequences(shape, seed, device),
            *("scores", "values", "logprobs", "ref_logprobs", "mask"),
        ),
        truth=_advantages_truth,
        providers=(
            Provider("fastppo", _advantages_from(_our_advantages)),
            Provider("loop over time", _advantages_from(loop_advantages)),
        ),
        tolerance=SEQUENCE_TOLERANCE,
        notes=NO_COMPILED_LOOP,
    )


def _whiten_from(function: Callable[..., Tensor]) -> Callable[[Inputs], Outputs]:
    return lambda inputs: {"whitened": function(inputs["values"], inputs["mask"])}


def _whiten_truth(inputs: Inputs) -> dict[str, Truth]:
    x, mask = inputs["values"].cpu().double().numpy(), inputs["mask"].cpu().numpy()
    return _sequence_truth(inputs["mask"].device, whitened=_exact_whitened(x, mask))


def _trl_whiten(device: torch.device) -> tuple[Provider, ...]:
    function = importlib.import_module("trl.experimental.ppo.ppo_trainer").masked_whiten

    def whiten(x: Tensor, mask: Tensor) -> Tensor:
        return function(x, mask).masked_fill(~mask, 0.0)  # as its trainer does

    return (Provider("trl", _whiten_from(whiten)),)


def _verl_whiten(device: torch.device) -> tuple[Provider, ...]:
    function = importlib.import_module("verl.utils.torch_functional").masked_whiten

    def whiten(x: Tensor, mask: Tensor) -> Tensor:
        return function(x, mask.float()) * mask

    return (Provider("verl", _whiten_from(whiten)),)


def whiten_case(shape: Sequences) -> Case:
    entries, valid = _valid(shape)
    return Case(
        "whiten",
        str(shape),
        torch.float32,
        # x read where it counts; the mask read and the result written everywhere
        bytes_moved=valid * FLOAT_BYTES + entries * (MASK_BYTES + FLOAT_BYTES),
        flop=valid * 5,  # moments: 3; subtract and multiply: 2
        draw=lambda seed, device: _only(draw_sequences(shape, seed, device), "values", "mask"),
        truth=_whiten_truth,
        providers=(
            Provider("fastppo", _whiten_from(fastppo.whiten)),
            Provider("eager", _whiten_from(eager_whiten)),
        ),
        compiled=(Provider("torch.compile", _whiten_from(lambda *a: _compiled(eager_whiten)(*a))),),
        tolerance=SEQUENCE_TOLERANCE,
        peers=(Peer("trl", _trl_whiten), Peer("verl", _verl_whiten)),
    )


# ------------------------------------------------------------------------------------ the whole set

NAMES = {
    "loss": "from logits, with its gradient and forward alone, with and without an entropy bonus",
    "statistics": "logprobs and entropy from logits, no gradient",
    "linear-loss": "loss and its gradients from hidden states and the lm-head",
    "linear-logprobs": "logprobs from hidden states and the lm-head, no gradient",
    "gae": "generalised advantage estimation",
    "advantages": "reward shaping, GAE and whitening in one call",
    "whiten": "masked whitening",
}


def cases(work: Work, names: tuple[str, ...] = tuple(NAMES)) -> list[Case]:
    """The cases of a set, restricted to `names`."""
    found: list[Case] = []
    for shape in work.logits:
        if "loss" in names:
            found.append(loss_case(shape, work.dtype))
            found.append(loss_case(shape, work.dtype, entropy_coef=0.0))
            found.append(loss_case(shape, work.dtype, with_gradient=False))
        if "statistics" in names:
            found.append(stats_case(shape, work.dtype))
    for shape in work.linear:
        if "linear-loss" in names:
            found.append(linear_loss_case(shape, work.dtype))
        if "linear-logprobs" in names:
            found.append(linear_logprobs_case(shape, work.dtype))
    for sequences in work.sequences:
        for name, build in (
            ("gae", gae_case),
            ("advantages", advantages_case),
            ("whiten", whiten_case),
        ):
            if name in names:
                found.append(build(sequences))
    return found


def describe(case: Case) -> dict[str, Any]:
    """What a results file says of a case."""
    return {
        "case": case.name,
        "shape": case.shape,
        "dtype": dtype_name(case.dtype),
        "bytes": case.bytes_moved,
        "flop": case.flop,
    }
