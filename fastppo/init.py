"""`fastppo init`: writes run.yaml and reward.py of one's own run, and says what it would take.

What no flag says is asked, where there is a person to ask. No file that is there is written over.
"""

from __future__ import annotations

import ast
import json
import pprint
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.prompt import Prompt

from fastppo import inputs
from fastppo.data.chat import encode_prompt
from fastppo.data.files import write_whole
from fastppo.data.rows import Rows, check_prompt_column, column_names
from fastppo.integrations.addresses import load_prompts
from fastppo.ppo.config import PPOConfig

QUESTIONS = {
    "model": "Model, a directory or a hub name",
    "prompts": "Prompts: .jsonl, .parquet, a hub dataset, or an address such as "
    "reasoning-gym:chain_sum?size=1000",
    "environment": "Environment, if responses have several turns: file.py:Name or an address",
    "reward": "Reward: a model, file.py:function or an address; none: reward.py, to be written",
}
OPTIONAL = ("environment", "reward")
"""Questions that an empty answer answers."""

ANSWERS = ("answer", "label", "solution", "target")
"""Columns that hold what is right, the likeliest first."""

TESTED = 3
"""Prompts in the test of the reward."""

READ = 100
"""Prompts of which the longest is planned for."""

RUN = """# fastppo check --config {file}, then fastppo train --config {file}
model: {model}
prompts: {prompts}
{paid_by}
output_dir: {output_dir}
max_new_tokens: 128        # longest response, or turn
rollout_batch_size: 64     # responses per iteration
iterations: 100
learning_rate: 1.0e-5
kl_coef: 0.05              # what it costs to leave the model that the run starts from
# eval_prompts: …          # prompts that are not learned from
# lora_rank: 16            # adapters in place of all weights
"""

REWARD = '''"""The reward of a run. `python {file}`, here, tries it on the first prompts."""

ROWS = {rows}


def score(prompts, completions{parameter}, **columns):
    """A number for each completion: here 1 where {rule}, else 0."""
    return [float({test}) for {variables}]


def test_score():
    """Three prompts, each with a response that should earn 1 and one that should earn 0."""
    columns = {{name: [row[name] for row in ROWS] for name in ROWS[0]}}
    prompts = columns.pop({column!r})
    right = [{right} for row in ROWS]
    wrong = ["" for row in ROWS]
    assert score(prompts, right, **columns) == [1.0] * len(ROWS)
    assert score(prompts, wrong, **columns) == [0.0] * len(ROWS)


if __name__ == "__main__":
    test_score()
    print("the reward does what its test says")
'''


def write_run(folder: Path, answers: dict[str, str], console: Console) -> None:
    """Writes the files of a run into a folder, and shows what it would take.

    Args:
        answers: to `QUESTIONS`, as far as flags gave them.

    Raises:
        ValueError: a question is open and nobody is there to answer; a file is there already; what
            an answer names cannot be used.
    """
    given = {name: answers.get(name) or _ask(name, console) for name in QUESTIONS}
    inputs.check_plan(PPOConfig(model=given["model"]))
    rows = load_prompts(given["prompts"])
    column = PPOConfig().prompt_column
    check_prompt_column(rows[0], column, given["prompts"])
    run = folder / "run.yaml"
    texts = {}
    rewards = [given["reward"]] if given["reward"] else []
    if not rewards and not given["environment"]:
        reward = folder / "reward.py"
        texts[reward] = _reward(reward, rows, column)
        rewards = [f"{reward}:score"]
    texts[run] = _run(run, given, rewards)
    for path in texts:
        if path.exists():
            raise ValueError(f"{path} exists already: choose another folder (--out)")
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in texts.items():
        write_whole(path, text)
        console.print(f"wrote {path}", highlight=False)
    _show(run, rows, console)


def _ask(name: str, console: Console) -> str:
    """The answer of a person; empty where none is needed."""
    if not sys.stdin.isatty():
        if name in OPTIONAL:
            return ""
        raise ValueError(f"--{name} is missing, and there is no terminal to ask at")
    while True:
        try:
            answer = Prompt.ask(QUESTIONS[name], console=console, default="", show_default=False)
        except EOFError:
            raise ValueError(f"--{name} is missing, and the answer ended") from None
        if answer.strip() or name in OPTIONAL:
            return answer.strip()


def _run(file: Path, given: dict[str, str], rewards: list[str]) -> str:
    """run.yaml."""
    lines = []
    if given["environment"]:
        lines.append(f"environment: {json.dumps(given['environment'])}")
    if rewards:
        lines.append(f"rewards: {json.dumps(rewards)}")
    return RUN.format(
        file=file,
        model=json.dumps(given["model"]),
        prompts=json.dumps(given["prompts"]),
        paid_by="\n".join(lines),
        output_dir=json.dumps(str(file.parent / "ppo")),
    )


def _reward(file: Path, rows: Rows, column: str) -> str:
    """reward.py: whether the completion has the answer, or ends a sentence where no column has
    one."""
    tested = rows[:TESTED]
    columns = [
        name
        for name in column_names(rows[:1], column)
        if all(_is_literal(row.get(name)) for row in tested)
    ]
    shown = [{key: row.get(key) for key in (column, *columns)} for row in tested]
    text = pprint.pformat(shown, width=96, sort_dicts=False)
    answer = next((name for name in ANSWERS if name in columns), None)
    if answer is None:
        return REWARD.format(
            file=file.name,
            rows=text,
            column=column,
            parameter="",
            rule="a completion ends with a full stop",
            test='text.rstrip().endswith(".")',
            variables="text in completions",
            right='"This is a sentence."',
        )
    return REWARD.format(
        file=file.name,
        rows=text,
        column=column,
        parameter=f", {answer}",
        rule=f"a completion has the row's `{answer}`",
        test="str(wanted) in text",
        variables=f"wanted, text in zip({answer}, completions)",
        right=f"f\"It is {{row['{answer}']}}.\"",
    )


def _is_literal(value: Any) -> bool:
    """Whether Python reads what it writes of a value: of no NaN, and of no date."""
    try:
        return ast.literal_eval(repr(value)) == value
    except (ValueError, SyntaxError):
        return False


def _show(run: Path, rows: Rows, console: Console) -> None:
    """What the run is of, the memory that it needs, and what to do next."""
    from fastppo.models.pretrained import load_tokenizer
    from fastppo.ppo import plan, rehearsal
    from fastppo.run.options import read_yaml

    config = PPOConfig(**read_yaml(str(run), PPOConfig))
    rehearsal.show(config, rehearsal.rehearse(config), console)
    tokenizer = load_tokenizer(config.model)
    lengths = [
        len(encode_prompt(row[config.prompt_column], tokenizer, config.prompts))
        for row in rows[:READ]
    ]
    plan.show(plan.make_plan(config, max(lengths)), console)
    console.print(f"next: fastppo train --config {run}", highlight=False)
