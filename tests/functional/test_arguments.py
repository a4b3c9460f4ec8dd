"""Wrong input is refused before any work, with the argument's name, what it got, what it wants.

Each row of a table: the call, what is wrong in it, and the words that the message must hold.
"""

from __future__ import annotations

import inspect
import pydoc
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


def of_tokens(**changes: Any) -> dict[str, Any]:
    return {
        "tokens": torch.zeros(N, dtype=torch.int64),
        "old_logprobs": torch.zeros(N),
        "advantages": torch.zeros(N),
        **changes,
    }


def ppo_loss(**changes: Any) -> Any:
    return fastppo.ppo_loss(**({"logits": torch.zeros(N, V)} | of_tokens(**changes)))


def linear_ppo_loss(**changes: Any) -> Any:
    head = {"hidden": torch.zeros(N, H), "weight": torch.zeros(V, H)}
    return fastppo.linear_ppo_loss(**(head | of_tokens(**changes)))


def token_stats(**changes: Any) -> Any:
    given = {"logits": torch.zeros(N, V), "tokens": torch.zeros(N, dtype=torch.int64)}
    return fastppo.token_stats(**(given | changes))


def linear_token_logprobs(**changes: Any) -> Any:
    head = {"hidden": torch.zeros(N, H), "weight": torch.zeros(V, H)}
    given = head | {"tokens": torch.zeros(N, dtype=torch.int64)}
    return fastppo.linear_token_logprobs(**(given | changes))


def linear_token_stats(**changes: Any) -> Any:
    head = {"hidden": torch.zeros(N, H), "weight": torch.zeros(V, H)}
    given = head | {"tokens": torch.zeros(N, dtype=torch.int64)}
    return fastppo.linear_token_stats(**(given | changes))


def policy_loss(**changes: Any) -> Any:
    names = ("logprobs", "old_logprobs", "advantages")
    return fastppo.policy_loss(**(dict.fromkeys(names, torch.zeros(N)) | changes))


def value_loss(**changes: Any) -> Any:
    return fastppo.value_loss(**(dict.fromkeys(("values", "returns"), torch.zeros(N)) | changes))


def total_loss(**changes: Any) -> Any:
    names = ("logprobs", "old_logprobs", "advantages", "values", "returns")
    given = dict.fromkeys(names, torch.zeros(N)) | {"logits": torch.zeros(N, V)}
    return fastppo.total_loss(**(given | changes))


def gae(**changes: Any) -> Any:
    return fastppo.gae(**(dict.fromkeys(("rewards", "values"), torch.zeros(2, 3)) | changes))


def compute_advantages(**changes: Any) -> Any:
    given = {
        "scores": torch.zeros(2),
        "mask": torch.ones(2, 3, dtype=torch.bool),
        **dict.fromkeys(("values", "logprobs", "ref_logprobs"), torch.zeros(2, 3)),
    }
    return fastppo.compute_advantages(**(given | changes))


def whiten(**changes: Any) -> Any:
    return fastppo.whiten(**({"x": torch.zeros(N)} | changes))


def aggregation_weights(**changes: Any) -> Any:
    return fastppo.aggregation_weights(**({"mask": torch.ones(2, N, dtype=torch.bool)} | changes))


def entropy(**changes: Any) -> Any:
    return fastppo.entropy(**({"logits": torch.zeros(N, V)} | changes))


def ints(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def meta(*shape: int) -> Tensor:
    return torch.zeros(shape, device="meta")


Row = tuple[Callable[..., Any], dict[str, Any], list[str]]
ZEROS = torch.zeros(N)

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
    (ppo_loss, {"logits": torch.zeros(V)}, ["logits", "(..., V)", "[7]"]),
    (ppo_loss, {"logits": torch.zeros(N, 0)}, ["logits", "vocabulary", "[4, 0]"]),
    (ppo_loss, {"logits": torch.zeros(V, N).T}, ["logits", "dense last axis", "(1, 4)"]),
    (ppo_loss, {"logits": ints(N, V)}, ["logits", "bfloat16", "int64"]),
    (ppo_loss, {"logits": None}, ["logits", "torch.Tensor", "NoneType"]),
    (
        ppo_loss,
        {
            "kl_coef": 0.1,
            "kl_estimator": "full",
            "kl_ratio_weighted": True,
            "ref_logits": torch.zeros(N, V),
        },
        ["kl_ratio_weighted", "'k1' or 'k3'", "'full'"],
    ),
    (ppo_loss, {"ref_logits": torch.zeros(N, V + 1)}, ["ref_logits", "[4, 7]", "[4, 8]"]),
    (ppo_loss, {"ref_logits": torch.zeros(V, N).T}, ["ref_logits", "dense last axis"]),
    (linear_ppo_loss, {"hidden": torch.zeros(H)}, ["hidden", "(..., H)", "[3]"]),
    (linear_ppo_loss, {"weight": torch.zeros(V, H + 1)}, ["weight", "H = 3", "[7, 4]"]),
    (linear_ppo_loss, {"weight": torch.zeros(H)}, ["weight", "[V, H]", "[3]"]),
    (linear_ppo_loss, {"weight": meta(V, H)}, ["weight", "cpu", "meta"]),
    (linear_ppo_loss, {"bias": torch.zeros(H)}, ["bias", "[7]", "[3]"]),
    (linear_ppo_loss, {"chunk_size": 0}, ["chunk_size", ">= 1", "0"]),
    (linear_ppo_loss, {"chunk_size": 1.5}, ["chunk_size", "int", "float"]),
    (linear_ppo_loss, {"ref_hidden": torch.zeros(N, H)}, ["ref_hidden", "ref_weight", "both"]),
    (linear_ppo_loss, {"ref_weight": torch.zeros(V, H)}, ["ref_hidden", "ref_weight", "both"]),
    (linear_ppo_loss, {"ref_bias": torch.zeros(V)}, ["ref_bias", "ref_hidden", "None"]),
    (
        linear_ppo_loss,
        {"ref_hidden": torch.zeros(N, H), "ref_weight": torch.zeros(V + 1, H)},
        ["ref_weight", "V = 7", "[8, 3]"],
    ),
    (
        linear_ppo_loss,
        {"ref_hidden": torch.zeros(N, H), "ref_weight": torch.zeros(V, H + 1)},
        ["ref_hidden", "[4, 4]", "[4, 3]"],
    ),
    (
        linear_ppo_loss,
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
    (token_stats, {"logits": torch.zeros(V)}, ["logits", "(..., V)", "[7]"]),
    (token_stats, {"tokens": ints(N, 1)}, ["tokens", "[4]", "[4, 1]"]),
    (token_stats, {"ref_logits": torch.zeros(N)}, ["ref_logits", "[4, 7]", "[4]"]),
    (token_stats, {"temperature": 0}, ["temperature", "> 0", "0"]),
    (token_stats, {"backend": "x"}, ["backend", "auto", "x"]),
    (linear_token_logprobs, {"tokens": torch.zeros(N)}, ["tokens", "int64", "float32"]),
    (linear_token_logprobs, {"weight": torch.zeros(V, H + 1)}, ["weight", "H = 3", "[7, 4]"]),
    (linear_token_logprobs, {"softcap": 0}, ["softcap", "> 0", "0"]),
    (linear_token_stats, {"hidden": torch.zeros(H)}, ["hidden", "(..., H)", "[3]"]),
    (linear_token_stats, {"ref_hidden": torch.zeros(N, H)}, ["ref_hidden", "ref_weight", "both"]),
    (linear_token_stats, {"ref_bias": torch.zeros(V)}, ["ref_bias", "ref_hidden", "None"]),
    (
        linear_token_stats,
        {"ref_hidden": torch.zeros(N, H), "ref_weight": torch.zeros(V + 1, H)},
        ["ref_weight", "V = 7", "[8, 3]"],
    ),
    (linear_token_stats, {"temperature": 0}, ["temperature", "> 0", "0"]),
    (linear_token_stats, {"chunk_size": 0}, ["chunk_size", ">= 1", "0"]),
    (gae, {"rewards": None}, ["rewards", "torch.Tensor", "NoneType"]),
    (policy_loss, {"logprobs": [0.0]}, ["logprobs", "torch.Tensor", "list"]),
    (value_loss, {"values": [0.0]}, ["values", "torch.Tensor", "list"]),
    (entropy, {"logits": None}, ["logits", "torch.Tensor", "NoneType"]),
    (policy_loss, {"old_logprobs": torch.zeros(1)}, ["old_logprobs", "[4]", "[1]"]),
    (policy_loss, {"advantages": torch.zeros(N, 1)}, ["advantages", "[4]", "[4, 1]"]),
    (policy_loss, {"mask": torch.ones(N)}, ["mask", "bool", "float32"]),
    (policy_loss, {"clip_ratio": -1}, ["clip_ratio", "negative", "-1"]),
    (policy_loss, {"dual_clip": 0.5}, ["dual_clip", "> 1", "0.5"]),
    (policy_loss, {"importance_weights": torch.ones(1)}, ["importance_weights", "[4]", "[1]"]),
    (value_loss, {"returns": torch.zeros(N, 1)}, ["returns", "[4]", "[4, 1]"]),
    (value_loss, {"mask": torch.ones(N - 1, dtype=torch.bool)}, ["mask", "[4]", "[3]"]),
    (value_loss, {"clip_ratio": 0.2}, ["clip_ratio", "old_values"]),
    (value_loss, {"clip_ratio": 0.0, "old_values": torch.zeros(N)}, ["clip_ratio", "> 0", "0.0"]),
    (
        value_loss,
        {"clip_ratio": 0.2, "old_values": torch.zeros(1)},
        ["old_values", "[4]", "[1]"],
    ),
    (total_loss, {"vf_coef": nan}, ["vf_coef", "finite", "nan"]),
    (total_loss, {"entropy_coef": "1"}, ["entropy_coef", "number", "str"]),
    (total_loss, {"returns": torch.zeros(2)}, ["returns", "[4]", "[2]"]),
    (total_loss, {"value_clip": 0.2}, ["clip_ratio", "old_values"]),
    (aggregation_weights, {"mask": torch.ones(2, N)}, ["mask", "bool", "float32"]),
    (aggregation_weights, {"mask": [True]}, ["mask", "torch.Tensor", "list"]),
    (aggregation_weights, {"aggregation": "sum"}, ["aggregation", "token-sum", "'sum'"]),
    (aggregation_weights, {"denominator": "3"}, ["denominator", "number", "str"]),
    (entropy, {"logits": torch.zeros(V)}, ["logits", "(..., V)", "[7]"]),
    (entropy, {"temperature": 0}, ["temperature", "> 0", "0"]),
    (gae, {"values": torch.zeros(6), "rewards": torch.zeros(6)}, ["values", "cu_seqlens", "[6]"]),
    (gae, {"rewards": torch.zeros(2, 4)}, ["rewards", "[2, 3]", "[2, 4]"]),
    (gae, {"mask": torch.ones(2, 3)}, ["mask", "bool", "float32"]),
    (gae, {"gamma": 1.5}, ["gamma", "[0, 1]", "1.5"]),
    (gae, {"gamma": "1"}, ["gamma", "number", "str"]),
    (gae, {"gamma": torch.ones(3)}, ["gamma", "[2]", "one per sequence", "[3]"]),
    (gae, {"lam": -0.1}, ["lam", "[0, 1]", "-0.1"]),
    (gae, {"lam": nan}, ["lam", "[0, 1]", "nan"]),
    (gae, {"bootstrap": torch.zeros(2, 1)}, ["bootstrap", "[2]", "[2, 1]"]),
    (gae, {"cu_seqlens": torch.tensor([0, 6])}, ["cu_seqlens", "packed [total]", "[2, 3]"]),
    (gae, {"backend": "numpy"}, ["backend", "auto", "numpy"]),
    *(
        (
            gae,
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
    (compute_advantages, {"mask": None}, ["mask", "torch.Tensor", "NoneType"]),
    (compute_advantages, {"mask": torch.ones(2, 3)}, ["mask", "bool", "float32"]),
    (compute_advantages, {"scores": torch.zeros(2, 1)}, ["scores", "one per sequence", "[2, 1]"]),
    (compute_advantages, {"logprobs": torch.zeros(2)}, ["logprobs", "[2, 3]", "[2]"]),
    (compute_advantages, {"ref_logprobs": torch.zeros(2)}, ["ref_logprobs", "[2, 3]", "[2]"]),
    (compute_advantages, {"ref_logprobs": None, "kl_coef": 0.1}, ["kl_coef", "ref_logprobs"]),
    (compute_advantages, {"kl_estimator": "full"}, ["kl_estimator", "k1, k2, k3", "full"]),
    (compute_advantages, {"kl_coef": nan}, ["kl_coef", "finite", "nan"]),
    (compute_advantages, {"score_clip": 0.0}, ["score_clip", "> 0", "0.0"]),
    (compute_advantages, {"token_rewards": torch.zeros(2)}, ["token_rewards", "[2, 3]", "[2]"]),
    (compute_advantages, {"bootstrap": torch.zeros(3)}, ["bootstrap", "[2]", "[3]"]),
    (compute_advantages, {"gamma": 2.0}, ["gamma", "[0, 1]", "2.0"]),
    (whiten, {"x": ints(N)}, ["x", "float32", "int64"]),
    (whiten, {"mask": torch.ones(2, dtype=torch.bool)}, ["mask", "[4]", "[2]"]),
    (whiten, {"moments": torch.zeros(2)}, ["moments", "[3]", "[2]"]),
    (whiten, {"backend": "x"}, ["backend", "auto", "x"]),
]

TABLE: list[Row] = [
    *((function, *row) for row in BOTH for function in (ppo_loss, linear_ppo_loss)),
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
        function(**changes)
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


@pytest.mark.parametrize("token", [-1, V, -100, 10**9])
@pytest.mark.parametrize(
    "function", [ppo_loss, linear_ppo_loss, token_stats, linear_token_stats, linear_token_logprobs]
)
def test_a_token_outside_the_vocabulary_is_refused_with_its_value(
    function: Callable[..., Any], token: int
) -> None:
    tokens = ints(N)
    tokens[2] = token
    with pytest.raises(ValueError, match=rf"tokens must be in \[0, {V}\), got .*{token}"):
        function(tokens=tokens)


def test_an_unknown_estimator_of_the_sampled_kl_is_refused() -> None:
    zeros = torch.zeros(3)
    with pytest.raises(ValueError, match="estimator must be one of k1, k2, k3, got 'full'"):
        sampled_kl(zeros, zeros, "full")
    with pytest.raises(ValueError, match=r"ref_logprobs must have shape \[3\], got \[1\]"):
        sampled_kl(zeros, zeros[:1])


def test_a_sharded_head_is_refused_with_the_way_out() -> None:
    """A DTensor would be read as its local shard."""

    class Sharded(torch.nn.Parameter):
        def full_tensor(self) -> None: ...

    for name in ("hidden", "weight"):
        shape = (N, H) if name == "hidden" else (V, H)
        with pytest.raises(
            TypeError,
            match=rf"{name} must be a plain tensor, got a DTensor.*{name}\.full_tensor\(",
        ):
            linear_ppo_loss(**{name: Sharded(torch.zeros(shape))})


def test_numpy_and_integer_numbers_are_numbers() -> None:
    import numpy as np

    for value in (1, 0.5, np.float32(0.5), np.float64(0.5), np.int64(1)):
        assert arguments.number("gamma", value) == value
    assert arguments.clip_range(1) == (0.0, 2.0)
    assert arguments.clip_range([0.1, 0.2]) == (0.9, 1.2)
    assert arguments.clip_range(None) == (-inf, inf)
    assert arguments.check_dual_clip(None) is None


# ------------------------------------------------------------------------------------ the contract

SOFTMAX = {"temperature": 1.0, "logit_scale": 1.0, "softcap": None, "backend": "auto"}
AGGREGATION = {"aggregation": "token-mean", "denominator": None, "weights": None}
LOSS = {
    "clip_ratio": 0.2,
    "dual_clip": None,
    "ref_logprobs": None,
    "kl_coef": 0.0,
    "kl_estimator": "k3",
    "kl_ratio_weighted": False,
    "entropy_coef": 0.0,
    "importance_weights": None,
}
REFERENCE = {"ref_hidden": None, "ref_weight": None, "ref_bias": None}
PER_TOKEN = ["tokens", "old_logprobs", "advantages"]

SIGNATURES: dict[Callable[..., Any], tuple[list[str], dict[str, Any], dict[str, Any]]] = {
    fastppo.ppo_loss: (
        ["logits", *PER_TOKEN],
        {"mask": None},
        {"ref_logits": None, "inplace": False, **SOFTMAX, **AGGREGATION, **LOSS},
    ),
    fastppo.linear_ppo_loss: (
        ["hidden", "weight", *PER_TOKEN],
        {"mask": None},
        {
            "bias": None,
            "chunk_size": None,
            **REFERENCE,
            **SOFTMAX,
            **AGGREGATION,
            **LOSS,
        },
    ),
    fastppo.combine_sums: (["total", "part"], {}, {}),
    fastppo.loss_metrics: (["sums"], {}, {}),
    fastppo.token_logprobs: (["logits", "tokens"], {}, SOFTMAX),
    fastppo.token_stats: (["logits", "tokens"], {}, {"ref_logits": None, **SOFTMAX}),
    fastppo.linear_token_stats: (
        ["hidden", "weight", "tokens"],
        {},
        {"bias": None, "chunk_size": None, **REFERENCE, **SOFTMAX},
    ),
    fastppo.linear_token_logprobs: (
        ["hidden", "weight", "tokens"],
        {},
        {"bias": None, "return_entropy": False, "chunk_size": None, **SOFTMAX},
    ),
    fastppo.value_loss: (
        ["values", "returns"],
        {"mask": None},
        {"old_values": None, "clip_ratio": None, **AGGREGATION},
    ),
    fastppo.gae: (
        ["rewards", "values"],
        {"mask": None},
        {"cu_seqlens": None, "gamma": 1.0, "lam": 0.95, "bootstrap": None, "backend": "auto"},
    ),
    fastppo.compute_advantages: (
        ["scores", "values", "logprobs", "ref_logprobs", "mask"],
        {},
        {
            "kl_coef": 0.0,
            "kl_estimator": "k1",
            "gamma": 1.0,
            "lam": 0.95,
            "whiten": True,
            "shift_mean": True,
            "bootstrap": None,
            "score_clip": None,
            "token_rewards": None,
            "cu_seqlens": None,
            "reduce_moments": None,
            "backend": "auto",
        },
    ),
    fastppo.whiten: (
        ["x"],
        {"mask": None},
        {"shift_mean": True, "moments": None, "backend": "auto"},
    ),
    fastppo.policy_loss: (
        ["logprobs", "old_logprobs", "advantages"],
        {"mask": None},
        {"clip_ratio": 0.2, "dual_clip": None, "importance_weights": None, **AGGREGATION},
    ),
    fastppo.entropy: (
        ["logits"],
        {"mask": None},
        {**SOFTMAX, "aggregation": "token-mean", "denominator": None},
    ),
    fastppo.total_loss: (
        ["logprobs", "old_logprobs", "advantages", "values", "returns", "logits"],
        {"mask": None},
        {
            "clip_ratio": 0.2,
            "vf_coef": 0.5,
            "entropy_coef": 0.01,
            "dual_clip": None,
            "old_values": None,
            "value_clip": None,
            "temperature": 1.0,
            "aggregation": "token-mean",
            "denominator": None,
        },
    ),
    fastppo.aggregation_weights: (
        ["mask"],
        {"aggregation": "token-mean", "denominator": None},
        {"dtype": torch.float32},
    ),
    fastppo.head_weight: (["lm_head"], {}, {}),
}
"""Of each public function: required arguments, those that may be given by place, keywords."""


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: function.__name__)
def test_arguments_and_defaults_are_the_contract(function: Callable[..., Any]) -> None:
    """Others call these by name: a keyword that vanishes or a default that moves breaks them."""
    required, by_place, keywords = SIGNATURES[function]
    parameters = inspect.signature(function).parameters
    assert list(parameters)[: len(required) + len(by_place)] == [*required, *by_place]
    assert {name: x.default for name, x in parameters.items() if x.default is not x.empty} == (
        by_place | keywords
    )
    for name, parameter in parameters.items():
        kind = parameter.KEYWORD_ONLY if name in keywords else parameter.POSITIONAL_OR_KEYWORD
        assert parameter.kind is kind


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: function.__name__)
def test_help_shows_every_keyword_with_its_default(function: Callable[..., Any]) -> None:
    shown = pydoc.plain(pydoc.render_doc(function))
    for name, default in (SIGNATURES[function][1] | SIGNATURES[function][2]).items():
        assert re.search(rf"\b{name}: [^=]*= {re.escape(repr(default))}[,)\n]", shown), name


@pytest.mark.parametrize("function", [fastppo.ppo_loss, fastppo.linear_ppo_loss])
def test_the_docstring_of_the_loss_documents_every_keyword(function: Callable[..., Any]) -> None:
    documented = str(fastppo.ppo_loss.__doc__) + str(function.__doc__)
    for name in inspect.signature(function).parameters:
        assert re.search(rf"^ +(\w+, )*{name}(, \w+)*:", documented, re.MULTILINE), name


def test_the_contract_holds_every_public_function() -> None:
    exported = (getattr(fastppo, name) for name in fastppo.__all__)
    assert {x for x in exported if inspect.isfunction(x)} == SIGNATURES.keys()


# ----------------------------------------------------------------- values of tensors, and booleans

LOGITS = {
    "logits": torch.zeros(N, V),
    "tokens": torch.zeros(N, dtype=torch.int64),
    "old_logprobs": torch.zeros(N),
    "advantages": torch.ones(N),
}
ADVANTAGES = {
    "scores": torch.zeros(2),
    "values": torch.zeros(2, 3),
    "logprobs": torch.zeros(2, 3),
    "ref_logprobs": None,
    "mask": torch.ones(2, 3, dtype=torch.bool),
}


@pytest.mark.parametrize("value", [0.0, -1.0, nan, inf, -inf])
@pytest.mark.parametrize("shape", [(), (N,)])
def test_a_temperature_that_is_a_tensor_is_looked_at(value: float, shape: tuple[int, ...]) -> None:
    temperature = torch.ones(shape).masked_fill(torch.tensor(True), value)
    with pytest.raises(ValueError, match="temperature must be finite and > 0, got values from"):
        fastppo.ppo_loss(**LOGITS, temperature=temperature)
    with pytest.raises(ValueError, match="temperature must be finite and > 0"):
        fastppo.token_logprobs(LOGITS["logits"], LOGITS["tokens"], temperature=temperature)


@pytest.mark.parametrize("value", [0.0, -1.0, nan, inf])
def test_a_denominator_is_looked_at(value: float) -> None:
    for given in (torch.tensor(value), torch.tensor(value, dtype=torch.float64), value):
        with pytest.raises(ValueError, match="denominator must be"):
            fastppo.ppo_loss(**LOGITS, denominator=given)
    mask = torch.ones(N, dtype=torch.bool)
    with pytest.raises(ValueError, match="denominator must be"):
        fastppo.aggregation_weights(mask, denominator=torch.tensor(value))


@pytest.mark.parametrize("name", ["gamma", "lam"])
@pytest.mark.parametrize("value", [-0.1, 1.1, nan, inf])
def test_a_discount_that_is_a_tensor_is_looked_at(name: str, value: float) -> None:
    for given in (torch.tensor(value), torch.tensor([0.5, value])):
        with pytest.raises(ValueError, match=rf"{name} must be in \[0, 1\], got values from"):
            fastppo.gae(torch.zeros(2, 3), torch.zeros(2, 3), **{name: given})


@pytest.mark.parametrize("name", ["temperature", "denominator"])
def test_complex_numbers_are_refused(name: str) -> None:
    for given in (torch.tensor(1 + 1j), 1 + 1j):
        with pytest.raises((ValueError, TypeError), match=f"{name} must be"):
            fastppo.ppo_loss(**LOGITS, **{name: given})
    with pytest.raises(ValueError, match="gamma must be"):
        fastppo.gae(torch.zeros(2, 3), torch.zeros(2, 3), gamma=torch.tensor(1j))


@pytest.mark.parametrize("value", ["no", "", 0, 1, None])
def test_what_is_true_or_false_is_a_boolean(value: object) -> None:
    for call, name in (
        (lambda: fastppo.ppo_loss(**LOGITS, inplace=value), "inplace"),
        (lambda: fastppo.compute_advantages(**ADVANTAGES, whiten=value), "whiten"),
        (lambda: fastppo.compute_advantages(**ADVANTAGES, shift_mean=value), "shift_mean"),
        (lambda: fastppo.whiten(torch.ones(3), shift_mean=value), "shift_mean"),
    ):
        with pytest.raises(TypeError, match=f"{name} must be True or False, got {value!r}"):
            call()


@pytest.mark.parametrize("operand", ["logits", "old_logprobs", "advantages"])
def test_a_sharded_operand_of_the_loss_from_logits_is_refused_by_name(operand: str) -> None:
    with pytest.raises(TypeError, match=f"{operand} must be a plain tensor, got a DTensor"):
        fastppo.ppo_loss(**LOGITS | {operand: _Sharded(LOGITS[operand])})


@pytest.mark.parametrize("operand", ["scores", "values", "logprobs"])
def test_a_sharded_operand_of_the_advantages_is_refused_by_name(operand: str) -> None:
    with pytest.raises(TypeError, match=f"{operand} must be a plain tensor, got a DTensor"):
        fastppo.compute_advantages(**ADVANTAGES | {operand: _Sharded(ADVANTAGES[operand])})


class _Sharded(torch.nn.Parameter):
    def full_tensor(self) -> None: ...


def test_the_way_that_the_refusal_of_a_sharded_head_names_has_the_right_gradient(
    tmp_path: Path,
) -> None:
    """Two processes with half of the rows each; without `Partial` half of the gradient is lost."""
    found = two_ranks.run(tmp_path)
    weight = two_ranks.batch()["weight"].requires_grad_()
    two_ranks.loss(slice(None), weight).backward()
    assert weight.grad is not None
    off = {name: (each - weight.grad).norm() / weight.grad.norm() for name, each in found.items()}
    assert off["partial"] < 1e-12  # fp64, summed in another order
    assert off["plain"] > 0.1
