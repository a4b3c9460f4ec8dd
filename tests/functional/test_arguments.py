"""Wrong input is refused before any work, with the argument's name, what it got, what it wants.

Each row of a table: the call, what is wrong in it, and the words that the message must hold.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import two_ranks
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fastppo
from fastppo.functional import arguments
from fastppo.functional.statistics import sampled_kl

N, V, H = 4, 7, 3
nan, inf = float("nan"), float("inf")


class _Work(TorchDispatchMode):
    """Fails where one of our operators begins to work."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.namespace != "fastppo", "work began before the wrong input was refused"
        return func(*args, **(kwargs or {}))


ZEROS = torch.zeros(N)
TOKENS = torch.zeros(N, dtype=torch.int64)
RESPONSES = torch.zeros(2, 3)
LOGITS = {"logits": torch.zeros(N, V)}
HEAD = {"hidden": torch.zeros(N, H), "weight": torch.zeros(V, H)}
LOSS_OPERANDS = {"tokens": TOKENS, "old_logprobs": ZEROS, "advantages": torch.ones(N)}
RIGHT: dict[Callable[..., Any], dict[str, Any]] = {
    fastppo.ppo_loss: LOGITS | LOSS_OPERANDS,
    fastppo.linear_ppo_loss: HEAD | LOSS_OPERANDS,
    fastppo.token_stats: LOGITS | {"tokens": TOKENS},
    fastppo.linear_token_stats: HEAD | {"tokens": TOKENS},
    fastppo.linear_token_logprobs: HEAD | {"tokens": TOKENS},
    fastppo.policy_loss: {"logprobs": ZEROS, "old_logprobs": ZEROS, "advantages": ZEROS},
    fastppo.value_loss: {"values": ZEROS, "returns": ZEROS},
    fastppo.total_loss: {
        **LOGITS,
        **{"logprobs": ZEROS, "old_logprobs": ZEROS, "advantages": ZEROS},
        **{"values": ZEROS, "returns": ZEROS},
    },
    fastppo.gae: {"rewards": RESPONSES, "values": RESPONSES},
    fastppo.compute_advantages: {
        "scores": torch.zeros(2),
        "values": RESPONSES,
        "logprobs": RESPONSES,
        "ref_logprobs": RESPONSES,
        "mask": torch.ones(2, 3, dtype=torch.bool),
    },
    fastppo.whiten: {"x": ZEROS},
    fastppo.aggregation_weights: {"mask": torch.ones(2, N, dtype=torch.bool)},
    fastppo.entropy: LOGITS,
}
"""Arguments with which each function works."""


def call(function: Callable[..., Any], **changes: Any) -> Any:
    return function(**RIGHT[function] | changes)


def ints(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def meta(*shape: int) -> Tensor:
    return torch.zeros(shape, device="meta")


Row = tuple[Callable[..., Any], dict[str, Any], list[str]]

BOTH: list[tuple[dict[str, Any], list[str]]] = [  # of ppo_loss and of linear_ppo_loss
    ({"tokens": torch.zeros(N)}, ["tokens", "int64", "float32"]),
    ({"tokens": torch.zeros(N, dtype=torch.int32)}, ["tokens", "int64", "int32"]),
    ({"tokens": ints(N + 1)}, ["tokens", "[4]", "[5]"]),
    ({"tokens": [0] * N}, ["tokens", "torch.Tensor", "list"]),
    ({"old_logprobs": torch.zeros(1)}, ["old_logprobs", "[4]", "one per token", "[1]"]),
    ({"old_logprobs": ints(N)}, ["old_logprobs", "float32", "int64"]),
    ({"old_logprobs": None}, ["old_logprobs", "torch.Tensor", "NoneType"]),
    ({"old_logprobs": meta(N)}, ["old_logprobs", "cpu", "meta"]),
    ({"advantages": torch.zeros(())}, ["advantages", "[4]", "[]"]),
    ({"advantages": 1.0}, ["advantages", "torch.Tensor", "float"]),
    ({"mask": torch.ones(N)}, ["mask", "bool", "float32"]),
    ({"mask": torch.ones(1, N, dtype=torch.bool)}, ["mask", "[4]", "[1, 4]"]),
    ({"importance_weights": torch.ones(N, 1)}, ["importance_weights", "[4]", "[4, 1]"]),
    ({"ref_logprobs": torch.zeros(2)}, ["ref_logprobs", "[4]", "[2]"]),
    ({"clip_ratio": -0.1}, ["clip_ratio", "negative", "-0.1"]),
    ({"clip_ratio": (0.1, -0.2)}, ["clip_ratio", "negative", "-0.2"]),
    ({"clip_ratio": nan}, ["clip_ratio", "nan"]),
    ({"clip_ratio": (0.1, 0.2, 0.3)}, ["clip_ratio", "ε", "0.3"]),
    ({"clip_ratio": "0.2"}, ["clip_ratio", "number", "str"]),
    ({"clip_ratio": torch.tensor(0.2)}, ["clip_ratio", "number", "Tensor"]),
    ({"dual_clip": 1.0}, ["dual_clip", "> 1", "1.0"]),
    ({"dual_clip": "3"}, ["dual_clip", "number", "str"]),
    ({"kl_estimator": "k4"}, ["kl_estimator", "k1, k2, k3, full", "k4"]),
    ({"kl_coef": 0.1}, ["kl_coef", "k3", "ref_logprobs"]),
    ({"kl_coef": 0.1, "kl_estimator": "k1"}, ["kl_coef", "k1", "ref_logprobs"]),
    ({"kl_coef": 0.1, "kl_estimator": "full"}, ["kl_estimator='full'", "ref_logits"]),
    (
        {"kl_coef": 0.1, "kl_estimator": "full", "ref_logprobs": torch.zeros(N)},
        ["kl_estimator='full'", "ref_logits"],
    ),
    (
        {"kl_coef": 0.1, "kl_estimator": "k2", "kl_ratio_weighted": True, "ref_logprobs": ZEROS},
        ["kl_ratio_weighted", "'k1' or 'k3'", "'k2'"],
    ),
    ({"kl_ratio_weighted": True}, ["kl_ratio_weighted", "kl_coef", "not 0"]),
    ({"kl_ratio_weighted": 1}, ["kl_ratio_weighted", "True or False", "1"]),
    ({"kl_coef": nan}, ["kl_coef", "finite", "nan"]),
    ({"kl_coef": "0.1"}, ["kl_coef", "number", "str"]),
    ({"entropy_coef": inf}, ["entropy_coef", "finite", "inf"]),
    ({"entropy_coef": None}, ["entropy_coef", "number", "NoneType"]),
    ({"temperature": 0.0}, ["temperature", "> 0", "0.0"]),
    ({"temperature": -1}, ["temperature", "> 0", "-1"]),
    ({"temperature": nan}, ["temperature", "> 0", "nan"]),
    ({"temperature": torch.ones(N, 1)}, ["temperature", "[4]", "[4, 1]"]),
    ({"temperature": ints(N)}, ["temperature", "float32", "int64"]),
    ({"logit_scale": 0.0}, ["logit_scale", "> 0", "0.0"]),
    ({"logit_scale": inf}, ["logit_scale", "finite", "inf"]),
    ({"softcap": 0.0}, ["softcap", "> 0", "0.0"]),
    ({"softcap": -30.0}, ["softcap", "> 0", "-30.0"]),
    ({"aggregation": "mean"}, ["aggregation", "token-mean", "mean"]),
    ({"aggregation": "seq-mean-token-sum"}, ["aggregation", "(..., T)", "[4]"]),
    ({"denominator": 0.0}, ["denominator", "> 0", "0.0"]),
    ({"denominator": -2}, ["denominator", "> 0", "-2"]),
    ({"denominator": torch.ones(2)}, ["denominator", "[]", "[2]"]),
    ({"weights": torch.ones(N, 1)}, ["weights", "[4]", "[4, 1]"]),
    ({"weights": torch.ones(N), "denominator": 2.0}, ["weights", "denominator"]),
    ({"weights": torch.ones(N), "aggregation": "token-sum"}, ["weights", "aggregation"]),
    ({"backend": "cuda"}, ["backend", "auto, triton, torch", "cuda"]),
]

OTHERS: list[Row] = [
    (fastppo.ppo_loss, {"logits": torch.zeros(V)}, ["logits", "(..., V)", "[7]"]),
    (fastppo.ppo_loss, {"logits": torch.zeros(N, 0)}, ["logits", "vocabulary", "[4, 0]"]),
    (fastppo.ppo_loss, {"logits": torch.zeros(V, N).T}, ["logits", "dense last axis", "(1, 4)"]),
    (fastppo.ppo_loss, {"logits": ints(N, V)}, ["logits", "bfloat16", "int64"]),
    (fastppo.ppo_loss, {"logits": None}, ["logits", "torch.Tensor", "NoneType"]),
    (
        fastppo.ppo_loss,
        {
            "kl_coef": 0.1,
            "kl_estimator": "full",
            "kl_ratio_weighted": True,
            "ref_logits": torch.zeros(N, V),
        },
        ["kl_ratio_weighted", "'k1' or 'k3'", "'full'"],
    ),
    (fastppo.ppo_loss, {"ref_logits": torch.zeros(N, V + 1)}, ["ref_logits", "[4, 7]", "[4, 8]"]),
    (fastppo.ppo_loss, {"ref_logits": torch.zeros(V, N).T}, ["ref_logits", "dense last axis"]),
    (fastppo.linear_ppo_loss, {"hidden": torch.zeros(H)}, ["hidden", "(..., H)", "[3]"]),
    (fastppo.linear_ppo_loss, {"weight": torch.zeros(V, H + 1)}, ["weight", "H = 3", "[7, 4]"]),
    (fastppo.linear_ppo_loss, {"weight": torch.zeros(H)}, ["weight", "[V, H]", "[3]"]),
    (fastppo.linear_ppo_loss, {"weight": meta(V, H)}, ["weight", "cpu", "meta"]),
    (fastppo.linear_ppo_loss, {"bias": torch.zeros(H)}, ["bias", "[7]", "[3]"]),
    (fastppo.linear_ppo_loss, {"hidden": torch.zeros(N, H).double()}, ["weight", "float64"]),
    (fastppo.linear_ppo_loss, {"weight": torch.zeros(V, H).double()}, ["weight", "float64"]),
    (fastppo.linear_ppo_loss, {"bias": torch.zeros(V).double()}, ["bias", "float64"]),
    (fastppo.linear_ppo_loss, {"chunk_size": 0}, ["chunk_size", ">= 1", "0"]),
    (fastppo.linear_ppo_loss, {"chunk_size": 1.5}, ["chunk_size", "int", "float"]),
    (
        fastppo.linear_ppo_loss,
        {"ref_hidden": torch.zeros(N, H)},
        ["ref_hidden", "ref_weight", "both"],
    ),
    (
        fastppo.linear_ppo_loss,
        {"ref_weight": torch.zeros(V, H)},
        ["ref_hidden", "ref_weight", "both"],
    ),
    (fastppo.linear_ppo_loss, {"ref_bias": torch.zeros(V)}, ["ref_bias", "ref_hidden", "None"]),
    (
        fastppo.linear_ppo_loss,
        {"ref_hidden": torch.zeros(N, H), "ref_weight": torch.zeros(V + 1, H)},
        ["ref_weight", "V = 7", "[8, 3]"],
    ),
    (
        fastppo.linear_ppo_loss,
        {"ref_hidden": torch.zeros(N, H), "ref_weight": torch.zeros(V, H + 1)},
        ["ref_hidden", "[4, 4]", "[4, 3]"],
    ),
    (
        fastppo.linear_ppo_loss,
        {
            "hidden": torch.zeros(N, H).half().requires_grad_(),
            "weight": torch.zeros(V, H).half(),
            "ref_hidden": torch.zeros(N, H).half(),
            "ref_weight": torch.zeros(V, H).half(),
            "kl_estimator": "full",
            "kl_coef": 0.1,
        },
        ["kl_estimator='full'", "float16", "bfloat16"],
    ),
    (fastppo.token_stats, {"tokens": ints(N, 1)}, ["tokens", "[4]", "[4, 1]"]),
    (fastppo.token_stats, {"ref_logits": torch.zeros(N)}, ["ref_logits", "[4, 7]", "[4]"]),
    (fastppo.token_stats, {"backend": "x"}, ["backend", "auto", "x"]),
    (fastppo.linear_token_logprobs, {"tokens": torch.zeros(N)}, ["tokens", "int64", "float32"]),
    (
        fastppo.linear_token_logprobs,
        {"weight": torch.zeros(V, H + 1)},
        ["weight", "H = 3", "[7, 4]"],
    ),
    (
        fastppo.linear_token_stats,
        {"ref_hidden": torch.zeros(N, H)},
        ["ref_hidden", "ref_weight", "both"],
    ),
    (fastppo.linear_token_stats, {"ref_bias": torch.zeros(V)}, ["ref_bias", "ref_hidden", "None"]),
    (
        fastppo.linear_token_stats,
        {"ref_hidden": torch.zeros(N, H), "ref_weight": torch.zeros(V + 1, H)},
        ["ref_weight", "V = 7", "[8, 3]"],
    ),
    (fastppo.linear_token_stats, {"chunk_size": 0}, ["chunk_size", ">= 1", "0"]),
    (fastppo.gae, {"rewards": None}, ["rewards", "torch.Tensor", "NoneType"]),
    (fastppo.policy_loss, {"logprobs": [0.0]}, ["logprobs", "torch.Tensor", "list"]),
    (fastppo.value_loss, {"values": [0.0]}, ["values", "torch.Tensor", "list"]),
    (fastppo.entropy, {"logits": None}, ["logits", "torch.Tensor", "NoneType"]),
    (fastppo.policy_loss, {"old_logprobs": torch.zeros(1)}, ["old_logprobs", "[4]", "[1]"]),
    (fastppo.policy_loss, {"advantages": torch.zeros(N, 1)}, ["advantages", "[4]", "[4, 1]"]),
    (fastppo.policy_loss, {"mask": torch.ones(N)}, ["mask", "bool", "float32"]),
    (fastppo.policy_loss, {"clip_ratio": -1}, ["clip_ratio", "negative", "-1"]),
    (fastppo.policy_loss, {"dual_clip": 0.5}, ["dual_clip", "> 1", "0.5"]),
    (
        fastppo.policy_loss,
        {"importance_weights": torch.ones(1)},
        ["importance_weights", "[4]", "[1]"],
    ),
    (fastppo.value_loss, {"returns": torch.zeros(N, 1)}, ["returns", "[4]", "[4, 1]"]),
    (fastppo.value_loss, {"mask": torch.ones(N - 1, dtype=torch.bool)}, ["mask", "[4]", "[3]"]),
    (fastppo.value_loss, {"clip_ratio": 0.2}, ["clip_ratio", "old_values"]),
    (
        fastppo.value_loss,
        {"clip_ratio": 0.0, "old_values": torch.zeros(N)},
        ["clip_ratio", "> 0", "0.0"],
    ),
    (
        fastppo.value_loss,
        {"clip_ratio": 0.2, "old_values": torch.zeros(1)},
        ["old_values", "[4]", "[1]"],
    ),
    (fastppo.total_loss, {"vf_coef": nan}, ["vf_coef", "finite", "nan"]),
    (fastppo.total_loss, {"entropy_coef": "1"}, ["entropy_coef", "number", "str"]),
    (fastppo.total_loss, {"value_clip": 0.2}, ["clip_ratio", "old_values"]),
    (fastppo.aggregation_weights, {"mask": torch.ones(2, N)}, ["mask", "bool", "float32"]),
    (fastppo.aggregation_weights, {"mask": [True]}, ["mask", "torch.Tensor", "list"]),
    (fastppo.aggregation_weights, {"aggregation": "sum"}, ["aggregation", "token-sum", "'sum'"]),
    (fastppo.aggregation_weights, {"denominator": "3"}, ["denominator", "number", "str"]),
    (fastppo.entropy, {"logits": torch.zeros(V)}, ["logits", "(..., V)", "[7]"]),
    (
        fastppo.gae,
        {"values": torch.zeros(6), "rewards": torch.zeros(6)},
        ["values", "cu_seqlens", "[6]"],
    ),
    (fastppo.gae, {"rewards": torch.zeros(2, 4)}, ["rewards", "[2, 3]", "[2, 4]"]),
    (fastppo.gae, {"mask": torch.ones(2, 3)}, ["mask", "bool", "float32"]),
    (fastppo.gae, {"gamma": 1.5}, ["gamma", "[0, 1]", "1.5"]),
    (fastppo.gae, {"gamma": "1"}, ["gamma", "number", "str"]),
    (fastppo.gae, {"gamma": torch.ones(3)}, ["gamma", "[2]", "one per sequence", "[3]"]),
    (fastppo.gae, {"lam": -0.1}, ["lam", "[0, 1]", "-0.1"]),
    (fastppo.gae, {"lam": nan}, ["lam", "[0, 1]", "nan"]),
    (fastppo.gae, {"bootstrap": torch.zeros(2, 1)}, ["bootstrap", "[2]", "[2, 1]"]),
    (fastppo.gae, {"cu_seqlens": torch.tensor([0, 6])}, ["cu_seqlens", "packed [total]", "[2, 3]"]),
    (fastppo.gae, {"backend": "numpy"}, ["backend", "auto", "numpy"]),
    *(
        (
            fastppo.gae,
            {"values": torch.zeros(6), "rewards": torch.zeros(6), "cu_seqlens": cu_seqlens},
            ["cu_seqlens", *words],
        )
        for cu_seqlens, words in (
            (torch.tensor([0, 5]), ["rise from 0 to 6", "[0, 5]"]),
            (torch.tensor([1, 6]), ["rise from 0 to 6", "[1, 6]"]),
            (torch.tensor([0, 4, 3, 6]), ["rise from 0 to 6", "[0, 4, 3, 6]"]),
            (torch.tensor([0.0, 6.0]), ["int32", "float32"]),
            (torch.tensor([[0, 6]]), ["[B + 1]", "[1, 2]"]),
            (torch.zeros(0, dtype=torch.int32), ["[B + 1]", "[0]"]),
        )
    ),
    (fastppo.compute_advantages, {"mask": None}, ["mask", "torch.Tensor", "NoneType"]),
    (fastppo.compute_advantages, {"mask": torch.ones(2, 3)}, ["mask", "bool", "float32"]),
    (
        fastppo.compute_advantages,
        {"scores": torch.zeros(2, 1)},
        ["scores", "one per sequence", "[2, 1]"],
    ),
    (fastppo.compute_advantages, {"logprobs": torch.zeros(2)}, ["logprobs", "[2, 3]", "[2]"]),
    (
        fastppo.compute_advantages,
        {"ref_logprobs": torch.zeros(2)},
        ["ref_logprobs", "[2, 3]", "[2]"],
    ),
    (
        fastppo.compute_advantages,
        {"ref_logprobs": None, "kl_coef": 0.1},
        ["kl_coef", "ref_logprobs"],
    ),
    (fastppo.compute_advantages, {"kl_estimator": "full"}, ["kl_estimator", "k1, k2, k3", "full"]),
    (fastppo.compute_advantages, {"kl_coef": nan}, ["kl_coef", "finite", "nan"]),
    (fastppo.compute_advantages, {"score_clip": 0.0}, ["score_clip", "> 0", "0.0"]),
    (
        fastppo.compute_advantages,
        {"token_rewards": torch.zeros(2)},
        ["token_rewards", "[2, 3]", "[2]"],
    ),
    (fastppo.compute_advantages, {"bootstrap": torch.zeros(3)}, ["bootstrap", "[2]", "[3]"]),
    (fastppo.compute_advantages, {"gamma": 2.0}, ["gamma", "[0, 1]", "2.0"]),
    (fastppo.whiten, {"x": ints(N)}, ["x", "float32", "int64"]),
    (fastppo.whiten, {"mask": torch.ones(2, dtype=torch.bool)}, ["mask", "[4]", "[2]"]),
    (fastppo.whiten, {"moments": torch.zeros(2)}, ["moments", "[3]", "[2]"]),
    (fastppo.whiten, {"backend": "x"}, ["backend", "auto", "x"]),
]

TABLE: list[Row] = [
    *((function, *row) for row in BOTH for function in (fastppo.ppo_loss, fastppo.linear_ppo_loss)),
    *OTHERS,
]


def name_of(row: Row) -> str:
    function, changes, _ = row
    shown = (
        f"{name}={list(value.shape) if isinstance(value, Tensor) else value}"
        for name, value in changes.items()
    )
    return f"{function.__name__}-{'-'.join(shown)}"


@pytest.mark.parametrize("row", TABLE, ids=name_of)
def test_wrong_input_is_named_with_what_it_got_and_what_is_wanted(row: Row) -> None:
    function, changes, words = row
    with pytest.raises((ValueError, TypeError)) as refusal, _Work():
        call(function, **changes)
    for word in words:
        assert word in str(refusal.value)


def test_an_amd_gpu_gets_the_torch_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tensors are "cuda" too, and some of the kernels hold NVIDIA's instructions."""
    x: Any = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(arguments, "HAS_TRITON", True)
    assert arguments.choose_backend("auto", x) == "triton"
    assert arguments.choose_backend("triton", x) == "triton"
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    assert arguments.choose_backend("auto", x) == "torch"
    assert arguments.choose_backend("torch", x) == "torch"
    with pytest.raises(ValueError, match=r"'triton' needs an NVIDIA GPU, .* got ROCm 6\.4\.43482"):
        arguments.choose_backend("triton", x)


@pytest.mark.parametrize("token", [-1, V])
@pytest.mark.parametrize(
    "function",
    [fastppo.ppo_loss, fastppo.linear_ppo_loss, fastppo.token_stats, fastppo.linear_token_stats],
)
def test_a_token_outside_the_vocabulary_is_refused_with_its_value(
    function: Callable[..., Any], token: int
) -> None:
    tokens = TOKENS.clone()
    tokens[2] = token
    with pytest.raises(ValueError, match=rf"tokens must be in \[0, {V}\), got .*{token}"):
        call(function, tokens=tokens)


def test_an_unknown_estimator_of_the_sampled_kl_is_refused() -> None:
    zeros = torch.zeros(3)
    with pytest.raises(ValueError, match="estimator must be one of k1, k2, k3, got 'full'"):
        sampled_kl(zeros, zeros, "full")
    with pytest.raises(ValueError, match=r"ref_logprobs must have shape \[3\], got \[1\]"):
        sampled_kl(zeros, zeros[:1])


class Sharded(torch.nn.Parameter):
    """What tells a DTensor, which would be read as the part of it that this rank holds."""

    def full_tensor(self) -> None: ...


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (fastppo.linear_ppo_loss, "hidden"),
        (fastppo.linear_ppo_loss, "weight"),
        (fastppo.ppo_loss, "logits"),
        (fastppo.ppo_loss, "advantages"),
        (fastppo.compute_advantages, "values"),
    ],
)
def test_a_sharded_tensor_is_refused_with_the_way_out(
    function: Callable[..., Any], name: str
) -> None:
    expected = rf"{name} must be a plain tensor, got a DTensor.*{name}\.full_tensor\("
    with pytest.raises(TypeError, match=expected):
        call(function, **{name: Sharded(RIGHT[function][name])})


def test_numpy_and_integer_numbers_are_numbers() -> None:
    import numpy as np

    for value in (1, 0.5, np.float32(0.5), np.float64(0.5), np.int64(1)):
        assert arguments.number("gamma", value) == value
    assert arguments.clip_range(1) == (0.0, 2.0)
    assert arguments.clip_range([0.1, 0.2]) == (0.9, 1.2)
    assert arguments.clip_range(None) == (-inf, inf)
    assert arguments.check_dual_clip(None) is None


# ------------------------------------------------------------------------------------ the contract

SOFTMAX = "temperature=1.0, logit_scale=1.0, softcap=None, backend='auto'"
AGGREGATION = "aggregation='token-mean', denominator=None, weights=None"
LOSS = (
    "clip_ratio=0.2, dual_clip=None, ref_logprobs=None, kl_coef=0.0, kl_estimator='k3', "
    "kl_ratio_weighted=False, entropy_coef=0.0, importance_weights=None"
)
REFERENCE = "ref_hidden=None, ref_weight=None, ref_bias=None"
PER_TOKEN = "tokens, old_logprobs, advantages, mask=None"

SIGNATURES = {
    "ppo_loss": (
        f"logits, {PER_TOKEN}",
        f"ref_logits=None, inplace=False, {SOFTMAX}, {AGGREGATION}, {LOSS}",
    ),
    "linear_ppo_loss": (
        f"hidden, weight, {PER_TOKEN}",
        f"bias=None, chunk_size=None, {REFERENCE}, {SOFTMAX}, {AGGREGATION}, {LOSS}",
    ),
    "combine_sums": ("total, part", ""),
    "loss_metrics": ("sums", ""),
    "token_logprobs": ("logits, tokens", SOFTMAX),
    "token_stats": ("logits, tokens", f"ref_logits=None, {SOFTMAX}"),
    "linear_token_stats": (
        "hidden, weight, tokens",
        f"bias=None, chunk_size=None, {REFERENCE}, {SOFTMAX}",
    ),
    "linear_token_logprobs": (
        "hidden, weight, tokens",
        f"bias=None, return_entropy=False, chunk_size=None, {SOFTMAX}",
    ),
    "value_loss": (
        "values, returns, mask=None",
        f"old_values=None, clip_ratio=None, {AGGREGATION}",
    ),
    "gae": (
        "rewards, values, mask=None",
        "cu_seqlens=None, gamma=1.0, lam=0.95, bootstrap=None, backend='auto'",
    ),
    "compute_advantages": (
        "scores, values, logprobs, ref_logprobs, mask",
        "kl_coef=0.0, kl_estimator='k1', gamma=1.0, lam=0.95, whiten=True, shift_mean=True, "
        "bootstrap=None, score_clip=None, token_rewards=None, cu_seqlens=None, "
        "reduce_moments=None, backend='auto'",
    ),
    "whiten": ("x, mask=None", "shift_mean=True, moments=None, backend='auto'"),
    "policy_loss": (
        "logprobs, old_logprobs, advantages, mask=None",
        f"clip_ratio=0.2, dual_clip=None, importance_weights=None, {AGGREGATION}",
    ),
    "entropy": ("logits, mask=None", f"{SOFTMAX}, aggregation='token-mean', denominator=None"),
    "total_loss": (
        "logprobs, old_logprobs, advantages, values, returns, logits, mask=None",
        "clip_ratio=0.2, vf_coef=0.5, entropy_coef=0.01, dual_clip=None, old_values=None, "
        "value_clip=None, temperature=1.0, aggregation='token-mean', denominator=None",
    ),
    "aggregation_weights": (
        "mask, aggregation='token-mean', denominator=None",
        "dtype=torch.float32",
    ),
    "head_weight": ("lm_head", ""),
}
"""Of each public function: the arguments that may be given by position, and the keywords."""


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_and_defaults_are_the_contract(name: str) -> None:
    """Others call these by name: a keyword that vanishes or a default that moves breaks them."""
    parameters = inspect.signature(getattr(fastppo, name)).parameters.values()
    shown = {x: str(x.replace(annotation=x.empty)) for x in parameters}
    by_position, keywords = SIGNATURES[name]
    positional = [shown[x] for x in parameters if x.kind is x.POSITIONAL_OR_KEYWORD]
    keyword_only = [shown[x] for x in parameters if x.kind is x.KEYWORD_ONLY]
    assert ", ".join(positional) == by_position
    assert sorted(keyword_only) == sorted(keywords.split(", ") if keywords else [])


def test_the_contract_holds_every_public_function() -> None:
    exported = (getattr(fastppo, name) for name in fastppo.__all__)
    assert {x.__name__ for x in exported if inspect.isfunction(x)} == SIGNATURES.keys()


@pytest.mark.parametrize("function", [fastppo.ppo_loss, fastppo.linear_ppo_loss])
def test_the_docstring_of_the_loss_documents_every_keyword(function: Callable[..., Any]) -> None:
    documented = str(fastppo.ppo_loss.__doc__) + str(function.__doc__)
    for name in inspect.signature(function).parameters:
        assert re.search(rf"^ +(\w+, )*{name}(, \w+)*:", documented, re.MULTILINE), name


# ----------------------------------------------------------------- values of tensors, and booleans


@pytest.mark.parametrize("value", [0.0, -1.0, nan, inf])
def test_a_temperature_that_is_a_tensor_is_looked_at(value: float) -> None:
    for temperature in (torch.tensor(value), torch.ones(N).index_fill(0, torch.tensor(1), value)):
        for function in (fastppo.ppo_loss, fastppo.token_stats):
            with pytest.raises(ValueError, match="temperature must be finite and > 0, got values"):
                call(function, temperature=temperature)


@pytest.mark.parametrize("value", [0.0, -1.0, nan, inf])
def test_a_denominator_is_looked_at(value: float) -> None:
    for denominator in (torch.tensor(value), torch.tensor(value).double(), value):
        for function in (fastppo.ppo_loss, fastppo.aggregation_weights):
            with pytest.raises(ValueError, match="denominator must be"):
                call(function, denominator=denominator)


@pytest.mark.parametrize("name", ["gamma", "lam"])
@pytest.mark.parametrize("value", [-0.1, 1.1, nan])
def test_a_discount_that_is_a_tensor_is_looked_at(name: str, value: float) -> None:
    for discount in (torch.tensor(value), torch.tensor([0.5, value])):
        with pytest.raises(ValueError, match=rf"{name} must be in \[0, 1\], got values from"):
            call(fastppo.gae, **{name: discount})


def test_complex_numbers_are_refused() -> None:
    for name in ("temperature", "denominator"):
        for value in (torch.tensor(1 + 1j), 1 + 1j):
            with pytest.raises((ValueError, TypeError), match=f"{name} must be"):
                call(fastppo.ppo_loss, **{name: value})


@pytest.mark.parametrize("value", ["no", 0, None])
def test_what_is_true_or_false_is_a_boolean(value: object) -> None:
    for function, name in (
        (fastppo.ppo_loss, "inplace"),
        (fastppo.compute_advantages, "whiten"),
        (fastppo.compute_advantages, "shift_mean"),
        (fastppo.whiten, "shift_mean"),
    ):
        with pytest.raises(TypeError, match=f"{name} must be True or False, got {value!r}"):
            call(function, **{name: value})


def test_the_way_that_the_refusal_of_a_sharded_head_names_has_the_right_gradient(
    tmp_path: Path,
) -> None:
    """Two processes with half of the rows each; without `Partial` half of the gradient is lost."""
    of_ranks = two_ranks.run(tmp_path)
    weight = two_ranks.batch()["weight"].requires_grad_()
    two_ranks.loss(slice(None), weight).backward()
    assert weight.grad is not None
    error = {
        name: (grad - weight.grad).norm() / weight.grad.norm() for name, grad in of_ranks.items()
    }
    assert error["partial"] < 1e-12  # fp64, summed in another order
    assert error["plain"] > 0.1
