"""PPO's loss and the statistics from logits equal the definition in fp64, with each backend.

A matrix of backend, term, dtype, vocabulary, layout and kind of rows. The Triton kernels run in
Triton's interpreter, and compiled on a GPU. `test_losses.py` tests every keyword of the public
functions.

Tolerances are those of `logit_rows.py`. The CPU's fp32 gradients are within 2e-6 of the row's
largest entry: some ten factors, each rounded by 6e-8; the ratio inherits the logprob's three
roundings, which grow below −11 nats. A sampled KL's derivative is a difference of logprobs, known
to 1e-6 nats, and may cancel the policy term's: 1e-6 of the token's weight more. Capped scores are
rounded before the shift, and 16-bit gradients at the end: both follow `logit_rows.py`.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from fastppo_kernels import cpu_backend, definition
from fastppo_kernels.cpu.operands import BLOCK
from fastppo_kernels.records import (
    POLICY_TERMS,
    PPORows,
    Softmax,
    StatsGradients,
    StatsRows,
    Sums,
    map_tensors,
)
from hypothesis import given as given_by
from hypothesis import settings
from hypothesis import strategies as st
from logit_rows import (
    EDGES,
    PLAIN,
    TERMS,
    N,
    arguments_of,
    assert_gradient,
    assert_loss,
    assert_statistic,
    assert_statistics,
    at_the_edge,
    defined_statistics,
    draw,
    in_fp64,
    logprobs_of,
    on,
    operands,
    peaked,
)
from torch import Tensor

import fastppo

pytestmark = [
    # NumPy warns about intended results: differences to the initial maximum overflow to −inf and
    # are clamped, and broken rows are NaN.
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
    pytest.mark.filterwarnings("ignore:All-NaN:RuntimeWarning"),
]

HAS_GPU = torch.cuda.is_available()
ON_A_GPU = [pytest.mark.gpu] if HAS_GPU else []
"""On a GPU the Triton kernels run compiled."""

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
LOWEST = torch.finfo(torch.float32).min


class Backend(NamedTuple):
    """A backend, and the device on which it runs here."""

    name: str
    functions: ModuleType
    device: str

    def loss(self, given: dict[str, Any], **options: Any) -> PPORows:
        """Return the loss for flat keywords."""
        records, rest = operands(on(self.device, given | options))
        return self.functions.ppo_loss(*records, **rest)

    def statistics(self, given: dict[str, Any]) -> StatsRows:
        """Return the statistics for flat keywords."""
        records, rest = operands(on(self.device, given))
        logits, tokens = records.logits, records.per_token.tokens
        return self.functions.token_stats(
            logits, tokens, self._moved(records.softmax), ref_logits=rest.get("ref_logits")
        )

    def statistics_gradient(
        self, given: dict[str, Any], stats: StatsRows, upstream: StatsGradients
    ) -> Tensor:
        """Return the gradient of the logits for `upstream`, the derivatives by the statistics."""
        records, rest = operands(on(self.device, given))
        logits, tokens = records.logits, records.per_token.tokens
        return self.functions.token_stats_backward(
            self._moved(upstream),
            logits,
            tokens,
            stats,
            self._moved(records.softmax),
            ref_logits=rest.get("ref_logits"),
        )

    def _moved(self, record: Any) -> Any:
        return map_tensors(lambda x: x.to(self.device, torch.float32), record)


TRITON = pytest.param("triton", marks=ON_A_GPU)


CPU = Backend("cpu", cpu_backend, "cpu")


def triton() -> Backend:
    functions = pytest.importorskip(
        "fastppo_kernels.triton_backend", reason="Triton is not installed"
    )
    return Backend("triton", functions, "cuda" if HAS_GPU else "cpu")


@pytest.fixture(params=["cpu", TRITON])
def backend(request: pytest.FixtureRequest) -> Backend:
    return CPU if request.param == "cpu" else triton()


def defined_loss(given: dict[str, Any], **options: Any) -> PPORows:
    """Return the definition's loss in fp64."""
    records, rest = operands(in_fp64(on("cpu", given | options)))
    found = definition.ppo_loss(*records, ref_logits=rest.get("ref_logits"))
    return found if rest.get("need_grad", True) else found._replace(grad=None)


def check_loss(backend: Backend, given: dict[str, Any], **options: Any) -> PPORows:
    """Compare the loss, its statistics and its gradient with the definition on the same numbers."""
    given = given | options
    want = defined_loss(given)
    got = backend.loss(given)
    if got.grad is not None:
        assert got.grad.dtype == given["logits"].dtype
        assert got.grad.shape == given["logits"].shape
    if backend.name == "cpu":
        check_loss_on_a_cpu(given, got, want)
    else:
        one_signed = not given.get("entropy_coef") and given.get("kl_estimator") != "full"
        assert_loss(got, want, one_signed=one_signed)
    return got


def check_loss_on_a_cpu(given: dict[str, Any], got: PPORows, want: PPORows) -> None:
    """The CPU's KL and gradients have more digits, and the ways to call it give the same bits."""
    for name in ("logprobs", "entropy", "kl"):
        assert_statistic(getattr(got, name), getattr(want, name), name)
    torch.testing.assert_close(
        got.sums.double(), want.sums, rtol=1e-5, atol=1e-5 * N, equal_nan=True
    )
    assert (got.grad is None) == (want.grad is None)
    if got.grad is not None and want.grad is not None:
        grads = (got.grad.flatten(0, -2), want.grad.flatten(0, -2))
        if got.grad.dtype != FP32 or given.get("softcap"):
            assert_gradient(*grads)
        else:
            has_kl = given.get("kl_coef", 0.0) != 0
            floor = 1e-6 * given["weights"].unsqueeze(-1) if has_kl else 0.0
            assert_cpu_gradient(*grads, want.logprobs, floor)
    if given.get("inplace"):  # the logits are overwritten
        return
    others = [CPU.loss(given, need_grad=False)]
    assert others[0].grad is None
    if got.grad is not None:
        logits = given["logits"].clone()
        others.append(CPU.loss(given, logits=logits, inplace=True))
        assert others[1].grad is logits
        torch.testing.assert_close(logits, got.grad, rtol=0, atol=0, equal_nan=True)
    for other in others:
        for one, two in zip(other[:4], got[:4], strict=True):
            torch.testing.assert_close(one, two, rtol=0, atol=0, equal_nan=True)


def assert_cpu_gradient(
    got: Tensor, want: Tensor, logprobs: Tensor, floor: Tensor | float = 0.0
) -> None:
    """Compare relative to the row's largest entry; `floor` [N, 1] is allowed in addition."""
    assert torch.equal(got.isnan(), want.isnan())
    error = (got.double() - want).nan_to_num(0.0).abs()
    largest = want.nan_to_num(0.0).abs().amax(-1, keepdim=True)
    tolerance = (3 * 2.0**-24 * logprobs.abs().nan_to_num(0.0)).clamp(2e-6, 1e-5).unsqueeze(-1)
    assert (error <= tolerance * largest + floor + torch.finfo(FP32).tiny).all()


def check_statistics(backend: Backend, given: dict[str, Any], upstream: StatsGradients) -> None:
    """Compare the statistics, and the gradient of the logits for `upstream`."""
    records, rest = operands(given)
    logits, softmax = records.logits, records.softmax
    want, want_grad = defined_statistics(
        logits, records.per_token.tokens, softmax, upstream, rest.get("ref_logits")
    )
    got = backend.statistics(given)
    assert_statistics(got, want)
    grad = backend.statistics_gradient(given, got, upstream)
    assert grad.dtype == logits.dtype
    if backend.name == "cpu" and grad.dtype == FP32 and not softmax.softcap:
        assert_cpu_gradient(grad, want_grad, want.logprobs.detach())
    else:
        assert_gradient(grad.flatten(0, -2), want_grad.flatten(0, -2))


def upstream_of(n: int, *, kl: bool = False) -> StatsGradients:
    """Draw derivatives by the statistics."""
    g = torch.Generator().manual_seed(5)
    logprobs, entropy, of_kl = torch.randn(3, n, generator=g)
    return StatsGradients(logprobs, entropy, of_kl if kl else None)


def with_reference(given: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Add a reference's logits, and the full KL."""
    n, vocab = given["logits"].shape
    ref = draw(n, vocab, given["logits"].dtype, seed=1)["logits"]
    return given | {"kl_estimator": "full", "ref_logits": ref, "kl_coef": 0.3} | options


# ----------------------------------------------------------------------------------------- the loss

MATRIX = [
    *(("cpu", vocab, FP32, "") for vocab in (3, 37, 2051)),
    *(("cpu", 37, FP32, change) for change in ("masked", "far")),
    *(("cpu", 2051, dtype, "masked") for dtype in (BF16, FP16)),
    *(pytest.param("triton", 37, FP32, change, marks=ON_A_GPU) for change in ("masked", "far")),
]


@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize(("backend", "vocab", "dtype", "change"), MATRIX, indirect=["backend"])
def test_each_term_equals_the_definition(
    term: str, backend: Backend, vocab: int, dtype: torch.dtype, change: str
) -> None:
    got = check_loss(backend, arguments_of(term, vocab, dtype, change))
    assert got.grad is not None
    assert got.grad.isfinite().all()


def without_some_gradients(**options: Any) -> dict[str, Any]:
    """One row has weight 0, and one has only derivatives of 0 apart from the KL's."""
    given = with_reference(draw(3, 507), **options)
    given["weights"][0] = 0.0
    given["advantages"][1] = 0.0
    return given


def ruled_out_by_both() -> dict[str, Any]:
    """By −inf, and by the lowest number from the first column on."""
    given = with_reference(draw(4, 2064), kl_coef=0.1)
    for row, lowest in enumerate((-torch.inf, LOWEST)):
        given["ref_logits"][row, :1500] = given["logits"][row, :1500] = lowest
    given["tokens"][:2] = 2000
    return given | {"weights": torch.tensor([1.0, 1.0, 0.0, 0.0])}


def capped(**options: Any) -> dict[str, Any]:
    given = draw(3, 2064, spread=20.0)
    given["logits"][0] *= 0.01
    return given | {"softcap": 15.0, "logit_scale": 0.7, "entropy_coef": 0.05} | options


def near_the_cap() -> dict[str, Any]:
    """tanh(3.8): the slope 1 − tanh² would be off by 1.6e-5."""
    given = draw(4, 50) | {"softcap": 30.0, "lowest_ratio": -math.inf, "highest_ratio": math.inf}
    given["logits"] = torch.linspace(90, 114, 50).repeat(4, 1)
    given["old_logprobs"] = torch.full((4,), -4.0)
    return given


def far_from_zero(level: float) -> dict[str, Any]:
    """The anchor's rounding error would overflow as an exponent: whole tiles take the careful loop
    of Triton's sweeps."""
    given = draw(3, 2064) | {"entropy_coef": 0.1, "temperature": 100.0}
    given["logits"][:2] = level
    given["logits"][1, 5] = level + 1e-3 * abs(level)
    given["tokens"][:2] = torch.tensor([7, 5])
    return given


LOSSES: dict[str, Callable[[], dict[str, Any]]] = {
    "full KL and entropy": lambda: with_reference(draw(3, 507), entropy_coef=0.01),
    "full KL, only reported": lambda: with_reference(draw(3, 507), kl_coef=0.0),
    "full KL, only reported, some gradients": lambda: without_some_gradients(kl_coef=0.0),
    "full KL without a gradient": lambda: without_some_gradients(need_grad=False),
    "fp16 without a gradient": lambda: draw(3, 507, FP16) | {"need_grad": False},
    "columns that policy and reference rule out": ruled_out_by_both,
    "soft-cap, temperatures": lambda: capped(temperature=torch.tensor([0.3, 1.0, 2.0])),
    "soft-cap, full KL": lambda: with_reference(capped()),
    "near the soft-cap": near_the_cap,
    "no rows": lambda: draw(0, 507),
    "one row": lambda: draw(1, 507),
    "a reference that starts at another alignment": lambda: with_reference(
        draw(3, 2064), ref_logits=torch.randn(3, 2065)[:, 1:]
    ),
    **{
        f"rows at {level:.0e}": lambda level=level: far_from_zero(level)  # type: ignore[misc]
        for level in (1e10, -1e13, 1e31)
    },
}


@pytest.mark.parametrize("case", LOSSES)
def test_the_loss_equals_the_definition(case: str, backend: Backend) -> None:
    got = check_loss(backend, LOSSES[case]())
    assert got.kl.isfinite().all()


@pytest.mark.parametrize("backend", [TRITON], indirect=True)
@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_kl_times_the_ratio_at_its_limits(estimator: str, backend: Backend) -> None:
    """Near the reference and far from it, up to e¹⁹; one ratio is clamped."""
    given = draw(5, 40) | {"kl_coef": 0.2, "kl_ratio_weighted": True, "kl_estimator": estimator}
    given["old_logprobs"][4] -= 25.0
    logprobs = logprobs_of(given["logits"], given["tokens"]).float()
    given["ref_logprobs"] = logprobs + torch.tensor([1e-4, -3.0, 19.0, -30.0, 1.0])
    check_loss(backend, given)


@pytest.mark.parametrize(
    ("vocab", "dtype"),
    [
        (3, BF16),
        (1000, FP32),
        (32000, BF16),
        (50257, BF16),
        (50257, FP32),
        pytest.param(151936, BF16, marks=pytest.mark.slow),
        pytest.param(262144, FP32, marks=pytest.mark.slow),
    ],
)
def test_vocabularies(vocab: int, dtype: torch.dtype, backend: Backend) -> None:
    """Padded columns entered the logsumexp if V was not a multiple of the block (verl 2656)."""
    given = draw(2, vocab, dtype)
    given["tokens"] = torch.tensor([0, vocab - 1])
    logprobs = logprobs_of(given["logits"], given["tokens"])
    given["old_logprobs"] = logprobs.float() + torch.tensor([0.1, -0.1])
    check_loss(backend, given)


def test_clipped_rows_have_no_gradient(backend: Backend) -> None:
    given = draw(2, 40)
    given["old_logprobs"] -= 3.0
    given["advantages"] = torch.tensor([1.0, 0.0])
    got = check_loss(backend, given)
    assert got.grad is not None
    assert (got.grad == 0).all()


def test_in_place_the_gradient_is_over_the_logits(backend: Backend) -> None:
    given = on(backend.device, draw(3, 2064))
    got = check_loss(backend, given, inplace=True)
    assert got.grad is not None
    assert got.grad.data_ptr() == given["logits"].data_ptr()


# ------------------------------------------------------------------------------ layouts of the rows


def cut(x: Tensor) -> tuple[Tensor, Tensor]:
    """logits[:, :-1] of [B, T + 1, V]: the rows of an odd vocabulary have two alignments."""
    whole = x.new_full((len(x) // 2, 3, x.shape[1]), torch.nan)
    return whole, whole[:, :-1]


def gapped(x: Tensor) -> tuple[Tensor, Tensor]:
    whole = x.new_full((len(x), x.shape[1] + 10), torch.nan)
    return whole, whole[:, : x.shape[1]]


def shifted(x: Tensor) -> tuple[Tensor, Tensor]:
    whole = x.new_full((len(x), x.shape[1] + 5), torch.nan)
    return whole, whole[:, 3:-2]


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize(
    ("layout", "vocab", "dtype"),
    [(cut, 40, FP32), (gapped, 40, FP32), (cut, 2061, BF16), (shifted, 5003, BF16)],
)
def test_rows_of_a_view(
    layout: Callable[[Tensor], tuple[Tensor, Tensor]],
    vocab: int,
    dtype: torch.dtype,
    inplace: bool,
    backend: Backend,
) -> None:
    """Nothing outside the view is read or written."""
    given = on(backend.device, draw(6, vocab, dtype))
    whole, view = layout(given["logits"])
    view.copy_(given["logits"].view(view.shape))
    got = check_loss(backend, given | {"logits": view}, inplace=inplace)
    assert got.grad is not None
    if backend.name == "cpu":  # Triton's sums depend on the alignment
        dense = backend.loss(given)
        assert torch.equal(got.sums, dense.sums)
        assert torch.equal(got.grad.reshape(6, -1), dense.grad)
    view.fill_(torch.nan)
    assert whole.isnan().all()


@pytest.mark.parametrize(
    ("n", "vocab", "dtype"), [(5, 2061, FP32), (9, 7, BF16), (9, 5003, BF16), (9, 2051, BF16)]
)
def test_rows_at_every_offset_from_16_bytes(
    n: int, vocab: int, dtype: torch.dtype, backend: Backend
) -> None:
    """The token is in the first part, in a whole tile and in the last column; a row of 7 is shorter
    than a part. The rows of 2051 have a reference."""
    given = draw(n, vocab, dtype)
    given["tokens"][:4] = torch.tensor([0, vocab - 1, vocab // 2, 1])
    if vocab == 2051:
        given = with_reference(given)
        check_loss(backend, given, softcap=15.0)
    else:
        check_loss(backend, given)
    if dtype == BF16:
        check_statistics(backend, given, upstream_of(n, kl=vocab == 2051))


@pytest.mark.skipif(HAS_GPU, reason="test_on_a_gpu.py does this with real memory")
def test_offsets_do_not_overflow_int32(backend: Backend) -> None:
    """int32 offsets overflowed at N·V > 2³¹ (fla 1082): rows 2³⁰ elements apart."""
    apart, n, vocab = 2**30, 4, 40
    # Untouched anonymous memory is never allocated.
    memory = mmap.mmap(-1, 2 * ((n - 1) * apart + vocab), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    far = torch.frombuffer(memory, dtype=BF16).as_strided((n, vocab), (apart, 1))
    given = draw(n, vocab, BF16)
    near = backend.loss(given)
    far.copy_(given["logits"])
    got = backend.loss(given | {"logits": far}, inplace=True)
    assert near.grad is not None
    assert torch.equal(got.logprobs, near.logprobs)
    assert torch.equal(far, near.grad)


def test_the_same_rows_give_the_same_bits(backend: Backend) -> None:
    """In any program and any split of the rows. In Triton, for rows that start on 16 bytes: others
    are swept from the preceding boundary, so their position groups their sums."""
    given = draw(7, 512)
    whole, again = backend.loss(given), backend.loss(given)
    assert torch.equal(whole.sums, again.sums)
    assert torch.equal(whole.grad, again.grad)
    part = {name: x[3:].clone() for name, x in given.items()}
    assert torch.equal(backend.loss(part).grad, whole.grad[3:])


@pytest.mark.skipif(HAS_GPU, reason="the target is simulated")
def test_wavefronts_of_64_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half as many wavefronts give a row's tiles the same threads, and AMD's compiler has no option
    for registers. The interpreter does not show communication between lanes."""
    backend = triton()
    from fastppo_kernels.triton import launch, views

    for module in (launch, views):
        monkeypatch.setattr(module, "target", lambda: launch.Target("hip", 64))
    given = draw(3, 2064)
    decided = views.launch_over(given["logits"], PLAIN, sweeps=2)
    assert decided.options["cut"].lanes.value == 64 * decided.options["num_warps"]
    assert "maxnreg" not in decided.options
    check_loss(backend, given, entropy_coef=0.1)
    check_statistics(backend, with_reference(given), upstream_of(3, kl=True))


# ----------------------------------------------------------------------------------- the statistics

STATISTICS = [
    *(
        ("cpu", term, upstream, dtype)
        for term in ("policy", "full KL", "everything")
        for upstream in ("all", "some rows", "logprob alone")
        for dtype in (FP32, BF16, FP16)
    ),
    *(
        pytest.param("triton", *case, marks=ON_A_GPU)
        for case in (
            ("policy", "all", FP16),
            ("full KL", "some rows", FP32),
            ("everything", "all", FP32),
        )
    ),
]


@pytest.mark.parametrize(("backend", "term", "upstream", "dtype"), STATISTICS, indirect=["backend"])
def test_statistics_and_gradients_equal_the_definition(
    backend: Backend, term: str, upstream: str, dtype: torch.dtype
) -> None:
    given = arguments_of(term, 2051 if backend.name == "cpu" else 1031, dtype)
    grads = upstream_of(N, kl="ref_logits" in given)
    if upstream == "some rows":
        counted = torch.arange(N) % 2 == 1
        grads = map_tensors(lambda x: x * counted, grads)
    if upstream == "logprob alone":
        grads = StatsGradients(grads.logprobs)
    check_statistics(backend, given, grads)


@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("kl_alone", [False, True])
def test_peaked_rows_with_a_reference(
    softcap: float | None, kl_alone: bool, backend: Backend
) -> None:
    """The token's share of the KL, t − r minus its mean, keeps its digits too; and the statistics
    return a soft-cap's row maximum unchanged."""
    given = with_reference(draw(3, 2061, spread=1.0), softcap=softcap)
    given["ref_logits"] = draw(3, 2061, seed=1, spread=1.0)["logits"] + given["logits"]
    highest = given["logits"].amax(-1, keepdim=True)
    nats = torch.tensor([[10.0], [12.0], [14.0]])
    given["logits"].scatter_(1, given["tokens"][:, None], highest + nats)
    upstream = upstream_of(3, kl=True)
    if kl_alone:
        upstream = StatsGradients(torch.zeros(3), None, torch.ones(3))
    check_statistics(backend, given, upstream)
    if not kl_alone:
        check_loss(backend, given)


@pytest.mark.parametrize("offset", [-1000.0, 1000.0])
def test_a_reference_far_from_the_logits(offset: float, backend: Backend) -> None:
    """t − r is computed from x − x_ref and the maxima's difference, each rounded at its size: in
    total off by 2⁻²³ of the distance, like moving the logits by one unit in the last place."""
    given = with_reference(draw(3, 2064))
    given["logits"] += offset
    x, tokens, ref = given["logits"], given["tokens"], given["ref_logits"]
    upstream = StatsGradients(torch.zeros(3), None, torch.ones(3))
    want, want_grad = defined_statistics(x, tokens, PLAIN, upstream, ref)
    apart = 2.0**-23 * (x - ref).abs().amax(-1)
    got = backend.statistics(given)
    assert_statistic(got.logprobs, want.logprobs, "logprobs")
    assert ((got.kl.cpu() - want.kl).abs() <= 1e-5 + apart).all()
    grad = backend.statistics_gradient(given, got, upstream)
    assert_gradient(grad, want_grad, allowance=2 * apart[:, None] * x.double().softmax(-1))


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_a_vocabulary_of_one(softcap: float | None, backend: Backend) -> None:
    x, ref = torch.randn(2, 3, 1)
    given = {"logits": x, "tokens": torch.zeros(3, dtype=torch.int64), "ref_logits": ref}
    given |= dict.fromkeys(("old_logprobs", "advantages", "weights"), torch.ones(3))
    check_statistics(backend, given | {"softcap": softcap}, upstream_of(3, kl=True))


def test_the_entropys_gradient_from_saved_statistics_of_nearly_equal_logits() -> None:
    """It is p·(μ − t) with μ = log S − entropy. fp32 keeps 7.6 nats to 2.4e-7 each, against about
    3.4 standard deviations of 0.01."""
    given = draw(5, 2064, spread=0.01)
    logits, tokens = given["logits"], given["tokens"]
    grads = StatsGradients(torch.zeros(5), torch.ones(5))
    _, want = defined_statistics(logits, tokens, PLAIN, grads)
    stats = cpu_backend.token_stats(logits, tokens, PLAIN)
    got = cpu_backend.token_stats_backward(grads, logits, tokens, stats, PLAIN)
    largest = want.abs().amax(-1, keepdim=True)
    assert ((got - want).abs() <= 1.5e-5 * largest).all()


@pytest.mark.parametrize("nats", [12.0, 20.0])
def test_one_minus_p_keeps_its_digits_on_a_cpu(nats: float) -> None:
    given = draw(N, 2051)
    peaked(given["logits"], given["tokens"], nats)
    want = definition.token_stats(given["logits"].double(), given["tokens"], PLAIN)
    got = cpu_backend.token_stats(given["logits"], given["tokens"], PLAIN)
    # At 20 nats a logprob is -2e-9. As a difference of scores it has 2e-6 of error in fp64 too.
    logprobs = torch.log1p(-want.p_others)
    torch.testing.assert_close(got.logprobs.double(), logprobs, rtol=2e-6, atol=0)
    for name in ("entropy", "p_others"):
        torch.testing.assert_close(
            getattr(got, name).double(), getattr(want, name), rtol=2e-6, atol=0
        )


# ---------------------------------------------------------------------------------- special numbers


@pytest.mark.parametrize(("case", "softcap"), EDGES)
def test_rows_at_the_edge_of_the_numbers(
    case: str, softcap: float | None, backend: Backend
) -> None:
    given, upstream = at_the_edge(case, softcap)
    check_loss(backend, given)
    check_statistics(backend, given, upstream)


@pytest.mark.parametrize("level", [1e10, -1e13, 1e31])
def test_statistics_of_rows_far_from_zero(level: float, backend: Backend) -> None:
    for upstream in (upstream_of(3), StatsGradients(torch.ones(3))):
        check_statistics(backend, far_from_zero(level), upstream)


def test_tokens_at_both_ends_of_a_block_of_the_cpu() -> None:
    given = draw(4, 2 * BLOCK)
    given["tokens"] = torch.tensor([0, BLOCK - 1, BLOCK, 2 * BLOCK - 1])
    given["old_logprobs"] = logprobs_of(given["logits"], given["tokens"]).float() + 0.1
    check_loss(CPU, given)
    check_statistics(CPU, given, upstream_of(4))


@pytest.mark.parametrize("kind", ["flat", "one peak over a flat row", "spread"])
def test_a_cpus_sums_over_a_large_vocabulary_keep_their_digits(kind: str) -> None:
    """152064 equal terms, where a running sum rounds in the same direction each time."""
    given = draw(2, 152064, spread=5.0) | {"entropy_coef": 0.5}
    if kind != "spread":
        given["logits"][:] = 0.1
    if kind == "one peak over a flat row":
        given["logits"][:, 7] = 12.3
        given["tokens"] = torch.tensor([7, 11])
    given["old_logprobs"] = logprobs_of(given["logits"], given["tokens"]).float() + 0.1
    check_loss(CPU, given)
    check_statistics(CPU, given, StatsGradients(torch.ones(2), torch.ones(2)))


def test_a_token_that_is_masked_out(backend: Backend) -> None:
    """Its logprob is −1e30, as in the definition: finite, and beyond any clip."""
    given = draw(2, 507)
    given["logits"][0, given["tokens"][0]] = -torch.inf
    got, on_a_cpu = backend.loss(given), cpu_backend.ppo_loss(*operands(given)[0])
    torch.testing.assert_close(got.logprobs.cpu().double(), defined_loss(given).logprobs)
    torch.testing.assert_close(got.grad.cpu(), on_a_cpu.grad)
    # The logprob's derivative is [j = y] − p_j as for any token; the definition's clamp has none.
    x, tokens = given["logits"], given["tokens"]
    slopes = torch.nn.functional.one_hot(tokens, 507) - x.double().softmax(-1)
    stats = backend.statistics(given)
    grad = backend.statistics_gradient(given, stats, StatsGradients(torch.ones(2)))
    assert_gradient(grad, slopes)


def test_a_column_that_only_the_reference_rules_out(backend: Backend) -> None:
    """It makes the KL infinite, for the token or another column, first or last in its lane. If only
    reported, it does not affect the loss and its gradient."""
    given = with_reference(draw(4, 2064), kl_coef=0.0)
    ref = given["ref_logits"]
    ref[0, 5], ref[1, 2040], ref[2, :1500] = -torch.inf, LOWEST, LOWEST
    ref[3, given["tokens"][3]] = -torch.inf
    got = check_loss(backend, given)
    assert (got.kl == torch.inf).all()
    assert got.sums[0].isfinite()
    assert got.grad is not None
    assert got.grad.isfinite().all()


def test_an_infinite_kl_with_a_coefficient_affects_only_its_row(backend: Backend) -> None:
    """The definition's row has only the policy term's gradient, with an infinite loss."""
    given = with_reference(draw(3, 507))
    given["ref_logits"][1, 100] = -torch.inf
    got = backend.loss(given)
    assert got.kl.isinf().tolist() == defined_loss(given).kl.isinf().tolist()
    assert got.kl.isinf().tolist() == [False, True, False]
    assert got.sums[0].isinf()
    assert got.grad is not None
    assert got.grad.isfinite().all(-1).tolist() == [True, False, True]


def test_an_infinite_reference_logprob_that_is_only_reported(backend: Backend) -> None:
    """It does not affect the gradient."""
    got = backend.loss(draw(2, 37), ref_logprobs=torch.tensor([-math.inf, -3.0]))
    assert got.grad is not None
    assert got.grad.isfinite().all()


@pytest.mark.parametrize(("bad", "vocab"), [(torch.nan, 2064), (torch.nan, 507), (torch.inf, 2061)])
def test_a_broken_row_is_nan(bad: float, vocab: int, backend: Backend) -> None:
    """NaN or +inf in one logit makes loss and gradient of its row NaN, clipped or not, and of no
    other."""
    given = draw(3, vocab)
    given["logits"][1, 100] = bad
    given["tokens"][1] = 3
    got = backend.loss(given)
    assert got.logprobs.isnan().tolist() == [False, True, False]
    assert got.grad is not None
    assert got.grad.isnan().any(-1).tolist() == [False, True, False]
    assert got.sums[0].isnan()


@pytest.mark.parametrize("operand", ["old_logprobs", "advantages", "importance_weights"])
def test_a_nan_shows_in_loss_gradient_and_metrics(operand: str, backend: Backend) -> None:
    """Clamps must not replace it by a number, because the trainer's guard looks for it."""
    given = draw(4, 37) | {"importance_weights": torch.ones(4)}
    given[operand][1] = torch.nan
    got = backend.loss(given)
    sums = Sums(*got.sums)
    assert sums.loss.isnan()
    assert got.grad is not None
    assert got.grad[1].isnan().all()
    assert got.grad[[0, 2, 3]].isfinite().all()
    assert bool(sums.ratio_max.isnan()) == (operand == "old_logprobs")


@pytest.mark.parametrize("backend", [TRITON], indirect=True)
def test_a_token_outside_the_vocabulary_reads_nothing(backend: Backend) -> None:
    """If checking would wait for the GPU, the result is NaN without a stray read."""
    given = draw(4, 507)
    given["tokens"][:3] = torch.tensor([-100, 507, -(2**62)])
    assert backend.loss(given).logprobs.isnan().tolist() == [True, True, True, False]


@pytest.mark.parametrize(
    ("vocab", "dtype", "references"), [(507, BF16, range(6)), (2061, FP32, (0, 2, 3))]
)
def test_normalizers_of_invalid_rows(
    vocab: int, dtype: torch.dtype, references: Iterable[int], backend: Backend
) -> None:
    """−inf for a row of −inf only, NaN for a row with NaN, for the policy and the reference,
    whatever the other row is. Every pair in rows shorter than a tile; in longer ones each kind with
    itself, with a distribution and with another kind."""
    logits = torch.randn(6, vocab)
    logits[0], logits[1, 100], logits[2, 7] = -torch.inf, torch.nan, torch.inf
    logits[3, 7], logits[3, 100] = torch.inf, torch.nan
    logits[4] = -torch.inf
    logits[4, 100] = torch.nan
    given = draw(6, vocab) | {"logits": logits.to(dtype), "tokens": torch.arange(6)}
    for turned in references:
        given["ref_logits"] = given["logits"].roll(turned, 0)
        want = definition.token_stats(
            given["logits"], given["tokens"], PLAIN, ref_logits=given["ref_logits"]
        )
        got = backend.statistics(given)
        assert_statistic(got.normalizer, want.normalizer, "normalizer")
        assert_statistic(got.ref_normalizer, want.ref_normalizer, "ref_normalizer")
        assert want.normalizer[0].tolist() == [-torch.inf, -torch.inf]
        assert want.normalizer[[1, 3, 4]].isnan().all()


def test_an_identical_reference_has_no_kl(backend: Backend) -> None:
    """Within fp32's rounding of log S, since the policy's sum adds the token last."""
    given = with_reference(draw(3, 2064), kl_coef=1.0)
    given["advantages"][:] = 0.0
    got = backend.loss(given, ref_logits=given["logits"])
    assert got.grad is not None
    assert got.kl.abs().max() < 5e-7
    assert got.grad.abs().max() < 5e-7


@pytest.mark.parametrize("distance", [1e-2, 1e-4])
def test_the_full_kl_keeps_its_digits_near_the_reference(distance: float, backend: Backend) -> None:
    """Training starts there; t − r of two rounded rows would be off by 1e-3 of the gradient."""
    given = draw(4, 2064) | {"kl_estimator": "full", "kl_coef": 1.0}
    given["advantages"][:] = 0.0
    given["ref_logits"] = given["logits"] + distance * torch.randn(4, 2064)
    want = defined_loss(given).grad
    got = backend.loss(given).grad
    assert want is not None
    assert got is not None
    largest = want.abs().amax(-1, keepdim=True)
    assert ((got.double().cpu() - want).abs() / largest).max() < 1e-5


@pytest.mark.parametrize("below", [3.0, 12.0, 19.0, 30.0])
def test_the_gradient_of_ratio_k3_keeps_its_digits_below_the_reference(
    below: float, backend: Backend
) -> None:
    """e^{−d} cancels between the estimate and its slope: at 19 nats fp32 would have no digits."""
    given = draw(N, 37) | {"kl_coef": 0.2, "kl_ratio_weighted": True}
    given["advantages"][:] = 0.0
    given["ref_logprobs"] = logprobs_of(given["logits"], given["tokens"]).float() + below
    want = defined_loss(given).grad
    got = backend.loss(given).grad
    assert want is not None
    assert got is not None
    assert_gradient(got, want)


# ------------------------------------------------------------------------------------- combinations


@st.composite
def combinations(draw_: Callable[..., Any]) -> dict[str, Any]:
    n = draw_(st.integers(1, 4))
    vocab = draw_(st.sampled_from([1, 2, 3, 64, 507, 1000, 2048]))
    dtype = draw_(st.sampled_from([FP32, BF16]))
    seed = draw_(st.integers(0, 2**16))
    given = draw(n, vocab, dtype, seed=seed)
    g = torch.Generator().manual_seed(seed + 1)
    if draw_(st.booleans()):
        given["weights"][torch.rand(n, generator=g) < 0.4] = 0.0
    softcap = draw_(st.sampled_from([None, None, 10.0]))
    # Not both: far beyond its cap, the definition's slope 1 − tanh² is 0 even in fp64.
    offset = draw_(st.sampled_from([0.0, 0.0, -100.0, 1000.0])) if softcap is None else 0.0
    given["logits"] = (given["logits"].float() + offset).to(dtype)
    given |= {
        "lowest_ratio": draw_(st.sampled_from([1.0, 0.8, -math.inf])),
        "highest_ratio": draw_(st.sampled_from([1.0, 1.28, math.inf])),
        "dual_clip": draw_(st.sampled_from([None, 3.0])),
        "policy_term": draw_(st.sampled_from(["clip", "clip", *POLICY_TERMS])),
        "tau_positive": 1.0,
        "tau_negative": 1.05,
        "kl_coef": draw_(st.sampled_from([0.0, 0.1])),
        "kl_estimator": draw_(st.sampled_from(["k1", "k2", "k3", "full"])),
        "entropy_coef": draw_(st.sampled_from([0.0, 0.01, -0.5])),
        "logit_scale": draw_(st.sampled_from([1.0, 0.25])),
        "softcap": softcap,
        "temperature": draw_(st.sampled_from([1.0, 0.3, 2.0, "per token"])),
        "need_grad": draw_(st.sampled_from([True, True, False])),
        "inplace": draw_(st.booleans()),
    }
    if given["policy_term"].startswith("dppo"):  # fp32 rounds small divergences to 0
        given["lowest_ratio"] = min(given["lowest_ratio"], 0.99)
        given["highest_ratio"] = max(given["highest_ratio"], 1.01)
    if given["temperature"] == "per token":
        given["temperature"] = torch.rand(n, generator=g) * 1.7 + 0.3
    if draw_(st.booleans()):
        given["importance_weights"] = torch.rand(n, generator=g) * 2
    # Old policy and reference near the policy of these options.
    exact, _ = operands(in_fp64(given))
    logprobs = logprobs_of(given["logits"], given["tokens"], exact.softmax)
    noise = torch.randn(2, n, generator=g)
    given["old_logprobs"] = (logprobs + 0.3 * noise[0]).float()
    if draw_(st.booleans()) or (given["kl_coef"] and given["kl_estimator"] != "full"):
        given["ref_logprobs"] = (logprobs + noise[1]).float()
    if given["kl_estimator"] == "full":
        given["ref_logits"] = given["logits"].float() + torch.randn(n, vocab, generator=g)
    return given


# On a GPU nearly every example compiles its own kernel, seconds each.
@pytest.mark.parametrize("name", ["cpu", TRITON])
@settings(max_examples=30 if HAS_GPU else 40, deadline=None, derandomize=True)
@given_by(given=combinations())
def test_combinations(name: str, given: dict[str, Any]) -> None:
    backend = CPU if name == "cpu" else triton()
    check_loss(backend, given | {"logits": given["logits"].clone()})


# --------------------------------------------------------------------------------- public functions


def public_loss(backend: str, logits: Tensor, **options: Any) -> fastppo.PPOLoss:
    shape = logits.shape[:-1]
    n, vocab = shape.numel(), logits.shape[-1]
    tokens = (torch.arange(n, device=logits.device) * 7 % vocab).view(shape)
    advantages = torch.linspace(-1, 1, n, device=logits.device).view(shape)
    old = torch.full(shape, -3.0, device=logits.device)
    return fastppo.ppo_loss(
        logits, tokens, old, advantages, clip_ratio=0.5, backend=backend, **options
    )


def leaf(backend: Backend) -> Tensor:
    g = torch.Generator().manual_seed(3)
    return torch.randn(2, 3, 37, generator=g).to(backend.device).requires_grad_()


def test_the_public_loss_agrees_with_the_torch_backend_in_fp64(backend: Backend) -> None:
    ref_logprobs = torch.full((2, 3), -3.5, device=backend.device)
    options = {"entropy_coef": 0.1, "kl_coef": 0.1, "ref_logprobs": ref_logprobs}
    x = leaf(backend)
    got = public_loss(backend.name, x, **options)
    want = public_loss("torch", x.double(), **in_fp64(options))
    assert_statistic(got.loss, want.loss, "loss")
    assert got.metrics.keys() == want.metrics.keys()
    for name, value in got.metrics.items():
        assert_statistic(value, want.metrics[name], name)
    (grad,) = torch.autograd.grad(got.loss, x)
    (want_grad,) = torch.autograd.grad(want.loss, x)
    assert_gradient(grad.view(6, 37), want_grad.view(6, 37))


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_a_retained_graph(factor: float, backend: Backend) -> None:
    """A leaf adopted the saved gradient and added to it: three backwards gave four gradients."""
    x = leaf(backend)
    (grad,) = torch.autograd.grad(public_loss(backend.name, x).loss, x)
    loss = public_loss(backend.name, x).loss * factor
    for _ in range(2):
        loss.backward(retain_graph=True)
    loss.backward()
    torch.testing.assert_close(x.grad, 3 * factor * grad)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("strides", [(0, 1), (36, 1)], ids=["expanded", "in part"])
def test_overlapping_rows_are_refused_in_place(strides: tuple[int, int], backend: Backend) -> None:
    x = torch.randn(4 * 37, device=backend.device, requires_grad=True)
    with pytest.raises(ValueError, match="inplace"):
        public_loss(backend.name, x.as_strided((4, 37), strides), inplace=True)


@pytest.mark.parametrize("backend", [TRITON], indirect=True)
def test_scaling_by_one_changes_nothing(backend: Backend) -> None:
    x = torch.randn(3, 507, device=backend.device)
    before = x.clone()
    assert backend.functions.scale_(x, torch.ones((), device=backend.device)) is x
    assert torch.equal(x, before)


@pytest.mark.parametrize("backend", [TRITON], indirect=True)
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_scaling(dtype: torch.dtype, backend: Backend) -> None:
    third = torch.tensor(1 / 3)
    for x in (torch.randn(9000), torch.randn(3, 507), torch.randn(2, 3, 20)[:, :-1]):
        x = x.to(backend.device, dtype)
        want = x.double() * third.double()
        backend.functions.scale_(x, third.to(backend.device))
        # One unit: the interpreter truncates to bf16, and a GPU rounds to nearest.
        assert_gradient(x.reshape(1, -1), want.reshape(1, -1), one_signed=True)


@pytest.mark.parametrize("backend", [TRITON], indirect=True)
def test_triton_refuses_unsupported_input(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="float64"):
        fastppo.token_logprobs(torch.randn(2, 7).double(), tokens, backend="triton")
    with pytest.raises(ValueError, match="float64"):
        backend.functions.token_stats(torch.randn(2, 7).double(), tokens, Softmax())
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        fastppo.token_logprobs(torch.randn(2, 7), tokens, backend="triton")
