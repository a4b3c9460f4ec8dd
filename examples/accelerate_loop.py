"""FastPPO's loss with Hugging Face accelerate: exact gradients over microbatches.

    pip install accelerate
    python examples/accelerate_loop.py
    ACCELERATE_USE_CPU=true torchrun --nproc_per_node 2 examples/accelerate_loop.py

`accelerator.backward` divides each loss by the number of microbatches, and several processes
average their gradients. Since responses differ in length, a mean of means is not the mean over all
tokens: short microbatches would weigh too much. `denominator = total / steps` corrects this, with
the total number of tokens over all microbatches and processes.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from ppo import PROMPT, RESPONSE, VOCABULARY, draw_prompts
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from fastppo import PPOLoss, combine_sums, linear_ppo_loss, linear_token_logprobs, loss_metrics

EPISODES = 128  # per process
MINIBATCHES = 2
STEPS = 4  # microbatches per optimizer step


class Episodes(NamedTuple):
    """Episodes of a batch: sequences are [B, PROMPT + RESPONSE], the other fields [B, RESPONSE]."""

    sequences: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    mask: Tensor

    def select(self, rows: Tensor) -> Episodes:
        return Episodes._make(x[rows] for x in self)

    def chunk(self, count: int) -> list[Episodes]:
        return [self.select(rows) for rows in torch.arange(len(self.mask)).chunk(count)]


class Policy(nn.Module):
    """A causal LM that computes the loss in its forward pass, as wrappers such as DDP require."""

    def __init__(self, causal_lm: LlamaForCausalLM) -> None:
        super().__init__()
        self.causal_lm = causal_lm

    def hidden(self, sequences: Tensor) -> Tensor:
        """Return the hidden states [B, RESPONSE, H] before each response token."""
        states = self.causal_lm.model(sequences, use_cache=False).last_hidden_state
        return states[:, PROMPT - 1 : -1]

    def forward(self, episodes: Episodes, denominator: Tensor) -> PPOLoss:
        return linear_ppo_loss(
            self.hidden(episodes.sequences),
            self.causal_lm.lm_head.weight,
            episodes.sequences[:, PROMPT:],
            episodes.old_logprobs,
            episodes.advantages,
            episodes.mask,
            denominator=denominator,
        )


def roll_out(policy: Policy, accelerator: Accelerator) -> tuple[Tensor, Episodes]:
    """Return the mean reward over all processes, and the episodes of this process."""
    prompts = draw_prompts(EPISODES, accelerator.device)
    with torch.no_grad():
        sequences = policy.causal_lm.generate(
            prompts, do_sample=True, top_k=0, max_new_tokens=RESPONSE
        )
        responses = sequences[:, PROMPT:]
        weight = policy.causal_lm.lm_head.weight
        logprobs = linear_token_logprobs(policy.hidden(sequences), weight, responses)
    # Random lengths of 1 to RESPONSE tokens; the mask excludes the rest.
    lengths = torch.randint(1, RESPONSE + 1, (EPISODES, 1), device=accelerator.device)
    mask = torch.arange(RESPONSE, device=accelerator.device) < lengths
    right = (responses == prompts.amin(1, keepdim=True)) & mask
    scores = right.sum(1) / mask.sum(1)
    everyone = accelerator.gather(scores)
    advantages = ((scores - everyone.mean()) / (everyone.std() + 1e-4)).unsqueeze(1)
    return everyone.mean(), Episodes(sequences, logprobs, advantages.expand_as(mask), mask)


def gradient(policy: Policy, batch: Episodes, microbatches: int, by: str) -> Tensor:
    """Return the flat gradient of a minibatch, accumulated over microbatches like accelerate."""
    total = batch.mask.sum()
    parameters = list(policy.parameters())
    gradients = torch.zeros(sum(p.numel() for p in parameters), device=total.device)
    for part in batch.chunk(microbatches):
        denominator = total / microbatches if by == "total / steps" else part.mask.sum()
        loss = policy(part, denominator).loss / microbatches
        gradients += torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])
    return gradients


def compare(policy: Policy, batch: Episodes, accelerator: Accelerator) -> None:
    """Compare the gradients of two denominators with that of the whole minibatch."""
    whole = gradient(policy, batch, 1, "total / steps")
    accelerator.print(f"gradient of {int(batch.mask.sum())} tokens in {STEPS} microbatches:")
    for by in ("total / steps", "tokens of the microbatch"):
        off = (gradient(policy, batch, STEPS, by) - whole).norm() / whole.norm()
        accelerator.print(f"  denominator = {by:25s} {off:.1e} of its norm off")


def train(iterations: int, seed: int = 0) -> list[float]:
    """Run the loop and return the mean reward of each iteration."""
    set_seed(seed)  # the same initial weights in every process
    accelerator = Accelerator(gradient_accumulation_steps=STEPS)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        bos_token_id=None,
        eos_token_id=None,
    )
    policy = Policy(LlamaForCausalLM(config))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-3, weight_decay=0.0)
    policy, optimizer = accelerator.prepare(policy, optimizer)
    plain = accelerator.unwrap_model(policy)
    set_seed(seed, device_specific=True)  # but different episodes
    history = []

    for iteration in range(iterations):
        reward, batch = roll_out(plain, accelerator)
        if not history:
            compare(plain, batch.chunk(MINIBATCHES)[0], accelerator)
        for rows in torch.randperm(EPISODES, device=accelerator.device).chunk(MINIBATCHES):
            minibatch = batch.select(rows)
            total = accelerator.reduce(minibatch.mask.sum(), "sum") / accelerator.num_processes
            sums = None
            for part in minibatch.chunk(STEPS):
                with accelerator.accumulate(policy):
                    out = policy(part, total / STEPS)
                    accelerator.backward(out.loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(policy.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                sums = out.sums if sums is None else combine_sums(sums, out.sums)
        history.append(reward.item())
        if iteration % 10 == 0 or iteration == iterations - 1:
            metrics = loss_metrics(sums)  # of this process's minibatch
            accelerator.print(
                f"iteration {iteration:3d}   reward {history[-1]:.3f}   "
                f"entropy {metrics['entropy']:.2f}   clipped {metrics['clip_fraction']:.1%}",
                flush=True,
            )
    accelerator.end_training()
    return history


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    train(**vars(parser.parse_args()))
