"""Operations that only torch's CUDA build has: fused attention, and GEMMs into a wider dtype.

Each checks its operands as CUDA's does, is one launch, and computes in fp32 on the host.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.simgpu.counts import counts

HALF = (torch.float16, torch.bfloat16)


def register() -> None:
    """Register the operations; they stay until the process ends."""
    library = torch.library.Library("aten", "IMPL")
    kernels: dict[str, Callable[..., Any]] = {
        "_scaled_dot_product_flash_attention": _sdpa_flash,
        "_scaled_dot_product_flash_attention_backward": _sdpa_flash_backward,
        "_scaled_dot_product_efficient_attention": _sdpa_efficient,
        "_scaled_dot_product_efficient_attention_backward": _sdpa_efficient_backward,
        "_flash_attention_forward": _varlen,
        "_flash_attention_backward": _varlen_backward,
        "mm.dtype": _mm,
        "mm.dtype_out": _mm,
        "addmm.dtype": _addmm,
        "addmm.dtype_out": _addmm,
    }
    for name, kernel in kernels.items():
        library.impl(name, kernel, "CUDA")
    _registered.append(library)


_registered: list[torch.library.Library] = []


def _host(x: Tensor) -> Tensor:
    return torch.ops.simgpu.to_host(x)


def _gpu(x: Tensor) -> Tensor:
    return torch.ops.simgpu.to_gpu(x)


def _check_on_gpu(name: str, *tensors: Tensor | None) -> None:
    if any(x is not None and not x.is_cuda for x in tensors):
        raise RuntimeError(f"Expected all tensors to be on the same device ({name})")


# --------------------------------------------------------------------------------------- attention


def _weights(
    q: Tensor, k: Tensor, bias: Tensor | None, *, hidden: Tensor | None, scale: float
) -> Tensor:
    """Return attention weights [..., T, S] of fp32 q and k."""
    scores = q @ k.transpose(-1, -2) * scale
    if bias is not None:
        scores = scores + bias
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0)  # a row without keys attends to nothing


def _gradients(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, p: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    dp = g @ v.transpose(-1, -2)
    ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * scale
    return ds @ k, ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ g


def _future(rows: int, columns: int) -> Tensor:
    return torch.ones(rows, columns, dtype=torch.bool).triu(1)


def _grouped(k: Tensor, q: Tensor, dim: int) -> Tensor:
    return k.repeat_interleave(q.shape[dim] // k.shape[dim], dim)


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *, is_causal: bool, scale: float | None
) -> tuple[list[Tensor], Tensor, float]:
    """Return (fp32 q, k, v on the host with as many heads, weights, scale)."""
    if not q.dtype == k.dtype == v.dtype:
        raise RuntimeError("Expected query, key, and value to have the same dtype")
    tensors = [_host(x).float() for x in (q, k, v)]
    tensors[1:] = [_grouped(x, tensors[0], 1) for x in tensors[1:]]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    hidden = _future(q.shape[-2], k.shape[-2]) if is_causal else None
    bias = None if bias is None else _host(bias).float()
    return tensors, _weights(tensors[0], tensors[1], bias, hidden=hidden, scale=scale), scale


def _like(x: Tensor, model: Tensor, dim: int = 1) -> Tensor:
    """Sum the heads of a group, and round to the dtype."""
    if x.shape[dim] != model.shape[dim]:
        x = x.unflatten(dim, (model.shape[dim], -1)).sum(dim + 1)
    return _gpu(x.to(model.dtype))


def _numbers() -> Tensor:
    return _gpu(torch.zeros((), dtype=torch.int64))


def _sdpa_flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    counts.add("flash attention")
    _check_on_gpu("flash attention", query, key, value)
    (_, _, v), p, _ = _sdpa(query, key, value, None, is_causal=is_causal, scale=scale)
    out = _gpu((p @ v).to(query.dtype).transpose(1, 2).contiguous().transpose(1, 2))
    lse = _gpu(torch.zeros(query.shape[:3]))
    longest = query.shape[2], key.shape[2]
    empty = _gpu(torch.empty(0))
    return out, lse, empty, empty, *longest, _numbers(), _numbers(), empty


def _sdpa_flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *random: Tensor,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    counts.add("flash attention, backward")
    (q, k, v), p, scale = _sdpa(query, key, value, None, is_causal=is_causal, scale=scale)
    grads = _gradients(_host(grad_out).float(), q, k, v, p, scale)
    return tuple(_like(g, x) for g, x in zip(grads, (query, key, value), strict=True))


def _sdpa_efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    counts.add("efficient attention")
    _check_on_gpu("efficient attention", query, key, value, attn_bias)
    (_, _, v), p, _ = _sdpa(query, key, value, attn_bias, is_causal=is_causal, scale=scale)
    out = _gpu((p @ v).to(query.dtype).transpose(1, 2).contiguous().transpose(1, 2))
    return out, _gpu(torch.zeros(query.shape[:3])), _numbers(), _numbers()


def _sdpa_efficient_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    dropout_p: float,
    grad_input_mask: list[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor | None, ...]:
    counts.add("efficient attention, backward")
    if grad_input_mask[3]:
        raise NotImplementedError("simulated device: the gradient of an attention bias")
    bias = attn_bias if attn_bias is not None and attn_bias.numel() else None
    (q, k, v), p, scale = _sdpa(query, key, value, bias, is_causal=is_causal, scale=scale)
    grads = _gradients(_host(grad_out).float(), q, k, v, p, scale)
    return *(_like(g, x) for g, x in zip(grads, (query, key, value), strict=True)), None


def _rows(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, *, causal: bool, window: tuple[int, int]
) -> list[tuple[slice, list[Tensor], Tensor]]:
    """Return (slice, fp32 [heads, T, D] of q, k, v, hidden [T, T]) of every packed sequence."""
    left, right = window
    rows = []
    edges = _host(cu_q).tolist()
    for begin, end in itertools.pairwise(edges):
        one = slice(begin, end)
        tensors = [_host(x)[one].float().transpose(0, 1) for x in (q, k, v)]
        tensors[1:] = [_grouped(x, tensors[0], 0) for x in tensors[1:]]
        position = torch.arange(end - begin)
        gap = position[:, None] - position[None, :]
        hidden = gap < 0 if causal or right == 0 else torch.zeros_like(gap, dtype=torch.bool)
        if left >= 0:
            hidden = hidden | (gap > left)
        rows.append((one, tensors, hidden))
    return rows


def _check_varlen(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, max_q: int) -> None:
    _check_on_gpu("flash attention", q, k, v, cu_q)
    for x in (q, k, v):
        if x.dtype not in HALF:
            raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
        if x.stride(-1) != 1:
            raise RuntimeError("Input tensor must have contiguous last dimension")
    if cu_q.dtype != torch.int32:
        raise RuntimeError("cu_seqlens_q must have dtype int32")
    if q.shape[-1] % 8 or q.shape[-1] > 256:
        raise RuntimeError("head_size should be a multiple of 8, and at most 256")
    edges = _host(cu_q)
    if int(edges.diff().max()) > max_q or int(edges[-1]) != q.shape[0]:
        raise RuntimeError("a GPU would read elsewhere: max_q or cu_seqlens is wrong")


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **more: Any,
) -> tuple[Tensor, ...]:
    counts.add("flash attention")
    _check_varlen(query, key, value, cum_seq_q, max_q)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    window = _window(window_size_left, window_size_right)
    out = torch.empty(query.shape, dtype=query.dtype)
    for one, (q, k, v), hidden in _rows(
        query, key, value, cum_seq_q, causal=is_causal, window=window
    ):
        p = _weights(q, k, None, hidden=hidden, scale=scale)
        out[one] = (p @ v).transpose(0, 1).to(out.dtype)
    lse = torch.zeros(query.shape[1], query.shape[0])
    empty = _gpu(torch.empty(0, dtype=query.dtype))
    random = _gpu(torch.zeros(2, dtype=torch.uint64))
    return _gpu(out), _gpu(lse), random, _gpu(torch.zeros((), dtype=torch.uint64)), empty


def _varlen_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...]:
    counts.add("flash attention, backward")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    window = _window(window_size_left, window_size_right)
    parts: list[list[Tensor]] = [[], [], []]
    for one, (q, k, v), hidden in _rows(
        query, key, value, cum_seq_q, causal=is_causal, window=window
    ):
        p = _weights(q, k, None, hidden=hidden, scale=scale)
        g = _host(grad_out)[one].float().transpose(0, 1)
        for part, grad in zip(parts, _gradients(g, q, k, v, p, scale), strict=True):
            part.append(grad.transpose(0, 1))
    grads = [torch.cat(part) for part in parts]
    return tuple(_like(g, x) for g, x in zip(grads, (query, key, value), strict=True))


def _window(left: int | None, right: int | None) -> tuple[int, int]:
    return -1 if left is None else left, -1 if right is None else right


# ------------------------------------------------------------------------------------------- GEMMs


def _check_gemm(a: Tensor, b: Tensor, out_dtype: torch.dtype, *others: Tensor | None) -> None:
    _check_on_gpu("mm", a, b, *others)
    if a.dtype != b.dtype:
        raise RuntimeError("mat1 and mat2 must have the same dtype")
    if out_dtype != a.dtype and not (out_dtype == torch.float32 and a.dtype in HALF):
        raise RuntimeError("out_dtype must be the dtype of the operands, or fp32 for fp16 and bf16")


def _into(out: Tensor | None, result: Tensor) -> Tensor:
    if out is None:
        return _gpu(result)
    if out.dtype != result.dtype:
        raise RuntimeError("out_dtype must be the dtype of out")
    _host(out).copy_(result)
    return out


def _mm(a: Tensor, b: Tensor, out_dtype: torch.dtype, *, out: Tensor | None = None) -> Tensor:
    counts.add("aten::mm")
    _check_gemm(a, b, out_dtype, out)
    return _into(out, (_host(a).float() @ _host(b).float()).to(out_dtype))


def _addmm(
    c: Tensor,
    a: Tensor,
    b: Tensor,
    out_dtype: torch.dtype,
    *,
    beta: float = 1,
    alpha: float = 1,
    out: Tensor | None = None,
) -> Tensor:
    counts.add("aten::addmm")
    _check_gemm(a, b, out_dtype, c, out)
    if c.dtype not in (out_dtype, a.dtype):
        raise RuntimeError("self must have the dtype of the result or of the operands")
    product = _host(a).float() @ _host(b).float()
    return _into(out, (beta * _host(c).float() + alpha * product).to(out_dtype))
