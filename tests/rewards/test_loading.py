"""Load rewards by name."""

from __future__ import annotations

import pytest
import tiny

from fastppo.rewards.loading import load_reward, reward_name
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
def test_a_missing_reward_is_an_error(spec: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        load_reward(spec)


def test_a_file_can_import_its_neighbors(tmp_path) -> None:
    (tmp_path / "words_of_a_neighbor.py").write_text("LIKED = 'w7'\n")
    (tmp_path / "with_neighbor.py").write_text(
        "from words_of_a_neighbor import LIKED\n"
        "def liked(prompts, completions):\n"
        "    return [c.split().count(LIKED) for c in completions]\n"
    )
    assert load_reward(f"{tmp_path}/with_neighbor.py:liked")(PROMPTS, COMPLETIONS) == [2, 0]


def test_a_directory_is_a_model(tmp_path) -> None:
    name = tiny.saved_reward_model(tmp_path / "my-rm")
    reward = load_reward(name, batch_size=3)
    assert isinstance(reward, RewardModel)
    assert reward.batch_size == 3


def test_a_reward_is_named_after_its_function_or_directory(tmp_path) -> None:
    assert reward_name("path/to/file.py:brief") == "brief"
    assert reward_name("package.module:brief") == "brief"
    assert reward_name("runs/reward") == "reward"
    (tmp_path / "odd:name").mkdir()
    assert reward_name(f"{tmp_path}/odd:name") == "odd:name"
