"""FastPPO's loss under FSDP2, called inside the wrapped forward with a gathered lm-head.

    torchrun --nproc_per_node 2 examples/fsdp2.py

Outside the forward `lm_head.weight` is a sharded DTensor, and the losses raise. Sampling also goes
through this forward, since FSDP would take a layer that runs first for the root. Gradients are
summed, not averaged, because `denominator` counts the tokens of all processes. Processes on a CPU
communicate with gloo.
"""

from __future__ import annotations

import argparse
import copy
import os
from typing import NamedTuple

import torch
from ppo import PROMPT, RESPONSE, VOCABULARY, draw_prompts, reward
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from fastppo import linear_ppo_loss, linear_token_logprobs

EPISODES = 64  # per process
MINIBATCHES = 4


class Episodes(NamedTuple):
    """Episodes of a batch: sequences are [B, PROMPT + RESPONSE], the other fields [B, RESPONSE]."""

    sequences: Tensor
    old_logprobs: Tensor
    advantages: Tensor


class Policy(nn.Module):
    """A causal LM with one forward for next-token logits, logprobs and the loss."""

    def __init__(self, causal_lm: LlamaForCausalLM) -> None:
        super().__init__()
        self.causal_lm = causal_lm

    def forward(
        self,
        sequences: Tensor,
        old_logprobs: Tensor | None = None,
        advantages: Tensor | None = None,
        denominator: float = 1.0,
    ) -> Tensor:
        """Return [B, V] logits of an unfinished sequence, [B, RESPONSE] logprobs of a finished one,
        or, given old logprobs and advantages, the scalar loss."""
        states = self.causal_lm.model(sequences, use_cache=False).last_hidden_state
        weight = self.causal_lm.lm_head.weight  # a plain tensor [V, H] inside the forward
        if sequences.shape[1] < PROMPT + RESPONSE:
            return states[:, -1] @ weight.T
        predicting = states[:, PROMPT - 1 : -1]
        responses = sequences[:, PROMPT:]
        if old_logprobs is None or advantages is None:
            return linear_token_logprobs(predicting, weight, responses)
        out = linear_ppo_loss(
            predicting, weight, responses, old_logprobs, advantages, denominator=denominator
        )
        return out.loss


def shard(policy: Policy) -> None:
    """Shard each layer; norm, embedding and lm-head belong to the root."""
    for layer in policy.causal_lm.model.layers:
        fully_shard(layer)
    fully_shard(policy)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo supports only sums


@torch.no_grad()
def roll_out(policy: Policy, device: torch.device) -> tuple[float, Episodes]:
    """Return the mean reward over all processes, and the episodes of this process."""
    prompts = draw_prompts(EPISODES, device)
    sequences = prompts
    for _ in range(RESPONSE):
        drawn = torch.multinomial(policy(sequences).softmax(-1), 1)
        sequences = torch.cat([sequences, drawn], dim=1)
    scores = reward(prompts, sequences[:, PROMPT:])
    moments = torch.stack([scores.sum(), (scores**2).sum()])
    distributed.all_reduce(moments)  # one baseline for all processes
    mean, square = moments / (EPISODES * distributed.get_world_size())
    advantages = (scores - mean) / ((square - mean**2).clamp(min=0).sqrt() + 1e-4)
    logprobs = policy(sequences)
    return mean.item(), Episodes(sequences, logprobs, advantages.unsqueeze(1).expand_as(logprobs))


def loss_of(policy: Policy, batch: Episodes) -> Tensor:
    """Return this process's part of the loss. The parts sum to the mean over all tokens."""
    return policy(
        batch.sequences,
        old_logprobs=batch.old_logprobs,
        advantages=batch.advantages,
        denominator=float(batch.advantages.numel() * distributed.get_world_size()),
    )


def show(policy: Policy, alone: Policy, batch: Episodes) -> None:
    """Print the shards' size, the gradient against one process, and the error outside."""
    loss_of(policy, batch).backward()  # reshards the root
    held = sum(p.to_local().numel() for p in policy.parameters())
    whole = sum(p.numel() for p in policy.parameters())
    norm = nn.utils.get_total_norm([p.grad for p in policy.parameters()]).full_tensor()
    policy.zero_grad()
    processes = range(distributed.get_world_size())
    everyones = [[torch.empty_like(x) for _ in processes] for x in batch]
    for parts, own in zip(everyones, batch, strict=True):
        distributed.all_gather(parts, own)
    for rank in processes:  # one process after another
        loss_of(alone, Episodes._make(parts[rank] for parts in everyones)).backward()
    expected = nn.utils.get_total_norm([p.grad for p in alone.parameters()])
    print_once(f"each of {len(processes)} processes holds {held} of {whole} weights")
    print_once(f"norm of the gradient {norm:.6f}, of one process with all rows {expected:.6f}")
    weight = policy.causal_lm.lm_head.weight
    try:
        linear_token_logprobs(torch.zeros(1, weight.shape[1]), weight, torch.zeros(1).long())
    except TypeError as error:
        print_once(f"outside the forward: {error}")


def print_once(line: str) -> None:
    """Print on the first process."""
    if distributed.get_rank() == 0:
        print(line, flush=True)


def train(iterations: int, seed: int = 0) -> None:
    """Run PPO without a value function."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(seed)  # the same initial weights in every process
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        bos_token_id=None,
        eos_token_id=None,
    )
    policy = Policy(LlamaForCausalLM(config)).to(device)
    alone: Policy | None = copy.deepcopy(policy)
    shard(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-3, weight_decay=0.0)
    torch.manual_seed(seed + distributed.get_rank())  # but different episodes

    for iteration in range(iterations):
        mean, batch = roll_out(policy, device)
        for rows in torch.randperm(EPISODES, device=device).chunk(MINIBATCHES):
            minibatch = Episodes._make(x[rows].contiguous() for x in batch)
            if alone is not None:
                show(policy, alone, minibatch)
                alone = None
            loss_of(policy, minibatch).backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if iteration % 10 == 0 or iteration == iterations - 1:
            print_once(f"iteration {iteration:3d}   reward {mean:.3f}")
    distributed.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    train(**vars(parser.parse_args()))
