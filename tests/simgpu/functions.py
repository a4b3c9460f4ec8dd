"""The drop-in functions on the simulated device and, by the same kernels, on CPU tensors."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import fastppo
from tests.simgpu.counts import counts

TRITON: dict[str, Any] = {"backend": "triton"}
WITH_GRADIENT = ("logits", "hidden", "weight", "bias")
B, T, V, H = 2, 3, 70, 8


def operands(device: str, dtype: torch.dtype) -> SimpleNamespace:
    """Return the same random operands on any device."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    made = {
        "logits": (normal(B, T, V) * 3).to(dtype),
        "ref_logits": (normal(B, T, V) * 3).to(dtype),
        "hidden": normal(B, T, H).to(dtype),
        "weight": normal(V, H).to(dtype),
        "bias": normal(V).to(dtype),
        "tokens": torch.randint(V, (B, T), generator=generator),
        "old": -normal(B, T).abs(),
        "ref": -normal(B, T).abs(),
        "advantages": normal(B, T),
        "values": normal(B, T),
        "scores": normal(B),
        "temperatures": normal(B, T).abs() + 0.5,
        "weights": normal(B, T).abs(),
        "mask": torch.rand(B, T, generator=generator) < 0.8,
        "cu_seqlens": torch.arange(0, B * T + 1, T, dtype=torch.int32),
    }
    on_device = {name: x.to(device) for name, x in made.items()}
    for name in WITH_GRADIENT:
        on_device[name] = on_device[name].detach().requires_grad_()
    return SimpleNamespace(**on_device)


def _loss(x: SimpleNamespace, **more: Any) -> Any:
    return fastppo.ppo_loss(x.logits, x.tokens, x.old, x.advantages, x.mask, **TRITON, **more)


def _linear(x: SimpleNamespace, **more: Any) -> Any:
    return fastppo.linear_ppo_loss(
        x.hidden, x.weight, x.tokens, x.old, x.advantages, x.mask, bias=x.bias, **TRITON, **more
    )


def _surrogate(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    return -(logprobs - old_logprobs).exp() * advantages


FUNCTIONS: dict[str, Callable[[SimpleNamespace], Any]] = {
    "ppo_loss": _loss,
    "ppo_loss with every term": lambda x: _loss(
        x,
        entropy_coef=0.01,
        ref_logprobs=x.ref,
        kl_coef=0.1,
        importance_weights=x.weights,
        temperature=x.temperatures,
        dual_clip=3.0,
    ),
    "ppo_loss with the full KL": lambda x: _loss(
        x, ref_logits=x.ref_logits, kl_coef=0.1, kl_estimator="full", softcap=20.0
    ),
    "gspo": lambda x: _loss(x, objective="gspo"),
    "sapo": lambda x: _loss(x, objective="sapo"),
    "a function as objective": lambda x: _loss(x, objective=_surrogate),
    "a mean over sequences": lambda x: _loss(
        x,
        aggregation="seq-mean-token-mean",
        denominator=torch.tensor(3.0, device=x.logits.device),
    ),
    "linear_ppo_loss": _linear,
    "linear_ppo_loss in chunks": lambda x: _linear(
        x, chunk_size=2, ref_logprobs=x.ref, kl_coef=0.1
    ),
    "token_stats": lambda x: fastppo.token_stats(
        x.logits, x.tokens, ref_logits=x.ref_logits, **TRITON
    ),
    "linear_token_logprobs": lambda x: fastppo.linear_token_logprobs(
        x.hidden, x.weight, x.tokens, bias=x.bias, chunk_size=4, return_entropy=True, **TRITON
    ),
    "gae": lambda x: fastppo.gae(x.values, x.values, x.mask, bootstrap=x.scores, **TRITON),
    "gae, packed": lambda x: fastppo.gae(
        x.values.flatten(),
        x.values.flatten(),
        x.mask.flatten(),
        cu_seqlens=x.cu_seqlens,
        **TRITON,
    ),
    "compute_advantages": lambda x: fastppo.compute_advantages(
        x.scores, x.values, x.old, x.ref, x.mask, kl_coef=0.1, score_clip=1.0, **TRITON
    ),
    "whiten": lambda x: fastppo.whiten(x.values, x.mask, **TRITON),
    "value_loss": lambda x: fastppo.value_loss(x.values, x.values + 1, x.mask),
}


READS = {"linear_ppo_loss": 1, "linear_ppo_loss in chunks": 1}
"""Functions that read the number of rows in a mask, to leave out the others."""


def results(function: Callable[[SimpleNamespace], Any], device: str, dtype: torch.dtype) -> Any:
    """Return the tensors that a function returns, and the gradients, on the CPU."""
    x = operands(device, dtype)
    returned = tree_leaves(function(x))
    outputs = [value for value in returned if isinstance(value, Tensor)]
    losses = [value.float().sum() for value in outputs if value.requires_grad]
    if losses:
        torch.stack(losses).sum().backward()
    gradients = [getattr(x, name).grad for name in WITH_GRADIENT]
    found = [value.detach() for value in outputs] + [g for g in gradients if g is not None]
    return [value.cpu() for value in found]


def check(dtype: str) -> None:
    """Compare all functions; raise if a bit differs, or if a function waits for the device."""
    for name, function in FUNCTIONS.items():
        expected = results(function, "cpu", getattr(torch, dtype))
        with counts.during(name):
            got = results(function, "cuda", getattr(torch, dtype))
        assert len(got) == len(expected), name
        for mine, its in zip(got, expected, strict=True):
            torch.testing.assert_close(mine, its, rtol=0, atol=0, equal_nan=True, msg=name)
        of_fastppo = [
            place
            for place in counts.places_of_waits(name)
            if "fastppo/functional" in place or "fastppo_kernels" in place
        ]
        assert len(of_fastppo) <= READS.get(name, 0), (name, of_fastppo)
