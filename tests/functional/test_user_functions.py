"""The losses with a function as the objective."""

from __future__ import annotations

import math
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import draws
import pytest
import torch
from torch import Tensor

import fastppo

V = 23
EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "objective.py"))
OPTIONS: dict[str, Any] = {"entropy_coef": 0.1, "kl_coef": 0.3, "temperature": 0.8}


def clip(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """PPO's clip at 0.2."""
    ratio = (logprobs - old_logprobs).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)


def gspo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, cu_seqlens: Tensor
) -> Tensor:
    """GSPO-token: the ratio of a response is the geometric mean of its tokens' ratios."""
    lengths = cu_seqlens.diff()
    log_ratio = torch.where(mask, logprobs - old_logprobs, 0.0).detach()
    total = torch.segment_reduce(log_ratio, "sum", lengths=lengths)
    count = torch.segment_reduce(mask.to(total.dtype), "sum", lengths=lengths)
    ratio = (total / count).exp().repeat_interleave(lengths) * (logprobs - logprobs.detach()).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)


class Inputs:
    """Logits or hidden states of 4 responses of 6 tokens, some masked, with ratios near 1."""

    def __init__(self, *, linear: bool) -> None:
        torch.manual_seed(0)
        self.leaves = [torch.randn(4, 6, 8), torch.randn(V, 8)]
        if not linear:
            self.leaves = [self.leaves[0] @ self.leaves[1].T]
        for leaf in self.leaves:
            leaf.requires_grad_()
        self.function = fastppo.linear_ppo_loss if linear else fastppo.ppo_loss
        logits = self.leaves[0] @ self.leaves[1].T if linear else self.leaves[0]
        # Sampled, so that some are likely: DPPO masks no rare token.
        self.tokens = torch.distributions.Categorical(logits=logits.detach() / 0.8).sample()
        logprobs = draws.token_logprobs(
            logits.detach().flatten(0, 1), self.tokens.flatten(), temperature=0.8
        )
        self.old_logprobs = (logprobs.view(4, 6) + 0.3 * torch.randn(4, 6)).float()
        self.advantages = torch.randn(4, 6)
        self.mask = torch.arange(6) < torch.tensor([[6], [5], [1], [3]])
        # Masked entries may hold anything.
        self.old_logprobs[~self.mask] = math.nan
        self.options = OPTIONS | {
            "importance_weights": torch.rand(4, 6) + 0.5,
            "ref_logprobs": self.old_logprobs - 0.1,
        }

    def __call__(self, objective: Any, **options: Any) -> tuple[Any, list[Tensor]]:
        loss = self.function(
            *self.leaves,
            self.tokens,
            self.old_logprobs,
            self.advantages,
            self.mask,
            objective=objective,
            **self.options,
            **options,
        )
        return loss, list(torch.autograd.grad(loss.loss, self.leaves))


@pytest.mark.parametrize("linear", [False, True], ids=["logits", "hidden"])
@pytest.mark.parametrize(
    ("function", "name", "clip_ratio"),
    [(clip, "clip", 0.2), (gspo, "gspo", 0.2), (EXAMPLE["dppo_tv"], "dppo_tv", EXAMPLE["EPSILON"])],
    ids=["clip", "gspo", "dppo_tv"],
)
def test_a_function_equals_the_built_in_objective(
    function: Callable[..., Tensor], name: str, clip_ratio: float, linear: bool
) -> None:
    """Loss, gradient, and all metrics that need no clip range; fp32 rounding."""
    inputs = Inputs(linear=linear)
    loss, gradients = inputs(function)
    wanted, wanted_gradients = inputs(name, clip_ratio=clip_ratio)
    torch.testing.assert_close(loss.loss, wanted.loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradients, wanted_gradients, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(loss.logprobs, wanted.logprobs, rtol=1e-5, atol=1e-5)
    compared = ["policy_loss", "entropy", "kl", "approx_kl"]
    compared += ["ratio_mean", "clip_fraction"] if name != "gspo" else []
    for metric in compared:
        torch.testing.assert_close(
            loss.metrics[metric], wanted.metrics[metric], rtol=1e-4, atol=1e-6
        )
    assert wanted.metrics["clip_fraction"] > 0


def test_a_function_gets_the_arguments_that_it_names() -> None:
    inputs = Inputs(linear=True)
    seen: dict[str, Tensor] = {}

    def objective(*arguments: Tensor, **others: Tensor) -> Tensor:
        seen.update(others)
        return arguments[0] * 0 - others["entropy"]

    _, gradients = inputs(objective)
    assert seen.keys() == {"entropy", "ref_logprobs", "importance_weights", "cu_seqlens"}
    assert seen["cu_seqlens"].tolist() == [0, 6, 12, 18, 24]
    assert all(value.shape == (24,) for name, value in seen.items() if name != "cu_seqlens")
    # It names the importance weights, so they do not multiply its entropy bonus.
    bonus = OPTIONS["entropy_coef"] + 1
    inputs.options = inputs.options | {"entropy_coef": bonus}
    inputs.advantages = torch.zeros(4, 6)
    torch.testing.assert_close(gradients, inputs("clip")[1], rtol=1e-4, atol=1e-6)


def scalar(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    return clip(logprobs, old_logprobs, advantages, mask).mean()


def detached(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    return clip(logprobs, old_logprobs, advantages, mask).detach()


def greedy(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, values: Tensor
) -> Tensor:
    return logprobs * values


@pytest.mark.parametrize("function", [scalar, lambda *a: None, detached, greedy])
def test_errors_name_the_function_and_its_line(function: Any) -> None:
    line = function.__code__.co_firstlineno
    where = f"objective `{function.__qualname__}` ({__file__}, line {line}): "
    with pytest.raises(ValueError, match=re.escape(where)):
        Inputs(linear=True)(function)
