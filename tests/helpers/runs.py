"""Trainers on tiny models, and the experience that tests hand to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import tiny
import torch
from torch import Tensor, nn

from fastppo.data.batch import Batch
from fastppo.data.datasets import visiting_order
from fastppo.data.prompts import Prompts
from fastppo.data.world import join
from fastppo.ppo.experience import Experience
from fastppo.ppo.options.config import FUNCTIONS, PPOConfig
from fastppo.ppo.state import RunState
from fastppo.ppo.step_control import make_step_control
from fastppo.ppo.trainer import PPOTrainer
from fastppo.rewards.scorer import Scores
from fastppo.rollout import Rollout, RolloutEngine, Sampling
from fastppo.run.log import read_jsonl
from fastppo.run.optimizer import Optimizer

PARTS = (
    "rewards",
    "prompts",
    "tokenizer",
    "reference",
    "engine",
    "environment",
    "monitor_rewards",
    "console",
    "callbacks",
    "objective",
    "advantage",
)
LEARNING: dict[str, Any] = {
    "rollout_batch_size": 64,
    "microbatch_size": 64,
    "iterations": 20,
    "learning_rate": 2e-3,
    "kl_coef": 0.0,
}
"""Options of a run whose reward rises above 0.5. A random policy gets about 1/43, the best 1."""

ONE_STEP: dict[str, Any] = {"ppo_epochs": 1, "minibatches": 1}
"""Options of one optimizer step per iteration."""


class Watched(RolloutEngine):
    """An engine that passes each rollout of another one to `look`, which may change it.

    Args:
        look: called with the rollout, the prompts' token ids and the sampling.
    """

    def __init__(self, engine: RolloutEngine, look: Callable[..., object]) -> None:
        self.engine, self.look = engine, look

    def generate(self, prompt_ids: list[list[int]], sampling: Sampling) -> Rollout:
        rollout = self.engine.generate(prompt_ids, sampling)
        self.look(rollout, prompt_ids, sampling)
        return rollout


def make_trainer(tmp_path: Path, architecture: str = "llama", **options: Any) -> PPOTrainer:
    """Return a trainer on a tiny model.

    Args:
        options: fields of the config, arguments of `PPOTrainer`, `causal_lm` for another model,
            `model_dtype` of the tiny one, or `timeout`, seconds that a rank waits for the others.
    """
    timeout = options.pop("timeout", None)
    dtype = getattr(torch, options.pop("model_dtype", "float32"))
    causal_lm = options.pop("causal_lm", None)
    if causal_lm is None:
        causal_lm = tiny.model(architecture).to(dtype)
    parts = {"rewards": [tiny.count_w7], "prompts": tiny.PROMPTS, "tokenizer": tiny.tokenizer()}
    own = [x for x in PARTS if x in options and (x not in FUNCTIONS or callable(options[x]))]
    parts |= {name: options.pop(name) for name in own}
    config = PPOConfig(**tiny.options(tmp_path, **options))
    if timeout is not None:
        parts["world"] = join(torch.device("cpu"), timeout=timeout, shard_size=config.shard_size)
    return PPOTrainer(config, model=causal_lm, **parts)


def adamw(groups: list[dict[str, Any]], **options: Any) -> Optimizer:
    """Return AdamW on fp32 masters of the groups' weights."""
    return Optimizer(lambda masters: torch.optim.AdamW(masters, **options), groups)


def tensors_of(experience: Experience) -> dict[str, Tensor]:
    """Return the tensors of an experience and of its batch, by name."""
    return {
        field.name: value
        for record in (experience, experience.batch)
        for field in fields(record)
        if isinstance(value := getattr(record, field.name), Tensor)
    }


def first_prompts(trainer: PPOTrainer, count: int) -> Prompts:
    """Return the first prompts of the shuffled epochs."""
    prompts = trainer.parts.prompts
    assert prompts is not None
    return prompts.select(visiting_order(len(prompts), 0, count, seed=0))


def first_experience(trainer: PPOTrainer) -> Experience:
    """Return the experience of a scored rollout."""
    prompts = first_prompts(trainer, trainer.config.rollout_batch_size)
    coefficients = trainer.begin_iteration()
    rollout = trainer.engine.generate(prompts.token_ids, trainer.parts.sampling)
    scores = trainer.score(prompts, rollout, coefficients)
    return trainer.make_experience(prompts.token_ids, rollout, scores, coefficients)[0]


def experience_of(
    trainer: PPOTrainer, batch: Batch, scores: Tensor | Scores, truncated: bool = False
) -> tuple[Experience, dict[str, float]]:
    """Return the experience of a batch with given scores, and its metrics."""
    prompt_ids = []
    responses = []
    for row, tokens in enumerate(batch.tokens.split(batch.lengths.tolist())):
        length = int(batch.prompt_lengths[row])
        prompt_ids.append(tokens[:length].tolist())
        responses.append(tokens[length:].tolist())
    response_mask = None
    if batch.response_mask is not None:
        masks = batch.response_mask.split(batch.response_lengths.tolist())
        response_mask = [mask.tolist() for mask in masks]
    reasons = ["length" if truncated else "stop"] * len(batch)
    rollout = Rollout(responses, reasons, response_mask=response_mask)
    rewards = scores if isinstance(scores, Scores) else Scores(scores)
    return trainer.make_experience(prompt_ids, rollout, rewards, trainer.begin_iteration())


def fresh_state(config: PPOConfig) -> RunState:
    """Return the state of a run before its first iteration, with an optimizer of one weight."""
    optimizer = adamw([{"params": [nn.Parameter(torch.zeros(1))], "peak_lr": 1e-3, "lr": 1e-3}])
    return RunState.of(config, make_step_control(config, optimizer, lambda *said: None))


def perturb(trainer: PPOTrainer, scale: float = 0.05) -> None:
    """Move the policy away from its rollout and its reference."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in trainer.model.causal_lm.parameters():
            parameter.add_(scale * torch.randn_like(parameter) * parameter.std())


def weights_of(trainer: PPOTrainer) -> list[Tensor]:
    """Return copies of all parameters."""
    return [weight.detach().clone() for weight in trainer.model.parameters()]


def logprobs_of(
    causal_lm: Any,
    prompt_ids: list[list[int]],
    responses: list[list[int]],
    temperature: float = 1.0,
) -> Tensor:
    """Return the logprobs [N] of the responses' tokens, from the logits of the model."""
    rows = []
    for prompt, tokens in zip(prompt_ids, responses, strict=True):
        with torch.no_grad():
            logits = causal_lm(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        logprobs = (logits / temperature).log_softmax(-1)
        rows.append(logprobs.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1))
    return torch.cat(rows)


def counting(at: int = 0, act: Callable[[], object] = lambda: None) -> Callable[..., list[float]]:
    """Return a reward that counts w7, and calls `act` before its call number `at`."""
    calls = []

    def reward(prompts: list[Any], completions: list[str], **columns: Any) -> list[float]:
        calls.append(1)
        if len(calls) == at:
            act()
        return tiny.count_w7(prompts, completions)

    return reward


def records(trainer: PPOTrainer) -> list[dict[str, Any]]:
    """Return the records of the run's metrics.jsonl."""
    return read_jsonl(Path(trainer.config.output_dir) / "metrics.jsonl")


def assert_learns(trainer: PPOTrainer) -> None:
    """Check that the reward of a run with the options of LEARNING rose."""
    rewards = [record["reward"] for record in records(trainer)]
    assert rewards[0] < 0.1
    assert rewards[-1] > 0.5


def update_gradients(tmp_path: Path, **options: Any) -> dict[str, Tensor]:
    """Return the gradient of each parameter in one optimizer step on a rollout."""
    fixed = {"value_head": "gradient", "max_grad_norm": 1e9, **ONE_STEP}
    trainer = make_trainer(tmp_path, **{**fixed, **options})
    torch.manual_seed(5)
    trainer.update(first_experience(trainer), trainer.begin_iteration())
    return {name: p.grad.clone() for name, p in trainer.model.named_parameters()}
