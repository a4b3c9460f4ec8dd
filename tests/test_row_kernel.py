"""The row kernel against its definition in fp64, under Triton's interpreter.

Paths through the kernel, and the case of `PATHS` that takes each (`test_every_line_is_taken` runs
them all and fails on a line of a jit function that none of them reaches):

| path                                                         | case                        |
|--------------------------------------------------------------|-----------------------------|
| one tile, partly filled                                      | bare                        |
| whole tiles and no rest; whole tiles and a rest              | whole tiles, rest           |
| rows on 16 bytes; rows off them, read by the element         | whole tiles; bare           |
| the long rows' tile                                          | long rows                   |
| token in the first tile, in the rest, in the last column     | bare, rest                  |
| no gradient: one sweep                                       | no gradient                 |
| gradient over the logits                                     | in place                    |
| row of weight 0, with and without a gradient                 | weight zero, no gradient    |
| row whose derivatives are all 0                              | clipped                     |
| a program's second row                                       | every case of more rows     |
| k1, k2, k3 (near and far from 0), full KL                    | k1, k2, k3, full            |
| a column that the reference rules out, early, late, a token  | ruled out                   |
| importance weights, dual clip, no clip                       | weighted, dual clip         |
| temperature per token, soft-cap (near and far from 0)        | capped                      |
| [B, T, V] that does not flatten, row strides                 | cut                         |
| statistics, with and without a reference, and their backward | statistics …                |
| a row without an upstream gradient; no entropy gradient      | statistics, logprob alone   |
| the gradient times 1, times something else, strided          | scale …                     |

Tolerances. Statistics are fp32 sums of fp32 exponentials: 1e-5 nats, and 4 units in the last place
of the value where that is more (a logprob of −300). A gradient in fp32 is off by at most 1e-5 of
the row's largest entry, one in bf16 by one unit in the last place of the fp64 gradient rounded to
bf16. Entropy and KL terms cross zero within a row; there the fp32 rule holds. Entries below the
smallest normal fp32 number may be 0.
"""

from __future__ import annotations

import ast
import inspect
import mmap
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fastppo
import pytest
import torch
from fastppo import ops
from fastppo_kernels import reference
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

row_loss = pytest.importorskip("fastppo_kernels.row_loss", reason="Triton is not installed")

pytestmark = [
    # The differences to the start of the running maximum overflow to −inf, and are clamped there.
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning:triton"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning:triton"),
]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCABULARIES = (3, 1000, 32000, 50257, 128256, 151936, 152064, 262144)


def draw(
    n: int, vocab: int, dtype: torch.dtype = torch.float32, *, seed: int = 0, spread: float = 3.0
) -> dict[str, Any]:
    """Arguments of ppo_loss near its clips: `logits` in `dtype`, the rest fp32."""
    g = torch.Generator().manual_seed(seed)
    logits = (torch.randn(n, vocab, generator=g) * spread).to(dtype)
    tokens = torch.randint(vocab, (n,), generator=g)
    # Behaviour close to the policy, so that both sides of each clip are met.
    logprobs = reference.token_stats(logits.double(), tokens).logprobs
    return {
        "logits": logits,
        "tokens": tokens,
        "old_logprobs": (logprobs + 0.3 * torch.randn(n, generator=g)).float(),
        "advantages": torch.randn(n, generator=g),
        "weights": torch.rand(n, generator=g) + 0.1,
    }


def wide(value: Any) -> Any:
    """The same numbers in fp64, so that the definition computes in fp64."""
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def on_device(arguments: dict[str, Any]) -> dict[str, Any]:
    return {k: v.to(DEVICE) if isinstance(v, Tensor) else v for k, v in arguments.items()}


def assert_statistic(got: Tensor, want: Tensor, name: str) -> None:
    got, want = got.detach().cpu().double(), want.cpu().double()
    allowed = (1e-5 + 4 * 2.0**-24 * want.abs()).clamp(max=1e30)
    wrong = ~(((got - want).abs() <= allowed) | (got == want) | (got.isnan() & want.isnan()))
    assert not wrong.any(), f"{name}: got {got[wrong]}, want {want[wrong]}"


def assert_gradient(got: Tensor, want: Tensor, *, one_signed: bool = False) -> None:
    """`one_signed`: no term crosses zero within a row, so that bf16 has no fp32 allowance."""
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
    excess = (got - want).abs() - allowed
    assert (excess <= 0).all(), (
        f"off by {((got - want).abs() / largest.clamp(min=1e-300)).max():.2g} of the row's largest "
        f"entry at {(excess > 0).nonzero()[:4].tolist()}"
    )


def check_loss(arguments: dict[str, Any], **options: Any) -> reference.PPORows:
    """ppo_loss of the kernel against the definition in fp64 on the same numbers."""
    logits = arguments["logits"]
    want = reference.ppo_loss(
        **{k: wide(v).clone() if isinstance(v, Tensor) else v for k, v in arguments.items()},
        **{k: wide(v) for k, v in (options | {"inplace": False}).items()},
    )
    got = row_loss.ppo_loss(**on_device(arguments), **on_device(options))
    for name in ("logprobs", "entropy"):
        assert_statistic(getattr(got, name), getattr(want, name), name)
    # e^{−d} multiplies an error of the logprob: relative to 1 + |KL|.
    scale = 1 + want.kl.abs().nan_to_num(0.0, 0.0)
    assert_statistic(got.kl.cpu() / scale, want.kl / scale, "kl")
    scale = 1 + want.sums.abs().nan_to_num(0.0, 0.0)
    assert_statistic(got.sums.cpu() / scale, want.sums / scale, "sums")
    assert (got.grad is None) == (want.grad is None)
    if got.grad is not None and want.grad is not None:
        assert got.grad.dtype == logits.dtype
        assert got.grad.shape == logits.shape
        one_signed = not options.get("entropy_coef") and options.get("kl_estimator") != "full"
        assert_gradient(got.grad.flatten(0, -2), want.grad.flatten(0, -2), one_signed=one_signed)
    return got


def check_stats(
    logits: Tensor, tokens: Tensor, *, upstream: tuple[Tensor | None, ...], **options: Any
) -> None:
    """token_stats and its backward, given the gradients of (logprobs, entropy, KL)."""
    wide_options = {k: wide(v) for k, v in options.items()}
    want = reference.token_stats(logits.double(), tokens, **wide_options)
    options = on_device(options)
    got = row_loss.token_stats(logits.to(DEVICE), tokens.to(DEVICE), **options)
    for name in ("logprobs", "entropy", "kl", "normalizer", "ref_normalizer"):
        assert_statistic(getattr(got, name), getattr(want, name), name)
    want_grad = reference.token_stats_backward(
        *(wide(g) for g in upstream), logits.double(), tokens, want, **wide_options
    )
    got_grad = row_loss.token_stats_backward(
        *(None if g is None else g.to(DEVICE) for g in upstream),
        logits.to(DEVICE),
        tokens.to(DEVICE),
        got,
        **options,
    )
    assert got_grad.dtype == logits.dtype
    assert_gradient(got_grad.flatten(0, -2), want_grad.flatten(0, -2))


# ------------------------------------------------------------------------------------------ paths


def path_bare() -> None:
    check_loss(draw(3, 507))


def path_whole_tiles() -> None:
    check_loss(draw(2, 2048))


def path_rest() -> None:
    arguments = draw(3, 2064)
    arguments["tokens"] = torch.tensor([0, 2063, 1024])
    check_loss(arguments)


def path_long_rows() -> None:
    check_loss(draw(2, 20000, torch.bfloat16))


def path_no_gradient() -> None:
    arguments = draw(3, 40)
    arguments["weights"][1] = 0.0
    check_loss(arguments, need_grad=False)


def path_in_place() -> None:
    arguments = draw(3, 2064)
    arguments["logits"] = arguments["logits"].to(DEVICE)
    got = check_loss(arguments, inplace=True)
    assert got.grad is not None
    assert got.grad.data_ptr() == arguments["logits"].data_ptr()


def path_weight_zero() -> None:
    arguments = draw(4, 40)
    arguments["weights"][::2] = 0.0
    arguments["logits"][::2] = float("nan")
    arguments["tokens"][::2] = -100
    got = check_loss(arguments)
    assert got.grad is not None
    assert (got.grad[::2] == 0).all()


def path_clipped() -> None:
    arguments = draw(2, 40)
    arguments["old_logprobs"] -= 3.0
    arguments["advantages"] = torch.tensor([1.0, 0.0])
    got = check_loss(arguments)
    assert got.grad is not None
    assert (got.grad == 0).all()


def path_k1() -> None:
    check_loss(draw(2, 40), kl_estimator="k1", kl_coef=0.2, ref_logprobs=torch.tensor([-2.0, -9.0]))


def path_k2() -> None:
    check_loss(draw(2, 40), kl_estimator="k2", kl_coef=0.2, ref_logprobs=torch.tensor([-2.0, -9.0]))


def path_k3() -> None:
    arguments = draw(4, 40)
    near = reference.token_stats(arguments["logits"], arguments["tokens"]).logprobs
    far = torch.tensor([1e-4, -3.0, 30.0, -30.0])
    check_loss(arguments, kl_estimator="k3", kl_coef=0.2, ref_logprobs=near + far)


def path_full() -> None:
    options: dict[str, Any] = {"kl_estimator": "full", "ref_logits": draw(3, 507, seed=1)["logits"]}
    check_loss(draw(3, 507), kl_coef=0.3, entropy_coef=0.01, **options)
    check_loss(draw(3, 507), kl_coef=0.0, **options)


def path_ruled_out() -> None:
    arguments = draw(4, 2064)
    ref = draw(4, 2064, seed=1)["logits"]
    lowest = torch.finfo(torch.float32).min
    # Ruled out by both: costs nothing. By −inf, and by the lowest number from the first column on.
    ref[0, :1500], arguments["logits"][0, :1500] = -torch.inf, -torch.inf
    ref[1, :1500], arguments["logits"][1, :1500] = lowest, lowest
    arguments["tokens"][:2] = 2000
    got = check_loss(arguments | {"weights": torch.tensor([1.0, 1, 0, 0])}, kl_estimator="full",
                     ref_logits=ref, kl_coef=0.1)  # fmt: skip
    assert got.kl.isfinite().all()
    # By the reference alone: an infinite KL, whether it is the token or another column, first or
    # last in its lane. Only reported, it leaves the loss and its gradient alone.
    ref = draw(4, 2064, seed=1)["logits"]
    ref[0, 5], ref[1, 2040], ref[2, :1500] = -torch.inf, lowest, lowest
    ref[3, arguments["tokens"][3]] = -torch.inf
    got = check_loss(draw(4, 2064), kl_estimator="full", ref_logits=ref, kl_coef=0.0)
    assert (got.kl == torch.inf).all()
    assert got.sums[0].isfinite()


def path_weighted() -> None:
    check_loss(draw(3, 40), importance_weights=torch.tensor([0.5, 2.0, 0.0]))


def path_dual_clip() -> None:
    arguments = draw(4, 40)
    arguments["old_logprobs"] -= torch.tensor([3.0, 0.5, 3.0, 0.5])
    arguments["advantages"] = torch.tensor([-1.0, -1.0, 1.0, 1.0])
    check_loss(arguments, dual_clip=3.0)
    check_loss(arguments, clip_low=float("inf"), clip_high=float("inf"))
    check_loss(arguments, clip_low=0.1, clip_high=float("inf"))


def path_capped() -> None:
    arguments = draw(3, 2064, spread=20.0)
    arguments["logits"][0] *= 0.01
    options = {"softcap": 15.0, "logit_scale": 0.7, "entropy_coef": 0.05}
    check_loss(arguments, temperature=torch.tensor([0.3, 1.0, 2.0]), **options)
    ref = draw(3, 2064, seed=1, spread=20.0)["logits"]
    check_loss(arguments, kl_estimator="full", ref_logits=ref, kl_coef=0.3, **options)


def path_cut() -> None:
    arguments = draw(6, 40)
    padded = torch.randn(3, 3, 40)
    padded[:, :-1] = arguments["logits"].view(3, 2, 40)
    check_loss(arguments | {"logits": padded[:, :-1]})
    gapped = torch.randn(6, 50)
    gapped[:, :40] = arguments["logits"]
    check_loss(arguments | {"logits": gapped[:, :40]})


def _upstream(n: int, count: int) -> tuple[Tensor | None, ...]:
    g = torch.Generator().manual_seed(5)
    return tuple(torch.randn(n, generator=g) if i < count else None for i in range(3))


def path_statistics() -> None:
    arguments = draw(3, 2064)
    check_stats(arguments["logits"], arguments["tokens"], upstream=_upstream(3, 2))


def path_statistics_reference() -> None:
    arguments, ref = draw(3, 2064), draw(3, 2064, seed=1)["logits"]
    x, tokens = arguments["logits"], arguments["tokens"]
    check_stats(x, tokens, upstream=_upstream(3, 3), ref_logits=ref)
    capped = {"softcap": 5.0, "temperature": torch.tensor([0.5, 1.0, 2.0])}
    check_stats(x, tokens, upstream=_upstream(3, 3), ref_logits=ref, **capped)


def path_statistics_logprob_alone() -> None:
    arguments = draw(3, 507)
    upstream = (torch.tensor([1.0, 0.0, -2.0]), None, None)
    check_stats(arguments["logits"], arguments["tokens"], upstream=upstream)


def path_scale_by_one() -> None:
    x = torch.randn(3, 507, device=DEVICE)
    before = x.clone()
    assert row_loss.scale_(x, torch.ones((), device=DEVICE)) is x
    assert torch.equal(x, before)


def path_scale() -> None:
    third = torch.tensor(1 / 3)
    for dtype in row_loss.DTYPES:
        for x in (torch.randn(9000), torch.randn(3, 507), torch.randn(2, 3, 20)[:, :-1]):
            x = x.to(DEVICE, dtype)
            want = x.double() * third.double()
            row_loss.scale_(x, third.to(DEVICE))
            # One unit: the interpreter cuts bf16 off where a GPU rounds to nearest.
            assert_gradient(x.reshape(1, -1), want.reshape(1, -1), one_signed=True)


PATHS: dict[str, Callable[[], None]] = {
    name.removeprefix("path_"): call
    for name, call in list(globals().items())
    if name.startswith("path_")
}


@pytest.mark.parametrize("name", PATHS)
def test_path(name: str) -> None:
    PATHS[name]()


def _jit_lines() -> set[int]:
    """Lines of statements inside the jit functions, docstrings and constants aside."""
    source = Path(row_loss.__file__).read_text()
    lines = set()
    for function in ast.parse(source).body:
        if not isinstance(function, ast.FunctionDef) or not any(
            "triton.jit" in ast.unparse(decorator) for decorator in function.decorator_list
        ):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.stmt) and node is not function:
                text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
                if not text:
                    lines.add(node.lineno)
    return lines


@pytest.mark.skipif(DEVICE == "cuda", reason="compiled kernels cannot be traced by line")
def test_every_line_is_taken() -> None:
    taken: set[int] = set()

    def local(frame: types.FrameType, event: str, _: Any) -> Any:
        taken.add(frame.f_lineno)
        return local

    def trace(frame: types.FrameType, event: str, _: Any) -> Any:
        return local if frame.f_code.co_filename == row_loss.__file__ else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for call in PATHS.values():
            call()
    finally:
        sys.settrace(before)
    lines = inspect.getsource(row_loss).splitlines()
    missed = sorted(_jit_lines() - taken)
    assert not missed, "no case takes " + "; ".join(f"{i}: {lines[i - 1].strip()}" for i in missed)
