"""Options: conversion, checks, sections and YAML."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import FrozenInstanceError, dataclass, fields, replace
from typing import Any, Literal

import pytest

from fastppo.generate import GenerateConfig
from fastppo.other_names import OPTIONS
from fastppo.ppo.options.config import PPOConfig
from fastppo.run.options import Options, option, read_yaml
from fastppo.run.other_names import other_projects_option
from fastppo.stages.reward_model import RewardModelConfig
from fastppo.stages.sft import SFTConfig


@dataclass(kw_only=True, frozen=True)
class LoopOptions(Options):
    """Loop. The rest of the docstring is no heading."""

    epochs: int = option(1, "Passes over the data", minimum=1)
    share: float = option(0.5, "A share", minimum=0, maximum=1)
    kind: Literal["slow", "fast"] = option("slow", "How")


@dataclass(kw_only=True, frozen=True)
class StepOptions(Options):
    """Step."""

    rate: float = option(1e-3, "A rate", above=0)
    chance: float | None = option(None, "A chance", above=0, maximum=1)
    quiet: bool = option(False, "Say nothing")
    names: Sequence[str] = option([], "Names")
    weights: Sequence[float] | None = option(None, "Weights")


@dataclass(kw_only=True, frozen=True)
class Both(LoopOptions, StepOptions):
    """Both sections, and an option of its own."""

    seed: int = option(0, "Seed", minimum=0)
    epochs: int = option(3, "Passes over the data", minimum=2)

    def check(self) -> None:
        if self.quiet and self.names:
            raise ValueError("quiet has no names")


def test_options_and_their_lists_are_frozen() -> None:
    names = ["a"]
    options = Both(names=names)
    with pytest.raises(FrozenInstanceError):
        options.epochs = 7
    names.append("b")
    assert options.names == ("a",)
    assert options.to_dict()["names"] == ["a"]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("epochs", "2", 2),
        ("epochs", 2.0, 2),
        ("rate", "1e-5", 1e-5),
        ("chance", None, None),
        ("chance", "none", None),
        ("quiet", "True", True),
        ("quiet", "false", False),
        ("names", ["a", "b"], ("a", "b")),
        ("weights", ["1", 2], (1.0, 2.0)),
    ],
)
def test_values_of_yaml_and_flags_are_converted(name: str, value: Any, expected: Any) -> None:
    converted = getattr(Both(**{name: value}), name)
    assert converted == expected
    assert type(converted) is type(expected)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"epochs": 1}, "^epochs .*1$"),
        ({"epochs": 2.5}, "^epochs .*2.5$"),
        ({"epochs": True}, "^epochs .*True$"),
        ({"rate": 0}, "^rate .*0.0$"),
        ({"rate": "fast"}, "^rate .*'fast'$"),
        ({"rate": float("inf")}, "^rate .*inf$"),
        ({"chance": 0}, "^chance .*0.0$"),
        ({"quiet": "perhaps"}, "^quiet .*'perhaps'$"),
        ({"names": "a"}, "^names .*'a'$"),
        ({"names": [1]}, "^names .*1$"),
        ({"kind": "quick"}, "^kind .*slow, fast.*'quick'$"),
        ({"quiet": True, "names": ["a"]}, "^quiet .*names"),
    ],
)
def test_a_wrong_value_raises_with_the_name_of_the_option(values, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Both(**values)


def test_sections_are_the_base_classes_in_order() -> None:
    names = {heading: [m.name for m in members] for heading, members in Both.sections().items()}
    assert names == {
        "Loop. The rest of the docstring is no heading": ["epochs", "share", "kind"],
        "Step": ["rate", "chance", "quiet", "names", "weights"],
        "Both sections, and an option of its own": ["seed"],
    }
    (epochs, *_) = next(iter(Both.sections().values()))
    assert (epochs.default, epochs.metadata["bounds"][0]) == (3, 2), (
        "the subclass overrides the field"
    )


@pytest.mark.parametrize(
    "kind",
    [PPOConfig, SFTConfig, RewardModelConfig, GenerateConfig],
    ids=lambda kind: kind.__name__,
)
def test_every_option_is_in_one_section_with_help_and_bounds(kind: type[Options]) -> None:
    members = [member for one in kind.sections().values() for member in one]
    assert sorted(m.name for m in members) == sorted(f.name for f in fields(kind))
    assert list(kind().to_dict()) == [m.name for m in members]
    for member in members:
        assert member.metadata["help"], member.name
        assert len(member.metadata["bounds"]) == 3, member.name


def test_saved_options_are_read_back(tmp_path) -> None:
    options = Both(rate=1e-6, names=["β", "b"], weights=[0.5])
    options.save(tmp_path / "config.yaml")
    assert Both(**read_yaml(tmp_path / "config.yaml", Both)) == options
    lines = (tmp_path / "config.yaml").read_text(encoding="utf-8").splitlines()
    keys = [line.split(":")[0] for line in lines if not line.startswith("-")]
    assert keys == list(options.to_dict())
    assert "- β" in lines


@pytest.mark.parametrize(
    ("text", "named"),
    [("- a", r"run\.yaml: .*list"), ("a: [", r"run\.yaml .*YAML")],
)
def test_a_wrong_file_raises(text: str, named: str, tmp_path) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ValueError, match=named):
        read_yaml(tmp_path / "run.yaml", Both)


def test_an_unknown_option_raises_with_our_name_or_the_nearest(tmp_path) -> None:
    (tmp_path / "run.yaml").write_text("leraning_rate: 1\nbeta: 0.1\nvespo_k_pos: 5")
    with pytest.raises(ValueError, match="learning_rate") as error:
        read_yaml(tmp_path / "run.yaml", PPOConfig)
    misspelt, of_trl, unknown = str(error.value).splitlines()
    assert re.search(r"run\.yaml: .*'leraning_rate'.* learning_rate\b", misspelt)
    assert re.search(r"run\.yaml: .*'beta'.* kl_loss_coef .*kl_coef\b", of_trl)
    assert re.search(r"run\.yaml: .*'vespo_k_pos'$", unknown)
    with pytest.raises(TypeError, match=r"'cliprange'.* clip_ratio"):
        PPOConfig(cliprange=0.2)
    with pytest.raises(TypeError, match=r"'num_train_epochs'.* epochs"):
        replace(SFTConfig(), num_train_epochs=2)


def test_other_names_map_to_our_options() -> None:
    ours = PPOConfig().to_dict().keys() | SFTConfig().to_dict().keys()
    for name, options in OPTIONS.items():
        assert name not in PPOConfig().to_dict()
        assert options
        assert set(options) <= ours
    known = {"learning_rate", "kl_loss_coef", "kl_coef"}
    assert other_projects_option("actor_rollout_ref.actor.optim.lr", known) == ["learning_rate"]
    assert other_projects_option("beta", known) == ["kl_loss_coef", "kl_coef"]
    assert other_projects_option("learning_rate", known) is None
    assert other_projects_option("local_rank", known) == []
