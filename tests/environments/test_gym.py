"""Environments with Gymnasium's interface: what the policy reads, its actions, and refusals."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fastppo.data.datasets import DataError
from fastppo.environments.gym import Gym, as_text, read_action
from fastppo.environments.loading import load_environment
from fastppo.plugins.adapters import load_prompts


class Corridor:
    """The goal is `length` steps to the right; five steps at most."""

    action_space = SimpleNamespace(n=2)

    def __init__(self, length: int = 2) -> None:
        self.length = length
        self.closed = False

    def reset(self, *, seed: int | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        self.place = 0 if seed is None else seed
        self.steps = 0
        return {"place": self.place}, {}

    def step(self, action: int) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        self.steps += 1
        self.place += 1 if action == 1 else -1
        at_goal = self.place == self.length
        return {"place": self.place}, float(at_goal), at_goal, self.steps == 5, {}

    def close(self) -> None:
        self.closed = True


class Echo:
    """Text in, text out, without an action space and without `close`."""

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        return "Say something.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return f"You said {action!r}.", 0.5, False, False, {}


VALID = {"invalid": False}

CHAT = [{"role": "system", "content": "Play."}, {"role": "user", "content": "x"}]


def test_a_text_environment_reads_and_writes_texts() -> None:
    game = Gym(Echo())
    assert game.reset("x") == "Say something.\n"
    assert game.step(" hello ") == ("\nYou said 'hello'.\n", 0.5, False, VALID)
    opening = game.reset(CHAT, seed=1)
    assert opening == [CHAT[0], {"role": "user", "content": "Say something."}]
    assert game.step("hello")[0] == "You said 'hello'."
    game.close()


def test_a_discrete_action_is_the_first_number_of_the_turn() -> None:
    game = Gym(Corridor())
    assert game.reset("x", seed=0) == '{"place": 0}\n'
    assert game.step("go to 1, not 0") == ('\n{"place": 1}\n', 0.0, False, VALID)
    for text in ("right", "7"):
        observation, *others = game.step(text)
        assert "expected an action from 0 to 1" in observation
        assert others == [0.0, False, {"invalid": True}]
    assert game.environment.steps == 1, "invalid actions do not reach it"
    assert game.step("1") == ('\n{"place": 2}\n', 1.0, True, {**VALID, "outcome": "terminated"})


class Numbers:
    """A space of arrays, as gymnasium's `MultiDiscrete([3, 3])`."""

    shape = (2,)
    dtype = np.dtype("int64")

    def contains(self, action: Any) -> bool:
        return action.shape == self.shape and bool(((action >= 0) & (action < 3)).all())

    def __repr__(self) -> str:
        return "MultiDiscrete([3 3])"


def test_an_action_of_several_numbers_is_the_list_of_the_turn() -> None:
    assert read_action(Numbers(), "I play [1,\n2].").tolist() == [1, 2]
    deep, large = 10_000 * "[" + 10_000 * "]", f"[1, {2**64}]"
    for text in ("1, 2", "[1, 3]", "[1]", '["a", 2]', "[1, 2", deep, large):
        with pytest.raises(ValueError, match=r"expected JSON of MultiDiscrete\(\[3 3\]\)"):
            read_action(Numbers(), text)


class Parts(dict[str, Any]):
    """As gymnasium's `Dict`, which is a mapping of spaces."""

    def contains(self, action: Any) -> bool:
        return action["digit"] in range(10) and self["at"].contains(action["at"])


def test_an_action_of_several_parts_is_the_object_of_the_turn() -> None:
    space = Parts(digit=SimpleNamespace(n=10), at=Numbers())
    action = read_action(space, 'I set {"digit": 7, "at": [0, 2]}.')
    assert action["digit"] == 7
    assert action["at"].tolist() == [0, 2]
    for text in ("7", '{"digit": 7}', '{"digit": 10, "at": [0, 2]}', '{"digit": 7, "at": [3, 0]}'):
        with pytest.raises(ValueError, match=r"expected JSON of"):
            read_action(space, text)


def test_a_space_that_raises_does_not_contain_the_action() -> None:
    class Small(Numbers):
        def contains(self, action: Any) -> bool:
            raise OverflowError("Python integer out of bounds")

    with pytest.raises(ValueError, match="expected JSON of"):
        read_action(Small(), "[1, 2]")


def test_discrete_actions_may_not_start_at_zero() -> None:
    assert read_action(SimpleNamespace(n=2, start=1, shape=()), "2") == 2
    assert read_action(SimpleNamespace(n=3, start=-1), "go -1") == -1
    with pytest.raises(ValueError, match="expected an action from 1 to 2"):
        read_action(SimpleNamespace(n=2, start=1), "0")


def test_arrays_are_written_as_they_print() -> None:
    seen = {"at": np.array([0.1, 1e-9], np.float32), "speed": np.float32(0.3), "wind": np.int8(2)}
    assert as_text(seen) == '{"at": [0.1, 1e-09], "speed": 0.3, "wind": 2}'
    board = np.array([[0, 1], [2, 3]])
    assert as_text(board) == "[[0, 1], [2, 3]]"


def test_a_rendering_as_text_replaces_the_observations() -> None:
    class Rendered(Corridor):
        render_mode = "ansi"

        def render(self) -> str:
            return "." * self.place + "x"

    game = Gym(Rendered())
    assert game.reset("x", seed=0) == "x\n"
    assert game.step("1")[0] == "\n.x\n"


def test_a_truncated_episode_ends() -> None:
    game = Gym(Corridor())
    game.reset("x")
    answers = [game.step("0") for _ in range(5)]
    assert [done for _, _, done, _ in answers] == [False] * 4 + [True]
    assert answers[-1][3] == {**VALID, "outcome": "truncated"}


@pytest.mark.parametrize("key", ["is_success", "success"])
@pytest.mark.parametrize(("value", "outcome"), [(np.True_, "success"), (0.0, "failure")])
def test_an_environment_may_say_whether_an_episode_was_a_success(
    key: str, value: Any, outcome: str
) -> None:
    class Goal(Corridor):
        def step(self, action: int) -> Any:
            return *super().step(action)[:4], {key: value}

    game = Gym(Goal(length=1))
    game.reset("x", seed=0)
    assert game.step("1")[3] == {**VALID, "outcome": outcome}


def test_texts_and_actions_can_be_converted() -> None:
    game = Gym(
        Corridor(), action=lambda text: ["left", "right"].index(text), observation=lambda seen: "."
    )
    assert game.reset("x", seed=0) == ".\n"
    assert game.step("right")[0] == "\n.\n"
    assert game.environment.place == 1
    assert "error" in game.step("up")[0]


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A package with a class, and Gymnasium's registry."""
    package = ModuleType("corridors")
    package.__dict__["Corridor"] = Corridor
    monkeypatch.setitem(sys.modules, "corridors", package)
    spec = SimpleNamespace(id="Corridor-v0", entry_point="corridors.envs:Corridor")
    gymnasium = ModuleType("gymnasium")
    gymnasium.__dict__.update(
        make=lambda name, **options: {spec.id: Corridor}[name](**options),
        registry={spec.id: spec, "Other-v0": SimpleNamespace(id="Other-v0", entry_point="o:O")},
        error=SimpleNamespace(UnregisteredEnv=KeyError),
    )
    monkeypatch.setitem(sys.modules, "gymnasium", gymnasium)
    return package


@pytest.mark.parametrize("name", ["Corridor", "Corridor-v0"])
def test_a_name_is_a_class_or_in_gymnasiums_registry(name: str, package: ModuleType) -> None:
    term = load_environment(f"gym:corridors:{name}?length=3")
    assert term is not None
    assert term.function.__name__ == name
    game = term.function()
    assert isinstance(game.environment, Corridor)
    assert game.environment.length == 3


def test_a_package_may_have_its_own_registry(package: ModuleType) -> None:
    package.__dict__["make"] = lambda name, **options: (Echo(), name, options)[0]
    term = load_environment("gym:corridors:game:Echo-v0")
    assert term is not None
    assert isinstance(term.function().environment, Echo)


def test_a_name_may_be_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "echo.py"
    file.write_text("class Echo:\n    def __init__(self, word): self.word = word\n")
    term = load_environment(f"gym:{file}:Echo?word=hi")
    assert term is not None
    first, second = (term.function().environment for _ in range(2))
    assert first.word == second.word == "hi"
    assert type(first) is type(second), "the file is loaded once"


def test_prompts_have_consecutive_seeds() -> None:
    rows = load_prompts("gym:corridors:Corridor?size=3&seed=5")
    assert [row["seed"] for row in rows] == [5, 6, 7]
    assert load_prompts("gym:corridors:Corridor?size=1&chat=true")[0]["prompt"][0]["role"] == "user"


def test_rules_precede_the_first_observation() -> None:
    (row,) = load_prompts("gym:corridors:Corridor?size=1&rules=Answer 0 or 1.")
    assert row["rules"] == "Answer 0 or 1."
    game = Gym(Corridor())
    assert game.reset(row["prompt"], row["seed"], row["rules"]) == 'Answer 0 or 1.\n{"place": 0}\n'
    assert game.reset(CHAT[1:], 0, "Answer 0 or 1.") == [
        {"role": "system", "content": "Answer 0 or 1."},
        {"role": "user", "content": '{"place": 0}'},
    ]
    with pytest.raises(DataError, match="rules must be a text, got 5"):
        load_prompts("gym:corridors:Corridor?rules=5")


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (
            "gym:corridors:Nowhere-v0",
            "gym:corridors has no class or function 'Nowhere-v0', and 'Nowhere-v0' "
            "corridors registers Corridor-v0$",
        ),
        ("gym:json:Nowhere-v0", "json registers none when it is imported; a function in a file"),
        ("gym:no_such_package:Name", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("gym:Corridor", "expected gym:package:Name or gym:file.py:Name, got gym:Corridor"),
    ],
)
def test_a_wrong_name_is_refused_before_the_run(spec: str, says: str, package: ModuleType) -> None:
    with pytest.raises(DataError, match=says):
        load_environment(spec)


def test_other_interfaces_are_refused() -> None:
    class Old(Echo):
        def step(self, action: str) -> Any:
            return "You said it.", 0.5, False, {}

    game = Gym(Old())
    game.reset("x")
    with pytest.raises(ValueError, match=r"expected \(observation, reward, terminated, truncated,"):
        game.step("x")
    with pytest.raises(ValueError, match=r"reset returned 'x'; expected \(observation, info\)"):
        Gym(SimpleNamespace(reset=lambda: "x")).reset("x")


def test_gem_and_minigrid_run() -> None:
    pytest.importorskip("gem", reason="pip install gem-llm")
    pytest.importorskip("minigrid", reason="pip install minigrid")
    term = load_environment("gym:gem:game:GuessTheNumber-v0-easy?max_turns=2")
    assert term is not None
    game = term.function()
    assert "Guess The Number" in game.reset("x", seed=1)
    assert game.step("no guess")[2]  # invalid guesses end the game
    term = load_environment("gym:minigrid:MiniGrid-Empty-5x5-v0")
    assert term is not None
    game = term.function()
    assert '"mission": "get to the green goal square"' in game.reset("x", seed=0)
    moves = [game.step(action) for action in "22122"]  # forward, forward, right, forward, forward
    assert [move[2] for move in moves] == [False] * 4 + [True]
    assert moves[-1][1] > 0.9
