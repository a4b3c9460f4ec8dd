"""Wrong arguments raise an error before any work, and signatures stay as they are."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fastppo
from fastppo.functional import arguments
from fastppo.functional.other_names import OTHER_NAMES

N, V, H = 4, 7, 3
nan, inf = float("nan"), float("inf")


class _Work(TorchDispatchMode):
    """Fails when one of our operators is called."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.namespace != "fastppo", "work began before the error"
        return func(*args, **(kwargs or {}))


ZEROS = torch.zeros(N)
TOKENS = torch.zeros(N, dtype=torch.int64)
RESPONSES = torch.zeros(2, 3)
SIX = torch.zeros(6)
ONE_IS_NAN = torch.tensor([1.0, nan, 1.0, 1.0])
LOGITS = {"logits": torch.zeros(N, V)}
HEAD = {"hidden": torch.zeros(N, H), "weight": torch.zeros(V, H)}
LOSS_OPERANDS = {"tokens": TOKENS, "old_logprobs": ZEROS, "advantages": torch.ones(N)}
RIGHT: dict[Callable[..., Any], dict[str, Any]] = {
    fastppo.ppo_loss: LOGITS | LOSS_OPERANDS,
    fastppo.linear_ppo_loss: HEAD | LOSS_OPERANDS,
    fastppo.token_stats: LOGITS | {"tokens": TOKENS},
    fastppo.linear_token_stats: HEAD | {"tokens": TOKENS},
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
}
"""Valid arguments of each function."""


def call(function: Callable[..., Any], **changes: Any) -> Any:
    return function(**RIGHT[function] | changes)


def ints(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


Row = tuple[dict[str, Any], tuple[str, ...]]


def wrong(*words: str, **changes: Any) -> Row:
    """Wrong arguments, and the words of the message."""
    return changes, words


KL = {"kl_coef": 0.1, "kl_ratio_weighted": True, "ref_logprobs": ZEROS}
REF_HIDDEN = {"ref_hidden": torch.zeros(N, H)}
HALF = {"hidden": torch.zeros(N, H).half().requires_grad_(), "weight": torch.zeros(V, H).half()}

WRONG: dict[Callable[..., Any], list[Row]] = {
    fastppo.ppo_loss: [
        # Tensors: type, dtype, shape, device
        wrong("old_logprobs", "torch.Tensor", "NoneType", old_logprobs=None),
        wrong("tokens", "int64", "float32", tokens=torch.zeros(N)),
        wrong("old_logprobs", "[4]", "one per token", "[1]", old_logprobs=torch.zeros(1)),
        wrong("old_logprobs", "cpu", "meta", old_logprobs=torch.zeros(N, device="meta")),
        wrong("mask", "bool", "float32", "use mask.bool()", mask=torch.ones(N)),
        wrong("logits", "(..., V)", "[7]", logits=torch.zeros(V)),
        wrong("logits", "vocabulary", "[4, 0]", logits=torch.zeros(N, 0)),
        wrong("logits", "dense last axis", "(1, 4)", logits=torch.zeros(V, N).T),
        wrong("ref_logits", "[4, 7]", "[4, 8]", ref_logits=torch.zeros(N, V + 1)),
        # Objective
        wrong("objective", "dppo_tv, dppo_kl, gspo", "'grpo'", objective="grpo"),
        wrong("clip_ratio", "negative", "-0.2", clip_ratio=(0.1, -0.2)),
        wrong("clip_ratio", "ε", "0.3", clip_ratio=(0.1, 0.2, 0.3)),
        wrong("clip_ratio", "number", "str", clip_ratio="0.2"),
        wrong("dual_clip", "> 1", "1.0", dual_clip=1.0),
        wrong("dual_clip", "'clip' or 'gspo'", "'dis'", objective="dis", dual_clip=3.0),
        wrong("sapo_tau", "objective='sapo'", "'clip'", sapo_tau=(1.0, 1.0)),
        wrong("sapo_tau", "A > 0", "(1.0,)", objective="sapo", sapo_tau=(1.0,)),
        wrong("cu_seqlens", "objective='gspo'", "'clip'", cu_seqlens=ints(2)),
        wrong("objective='gspo'", "(..., T)", "[4]", objective="gspo"),
        wrong("cu_seqlens", "from 0 to 4", objective="gspo", cu_seqlens=torch.tensor([0, 3])),
        # KL and entropy
        wrong("kl_estimator", "k1, k2, k3, full", "k4", kl_estimator="k4"),
        wrong("kl_coef", "k3", "ref_logprobs", kl_coef=0.1),
        wrong("kl_estimator='full'", "ref_logits", kl_coef=0.1, kl_estimator="full"),
        wrong("kl_ratio_weighted", "'k1' or 'k3'", "'k2'", kl_estimator="k2", **KL),
        wrong("kl_ratio_weighted", "kl_coef", "other than 0", kl_ratio_weighted=True),
        wrong("kl_ratio_weighted", "True or False", "1", kl_ratio_weighted=1),
        wrong("kl_ratio_weighted", "objective='gspo'", objective="gspo", **KL),
        wrong("kl_coef", "finite", "nan", kl_coef=nan),
        wrong("entropy_coef", "finite", "inf", entropy_coef=inf),
        # Softmax
        wrong("temperature", "> 0", "0.0", temperature=0.0),
        wrong("temperature", "[4]", "[4, 1]", temperature=torch.ones(N, 1)),
        wrong("temperature must be finite and > 0, got values", temperature=ONE_IS_NAN),
        wrong("logit_scale", "> 0", "0.0", logit_scale=0.0),
        wrong("softcap", "> 0", "-30.0", softcap=-30.0),
        # Weights
        wrong("aggregation", "token-mean", "mean", aggregation="mean"),
        wrong("aggregation", "(..., T)", "[4]", aggregation="seq-mean-token-sum"),
        wrong("denominator", "> 0", "0.0", denominator=0.0),
        wrong("denominator must be", denominator=torch.tensor(-1.0)),
        wrong("weights", "denominator", weights=torch.ones(N), denominator=2.0),
        # The rest
        wrong("backend", "auto", "triton", "cpu", "torch", "cuda", backend="cuda"),
        wrong("inplace must be True or False, got 'no'", inplace="no"),
        wrong(
            "inplace=True needs bfloat16, float32 or float64 logits, got float16",
            logits=torch.zeros(N, V).half().requires_grad_(),
            inplace=True,
        ),
        wrong(
            "inplace=True needs logits that collapse to [N, V] or [B, T, V]",
            logits=torch.zeros(1, N, 2, V)[..., 0, :].unsqueeze(0).requires_grad_(),
            tokens=ints(1, 1, N),
            old_logprobs=torch.zeros(1, 1, N),
            advantages=torch.zeros(1, 1, N),
            inplace=True,
        ),
    ],
    fastppo.linear_ppo_loss: [
        wrong("hidden", "(..., H)", "[3]", hidden=torch.zeros(H)),
        wrong("weight", "[V, H]", "[3]", weight=torch.zeros(H)),
        wrong("weight", "H = 3", "[7, 4]", weight=torch.zeros(V, H + 1)),
        wrong("bias", "[7]", "[3]", bias=torch.zeros(H)),
        wrong("weight", "float64", hidden=torch.zeros(N, H).double()),
        wrong("chunk_size", "int", "float", chunk_size=1.5),
        wrong("chunk_size", ">= 1", "0", chunk_size=0),
        wrong("ref_hidden", "ref_weight", "together", **REF_HIDDEN),
        wrong("ref_bias", "ref_hidden", "None", ref_bias=torch.zeros(V)),
        wrong("ref_weight", "V = 7", "[8, 3]", **REF_HIDDEN, ref_weight=torch.zeros(V + 1, H)),
        wrong(
            "kl_estimator='full'",
            "float16",
            "bfloat16",
            **HALF,
            ref_hidden=torch.zeros(N, H).half(),
            ref_weight=torch.zeros(V, H).half(),
            kl_estimator="full",
            kl_coef=0.1,
        ),
    ],
    fastppo.token_stats: [wrong("tokens", "[4]", "[4, 1]", tokens=ints(N, 1))],
    fastppo.policy_loss: [wrong("advantages", "[4]", "[4, 1]", advantages=torch.zeros(N, 1))],
    fastppo.value_loss: [
        wrong("returns", "[4]", "[4, 1]", returns=torch.zeros(N, 1)),
        wrong("clip_ratio", "old_values", clip_ratio=0.2),
        wrong("clip_ratio", "> 0", "0.0", clip_ratio=0.0, old_values=ZEROS),
    ],
    fastppo.total_loss: [
        wrong("vf_coef", "finite", "nan", vf_coef=nan),
    ],
    fastppo.aggregation_weights: [wrong("mask", "torch.Tensor", "list", mask=[True])],
    fastppo.gae: [
        wrong("values", "cu_seqlens", "[6]", values=SIX, rewards=SIX),
        wrong("rewards", "[2, 3]", "[2, 4]", rewards=torch.zeros(2, 4)),
        wrong("gamma", "[0, 1]", "1.5", gamma=1.5),
        wrong("gamma", "[2]", "one per sequence", "[3]", gamma=torch.ones(3)),
        wrong("lam must be in [0, 1], got values from", lam=torch.tensor([0.5, nan])),
        wrong("bootstrap", "[2]", "[2, 1]", bootstrap=torch.zeros(2, 1)),
        wrong("cu_seqlens", "packed [total]", "[2, 3]", cu_seqlens=torch.tensor([0, 6])),
        *(
            wrong("cu_seqlens", *words, values=SIX, rewards=SIX, cu_seqlens=cu_seqlens)
            for cu_seqlens, words in (
                (torch.tensor([0, 4, 3, 6]), ["rise from 0 to 6", "[0, 4, 3, 6]"]),
                (torch.tensor([[0, 6]]), ["[B + 1]", "[1, 2]"]),
            )
        ),
    ],
    fastppo.compute_advantages: [
        wrong("scores", "one per sequence", "[2, 1]", scores=torch.zeros(2, 1)),
        wrong("kl_coef", "ref_logprobs", ref_logprobs=None, kl_coef=0.1),
        wrong("kl_estimator", "k1, k2, k3", "full", kl_estimator="full"),
        wrong("score_clip", "> 0", "0.0", score_clip=0.0),
        wrong("whiten must be True or False, got 0", whiten=0),
    ],
    fastppo.whiten: [
        wrong("x", "float32", "int64", x=ints(N)),
        wrong("moments", "[3]", "[2]", moments=torch.zeros(2)),
    ],
}


@pytest.mark.parametrize("function", WRONG)
def test_an_error_names_the_argument_what_it_got_and_what_is_expected(
    function: Callable[..., Any],
) -> None:
    for changes, words in WRONG[function]:
        with pytest.raises((ValueError, TypeError)) as error, _Work():
            call(function, **changes)
        for word in words:
            assert word in str(error.value), changes


def test_an_amd_gpu_gets_the_triton_kernels_on_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its tensors are "cuda" too, and the kernels have not been run on one."""
    x: Any = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, device=torch.device("cuda", 0))
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(arguments, "HAS_TRITON", True)
    assert arguments.choose_backend("auto", x) == "triton"
    assert arguments.choose_backend("triton", x) == "triton"
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    assert arguments.choose_backend("auto", x) == "torch"
    assert arguments.choose_backend("torch", x) == "torch"
    assert arguments.choose_backend("triton", x) == "triton"
    with pytest.raises(ValueError, match="backend='cpu' needs tensors on the CPU, got cuda:0"):
        arguments.choose_backend("cpu", x)


@pytest.mark.parametrize("token", [-1, V])
@pytest.mark.parametrize(
    "function",
    [fastppo.ppo_loss, fastppo.linear_ppo_loss, fastppo.token_stats, fastppo.linear_token_stats],
)
def test_a_token_outside_the_vocabulary_raises_an_error_with_its_value(
    function: Callable[..., Any], token: int
) -> None:
    tokens = TOKENS.index_fill(0, torch.tensor(2), token)
    with pytest.raises(ValueError, match=rf"tokens must be in \[0, {V}\), got .*{token}"):
        call(function, tokens=tokens)


GARBAGE = [
    (fastppo.ppo_loss, {"advantages": ONE_IS_NAN}, r"advantages must be numbers, got nan at \[1\]"),
    (fastppo.ppo_loss, {"old_logprobs": -ONE_IS_NAN}, r"old_logprobs must be numbers, got nan at"),
    (
        fastppo.compute_advantages,
        {"scores": torch.tensor([0.0, nan])},
        r"scores must be numbers, got nan at \[1\]",
    ),
    (
        fastppo.ppo_loss,
        {"logits": torch.tensor([[0.0], [0.0], [nan], [0.0]]).expand(N, V).contiguous()},
        r"logits, which give the logprobs, must be numbers, got nan at \[2\]",
    ),
    (
        fastppo.linear_ppo_loss,
        {"hidden": torch.full((N, H), nan)},
        r"hidden and weight, which give the logprobs, must be numbers, got nan at \[0\]",
    ),
    (
        fastppo.ppo_loss,
        {"old_logprobs": torch.tensor([0.0, -1.0, 1.5, 0.05])},  # negative log-likelihoods
        r"old_logprobs must be logprobs, ≤ 0, got 1\.5 at \[2\]",
    ),
    (
        fastppo.compute_advantages,
        {
            "scores": torch.ones(2),
            "mask": torch.tensor([[True] * 3, [False] * 3]),
        },
        r"scores\[1\] is lost: mask has no token of its response",
    ),
    (
        fastppo.compute_advantages,
        {
            "scores": torch.ones(3),
            "cu_seqlens": torch.tensor([0, 2, 2, 4]),
            "mask": torch.ones(4, dtype=torch.bool),
            **dict.fromkeys(("values", "logprobs", "ref_logprobs"), ZEROS),
        },
        r"scores\[1\] is lost: mask has no token of its response",
    ),
    (
        fastppo.compute_advantages,
        {"values": torch.tensor([[0.0] * 3, [0.0, nan, 0.0]])},
        r"values must be numbers, got nan at \[1, 1\]",
    ),
]
"""Functions, arguments, and the message that names argument and row."""


@pytest.mark.parametrize(("function", "changes", "says"), GARBAGE)
def test_garbage_is_refused_with_its_row(
    function: Callable[..., Any],
    changes: dict[str, Any],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FASTPPO_CHECK_VALUES", "1")
    call(function)  # the right arguments pass
    with pytest.raises(ValueError, match=says):
        call(function, **changes)


@pytest.mark.parametrize(("function", "changes", "says"), GARBAGE)
def test_values_are_not_read_by_default(
    function: Callable[..., Any], changes: dict[str, Any], says: str
) -> None:
    call(function, **changes)


def test_a_masked_nan_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTPPO_CHECK_VALUES", "1")
    mask = torch.tensor([True, False, True, True])
    out = call(fastppo.ppo_loss, advantages=ONE_IS_NAN, old_logprobs=-ONE_IS_NAN, mask=mask)
    assert out.loss.isfinite()


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("cliprange", ": use clip_ratio"),  # TRL
        ("clip_ratio_high", ": use clip_ratio=(low, high)"),  # verl
        ("beta", ": use kl_coef"),
        ("clipratio", ": use clip_ratio"),
        ("frobnicate", ""),
    ],
)
def test_an_unknown_keyword_gets_our_name(name: str, hint: str) -> None:
    message = f"ppo_loss got an unexpected keyword argument '{name}'{hint}"
    with pytest.raises(TypeError) as error:
        call(fastppo.ppo_loss, **{name: 0.2})
    assert str(error.value) == message


def test_other_names_are_not_ours_and_lead_to_our_keywords() -> None:
    ours = {*inspect.signature(fastppo.ppo_loss).parameters}
    assert not ours & OTHER_NAMES.keys()
    assert {name.partition("=")[0] for name in OTHER_NAMES.values()} <= ours


# -------------------------------------------------------------------------------------- signatures

SOFTMAX = "temperature=1.0, logit_scale=1.0, softcap=None, backend='auto'"
AGGREGATION = "aggregation='token-mean', denominator=None, weights=None"
LOSS = (
    "objective='clip', clip_ratio=0.2, dual_clip=None, sapo_tau=None, cu_seqlens=None, "
    "ref_logprobs=None, kl_coef=0.0, kl_estimator='k3', kl_ratio_weighted=False, "
    "entropy_coef=0.0, importance_weights=None"
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
    "loss_metrics": ("sums, objective='clip'", ""),
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
    "empty_cache": ("", ""),
}
"""The positional arguments and the keywords of each public function."""


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_and_defaults_are_the_contract(name: str) -> None:
    """A removed keyword or a changed default would break callers."""
    parameters = inspect.signature(getattr(fastppo, name)).parameters.values()
    shown = {x: str(x.replace(annotation=x.empty)) for x in parameters}
    by_position, keywords = SIGNATURES[name]
    positional = [shown[x] for x in parameters if x.kind is x.POSITIONAL_OR_KEYWORD]
    keyword_only = [shown[x] for x in parameters if x.kind is x.KEYWORD_ONLY]
    assert ", ".join(positional) == by_position
    assert sorted(keyword_only) == sorted(keywords.split(", ") if keywords else [])


def test_the_contract_covers_every_public_function() -> None:
    exported = (getattr(fastppo, name) for name in fastppo.__all__)
    assert {x.__name__ for x in exported if inspect.isfunction(x)} == SIGNATURES.keys()
