"""Each controller follows its formula, alone and in a run."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch

from benchmarks.conformance import formulas as paper
from fastppo.ppo.controllers import AdaptiveKL, EntropyControl, FixedKL, PenaltyKL
from runs import make_trainer, records


@pytest.mark.parametrize("kl", [-1.0, 0.0, 3.99, 4.0, 6.0, 6.1, 9.0, 9.01, 50.0])
def test_kl_coefficients_follow_their_papers(kl: float) -> None:
    fixed = FixedKL(0.3)
    adaptive = AdaptiveKL(0.3, target=6.0, horizon=1000.0)
    penalty = PenaltyKL(0.3, target=6.0)
    for controller in (fixed, adaptive, penalty):
        controller.update(kl, sequences=64)
    assert fixed.coef == 0.3
    batches = {"kl": np.array([kl]), "sequences": np.array([64])}
    (wanted,) = paper.kl_control(batches, coef=0.3, target=6.0, horizon=1000.0)["coefs"]
    assert adaptive.coef == pytest.approx(wanted, rel=1e-14)
    # Schulman et al. 2017, section 4.
    factor = 2 if kl > 1.5 * 6.0 else 0.5 if kl < 6.0 / 1.5 else 1
    assert penalty.coef == 0.3 * factor


# ----------------------------------------------------------------------------------------- in a run


def test_a_run_updates_the_adaptive_coefficient(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path,
        kl_controller="adaptive",
        kl_coef=0.1,
        kl_target=0.01,
        iterations=3,
        rewards=[tiny.every_other],
    )
    trainer.train()
    expected = 0.1
    for record in records(trainer):
        assert record["kl_coef"] == pytest.approx(expected, rel=1e-9)
        expected *= 1 + min(max(record["kl"] / 0.01 - 1, -0.2), 0.2) * 16 / 10_000
    assert expected != 0.1


@pytest.mark.parametrize(("rate", "factor"), [(3e-2, 2.0), (1e-7, 0.5)])
def test_the_penalty_coefficient_doubles_or_halves(
    rate: float, factor: float, tmp_path: Path
) -> None:
    trainer = make_trainer(tmp_path, objective="penalty", learning_rate=rate, iterations=1)
    metrics = trainer.train()
    assert metrics["policy_kl_coef"] == 1.0
    assert trainer.state.coefficient_control.controllers["policy_kl_coef"].coef == pytest.approx(
        factor
    )


def test_the_entropy_coefficient_follows_the_rule_of_trl() -> None:
    """`GRPOTrainer` of TRL 1.16 with `use_adaptive_entropy`, one optimizer step per iteration."""
    control = EntropyControl(0.01, target=1.5)
    coef, last = 0.01, math.inf
    generator = torch.Generator().manual_seed(0)
    applied = set()
    for entropy in (3 * torch.rand(300, generator=generator)).tolist() + [0.1] * 300:
        wanted = coef if last <= 1.5 else 0.0
        assert control.coef == wanted
        applied.add(wanted)
        control.update(entropy, sequences=16)
        coef = min(coef + 0.005, 1.0) if entropy <= 1.5 else max(coef - 0.005, 0.0)
        last = entropy
    assert {0.0, 1.0} < applied
