"""Options of the update: loss, KL, advantages, optimizer, and schedules of coefficients."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from fastppo.functional import scalars
from fastppo.ppo.controllers import KL_CONTROLLERS
from fastppo.run.options import Options, option

SCHEDULED = (
    "clip_ratio",
    "clip_ratio_high",
    "dual_clip",
    "value_clip",
    "entropy_coef",
    "vf_coef",
    "kl_coef",
    "kl_loss_coef",
    "ptx_coef",
    "missing_eos_penalty",
    "early_stop_kl",
    "step_kl",
)
"""Options that `schedules` may change; the learning rate has `lr_schedule`."""


class Schedule(NamedTuple):
    """`name=shape:final`: from the option's value to `final` over the iterations of the run.

    `entropy_coef=target:nats` adapts the coefficient to the entropy instead.
    """

    name: str
    shape: str
    final: float

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Parse an entry of `schedules`.

        Raises:
            ValueError: it has another form; the message names the right one.
        """
        match = re.fullmatch(r"\s*(\w+)\s*=\s*(\w+)\s*:\s*(\S+)\s*", text)
        if match is None:
            raise ValueError(
                f"schedules: expected name=linear:final or name=cosine:final, got {text!r}"
            )
        name, shape, last = match.groups()
        scalars.choice("schedules: the name", name, SCHEDULED)
        shapes: tuple[str, ...] = ("constant", "linear", "cosine")
        if name == "entropy_coef":
            shapes = (*shapes, "target")
        scalars.choice("schedules: the shape", shape, shapes)
        try:
            final = float(last)
        except ValueError:
            raise ValueError(f"schedules: {last!r} in {text!r} is not a number") from None
        return cls(name, shape, final)

    def value(self, start: float, progress: float) -> float:
        """Return the value at `progress` in [0, 1] of the run."""
        if self.shape in ("constant", "target"):
            return start
        left = 1 - progress if self.shape == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
        return self.final + (start - self.final) * left


@dataclass(kw_only=True, frozen=True)
class UpdateOptions(Options):
    """Update."""

    iterations: int = option(
        100, "Number of PPO iterations, each a rollout and an update", minimum=1
    )
    ppo_epochs: int = option(4, "Number of epochs over each rollout batch", minimum=1)
    minibatches: int = option(2, "Number of minibatches, and optimizer steps, per epoch", minimum=1)
    microbatch_size: int = option(
        16, "Number of sequences per forward and backward pass", minimum=1
    )
    microbatch_tokens: int | None = option(
        None,
        "Number of tokens per forward and backward pass, padding included, instead of "
        "microbatch_size. A longer sequence is a microbatch by itself",
        minimum=1,
    )
    packing: Literal["auto", "on", "off"] = option(
        "auto",
        "Concatenate the sequences of a microbatch instead of padding them. auto does so on a GPU "
        "if both give the same logprobs on a small batch",
    )
    objective: (
        str | Literal["clip", "penalty", "cispo", "sapo", "gspo", "dis", "dppo_tv", "dppo_kl"]
    ) = option(
        "clip",
        "Policy loss. clip is PPO's; penalty adds the KL to the rollout policy with an adaptive "
        "weight; cispo weights the logprob by the clipped ratio; sapo has a soft gate; gspo clips "
        "the ratio of the response; dis drops tokens outside the clip range; dppo_tv and dppo_kl "
        "bound a divergence instead of the ratio; or your function: file.py:function, "
        "package.module:function",
    )
    clip_ratio: float = option(
        0.2,
        "Clip range ε: the ratio is clipped to [1 − ε, 1 + ε]",
        minimum=0,
        maximum=1,
        needs="objective=clip/cispo/gspo/dis/dppo_tv/dppo_kl",
    )
    clip_ratio_high: float | None = option(
        None,
        "Upper clip range: the ratio is clipped at 1 + this value; default: clip_ratio",
        minimum=0,
        needs="objective=clip/cispo/gspo/dis/dppo_tv/dppo_kl",
    )
    dual_clip: float | None = option(
        None, "Dual clip c > 1, which bounds the loss by c·|A| where A < 0"
    )
    early_stop_kl: float | None = option(
        None,
        "End the update of an iteration when the KL to the rollout policy exceeds this value, in "
        "nats per token",
        above=0,
    )
    entropy_coef: float = option(0.0, "Weight of the entropy bonus in the loss", minimum=0)
    aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "token-sum"] = (
        option("token-mean", "How the losses of the tokens are reduced to one loss")
    )
    schedules: Sequence[str] = option(
        [],
        "Coefficients that change over the run, as name=linear:final or name=cosine:final, such "
        "as entropy_coef=linear:0. entropy_coef=target:1.5 holds the entropy at 1.5 nats per token",
    )
    backend: Literal["auto", "triton", "cpu", "torch"] = option(
        "auto", "Kernels that compute the losses"
    )


@dataclass(kw_only=True, frozen=True)
class KLOptions(Options):
    """KL to the reference."""

    kl_coef: float = option(0.05, "Weight β of the KL penalty in the reward, per nat", minimum=0)
    kl_estimator: Literal["k1", "k2", "k3", "full"] = option(
        "k1", "Estimator of the KL in the reward; full is exact", needs="kl_coef"
    )
    kl_controller: str = option(
        "fixed",
        "How β changes. "
        + "; ".join(f"{name}: {control.summary}" for name, control in KL_CONTROLLERS.items())
        + ". β is constant during value_warmup_iterations",
        choices=KL_CONTROLLERS,
        needs="kl_coef",
    )
    kl_target: float = option(
        6.0,
        "Target KL of the controller, in nats per sequence",
        above=0,
        needs="kl_controller!=fixed",
    )
    kl_loss_coef: float = option(
        0.0, "Weight of the KL to the reference in the loss, per nat", minimum=0
    )
    kl_loss_estimator: Literal["k1", "k2", "k3", "k1_by_ratio", "k3_by_ratio", "full"] = option(
        "k3",
        "Estimator of the KL in the loss. by_ratio weights it by the ratio, which makes it "
        "unbiased after several steps; full is exact and runs the reference in the update",
        needs="kl_loss_coef",
    )


@dataclass(kw_only=True, frozen=True)
class AdvantageOptions(Options):
    """Advantages."""

    gamma: float = option(1.0, "Discount factor per token", minimum=0, maximum=1)
    lam: float = option(
        0.95,
        "λ of GAE per token",
        minimum=0,
        maximum=1,
        needs="advantage=turn_gae or advantage=gae and lam_alpha=none",
    )
    advantage: str | Literal["gae", "turn_gae", "sequence", "reinforce", "rloo", "group"] = option(
        "gae",
        "Advantage estimator. gae; turn_gae is GAE over turns; sequence is R − V(prompt) for every "
        "token. Without a value function: reinforce is the reward to go; rloo is R − the mean of "
        "the prompt's other samples; group is GRPO's (R − mean)/std over the prompt's "
        "samples. Or your function: file.py:function, package.module:function",
    )
    lam_alpha: float | None = option(
        None,
        "Use λ = max(0, 1 − 1/(α·length)) for each response instead of lam, with this α",
        above=0,
        needs="advantage=gae",
    )
    value_lam: float | None = option(
        None,
        "λ of the returns that the value function learns; default: lam",
        minimum=0,
        maximum=1,
        needs="advantage=gae/turn_gae",
    )
    whiten_advantages: bool | None = option(
        None,
        "Normalize the advantages of a batch to mean 0 and variance 1; default: true, and false "
        "for advantage=group",
    )


@dataclass(kw_only=True, frozen=True)
class OptimizerOptions(Options):
    """Optimizer."""

    learning_rate: float | Literal["auto"] = option(
        "auto", "Peak learning rate; auto adapts it to step_kl after every update", above=0
    )
    step_kl: float | None = option(
        None,
        "Target KL of an update to the rollout policy at an entropy of one nat, both per token; it "
        "grows with the square root of the entropy. The default is 0.02 for a rollout_batch_size "
        "of 64, and grows with its square root up to 0.04",
        above=0,
        needs="learning_rate=auto",
    )
    value_learning_rate: float | None = option(
        None,
        "Peak learning rate of the value head, or of the whole critic; default: learning_rate, and "
        "ten times that for a critic",
        minimum=0,
        needs="value_model=critic or value_head=gradient",
    )
    lr_schedule: Literal["constant", "linear", "cosine"] = option(
        "constant",
        "Schedule of the learning rate after the warmup: constant, or a decay to 0 over the run. "
        "With learning_rate=auto it is a factor of the adapted rate",
    )
    warmup_steps: int = option(
        0,
        "Number of optimizer steps of linear warmup, also a factor with learning_rate=auto",
        minimum=0,
    )
    optimizer: str | Literal["adamw"] = option(
        "adamw",
        "adamw, or a class or function that takes parameter groups, as package.module:Name or "
        "file.py:name, such as torchao.optim:AdamW8bit",
    )
    optimizer_options: Mapping[str, Any] | None = option(
        None, "Keyword arguments of the optimizer, as a YAML mapping such as '{eps: 1.0e-6}'"
    )
    weight_decay: float = option(0.0, "Weight decay of matrices", minimum=0)
    max_grad_norm: float = option(
        1.0, "Maximum norm of the gradients, to which they are clipped", above=0
    )
