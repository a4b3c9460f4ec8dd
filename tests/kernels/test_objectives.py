"""Every policy term and KL estimator is known to every backend, to the tests and to the docs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import draws
import numpy as np
import pytest
import torch
from fastppo_kernels import cpu_backend, definition, torch_backend
from fastppo_kernels.records import KL_ESTIMATORS, POLICY_TERMS, Objective, PPORows
from logit_rows import (
    CLIPPED,
    TERMS,
    arguments_of,
    assert_gradient,
    draw,
    in_fp64,
    logprobs_of,
    operands,
)

import fastppo
from benchmarks.conformance import formulas as paper
from fastppo.ppo.options.config import PPOConfig

triton_backend = pytest.importorskip(
    "fastppo_kernels.triton_backend", reason="Triton is not installed"
)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
if torch.cuda.is_available():
    pytest.skip("test_on_a_gpu.py does this on a GPU", allow_module_level=True)

BACKENDS = {"cpu": cpu_backend, "torch": torch_backend, "triton": triton_backend}
DOCS = Path(__file__).parents[2] / "docs"
SCALARS = ("tau_positive", "tau_negative", "kl_coef", "lowest_ratio", "highest_ratio")
backends = pytest.mark.parametrize("backend", BACKENDS)


def case_of(field: str, name: str) -> str:
    """Return the first case of `logit_rows.TERMS` with this name and no other change."""
    default = getattr(Objective(), field)
    for case, given in TERMS.items():
        if given.get(field, default) == name and given.keys() <= {field, *SCALARS}:
            return case
    raise AssertionError(f"tests/helpers/logit_rows.py has no case of {name!r}")


def computed(backend: str, given: dict[str, Any]) -> PPORows:
    return BACKENDS[backend].ppo_loss(*operands(given)[0])


def numbers(given: dict[str, Any], *names: str) -> list[np.ndarray]:
    """Return fp64 NumPy arrays of the logprobs, and of the operands of these names."""
    logprobs = logprobs_of(given["logits"], given["tokens"])
    return [x.double().numpy() for x in (logprobs, *(given[name] for name in names))]


@backends
@pytest.mark.parametrize("name", POLICY_TERMS)
def test_each_backend_computes_the_published_term(name: str, backend: str) -> None:
    """Value and gradient: p_y and its own derivative give those of all logits."""
    given = arguments_of(case_of("policy_term", name))
    taus = (given.get("tau_positive", 1.0), given.get("tau_negative", 1.0))
    bounds = CLIPPED | given
    clip = (1 - bounds["lowest_ratio"], bounds["highest_ratio"] - 1)
    logprobs, old_logprobs, advantages = numbers(given, "old_logprobs", "advantages")
    inputs = {"old_logprobs": old_logprobs, "advantages": advantages}

    def published(x: np.ndarray) -> np.ndarray:
        return paper.policy_term(x, logprobs, inputs, objective=name, clip=clip, tau=taus)

    term = published(logprobs)
    by_logprob = paper.gradient(published, logprobs)
    if name not in ("cispo", "sapo"):
        assert 0 < np.count_nonzero(by_logprob) < len(by_logprob), "some have no gradient"
    factors = given["weights"].double() * given["importance_weights"].double()
    found = computed(backend, given)
    # fp32: the ratio's logprobs have errors of 1e-6 nats.
    wanted = (factors.numpy() * term).sum()
    np.testing.assert_allclose(found.sums[1].item(), wanted, rtol=1e-5, atol=1e-5)
    logits = given["logits"].double().requires_grad_()
    log_p = definition.log_softmax(logits, operands(given)[0].softmax)
    of_tokens = log_p.gather(1, given["tokens"][:, None])[:, 0]
    (grad,) = torch.autograd.grad(of_tokens, logits, factors * torch.from_numpy(by_logprob))
    assert_gradient(found.grad, grad, one_signed=True)


@backends
@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_each_backend_computes_the_published_estimator(name: str, backend: str) -> None:
    given = arguments_of(case_of("kl_estimator", name))
    found = computed(backend, given)
    wanted = paper.sampled_kl(*numbers(given, "ref_logprobs"), name)
    np.testing.assert_allclose(found.kl.numpy(), wanted, rtol=1e-5, atol=1e-5)


@backends
def test_backends_refuse_unknown_names(backend: str) -> None:
    """In Triton an assertion at compile time."""
    refusal = ValueError if backend != "triton" else Exception
    for field in ("policy_term", "kl_estimator"):
        given = arguments_of("k1") | {field: "tppo"}
        with pytest.raises(refusal, match=r"expected|have"):
            computed(backend, given)


@backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_sapos_gradient_at_a_large_ratio(backend: str, dtype: torch.dtype) -> None:
    """At a ratio of 20 the gate's 1 − σ is 6e-9, less than an fp32 rounding of σ."""
    given = draw(5, 37, dtype) | {"policy_term": "sapo", "tau_positive": 1.0, "tau_negative": 1.0}
    logprobs = logprobs_of(given["logits"], given["tokens"])
    given["old_logprobs"] = (logprobs - np.log(20)).float()
    given["weights"] = torch.full((5,), 1e6)  # fp16 gradients below 6e-8 are 0
    found = computed(backend, given)
    wanted = definition.ppo_loss(*operands(in_fp64(given))[0]).grad
    largest = wanted.abs().amax(-1, keepdim=True)
    # The ratio's error, 20 roundings of a logprob of some nats, is that of the exponent.
    assert ((found.grad.double() - wanted).abs() <= 2e-3 * largest).all()
    assert (largest > 0).all()


@backends
@pytest.mark.parametrize("name", ["cispo", "dis"])
def test_tokens_outside_the_range_count_without_an_advantage(name: str, backend: str) -> None:
    """Half of the tokens are beyond each bound, and have no advantage."""
    given = draw(6, 37) | {"policy_term": name, "advantages": torch.zeros(6)}
    logprobs = logprobs_of(given["logits"], given["tokens"])
    given["old_logprobs"] = (logprobs + torch.tensor([0.5, -0.5, 0.0, 0.5, -0.5, 0.0])).float()
    sums = computed(backend, given).sums
    assert fastppo.loss_metrics(sums, name)["clip_fraction"].item() == pytest.approx(4 / 6)
    assert fastppo.loss_metrics(sums, "clip")["clip_fraction"].item() == 0


@backends
def test_a_probability_that_rounds_to_1_has_a_small_divergence(backend: str) -> None:
    """Without the 1e-8 in its logarithm the KL of (1 − 1e-7, 1) would be infinite."""
    given = draw(4, 3) | {"policy_term": "dppo_kl", "advantages": torch.ones(4)}
    given["logits"].scatter_(1, given["tokens"][:, None], 60.0)
    given["old_logprobs"] = torch.full((4,), -1e-7)
    found = computed(backend, given)
    assert fastppo.loss_metrics(found.sums, "dppo_kl")["clip_fraction"].item() == 0
    assert found.sums.isfinite().all()


@pytest.mark.parametrize("name", POLICY_TERMS)
def test_each_policy_term_is_an_objective_drawn_and_documented(name: str) -> None:
    batch = draws.batch((6,), 11)
    drawn = {draws.options(batch, term).get("objective", "clip") for term in draws.TERMS}
    assert name in drawn, "tests/helpers/draws.py"
    assert PPOConfig(objective=name).objective == name
    assert re.search(rf"^\|[^|]*`{name}`", (DOCS / "definitions.md").read_text(), re.MULTILINE)
    assert re.search(rf"^\|.*`objective: {name}`", (DOCS / "ppo.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_each_estimator_is_drawn_and_documented(name: str) -> None:
    batch = draws.batch((6,), 11)
    drawn = {draws.options(batch, term).get("kl_estimator") for term in draws.TERMS}
    assert name in drawn, "tests/helpers/draws.py"
    assert re.search(rf"^\|[^|]*`{name}`", (DOCS / "definitions.md").read_text(), re.MULTILINE)
    assert re.search(rf"^\| {name} \|", (DOCS / "ppo.md").read_text(), re.MULTILINE)
