"""GRPO for a language model in one file: groups of responses, no value function.

    python examples/grpo.py

The task of `ppo.py` with eight responses per prompt. The advantage of a response is its reward
normalized over its group (Shao et al. 2024). The KL to the reference is a term of the fused loss.
"""

from __future__ import annotations

import argparse

import torch
from ppo import PROMPT, RESPONSE, VOCABULARY, draw_prompts, reward
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from fastppo import linear_ppo_loss, linear_token_logprobs

PROMPTS = 16
GROUP = 8
MINIBATCHES = 2
CLIP = (0.2, 0.28)  # the upper clip is wider: Yu et al. 2025 (DAPO)
KL_COEF = 0.01


def train(iterations: int, seed: int = 0) -> list[float]:
    """Run GRPO and return the mean reward of each iteration."""
    torch.manual_seed(seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        bos_token_id=None,
        eos_token_id=None,
    )
    policy = LlamaForCausalLM(config).to(device)
    reference = LlamaForCausalLM(config).to(device).requires_grad_(False)
    reference.load_state_dict(policy.state_dict())
    optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-3, weight_decay=0.0, fused=True)
    history = []

    def hidden_states(model: LlamaForCausalLM, sequences: torch.Tensor) -> torch.Tensor:
        """Return the hidden states [B, RESPONSE, H] before each response token."""
        return model.model(sequences, use_cache=False).last_hidden_state[:, PROMPT - 1 : -1]

    for iteration in range(iterations):
        prompts = draw_prompts(PROMPTS, device).repeat_interleave(GROUP, dim=0)
        with torch.no_grad():
            sequences = policy.generate(prompts, do_sample=True, top_k=0, max_new_tokens=RESPONSE)
            responses = sequences[:, PROMPT:]
            logprobs, ref_logprobs = (
                linear_token_logprobs(
                    hidden_states(model, sequences), model.lm_head.weight, responses
                )
                for model in (policy, reference)
            )
        scores = reward(prompts, responses)
        groups = scores.view(PROMPTS, GROUP)
        normalized = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
        advantages = normalized.view(-1, 1).expand_as(responses)

        for rows in torch.randperm(len(sequences), device=device).chunk(MINIBATCHES):
            out = linear_ppo_loss(
                hidden_states(policy, sequences[rows]),
                policy.lm_head.weight,
                responses[rows],
                logprobs[rows],
                advantages[rows],
                clip_ratio=CLIP,
                ref_logprobs=ref_logprobs[rows],
                kl_coef=KL_COEF,
                kl_estimator="k3",
                aggregation="seq-mean-token-mean",
            )
            optimizer.zero_grad()
            out.loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()

        history.append(scores.mean().item())
        if iteration % 10 == 0 or iteration == iterations - 1:
            print(
                f"iteration {iteration:3d}   reward {history[-1]:.3f}   "
                f"KL {out.metrics['kl']:.3f} nats per token   "
                f"entropy {out.metrics['entropy']:.2f}   "
                f"groups with equal rewards {(groups.std(1) == 0).float().mean():.0%}",
                flush=True,
            )
    return history


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    train(**vars(parser.parse_args()))
