"""Execute the compiled Triton kernels without a GPU and compare them with the definition.

    python tests/ptx/emulated.py [--all] [--capability 90] [loss statistics scans linear others]

The launchers run on CPU tensors, and `emulate.py` executes the PTX that Triton compiles for them.
Each case runs under several orders of programs, warps and stores, and must

- agree with the definition in fp64, within the tolerances of `tests/helpers/logit_rows.py`;
- give the same bits under every order, with and without contraction of multiply and add, and
  correct results with the hardware's documented errors of approximate instructions (three cases
  with cancelling terms, marked "cancels_at", get the error allowance of the exact gradient);
- read and write inside its tensors, aligned; write every byte of its results; let no unwritten or
  racy byte reach a result; store one value where several lanes store to one address.

The default selection covers every kernel, configuration and shape (of the lm-head's loop, two
cases), each known past defect at three shapes, and the three cases with cancelling terms. `--all`
runs every configuration at every shape.
The emulator does not model registers, time, or memory orders weaker than barriers.
"""

from __future__ import annotations

# ruff: noqa: E402
import argparse
import functools
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
# The checkout, even if another version is installed.
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "tests" / "helpers")]

import emulate
import torch
from fastppo_kernels import definition, linear, triton_backend
from fastppo_kernels.records import (
    Discounts,
    Gemm,
    Projection,
    ProjectionGradients,
    Shaping,
    Softmax,
    StatsGradients,
    StatsRows,
    Trajectory,
    map_tensors,
)
from fastppo_kernels.triton import draw as triton_draw
from fastppo_kernels.triton import scale as triton_scale
from fastppo_kernels.triton import views as triton_views
from fastppo_kernels.triton import whitening as triton_whitening
from logit_rows import (
    assert_gradient,
    assert_loss,
    assert_statistic,
    assert_statistics,
    defined_statistics,
    draw,
    in_fp64,
    logprobs_of,
    operands,
    peaked,
)
from torch import Tensor
from trajectories import assert_close, bounds, padded
from trajectories import in_fp64 as record_in_fp64
from trajectories import packed as in_a_row

from fastppo.rollout import draw as sampling

GROUPS = ("loss", "statistics", "scans", "linear", "others")

HARMLESS = "write after write of the same byte"
"""Layouts are replicated: several warps store the same value."""

NEIGHBOURS = ("global race of programs", "global read of what another program wrote")
"""Expected for in-place rows that are not 16-byte aligned. The first and last 16 bytes of a row are
shared with its neighbors and are read but not used: the results' `raced` count stays 0."""


class Results(NamedTuple):
    """The results of a launch under one kind of rounding."""

    found: dict[str, Tensor]
    has_hardware_errors: bool


class Case(NamedTuple):
    """A named check of one launcher."""

    name: str
    run: Callable[[Emulation], None]
    is_selected: bool


class Emulation:
    """Runs each case under every order."""

    def __init__(self, capability: int) -> None:
        order = emulate.Schedule
        orders = [
            order(),
            order(sched=1, programs=1, late=True, down=True),
            order(sched=2, seed=3, programs=2, quantum=3),
            order(down=True),
        ]
        fused = [order(fuse=True), order(fuse=True, sched=1, down=True)]
        self.same_bits = [orders, fused, [order(perturb=5)]]
        self.session = emulate.Session(capability)
        # Two multiprocessors, so that there are several programs with several rows each.
        for module in (triton_views, triton_scale):
            module.device_limits = lambda device: (2, 2**26)
        # The lm-head's buffer of logits: torch writes it, and the emulator does not see that.
        triton_backend.fresh = lambda like: self.session.tensor(like.shape, like.dtype)

    def results(
        self,
        launch: Callable[[Callable[..., Tensor]], dict[str, Tensor]],
        *,
        in_place: bool = False,
    ) -> Iterator[Results]:
        """Yield the checked results of `launch` for each kind of rounding.

        `launch` takes the function that copies a tensor into guarded memory.
        """
        for schedules in self.same_bits:
            first: dict[str, Tensor] = {}
            for schedule in schedules:
                self.session.fresh()
                self.session.findings.clear()
                with self.session.running(schedule):
                    found = launch(self.session.like)
                for name, x in found.items():
                    for row in x.view(-1, x.shape[-1]) if x.is_contiguous() else rows_of(x):
                        unwritten, raced = self.session.shadow(row)
                        assert not unwritten, f"{name}: {unwritten} bytes are not written"
                        assert not raced, f"{name}: {raced} bytes come from a race"
                    first.setdefault(name, x.clone())
                    assert same_bits(x, first[name]), f"{name}: other bits under {schedule}"
                for finding in self.session.findings:
                    kind = finding.kind
                    is_harmless = HARMLESS in kind or (in_place and kind.startswith(NEIGHBOURS))
                    assert is_harmless, f"{finding} under {schedule}"
            yield Results(first, has_hardware_errors=bool(schedules[0].perturb))


def rows_of(x: Tensor) -> list[Tensor]:
    """Return the dense rows of a view."""
    return [row for part in x for row in (part if x.dim() == 3 else part[None])]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Compare bit for bit; NaN equals NaN."""
    return torch.equal(torch.isnan(a), torch.isnan(b)) and torch.equal(
        a.nan_to_num(0.0, 1.0, -1.0), b.nan_to_num(0.0, 1.0, -1.0)
    )


# ------------------------------------------------------------------------------- rows of logits


class Shape(NamedTuple):
    """Rows logits[:, skip:], or logits[:, :-1] of [n/2, 3, V] with `is_cut`."""

    name: str
    n: int
    vocab: int
    dtype: torch.dtype = torch.bfloat16
    skip: int = 0
    is_cut: bool = False

    def placed(self, x: Tensor, like: Callable[..., Tensor]) -> Tensor:
        if not self.is_cut:
            whole = torch.zeros(self.n, self.skip + self.vocab, dtype=x.dtype)
            whole[:, self.skip :] = x
            return like(whole)[:, self.skip :]
        whole = torch.zeros(self.n // 2, 3, self.vocab, dtype=x.dtype)
        whole[:, :-1] = x.view(self.n // 2, 2, self.vocab)
        return like(whole)[:, :-1]


# A row gets a program of 4, 8 or 16 warps depending on its bytes (`programs.TABLE`).
SHAPES = (
    Shape("short", 7, 1024),
    Shape("short, fp32, off 16 bytes", 5, 2061, torch.float32),
    Shape("middle", 8, 6672),
    Shape("middle, off 16 bytes", 5, 6675),
    Shape("middle, fp16, logits[:, 3:]", 4, 6672, torch.float16, skip=3),
    Shape("middle, of two kinds", 4, 8211, is_cut=True),
    Shape("long", 3, 66048),
    Shape("long, fp32, off 16 bytes", 2, 33001, torch.float32),
)

PEAKED_SHAPES = tuple(
    Shape(f"seven rows, fp32, V = {vocab}", 7, vocab, torch.float32)
    for vocab in (2061, 6675, 33001)
)
"""The token is 8 to 14 nats above the others, one more per row."""

LOSSES: dict[str, dict[str, Any]] = {
    "bare": {},
    "entropy, in place": {"entropy_coef": 0.05, "inplace": True},
    "k1": {"kl_estimator": "k1", "kl_coef": 0.1, "temperature": 0.7},
    "k2, dual clip": {
        "kl_estimator": "k2", "kl_coef": 0.1, "dual_clip": 3.0,
        # In one row the derivative by the logprob is −ratio·A + kl_coef·(logprob − ref_logprob) =
        # 0.100 − 0.122 = −0.021, and rises by −ratio·A + kl_coef = 0.200 per nat: it is off by 9.4
        # times the logprob's error, which is 1.1e-6 nats of the possible 3.8e-6.
        "cancels_at": "short, fp32, off 16 bytes",
    },
    "k3 times the ratio, importance weights": {
        "kl_coef": 0.1, "kl_ratio_weighted": True, "importance_weights": True,
        "temperature": "per token",
        # In one row policy term and KL cancel down to a sixteenth. In another the KL is the only
        # term, and the logprob, −25, almost equals the reference's.
        "cancels_at": "short, fp32, off 16 bytes",
    },
    "no gradient, no clip": {
        "need_grad": False, "lowest_ratio": -float("inf"), "highest_ratio": float("inf"),
    },
    "weights of zero": {"entropy_coef": 0.05, "some_weights": True},
    "soft-cap": {"softcap": 15.0, "logit_scale": 0.7, "entropy_coef": 0.05},
    "soft-cap, in place, temperatures": {
        "softcap": 30.0, "inplace": True, "temperature": "per token",
    },
    "full KL": {"kl_estimator": "full", "kl_coef": 0.3, "temperature": "per token"},
    "full KL, entropy, in place": {
        "kl_estimator": "full", "kl_coef": 0.3, "entropy_coef": 0.05, "inplace": True,
    },
    "full KL, only reported": {"kl_estimator": "full", "kl_coef": 0.0, "need_grad": False},
    "full KL, soft-cap": {
        "kl_estimator": "full", "kl_coef": 0.3, "softcap": 15.0,
        # The likeliest column's t − r differs from the mean by a few hundredths.
        "cancels_at": "long, fp32, off 16 bytes",
    },
    "columns ruled out": {"entropy_coef": 0.05, "rows": "masked"},
    # Without entropy: its gradient is 0 in a constant row, and fp64's rounding would be tested.
    "rows far from zero": {"rows": "far", "temperature": 100.0, "shapes": 3},
    "cispo": {"policy_term": "cispo"},
    "sapo": {"policy_term": "sapo", "tau_positive": 1.0, "tau_negative": 1.05},
    "dis": {"policy_term": "dis"},
    "dppo_tv": {
        "policy_term": "dppo_tv", "lowest_ratio": 0.95, "highest_ratio": 1.08, "rows": "likely",
        "shapes": 2,
    },
    "dppo_kl": {
        "policy_term": "dppo_kl", "lowest_ratio": 0.99, "highest_ratio": 1.02, "rows": "likely",
        "shapes": 2,
    },
}  # fmt: skip


def hardware_allowance(given: Any, ref_logits: Tensor | None, want: Any) -> Tensor:
    """Return [N, V], the first-order effect of the hardware's errors on the exact gradient.

    Used for the shape named by "cancels_at", where this exceeds the tolerance of `logit_rows.py`.
    `given` and `want` are in fp64.

    ex2, rsqrt and division are off by up to 2 units in the last place, u = 2⁻²² relative. A
    logarithm is a polynomial and only rounds. A sum is off by u like its exponentials, and by
    u more at the last rise of its maximum, which multiplies the earlier part (earlier rises weigh
    less). The division 1/T affects all scores: a logprob is off by u·(2 + |logprob| + entropy). A
    soft-cap adds 2u·softcap/T to a score, since tanh = 1 − 2e/(1 + e) and e/(1 + e) < 0.23 is off
    by 3u relative; a logprob is the difference of two scores. The derivative by the logprob is then
    that of the perturbed logprob. A column's t − r − γ consists of four scores, and the mean γ is
    off by 2u of the mean of |t − r − γ|.
    """
    unit = 2.0**-22
    softmax = given.softmax
    temperature = softmax.temperature if softmax.temperatures is None else softmax.temperatures
    score = 2 * unit * (softmax.softcap or 0.0) / temperature
    logprob = unit * (2 + want.logprobs.abs() + want.entropy) + 2 * score
    allowance = torch.zeros_like(want.grad)
    for error in (logprob, -logprob):
        per_token = given.per_token._replace(old_logprobs=given.per_token.old_logprobs + error)
        if per_token.ref_logprobs is not None:
            per_token = per_token._replace(ref_logprobs=per_token.ref_logprobs + error)
        moved = definition.ppo_loss(
            given.logits, per_token, given.objective, softmax, ref_logits=ref_logits
        )
        allowance = torch.maximum(allowance, (moved.grad - want.grad).abs())
    if ref_logits is None:
        return allowance
    x = given.logits.clone().requires_grad_()
    (slope,) = torch.autograd.grad(definition.scores(x, softmax)[0].sum(), x)
    log_p = definition.log_softmax(given.logits, softmax)
    p = log_p.exp()
    gap = log_p - definition.log_softmax(ref_logits, softmax) - want.kl[:, None]
    error = 4 * score + 2 * unit * (p * gap.abs()).sum(-1)
    by_kl = given.per_token.weights * given.objective.kl_coef
    return allowance + (by_kl * error)[:, None] * p * slope.abs()


def changed(logits: Tensor, tokens: Tensor, kind: str | None) -> None:
    """Change the rows in place to a special kind."""
    if kind == "masked":
        logits[0, : logits.shape[1] // 2] = -torch.inf
        tokens[0] = logits.shape[1] - 1
    if kind == "peaked":
        top = logits.float().amax(-1)
        nats = torch.linspace(8.0, 14.0, len(logits))
        logits.scatter_(1, tokens[:, None], (top + nats).to(logits.dtype)[:, None])
    if kind == "likely":
        nats = torch.linspace(-2.0, 1.0, len(logits))[:, None]
        peaked(logits, tokens, nats.to(logits.dtype))
    if kind == "broken":
        logits[0] = -torch.inf
        logits[1, 3] = torch.nan
        if len(logits) > 2:
            logits[2, 3] = torch.nan
            logits[2, 5] = torch.inf
    if kind == "far":
        highest = torch.finfo(logits.dtype).max
        logits[0] = min(1e31, highest)
        logits[1] = max(-1e13, -highest)


def loss_case(shape: Shape, options: dict[str, Any], emulation: Emulation) -> None:
    options = dict(options)
    cancels_at = options.pop("cancels_at", None)
    some_weights = options.pop("some_weights", False)
    kind = options.pop("rows", None)
    options.pop("shapes", None)
    in_place = options.pop("inplace", False)
    need_grad = options.pop("need_grad", True)
    g = torch.Generator().manual_seed(shape.vocab)
    arguments = draw(shape.n, shape.vocab, shape.dtype, seed=shape.vocab)
    arguments["tokens"][:2] = torch.tensor([0, shape.vocab - 1])
    changed(arguments["logits"], arguments["tokens"], kind)
    if options.get("temperature") == "per token":
        options["temperature"] = torch.rand(shape.n, generator=g) * 1.7 + 0.3
    if options.pop("importance_weights", False):
        options["importance_weights"] = torch.rand(shape.n, generator=g) * 2
    if some_weights:
        arguments["weights"][::2] = 0.0
    ref_logits = None
    if options.get("kl_estimator") == "full":
        ref_logits = arguments["logits"] + torch.randn(shape.n, shape.vocab, generator=g).to(
            shape.dtype
        )
    exact, _ = operands(in_fp64(arguments | options))
    logprobs = logprobs_of(arguments["logits"], arguments["tokens"], exact.softmax)
    arguments["old_logprobs"] = (logprobs + 0.3 * torch.randn(shape.n, generator=g)).float()
    if options.get("kl_coef") and ref_logits is None:
        noise = torch.randn(shape.n, generator=g)
        options["ref_logprobs"] = (logprobs + noise).float()
    given, _ = operands(arguments | options)
    wide, _ = operands(in_fp64(arguments | options))
    wide_ref = None if ref_logits is None else ref_logits.double()
    want = definition.ppo_loss(*wide, ref_logits=wide_ref)

    def launch(like: Callable[..., Tensor]) -> dict[str, Tensor]:
        ref = None if ref_logits is None else shape.placed(ref_logits, like)
        rows = triton_backend.ppo_loss(
            shape.placed(given.logits, like), *given[1:],
            ref_logits=ref, need_grad=need_grad, inplace=in_place,
        )  # fmt: skip
        return {name: x for name, x in rows._asdict().items() if x is not None}

    one_signed = not options.get("entropy_coef") and ref_logits is None
    for results in emulation.results(launch, in_place=in_place):
        got = want._replace(grad=None)._replace(**results.found)
        allowance = None
        if results.has_hardware_errors and cancels_at == shape.name:
            allowance = hardware_allowance(wide, wide_ref, want)
        assert_loss(
            got,
            want if need_grad else want._replace(grad=None),
            one_signed=one_signed,
            allowance=allowance,
        )


STATISTICS: dict[str, dict[str, Any]] = {
    "bare": {},
    "temperatures": {"temperature": "per token", "shapes": 3},
    "logprob alone": {"upstream": (True, False, False)},
    "entropy alone, peaked": {"upstream": (False, True, False), "rows": "peaked"},
    "some rows without a gradient": {"upstream": (True, True, False), "some": True},
    "soft-cap": {"softcap": 15.0, "temperature": "per token"},
    "columns ruled out": {"rows": "masked"},
    "reference": {"upstream": (True, True, True)},
    "reference, soft-cap, temperatures": {
        "upstream": (True, True, True), "softcap": 15.0, "temperature": "per token",
    },
    "reference, soft-cap, peaked": {
        "upstream": (True, True, True), "softcap": 30.0, "rows": "peaked", "spread": 1.0,
    },
    "reference, KL alone, peaked": {"upstream": (False, False, True), "rows": "peaked"},
    "rows far from zero": {"rows": "far", "temperature": 100.0, "shapes": 3},
    "broken rows": {"rows": "broken", "shapes": 3},
    "broken rows, reference": {
        "rows": "broken", "upstream": (True, True, True), "shapes": 3,
    },
}  # fmt: skip


def statistics_case(shape: Shape, options: dict[str, Any], emulation: Emulation) -> None:
    kind = options.get("rows")
    wanted = options.get("upstream", (True, True, False))
    g = torch.Generator().manual_seed(shape.vocab)
    arguments = draw(
        shape.n, shape.vocab, shape.dtype, seed=shape.vocab + 1, spread=options.get("spread", 3.0)
    )
    logits = arguments["logits"]
    tokens = arguments["tokens"]
    tokens[:2] = torch.tensor([0, shape.vocab - 1])
    ref_logits = None
    if wanted[2]:
        ref_logits = logits + torch.randn(shape.n, shape.vocab, generator=g).to(shape.dtype)
    changed(logits, tokens, kind)
    if kind == "broken" and ref_logits is not None:
        ref_logits[shape.n // 2] = -torch.inf
        ref_logits[-1, 5] = torch.nan
    temperatures = None
    if options.get("temperature") == "per token":
        temperatures = torch.rand(shape.n, generator=g) * 1.7 + 0.3
    softmax = Softmax(temperatures=temperatures, softcap=options.get("softcap"))
    if isinstance(options.get("temperature"), float):
        softmax = softmax._replace(temperature=options["temperature"])
    draws = torch.randn(3, shape.n, generator=g)
    if kind == "peaked":  # of one sign at the token: terms that cancel would show their own errors
        draws = draws.abs() * torch.tensor([1.0, -1.0, 1.0])[:, None]
    if options.get("some"):
        draws[:, ::2] = 0.0
    upstream = StatsGradients(
        draws[0] if wanted[0] else torch.zeros(shape.n),
        draws[1] if wanted[1] else None,
        draws[2] if wanted[2] else None,
    )
    want, want_grad = defined_statistics(logits, tokens, softmax, upstream, ref_logits)

    def launch(like: Callable[..., Tensor]) -> dict[str, Tensor]:
        x = shape.placed(logits, like)
        ref = None if ref_logits is None else shape.placed(ref_logits, like)
        stats = triton_backend.token_stats(x, tokens, softmax, ref_logits=ref)
        grad = triton_backend.token_stats_backward(
            upstream, x, tokens, stats, softmax, ref_logits=ref
        )
        return stats._asdict() | {"grad": grad}

    for results in emulation.results(launch):
        grad = results.found.pop("grad").flatten(0, -2)
        got = StatsRows(**results.found)
        if kind == "broken":
            assert_statistic(got.normalizer, want.normalizer, "normalizer")
            assert_statistic(got.ref_normalizer, want.ref_normalizer, "ref_normalizer")
            # For a row without a distribution, infinite and NaN statistics are both correct.
            got = StatsRows(*(torch.where(x.isfinite(), x, torch.nan) for x in got))
            expected = StatsRows(*(torch.where(x.isfinite(), x, torch.nan) for x in want))
            assert_statistics(got, expected)
            whole = want_grad.flatten(0, -2).isfinite().all(-1)
            assert not grad[~whole].isfinite().all(-1).any(), "a broken row's gradient"
            assert_gradient(grad[whole], want_grad.flatten(0, -2)[whole])
        else:
            assert_statistics(got, want)
            assert_gradient(grad, want_grad.flatten(0, -2))


def scale_case(shape: Shape, options: dict[str, Any], emulation: Emulation) -> None:
    x = torch.randn(shape.n, shape.vocab).to(shape.dtype)
    factor = torch.tensor(options["factor"])

    def launch(like: Callable[..., Tensor]) -> dict[str, Tensor]:
        return {"x": triton_backend.scale_(shape.placed(x, like), like(factor))}

    for results in emulation.results(launch):
        want = x.double() * factor.double()
        assert_gradient(results.found["x"].reshape(shape.n, -1), want, one_signed=True)


# ------------------------------------------------------------------------------------ sequences

LENGTHS = {
    "one token": [1],
    "a block": [256, 256, 256],
    "around a block": [255, 256, 257, 0, 4],
    "a chunk": [8192],
    "around a chunk": [8191, 8193, 3],
    "chunks": [20000, 8195],
    "off 16 bytes": [1001, 1001],
}

SCANS: dict[str, dict[str, Any]] = {
    "gae": {},
    "gae, rewards, mask": {"rewards": True, "mask": True},
    "gae, bootstrap, discounts by sequence": {"bootstrap": True, "discounts": True, "mask": True},
    "gae, bf16": {"rewards": True, "dtype": torch.bfloat16},
    "gae, packed": {"rewards": True, "mask": True, "packed": True},
    "shaped, k1": {"shaping": "k1", "mask": True},
    "shaped, k2, bootstrap": {"shaping": "k2", "bootstrap": True, "score_clip": 0.5},
    "shaped, k3, rewards": {"shaping": "k3", "rewards": True, "mask": True},
    "shaped, k3, packed": {"shaping": "k3", "mask": True, "packed": True},
    "shaped, k1, packed, discounts": {
        "shaping": "k1", "packed": True, "discounts": True, "bootstrap": True,
    },
    "shaped, k3, bf16": {"shaping": "k3", "dtype": torch.bfloat16, "mask": True},
    "shaped, no reference": {"shaping": "none", "mask": True},
    "packed and padded": {"shaping": "k3", "mask": True, "both": True},
}  # fmt: skip


def scan_case(lengths: list[int], options: dict[str, Any], emulation: Emulation) -> None:
    g = torch.Generator().manual_seed(sum(lengths))
    dtype = options.get("dtype", torch.float32)

    def drawn() -> list[Tensor]:
        return [torch.randn(n, generator=g).to(dtype) for n in lengths]

    values, rewards, logprobs, refs = drawn(), drawn(), drawn(), drawn()
    masks = [torch.rand(n, generator=g) < 0.8 for n in lengths]
    batch = len(lengths)
    gammas, lams = torch.rand(2, batch, generator=g) * 0.1 + 0.9
    bootstrap = torch.randn(batch, generator=g) if options.get("bootstrap") else None
    scores = torch.randn(batch, generator=g)
    discounts = Discounts(0.999, 0.97)
    if options.get("discounts"):
        discounts = discounts._replace(gammas=gammas, lams=lams)
    width = max(lengths)

    def records(packed: bool) -> tuple[Any, ...]:
        arrange = in_a_row if packed else functools.partial(padded, length=width)
        mask = arrange(masks) if options.get("mask") or not packed else None
        trajectory = Trajectory(
            arrange(values),
            arrange(rewards) if options.get("rewards") else None,
            mask if options.get("mask") or len(set(lengths)) > 1 else None,
            bounds(lengths) if packed else None,
            bootstrap,
        )
        if "shaping" not in options:
            return trajectory, discounts
        estimator = options["shaping"]
        reference = None if estimator == "none" else arrange(refs)
        shaping = Shaping(scores, arrange(logprobs), reference, 0.1)
        if reference is not None:
            shaping = shaping._replace(kl_estimator=estimator)
        return trajectory, shaping._replace(score_clip=options.get("score_clip")), discounts

    name = "shaped_advantages" if "shaping" in options else "gae"
    operation = getattr(triton_backend, name)
    layouts = [False, True] if options.get("both") else [bool(options.get("packed"))]
    all_found = []
    for packed in layouts:
        given = records(packed)
        want = getattr(definition, name)(*map(record_in_fp64, given))

        def launch(
            like: Callable[..., Tensor], given: tuple[Any, ...] = given
        ) -> dict[str, Tensor]:
            guarded = [
                type(record)(*(like(x) if isinstance(x, Tensor) else x for x in record))
                for record in given
            ]
            return operation(*guarded)._asdict()

        for results in emulation.results(launch):
            for field, x in results.found.items():
                assert_close(x, getattr(want, field), 1e-5)
        all_found.append(results.found)
    if len(layouts) == 2:
        inside = padded([torch.ones_like(mask) for mask in masks], width)
        for field in ("advantages", "returns"):
            assert same_bits(all_found[0][field][inside], all_found[1][field]), field
        for field in ("kl", "moments"):
            assert same_bits(all_found[0][field], all_found[1][field]), field


def whiten_case(elements: int, options: dict[str, Any], emulation: Emulation) -> None:
    x = torch.randn(elements, dtype=torch.float64).to(options.get("dtype", torch.float32)) + 3
    mask = torch.rand(elements) < 0.7 if options["mask"] else None

    def launch(like: Callable[..., Tensor]) -> dict[str, Tensor]:
        here = None if mask is None else like(mask)
        moments = triton_whitening.whitening_moments(like(x), here)
        white = triton_backend.whiten(
            like(x), here, moments=moments, shift_mean=options["shift_mean"]
        )
        return {"moments": moments, "white": white}

    want = definition.whiten(x.double(), mask, shift_mean=options["shift_mean"])
    for results in emulation.results(launch):
        assert_close(results.found["moments"], definition.whitening_moments(x, mask), 1e-12)
        assert_close(results.found["white"], want, 1e-5)


def draw_case(vocabulary: int, options: dict[str, Any], emulation: Emulation) -> None:
    scores = 2 * torch.randn(3, vocabulary)
    scores[1] -= 1000
    scores[2, vocabulary // 2] += 100
    uniforms = torch.rand(3, dtype=torch.float64) if options["sampled"] else None

    def launch(like: Callable[..., Tensor]) -> dict[str, Tensor]:
        here = None if uniforms is None else like(uniforms)
        tokens, logprobs = triton_draw.draw(like(scores), here)
        return {"tokens": tokens, "logprobs": logprobs}

    want = sampling.draw(scores, uniforms)
    for results in emulation.results(launch):
        assert torch.equal(results.found["tokens"], want.tokens)
        # Exponentials and the logarithm of at most log V are the hardware's, in fp32.
        assert_close(results.found["logprobs"], want.logprobs, 1e-5)


def end_of_draw_case(vocabulary: int, emulation: Emulation) -> None:
    """Most tiles weigh about 2⁻⁵³ of the total, so that running sums may not exceed u·total."""
    scores = torch.full((8, vocabulary), -torch.inf)
    scores[:, 7::4096] = -36.7 - 0.3 * torch.rand(scores[:, 7::4096].shape)
    scores[range(8), torch.randint(vocabulary, (8,))] = 0.0
    uniforms = torch.full((8,), 1 - 2**-53, dtype=torch.float64)

    def launch(like: Callable[..., Tensor]) -> dict[str, Tensor]:
        tokens, logprobs = triton_draw.draw(like(scores), like(uniforms))
        return {"tokens": tokens, "logprobs": logprobs}

    for results in emulation.results(launch):
        tokens = results.found["tokens"]
        assert (tokens < vocabulary).all()
        assert_close(results.found["logprobs"], scores.gather(1, tokens[:, None])[:, 0], 1e-5)


# ---------------------------------------------------------------------------------- the lm-head

HEADS = tuple(
    Shape(f"{name}, V = {vocab}", 6, vocab, dtype)
    for vocab in (1003, 2048)  # rows of the buffer of logits with padding, and without
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32))
)

LINEARS: dict[str, dict[str, Any]] = {
    "k3, entropy, chunks of 4": {"kl_coef": 0.1, "entropy_coef": 0.05, "chunk_size": 4},
    "bias, weights of zero, chunks of 3": {
        "bias": True, "some_weights": True, "chunk_size": 3, "shapes": 0,
    },
    "full KL, bias, one chunk": {
        "kl_estimator": "full", "kl_coef": 0.3, "bias": True, "shapes": 0,
    },
    "full KL, temperatures, chunks of 4": {
        "kl_estimator": "full", "kl_coef": 0.3, "temperature": "per token", "chunk_size": 4,
        "shapes": 0,
    },
    "statistics, bias, chunks of 3": {"upstream": 2, "bias": True, "chunk_size": 3, "shapes": 0},
    "statistics, reference, chunks of 4": {"upstream": 3, "chunk_size": 4},
}  # fmt: skip


def head_results(statistics: Any, grads: ProjectionGradients) -> dict[str, Tensor]:
    """Return copies by name. The emulator does not see torch's writes, so shadows are not checked:
    unwritten results are NaN."""
    found = {name: getattr(statistics, name) for name in ("logprobs", "entropy", "kl")}
    found |= {name: x for name, x in grads._asdict().items() if x is not None}
    return {name: x.detach().clone() for name, x in found.items()}


def linear_case(shape: Shape, options: dict[str, Any], emulation: Emulation) -> None:
    """Tolerances of `tests/kernels/test_linear.py`: 1e-5 of the largest entry in fp32, twice the
    error of the definition in bf16 for bf16."""
    g = torch.Generator().manual_seed(shape.vocab)
    randn = functools.partial(torch.randn, generator=g)
    n, width = shape.n, 64
    parts = [randn(n, width), randn(shape.vocab, width) * 3 / width**0.5, randn(shape.vocab)]
    head = Projection(*(x.to(shape.dtype) for x in parts[: 3 if options.get("bias") else 2]))
    arguments = draw(n, shape.vocab, seed=shape.vocab) | options
    arguments["logits"] = definition.logits_of(head)
    if options.get("temperature") == "per token":
        arguments["temperature"] = torch.rand(n, generator=g) * 1.7 + 0.3
    (logits, per_token, objective, softmax), _ = operands(arguments)
    logprobs = logprobs_of(logits, per_token.tokens, softmax)
    per_token = per_token._replace(
        old_logprobs=(logprobs + 0.3 * randn(n)).float(),
        ref_logprobs=(logprobs + randn(n)).float(),
    )
    if options.get("some_weights"):
        per_token.weights[::2] = 0.0
    upstream = StatsGradients(*randn(options["upstream"], n)) if "upstream" in options else None
    ref_head = None
    if objective.kl_estimator == "full" or options.get("upstream") == 3:
        ref_head = head._replace(hidden=(parts[0] + 0.3 * randn(n, width)).to(shape.dtype))
        per_token = per_token._replace(ref_logprobs=None)

    def by_definition(convert: Callable[[Any], Any]) -> dict[str, Tensor]:
        leaves = map_tensors(lambda x: x.detach().requires_grad_(), convert(head))
        ref = None if ref_head is None else convert(ref_head)
        if upstream is None:
            rows = definition.linear_ppo_loss(
                leaves, convert(per_token), objective, convert(softmax), ref_projection=ref
            )
            return head_results(rows, rows.grads)
        stats = definition.linear_token_stats(
            leaves, per_token.tokens, convert(softmax), ref_projection=ref
        )
        pairs = zip(stats, convert(upstream), strict=False)  # logprobs, entropy and kl come first
        total = sum((x * grad).sum() for x, grad in pairs if grad is not None)
        by = [
            None if x is None else torch.autograd.grad(total, x, retain_graph=True)[0]
            for x in leaves
        ]
        return head_results(stats, ProjectionGradients(*by))

    def launch(like: Callable[..., Tensor]) -> dict[str, Tensor]:
        projection = map_tensors(like, head)
        how: dict[str, Any] = {
            "row_functions": triton_backend,
            "ref_projection": None if ref_head is None else map_tensors(like, ref_head),
            "gemm": Gemm(options.get("chunk_size")),
        }
        if upstream is None:
            rows = linear.ppo_loss(projection, per_token, objective, softmax, **how)
            return head_results(rows, rows.grads)
        stats = linear.token_stats(projection, per_token.tokens, softmax, **how)
        grads = linear.token_stats_backward(
            upstream, projection, per_token.tokens, stats, softmax, **how
        )
        return head_results(stats, grads)

    exact, plain = by_definition(record_in_fp64), by_definition(lambda record: record)
    for results in emulation.results(launch):
        assert results.found.keys() == exact.keys()
        for name, want in exact.items():
            error, plain_error = (x[name] - want for x in (results.found, plain))
            if shape.dtype == torch.float32:
                is_right = bool((error.abs() <= 1e-5 * want.abs().max()).all())
            else:
                is_right = bool(error.norm() <= 2 * plain_error.norm() + 1e-6 * want.norm())
            assert is_right, f"{name}: off by {error.norm() / want.norm():.2g}"


# -------------------------------------------------------------------------------------- the cases


def cases(group: str) -> Iterator[Case]:
    """Yield every configuration at every shape.

    The selection is a diagonal that meets each shape and each configuration, and the cases with
    cancelling terms.
    """

    def crossed(case: Callable[..., None], places: dict[str, Any], every: dict[str, Any]) -> Any:
        for i, (what, options) in enumerate(every.items()):
            for j, (where, place) in enumerate(places.items()):
                run = functools.partial(case, place, options)
                on_diagonal = (j - i) % len(places) in (0, 3, 6)[: options.get("shapes", 1)]
                is_selected = on_diagonal or options.get("cancels_at") == where
                yield Case(f"{group}: {what}; {where}", run, is_selected)

    shapes = {shape.name: shape for shape in SHAPES}
    if group == "loss":
        yield from crossed(loss_case, shapes, LOSSES)
    elif group == "statistics":
        yield from crossed(statistics_case, shapes, STATISTICS)
        what = "reference, soft-cap, peaked"
        for shape in PEAKED_SHAPES:
            run = functools.partial(statistics_case, shape, STATISTICS[what])
            yield Case(f"{group}: {what}; {shape.name}", run, True)
    elif group == "scans":
        yield from crossed(scan_case, LENGTHS, SCANS)
    elif group == "linear":
        yield from crossed(linear_case, {shape.name: shape for shape in HEADS}, LINEARS)
    else:
        factors = {"scale by ⅓": {"factor": 1 / 3}, "scale by 1": {"factor": 1.0}}
        yield from crossed(scale_case, {shape.name: shape for shape in SHAPES[:6]}, factors)
        sizes = {str(n): n for n in (1, 8192, 8193, 20001)}
        ways = {
            f"whiten, mask={mask}, shift_mean={shift}": {"mask": mask, "shift_mean": shift}
            for mask in (False, True)
            for shift in (False, True)
        }
        yield from crossed(whiten_case, sizes, ways)
        vocabularies = {f"V = {n}": n for n in (9000, 4099, 3)}
        kinds = {f"draw, sampled={sampled}": {"sampled": sampled} for sampled in (True, False)}
        yield from crossed(draw_case, vocabularies, kinds)
        run = functools.partial(end_of_draw_case, 33 * 4096 - 100)
        yield Case(f"{group}: draw, the end of the distribution", run, True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("groups", nargs="*", default=list(GROUPS), metavar="|".join(GROUPS))
    parser.add_argument("--all", action="store_true", help="every configuration at every shape")
    parser.add_argument(
        "--capability", type=int, default=90, help="compute capability; default: 90"
    )
    options = parser.parse_args(arguments)
    if not shutil.which("g++"):
        print("skipped: the emulator needs g++")
        return 0
    emulation = Emulation(options.capability)
    begin = time.monotonic()
    wrong = 0
    for group in options.groups:
        count = 0
        for case in cases(group):
            if options.all or case.is_selected:
                torch.manual_seed(0)
                count += 1
                try:
                    case.run(emulation)
                except AssertionError as error:
                    wrong += 1
                    print(f"WRONG {case.name}: {error}", flush=True)
                    traceback.print_exc(limit=-2)
        print(f"{group}: {count} cases, {time.monotonic() - begin:.0f} s", flush=True)
    ran: dict[str, list[float]] = {}
    for program in emulation.session.programs.values():
        ran.setdefault(program.name, []).append(program.covered())
    for name, shares in sorted(ran.items()):
        print(
            f"{name}: {len(shares)} variants, {min(shares):.0%} to {max(shares):.0%} of their "
            "instructions ran"
        )
    print(f"{wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
