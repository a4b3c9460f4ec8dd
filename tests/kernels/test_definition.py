"""The definition equals the published formulas of `benchmarks.conformance`, in fp64.

Both sides have some tens of roundings of 1e-16: 1e-12. Gradients are autograd's, and compared with
finite differences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import draws
import numpy as np
import pytest
import torch
from fastppo_kernels import definition
from fastppo_kernels.records import (
    POLICY_TERMS,
    Discounts,
    Objective,
    PerToken,
    Projection,
    ShapedAdvantages,
    Shaping,
    Softmax,
    Trajectory,
)
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.conformance import formulas as paper

N, V, H = 8, 11, 3
B, T = 5, 9
LENGTHS = (9, 4, 1, 0, 7)
WEIGHTS = torch.full((N,), 1 / N, dtype=torch.float64)


def close(found: Tensor, wanted: np.ndarray | float) -> None:
    np.testing.assert_allclose(found.detach().numpy(), wanted, rtol=1e-12, atol=1e-12)


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_statistics_equal_those_of_the_softmax(temperature: float) -> None:
    logits, ref, tokens = draw(N, V), draw(N, V), torch.randint(V, (N,))
    found = definition.token_stats(logits, tokens, Softmax(temperature), ref_logits=ref)
    z, q = logits.numpy(), ref.numpy()
    close(found.logprobs, paper.token_logprobs(z, tokens.numpy(), temperature))
    close(found.entropy, paper.entropy(z, temperature))
    close(found.kl, paper.full_kl(z, q, temperature))
    each = torch.full((N,), temperature, dtype=torch.float64)
    again = definition.token_stats(logits, tokens, Softmax(temperatures=each), ref_logits=ref)
    torch.testing.assert_close(again, found, rtol=0, atol=0)


def test_scale_and_cap_come_before_the_temperature() -> None:
    logits, tokens = draw(N, V), torch.randint(V, (N,))
    found = definition.token_stats(logits, tokens, Softmax(0.7, None, 1.5, 2.0))
    z = 2.0 * np.tanh(1.5 * logits.numpy() / 2.0)
    close(found.logprobs, paper.token_logprobs(z, tokens.numpy(), 0.7))
    row_max, log_sum = found.normalizer.numpy().T
    row_max = 2.0 * row_max
    np.testing.assert_allclose(row_max, z.max(-1), rtol=1e-12)
    at_tokens = np.take_along_axis(z, tokens.numpy()[:, None], -1)[:, 0]
    close(found.logprobs, (at_tokens - row_max) / 0.7 - log_sum)


@pytest.mark.parametrize("offset", [-900.0, 900.0])
@pytest.mark.parametrize("softmax", [Softmax(0.7), Softmax(logit_scale=0.3)])
def test_rows_far_from_zero_keep_their_digits_in_fp32(softmax: Softmax, offset: float) -> None:
    """Rounding z/T before the maximum is subtracted would cost 6e-5 nats."""
    logits, tokens = (3 * draw(64, 200) + offset).float(), torch.randint(200, (64,))
    found = definition.token_stats(logits, tokens, softmax)
    exact = definition.token_stats(logits.double(), tokens, softmax)
    torch.testing.assert_close(found.logprobs.double(), exact.logprobs, rtol=0, atol=4e-6)
    torch.testing.assert_close(found.entropy.double(), exact.entropy, rtol=0, atol=4e-6)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_sampled_kl_is_the_estimator_of_the_note(estimator: str) -> None:
    logprobs, ref = draw(50), draw(50)
    found = definition.sampled_kl(logprobs - ref, estimator)
    close(found, paper.sampled_kl(logprobs.numpy(), ref.numpy(), estimator))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "full"])
@pytest.mark.parametrize("dual_clip", [None, 1.5])
@pytest.mark.parametrize("linear", [False, True], ids=("logits", "linear"))
def test_the_loss_is_surrogate_minus_kl_penalty_plus_entropy_bonus(
    estimator: str, dual_clip: float | None, linear: bool
) -> None:
    hidden, weight, ref = draw(N, H), draw(V, H), draw(N, V)
    logits = hidden @ weight.T
    data = draws.batch((N,), V)
    z, tokens = logits.numpy(), data.tokens.numpy()
    logprobs = paper.token_logprobs(z, tokens, 0.8)
    old = torch.from_numpy(logprobs) + 0.3 * draw(N)
    importance = draw(N).abs()
    if estimator == "full":
        kl, ref_logprobs = paper.full_kl(z, ref.numpy(), 0.8), None
    else:
        q = paper.token_logprobs(ref.numpy(), tokens, 0.8)
        kl, ref_logprobs = paper.sampled_kl(logprobs, q, estimator), torch.from_numpy(q)
    ratio = np.exp(logprobs - old.numpy())
    surrogate = paper.clipped_surrogate(ratio, data.advantages.numpy(), (0.1, 0.3), dual_clip)
    entropies = paper.entropy(z, 0.8)
    policy = -surrogate * importance.numpy()
    wanted = (policy + 0.2 * kl - 0.05 * entropies).mean()
    operands: tuple[Any, ...] = (
        PerToken(data.tokens, old, data.advantages, WEIGHTS, importance, ref_logprobs),
        Objective(0.9, 1.3, dual_clip, 0.2, estimator, 0.05),
        Softmax(0.8),
    )
    if linear:
        reference = Projection(ref, torch.eye(V, dtype=torch.float64))
        projection = Projection(hidden, weight)
        rows = definition.linear_ppo_loss(projection, *operands, ref_projection=reference)
    else:
        rows = definition.ppo_loss(logits, *operands, ref_logits=ref)  # type: ignore[assignment]
    close(rows.sums[0], wanted)
    close(rows.logprobs, logprobs)
    close(rows.entropy, entropies)
    close(rows.kl, kl)
    close(rows.sums[1], policy.mean())


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_mean_of_the_ratio_weighted_kl_and_its_gradient_are_the_kls(estimator: str) -> None:
    """Over every token, weighted by π_old. Without the ratio neither holds."""
    x, old, ref = draw(1, V), draw(1, V), draw(1, V)
    logits, every = x.expand(V, V), torch.arange(V)
    p_old, q = (paper.token_logprobs(z.expand(V, V).numpy(), every.numpy()) for z in (old, ref))
    per_token = PerToken(
        every,
        torch.from_numpy(p_old),
        torch.zeros(V, dtype=torch.float64),
        torch.from_numpy(np.exp(p_old)),
        None,
        torch.from_numpy(q),
    )
    plain = Objective(kl_coef=1.0, kl_estimator=estimator)
    weighted = definition.ppo_loss(
        logits, per_token, plain._replace(kl_ratio_weighted=True), Softmax()
    )
    unweighted = definition.ppo_loss(logits, per_token, plain, Softmax())
    leaf = x.clone().requires_grad_()
    exact = definition.token_stats(leaf, every[:1], Softmax(), ref_logits=ref).kl
    (wanted,) = torch.autograd.grad(exact.sum(), leaf)
    close(weighted.sums[0], paper.full_kl(x.numpy(), ref.numpy())[0])
    assert weighted.grad is not None
    assert unweighted.grad is not None
    close(weighted.grad.sum(0), wanted[0].numpy())
    assert (unweighted.grad.sum(0) - wanted[0]).abs().max() > 1e-2
    # The reported KL is the estimator.
    logprobs = paper.token_logprobs(logits.numpy(), every.numpy())
    estimate = paper.sampled_kl(logprobs, q, estimator)
    close(weighted.kl, estimate)
    close(weighted.sums[0], (np.exp(logprobs) * estimate).sum())


@pytest.mark.parametrize("term", POLICY_TERMS)
def test_policy_terms_are_those_of_their_papers(term: str) -> None:
    """Value, and gradient by the logprob."""
    data = draws.batch((N,), V)
    logprobs = draws.token_logprobs(data.logits, data.tokens).requires_grad_()
    ratio = (logprobs - data.old_logprobs).exp()
    taus = (1.5, 0.7) if term == "sapo" else (None, None)
    low, high = (0.002, 0.0015) if term.startswith("dppo") else (0.1, 0.3)
    objective = Objective(
        1 - low, 1 + high, policy_term=term, tau_positive=taus[0], tau_negative=taus[1]
    )
    x, old, advantages = (
        x.detach().numpy() for x in (logprobs, data.old_logprobs, data.advantages)
    )
    inputs = {"old_logprobs": old, "advantages": advantages}

    def published(at: np.ndarray) -> np.ndarray:
        return paper.policy_term(at, x, inputs, objective=term, clip=(low, high), tau=(1.5, 0.7))

    by_logprob = paper.gradient(published, x)
    bounded = definition.bounded_variable(logprobs, data.old_logprobs, ratio, objective)
    found = definition.policy_term(logprobs, ratio, bounded, data.advantages, objective)
    close(found, published(x))
    (grad,) = torch.autograd.grad(found.sum(), logprobs)
    close(grad, by_logprob)
    if term != "sapo":
        on_policy = -advantages * np.exp(x - old)
        assert len(np.unique(np.isclose(by_logprob, on_policy))) == 2, "some are out of the range"


@pytest.mark.parametrize("ratio", [0.0, 15.0, 40.0, 90.0])
def test_sapos_gate_keeps_its_digits(ratio: float) -> None:
    """In fp32, where the sigmoid of 17 rounds to 1."""
    x = torch.tensor([ratio], requires_grad=True)
    objective = Objective(policy_term="sapo", tau_positive=1.0, tau_negative=1.0)
    term = definition.policy_term(x, x, x, torch.ones(1), objective)
    (grad,) = torch.autograd.grad(term.sum(), x)
    wanted = -1 / np.cosh((ratio - 1) / 2) ** 2
    # An exponential of up to 89 has a relative error of 89 roundings of 6e-8.
    np.testing.assert_allclose(grad.numpy(), wanted, rtol=1e-5)


def test_unknown_names_are_refused() -> None:
    x = torch.ones(1)
    with pytest.raises(ValueError, match=r"policy term .*'clip', .* got 'tppo'"):
        definition.policy_term(x, x, x, x, Objective(policy_term="tppo"))
    with pytest.raises(ValueError, match=r"estimator .*'k1', .* got 'k4'"):
        definition.sampled_kl(x, "k4")


def test_gspo_has_the_sequences_ratio_and_a_gradient_per_token() -> None:
    """Two sequences, one with a gap and one with an uncounted token. With one advantage per
    sequence the gradient is that of the sequence's ratio."""
    lengths = (5, 3)
    old, x = draw(2, N)
    logprobs = x.requires_grad_()
    counted = torch.tensor([1, 1, 0, 1, 1, 1, 1, 0]).bool()
    ends = torch.tensor([0, 5, 5, 8])  # the second has no tokens
    stand_in = definition.sequence_ratio_logprobs(logprobs, old, counted, ends)
    ratio = (logprobs - stand_in).exp()
    wanted = []
    for part in logprobs.split(lengths), old.split(lengths), counted.split(lengths):
        wanted.append(part)
    exact = [
        paper.sequence_ratio(*(x.detach().numpy()[None] for x in part))[0, 0]
        for part in zip(*wanted, strict=True)
    ]
    close(ratio, np.repeat(exact, lengths))
    (grad,) = torch.autograd.grad((ratio * counted).sum(), logprobs)
    close(grad, np.repeat(exact, lengths) * counted.numpy())
    # GSPO itself: Σ over the sequence of s, through the mean of its log ratios.
    sequence_ratios = [((p - o)[c].mean()).exp() * c.sum() for p, o, c in zip(*wanted, strict=True)]
    (of_gspo,) = torch.autograd.grad(torch.stack(sequence_ratios).sum(), logprobs)
    close(grad, of_gspo.numpy())


@pytest.mark.parametrize("term", [term for term in draws.TERMS if term not in draws.DETACHED])
def test_gradients_are_those_of_finite_differences(term: str) -> None:
    data = draws.batch((4,), 5).leaf()
    keywords = draws.options(data, term)
    w = torch.full((4,), 0.25, dtype=torch.float64)
    assert gradcheck(lambda x: draws.exact(x, *data[1:], w, **keywords).loss, data.logits)


def test_a_ruled_out_token_adds_nothing_and_one_ruled_out_by_q_makes_the_kl_infinite() -> None:
    logits, ref, tokens = draw(3, V), draw(3, V), torch.zeros(3, dtype=torch.int64)
    logits[0, 4:], ref[0, 4:] = -torch.inf, -torch.inf
    ref[1, 7] = -torch.inf
    logits.requires_grad_()
    found = definition.token_stats(logits, tokens, Softmax(), ref_logits=ref)
    z, q = logits.detach().numpy(), ref.numpy()
    close(found.entropy[0], paper.entropy(z[:1, :4])[0])
    close(found.kl[0], paper.full_kl(z[:1, :4], q[:1, :4])[0])
    assert found.kl.isinf().tolist() == [False, True, False]
    (grad,) = torch.autograd.grad(found.entropy.sum() + found.kl[[0, 2]].sum(), logits)
    assert grad.isfinite().all()
    assert (grad[0, 4:] == 0).all()


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (0.95, 0.0)])
@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_gae_is_the_discounted_sum_of_residuals(
    gamma: float, lam: float, truncated: bool, packed: bool
) -> None:
    """Also with gaps in the mask, and with discounts per sequence."""
    rewards, values, ends = draw(B, T), draw(B, T), draw(B)
    mask = (torch.arange(T) < torch.tensor(LENGTHS)[:, None]) & (torch.arange(T) != 2)
    inputs = {"rewards": rewards, "values": values, "mask": mask}
    inputs |= {"bootstrap": ends} if truncated else {}
    wanted = paper.gae({name: x.numpy() for name, x in inputs.items()}, gamma=gamma, lam=lam)
    trajectory = Trajectory(values, rewards, mask, None, ends if truncated else None)
    if packed:
        starts = torch.arange(B + 1) * T
        flat = (x.flatten() for x in (values, rewards, mask))
        trajectory = Trajectory(*flat, starts, trajectory.bootstrap)
    each = [torch.full((B,), x, dtype=torch.float64) for x in (gamma, lam)]
    for discounts in (Discounts(gamma, lam), Discounts(0.1, 0.1, *each)):
        found = definition.gae(trajectory, discounts)
        for name, x in found._asdict().items():
            close(x.view(B, T), np.where(mask, wanted[name], 0.0))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("shift_mean", [True, False])
def test_rewards_are_shaped_then_advantages_estimated_then_whitened(
    estimator: str, shift_mean: bool
) -> None:
    scores, values, logprobs, ref = draw(B), draw(B, T), draw(B, T), draw(B, T)
    mask = torch.arange(T) < torch.tensor(LENGTHS)[:, None]
    inputs = {
        "scores": scores.clamp(-0.5, 0.5), "logprobs": logprobs, "ref_logprobs": ref,
        "values": values, "mask": mask,
    }  # fmt: skip
    arrays = {name: x.numpy() for name, x in inputs.items()}
    shaped = paper.rewards(arrays, kl_coef=0.1, estimator=estimator)
    wanted = paper.gae(arrays | shaped, gamma=0.99, lam=0.95)
    estimates = paper.sampled_kl(arrays["logprobs"], arrays["ref_logprobs"], estimator)
    found = definition.shaped_advantages(
        Trajectory(values, None, mask),
        Shaping(scores, logprobs, ref, 0.1, estimator, 0.5),
        Discounts(0.99, 0.95),
    )
    for name, x in wanted.items():
        close(getattr(found, name), np.where(mask, x, 0.0))
    close(found.kl, np.where(mask, estimates, 0.0).sum(1))
    counted = wanted["advantages"][mask.numpy()]
    close(found.moments, np.array([len(counted), counted.sum(), (counted**2).sum()]))
    whitened = paper.whiten(
        {"x": wanted["advantages"], "mask": arrays["mask"]}, shift_mean=shift_mean
    )["whitened"]
    white = np.where(mask, whitened, 0.0)
    for moments in (None, found.moments):
        given = definition.whiten(found.advantages, mask, shift_mean=shift_mean, moments=moments)
        close(given, white)


def test_shaping_takes_a_batch_of_any_strides() -> None:
    by_time = torch.randn(4, 3, 2, dtype=torch.float64)  # [T, B, ·]
    values, logprobs = by_time.unbind(-1)

    def shaped(layout: Callable[[Tensor], Tensor]) -> ShapedAdvantages:
        trajectory = Trajectory(layout(values.T), token_rewards=layout(logprobs.T))
        scores = torch.ones(3, dtype=torch.float64)
        shaping = Shaping(scores, layout(logprobs.T), layout(values.T), kl_coef=0.1)
        return definition.shaped_advantages(trajectory, shaping, Discounts())

    torch.testing.assert_close(shaped(lambda x: x), shaped(Tensor.contiguous), rtol=0, atol=0)


class _NoFp64(TorchDispatchMode):
    """Refuse fp64 tensors on the GPU of a Mac, as Metal does."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and x.device.type == "mps":
                assert x.dtype != torch.float64, function
        return result


def test_whitening_needs_no_fp64_on_the_gpu_of_a_mac() -> None:
    """Fake tensors stand in for those of the device."""
    with FakeTensorMode(), _NoFp64():
        x = torch.zeros(3, 5, device="mps")
        assert definition.whiten(x).dtype == torch.float32
        with pytest.raises(AssertionError):
            x.double()
