"""Rewards by name, under names of their own."""

from __future__ import annotations

import sys

import pytest
import tiny

from fastppo.rewards.loading import load_callable, load_reward, reward_name
from fastppo.rewards.model import RewardModel

PROMPTS = ["w1 w2 ", "w3 "]
COMPLETIONS = ["w7 w7", "w4"]


def test_a_function_of_a_module() -> None:
    reward = load_reward("fastppo.demo.task:gold_reward")
    assert reward(
        ["tell me about the red fox ."], ["the fox is kind . it sings near the hill ."]
    ) == [1.0]


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("nowhere.py:f", "there is no file nowhere.py"),
        ("fastppo.nowhere:f", "no module"),
        ("reward.py", r"reward reward\.py: expected reward\.py:function, got no function"),
        ("fastppo.demo.task:absent", "no function 'absent' there; it has "),
    ],
)
def test_a_reward_that_is_not_there_is_refused(spec: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        load_reward(spec)


def test_a_file_may_import_its_neighbours(tmp_path) -> None:
    (tmp_path / "words_of_a_neighbour.py").write_text("LIKED = 'w7'\n")
    (tmp_path / "with_neighbour.py").write_text(
        "from words_of_a_neighbour import LIKED\n"
        "def liked(prompts, completions):\n"
        "    return [c.split().count(LIKED) for c in completions]\n"
    )
    assert load_reward(f"{tmp_path}/with_neighbour.py:liked")(PROMPTS, COMPLETIONS) == [2, 0]


def test_a_directory_is_a_model(tmp_path) -> None:
    name = tiny.saved_reward_model(tmp_path / "my-rm")
    reward = load_reward(name, batch_size=3)
    assert isinstance(reward, RewardModel)
    assert reward.batch_size == 3


def test_a_reward_goes_by_its_functions_or_its_directorys_name(tmp_path) -> None:
    assert reward_name("path/to/file.py:brief") == "brief"
    assert reward_name("package.module:brief") == "brief"
    assert reward_name("runs/reward") == "reward"
    (tmp_path / "odd:name").mkdir()
    assert reward_name(f"{tmp_path}/odd:name") == "odd:name"


@pytest.mark.parametrize(
    "pays",
    [
        "import functools\n\ndef base(x, **columns): return [1.0]\n"
        "pays = functools.partial(base, x=2)\n",
        "class Pays:\n    def __call__(self, *texts, **columns): return [1.0]\npays = Pays()\n",
        "from words_that_pay import pays\n",
    ],
    ids=["partial", "object", "from another file"],
)
def test_a_changed_body_changes_the_fingerprint_of_whatever_is_called(pays: str, tmp_path) -> None:
    neighbour = tmp_path / "words_that_pay.py"
    neighbour.write_text("def pays(*texts, **columns): return [1.0]\n")
    file = tmp_path / "reward.py"
    file.write_text(pays)
    prints = [load_callable(f"{file}:pays", "reward").fingerprint]
    for changed in (file, neighbour) if "words_that_pay" in pays else (file,):
        changed.write_text(changed.read_text().replace("1.0", "2.0") + "\n")
        sys.modules.pop("words_that_pay", None)
        prints.append(load_callable(f"{file}:pays", "reward").fingerprint)
    assert len(set(prints)) == len(prints)
