"""Presets: what they say is an option, and a run with one is the method."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fastppo import cli
from fastppo.ppo.options.config import PPOConfig
from fastppo.ppo.presets import PRESETS, preset_options
from runs import make_trainer, records


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_options_that_differ_from_the_defaults_or_make_the_method(name: str) -> None:
    options = preset_options(name)
    assert options.keys() <= PPOConfig().to_dict().keys()
    config = PPOConfig(**options)
    assert all(getattr(config, key) == value for key, value in options.items())


def test_there_is_no_preset_of_another_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--preset", "grpo", "--model", "m", "--prompts", "p"]) == 2
    assert "preset must be one of sao, got 'grpo'" in capsys.readouterr().err


def test_the_file_wins_over_the_preset_and_flags_over_both(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: m\nprompts: p\nrewards: [r.py:f]\nclip_ratio: 0.8\nlam_alpha: 2.0\n")
    flags = ["--preset", "sao", "--config", str(file), "--lam_alpha", "3.0"]
    config = cli.parse("train", flags)
    assert (config.objective, config.clip_ratio, config.lam_alpha) == ("dis", 0.8, 3.0)
    assert cli.parse("plan", flags) == config


def test_sao_trains_the_critic_alone_and_then_the_policy_against_the_sampler(
    tmp_path: Path,
) -> None:
    """Before an update only the critic makes a pass. The policy rests while the critic warms up."""
    small = {
        "rollout_batch_size": 8,
        "minibatches": 2,
        "value_warmup_iterations": 1,
        "learning_rate": 3e-2,
        "value_learning_rate": 1e-2,
        "iterations": 3,
    }
    trainer = make_trainer(tmp_path, **preset_options("sao") | small)
    weights = [trainer.model.head.weight.detach().clone()]
    inner = trainer.make_experience
    passes: list[int] = []
    passes_before_an_update: list[int] = []
    words = trainer.model.causal_lm.get_input_embeddings()
    words.register_forward_hook(lambda module, args, output: passes.append(len(args[0])))

    def make_experience(*args, **keywords):
        passes.clear()
        gradient = inner(*args, **keywords)
        passes_before_an_update.append(len(passes))
        weights.append(trainer.model.head.weight.detach().clone())
        return gradient

    trainer.make_experience = make_experience
    trainer.train()
    assert passes_before_an_update == [0, 0, 0]
    assert torch.equal(weights[1], weights[2]), "the critic was alone in the first iteration"
    assert not torch.equal(weights[2], weights[3])
    first, _, last = records(trainer)
    assert first["clip_fraction"] == 0
    assert last["clip_fraction"] > 0, "the second minibatch's tokens are outside the range"
    assert last["explained_variance"] != first["explained_variance"]
