"""The options of a PPO run: each is a key of the YAML file and a flag of the command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from fastppo_kernels.records import RATIO_WEIGHTED

from fastppo.data.microbatches import Limits
from fastppo.functional import arguments
from fastppo.ppo.curriculum import CurriculumOptions
from fastppo.ppo.evaluation import EvaluationOptions
from fastppo.ppo.reward_options import RewardOptions
from fastppo.ppo.rollout_options import RolloutOptions, TurnOptions
from fastppo.ppo.schedule import Schedule
from fastppo.run.options import (
    Options,
    RanksOptions,
    SharingOptions,
    WeightOptions,
    check_bounds,
    option,
)
from fastppo.run.watch import parse_threshold

WARNINGS = (
    *("kl > 50", "eos_rate < 0.1", "distinct_2 < 0.1", "skipped_steps > 0"),
    *("mismatch/outside > 0.1", "advantage_std < 0.0001"),
)
"""Thresholds that warn unless others are given: far outside what a healthy run shows."""

CRITIC_FREE = ("reinforce", "rloo", "group")
"""Kinds of advantages that need no value function."""


@dataclass(kw_only=True, frozen=True)
class PolicyOptions(Options):
    """Policy."""

    model: str = option(
        "", "Required. The SFT model: directory or hub name; policy and reference start there"
    )
    quantization: Literal["none", "nf4", "fp4"] = option(
        "none",
        "Hold the frozen matrices under LoRA adapters in 4 bits a weight, NormalFloat or floating "
        "point (QLoRA); needs bitsandbytes",
    )


@dataclass(kw_only=True, frozen=True)
class ReferenceOptions(Options):
    """Reference policy."""

    reference_model: str | None = option(
        None,
        "The model that the KL is measured to, even where no coefficient weighs it; none given "
        "means `model` as it starts",
    )
    reference_refresh: int = option(
        0, "Iterations after which the policy becomes the reference; 0 never", minimum=0
    )


@dataclass(kw_only=True, frozen=True)
class ValueOptions(Options):
    """Value function."""

    value_model: Literal["shared", "detached", "critic"] = option(
        "shared",
        "Value head on the shared trunk, on the trunk without training it, or on a critic of its "
        "own",
    )
    critic_model: str | None = option(
        None, "Where value_model=critic starts: a reward model or a causal LM; none: the policy"
    )
    value_warmup_iterations: int = option(
        0, "First iterations that train the value function alone", minimum=0
    )
    vf_coef: float = option(0.5, "Weight of the value loss", minimum=0)
    value_clip: float | None = option(
        None, "Clip of the value's move per rollout, reward units", above=0
    )


@dataclass(kw_only=True, frozen=True)
class PromptOptions(Options):
    """Prompts."""

    prompts: str = option(
        "", "Required. Prompts: .jsonl, .parquet, a save_to_disk directory or a hub name"
    )
    prompt_column: str = option("prompt", "Column of the prompt: a string or chat messages")
    split: str = option("train", "Split of a datasets directory or hub dataset")


@dataclass(kw_only=True, frozen=True)
class UpdateOptions(Options):
    """Update."""

    iterations: int = option(100, "PPO iterations: rollouts followed by updates", minimum=1)
    ppo_epochs: int = option(4, "Passes over each rollout batch", minimum=1)
    minibatches: int = option(4, "Optimiser steps per pass", minimum=1)
    microbatch_size: int = option(16, "Sequences per forward and backward pass", minimum=1)
    microbatch_tokens: int | None = option(
        None,
        "Tokens per forward and backward pass, padding included, in place of microbatch_size; a "
        "longer sequence goes alone",
        minimum=1,
    )
    packing: Literal["auto", "on", "off"] = option(
        "auto",
        "Sequences of a microbatch end to end, without padding; auto is on for a GPU, if packed "
        "and padded agree on a small batch",
    )
    objective: Literal["clip", "penalty"] = option(
        "clip", "clip, or penalty: no clip, β·KL to the rollout policy with a moving β"
    )
    clip_ratio: float = option(
        0.2, "ε: the ratio's gain is cut off below 1 − ε and above 1 + ε", minimum=0, maximum=1
    )
    clip_ratio_high: float | None = option(
        None, "ε above 1; none given means clip_ratio", minimum=0
    )
    dual_clip: float | None = option(None, "c > 1: bounds the loss at c·|A| where A < 0")
    policy_kl_target: float = option(
        0.01, "KL to the rollout policy that objective=penalty aims at, nats per token", above=0
    )
    early_stop_kl: float | None = option(
        None,
        "The update of an iteration ends when its KL to the rollout policy is above this, nats per "
        "token",
        above=0,
    )
    entropy_coef: float = option(0.0, "Weight of the entropy bonus in the loss", minimum=0)
    aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "token-sum"] = (
        option("token-mean", "How token losses add up to the loss")
    )
    schedules: Sequence[str] = option(
        [],
        "Coefficients that move over the run: name=linear:final or name=cosine:final, such as "
        "entropy_coef=linear:0",
    )
    backend: Literal["auto", "triton", "torch"] = option("auto", "Kernels of the losses")


@dataclass(kw_only=True, frozen=True)
class KLOptions(Options):
    """KL to the reference."""

    kl_coef: float = option(
        0.05, "β: weight of the KL to the reference in the reward, per nat", minimum=0
    )
    kl_estimator: Literal["k1", "k2", "k3", "full"] = option(
        "k1", "Estimator of the KL in the reward; full is exact"
    )
    kl_controller: Literal["fixed", "adaptive", "penalty"] = option(
        "fixed", "How β moves: fixed, adaptive (Ziegler 2019), penalty (doubling, Schulman 2017)"
    )
    kl_target: float = option(6.0, "Target of a moving β, nats per sequence", above=0)
    kl_horizon: float = option(10_000.0, "Horizon of the adaptive β, sequences", above=0)
    kl_loss_coef: float = option(
        0.0, "Weight of a KL to the reference in the loss, per nat", minimum=0
    )
    kl_loss_estimator: Literal["k1", "k2", "k3", "full"] = option(
        "k3", "Estimator of the KL in the loss; full is exact and runs the reference in the update"
    )
    kl_loss_ratio_weighted: bool = option(
        False, "The KL in the loss, k1 or k3, times the ratio: unbiased after several steps too"
    )


@dataclass(kw_only=True, frozen=True)
class AdvantageOptions(Options):
    """Advantages."""

    gamma: float = option(1.0, "Discount per token", minimum=0, maximum=1)
    lam: float = option(0.95, "λ of GAE, per token", minimum=0, maximum=1)
    advantage: Literal["gae", "sequence", "reinforce", "rloo", "group"] = option(
        "gae",
        "gae; sequence: R − V(prompt) for every token; without a value function: reinforce: reward "
        "to go; rloo: R − the mean of the prompt's other samples; group: as GRPO normalises them",
    )
    gae_by: Literal["token", "turn"] = option(
        "token", "Steps of GAE: tokens, or turns, whose tokens all have the turn's advantage"
    )
    lam_alpha: float | None = option(
        None, "α: λ = 1 − 1/(α·length) of each response, in place of lam", above=0
    )
    value_lam: float | None = option(
        None, "λ of what the value function learns; none given means lam", minimum=0, maximum=1
    )
    whiten_advantages: Literal["full", "variance", "none"] = option(
        "full", "Normalise advantages: full is mean 0 and variance 1, variance keeps their signs"
    )
    bootstrap_truncated: bool = option(
        False, "After a truncated response comes its last value, not 0"
    )


@dataclass(kw_only=True, frozen=True)
class PretrainingOptions(Options):
    """Pretraining text (PPO-ptx)."""

    ptx_coef: float = option(
        0.0, "γ: weight of the language-model loss on pretraining text (PPO-ptx)", minimum=0
    )
    ptx_data: str = option("", "Pretraining text: rows with a `text` column, as prompts are given")
    ptx_batch_size: int = option(8, "Blocks of text per optimiser step, sequences", minimum=1)
    ptx_block_size: int = option(256, "Length of a block of text, tokens", minimum=2)


@dataclass(kw_only=True, frozen=True)
class OptimizerOptions(Options):
    """Optimizer."""

    learning_rate: float = option(1e-5, "Peak learning rate of AdamW", above=0)
    value_learning_rate: float | None = option(
        None, "Peak learning rate of the value head; none given means learning_rate", minimum=0
    )
    lr_schedule: Literal["constant", "linear", "cosine"] = option(
        "constant", "Learning rate after warm-up: constant, or decay to 0 over the run"
    )
    warmup_steps: int = option(0, "Linear warm-up, optimiser steps", minimum=0)
    optimizer: Literal["adamw", "adamw8bit"] = option(
        "adamw",
        "adamw8bit: moments of 8 bits, bf16 weights without fp32 masters; needs torchao",
    )
    weight_decay: float = option(0.0, "AdamW's weight decay, on matrices", minimum=0)
    adam_beta2: float = option(0.95, "AdamW's β₂", minimum=0, maximum=1)
    adam_eps: float = option(1e-8, "AdamW's ε", above=0)
    max_grad_norm: float = option(1.0, "Gradients are scaled down to this norm", above=0)


@dataclass(kw_only=True, frozen=True)
class WatchOptions(Options):
    """Watching."""

    warn_if: Sequence[str] = option(
        list(WARNINGS),
        "Thresholds that warn, such as 'kl > 50'; any logged metric with >, >=, < or <=",
    )
    stop_if: Sequence[str] = option([], "Thresholds that stop the run with a checkpoint")


@dataclass(kw_only=True, frozen=True)
class RunOptions(Options):
    """Run."""

    output_dir: str = option("runs/ppo", "Run directory")
    seed: int = option(
        0, "Seed of sampling, shuffling and initialisation", minimum=0, maximum=2**32 - 1
    )
    device: str = option("auto", "auto (a GPU if there is one), cpu, cuda, cuda:1, …")
    checkpoint_interval: int = option(
        50, "Iterations between checkpoints; 0 writes the last only", minimum=0
    )
    checkpoint_best: str | None = option(
        None,
        "Metric whose best checkpoint is also kept, by its mean since the checkpoint before: "
        "reward for the highest, min:kl for the lowest",
    )
    resume: bool = option(False, "Go on from the newest whole checkpoint of output_dir")
    allow_config_change: bool = option(
        False, "Resume although options, model, data or rewards make it another run"
    )


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
        arguments.dual_clip(self.dual_clip)
        if self.rollout_batch_size % self.minibatches:
            raise ValueError(
                f"rollout_batch_size must be a multiple of minibatches, "
                f"got {self.rollout_batch_size} and {self.minibatches}"
            )
        if self.rollout_batch_size % self.samples_per_prompt:
            raise ValueError(
                f"rollout_batch_size counts responses and must be a multiple of "
                f"samples_per_prompt, got {self.rollout_batch_size} and {self.samples_per_prompt}"
            )
        self._check_reward_weights()
        if self.kl_controller != "fixed" and self.kl_coef == 0:
            raise ValueError(
                f"kl_controller={self.kl_controller} multiplies kl_coef, so it must be > 0, got 0"
            )
        for option_name in ("warn_if", "stop_if"):
            for text in getattr(self, option_name):
                parse_threshold(text, option_name)
        self.check_sharing()
        self._check_combinations()
        schedules = [Schedule.parse(text) for text in self.schedules]
        if len({schedule.name for schedule in schedules}) < len(schedules):
            raise ValueError(f"schedules has one name twice: {self.schedules}")
        for schedule in schedules:
            if getattr(self, schedule.name) is None:
                raise ValueError(f"schedules: {schedule.name} has no value to start from")
            check_bounds(PPOConfig, schedule.name, schedule.final)
            if schedule.name == "dual_clip":
                arguments.dual_clip(schedule.final)

    def _check_reward_weights(self) -> None:
        if not self.rewards or self.reward_weights is None:
            return
        count = len(self.reward_weights)
        if self.reward_ensemble and count == len(self.rewards) + 1:
            return  # the last is the ensemble's
        if count != len(self.rewards):
            more = ", or one more for reward_ensemble" if self.reward_ensemble else ""
            raise ValueError(
                f"reward_weights must be as many as rewards, {len(self.rewards)}{more}, got "
                f"{count}; none given means 1 each"
            )

    def _check_combinations(self) -> None:
        """An option that would have no effect is an error, not a surprise."""
        scheduled = {Schedule.parse(text).name for text in self.schedules}

        def used(name: str) -> bool:
            return getattr(self, name) > 0 or name in scheduled

        for wrong, sentence in (
            (
                bool(self.prompt_order and self.prompt_weights),
                "prompt_order goes through all prompts in turn and prompt_weights draws them: "
                "expected one of them",
            ),
            (
                self.quantization != "none"
                and (self.lora_rank == 0 or self.value_model not in ("shared", "detached")),
                f"quantization={self.quantization} freezes the model's matrices, so lora_rank must "
                "be > 0 and value_model shared or detached",
            ),
            (
                self.quantization != "none" and self.rollout == "vllm",
                f"quantization={self.quantization}: rollout=vllm takes whole weights; "
                "use rollout=decoder",
            ),
            (
                self.precision == "fp16"
                and (self.param_dtype != "float32" or self.optimizer != "adamw"),
                "precision=fp16 scales gradients of fp32 weights, so param_dtype must be float32 "
                f"and optimizer adamw, got {self.param_dtype} and {self.optimizer}",
            ),
            (
                self.precision == "fp16"
                and used("kl_loss_coef")
                and self.kl_loss_estimator == "full",
                "precision=fp16 forms the loss's gradient after its scale is known, which "
                "kl_loss_estimator=full does not have",
            ),
            (
                self.objective == "penalty" and used("kl_loss_coef"),
                "objective=penalty has a KL of its own in the loss; a KL to the reference goes "
                "into the reward (kl_coef), so kl_loss_coef must be 0",
            ),
            (
                self.objective == "penalty" and self.dual_clip is not None,
                "objective=penalty clips nothing, so dual_clip must be none",
            ),
            (
                self.kl_loss_ratio_weighted and self.kl_loss_estimator not in RATIO_WEIGHTED,
                "kl_loss_ratio_weighted needs kl_loss_estimator k1 or k3, which the ratio makes "
                f"unbiased, got {self.kl_loss_estimator}",
            ),
            (
                self.reference_refresh > 0
                and not (used("kl_coef") or used("kl_loss_coef") or self.reference_model),
                "reference_refresh needs a reference: kl_coef or kl_loss_coef must be > 0",
            ),
            (
                self.reference_refresh > 0 and self.reference_model is not None,
                "reference_refresh replaces the reference by the policy, which may be another "
                "architecture than reference_model: give one of them",
            ),
            (
                self.critic_model is not None and self.value_model != "critic",
                f"critic_model needs value_model=critic, got {self.value_model}",
            ),
            (
                self.bootstrap_truncated and self.advantage != "gae",
                f"advantage={self.advantage} is of complete returns; bootstrap_truncated is for "
                "gae",
            ),
            (
                self.advantage in CRITIC_FREE and used("vf_coef"),
                f"advantage={self.advantage} has no value function to train, so vf_coef must be 0",
            ),
            (
                self.advantage in CRITIC_FREE and self.value_model != "shared",
                f"advantage={self.advantage} has no value function, so value_model must be shared, "
                "which costs nothing",
            ),
            (
                self.advantage in ("rloo", "group") and self.samples_per_prompt < 2,
                f"advantage={self.advantage} compares responses to one prompt, so "
                "samples_per_prompt must be at least 2",
            ),
            (
                self.advantage in ("rloo", "group") and self.reward_failure == "drop",
                f"advantage={self.advantage} compares all responses to a prompt, so none may be "
                "dropped: reward_failure must be stop",
            ),
            (
                self.advantage == "group" and self.whiten_advantages == "full",
                "advantage=group normalises the samples of each prompt, so whiten_advantages must "
                "be none or variance",
            ),
            (
                self.gae_by == "turn" and self.lam_alpha is not None,
                "lam_alpha follows from a response's tokens, so gae_by must be token",
            ),
            (
                bool(self.reward_ensemble) and len(self.reward_ensemble) < 2,
                "reward_ensemble must be at least two reward models; one goes into rewards",
            ),
            (
                self.steps_per_iteration == 1
                and (self.objective == "penalty" or self.early_stop_kl is not None),
                "objective=penalty and early_stop_kl measure how far an iteration's optimiser "
                "steps have moved the policy, so ppo_epochs · minibatches must be > 1",
            ),
            (
                self.reference_refresh == 1 and used("kl_coef"),
                "reference_refresh=1: the KL of a rollout to its own policy is 0, so kl_coef must "
                "be 0; kl_loss_coef weighs the KL in the loss",
            ),
            (
                self.value_warmup_iterations > 0 and not used("vf_coef"),
                "value_warmup_iterations trains the value function alone, so vf_coef must be > 0",
            ),
            (used("ptx_coef") and not self.ptx_data, "ptx_coef > 0 needs ptx_data"),
            (
                bool(self.ptx_data) and not used("ptx_coef"),
                "ptx_data is given and ptx_coef is 0: expected both or neither",
            ),
            (
                "kl_coef" in scheduled and self.kl_controller != "fixed",
                f"kl_coef has a schedule and kl_controller={self.kl_controller}: expected one of "
                "them",
            ),
        ):
            if wrong:
                raise ValueError(sentence)
        for names, needs, there in (
            ("clip_ratio clip_ratio_high", "objective=clip", self.objective == "clip"),
            ("policy_kl_target", "objective=penalty", self.objective == "penalty"),
            ("reward_ensemble_by", "reward_ensemble", self.reward_ensemble),
            ("kl_estimator", "kl_coef > 0", used("kl_coef")),
            (
                "kl_loss_estimator kl_loss_ratio_weighted",
                "kl_loss_coef > 0",
                used("kl_loss_coef"),
            ),
            ("kl_target", "a kl_controller that moves", self.kl_controller != "fixed"),
            ("kl_horizon", "kl_controller=adaptive", self.kl_controller == "adaptive"),
            (
                "lam",
                "advantage=gae and no lam_alpha",
                self.advantage == "gae" and self.lam_alpha is None,
            ),
            ("lam_alpha value_lam gae_by", "advantage=gae", self.advantage == "gae"),
            ("eval_interval eval_sampling eval_patience", "eval_prompts", self.eval_prompts),
            ("lora_alpha lora_target_modules", "lora_rank > 0", self.lora_rank > 0),
            ("ptx_batch_size ptx_block_size", "ptx_data", self.ptx_data),
            ("vllm_tensor_parallel_size", "rollout=vllm", self.rollout == "vllm"),
        ):
            for name in names.split():
                (default,) = (each.default for each in fields(self) if each.name == name)
                if (getattr(self, name) != default or name in scheduled) and not there:
                    raise ValueError(f"{name} has an effect only with {needs}")

    def at(self, iteration: int) -> PPOConfig:
        """The options of one iteration: these, with each schedule's value in its place."""
        if not self.schedules:
            return self
        progress = min(1.0, iteration / max(1, self.iterations - 1))
        moved = {
            schedule.name: schedule.value(getattr(self, schedule.name), progress)
            for schedule in map(Schedule.parse, self.schedules)
        }
        return replace(self, **moved)  # type: ignore[arg-type]

    def scheduled_values(self) -> dict[str, float]:
        """`schedule/NAME`: what the schedules have made of their options, of `at(iteration)`."""
        names = [Schedule.parse(text).name for text in self.schedules]
        return {f"schedule/{name}": float(getattr(self, name)) for name in names}

    @property
    def wants_reference(self) -> bool:
        """Whether there is a KL to a reference model."""
        moving = any(Schedule.parse(text).name.startswith("kl_") for text in self.schedules)
        return self.kl_coef > 0 or self.kl_loss_coef > 0 or moving

    @property
    def softmax(self) -> dict[str, Any]:
        """How logits become a distribution, as the keywords of the losses."""
        return {"temperature": self.temperature, "backend": self.backend}

    def limits(self, packed: bool = False) -> Limits:
        """What a microbatch may hold."""
        return Limits(self.microbatch_size, self.microbatch_tokens, packed)

    @property
    def clip_range(self) -> tuple[float, float]:
        """(ε_low, ε_high)."""
        high = self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high
        return self.clip_ratio, high

    @property
    def prompts_per_iteration(self) -> int:
        """Different prompts of one rollout batch."""
        return self.rollout_batch_size // self.samples_per_prompt

    def stops_at(self, policy_kl: float) -> bool:
        """Whether the KL to the rollout policy, nats per token, ends an iteration's update."""
        return self.early_stop_kl is not None and policy_kl > self.early_stop_kl

    @property
    def steps_per_iteration(self) -> int:
        """Optimiser steps of one iteration, if nothing stops it early."""
        return self.ppo_epochs * self.minibatches

    @property
    def optimizer_steps(self) -> int:
        """Optimiser steps of the whole run."""
        return self.iterations * self.steps_per_iteration


IDENTITY = (
    *("param_dtype", "quantization", "lora_rank", "lora_alpha", "lora_target_modules"),
    *("reference_refresh", "value_model", "critic_model"),
    *("prompt_column", "split", "seed", "solved_reward"),
    *("reward_weights", "score_normalization", "reward_ensemble_by"),
    *("rollout_batch_size", "samples_per_prompt", "minibatches", "ppo_epochs"),
    *("max_new_tokens", "temperature", "top_k", "top_p", "stop_token_ids", "stop_strings"),
    *("max_turns", "max_response_tokens", "gae_by"),
    *("objective", "advantage", "lam_alpha", "value_lam", "optimizer", "aggregation"),
    *("kl_estimator", "kl_loss_estimator", "kl_loss_ratio_weighted"),
)
"""Options that say which run it is: a resumed run with another value is another run. Models, data
and rewards are known by their content, wherever they lie; rates and coefficients may move."""
