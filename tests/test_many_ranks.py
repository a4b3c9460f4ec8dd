"""Several processes give the weights, gradients and metrics of one, up to rounding."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import environments
import many_ranks
import pytest
import ranks
import tiny
from command_line import Folder
from processes import torchrun

from fastppo.ppo.options.config import PPOConfig, check_processes

WIDE: dict[str, Any] = {"model_dtype": "float64"}
LORA: dict[str, Any] = {"lora_rank": 4, "lora_alpha": 8.0}
EXACT: dict[str, Any] = {"kl_loss_coef": 0.1, "kl_loss_estimator": "full"}
REFRESHED: dict[str, Any] = {"reference_refresh": 1, "kl_coef": 0.0, **EXACT}
TURNS: dict[str, Any] = {
    **environments.OPTIONS,
    "environment": environments.Exact,
    "prompts": environments.PROMPTS,
    "advantage": "turn_gae",
}
NARROW: dict[str, Any] = {"learning_rate": 1e-4}
"""fp32: the first steps of Adam are ± this, even for a gradient near 0."""
BF16: dict[str, Any] = {"precision": "bf16", "iterations": 1}
SHORT: dict[str, Any] = {"rollout_batch_size": 8, "max_new_tokens": 6, "ppo_epochs": 1}
"""Two iterations of two steps."""
NARROW_CRITIC = NARROW | {"value_model": "critic", "value_learning_rate": 1e-4}
FITTED = {"value_model": "critic", "value_head": "closed_form"}
CRITIC = WIDE | SHORT | FITTED | {"truncated": "bootstrap"}

VARIANTS: dict[str, dict[str, Any]] = {
    "critic": CRITIC,
    "qwen2": WIDE | {"architecture": "qwen2", "gradient_checkpointing": True},
    "gpt2": WIDE | SHORT | {"architecture": "gpt2"},
    "lora": WIDE | LORA | EXACT | {"kl_estimator": "full"},
    "refreshed": WIDE | SHORT | REFRESHED,
    "uneven": WIDE | {"rollout_batch_size": 15, "minibatches": 5, "microbatch_size": 2},
    "turns": WIDE | TURNS,
    "solved prompts": WIDE | {"solved_reward": 0.125, "iterations": 3},
    "gspo": WIDE | SHORT | {"objective": "gspo"},
    "sampler": NARROW_CRITIC | {"old_logprobs": "sampler"},
    "ptx": WIDE | SHORT | {"ptx_coef": 0.5, "ptx_batch_size": 3},
    "packed": WIDE | SHORT | {"microbatch_tokens": 40, "packing": "on"},
    # The second batch of two iterations has no signal.
    "warm-up": WIDE
    | SHORT
    | {"value_model": "detached", "value_warmup_iterations": 1, "iterations": 3},
    "rloo": WIDE | SHORT | {"advantage": "rloo", "samples_per_prompt": 4, "vf_coef": 0.0},
    "dynamic sampling": WIDE
    | SHORT
    | {"advantage": "rloo", "samples_per_prompt": 2, "vf_coef": 0.0, "dynamic_sampling": 2},
    "masked": WIDE | SHORT | {"truncated": "mask", "max_new_tokens": 24},
    "early stop": WIDE | SHORT | {"early_stop_kl": 1e-4},
    "auto": WIDE | SHORT | {"learning_rate": "auto", "iterations": 4},
    "momentum": WIDE
    | SHORT
    | {"optimizer": "torch.optim:SGD", "optimizer_options": {"momentum": 0.9}},
    "bf16, lora": NARROW | BF16 | SHORT | LORA,
}


def tolerance(variant: dict[str, Any]) -> float:
    """Return the rounding of reordered sums in bf16, fp32 or fp64."""
    if variant.get("precision") == "bf16":
        return 2**-8
    return 1e-12 if "model_dtype" in variant else 1e-6


def train(count: int, folder: Path, variant: dict[str, Any]) -> dict[str, Any]:
    """Return the weights and metrics of a run with `count` processes."""
    return ranks.run(count, many_ranks.train, folder, str(folder), variant)


def test_two_processes_match_one(tmp_path: Path) -> None:
    one = train(1, tmp_path / "1", CRITIC)
    two = train(2, tmp_path / "2", CRITIC)
    differences = many_ranks.difference(one, two)
    assert max(differences.values()) <= tolerance(CRITIC), differences


@pytest.mark.slow
def test_two_and_four_processes_match_one_in_all_variants(tmp_path: Path) -> None:
    """The processes are started once for all variants."""
    directories = NARROW | many_ranks.save_directories(tmp_path)
    variants = VARIANTS | {"directories": directories}
    variants["ptx"] = variants["ptx"] | {"ptx_data": tiny.saved_text(tmp_path / "text.jsonl")}
    results = {}
    for count in (1, 2, 4):
        folder = tmp_path / str(count)
        results[count] = ranks.run(
            count, many_ranks.train_all, folder, str(folder), variants, timeout=1800
        )
    too_far = {}
    for name, variant in variants.items():
        for count in (2, 4):
            differences = many_ranks.difference(results[1][name], results[count][name])
            if max(differences.values()) > tolerance(variant):
                too_far[name, count] = differences
    assert not too_far


# ------------------------------------------------------------------------------- the other stages


def stage_difference(one: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """Compare weights and all metrics."""
    names = {name for record in one["metrics"] for name in record}
    return many_ranks.difference(one, other, [*names])


@pytest.mark.slow
def test_two_processes_match_one_in_all_stages(tmp_path: Path) -> None:
    """Up to rounding; with LoRA, weights in bf16, uneven batches, and batches of a single row."""
    base = tiny.saved_model(tmp_path / "base")
    one, two = (
        ranks.run(n, many_ranks.train_stages, tmp_path / str(n), str(tmp_path / str(n)), base)
        for n in (1, 2)
    )
    for name in many_ranks.STAGES:
        differences = stage_difference(one[name], two[name])
        rounding = 2**-8 if "param_dtype" in many_ranks.STAGES[name] else 1e-5
        assert max(differences.values()) <= rounding, (name, differences)


@pytest.mark.slow
def test_a_stage_resumes_with_another_number_of_processes(tmp_path: Path) -> None:
    """Two steps with two processes, one with one, the last with two."""
    options = {"checkpoint_interval": 1, "epochs": 2, "gradient_accumulation": 1, "batch_size": 4}
    folder = tmp_path / "never_stopped"
    never_stopped = ranks.run(1, many_ranks.train_sft_until, folder, str(folder), options, 0)
    folder = tmp_path / "resumed"
    for count, stop in ((2, 2), (1, 3), (2, 0)):
        resumed = ranks.run(
            count,
            many_ranks.train_sft_until,
            folder,
            str(folder),
            options | {"resume": True},
            stop,
        )
    differences = stage_difference(never_stopped, resumed)
    assert max(differences.values()) <= 1e-5, differences


# ------------------------------------------------------------------------------- errors and signals


@pytest.mark.slow
def test_an_error_of_a_reward_on_one_process_is_raised_on_all(tmp_path: Path) -> None:
    ended = ranks.start(2, many_ranks.train_with_a_failing_reward, tmp_path, str(tmp_path))
    assert [code for code, _ in ended] == [1, 1]
    last_lines = {error.strip().splitlines()[-1] for _, error in ended}
    assert len(last_lines) == 1
    assert "reward 'fails' raised ValueError('the server is out')" in last_lines.pop()
    assert (tmp_path / "run" / "failed_reward.json").exists()


@pytest.mark.slow
def test_a_hanging_process_is_reported(tmp_path: Path) -> None:
    (code, error), _ = ranks.start(2, many_ranks.train_with_a_late_rank, tmp_path, str(tmp_path))
    assert code == 1
    assert "rank 0 of 2: another rank did not respond within 4 s" in error


@pytest.mark.slow
def test_out_of_memory_in_a_layer_is_reported_by_all_processes(tmp_path: Path) -> None:
    """The run ends before the timeout, although the first process waits for the second's shard."""
    (first_code, first_error), (second_code, second_error) = ranks.start(
        2, many_ranks.train_without_room_in_a_layer, tmp_path, str(tmp_path)
    )
    assert (first_code, second_code) == (1, 1)
    assert "rank 0 of 2" in first_error
    assert "CUDA out of memory" in second_error
    assert re.search("microbatch_size .*microbatch_tokens", second_error)


@pytest.mark.parametrize(
    ("options", "refused", "allowed", "message"),
    [
        ({"precision": "fp16"}, 2, 1, "precision=fp16"),
        (
            {"quantization": "nf4", "lora_rank": 4},
            2,
            1,
            "quantization=nf4",
        ),
    ],
)
def test_options_that_exclude_a_number_of_processes_are_rejected(
    options: dict[str, Any], refused: int, allowed: int, message: str
) -> None:
    config = PPOConfig(**options)
    with pytest.raises(ValueError, match=message):
        check_processes(config, refused)
    check_processes(config, allowed)


STOP_TORCHRUN = """if os.environ.get("RANK") == "1" and calls == 2:
        os.kill(os.getppid(), signal.SIGTERM)"""
KILL_ONCE = """killed = __file__ + ".killed"
    if os.environ.get("RANK") == "1" and calls == 3 and not os.path.exists(killed):
        open(killed, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)"""
"""Code of a reward function."""

LONG = 200
"""Iterations: far more than until the signal arrives."""


@pytest.mark.slow
def test_a_stopped_torchrun_leaves_a_checkpoint(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.write_reward(STOP_TORCHRUN)
    options = {"checkpoint_interval": 0, "rollout_batch_size": 4}
    done = torchrun(2, "-m", "fastppo", *folder.flags(iterations=LONG, **options))
    assert done.returncode != 0
    (name,) = folder.checkpoints()
    stopped = f"fastppo: stopped by SIGTERM after {int(name[-6:])} of {LONG} iterations; "
    assert done.stderr.count(stopped) == 2, done.stderr
    shards = [*(folder.run / name / "shards").glob("*.safetensors")]
    assert len(shards) == 2, shards
    flags = folder.flags(iterations=int(name[-6:]) + 1, **options, resume=True)
    done = torchrun(1, "-m", "fastppo", *flags)
    assert done.returncode == 0, done.stderr
    assert f"resuming from {folder.run / name}" in done.stderr


@pytest.mark.slow
def test_a_restart_by_torchrun_ends_in_the_same_bits(tmp_path: Path) -> None:
    folders = {name: Folder(tmp_path / name) for name in ("unharmed", "killed")}
    folders["killed"].write_reward(KILL_ONCE)
    for name, folder in folders.items():
        flags = folder.flags(iterations=4, resume=True)
        done = torchrun(2, "--max-restarts", "1", "-m", "fastppo", *flags)
        assert done.returncode == 0, done.stderr
        assert ("resuming from" in done.stderr) == (name == "killed")
    policies = [folder.run / "policy" / "model.safetensors" for folder in folders.values()]
    assert policies[0].read_bytes() == policies[1].read_bytes()
