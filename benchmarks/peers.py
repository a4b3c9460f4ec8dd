"""Call other packages: one small function per package and operation, without copied code.

Every function takes the device, imports its package, and returns a callable with the signature of
the case. It raises `UnsupportedError` if the package cannot run on the device. If a package has
changed, its test fails with the ImportError or AttributeError. Where a package computes its loss
only inside a trainer's method, `clipped_loss` computes the same loss from the package's logprobs.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import os
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.case import Inputs, UnsupportedError

# Silences TRL's warning about experimental code.
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

CLIP_RATIO = 0.2
KL_COEF = 0.05
GAMMA = 1.0
LAM = 0.95

Stats = Callable[..., tuple[Tensor, Tensor | None]]
"""Function (logits, tokens) or (hidden, weight, tokens) → logprobs, and entropy or None."""

NEEDS_GPU = "its Triton kernel needs a GPU"


class Loss(NamedTuple):
    """Differentiable loss with the case's signature, and the preparation of its inputs."""

    call: Callable[..., Tensor]
    prepare: Callable[[Inputs], Inputs] | None = None


def _module(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


def need_gpu(device: torch.device, why: str = NEEDS_GPU) -> None:
    if device.type != "cuda":
        raise UnsupportedError(why)


def clipped_loss(
    logprobs: Tensor,
    entropy: Tensor | None,
    old_logprobs: Tensor,
    advantages: Tensor,
    entropy_coef: float,
) -> Tensor:
    """Compute the mean of PPO's clipped loss from logprobs in plain PyTorch."""
    ratio = torch.exp(logprobs - old_logprobs)
    clipped = ratio.clamp(1 - CLIP_RATIO, 1 + CLIP_RATIO)
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    if entropy_coef:
        assert entropy is not None
        loss = loss - entropy_coef * entropy
    return loss.mean()


# -------------------------------------------------------------------------------------------- TRL


def trl_stats(device: torch.device) -> Stats:
    utils = _module("trl.trainer.utils")

    def stats(
        logits: Tensor, tokens: Tensor, with_entropy: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        batched = logits.float().unsqueeze(0)  # it loops over the batch
        logprobs = utils.selective_log_softmax(batched, tokens.unsqueeze(0)).squeeze(0)
        return logprobs, utils.entropy_from_logits(batched).squeeze(0) if with_entropy else None

    return stats


TRL_COLUMNS = 8192
TRL_KERNEL_COLUMNS = 32768
"""Columns per chunk of logits. Users of TRL 1.12 choose the first; newer trainers use the other."""


def trl_linear_stats(device: torch.device, *, entropy_gradient: bool = False) -> Stats:
    """Return the chunked lm-head of TRL's trainers.

    TRL 1.16 has it in `trl.kernels`: cuBLAS and a Triton kernel per tile (torch on a CPU),
    recomputed in the backward pass. Earlier releases use PyTorch, with an entropy without gradient.
    """
    try:
        kernel = _module("trl.kernels.chunked_logprob").ChunkedLogProbFunction
    except ModuleNotFoundError as error:
        if entropy_gradient:
            raise UnsupportedError(
                "its entropy has no gradient before TRL 1.16, got "
                f"{importlib.metadata.version('trl')}"
            ) from error
        function = _module("trl.trainer.utils")._ChunkedLogProbFunction
        return lambda hidden, weight, tokens, with_entropy=True: function.apply(
            hidden, weight, tokens, 1.0, TRL_COLUMNS
        )

    def stats(
        hidden: Tensor, weight: Tensor, tokens: Tensor, with_entropy: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        outputs = ("entropy",) if with_entropy else ()
        logprobs, entropy, *_ = kernel.apply(
            hidden, weight, None, tokens, 1.0, TRL_KERNEL_COLUMNS, None, 1.0, outputs
        )
        return logprobs, entropy

    return stats


def trl_kernel_stats(device: torch.device) -> Stats:
    """Return logprob and entropy from one pass over the logits, both differentiable.

    On a CPU the kernel runs in Triton's interpreter, so that its values can be checked.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        need_gpu(device)
    try:
        function = _module("trl.kernels.logprob_entropy").selective_log_softmax_and_entropy
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"its kernel needs TRL 1.16, got {importlib.metadata.version('trl')}"
        ) from error
    return lambda logits, tokens, with_entropy=True: function(logits, tokens)


def trl_whiten(device: torch.device) -> Callable[[Tensor, Tensor], Tensor]:
    try:
        function = _module("trl.experimental.ppo.ppo_trainer").masked_whiten
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"it belongs to TRL 1.12's PPOTrainer, got {importlib.metadata.version('trl')}"
        ) from error
    # TRL's trainer zeroes the padding afterwards.
    return lambda x, mask: function(x, mask).masked_fill(~mask, 0.0)


# ------------------------------------------------------------------------------------------- verl


def verl_stats(device: torch.device) -> Stats:
    functional = _module("verl.utils.torch_functional")

    def stats(
        logits: Tensor, tokens: Tensor, with_entropy: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        logits = logits.float()  # like autocast in its workers
        logprobs = functional.logprobs_from_logits(logits, tokens, inplace_backward=False)
        return logprobs, functional.entropy_from_logits(logits) if with_entropy else None

    return stats


def verl_loss(device: torch.device) -> Callable[..., Tensor]:
    """Return verl's `compute_policy_loss` on its logprobs, without a dual clip."""
    # The function that replaces it computes the same loss, but needs the trainer's whole config.
    warnings.filterwarnings("ignore", ".*compute_policy_loss' is deprecated", FutureWarning)
    stats = verl_stats(device)
    policy_loss = _module("verl.trainer.ppo.core_algos").compute_policy_loss

    def loss(
        logits: Tensor, tokens: Tensor, old: Tensor, advantages: Tensor, entropy_coef: float
    ) -> Tensor:
        logprobs, entropy = stats(logits, tokens, with_entropy=bool(entropy_coef))
        policy_term = policy_loss(
            old_log_prob=old[None],
            log_prob=logprobs[None],
            advantages=advantages[None],
            response_mask=torch.ones_like(logprobs[None]),
            cliprange=CLIP_RATIO,
            clip_ratio_c=1e9,
        )[0]
        return policy_term if entropy is None else policy_term - entropy_coef * entropy.mean()

    return loss


def verl_linear_stats(device: torch.device) -> Stats:
    """Return verl's PyTorch head: chunks of 512 rows, recomputed in the backward pass."""
    fused = _module("verl.utils.experimental.torch_functional").FusedLinearForPPO()
    return lambda hidden, weight, tokens, with_entropy=True: fused(hidden, weight, tokens)


def verl_linear_kernel(device: torch.device) -> Stats:
    need_gpu(device)
    function = _module("verl.utils.kernel.linear_cross_entropy").linear_cross_entropy
    return lambda hidden, weight, tokens, with_entropy=True: function(
        hidden, weight, tokens, 1.0, "none"
    )


def verl_gae(device: torch.device) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return verl's GAE, (rewards, values, mask) → advantages, returns. It always whitens."""
    function = _module("verl.trainer.ppo.core_algos").compute_gae_advantage_return

    def gae(rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        weight = mask.float()
        advantages, returns = function(rewards, values, weight, GAMMA, LAM)
        return advantages * weight, returns * weight

    return gae


def verl_advantages(device: torch.device) -> Callable[..., tuple[Tensor, Tensor]]:
    gae = verl_gae(device)
    shape = _module("verl.trainer.ppo.core_algos").compute_rewards

    def advantages(
        scores: Tensor, values: Tensor, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        token_scores = torch.zeros_like(values)
        rows = torch.arange(len(scores), device=scores.device)
        token_scores[rows, mask.sum(1) - 1] = scores
        return gae(shape(token_scores, logprobs, ref_logprobs, KL_COEF), values, mask)

    return advantages


def verl_whiten(device: torch.device) -> Callable[[Tensor, Tensor], Tensor]:
    function = _module("verl.utils.torch_functional").masked_whiten
    return lambda x, mask: function(x, mask.float()) * mask


# ----------------------------------------------------------------------------------- Liger-Kernel


def sequence_length(n: int) -> int:
    """Return tokens per sequence, for losses with one advantage per sequence."""
    return next((size for size in (1024, 128) if n % size == 0 and n >= 4 * size), n)


def liger_loss(device: torch.device) -> Loss:
    """Return Liger's Triton GRPO loss.

    It takes logits [B, L + 1, V], ignores the last row, and has one advantage per sequence.
    """
    need_gpu(device)
    function = _module("liger_kernel.transformers.grpo_loss").triton_grpo_loss

    def prepare(inputs: Inputs) -> Inputs:
        logits = inputs["logits"].detach()
        n, vocab = logits.shape
        length = sequence_length(n)
        rows = logits.view(n // length, length, vocab)
        padded = torch.cat([rows, rows[:, :1]], dim=1).requires_grad_()
        per_token = {name: inputs[name].view(-1, length) for name in ("tokens", "old_logprobs")}
        return {"logits": padded, **per_token, "advantages": inputs["advantages"][::length]}

    def loss(
        logits: Tensor, tokens: Tensor, old: Tensor, advantages: Tensor, entropy_coef: float
    ) -> Tensor:
        return function(
            logits,
            old,
            None,
            tokens,
            advantages,
            temperature=1.0,
            beta=0.0,
            eps_low=CLIP_RATIO,
            eps_high=CLIP_RATIO,
            inplace=False,
            loss_type="bnpo",  # the mean over all tokens
            reduce=True,
        )[0]

    return Loss(loss, prepare)


def liger_linear_loss(device: torch.device) -> Loss:
    """Return Liger's GRPO loss in PyTorch, in chunks recomputed for the gradient."""
    module = _module("liger_kernel.chunked_loss").LigerFusedLinearGRPOLoss(
        beta=0.0,
        compiled=device.type == "cuda",  # the default; without effect on a CPU
        use_ref_model=False,
        epsilon_low=CLIP_RATIO,
        epsilon_high=CLIP_RATIO,
        loss_type="bnpo",
    )

    def prepare(inputs: Inputs) -> Inputs:
        n = inputs["tokens"].numel()
        length = sequence_length(n)
        shaped = {name: inputs[name].view(-1, length) for name in ("tokens", "old_logprobs")}
        hidden = inputs["hidden"].detach().view(n // length, length, -1).requires_grad_()
        advantages = inputs["advantages"][::length]
        return {"hidden": hidden, "weight": inputs["weight"], **shaped, "advantages": advantages}

    def loss(
        hidden: Tensor,
        weight: Tensor,
        tokens: Tensor,
        old: Tensor,
        advantages: Tensor,
        entropy_coef: float,
    ) -> Tensor:
        mask = torch.ones_like(old)
        return module(hidden, weight, tokens, mask, advantages, old_per_token_logps=old)[0]

    return Loss(loss, prepare)


def liger_linear_stats(device: torch.device) -> Stats:
    """Return `LigerFusedLinearScaledCrossEntropyFunction`: logprob and entropy with gradients.

    On sm_90 it is one kernel and recomputes the logits in the backward pass; elsewhere PyTorch in
    chunks of 512 rows, after verl. Its entropy has the dtype of the hidden states.
    """
    try:
        function = _module("liger_kernel.ops").LigerFusedLinearScaledCrossEntropyFunction
    except AttributeError as error:
        raise UnsupportedError(
            "its function needs Liger-Kernel 0.8.2, got "
            f"{importlib.metadata.version('liger-kernel')}"
        ) from error
    on_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
    if on_hopper and importlib.util.find_spec("cutlass") is None:
        raise UnsupportedError("on a Hopper GPU its kernel needs liger-kernel[cutedsl]")

    def stats(
        hidden: Tensor, weight: Tensor, tokens: Tensor, with_entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        if not with_entropy:
            return -function.apply(hidden, weight, tokens), None
        negative_logprobs, entropy = function.apply(hidden, weight, tokens, return_entropy=True)
        return -negative_logprobs, entropy

    return stats


# ------------------------------------------------------------------------------ Cut Cross-Entropy


def cce_path(device: torch.device) -> str:
    """Return the name of CCE's implementation: kernels on a GPU, otherwise a compiled fallback."""
    return "cce" if device.type == "cuda" else "torch_compile"


def cce_linear_stats(device: torch.device, **options: Any) -> Stats:
    function = functools.partial(
        _module("cut_cross_entropy").linear_cross_entropy,
        reduction="none",
        impl=cce_path(device),
        **options,
    )
    return lambda hidden, weight, tokens, with_entropy=False: (
        -function(hidden, weight, tokens).float(),
        None,
    )


def cce_unfiltered_stats(device: torch.device) -> Stats:
    """Return CCE with exact gradients. By default it drops those below 2⁻¹² of a row."""
    need_gpu(device, "its fallback for a CPU filters nothing")
    return cce_linear_stats(device, filter_eps=None)


# -------------------------------------------------------------------------------------- rl-triton


class Gae(NamedTuple):
    """GAE with the case's signature and a single result, and the preparation of its inputs."""

    call: Callable[[Tensor, Tensor, Tensor], Tensor]
    prepare: Callable[[Inputs], Inputs]


def rl_triton_gae(device: torch.device) -> Gae:
    """Return rl-triton's advantages. It has no mask, so the last valid token is a termination."""
    need_gpu(device)
    function = _module("rl_triton").compute_gae

    def prepare(inputs: Inputs) -> Inputs:
        mask = inputs["mask"]
        followed = torch.nn.functional.pad(mask[:, 1:], (0, 1))
        padded = {name: inputs[name].masked_fill(~mask, 0.0) for name in ("rewards", "values")}
        return {**padded, "terminateds": (mask & ~followed).float()}

    def gae(rewards: Tensor, values: Tensor, terminateds: Tensor) -> Tensor:
        return function(rewards, values, terminateds, gamma=GAMMA, lambda_=LAM)

    return Gae(gae, prepare)


# ------------------------------------------------------------------------------------------ QuACK

NEEDS_HOPPER = "its kernels need a Hopper GPU or newer"


def _need_hopper(device: torch.device) -> None:
    need_gpu(device, NEEDS_HOPPER)
    if torch.cuda.get_device_capability(device) < (9, 0):
        raise UnsupportedError(NEEDS_HOPPER)


def quack_linear_stats(device: torch.device) -> Stats:
    _need_hopper(device)
    function = _module("quack.linear_cross_entropy").linear_cross_entropy_func
    return lambda hidden, weight, tokens, with_entropy=False: (
        -function(hidden, weight, None, tokens, reduction="none").float(),
        None,
    )


def quack_linear_cross_entropy(
    device: torch.device, *, scaled_exp: bool
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return QuACK's mean −logprob, with the gradient computed in the forward pass.

    It has no weights per token, so it is not a PPO loss.

    Args:
        scaled_exp: store e^z with an exponent per row and tile instead of logits, and no gradient
            of the logits; bf16 on sm_90, V a multiple of 128. Otherwise use the older pipeline.
    """
    _need_hopper(device)
    function = _module("quack.linear_cross_entropy").chunked_linear_cross_entropy
    return functools.partial(function, use_scaled_exp=scaled_exp)
