"""The algorithm of a run in one line, in the terms of the papers."""

from __future__ import annotations

from fastppo.ppo.options.config import CRITIC_FREE, PPOConfig

OBJECTIVES = {
    "clip": "PPO-clip",
    "penalty": "PPO with a KL penalty",
    "cispo": "CISPO",
    "sapo": "SAPO",
    "gspo": "GSPO",
    "dis": "DIS",
    "dppo_tv": "DPPO (TV)",
    "dppo_kl": "DPPO (KL)",
}
ADVANTAGES = {
    "sequence": "R − V(prompt)",
    "reinforce": "the reward to go without a value function",
    "rloo": "RLOO",
    "group": "group-normalized rewards (GRPO)",
}


TERMS = {
    "kl_coef": "KL in the reward",
    "kl_loss_coef": "KL in the loss",
    "entropy_coef": "entropy bonus",
    "ptx_coef": "pretraining text",
}


def algorithm_line(config: PPOConfig) -> str:
    """Return a sentence such as "PPO-clip, GAE(1, 0.95), closed-form value head, adamw at a rate
    that follows 0.02 nats per token"."""
    parts = [OBJECTIVES.get(config.objective, f"the objective {config.objective}")]
    parts.append(_advantage(config))
    if config.advantage not in CRITIC_FREE:
        parts.append(_value_function(config))
    for name, term in TERMS.items():
        if config.is_used(name):
            scheduled = name in config.scheduled
            parts.append(f"{term} ({'scheduled' if scheduled else f'{getattr(config, name):g}'})")
    parts.append(f"{config.optimizer} at {_rate(config)}")
    return ", ".join(parts)


def _advantage(config: PPOConfig) -> str:
    lam = f"{config.lam:g}" if config.lam_alpha is None else "1 − 1/(α·length)"
    if config.advantage == "gae":
        return f"GAE({config.gamma:g}, {lam})"
    if config.advantage == "turn_gae":
        return f"GAE over turns ({config.gamma:g}, {config.lam:g})"
    return ADVANTAGES.get(config.advantage, f"the advantages of {config.advantage}")


def _value_function(config: PPOConfig) -> str:
    if config.fits_value_head:
        if config.value_model == "critic":
            return "separate critic with a closed-form value head"
        if config.trains_trunk_on_values:
            return "closed-form value head, value loss on the trunk"
        return "closed-form value head"
    return "separate critic" if config.value_model == "critic" else "value head by gradient"


def _rate(config: PPOConfig) -> str:
    rate = f"a rate of {config.policy_rate:g}"
    if config.is_adaptive:
        rate = f"a rate that follows {config.update_target:g} nats per token"
    decay = "" if config.lr_schedule == "constant" else f", {config.lr_schedule} decay"
    return rate + decay
