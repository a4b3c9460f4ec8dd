"""`fastppo init`: writes run.yaml and reward.py of one's own run, and says what it would take.

What no flag says is asked, where there is a person to ask. Files are written once all that they
name has been checked, and none that is there is written over.
"""

from __future__ import annotations

import ast
import json
import pprint
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.prompt import Prompt

from fastppo import inputs
from fastppo.data.files import write_whole
from fastppo.data.rows import Rows, column_names
from fastppo.ppo.options.config import PPOConfig
from fastppo.run.progress import say

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

RESPONSE = {"cuda": 128, "cpu": 16}
"""Tokens of the longest response by device, where the context has room for them."""

SIZES = {
    "cuda": """max_new_tokens: {max_new_tokens:<10} # longest response, or turn
rollout_batch_size: 64     # responses per iteration
iterations: 100
learning_rate: 1.0e-5
""",
    "cpu": """# For a CPU: docs/ten-minutes.md says what 135 M parameters took with these sizes.
max_new_tokens: {max_new_tokens:<10} # longest response, or turn
rollout_batch_size: 32     # responses per iteration
iterations: 12
ppo_epochs: 1
minibatches: 2
learning_rate: 4.0e-5
""",
}
"""By device: PPO's defaults, and what a page has run on a CPU."""

RUN = """# fastppo check --config {file}, then fastppo train --config {file}
model: {model}
prompts: {prompts}
{paid_by}
output_dir: {output_dir}
{sizes}kl_coef: 0.05              # what it costs to leave the model that the run starts from
# eval_prompts: …          # prompts that are not learned from
# lora_rank: 16            # adapters in place of all weights
"""

REWARD = '''"""The reward of a run. `python {file}`, here, tries it on the first prompts."""
{imports}
ROWS = {rows}


def score(prompts, completions{parameter}, **columns):
    """{rule}"""
    return [
        {expression}
        for {variables}
    ]


def test_score():
    """A completion that should earn something does, an empty one does not."""
    columns = {{name: [row[name] for row in ROWS] for name in ROWS[0]}}
    prompts = columns.pop({column!r})
    right = [{right} for row in ROWS]
    wrong = ["" for row in ROWS]
    assert score(prompts, right, **columns) == [{earned}] * len(ROWS)
    assert score(prompts, wrong, **columns) == [{nothing}] * len(ROWS)


if __name__ == "__main__":
    test_score()
    print("the reward does what its test says")
'''

WORDS = {
    "imports": "\nimport re\n",
    "parameter": "",
    "rule": """What each completion earns: a number, or as here (end, value) pairs of its words.

    A tenth for every word that begins with an s. Pay by word or line where you can: one number
    for all of a completion takes more iterations, and teaches nothing while all earn the same.
    """,
    "expression": r'[(word.end(), 0.1) for word in re.finditer(r"\b[sS]\w*", text)]',
    "variables": "text in completions",
    "right": '"She sings."',
    "earned": "[(3, 0.1), (9, 0.1)]",
    "nothing": "[]",
}
"""The reward for prompts without an answer: docs/ten-minutes.md trains on it, small models learn
it."""


def write_run(
    folder: Path,
    answers: dict[str, str],
    console: Console,
    *,
    before_loading: Callable[[], None],
) -> None:
    """Writes the files of a run into a folder, and shows what it would take.

    Args:
        answers: to `QUESTIONS`, as far as flags gave them.
        before_loading: is called once the answers are checked, before torch is imported.

    Raises:
        ValueError: a question is open and nobody is there to answer; a file is there already; what
            an answer names cannot be used.
        RewardError: the reward fails on the first prompt.
    """
    run = folder / "run.yaml"
    reward = folder / "reward.py"
    _check_new(run)  # before anybody is asked
    given = {name: answers.get(name) or _ask(name, console) for name in QUESTIONS}
    writes_reward = not (given["reward"] or given["environment"])
    if writes_reward:
        _check_new(reward)
    rewards = [given["reward"]] if given["reward"] else []
    config = PPOConfig(
        model=given["model"],
        prompts=given["prompts"],
        environment=given["environment"],
        rewards=rewards,
        max_new_tokens=1,  # the least, until the context and the prompts are known
    )
    inputs.check_train(config)
    before_loading()

    from fastppo.models.device import choose_device
    from fastppo.ppo.plan import plan
    from fastppo.ppo.setup import preflight  # which take seconds to import

    read = preflight.preflight(config)
    rows = read.prompts or []
    context = plan.context_of(config)
    prompt_tokens = _longest_prompt(config, rows, context)
    device = choose_device("auto").type
    tokens = RESPONSE[device]
    if context is not None:
        tokens = min(tokens, context - prompt_tokens)
    texts = {}
    if writes_reward:
        texts[reward] = _reward(reward, rows, config.prompt_column)
        rewards = [f"{reward}:score"]
    sizes = SIZES[device].format(max_new_tokens=tokens)
    texts[run] = _run(run, given, rewards, sizes=sizes)
    config = PPOConfig(**yaml.safe_load(texts[run]))
    needed = plan.make_plan(config, prompt_tokens)

    folder.mkdir(parents=True, exist_ok=True)
    for path, text in texts.items():
        write_whole(path, text)
        say(console, f"wrote {path}")
    preflight.show(config, read, console)
    plan.show(needed, console)
    if device == "cpu":
        say(console, "no GPU: docs/ten-minutes.md says what 135 M parameters took with these sizes")
    say(console, f"next: fastppo train --config {shlex.quote(str(run))}")


def _check_new(path: Path) -> None:
    """Raises ValueError for a file that is there."""
    if path.exists():
        raise ValueError(f"{path} exists already: choose another folder (--out)")


def _ask(name: str, console: Console) -> str:
    """The answer of a person; empty where none is needed."""
    if sys.stdin is None or not sys.stdin.isatty():  # None where it was closed: <&-
        if name in OPTIONAL:
            return ""
        raise ValueError(f"--{name} is missing, and there is no terminal to ask at")
    while True:
        try:
            answer = Prompt.ask(QUESTIONS[name], console=console, default="", show_default=False)
        except EOFError:
            raise ValueError(f"--{name} has no answer: the input has ended") from None
        if answer.strip() or name in OPTIONAL:
            return answer.strip()


def _longest_prompt(config: PPOConfig, rows: Rows, context: int | None) -> int:
    """Tokens of the longest of the first prompts; raises DataError where one cannot be used."""
    from fastppo.data.prompts import encode_prompts
    from fastppo.models.pretrained import load_tokenizer

    prompts = encode_prompts(
        rows[:READ],
        load_tokenizer(config.model),
        column=config.prompt_column,
        max_prompt_tokens=(context or 2**31) - 1,
        source=config.prompts,
    )
    return max(map(len, prompts.token_ids))


def _run(file: Path, given: dict[str, str], rewards: list[str], *, sizes: str) -> str:
    """run.yaml."""
    lines = []
    if given["environment"]:
        lines.append(f"environment: {_quoted(given['environment'])}")
        lines.append(
            f"max_turns: {PPOConfig.max_turns}               # of the policy, in an episode"
        )
    if rewards:
        lines.append(f"rewards: {_quoted(rewards)}")
    return RUN.format(
        file=shlex.quote(str(file)),
        model=_quoted(given["model"]),
        prompts=_quoted(given["prompts"]),
        paid_by="\n".join(lines),
        output_dir=_quoted(str(file.parent / "ppo")),
        sizes=sizes,
    )


def _quoted(value: Any) -> str:
    """A text or a list of texts as JSON that YAML reads: characters stand as they are, since YAML
    takes an escaped surrogate pair for two."""
    return json.dumps(value, ensure_ascii=False)


def _reward(file: Path, rows: Rows, column: str) -> str:
    """reward.py: whether the completion has the answer; words that pay where no column has one."""
    names = column_names(rows, column)
    answer = None
    tested = rows[:TESTED]
    for name in ANSWERS:
        answered = [row for row in rows if _is_answer(row.get(name))]
        if answered:
            answer = name
            tested = answered[:TESTED]
            break
    shown = [name for name in names if all(_is_literal(row.get(name)) for row in tested)]
    cells = [{name: row.get(name) for name in (column, *shown)} for row in tested]
    text = pprint.pformat(cells, width=96, sort_dicts=False)
    slots = WORDS
    if answer is not None:
        slots = {
            "imports": "",
            "parameter": f", {answer}",
            "rule": f"A number for each completion: 1 where it has the row's `{answer}`, else 0.",
            "expression": 'float(wanted not in (None, "") and str(wanted) in text)',
            "variables": f"wanted, text in zip({answer}, completions)",
            "right": f"f\"It is {{row['{answer}']}}.\"",
            "earned": "1.0",
            "nothing": "0.0",
        }
    return REWARD.format(file=file.name, rows=text, column=column, **slots)


def _is_answer(value: Any) -> bool:
    """Whether a completion may have it: there is a value, whose text is not empty."""
    return value is not None and str(value).strip() != "" and _is_literal(value)


def _is_literal(value: Any) -> bool:
    """Whether what Python writes of a value is that value: it is not of NaN, dates or arrays."""
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError):
        return False
