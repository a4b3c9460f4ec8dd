"""PPO for a language model in one file: FastPPO's functions, a transformer, and a loop.

    python examples/ppo.py

A small Llama with random weights learns to repeat the smallest token of a prompt eight times. It
takes a minute on a CPU; on a GPU the same code runs the Triton kernels. To train your own model,
load it, and replace `draw_prompts` and `reward`.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from fastppo import compute_advantages, linear_ppo_loss, linear_token_logprobs, value_loss

VOCABULARY = 16  # tokens 0 to 15
PROMPT = 4  # tokens
RESPONSE = 8  # tokens
EPISODES = 128
EPOCHS = 2
MINIBATCHES = 4
CLIP = 0.2
VF_COEF = 0.5
KL_COEF = 0.01
ENTROPY_COEF = 0.01
GAMMA = 1.0
LAM = 0.95


def draw_prompts(count: int, device: torch.device) -> Tensor:
    """Draw random prompts, [count, PROMPT] token ids."""
    return torch.randint(VOCABULARY, (count, PROMPT), device=device)


def reward(prompts: Tensor, responses: Tensor) -> Tensor:
    """Return the share of response tokens equal to the smallest prompt token, [B] fp32."""
    return (responses == prompts.amin(1, keepdim=True)).float().mean(1)


class ActorCritic(nn.Module):
    """One trunk with two heads: the lm-head, and a linear value head."""

    def __init__(self, causal_lm: LlamaForCausalLM) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self.value_head = nn.Linear(causal_lm.config.hidden_size, 1)

    def forward(self, sequences: Tensor) -> tuple[Tensor, Tensor]:
        """Return hidden states [B, RESPONSE, H] before each response token, and their values."""
        states = self.causal_lm.model(sequences, use_cache=False).last_hidden_state
        hidden = states[:, PROMPT - 1 : -1]
        return hidden, self.value_head(hidden).squeeze(-1)

    @property
    def lm_head(self) -> Tensor:
        """Weight of the lm-head, [V, H]."""
        return self.causal_lm.lm_head.weight


@torch.no_grad()
def generate(policy: ActorCritic, prompts: Tensor) -> Tensor:
    """Sample responses and return them after their prompts, [B, PROMPT + RESPONSE]."""
    return policy.causal_lm.generate(prompts, do_sample=True, top_k=0, max_new_tokens=RESPONSE)


def train(iterations: int, seed: int = 0) -> list[float]:
    """Run PPO and return the mean reward of each iteration."""
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
    policy = ActorCritic(LlamaForCausalLM(config)).to(device)
    reference = LlamaForCausalLM(config).to(device).requires_grad_(False)
    reference.load_state_dict(policy.causal_lm.state_dict())
    optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-3, weight_decay=0.0, fused=True)
    history = []

    for iteration in range(iterations):
        # Sample and score responses; compute logprobs and values.
        prompts = draw_prompts(EPISODES, device)
        sequences = generate(policy, prompts)
        responses = sequences[:, PROMPT:]
        scores = reward(prompts, responses)
        with torch.no_grad():
            hidden, values = policy(sequences)
            logprobs = linear_token_logprobs(hidden, policy.lm_head, responses)
            ref_hidden = reference.model(sequences, use_cache=False).last_hidden_state
            ref_logprobs = linear_token_logprobs(
                ref_hidden[:, PROMPT - 1 : -1], reference.lm_head.weight, responses
            )

        # Score at the last token minus the KL at each token; GAE; whitening.
        mask = torch.ones_like(responses, dtype=torch.bool)
        advantages, returns, kl = compute_advantages(
            scores,
            values,
            logprobs,
            ref_logprobs,
            mask,
            kl_coef=KL_COEF,
            gamma=GAMMA,
            lam=LAM,
        )

        # Epochs of minibatches: clipped loss, value loss, entropy bonus.
        for _ in range(EPOCHS):
            for rows in torch.randperm(EPISODES, device=device).chunk(MINIBATCHES):
                hidden, new_values = policy(sequences[rows])
                out = linear_ppo_loss(  # never holds all logits
                    hidden,
                    policy.lm_head,
                    responses[rows],
                    logprobs[rows],
                    advantages[rows],
                    clip_ratio=CLIP,
                    entropy_coef=ENTROPY_COEF,
                )
                loss = out.loss + VF_COEF * value_loss(new_values, returns[rows])
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
                optimizer.step()

        history.append(scores.mean().item())
        if iteration % 10 == 0 or iteration == iterations - 1:
            metrics = {name: value.item() for name, value in out.metrics.items()}
            print(
                f"iteration {iteration:3d}   reward {history[-1]:.3f}   "
                f"KL {kl.mean():5.2f} nats   entropy {metrics['entropy']:.2f}   "
                f"clipped {metrics['clip_fraction']:.1%}",
                flush=True,
            )
    return history


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    train(**vars(parser.parse_args()))
