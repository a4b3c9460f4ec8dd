"""Options of earlier versions, and what replaces them."""

FORMER_NAMES: dict[str, str] = {
    "importance_floor": "importance",
    "importance_mode": "importance",
    "kl_horizon": "kl_target",
    "policy_kl_target": "objective",
    "ptx_block_size": "ptx_batch_size",
    "adam_beta2": "optimizer_options={betas: [0.9, 0.95]}",
}
"""An unknown option is answered with its successor, if the command has it."""
