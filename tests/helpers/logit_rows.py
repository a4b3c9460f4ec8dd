"""Rows of logits for tests of the row kernels: draws, records from flat keywords, tolerances.

Statistics are fp32 sums of fp32 exponentials: 1e-5 nats, or 4 units in the last place of larger
values (a logprob of −300). An fp32 gradient is off by at most 1e-5 of the row's largest entry; a
bf16 gradient by one unit in the last place of the fp64 gradient rounded to bf16, except that
entropy and KL terms, which cross zero within a row, follow the fp32 rule. Entries below the
smallest normal fp32 number may be 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
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
    """The operands of `ppo_loss`, of the definition and of the backends."""

    logits: Tensor
    per_token: PerToken
    objective: Objective
    softmax: Softmax


def operands(arguments: dict[str, Any]) -> tuple[Operands, dict[str, Any]]:
    """Return the records of flat keywords, and the remaining keywords."""
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
    """Convert to fp64, for the definition."""
    return {
        k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v
        for k, v in arguments.items()
    }


def on(device: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in arguments.items()}


def logprobs_of(logits: Tensor, tokens: Tensor, softmax: Softmax = PLAIN) -> Tensor:
    """Return the logprobs [N] in fp64."""
    return definition.token_stats(logits.double(), tokens, softmax).logprobs


def draw(
    n: int, vocab: int, dtype: torch.dtype = torch.float32, *, seed: int = 0, spread: float = 3.0
) -> dict[str, Any]:
    """Draw flat arguments of a loss near its clips: `logits` in `dtype`, the others fp32."""
    g = torch.Generator().manual_seed(seed)
    logits = (torch.randn(n, vocab, generator=g) * spread).to(dtype)
    tokens = torch.randint(vocab, (n,), generator=g)
    # Old logprobs near the policy's, on both sides of each clip.
    logprobs = logprobs_of(logits, tokens)
    return {
        "logits": logits,
        "tokens": tokens,
        "old_logprobs": (logprobs + 0.3 * torch.randn(n, generator=g)).float(),
        "advantages": torch.randn(n, generator=g),
        "weights": torch.rand(n, generator=g) + 0.1,
    }


N = 13
"""Rows of `arguments_of`."""

TERMS: dict[str, dict[str, Any]] = {
    "policy": {},
    "entropy": {"entropy_coef": 0.1},
    "dual clip": {"dual_clip": 1.5},
    "no clip": {"lowest_ratio": -math.inf, "highest_ratio": math.inf},
    "cispo": {"policy_term": "cispo"},
    "sapo": {"policy_term": "sapo", "tau_positive": 1.0, "tau_negative": 3.0},
    "dis": {"policy_term": "dis"},
    "dppo_tv": {"policy_term": "dppo_tv", "lowest_ratio": 0.96, "highest_ratio": 1.03},
    "dppo_kl": {"policy_term": "dppo_kl", "lowest_ratio": 0.996, "highest_ratio": 1.005},
    "k1": {"kl_coef": 0.2, "kl_estimator": "k1"},
    "k2": {"kl_coef": 0.2, "kl_estimator": "k2"},
    "k3": {"kl_coef": 0.2},
    "ratio·k1": {"kl_coef": 0.2, "kl_estimator": "k1", "kl_ratio_weighted": True},
    "ratio·k3": {"kl_coef": 0.2, "kl_ratio_weighted": True},
    "full KL": {"kl_coef": 0.2, "kl_estimator": "full"},
    "temperatures": {"temperature": torch.linspace(0.7, 2.0, N), "logit_scale": 1.5},
    "everything": {
        "kl_coef": 0.2,
        "kl_estimator": "full",
        "entropy_coef": -0.3,
        "dual_clip": 1.5,
        "temperature": torch.linspace(0.7, 2.0, N),
        "logit_scale": 1.5,
        "softcap": 8.0,
    },
}


def arguments_of(
    term: str, vocab: int = 37, dtype: torch.dtype = torch.float32, change: str = ""
) -> dict[str, Any]:
    """Draw flat arguments of a term: logits in `dtype`, the others fp32.

    "masked": rows of weight 0 with NaN everywhere. "far": ratios and references on both sides of
    every bound, and at their limits.
    """
    given = draw(N, vocab, dtype) | TERMS[term]
    if term.startswith("dppo"):  # probabilities that can move by more than the range
        peaked(given["logits"], given["tokens"], torch.linspace(-3, 1, N, dtype=dtype)[:, None])
    logprobs = logprobs_of(given["logits"], given["tokens"], operands(given)[0].softmax).float()
    given["old_logprobs"] = logprobs + 0.3 * torch.randn(N)
    given["ref_logprobs"] = given["old_logprobs"] - 0.3
    given["importance_weights"] = torch.rand(N) + 0.5
    if given.get("kl_estimator") == "full":
        given["ref_logits"] = draw(N, vocab, dtype, seed=1)["logits"]
    if change == "far":
        given["old_logprobs"] = logprobs - torch.tensor(
            [0.01, 0.5, 0.5, -0.5, -0.5, 25.0, -25.0, 0.5, -0.5, 25.0, 0.01, 0.5, -0.5]
        )
        given["ref_logprobs"] = logprobs + torch.tensor(
            [1e-4, -3.0, 1.0, -3.0, 1.0, 1.0, -3.0, -30.0, 30.0, -3.0, 1e-4, -30.0, 30.0]
        )
    if change == "masked":
        given["weights"][::3] = 0.0
        given["tokens"][::3] = -100
        for name in ("logits", "old_logprobs", "advantages", "ref_logprobs", "importance_weights"):
            given[name][::3] = torch.nan
    return given


def peaked(x: Tensor, tokens: Tensor, nats: float | Tensor) -> None:
    """Set the token's probability to 1/(1 + e^{-nats})."""
    others = x.scatter(1, tokens[:, None], -torch.inf).logsumexp(-1, keepdim=True)
    x.scatter_(1, tokens[:, None], others + nats)


def peaked_elsewhere(x: Tensor, tokens: Tensor, nats: float) -> None:
    """Raise another column by `nats` above the maximum."""
    x[:, 1200] = x.amax(-1) + nats


def ruled_out(x: Tensor, tokens: Tensor, fill: float) -> None:
    """Rule out all but the token; every second column, including a token; whole tiles."""
    x[0] = fill
    x[0, tokens[0]] = 1.0
    x[1:, ::2] = fill
    tokens[1] = 4
    x[2, :1500] = fill
    tokens[2] = 2001


def moved(x: Tensor, tokens: Tensor, offset: float) -> None:
    x += offset


def a_row_of(x: Tensor, tokens: Tensor, fill: float) -> None:
    x[2] = fill


def a_logit_of(x: Tensor, tokens: Tensor, fill: float) -> None:
    x[2, 7] = fill


LOWEST = torch.finfo(torch.float32).min
CHANGES: dict[str, tuple[Callable[[Tensor, Tensor, float], None], float]] = {
    "peaked by 12 nats": (peaked, 12.0),
    # At 30 nats even fp64 loses five digits of 1 − p.
    "peaked by 20 nats": (peaked, 20.0),
    "peaked by 5 nats elsewhere": (peaked_elsewhere, 5.0),
    "peaked by 20 nats elsewhere": (peaked_elsewhere, 20.0),
    "1000 above": (moved, 1000.0),
    "1000 below": (moved, -1000.0),
    "10000 above": (moved, 10_000.0),
    "10000 below": (moved, -10_000.0),
    "columns at −inf": (ruled_out, -torch.inf),
    "columns at the lowest number": (ruled_out, LOWEST),
    "a row of −inf": (a_row_of, -torch.inf),
    "a row of the lowest number": (a_row_of, LOWEST),
    "a row of NaN": (a_row_of, torch.nan),
    "a row of inf": (a_row_of, torch.inf),
    "a NaN whose sign bit is set": (a_logit_of, math.copysign(torch.nan, -1.0)),
}
"""Changes of drawn rows, and their number."""

EDGES = [
    (case, softcap)
    for case in CHANGES
    for softcap in (None, 5.0)
    if softcap is None or "000" not in case  # far beyond the cap even fp64 has no slope
]


def at_the_edge(case: str, softcap: float | None) -> tuple[dict[str, Any], StatsGradients]:
    """Return the arguments of a loss of such rows, and gradients of their statistics. Rows with a
    cap are not 16-byte aligned."""
    given = draw(5, 2064 if softcap is None else 2051)
    given |= {"entropy_coef": -0.1, "softcap": softcap}
    given["advantages"].abs_()  # the entropy's sign, so that no terms cancel
    change, number = CHANGES[case]
    change(given["logits"], given["tokens"], number)
    logprobs = logprobs_of(given["logits"], given["tokens"], operands(given)[0].softmax)
    given["old_logprobs"] = torch.where(logprobs > -1e20, logprobs, -3.0).float() + 0.1
    # A ruled-out token's logprob has no gradient in the definition.
    by_logprob = torch.where(logprobs < -1e20, 0.0, -torch.rand(5))
    return given, StatsGradients(by_logprob, torch.rand(5))


def assert_statistic(got: Tensor, want: Tensor, name: str) -> None:
    got, want = got.detach().cpu().double(), want.detach().cpu().double()
    allowed = (1e-5 + 4 * 2.0**-24 * want.abs()).clamp(max=1e30)
    wrong = ~(((got - want).abs() <= allowed) | (got == want) | (got.isnan() & want.isnan()))
    assert not wrong.any(), f"{name}: got {got[wrong]}, want {want[wrong]}"


def assert_gradient(
    got: Tensor, want: Tensor, *, one_signed: bool = False, allowance: Tensor | None = None
) -> None:
    """`one_signed`: no term crosses zero within a row, so bf16 gets no fp32 tolerance. `allowance`
    [N, V]: additional tolerance per entry."""
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
    """`want` is in fp64; `one_signed` and `allowance` are those of `assert_gradient`."""
    for name in ("logprobs", "entropy"):
        assert_statistic(getattr(got, name), getattr(want, name), name)
    # e^{−d} multiplies the error of the logprob: relative to 1 + |KL|.
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
    """Return (the definition's statistics in fp64, the gradient of the logits for `upstream`)."""

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
