"""A plan's peaks are those that torch's CPU allocator reports of a run."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from rich.console import Console
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

from fastppo import cli
from fastppo.models.cache import ROOM
from fastppo.ppo.config import PPOConfig
from fastppo.ppo.memory import PARTS, Ledger, Phase, Plan, make_plan
from fastppo.ppo.trainer import PPOTrainer
from fastppo.run.profile import PREFIX, named_phases

PROMPT, RESPONSE = 12, 4
TOLERANCE = 0.1
"""What the plan is held to. It has come out within 0.06 in every phase of these cases; what it
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


@contextmanager
def _without_onednn() -> Iterator[None]:
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
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
        with named_phases(trainer):
            for _ in range(2):  # the optimiser's states are there from the second rollout on
                trainer.iterate(trainer.prompts, config)
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
    (found,) = (each for each in plan.phases if each.name == phase)
    return found.parts


def test_activations_before_the_update_are_of_what_is_read_at_once(tmp_path: Path) -> None:
    def activations(size: int) -> int:
        config = options(tmp_path, microbatch_size=size)
        return sizes(make_plan(config, PROMPT), "experience")["activations"]

    assert activations(8) > 2 * activations(2)
    most = activations(options(tmp_path).rollout_batch_size)
    assert activations(512) == most, "a batch has no more"


def parameters(config: LlamaConfig | None = None) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in LlamaForCausalLM(config or llama()).parameters())


def test_parts_are_what_their_formulas_say(tmp_path: Path) -> None:
    plan, count, head = make_plan(options(tmp_path, max_new_tokens=64), PROMPT), parameters(), 129
    rollout = sizes(plan, "rollout")
    rotary = 2 * 16 * 4  # the frequencies, and the same as they started: buffers
    assert rollout["policy weights"] == 4 * count + rotary
    assert rollout["reference"] == 4 * count + rotary
    assert rollout["value function"] == 4 * head
    assert rollout["gradients"] == 0
    assert sizes(plan)["gradients"] >= 4 * (count + head)
    steps = 4 * len([*LlamaForCausalLM(llama()).parameters()]) + 8  # each counts its own
    assert rollout["optimiser states"] == 8 * (count + head) + steps
    cache_of_a_layer = 2 * 4 * 2 * 32 * 16 * (PROMPT + 64 - 1 + ROOM)
    assert rollout["KV cache"] == 2 * cache_of_a_layer
    assert rollout.keys() == {*PARTS}


def test_on_a_gpu_the_cache_has_its_size_from_the_start(tmp_path: Path) -> None:
    how = {"rollout_batch_size": 60, "minibatches": 4, "max_new_tokens": 150, "device": "cuda"}
    plan = make_plan(options(tmp_path, **how), 4, memory=80)  # the last step is the rollout's peak
    rows, tokens = 64, 256  # whole buckets of 60 and 154
    lengths = 2 * 8  # transformers counts in each layer
    assert sizes(plan, "rollout")["KV cache"] == 2 * 2 * 2 * 2 * 32 * tokens * rows + lengths


def test_checkpointing_takes_less_and_both_are_shown(tmp_path: Path) -> None:
    without = make_plan(options(tmp_path), PROMPT)
    checkpointed = make_plan(options(tmp_path, gradient_checkpointing=True), PROMPT)
    assert checkpointed.phases[-1].total < without.phases[-1].total
    assert without.other_update.total == checkpointed.phases[-1].total
    assert checkpointed.other_update.total == without.phases[-1].total


def test_a_reference_is_absent_with_adapters_and_has_its_matrices_in_bf16(tmp_path) -> None:
    assert sizes(make_plan(options(tmp_path, lora_rank=4), PROMPT), "rollout")["reference"] == 0
    assert sizes(make_plan(options(tmp_path), PROMPT))["reference"] > 4 * parameters()
    on_gpu = sizes(make_plan(options(tmp_path, device="cuda"), PROMPT, memory=80))
    assert 2 * parameters() < on_gpu["reference"] < 3 * parameters()


def test_a_reward_model_counts_if_its_config_can_be_read(tmp_path: Path) -> None:
    LlamaForSequenceClassification(llama(num_labels=1)).save_pretrained(tmp_path / "rm")
    rewards = [str(tmp_path / "rm"), "reward.py:score", str(tmp_path / "absent")]
    plan = make_plan(options(tmp_path, rewards=rewards), PROMPT)
    body = parameters() - 512 * 128 + 128  # no lm-head, a row of scores
    assert 4 * body <= sizes(plan, "score")["reward models"] < 4 * body + 1000
    (note,) = (note for note in plan.notes if note.startswith("not counted"))
    assert "absent: there is no such directory" in note


def test_pretraining_text_counts(tmp_path: Path) -> None:
    text = {"ptx_coef": 1.0, "ptx_data": "text.jsonl", "ptx_block_size": 64}
    with_text = make_plan(options(tmp_path, **text), PROMPT).phases[-1]
    assert with_text.total > make_plan(options(tmp_path), PROMPT).phases[-1].total


# ---------------------------------------------------------------------------------- what is printed


def test_the_command_prints_parts_phases_and_whether_it_fits(tmp_path: Path, capsys) -> None:
    config = options(tmp_path)
    config.save(tmp_path / "run.yaml")
    flags = ["plan", "--config", str(tmp_path / "run.yaml"), "--prompt_tokens", str(PROMPT)]
    need = f"{make_plan(config, PROMPT).peak.total / 1e6:.1f} MB"
    assert cli.main([*flags, "--memory", "80"]) == 0
    shown = capsys.readouterr().out
    assert f"fits 80 GB: {need} at its peak, the update" in shown
    for word in ("policy weights", "optimiser states", "rollout", "experience", "checkpointing"):
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


def test_a_verdict_is_of_the_largest_phase() -> None:
    phases = [Phase(name, {"activations": size}) for name, size in (("rollout", 3), ("update", 2))]
    plan = Plan(phases, phases[1], False, torch.device("cuda"), 2.5, [])
    assert plan.verdict.startswith("does not fit")
    assert replace(plan, memory=3.0).verdict.startswith("fits")
    assert plan.peak.name == "rollout"


# ------------------------------------------------------------------------------------- the counting


def test_a_ledger_knows_what_is_live_and_whose_it_is() -> None:
    ledger = Ledger()
    with FakeTensorMode(), ledger:
        weight = nn.Parameter(torch.empty(10, 10))
        ledger.assign("policy weights", weight)
        with ledger.phase("first"):
            held = weight * 2
            gone = held + 1
            view = gone.view(100)  # no storage of its own
            del gone, view
        assert held.shape == (10, 10)
        with ledger.phase("second"):
            halved = weight.to(torch.bfloat16)
        assert halved.shape == (10, 10)
    first, second = ledger.peaks()
    assert (first.parts["policy weights"], first.parts["activations"]) == (400, 800)
    assert (second.parts["cast weights"], second.parts["activations"]) == (200, 400)
    assert (first.total, second.total) == (1200, 1000)
