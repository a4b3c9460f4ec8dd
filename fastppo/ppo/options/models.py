"""Options of policy, reference policy and value function."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fastppo.run.options import Options, option, read_mapping


@dataclass(kw_only=True, frozen=True)
class PolicyOptions(Options):
    """Policy."""

    model: str = option(
        "",
        "Required. Directory or hub name of the SFT model, from which policy and reference start",
    )
    quantization: Literal["none", "nf4"] = option(
        "none",
        "Store the frozen weights under LoRA adapters in 4-bit NormalFloat (QLoRA), which needs "
        "bitsandbytes",
    )


@dataclass(kw_only=True, frozen=True)
class ReferenceOptions(Options):
    """Reference policy."""

    reference_model: str | None = option(
        None, "Directory or hub name of the model for the KL penalty; default: `model`"
    )
    reference_refresh: int = option(
        0,
        "Iterations after which the policy replaces the reference; 0 keeps the reference",
        minimum=0,
        needs="kl_coef or kl_loss_coef",
    )


@dataclass(kw_only=True, frozen=True)
class CriticOptions(Options):
    """The keys of `critic_options`."""

    epochs: int | None = option(
        None, "Passes over each batch, ppo_epochs of them with the policy", minimum=1
    )
    frozen: Literal["none", "attention"] = option("none", "Part that is not trained")


@dataclass(kw_only=True, frozen=True)
class ValueOptions(Options):
    """Value function."""

    value_model: Literal["shared", "detached", "critic"] = option(
        "shared",
        "shared: a value head on the policy's trunk, which the value loss trains if vf_coef > 0; "
        "detached: its loss does not train the trunk; critic: a separate model",
    )
    critic_model: str | None = option(
        None,
        "Model that the critic starts from: a reward model, a causal LM, or the "
        "value_function.safetensors of an earlier critic; default: the policy",
        needs="value_model=critic",
    )
    critic_options: Mapping[str, Any] | None = option(
        None,
        "How the critic is trained, as a YAML mapping such as '{epochs: 8, frozen: attention}'. "
        "epochs: passes over each batch, of which ppo_epochs also train the policy; frozen: none "
        "or attention (SAO)",
        needs="value_model=critic",
    )
    value_head: Literal["auto", "closed_form", "gradient"] = option(
        "auto",
        "closed_form fits the value head to the returns by ridge regression after each update; "
        "gradient trains it with the optimizer; auto is gradient for a critic, else closed_form",
        needs="advantage=gae/turn_gae/sequence/file.py:name",
    )
    value_warmup_iterations: int = option(
        0, "Number of first iterations that train only the value function", minimum=0
    )
    vf_coef: float | None = option(
        None,
        "Weight of the value loss, which is divided by the variance of the returns; default: 0.5, "
        "or 0 for a head in closed form on the policy's trunk without a schedule of vf_coef",
        minimum=0,
        needs="value_head=gradient or "
        "value_model=shared/critic and advantage=gae/turn_gae/sequence/file.py:name",
    )
    value_clip: float | None = option(
        None,
        "Clip the change of a value in an iteration to this range, in reward units",
        above=0,
        needs="value_model=critic or value_head=gradient",
    )

    @property
    def critic(self) -> CriticOptions:
        """The keys of `critic_options`."""
        return read_mapping("critic_options", self.critic_options, CriticOptions)
