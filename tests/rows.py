"""Rows of logits for tests of the row kernels: draws, records of flat keywords, tolerances.

Statistics are fp32 sums of fp32 exponentials: 1e-5 nats, and 4 units in the last place of the value
where that is more (a logprob of −300). A gradient in fp32 is off by at most 1e-5 of the row's
largest entry, one in bf16 by one unit in the last place of the fp64 gradient rounded to bf16.
Entropy and KL terms cross zero within a row; there the fp32 rule holds. Entries below the smallest
normal fp32 number may be 0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from fastppo_kernels import definition
from fastppo_kernels.records import (
    Objective,
    PerToken,
    PPORows,
    Softmax,
    StatsGradients,
    StatsRows,
)
from torch import Tensor

VOCABULARIES = (3, 1000, 32000, 50257, 128256, 151936, 152064, 262144)
PLAIN = Softmax()
CLIPPED = {"lowest_ratio": 0.8, "highest_ratio": 1.2}


class Operands(NamedTuple):
    """What `ppo_loss` of the definition and of a backend takes."""

    logits: Tensor
    per_token: PerToken
    objective: Objective
    softmax: Softmax


def operands(arguments: dict[str, Any]) -> tuple[Operands, dict[str, Any]]:
    """The records of flat keywords, and the keywords that are in none of them."""
    rest = CLIPPED | arguments
    if isinstance(rest.get("temperature"), Tensor):
        rest["temperatures"] = rest.pop("temperature")
    logits = rest.pop("logits")
    made = [
        record(**{name: rest.pop(name) for name in record._fields if name in rest})
        for record in (PerToken, Objective, Softmax)
    ]
    return Operands(logits, *made), rest


def in_fp64(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same numbers, so that the definition computes in fp64."""
    return {
        k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v
        for k, v in arguments.items()
    }


def on(device: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in arguments.items()}


def logprobs_of(logits: Tensor, tokens: Tensor, softmax: Softmax = PLAIN) -> Tensor:
    """[N] fp64."""
    return definition.token_stats(logits.double(), tokens, softmax).logprobs


def draw(
    n: int, vocab: int, dtype: torch.dtype = torch.float32, *, seed: int = 0, spread: float = 3.0
) -> dict[str, Any]:
    """Flat arguments of a loss near its clips: `logits` in `dtype`, the rest fp32."""
    g = torch.Generator().manual_seed(seed)
    logits = (torch.randn(n, vocab, generator=g) * spread).to(dtype)
    tokens = torch.randint(vocab, (n,), generator=g)
    # Behaviour close to the policy, so that both sides of each clip are met.
    logprobs = logprobs_of(logits, tokens)
    return {
        "logits": logits,
        "tokens": tokens,
        "old_logprobs": (logprobs + 0.3 * torch.randn(n, generator=g)).float(),
        "advantages": torch.randn(n, generator=g),
        "weights": torch.rand(n, generator=g) + 0.1,
    }


def assert_statistic(got: Tensor, want: Tensor, name: str) -> None:
    got, want = got.detach().cpu().double(), want.detach().cpu().double()
    allowed = (1e-5 + 4 * 2.0**-24 * want.abs()).clamp(max=1e30)
    wrong = ~(((got - want).abs() <= allowed) | (got == want) | (got.isnan() & want.isnan()))
    assert not wrong.any(), f"{name}: got {got[wrong]}, want {want[wrong]}"


def assert_gradient(
    got: Tensor, want: Tensor, *, one_signed: bool = False, allowance: Tensor | None = None
) -> None:
    """`one_signed`: no term crosses zero within a row, so that bf16 has no fp32 allowance.
    `allowance` [N, V]: what an entry may be off by besides."""
    dtype = got.dtype
    got, want = got.detach().cpu().double(), want.cpu().double()
    assert torch.equal(got.isnan(), want.isnan())
    got, want = got.nan_to_num(0.0), want.nan_to_num(0.0)
    if want.shape[0] == 0:
        return
    largest = want.abs().amax(-1, keepdim=True)
    allowed = 1e-5 * largest + torch.finfo(torch.float32).tiny
    if dtype != torch.float32:
        rounded = want.to(dtype).double()
        _, exponent = torch.frexp(rounded)
        unit = torch.finfo(dtype).eps * torch.ldexp(torch.ones_like(want), exponent - 1)
        unit = unit.clamp(min=torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps)
        want = rounded
        floor = 0.0 if one_signed else 1e-5 * largest
        allowed = unit + floor + torch.finfo(torch.float32).tiny
    if allowance is not None:
        allowed = allowed + allowance
    excess = (got - want).abs() - allowed
    assert (excess <= 0).all(), (
        f"off by {((got - want).abs() / largest.clamp(min=1e-300)).max():.2g} of the row's largest "
        f"entry at {(excess > 0).nonzero()[:4].tolist()}"
    )


def assert_loss(
    got: PPORows, want: PPORows, *, one_signed: bool, allowance: Tensor | None = None
) -> None:
    """`want` in fp64; `one_signed` and `allowance` as of `assert_gradient`."""
    for name in ("logprobs", "entropy"):
        assert_statistic(getattr(got, name), getattr(want, name), name)
    # e^{−d} multiplies an error of the logprob: relative to 1 + |KL|.
    scale = 1 + want.kl.abs().nan_to_num(0.0, 0.0)
    assert_statistic(got.kl.cpu() / scale, want.kl / scale, "kl")
    scale = 1 + want.sums.abs().nan_to_num(0.0, 0.0)
    assert_statistic(got.sums.cpu() / scale, want.sums / scale, "sums")
    assert (got.grad is None) == (want.grad is None)
    if got.grad is not None and want.grad is not None:
        assert_gradient(
            got.grad.flatten(0, -2),
            want.grad.flatten(0, -2),
            one_signed=one_signed,
            allowance=allowance,
        )


def defined_statistics(
    logits: Tensor,
    tokens: Tensor,
    softmax: Softmax,
    upstream: StatsGradients,
    ref_logits: Tensor | None = None,
) -> tuple[StatsRows, Tensor]:
    """(the definition's statistics in fp64, the gradient of the logits by `upstream`)."""

    def widened(record: Any) -> Any:
        return type(record)(*(x.double() if isinstance(x, Tensor) else x for x in record))

    x = logits.double().requires_grad_()
    ref = None if ref_logits is None else ref_logits.double()
    stats = definition.token_stats(x, tokens, widened(softmax), ref_logits=ref)
    pairs = [
        (getattr(stats, name), g)
        for name, g in widened(upstream)._asdict().items()
        if g is not None
    ]
    (grad,) = torch.autograd.grad([one for one, _ in pairs], x, [g for _, g in pairs])
    return stats, grad


def assert_statistics(got: StatsRows, want: StatsRows) -> None:
    for name in got._fields:
        assert_statistic(getattr(got, name), getattr(want, name), name)
