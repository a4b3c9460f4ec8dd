"""Options of earlier versions, each with what replaces it. A YAML file, a flag or a checkpoint may
still set one: its former default is ignored, any other value is an error with the sentence below.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Removed(NamedTuple):
    """An option, or one choice of an option (`rollout=continuous`), that was removed."""

    default: Any
    """What it was unless somebody set it; None also for a choice."""
    sentence: str
    """What to do instead."""
    stage_default: Any = None
    """What it was by default in SFT and the reward model, where that was something else."""


REMOVED = {
    "adam_beta1": Removed(0.9, "β₁ of AdamW is 0.9"),
    "adam_eps": Removed(1e-8, "ε of AdamW is 1e-8"),
    "environment_concurrency": Removed(
        1, "environments whose methods are coroutines all work at a time"
    ),
    "reward_ensemble_std_coef": Removed(1.0, "reward_ensemble_by=lcb is the mean − the deviation"),
    "value_branch_layers": Removed(2, "value_model=critic trains a value function of its own"),
    "value_model=branch": Removed(None, "value_model=critic trains a value function of its own"),
    "kl_loss_ratio_weighted": Removed(
        False, "kl_loss_estimator=k1_by_ratio or k3_by_ratio is k1 or k3 times the ratio"
    ),
    "max_response_tokens": Removed(
        None, "a response of several turns ends where the context does; cut long observations"
    ),
    "reward_batch_size": Removed(32, "a reward model reads 32 texts at a time"),
    "sapo_tau": Removed(
        [1.0, 1.05], "τ of objective=sapo is 1 where A > 0 and 1.05 elsewhere, as in its paper"
    ),
    "rollout=continuous": Removed(None, "rollout=decoder and rollout=vllm are both faster"),
    "advantage=monte_carlo": Removed(None, "advantage=gae with lam=1 is the same"),
    "advantage=one_step": Removed(None, "advantage=gae with lam=0 is the same"),
    "gae_by": Removed("token", "advantage=turn_gae is GAE whose steps are turns"),
    "reward_ensemble_weight": Removed(
        1.0, "the weight of the ensemble is the last entry of reward_weights"
    ),
    "success_window": Removed(8, "success is counted over the last 8 responses of a prompt"),
    "leave_out": Removed(
        "none", "with solved_reward, prompts whose last 8 responses all reached it are left out"
    ),
    "leave_out_for": Removed(None, "a prompt that is left out stays out"),
    "early_stop_check": Removed("epoch", "early_stop_kl is checked after each epoch"),
    "policy_kl_coef": Removed(1.0, "β of objective=penalty begins at 1 and adapts from there"),
    "max_skipped_steps": Removed(5, "a run stops after 5 steps in a row that are not finite"),
    "log_interval": Removed(1, "every iteration is logged", stage_default=10),
    "log_samples": Removed(8, "8 samples of each iteration are logged"),
    "checkpoint_failure": Removed("stop", "a checkpoint that cannot be written stops the run"),
    "checkpoint_async": Removed(False, "the run waits while a checkpoint is written"),
    "checkpoint_minutes": Removed(
        10.0, "checkpoint_interval counts iterations, and SIGUSR1 asks for a checkpoint at any time"
    ),
    "checkpoint_limit": Removed(2, "the newest 2 checkpoints are kept"),
    "reward_retries": Removed(2, "a reward that fails is called twice more; retry inside it"),
    "reward_concurrency": Removed(8, "a reward at a URL gets 8 requests at a time"),
    "reward_failure": Removed(
        "stop", "a reward that fails stops the run, its samples saved; catch errors inside it"
    ),
    "reward_max_length": Removed(
        None, "a reward model reads as many tokens as it was trained with, or as its context holds"
    ),
    "length_penalty": Removed(0.0, "subtract it in a reward function of your own"),
    "length_penalty_free": Removed(0, "subtract it in a reward function of your own"),
    "length_normalized_score": Removed(False, "divide by the length in a reward of your own"),
    "no_repeat_ngram_size": Removed(0, "penalise repetition in a reward function of your own"),
    "min_new_tokens": Removed(0, "penalise short responses in a reward function of your own"),
    "experience_batch_size": Removed(
        None, "microbatch_size also sets how many sequences are read without gradients"
    ),
    "loss_path": Removed("auto", "the loss always goes past the logits in chunks"),
    "reference_policy": Removed(
        "fixed", "reference_refresh=1 is the policy at the start of each iteration"
    ),
    "reference_offload": Removed(False, "LoRA needs no reference of its own"),
    "push_to_hub": Removed(False, "`hf upload OWNER/NAME RUN/policy` uploads the policy"),
    "hub_model_id": Removed(None, "`hf upload OWNER/NAME RUN/policy` uploads the policy"),
    "hub_private_repo": Removed(None, "`hf upload --private OWNER/NAME RUN/policy` does it"),
    "project": Removed("fastppo", "set WANDB_PROJECT in the environment"),
    "run_name": Removed(None, "the trackers call a run by the name of its output_dir"),
    "liger": Removed(False, "the trunk's layers run as transformers has them"),
    "compile": Removed(False, "the trunk's layers run as transformers has them"),
    "distributed_timeout": Removed(1800.0, "a process waits 1800 seconds for the others"),
    "reshard_after_forward": Removed(True, "layers are always freed after their forward pass"),
    "eval_rewards": Removed(
        [], "an evaluation scores rewards and monitor_rewards; name it in monitor_rewards"
    ),
    "eval_patience": Removed(
        None, "checkpoint_best=eval/reward keeps the best policy, and a callback may end the run"
    ),
    "normalize": Removed(
        True, "a reward model's mean score of the best training completions is always subtracted"
    ),
    "reference": Removed(
        None, "a reward model's mean score of the best training completions becomes 0"
    ),
    "reference_size": Removed(2048, "a reward model's mean is taken over 2048 texts at most"),
    "output": Removed(None, "`fastppo generate` prints its table; a run has samples.jsonl"),
    "group_std": Removed(True, "without the division advantage=group is rloo, up to n/(n − 1)"),
}


def is_unset(name: str, value: Any) -> bool:
    """Whether a removed option has the value that it had by default: nothing is lost then."""
    return name in REMOVED and value in (REMOVED[name].default, REMOVED[name].stage_default)


def removal(name: str) -> str | None:
    """The sentence on a removed option, or on a removed choice `option=value`; None of others."""
    return f"{name} was removed: {REMOVED[name].sentence}" if name in REMOVED else None
