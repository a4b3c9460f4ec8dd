"""A plan's peaks are those that torch's CPU allocator reports of a run."""

from __future__ import annotations

import gc
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from rich.console import Console
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    OPTConfig,
    OPTForCausalLM,
)

from fastppo import cli
from fastppo.models.cache import ROOM
from fastppo.ppo.config import PPOConfig
from fastppo.ppo.memory import Plan, make_plan
from fastppo.ppo.metrics import PhaseTimer
from fastppo.ppo.trainer import PPOTrainer

PROMPT, RESPONSE = 12, 4
PREFIX = "phase/"
TOLERANCE = 0.1
"""What the plan is held to. It has come out within 0.08 in every phase of these cases; what it
leaves out (tokens, masks, numbers per token) is smaller the larger the model is."""


def llama(**more: Any) -> LlamaConfig:
    """Large enough for weights and activations to be all that counts."""
    options = {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return LlamaConfig(**(options | more))


def options(tmp_path: Path, **more: Any) -> PPOConfig:
    """A run whose responses are all as long as they may be, on a model that has a config alone."""
    llama().save_pretrained(tmp_path / "model")
    return PPOConfig(
        **{
            "model": str(tmp_path / "model"),
            "output_dir": str(tmp_path / "run"),
            "device": "cpu",
            "rollout_batch_size": 16,
            "max_new_tokens": RESPONSE,
            "stop_token_ids": [],
            "ppo_epochs": 1,
            "minibatches": 1,
            "microbatch_size": 8,
            **more,
        }
    )


class RecordedPhases(PhaseTimer):
    """Names the phases of an iteration in a profile."""

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        with super().__call__(phase), record_function(PREFIX + phase):
            yield


@contextmanager
def _without_onednn() -> Iterator[None]:
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    gc.collect()  # or what an earlier test left is given back during this one
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def measured(config: PPOConfig) -> dict[str, int]:
    """The most bytes that torch's CPU allocator had given out in each phase of two iterations.

    Without oneDNN, which borrows room for a product according to the CPU's instruction set.
    """
    with (
        _without_onednn(),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found,
    ):
        torch.manual_seed(0)
        trainer = PPOTrainer(
            config,
            model=AutoModelForCausalLM.from_config(llama()),
            tokenizer=tiny.tokenizer(),
            # Different ones: of the same prompt several rows are read once.
            prompts=[
                {"prompt": " ".join([f"w{1 + row}"] * PROMPT)}
                for row in range(config.rollout_batch_size)
            ],
            rewards=[tiny.count_w7],
            console=Console(quiet=True),
        )
        assert trainer.prompts is not None
        for _ in range(2):  # the optimiser's states are there from the second rollout on
            trainer.iterate(trainer.prompts, config, RecordedPhases())
    assert found.profiler is not None
    events = found.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    times = [time for time, _ in changes]
    held = torch.tensor([size for _, size in changes]).cumsum(0).tolist()
    peaks: dict[str, int] = {}
    for event in events:
        if event.name().startswith(PREFIX):
            begin, end = bisect_left(times, event.start_ns()), bisect_right(times, event.end_ns())
            name = event.name().removeprefix(PREFIX)
            peaks[name] = max([peaks.get(name, 0), *held[begin - 1 : end]])
    return peaks


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"gradient_checkpointing": True},
        {"lora_rank": 8, "microbatch_size": 16},
        {"value_model": "critic", "microbatch_size": 2},
        {"precision": "bf16"},
    ],
    ids=["full", "checkpointing", "lora", "critic", "bf16"],
)
def test_a_plan_is_what_is_measured(more: dict[str, Any], tmp_path: Path) -> None:
    config = options(tmp_path, **more)
    plan, peaks = make_plan(config, PROMPT), measured(config)
    planned = {phase.name: phase.total for phase in plan.phases}
    assert planned.keys() == {"rollout", "experience", "update"}
    for name, phase in (("generate", "rollout"), ("experience",) * 2, ("update",) * 2):
        assert planned[phase] == pytest.approx(peaks[name], rel=TOLERANCE), phase
    assert plan.peak.total == pytest.approx(max(peaks.values()), rel=TOLERANCE)


# ---------------------------------------------------------------------------------------- the parts


def sizes(plan: Plan, phase: str = "update") -> dict[str, int]:
    (parts,) = (each.parts for each in plan.phases if each.name == phase)
    return parts


def parameters(config: LlamaConfig | None = None) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in LlamaForCausalLM(config or llama()).parameters())


def test_parts_are_as_many_bytes_as_what_they_hold(tmp_path: Path) -> None:
    plan = make_plan(options(tmp_path, max_new_tokens=64), PROMPT)
    count = parameters()
    head = 129
    rollout = sizes(plan, "rollout")
    rotary = 2 * 16 * 4  # the frequencies, and the same as they started: buffers
    assert rollout["policy weights"] == 4 * count + rotary
    assert rollout["reference"] == 4 * count + rotary
    moments = 8 * (128 + 2) ** 2
    assert rollout["value function"] == 4 * head + moments
    assert rollout["gradients"] == 0
    assert sizes(plan)["gradients"] == 4 * count
    steps = 4 * len([*LlamaForCausalLM(llama()).parameters()])  # each counts its own
    assert rollout["optimiser states"] == 8 * count + steps
    cache_of_a_layer = 2 * 4 * 2 * 32 * 16 * (PROMPT + 64 - 1 + ROOM)
    assert rollout["KV cache"] == 2 * cache_of_a_layer


def test_on_a_gpu_the_cache_has_its_size_from_the_start(tmp_path: Path) -> None:
    more = {"rollout_batch_size": 60, "minibatches": 4, "max_new_tokens": 150, "device": "cuda"}
    plan = make_plan(options(tmp_path, **more), 4, memory=80)  # the last step is the rollout's peak
    rows, tokens = 64, 256  # whole buckets of 60 and 154
    lengths = 2 * 8  # transformers counts in each layer
    assert sizes(plan, "rollout")["KV cache"] == 2 * 2 * 2 * 2 * 32 * tokens * rows + lengths


def test_a_smaller_microbatch_takes_less_until_a_batch_has_no_more(tmp_path: Path) -> None:
    def activations(size: int) -> int:
        config = options(tmp_path, microbatch_size=size)
        return sizes(make_plan(config, PROMPT), "experience")["activations"]

    assert activations(8) > 2 * activations(2)
    assert activations(512) == activations(options(tmp_path).rollout_batch_size)


@pytest.mark.parametrize(
    ("more", "part", "sign"),
    [
        ({"gradient_checkpointing": True}, "activations", -1),
        ({"param_dtype": "bfloat16"}, "fp32 masters", 1),
        ({"kl_loss_coef": 0.1, "kl_loss_estimator": "full"}, "activations", 1),
        (
            {"ptx_coef": 1.0, "ptx_data": "text.jsonl", "ptx_block_size": 64},
            "activations",
            1,
        ),
        ({"lora_rank": 4}, "reference", -1),
        ({"device": "cuda"}, "reference", -1),  # its matrices are in bf16
    ],
    ids=str,
)
def test_an_option_moves_the_part_that_it_is_of(
    more: dict[str, Any], part: str, sign: int, tmp_path: Path
) -> None:
    plain, other = (
        sizes(make_plan(options(tmp_path, **some), PROMPT, memory=80)) for some in ({}, more)
    )
    assert sign * (other[part] - plain[part]) > 0


def test_a_reward_model_counts_if_its_config_can_be_read(tmp_path: Path) -> None:
    LlamaForSequenceClassification(llama(num_labels=1)).save_pretrained(tmp_path / "rm")
    rewards = [str(tmp_path / "rm"), "reward.py:score", str(tmp_path / "absent")]
    plan = make_plan(options(tmp_path, rewards=rewards), PROMPT)
    body = parameters() - 512 * 128 + 128  # no lm-head, a row of scores
    assert 4 * body <= sizes(plan, "score")["reward models"] < 4 * body + 1000
    (note,) = (note for note in plan.notes if note.startswith("not counted"))
    assert "absent: there is no such directory" in note


def test_a_critic_is_planned_as_it_is_built(tmp_path: Path) -> None:
    """Of a causal LM whose head reads another width than its embeddings have."""
    OPTForCausalLM(
        OPTConfig(
            vocab_size=512,
            hidden_size=64,
            word_embed_proj_dim=32,
            ffn_dim=64,
            num_hidden_layers=1,
            num_attention_heads=2,
        )
    ).save_pretrained(tmp_path / "critic")
    critic = {"value_model": "critic", "critic_model": str(tmp_path / "critic")}
    plan = make_plan(options(tmp_path, **critic), PROMPT)
    assert sizes(plan)["value function"] > 4 * 33


# ---------------------------------------------------------------------------------- what is printed


def test_the_command_prints_parts_phases_and_whether_it_fits(tmp_path: Path, capsys) -> None:
    config = options(tmp_path)
    config.save(tmp_path / "run.yaml")
    flags = ["plan", "--config", str(tmp_path / "run.yaml"), "--prompt_tokens", str(PROMPT)]
    need = f"{make_plan(config, PROMPT).peak.total / 1e9:.3g} GB"
    assert cli.main([*flags, "--memory", "80"]) == 0
    shown = capsys.readouterr().out
    assert f"fits 80 GB: {need} at its peak, the update" in shown
    for word in ("policy weights", "optimiser states", "rollout", "experience"):
        assert word in shown
    assert cli.main(flags) == 0
    shown = capsys.readouterr().out
    assert "--memory says of how many GB" in shown
    assert "16 sequences of 12 + 4 tokens, 8 at a time" in shown


def test_sequences_beyond_the_context_are_refused(tmp_path: Path, capsys) -> None:
    config = options(tmp_path)
    flags = ["plan", "--model", config.model, "--prompt_tokens", "4000"]
    assert cli.main(flags) == 2
    assert "longer than the context of 2048 tokens" in capsys.readouterr().err


def test_what_a_plan_does_not_use_is_refused(tmp_path: Path, capsys) -> None:
    config = options(tmp_path)
    assert cli.main(["plan", "--model", config.model, "--shard_size", "8"]) == 2
    assert "a plan is of one process, so shard_size has no effect" in capsys.readouterr().err


# ------------------------------------------------------------------------------------- the counting
