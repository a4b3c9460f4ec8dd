"""Options of turns have an effect, or are refused."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import environments
import pytest
import tiny

from fastppo.ppo.config import PPOConfig
from fastppo.ppo.rollout_options import TurnOptions
from runs import make_trainer


@pytest.mark.parametrize("options", [{"max_turns": 3}, {"max_response_tokens": 9}])
def test_options_of_turns_need_an_environment(options: dict[str, int], tmp_path: Path) -> None:
    (name,) = options
    with pytest.raises(ValueError, match=f"{name} has an effect only with environment"):
        make_trainer(tmp_path, **options)


def test_options_of_turns_reach_what_plays_them(tmp_path: Path) -> None:
    options = {"max_turns": 3, "max_response_tokens": 9}
    trainer = make_trainer(tmp_path, **options, environment=environments.Calculator)
    turns = trainer.turns
    assert (turns.max_turns, turns.max_tokens) == (3, 9)
    assert turns.context == tiny.CONTEXT


def test_the_options_of_turns_are_a_section_of_their_own() -> None:
    own = {each.name for each in fields(TurnOptions)}
    assert own == {"environment", "max_turns", "max_response_tokens"}
    assert own <= {*PPOConfig().to_dict()}


def test_steps_of_turns_are_gaes() -> None:
    with pytest.raises(ValueError, match="gae_by has an effect only with advantage=gae"):
        PPOConfig(gae_by="turn", advantage="sequence")
    with pytest.raises(ValueError, match="lam_alpha follows from a response's tokens"):
        PPOConfig(gae_by="turn", lam_alpha=0.1)
