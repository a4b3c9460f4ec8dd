"""The project's claims for a CPU: `python -m benchmarks claims`.

Each claim is the median ratio of neighboring calls. FastPPO and the other provider alternate, so a
busy machine slows both. Providers are checked against fp64 first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import case as case_module
from benchmarks import measure, run, trl_iteration
from benchmarks.case import Case, Provider
from benchmarks.losses import linear_loss_case, loss_case
from benchmarks.report import device_title, seconds
from benchmarks.sequences import LOOP, gae_case
from benchmarks.shapes import MODELS, Sequences, Tokens

LOGITS = Tokens(MODELS["tinyllama-1.1b"], 512)
LINEAR = Tokens(MODELS["llama-68m"], 2048)
RESPONSES = Sequences(64, 4096)

TURNS = 9
LINEAR_TURNS = 5  # a call takes seconds
MEMORY_SHARE = 0.25
GRADIENT_SHARE = 1.05
LOOP_SPEED_UP = 60.0
VERL_SPEED_UP = 150.0
ITERATION_SPEED_UP = 3.0

CPU = torch.device("cpu")


class Claim(NamedTuple):
    """A claim: the measured value and its target."""

    text: str
    measured: float | None
    """None if not measured; `detail` has the reason."""
    at_most: float | None = None
    at_least: float | None = None
    detail: str = ""

    @property
    def verdict(self) -> str:
        if self.measured is None:
            return "NOT MEASURED"
        above = self.at_most is not None and not self.measured <= self.at_most
        below = self.at_least is not None and not self.measured >= self.at_least
        return "FAIL" if above or below else "PASS"

    @property
    def wanted(self) -> str:
        return f"≤ {self.at_most:g}" if self.at_most is not None else f"≥ {self.at_least:g}"


def _compare(
    case: Case, ours: Provider, other: Provider, progress: run.Progress, turns: int = TURNS
) -> tuple[measure.Ratio, float]:
    """Return the time ratio and the memory ratio of ours to the other."""
    progress(f"{case.name}, {case.shape}: {ours.name} and {other.name}")
    inputs = case.draw(0, CPU)
    truth = case.truth(inputs)
    extra = []
    for provider in (ours, other):
        row = run.check(case, provider, inputs, truth)
        if row.status != "right":
            raise RuntimeError(f"{case.name}: {provider.name} is {row.status}: {row.detail}")
        own_inputs = provider.own_inputs(inputs)
        call = functools.partial(provider.call, own_inputs)
        extra.append(measure.peak_extra_memory(call, CPU))
    del truth
    length = measure.rotation_length(sum(x.nbytes for x in inputs.values()), CPU)
    rotation = [inputs, *(case.draw(seed, CPU) for seed in range(1, min(length, turns)))]

    def timed(provider: Provider) -> Callable[[int], object]:
        return lambda turn: provider.call(rotation[turn % len(rotation)])

    return measure.ratio_in_turns(timed(ours), timed(other), turns), extra[0] / extra[1]


def _named(case: Case, name: str) -> Provider:
    return next(provider for provider in case.providers if provider.name == name)


def _spread(ratio: measure.Ratio, names: tuple[str, str] = ("FastPPO", "eager")) -> str:
    low, high = ratio.quartiles
    ours, other = (seconds(value) for value in ratio.seconds)
    return f"quartiles {low:.2f} to {high:.2f}; {names[0]} {ours}, {names[1]} {other}"


def _losses(progress: run.Progress) -> Iterator[Claim]:
    for name, build, shape, turns in (
        ("ppo_loss", loss_case, LOGITS, TURNS),
        ("linear_ppo_loss", linear_loss_case, LINEAR, LINEAR_TURNS),
    ):
        for entropy_coef in (0.01, 0.0):
            case = build(shape, torch.float32, entropy_coef=entropy_coef)
            ours = _named(case, "FastPPO")
            eager = _named(case, "eager PyTorch")
            ratio, memory = _compare(case, ours, eager, progress, turns)
            what = f"{name} with gradients, {case.shape}, V = {shape.model.vocab}"
            what += ", entropy bonus" if entropy_coef else ", no entropy bonus"
            yield Claim(f"{what}: time over eager's", ratio.median, 1.0, detail=_spread(ratio))
            text = f"{what}: extra memory over eager's"
            if name == "ppo_loss" and not entropy_coef:
                # Cannot reach 0.25: eager holds at most three copies of the logits, and the
                # returned gradient is one of them. In place it can.
                yield Claim(text, memory, MEMORY_SHARE, detail="the gradient alone is a third")
                _, memory = _compare(case, _named(case, "FastPPO, in place"), eager, progress, 1)
                text = text.replace(name, f"{name}, in place,", 1)
            yield Claim(text, memory, MEMORY_SHARE)


def _memory(progress: run.Progress) -> Iterator[Claim]:
    case = loss_case(LOGITS, torch.float32)
    progress(f"{case.name}, {case.shape}: memory")
    inputs = case.draw(0, CPU)
    ours = _named(case, "FastPPO")
    call = functools.partial(ours.call, ours.own_inputs(inputs))
    extra = measure.peak_extra_memory(call, CPU)
    text = f"ppo_loss with gradients, {case.shape}: extra memory over the gradient's"
    yield Claim(text, extra / inputs["logits"].nbytes, GRADIENT_SHARE)


def _gae(progress: run.Progress) -> Iterator[Claim]:
    case = gae_case(RESPONSES)
    ours = _named(case, "FastPPO")
    ratio, _ = _compare(case, _named(case, LOOP), ours, progress)
    text = f"gae, {case.shape}: times as fast as"
    yield Claim(
        f"{text} TRL's loop",
        ratio.median,
        at_least=LOOP_SPEED_UP,
        detail=_spread(ratio, ("loop", "FastPPO")),
    )
    if not case_module.is_installed("verl"):
        yield Claim(f"{text} verl's", None, at_least=VERL_SPEED_UP, detail="pip install verl")
        return
    (verl,) = next(peer for peer in case.peers if peer.name == "verl").build(CPU)
    ratio, _ = _compare(case, verl, ours, progress)
    detail = f"{_spread(ratio, ('verl', 'FastPPO'))}; verl's whitens too"
    yield Claim(f"{text} verl's", ratio.median, at_least=VERL_SPEED_UP, detail=detail)


def _iteration(progress: run.Progress) -> Iterator[Claim]:
    options = trl_iteration.Options()
    text = (
        f"a PPO iteration of a tiny model ({options.batch} episodes of {options.prompt} + "
        f"{options.response} tokens, {options.epochs} epochs): episodes per second over TRL's"
    )
    progress("a PPO iteration beside TRL's, in a separate process")
    try:
        result = trl_iteration.compare_in_a_process(options)
    except RuntimeError as error:
        yield Claim(text, None, at_least=ITERATION_SPEED_UP, detail=str(error))
        return
    phases = ", ".join(f"{name} {seconds:.2g} s" for name, seconds in result["phases"].items())
    yield Claim(
        text,
        result["speed_up"],
        at_least=ITERATION_SPEED_UP,
        detail=f"{options.threads} thread; FastPPO: {phases}",
    )


def measure_claims(progress: run.Progress) -> list[Claim]:
    """Measure all claims, in about three minutes on two idle cores."""
    return [
        *_losses(progress),
        *_memory(progress),
        *_gae(progress),
        *_iteration(progress),
    ]


def describe(claims: list[Claim]) -> list[dict[str, Any]]:
    """Return the claims for the results file."""
    return [
        {**claim._asdict(), "wanted": claim.wanted, "verdict": claim.verdict} for claim in claims
    ]


def print_claims(claims: list[Claim], to: Console) -> None:
    table = Table(
        title=f"Claims for a CPU · {device_title(run.describe_device(CPU))}",
        title_justify="left",
    )
    table.add_column("")
    table.add_column("claim")
    table.add_column("measured", justify="right", no_wrap=True)
    table.add_column("target", justify="right", no_wrap=True)
    table.add_column("detail")
    styles = {"PASS": "green", "FAIL": "bold red", "NOT MEASURED": "yellow"}
    for claim in claims:
        measured = "" if claim.measured is None else f"{claim.measured:.2f}"
        verdict = f"[{styles[claim.verdict]}]{claim.verdict}[/]"
        table.add_row(verdict, claim.text, measured, claim.wanted, claim.detail)
    to.print(table)
