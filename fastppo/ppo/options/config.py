"""Options of a PPO run.

Each option is a key of the YAML file and a flag of `fastppo train`. The files of this folder hold
the sections; `PPOConfig` combines them and checks combinations. Importing this takes no torch, so
wrong options are refused at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastppo.functional import scalars
from fastppo.functional.scalars import CLIPPED_SURROGATES
from fastppo.ppo.options.data import (
    CurriculumOptions,
    EvaluationOptions,
    PretrainingOptions,
    PromptOptions,
)
from fastppo.ppo.options.models import PolicyOptions, ReferenceOptions, ValueOptions
from fastppo.ppo.options.rewards import FailureOptions, RewardOptions, TurnOptions
from fastppo.ppo.options.rollout import RolloutOptions, check_stop_strings
from fastppo.ppo.options.run import RunOptions, WatchOptions
from fastppo.ppo.options.update import (
    AdvantageOptions,
    KLOptions,
    OptimizerOptions,
    Schedule,
    UpdateOptions,
)
from fastppo.run.options import (
    RanksOptions,
    SharingOptions,
    WeightOptions,
    check_bounds,
    inner_type,
)
from fastppo.run.watch import parse_threshold

if TYPE_CHECKING:
    from fastppo.data.microbatches import Limits

BY_RATIO = "_by_ratio"
"""Suffix of the ratio-weighted KL estimators."""

FUNCTIONS = ("rollout", "objective", "advantage", "optimizer")
"""Options that name a built-in or a user-defined function."""

CRITIC_FREE = ("reinforce", "rloo", "group")
"""Advantages without a value function."""

CRITIC_RATE = 10.0
"""Learning rate of a separate critic relative to the policy's, as in verl; OpenRLHF has 9."""


@dataclass(kw_only=True, frozen=True)
class PPOConfig(
    PolicyOptions,
    WeightOptions,
    ReferenceOptions,
    ValueOptions,
    PromptOptions,
    CurriculumOptions,
    RewardOptions,
    RolloutOptions,
    TurnOptions,
    FailureOptions,
    UpdateOptions,
    KLOptions,
    AdvantageOptions,
    PretrainingOptions,
    OptimizerOptions,
    EvaluationOptions,
    WatchOptions,
    RunOptions,
    SharingOptions,
    RanksOptions,
):
    """Options of a PPO run. Lengths are in tokens, KL and entropy in nats, sizes in sequences."""

    def check(self) -> None:
        check_names(self)
        check_stop_strings(self.stop_strings)
        scalars.check_dual_clip(self.dual_clip)
        check_schedules(self)
        self.check_sharing()
        for option, thresholds in (("warn_if", self.warn_if), ("stop_if", self.stop_if)):
            for text in thresholds:
                parse_threshold(text, option)
        # Both raise for a wrong key or value.
        _ = self.engine_keywords
        _ = self.critic
        if self.whiten_advantages is None:
            object.__setattr__(self, "whiten_advantages", self.advantage != "group")
        for is_there, sentence in contradictions(self):
            if is_there:
                raise ValueError(sentence)

    @property
    def scheduled(self) -> set[str]:
        """Scheduled options."""
        return {Schedule.parse(text).name for text in self.schedules}

    def is_used(self, coefficient: str) -> bool:
        """Return whether a coefficient is above 0 at any iteration."""
        return self.value_of(coefficient) > 0 or coefficient in self.scheduled

    def is_set(self, name: str) -> bool:
        """Return whether an option differs from its default, or has a schedule."""
        return super().is_set(name) or name in self.scheduled

    def is_on(self, name: str) -> bool:
        """Return whether an option is not empty, 0, false or none, or has a schedule."""
        return super().is_on(name) or name in self.scheduled

    def value_of(self, coefficient: str) -> Any:
        """Return the value of an option, or the default that depends on other options."""
        if coefficient == "step_kl":
            return self.update_target
        if coefficient == "vf_coef" and self.vf_coef is None:
            is_fitted = self.fits_value_head and self.value_model != "critic"
            return 0.0 if is_fitted and "vf_coef" not in self.scheduled else 0.5
        return getattr(self, coefficient)

    @property
    def update_target(self) -> float:
        """Target of `learning_rate=auto`: `step_kl`, or its default for the size of the batch.

        The more responses, the less noise in a step.
        """
        if self.step_kl is not None:
            return self.step_kl
        return round(min(0.04, 0.02 * math.sqrt(self.rollout_batch_size / 64)), 3)

    @property
    def entropy_target(self) -> float | None:
        """Target of the entropy, nats per token, which `entropy_coef` is adapted to."""
        schedules = map(Schedule.parse, self.schedules)
        return next((each.final for each in schedules if each.shape == "target"), None)

    @property
    def user_functions(self) -> list[str]:
        """Options that name a user-defined function."""
        return [name for name in FUNCTIONS if ":" in getattr(self, name)]

    @property
    def wants_reference(self) -> bool:
        """Whether a KL to the reference is used."""
        return self.is_used("kl_coef") or self.is_used("kl_loss_coef")

    @property
    def distills(self) -> bool:
        """Whether the KL to a teacher is used, with which a run needs no reward."""
        return self.reference_model is not None and self.wants_reference

    @property
    def bootstrap_truncated(self) -> bool:
        """Whether a truncated response continues by the value of its last state."""
        return self.truncated == "bootstrap"

    @property
    def value_rate(self) -> float:
        """Peak learning rate of the value function's trained parameters, like `policy_rate`."""
        if self.value_learning_rate is not None:
            return self.value_learning_rate
        return self.policy_rate * (CRITIC_RATE if self.value_model == "critic" else 1)

    @property
    def is_adaptive(self) -> bool:
        """Whether the learning rate is adapted."""
        return self.learning_rate == "auto"

    @property
    def policy_rate(self) -> float:
        """Peak learning rate of the policy; 1, the multiple of the adapted rate, with `auto`."""
        return 1.0 if self.learning_rate == "auto" else self.learning_rate

    @property
    def initial_critic(self) -> str | None:
        """Model that `value_model=critic` starts from; None for the policy, or without a critic."""
        return self.critic_model if self.value_model == "critic" else None

    @property
    def fits_value_head(self) -> bool:
        """Whether the value head is fitted in closed form."""
        if self.advantage in CRITIC_FREE:
            return False
        if self.value_head == "auto":
            return self.value_model != "critic"
        return self.value_head == "closed_form"

    @property
    def trains_trunk_on_values(self) -> bool:
        """Whether the value loss trains a trunk: a critic's, or the policy's."""
        if self.advantage in CRITIC_FREE or self.value_model == "detached":
            return False
        return self.value_model == "critic" or self.is_used("vf_coef")

    @property
    def softmax(self) -> dict[str, Any]:
        """Keywords of the losses for the softmax."""
        return {"temperature": self.temperature, "backend": self.backend}

    def limits(self, packed: bool = False) -> Limits:
        """Return the size limits of a microbatch."""
        from fastppo.data.microbatches import Limits

        return Limits(self.microbatch_size, self.microbatch_tokens, packed)

    @property
    def clip_range(self) -> tuple[float, float]:
        """(ε_low, ε_high)."""
        high = self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high
        return self.clip_ratio, high

    @property
    def prompts_per_iteration(self) -> int:
        """Distinct prompts of a rollout batch."""
        return self.rollout_batch_size // self.samples_per_prompt

    @property
    def critic_only_epochs(self) -> int:
        """Epochs over each batch that train only the critic."""
        if self.value_model != "critic" or self.critic.epochs is None:
            return 0
        return self.critic.epochs - self.ppo_epochs

    @property
    def steps_per_iteration(self) -> int:
        """Optimizer steps of an iteration without an early stop."""
        return self.ppo_epochs * self.minibatches

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.iterations * self.steps_per_iteration


# -------------------------------------------------------------------- combinations of options


def contradictions(config: PPOConfig) -> list[tuple[object, str]]:
    """Return (whether the config has it, the sentence about it) of each contradiction.

    An option that is merely without an effect is no contradiction: see `unused`.
    """
    advantage = config.advantage
    objective = config.objective
    is_auto = config.learning_rate == "auto"
    is_penalty = objective == "penalty"
    is_critic_free = advantage in CRITIC_FREE
    is_group = advantage in ("rloo", "group")
    kl_in_loss = config.is_used("kl_loss_coef")
    full_kl_in_loss = kl_in_loss and config.kl_loss_estimator == "full"
    warms_up = config.value_warmup_iterations > 0
    best = (config.checkpoint_best or "reward").removeprefix("min:")
    weights = [0, 1] if config.reward_ensemble else [0]
    return [
        (
            config.rollout_batch_size % config.minibatches
            or config.rollout_batch_size % config.samples_per_prompt,
            "rollout_batch_size counts responses and must be a multiple of minibatches and of "
            f"samples_per_prompt, got {config.rollout_batch_size}, {config.minibatches} and "
            f"{config.samples_per_prompt}",
        ),
        (
            config.rewards
            and config.reward_weights is not None
            and len(config.reward_weights) - len(config.rewards) not in weights,
            f"reward_weights must be as many as rewards, {len(config.rewards)}, or one more with "
            f"reward_ensemble, got {len(config.reward_weights or ())}",
        ),
        (
            len(config.reward_ensemble) == 1,
            "reward_ensemble must be at least two reward models; a single one goes into rewards",
        ),
        (
            config.quantization != "none"
            and (
                config.lora_rank == 0
                or config.value_model == "critic"
                or config.rollout in ("vllm", "server")
            ),
            f"quantization={config.quantization} freezes the model's weights, so it needs "
            "lora_rank > 0, value_model=shared or detached, and rollout=decoder or generate",
        ),
        (
            config.precision == "fp16" and (config.param_dtype != "float32" or full_kl_in_loss),
            "precision=fp16 scales gradients of fp32 weights before they are computed, so it "
            "needs param_dtype=float32 and another kl_loss_estimator than full",
        ),
        (
            config.critic_only_epochs < 0,
            "critic_options: epochs includes the epochs of the policy: expected at least "
            f"ppo_epochs, {config.ppo_epochs}, got {config.critic.epochs}",
        ),
        (
            config.critic_only_epochs > 0 and config.fits_value_head,
            f"critic_options: epochs={config.critic.epochs} trains a critic with its head by "
            "gradient: use value_head=gradient, or leave epochs out with value_head=closed_form",
        ),
        (
            warms_up
            and (is_critic_free or (not config.fits_value_head and not config.is_used("vf_coef"))),
            "value_warmup_iterations trains only the value function: it needs an advantage with "
            "one, and vf_coef > 0",
        ),
        (
            warms_up
            and is_auto
            and config.value_learning_rate is None
            and not config.fits_value_head,
            "value_warmup_iterations needs value_learning_rate with learning_rate=auto, which is "
            "adapted while the policy trains",
        ),
        (
            config.fits_value_head and config.value_clip is not None,
            "value_clip is for a head that the value loss trains, not for one in closed form: use "
            "value_head=gradient",
        ),
        (
            is_critic_free and config.value_model != "shared",
            f"value_model must be shared with advantage={advantage}, which has no value function",
        ),
        (
            is_group and config.samples_per_prompt < 2,
            f"samples_per_prompt must be at least 2 with advantage={advantage}, which compares "
            "responses to one prompt",
        ),
        (
            advantage == "group" and config.whiten_advantages,
            "whiten_advantages must be false with advantage=group, which normalizes the samples "
            "of each prompt",
        ),
        (
            config.dynamic_sampling and not (is_group or "advantage" in config.user_functions),
            "dynamic_sampling is for advantages that compare responses to one prompt: rloo, "
            f"group, or a function, got advantage={advantage}",
        ),
        (
            config.bootstrap_truncated and advantage not in ("gae", "turn_gae"),
            f"truncated=bootstrap is for advantage=gae or turn_gae; {advantage} uses complete "
            "returns",
        ),
        (
            config.steps_per_iteration == 1
            and (is_penalty or is_auto or config.early_stop_kl is not None),
            "learning_rate=auto, objective=penalty and early_stop_kl measure the KL between the "
            "optimizer steps of an iteration, so ppo_epochs · minibatches must be > 1",
        ),
        (
            is_penalty and (kl_in_loss or is_auto),
            "objective=penalty adapts a KL in the loss, so kl_loss_coef must be 0 and "
            "learning_rate a number; use kl_coef for a KL to the reference",
        ),
        (
            objective not in CLIPPED_SURROGATES and config.dual_clip is not None,
            f"dual_clip must be none with objective={objective}, which has no clipped surrogate",
        ),
        (
            "objective" in config.user_functions and full_kl_in_loss,
            "kl_loss_estimator=full is fused with the built-in objectives: use another estimator "
            f"with objective={objective}",
        ),
        (
            config.kl_loss_estimator.endswith(BY_RATIO) and objective == "gspo",
            f"kl_loss_estimator={config.kl_loss_estimator} needs the ratios of tokens, and "
            "objective=gspo has ratios of responses",
        ),
        (
            config.kl_controller != "fixed" and "kl_coef" in config.scheduled,
            f"kl_coef has a schedule and kl_controller={config.kl_controller}: use one of them",
        ),
        (
            config.reference_refresh and config.reference_model is not None,
            "reference_refresh replaces reference_model by the policy, whose architecture may "
            "differ: use one of them",
        ),
        (
            config.reference_refresh == 1 and config.is_used("kl_coef"),
            "reference_refresh=1 makes the KL of a rollout to the reference 0, so kl_coef must be "
            "0; use kl_loss_coef for a KL in the loss",
        ),
        (
            config.importance.endswith("mask") and (config.importance_cap or math.inf) <= 1,
            f"importance={config.importance} keeps ratios from 1/importance_cap to "
            f"importance_cap, so importance_cap must be > 1, got {config.importance_cap}",
        ),
        (
            config.async_steps
            and (
                config.rollout in ("generate", "vllm")
                or config.is_set("solved_reward")
                or config.dynamic_sampling
            ),
            "async_steps=1 generates the next batch during the update, before the scores of this "
            "one, so it needs rollout=decoder or server, and neither solved_reward nor "
            "dynamic_sampling",
        ),
        (
            config.async_steps and config.environment_failure == "drop",
            "async_steps=1 trains on the prompts that it ran ahead, so environment_failure must be "
            "raise",
        ),
        (
            config.environment_failure == "drop" and config.is_set("solved_reward"),
            "environment_failure=drop leaves out episodes, whose prompts solved_reward would have "
            "to count: use one of them",
        ),
        (config.is_used("ptx_coef") and not config.ptx_data, "ptx_coef > 0 needs ptx_data"),
        (
            not best or (best.startswith("eval/") and not config.eval_prompts),
            "checkpoint_best must name a metric, such as `reward` or `min:kl`, or `eval/reward` "
            f"with eval_prompts, got {config.checkpoint_best!r}",
        ),
    ]


def check_names(config: PPOConfig) -> None:
    """Raise ValueError for an option that names neither a built-in nor a function."""
    for option in FUNCTIONS:
        _, built_in = inner_type(PPOConfig.types()[option])
        if option not in config.user_functions:
            choices = (*built_in, "file.py:name", "package.module:name")
            scalars.choice(option, getattr(config, option), choices)


def check_schedules(config: PPOConfig) -> None:
    """Raise ValueError for schedules without a start, or with an end out of bounds."""
    schedules = [Schedule.parse(text) for text in config.schedules]
    if len(config.scheduled) < len(schedules):
        raise ValueError(f"schedules has one name twice: {config.schedules}")
    for schedule in schedules:
        if config.value_of(schedule.name) is None:
            raise ValueError(f"schedules: {schedule.name} has no value to start from")
        check_bounds(PPOConfig, schedule.name, schedule.final)
        if schedule.name == "dual_clip":
            scalars.check_dual_clip(schedule.final)


def check_processes(config: PPOConfig, count: int) -> None:
    """Raise ValueError for options without support for several processes."""
    needs_one = {
        "async_steps=1": config.async_steps,
        "rollout=server": config.rollout == "server",
        "precision=fp16": config.precision == "fp16",
        f"quantization={config.quantization}": config.quantization != "none",
    }
    for option, is_set in needs_one.items():
        if is_set and count > 1:
            raise ValueError(f"{option} is for one process, got {count}")


IDENTITY = (
    "param_dtype",
    "quantization",
    "lora_rank",
    "lora_alpha",
    "lora_target_modules",
    "reference_refresh",
    "value_model",
    "critic_model",
    "critic_options",
    "value_head",
    "prompt_column",
    "split",
    "seed",
    "solved_reward",
    "reward_weights",
    "score_normalization",
    "reward_ensemble_by",
    "rollout_batch_size",
    "samples_per_prompt",
    "minibatches",
    "ppo_epochs",
    "max_new_tokens",
    "temperature",
    "top_k",
    "top_p",
    "async_steps",
    "stop_token_ids",
    "stop_strings",
    "max_turns",
    "objective",
    "advantage",
    "lam_alpha",
    "value_lam",
    "optimizer",
    "optimizer_options",
    "aggregation",
    "kl_estimator",
    "kl_loss_estimator",
)
"""Options that must be the same on resume. Models, data and rewards are compared by their content;
rates and coefficients may change."""
