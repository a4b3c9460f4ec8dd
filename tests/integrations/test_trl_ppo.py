"""TRL 1.12's PPOTrainer and ours with examples/trl_defaults.yaml: the same weights in the end.

TRL draws and scores the responses; ours is given these and the first weights, and nothing else.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from fastppo.ppo.options.config import PPOConfig
from fastppo.ppo.trainer import PPOTrainer
from fastppo.ppo.value_head import ReturnMoments
from fastppo.run.options import read_yaml

datasets = pytest.importorskip("datasets")
pytest.importorskip("requests", reason="TRL 1.12 imports requests and does not ask for it")
trl_ppo = pytest.importorskip("trl.experimental.ppo", reason="pip install trl==1.12.*")

pytestmark = pytest.mark.filterwarnings("default")  # TRL's are its own affair

DEFAULTS = Path(__file__).parents[2] / "examples" / "trl_defaults.yaml"
ITERATIONS = 3
B = 8
T = 12
LEARNING_RATE = 1e-3
TOLERANCE = 3e-7
"""Of weights that move by 1e-2: a few roundings of fp32 near 1."""


def reward_model() -> Any:
    """Scores of some ten, so that gradients of the value function are well above a norm of 1."""
    torch.manual_seed(1)
    shape = tiny.CONFIGS["llama"]().to_dict() | {"num_labels": 1, "architectures": None}
    model = LlamaForSequenceClassification(LlamaConfig(**shape))
    model.score.weight.data.mul_(100)
    return model


def trls_run(folder: Path, policy: Any, critic: Any, monkeypatch: Any) -> list[Any]:
    """Trains both; what each iteration drew: queries with responses [B, 2 + T], and scores [B]."""
    from trl.experimental.ppo import ppo_trainer

    tokenizer = tiny.tokenizer()
    # Outside of the model's vocabulary, so that no response holds it: TRL takes it for an end.
    tokenizer.add_special_tokens({"pad_token": "<nothing>"})
    rows = [{"input_ids": tokenizer(f"w{i} w{i + 9}")["input_ids"]} for i in range(B)]
    data = datasets.Dataset.from_list(rows)
    config = trl_ppo.PPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=B,
        gradient_accumulation_steps=1,
        total_episodes=B * ITERATIONS,
        response_length=T,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        num_sample_generations=0,
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
    )
    drawn: list[Any] = []
    scored: list[Any] = []
    generate = ppo_trainer.batch_generation
    rate = ppo_trainer.get_reward
    rewarding = reward_model()

    def generated(*arguments: Any) -> Any:
        result = generate(*arguments)
        drawn.append(result[0])
        return result

    def rated(model: Any, *arguments: Any) -> Any:
        result = rate(model, *arguments)
        if model is rewarding:
            scored.append(result[1].clone())
        return result

    monkeypatch.setattr(ppo_trainer, "batch_generation", generated)
    monkeypatch.setattr(ppo_trainer, "get_reward", rated)
    trainer = trl_ppo.PPOTrainer(
        config,
        processing_class=tokenizer,
        model=policy,
        ref_model=copy.deepcopy(policy),
        reward_model=rewarding,
        value_model=critic,
        train_dataset=data,
        eval_dataset=data,
    )
    trainer.train()
    return list(zip(drawn, scored, strict=True))


def our_run(folder: Path, policy: Any, critic: Any, drawn: list[Any], **options: Any) -> Any:
    critic.save_pretrained(folder / "critic")
    tiny.tokenizer().save_pretrained(folder / "critic")
    given = {
        "model": "",
        "prompts": "",
        "rewards": [],
        "critic_model": str(folder / "critic"),
        "max_new_tokens": T,
        "iterations": ITERATIONS,
        "learning_rate": LEARNING_RATE,
        "value_learning_rate": LEARNING_RATE,
        "lr_schedule": "constant",  # TRL's falls by iteration, ours by optimizer step
        "stop_token_ids": [],
        "output_dir": str(folder / "run"),
    }
    config = PPOConfig(**read_yaml(DEFAULTS, PPOConfig) | given | options)
    assert (config.rollout_batch_size, config.minibatches) == (B, 1)
    trainer = PPOTrainer(config, model=policy, tokenizer=tiny.tokenizer())
    trainer.model.value_function.head.bias.requires_grad_(False)  # TRL's `score` has none
    for tokens, scores in drawn:
        trainer.step(tokens[:, :-T].tolist(), tokens[:, -T:].tolist(), scores, ["length"] * B)
    return trainer


def furthest(ours: Any, theirs: Any) -> float:
    """The largest difference of two models' weights."""
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return max((x - y).abs().max().item() for x, y in pairs)


def test_three_iterations_end_with_trls_weights(tmp_path: Path, monkeypatch) -> None:
    """Apart from the unit of the values: TRL's are in reward units, ours in deviations of the
    returns, which is 1 here."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    monkeypatch.setattr(
        ReturnMoments, "add", lambda moments, returns: torch.ones((), dtype=torch.float64)
    )
    first = tiny.model()
    critic = reward_model()
    policy, value = copy.deepcopy(first), copy.deepcopy(critic)
    drawn = trls_run(tmp_path / "trl", policy, value, monkeypatch)
    assert furthest(policy, first) > 5e-3
    ours = our_run(tmp_path / "ours", copy.deepcopy(first), critic, drawn)
    assert furthest(ours.model.causal_lm, policy) < TOLERANCE
    assert furthest(ours.model.value_function.trunk, value.model) < TOLERANCE
    clipped = our_run(tmp_path / "clipped", copy.deepcopy(first), critic, drawn, max_grad_norm=1.0)
    assert furthest(clipped.model.causal_lm, policy) > 1e-4, "TRL does not clip"
