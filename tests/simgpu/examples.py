"""Run the examples at toy sizes, as cases of `cases.py`.

lora_head.py is on the CPU by design. fsdp2.py needs two ranks; `test_simgpu.py` runs it.
objective.py, objectives.py and optimizer.py are functions of a trainer.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any
from unittest import mock

EXAMPLES = Path(__file__).parents[2] / "examples"

FILES = ("model", "prompts", "rewards", "output_dir", "reference_model")
"""Options that name files of a user."""

TOY: dict[str, Any] = {
    "device": "cuda",
    "rollout_batch_size": 4,
    "max_new_tokens": 4,
    "iterations": 1,
    "microbatch_size": 2,
    "ppo_epochs": 1,
    "minibatches": 1,
    "learning_rate": 1e-3,
    "warmup_steps": 0,
}

YAML: dict[str, dict[str, Any]] = {
    "distill": {},
    "full_7b": {"shard_size": None},
    "plain": {},
    "sao": {"value_warmup_iterations": 1, "iterations": 2},
    "trl_defaults": {},
    "vapo": {"value_warmup_iterations": 1, "iterations": 2, "samples_per_prompt": 2},
}
"""Files, and what changes in addition to `TOY`."""

FUNCTIONS = {
    "objective": {"objective": "examples/objective.py:dppo_tv"},
    "clip_cov": {"objective": "examples/objectives.py:clip_cov"},
    "kl_cov": {"objective": "examples/objectives.py:kl_cov"},
    "geometric_mean": {"objective": "examples/objectives.py:geometric_mean_rejection"},
    "k3_rejection": {"objective": "examples/objectives.py:k3_rejection"},
    "optimizer": {"optimizer": "examples/optimizer.py:MuonAdamW"},
}
"""Options that name a function of an example."""


def yaml_options(name: str) -> dict[str, Any]:
    """Return the options of an example's file at toy size."""
    import tiny

    from fastppo.ppo.options.config import PPOConfig
    from fastppo.run.options import read_yaml

    options = read_yaml(EXAMPLES / f"{name}.yaml", PPOConfig)
    own = {key: value for key, value in options.items() if key not in FILES}
    if name == "distill":
        own |= {"rewards": [], "reference": tiny.model(seed=1)}
    return own | TOY | YAML[name]


def module(name: str, **constants: int) -> Any:
    """Return the module of an example, with other constants."""
    sys.path.insert(0, str(EXAMPLES))
    found = importlib.import_module(name)
    for constant, value in constants.items():
        assert hasattr(found, constant)
        setattr(found, constant, value)
    return found


def ppo(folder: Path) -> None:
    module("ppo", EPISODES=8, MINIBATCHES=2).train(1)


def grpo(folder: Path) -> None:
    module("grpo", PROMPTS=4, GROUP=2, MINIBATCHES=2).train(1)


def accelerate_loop(folder: Path) -> None:
    module("accelerate_loop", EPISODES=8, MINIBATCHES=1, STEPS=2).train(1)


def tasks(folder: Path) -> None:
    example = module("tasks", HELD_OUT=4)
    config = example.PPOConfig

    def small(**options: Any) -> Any:
        return config(**options | {"rollout_batch_size": 4, "microbatch_size": 4, "ppo_epochs": 1})

    arguments = ["tasks.py", "--iterations", "1", "--output_dir", str(folder / "run")]
    with mock.patch.object(example, "PPOConfig", small), mock.patch.object(sys, "argv", arguments):
        example.main()


def trl_grpo(folder: Path) -> None:
    module("trl_grpo", VOCABULARY=256, RESPONSE=4, GROUP=2, ROWS=4).main(2)


SCRIPTS = (ppo, grpo, accelerate_loop, tasks, trl_grpo)
