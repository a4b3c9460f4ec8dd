"""What TRL's options are called here, for whoever types the name that they know.

docs/from-trl.md has the same names with their defaults.
"""

from __future__ import annotations

TRL: dict[str, tuple[str, ...]] = {
    # PPOConfig, and the arguments of its script
    "batch_size": ("rollout_batch_size",),
    "cliprange": ("clip_ratio",),
    "cliprange_value": ("value_clip",),
    "dataset_name": ("prompts", "data"),
    "dtype": ("param_dtype",),
    "local_rollout_forward_batch_size": ("generate_batch_size",),
    "lora_r": ("lora_rank",),
    "mini_batch_size": ("rollout_batch_size", "minibatches"),
    "model_name_or_path": ("model",),
    "num_mini_batches": ("minibatches",),
    "num_ppo_epochs": ("ppo_epochs",),
    "num_sample_generations": (),
    "num_total_batches": ("iterations",),
    "response_length": ("max_new_tokens",),
    "reward_model_path": ("rewards",),
    "sft_model_path": ("model",),
    "stop_token": ("stop_token_ids",),
    "stop_token_id": ("stop_token_ids",),
    "total_episodes": ("iterations", "rollout_batch_size"),
    "use_peft": ("lora_rank",),
    "whiten_rewards": (),
    # TrainingArguments of transformers
    "adam_epsilon": (),
    "bf16": ("precision",),
    "eval_steps": ("eval_interval",),
    "eval_strategy": ("eval_interval",),
    "fp16": ("precision",),
    "gradient_accumulation_steps": ("rollout_batch_size", "gradient_accumulation"),
    "logging_dir": (),
    "logging_steps": (),
    "logging_strategy": (),
    "lr_scheduler_type": ("lr_schedule",),
    "max_steps": ("iterations",),
    "num_train_epochs": ("iterations", "epochs"),
    "optim": ("optimizer",),
    "per_device_train_batch_size": ("microbatch_size", "batch_size"),
    "resume_from_checkpoint": ("resume",),
    "save_steps": ("checkpoint_interval",),
    "save_strategy": ("checkpoint_interval",),
    "save_total_limit": (),
    "warmup_ratio": ("warmup_steps", "warmup"),
    # GRPOConfig
    "beta": ("kl_loss_coef", "kl_coef"),
    "chat_template_kwargs": (),
    "delta": ("dual_clip",),
    "environment_factory": ("environment",),
    "epsilon": ("clip_ratio",),
    "epsilon_high": ("clip_ratio_high",),
    "generation_batch_size": ("rollout_batch_size",),
    "importance_sampling_level": ("objective",),
    "max_completion_length": ("max_new_tokens",),
    "loss_type": ("aggregation", "objective"),
    "mask_truncated_completions": (),
    "max_tool_calling_iterations": ("max_turns",),
    "num_generations": ("samples_per_prompt",),
    "num_iterations": ("ppo_epochs",),
    "reward_funcs": ("rewards",),
    "scale_rewards": ("advantage",),
    "steps_per_generation": ("minibatches",),
    "train_dataset": ("prompts", "data"),
    "use_bias_correction_kl": ("kl_loss_estimator",),
    "use_vllm": ("rollout",),
}
"""The options of PPO and of the stages before it that do the same; none where there is none.
Options that have one name in both are left out."""


def counterpart(name: str, known: set[str]) -> str | None:
    """What the option of TRL is called among those that are known; None of other names."""
    if name not in TRL:
        return None
    ours = [option for option in TRL[name] if option in known]
    if ours or not TRL[name]:
        return f"TRL's {name}: {', '.join(ours) or 'none here, docs/from-trl.md says why'}"
    return None
