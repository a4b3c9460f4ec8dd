"""Distributed test functions with vLLM, and with a stub of it."""

from __future__ import annotations

import random
import sys
import weakref
from collections.abc import Iterator
from dataclasses import make_dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import tiny
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fastppo.models.sharding import unsharded
from fastppo.ppo.options.config import PPOConfig
from fastppo.ppo.trainer import PPOTrainer
from fastppo.rollout import FINISHED, Rollout, RolloutEngine, Sampling
from fastppo.rollout.generate import GenerateEngine
from fastppo.rollout.vllm import VLLMEngine
from fastppo.run.log import read_jsonl
from runs import make_trainer

WIDE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
"""Heads that vLLM's CPU kernels support and two processes can share."""


class Listener:
    """A stub of the module `vllm`: records calls, copies weights, and answers tokens 4 and 1."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.module: Any = ModuleType("vllm")
        self.module.__spec__ = ModuleSpec("vllm", None)  # `find_spec` finds it
        self.module.LLM, self.module.SamplingParams = self._llm, dict
        self.module.EngineArgs = make_dataclass(
            "EngineArgs",
            [
                *("seed", "max_num_seqs", "quantization", "speculative_config", "kv_cache_dtype"),
                "mm_device_do_normalize",
            ],
        )
        self.most_at_once = 0
        """Largest number of full weights in memory at once."""
        self.fails_at: str | None = None
        self.fails_to_wake = False
        self.finish_reason = "stop"
        self.logprob = -0.5
        """Logprob of the first token."""
        self.prefix_cache_is_free = True
        self.llm_engine = SimpleNamespace(reset_encoder_cache=lambda: None)

    def _llm(self, **options: Any) -> Listener:
        self.options = options
        self.files = {path.name for path in Path(options["model"]).iterdir()}
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        torch.set_num_threads = lambda n: None
        return self

    def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> None:
        given: Iterator[tuple[str, Tensor]] = kwargs["weights_iterator"]
        alive: list[weakref.ref[Tensor]] = []
        self.weights: dict[str, Tensor] = {}
        for name, weight in given:
            assert not isinstance(weight, DTensor), name
            if name == self.fails_at:
                raise ValueError(f"no room for {name}")
            self.weights[name] = weight.clone()
            alive.append(weakref.ref(weight))
            there = [reference for reference in alive if reference() is not None]
            self.most_at_once = max(self.most_at_once, len(there))
            del weight
        self.calls.append((method, len(self.weights)))

    def reset_prefix_cache(self) -> bool:
        self.calls.append(("reset_prefix_cache", None))
        return self.prefix_cache_is_free

    def sleep(self, level: int) -> None:
        self.calls.append(("sleep", level))

    def wake_up(self, tags: list[str]) -> None:
        if self.fails_to_wake:
            raise ValueError("no room to wake")
        self.calls.append(("wake_up", tags))

    def generate(self, prompts: Any, sampling_params: Any, use_tqdm: bool) -> list[Any]:
        self.prompts, self.sampling_params = prompts, sampling_params
        logprobs = [{4: SimpleNamespace(logprob=self.logprob)}, {1: SimpleNamespace(logprob=-1.5)}]
        response = SimpleNamespace(
            token_ids=(4, 1), logprobs=logprobs, finish_reason=self.finish_reason
        )
        return [SimpleNamespace(outputs=[response]) for _ in prompts]


def hand_over(folder: str, options: dict[str, Any]) -> dict[str, Any]:
    """Hand over an update's weights to the stub and save the policy; then fail on rank 1."""
    listener = Listener()
    sys.modules["vllm"] = listener.module
    trainer = make_trainer(Path(folder), rollout="vllm", **options)
    listener.most_at_once = 0
    trainer.step(["w1"] * 16, ["w2 w3"] * 16, [float(i) for i in range(16)])
    given = dict(listener.weights)

    def message() -> str:
        try:
            trainer.engine.weights_changed(trainer.model)
        except ValueError as error:
            return str(error)
        return ""

    listener.fails_at = "model.layers.1.mlp.up_proj.weight" if trainer.world.rank == 1 else None
    errors = [message()]
    inner: Any = getattr(trainer.engine, "engine", trainer.engine)
    inner._asleep, listener.fails_at = True, None
    listener.fails_to_wake = trainer.world.rank == 1
    errors.append(message())
    trainer.save_policy(Path(folder) / "policy")
    return {
        "given": given,
        "most_at_once": listener.most_at_once,
        "executor": listener.options.get("distributed_executor_backend"),
        "errors": trainer.world.gather(errors),
    }


class OfGroups(RolloutEngine):
    """Draws a token per prompt from torch's generator. Two ranks share an engine."""

    holds_weights = True
    ranks_together = 2

    def __init__(self) -> None:
        self.asked: list[list[list[int]]] = []

    def generate(self, prompt_ids: list[list[int]], sampling: Sampling) -> Rollout:
        self.asked.append(prompt_ids)
        drawn = [[int(torch.randint(3, 40, ()))] for _ in prompt_ids]
        return Rollout(drawn, [FINISHED] * len(drawn), [torch.zeros(1)] * len(drawn))


def draw_in_groups(folder: str) -> dict[str, Any]:
    """Return the prompts of each rank and the tokens of all, for five prompts and for one."""
    engine = OfGroups()
    trainer = make_trainer(Path(folder), engine=engine)
    torch.manual_seed(3)
    prompts = [[4, 5], [6], [7, 8, 9], [4], [5]]
    rollouts = [
        trainer.engine.generate(batch, trainer.parts.sampling) for batch in (prompts, prompts[:1])
    ]
    tokens = [rollout.tokens for rollout in rollouts]
    return {
        "asked": trainer.world.gather(engine.asked),
        "got": trainer.world.gather(tokens),
        "next": trainer.world.gather(torch.rand(3).tolist()),
    }


# --------------------------------------------------------------------------------- with vLLM itself


def wide_model() -> Any:
    config = tiny.CONFIGS["llama"]()
    config.update(WIDE)
    return tiny.model_of(config)


def train(folder: str, options: dict[str, Any]) -> dict[str, Any]:
    """Train with vLLM. Return the metrics and each rank's final greedy tokens, vLLM's and ours."""
    config = PPOConfig(**tiny.options(Path(folder), rollout="vllm", **options))
    trainer = PPOTrainer(
        config,
        model=wide_model(),
        tokenizer=tiny.tokenizer(),
        prompts=tiny.PROMPTS,
        rewards=[tiny.count_w7],
    )
    trainer.train()
    prompts = [[5, 9, 4], [7], [8, 3, 6, 12, 20], [5, 9, 4], [11, 12]]
    greedy = Sampling(20, stop_token_ids=(1,), greedy=True)
    theirs = trainer.engine.generate(prompts, greedy)
    with unsharded(trainer.model):
        ours = GenerateEngine(trainer.model.causal_lm, 0).generate(prompts, greedy)
    inner: Any = getattr(trainer.engine, "engine", trainer.engine)
    assert isinstance(inner, VLLMEngine)
    parallel = inner.llm.llm_engine.vllm_config.parallel_config
    return {
        "metrics": read_jsonl(Path(folder) / "run" / "metrics.jsonl"),
        "theirs": trainer.world.gather(theirs.tokens),
        "ours": trainer.world.gather(ours.tokens),
        "parallel": (parallel.tensor_parallel_size, parallel.distributed_executor_backend),
    }
