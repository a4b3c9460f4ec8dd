"""Functions that ranks run in tests, and the comparison of their results."""

from __future__ import annotations

import gc
import json
import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import stage_runs
import tiny
import torch
from safetensors.torch import load_file
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from fastppo.data.world import join
from fastppo.models import sharding
from fastppo.models.policy import LanguageModel
from fastppo.models.sharding import full_tensor, reshard
from fastppo.ppo.options.config import PPOConfig
from fastppo.ppo.trainer import PPOTrainer
from fastppo.ppo.value_head import ClosedFormHead
from fastppo.rollout import RolloutError
from fastppo.run.log import read_jsonl
from fastppo.stages.reward_model import load_classifier
from runs import first_experience, make_trainer

COMPARED = ("loss", "grad_norm", "kl", "reward", "approx_kl", "value_loss", "entropy")


def weights(trainer: PPOTrainer) -> dict[str, Tensor]:
    """Return the unsharded weights of the optimizer, and the closed-form value head."""
    reshard(trainer.model)
    names = {id(p): name for name, p in trainer.model.named_parameters()}
    masters = [p for group in trainer.optimizer.param_groups for p in group["params"]]
    found = {
        names[id(weight)]: full_tensor(master.detach()).clone()
        for weight, master in zip(trainer.optimizer.weights, masters, strict=True)
    }
    if isinstance(trainer.value_head, ClosedFormHead):
        regression = trainer.value_head.regression
        if regression.heads is not None:
            found["value_function.head"] = regression.heads[regression.best].clone()
    return found


def train(folder: str, variant: Mapping[str, Any]) -> dict[str, Any]:
    """Run training and return the final weights and metrics."""
    import fastppo.run.report.callback as module

    module.write_report = lambda run_dir: None  # plots take longer than the runs
    trainer = _trainer(Path(folder), dict(variant))
    trainer.train()
    return {"weights": weights(trainer), "metrics": read_jsonl(Path(folder) / "run/metrics.jsonl")}


def save_directories(folder: Path) -> dict[str, str]:
    """Save a model and another reference model; return their options."""
    reference = folder / "reference"
    tiny.model(seed=1).save_pretrained(reference)
    tiny.tokenizer().save_pretrained(reference)
    return {"model": tiny.saved_model(folder / "model"), "reference_model": str(reference)}


def _trainer(folder: Path, options: dict[str, Any]) -> PPOTrainer:
    """Make a trainer of the model named in the options, or of a default model."""
    if "model" not in options:
        return make_trainer(folder, **options)
    config = PPOConfig(**tiny.options(folder, **options))
    return PPOTrainer(config, prompts=tiny.PROMPTS, rewards=[tiny.count_w7])


def step_on_given_responses(folder: str, model: str) -> dict[str, Tensor]:
    """Return the weights after a step on given responses, and the random state before it."""
    options = {"model": model, "learning_rate": 1e-2, "rollout_batch_size": 8}
    trainer = _trainer(Path(folder), options)
    before = torch.get_rng_state()
    prompts = [[3 + row, 4] for row in range(8)]
    responses = [[5 + row, 6, 1][: 2 + row % 2] for row in range(8)]
    trainer.step(prompts, responses, [row / 8 for row in range(8)])
    return {**weights(trainer), "random": before}


def train_all(folder: str, variants: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Run several variants in the same processes."""
    results = {}
    for name, variant in variants.items():
        run_folder = Path(folder) / name
        run_folder.mkdir(parents=True, exist_ok=True)
        results[name] = train(str(run_folder), variant)
    return results


def fails(prompts: list[Any], completions: list[str], **columns: Any) -> list[float]:
    """A reward that fails on the second process."""
    if distributed.get_rank() == 1:
        raise ValueError("the server is out")
    return [0.0] * len(completions)


def is_late(prompts: list[Any], completions: list[str], **columns: Any) -> list[float]:
    """A reward that is slow on the second process, beyond the timeout of the first."""
    if distributed.get_rank() == 1:
        time.sleep(12)
    return [0.0] * len(completions)


def train_with_a_failing_reward(folder: str) -> None:
    train(folder, {"rewards": [fails]})


def train_with_a_late_rank(folder: str) -> None:
    train(folder, {"rewards": [is_late], "timeout": 4.0})


def collectives(folder: str) -> dict[int, Counter[str]]:
    """Count the operations of one optimizer step by name.

    Keys are the number of microbatches per rank.
    """
    counts_by_microbatches = {}
    for microbatches in (1, 2):
        options = {"minibatches": 1, "ppo_epochs": 1, "microbatch_size": 8 // microbatches}
        trainer = make_trainer(Path(folder), **options)
        experience = first_experience(trainer)
        trainer.engine.release()
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            trainer.update(experience, trainer.begin_iteration())
        counts = Counter(event.name for event in profiled.events())
        counts_by_microbatches[microbatches] = counts
    return counts_by_microbatches


def train_without_room_in_a_layer(folder: str) -> None:
    """Run out of memory on the second rank, in the second layer of an update."""
    trainer = make_trainer(Path(folder), timeout=60.0)

    def full(*given: Any) -> None:
        if torch.is_grad_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")

    if trainer.world.rank == 1:
        trainer.model.causal_lm.base_model.layers[1].register_forward_pre_hook(full)
    trainer.train()


def held_bytes(folder: str) -> int:
    """Return the bytes of weights, gradients and moments on this rank after a step."""
    options = {"minibatches": 1, "ppo_epochs": 1}
    trainer = make_trainer(Path(folder), **options)
    trainer.update(first_experience(trainer), trainer.begin_iteration())
    reshard(trainer.model)
    held = [*trainer.model.parameters(), *(p.grad for p in trainer.model.parameters())]
    held += [x for entry in trainer.optimizer.state.values() for x in entry.values()]
    local = [x.to_local() if isinstance(x, DTensor) else x for x in held if x is not None]
    return sum(x.numel() * x.element_size() for x in local)


def whole_in_fp32() -> float:
    """Return the peak size of fp32 tensors while a bf16 policy is sharded, as a share of its
    weights in fp32."""
    model = tiny.model().to(torch.bfloat16)
    count = model.num_parameters()
    held = []

    def counted(module: nn.Module, **options: Any) -> Any:
        sharded = fully_shard(module, **options)
        tensors = [x for x in gc.get_objects() if type(x) in (Tensor, nn.Parameter)]
        storages = {x.untyped_storage().data_ptr(): x for x in tensors if x.dtype == torch.float32}
        held.append(sum(x.untyped_storage().nbytes() for x in storages.values()))
        return sharded

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharding, "fully_shard", counted)
        sharding.shard(LanguageModel(model), join(torch.device("cpu")))
    return max(held) / (4 * count)


class OddError(Exception):
    """An error that cannot be unpickled."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(one)


class Details:
    """A mixin with another constructor."""

    def __init__(self, one: str) -> None:
        self.one = one


class OddEngineError(Details, RolloutError):
    """An error of a user's engine that cannot be unpickled."""

    def __init__(self, one: str, other: str) -> None:
        RolloutError.__init__(self, one)


STAGES: dict[str, dict[str, Any]] = {
    "sft": {"eval_share": 0.25, "epochs": 2},
    "sft, one row": {"batch_size": 1, "gradient_accumulation": 2},
    "sft, lora": {"lora_rank": 4, "lora_alpha": 8.0},
    "sft, bf16": {"param_dtype": "bfloat16", "eval_share": 0.25},
    "reward": {"eval_share": 0.25, "batch_size": 5, "gradient_accumulation": 2},
    "reward, lora": {"lora_rank": 4, "lora_alpha": 8.0},
    "reward, lora, bf16": {"lora_rank": 4, "lora_alpha": 8.0, "param_dtype": "bfloat16"},
}
"""With batches of one row, the second of two processes has no rows."""


def train_stage(folder: str, name: str, base: str = "", **more: Any) -> dict[str, Any]:
    """Return the saved weights of a stage and its records; the last one is its result.

    Args:
        base: saved model to start from; "" is a tiny Llama, for SFT.
    """
    stage_folder = Path(folder) / name
    stage_folder.mkdir(parents=True, exist_ok=True)
    options = STAGES[name] | {"warmup": 0.0, "learning_rate": 1e-3, **more}
    if name.startswith("sft"):
        config = stage_runs.sft_config(stage_folder, model=base, **options)
        result = stage_runs.sft(config)
    else:
        config = stage_runs.reward_config(stage_folder, **options)
        model = load_classifier(base, dtype=getattr(torch, config.param_dtype))
        result = stage_runs.reward_model(config, stage_folder, model=model)
    run_folder = stage_folder / "run"
    saved_config = json.loads((run_folder / "config.json").read_text())
    result = result | {"score_mean": saved_config.get("score_mean", 0.0)}
    return {
        "weights": load_file(run_folder / "model.safetensors"),
        "metrics": [*read_jsonl(run_folder / "metrics.jsonl"), result],
    }


def train_sft_until(folder: str, options: Mapping[str, Any], stop: int) -> dict[str, Any] | None:
    """Run SFT, interrupted after `stop` steps unless it is 0."""
    if not stop:
        return train_stage(folder, "sft", **options)
    with stage_runs.interrupted(after=stop):
        train_stage(folder, "sft", **options)
    return None


def train_stages(folder: str, base: str) -> dict[str, Any]:
    """Run all stages in the same processes; FSDP's warning of wrong gradients is an error."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "FSDP2-wrapped module")
        return {name: train_stage(folder, name, base) for name in STAGES}


def gathered() -> dict[str, Any]:
    """Return the results of all collectives of a world of two."""
    world = join(torch.device("cpu"))
    rank = world.rank

    def raises(error: Exception) -> str:
        def work() -> None:
            if rank == 1:
                raise error

        try:
            world.gather_results(work)
        except Exception as raised:
            return f"{type(raised).__name__}: {raised}"
        return "nothing"

    return {
        "rows": world.cat(torch.arange(1 + rank) + 10 * rank).tolist(),
        "none": world.cat(torch.full((rank,), 7)).tolist(),
        "values": world.gather(f"of {rank}"),
        "sum": world.sum(torch.tensor(10.0 + rank)).item(),
        "first": world.on_main_rank(lambda: f"of {rank}"),
        "error": raises(ValueError("of 1")),
        "unpicklable": raises(OddError("of 1", "")),
        "of an engine": raises(OddEngineError("of 1", "")),
    }


def rollouts(folder: str) -> dict[str, Any]:
    """Return rollouts of five prompts and of one, and the next random numbers."""
    trainer = make_trainer(Path(folder))
    torch.manual_seed(3)
    drawn = [
        trainer.engine.generate([[4, 5], [6], [7, 8, 9], [4], [5]], trainer.parts.sampling),
        trainer.engine.generate([[4, 5]], trainer.parts.sampling),
    ]
    after = torch.rand(3)
    known_by_rank = trainer.world.gather(([rollout.tokens for rollout in drawn], after.tolist()))
    same = all(known == known_by_rank[0] for known in known_by_rank)
    name = type(trainer.engine).__name__
    return {"rollouts": drawn, "next": after, "engine": name, "same": same}


def difference(
    one: dict[str, Any], other: dict[str, Any], names: Sequence[str] = COMPARED
) -> dict[str, float]:
    """Return the largest differences of weights and metrics; relative for values above 1."""
    assert one["weights"].keys() == other["weights"].keys()
    differences = {
        "weights": max(
            (weight - other["weights"][name]).abs().max().item()
            for name, weight in one["weights"].items()
        )
    }
    assert any(record.get("grad_norm", 0) > 0 for record in one["metrics"]), "no gradient"
    for record, other_record in zip(one["metrics"], other["metrics"], strict=True):
        shared = record.keys() & set(names)
        assert shared == other_record.keys() & set(names)
        for name in shared:
            expected = record[name]
            off = abs(expected - other_record[name]) / max(1.0, abs(expected))
            differences[name] = max(differences.get(name, 0.0), off)
    assert torch.tensor([*differences.values()]).isfinite().all(), differences
    return differences
