"""Runs on the simulated device.

    python -m tests.simgpu.cases NAME…      run cases, print a line of JSON for each
    python -m tests.simgpu.cases            list the cases

A case fails by an exception: of the device if tensors of host and device meet, or of its own.
`tests/simgpu/test_simgpu.py` compares its counts with `limits.py`.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.simgpu import device, examples, phases
from tests.simgpu.counts import counts

Case = Callable[[Path], object]
CASES: dict[str, Case] = {}

SHORT: dict[str, Any] = {
    "device": "cuda",
    "iterations": 1,
    "rollout_batch_size": 4,
    "max_new_tokens": 2,
    "microbatch_size": 2,
    "ppo_epochs": 1,
    "minibatches": 1,
}
"""Options of a run with one minibatch of two microbatches. Triton's interpreter is slow."""


def case(function: Case) -> Case:
    """Add a function to the cases."""
    CASES[function.__name__] = function
    return function


def trainer(folder: Path, **options: Any) -> Any:
    """Return a trainer whose rewards always move the policy."""
    import tiny

    import runs

    return runs.make_trainer(folder, **{**SHORT, "rewards": [tiny.every_other], **options})


def train(folder: Path, **options: Any) -> Any:
    """Train, and check that the weights stayed on the device and moved."""
    ours = trainer(folder, **options)
    before = [weight.clone() for weight in ours.model.parameters()]
    metrics = ours.train()
    assert math.isfinite(metrics["loss"]), metrics
    after = list(ours.model.parameters())
    assert all(weight.is_cuda for weight in after)
    assert any(not before[i].equal(after[i]) for i in range(len(after)))
    return ours


def add_run(name: str, **options: Any) -> None:
    """Add a case that trains with these options."""
    CASES[name] = lambda folder: train(folder, **options)


# -------------------------------------------------------------------------------------- the device


@case
def refusals(folder: Path) -> None:
    """The device refuses what CUDA refuses, and counts the host's waits."""
    import torch
    import triton
    import triton.language as tl

    @triton.jit
    def double(source, target, n: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.arange(0, n)
        tl.store(target + at, 2 * tl.load(source + at))

    attention = torch.nn.functional.scaled_dot_product_attention
    on_gpu = torch.arange(4.0, device="cuda")
    on_host = torch.ones(4)
    query = on_gpu.view(1, 1, 1, 4)
    refused: dict[str, Callable[[], object]] = {
        "an operation on both": lambda: on_gpu + on_host,
        "a list of both": lambda: torch.cat([on_gpu, on_host]),
        "a result on the other": lambda: torch.add(on_gpu, on_gpu, out=on_host),
        "indices of the device": lambda: on_host[on_gpu.long()],
        "attention with a mask of the host": lambda: attention(
            query, query, query, attn_mask=torch.ones(1, 1, 1, 1)
        ),
        "NumPy": lambda: on_gpu.numpy(),
        "a generator of the CPU": lambda: on_gpu.uniform_(generator=torch.Generator()),
        "a kernel on both": lambda: double[(1,)](on_gpu, on_host, 4),
        "pinned memory of the device": lambda: on_gpu.pin_memory(),
    }
    for what, call in refused.items():
        try:
            call()
        except (RuntimeError, TypeError, ValueError, IndexError):
            continue
        raise AssertionError(f"{what}: not refused")

    double[(1,)](on_gpu, into := torch.empty_like(on_gpu), 4)
    assert into.tolist() == [0, 2, 4, 6]
    assert torch.empty(3, device="cuda").isnan().all()
    pinned = on_host.pin_memory()
    waits: dict[str, tuple[int, Callable[[], object]]] = {
        "arithmetic": (0, lambda: (on_gpu + 1).sum()),
        "a view": (0, lambda: on_gpu.view(2, 2).t()[0]),
        "a number of the host": (0, lambda: on_gpu + torch.tensor(1.0)),
        "item": (1, lambda: on_gpu.sum().item()),
        "a boolean mask": (1, lambda: on_gpu[on_gpu > 1]),
        "indices of the host": (1, lambda: on_gpu[[0, 1]]),
        "nonzero": (1, lambda: on_gpu.nonzero()),
        "a pageable copy": (1, lambda: on_host.to("cuda", non_blocking=True)),
        "a pinned copy": (0, lambda: pinned.to("cuda", non_blocking=True)),
        "a pinned copy that blocks": (1, lambda: pinned.to("cuda")),
        "a copy to the host": (1, lambda: on_gpu.cpu()),
    }
    for what, (expected, call) in waits.items():
        with counts.during(what):
            call()
        assert counts.waits_in(what) == expected, (what, counts.places_of_waits(what))


# ------------------------------------------------------------------------------------- the trainer

FP32_WEIGHTS_IN_FP16: dict[str, Any] = {"precision": "fp16"}

add_run("default", minibatches=2)
add_run("fp16", **FP32_WEIGHTS_IN_FP16)
add_run("bf16_weights", param_dtype="bfloat16", model_dtype="bfloat16")
add_run("unpacked", packing="off")
add_run("critic", value_model="critic")
add_run("critic_warmup", value_model="critic", value_warmup_iterations=1)
add_run("critic_epochs", value_model="critic", critic_options={"epochs": 2})
add_run("gradient_head", value_head="gradient")
add_run("trunk_value_loss", vf_coef=0.5)
add_run("lora", lora_rank=4)
add_run(
    "lora_refresh", lora_rank=4, reference_refresh=1, iterations=2, kl_coef=0.0, kl_loss_coef=0.1
)
add_run("refresh", reference_refresh=1, iterations=2, kl_coef=0.0, kl_loss_coef=0.1)
add_run("full_kl", kl_loss_coef=0.1, kl_loss_estimator="full")
add_run("full_kl_reward", kl_coef=0.1, kl_estimator="full")
add_run("top_k", top_k=5, top_p=0.9)
add_run("stop_strings", stop_strings=["w7"])
add_run(
    "dynamic_sampling", samples_per_prompt=2, dynamic_sampling=2, advantage="group", vf_coef=0.0
)
add_run("importance", importance="sequence-mask")
add_run("early_stop", early_stop_kl=1e-6, ppo_epochs=2)
add_run("auto_rate", learning_rate="auto", ppo_epochs=2)
add_run("bootstrap", truncated="bootstrap")
add_run("truncated", truncated="mask", stop_token_ids=list(range(20)))
add_run("gspo", objective="gspo")
add_run("penalty", objective="penalty", minibatches=2)
add_run("sapo_fp16", objective="sapo", **FP32_WEIGHTS_IN_FP16)
add_run("gradient_checkpointing", gradient_checkpointing=True)
add_run("microbatch_tokens", microbatch_tokens=24)
add_run("asynchronous", async_steps=1, iterations=2)
add_run("value_lam", value_lam=1.0, lam_alpha=0.5)
for architecture in ("gpt2", "qwen3", "gemma2", "gemma3", "mistral-window", "opt"):
    add_run(architecture, architecture=architecture)
for architecture in ("llama", "qwen2", "gemma2"):
    add_run(f"generate_{architecture}", rollout="generate", architecture=architecture)
add_run("generate_fp16", rollout="generate", **FP32_WEIGHTS_IN_FP16)
add_run("generate_stop_strings", rollout="generate", stop_strings=["w7"])


@case
def ptx(folder: Path) -> None:
    import tiny

    text = tiny.saved_text(folder / "text.jsonl")
    train(folder, ptx_coef=0.5, ptx_data=text, ptx_batch_size=2)


@case
def same_as_cpu(folder: Path) -> None:
    """The weights after two steps in fp32 agree with those of a CPU."""
    options = {"precision": "fp32", "backend": "triton", "minibatches": 2}
    ours = train(folder / "gpu", **options)
    theirs = train_on_cpu(folder / "cpu", **options)
    for mine, its in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        # AdamW's first steps are of the size of the rate, 1e-3, in the sign of the gradient.
        assert (mine.cpu() - its).abs().max() < 1e-6


def train_on_cpu(folder: Path, **options: Any) -> Any:
    """Train with the same options on the CPU."""
    ours = trainer(folder, **options, **{"device": "cpu"})
    ours.train()
    return ours


# ---------------------------------------------------------------------- environments and rewards


@case
def environment(folder: Path) -> None:
    """Several turns, with advantages per turn."""
    import environments

    options = {**environments.OPTIONS, "rollout_batch_size": 4, "max_new_tokens": 3}
    train(
        folder,
        environment=environments.Calculator,
        prompts=environments.PROMPTS,
        rewards=[],
        advantage="turn_gae",
        iterations=2,
        **options,
    )


class Shop:
    """An environment whose methods the model may call."""

    def reset(self, **row: Any) -> None: ...

    def price(self, item: str) -> float:
        """Return the price of an item.

        Args:
            item: its name.
        """
        return 7.5


WITH_TOOLS = (
    "{% if tools %}w9 {% endif %}{% for m in messages %}w{{ loop.index }} {{ m['content'] }} "
    "{% endfor %}{% if add_generation_prompt %}w0{% endif %}"
)


@case
def tools(folder: Path) -> None:
    """An environment with tools."""
    import tiny

    tokenizer = tiny.tokenizer(chat=True)
    tokenizer.chat_template = WITH_TOOLS
    prompts = [{"prompt": [{"role": "user", "content": f"w{i} w3"}]} for i in range(8)]
    train(folder, environment=Shop, prompts=prompts, tokenizer=tokenizer, max_turns=2)


@case
def reward_model_as_reward(folder: Path) -> None:
    import tiny

    model = tiny.saved_reward_model(folder / "reward")
    train(folder, rewards=[model])
    train(folder / "critic", value_model="critic", critic_model=model)


# ------------------------------------------------------------------------- steps and evaluation


@case
def step(folder: Path) -> None:
    """`PPOTrainer.step` on lists, and on tensors of host and device."""
    import torch

    ours = trainer(folder)
    prompts = ["w1 w2", "w3", "w4 w5 w6", "w8"]
    responses = [[7, 8, 1], [9, 10, 11], [5, 1], [6, 7]]
    scores = [1.0, 0.0, 0.5, 0.2]
    assert math.isfinite(ours.step(prompts, responses, scores)["loss"])
    more: dict[str, Any] = {
        "masks": [[True] * (len(tokens) - 1) + [False] for tokens in responses[1:]],
        "token_rewards": [[0.1] * len(tokens) for tokens in responses],
        "old_logprobs": [[-3.0] * len(tokens) for tokens in responses],
        "values": [[0.0] * len(tokens) for tokens in responses],
    }
    more["masks"].insert(0, [True, False, True])
    assert math.isfinite(ours.step(prompts, responses, torch.tensor(scores), **more)["loss"])
    on_device = {
        name: [torch.tensor(row, device="cuda") for row in rows] for name, rows in more.items()
    }
    tokens = [torch.tensor(row, device="cuda") for row in responses]
    metrics = ours.step(prompts, tokens, torch.tensor(scores, device="cuda"), **on_device)
    assert math.isfinite(metrics["loss"])


@case
def evaluation(folder: Path) -> None:
    import tiny

    path = folder / "eval.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in tiny.PROMPTS[:4]))
    train(folder, eval_prompts=str(path), eval_interval=1)


@case
def monitors(folder: Path) -> None:
    """Warnings, records of samples, and a reward that is only watched."""
    import tiny

    train(folder, monitor_rewards=[tiny.count_w7], iterations=2)


# ---------------------------------------------------------------------------------- checkpoints


calls_left: list[int] = []
"""Calls of `fragile` before one that fails; empty if none does."""


def fragile(prompts: list[Any], completions: list[str], **columns: Any) -> list[float]:
    """Return rewards that differ, or fail."""
    if calls_left:
        calls_left[0] -= 1
        if calls_left[0] < 0:
            calls_left.clear()
            raise ValueError("no calls are left")
    return [float(i % 2) for i in range(len(completions))]


@case
def resume(folder: Path) -> None:
    """A run that failed and was resumed ends in the bits of one that was not."""
    from fastppo.rewards.reward import RewardError

    options: dict[str, Any] = {"iterations": 3, "checkpoint_interval": 1, "rewards": [fragile]}

    whole = train(folder / "whole", **options)
    dying = trainer(folder / "cut", **options)
    calls_left.append(2)
    try:
        dying.train()
    except RewardError:
        assert dying.state.iteration == 2
    else:
        raise AssertionError("the reward did not fail")
    resumed = trainer(folder / "cut", **options, resume=True)
    resumed.train()
    for mine, its in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert mine.equal(its)
    assert all(
        value.is_cuda
        for state in resumed.optimizer.state.values()
        for name, value in state.items()
        if name != "step"
    )


@case
def saved_models(folder: Path) -> None:
    """A model from a directory, its reference, and the export of a checkpoint."""
    import tiny

    from fastppo.ppo.checkpoints import export_checkpoint
    from fastppo.ppo.options.config import PPOConfig
    from fastppo.ppo.trainer import PPOTrainer

    model = tiny.saved_model(folder / "model")
    options = {**tiny.options(folder), **SHORT, "checkpoint_interval": 1}
    config = PPOConfig(model=model, reference_model=model, **options)
    ours = PPOTrainer(config, prompts=tiny.PROMPTS, rewards=[tiny.every_other])
    ours.train()
    newest = max((folder / "run").glob("checkpoint-*"))
    export_checkpoint(newest, folder / "exported", "cuda")
    assert (folder / "exported" / "model.safetensors").exists()


@case
def out_of_memory(folder: Path) -> None:
    """An update that runs out of memory goes on with smaller microbatches."""
    seen = []

    def fault(operation: str) -> bool:
        if counts.phase == "microbatches" and operation == "aten::mm":
            seen.append(operation)
        return counts.phase == "microbatches" and operation == "aten::mm" and len(seen) == 20

    device.faults.append(fault)
    try:
        train(folder, microbatch_size=4)
    finally:
        device.faults.clear()
    assert len(seen) > 20


# --------------------------------------------------------------------------------------- stages


@case
def sft(folder: Path) -> None:
    import stage_runs

    metrics = stage_runs.sft(stage_runs.sft_config(folder, device="cuda"))
    assert math.isfinite(metrics["loss"])


@case
def reward_model(folder: Path) -> None:
    import stage_runs

    config = stage_runs.reward_config(folder, device="cuda")
    assert math.isfinite(stage_runs.reward_model(config, folder)["loss"])


# ------------------------------------------------------------------------- the drop-in functions


@case
def functions_bf16(folder: Path) -> None:
    """Compare every function of `functions.py` with the same kernels on CPU tensors."""
    from tests.simgpu.functions import check

    check("bfloat16")


# ------------------------------------------------------------------------------------ the examples

for script in examples.SCRIPTS:
    CASES[f"{script.__name__}.py"] = script
for name, chosen in examples.FUNCTIONS.items():
    add_run(f"function_{name}", **chosen)


def add_yaml(name: str) -> None:
    """Add a case that trains with the options of an example's file."""
    CASES[f"{name}.yaml"] = lambda folder: train(folder, **examples.yaml_options(name))


for name in examples.YAML:
    add_yaml(name)


# ------------------------------------------------------------------------------------------ main


def run(name: str) -> dict[str, Any]:
    """Run a case and return what it counted."""
    begin = time.monotonic()
    counts.clear()
    error = ""
    with tempfile.TemporaryDirectory() as folder:
        try:
            CASES[name](Path(folder))
        except Exception:
            error = traceback.format_exc()
    return {
        "case": name,
        "error": error,
        "seconds": round(time.monotonic() - begin, 1),
        **counts.summary(),
    }


def main() -> None:
    names = sys.argv[1:]
    if not names:
        print(*CASES, sep="\n")
        return
    device.install()
    import torch

    torch.set_num_threads(1)
    phases.follow()

    for name in names:
        print("\n" + json.dumps(run(name)), flush=True)


if __name__ == "__main__":
    main()
