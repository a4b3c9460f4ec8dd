"""FastPPO's loss under FSDP2: called inside the wrapped forward, where the lm-head is whole.

    torchrun --nproc_per_node 2 examples/fsdp2.py

Outside it `lm_head.weight` is a DTensor, of which each process holds its rows, and the losses
refuse it. Everything runs through the one forward that FSDP's hooks are on, sampling too: a layer
that ran by itself first would be taken for the root. Gradients are summed, not averaged, because
`denominator` counts the tokens of all processes. Two processes on a CPU talk by gloo.
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

EPISODES = 64  # of one process
MINIBATCHES = 4


class Episodes(NamedTuple):
    """Prompts with their responses: [B, PROMPT + RESPONSE], and [B, RESPONSE] each."""

    sequences: Tensor
    old_logprobs: Tensor
    advantages: Tensor


class Policy(nn.Module):
    """A causal LM with one forward: for the next token's logits, for logprobs, for the loss."""

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
        """[B, V] logits of an unfinished sequence; [B, RESPONSE] logprobs of a whole one; or, given
        old logprobs and advantages, the loss ()."""
        states = self.causal_lm.model(sequences, use_cache=False).last_hidden_state
        weight = self.causal_lm.lm_head.weight  # in here a plain tensor [V, H]
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
    """Layers are gathered one by one; norm, embedding and lm-head are the root's."""
    for layer in policy.causal_lm.model.layers:
        fully_shard(layer)
    fully_shard(policy)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no other


@torch.no_grad()
def roll_out(policy: Policy, device: torch.device) -> tuple[float, Episodes]:
    """(mean reward, this process's episodes)."""
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
    """This process's part of the loss: the mean over the tokens of all processes is their sum."""
    return policy(
        batch.sequences,
        old_logprobs=batch.old_logprobs,
        advantages=batch.advantages,
        denominator=float(batch.advantages.numel() * distributed.get_world_size()),
    )


def show(policy: Policy, alone: Policy, batch: Episodes) -> None:
    """What is sharded, that the gradient is the whole one, and what a loss says to a shard."""
    loss_of(policy, batch).backward()  # after which the root is sharded again
    held = sum(p.to_local().numel() for p in policy.parameters())
    whole = sum(p.numel() for p in policy.parameters())
    norm = nn.utils.get_total_norm([p.grad for p in policy.parameters()]).full_tensor()
    policy.zero_grad()
    processes = range(distributed.get_world_size())
    everyones = [[torch.empty_like(x) for _ in processes] for x in batch]
    for parts, own in zip(everyones, batch, strict=True):
        distributed.all_gather(parts, own)
    for rank in processes:  # the episodes of one process after those of another
        loss_of(alone, Episodes._make(parts[rank] for parts in everyones)).backward()
    wanted = nn.utils.get_total_norm([p.grad for p in alone.parameters()])
    speak(f"each of {len(processes)} processes holds {held} of {whole} weights")
    speak(f"norm of the gradient {norm:.6f}, of one process with all rows {wanted:.6f}")
    weight = policy.causal_lm.lm_head.weight
    try:
        linear_token_logprobs(torch.zeros(1, weight.shape[1]), weight, torch.zeros(1).long())
    except TypeError as error:
        speak(f"outside the forward: {error}")


def speak(line: str) -> None:
    """The first process speaks for all."""
    if distributed.get_rank() == 0:
        print(line, flush=True)


def train(iterations: int, seed: int = 0) -> None:
    """Runs PPO without a value function."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(seed)  # the same first weights in every process
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
    torch.manual_seed(seed + distributed.get_rank())  # and episodes of its own in each

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
            speak(f"iteration {iteration:3d}   reward {mean:.3f}")
    distributed.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    train(**vars(parser.parse_args()))
