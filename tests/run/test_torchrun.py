"""The last lines of torchrun say how a failed run goes on."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import tiny
from processes import torchrun

REWARD = """
import os, signal
calls = 0

def fails(prompts, completions):
    global calls
    calls += 1
    if calls == 3 and os.environ["RANK"] == "1":
        {statement}
    return [1.0] * len(prompts)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("statement", "says"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "rank 1 was killed"),
        ("raise KeyError(calls)", "reward 'fails' raised KeyError(3)"),
    ],
    ids=["killed", "raised"],
)
def test_the_last_line_says_how_to_resume(statement: str, says: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(x) + "\n" for x in tiny.PROMPTS))
    (tmp_path / "reward.py").write_text(REWARD.format(statement=statement))
    options = {
        "model": tiny.saved_model(tmp_path / "model"),
        "prompts": tmp_path / "prompts.jsonl",
        "rewards": f"{tmp_path}/reward.py:fails",
        "output_dir": run,
        "device": "cpu",
        "max_new_tokens": 8,
        "rollout_batch_size": 16,
        "checkpoint_interval": 1,
    }
    done = torchrun(2, "-m", "fastppo", "train", *(f"--{k}={v}" for k, v in options.items()))
    assert done.returncode == 1
    if says == "rank 1 was killed":
        assert "rank 0 of 2" in done.stderr
    last = done.stderr.rstrip("= \n").splitlines()[-1]
    assert f"RuntimeError: {says}" in last
    assert re.search(rf"--resume true.* {run}$", last)
