"""Several processes train what one trains: weights, gradients and metrics, to rounding."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import environments
import many_ranks
import pytest
import ranks
from command_line import Folder

from fastppo.data.world import World
from fastppo.ppo.build import check_ranks
from fastppo.ppo.config import PPOConfig

ROOT = Path(__file__).parents[1]

WIDE: dict[str, Any] = {"model_dtype": "float64"}
LORA: dict[str, Any] = {"lora_rank": 4, "lora_alpha": 8.0}
EXACT: dict[str, Any] = {"kl_loss_coef": 0.1, "kl_loss_estimator": "full"}
MOVED: dict[str, Any] = {"reference_refresh": 1, "kl_coef": 0.0, **EXACT}
TURNS: dict[str, Any] = {
    "environment": environments.Exact,
    "prompts": environments.PROMPTS,
    "gae_by": "turn",
}
CURRICULUM: dict[str, Any] = {
    "prompt_weights": "many_ranks:weigh",
    "solved_reward": 0.125,
    "success_window": 1,
    "leave_out": "solved",
    "iterations": 3,
}
NARROW: dict[str, Any] = {"learning_rate": 1e-4}
"""In fp32: Adam's first steps are the sign of a gradient, whatever its size, times this."""

VARIANTS: dict[str, dict[str, Any]] = {
    "llama": WIDE,
    "qwen2": WIDE | {"architecture": "qwen2", "gradient_checkpointing": True},
    "lora": WIDE | LORA | EXACT | {"kl_estimator": "full"},
    "uneven": WIDE | {"rollout_batch_size": 15, "minibatches": 5, "microbatch_size": 2},
    "fp32": NARROW | {"value_model": "critic", "bootstrap_truncated": True},
    "turns": WIDE | environments.OPTIONS | TURNS,
    "curriculum": WIDE | CURRICULUM,
}
"""What the suite runs on one process and on two."""

MORE: dict[str, dict[str, Any]] = {
    "gpt2": WIDE | {"architecture": "gpt2"},
    "opt": WIDE | {"architecture": "opt"},
    "gemma2": NARROW | {"architecture": "gemma2"},
    "lora, refreshed": WIDE | LORA | MOVED,
    "refreshed": WIDE | MOVED,
    "critic": WIDE | {"value_model": "critic"},
    "branch": WIDE | {"value_model": "branch", "value_branch_layers": 1},
    "exact KL": WIDE | {"kl_estimator": "full"},
    "penalty": WIDE | {"objective": "penalty"},
    "ptx": WIDE | {"ptx_coef": 0.5, "ptx_batch_size": 3, "ptx_block_size": 12},
    "tokens": WIDE | {"microbatch_tokens": 40},
    "packed": NARROW | {"microbatch_tokens": 40, "packing": "on"},
    "warm-up": WIDE | {"value_model": "detached", "value_warmup_iterations": 1},
    "rloo": WIDE | {"advantage": "rloo", "samples_per_prompt": 4, "vf_coef": 0.0},
    "kept": WIDE | {"reshard_after_forward": False},
    "early stop": WIDE | {"early_stop_kl": 1e-4, "early_stop_check": "minibatch"},
}
"""The rest."""


def tolerance(name: str, variant: dict[str, Any]) -> float:
    """Sums in another order: of fp32, or of fp64; OPT's products are the largest."""
    if "model_dtype" not in variant:
        return 1e-6
    return 1e-10 if variant.get("architecture") == "opt" else 1e-12


def _compare(folder: Path, variants: dict[str, dict[str, Any]], counts: list[int]) -> None:
    found = {
        count: ranks.run(
            count, many_ranks.train_all, folder / str(count), str(folder / str(count)), variants
        )
        for count in (1, *counts)
    }
    wrong = {}
    for name, variant in variants.items():
        for count in counts:
            off = many_ranks.difference(found[1][name], found[count][name])
            far = {key: value for key, value in off.items() if value > tolerance(name, variant)}
            wrong |= {(name, count): far} if far else {}
    assert not wrong


def test_two_processes_train_what_one_trains(tmp_path: Path) -> None:
    _compare(tmp_path, VARIANTS, [2])


@pytest.mark.slow
def test_two_and_four_processes_train_what_one_trains_in_every_variant(tmp_path: Path) -> None:
    _compare(tmp_path, MORE, [2, 4])
    _compare(tmp_path, VARIANTS, [4])


def test_gradients_that_are_divided_by_the_ranks_show(tmp_path: Path) -> None:
    """Adam hides it from the weights, all but for its ε; the gradient's norm does not."""
    variants = {"llama": WIDE | {"iterations": 1}}
    one = ranks.run(1, many_ranks.train_all, tmp_path / "1", str(tmp_path / "1"), variants)
    two = ranks.run(2, many_ranks.train_divided, tmp_path / "2", str(tmp_path / "2"), variants)
    off = many_ranks.difference(one["llama"], two["llama"])
    assert off["grad_norm"] > 0.1


# -------------------------------------------------------------------------------- going on, or not


def test_a_reward_that_raises_on_one_process_raises_the_same_on_all(tmp_path: Path) -> None:
    ended = ranks.start(2, many_ranks.train_with_a_failing_reward, tmp_path, str(tmp_path))
    assert [code for code, _ in ended] == [1, 1]
    last = {said.strip().splitlines()[-1] for _, said in ended}
    assert len(last) == 1
    assert "reward 'fails' raised ValueError('the server is out')" in last.pop()
    assert (tmp_path / "run" / "failed_reward.json").exists()


def test_a_process_that_hangs_ends_the_run_with_a_sentence(tmp_path: Path) -> None:
    (first, said), _ = ranks.start(2, many_ranks.train_with_a_late_rank, tmp_path, str(tmp_path))
    assert first == 1
    assert "rank 0 of 2 waited 4 s for the others, and one did not answer" in said


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"reference_offload": True}, "2 processes: reference_offload: "),
        ({"rollout": "vllm"}, "2 processes: rollout=vllm has "),
        ({"optimizer": "adamw8bit"}, "2 processes: optimizer=adamw8bit has "),
        ({"compile": True}, "2 processes: compile: "),
        ({"precision": "fp16"}, "2 processes: precision=fp16 has "),
        ({"quantization": "nf4", "lora_rank": 4}, "2 processes: quantization=nf4 has "),
    ],
)
def test_options_that_several_processes_do_not_have_are_refused(options, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check_ranks(PPOConfig(**options), World(size=2))
    check_ranks(PPOConfig(**options), World())


KILLED = """
import os, signal
from pathlib import Path
calls = 0


def count(prompts, completions, **columns):
    global calls
    calls += 1
    mark = Path(__file__).with_name("killed")
    if os.environ.get("RANK") == "1" and calls == 3 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return [text.split().count("w7") / 8 for text in completions]
"""


@pytest.mark.slow
def test_a_run_that_torchrun_restarts_ends_where_one_ends_that_was_not_killed(
    tmp_path: Path,
) -> None:
    folders = {"whole": Folder(tmp_path / "whole"), "killed": Folder(tmp_path / "killed")}
    folders["killed"].reward.write_text(KILLED)
    variables = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]),
        "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    for name, folder in folders.items():
        command = [*torchrun, "--max-restarts", "1", "-m", "fastppo"]
        done = subprocess.run(
            [*command, *folder.flags(iterations=4, resume=True)],
            env=os.environ | variables,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert ("resuming from" in done.stderr) == (name == "killed")
    policies = [folder.run / "policy" / "model.safetensors" for folder in folders.values()]
    assert policies[0].read_bytes() == policies[1].read_bytes()
