"""Wrong arguments raise an error before any work, and signatures stay as they are."""

from __future__ import annotations

import inspect
import pydoc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fastppo
from fastppo.functional import arguments
from fastppo.functional.loss_keywords import LossKeywords
from fastppo.other_names import KEYWORDS

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


def wrong(error: type[Exception] = ValueError, /, **changes: Any) -> tuple[Any, ...]:
    """Wrong arguments, of which the first is at fault, and the type of the exception."""
    return error, changes


KL = {"kl_coef": 0.1, "ref_logprobs": ZEROS}
REF_HIDDEN = {"ref_hidden": torch.zeros(N, H)}
HALF = {"hidden": torch.zeros(N, H).half().requires_grad_(), "weight": torch.zeros(V, H).half()}
HALF_REF = {"ref_hidden": HALF["weight"][:N], "ref_weight": HALF["weight"]}
STRIDED = torch.zeros(1, N, 2, V)[..., 0, :].unsqueeze(0)

WRONG: dict[Callable[..., Any], list[tuple[Any, ...]]] = {
    fastppo.ppo_loss: [
        # Tensors: type, dtype, shape, device
        wrong(TypeError, old_logprobs=None),
        wrong(tokens=torch.zeros(N)),
        wrong(old_logprobs=torch.zeros(1)),
        wrong(old_logprobs=torch.zeros(N, device="meta")),
        wrong(mask=torch.ones(N)),
        wrong(logits=torch.zeros(V)),
        wrong(logits=torch.zeros(N, 0)),
        wrong(logits=torch.zeros(V, N).T),
        wrong(ref_logits=torch.zeros(N, V + 1)),
        # Objective
        wrong(objective="grpo"),
        wrong(objective="custom"),
        wrong(clip_ratio=(0.1, -0.2)),
        wrong(clip_ratio=(0.1, 0.2, 0.3)),
        wrong(TypeError, clip_ratio="0.2"),
        wrong(dual_clip=1.0),
        wrong(dual_clip=3.0, objective="dis"),
        wrong(sapo_tau=(1.0, 1.0)),
        wrong(sapo_tau=(1.0,), objective="sapo"),
        wrong(cu_seqlens=ints(2)),
        wrong(objective="gspo"),
        wrong(cu_seqlens=torch.tensor([0, 3]), objective="gspo"),
        # KL and entropy
        wrong(kl_estimator="k4"),
        wrong(kl_coef=0.1),
        wrong(kl_estimator="full", kl_coef=0.1),
        wrong(kl_ratio_weighted=True, kl_estimator="k2", **KL),
        wrong(kl_ratio_weighted=True),
        wrong(TypeError, kl_ratio_weighted=1),
        wrong(kl_ratio_weighted=True, objective="gspo", **KL),
        wrong(kl_coef=nan),
        wrong(entropy_coef=inf),
        # Softmax
        wrong(temperature=0.0),
        wrong(temperature=torch.ones(N, 1)),
        wrong(temperature=ONE_IS_NAN),
        wrong(logit_scale=0.0),
        wrong(softcap=-30.0),
        # Weights
        wrong(aggregation="mean"),
        wrong(aggregation="seq-mean-token-sum"),
        wrong(denominator=0.0),
        wrong(denominator=torch.tensor(-1.0)),
        wrong(weights=torch.ones(N), denominator=2.0),
        # The rest
        wrong(backend="cuda"),
        wrong(TypeError, inplace="no"),
        wrong(inplace=True, logits=torch.zeros(N, V).half().requires_grad_()),
        wrong(
            inplace=True,
            logits=STRIDED.requires_grad_(),
            tokens=ints(1, 1, N),
            old_logprobs=torch.zeros(1, 1, N),
            advantages=torch.zeros(1, 1, N),
        ),
    ],
    fastppo.linear_ppo_loss: [
        wrong(hidden=torch.zeros(H)),
        wrong(weight=torch.zeros(H)),
        wrong(weight=torch.zeros(V, H + 1)),
        wrong(bias=torch.zeros(H)),
        wrong(weight=torch.zeros(V, H).double()),
        wrong(chunk_size=0),
        wrong(**REF_HIDDEN),
        wrong(ref_bias=torch.zeros(V)),
        wrong(ref_weight=torch.zeros(V + 1, H), **REF_HIDDEN),
        wrong(kl_estimator="full", kl_coef=0.1, **HALF, **HALF_REF),
        wrong(
            kl_estimator="full",
            kl_coef=0.1,
            objective=lambda *operands: operands[0],
            **REF_HIDDEN,
            ref_weight=torch.zeros(V, H),
        ),
    ],
    fastppo.token_stats: [wrong(tokens=ints(N, 1))],
    fastppo.policy_loss: [wrong(advantages=torch.zeros(N, 1))],
    fastppo.value_loss: [
        wrong(returns=torch.zeros(N, 1)),
        wrong(clip_ratio=0.2),
        wrong(clip_ratio=0.0, old_values=ZEROS),
    ],
    fastppo.total_loss: [wrong(vf_coef=nan)],
    fastppo.aggregation_weights: [wrong(TypeError, mask=[True])],
    fastppo.gae: [
        wrong(values=SIX, rewards=SIX),
        wrong(rewards=torch.zeros(2, 4)),
        wrong(gamma=1.5),
        wrong(gamma=torch.ones(3)),
        wrong(lam=torch.tensor([0.5, nan])),
        wrong(bootstrap=torch.zeros(2, 1)),
        wrong(cu_seqlens=torch.tensor([0, 6])),
        wrong(cu_seqlens=torch.tensor([0, 4, 3, 6]), values=SIX, rewards=SIX),
        wrong(cu_seqlens=torch.tensor([[0, 6]]), values=SIX, rewards=SIX),
    ],
    fastppo.compute_advantages: [
        wrong(scores=torch.zeros(2, 1)),
        wrong(kl_coef=0.1, ref_logprobs=None),
        wrong(kl_estimator="full"),
        wrong(score_clip=0.0),
        wrong(TypeError, whiten=0),
    ],
    fastppo.whiten: [wrong(x=ints(N)), wrong(moments=torch.zeros(2))],
}


@pytest.mark.parametrize("function", WRONG)
def test_a_wrong_argument_raises_an_error_with_its_name(function: Callable[..., Any]) -> None:
    for error, changes in WRONG[function]:
        name = next(iter(changes))
        with pytest.raises(error, match=rf"\b{name}\b"), _Work():
            call(function, **changes)


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
    with pytest.raises(ValueError, match="backend"):
        arguments.choose_backend("cpu", x)


@pytest.mark.parametrize("token", [-1, V])
@pytest.mark.parametrize(
    "function",
    [fastppo.ppo_loss, fastppo.linear_ppo_loss, fastppo.token_stats, fastppo.linear_token_stats],
)
def test_a_token_outside_the_vocabulary_raises_an_error_with_its_name(
    function: Callable[..., Any], token: int
) -> None:
    tokens = TOKENS.index_fill(0, torch.tensor(2), token)
    with pytest.raises(ValueError, match="tokens"):
        call(function, tokens=tokens)


GARBAGE: list[tuple[Callable[..., Any], str, dict[str, Any]]] = [
    (fastppo.ppo_loss, r"advantages .*\[1\]", {"advantages": ONE_IS_NAN}),
    (fastppo.ppo_loss, r"old_logprobs .*\[1\]", {"old_logprobs": -ONE_IS_NAN}),
    # Negative log-likelihoods
    (
        fastppo.ppo_loss,
        r"old_logprobs .*\[2\]",
        {"old_logprobs": torch.tensor([0.0, -1.0, 1.5, 0.05])},
    ),
    (
        fastppo.ppo_loss,
        r"logits.*\[2\]",
        {"logits": torch.tensor([[0.0], [0.0], [nan], [0.0]]).expand(N, V).contiguous()},
    ),
    (fastppo.linear_ppo_loss, r"hidden.*\[0\]", {"hidden": torch.full((N, H), nan)}),
    (fastppo.compute_advantages, r"scores .*\[1\]", {"scores": torch.tensor([0.0, nan])}),
    (
        fastppo.compute_advantages,
        r"scores\[1\]",
        {"scores": torch.ones(2), "mask": torch.tensor([[True] * 3, [False] * 3])},
    ),
    (
        fastppo.compute_advantages,
        r"scores\[1\]",
        {
            "scores": torch.ones(3),
            "cu_seqlens": torch.tensor([0, 2, 2, 4]),
            "mask": torch.ones(4, dtype=torch.bool),
            **dict.fromkeys(("values", "logprobs", "ref_logprobs"), ZEROS),
        },
    ),
    (
        fastppo.compute_advantages,
        r"values .*\[1, 1\]",
        {"values": torch.tensor([[0.0] * 3, [0.0, nan, 0.0]])},
    ),
]
"""Functions, the argument and row that the error names, and arguments."""


@pytest.mark.parametrize(("function", "place", "changes"), GARBAGE)
def test_garbage_is_refused_with_its_row(
    function: Callable[..., Any],
    place: str,
    changes: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FASTPPO_CHECK_VALUES", "1")
    call(function)  # the right arguments pass
    with pytest.raises(ValueError, match=place):
        call(function, **changes)


@pytest.mark.parametrize(("function", "place", "changes"), GARBAGE)
def test_values_are_not_read_by_default(
    function: Callable[..., Any], place: str, changes: dict[str, Any]
) -> None:
    call(function, **changes)


def test_a_masked_nan_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTPPO_CHECK_VALUES", "1")
    mask = torch.tensor([True, False, True, True])
    out = call(fastppo.ppo_loss, advantages=ONE_IS_NAN, old_logprobs=-ONE_IS_NAN, mask=mask)
    assert out.loss.isfinite()


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("cliprange", "clip_ratio"),  # TRL
        ("clip_ratio_high", "clip_ratio=(low, high)"),  # verl
        ("beta", "kl_coef"),
        ("labels", "tokens"),
        ("clipratio", "clip_ratio"),
        ("chunksize", "chunk_size"),
        ("frobnicate", None),
    ],
)
def test_an_unknown_keyword_is_answered_with_ours(name: str, ours: str | None) -> None:
    with pytest.raises(TypeError, match=f"linear_ppo_loss .*'{name}'") as error:
        call(fastppo.linear_ppo_loss, **{name: 0.2})
    _, _, suggested = str(error.value).partition(": use ")
    assert suggested == (ours or "")


def test_a_missing_argument_under_another_name_is_answered_with_ours() -> None:
    with pytest.raises(TypeError, match=r"'labels'.* tokens"):
        fastppo.ppo_loss(LOGITS["logits"], labels=TOKENS)


def test_other_names_are_not_ours_and_lead_to_our_keywords() -> None:
    ours = {*inspect.signature(fastppo.ppo_loss).parameters}
    assert not ours & KEYWORDS.keys()
    assert {name.partition("=")[0] for name in KEYWORDS.values()} <= ours


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


@pytest.mark.parametrize("function", [fastppo.ppo_loss, fastppo.linear_ppo_loss])
def test_help_shows_each_keyword_with_its_default(function: Callable[..., Any]) -> None:
    shown = " ".join(pydoc.render_doc(function, renderer=pydoc.plaintext).split())
    for name, hint in get_type_hints(LossKeywords, include_extras=True).items():
        _, default, documentation = get_args(hint)
        text = " ".join(documentation.split())
        assert f"{name} (default {default!r}): {text}" in shown


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
