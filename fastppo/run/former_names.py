"""Options of earlier versions, and what replaces them."""

FORMER_NAMES: dict[str, str] = {
    "allow_config_change": "resume=force",
    "bootstrap_truncated": "truncated=bootstrap",
    "critic_frozen": "critic_options={frozen: attention}",
    "eval_sampling": "eval_prompts",
    "generate_batch_size": "engine_options={batch_size: 32}",
    "importance_floor": "importance",
    "importance_mode": "importance",
    "kl_horizon": "kl_target",
    "policy_kl_target": "objective",
    "ptx_block_size": "ptx_batch_size",
    "rollout_urls": "engine_options={urls: [http://localhost:8000]}",
    "value_epochs": "critic_options={epochs: 2}",
    "vllm_gpu_memory_utilization": "engine_options={gpu_memory_utilization: 0.3}",
    "vllm_tensor_parallel_size": "engine_options={tensor_parallel_size: 2}",
    "adam_beta2": "optimizer_options={betas: [0.9, 0.95]}",
}
"""An unknown option is answered with its successor, if the command has it."""
