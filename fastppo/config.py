"""The options of a PPO run: each is a key of the YAML file and a flag of the command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fastppo import validation
from fastppo.options import Options, option


@dataclass(kw_only=True, slots=True)
class PPOConfig(Options):
    """Options of a PPO run. Lengths are in tokens, KL and entropy in nats, sizes in sequences."""

    # Models
    model: str = option(
        "", "Required. The SFT model: directory or hub name; policy and reference start there"
    )
    param_dtype: Literal["float32", "bfloat16"] = option(
        "float32",
        "Dtype of the weights; float32 keeps small updates that bfloat16 would round away",
    )
    precision: Literal["auto", "bf16", "fp32"] = option(
        "auto", "Compute dtype: bf16 (autocast) or fp32; auto is bf16 on a GPU, fp32 on a CPU"
    )
    attn_implementation: str = option(
        "auto", "auto (flash-attn if installed, else sdpa), sdpa, eager or flash_attention_2"
    )
    gradient_checkpointing: bool = option(False, "Recompute activations in backward: less memory")
    lora_rank: int = option(0, "Rank of LoRA adapters; 0 trains all weights. Needs peft", minimum=0)
    lora_alpha: float = option(32.0, "LoRA scale: the update is alpha/rank · BA", above=0)
    lora_target_modules: list[str] | None = option(
        None, "Modules that get adapters; none given means all linear layers"
    )

    # Data
    prompts: str = option(
        "", "Required. Prompts: .jsonl, .parquet, a save_to_disk directory or a hub name"
    )
    prompt_column: str = option("prompt", "Column of the prompt: a string or chat messages")
    split: str = option("train", "Split of a datasets directory or hub dataset")

    # Rewards
    rewards: list[str] = option(
        [], "Required. file.py:function, module:function, or a sequence-classification model"
    )
    reward_weights: list[float] | None = option(None, "One weight per reward; none given means 1")
    monitor_rewards: list[str] = option([], "Rewards that are logged and not trained on")
    reward_batch_size: int = option(
        32, "Texts per forward pass of a reward model, sequences", minimum=1
    )
    reward_max_length: int | None = option(
        None, "Longest text of a reward model, tokens; none given means its context", minimum=1
    )
    missing_eos_penalty: float | None = option(
        None,
        "Subtracted from the score of a response cut off at max_new_tokens, reward units",
        minimum=0,
    )
    score_clip: float | None = option(None, "Clamp scores to ±this, reward units", above=0)

    # Rollout
    rollout_batch_size: int = option(
        64, "Prompts, and so responses, per iteration, sequences", minimum=1
    )
    generate_batch_size: int | None = option(
        None, "Sequences generated at once; none given means the whole rollout batch", minimum=1
    )
    max_new_tokens: int = option(128, "Longest response, tokens", minimum=1)
    temperature: float = option(1.0, "Sampling temperature, the loss's too", above=0)
    top_k: int = option(
        0, "Sample from the k likeliest tokens, tokens; 0 is all of them", minimum=0
    )
    top_p: float = option(
        1.0, "Sample from the smallest set of this probability; 1 is all", minimum=0, maximum=1
    )
    stop_token_ids: list[int] | None = option(
        None, "Tokens that end a response; none given means the model's EOS tokens"
    )

    # PPO
    iterations: int = option(100, "PPO iterations: rollouts followed by updates", minimum=1)
    ppo_epochs: int = option(4, "Passes over each rollout batch", minimum=1)
    minibatches: int = option(4, "Optimiser steps per pass", minimum=1)
    microbatch_size: int = option(16, "Sequences per forward and backward pass", minimum=1)
    clip_ratio: float = option(0.2, "ε: the ratio's gain is cut off below 1 − ε and above 1 + ε")
    clip_ratio_high: float | None = option(None, "ε above 1; none given means clip_ratio")
    dual_clip: float | None = option(None, "c > 1: bounds the loss at c·|A| where A < 0")
    entropy_coef: float = option(0.0, "Weight of the entropy bonus in the loss", minimum=0)
    aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "token-sum"] = (
        option("token-mean", "How token losses add up to the loss")
    )
    kl_coef: float = option(
        0.05, "β: weight of the KL to the reference in the reward, per nat", minimum=0
    )
    kl_estimator: Literal["k1", "k2", "k3"] = option("k1", "Estimator of the KL in the reward")
    kl_controller: Literal["fixed", "adaptive", "penalty"] = option(
        "fixed", "How β moves: fixed, adaptive (Ziegler 2019), penalty (doubling, Schulman 2017)"
    )
    kl_target: float = option(6.0, "Target of a moving β, nats per sequence", above=0)
    kl_horizon: float = option(10_000.0, "Horizon of the adaptive β, sequences", above=0)
    kl_loss_coef: float = option(
        0.0, "Weight of a KL to the reference in the loss, per nat", minimum=0
    )
    kl_loss_estimator: Literal["k1", "k2", "k3", "full"] = option(
        "k3", "Estimator of the KL in the loss; full is exact and runs the reference in the update"
    )
    gamma: float = option(1.0, "Discount per token", minimum=0, maximum=1)
    lam: float = option(0.95, "λ of GAE, per token", minimum=0, maximum=1)
    whiten_advantages: bool = option(True, "Normalise advantages to mean 0, variance 1")
    bootstrap_truncated: bool = option(
        False, "Behind a truncated response stands its last value, not 0"
    )
    vf_coef: float = option(0.5, "Weight of the value loss", minimum=0)
    value_clip: float | None = option(
        None, "Clip of the value's move per rollout, reward units", above=0
    )
    loss_path: Literal["auto", "linear", "logits"] = option(
        "auto", "linear never forms all logits; logits does; auto is linear"
    )
    backend: Literal["auto", "triton", "torch"] = option("auto", "Kernels of the losses")

    # Optimiser
    learning_rate: float = option(1e-5, "Peak learning rate of AdamW", above=0)
    value_learning_rate: float | None = option(
        None, "Peak learning rate of the value head; none given means learning_rate", minimum=0
    )
    lr_schedule: Literal["constant", "linear", "cosine"] = option(
        "constant", "Learning rate after warm-up: constant, or decay to 0 over the run"
    )
    warmup_steps: int = option(0, "Linear warm-up, optimiser steps", minimum=0)
    weight_decay: float = option(0.0, "AdamW's weight decay, on matrices", minimum=0)
    adam_beta1: float = option(0.9, "AdamW's β₁", minimum=0, maximum=1)
    adam_beta2: float = option(0.95, "AdamW's β₂", minimum=0, maximum=1)
    adam_eps: float = option(1e-8, "AdamW's ε", above=0)
    max_grad_norm: float = option(1.0, "Gradients are scaled down to this norm", above=0)

    # Run
    output_dir: str = option("runs/ppo", "Run directory")
    seed: int = option(0, "Seed of sampling, shuffling and initialisation", minimum=0)
    device: str = option("auto", "auto (a GPU if there is one), cpu, cuda, cuda:1, …")
    log_samples: int = option(8, "Samples written per logged iteration, sequences", minimum=0)
    log_interval: int = option(1, "Iterations between entries of samples.jsonl", minimum=1)
    checkpoint_interval: int = option(
        50, "Iterations between checkpoints; 0 writes the last only", minimum=0
    )
    checkpoint_limit: int = option(2, "Checkpoints kept", minimum=1)
    resume: bool = option(False, "Go on from the newest checkpoint of output_dir")
    wandb_project: str | None = option(None, "Also log to this Weights & Biases project")

    def check(self) -> None:
        validation.clip_range(self.clip_range)
        validation.dual_clip(self.dual_clip)
        if self.rollout_batch_size % self.minibatches:
            raise ValueError(
                f"rollout_batch_size must be a multiple of minibatches, "
                f"got {self.rollout_batch_size} and {self.minibatches}"
            )
        given = self.rewards and self.reward_weights is not None
        if given and len(self.reward_weights or ()) != len(self.rewards):
            raise ValueError(
                f"reward_weights must be one per reward: got {len(self.reward_weights or ())} "
                f"for {len(self.rewards)} rewards"
            )
        if self.kl_controller != "fixed" and self.kl_coef == 0:
            raise ValueError(
                f"kl_controller={self.kl_controller} multiplies kl_coef, so it must be > 0, got 0"
            )

    @property
    def clip_range(self) -> tuple[float, float]:
        """(ε_low, ε_high)."""
        high = self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high
        return self.clip_ratio, high

    @property
    def optimizer_steps(self) -> int:
        """Optimiser steps of the whole run."""
        return self.iterations * self.ppo_epochs * self.minibatches
