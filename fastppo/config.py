"""One dataclass of options: each is a key of the YAML file and a flag of the command line."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from fastppo import validation


def _option(default: Any, help: str) -> Any:
    metadata = {"help": help}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


_COUNTS = (
    *("rollout_batch_size", "max_new_tokens", "iterations", "ppo_epochs", "minibatches"),
    *("microbatch_size", "reward_batch_size", "reward_max_length", "generate_batch_size"),
    *("log_interval", "checkpoint_limit"),
)
_POSITIVE = (
    *("temperature", "learning_rate", "kl_target", "kl_horizon", "max_grad_norm", "adam_eps"),
    *("value_clip", "score_clip", "lora_alpha"),
)
_NOT_NEGATIVE = (
    *("kl_coef", "kl_loss_coef", "entropy_coef", "vf_coef", "weight_decay", "top_k", "lora_rank"),
    *("warmup_steps", "checkpoint_interval", "log_samples", "value_learning_rate"),
    *("missing_eos_penalty", "seed"),
)
BOUNDS: dict[str, tuple[float, bool]] = {
    **dict.fromkeys(_COUNTS, (1, False)),
    **dict.fromkeys(_POSITIVE, (0, True)),
    **dict.fromkeys(_NOT_NEGATIVE, (0, False)),
}
"""Lower bounds of options: (bound, whether the value must be above it)."""


@dataclass(kw_only=True, slots=True)
class PPOConfig:
    """Options of a PPO run. Lengths are in tokens, KL and entropy in nats, sizes in sequences."""

    # Models
    model: str = _option(
        "", "Required. The SFT model: directory or hub name; policy and reference start there"
    )
    param_dtype: Literal["float32", "bfloat16"] = _option(
        "float32",
        "Dtype of the weights; float32 keeps small updates that bfloat16 would round away",
    )
    precision: Literal["auto", "bf16", "fp32"] = _option(
        "auto", "Compute dtype: bf16 (autocast) or fp32; auto is bf16 on a GPU, fp32 on a CPU"
    )
    attn_implementation: str = _option(
        "auto", "auto (flash-attn if installed, else sdpa), sdpa, eager or flash_attention_2"
    )
    gradient_checkpointing: bool = _option(False, "Recompute activations in backward: less memory")
    lora_rank: int = _option(0, "Rank of LoRA adapters; 0 trains all weights. Needs peft")
    lora_alpha: float = _option(32.0, "LoRA scale: the update is alpha/rank · BA")
    lora_target_modules: list[str] | None = _option(
        None, "Modules that get adapters; none given means all linear layers"
    )

    # Data
    prompts: str = _option(
        "", "Required. Prompts: .jsonl, .parquet, a save_to_disk directory or a hub name"
    )
    prompt_column: str = _option("prompt", "Column of the prompt: a string or chat messages")
    split: str = _option("train", "Split of a datasets directory or hub dataset")

    # Rewards
    rewards: list[str] = _option(
        [], "Required. file.py:function, module:function, or a sequence-classification model"
    )
    reward_weights: list[float] | None = _option(None, "One weight per reward; none given means 1")
    monitor_rewards: list[str] = _option([], "Rewards that are logged and not trained on")
    reward_batch_size: int = _option(32, "Texts per forward pass of a reward model, sequences")
    reward_max_length: int | None = _option(
        None, "Longest text of a reward model, tokens; none given means its context"
    )
    missing_eos_penalty: float | None = _option(
        None, "Subtracted from the score of a response cut off at max_new_tokens, reward units"
    )
    score_clip: float | None = _option(None, "Clamp scores to ±this, reward units")

    # Rollout
    rollout_batch_size: int = _option(64, "Prompts, and so responses, per iteration, sequences")
    generate_batch_size: int | None = _option(
        None, "Sequences generated at once; none given means the whole rollout batch"
    )
    max_new_tokens: int = _option(128, "Longest response, tokens")
    temperature: float = _option(1.0, "Sampling temperature, the loss's too")
    top_k: int = _option(0, "Sample from the k likeliest tokens, tokens; 0 is all of them")
    top_p: float = _option(1.0, "Sample from the smallest set of this probability; 1 is all")
    stop_token_ids: list[int] | None = _option(
        None, "Tokens that end a response; none given means the model's EOS tokens"
    )

    # PPO
    iterations: int = _option(100, "PPO iterations: rollouts followed by updates")
    ppo_epochs: int = _option(4, "Passes over each rollout batch")
    minibatches: int = _option(4, "Optimiser steps per pass")
    microbatch_size: int = _option(16, "Sequences per forward and backward pass")
    clip_ratio: float = _option(0.2, "ε: the ratio's gain is cut off below 1 − ε and above 1 + ε")
    clip_ratio_high: float | None = _option(None, "ε above 1; none given means clip_ratio")
    dual_clip: float | None = _option(None, "c > 1: bounds the loss at c·|A| where A < 0")
    entropy_coef: float = _option(0.0, "Weight of the entropy bonus in the loss")
    aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "token-sum"] = (
        _option("token-mean", "How token losses add up to the loss")
    )
    kl_coef: float = _option(0.05, "β: weight of the KL to the reference in the reward, per nat")
    kl_estimator: Literal["k1", "k2", "k3"] = _option("k1", "Estimator of the KL in the reward")
    kl_controller: Literal["fixed", "adaptive", "penalty"] = _option(
        "fixed", "How β moves: fixed, adaptive (Ziegler 2019), penalty (doubling, Schulman 2017)"
    )
    kl_target: float = _option(6.0, "Target of a moving β, nats per sequence")
    kl_horizon: float = _option(10_000.0, "Horizon of the adaptive β, sequences")
    kl_loss_coef: float = _option(0.0, "Weight of a KL to the reference in the loss, per nat")
    kl_loss_estimator: Literal["k1", "k2", "k3", "full"] = _option(
        "k3", "Estimator of the KL in the loss; full is exact and runs the reference in the update"
    )
    gamma: float = _option(1.0, "Discount per token")
    lam: float = _option(0.95, "λ of GAE, per token")
    whiten_advantages: bool = _option(True, "Normalise advantages to mean 0, variance 1")
    bootstrap_truncated: bool = _option(
        False, "Behind a truncated response stands its last value, not 0"
    )
    vf_coef: float = _option(0.5, "Weight of the value loss")
    value_clip: float | None = _option(None, "Clip of the value's move per rollout, reward units")
    loss_path: Literal["auto", "linear", "logits"] = _option(
        "auto", "linear never forms all logits; logits does; auto is linear"
    )
    backend: Literal["auto", "triton", "torch"] = _option("auto", "Kernels of the losses")

    # Optimiser
    learning_rate: float = _option(1e-5, "Peak learning rate of AdamW")
    value_learning_rate: float | None = _option(
        None, "Peak learning rate of the value head; none given means learning_rate"
    )
    lr_schedule: Literal["constant", "linear", "cosine"] = _option(
        "constant", "Learning rate after warm-up: constant, or decay to 0 over the run"
    )
    warmup_steps: int = _option(0, "Linear warm-up, optimiser steps")
    weight_decay: float = _option(0.0, "AdamW's weight decay, on matrices")
    adam_beta1: float = _option(0.9, "AdamW's β₁")
    adam_beta2: float = _option(0.95, "AdamW's β₂")
    adam_eps: float = _option(1e-8, "AdamW's ε")
    max_grad_norm: float = _option(1.0, "Gradients are scaled down to this norm")

    # Run
    output_dir: str = _option("runs/ppo", "Run directory")
    seed: int = _option(0, "Seed of sampling, shuffling and initialisation")
    device: str = _option("auto", "auto (a GPU if there is one), cpu, cuda, cuda:1, …")
    log_samples: int = _option(8, "Samples written per logged iteration, sequences")
    log_interval: int = _option(1, "Iterations between entries of samples.jsonl")
    checkpoint_interval: int = _option(50, "Iterations between checkpoints; 0 writes the last only")
    checkpoint_limit: int = _option(2, "Checkpoints kept")
    resume: bool = _option(False, "Go on from the newest checkpoint of output_dir")
    wandb_project: str | None = _option(None, "Also log to this Weights & Biases project")

    def __post_init__(self) -> None:
        hints = get_type_hints(PPOConfig)
        for option in fields(self):
            value = _converted(option.name, getattr(self, option.name), hints[option.name])
            setattr(self, option.name, value)
        self.validate()

    def validate(self) -> None:
        """Raises ValueError with the option's name, what it got and what it wants."""
        for name, (low, strictly) in BOUNDS.items():
            value = getattr(self, name)
            if value is not None:
                validation.at_least(name, value, low, strictly=strictly)
        for name in ("gamma", "lam", "top_p", "adam_beta1", "adam_beta2"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {value!r}")
        validation.clip_range(self.clip_range)
        validation.dual_clip(self.dual_clip)
        if self.rollout_batch_size % self.minibatches:
            raise ValueError(
                f"rollout_batch_size must be a multiple of minibatches, "
                f"got {self.rollout_batch_size} and {self.minibatches}"
            )
        given = self.rewards and self.reward_weights is not None
        if given and len(self.reward_weights or ()) != len(self.rewards):
            raise ValueError(
                f"reward_weights must be one per reward: got {len(self.reward_weights or ())} "
                f"for {len(self.rewards)} rewards"
            )
        if self.kl_controller != "fixed" and self.kl_coef == 0:
            raise ValueError(
                f"kl_controller={self.kl_controller} multiplies kl_coef, so it must be > 0, got 0"
            )

    @property
    def clip_range(self) -> tuple[float, float]:
        """(ε_low, ε_high)."""
        high = self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high
        return self.clip_ratio, high

    @property
    def optimizer_steps(self) -> int:
        """Optimiser steps of the whole run."""
        return self.iterations * self.ppo_epochs * self.minibatches

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def save(self, path: str | Path) -> None:
        """Writes every option, defaults included, as YAML."""
        text = yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)
        Path(path).write_text(text, encoding="utf-8")


def _converted(name: str, value: Any, hint: Any) -> Any:
    """`value` as the option's type. YAML reads 1e-5 as a string, and 1 where 1.0 is meant."""
    if get_origin(hint) is Literal:
        return validation.choice(name, value, get_args(hint))
    if get_origin(hint) in (Union, UnionType):
        (inner,) = (choice for choice in get_args(hint) if choice is not type(None))
        return None if value is None else _converted(name, value, inner)
    if get_origin(hint) is list:
        if not isinstance(value, (list, tuple)):
            raise ValueError(f"{name} must be a list, got {value!r}")
        return [_converted(name, item, get_args(hint)[0]) for item in value]
    if hint in (int, float) and not isinstance(value, bool):
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if math.isfinite(number) and (hint is float or number == int(number)):
            return hint(number)
    elif isinstance(value, hint):
        return value
    names = {int: "an integer", float: "a finite number", bool: "true or false", str: "a text"}
    raise ValueError(f"{name} must be {names[hint]}, got {value!r}")


def read_yaml(path: str | Path, options: Callable[..., Any] = PPOConfig) -> dict[str, Any]:
    """The keys of a YAML file of options.

    Raises:
        ValueError: no mapping, or a key that is no option; the nearest option is named.
    """
    import difflib

    if not Path(path).is_file():
        raise ValueError(f"there is no config file {path}")
    try:
        loaded = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(loaded, dict):
        raise ValueError(f"{path}: want `option: value` lines, got {type(loaded).__name__}")
    known = [f.name for f in fields(options)]  # type: ignore[arg-type]
    for key in loaded:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"{path}: no option {key!r}{hint}")
    return loaded
