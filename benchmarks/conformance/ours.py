"""Adapters of FastPPO's three backends."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import fastppo
from benchmarks.conformance.adapter import (
    Adapter,
    Answer,
    Inputs,
    Policy,
    need,
    policy_outputs,
    with_gradient,
)
from fastppo.data.batch import Batch
from fastppo.ppo.coefficients import CoefficientControl
from fastppo.ppo.controllers import AdaptiveKL
from fastppo.ppo.estimators import estimate_advantages
from fastppo.ppo.experience import Experience
from fastppo.ppo.options.config import PPOConfig
from fastppo.ppo.policies import importance
from fastppo.rewards.scorer import Scores


def _logits(logprobs: Tensor) -> Tensor:
    """Return logits over two tokens, the first of which has these logprobs."""
    finite = torch.where(logprobs.isnan(), -1.0, logprobs)
    return torch.stack([logprobs, torch.log1p(-finite.exp())], -1)


def _ppo_loss(logprobs: Tensor, inputs: Inputs, **options: Any) -> fastppo.PPOLoss:
    return fastppo.ppo_loss(
        _logits(logprobs),
        torch.zeros(logprobs.shape, dtype=torch.int64, device=logprobs.device),
        inputs["old_logprobs"],
        inputs["advantages"],
        inputs.get("mask"),
        **options,
    )


def _gae(inputs: Inputs, backend: str, **options: Any) -> Mapping[str, Any]:
    optional = {name: inputs[name] for name in ("cu_seqlens", "bootstrap") if name in inputs}
    advantages, returns = fastppo.gae(
        inputs["rewards"], inputs["values"], inputs["mask"], **optional, **options, backend=backend
    )
    return {"advantages": advantages, "returns": returns}


def _rewards(inputs: Inputs, backend: str, kl_coef: float, estimator: str) -> Mapping[str, Any]:
    # With γ = 0 and values of 0 the advantages are the shaped rewards.
    shaped = fastppo.compute_advantages(
        inputs["scores"],
        torch.zeros_like(inputs["logprobs"]),
        inputs["logprobs"],
        inputs["ref_logprobs"],
        inputs["mask"],
        kl_coef=kl_coef,
        kl_estimator=estimator,
        gamma=0.0,
        whiten=False,
        backend=backend,
    )
    return {"rewards": shaped.advantages}


def _whiten(inputs: Inputs, backend: str, shift_mean: bool) -> Mapping[str, Any]:
    white = fastppo.whiten(inputs["x"], inputs.get("mask"), shift_mean=shift_mean, backend=backend)
    return {"whitened": white}


def _kl(
    inputs: Inputs, backend: str, estimator: str, ratio_weighted: bool = False
) -> Mapping[str, Any]:
    logprobs = inputs["logprobs"]
    zeros = {"advantages": torch.zeros_like(logprobs), "old_logprobs": logprobs}
    options = {
        "ref_logprobs": inputs["ref_logprobs"],
        "kl_estimator": estimator,
        "kl_coef": 1.0,
        "kl_ratio_weighted": ratio_weighted,
        "aggregation": "token-sum",
        "backend": backend,
    }
    _, gradient = with_gradient(lambda x: _ppo_loss(x, zeros | inputs, **options).loss, logprobs)
    # The reported KL is not weighted by the ratio.
    reported = {} if ratio_weighted else {"kl": _ppo_loss(logprobs, zeros | inputs, **options).kl}
    return {"gradient": gradient} | reported


def _kl_control(
    inputs: Inputs, backend: str, coef: float, target: float, horizon: float
) -> Mapping[str, Any]:
    control = AdaptiveKL(coef, target, horizon)
    coefs = []
    for kl, count in zip(inputs["kl"].tolist(), inputs["sequences"].tolist(), strict=True):
        control.update(kl, count)
        coefs.append(control.coef)
    return {"coefs": torch.tensor(coefs)}


def _policy(inputs: Inputs, backend: str, **given: Any) -> Mapping[str, Any]:
    options = Policy(**given)
    aggregation = options.aggregation
    if aggregation == "token-mean":
        denominator = float(inputs["mask"].sum())
    else:
        denominator = float(len(inputs["mask"]) * (options.length or 1))

    def loss(logprobs: Tensor, part: Inputs) -> Tensor:
        return _ppo_loss(
            logprobs,
            part,
            objective=options.objective,
            clip_ratio=tuple(options.clip),
            dual_clip=options.dual_clip,
            sapo_tau=None if options.tau is None else tuple(options.tau),
            importance_weights=part.get("importance_weights"),
            aggregation="token-sum" if aggregation == "constant" else aggregation,
            denominator=denominator,
            backend=backend,
        ).loss

    return policy_outputs(loss, inputs, options)


def _value(inputs: Inputs, backend: str, clip: float | None) -> Mapping[str, Any]:
    def loss(values: Tensor) -> Tensor:
        return fastppo.value_loss(
            values,
            inputs["returns"],
            inputs["mask"],
            old_values=inputs["old_values"],
            clip_ratio=clip,
        )

    value, gradient = with_gradient(loss, inputs["values"])
    return {"loss": value, "gradient": gradient}


def _token(inputs: Inputs, backend: str, temperature: float) -> Mapping[str, Any]:
    stats = fastppo.token_stats(
        inputs["logits"], inputs["tokens"], temperature=temperature, backend=backend
    )
    return {"logprobs": stats.logprobs, "entropy": stats.entropy}


def _importance(
    inputs: Inputs, backend: str, level: str, mode: str, floor: float | None, cap: float
) -> Mapping[str, Any]:
    mask = inputs["mask"]
    weights, _ = importance(
        inputs["logprobs"][mask],
        inputs["sampler_logprobs"][mask],
        mask.sum(1),
        mode=mode if level == "token" else f"sequence-{mode}",
        bounds=(floor or 0.0, cap),
    )
    return {"weights": torch.zeros_like(inputs["logprobs"]).masked_scatter(mask, weights)}


def _group(inputs: Inputs, backend: str, kind: str, size: int) -> Mapping[str, Any]:
    need(kind != "mean", "rloo is its multiple: size/(size − 1) times")
    scores = inputs["scores"]
    zeros = torch.zeros_like(scores)
    options: dict[str, Any] = {"advantage": "rloo" if kind == "rloo" else "group", "vf_coef": 0.0}
    config = PPOConfig(
        **options | {"backend": backend, "samples_per_prompt": size, "whiten_advantages": False}
    )
    batch = Batch.of([[1]] * len(scores), [[1]] * len(scores), scores.device)
    made = estimate_advantages(
        Experience(batch, old_logprobs=zeros, old_values=zeros),
        Scores(scores),
        config,
        CoefficientControl(config).at(0),
    )
    return {"advantages": made.advantages}


OPERATIONS: dict[str, Answer] = {
    "gae": _gae,
    "rewards": _rewards,
    "whiten": _whiten,
    "kl": _kl,
    "kl_control": _kl_control,
    "policy": _policy,
    "value": _value,
    "token": _token,
    "importance": _importance,
    "group": _group,
}


def _build(backend: str) -> dict[str, Answer]:
    return {name: functools.partial(call, backend=backend) for name, call in OPERATIONS.items()}


BACKENDS = ("torch", "cpu", "triton")


def backends() -> list[Adapter]:
    """Return the backends that can run here: Triton needs a GPU or TRITON_INTERPRET=1."""
    on_gpu = torch.cuda.is_available()
    names = list(BACKENDS)
    if not on_gpu and os.environ.get("TRITON_INTERPRET") != "1":
        names.remove("triton")
    return [
        Adapter(
            name=f"FastPPO, {name}",
            distribution="fastppo",
            release=fastppo.__version__,
            build=functools.partial(_build, name),
            device="cuda" if on_gpu and name == "triton" else "cpu",
        )
        for name in names
    ]
