"""The examples run and print what they claim."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

import pytest
from processes import PATHS, ROOT, python, torchrun

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
LEARN = ["ppo.py", "grpo.py", "accelerate_loop.py"]


def run(*command: str, cwd: Path = ROOT) -> str:
    """Run a Python command and return its output."""
    paths = os.pathsep.join([PATHS, *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    return python(*command, cwd=cwd, PYTHONPATH=paths, OMP_NUM_THREADS="1").stdout


def assert_learns(printed: str) -> None:
    """Check the rewards of 31 iterations. Chance is 1/16."""
    rewards = [float(reward) for reward in re.findall(r" reward (\d\.\d{3})", printed)]
    assert len(rewards) == 4
    assert rewards[0] < 0.12
    assert rewards[-1] > 0.3


@pytest.mark.slow
def test_the_task_example_learns_to_call_and_to_answer(tmp_path: Path) -> None:
    """The rewards are those of held-out sums. A random policy calls in 1 of 23 first turns."""
    printed = run(str(ROOT / "examples" / "tasks.py"), cwd=tmp_path)
    numbers = re.findall(r"left out (\S+)  held-out (\S+)", printed)
    (_, _, (left_out, held_out)) = [tuple(map(float, row)) for row in numbers]
    assert held_out > 0.5, "the call alone is worth 0.2"
    assert left_out > 0
    report = tmp_path / "runs" / "adding" / "report.html"
    assert "Held-out reward" in report.read_text("utf-8")


@pytest.mark.parametrize(
    "name", ["ppo.py", *(pytest.param(name, marks=pytest.mark.slow) for name in LEARN[1:])]
)
def test_an_example_learns(name: str) -> None:
    printed = run(f"examples/{name}", "--iterations", "31")
    assert_learns(printed)
    if name == "accelerate_loop.py":
        right, wrong = (float(off) for off in re.findall(r"(\S+) of its norm off", printed))
        assert right < 1e-5
        assert wrong > 1e-3


@pytest.mark.slow
def test_two_processes_under_fsdp_learn_with_one_gradient() -> None:
    done = torchrun(2, str(ROOT / "examples" / "fsdp2.py"), "--iterations", "31")
    assert done.returncode == 0, done.stderr
    printed = done.stdout
    assert_learns(printed)
    held, total = map(int, re.search(r"holds (\d+) of (\d+) weights", printed).groups())
    assert held == total / 2
    norms = re.search(r"norm of the gradient (\S+), of one process with all rows (\S+)\n", printed)
    assert float(norms[1]) == pytest.approx(float(norms[2]), rel=1e-5)
    assert re.search("outside the forward: weight .*DTensor", printed)


@pytest.mark.slow
def test_lm_head_adapters_are_merged_or_refused() -> None:
    pytest.importorskip("peft", reason="peft is not installed")
    printed = run("examples/lora_head.py")
    by_logits = re.findall(r"(\w+): .* by the logits +(\S+)\n", printed)
    assert [kind for kind, _ in by_logits] == ["LoRA", "DoRA"]
    lines = re.findall(r"logprobs (\S+) nats off, gradient (\S+)\n", printed)
    pairs = [tuple(map(float, line)) for line in lines]
    for (_, expected_grad), merged, ignored in zip(by_logits, pairs[::2], pairs[1::2], strict=True):
        assert float(expected_grad) > 0.01
        error, grad = merged
        assert error < 1e-5
        assert grad == float(expected_grad)
        error, grad = ignored
        assert error > 0.01
        assert grad == 0
    for what in ("dropout", "a bias"):
        assert re.search(f"{what} is refused: .*ppo_loss", printed)
    losses = [float(loss) for loss in re.findall(r"loss (\S+) ", printed)]
    assert losses[-1] < losses[0] - 0.05
    good, bad = (float(x) for x in re.findall(r"([+-]\d\S+)", printed.splitlines()[-1]))
    assert good > 0 > bad


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("trl") is None,
    reason='TRL is not installed: pip install "trl==1.12.*" requests',
)
def test_trls_grpo_with_the_fused_loss_is_the_same_run_in_less_memory() -> None:
    printed = run("examples/trl_grpo.py", "--steps", "4")
    rows = re.findall(r"^ +\d +(.*)$", printed, re.M)
    assert len(rows) == 4
    for row in rows:
        numbers = [float(x) for x in row.split()]
        assert numbers[::2] == pytest.approx(numbers[1::2], abs=2e-5)
    # Gradients differ by 1e-6 of the largest, and Adam divides each by its own size.
    assert float(re.search(r"differ by (\S+) of their change", printed)[1]) < 5e-5
    theirs, ours = (float(x) for x in re.findall(r"(\S+) MB", printed))
    assert ours < theirs / 1.8


def test_every_example_is_run() -> None:
    others = {"tasks.py", "fsdp2.py", "lora_head.py", "trl_grpo.py"}
    # In tests/functional/test_user_functions.py, tests/ppo/test_functions.py and test_optimizer.py.
    functions = {"objective.py", "objectives.py", "optimizer.py"}
    assert {path.name for path in EXAMPLES} == {*LEARN, *others, *functions}
