"""Planned peaks agree with torch's CPU allocator, planned parts with the tensors of a run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import ranks
from phase_peaks import PROMPT, Measured, llama, measured, options
from transformers import (
    LlamaForSequenceClassification,
    OPTConfig,
    OPTForCausalLM,
    Qwen2Config,
)

from fastppo import cli
from fastppo.ppo.plan.plan import Plan, make_plan

ROOT = Path(__file__).resolve().parents[3]

TOLERANCE = 0.1
"""Relative tolerance of peaks. Tokens, masks and numbers per token are not planned, a smaller share
of larger models."""

TOLERANCE_OF_RANKS = 0.15
"""For two processes, since FSDP's buffers are not counted one by one."""


PHASES = {"generate": "rollout", "update": "update"}
"""Phases of an iteration with their names in the plan."""


def sizes(plan: Plan, phase: str = "update") -> dict[str, int]:
    (parts,) = (planned.parts for planned in plan.phases if planned.name == phase)
    return parts


def assert_parts(plan: Plan, run: Measured) -> None:
    """Compare the lasting parts. Step counters of the optimizer and uneven shards are tolerated."""
    for part, size in run.parts.items():
        assert sizes(plan, "rollout")[part] == pytest.approx(size, rel=0.01, abs=1000), part


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"gradient_checkpointing": True},
        {"lora_rank": 8, "microbatch_size": 16},
        {"value_model": "critic", "microbatch_size": 2},
        {"precision": "bf16"},
        {"param_dtype": "bfloat16"},
        {"learning_rate": "auto", "ppo_epochs": 2},
    ],
    ids=["full", "checkpointing", "lora", "critic", "bf16", "masters", "auto"],
)
def test_a_plan_agrees_with_a_run(more: dict[str, Any], tmp_path: Path) -> None:
    config = options(tmp_path, **more)
    run = measured(config)
    plan = make_plan(config, PROMPT)
    assert_parts(plan, run)
    for name, phase in PHASES.items():
        planned = sum(sizes(plan, phase).values())
        assert planned == pytest.approx(run.peaks[name], rel=TOLERANCE), name
    assert plan.peak.total == pytest.approx(max(run.peaks.values()), rel=TOLERANCE)


def test_a_plan_of_two_processes_agrees_with_a_run(tmp_path: Path) -> None:
    config = options(tmp_path, microbatch_size=4)
    run = ranks.run(2, measured, tmp_path / "ranks", config)
    plan = make_plan(config, PROMPT, processes=2)
    assert_parts(plan, run)
    for name, phase in PHASES.items():
        # A measured peak may be too high (see `measured`), so only the upper bound is checked.
        assert sum(sizes(plan, phase).values()) <= (1 + TOLERANCE_OF_RANKS) * run.peaks[name], name


# ---------------------------------------------------------------------------------------- the parts


def test_a_smaller_microbatch_needs_less_memory(tmp_path: Path) -> None:
    def activations(size: int) -> int:
        config = options(tmp_path, microbatch_size=size)
        return sizes(make_plan(config, PROMPT))["activations"]

    assert activations(8) > 2 * activations(2)
    assert activations(512) == activations(options(tmp_path).rollout_batch_size)


@pytest.mark.parametrize(
    ("more", "part", "sign"),
    [
        ({"gradient_checkpointing": True}, "activations", -1),
        ({"param_dtype": "bfloat16"}, "fp32 masters", 1),
        ({"kl_loss_coef": 0.1, "kl_loss_estimator": "full"}, "logits", 1),
        (
            {"ptx_coef": 1.0, "ptx_data": "text.jsonl"},
            "logits",
            1,
        ),
        ({"lora_rank": 4}, "reference", -1),
        ({"device": "cuda"}, "reference", -1),  # its matrices are in bf16
    ],
    ids=str,
)
def test_an_option_changes_its_part(
    more: dict[str, Any], part: str, sign: int, tmp_path: Path
) -> None:
    plain, other = (
        sizes(make_plan(options(tmp_path, **some), PROMPT, memory=80)) for some in ({}, more)
    )
    assert sign * (other[part] - plain[part]) > 0


def test_the_buffers_that_the_cpu_kernels_keep_are_in_the_rollout(tmp_path: Path) -> None:
    def spare(phase: str, **more: Any) -> int:
        return sizes(make_plan(options(tmp_path, **more), PROMPT), phase)["spare buffers"]

    one = spare("rollout")
    assert one > 0
    assert spare("rollout", kl_loss_coef=0.1, kl_loss_estimator="full") == 2 * one
    assert spare("rollout", objective="penalty", ppo_epochs=2) == 2 * one
    assert spare("rollout", backend="torch") == 0


def test_a_reward_model_with_a_readable_config_is_counted(tmp_path: Path) -> None:
    LlamaForSequenceClassification(llama(num_labels=1)).save_pretrained(tmp_path / "rm")
    rewards = [str(tmp_path / "rm"), "reward.py:score", str(tmp_path / "absent")]
    plan = make_plan(options(tmp_path, rewards=rewards), PROMPT)
    weights = LlamaForSequenceClassification(llama(num_labels=1)).parameters()
    size = sum(4 * weight.numel() for weight in weights)
    assert size <= sizes(plan)["reward models"] < size + 1000  # with its buffers
    (note,) = (note for note in plan.notes if note.startswith("not counted"))
    assert "absent: there is no such directory" in note


def test_a_critic_is_planned_as_it_is_built(tmp_path: Path) -> None:
    """For a causal LM with different widths of head and embeddings."""
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


def test_with_servers_no_cache_is_planned(tmp_path: Path) -> None:
    servers = {"rollout": "server", "engine_options": {"urls": ["http://localhost:8000"]}}
    plan = make_plan(options(tmp_path, **servers), PROMPT)
    assert not {"KV cache", "logits"} & sizes(plan, "rollout").keys()


def test_with_vllm_the_policy_is_gathered_only_when_it_is_saved(tmp_path: Path) -> None:
    with_decoder = make_plan(options(tmp_path), PROMPT, processes=2)
    assert [phase.name for phase in with_decoder.phases] == ["loading", "rollout", "update"]
    whole = sizes(with_decoder, "rollout")["gathered"]
    config = options(tmp_path, rollout="vllm")
    plan = make_plan(config, PROMPT, processes=2, memory=1)
    assert [phase.name for phase in plan.phases] == ["loading", "rollout", "update", "saving"]
    assert sizes(plan, "saving")["gathered"] == whole
    assert sizes(plan, "rollout")["gathered"] < whole / 3
    assert sizes(plan, "saving")["vLLM"] == sizes(plan, "rollout")["vLLM"] == 0.3e9
    assert [phase.name for phase in make_plan(config, PROMPT).phases] == ["rollout", "update"]


def test_an_episode_ends_at_the_context(tmp_path: Path) -> None:
    """Eight turns of 500 tokens do not fit into 2048."""
    turns = {"environment": "game.py:Game", "max_turns": 8, "max_new_tokens": 500}
    assert make_plan(options(tmp_path, **turns), PROMPT).run.tokens == 2048


# ---------------------------------------------------------------------------------- what is printed


def test_the_command_prints_parts_phases_and_a_summary(tmp_path: Path, capsys) -> None:
    config = options(tmp_path, prompts="absent.jsonl")
    config.save(tmp_path / "run.yaml")
    flags = ["plan", "--config", str(tmp_path / "run.yaml"), "--prompt_tokens", str(PROMPT)]
    need = f"{make_plan(config, PROMPT).peak.total / 1e6:.3g} MB"  # as the table has it
    assert cli.main([*flags, "--memory", "80"]) == 0
    shown = capsys.readouterr().out
    assert f"fits 80 GB: {need} at its peak, the update; the largest part, " in shown
    for word in ("policy weights", "optimizer states", "rollout", "logits"):
        assert word in shown
    assert cli.main(flags) == 0
    shown = capsys.readouterr().out
    assert f"needs {need} at its peak, the update; the largest part, " in shown
    assert "`fastppo plan --memory GB` says whether that fits" in shown
    assert cli.main([*flags, "--memory", "0.0001"]) == 0
    assert "does not fit 0.0001 GB" in capsys.readouterr().out
    assert "16 sequences of 12 + 4 tokens, 8 at a time" in shown


def test_a_plan_for_a_gpu_needs_none(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    flags = ["plan", "--model", options(tmp_path).model, "--prompt_tokens", "12"]
    assert cli.main([*flags, "--device", "cuda"]) == 0
    assert "`fastppo plan --memory GB` says whether that fits" in capsys.readouterr().out


def test_shards_divide_the_optimizer_states(tmp_path: Path, capsys) -> None:
    model = options(tmp_path).model
    flags = ["plan", "--model", model, "--device", "cpu", "--prompt_tokens", "12"]
    weights = {}
    for shards in (2, 8):
        assert cli.main([*flags, "--processes", "8", "--shard_size", str(shards)]) == 0
        shown = capsys.readouterr().out
        assert f"each of 8 processes; {shards} share one copy of the weights" in shown
        weights[shards] = float(re.findall(r"optimizer states\W+0.000\W+([\d.]+)", shown)[0])
    assert weights[2] == pytest.approx(4 * weights[8], rel=0.01)


@pytest.mark.parametrize(
    ("options_", "flags", "says"),
    [
        ({}, {"prompt_tokens": 0}, "prompt_tokens must be >= 1, got 0"),
        ({}, {"memory": 0}, "memory must be > 0, got 0"),
        ({"shard_size": 8}, {}, "shard_size=8 shards the weights over several processes"),
        ({"shard_size": 4}, {"processes": 6}, "shard_size must divide the 6 processes"),
        ({"async_steps": 1}, {"processes": 2}, "async_steps=1"),
        ({}, {"prompt_tokens": 2045}, "prompts of 2045 tokens and responses of 4 are longer than"),
    ],
)
def test_a_plan_that_cannot_be_made_is_refused(
    options_: dict[str, Any], flags: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=says):
        make_plan(options(tmp_path, **options_), **({"prompt_tokens": PROMPT} | flags))


@pytest.mark.slow
def test_the_config_of_a_full_7b_fits_eight_gpus(tmp_path: Path, capsys) -> None:
    """With Qwen2.5-7B's shape, planned as in the file's comment."""
    Qwen2Config(
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        vocab_size=152064,
        tie_word_embeddings=False,
    ).save_pretrained(tmp_path)
    file = ROOT / "examples" / "full_7b.yaml"
    (line,) = re.findall("fastppo (plan .*)", file.read_text("utf-8"))
    flags = line.replace("full_7b.yaml", str(file)).split()
    assert cli.main([*flags, "--model", str(tmp_path)]) == 0
    assert "fits 80 GB" in capsys.readouterr().out
