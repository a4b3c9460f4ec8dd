"""Custom operators and the choice of backend, between the public functions and `fastppo_kernels`.

    @operator("ppo_loss", like=torch_backend.ppo_loss, …)
    def ppo_loss_op(backend, logits, per_token, **_):
        return the backend's function        # to be called with the operands

A decorated function computes nothing: it checks token ids and returns a function with the signature
of `like`. `ppo_loss_op(…)` goes through torch's dispatcher, so `torch.compile(fullgraph=True)` sees
one opaque operator, with the fake kernel that is registered below it.

Operands are checked, flat records: one entry per token, `[N]`. `record_operator` flattens them for
torch; `gradients` makes the results differentiable.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from fastppo_kernels import linear, torch_backend
from fastppo_kernels.records import (
    SUMS,
    Gae,
    Gemm,
    GradientsWanted,
    LinearPPORows,
    PerToken,
    PPORows,
    Projection,
    ProjectionGradients,
    ShapedAdvantages,
    Shaping,
    StatsRows,
    Trajectory,
    accumulation_dtype,
)
from torch import Tensor

from fastppo.functional import arguments
from fastppo.functional.record_operator import operator


def _functions_of(backend: str) -> ModuleType:
    """Return the backend's module. Triton is imported on first use."""
    return importlib.import_module(f"fastppo_kernels.{backend}_backend")


def row_functions_of(backend: str, dtype: torch.dtype) -> ModuleType:
    """Return the backend for rows of logits of this dtype.

    The CPU's loops compute in fp32: fp64 logits use the definition.
    """
    return _functions_of("torch" if backend == "cpu" and dtype == torch.float64 else backend)


def _row_functions_of_head(backend: str, projection: Projection, gemm: Gemm) -> ModuleType:
    """`row_functions_of` the logits of a projection."""
    return row_functions_of(backend, gemm.dtype_for(projection))


def _check_tokens(tokens: Tensor, vocabulary: int, weights: Tensor | None = None) -> None:
    """Check tokens of non-zero weight against the vocabulary, if that does not synchronize with a
    GPU.

    FASTPPO_CHECK_VALUES=1 checks everywhere.
    """
    if tokens.device.type == "cpu" or arguments.values_are_checked():
        arguments.check_tokens(tokens, vocabulary, weights)


# ------------------------------------------------------------------------------------- statistics


@operator("token_stats", like=torch_backend.token_stats)
def token_stats_op(
    backend: str, logits: Tensor, tokens: Tensor, **_: Any
) -> Callable[..., StatsRows]:
    _check_tokens(tokens, logits.shape[-1])
    return row_functions_of(backend, logits.dtype).token_stats


@token_stats_op.register_fake
def _(logits: Tensor, tokens: Tensor) -> StatsRows:
    return _empty_stats(tokens, accumulation_dtype(logits.dtype))


def _empty_stats(tokens: Tensor, dtype: torch.dtype) -> StatsRows:
    columns = {name: tokens.new_empty(tokens.shape, dtype=dtype) for name in StatsRows._fields}
    for name in ("normalizer", "ref_normalizer"):
        columns[name] = tokens.new_empty((*tokens.shape, 2), dtype=dtype)
    return StatsRows(**columns)


@operator("token_stats_backward", like=torch_backend.token_stats_backward)
def token_stats_backward_op(backend: str, logits: Tensor, **_: Any) -> Callable[..., Tensor]:
    return row_functions_of(backend, logits.dtype).token_stats_backward


@token_stats_backward_op.register_fake
def _(logits: Tensor) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


# -------------------------------------------------------------------------------- loss from logits


@operator("ppo_loss", like=torch_backend.ppo_loss, without=("inplace",))
def ppo_loss_op(
    backend: str, logits: Tensor, per_token: PerToken, **_: Any
) -> Callable[..., PPORows]:
    _check_tokens(per_token.tokens, logits.shape[-1], per_token.weights)
    return row_functions_of(backend, logits.dtype).ppo_loss


@ppo_loss_op.register_fake
def _(logits: Tensor, per_token: PerToken, need_grad: bool) -> PPORows:
    grad = torch.empty_like(logits, memory_format=torch.contiguous_format) if need_grad else None
    return _empty_rows(per_token.tokens, logits.dtype)._replace(grad=grad)


def _empty_rows(tokens: Tensor, dtype: torch.dtype) -> PPORows:
    wide = accumulation_dtype(dtype)
    logprobs, entropy, kl = (tokens.new_empty(tokens.shape, dtype=wide) for _ in range(3))
    return PPORows(tokens.new_empty(len(SUMS), dtype=wide), logprobs, entropy, kl)


@operator(
    "ppo_loss_inplace",
    like=torch_backend.ppo_loss,
    without=("need_grad", "inplace"),
    mutates="logits",
)
def ppo_loss_inplace_op(
    backend: str, logits: Tensor, per_token: PerToken, **_: Any
) -> Callable[..., PPORows]:
    """Write the gradient over the logits instead of returning it."""
    _check_tokens(per_token.tokens, logits.shape[-1], per_token.weights)
    ppo_loss = row_functions_of(backend, logits.dtype).ppo_loss
    return lambda **operands: ppo_loss(**operands, inplace=True)._replace(grad=None)


@ppo_loss_inplace_op.register_fake
def _(logits: Tensor, per_token: PerToken) -> PPORows:
    return _empty_rows(per_token.tokens, logits.dtype)


# --------------------------------------------------------------------------------- fused lm-head


@operator("linear_ppo_loss", like=linear.ppo_loss, without=("row_functions",))
def linear_ppo_loss_op(
    backend: str, projection: Projection, per_token: PerToken, gemm: Gemm, **_: Any
) -> Callable[..., LinearPPORows]:
    _check_tokens(per_token.tokens, projection.weight.shape[0], per_token.weights)
    row_functions = _row_functions_of_head(backend, projection, gemm)
    return functools.partial(linear.ppo_loss, row_functions=row_functions)


@linear_ppo_loss_op.register_fake
def _(
    projection: Projection, per_token: PerToken, gemm: Gemm, wanted: GradientsWanted
) -> LinearPPORows:
    rows = _empty_rows(per_token.tokens, gemm.dtype_for(projection))
    grads = _empty_gradients(projection, wanted)
    return LinearPPORows(rows.sums, rows.logprobs, rows.entropy, rows.kl, grads)


def _empty_gradients(projection: Projection, wanted: GradientsWanted) -> ProjectionGradients:
    """Return contiguous gradients, whatever the strides of the projection."""
    parts = [None if part is None else part.new_empty(part.shape) for part in projection]
    return only_wanted(ProjectionGradients(*parts), wanted)


def only_wanted(grads: ProjectionGradients, wanted: GradientsWanted) -> ProjectionGradients:
    """Replace the empty tensors of gradients that are not needed by None."""
    return ProjectionGradients(
        hidden=grads.hidden if wanted.hidden else None,
        weight=grads.weight if wanted.weight else None,
        bias=grads.bias if wanted.bias else None,
    )


@operator("linear_token_stats", like=linear.token_stats, without=("row_functions",))
def linear_token_stats_op(
    backend: str, projection: Projection, tokens: Tensor, gemm: Gemm, **_: Any
) -> Callable[..., StatsRows]:
    _check_tokens(tokens, projection.weight.shape[0])
    row_functions = _row_functions_of_head(backend, projection, gemm)
    return functools.partial(linear.token_stats, row_functions=row_functions)


@linear_token_stats_op.register_fake
def _(projection: Projection, tokens: Tensor, gemm: Gemm) -> StatsRows:
    return _empty_stats(tokens, accumulation_dtype(gemm.dtype_for(projection)))


@operator(
    "linear_token_stats_backward", like=linear.token_stats_backward, without=("row_functions",)
)
def linear_token_stats_backward_op(
    backend: str, projection: Projection, gemm: Gemm, **_: Any
) -> Callable[..., ProjectionGradients]:
    row_functions = _row_functions_of_head(backend, projection, gemm)
    return functools.partial(linear.token_stats_backward, row_functions=row_functions)


@linear_token_stats_backward_op.register_fake
def _(projection: Projection, wanted: GradientsWanted) -> ProjectionGradients:
    return _empty_gradients(projection, wanted)


# -------------------------------------------------------------------------------------- advantages


@operator("gae", like=torch_backend.gae)
def gae_op(backend: str, **_: Any) -> Callable[..., Gae]:
    return _functions_of(backend).gae


@gae_op.register_fake
def _(trajectory: Trajectory) -> Gae:
    return _empty_advantages(trajectory.token_values)


def _empty_advantages(values: Tensor) -> Gae:
    dtype = accumulation_dtype(values.dtype)
    return Gae(
        advantages=values.new_empty(values.shape, dtype=dtype),
        returns=values.new_empty(values.shape, dtype=dtype),
    )


@operator("shaped_advantages", like=torch_backend.shaped_advantages)
def shaped_advantages_op(backend: str, **_: Any) -> Callable[..., ShapedAdvantages]:
    """The advantages are not whitened."""
    return _functions_of(backend).shaped_advantages


@shaped_advantages_op.register_fake
def _(trajectory: Trajectory, shaping: Shaping) -> ShapedAdvantages:
    estimates = _empty_advantages(trajectory.token_values)
    kl = estimates.returns.new_empty(shaping.scores.shape)
    return ShapedAdvantages(
        estimates.advantages, estimates.returns, kl, kl.new_empty(3, dtype=torch.float64)
    )


@operator("whiten", like=torch_backend.whiten)
def whiten_op(backend: str, **_: Any) -> Callable[..., Tensor]:
    return _functions_of(backend).whiten


@whiten_op.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape, dtype=accumulation_dtype(x.dtype))
