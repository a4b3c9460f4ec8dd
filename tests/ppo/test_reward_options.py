"""Options of rewards are a section of their own, and those without an effect are refused."""

from __future__ import annotations

from dataclasses import fields

import pytest

from fastppo.ppo.config import PPOConfig
from fastppo.ppo.reward_options import RewardOptions


def test_the_options_of_rewards_are_a_section_of_their_own() -> None:
    section = {each.name for each in PPOConfig.sections()["Rewards"]}
    assert section == {each.name for each in fields(RewardOptions)}
    assert "reward_failure" in section


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"reward_ensemble": ["a"]}, "reward_ensemble must be at least two reward models"),
        ({"reward_timeout": 0.0}, "reward_timeout must be > 0, got 0"),
    ],
)
def test_what_has_no_effect_or_no_sense_is_refused(options: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        PPOConfig(**options)
