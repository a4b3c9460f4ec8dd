"""Two compiled kernels in the emulator, against the definition in fp64: `python example.py CHECKOUT`.

To write cases of your own from: a launcher is called as on a GPU, on tensors that the session made.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

checkout = Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()
sys.path[:0] = [str(Path(__file__).resolve().parent), str(checkout), str(checkout / "kernels")]

import emulate  # noqa: E402
from emulate import Schedule, Session  # noqa: E402
from fastppo_kernels import definition, triton_rows  # noqa: E402
from fastppo_kernels.records import Objective, PerToken, Softmax  # noqa: E402

SCHEDULES = (
    Schedule(sched=0),
    Schedule(sched=1, programs=1, late=True),
    Schedule(sched=2, seed=3, programs=2, quantum=3),
    Schedule(sched=0, down=True),
)

torch.manual_seed(0)
N, V = 5, 6675  # a few tiles and an end; rows off 16 bytes
session = Session(capability=90)
bits = set()
for schedule in SCHEDULES:
    session.fresh()
    torch.manual_seed(0)
    logits = session.tensor((N, V), torch.bfloat16)
    logits.copy_(torch.randn(N, V, dtype=torch.float64) * 3)
    tokens = torch.tensor([0, V - 1, 5, V // 2, 17])
    exact = torch.log_softmax(logits.double(), -1).gather(1, tokens[:, None])[:, 0]
    per_token = PerToken(
        tokens, (exact + torch.linspace(-0.3, 0.3, N)).float(), torch.linspace(-1.0, 1.5, N) + 0.05,
        torch.full((N,), 1 / N), None, (exact + 0.2 * torch.randn(N)).float(),
    )  # fmt: skip
    objective = Objective(0.8, 1.2)._replace(kl_coef=0.1, entropy_coef=0.01)
    with session.running(schedule):
        got = triton_rows.ppo_loss(logits, per_token, objective, Softmax())
    wide = PerToken(
        *(
            x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
            for x in per_token
        )
    )
    want = definition.ppo_loss(logits.double(), wide, objective, Softmax())
    unwritten, raced = session.shadow(got.grad)
    worst = (got.grad.double() - want.grad).abs().max() / want.grad.abs().max()
    print(f"{schedule}: logprob {(got.logprobs - want.logprobs).abs().max():.1e}, "
          f"gradient {worst:.1e} of the largest; unwritten {unwritten}, raced {raced} bytes")  # fmt: skip
    bits.add(got.logprobs.numpy().tobytes() + got.grad.view(torch.int16).numpy().tobytes())
print("the same bits under every schedule" if len(bits) == 1 else f"{len(bits)} different results")
for finding in emulate.summary(session.findings):
    print(finding)
for program in session.programs.values():
    print(f"{program.name}: {program.covered():.1%} of its instructions ran")
