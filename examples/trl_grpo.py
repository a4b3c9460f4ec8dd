"""Compare TRL's GRPOTrainer with and without FastPPO's loss: the same run with less memory.

    pip install "trl==1.12.*" requests
    python examples/trl_grpo.py

Two trainers run with the same options, initial weights, seed and prompts. Only the import differs.
The example prints the peak memory of one more loss and gradient, from CUDA or from CPU allocations,
with a vocabulary large enough to make the logits dominate.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.profiler import ProfilerActivity, profile
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    PrinterCallback,
    set_seed,
)

from fastppo.integrations.trl import GRPOTrainer

VOCABULARY = 16384
PROMPT = 4
RESPONSE = 16
GROUP = 8
ROWS = 32


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with the tokens t0, t1, …; no response ends early."""
    names = {"<pad>": 0, "<eos>": 1} | {f"t{i}": i for i in range(2, VOCABULARY)}
    words = Tokenizer(models.WordLevel(names, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def policy() -> LlamaForCausalLM:
    """Return the initial model of both trainers and their reference."""
    set_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config)


def even(completion_ids: list[list[int]], **others: Any) -> list[float]:
    """Return the share of even tokens as reward."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def weights(model: torch.nn.Module) -> torch.Tensor:
    """Return all weights as one vector on the CPU."""
    return torch.cat([p.detach().double().cpu().flatten() for p in model.parameters()])


def train(kind: type, steps: int, folder: str) -> Any:
    """Run a trainer from the model saved in the folder."""
    prompts = torch.randint(2, VOCABULARY, (ROWS, PROMPT), generator=torch.manual_seed(1)).tolist()
    rows = Dataset.from_dict({"prompt": [" ".join(f"t{i}" for i in row) for row in prompts]})
    options = trl.GRPOConfig(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=2,
        num_generations=GROUP,
        num_iterations=2,  # two optimizer steps per generation: the second one clips
        max_completion_length=RESPONSE,
        beta=0.02,
        use_bias_correction_kl=False,  # otherwise TRL computes the loss from FastPPO's statistics
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        bf16=torch.cuda.is_available(),
        gradient_checkpointing=False,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        seed=0,
    )
    trainer = kind(
        model=folder,
        reward_funcs=even,
        args=options,
        train_dataset=rows,
        processing_class=tokenizer(),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return trainer


def loss_memory(trainer: Any) -> int:
    """Return the peak memory of one more loss and its gradient, in bytes."""
    inputs = trainer._buffered_inputs[0]
    model = trainer.model
    model.zero_grad()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        trainer.compute_loss(model, inputs).backward()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        trainer.compute_loss(model, inputs).backward()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = 0
    peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def main(steps: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        policy().save_pretrained(folder)
        theirs, ours = (train(kind, steps, folder) for kind in (trl.GRPOTrainer, GRPOTrainer))
    print("step   loss: TRL, FastPPO   clipped             KL                  entropy")
    names = ("loss", "clip_ratio/region_mean", "kl", "entropy")
    for a, b in zip(theirs.state.log_history, ours.state.log_history, strict=True):
        if "loss" in a:
            cells = (f"{a[name]:8.5f} {b[name]:8.5f}" for name in names)
            print(f"{a['step']:4d}   " + "   ".join(cells))
    # Compare all weights at once, since Adam can turn rounding in one gradient into a full step.
    start, one, other = (weights(model) for model in (policy(), theirs.model, ours.model))
    off = float((one - other).norm() / (one - start).norm())
    print(f"after {steps} steps the weights differ by {off:.1e} of their change")
    for name, trainer in (("TRL", theirs), ("FastPPO", ours)):
        print(
            f"memory of the loss and its gradient, {name:8s} {loss_memory(trainer) / 1e6:6.1f} MB"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8)
    main(**vars(parser.parse_args()))
