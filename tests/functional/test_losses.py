"""The public losses equal autograd on their definitions, in value and gradient, for every keyword.

`draws.exact` is the definition: fp64, `torch.log_softmax` and autograd. Tolerances: fp64 has some
hundred roundings of 1e-16 on both sides, hence 1e-11; fp32 has 6e-8, hence 1e-5. bf16 and fp16
losses are accumulated in fp32 from shared logits, so only the gradient is rounded, once: 2⁻⁸ and
2⁻¹⁰ of it.
"""

from __future__ import annotations

from typing import Any

import draws
import pytest
import torch
from fastppo_kernels.records import POLICY_TERMS
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from trajectories import assert_close as close

import fastppo
from benchmarks.conformance import formulas as paper

N, V, H = 6, 11, 5
VALUE = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 1e-5, torch.float16: 1e-5}
GRADIENT = {
    torch.float64: 1e-11,
    torch.float32: 1e-5,
    torch.bfloat16: 2**-8,
    torch.float16: 2**-10,
}
PATHS = ("logits", "linear")

terms = pytest.mark.parametrize("term", draws.TERMS)
paths = pytest.mark.parametrize("path", PATHS)
dtypes = pytest.mark.parametrize("dtype", VALUE, ids=lambda dtype: str(dtype)[6:])


def gradient_close(
    actual: Tensor | None, expected: Tensor, tolerance: float, floor: float = 1e-300
) -> None:
    """Compare within `tolerance` of the largest entry, however small."""
    assert actual is not None
    scale = expected.abs().max().item() if expected.numel() else 0.0
    torch.testing.assert_close(
        actual.double(), expected.double(), rtol=tolerance, atol=tolerance * scale + floor
    )


def run(
    path: str, data: draws.Batch, keywords: dict[str, Any], mask: Tensor | None = None
) -> tuple[fastppo.PPOLoss, Tensor]:
    """Return the loss on either path, and its gradient by the logits (hidden states of an
    identity)."""
    x = data.logits.detach().clone().requires_grad_()
    if path == "logits":
        out = fastppo.ppo_loss(x, *data[1:], mask, **keywords)
    else:
        identity = torch.eye(x.shape[-1], dtype=x.dtype)
        keywords = {"chunk_size": 4, **draws.as_linear(keywords)}
        out = fastppo.linear_ppo_loss(x, identity, *data[1:], mask, **keywords)
    (grad,) = torch.autograd.grad(out.loss, x)
    return out, grad


# --------------------------------------------------------------- value and gradient, term by term


@terms
@paths
@dtypes
def test_value_and_gradient_of_each_term_are_those_of_autograd(
    term: str, path: str, dtype: torch.dtype
) -> None:
    data = draws.batch((N,), V, dtype)
    keywords = draws.options(data, term)
    if (path, dtype, keywords.get("kl_estimator")) == ("linear", torch.float16, "full"):
        with pytest.raises(ValueError, match="kl_estimator"):
            run(path, data, keywords)
        return
    x = data.logits.double().requires_grad_()
    expected = draws.exact(x, *data[1:], torch.full((N,), 1 / N, dtype=torch.float64), **keywords)
    (expected_grad,) = torch.autograd.grad(expected.loss, x)
    actual, grad = run(path, data, keywords)
    for name in ("loss", "logprobs", "entropy", "kl"):
        close(getattr(actual, name), getattr(expected, name), VALUE[dtype])
    assert grad.dtype == dtype
    gradient_close(grad, expected_grad, GRADIENT[dtype])


@paths
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_gspo_of_padded_sequences_is_that_of_packed_ones(path: str, dtype: torch.dtype) -> None:
    """Masked tokens are in no mean; the KL to the old policy stays per token."""
    data = draws.batch((2, 4), V, dtype)
    mask = torch.tensor([[True, True, False, True], [True, True, False, False]])
    ends = torch.tensor([0, 3, 5])
    packed = draws.Batch(*(x[mask] for x in data))
    padded, padded_grad = run(path, data, {"objective": "gspo"}, mask)
    ours, grad = run(path, packed, {"objective": "gspo", "cu_seqlens": ends})
    close(padded.loss, ours.loss, VALUE[dtype])
    gradient_close(padded_grad[mask], grad, GRADIENT[dtype])
    assert (padded_grad[~mask] == 0).all()
    d = ours.logprobs - packed.old_logprobs
    of_sequences = torch.stack([part.mean().exp() for part in d.split((3, 2))])
    assert padded.metrics["ratio_max"].item() == pytest.approx(of_sequences.max().item(), rel=1e-3)
    assert padded.metrics["approx_kl"].item() == pytest.approx(
        (d.exp() - 1 - d).mean().item(), 1e-3
    )


# ------------------------------------------------------------------------- any keywords together


@st.composite
def cases(draw: st.DrawFn) -> tuple[draws.Batch, dict[str, Any], Tensor | None, str, int]:
    """Draw (batch, keywords, mask, path, chunk size) for any supported combination of keywords."""
    n, vocab = draw(st.integers(1, 9)), draw(st.integers(1, 17))
    data = draws.batch((n,), vocab, seed=draw(st.integers(0, 10**6)))
    if draw(st.booleans()):  # the policy term of some or all tokens has no gradient
        data.advantages[draw(st.integers(0, n - 1)) :] = 0.0
    keywords: dict[str, Any] = {
        "objective": draw(st.sampled_from(["clip", "clip", *POLICY_TERMS])),
        "clip_ratio": draw(st.sampled_from([None, 0.2, (0.1, 0.4), 0.0])),
        "dual_clip": draw(st.sampled_from([None, 1.2, 3.0])),
        "entropy_coef": draw(st.sampled_from([0.0, 0.01, -0.5])),
        "kl_coef": draw(st.sampled_from([0.0, 0.3, -0.1])),
        "kl_estimator": draw(st.sampled_from(["k1", "k2", "k3", "full"])),
        "logit_scale": draw(st.sampled_from([1.0, 0.3, 2.0])),
        "softcap": draw(st.sampled_from([None, 2.0, 30.0])),
    }
    if keywords["objective"].startswith("dppo") and keywords["clip_ratio"] == 0.0:
        keywords["clip_ratio"] = 0.01  # a divergence of 0 is a matter of rounding
    if keywords["objective"] != "clip":
        keywords["dual_clip"] = None
    keywords["temperature"] = draw(st.sampled_from([1.0, 0.3, 2.0, "0-d", "per token"]))
    if keywords["temperature"] == "0-d":
        keywords["temperature"] = torch.tensor(0.7, dtype=torch.float64)
    if keywords["temperature"] == "per token":
        keywords["temperature"] = draws.like(data.old_logprobs, 1, 0.5, positive=True) + 0.2
    if draw(st.booleans()):
        keywords["importance_weights"] = draws.like(data.old_logprobs, 2, 1.0, positive=True)
    if keywords["kl_estimator"] == "full" or draw(st.booleans()):
        keywords["ref_logits"] = data.logits + draws.like(data.logits, 3, 0.5)
    if keywords["kl_estimator"] != "full" and ("ref_logits" not in keywords or draw(st.booleans())):
        keywords["ref_logprobs"] = data.old_logprobs + draws.like(data.old_logprobs, 4, 0.3)
    mask = draw(st.none() | st.lists(st.booleans(), min_size=n, max_size=n).map(torch.tensor))
    return data, keywords, mask, draw(st.sampled_from(PATHS)), draw(st.integers(1, n + 1))


@settings(max_examples=60)
@given(cases(), st.sampled_from([None, 3.0, 1000.0]))
def test_any_combination_of_keywords_equals_autograd(
    case: tuple[draws.Batch, dict[str, Any], Tensor | None, str, int], denominator: float | None
) -> None:
    data, keywords, mask, path, chunk_size = case
    kept = torch.ones_like(data.tokens, dtype=torch.bool) if mask is None else mask
    cut = {
        name: value[kept] if isinstance(value, Tensor) and value.dim() else value
        for name, value in keywords.items()
    }
    rows = draws.Batch(*(x[kept] for x in data))
    x = rows.logits.clone().requires_grad_()
    n = kept.sum().item()
    w = torch.full((int(n),), 1 / (denominator or max(n, 1)), dtype=torch.float64)
    expected = draws.exact(x, *rows[1:], w, **cut)
    (expected_grad,) = torch.autograd.grad(expected.loss, x)
    keywords["denominator"] = denominator
    if path == "linear":
        keywords["chunk_size"] = chunk_size
    actual, grad = run(path, data, keywords, mask)
    close(actual.loss, expected.loss, 1e-11)
    for name in ("logprobs", "entropy", "kl"):
        full = torch.zeros_like(data.old_logprobs)
        full[kept] = getattr(expected, name).detach()
        close(getattr(actual, name), full, 1e-11)
    full_grad = torch.zeros_like(data.logits)
    full_grad[kept] = expected_grad
    # Autograd computes 1 − p_y, which in a peaked row consists of rounding only.
    gradient_close(grad, full_grad, 1e-10, floor=1e-15 * (1 + abs(expected.loss.item())))
    if n:
        terms = ("objective", "clip_ratio", "dual_clip", "importance_weights")
        metrics = draws.metrics(
            expected,
            rows.old_logprobs,
            rows.advantages,
            w,
            **{name: cut.get(name) for name in terms},
        )
        assert {k: v.item() for k, v in actual.metrics.items()} == pytest.approx(metrics, rel=1e-9)


# ---------------------------------------------------------------------------- the fused lm-head


@pytest.mark.parametrize("trained", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0)])
@pytest.mark.parametrize("statistics", [False, True], ids=("loss", "logprobs"))
def test_frozen_parts_of_the_head_get_no_gradient_and_change_no_other(
    trained: tuple[int, int, int], statistics: bool
) -> None:
    data = draws.batch((N,), V)
    parts = [x.detach() for x in draws.head((N,), V, H)]

    def gradients(trained: tuple[int, ...]) -> list[Tensor | None]:
        leaves = [x.clone().requires_grad_(bool(on)) for x, on in zip(parts, trained, strict=True)]
        hidden, weight, bias = leaves
        if statistics:
            loss = fastppo.linear_token_logprobs(hidden, weight, data.tokens, bias=bias).sum()
        else:
            loss = fastppo.linear_ppo_loss(hidden, weight, *data[1:], bias=bias).loss
        assert loss.requires_grad == any(trained)
        if any(trained):
            loss.backward()
        return [x.grad for x in leaves]

    for grad, is_trained, expected in zip(
        gradients(trained), trained, gradients((1, 1, 1)), strict=True
    ):
        if is_trained:
            assert grad is not None
            assert expected is not None
            assert torch.equal(grad, expected)
        else:
            assert grad is None


@pytest.mark.parametrize("dtype", list(VALUE)[1:], ids=str)
@pytest.mark.parametrize("left", [2, 100])
def test_a_bias_of_minus_infinity_masks_the_vocabulary_of_a_fused_head(
    dtype: torch.dtype, left: int
) -> None:
    """No NaN, the same loss and gradient as without the columns, and no gradient in them."""
    data = draws.batch((4,), 101, dtype)
    kept = torch.randperm(101)[:left].sort().values
    bias = torch.full((101,), -torch.inf).index_fill_(0, kept, 0.0).to(dtype)
    picks = torch.randint(left, (4,))
    hidden = data.logits.detach().requires_grad_()
    small = data.logits[:, kept].detach().requires_grad_()
    old = fastppo.token_logprobs(small, picks).detach() + 0.1
    masked = fastppo.linear_ppo_loss(
        hidden,
        torch.eye(101, dtype=dtype),
        kept[picks],
        old,
        data.advantages,
        bias=bias,
        entropy_coef=0.1,
    )
    smaller = fastppo.ppo_loss(small, picks, old, data.advantages, entropy_coef=0.1)
    torch.testing.assert_close(masked[:3], smaller[:3], rtol=0, atol=1e-5)
    (grad,) = torch.autograd.grad(masked.loss, hidden)
    (small_grad,) = torch.autograd.grad(smaller.loss, small)
    rounding = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-9}[dtype]
    wanted = torch.zeros_like(grad).index_copy_(1, kept, small_grad)
    torch.testing.assert_close(grad, wanted, rtol=rounding, atol=rounding * 0.1)
    assert (grad.index_fill(1, kept, 0.0) == 0).all()


# ---------------------------------------------------------------------- shapes, strides, autograd


@pytest.mark.parametrize("shape", [(1, 1), (2, 3, 2), (0,), (2, 0)])
@paths
def test_leading_axes_are_only_a_shape(shape: tuple[int, ...], path: str) -> None:
    data = draws.batch(shape, V)
    n = data.tokens.numel()
    ref = draws.like(data.old_logprobs, 5)
    keywords: dict[str, Any] = {"kl_coef": 0.1, "entropy_coef": 0.2, "ref_logprobs": ref}
    actual, grad = run(path, data, keywords)
    flat = draws.Batch(data.logits.reshape(n, V), *(x.reshape(n) for x in data[1:]))
    expected, flat_grad = run(path, flat, keywords | {"ref_logprobs": ref.reshape(n)})
    assert actual.loss.shape == ()
    assert torch.equal(actual.loss, expected.loss)
    assert torch.equal(grad, flat_grad.view(*shape, V))
    for name in ("logprobs", "entropy", "kl"):
        assert torch.equal(getattr(actual, name), getattr(expected, name).view(shape))
    if n == 0:
        assert actual.loss.item() == 0
        assert all(value.item() == 0 for value in actual.metrics.values())


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=("fp64", "fp16"))
def test_a_view_of_shifted_logits_gives_the_same_as_its_copy(
    masked: bool, dtype: torch.dtype
) -> None:
    """`logits[:, :-1]`, whose leading axes do not collapse; also sliced at the batch's end."""
    whole = draws.batch((4, 6), V, dtype).logits
    for view in (whole[:, :-1], whole[1:3, 2:4], whole.transpose(0, 1)):
        shape = tuple(view.shape[:-1])
        data = draws.batch(shape, V, dtype)
        mask = torch.rand(shape) < 0.6 if masked else None
        ref = draws.like(view, 3).to(dtype)
        options: dict[str, Any] = {"ref_logits": ref, "kl_coef": 0.2, "kl_estimator": "full"}
        results = []
        for logits in (view, view.contiguous()):
            x = logits.detach().requires_grad_()
            out = fastppo.ppo_loss(x, *data[1:], mask, **options)
            stats = fastppo.token_stats(x, data.tokens, ref_logits=ref)
            assert stats.kl is not None
            total = out.loss + (stats.logprobs + stats.entropy + stats.kl).sum() / 7
            results.append((out.loss, stats.entropy, *torch.autograd.grad(total, x)))
        torch.testing.assert_close(*results, rtol=0, atol=0)


def test_only_logits_or_the_head_get_a_gradient() -> None:
    """Old logprobs, advantages, references, weights and temperatures are constants."""
    data = draws.batch((N,), V)
    constants = {
        name: draws.like(data.old_logprobs, seed, positive=True).requires_grad_()
        for seed, name in enumerate(
            ("old_logprobs", "advantages", "ref_logprobs", "importance_weights", "temperature")
        )
    }
    weights = torch.rand(N, dtype=torch.float64, requires_grad=True)
    out = fastppo.ppo_loss(data.logits, data.tokens, weights=weights, kl_coef=0.1, **constants)
    assert not out.loss.requires_grad
    out = fastppo.ppo_loss(
        data.leaf().logits, data.tokens, weights=weights, kl_coef=0.1, **constants
    )
    out.loss.backward()
    assert all(x.grad is None for x in (*constants.values(), weights))
    for x in (out.logprobs, out.entropy, out.kl, *out.metrics.values()):
        assert not x.requires_grad


def test_without_grad_no_gradient_is_computed_and_the_values_are_the_same() -> None:
    data = draws.batch((N,), V).leaf()
    tracked = fastppo.ppo_loss(*data, entropy_coef=0.1, inplace=False)
    with torch.no_grad():
        untracked = fastppo.ppo_loss(*data, entropy_coef=0.1, inplace=True)
    assert not untracked.loss.requires_grad
    torch.testing.assert_close(tracked[:4], untracked[:4], rtol=0, atol=0)
    assert torch.equal(data.logits, draws.batch((N,), V).logits)


# ------------------------------------------------------------------------------------- in place


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_in_place_gives_the_same_bits_in_the_logits_memory(
    masked: bool, dtype: torch.dtype
) -> None:
    data = draws.batch((3, 5), V, dtype)
    mask = torch.rand(3, 5) < 0.6 if masked else None
    expected, expected_grad = run("logits", data, {"entropy_coef": 0.1}, mask)
    leaf = data.logits.clone().requires_grad_()
    logits = leaf * 1
    out = fastppo.ppo_loss(logits, *data[1:], mask, entropy_coef=0.1, inplace=True)
    assert torch.equal(logits.detach(), expected_grad)
    torch.testing.assert_close(out[:4], expected[:4], rtol=0, atol=0)
    (grad,) = torch.autograd.grad(out.loss, leaf)
    assert torch.equal(grad, expected_grad)


# ------------------------------------------------------------------------------------------ masks


@pytest.mark.parametrize("term", ["policy", "k3", "everything"])
@paths
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("by_weights", [False, True], ids=("mask", "weights"))
def test_masked_entries_may_hold_anything(
    term: str, path: str, dtype: torch.dtype, by_weights: bool
) -> None:
    """NaN, inf and −100 under the mask give the same bits, and no gradient there."""
    data = draws.batch((N,), V, dtype)
    keywords = draws.options(data, term)
    if (path, dtype, keywords.get("kl_estimator")) == ("linear", torch.float16, "full"):
        keywords |= {"kl_estimator": "k3"}
    keep = torch.tensor([True, False, True, True, False, False])
    mask = None if by_weights else keep
    keywords["weights"] = keep / 3.0
    poisoned = dict(keywords)
    for name in ("ref_logprobs", "importance_weights", "temperature", "ref_logits"):
        if isinstance(value := keywords.get(name), Tensor):
            poisoned[name] = value.clone()
            poisoned[name][~keep] = float("nan")
    if not by_weights:
        poisoned["weights"] = torch.where(keep, 1 / 3, float("nan"))
    bad = draws.Batch(*(x.clone() for x in data))
    bad.logits[~keep] = float("nan")
    bad.tokens[~keep] = -100
    bad.old_logprobs[~keep] = float("nan")
    bad.advantages[~keep] = float("inf")
    expected, expected_grad = run(path, data, keywords, mask)
    actual, grad = run(path, bad, poisoned, mask)
    torch.testing.assert_close(actual[:4], expected[:4], rtol=0, atol=0)
    assert torch.equal(grad, expected_grad)
    assert (grad[~keep] == 0).all()
    for stat in (actual.logprobs, actual.entropy, actual.kl):
        assert (stat[~keep] == 0).all()
    for name, value in actual.metrics.items():
        assert torch.equal(value, expected.metrics[name])


# ------------------------------------------------------------------------- aggregation and metrics


def test_each_aggregation_is_its_formula() -> None:
    mask = torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0], [0, 1, 0, 0]]).bool()
    third = torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0], [0, 3, 0, 0]]) / 3
    for aggregation, expected in {
        "token-mean": mask / 4,
        "seq-mean-token-mean": third / 2,
        "seq-mean-token-sum": mask / 2,
        "token-sum": mask / 1,
    }.items():
        torch.testing.assert_close(fastppo.aggregation_weights(mask, aggregation), expected)
        scaled = fastppo.aggregation_weights(mask, aggregation, 10.0)
        base = third if aggregation == "seq-mean-token-mean" else mask.float()
        torch.testing.assert_close(scaled, base / 10)
        tensor = fastppo.aggregation_weights(mask, aggregation, torch.tensor(10))
        assert torch.equal(tensor, scaled)
        assert scaled.dtype == torch.float32
        assert (fastppo.aggregation_weights(mask & False, aggregation) == 0).all()


@pytest.mark.parametrize(
    "aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "token-sum"]
)
@pytest.mark.parametrize("denominator", [None, 7.0])
def test_every_loss_is_the_weighted_sum_of_its_tokens(
    aggregation: str, denominator: float | None
) -> None:
    data = draws.batch((3, 4), V)
    mask = torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0], [0, 1, 0, 0]]).bool()
    w = fastppo.aggregation_weights(mask, aggregation, denominator, dtype=torch.float64)
    options: dict[str, Any] = {"aggregation": aggregation, "denominator": denominator}
    rows = draws.exact(*(x.flatten(0, 1) for x in data), w.flatten(), entropy_coef=0.1)
    logprobs = rows.logprobs.view(3, 4)
    ratio = (logprobs - data.old_logprobs).exp()
    surrogate = paper.clipped_surrogate(ratio.numpy(), data.advantages.numpy())
    policy = -torch.from_numpy(surrogate)
    actual = fastppo.ppo_loss(*data, mask, entropy_coef=0.1, **options)
    close(actual.loss, rows.loss, 1e-12)
    by_weights = fastppo.ppo_loss(*data, mask, entropy_coef=0.1, weights=w)
    assert torch.equal(by_weights.loss, actual.loss)
    close(actual.metrics["policy_loss"], (w * policy).sum(), 1e-12)
    close(fastppo.policy_loss(logprobs, *data[2:], mask, **options), (w * policy).sum(), 1e-12)
    values, returns = data.advantages, data.old_logprobs
    expected = (w * (values - returns) ** 2).sum() / 2
    close(fastppo.value_loss(values, returns, mask, **options), expected, 1e-12)
    entropy = rows.entropy.view(3, 4)
    close(fastppo.entropy(data.logits, mask, **options), (w * entropy).sum(), 1e-12)


def test_the_exponent_is_clamped_at_20_nats_and_its_gradient_with_it() -> None:
    """Ratios of e^±1000 are finite, and saturated ones have no gradient."""
    data = draws.batch((4,), V)
    far = torch.tensor([1000.0, -1000.0, 19.0, -19.0], dtype=torch.float64)
    data = data._replace(
        old_logprobs=fastppo.token_logprobs(data.logits, data.tokens) + far,
        advantages=torch.ones(4, dtype=torch.float64),
    )
    for term in ("policy", "no clipping", *POLICY_TERMS[1:], "k3"):
        keywords = draws.options(data, term)
        if term == "k3":
            keywords["ref_logprobs"] = data.old_logprobs
        x = data.logits.clone().requires_grad_()
        w = torch.full((4,), 0.25, dtype=torch.float64)
        expected = draws.exact(x, *data[1:], w, **keywords)
        (expected_grad,) = torch.autograd.grad(expected.loss, x)
        actual, grad = run("logits", data, keywords)
        assert torch.isfinite(actual.loss)
        torch.testing.assert_close(actual.loss, expected.loss, rtol=1e-12, atol=0)
        gradient_close(grad, expected_grad, 1e-11)
        assert actual.metrics["ratio_max"].item() == pytest.approx(torch.tensor(20.0).exp().item())


# --------------------------------------------------------------------------------------- autocast


@paths
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=("fp32", "fp64"))
def test_autocast_affects_only_the_gemms_of_the_fused_head(path: str, dtype: torch.dtype) -> None:
    """Only GEMMs of fp32 operands change; everything else has the same bits as without autocast."""
    data = draws.batch((N,), V, dtype)
    outside = data
    if (path, dtype) == ("linear", torch.float32):
        outside = data._replace(logits=data.logits.bfloat16())
    expected, expected_grad = run(path, outside, {"entropy_coef": 0.1})
    with torch.autocast("cpu", torch.bfloat16):
        actual, grad = run(path, data, {"entropy_coef": 0.1})
    assert torch.equal(actual.loss, expected.loss)
    assert grad.dtype == dtype
    if outside is data:
        assert torch.equal(grad, expected_grad)


def test_the_loss_scale_multiplies_fp16_gradients_before_they_are_rounded() -> None:
    """Gradients of 1e-9 underflow in fp16 (least 6e-8) unless the loss scale comes first."""
    scale = 2.0**16
    options: dict[str, Any] = {"denominator": 1e6, "entropy_coef": 0.01}
    data = draws.batch((40,), 101, torch.float16)
    narrow = draws.head((40,), 101, H, torch.float16)
    wide = [x.detach().double().requires_grad_() for x in narrow]
    logits = wide[0] @ wide[1].T + wide[2]
    old = fastppo.token_logprobs(logits, data.tokens).detach()
    per_token = (data.tokens, old, data.advantages)
    hidden, weight, bias = narrow
    loss = fastppo.linear_ppo_loss(hidden, weight, *per_token, bias=bias, **options).loss
    grads = torch.autograd.grad(loss * scale, narrow)
    expected_loss = fastppo.ppo_loss(logits, *per_token, **options).loss
    expected_grads = torch.autograd.grad(expected_loss * scale, wide)
    for grad, expected in zip(grads, expected_grads, strict=True):
        # logits of order 5 rounded to fp16 move a probability by 5·2⁻¹¹ of itself
        assert (grad.double() - expected).norm() < 5 * 2**-10 * expected.norm()

    def gradient(logits: Tensor) -> Tensor:
        leaf = logits.clone().requires_grad_()
        loss = fastppo.ppo_loss(leaf, *data[1:], **options).loss
        (grad,) = torch.autograd.grad(loss * scale, leaf)
        return grad.double()

    expected = gradient(data.logits.double())
    assert (gradient(data.logits) - expected).norm() < 2**-10 * expected.norm()
