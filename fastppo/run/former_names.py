"""Options of earlier versions, and what replaces them."""

FORMER_NAMES: dict[str, str] = {
    "allow_config_change": "resume=force",
    "bootstrap_truncated": "truncated=bootstrap",
    "critic_frozen": "critic_options={frozen: attention}",
    "generate_batch_size": "engine_options={batch_size: 32}",
    "importance_mode": "importance",
    "rollout_urls": "engine_options={urls: [http://localhost:8000]}",
    "value_epochs": "critic_options={epochs: 8}",
    "vllm_gpu_memory_utilization": "engine_options={gpu_memory_utilization: 0.3}",
    "vllm_tensor_parallel_size": "engine_options={tensor_parallel_size: 2}",
    "adam_beta2": "optimizer_options={betas: [0.9, 0.95]}",
}
"""An unknown option is answered with its successor, if the command has it."""

REMOVED: dict[str, tuple[str, str]] = {
    "eval_sampling": ("eval_prompts", "it was removed: evaluations sample as in training"),
    "importance_floor": (
        "importance",
        "it was removed: the lower bound follows from importance and importance_cap",
    ),
    "kl_horizon": ("kl_controller", "it is a constant now: 10,000 sequences"),
    "policy_kl_target": ("objective", "it is a constant now: 0.01 nats per token"),
    "ptx_block_size": ("ptx_data", "it is a constant now: 256 tokens"),
}
"""An option without a successor: the option that it belonged to, and the answer. A command that has
the former gives the answer."""
