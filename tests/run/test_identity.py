"""Which differences make a resumed run another run."""

from __future__ import annotations

import json
from dataclasses import dataclass

from fastppo.ppo.options.config import IDENTITY, PPOConfig
from fastppo.run import identity
from fastppo.run.options import Options, option
from fastppo.stages.options import IDENTITY as STAGE_IDENTITY
from fastppo.stages.reward_model import RewardModelConfig
from fastppo.stages.sft import SFTConfig


@dataclass(kw_only=True, frozen=True)
class Config(Options):
    """Run."""

    seed: int = option(0, "Seed")
    rate: float = option(1.0, "Rate")
    output_dir: str = option("a", "Where")


def _identity(model: str = "m", **options) -> dict:
    run = identity.of_run(Config(**options), {"model": model})
    return json.loads(json.dumps(run))


def test_the_essential_options_exist() -> None:
    assert {*IDENTITY} <= PPOConfig().to_dict().keys()
    assert {*STAGE_IDENTITY} <= SFTConfig().to_dict().keys() | RewardModelConfig().to_dict().keys()
    assert len({*IDENTITY}) == len(IDENTITY)


def test_fingerprints_and_essential_options_make_another_run() -> None:
    differences = identity.differences(_identity(), _identity("n", seed=1, rate=2), ["seed"])
    assert [(difference.name, difference.is_other_run) for difference in differences] == [
        ("seed", True),
        ("the content of model", True),
        ("rate", False),
    ]
    assert str(differences[0]) == "seed was 0 and is 1"


def test_an_option_without_an_effect_is_not_essential() -> None:
    names = ("kl_loss_estimator", "max_turns", "seed")
    essential = identity.essential_options
    assert essential(PPOConfig(), names) == ["seed"]
    assert essential(PPOConfig(kl_loss_coef=0.1), names) == ["kl_loss_estimator", "seed"]
    assert essential(PPOConfig(), names, ["environment"]) == ["max_turns", "seed"]
    assert essential(SFTConfig(), ("lora_alpha", "center_coef", "seed")) == ["seed"]


def test_a_new_or_missing_fingerprint_makes_another_run() -> None:
    one, both = _identity(), _identity()
    both["fingerprints"]["rewards/brevity"] = "abc"
    for before, now, says in ((one, both, "was None and is 'abc'"), (both, one, "is None")):
        (difference,) = identity.differences(before, now, [])
        assert difference.is_other_run
        assert str(difference).startswith("the content of rewards/brevity was ")
        assert says in str(difference)
