"""The row kernels equal the definition in fp64, in Triton's interpreter.

Tolerances: see rows.py.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from fastppo_kernels import cpu_backend, definition
from fastppo_kernels.records import POLICY_TERMS, PPORows, Softmax, StatsGradients, Sums
from hypothesis import given, settings
from hypothesis import strategies as st
from rows import (
    EDGES,
    PLAIN,
    TERMS,
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
)
from torch import Tensor

import fastppo

pytest.importorskip("triton", reason="Triton is not installed")

from fastppo_kernels import triton_backend
from fastppo_kernels.triton import launch
from fastppo_kernels.triton import views as triton_views
from fastppo_kernels.triton.launch import DTYPES

pytestmark = [
    # NumPy warns about intended results: differences to the initial maximum overflow to −inf and
    # are clamped, and broken rows are NaN.
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
    pytest.mark.filterwarnings("ignore:All-NaN:RuntimeWarning"),
]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cuda":  # the same tests run the compiled kernels
    pytestmark.append(pytest.mark.gpu)


def kernel_loss(arguments: dict[str, Any], **options: Any) -> PPORows:
    """Return the kernel's loss for flat keywords."""
    given, rest = operands(on(DEVICE, arguments | options))
    return triton_backend.ppo_loss(*given, **rest)


def defined_loss(arguments: dict[str, Any], **options: Any) -> PPORows:
    """Return the definition's loss in fp64."""
    given, rest = operands(in_fp64(on("cpu", arguments | options)))
    found = definition.ppo_loss(*given, ref_logits=rest.get("ref_logits"))
    return found if rest.get("need_grad", True) else found._replace(grad=None)


def check_loss(arguments: dict[str, Any], **options: Any) -> PPORows:
    """Compare the kernel's ppo_loss with the definition in fp64 on the same numbers."""
    logits = arguments["logits"]
    want = defined_loss(arguments, **options)
    got = kernel_loss(arguments, **options)
    one_signed = not options.get("entropy_coef") and options.get("kl_estimator") != "full"
    assert_loss(got, want, one_signed=one_signed)
    if got.grad is not None:
        assert got.grad.dtype == logits.dtype
        assert got.grad.shape == logits.shape
    return got


def check_stats(
    logits: Tensor,
    tokens: Tensor,
    softmax: Softmax = PLAIN,
    *,
    upstream: StatsGradients,
    ref_logits: Tensor | None = None,
) -> None:
    """Compare token_stats and its backward pass for gradients of (logprobs, entropy, KL)."""

    def moved(record: Any, dtype: torch.dtype, device: str) -> Any:
        return type(record)(*(x.to(device, dtype) if isinstance(x, Tensor) else x for x in record))

    want, want_grad = defined_statistics(logits, tokens, softmax, upstream, ref_logits)
    softmax = moved(softmax, torch.float32, DEVICE)
    ref = None if ref_logits is None else ref_logits.to(DEVICE)
    given = (logits.to(DEVICE), tokens.to(DEVICE))
    got = triton_backend.token_stats(*given, softmax, ref_logits=ref)
    assert_statistics(got, want)
    got_grad = triton_backend.token_stats_backward(
        moved(upstream, torch.float32, DEVICE), *given, got, softmax, ref_logits=ref
    )
    assert got_grad.dtype == logits.dtype
    assert_gradient(got_grad.flatten(0, -2), want_grad.flatten(0, -2))


# ------------------------------------------------------------------------------------------ paths


@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize("change", ["masked", "far"])
def test_each_term_equals_the_definition(term: str, change: str) -> None:
    got = check_loss(arguments_of(term, change=change))
    assert got.grad is not None
    assert got.grad.isfinite().all()


def test_unaligned_rows() -> None:
    """Every offset from the boundary; the token in the first part, in a whole tile, in the last
    column; a row shorter than a part."""
    for n, dtype, vocab in ((5, torch.float32, 2061), (9, torch.bfloat16, 7)):
        arguments = draw(n, vocab, dtype)
        arguments["tokens"][:4] = torch.tensor([0, vocab - 1, vocab // 2, 1])
        check_loss(arguments)
    arguments = draw(9, 5003, torch.bfloat16)
    arguments["tokens"][:4] = torch.tensor([0, 5002, 2501, 1])
    check_loss(arguments)
    check_stats(arguments["logits"], arguments["tokens"], upstream=_upstream(9))
    small = draw(9, 2051, torch.bfloat16)
    ref = draw(9, 2051, torch.bfloat16, seed=1)["logits"]
    check_loss(small, kl_estimator="full", ref_logits=ref, kl_coef=0.3, softcap=15.0)
    check_stats(small["logits"], small["tokens"], upstream=_upstream(9, kl=True), ref_logits=ref)
    shifted = torch.zeros(9, 5008, dtype=torch.bfloat16, device=DEVICE)[:, 3:5006]
    shifted.copy_(arguments["logits"])
    check_loss(arguments | {"logits": shifted}, inplace=True)


def test_rows_of_different_alignment() -> None:
    """The dense gradient's rows, or the reference's, have another alignment."""
    arguments = draw(6, 2061, torch.bfloat16)
    wide = torch.randn(3, 3, 2061, device=DEVICE).bfloat16()
    wide[:, :-1] = arguments["logits"].view(3, 2, 2061)
    check_loss(arguments | {"logits": wide[:, :-1]})
    arguments, ref = draw(3, 2064), torch.randn(3, 2065, device=DEVICE)[:, 1:]
    check_loss(arguments, kl_estimator="full", ref_logits=ref, kl_coef=0.3)


def test_in_place() -> None:
    arguments = draw(3, 2064)
    arguments["logits"] = arguments["logits"].to(DEVICE)
    got = check_loss(arguments, inplace=True)
    assert got.grad is not None
    assert got.grad.data_ptr() == arguments["logits"].data_ptr()


def test_clipped() -> None:
    arguments = draw(2, 40)
    arguments["old_logprobs"] -= 3.0
    arguments["advantages"] = torch.tensor([1.0, 0.0])
    got = check_loss(arguments)
    assert got.grad is not None
    assert (got.grad == 0).all()


def test_times_the_ratio() -> None:
    arguments = draw(5, 40)
    arguments["old_logprobs"][4] -= 25.0  # where the ratio is clamped
    options: dict[str, Any] = {"kl_coef": 0.2, "kl_ratio_weighted": True}
    logprobs = logprobs_of(arguments["logits"], arguments["tokens"]).float()
    options["ref_logprobs"] = logprobs + torch.tensor([1e-4, -3.0, 19.0, -30.0, 1.0])
    check_loss(arguments, kl_estimator="k3", **options)
    check_loss(arguments, kl_estimator="k1", **options)


def test_full() -> None:
    options: dict[str, Any] = {"kl_estimator": "full", "ref_logits": draw(3, 507, seed=1)["logits"]}
    check_loss(draw(3, 507), kl_coef=0.3, entropy_coef=0.01, **options)
    check_loss(draw(3, 507), kl_coef=0.0, **options)
    # A row of weight 0, and one whose derivatives are all 0.
    arguments = draw(3, 507)
    arguments["weights"][0] = 0.0
    arguments["advantages"][1] = 0.0
    check_loss(arguments, kl_coef=0.0, **options)
    check_loss(arguments, kl_coef=0.3, need_grad=False, **options)


def test_ruled_out() -> None:
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
    # By the reference only: an infinite KL, for the token or another column, first or last in its
    # lane. If only reported, it does not affect the loss and its gradient.
    ref = draw(4, 2064, seed=1)["logits"]
    ref[0, 5], ref[1, 2040], ref[2, :1500] = -torch.inf, lowest, lowest
    ref[3, arguments["tokens"][3]] = -torch.inf
    got = check_loss(draw(4, 2064), kl_estimator="full", ref_logits=ref, kl_coef=0.0)
    assert (got.kl == torch.inf).all()
    assert got.sums[0].isfinite()


def test_capped() -> None:
    arguments = draw(3, 2064, spread=20.0)
    arguments["logits"][0] *= 0.01
    options = {"softcap": 15.0, "logit_scale": 0.7, "entropy_coef": 0.05}
    check_loss(arguments, temperature=torch.tensor([0.3, 1.0, 2.0]), **options)
    ref = draw(3, 2064, seed=1, spread=20.0)["logits"]
    check_loss(arguments, kl_estimator="full", ref_logits=ref, kl_coef=0.3, **options)


def test_cut() -> None:
    arguments = draw(6, 40)
    padded = torch.randn(3, 3, 40, device=DEVICE)  # moved first: moving makes a view contiguous
    padded[:, :-1] = arguments["logits"].view(3, 2, 40)
    check_loss(arguments | {"logits": padded[:, :-1]})
    gapped = torch.randn(6, 50, device=DEVICE)
    gapped[:, :40] = arguments["logits"]
    check_loss(arguments | {"logits": gapped[:, :40]})


def _upstream(n: int, *, kl: bool = False) -> StatsGradients:
    g = torch.Generator().manual_seed(5)
    logprobs, entropy, of_kl = torch.randn(3, n, generator=g)
    return StatsGradients(logprobs, entropy, of_kl if kl else None)


def test_statistics_reference() -> None:
    arguments, ref = draw(3, 2064), draw(3, 2064, seed=1)["logits"]
    x, tokens = arguments["logits"], arguments["tokens"]
    upstream = StatsGradients(*(g * torch.tensor([1.0, 0.0, 1.0]) for g in _upstream(3, kl=True)))
    check_stats(x, tokens, upstream=upstream, ref_logits=ref)
    capped = Softmax(temperatures=torch.tensor([0.5, 1.0, 2.0]), softcap=5.0)
    check_stats(x, tokens, capped, upstream=_upstream(3, kl=True), ref_logits=ref)


def test_scale_by_one() -> None:
    x = torch.randn(3, 507, device=DEVICE)
    before = x.clone()
    assert triton_backend.scale_(x, torch.ones((), device=DEVICE)) is x
    assert torch.equal(x, before)


def test_scale() -> None:
    third = torch.tensor(1 / 3)
    for dtype in DTYPES:
        for x in (torch.randn(9000), torch.randn(3, 507), torch.randn(2, 3, 20)[:, :-1]):
            x = x.to(DEVICE, dtype)
            want = x.double() * third.double()
            triton_backend.scale_(x, third.to(DEVICE))
            # One unit: the interpreter truncates to bf16, and a GPU rounds to nearest.
            assert_gradient(x.reshape(1, -1), want.reshape(1, -1), one_signed=True)


# ----------------------------------------------------------------------------------------- shapes


@pytest.mark.parametrize(
    ("vocab", "dtype"),
    [
        (3, torch.bfloat16),
        (1000, torch.float32),
        (32000, torch.bfloat16),
        (50257, torch.bfloat16),
        (50257, torch.float32),
        pytest.param(151936, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(262144, torch.float32, marks=pytest.mark.slow),
    ],
)
def test_vocabularies(vocab: int, dtype: torch.dtype) -> None:
    """Padded columns entered the logsumexp if V was not a multiple of the block (verl 2656)."""
    arguments = draw(2, vocab, dtype)
    arguments["tokens"] = torch.tensor([0, vocab - 1])
    logprobs = logprobs_of(arguments["logits"], arguments["tokens"])
    arguments["old_logprobs"] = logprobs.float() + torch.tensor([0.1, -0.1])
    check_loss(arguments)


@pytest.mark.parametrize("n", [0, 1])
def test_no_row_and_one(n: int) -> None:
    arguments = draw(n, 507)
    check_loss(arguments)
    check_stats(arguments["logits"], arguments["tokens"], upstream=_upstream(n))


def test_fp16() -> None:
    """By the statistics in the public `ppo_loss`, and by the kernel without a gradient."""
    arguments = draw(3, 507, torch.float16)
    check_loss(arguments, need_grad=False)
    check_stats(arguments["logits"], arguments["tokens"], upstream=_upstream(3))


@pytest.mark.skipif(DEVICE == "cuda", reason="the target is made up")
def test_wavefronts_of_64_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half as many wavefronts give a row's tiles the same threads, and AMD's compiler has no option
    for registers. The interpreter does not show communication between lanes."""
    for module in (launch, triton_views):
        monkeypatch.setattr(module, "target", lambda: launch.Target("hip", 64))
    arguments = draw(3, 2064)
    decided = triton_views.launch_over(arguments["logits"], PLAIN, sweeps=2)
    assert decided.options["cut"].lanes.value == 64 * decided.options["num_warps"]
    assert "maxnreg" not in decided.options
    check_loss(arguments, entropy_coef=0.1)
    ref = draw(3, 2064, seed=1)["logits"]
    check_stats(
        arguments["logits"], arguments["tokens"], upstream=_upstream(3, kl=True), ref_logits=ref
    )


@pytest.mark.skipif(DEVICE == "cuda", reason="test_on_a_gpu.py does this with real memory")
def test_offsets_do_not_overflow_int32() -> None:
    """int32 offsets overflowed at N·V > 2³¹ (fla 1082): rows 2³⁰ elements apart."""
    apart, n, vocab = 2**30, 4, 40
    # Untouched anonymous memory is never allocated.
    memory = mmap.mmap(-1, 2 * ((n - 1) * apart + vocab), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    flat = torch.frombuffer(memory, dtype=torch.bfloat16)
    far = flat.as_strided((n, vocab), (apart, 1))
    arguments = draw(n, vocab, torch.bfloat16)
    near = kernel_loss(arguments)
    far.copy_(arguments["logits"])
    got = kernel_loss(arguments | {"logits": far}, inplace=True)
    assert near.grad is not None
    assert torch.equal(got.logprobs, near.logprobs)
    assert torch.equal(far, near.grad)


# --------------------------------------------------------------------------------------- the rows


@pytest.mark.parametrize(("case", "softcap"), EDGES)
def test_rows_at_the_edge_of_the_numbers(case: str, softcap: float | None) -> None:
    given, upstream = at_the_edge(case, softcap)
    check_loss(given)
    capped = Softmax(softcap=softcap)
    check_stats(given["logits"], given["tokens"], capped, upstream=upstream)


@pytest.mark.parametrize("offset", [-1000.0, 1000.0])
def test_a_reference_far_from_the_logits(offset: float) -> None:
    """t − r is computed from x − x_ref and the maxima's difference, each rounded at its size: in
    total off by 2⁻²³ of the distance, like moving the logits by one unit in the last place."""
    arguments = draw(3, 2064)
    x, tokens, ref = arguments["logits"] + offset, arguments["tokens"], draw(3, 2064, seed=1)
    upstream = StatsGradients(torch.zeros(3), None, torch.ones(3))
    want, want_grad = defined_statistics(x, tokens, PLAIN, upstream, ref["logits"])
    apart = 2.0**-23 * (x - ref["logits"]).abs().amax(-1)
    for module, device in ((cpu_backend, "cpu"), (triton_backend, DEVICE)):
        row = (x.to(device), tokens.to(device))
        moved = StatsGradients(*(None if g is None else g.to(device) for g in upstream))
        other = ref["logits"].to(device)
        got = module.token_stats(*row, PLAIN, ref_logits=other)
        assert_statistic(got.logprobs, want.logprobs, "logprobs")
        assert ((got.kl.cpu() - want.kl).abs() <= 1e-5 + apart).all()
        grad = module.token_stats_backward(moved, *row, got, PLAIN, ref_logits=other)
        probabilities = x.double().softmax(-1)
        assert_gradient(grad, want_grad, allowance=2 * apart[:, None] * probabilities)


def test_a_vocabulary_of_one() -> None:
    tokens = torch.zeros(3, dtype=torch.int64)
    x, ref = torch.randn(2, 3, 1)
    for softmax in (PLAIN, Softmax(softcap=5.0)):
        check_stats(x, tokens, softmax, upstream=_upstream(3, kl=True), ref_logits=ref)


def test_a_token_that_is_masked_out() -> None:
    """Its logprob is −1e30, as in the definition: finite, and beyond any clip."""
    arguments = draw(2, 507)
    arguments["logits"][0, arguments["tokens"][0]] = -torch.inf
    got, want = kernel_loss(arguments), cpu_backend.ppo_loss(*operands(arguments)[0])
    exact = defined_loss(arguments)
    torch.testing.assert_close(want.logprobs.double(), exact.logprobs)
    torch.testing.assert_close(got.logprobs.cpu(), want.logprobs)
    torch.testing.assert_close(got.grad.cpu(), want.grad)
    # The logprob's derivative is [j = y] − p_j as for any token; the definition's clamp has none.
    x, tokens = arguments["logits"], arguments["tokens"]
    slopes = torch.nn.functional.one_hot(tokens, 507) - x.double().softmax(-1)
    for module, device in ((cpu_backend, "cpu"), (triton_backend, DEVICE)):
        row = (x.to(device), tokens.to(device))
        upstream = StatsGradients(torch.ones(2, device=device))
        stats = module.token_stats(*row, PLAIN)
        assert_gradient(module.token_stats_backward(upstream, *row, stats, PLAIN), slopes)


def test_an_infinite_kl_with_a_coefficient_affects_only_its_row() -> None:
    """The definition's row has only the policy term's gradient, with an infinite loss."""
    arguments = draw(3, 507)
    ref = draw(3, 507, seed=1)["logits"]
    ref[1, 100] = -torch.inf
    options: dict[str, Any] = {"kl_estimator": "full", "kl_coef": 0.1}
    exact = defined_loss(arguments, ref_logits=ref, **options)
    for module, device in ((cpu_backend, "cpu"), (triton_backend, DEVICE)):
        given, _ = operands(on(device, arguments | options))
        got = module.ppo_loss(*given, ref_logits=ref.to(device))
        assert got.kl.isinf().tolist() == exact.kl.isinf().tolist() == [False, True, False]
        assert got.sums[0].isinf()
        assert got.grad.isfinite().all(-1).tolist() == [True, False, True]


@pytest.mark.parametrize(("bad", "vocab"), [(torch.nan, 2064), (torch.nan, 507), (torch.inf, 2061)])
def test_a_broken_row_is_nan(bad: float, vocab: int) -> None:
    """NaN or +inf in one logit makes loss and gradient of its row NaN, clipped or not, and of no
    other."""
    arguments = draw(3, vocab)
    arguments["logits"][1, 100] = bad
    arguments["tokens"][1] = 3
    got = kernel_loss(arguments)
    assert got.logprobs.isnan().tolist() == [False, True, False]
    assert got.grad is not None
    assert got.grad.isnan().any(-1).tolist() == [False, True, False]
    assert got.sums[0].isnan()


def test_a_token_outside_the_vocabulary_reads_nothing() -> None:
    """If checking would wait for the GPU, the result is NaN without a stray read."""
    arguments = draw(4, 507)
    arguments["tokens"][:3] = torch.tensor([-100, 507, -(2**62)])
    got = kernel_loss(arguments)
    assert got.logprobs.isnan().tolist() == [True, True, True, False]


@pytest.mark.parametrize("softcap", [None, 30.0])
def test_peaked_rows_with_a_reference(softcap: float | None) -> None:
    """The token's share of the KL, t − r minus its mean, keeps its digits too; and the statistics
    return a soft-cap's row maximum unchanged."""
    arguments = draw(3, 2061, spread=1.0)
    ref = draw(3, 2061, seed=1, spread=1.0)["logits"] + arguments["logits"]
    x, tokens = arguments["logits"], arguments["tokens"]
    x.scatter_(
        1, tokens[:, None], x.amax(-1, keepdim=True) + torch.tensor([[10.0], [12.0], [14.0]])
    )
    capped = Softmax(softcap=softcap)
    for upstream in (_upstream(3, kl=True), StatsGradients(torch.zeros(3), None, torch.ones(3))):
        check_stats(x, tokens, capped, upstream=upstream, ref_logits=ref)
    check_loss(arguments, kl_estimator="full", ref_logits=ref, kl_coef=0.3, softcap=softcap)


@pytest.mark.parametrize(
    ("vocab", "dtype", "references"),
    [(507, torch.bfloat16, range(6)), (2061, torch.float32, (0, 2, 3))],
)
def test_normalizers_of_invalid_rows(
    vocab: int, dtype: torch.dtype, references: Iterable[int]
) -> None:
    """−inf for a row of −inf only, NaN for a row with NaN, for the policy and the reference,
    whatever the other row is. Every pair in rows shorter than a tile; in longer ones each kind with
    itself, with a distribution and with another kind."""
    logits, tokens = torch.randn(6, vocab), torch.arange(6)
    logits[0], logits[1, 100], logits[2, 7] = -torch.inf, torch.nan, torch.inf
    logits[3, 7], logits[3, 100] = torch.inf, torch.nan
    logits[4] = -torch.inf
    logits[4, 100] = torch.nan
    logits = logits.to(dtype)
    given = (logits.to(DEVICE), tokens.to(DEVICE), PLAIN)
    for turned in references:
        ref = logits.roll(turned, 0)
        want = definition.token_stats(logits, tokens, PLAIN, ref_logits=ref)
        for module in (cpu_backend, triton_backend):
            moved = given if module is triton_backend else (logits, tokens, PLAIN)
            got = module.token_stats(*moved, ref_logits=ref.to(moved[0].device))
            assert_statistic(got.normalizer, want.normalizer, "normalizer")
            assert_statistic(got.ref_normalizer, want.ref_normalizer, "ref_normalizer")
        assert want.normalizer[0].tolist() == [-torch.inf, -torch.inf]
        assert want.normalizer[[1, 3, 4]].isnan().all()


@pytest.mark.parametrize("level", [1e10, -1e13, 1e31])
def test_rows_far_from_zero(level: float) -> None:
    """The anchor's rounding error would overflow as an exponent: whole tiles take the careful loop
    in both sweeps."""
    arguments = draw(3, 2064)
    arguments["logits"][0] = level
    arguments["logits"][1] = level
    arguments["logits"][1, 5] = level + 1e-3 * abs(level)
    arguments["tokens"][:2] = torch.tensor([7, 5])
    check_loss(arguments, entropy_coef=0.1, temperature=100.0)
    softmax = Softmax(temperature=100.0)
    for upstream in (_upstream(3), StatsGradients(torch.ones(3))):
        check_stats(arguments["logits"], arguments["tokens"], softmax, upstream=upstream)


def test_identical_reference_has_no_kl() -> None:
    """Within fp32's rounding of log S, since the policy's sum adds the token last."""
    arguments = draw(3, 2064)
    arguments["advantages"][:] = 0.0
    ref = arguments["logits"]
    got = kernel_loss(arguments, kl_estimator="full", ref_logits=ref, kl_coef=1.0)
    assert got.grad is not None
    assert got.kl.abs().max() < 5e-7
    assert got.grad.abs().max() < 5e-7


def test_the_same_rows_give_the_same_bits() -> None:
    """In any program and any split of the rows, for rows that start on 16 bytes. Other rows are
    swept from the preceding boundary, so their position groups their sums."""
    arguments = draw(7, 512)
    whole, again = kernel_loss(arguments), kernel_loss(arguments)
    assert torch.equal(whole.sums, again.sums)
    assert torch.equal(whole.grad, again.grad)
    part = {k: v[3:].clone() for k, v in arguments.items()}
    assert torch.equal(kernel_loss(part).grad, whole.grad[3:])


# ------------------------------------------------------------------------------------ combinations


@st.composite
def combinations(draw_: Callable[..., Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    n = draw_(st.integers(1, 4))
    vocab = draw_(st.sampled_from([1, 2, 3, 64, 507, 1000, 2048]))
    dtype = draw_(st.sampled_from([torch.float32, torch.bfloat16]))
    seed = draw_(st.integers(0, 2**16))
    arguments = draw(n, vocab, dtype, seed=seed)
    g = torch.Generator().manual_seed(seed + 1)
    if draw_(st.booleans()):
        arguments["weights"][torch.rand(n, generator=g) < 0.4] = 0.0
    softcap = draw_(st.sampled_from([None, None, 10.0]))
    # Not both: far beyond its cap, the definition's slope 1 − tanh² is 0 even in fp64.
    offset = draw_(st.sampled_from([0.0, 0.0, -100.0, 1000.0])) if softcap is None else 0.0
    arguments["logits"] = (arguments["logits"].float() + offset).to(dtype)
    options: dict[str, Any] = {
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
    if options["policy_term"].startswith("dppo"):  # fp32 rounds small divergences to 0
        options["lowest_ratio"] = min(options["lowest_ratio"], 0.99)
        options["highest_ratio"] = max(options["highest_ratio"], 1.01)
    if options["temperature"] == "per token":
        options["temperature"] = torch.rand(n, generator=g) * 1.7 + 0.3
    if draw_(st.booleans()):
        options["importance_weights"] = torch.rand(n, generator=g) * 2
    # Old policy and reference near the policy of these options.
    exact, _ = operands(in_fp64(arguments | options))
    logprobs = logprobs_of(arguments["logits"], arguments["tokens"], exact.softmax)
    noise = torch.randn(2, n, generator=g)
    arguments["old_logprobs"] = (logprobs + 0.3 * noise[0]).float()
    if draw_(st.booleans()) or (options["kl_coef"] and options["kl_estimator"] != "full"):
        options["ref_logprobs"] = (logprobs + noise[1]).float()
    if options["kl_estimator"] == "full":
        options["ref_logits"] = arguments["logits"].float() + torch.randn(n, vocab, generator=g)
    return arguments, options


# On a GPU nearly every example compiles its own kernel, seconds each.
@settings(max_examples=40 if DEVICE == "cpu" else 30, deadline=None, derandomize=True)
@given(combinations())
def test_combinations(combination: tuple[dict[str, Any], dict[str, Any]]) -> None:
    arguments, options = combination
    check_loss(arguments | {"logits": arguments["logits"].clone()}, **options)


# ---------------------------------------------------------------------------------------- autograd


def _public(logits: Tensor, **options: Any) -> fastppo.PPOLoss:
    shape = logits.shape[:-1]
    n, vocab = shape.numel(), logits.shape[-1]
    tokens = (torch.arange(n, device=logits.device) * 7 % vocab).view(shape)
    advantages = torch.linspace(-1, 1, n, device=logits.device).view(shape)
    old = torch.full(shape, -3.0, device=logits.device)
    return fastppo.ppo_loss(
        logits, tokens, old, advantages, **{"backend": "triton", "clip_ratio": 0.5} | options
    )


def _leaf(dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (2, 3, 37)) -> Tensor:
    g = torch.Generator().manual_seed(3)
    return torch.randn(shape, generator=g).to(DEVICE, dtype).requires_grad_()


def _gradient(logits: Tensor, loss: Callable[[Tensor], Tensor]) -> Tensor:
    return torch.autograd.grad(loss(logits), logits)[0]


def test_public_loss_agrees_with_the_torch_backend_in_fp64() -> None:
    options = {"entropy_coef": 0.1, "ref_logprobs": torch.full((2, 3), -3.5, device=DEVICE)}
    x = _leaf()
    loss = _public(x, kl_coef=0.1, **options)
    wanted = _public(x.double(), kl_coef=0.1, backend="torch", **in_fp64(options))
    assert_statistic(loss.loss, wanted.loss, "loss")
    assert loss.metrics.keys() == wanted.metrics.keys()
    for name, value in loss.metrics.items():
        assert_statistic(value, wanted.metrics[name], name)
    (grad,) = torch.autograd.grad(loss.loss, x)
    (wanted_grad,) = torch.autograd.grad(wanted.loss, x)
    assert_gradient(grad.view(6, 37), wanted_grad.view(6, 37))


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_retained_graph(factor: float) -> None:
    """A leaf adopted the saved gradient and added to it: three backwards gave four gradients."""
    x = _leaf()
    want = 3 * factor * _gradient(x, lambda x: _public(x).loss)
    loss = _public(x).loss * factor
    for _ in range(2):
        loss.backward(retain_graph=True)
    loss.backward()
    torch.testing.assert_close(x.grad, want)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("strides", [(0, 1), (36, 1)], ids=["expanded", "in part"])
def test_in_place_raises_an_error_for_overlapping_rows(strides: tuple[int, int]) -> None:
    leaf = torch.randn(4 * 37, device=DEVICE, requires_grad=True)
    with pytest.raises(ValueError, match="overlap"):
        _public(leaf.as_strided((4, 37), strides), inplace=True)


@pytest.mark.parametrize("operand", ["old_logprobs", "advantages", "importance_weights"])
def test_a_nan_shows_in_loss_gradient_and_metrics(operand: str) -> None:
    """Clamps must not replace it by a number, because the trainer's guard looks for it."""
    arguments = {"logits": torch.randn(4, 37), "tokens": torch.zeros(4, dtype=torch.int64)}
    arguments |= {"old_logprobs": torch.full((4,), -3.6), "advantages": torch.ones(4)}
    arguments |= {"weights": torch.full((4,), 0.25), "importance_weights": torch.ones(4)}
    arguments[operand][1] = float("nan")
    given, _ = operands(on(DEVICE, arguments))
    for module in (cpu_backend, triton_backend):
        rows = module.ppo_loss(*given)
        sums = Sums(*rows.sums)
        assert sums.loss.isnan()
        assert rows.grad[1].isnan().all()
        assert rows.grad[[0, 2, 3]].isfinite().all()
        assert bool(sums.ratio_max.isnan()) == (operand == "old_logprobs")


def test_an_infinite_reference_that_is_only_reported_does_not_affect_the_gradient() -> None:
    arguments = {"logits": torch.randn(2, 37), "tokens": torch.zeros(2, dtype=torch.int64)}
    arguments |= {"old_logprobs": torch.full((2,), -3.6), "advantages": torch.ones(2)}
    arguments |= {"weights": torch.full((2,), 0.5), "kl_estimator": "k3"}
    arguments |= {"ref_logprobs": torch.tensor([-math.inf, -3.0])}
    given, _ = operands(on(DEVICE, arguments))
    for module in (cpu_backend, triton_backend):
        rows = module.ppo_loss(*given)
        assert rows.grad is not None
        assert rows.grad.isfinite().all()


@pytest.mark.parametrize("distance", [1e-2, 1e-4])
def test_the_full_kl_keeps_its_digits_near_the_reference(distance: float) -> None:
    """Training starts there; t − r of two rounded rows would be off by 1e-3 of the gradient."""
    torch.manual_seed(3)
    logits = 3 * torch.randn(4, 2064)
    ref = logits + distance * torch.randn(4, 2064)
    arguments = {"logits": logits, "tokens": torch.randint(2064, (4,)), "ref_logits": ref}
    arguments |= {"old_logprobs": torch.zeros(4), "advantages": torch.zeros(4)}
    arguments |= {"weights": torch.full((4,), 0.25), "kl_estimator": "full", "kl_coef": 1.0}
    exact = defined_loss(arguments).grad
    assert exact is not None
    largest = exact.abs().amax(-1, keepdim=True)
    given, rest = operands(on(DEVICE, arguments))
    for module in (cpu_backend, triton_backend):
        found = module.ppo_loss(*given, **rest).grad
        assert found is not None
        error = ((found.double().cpu() - exact).abs() / largest).max()
        assert error < 1e-5


# -------------------------------------------------------------------------------- choice of backend


def test_triton_raises_errors_for_unsupported_input(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="float64"):
        fastppo.token_logprobs(torch.randn(2, 7).double(), tokens, backend="triton")
    with pytest.raises(ValueError, match="must be bfloat16"):
        triton_backend.token_stats(torch.randn(2, 7).double(), tokens, Softmax())
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        fastppo.token_logprobs(torch.randn(2, 7), tokens, backend="triton")
