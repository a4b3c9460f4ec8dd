"""Run one compiled kernel in the emulator and compare it with the definition in fp64.

    python tests/ptx/example.py

A starting point for your own experiments: call the launcher as on a GPU, with tensors that the
session has allocated.
"""

from __future__ import annotations

# ruff: noqa: E402
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The checkout, even if another version is installed.
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "tests" / "helpers")]

import torch
from emulate import Schedule, Session
from fastppo_kernels import definition, triton_backend
from fastppo_kernels.records import Objective, PerToken, Softmax, map_tensors

SCHEDULES = (
    Schedule(),
    Schedule(sched=1, programs=1, late=True),
    Schedule(sched=2, seed=3, programs=2, quantum=3),
    Schedule(down=True),
)
N, V = 5, 6675  # several tiles and a remainder; rows are not 16-byte aligned

torch.manual_seed(0)
logits = (torch.randn(N, V) * 3).bfloat16()
tokens = torch.tensor([0, V - 1, 5, V // 2, 17])
exact = torch.log_softmax(logits.double(), -1).gather(1, tokens[:, None])[:, 0]
per_token = PerToken(
    tokens,
    old_logprobs=(exact + torch.linspace(-0.3, 0.3, N)).float(),
    advantages=torch.linspace(-1.0, 1.5, N) + 0.05,
    weights=torch.full((N,), 1 / N),
    ref_logprobs=(exact + 0.2 * torch.randn(N)).float(),
)
objective = Objective(0.8, 1.2, kl_coef=0.1, entropy_coef=0.01)
wide = map_tensors(lambda x: x.double() if x.is_floating_point() else x, per_token)
want = definition.ppo_loss(logits.double(), wide, objective, Softmax())

session = Session(capability=90)
results = set()
for schedule in SCHEDULES:
    session.fresh()
    with session.running(schedule):
        got = triton_backend.ppo_loss(session.like(logits), per_token, objective, Softmax())
    unwritten, raced = session.shadow(got.grad)
    logprob_error = (got.logprobs - want.logprobs).abs().max()
    gradient_error = (got.grad.double() - want.grad).abs().max() / want.grad.abs().max()
    print(schedule)
    print(
        f"  logprob error {logprob_error:.1e}, gradient error {gradient_error:.1e} of the largest"
    )
    print(f"  {unwritten} unwritten bytes, {raced} bytes from a race")
    results.add(got.logprobs.numpy().tobytes() + got.grad.view(torch.int16).numpy().tobytes())
print(f"{len(results)} different results under {len(SCHEDULES)} schedules")
for finding in session.findings:
    print(finding)
for program in session.programs.values():
    print(f"{program.name}: {program.covered():.1%} of its instructions ran")
