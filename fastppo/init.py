"""`fastppo init`: write run.yaml and reward.py, the templates of a run."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from fastppo.data.files import write_whole

RUN = """\
# fastppo check --config {file}  # checks models, prompts and rewards
# fastppo train --config {file}  # trains; --help lists all options
# Paths are relative to the working directory.
model: {model}  # a directory or hub name, fine-tuned with `fastppo sft` or elsewhere
prompts: {prompts}  # .jsonl, .parquet or a hub dataset, with a column `prompt`
rewards: [{reward}]  # functions of yours or reward models; their sum is trained on
output_dir: {output_dir}

# Sizes for a GPU. docs/ten-minutes.md has sizes for 135 M parameters on a CPU.
max_new_tokens: 128      # longest response, tokens
rollout_batch_size: 64   # responses per iteration
iterations: 100
learning_rate: auto      # or a number, such as 1.0e-5
kl_coef: 0.05            # weight of the KL to `model`; higher keeps the policy closer

# eval_prompts: held_out.jsonl  # prompts to evaluate on, never trained on
# lora_rank: 16                 # train LoRA adapters instead of all weights
# environment: game.py:Game     # responses of several turns, with rewards of its own
"""

REWARD = '''\
"""The reward of a run. `python reward.py` tests it."""

import re


def score(prompts, completions, answer=None, **columns):
    """Return the reward of each completion, higher is better.

    A reward is a number, or (end, value) pairs that credit parts of the text. `prompts` and
    `completions` are lists of strings. Every other column of the prompts is a keyword argument, a
    list too.
    """
    if answer is not None:  # if prompts have a column `answer`: 1 if the completion contains it
        pairs = zip(answer, completions)
        return [float(str(expected) in text) for expected, text in pairs]
    # Otherwise 0.1 for every word that starts with an s. Crediting words instead of the whole
    # completion takes fewer iterations.
    words = [re.finditer(r"\\b[sS]\\w*", text) for text in completions]
    return [[(word.end(), 0.1) for word in found] for found in words]


def test_score():
    assert score(["2 + 2 ="] * 2, ["It is 4.", "It is 5."], answer=["4", "4"]) == [1.0, 0.0]
    assert score(["Yesterday"] * 2, ["She sings.", "I work."]) == [[(3, 0.1), (9, 0.1)], []]


if __name__ == "__main__":
    test_score()
    print("ok")
'''


def write_run(folder: Path, model: str, prompts: str) -> list[Path]:
    """Write run.yaml and reward.py into `folder`.

    Returns:
        list[Path]: the two files, run.yaml first.

    Raises:
        ValueError: one of them exists.
    """
    run = folder / "run.yaml"
    reward = folder / "reward.py"
    for path in (run, reward):
        if path.exists():
            raise ValueError(f"{path} exists already: choose another folder (--out)")
    folder.mkdir(parents=True, exist_ok=True)
    values = {
        "model": model,
        "prompts": prompts,
        "reward": f"{reward}:score",
        "output_dir": str(folder / "ppo"),
    }
    quoted = {name: json.dumps(value, ensure_ascii=False) for name, value in values.items()}
    write_whole(run, RUN.format(file=shlex.quote(str(run)), **quoted))
    write_whole(reward, REWARD)
    return [run, reward]
