"""LoRA and DoRA adapters on the lm-head, merged into the weight for the loss.

    pip install peft
    python examples/lora_head.py

PEFT stores an adapter separately, so `model.lm_head.weight` is only the frozen matrix. A loss with
this weight would train a different policy than the sampled one, and the head's adapter would get no
gradient. `fastppo.head_weight` returns the weight with the adapter merged. It raises for adapters
with dropout in training or a bias, since no single weight represents them.
"""

from __future__ import annotations

import argparse
import warnings
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from ppo import PROMPT, RESPONSE, VOCABULARY, draw_prompts
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from fastppo import head_weight, linear_ppo_loss, linear_token_logprobs, token_logprobs

EPISODES = 32
RANK = 4


def adapted(**more: Any) -> Any:
    """Return a small Llama with adapters on its projections and lm-head."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        bos_token_id=None,
        eos_token_id=None,
    )
    targets = ["q_proj", "v_proj", "lm_head"]
    plain = LlamaForCausalLM(config)
    if more.get("lora_bias"):
        targets = ["lm_head"]
        plain.lm_head = torch.nn.Linear(64, VOCABULARY)
    lora = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=targets, **more)
    with warnings.catch_warnings():  # PEFT uses an attribute renamed in transformers
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")
        model = get_peft_model(plain, lora)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # initially zero; nonzero as after training
            torch.nn.init.normal_(parameter, std=0.1)
        if "magnitude" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.0)
    return model


def hidden_states(model: Any, sequences: Tensor) -> Tensor:
    """Return the adapted trunk's hidden states [B, RESPONSE, H] before each response token."""
    trunk = model.base_model.model.model
    return trunk(sequences, use_cache=False).last_hidden_state[:, PROMPT - 1 : -1]


def adapter_gradient(model: Any, logprobs: Tensor) -> float:
    """Return the norm of the head adapter's gradient, 0 if there is none."""
    own = [p for n, p in model.named_parameters() if "lm_head.lora" in n and p.requires_grad]
    gradients = torch.autograd.grad(logprobs.sum(), own, allow_unused=True, retain_graph=True)
    return sum(float((g**2).sum()) for g in gradients if g is not None) ** 0.5


def compare(kind: str, model: Any, sequences: Tensor) -> None:
    """Compare the model's logprobs with those of the merged and of the frozen weight."""
    responses = sequences[:, PROMPT:]
    lm_head = model.get_output_embeddings()
    expected = token_logprobs(model(sequences).logits[:, PROMPT - 1 : -1], responses)
    hidden = hidden_states(model, sequences)
    by_logits = adapter_gradient(model, expected)
    print(f"{kind}: gradient of the head's adapter, by the logits    {by_logits:.4f}")
    for name, weight in (
        ("head_weight(lm_head)", head_weight(lm_head)),
        ("lm_head.weight", lm_head.weight),
    ):
        logprobs = linear_token_logprobs(hidden, weight, responses)
        print(
            f"  by {name:22s} logprobs {(logprobs - expected).abs().max():.1e} nats off, "
            f"gradient {adapter_gradient(model, logprobs):.4f}"
        )


def refuse(what: str, **more: Any) -> None:
    """Print the error for an adapter without a merged weight."""
    try:
        head_weight(adapted(**more).train().get_output_embeddings())
    except TypeError as error:
        print(f"{what} is refused: {error}")


def train(model: Any, sequences: Tensor, steps: int) -> None:
    """Train on one batch, with positive advantages for even tokens and negative ones for odd."""
    responses = sequences[:, PROMPT:]
    advantages = torch.where(responses % 2 == 0, 1.0, -1.0)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-3, weight_decay=0.0)
    lm_head = model.get_output_embeddings()
    frozen = lm_head.weight.clone()
    with torch.no_grad():
        old = linear_token_logprobs(
            hidden_states(model, sequences), head_weight(lm_head), responses
        )
    for step in range(steps):
        out = linear_ppo_loss(
            hidden_states(model, sequences), head_weight(lm_head), responses, old, advantages
        )
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()
        if step % 10 == 0 or step == steps - 1:
            clipped = out.metrics["clip_fraction"]
            print(f"step {step:3d}   loss {out.loss:.3f}   clipped {clipped:.1%}", flush=True)
    with torch.no_grad():
        merged = model.merge_and_unload()
        now = token_logprobs(merged(sequences).logits[:, PROMPT - 1 : -1], responses)
    moved = (head_weight(merged.lm_head) - frozen).abs().max()
    print(f"merged: the head moved by up to {moved:.3f}", end="; ")
    print(f"good tokens {(now - old)[advantages > 0].mean():+.3f} nats", end=", ")
    print(f"bad ones {(now - old)[advantages < 0].mean():+.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=31)
    options = parser.parse_args()
    policy = adapted()
    prompts = draw_prompts(EPISODES, torch.device("cpu"))
    answers = policy.generate(input_ids=prompts, do_sample=True, top_k=0, max_new_tokens=RESPONSE)
    compare("LoRA", policy, answers)
    compare("DoRA", adapted(use_dora=True), answers)
    refuse("dropout", lora_dropout=0.1)
    refuse("a bias", lora_bias=True)
    train(policy, answers, options.steps)
