"""Option names of TRL, verl and OpenRLHF, and ours for the same thing.

An unknown option is answered with our name. docs/from-trl.md, from-verl.md and from-openrlhf.md
compare the defaults. Names that are ours too are left out. TRL's options without a counterpart are
in `WITHOUT`, so that none is answered with an option that only looks like it.
"""

from __future__ import annotations

from collections.abc import Container

OTHER_NAMES: dict[str, tuple[str, ...]] = {
    # TRL: PPOConfig and the arguments of its script
    "batch_size": ("rollout_batch_size",),
    "cliprange": ("clip_ratio",),
    "cliprange_value": ("value_clip",),
    "dataset_name": ("prompts", "data"),
    "dtype": ("param_dtype",),
    "local_rollout_forward_batch_size": ("engine_options",),
    "lora_r": ("lora_rank",),
    "mini_batch_size": ("minibatches",),
    "model_name_or_path": ("model",),
    "num_mini_batches": ("minibatches",),
    "num_ppo_epochs": ("ppo_epochs",),
    "num_total_batches": ("iterations",),
    "response_length": ("max_new_tokens",),
    "reward_model_path": ("rewards",),
    "sft_model_path": ("model",),
    "stop_token": ("stop_token_ids",),
    "stop_token_id": ("stop_token_ids",),
    "total_episodes": ("iterations",),
    "use_peft": ("lora_rank",),
    # transformers: TrainingArguments
    "adam_beta1": ("optimizer_options",),
    "adam_beta2": ("optimizer_options",),
    "adam_epsilon": ("optimizer_options",),
    "bf16": ("precision",),
    "eval_steps": ("eval_interval",),
    "eval_strategy": ("eval_interval",),
    "fp16": ("precision",),
    "gradient_accumulation_steps": ("rollout_batch_size", "gradient_accumulation"),
    "lr_scheduler_type": ("lr_schedule",),
    "max_steps": ("iterations",),
    "num_train_epochs": ("iterations", "epochs"),
    "optim": ("optimizer",),
    "per_device_train_batch_size": ("microbatch_size", "batch_size"),
    "resume_from_checkpoint": ("resume",),
    "save_steps": ("checkpoint_interval",),
    "save_strategy": ("checkpoint_interval",),
    "warmup_ratio": ("warmup_steps", "warmup"),
    # TRL: GRPOConfig
    "beta": ("kl_loss_coef", "kl_coef"),
    "delta": ("dual_clip",),
    "environment_factory": ("environment",),
    "entropy_target": ("schedules",),
    "epsilon": ("clip_ratio",),
    "epsilon_high": ("clip_ratio_high",),
    "generation_batch_size": ("rollout_batch_size",),
    "importance_sampling_level": ("objective",),
    "loss_type": ("aggregation", "objective"),
    "max_completion_length": ("max_new_tokens",),
    "mask_truncated_completions": ("truncated",),
    "max_tool_calling_iterations": ("max_turns",),
    "num_generations": ("samples_per_prompt",),
    "num_iterations": ("ppo_epochs",),
    "reward_funcs": ("rewards",),
    "scale_rewards": ("advantage",),
    "steps_per_generation": ("minibatches",),
    "train_dataset": ("prompts", "data"),
    "model_init_kwargs": ("param_dtype", "attn_implementation"),
    "ref_model_sync_steps": ("reference_refresh",),
    "sync_ref_model": ("reference_refresh",),
    "use_adaptive_entropy": ("schedules",),
    "use_bias_correction_kl": ("kl_loss_estimator",),
    "use_vllm": ("rollout",),
    "vllm_gpu_memory_utilization": ("engine_options",),
    "vllm_importance_sampling_cap": ("importance_cap",),
    "vllm_importance_sampling_clip_max": ("importance_cap",),
    "vllm_importance_sampling_clip_min": ("importance",),
    "vllm_importance_sampling_correction": ("importance_cap",),
    "vllm_importance_sampling_mode": ("importance",),
    "vllm_max_model_length": ("engine_options",),
    "vllm_mode": ("rollout",),
    "vllm_model_impl": ("engine_options",),
    "vllm_server_base_url": ("engine_options",),
    "vllm_server_host": ("engine_options",),
    "vllm_server_port": ("engine_options",),
    "vllm_tensor_parallel_size": ("engine_options",),
    # verl, without the sections of its config
    "adv_estimator": ("advantage",),
    "clip_ratio_c": ("dual_clip",),
    "clip_ratio_low": ("clip_ratio",),
    "critic_warmup": ("value_warmup_iterations",),
    "enable_gradient_checkpointing": ("gradient_checkpointing",),
    "entropy_coeff": ("entropy_coef",),
    "kl_loss_type": ("kl_loss_estimator",),
    "kl_penalty": ("kl_estimator",),
    "log_prob_micro_batch_size_per_gpu": ("microbatch_size",),
    "loss_agg_mode": ("aggregation",),
    "loss_mode": ("objective",),
    "lr": ("learning_rate",),
    "lr_warmup_steps": ("warmup_steps",),
    "max_response_length": ("max_new_tokens",),
    "ppo_max_token_len_per_gpu": ("microbatch_tokens",),
    "ppo_micro_batch_size_per_gpu": ("microbatch_size",),
    "ppo_mini_batch_size": ("minibatches",),
    "prompt_key": ("prompt_column",),
    "resume_mode": ("resume",),
    "save_freq": ("checkpoint_interval",),
    "target_kl": ("kl_target", "early_stop_kl"),
    "test_freq": ("eval_interval",),
    "total_training_steps": ("iterations",),
    "train_batch_size": ("rollout_batch_size",),
    "train_files": ("prompts", "data"),
    "val_files": ("eval_prompts", "eval_data"),
    # OpenRLHF, without the sections of its flags
    "eps_clip": ("clip_ratio",),
    "freezing_steps": ("value_warmup_iterations",),
    "init_coef": ("kl_coef",),
    "input_key": ("prompt_column",),
    "lambd": ("lam",),
    "max_epochs": ("ppo_epochs", "epochs"),
    "max_norm": ("max_grad_norm",),
    "max_tokens_per_gpu": ("microbatch_tokens",),
    "micro_batch_size": ("microbatch_size",),
    "n_samples_per_prompt": ("samples_per_prompt",),
    "prompt_dataset": ("prompts", "data"),
}


WITHOUT = {
    # TRL: PPOConfig
    "dataset_num_proc",
    "ds3_gather_for_generation",
    "local_batch_size",
    "local_mini_batch_size",
    "model_adapter_name",
    "num_sample_generations",
    "ref_adapter_name",
    "whiten_rewards",
    "world_size",
    # TRL: GRPOConfig
    "cache_implementation",
    "cast_lm_head_to_fp32",
    "disable_dropout",
    "entropy_coef_delta",
    "entropy_coef_max",
    "entropy_coef_min",
    "generation_kwargs",
    "log_completions",
    "log_completions_hub_repo",
    "log_multimodal",
    "log_unique_prompts",
    "min_p",
    "multi_objective_aggregation",
    "num_completions_to_print",
    "num_generations_eval",
    "off_policy_mask_threshold",
    "pad_to_multiple_of",
    "ref_model_mixup_alpha",
    "repetition_penalty",
    "router_aux_loss_coef",
    "sapo_temperature_neg",
    "sapo_temperature_pos",
    "shuffle_dataset",
    "top_entropy_quantile",
    "transformers_continuous_batching_config",
    "trust_remote_code",
    "use_transformers_continuous_batching",
    "use_transformers_paged",
    "vespo_k_neg",
    "vespo_k_pos",
    "vespo_lambda_neg",
    "vespo_lambda_pos",
    "vllm_enable_sleep_mode",
    "vllm_group_port",
    "vllm_server_timeout",
    "vllm_structured_outputs_regex",
    # transformers: TrainingArguments
    "local_rank",
    "optim_target_modules",
}
"""Options without a counterpart; docs/from-trl.md has the reasons."""


def other_projects_option(name: str, known: Container[str]) -> list[str] | None:
    """Return our names of another project's option, or None for an unknown name.

    `other_projects_option("cliprange", …)` is ["clip_ratio"]. The list is empty for an option
    without a counterpart. Sections in front of a dot (`actor.optim.lr`) are ignored.

    Args:
        known: the names to choose from.
    """
    name = name.rpartition(".")[2]
    ours = [option for option in OTHER_NAMES.get(name, ()) if option in known]
    return ours if ours or name in WITHOUT else None
