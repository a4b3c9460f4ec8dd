"""Options of a PPO run.

Each option is a key of the YAML file and a flag of `fastppo train`. The files of this folder hold
the sections; `PPOConfig` combines them and checks combinations. Importing this takes no torch, so
wrong options are refused at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
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
from fastppo.ppo.options.rewards import RewardOptions, TurnOptions
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

ASYNC_NEEDS_ONE_TURN = "async_steps=1 generates single-turn responses, so environment must be none"

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
        if self.whiten_advantages is None:
            object.__setattr__(self, "whiten_advantages", self.advantage != "group")
        check_stop_strings(self.stop_strings)
        check_batches(self)
        check_models(self)
        check_rewards(self)
        check_objective(self)
        check_importance(self)
        _ = self.engine_keywords  # raises for a wrong key or value
        check_async(self)
        check_kl(self)
        check_advantages(self)
        check_learning_rate(self)
        check_pretraining(self)
        check_watching(self)
        check_schedules(self)

    @property
    def scheduled(self) -> set[str]:
        """Scheduled options."""
        return {Schedule.parse(text).name for text in self.schedules}

    def is_used(self, coefficient: str) -> bool:
        """Return whether a coefficient is above 0 at any iteration."""
        return getattr(self, coefficient) > 0 or coefficient in self.scheduled

    def is_set(self, name: str) -> bool:
        """Return whether an option differs from its default, or has a schedule."""
        (default,) = (member.default for member in fields(self) if member.name == name)
        return getattr(self, name) != default or name in self.scheduled

    def have_effect_only(self, *names: str, where: object, needs: str) -> None:
        """Raise ValueError for options that are set without an effect.

        Args:
            where: whether the options have an effect.
            needs: the condition in words.
        """
        for name in names:
            if not where and self.is_set(name):
                raise ValueError(f"{name} has an effect only with {needs}")

    def start_of(self, schedule: Schedule) -> Any:
        """Return the value that a schedule starts from, or None."""
        return self.update_target if schedule.name == "step_kl" else getattr(self, schedule.name)

    def at(self, iteration: int) -> PPOConfig:
        """Return the options of one iteration, with the schedules applied."""
        if not self.schedules:
            return self
        progress = min(1.0, iteration / max(1, self.iterations - 1))
        changed = {
            schedule.name: schedule.value(self.start_of(schedule), progress)
            for schedule in map(Schedule.parse, self.schedules)
        }
        return replace(self, **changed)  # type: ignore[arg-type]

    @property
    def update_target(self) -> float:
        """Target of `learning_rate=auto`: `step_kl`, or its default for the size of the batch.

        The more responses, the less noise in a step.
        """
        if self.step_kl is not None:
            return self.step_kl
        return round(min(0.05, 0.025 * math.sqrt(self.rollout_batch_size / 64)), 3)

    @property
    def entropy_target(self) -> float | None:
        """Target of the entropy, nats per token, which `entropy_coef` is adapted to."""
        schedules = map(Schedule.parse, self.schedules)
        return next((each.final for each in schedules if each.shape == "target"), None)

    def scheduled_values(self) -> dict[str, float]:
        """Return the scheduled options of `at(iteration)` as metrics, `schedule/NAME`."""
        names = [Schedule.parse(text).name for text in self.schedules]
        return {f"schedule/{name}": float(getattr(self, name)) for name in names}

    @property
    def own_functions(self) -> list[str]:
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
    def fits_value_head(self) -> bool:
        """Whether the value head is fitted in closed form."""
        if self.advantage in CRITIC_FREE:
            return False
        if self.value_head == "auto":
            return self.value_model != "critic"
        return self.value_head == "closed_form"

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
        epochs = self.critic.epochs
        return 0 if epochs is None else epochs - self.ppo_epochs

    def stops_at(self, policy_kl: float) -> bool:
        """Return whether the KL to the rollout policy, nats per token, ends the update."""
        return self.early_stop_kl is not None and policy_kl > self.early_stop_kl

    @property
    def steps_per_iteration(self) -> int:
        """Optimizer steps of an iteration without an early stop."""
        return self.ppo_epochs * self.minibatches

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.iterations * self.steps_per_iteration


# Combinations of options. An option without an effect is an error.


def check_names(config: PPOConfig) -> None:
    """Raise ValueError for an option that names neither a built-in nor a function."""
    for option in FUNCTIONS:
        _, built_in = inner_type(PPOConfig.types()[option])
        if option not in config.own_functions:
            choices = (*built_in, "file.py:function", "package.module:function")
            scalars.choice(option, getattr(config, option), choices)


def check_batches(config: PPOConfig) -> None:
    """Raise ValueError if a rollout batch cannot be divided."""
    if config.rollout_batch_size % config.minibatches:
        raise ValueError(
            f"rollout_batch_size must be a multiple of minibatches, got "
            f"{config.rollout_batch_size} and {config.minibatches}"
        )
    if config.rollout_batch_size % config.samples_per_prompt:
        raise ValueError(
            f"rollout_batch_size counts responses and must be a multiple of samples_per_prompt, "
            f"got {config.rollout_batch_size} and {config.samples_per_prompt}"
        )


def check_models(config: PPOConfig) -> None:
    """Raise ValueError for conflicting options of policy, reference and value function."""
    if config.quantization != "none":
        if config.lora_rank == 0 or config.value_model == "critic":
            raise ValueError(
                f"quantization={config.quantization} freezes the model's weights, so lora_rank "
                "must be > 0 and value_model shared or detached"
            )
        if config.rollout in ("vllm", "server"):
            raise ValueError(
                f"quantization={config.quantization}: rollout={config.rollout} needs unquantized "
                "weights; use rollout=decoder"
            )
    if config.precision == "fp16":
        if config.param_dtype != "float32":
            raise ValueError(
                "precision=fp16 scales gradients of fp32 weights, so param_dtype must be float32, "
                f"got {config.param_dtype}"
            )
        if config.is_used("kl_loss_coef") and config.kl_loss_estimator == "full":
            raise ValueError(
                "precision=fp16 needs the loss scale before the gradient is computed, which "
                "kl_loss_estimator=full does not support"
            )
    config.have_effect_only(
        "critic_model",
        "critic_options",
        where=config.value_model == "critic",
        needs="value_model=critic",
    )
    if config.critic_only_epochs < 0:
        raise ValueError(
            f"critic_options: epochs includes the epochs of the policy: expected at least "
            f"ppo_epochs, {config.ppo_epochs}, got {config.critic.epochs}"
        )
    if config.value_warmup_iterations > 0 and not config.is_used("vf_coef"):
        raise ValueError(
            "value_warmup_iterations trains the value function only, so vf_coef must be > 0"
        )
    if config.fits_value_head and config.value_clip is not None:
        raise ValueError(
            "value_clip clips the value loss, which a head in closed form does not have: "
            "value_clip must be none, or value_head gradient"
        )
    config.have_effect_only(
        "value_learning_rate",
        where=config.value_model == "critic" or not config.fits_value_head,
        needs="value_model=critic or value_head=gradient",
    )
    lora = config.lora_rank > 0
    config.have_effect_only("lora_alpha", "lora_target_modules", where=lora, needs="lora_rank > 0")


def check_rewards(config: PPOConfig) -> None:
    """Raise ValueError for wrong numbers of reward weights or ensemble members."""
    if config.rewards and config.reward_weights is not None:
        count = len(config.rewards)
        allowed = [count, count + 1] if config.reward_ensemble else [count]
        if len(config.reward_weights) not in allowed:
            more = ", or one more for reward_ensemble" if config.reward_ensemble else ""
            raise ValueError(
                f"reward_weights must be as many as rewards, {count}{more}, got "
                f"{len(config.reward_weights)}; the default is 1 each"
            )
    if len(config.reward_ensemble) == 1:
        raise ValueError(
            "reward_ensemble must be at least two reward models; a single one goes into rewards"
        )
    config.have_effect_only(
        "reward_ensemble_by", where=config.reward_ensemble, needs="reward_ensemble"
    )


def check_objective(config: PPOConfig) -> None:
    """Raise ValueError for conflicting options of the policy loss."""
    scalars.check_dual_clip(config.dual_clip)
    objective = config.objective
    is_penalty = objective == "penalty"
    if is_penalty and config.is_used("kl_loss_coef"):
        raise ValueError(
            "objective=penalty has a KL of its own in the loss, so kl_loss_coef must be 0; use "
            "kl_coef for a KL to the reference"
        )
    if objective not in CLIPPED_SURROGATES and config.dual_clip is not None:
        raise ValueError(
            f"objective={objective} has no clipped surrogate, so dual_clip must be none"
        )
    if config.steps_per_iteration == 1 and (is_penalty or config.early_stop_kl is not None):
        raise ValueError(
            "objective=penalty and early_stop_kl measure the KL between the optimizer steps of an "
            "iteration, so ppo_epochs · minibatches must be > 1"
        )
    is_own = "objective" in config.own_functions
    if is_own and config.is_used("kl_loss_coef") and config.kl_loss_estimator == "full":
        raise ValueError(
            "kl_loss_estimator=full is fused with the built-in objectives: expected another "
            f"estimator for objective={objective}"
        )
    config.have_effect_only(
        "clip_ratio",
        "clip_ratio_high",
        where=objective not in ("penalty", "sapo") and not is_own,
        needs="an objective with a clip range: not penalty, sapo or a user-defined function",
    )


def check_importance(config: PPOConfig) -> None:
    """Raise ValueError for conflicting options of the importance weights."""
    cap = config.importance_cap
    if cap is not None and cap <= 1 and config.importance.endswith("mask"):
        raise ValueError(
            f"importance={config.importance} keeps ratios from 1/importance_cap to "
            f"importance_cap, so importance_cap must be > 1, got {cap:g}"
        )
    config.have_effect_only("importance", where=cap is not None, needs="an importance_cap")


def check_async(config: PPOConfig) -> None:
    """Raise ValueError for options without asynchronous rollouts."""
    if not config.async_steps:
        return
    if config.rollout in ("generate", "vllm"):
        raise ValueError(
            f"async_steps=1 generates during the update, which rollout={config.rollout} does not "
            "support: use decoder or server"
        )
    if config.environment:
        raise ValueError(ASYNC_NEEDS_ONE_TURN)
    for name in ("solved_reward", "dynamic_sampling"):
        if config.is_set(name):
            raise ValueError(
                f"async_steps=1 chooses prompts before the scores that {name} needs: expected "
                "one of them"
            )


def check_kl(config: PPOConfig) -> None:
    """Raise ValueError for conflicting options of the KL to the reference."""
    in_reward = config.is_used("kl_coef")
    in_loss = config.is_used("kl_loss_coef")
    is_controlled = config.kl_controller != "fixed"
    if is_controlled and config.kl_coef == 0:
        raise ValueError(
            f"kl_controller={config.kl_controller} multiplies kl_coef: expected kl_coef > 0, got 0"
        )
    if is_controlled and "kl_coef" in config.scheduled:
        raise ValueError(
            f"kl_coef has a schedule and kl_controller={config.kl_controller}: expected one of them"
        )
    if config.reference_refresh > 0:
        if not (in_reward or in_loss or config.reference_model):
            raise ValueError(
                "reference_refresh needs a reference: kl_coef or kl_loss_coef must be > 0"
            )
        if config.reference_model is not None:
            raise ValueError(
                "reference_refresh replaces reference_model by the policy, whose architecture may "
                "differ: give one of them"
            )
        if config.reference_refresh == 1 and in_reward:
            raise ValueError(
                "reference_refresh=1: the KL of a rollout to its own policy is 0, so kl_coef must "
                "be 0; use kl_loss_coef for a KL in the loss"
            )
    if config.kl_loss_estimator.endswith(BY_RATIO) and config.objective == "gspo":
        raise ValueError(
            f"kl_loss_estimator={config.kl_loss_estimator} needs the ratios of tokens, and "
            "objective=gspo has ratios of responses"
        )
    config.have_effect_only("kl_estimator", where=in_reward, needs="kl_coef > 0")
    config.have_effect_only("kl_loss_estimator", where=in_loss, needs="kl_loss_coef > 0")
    config.have_effect_only(
        "kl_target", where=is_controlled, needs="kl_controller=adaptive or penalty"
    )


def check_advantages(config: PPOConfig) -> None:
    """Raise ValueError for options without an effect on these advantages."""
    kind = config.advantage
    is_gae = kind in ("gae", "turn_gae")
    if config.bootstrap_truncated and not is_gae:
        raise ValueError(f"advantage={kind} uses complete returns; bootstrap_truncated is for gae")
    if kind in CRITIC_FREE and config.is_used("vf_coef"):
        raise ValueError(f"advantage={kind} has no value function to train, so vf_coef must be 0")
    if kind in CRITIC_FREE and config.value_model != "shared":
        raise ValueError(
            f"advantage={kind} has no value function, so value_model must be shared, at no cost"
        )
    if kind in ("rloo", "group") and config.samples_per_prompt < 2:
        raise ValueError(
            f"advantage={kind} compares responses to one prompt, so samples_per_prompt must be at "
            "least 2"
        )
    if kind == "group" and config.whiten_advantages:
        raise ValueError(
            "advantage=group normalizes the samples of each prompt, so whiten_advantages must be "
            "false"
        )
    is_grouped = kind in ("rloo", "group") or "advantage" in config.own_functions
    config.have_effect_only(
        "dynamic_sampling", where=is_grouped, needs="advantage=rloo, group or a function"
    )
    fixed_lam = is_gae and config.lam_alpha is None
    config.have_effect_only("lam", where=fixed_lam, needs="advantage=gae and no lam_alpha")
    config.have_effect_only("value_lam", where=is_gae, needs="advantage=gae")
    config.have_effect_only("lam_alpha", where=kind == "gae", needs="advantage=gae")
    config.have_effect_only("value_head", where=kind not in CRITIC_FREE, needs="a value function")


def check_pretraining(config: PPOConfig) -> None:
    """Raise ValueError for a PPO-ptx coefficient without text, or text without a coefficient."""
    if config.is_used("ptx_coef") and not config.ptx_data:
        raise ValueError("ptx_coef > 0 needs ptx_data")
    if config.ptx_data and not config.is_used("ptx_coef"):
        raise ValueError("ptx_data is given and ptx_coef is 0: expected both or neither")
    config.have_effect_only("ptx_batch_size", where=config.ptx_data, needs="ptx_data")


def check_learning_rate(config: PPOConfig) -> None:
    """Raise ValueError for options that a learning rate of `auto` excludes or needs."""
    is_auto = config.learning_rate == "auto"
    config.have_effect_only(
        "lr_schedule", "warmup_steps", where=not is_auto, needs="a number for learning_rate"
    )
    config.have_effect_only("step_kl", where=is_auto, needs="learning_rate=auto")
    if not is_auto:
        return
    if config.steps_per_iteration == 1:
        raise ValueError(
            "learning_rate=auto measures the KL between the optimizer steps of an iteration, so "
            "ppo_epochs · minibatches must be > 1, or learning_rate a number"
        )
    if config.objective == "penalty":
        raise ValueError(
            "objective=penalty adapts its own coefficient to the KL, so learning_rate "
            "must be a number"
        )
    has_rate = config.value_learning_rate is not None or config.fits_value_head
    if config.value_warmup_iterations > 0 and not has_rate:
        raise ValueError(
            "learning_rate=auto adapts the rate while the policy trains, so "
            "value_warmup_iterations needs value_learning_rate"
        )


def check_watching(config: PPOConfig) -> None:
    """Raise ValueError for evaluations without prompts, and for unknown thresholds and trackers."""
    config.have_effect_only("eval_interval", where=config.eval_prompts, needs="eval_prompts")
    if config.checkpoint_best is not None and not config.checkpoint_best.removeprefix("min:"):
        raise ValueError(
            f"checkpoint_best must name a metric, such as `reward` or `min:kl`, got "
            f"{config.checkpoint_best!r}"
        )
    if (config.checkpoint_best or "").removeprefix("min:").startswith("eval/"):
        config.have_effect_only("checkpoint_best", where=config.eval_prompts, needs="eval_prompts")
    for text in config.warn_if:
        parse_threshold(text, "warn_if")
    for text in config.stop_if:
        parse_threshold(text, "stop_if")
    config.check_sharing()


def check_schedules(config: PPOConfig) -> None:
    """Raise ValueError for schedules without a start, or with an end out of bounds."""
    schedules = [Schedule.parse(text) for text in config.schedules]
    if len(config.scheduled) < len(schedules):
        raise ValueError(f"schedules has one name twice: {config.schedules}")
    for schedule in schedules:
        if config.start_of(schedule) is None:
            raise ValueError(f"schedules: {schedule.name} has no value to start from")
        check_bounds(PPOConfig, schedule.name, schedule.final)
        if schedule.name == "dual_clip":
            scalars.check_dual_clip(schedule.final)


def check_processes(config: PPOConfig, count: int) -> None:
    """Raise ValueError for options without support for several processes."""
    if count == 1:
        return
    if config.async_steps:
        raise ValueError(f"{count} processes: async_steps=1 is for one process; use 0")
    if config.rollout == "server":
        raise ValueError(f"{count} processes: rollout=server is for one process; use vllm")
    if config.precision == "fp16":
        raise ValueError(
            f"{count} processes: the loss scale of precision=fp16 follows the gradients of "
            "one process; use bf16"
        )
    if config.quantization != "none":
        raise ValueError(
            f"{count} processes: the weights of quantization={config.quantization} cannot be "
            "sharded; use none"
        )


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
