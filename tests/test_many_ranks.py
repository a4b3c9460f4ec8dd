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
import tiny
import torch
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
    "iterations": 3,
}
NARROW: dict[str, Any] = {"learning_rate": 1e-4}
"""In fp32: Adam's first steps are the sign of a gradient, whatever its size, times this."""
BF16: dict[str, Any] = {"precision": "bf16", "iterations": 1}
"""Frozen matrices are then in bf16, and trained ones in fp32."""
GEMMA2: dict[str, Any] = {"architecture": "gemma2", "rollout_batch_size": 16, "max_new_tokens": 8}
"""Its soft-cap leaves all words nearly as likely: of fewer none is the one that is rewarded."""
SHORT: dict[str, Any] = {"rollout_batch_size": 8, "max_new_tokens": 6, "ppo_epochs": 1}
"""Of the variants that only the slow test runs: two iterations of two steps."""

VARIANTS: dict[str, dict[str, Any]] = {
    "llama": WIDE,
    "qwen2": WIDE | {"architecture": "qwen2", "gradient_checkpointing": True},
    "lora": WIDE | LORA | EXACT | {"kl_estimator": "full"},
    "uneven": WIDE | {"rollout_batch_size": 15, "minibatches": 5, "microbatch_size": 2},
    "fp32": NARROW | {"value_model": "critic", "bootstrap_truncated": True},
    "turns": WIDE | environments.OPTIONS | TURNS,
    "curriculum": WIDE | CURRICULUM,
    "bf16": NARROW | BF16,
}
"""What the suite runs on one process and on two."""

MORE: dict[str, dict[str, Any]] = {
    "gpt2": WIDE | {"architecture": "gpt2"},
    "opt": WIDE | {"architecture": "opt"},
    "gemma2": WIDE | GEMMA2,
    "bootstrap": WIDE | {"bootstrap_truncated": True},
    "gemma2 in fp32": NARROW | GEMMA2,
    "lora, refreshed": WIDE | LORA | MOVED,
    "refreshed": WIDE | MOVED,
    "critic": WIDE | {"value_model": "critic"},
    "exact KL": WIDE | {"kl_estimator": "full"},
    "penalty": WIDE | {"objective": "penalty"},
    "ptx": WIDE | {"ptx_coef": 0.5, "ptx_batch_size": 3, "ptx_block_size": 12},
    "tokens": WIDE | {"microbatch_tokens": 40},
    "packed": WIDE | {"microbatch_tokens": 40, "packing": "on"},
    "warm-up": WIDE | {"value_model": "detached", "value_warmup_iterations": 1},
    "rloo": WIDE | {"advantage": "rloo", "samples_per_prompt": 4, "vf_coef": 0.0},
    "bf16, lora": NARROW | BF16 | LORA,
    "early stop": WIDE | {"early_stop_kl": 1e-4},
}
"""The rest."""


def tolerance(name: str, variant: dict[str, Any]) -> float:
    """Sums in another order: of products in bf16, of fp32, or of fp64; OPT's products are the
    largest."""
    if variant.get("precision") == "bf16":
        return 2**-8
    if "model_dtype" not in variant:
        return 1e-6
    return 1e-10 if variant.get("architecture") == "opt" else 1e-12


def _compare(
    folder: Path, variants: dict[str, dict[str, Any]], counts: list[int], **more: Any
) -> None:
    found = {}
    for count in (1, *counts):
        place = folder / str(count)
        found[count] = ranks.run(count, many_ranks.train_all, place, str(place), variants, **more)
    wrong = {}
    for name, variant in variants.items():
        for count in counts:
            off = many_ranks.difference(found[1][name], found[count][name])
            far = {key: value for key, value in off.items() if value > tolerance(name, variant)}
            wrong |= {(name, count): far} if far else {}
    assert not wrong


def test_two_processes_train_what_one_trains(tmp_path: Path) -> None:
    directories = NARROW | many_ranks.save_directories(tmp_path)
    _compare(tmp_path, VARIANTS | {"directories": directories}, [2])


@pytest.mark.slow
def test_two_and_four_processes_train_what_one_trains_in_every_variant(tmp_path: Path) -> None:
    """All variants in one start of the processes."""
    variants = VARIANTS | {name: SHORT | each for name, each in MORE.items()}
    _compare(tmp_path, variants, [2, 4], timeout=1800)


def test_gradients_that_are_divided_by_the_ranks_show(tmp_path: Path) -> None:
    """Adam hides it from the weights, all but for its ε; the gradient's norm does not."""
    variants = {"llama": WIDE | {"iterations": 1}}
    one = ranks.run(1, many_ranks.train_all, tmp_path / "1", str(tmp_path / "1"), variants)
    two = ranks.run(2, many_ranks.train_divided, tmp_path / "2", str(tmp_path / "2"), variants)
    off = many_ranks.difference(one["llama"], two["llama"])
    assert off["grad_norm"] > 0.1


# ------------------------------------------------------------------------------- the other stages


def _with_gradient(name: str, weight: torch.Tensor) -> torch.Tensor:
    """What of a weight has a gradient. The softmax of attention does not see the bias of GPT-2's
    keys: its gradient is rounding, of which Adam makes a step as large as any."""
    if not name.endswith("attn.c_attn.bias"):
        return weight
    query, _, value = weight.chunk(3)
    return torch.cat([query, value])


def _stages_differ(one: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """The largest difference of the weights, of each metric and of each result."""
    assert one["weights"].keys() == other["weights"].keys()
    pairs = [
        (_with_gradient(name, one["weights"][name]), _with_gradient(name, other["weights"][name]))
        for name in one["weights"]
    ]
    found = {"weights": max((a - b).abs().max().item() for a, b in pairs)}
    assert [record.keys() for record in one["metrics"]] == [r.keys() for r in other["metrics"]]
    records = [*zip(one["metrics"], other["metrics"], strict=True)]
    records.append((one["result"], other["result"]))
    assert one["result"].keys() == other["result"].keys()
    for mine, theirs in records:
        for name in mine.keys() - {"eval_runtime"}:
            found[name] = max(found.get(name, 0.0), abs(mine[name] - theirs[name]))
    return found


def test_two_processes_train_the_stages_that_one_trains(tmp_path: Path) -> None:
    """To the rounding of fp32; with LoRA, with rows that do not come out even, with batches of one
    row, of which the second process has none."""
    base = tiny.saved_model(tmp_path / "base")
    one, two = (
        ranks.run(n, many_ranks.stages, tmp_path / str(n), str(tmp_path / str(n)), base)
        for n in (1, 2)
    )
    off = {name: _stages_differ(one[name], two[name]) for name in many_ranks.STAGES}
    far = {name: {k: v for k, v in each.items() if v > 1e-5} for name, each in off.items()}
    assert not any(far.values()), far


def test_a_stage_goes_on_with_another_number_of_processes(tmp_path: Path) -> None:
    """Two steps of two processes, one of one, the last of two."""
    how = {"checkpoint_interval": 1, "epochs": 2, "gradient_accumulation": 1, "batch_size": 4}
    whole = ranks.run(1, many_ranks.stage_of, tmp_path / "a", str(tmp_path / "a"), how, 0)
    for count, stop in ((2, 2), (1, 3), (2, 0)):
        place = tmp_path / "b"
        parts = ranks.run(
            count, many_ranks.stage_of, place, str(place), how | {"resume": True}, stop
        )
    off = _stages_differ(whole, parts)
    assert max(off.values()) <= 1e-5, off


# ------------------------------------------------------------------------------------ stragglers


def test_the_slowest_process_of_each_phase_shows(tmp_path: Path) -> None:
    """By the clock where processes work apart, 3 of (1 + 3) / 2; by the tokens that they are dealt
    where they wait for one another."""
    found = ranks.run(2, many_ranks.train_with_a_slow_clock, tmp_path, str(tmp_path))
    assert found["straggler/generate"] == pytest.approx(1.5)
    assert found["straggler/score"] == pytest.approx(1.5)
    for phase in ("experience", "update"):
        assert 1 <= found[f"straggler/{phase}"] < 1.5, found


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


def test_memory_that_runs_out_in_a_layer_ends_all_with_a_sentence_each(tmp_path: Path) -> None:
    """At once, not at the timeout: the first waits there for the second's part of the next
    layer."""
    place = str(tmp_path)
    first, second = ranks.start(2, many_ranks.train_without_room_in_a_layer, tmp_path, place)
    assert (first[0], second[0]) == (1, 1)
    assert "rank 0 of 2: another rank has ended; look at what it said last" in first[1]
    assert "out of memory on one of several processes: CUDA out of memory" in second[1]
    assert "with a smaller microbatch_size or microbatch_tokens" in second[1]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"optimizer": "adamw8bit"}, "2 processes: optimizer=adamw8bit has "),
        ({"precision": "fp16"}, "2 processes: precision=fp16 has "),
        ({"quantization": "nf4", "lora_rank": 4}, "2 processes: quantization=nf4 has "),
    ],
)
def test_options_that_several_processes_do_not_have_are_refused(options, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check_ranks(PPOConfig(**options), World(size=2))
    check_ranks(PPOConfig(**options), World())


def test_groups_that_share_a_vllm_divide_the_processes() -> None:
    config = PPOConfig(rollout="vllm", vllm_tensor_parallel_size=2)
    for size in (1, 3):
        with pytest.raises(ValueError, match=f"must divide the number .*: got 2 and {size}"):
            check_ranks(config, World(size=size))
    check_ranks(config, World(size=4))


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


def _torchrun(count: int, arguments: list[str], *more: str) -> subprocess.CompletedProcess[str]:
    """`fastppo` with these arguments in as many processes, to their end."""
    variables = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]),
        "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(count)]
    return subprocess.run(
        [*launch, "--standalone", *more, "-m", "fastppo", *arguments],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )


STOPPED = """
import os, signal
calls = 0


def count(prompts, completions, **columns):
    global calls
    calls += 1
    if os.environ.get("RANK") == "1" and calls == 2:
        os.kill(os.getppid(), signal.SIGTERM)  # torchrun
    return [text.split().count("w7") / 8 for text in completions]
"""

LONG = 200
"""Iterations: far more than there are until the signal has come round."""


@pytest.mark.slow
def test_torchrun_that_is_told_to_stop_stops_all_with_a_checkpoint(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.reward.write_text(STOPPED)
    options = {"checkpoint_interval": 0, "rollout_batch_size": 4}
    done = _torchrun(2, folder.flags(iterations=LONG, **options))
    assert done.returncode != 0
    (name,) = folder.checkpoints()
    stopped = f"fastppo: stopped by SIGTERM after {int(name[-6:])} of {LONG} iterations; "
    assert done.stderr.count(stopped) == 2, done.stderr
    shards = sorted(path.name for path in (folder.run / name / "shards").glob("*.distcp"))
    assert shards == ["__0_0.distcp", "__1_0.distcp"]
    end = int(name[-6:]) + 1
    done = _torchrun(1, folder.flags(iterations=end, **options, resume=True))
    assert done.returncode == 0, done.stderr
    assert f"resuming from {folder.run / name}" in done.stderr


@pytest.mark.slow
def test_a_run_that_torchrun_restarts_ends_where_one_ends_that_was_not_killed(
    tmp_path: Path,
) -> None:
    folders = {"whole": Folder(tmp_path / "whole"), "killed": Folder(tmp_path / "killed")}
    folders["killed"].reward.write_text(KILLED)
    for name, folder in folders.items():
        done = _torchrun(2, folder.flags(iterations=4, resume=True), "--max-restarts", "1")
        assert done.returncode == 0, done.stderr
        assert ("resuming from" in done.stderr) == (name == "killed")
    policies = [folder.run / "policy" / "model.safetensors" for folder in folders.values()]
    assert policies[0].read_bytes() == policies[1].read_bytes()
