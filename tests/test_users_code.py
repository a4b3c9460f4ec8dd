"""Users' rewards and environments on the command line: every error names the user's line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import many_ranks
import pytest
import ranks
import tiny
import torch
from command_line import Folder, Run

GAME = """
import asyncio, sys, time

class Game:
    def reset(self, prompt):
        pass

    def step(self, text):
        return "w1", 1.0, True
"""

ENVIRONMENT_ERRORS = {
    "raises when created": (
        "    def __init__(self): self.x = {}['x']",
        "KeyError('x')",
    ),
    "exits": ("    async def step(self, text): sys.exit(0)", "SystemExit(0) in step"),
    "hangs": ("    def step(self, text): time.sleep(30)", "0.5 s in step"),
    "blocks the event loop": ("    async def step(self, text): time.sleep(30)", "0.5 s in step"),
}
"""By fault: the method added to `Game`, and what the error names."""


@pytest.mark.parametrize("kind", ENVIRONMENT_ERRORS)
def test_a_failing_environment_ends_the_run_with_a_message(
    kind: str, folder: Folder, run: Run
) -> None:
    body, named = ENVIRONMENT_ERRORS[kind]
    file = folder.path / "game.py"
    file.write_text(f"{GAME}\n{body}\n")
    code, output = run(environment=f"{file}:Game", reward_timeout=0.5)
    assert code == 1
    assert re.search(f"environment 'Game' .*{re.escape(named)}", " ".join(output.split()))


def test_an_environment_whose_close_raises_does_not_fail_the_run(folder: Folder, run: Run) -> None:
    file = folder.path / "game.py"
    file.write_text(f"{GAME}\n    def close(self): raise KeyError('c')\n")
    code, output = run(environment=f"{file}:Game")
    assert code == 0
    assert "environment 'Game' raised KeyError('c') in close" in " ".join(output.split())


def test_an_error_in_an_environment_names_the_line(folder: Folder, run: Run) -> None:
    file = folder.path / "game.py"
    file.write_text(f"{GAME}\n    def step(self, text):\n        return {{}}[text]\n")
    code, output = run(environment=f"{file}:Game")
    assert code == 1
    assert f"({file}, line 12, in step: return {{}}[text])" in output
    saved = json.loads((folder.run / "failed_episode.json").read_text())
    assert "line 12, in step" in saved["traceback"]


def test_a_function_that_creates_tools_is_refused_with_a_hint(folder: Folder, run: Run) -> None:
    file = folder.path / "tools.py"
    file.write_text(
        "class Tools:\n"
        "    def reset(self, prompt): pass\n"
        "    def add(self, a: int, b: int) -> int:\n"
        '        """Adds."""\n'
        "        return a + b\n"
        "def make(): return Tools()\n"
    )
    code, output = run(environment=f"{file}:make")
    assert code == 1
    assert re.search("environment 'make' .*step.* class", " ".join(output.split()))


def test_a_reward_that_exits_ends_the_run_with_a_message(folder: Folder, run: Run) -> None:
    folder.write_reward("import sys; sys.exit(0)")
    code, output = run()
    assert code == 1
    assert "reward 'count' raised SystemExit(0)" in output


def test_an_error_in_a_reward_names_the_users_line(folder: Folder, run: Run) -> None:
    """The frames below it are a library's."""
    body = "    answers = 'text'\n    return [json.loads(answers)]\n"
    folder.reward.write_text(f"import json\ndef count(prompts, completions):\n{body}")
    code, output = run()
    assert code == 1
    assert f"({folder.reward}, line 4, in count: return [json.loads(answers)])" in output
    saved = json.loads((folder.run / "failed_reward.json").read_text())
    assert "line 4, in count" in saved["traceback"]
    assert "JSONDecodeError: Expecting value" in saved["traceback"]


def test_an_error_while_importing_a_reward_names_the_line(folder: Folder, run: Run) -> None:
    file = folder.path / "count_w7.py"
    file.write_text(f"WORDS = ['w7']\nFIRST = WORDS[1]\n{folder.reward.read_text()}")
    code, output = run(rewards=f"{file}:count")
    assert code == 2
    assert f"({file}, line 2, in <module>: FIRST = WORDS[1])" in output


def test_an_edited_reward_cannot_resume_the_run(folder: Folder, run: Run) -> None:
    file = folder.path / "named.py"
    for value, code in ((1.0, 0), (2.0, 2)):
        file.write_text(f"def count(*_, **__): return [{value}] * len(_[1])\n")
        ended, output = run(resume=True, rewards=f"{file}:count")
        assert ended == code, output
    assert "rewards/count" in output


def test_a_reward_that_uses_torchs_random_state_does_not_change_the_run(
    folder: Folder, run: Run
) -> None:
    weights = []
    for statement in ("pass", "import torch; torch.manual_seed(0); torch.rand(3)"):
        folder.write_reward(statement)
        folder.run = folder.path / f"run{len(weights)}"
        assert run(iterations=2, output_dir=folder.run)[0] == 0
        weights.append((folder.run / "policy" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


@pytest.mark.slow
def test_two_processes_step_as_one_does_without_a_seed_of_their_own(tmp_path: Path) -> None:
    model = tiny.saved_model(tmp_path / "model")
    one, two = (
        ranks.run(n, many_ranks.step_on_given_responses, folder, str(folder), model)
        for n, folder in ((1, tmp_path / "one"), (2, tmp_path / "two"))
    )
    assert one.keys() == two.keys()
    assert torch.equal(one.pop("random"), two.pop("random"))
    for name, weight in one.items():
        # Rounding in fp32; minibatches of another shuffle differ by the learning rate, 1e-2.
        assert (weight - two[name]).abs().max() <= 1e-4, name
