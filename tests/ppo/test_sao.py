"""examples/sao.yaml trains as the paper describes."""

from __future__ import annotations

from pathlib import Path

import torch
from processes import ROOT

from fastppo.ppo.options.config import PPOConfig
from fastppo.run.options import read_yaml
from runs import make_trainer, records

FILES = ("model", "prompts", "rewards", "output_dir")


def test_sao_warms_up_the_critic_and_then_trains_the_policy_against_the_sampler(
    tmp_path: Path,
) -> None:
    options = read_yaml(ROOT / "examples" / "sao.yaml", PPOConfig)
    options = {name: value for name, value in options.items() if name not in FILES}
    options |= {
        "rollout_batch_size": 8,
        "minibatches": 2,
        "value_warmup_iterations": 1,
        "learning_rate": 3e-2,
        "value_learning_rate": 1e-2,
        "iterations": 3,
    }
    trainer = make_trainer(tmp_path, **options)
    weights = [trainer.model.head.weight.detach().clone()]
    make_experience = trainer.make_experience
    passes: list[int] = []
    passes_before_update: list[int] = []
    embedding = trainer.model.causal_lm.get_input_embeddings()
    embedding.register_forward_hook(lambda module, args, output: passes.append(len(args[0])))

    def counting(*args, **keywords):
        passes.clear()
        experience = make_experience(*args, **keywords)
        passes_before_update.append(len(passes))
        weights.append(trainer.model.head.weight.detach().clone())
        return experience

    trainer.make_experience = counting
    trainer.train()
    assert passes_before_update == [0, 0, 0], "only the critic reads the batch before the update"
    assert torch.equal(weights[1], weights[2]), "the first iteration trains only the critic"
    assert not torch.equal(weights[2], weights[3])
    first, _, last = records(trainer)
    assert first["clip_fraction"] == 0
    assert last["clip_fraction"] > 0, "tokens of the second minibatch leave the range"
    assert last["explained_variance"] != first["explained_variance"]
