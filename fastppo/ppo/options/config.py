"""The options of a PPO run: each is a key of the YAML file and a flag of the command line.

They are read, checked and shown in help texts before torch is imported, which takes seconds; what
needs it is imported where it is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from fastppo.functional import scalars
from fastppo.functional.scalars import CLIPPED_SURROGATES
from fastppo.ppo.options.prompts import CurriculumOptions, EvaluationOptions, PromptOptions
from fastppo.ppo.options.rewards import RewardOptions
from fastppo.ppo.options.rollout import RolloutOptions, TurnOptions, check_stop_strings
from fastppo.ppo.options.schedule import Schedule
from fastppo.run.options import (
    Options,
    RanksOptions,
    SharingOptions,
    WeightOptions,
    check_bounds,
    option,
)
from fastppo.run.watch import parse_threshold

if TYPE_CHECKING:
    from fastppo.data.microbatches import Limits

WARNINGS = (
    "kl > 50",
    "eos_rate < 0.1",
    "distinct_2 < 0.1",
    "skipped_steps > 0",
    "mismatch/outside > 0.1",
    "reward_std < 0.0001",
    "advantage_std < 0.0001",
)
"""Thresholds that warn unless others are given: far outside what a healthy run shows."""

BY_RATIO = "_by_ratio"
"""Ends an estimator of the KL in the loss that is times the ratio."""

ASYNC_NEEDS_ONE_TURN = "async_steps=1 draws responses of one turn, so environment must be none"

CRITIC_FREE = ("reinforce", "rloo", "group")
"""Kinds of advantages that need no value function."""

CRITIC_RATE = 10.0
"""The learning rate of a critic of its own, in units of the policy's: verl's; OpenRLHF has nine."""


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
        None,
        "Where value_model=critic starts: a reward model, a causal LM, or the "
        "value_function.safetensors of an earlier critic; none: the policy",
    )
    critic_frozen: Literal["none", "attention"] = option(
        "none", "What of value_model=critic is not trained: nothing, or its attention (SAO)"
    )
    value_epochs: int | None = option(
        None,
        "Passes over each batch that train value_model=critic, ppo_epochs of them with the policy; "
        "none given means ppo_epochs",
        minimum=1,
    )
    value_head: Literal["auto", "closed_form", "gradient"] = option(
        "auto",
        "How the value head learns: ridge regression of the returns after each update, or AdamW; "
        "auto is AdamW for value_model=critic alone",
    )
    value_warmup_iterations: int = option(
        0, "First iterations that train the value function alone", minimum=0
    )
    vf_coef: float = option(0.5, "Weight of the value loss", minimum=0)
    value_clip: float | None = option(
        None, "Clip of the value's move per rollout, reward units", above=0
    )


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
    objective: Literal["clip", "penalty", "cispo", "sapo", "gspo", "dis"] = option(
        "clip",
        "clip; penalty: no clip, β·KL to the rollout policy with a moving β; cispo: the clipped "
        "ratio weighs the logprob; sapo: a soft gate; gspo: the clip of the response's ratio; dis: "
        "tokens outside the clip range teach nothing",
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
    backend: Literal["auto", "triton", "cpu", "torch"] = option("auto", "Kernels of the losses")


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
        "fixed",
        "How β moves: fixed, adaptive (Ziegler 2019), penalty (doubling, Schulman 2017); it stands "
        "still during value_warmup_iterations",
    )
    kl_target: float = option(6.0, "Target of a moving β, nats per sequence", above=0)
    kl_horizon: float = option(10_000.0, "Horizon of the adaptive β, sequences", above=0)
    kl_loss_coef: float = option(
        0.0, "Weight of a KL to the reference in the loss, per nat", minimum=0
    )
    kl_loss_estimator: Literal["k1", "k2", "k3", "k1_by_ratio", "k3_by_ratio", "full"] = option(
        "k3",
        "Estimator of the KL in the loss; by_ratio: times the ratio, unbiased after several steps "
        "too; full is exact and runs the reference in the update",
    )


@dataclass(kw_only=True, frozen=True)
class AdvantageOptions(Options):
    """Advantages."""

    gamma: float = option(1.0, "Discount per token", minimum=0, maximum=1)
    lam: float = option(0.95, "λ of GAE, per token", minimum=0, maximum=1)
    advantage: Literal["gae", "turn_gae", "sequence", "reinforce", "rloo", "group"] = option(
        "gae",
        "gae; turn_gae: GAE whose steps are turns; sequence: R − V(prompt) for every token; "
        "without a value function: reinforce: reward to go; rloo: R − the mean of the prompt's "
        "other samples; group: GRPO's (R − mean)/(deviation + 1e-4) over the prompt's samples",
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
        None,
        "Peak learning rate of the value function: the value head, or the whole of "
        "value_model=critic; none given means learning_rate, and ten times that for a critic",
        minimum=0,
    )
    lr_schedule: Literal["constant", "linear", "cosine"] = option(
        "constant", "Learning rate after warm-up: constant, or decay to 0 over the run"
    )
    warmup_steps: int = option(0, "Linear warm-up, optimiser steps", minimum=0)
    optimizer: str = option(
        "adamw",
        "adamw, or a class or function over parameter groups: package.module:Name or "
        "file.py:name, such as torchao.optim:AdamW8bit",
    )
    optimizer_options: Mapping[str, Any] | None = option(
        None, "Keyword arguments of the optimizer, a YAML mapping such as '{eps: 1.0e-6}'"
    )
    weight_decay: float = option(0.0, "AdamW's weight decay, on matrices", minimum=0)
    adam_beta2: float = option(0.95, "AdamW's β₂", minimum=0, maximum=1)
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
        check_stop_strings(self.stop_strings)
        check_batches(self)
        check_models(self)
        check_rewards(self)
        check_objective(self)
        check_importance(self)
        check_servers(self)
        check_async(self)
        check_kl(self)
        check_advantages(self)
        check_pretraining(self)
        check_evaluation(self)
        check_watching(self)
        check_schedules(self)

    @property
    def scheduled(self) -> set[str]:
        """Options that a schedule moves."""
        return {Schedule.parse(text).name for text in self.schedules}

    def is_used(self, coefficient: str) -> bool:
        """Whether a coefficient is, or may become, larger than 0."""
        return getattr(self, coefficient) > 0 or coefficient in self.scheduled

    def is_set(self, name: str) -> bool:
        """Whether an option has another value than by default, or a schedule."""
        (default,) = (member.default for member in fields(self) if member.name == name)
        return getattr(self, name) != default or name in self.scheduled

    def have_effect_only(self, *names: str, where: object, needs: str) -> None:
        """Raises ValueError for an option that is set and would do nothing.

        Args:
            where: whether there is what the options need; needs: what that is.
        """
        for name in names:
            if not where and self.is_set(name):
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
        return self.is_used("kl_coef") or self.is_used("kl_loss_coef")

    @property
    def value_rate(self) -> float:
        """The peak learning rate of what AdamW trains of the value function."""
        if self.value_learning_rate is not None:
            return self.value_learning_rate
        if self.value_model == "critic":
            return CRITIC_RATE * self.learning_rate
        return self.learning_rate

    @property
    def fits_value_head(self) -> bool:
        """Whether the value head is that of a regression, and AdamW leaves it alone."""
        if self.advantage in CRITIC_FREE:
            return False
        if self.value_head == "auto":
            return self.value_model != "critic"
        return self.value_head == "closed_form"

    @property
    def softmax(self) -> dict[str, Any]:
        """How logits become a distribution, as the keywords of the losses."""
        return {"temperature": self.temperature, "backend": self.backend}

    def limits(self, packed: bool = False) -> Limits:
        """What a microbatch may hold."""
        from fastppo.data.microbatches import Limits

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

    @property
    def critic_only_epochs(self) -> int:
        """Passes over each batch that train only the critic."""
        return 0 if self.value_epochs is None else self.value_epochs - self.ppo_epochs

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


# Which options exclude each other, section by section. An option that would have no effect is an
# error, not a surprise.


def check_batches(config: PPOConfig) -> None:
    """Raises ValueError where a rollout's responses cannot be assignment out."""
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
    if config.prompt_order and config.prompt_weights:
        raise ValueError(
            "prompt_order goes through all prompts in turn and prompt_weights draws them: expected "
            "one of them"
        )


def check_models(config: PPOConfig) -> None:
    """Raises ValueError for options of policy, reference and value function."""
    if config.quantization != "none":
        if config.lora_rank == 0 or config.value_model == "critic":
            raise ValueError(
                f"quantization={config.quantization} freezes the model's matrices, so lora_rank "
                "must be > 0 and value_model shared or detached"
            )
        if config.rollout in ("vllm", "server"):
            raise ValueError(
                f"quantization={config.quantization}: rollout={config.rollout} takes whole "
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
                "precision=fp16 forms the loss's gradient after its scale is known, which "
                "kl_loss_estimator=full does not have"
            )
    config.have_effect_only(
        "critic_model",
        "critic_frozen",
        "value_epochs",
        where=config.value_model == "critic",
        needs="value_model=critic",
    )
    if config.value_epochs is not None and config.value_epochs < config.ppo_epochs:
        raise ValueError(
            f"value_epochs counts the passes with the policy too: expected at least ppo_epochs, "
            f"{config.ppo_epochs}, got {config.value_epochs}"
        )
    if config.value_warmup_iterations > 0 and not config.is_used("vf_coef"):
        raise ValueError(
            "value_warmup_iterations trains the value function alone, so vf_coef must be > 0"
        )
    if config.fits_value_head and config.value_clip is not None:
        raise ValueError(
            "value_clip bounds how far AdamW moves a value, and a head in closed form is solved "
            "for: value_clip must be none, or value_head gradient"
        )
    config.have_effect_only(
        "value_learning_rate",
        where=config.value_model == "critic" or not config.fits_value_head,
        needs="value_model=critic or value_head=gradient",
    )
    lora = config.lora_rank > 0
    config.have_effect_only("lora_alpha", "lora_target_modules", where=lora, needs="lora_rank > 0")
    config.have_effect_only(
        "vllm_tensor_parallel_size", where=config.rollout == "vllm", needs="rollout=vllm"
    )


def check_servers(config: PPOConfig) -> None:
    """Raises ValueError for servers that are not asked, or that are nowhere."""
    config.have_effect_only(
        "rollout_urls", where=config.rollout == "server", needs="rollout=server"
    )
    if config.rollout != "server":
        return
    if not config.rollout_urls:
        raise ValueError("rollout=server needs rollout_urls, such as http://localhost:8000")
    for url in config.rollout_urls:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"rollout_urls: expected http://host:port, got {url}")


def check_rewards(config: PPOConfig) -> None:
    """Raises ValueError for weights and ensembles that do not fit the rewards."""
    if config.rewards and config.reward_weights is not None:
        count = len(config.rewards)
        allowed = [count, count + 1] if config.reward_ensemble else [count]
        if len(config.reward_weights) not in allowed:
            more = ", or one more for reward_ensemble" if config.reward_ensemble else ""
            raise ValueError(
                f"reward_weights must be as many as rewards, {count}{more}, got "
                f"{len(config.reward_weights)}; none given means 1 each"
            )
    if len(config.reward_ensemble) == 1:
        raise ValueError(
            "reward_ensemble must be at least two reward models; one goes into rewards"
        )
    config.have_effect_only(
        "reward_ensemble_by", where=config.reward_ensemble, needs="reward_ensemble"
    )


def check_objective(config: PPOConfig) -> None:
    """Raises ValueError for options of the policy loss and of an update's end."""
    scalars.check_dual_clip(config.dual_clip)
    objective = config.objective
    is_penalty = objective == "penalty"
    if is_penalty and config.is_used("kl_loss_coef"):
        raise ValueError(
            "objective=penalty has a KL of its own in the loss; a KL to the reference goes into "
            "the reward (kl_coef), so kl_loss_coef must be 0"
        )
    if objective not in CLIPPED_SURROGATES and config.dual_clip is not None:
        raise ValueError(
            f"objective={objective} has no clipped surrogate to bound, so dual_clip must be none"
        )
    if config.steps_per_iteration == 1 and (is_penalty or config.early_stop_kl is not None):
        raise ValueError(
            "objective=penalty and early_stop_kl measure how far an iteration's optimiser steps "
            "have moved the policy, so ppo_epochs · minibatches must be > 1"
        )
    config.have_effect_only(
        "clip_ratio",
        "clip_ratio_high",
        where=objective not in ("penalty", "sapo"),
        needs="an objective that has a clip range: not penalty or sapo",
    )
    config.have_effect_only("policy_kl_target", where=is_penalty, needs="objective=penalty")


def check_importance(config: PPOConfig) -> None:
    """Raises ValueError for bounds of the importance weights that leave nothing between them."""
    cap = config.importance_cap
    floor = config.importance_floor
    if cap is not None and floor is not None and floor >= cap:
        raise ValueError(f"importance_floor must be below importance_cap, got {floor} and {cap}")
    config.have_effect_only(
        "importance_mode",
        where=cap is not None or floor is not None,
        needs="an importance_cap or an importance_floor",
    )
    if config.objective == "penalty" and config.importance_mode.endswith("mask"):
        raise ValueError(
            "objective=penalty divides by the importance weights, which a mask makes 0: expected "
            "token_truncate or sequence_truncate"
        )


def check_async(config: PPOConfig) -> None:
    """Raises ValueError for options that say what is drawn only once the batch before is learned
    from, and for engines that cannot draw beside an update."""
    if not config.async_steps:
        return
    if config.rollout in ("generate", "vllm"):
        raise ValueError(
            f"async_steps=1 draws during an update, which rollout={config.rollout} cannot: use "
            "decoder or server"
        )
    if config.environment:
        raise ValueError(ASYNC_NEEDS_ONE_TURN)
    if config.solved_reward is not None:
        raise ValueError(
            "async_steps=1 chooses prompts before the scores that solved_reward needs are known: "
            "expected one of them"
        )


def check_kl(config: PPOConfig) -> None:
    """Raises ValueError for options of the KL to the reference."""
    in_reward = config.is_used("kl_coef")
    in_loss = config.is_used("kl_loss_coef")
    moves = config.kl_controller != "fixed"
    if moves and config.kl_coef == 0:
        raise ValueError(
            f"kl_controller={config.kl_controller} multiplies kl_coef, so it must be > 0, got 0"
        )
    if moves and "kl_coef" in config.scheduled:
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
                "reference_refresh replaces the reference by the policy, which may be another "
                "architecture than reference_model: give one of them"
            )
        if config.reference_refresh == 1 and in_reward:
            raise ValueError(
                "reference_refresh=1: the KL of a rollout to its own policy is 0, so kl_coef must "
                "be 0; kl_loss_coef weighs the KL in the loss"
            )
    if config.kl_loss_estimator.endswith(BY_RATIO) and config.objective == "gspo":
        raise ValueError(
            f"kl_loss_estimator={config.kl_loss_estimator} needs the ratios of tokens, and "
            "objective=gspo has those of responses"
        )
    config.have_effect_only("kl_estimator", where=in_reward, needs="kl_coef > 0")
    config.have_effect_only("kl_loss_estimator", where=in_loss, needs="kl_loss_coef > 0")
    config.have_effect_only("kl_target", where=moves, needs="a kl_controller that moves")
    config.have_effect_only(
        "kl_horizon", where=config.kl_controller == "adaptive", needs="kl_controller=adaptive"
    )


def check_advantages(config: PPOConfig) -> None:
    """Raises ValueError for options that a kind of advantages does not have."""
    kind = config.advantage
    is_gae = kind in ("gae", "turn_gae")
    if config.bootstrap_truncated and not is_gae:
        raise ValueError(f"advantage={kind} is of complete returns; bootstrap_truncated is for gae")
    if kind in CRITIC_FREE and config.is_used("vf_coef"):
        raise ValueError(f"advantage={kind} has no value function to train, so vf_coef must be 0")
    if kind in CRITIC_FREE and config.value_model != "shared":
        raise ValueError(
            f"advantage={kind} has no value function, so value_model must be shared, which costs "
            "nothing"
        )
    if kind in ("rloo", "group") and config.samples_per_prompt < 2:
        raise ValueError(
            f"advantage={kind} compares responses to one prompt, so samples_per_prompt must be at "
            "least 2"
        )
    if kind == "group" and config.whiten_advantages == "full":
        raise ValueError(
            "advantage=group normalises the samples of each prompt, so whiten_advantages must be "
            "none or variance"
        )
    fixed_lam = is_gae and config.lam_alpha is None
    config.have_effect_only("lam", where=fixed_lam, needs="advantage=gae and no lam_alpha")
    config.have_effect_only("value_lam", where=is_gae, needs="advantage=gae")
    config.have_effect_only("lam_alpha", where=kind == "gae", needs="advantage=gae")
    config.have_effect_only("value_head", where=kind not in CRITIC_FREE, needs="a value function")


def check_pretraining(config: PPOConfig) -> None:
    """Raises ValueError where PPO-ptx has a coefficient without text, or text without one."""
    if config.is_used("ptx_coef") and not config.ptx_data:
        raise ValueError("ptx_coef > 0 needs ptx_data")
    if config.ptx_data and not config.is_used("ptx_coef"):
        raise ValueError("ptx_data is given and ptx_coef is 0: expected both or neither")
    config.have_effect_only(
        "ptx_batch_size", "ptx_block_size", where=config.ptx_data, needs="ptx_data"
    )


def check_evaluation(config: PPOConfig) -> None:
    """Raises ValueError for options of an evaluation that has no prompts."""
    config.have_effect_only(
        "eval_interval", "eval_sampling", where=config.eval_prompts, needs="eval_prompts"
    )


def check_watching(config: PPOConfig) -> None:
    """Raises ValueError for thresholds, metrics and trackers that are not understood."""
    if config.checkpoint_best is not None and not config.checkpoint_best.removeprefix("min:"):
        raise ValueError(
            f"checkpoint_best must name a metric, as `reward` or `min:kl`, got "
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
    """Raises ValueError for schedules that end where their option may not be."""
    schedules = [Schedule.parse(text) for text in config.schedules]
    if len(config.scheduled) < len(schedules):
        raise ValueError(f"schedules has one name twice: {config.schedules}")
    for schedule in schedules:
        if getattr(config, schedule.name) is None:
            raise ValueError(f"schedules: {schedule.name} has no value to start from")
        check_bounds(PPOConfig, schedule.name, schedule.final)
        if schedule.name == "dual_clip":
            scalars.check_dual_clip(schedule.final)


IDENTITY = (
    "param_dtype",
    "quantization",
    "lora_rank",
    "lora_alpha",
    "lora_target_modules",
    "reference_refresh",
    "value_model",
    "critic_model",
    "critic_frozen",
    "value_head",
    "value_epochs",
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
"""Options that say which run it is: a resumed run with another value is another run. Models, data
and rewards are known by their content, wherever they lie; rates and coefficients may move."""
