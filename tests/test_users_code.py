"""Users' code on the command line: what it raises is a sentence, what it changes is put back, and
no exit of its own ends a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import command_line
import many_ranks
import pytest
import ranks
import torch
from command_line import Folder, Run

from fastppo.run.log import read_jsonl

ENVIRONMENT = """
import asyncio, sys, time

class Game:
    def reset(self, prompt):
        pass

    def step(self, text):
        return "w1", 1.0, True
"""

ENVIRONMENTS = {
    "exits where it is made": (
        "    def __init__(self): sys.exit(0)",
        1,
        "environment 'Game' raised SystemExit(0) where it is made",
    ),
    "exits in a coroutine": (
        "    async def step(self, text): sys.exit(0)",
        1,
        "environment 'Game' raised SystemExit(0) in step",
    ),
    "blocks the event loop": (
        "    async def step(self, text): time.sleep(30)",
        1,
        "environment 'Game' did not return within 0.5 s in step",
    ),
    "has a step without a signature": (
        "    step = dict",
        1,
        "environment 'Game' raised ValueError(",
    ),
    "has signatures that cannot be read": (
        "    reset.__signature__ = step.__signature__ = 5",
        0,
        "",
    ),
    "has a close that raises": (
        "    @property\n    def close(self): raise KeyError('c')",
        0,
        "environment 'Game' raised KeyError('c') in close",
    ),
    "has attributes that raise": (
        "    def __getattr__(self, name): raise KeyError('c')",
        0,
        "environment 'Game' raised KeyError('c') in close",
    ),
    "is late": (
        "    def step(self, text): time.sleep(30)",
        1,
        "environment 'Game' did not return within 0.5 s in step",
    ),
    "raises where it is made": (
        "    def __init__(self): self.x = {}['x']",
        1,
        "environment 'Game' raised KeyError('x') where it is made",
    ),
    "has a property that raises": (
        "    @property\n    def step(self): raise KeyError('s')",
        1,
        "environment 'Game' raised KeyError('s') where it is made",
    ),
    "wants arguments": (
        "    def __init__(self, size): pass",
        2,
        "environment: __init__ takes (self, size): missing a required argument: 'size'",
    ),
    "has no step": ("    step = None", 1, "environment 'Game' has no method step"),
    "is cancelled": (
        "    async def step(self, text): raise asyncio.CancelledError",
        1,
        "environment 'Game' raised CancelledError() in step",
    ),
    "cancels itself": (
        "    async def step(self, text):\n"
        "        asyncio.current_task().cancel()\n"
        "        await asyncio.sleep(1)",
        1,
        "environment 'Game' cancelled its own task in step",
    ),
    "returns what raises": (
        "    def step(self, text):\n"
        "        class Odd(tuple):\n"
        "            def __iter__(self): raise KeyError('o')\n"
        "        return Odd('abc')",
        1,
        "environment 'Game' returned Odd, which raised KeyError('o') when read",
    ),
    "ends a generator": (
        "    def step(self, text): raise GeneratorExit",
        1,
        "environment 'Game' raised GeneratorExit() in step",
    ),
}
"""What the class of an environment has besides, the exit code, and what is said."""
QUICK = [*ENVIRONMENTS][:8]


@pytest.mark.parametrize("option", ["rewards", "prompt_weights"])
def test_an_edited_callable_is_another_run(option: str, folder: Folder, run: Run) -> None:
    count = len(folder.prompts.read_text().splitlines()) if option == "prompt_weights" else 0
    file = folder.path / "named.py"
    for value, code in ((1.0, 0), (2.0, 2)):
        returned = f"[{value}] * {count}" if count else f"[{value}] * len(_[1])"
        file.write_text(f"def count(*_, **__): return {returned}\n")
        ended, said = run(resume=True, **{option: f"{file}:count"})
        assert ended == code, said
    assert "belongs to another run: the content of " in said


def test_a_function_that_makes_tools_is_told_to_name_their_class(folder: Folder, run: Run) -> None:
    file = folder.path / "tools.py"
    file.write_text(
        "class Tools:\n"
        "    def reset(self, prompt): pass\n"
        "    def add(self, a: int, b: int) -> int:\n"
        '        """Adds."""\n'
        "        return a + b\n"
        "def make(): return Tools()\n"
    )
    code, said = run(environment=f"{file}:make")
    assert code == 1
    assert "environment 'make' has no method step" in said
    assert "the option names the class itself" in said


def test_environments_that_block_where_they_are_made_have_one_limit(
    folder: Folder, run: Run
) -> None:
    file = folder.path / "game.py"
    file.write_text(f"{ENVIRONMENT}\n    def __init__(self): time.sleep(60)\n")
    begin = time.monotonic()
    code, said = run(environment=f"{file}:Game", reward_timeout=2)
    assert code == 1
    assert "environment 'Game' did not return within 2 s where it is made" in said
    assert time.monotonic() - begin < 16 * 2


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[] if kind in QUICK else [pytest.mark.slow])
        for kind in ENVIRONMENTS
    ],
)
def test_an_odd_environment_ends_the_run_with_a_sentence_or_does_no_harm(
    kind: str, folder: Folder, run: Run
) -> None:
    body, expected, says = ENVIRONMENTS[kind]
    file = folder.path / "game.py"
    file.write_text(f"{ENVIRONMENT}\n{body}\n")
    code, said = run(environment=f"{file}:Game", reward_timeout=0.5)
    assert code == expected
    assert says in " ".join(said.split())


@pytest.mark.slow
def test_a_coroutine_that_takes_no_end_does_not_keep_the_program_from_its_own(
    folder: Folder,
) -> None:
    """It would go on at the end of the interpreter, when it is destroyed."""
    file = folder.path / "game.py"
    file.write_text(
        f"{ENVIRONMENT}\n    async def step(self, text):\n        while True:\n"
        "            try: await asyncio.sleep(60)\n            except BaseException: pass\n"
    )
    flags = folder.flags(iterations=1, environment=f"{file}:Game", reward_timeout=0.5)
    program = [sys.executable, "-m", "fastppo", *flags]
    ended = subprocess.run(program, capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == 1
    assert "did not return within 0.5 s in step" in ended.stderr


CLASSES = """
class Listed:
    def tolist(self): raise KeyError("odd")

class List(list):
    def __iter__(self): raise KeyError("odd")

class Classless:
    @property
    def __class__(self): raise KeyError("odd")

class WordlessError(Exception):
    def __str__(self): raise KeyError("odd")
    __repr__ = __str__

class Exits:
    def __repr__(self): raise SystemExit(0)

class Number(float):
    def __abs__(self): raise KeyError("odd")
    __float__ = __abs__

async def later(): return [1.0]
"""


@pytest.mark.parametrize(
    ("statement", "says"),
    [
        ("import sys; sys.exit(0)", "raised SystemExit(0)"),
        ("raise KeyboardInterrupt", "raised KeyboardInterrupt()"),
        ("raise StopIteration", "raised StopIteration()"),
        ("return later()", "returned a coroutine: expected a plain `def`"),
        ("return Listed()", "returned Listed, which raised KeyError('odd') when read"),
        ("return List([1.0])", "returned List, which raised KeyError('odd') when read"),
        ("return [Classless()]", "returned Classless, which raised KeyError('odd') when read"),
        ("raise WordlessError", "raised WordlessError"),
        ("return [Exits()]", "returned <"),
        ("return [Number('nan')] * len(prompts)", "returned nan for completion 0"),
    ],
)
def test_a_reward_that_fails_oddly_ends_the_run_with_a_sentence(
    statement: str, says: str, folder: Folder, run: Run
) -> None:
    body = f"def count(prompts, completions, **columns):\n    {statement}\n"
    folder.reward.write_text(CLASSES + body)
    code, said = run()
    assert code == 1
    assert f"reward 'count' {says}" in said


@pytest.mark.parametrize(
    ("body", "code", "says"),
    [
        (
            "def count(prompts, completions): ...\ncount.__signature__ = 5",
            1,
            "reward 'count' raised TypeError(",
        ),
        (
            "class Odd:\n    def __getattr__(self, name): raise KeyError(name)\n"
            "    def __call__(self, *texts, **columns): return [1.0]\ncount = Odd()",
            1,
            "reward 'count' raised KeyError('__wrapped__')",
        ),
        (
            "def __getattr__(name):\n    raise SystemExit(0)\nglobals()",
            2,
            ":count: importing {file} raised SystemExit(0)",
        ),
    ],
)
def test_a_reward_that_cannot_be_looked_at_is_a_sentence(
    body: str, code: int, says: str, folder: Folder, run: Run
) -> None:
    folder.reward.write_text(body)
    ended, said = run()
    assert ended == code
    assert says.format(file=folder.reward) in said


@pytest.mark.parametrize("statement", ["sys.stderr.close()", "sys.stderr = None"])
def test_a_reward_that_takes_the_console_away_costs_no_sentence(
    statement: str, folder: Folder
) -> None:
    folder.write_reward(f"import sys; {statement}")
    log = folder.path / "log.txt"
    process = command_line.start(folder.flags(iterations=1), log)
    assert command_line.finish(process) == 0
    assert f"policy  {folder.run}/policy" in log.read_text()


def test_a_reward_of_a_package_imports_from_it(
    folder: Folder, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = folder.path / "rewards_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "beside.py").write_text("SCORE = 1.0\n")
    body = "def count(prompts, completions):\n    return [beside.SCORE] * len(prompts)\n"
    (package / "rewards.py").write_text(f"from . import beside\n{body}")
    monkeypatch.syspath_prepend(folder.path)
    assert run(rewards="rewards_package.rewards:count")[0] == 0


def test_a_reward_that_raises_is_told_by_its_line(folder: Folder, run: Run) -> None:
    """The user's own, above that of the library that raised."""
    body = "    answers = 'text'\n    return [json.loads(answers)]\n"
    folder.reward.write_text(f"import json\ndef count(prompts, completions):\n{body}")
    code, said = run()
    assert code == 1
    assert f"({folder.reward}, line 4, in count: return [json.loads(answers)])" in said
    saved = json.loads((folder.run / "failed_reward.json").read_text())
    assert "line 4, in count" in saved["traceback"]
    assert "JSONDecodeError: Expecting value" in saved["traceback"]


POOLS = {
    "ProcessPoolExecutor": "ProcessPoolExecutor(1, mp_context=get_context('fork'))",
    "Pool": "get_context('fork').Pool(1)",
}


@pytest.mark.parametrize("pool", POOLS)
def test_what_a_worker_of_a_reward_raises_is_told_by_its_line(
    pool: str, folder: Folder, run: Run
) -> None:
    folder.reward.write_text(
        "from concurrent.futures import ProcessPoolExecutor\n"
        "from multiprocessing import get_context\n"
        "def one(text):\n"
        "    return {}[text]\n"
        "def count(prompts, completions, **columns):\n"
        f"    with {POOLS[pool]} as pool:\n"
        "        return list(pool.map(one, completions))\n"
    )
    code, said = run()
    assert code == 1
    assert f"({folder.reward}, line 4, in one: return {{}}[text])" in said


@pytest.mark.parametrize("name", ["{file}:count", "count_w7:count"])
def test_a_file_that_cannot_be_imported_is_told_by_its_line(
    name: str, folder: Folder, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not by that of Python which imports it."""
    monkeypatch.syspath_prepend(folder.path)
    file = folder.path / "count_w7.py"
    file.write_text(f"WORDS = ['w7']\nFIRST = WORDS[1]\n{folder.reward.read_text()}")
    code, said = run(rewards=name.format(file=file))
    assert code == 2
    assert f"({file}, line 2, in <module>: FIRST = WORDS[1])" in said


def test_an_environment_that_raises_is_told_by_its_line(folder: Folder, run: Run) -> None:
    file = folder.path / "game.py"
    file.write_text(f"{ENVIRONMENT}\n    def step(self, text):\n        return {{}}[text]\n")
    code, said = run(environment=f"{file}:Game")
    assert code == 1
    assert f"({file}, line 12, in step: return {{}}[text])" in said
    saved = json.loads((folder.run / "failed_episode.json").read_text())
    assert "line 12, in step" in saved["traceback"]


@pytest.mark.parametrize(
    ("option", "body", "says"),
    [
        ("prompt_weights", "return Odd()", "KeyError('odd')"),
        ("prompt_weights", "sys.exit(0)", "SystemExit(0)"),
        ("prompt_order", "sys.exit(0)", "SystemExit(0)"),
    ],
)
def test_a_function_of_the_prompts_that_fails_is_refused(
    option: str, body: str, says: str, folder: Folder, run: Run
) -> None:
    odd = "import sys\nclass Odd:\n    def tolist(self): raise KeyError('odd')\n"
    file = folder.path / "weights.py"
    file.write_text(f"{odd}def weigh(prompts): {body}\n")
    code, said = run(**{option: f"{file}:weigh"})
    assert code == 2
    assert f"{option}={file}:weigh raised {says}" in said


@pytest.mark.parametrize("option", ["prompt_order", "prompt_weights"])
def test_a_number_beyond_a_floats_range_in_a_column_is_refused(
    option: str, folder: Folder, run: Run
) -> None:
    rows = [{"prompt": "w1", "hard": 10**400}] * 4
    folder.prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, said = run(**{option: "hard"})
    assert code == 2
    assert f"fastppo: {option}=hard, prompt 1: expected a finite number" in said


def test_what_a_reward_changes_of_torch_is_put_back_and_said_once(folder: Folder, run: Run) -> None:
    def weights() -> bytes:
        return (folder.run / "policy" / "model.safetensors").read_bytes()

    assert run(iterations=2)[0] == 0
    honest = weights()
    changes = {
        "torch's random state": "torch.manual_seed(0); torch.rand(3)",
        "torch's default dtype": "torch.set_default_dtype(torch.float64)",
        "torch's default device": "torch.set_default_device('meta')",
        "torch's autocast": "torch.set_autocast_enabled('cpu', True)",
        "whether torch records gradients": "torch.set_grad_enabled(False)",
        "torch's number of threads": f"torch.set_num_threads({torch.get_num_threads() + 1})",
        "torch's precision of matrix products": "torch.set_float32_matmul_precision('medium')",
        "torch's kernels of attention": "torch.backends.cuda.enable_math_sdp(False)",
        "the working directory": "os.chdir('/')",
    }
    folder.write_reward(f"import torch; {'; '.join(changes.values())}")
    code, said = run(iterations=2, output_dir=folder.path / "other")
    folder.run = folder.path / "other"
    assert code == 0
    for what in changes:
        assert said.count(f"reward 'count' changed {what}, which is put back") == 1
    assert weights() == honest


def test_a_reward_that_forks_comes_back_once(folder: Folder, run: Run) -> None:
    folder.write_reward("os.fork()")
    assert run(iterations=2)[0] == 0
    records = read_jsonl(folder.run / "metrics.jsonl")
    assert [record["iteration"] for record in records] == [0, 1]
    for _ in records:
        assert os.wait()[1] != 0, "the children end"


def test_a_process_that_a_reward_forks_is_ended_by_sigterm(folder: Folder, run: Run) -> None:
    """As a pool ends its workers: by the kernel, as a handler of Python runs too late in one that
    is about to block."""
    folder.write_reward(
        "import multiprocessing, time\n"
        "    fork = multiprocessing.get_context('fork')\n"
        "    ready, told = fork.Pipe()\n"
        "    sleep = lambda: (told.send(signal.getsignal(signal.SIGTERM)), time.sleep(60))\n"
        "    worker = fork.Process(target=sleep)\n"
        "    worker.start()\n"
        "    assert ready.recv() == signal.SIG_DFL\n"
        "    worker.terminate()\n"
        "    worker.join(30)\n"
        "    assert worker.exitcode == -signal.SIGTERM, worker.exitcode"
    )
    code, output = run(iterations=2)
    assert code == 0, output


@pytest.mark.slow
def test_two_processes_step_as_one_does_without_a_seed_of_their_own(tmp_path: Path) -> None:
    one = ranks.run(1, many_ranks.step_on_given_responses, tmp_path / "one", str(tmp_path / "one"))
    two = ranks.run(2, many_ranks.step_on_given_responses, tmp_path / "two", str(tmp_path / "two"))
    assert one.keys() == two.keys()
    assert torch.equal(one.pop("random"), two.pop("random"))
    for name, weight in one.items():
        # Rounding in fp32; minibatches of another shuffle differ by the learning rate, 1e-2.
        assert (weight - two[name]).abs().max() <= 1e-4, name
