"""Adapters of other packages, which call their public functions without copying code.

A public method of a trainer is called with a stand-in for `self` that has the attributes it reads.
Packages are imported inside the builders, because their dependencies conflict.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
import typing
from collections import defaultdict
from collections.abc import Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch
from torch import Tensor

from benchmarks.conformance.adapter import (
    Adapter,
    Answer,
    Inputs,
    Policy,
    module,
    need,
    policy_outputs,
    with_gradient,
)

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

NO_CLIP = 1e9
NO_BOOTSTRAP = "no value after a truncated response"
NO_PACKING = "padded sequences only"
LOGPROBS_ONLY = "its policy loss takes logprobs without this objective"


def stand_in(*names: str) -> None:
    """Replace modules that cannot be installed without a GPU, and that no tested function uses."""
    for name in names:
        if name not in sys.modules:
            fake = MagicMock()
            fake.__spec__ = importlib.machinery.ModuleSpec(name, None)
            sys.modules[name] = fake


def padded(inputs: Inputs) -> None:
    need("cu_seqlens" not in inputs, NO_PACKING)
    need("bootstrap" not in inputs, NO_BOOTSTRAP)


def token_scores(inputs: Inputs) -> Tensor:
    """Place the scores [B] on the last tokens, for packages that want scores per token."""
    placed = torch.zeros_like(inputs["logprobs"])
    last = inputs["mask"].shape[1] - 1 - inputs["mask"].long().flip(1).argmax(1)
    placed[torch.arange(len(placed)), last] = inputs["scores"]
    return placed


def outcome_scores(scores: Tensor, size: int) -> dict[str, Any]:
    """Return the arguments of verl's and SkyRL's advantages of whole responses, of one token each.

    Args:
        size: adjacent responses to each prompt.
    """
    return {
        "token_level_rewards": scores[:, None].clone(),
        "response_mask": torch.ones_like(scores)[:, None],
        "index": np.arange(len(scores)) // size,
    }


def adaptive(controller: Any, inputs: Inputs) -> Mapping[str, Any]:
    coefs = []
    for kl, count in zip(inputs["kl"].tolist(), inputs["sequences"].tolist(), strict=True):
        controller.update(kl, count)
        coefs.append(controller.value)
    return {"coefs": torch.tensor(coefs)}


# ---------------------------------------------------------------------------------------------- TRL


def trl_ppo() -> dict[str, Answer]:
    """Return the public functions; the rest of this trainer's PPO is inside its `train` method."""
    trainer = module("trl.experimental.ppo.ppo_trainer")
    utils = module("trl.trainer.utils")

    def whiten(inputs: Inputs, shift_mean: bool) -> Mapping[str, Any]:
        mask = inputs.get("mask", torch.ones_like(inputs["x"], dtype=torch.bool))
        return {"whitened": trainer.masked_whiten(inputs["x"], mask, shift_mean)}

    return {"whiten": whiten, "token": trl_token(utils)}


def trl_token(utils: Any) -> Answer:
    def token(inputs: Inputs, temperature: float) -> Mapping[str, Any]:
        logits = inputs["logits"] / temperature
        return {
            "logprobs": utils.selective_log_softmax(logits, inputs["tokens"]),
            "entropy": utils.entropy_from_logits(logits),
        }

    return token


TRL_LOSSES = {
    "token-mean": "dapo",
    "seq-mean-token-mean": "grpo",
    "constant": "dr_grpo",
}


def trl_grpo() -> dict[str, Answer]:
    trainer = module("trl.trainer.grpo_trainer").GRPOTrainer

    def loss_of(
        logprobs: Tensor,
        inputs: Inputs,
        options: Policy,
        *,
        loss_type: str,
        beta: float = 0.0,
        kl_weighted: bool = False,
        token_count: Tensor | None = None,
    ) -> Tensor:
        """Call `GRPOTrainer.compute_loss` for a model that returns these logprobs."""
        mask = inputs["mask"].long()
        tau_positive, tau_negative = options.tau or (1.0, 1.0)
        steps = len(options.microbatches or [[]])
        out = SimpleNamespace(log_probs=logprobs, entropy=torch.zeros_like(logprobs))
        model = MagicMock(return_value=out)
        stand = object.__new__(trainer)
        stand.__dict__.update(
            accelerator=SimpleNamespace(
                autocast=nullcontext,
                num_processes=1,
                is_main_process=False,
                gather=lambda x: x,
                reduce=lambda x, **_: x,
            ),
            args=SimpleNamespace(
                delta=options.dual_clip,
                use_bias_correction_kl=kl_weighted,
                sapo_temperature_pos=tau_positive,
                sapo_temperature_neg=tau_negative,
                steps_per_generation=steps,
                report_to=[],
            ),
            model=SimpleNamespace(training=True),
            aux_loss_enabled=False,
            top_entropy_quantile=1.0,
            off_policy_mask_threshold=None,
            importance_sampling_level="sequence" if options.objective == "gspo" else "token",
            beta=beta,
            loss_type=options.objective if options.objective in ("cispo", "sapo") else loss_type,
            epsilon_low=options.low,
            epsilon_high=1 + options.high if options.objective == "cispo" else options.high,
            use_vllm="importance_weights" in inputs,
            vllm_importance_sampling_correction=True,
            current_gradient_accumulation_steps=steps,
            max_completion_length=options.length,
            _entropy_bonus_enabled=False,
            _metrics={"train": defaultdict(list)},
        )
        none = mask[:, :0]
        batch = {
            "prompt_ids": none,
            "prompt_mask": none,
            "completion_ids": mask,
            "completion_mask": mask,
            "advantages": inputs["advantages"],
            "old_per_token_logps": inputs["old_logprobs"],
            "ref_per_token_logps": inputs.get("ref_logprobs"),
            "importance_sampling_ratio": inputs.get("importance_weights"),
            "num_items_in_batch": mask.sum() if token_count is None else token_count,
        }
        return stand.compute_loss(model, batch)

    def policy(inputs: Inputs, **given: Any) -> Mapping[str, Any]:
        options = Policy(**given)
        need(options.objective in ("clip", "gspo", "cispo", "sapo"), "no loss type with this mask")
        need(options.aggregation in TRL_LOSSES, "no loss type with this aggregation")
        sizes = {len(rows) for rows in options.microbatches or []}
        need(len(sizes) < 2, "all of its microbatches have the same number of sequences")

        def loss(logprobs: Tensor, part: Inputs) -> Tensor:
            return loss_of(
                logprobs,
                part,
                options,
                loss_type=TRL_LOSSES[options.aggregation],
                token_count=inputs["mask"].sum(),
            )

        return policy_outputs(loss, inputs, options)

    def kl(inputs: Inputs, estimator: str, ratio_weighted: bool = False) -> Mapping[str, Any]:
        need(estimator == "k3", "its KL is k3")
        ppo = Policy(objective="clip", clip=(0.2, 0.2))
        logprobs = inputs["logprobs"]
        zeros = {
            "mask": torch.ones_like(logprobs, dtype=torch.bool),
            "advantages": torch.zeros_like(logprobs),
            "old_logprobs": logprobs,
        }

        def total(x: Tensor) -> Tensor:
            loss = loss_of(
                x, zeros | inputs, ppo, loss_type="bnpo", beta=1.0, kl_weighted=ratio_weighted
            )
            return loss * logprobs.numel()

        return {"gradient": with_gradient(total, logprobs)[1]}

    return {"policy": policy, "kl": kl, "token": trl_token(module("trl.trainer.utils"))}


# --------------------------------------------------------------------------------------------- verl


def verl() -> dict[str, Answer]:
    algorithms = module("verl.trainer.ppo.core_algos")
    functional = module("verl.utils.torch_functional")
    fused = module("verl.utils.experimental.torch_functional").FusedLinearForPPO()
    actor_config = module("verl.workers.config").ActorConfig
    correction = module("verl.trainer.ppo.rollout_corr_helper")

    def gae(inputs: Inputs, gamma: float, lam: float) -> Mapping[str, Any]:
        padded(inputs)
        _, returns = algorithms.compute_gae_advantage_return(
            inputs["rewards"], inputs["values"], inputs["mask"].float(), gamma, lam
        )
        return {"returns": returns}  # it always whitens the advantages

    def rewards(inputs: Inputs, kl_coef: float, estimator: str) -> Mapping[str, Any]:
        need(kl_coef > 0 and estimator == "k1", "takes scores per token; the penalty is k1")
        shaped = algorithms.compute_rewards(
            token_scores(inputs), inputs["logprobs"], inputs["ref_logprobs"], kl_coef
        )
        return {"rewards": shaped}

    def whiten(inputs: Inputs, shift_mean: bool) -> Mapping[str, Any]:
        mask = inputs.get("mask", torch.ones_like(inputs["x"])).float()
        return {"whitened": functional.masked_whiten(inputs["x"], mask, shift_mean)}

    def kl(inputs: Inputs, estimator: str, ratio_weighted: bool = False) -> Mapping[str, Any]:
        need(not ratio_weighted, "no KL times the ratio")
        value, gradient = with_gradient(
            lambda x: algorithms.kl_penalty(x, inputs["ref_logprobs"], estimator),
            inputs["logprobs"],
        )
        return {"kl": value, "gradient": gradient}

    def policy(inputs: Inputs, **given: Any) -> Mapping[str, Any]:
        options = Policy(**given)
        taus = {}
        if options.tau:
            taus = {"tau_pos": options.tau[0], "tau_neg": options.tau[1]}
        config = actor_config(
            strategy="fsdp",
            rollout_n=1,
            ppo_micro_batch_size_per_gpu=1,
            clip_ratio_low=options.low,
            clip_ratio_high=options.high,
            clip_ratio_c=options.dual_clip or NO_CLIP,  # in DPPO, this bounds the detached ratio
            **taus,
        )
        mask = inputs["mask"].float()
        config.global_batch_info.update(
            batch_num_tokens=mask.sum(),
            global_batch_size=(mask.sum(1) > 0).sum(),
            loss_scale_factor=options.length,
        )
        mode = options.aggregation
        if mode == "constant":
            mode = "seq-mean-token-sum-norm"

        def loss(logprobs: Tensor, part: Inputs) -> Tensor:
            given = {
                "log_prob": logprobs,
                "advantages": part["advantages"],
                "response_mask": part["mask"].float(),
                "loss_agg_mode": mode,
                "config": config,
                "rollout_is_weights": part.get("importance_weights"),
            }
            if options.objective == "dis":  # REINFORCE with IcePop's weights
                bounds = f"{1 - options.low}_{1 + options.high}"
                given["rollout_is_weights"], _ = correction.compute_rollout_correction_weights(
                    given["log_prob"].detach() - part["old_logprobs"],
                    given["response_mask"],
                    rollout_is="token",
                    rollout_is_threshold=bounds,
                )
                return algorithms.compute_policy_loss_reinforce(
                    rollout_log_prob=part["old_logprobs"], **given
                )[0]
            name = "vanilla" if options.objective == "clip" else options.objective
            compute = algorithms.get_policy_loss_fn(name)
            return compute(old_log_prob=part["old_logprobs"], **given)[0]

        return policy_outputs(loss, inputs, options)

    def value(inputs: Inputs, clip: float | None) -> Mapping[str, Any]:
        total, gradient = with_gradient(
            lambda x: algorithms.compute_value_loss(
                x,
                inputs["returns"],
                inputs["old_values"],
                inputs["mask"].float(),
                clip or NO_CLIP,
            )[0],
            inputs["values"],
        )
        return {"loss": total, "gradient": gradient}

    def token(inputs: Inputs, temperature: float) -> Mapping[str, Any]:
        logits = inputs["logits"]
        if logits.isinf().any():  # which a product with an lm-head cannot yield
            return {"entropy": functional.entropy_from_logits(logits)}
        logprobs, entropy = fused(
            logits, torch.eye(logits.shape[-1]), inputs["tokens"], temperature
        )
        return {"logprobs": logprobs, "entropy": entropy}

    def importance(
        inputs: Inputs, level: str, mode: str, floor: float | None, cap: float
    ) -> Mapping[str, Any]:
        weights, _ = correction.compute_rollout_correction_weights(
            inputs["logprobs"] - inputs["sampler_logprobs"],
            inputs["mask"].float(),
            rollout_is=level,
            rollout_is_threshold=f"{floor}_{cap}" if mode == "mask" else str(cap),
        )
        return {"weights": weights}

    def group(inputs: Inputs, kind: str, size: int) -> Mapping[str, Any]:
        given = outcome_scores(inputs["scores"], size)
        if kind == "rloo":
            made = algorithms.compute_rloo_outcome_advantage(**given)
        else:
            made = algorithms.compute_grpo_outcome_advantage(
                **given, norm_adv_by_std_in_grpo=kind == "grpo"
            )
        return {"advantages": made[0][:, 0]}

    return {
        "gae": gae,
        "rewards": rewards,
        "whiten": whiten,
        "kl": kl,
        "kl_control": lambda inputs, coef, target, horizon: adaptive(
            algorithms.AdaptiveKLController(coef, target, horizon), inputs
        ),
        "policy": policy,
        "value": value,
        "token": token,
        "importance": importance,
        "group": group,
    }


# ----------------------------------------------------------------------------------------- OpenRLHF


def openrlhf() -> dict[str, Answer]:
    stand_in(
        "flash_attn",
        "flash_attn.bert_padding",
        "flash_attn.utils",
        "flash_attn.utils.distributed",
    )
    losses = module("openrlhf.models.loss")
    utils = module("openrlhf.models.utils")
    control = module("openrlhf.trainer.ppo_utils.kl_controller").AdaptiveKLController
    maker = module("openrlhf.trainer.ppo_utils.experience_maker").RemoteExperienceMaker

    def gae(inputs: Inputs, gamma: float, lam: float) -> Mapping[str, Any]:
        padded(inputs)
        advantages, returns = maker.get_advantages_and_returns(
            None, inputs["values"], inputs["rewards"], inputs["mask"].float(), gamma, lam
        )
        return {"advantages": advantages, "returns": returns}

    def rewards(inputs: Inputs, kl_coef: float, estimator: str) -> Mapping[str, Any]:
        kl = utils.compute_approx_kl(
            inputs["logprobs"], inputs["ref_logprobs"], kl_estimator=estimator
        )
        shaped = utils.compute_reward(inputs["scores"], kl_coef, kl, inputs["mask"])
        return {"rewards": shaped}

    def whiten(inputs: Inputs, shift_mean: bool) -> Mapping[str, Any]:
        need(shift_mean, "always subtracts the mean")
        x = inputs["x"].flatten()
        mask = inputs.get("mask", torch.ones_like(inputs["x"])).flatten().float()
        return {"whitened": utils.masked_normalize(x, mask, dim=0).view_as(inputs["x"])}

    def kl(inputs: Inputs, estimator: str, ratio_weighted: bool = False) -> Mapping[str, Any]:
        need(not ratio_weighted, "`unbiased_gradient` keeps the value and has k2's gradient")
        value, gradient = with_gradient(
            lambda x: utils.compute_approx_kl(x, inputs["ref_logprobs"], kl_estimator=estimator),
            inputs["logprobs"],
        )
        return {"kl": value, "gradient": gradient}

    def policy(inputs: Inputs, **given: Any) -> Mapping[str, Any]:
        options = Policy(**given)
        need(options.objective in ("clip", "gspo"), "policy_loss_type is ppo or gspo")
        need(
            options.aggregation in ("token-mean", "seq-mean-token-mean"),
            "means by token or by sequence",
        )
        correction = "importance_weights" in inputs
        function = losses.PolicyLoss(
            clip_eps_low=options.low,
            clip_eps_high=options.high,
            dual_clip=options.dual_clip,
            token_level_loss=options.aggregation == "token-mean",
            policy_loss_type="ppo" if options.objective == "clip" else options.objective,
            is_correction_level="token" if correction else "off",
            is_correction_mode="clip" if correction else "mask",
            is_correction_threshold=[0.0, NO_CLIP],
        )

        def loss(logprobs: Tensor, part: Inputs) -> Tensor:
            rollout = None
            if correction:
                rollout = part["old_logprobs"] - part["importance_weights"].log()
            return function(
                logprobs,
                part["old_logprobs"],
                part["advantages"],
                part["mask"].float(),
                rollout_log_probs=rollout,
                batch_num_tokens=inputs["mask"].sum(),
                global_batch_size=len(inputs["mask"]),
            )[0]

        return policy_outputs(loss, inputs, options)

    def value(inputs: Inputs, clip: float | None) -> Mapping[str, Any]:
        function = losses.ValueLoss(clip_eps=clip)
        total, gradient = with_gradient(
            lambda x: function(x, inputs["old_values"], inputs["returns"], inputs["mask"].float()),
            inputs["values"],
        )
        return {"loss": total, "gradient": gradient}

    def token(inputs: Inputs, temperature: float) -> Mapping[str, Any]:
        # `Actor` divides the logits once, for both.
        logits = inputs["logits"] / temperature
        return {
            "logprobs": utils.log_probs_from_logits(logits, inputs["tokens"]),
            # Unwrap the function from torch.compile.
            "entropy": torch._dynamo.disable(utils.compute_entropy)(logits),
        }

    def importance(
        inputs: Inputs, level: str, mode: str, floor: float | None, cap: float
    ) -> Mapping[str, Any]:
        need(level == "token" or mode == "mask", "truncates by token only")
        function = losses.PolicyLoss(
            is_correction_level="seq" if level == "sequence" else level,
            is_correction_mode="clip" if mode == "truncate" else "mask",
            is_correction_threshold=[floor or 0.0, cap],
        )

        # With a ratio of 1, the loss −w·A is the weight where A = −1.
        def weight(row: int, column: int) -> Tensor:
            one = torch.zeros_like(inputs["logprobs"])
            one[row, column] = -1.0
            return function(
                inputs["logprobs"],
                inputs["logprobs"],
                one,
                inputs["mask"].float(),
                rollout_log_probs=inputs["sampler_logprobs"],
                batch_num_tokens=1,
            )[0]

        rows, columns = inputs["mask"].shape
        weights = [[weight(row, column) for column in range(columns)] for row in range(rows)]
        return {"weights": torch.tensor(weights)}

    return {
        "gae": gae,
        "rewards": rewards,
        "whiten": whiten,
        "kl": kl,
        "kl_control": lambda inputs, coef, target, horizon: adaptive(
            control(coef, target, horizon), inputs
        ),
        "policy": policy,
        "value": value,
        "token": token,
        "importance": importance,
    }


# -------------------------------------------------------------------------------------------- SkyRL


def skyrl() -> dict[str, Answer]:
    if sys.version_info < (3, 12):  # pydantic needs this variant there
        import typing_extensions

        typing.TypedDict = typing_extensions.TypedDict
    utils = module("skyrl.backends.skyrl_train.utils.ppo_utils")
    correction = module("skyrl.backends.skyrl_train.utils.off_policy_correction_utils")
    statistics = module("skyrl.backends.skyrl_train.utils.torch_utils")
    config_module = module("skyrl.train.config")

    def gae(inputs: Inputs, gamma: float, lam: float) -> Mapping[str, Any]:
        padded(inputs)
        _, returns = utils.compute_gae_advantage_return(
            inputs["rewards"], inputs["values"], inputs["mask"].float(), gamma, lam
        )
        return {"returns": returns}  # it always whitens the advantages

    def whiten(inputs: Inputs, shift_mean: bool) -> Mapping[str, Any]:
        mask = inputs.get("mask", torch.ones_like(inputs["x"])).float()
        return {"whitened": utils.masked_whiten(inputs["x"], mask, shift_mean)}

    def kl(inputs: Inputs, estimator: str, ratio_weighted: bool = False) -> Mapping[str, Any]:
        need(not ratio_weighted, "no KL times the ratio")
        value, gradient = with_gradient(
            lambda x: utils.compute_approx_kl(
                x, inputs["ref_logprobs"], kl_estimator_type=estimator
            ),
            inputs["logprobs"],
        )
        return {"kl": value, "gradient": gradient}

    reductions = {
        "token-mean": "token_mean",
        "seq-mean-token-mean": "sequence_mean",
        "constant": "seq_mean_token_sum_norm",
    }
    objectives = {"clip": "regular", "dis": "rollout_is", "dppo_tv": "dppo", "dppo_kl": "dppo"}

    def policy(inputs: Inputs, **given: Any) -> Mapping[str, Any]:
        options = Policy(**given)
        need(options.aggregation in reductions, "no reduction to the sum of a sequence")
        need("importance_weights" not in inputs, "its correction computes the weights inside")
        name = objectives.get(options.objective, options.objective)
        if options.dual_clip:
            name = "dual_clip"
        config = config_module.AlgorithmConfig(
            policy_loss_type=name,
            loss_reduction=reductions[options.aggregation],
            eps_clip_low=options.low,
            eps_clip_high=options.high,
            clip_ratio_c=options.dual_clip or NO_CLIP,
        )
        config.cispo.cispo_eps_clip_low, config.cispo.cispo_eps_clip_high = options.clip
        config.dppo.delta_low, config.dppo.delta_high = options.clip
        config.dppo.dppo_type = options.objective.replace("dppo", "binary")
        if options.tau:
            config.sapo.tau_pos, config.sapo.tau_neg = options.tau
        # Its trainer scales the advantages, so that the sum is the reduction.
        scaled = utils.apply_loss_reduction_to_advantages_minibatch(
            inputs["advantages"],
            inputs["mask"].float(),
            reductions[options.aggregation],
            micro_batch_size=2,
            max_seq_len=options.length or 1,
        )

        def loss(logprobs: Tensor, part: Inputs) -> Tensor:
            return utils.PolicyLossRegistry.get(name)(
                logprobs,
                part["old_logprobs"],
                part["advantages"],
                config,
                part["mask"].float(),
                part["old_logprobs"] if options.objective == "dis" else None,
            )[0]

        return policy_outputs(loss, inputs | {"advantages": scaled}, options)

    def value(inputs: Inputs, clip: float | None) -> Mapping[str, Any]:
        config = SimpleNamespace(value_clip=clip)
        total, gradient = with_gradient(
            lambda x: utils.ppo_critic_loss(
                x, inputs["old_values"], inputs["returns"], config, inputs["mask"].float()
            )[0],
            inputs["values"],
        )
        return {"loss": total, "gradient": gradient}

    def importance(
        inputs: Inputs, level: str, mode: str, floor: float | None, cap: float
    ) -> Mapping[str, Any]:
        need(mode == "truncate", "its masks are separate from the weights")
        config = SimpleNamespace(token_tis_ratio_clip_high=cap, sequence_tis_ratio_clip_high=cap)
        weights, _ = correction.compute_tis_ratio(
            inputs["logprobs"],
            inputs["sampler_logprobs"],
            inputs["mask"].float(),
            level,
            config,
        )
        return {"weights": weights.expand_as(inputs["logprobs"])}

    def group(inputs: Inputs, kind: str, size: int) -> Mapping[str, Any]:
        given = outcome_scores(inputs["scores"], size)
        if kind == "rloo":
            made = utils.compute_rloo_outcome_advantage(**given)
        else:
            made = utils.compute_grpo_outcome_advantage(**given, grpo_norm_by_std=kind == "grpo")
        return {"advantages": made[0][:, 0]}

    def token(inputs: Inputs, temperature: float) -> Mapping[str, Any]:
        # Its model divides the logits by the temperature before either function.
        logits = inputs["logits"] / temperature
        shape = inputs["tokens"].shape
        batch = logits.reshape(1, -1, logits.shape[-1])
        tokens = inputs["tokens"].reshape(1, -1)
        return {
            "logprobs": statistics.logprobs_from_logits(batch, tokens).reshape(shape),
            "entropy": statistics.chunked_entropy_from_logits(batch).reshape(shape),
        }

    return {
        "gae": gae,
        "whiten": whiten,
        "kl": kl,
        "kl_control": lambda inputs, coef, target, horizon: adaptive(
            utils.AdaptiveKLController(coef, target, horizon), inputs
        ),
        "policy": policy,
        "value": value,
        "token": token,
        "importance": importance,
        "group": group,
    }


# -------------------------------------------------------------------------------------------- AReaL


def areal() -> dict[str, Answer]:
    functional = module("areal.utils.functional")
    estimators = module("areal.utils.data").KLEstimator
    normalization = module("areal.utils.data").Normalization
    norm_config = module("areal.api.cli_args").NormConfig
    rejection = module("areal.api.cli_args").RejectionSamplingConfig

    def whiten(inputs: Inputs, shift_mean: bool) -> Mapping[str, Any]:
        need(shift_mean, "without its mean, the deviation is that from 0")
        normalize = normalization(norm_config(eps=1e-8))
        return {"whitened": normalize(inputs["x"], inputs.get("mask"))}

    def group(inputs: Inputs, kind: str, size: int) -> Mapping[str, Any]:
        normalize = normalization(
            norm_config(
                mean_level="group",
                mean_leave1out=kind == "rloo",
                std_level="group" if kind == "grpo" else None,
                group_size=size,
                eps=1e-8,
            )
        )
        return {"advantages": normalize(inputs["scores"])}

    def token(inputs: Inputs, temperature: float) -> Mapping[str, Any]:
        logprobs, entropy = functional.gather_logprobs_entropy(
            inputs["logits"], inputs["tokens"], temperature
        )
        return {"logprobs": logprobs, "entropy": entropy}

    def kl(inputs: Inputs, estimator: str, ratio_weighted: bool = False) -> Mapping[str, Any]:
        need(not ratio_weighted, "no KL times the ratio")
        value, gradient = with_gradient(
            lambda x: estimators(estimator)(x, inputs["ref_logprobs"]), inputs["logprobs"]
        )
        return {"kl": value, "gradient": gradient}

    def policy(inputs: Inputs, **given: Any) -> Mapping[str, Any]:
        options = Policy(**given)
        need(options.objective in ("clip", "gspo", "sapo"), LOGPROBS_ONLY)
        need(
            options.objective != "clip" or options.aggregation == "token-mean",
            "the mean over tokens only",
        )
        count = inputs["mask"].sum()

        def loss(logprobs: Tensor, part: Inputs) -> Tensor:
            given = {
                "logprobs": logprobs,
                "old_logprobs": part["old_logprobs"],
                "advantages": part["advantages"],
                "loss_mask": part["mask"],
            }
            if options.tau:
                total = functional.sapo_loss_fn(
                    **given, tau_pos=options.tau[0], tau_neg=options.tau[1]
                )[0]
            else:
                correction = {}
                if "importance_weights" in part:
                    given["old_logprobs"] = part["old_logprobs"] - part["importance_weights"].log()
                    correction["rejection_sampling"] = rejection(action="clamp", upper=NO_CLIP)
                total = functional.ppo_actor_loss_fn(
                    proximal_logprobs=part["old_logprobs"],
                    eps_clip=options.low,
                    eps_clip_higher=options.high,
                    c_clip=options.dual_clip,
                    importance_sampling_level="sequence"
                    if options.objective == "gspo"
                    else "token",
                    **given,
                    **correction,
                )[0]
            # Its engine weights microbatches by their tokens.
            return total * part["mask"].sum() / count

        return policy_outputs(loss, inputs, options)

    def value(inputs: Inputs, clip: float | None) -> Mapping[str, Any]:
        total, gradient = with_gradient(
            lambda x: functional.ppo_critic_loss_fn(
                x, inputs["old_values"], inputs["returns"], clip or NO_CLIP, inputs["mask"]
            )[0],
            inputs["values"],
        )
        return {"loss": total, "gradient": gradient}

    def importance(
        inputs: Inputs, level: str, mode: str, floor: float | None, cap: float
    ) -> Mapping[str, Any]:
        result = functional.apply_rejection_sampling(
            inputs["logprobs"],
            inputs["sampler_logprobs"],
            inputs["mask"],
            None,
            rejection(
                level=level,
                action="clamp" if mode == "truncate" else "mask",
                metric="ratio",
                lower=floor,
                upper=cap,
            ),
        )
        return {"weights": result.behave_imp_weight * result.loss_mask}

    return {
        "whiten": whiten,
        "kl": kl,
        "policy": policy,
        "value": value,
        "token": token,
        "importance": importance,
        "group": group,
    }


# ------------------------------------------------------------------ AgileRL, Liger-Kernel, ms-swift


def agilerl() -> dict[str, Answer]:
    utils = module("agilerl.utils.llm_utils")

    def whiten(inputs: Inputs, shift_mean: bool) -> Mapping[str, Any]:
        mask = inputs.get("mask", torch.ones_like(inputs["x"])).float()
        return {"whitened": utils.masked_whiten(inputs["x"], mask, shift_mean)}

    def kl(inputs: Inputs, estimator: str, ratio_weighted: bool = False) -> Mapping[str, Any]:
        need(estimator == "k3" and not ratio_weighted, "its KL is k3")
        value, gradient = with_gradient(
            lambda x: utils.calculate_k3_kl(inputs["ref_logprobs"], x), inputs["logprobs"]
        )
        return {"kl": value, "gradient": gradient}

    def policy(inputs: Inputs, **given: Any) -> Mapping[str, Any]:
        options = Policy(**given)
        need(options.objective == "clip" and options.dual_clip is None, LOGPROBS_ONLY)
        need(options.aggregation == "token-mean", "the mean over tokens only")

        def loss(logprobs: Tensor, part: Inputs) -> Tensor:
            total = utils.clipped_min_surrogate(
                logprobs - part["old_logprobs"],
                part["advantages"],
                part["mask"].float(),
                1 - options.low,
                1 + options.high,
                part.get("importance_weights"),
            )[0]
            return total / len(options.microbatches or [[]])  # as its trainer does

        return policy_outputs(loss, inputs, options)

    return {"whiten": whiten, "kl": kl, "policy": policy}


def liger() -> dict[str, Answer]:
    function = module("liger_kernel.chunked_loss.grpo_loss").LigerFusedLinearGRPOFunction
    losses = TRL_LOSSES | {"token-mean": "bnpo"}

    def policy(inputs: Inputs, **given: Any) -> Mapping[str, Any]:
        options = Policy(**given)
        need(options.objective in ("clip", "gspo", "cispo", "sapo"), "no loss type with this mask")
        need(options.aggregation in losses, "no loss type with this aggregation")
        tau_positive, tau_negative = options.tau or (1.0, 1.0)

        def loss(logprobs: Tensor, part: Inputs) -> Tensor:
            return function.ppo_loss_fn(
                logprobs,
                part["mask"].float(),
                part["advantages"][:, 0],
                inputs["mask"].float(),
                old_per_token_logps=part["old_logprobs"],
                epsilon_low=options.low,
                epsilon_high=1 + options.high if options.objective == "cispo" else options.high,
                beta=0.0,
                loss_type=options.objective
                if options.objective in ("cispo", "sapo")
                else losses[options.aggregation],
                max_completion_length=options.length,
                importance_sampling_level="sequence" if options.objective == "gspo" else "token",
                vllm_is_ratio=part.get("importance_weights"),
                sapo_temperature_pos=tau_positive,
                sapo_temperature_neg=tau_negative,
                delta=options.dual_clip,
            )[0]

        return policy_outputs(loss, inputs, options)

    def kl(inputs: Inputs, estimator: str, ratio_weighted: bool = False) -> Mapping[str, Any]:
        need(estimator == "k3", "its KL is k3")
        logprobs = inputs["logprobs"]
        ones = torch.ones_like(logprobs)

        def total(x: Tensor) -> Tensor:
            loss = function.ppo_loss_fn(
                x,
                ones,
                torch.zeros(len(logprobs)),
                ones,
                ref_per_token_logps=inputs["ref_logprobs"],
                old_per_token_logps=inputs.get("old_logprobs", logprobs),
                beta=1.0,
                loss_type="bnpo",
                use_bias_correction_kl=ratio_weighted,
            )[0]
            return loss * logprobs.numel()

        return {"gradient": with_gradient(total, logprobs)[1]}

    return {"policy": policy, "kl": kl}


def swift() -> dict[str, Answer]:
    compute_advantages = module("swift.rl_core.advantage").compute_advantages
    entropy_from_logits = module("swift.rlhf_trainers.utils").entropy_from_logits

    def group(inputs: Inputs, kind: str, size: int) -> Mapping[str, Any]:
        advantages, _ = compute_advantages(
            inputs["scores"][:, None],
            torch.ones(1),
            size,
            advantage_estimator="rloo" if kind == "rloo" else "grpo",
            scale_rewards="group" if kind == "grpo" else "none",
        )
        return {"advantages": advantages}

    def token(inputs: Inputs, temperature: float) -> Mapping[str, Any]:
        return {"entropy": entropy_from_logits(inputs["logits"] / temperature)}

    return {"group": group, "token": token}


# ---------------------------------------------------------------------------------------- torchtune


def torchtune() -> dict[str, Answer]:
    rlhf = module("torchtune.rlhf")
    ppo_loss = module("torchtune.rlhf.loss").PPOLoss

    def gae(inputs: Inputs, gamma: float, lam: float) -> Mapping[str, Any]:
        padded(inputs)
        _, returns = rlhf.estimate_advantages(
            inputs["values"], inputs["rewards"], gamma, lam, inputs["mask"]
        )
        return {"returns": returns}  # it always whitens the advantages

    def rewards(inputs: Inputs, kl_coef: float, estimator: str) -> Mapping[str, Any]:
        need(estimator == "k1", "the penalty is k1")
        last = inputs["mask"].shape[1] - 1 - inputs["mask"].long().flip(1).argmax(1)
        shaped, _, _ = rlhf.get_rewards_ppo(
            inputs["scores"], inputs["logprobs"], inputs["ref_logprobs"], kl_coef, last
        )
        return {"rewards": shaped}

    def whiten(inputs: Inputs, shift_mean: bool) -> Mapping[str, Any]:
        return {"whitened": rlhf.whiten(inputs["x"], inputs.get("mask"), shift_mean)}

    def losses(inputs: Inputs, clip: float, logprobs: Tensor, values: Tensor) -> Any:
        return ppo_loss(clip, clip, 1.0)(
            inputs["old_logprobs"],
            logprobs,
            inputs["advantages"],
            inputs["old_values"],
            values,
            inputs["returns"],
            inputs["mask"],
            inputs["mask"],
        )

    def policy(inputs: Inputs, **given: Any) -> Mapping[str, Any]:
        options = Policy(**given)
        need(options.objective == "clip" and options.dual_clip is None, "PPO's clip only")
        need(options.aggregation == "token-mean", "the mean over tokens only")
        need("importance_weights" not in inputs, "no importance weights")
        need(options.low == options.high, "one clip range for both sides")

        zeros = torch.zeros_like(inputs["advantages"])
        values = {"old_values": zeros, "returns": zeros}

        def loss(logprobs: Tensor, part: Inputs) -> Tensor:
            total = losses(part, options.low, logprobs, part["returns"])[0]
            return total / len(options.microbatches or [[]])  # as its recipe does

        return policy_outputs(loss, inputs | values, options)

    def value(inputs: Inputs, clip: float | None) -> Mapping[str, Any]:
        zeros = torch.zeros_like(inputs["values"])
        policy = {"old_logprobs": zeros, "advantages": zeros}
        total, gradient = with_gradient(
            lambda x: losses(inputs | policy, clip or NO_CLIP, zeros, x)[0], inputs["values"]
        )
        return {"loss": total, "gradient": gradient}

    return {"gae": gae, "rewards": rewards, "whiten": whiten, "policy": policy, "value": value}


PEERS = [
    Adapter("TRL 1.12 (PPO)", "trl", "1.12", trl_ppo),
    Adapter("TRL 1.16 (GRPO)", "trl", "1.16", trl_grpo),
    Adapter("verl", "verl", "0.9", verl),
    Adapter("OpenRLHF", "openrlhf", "0.11", openrlhf),
    Adapter("SkyRL", "skyrl", "0.3", skyrl),
    Adapter("AReaL", "areal", "1.0", areal),
    Adapter("AgileRL", "agilerl", "2.58", agilerl),
    Adapter("Liger-Kernel", "liger-kernel", "0.8", liger),
    Adapter("ms-swift", "ms-swift", "4.6", swift),
    Adapter("torchtune", "torchtune", "0.6", torchtune),
]
