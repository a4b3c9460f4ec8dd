"""What options of other trainers are called here: for whoever types the name that they know."""

from __future__ import annotations

TRL = {
    "adam_epsilon": "adam_eps",
    "batch_size": "rollout_batch_size",
    "bf16": "precision",
    "cliprange": "clip_ratio",
    "cliprange_value": "value_clip",
    "dataset_name": "prompts",
    "dataset_train_split": "split",
    "dtype": "param_dtype",
    "fp16": "precision",
    "gradient_accumulation_steps": "rollout_batch_size, with microbatch_size for the memory",
    "init_kl_coef": "kl_coef",
    "local_rollout_forward_batch_size": "generate_batch_size, with microbatch_size for the passes",
    "lora_r": "lora_rank",
    "lr": "learning_rate",
    "lr_scheduler_type": "lr_schedule",
    "max_steps": "iterations",
    "mini_batch_size": "minibatches, which says how many",
    "model_name_or_path": "model",
    "num_mini_batches": "minibatches",
    "num_ppo_epochs": "ppo_epochs",
    "num_total_batches": "iterations",
    "num_train_epochs": "iterations",
    "per_device_train_batch_size": "microbatch_size, of rollout_batch_size in all",
    "ref_model": "reference_model",
    "response_length": "max_new_tokens",
    "reward_model_path": "rewards",
    "save_steps": "checkpoint_interval",
    "sft_model_path": "model",
    "stop_token": "stop_token_ids; the model's EOS by default",
    "stop_token_id": "stop_token_ids",
    "torch_dtype": "param_dtype",
    "total_episodes": "iterations, times rollout_batch_size",
    "use_peft": "lora_rank",
}
"""Of TRL 1.12's PPOConfig, ModelConfig and ScriptArguments. Those of one name in both are left
out; docs/from-trl.md has all of them with their defaults."""
