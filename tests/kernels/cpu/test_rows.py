"""The CPU's loops over rows of logits equal the definition in fp64.

Logits, exponentials and their sums are fp32: 1e-5 nats (or 4 units in the last place of a larger
logprob). A gradient is within 2e-6 of the row's largest entry: some ten factors, each rounded by
6e-8; the ratio inherits the logprob's three roundings, which grow below −11 nats. A sampled KL's
derivative is a difference of logprobs, known to 1e-6 nats, and may cancel the policy term's: 1e-6
of the token's weight more. Capped scores are rounded before the shift, and 16-bit gradients at the
end: both by `rows.assert_gradient`. The entropy's gradient from saved statistics of nearly equal
logits has fewer digits, and a test of its own. test_losses.py tests every keyword of the public
functions on this backend.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fastppo_kernels
import pytest
import torch
from fastppo_kernels import cpu_backend, definition
from fastppo_kernels.cpu import threads as cpu_threads
from fastppo_kernels.cpu.operands import BLOCK
from fastppo_kernels.records import PPORows, StatsGradients
from rows import (
    EDGES,
    PLAIN,
    TERMS,
    N,
    arguments_of,
    assert_gradient,
    assert_statistic,
    assert_statistics,
    at_the_edge,
    defined_statistics,
    draw,
    in_fp64,
    logprobs_of,
    operands,
    peaked,
)
from torch import Tensor

VOCABULARIES = (3, 37, 2051)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def assert_rows_gradient(
    found: Tensor, wanted: Tensor, logprobs: Tensor, floor: Tensor | float = 0.0
) -> None:
    """Compare relative to the row's largest entry; `floor` [N, 1] is allowed in addition."""
    assert torch.equal(found.isnan(), wanted.isnan())
    error = (found.double() - wanted).nan_to_num(0.0).abs()
    largest = wanted.nan_to_num(0.0).abs().amax(-1, keepdim=True)
    tolerance = (3 * 2.0**-24 * logprobs.abs().nan_to_num(0.0)).clamp(2e-6, 1e-5).unsqueeze(-1)
    assert (error <= tolerance * largest + floor + torch.finfo(torch.float32).tiny).all()


def check_loss(given: dict[str, Any]) -> PPORows:
    """Compare value and gradient, also in place and without a gradient."""
    exact, exact_rest = operands(in_fp64(given))
    wanted = definition.ppo_loss(*exact, **exact_rest)
    records, rest = operands(given)
    found = cpu_backend.ppo_loss(*records, **rest)
    for name in ("logprobs", "entropy", "kl"):
        assert_statistic(getattr(found, name), getattr(wanted, name), name)
    torch.testing.assert_close(
        found.sums.double(), wanted.sums, rtol=1e-5, atol=1e-5 * N, equal_nan=True
    )
    assert found.grad is not None
    assert wanted.grad is not None
    assert found.grad.dtype == records.logits.dtype
    if found.grad.dtype != torch.float32 or given.get("softcap"):
        assert_gradient(found.grad, wanted.grad)
    else:
        has_kl = given.get("kl_coef", 0.0) != 0
        floor = 1e-6 * given["weights"].unsqueeze(-1) if has_kl else 0.0
        assert_rows_gradient(found.grad, wanted.grad, wanted.logprobs, floor)
    over = records._replace(logits=records.logits.clone())
    inplace = cpu_backend.ppo_loss(*over, **rest, inplace=True)
    assert inplace.grad is over.logits
    without = cpu_backend.ppo_loss(*records, **rest, need_grad=False)
    assert without.grad is None
    torch.testing.assert_close(inplace.grad, found.grad, rtol=0, atol=0, equal_nan=True)
    for again in (inplace, without):
        for one, other in zip(again[:4], found[:4], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    return found


def check_statistics(given: dict[str, Any], grads: StatsGradients) -> None:
    """Compare the statistics, and the gradient of the logits for `grads`."""
    records, rest = operands(given)
    logits, softmax, ref = records.logits, records.softmax, rest.get("ref_logits")
    tokens = records.per_token.tokens
    wanted, wanted_grad = defined_statistics(logits, tokens, softmax, grads, ref)
    found = cpu_backend.token_stats(logits, tokens, softmax, ref_logits=ref)
    assert_statistics(found, wanted)
    found_grad = cpu_backend.token_stats_backward(
        grads, logits, tokens, found, softmax, ref_logits=ref
    )
    if logits.dtype != torch.float32 or softmax.softcap:
        assert_gradient(found_grad, wanted_grad)
    else:
        assert_rows_gradient(found_grad, wanted_grad, wanted.logprobs.detach())


@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize(
    ("vocab", "dtype", "change"),
    [
        *((vocab, torch.float32, "") for vocab in VOCABULARIES),
        *((37, torch.float32, change) for change in ("masked", "far")),
        *((2051, dtype, "masked") for dtype in DTYPES[1:]),
    ],
)
def test_loss_and_gradient_equal_the_definition(
    term: str, vocab: int, dtype: torch.dtype, change: str
) -> None:
    found = check_loss(arguments_of(term, vocab, dtype, change))
    assert found.grad is not None
    assert found.grad.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("upstream", ["all", "some rows", "logprob alone"])
@pytest.mark.parametrize("term", ["policy", "full KL", "everything"])
def test_statistics_and_gradients_equal_the_definition(
    term: str, upstream: str, dtype: torch.dtype
) -> None:
    given = arguments_of(term, 2051, dtype)
    g = torch.randn(3, N)
    if upstream == "some rows":
        g[:, ::2] = 0
    grads = StatsGradients(g[0], g[1], g[2] if "ref_logits" in given else None)
    if upstream == "logprob alone":
        grads = StatsGradients(g[0])
    check_statistics(given, grads)


# ---------------------------------------------------------------------------------- special numbers


@pytest.mark.parametrize(("case", "softcap"), EDGES)
def test_rows_at_the_edge_of_the_numbers(case: str, softcap: float | None) -> None:
    given, upstream = at_the_edge(case, softcap)
    check_loss(given)
    check_statistics(given, upstream)


def test_tokens_at_both_ends_of_a_block() -> None:
    given = draw(4, 2 * BLOCK)
    given["tokens"] = torch.tensor([0, BLOCK - 1, BLOCK, 2 * BLOCK - 1])
    given["old_logprobs"] = logprobs_of(given["logits"], given["tokens"]).float() + 0.1
    check_loss(given)
    check_statistics(given, StatsGradients(torch.randn(4), torch.randn(4)))


@pytest.mark.parametrize("kind", ["flat", "one peak over a flat row", "spread"])
def test_sums_over_a_large_vocabulary_keep_their_digits(kind: str) -> None:
    """152064 equal terms, where a running sum rounds in the same direction each time."""
    vocab = 152064
    given = draw(2, vocab, spread=5.0) | {"entropy_coef": 0.5}
    if kind != "spread":
        given["logits"][:] = 0.1
    if kind == "one peak over a flat row":
        given["logits"][:, 7] = 12.3
        given["tokens"] = torch.tensor([7, 11])
    given["old_logprobs"] = logprobs_of(given["logits"], given["tokens"]).float() + 0.1
    check_loss(given)
    check_statistics(given, StatsGradients(torch.ones(2), torch.ones(2)))


def test_a_soft_caps_gradient_keeps_its_digits_near_the_cap() -> None:
    """tanh(3.8): the slope 1 − tanh² would be off by 1.6e-5."""
    given = draw(4, 50) | {"softcap": 30.0, "lowest_ratio": -math.inf, "highest_ratio": math.inf}
    given["logits"] = torch.linspace(90, 114, 50).repeat(4, 1)
    given["old_logprobs"] = torch.full((4,), -4.0)
    check_loss(given)


def test_the_entropys_gradient_from_saved_statistics_of_nearly_equal_logits() -> None:
    """It is p·(μ − t) with μ = log S − entropy. fp32 keeps 7.6 nats to 2.4e-7 each, against about
    3.4 deviations of 0.01."""
    given = draw(5, 2064, spread=0.01)
    logits, tokens = given["logits"], given["tokens"]
    grads = StatsGradients(torch.zeros(5), torch.ones(5))
    _, wanted = defined_statistics(logits, tokens, PLAIN, grads)
    stats = cpu_backend.token_stats(logits, tokens, PLAIN)
    found = cpu_backend.token_stats_backward(grads, logits, tokens, stats, PLAIN)
    largest = wanted.abs().amax(-1, keepdim=True)
    assert ((found - wanted).abs() <= 1.5e-5 * largest).all()


@pytest.mark.parametrize("nats", [12.0, 20.0])
def test_one_minus_p_keeps_its_digits(nats: float) -> None:
    given = draw(N, 2051)
    peaked(given["logits"], given["tokens"], nats)
    wanted = definition.token_stats(given["logits"].double(), given["tokens"], PLAIN)
    found = cpu_backend.token_stats(given["logits"], given["tokens"], PLAIN)
    # At 20 nats a logprob is -2e-9. As a difference of scores it has 2e-6 of error in fp64 too.
    logprobs = torch.log1p(-wanted.p_others)
    torch.testing.assert_close(found.logprobs.double(), logprobs, rtol=2e-6, atol=0)
    for name in ("entropy", "p_others"):
        torch.testing.assert_close(
            getattr(found, name).double(), getattr(wanted, name), rtol=2e-6, atol=0
        )


def test_an_infinite_kl_that_is_only_reported_leaves_the_gradient() -> None:
    given = arguments_of("full KL") | {"kl_coef": 0.0}
    given["ref_logits"][0, 5] = -torch.inf
    found = check_loss(given)
    assert found.grad is not None
    assert found.kl[0] == math.inf
    assert found.grad.isfinite().all()


@pytest.mark.parametrize("below", [3.0, 12.0, 19.0, 30.0])
def test_the_gradient_of_ratio_k3_keeps_its_digits_below_the_reference(below: float) -> None:
    """e^{−d} cancels between the estimate and its slope: at 19 nats fp32 would have no digits."""
    given = draw(N, 37) | {"kl_coef": 0.2, "kl_ratio_weighted": True}
    given["advantages"][:] = 0.0
    given["ref_logprobs"] = logprobs_of(given["logits"], given["tokens"]).float() + below
    wanted = definition.ppo_loss(*operands(in_fp64(given))[0]).grad
    found = cpu_backend.ppo_loss(*operands(given)[0]).grad
    assert wanted is not None
    assert found is not None
    assert_gradient(found, wanted)


# ------------------------------------------------------------------------------------ whole batches


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_a_view_are_read_in_place(dtype: torch.dtype) -> None:
    given, _ = operands(draw(6, 37, dtype))
    wanted = cpu_backend.ppo_loss(*given)
    whole = torch.full((3, 3, 41), torch.nan, dtype=dtype)
    view = whole[:, :-1, 2:39]
    view.copy_(given.logits.view(3, 2, 37))
    assert wanted.grad is not None
    for inplace in (False, True):
        found = cpu_backend.ppo_loss(*given._replace(logits=view), inplace=inplace)
        assert found.grad is not None
        assert torch.equal(found.sums, wanted.sums)
        assert torch.equal(found.grad.flatten(0, 1), wanted.grad)
    view.fill_(torch.nan)
    assert whole.isnan().all()


# ----------------------------------------------------------------------------- threads, forks, disk


def test_bits_do_not_depend_on_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_threads, "ENTRIES_PER_THREAD", 1)
    given, rest = operands(arguments_of("everything", 2051))
    wanted = cpu_backend.ppo_loss(*given, **rest)
    try:
        torch.set_num_threads(3)
        found = cpu_backend.ppo_loss(*given, **rest)
        with ThreadPoolExecutor(2) as callers:  # two at once
            at_once = list(callers.map(lambda _: cpu_backend.ppo_loss(*given, **rest), range(4)))
    finally:
        torch.set_num_threads(1)
    for again in (found, *at_once):
        for one, other in zip(again, wanted, strict=True):
            assert torch.equal(one, other)


AFTER_A_FORK = """
import os
import torch
from fastppo_kernels import cpu_backend
from fastppo_kernels.cpu import threads as cpu_threads
from fastppo_kernels.records import Softmax

cpu_threads.ENTRIES_PER_THREAD = 1
torch.set_num_threads(2)
logits, tokens = torch.randn(8, 100), torch.arange(8)
before = cpu_backend.token_stats(logits, tokens, Softmax()).logprobs
child = os.fork()
same = torch.equal(cpu_backend.token_stats(logits, tokens, Softmax()).logprobs, before)
if child == 0:
    os._exit(0 if same else 1)
assert same
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_it_runs_after_a_fork_and_without_a_writable_folder(tmp_path: Path) -> None:
    """Without a folder for compiled code it compiles again, without a warning. Files are in place
    of the folders, because a superuser can write to read-only folders."""
    shutil.copytree(
        Path(fastppo_kernels.__file__).parent,
        tmp_path / "fastppo_kernels",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    (tmp_path / "fastppo_kernels" / "__pycache__").touch()
    nowhere = str(tmp_path / "fastppo_kernels" / "__pycache__" / "cache")
    places = dict.fromkeys(("HOME", "XDG_CACHE_HOME", "NUMBA_CACHE_DIR"), nowhere)
    fork = "ignore:This process:DeprecationWarning"  # Python's own on threads
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-W", fork, "-c", AFTER_A_FORK],
        env={**os.environ, **places, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
