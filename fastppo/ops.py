"""Custom operators, their autograd, and the choice of backend.

The layer between the public functions and `fastppo_kernels`. Each operator is opaque to
`torch.compile` (a registered custom operator with a fake kernel, so `fullgraph=True` works), runs
the Triton kernel or the plain-PyTorch definition, and is made differentiable by a small
`autograd.Function`. Arguments arrive validated, one entry per token: `[N]`.

PPO's gradient is formed in the forward pass; the backward pass scales it by the incoming gradient.
fp16 is the exception: its loss scale is known in the backward pass only, and a gradient rounded to
fp16 before the scaling would underflow, so `fastppo.losses` takes the statistics' path there,
from logits and from hidden states alike.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from types import ModuleType
from typing import Any, NamedTuple

import torch
from fastppo_kernels import reference
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.library import custom_op

from fastppo import validation

HAS_TRITON = importlib.util.find_spec("triton") is not None
BACKENDS = ("auto", "triton", "torch")


class SoftmaxOptions(NamedTuple):
    """How logits become a distribution; `temperature` holds where none is given per token."""

    temperature: float = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None
    backend: str = "torch"


class LossOptions(NamedTuple):
    """The fields of SoftmaxOptions and those of `reference.Objective`."""

    temperature: float
    logit_scale: float
    softcap: float | None
    backend: str
    clip_low: float
    clip_high: float
    dual_clip: float | None
    kl_coef: float
    kl_estimator: str
    entropy_coef: float


SOFTMAX = "float temperature, float logit_scale, float? softcap, str backend"
LOSS = f"""{SOFTMAX}, float clip_low, float clip_high, float? dual_clip,
    float kl_coef, str kl_estimator, float entropy_coef"""
PER_TOKEN = """Tensor tokens, Tensor old_logprobs, Tensor advantages, Tensor weights,
    Tensor? importance_weights, Tensor? ref_logprobs, Tensor? temperatures"""
PER_TOKEN_COUNT = PER_TOKEN.count(",") + 1


def _schema(text: str) -> str:
    return " ".join(text.split())


def choose_backend(backend: str, x: Tensor) -> str:
    """The backend, "torch" or "triton", that runs an operation on `x`.

    Raises:
        ValueError: "triton" where it cannot run: fp64, or a CPU without the interpreter.
    """
    validation.choice("backend", backend, BACKENDS)
    if backend == "auto":
        runs = x.is_cuda and x.dtype != torch.float64
        return "triton" if runs and HAS_TRITON else "torch"
    if backend == "triton":
        if x.dtype == torch.float64:
            raise ValueError(
                "backend='triton' computes in fp32, got float64; use 'auto' or 'torch'"
            )
        if not x.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
            raise ValueError(
                f"backend='triton' needs CUDA tensors, got {x.device}; for Triton's (slow) "
                "interpreter set TRITON_INTERPRET=1 before the first import of triton"
            )
    return backend


def _kernels(backend: str, family: str = "row_loss") -> ModuleType:
    """The operations of a kernel family in a backend; Triton is imported only where it is used."""
    if backend == "torch":
        return reference
    return importlib.import_module(f"fastppo_kernels.{family}")


def _check_tokens(tokens: Tensor, vocab: int, weights: Tensor | None = None) -> None:
    """Refuses tokens outside the vocabulary where the check does not synchronise with a GPU.

    FASTPPO_CHECK_TOKENS=1 asks for it everywhere. Tokens of weight 0 may be anything.
    """
    if tokens.device.type == "cpu" or os.environ.get("FASTPPO_CHECK_TOKENS") == "1":
        validation.vocabulary(tokens if weights is None else tokens[weights != 0], vocab)


def _own_precision(x: Tensor) -> torch.autocast:
    """The operators choose their dtypes themselves; autocast must not reach inside them."""
    return torch.autocast(x.device.type, enabled=False)


def _scaled(grad: Tensor, by: Tensor, backend: str = "torch") -> Tensor:
    """grad·by for a gradient saved in the forward pass and the 0-d gradient of the loss.

    In eager mode a factor of exactly 1 costs no pass over memory: on a CPU its value is looked at,
    and the Triton kernel looks at it on the device. The saved buffer itself is handed out (and
    scaled) only where autograd frees it after this call: whoever receives it may add to it in
    place. Where it is kept for another backward pass (retain_graph=True), it is copied.
    """
    if not torch.compiler.is_compiling():
        kept = torch._C._autograd._get_current_graph_task_keep_graph()
        if backend == "triton":
            return _kernels(backend).scale_(grad.clone() if kept else grad, by)
        if by.device.type == "cpu":
            return grad if by.item() == 1.0 and not kept else grad * by
    # Elsewhere a 0-d factor is rounded to the gradient's dtype before the product.
    return (grad.to(torch.promote_types(grad.dtype, by.dtype)) * by).to(grad.dtype)


def _kernel_options(options: dict[str, Any], temperatures: Tensor | None) -> dict[str, Any]:
    """The keywords of the kernel: without the backend, one temperature instead of two."""
    kept = {name: value for name, value in options.items() if name != "backend"}
    return kept if temperatures is None else kept | {"temperature": temperatures}


# ------------------------------------------------------------------------------------- statistics


@custom_op(
    "fastppo::token_stats",
    mutates_args=(),
    schema=_schema(f"""(Tensor logits, Tensor tokens, Tensor? ref_logits, Tensor? temperatures, *,
        {SOFTMAX}) -> Tensor[]"""),
)
def token_stats_op(
    logits: Tensor,
    tokens: Tensor,
    ref_logits: Tensor | None,
    temperatures: Tensor | None,
    **options: Any,
) -> list[Tensor]:
    _check_tokens(tokens, logits.shape[-1])
    with _own_precision(logits):
        stats = _kernels(options["backend"]).token_stats(
            logits, tokens, ref_logits=ref_logits, **_kernel_options(options, temperatures)
        )
    return list(stats)


@token_stats_op.register_fake
def _(logits: Tensor, tokens: Tensor, *args: Any, **options: Any) -> list[Tensor]:
    return _empty_stats(tokens, reference.accumulation_dtype(logits.dtype))


def _empty_stats(tokens: Tensor, dtype: torch.dtype) -> list[Tensor]:
    n = tokens.shape[0]
    return [tokens.new_empty(shape, dtype=dtype) for shape in ((n,), (n,), (n,), (n, 2), (n, 2))]


@custom_op(
    "fastppo::token_stats_backward",
    mutates_args=(),
    schema=_schema(f"""(Tensor grad_logprobs, Tensor? grad_entropy, Tensor? grad_kl, Tensor logits,
        Tensor tokens, Tensor[] stats, Tensor? ref_logits, Tensor? temperatures, *,
        {SOFTMAX}) -> Tensor"""),
)
def token_stats_backward_op(
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
    grad_kl: Tensor | None,
    logits: Tensor,
    tokens: Tensor,
    stats: list[Tensor],
    ref_logits: Tensor | None,
    temperatures: Tensor | None,
    **options: Any,
) -> Tensor:
    with _own_precision(logits):
        return _kernels(options["backend"]).token_stats_backward(
            grad_logprobs,
            grad_entropy,
            grad_kl,
            logits,
            tokens,
            reference.TokenStats(*stats),
            ref_logits=ref_logits,
            **_kernel_options(options, temperatures),
        )


@token_stats_backward_op.register_fake
def _(g_logprobs: Tensor, g_entropy: Any, g_kl: Any, logits: Tensor, *a: Any, **o: Any) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


class TokenStats(torch.autograd.Function):
    """(logprobs, entropy, full KL), differentiable by the logits; backward reads them again."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        tokens: Tensor,
        ref_logits: Tensor | None,
        temperatures: Tensor | None,
        options: SoftmaxOptions,
    ) -> tuple[Tensor, Tensor, Tensor]:
        stats = token_stats_op(logits, tokens, ref_logits, temperatures, **options._asdict())
        ctx.save_for_backward(logits, tokens, ref_logits, temperatures, *stats)
        ctx.options = options
        return stats[0], stats[1], stats[2]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, tokens, ref_logits, temperatures, *stats = ctx.saved_tensors
        grad = token_stats_backward_op(
            grads[0],
            grads[1],
            None if ref_logits is None else grads[2],
            logits,
            tokens,
            stats,
            ref_logits,
            temperatures,
            **ctx.options._asdict(),
        )
        return grad, None, None, None, None


# -------------------------------------------------------------------------------- loss from logits


def _ppo_rows(
    logits: Tensor,
    tokens: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    importance_weights: Tensor | None,
    ref_logprobs: Tensor | None,
    temperatures: Tensor | None,
    ref_logits: Tensor | None,
    need_grad: bool,
    *,
    inplace: bool,
    options: dict[str, Any],
) -> reference.PPORows:
    _check_tokens(tokens, logits.shape[-1], weights)
    with _own_precision(logits):
        return _kernels(options["backend"]).ppo_loss(
            logits,
            tokens,
            old_logprobs,
            advantages,
            weights,
            importance_weights=importance_weights,
            ref_logprobs=ref_logprobs,
            ref_logits=ref_logits,
            need_grad=need_grad,
            inplace=inplace,
            **_kernel_options(options, temperatures),
        )


@custom_op(
    "fastppo::ppo_loss",
    mutates_args=(),
    schema=_schema(
        f"(Tensor logits, {PER_TOKEN}, Tensor? ref_logits, bool need_grad, *, {LOSS}) -> Tensor[]"
    ),
)
def ppo_loss_op(logits: Tensor, *per_token: Any, **options: Any) -> list[Tensor]:
    """[sums, logprobs, entropy, kl, grad]; grad is empty unless asked for."""
    rows = _ppo_rows(logits, *per_token, inplace=False, options=options)
    grad = logits.new_empty(0) if rows.grad is None else rows.grad
    return [rows.sums, rows.logprobs, rows.entropy, rows.kl, grad]


@ppo_loss_op.register_fake
def _(logits: Tensor, tokens: Tensor, *args: Any, **options: Any) -> list[Tensor]:
    need_grad = args[-1]
    shape = logits.shape if need_grad else (0,)
    return [*_empty_rows(logits, tokens), logits.new_empty(shape)]


def _empty_rows(x: Tensor, tokens: Tensor) -> list[Tensor]:
    dtype = reference.accumulation_dtype(x.dtype)
    n = tokens.shape[0]
    return [x.new_empty(shape, dtype=dtype) for shape in (len(reference.SUMS), n, n, n)]


@custom_op(
    "fastppo::ppo_loss_inplace",
    mutates_args=("logits",),
    schema=_schema(
        # Four tensors and no list: torch.compile functionalises no mutation beside a list.
        f"(Tensor(a!) logits, {PER_TOKEN}, Tensor? ref_logits, bool need_grad, *, {LOSS})"
        " -> (Tensor, Tensor, Tensor, Tensor)"
    ),
)
def ppo_loss_inplace_op(
    logits: Tensor, *per_token: Any, **options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(sums, logprobs, entropy, kl); the gradient is written over the logits."""
    rows = _ppo_rows(logits, *per_token, inplace=True, options=options)
    return rows.sums, rows.logprobs, rows.entropy, rows.kl


@ppo_loss_inplace_op.register_fake
def _(logits: Tensor, tokens: Tensor, *args: Any, **options: Any) -> tuple[Tensor, ...]:
    return tuple(_empty_rows(logits, tokens))


class PPOLoss(torch.autograd.Function):
    """(loss, sums, logprobs, entropy, kl); the loss alone is differentiable, by the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        ref_logits: Tensor | None,
        need_grad: bool,
        inplace: bool,
        options: LossOptions,
        *per_token: Tensor | None,
    ) -> tuple[Tensor, ...]:
        arguments = (*per_token, ref_logits, need_grad)
        if inplace and need_grad:
            grad = logits.detach()
            rows = ppo_loss_inplace_op(grad, *arguments, **options._asdict())
        else:
            *rows, grad = ppo_loss_op(logits, *arguments, **options._asdict())
        if need_grad:
            # In place, the saved buffer is the caller's own logits: the one copy there is.
            ctx.save_for_backward(grad)
            ctx.backend = options.backend
        loss = rows[0][0].clone()
        ctx.mark_non_differentiable(*rows)
        return (loss, *rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        return (_scaled(grad, grads[0], ctx.backend), *(None,) * (4 + PER_TOKEN_COUNT))


class TokenLoss(torch.autograd.Function):
    """(loss, sums, kl) from a row's statistics, differentiable by (logprobs, entropy, full KL).

    For fp16 logits: composed with TokenStats it forms the logits' gradient in the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logprobs: Tensor,
        entropy: Tensor,
        full_kl: Tensor | None,
        options: LossOptions,
        tokens: Tensor,
        old_logprobs: Tensor,
        advantages: Tensor,
        weights: Tensor,
        importance_weights: Tensor | None,
        ref_logprobs: Tensor | None,
    ) -> tuple[Tensor, ...]:
        operands = reference.PerToken(
            tokens, old_logprobs, advantages, weights, importance_weights, ref_logprobs
        )
        objective = reference.Objective(
            **{name: getattr(options, name) for name in reference.Objective._fields}
        )
        token = reference.token_loss(logprobs, full_kl, operands, objective)
        sums = reference.loss_sums(logprobs, entropy, token.kl, operands, objective)
        ctx.save_for_backward(token.g_logprob, token.g_entropy, token.g_kl)
        ctx.mark_non_differentiable(sums, token.kl)
        return sums[0].clone(), sums, token.kl

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        grads = [None if grad is None else grad * upstream[0] for grad in ctx.saved_tensors]
        return (*grads, *(None,) * 7)


# ------------------------------------------------------------------------------- the fused lm-head

HEAD = "Tensor hidden, Tensor weight, Tensor? bias"
GEMM = "int? chunk_size, ScalarType? compute_dtype"


@custom_op(
    "fastppo::linear_ppo_loss",
    mutates_args=(),
    schema=_schema(f"""({HEAD}, {PER_TOKEN}, Tensor? ref_hidden, Tensor? ref_weight,
        Tensor? ref_bias, bool[] need, *, bool compact, {GEMM}, {LOSS}) -> Tensor[]"""),
)
def linear_ppo_loss_op(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tokens: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    importance_weights: Tensor | None,
    ref_logprobs: Tensor | None,
    temperatures: Tensor | None,
    ref_hidden: Tensor | None,
    ref_weight: Tensor | None,
    ref_bias: Tensor | None,
    need: list[bool],
    *,
    compact: bool,
    **options: Any,
) -> list[Tensor]:
    """[sums, logprobs, entropy, kl, dX, dW, dbias]; gradients not asked for are empty.

    `compact` lets the kernel find the rows of weight 0 and leave them out, which takes a
    synchronisation; not in a graph capture, where none is allowed. The definition always does.
    """
    _check_tokens(tokens, weight.shape[0], weights)
    backend, how = options["backend"], {}
    if backend == "triton":
        capturing = hidden.is_cuda and torch.cuda.is_current_stream_capturing()
        how = {"compact": compact and not capturing}
    with _own_precision(hidden):
        rows = _kernels(backend, "linear_loss").linear_ppo_loss(
            hidden,
            weight,
            tokens,
            old_logprobs,
            advantages,
            weights,
            bias=bias,
            ref_hidden=ref_hidden,
            ref_weight=ref_weight,
            ref_bias=ref_bias,
            importance_weights=importance_weights,
            ref_logprobs=ref_logprobs,
            need=(need[0], need[1], need[2]),
            **how,
            **_kernel_options(options, temperatures),
        )
    grads = (rows.grad_hidden, rows.grad_weight, rows.grad_bias)
    return [*rows[:4], *(hidden.new_empty(0) if grad is None else grad for grad in grads)]


@linear_ppo_loss_op.register_fake
def _(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tensor, *args: Any, **options: Any
) -> list[Tensor]:
    rows = _empty_rows(hidden.new_empty((), dtype=options["compute_dtype"] or hidden.dtype), tokens)
    return [*rows, *_empty_head_gradients(hidden, weight, bias, args[-1])]


def _empty_head_gradients(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, need: list[bool]
) -> list[Tensor]:
    """Contiguous, whatever hidden and weight are."""
    return [
        x.new_empty(x.shape) if x is not None and asked else hidden.new_empty(0)
        for x, asked in zip((hidden, weight, bias), need, strict=True)
    ]


class LinearPPOLoss(torch.autograd.Function):
    """(loss, sums, logprobs, entropy, kl); the loss is differentiable by hidden, weight, bias."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        need: tuple[bool, bool, bool],
        compact: bool,
        chunk_size: int | None,
        compute_dtype: torch.dtype,
        options: LossOptions,
        *per_token_and_reference: Tensor | None,
    ) -> tuple[Tensor, ...]:
        outputs = linear_ppo_loss_op(
            hidden,
            weight,
            bias,
            *per_token_and_reference,
            list(need),
            compact=compact,
            chunk_size=chunk_size,
            compute_dtype=compute_dtype,
            **options._asdict(),
        )
        rows, grads = outputs[:4], outputs[4:]
        ctx.save_for_backward(*grads)
        ctx.need, ctx.backend = need, options.backend
        loss = rows[0][0].clone()
        ctx.mark_non_differentiable(*rows)
        return (loss, *rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        grads = [
            _scaled(grad, upstream[0], ctx.backend) if asked else None
            for grad, asked in zip(ctx.saved_tensors, ctx.need, strict=True)
        ]
        return (*grads, *(None,) * (5 + PER_TOKEN_COUNT + 3))


@custom_op(
    "fastppo::linear_token_stats",
    mutates_args=(),
    schema=_schema(
        f"({HEAD}, Tensor tokens, Tensor? temperatures, *, {GEMM}, {SOFTMAX}) -> Tensor[]"
    ),
)
def linear_token_stats_op(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tokens: Tensor,
    temperatures: Tensor | None,
    **options: Any,
) -> list[Tensor]:
    _check_tokens(tokens, weight.shape[0])
    with _own_precision(hidden):
        stats = _kernels(options["backend"], "linear_loss").linear_token_stats(
            hidden,
            weight,
            tokens,
            bias=bias,
            **_kernel_options(options, temperatures),
        )
    return list(stats)


@linear_token_stats_op.register_fake
def _(
    hidden: Tensor, weight: Tensor, bias: Any, tokens: Tensor, *args: Any, **options: Any
) -> list[Tensor]:
    dtype = reference.accumulation_dtype(options["compute_dtype"] or hidden.dtype)
    return _empty_stats(tokens, dtype)


@custom_op(
    "fastppo::linear_token_stats_backward",
    mutates_args=(),
    schema=_schema(f"""({HEAD}, Tensor tokens, Tensor? temperatures, Tensor grad_logprobs,
        Tensor grad_entropy, Tensor[] stats, bool[] need, *, {GEMM}, {SOFTMAX}) -> Tensor[]"""),
)
def linear_token_stats_backward_op(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tokens: Tensor,
    temperatures: Tensor | None,
    grad_logprobs: Tensor,
    grad_entropy: Tensor,
    stats: list[Tensor],
    need: list[bool],
    **options: Any,
) -> list[Tensor]:
    with _own_precision(hidden):
        grads = _kernels(options["backend"], "linear_loss").linear_token_stats_backward(
            grad_logprobs,
            grad_entropy,
            hidden,
            weight,
            tokens,
            reference.TokenStats(*stats),
            bias=bias,
            need=(need[0], need[1], need[2]),
            **_kernel_options(options, temperatures),
        )
    return [hidden.new_empty(0) if grad is None else grad for grad in grads]


@linear_token_stats_backward_op.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Any, *args: Any, **options: Any) -> list[Tensor]:
    return _empty_head_gradients(hidden, weight, bias, args[-1])


class LinearTokenStats(torch.autograd.Function):
    """(logprobs, entropy), differentiable by hidden, weight, bias; backward forms logits again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: Tensor,
        temperatures: Tensor | None,
        need: tuple[bool, bool, bool],
        chunk_size: int | None,
        compute_dtype: torch.dtype,
        options: SoftmaxOptions,
    ) -> tuple[Tensor, Tensor]:
        keywords = {"chunk_size": chunk_size, "compute_dtype": compute_dtype, **options._asdict()}
        stats = linear_token_stats_op(hidden, weight, bias, tokens, temperatures, **keywords)
        ctx.save_for_backward(hidden, weight, bias, tokens, temperatures, *stats)
        ctx.need, ctx.keywords = need, keywords
        return stats[0], stats[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, tokens, temperatures, *stats = ctx.saved_tensors
        grads = linear_token_stats_backward_op(
            hidden,
            weight,
            bias,
            tokens,
            temperatures,
            *upstream,
            stats,
            list(ctx.need),
            **ctx.keywords,
        )
        asked = [grad if need else None for grad, need in zip(grads, ctx.need, strict=True)]
        return (*asked, *(None,) * 6)


# -------------------------------------------------------------------------------------- advantages


@custom_op(
    "fastppo::gae",
    mutates_args=(),
    schema=_schema("""(Tensor rewards, Tensor values, Tensor? mask, Tensor? cu_seqlens,
        Tensor? gammas, Tensor? lams, Tensor? bootstrap, *, float gamma, float lam, str backend)
        -> (Tensor, Tensor)"""),
)
def gae_op(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    gammas: Tensor | None,
    lams: Tensor | None,
    bootstrap: Tensor | None,
    *,
    gamma: float,
    lam: float,
    backend: str,
) -> tuple[Tensor, Tensor]:
    return _kernels(backend, "advantages").gae(
        rewards,
        values,
        mask,
        cu_seqlens=cu_seqlens,
        gamma=gamma if gammas is None else gammas,
        lam=lam if lams is None else lams,
        bootstrap=bootstrap,
    )


@gae_op.register_fake
def _(rewards: Tensor, values: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    dtype = reference.accumulation_dtype(values.dtype)
    return values.new_empty(values.shape, dtype=dtype), values.new_empty(values.shape, dtype=dtype)


@custom_op(
    "fastppo::shaped_advantages",
    mutates_args=(),
    schema=_schema("""(Tensor scores, Tensor values, Tensor logprobs, Tensor? ref_logprobs,
        Tensor mask,
        Tensor? cu_seqlens, Tensor? gammas, Tensor? lams, Tensor? bootstrap, Tensor? token_rewards,
        *, float gamma, float lam, float kl_coef, str kl_estimator, float? score_clip, str backend)
        -> Tensor[]"""),
)
def shaped_advantages_op(
    scores: Tensor,
    values: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor | None,
    mask: Tensor,
    cu_seqlens: Tensor | None,
    gammas: Tensor | None,
    lams: Tensor | None,
    bootstrap: Tensor | None,
    token_rewards: Tensor | None,
    *,
    gamma: float,
    lam: float,
    kl_coef: float,
    kl_estimator: str,
    score_clip: float | None,
    backend: str,
) -> list[Tensor]:
    """[advantages, returns, kl [B], moments [3]], not yet whitened."""
    return list(
        _kernels(backend, "advantages").shaped_advantages(
            scores,
            values,
            logprobs,
            ref_logprobs,
            mask,
            cu_seqlens=cu_seqlens,
            kl_coef=kl_coef,
            kl_estimator=kl_estimator,
            gamma=gamma if gammas is None else gammas,
            lam=lam if lams is None else lams,
            bootstrap=bootstrap,
            score_clip=score_clip,
            token_rewards=token_rewards,
        )
    )


@shaped_advantages_op.register_fake
def _(scores: Tensor, values: Tensor, *args: Any, **options: Any) -> list[Tensor]:
    dtype = reference.accumulation_dtype(values.dtype)
    return [
        values.new_empty(values.shape, dtype=dtype),
        values.new_empty(values.shape, dtype=dtype),
        values.new_empty(scores.shape, dtype=dtype),
        values.new_empty(3, dtype=torch.float64),
    ]


@custom_op(
    "fastppo::whiten",
    mutates_args=(),
    schema=_schema(
        "(Tensor x, Tensor? mask, Tensor? moments, *, bool shift_mean, str backend) -> Tensor"
    ),
)
def whiten_op(
    x: Tensor, mask: Tensor | None, moments: Tensor | None, *, shift_mean: bool, backend: str
) -> Tensor:
    return _kernels(backend, "advantages").whiten(x, mask, shift_mean=shift_mean, moments=moments)


@whiten_op.register_fake
def _(x: Tensor, *args: Any, **options: Any) -> Tensor:
    return x.new_empty(x.shape, dtype=reference.accumulation_dtype(x.dtype))
