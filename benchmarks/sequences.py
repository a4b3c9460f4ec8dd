"""Cases of the advantages: GAE, whitening, and both with reward shaping.

Responses are padded to T with noise, which providers must ignore.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

import fastppo
from benchmarks import peers
from benchmarks.case import (
    COMPILED,
    FLOAT_BYTES,
    MASK_BYTES,
    Case,
    Inputs,
    Outputs,
    Peer,
    Provider,
    Truth,
    compiled,
    draw_normal,
)
from benchmarks.peers import GAMMA, KL_COEF, LAM
from benchmarks.shapes import Sequences

LOOP = "Python loop"
"""Name of the loop over time that trainers without a kernel use. TRL's cannot be called, because it
is inside `PPOTrainer.train`. `torch.compile` would unroll it into a graph of T steps."""

VERL_GAE = "verl, whitens too"

SEQUENCE_TOLERANCE = 1e-4
"""Tolerance in units of the largest advantage, a sum of up to 10⁵ fp32 terms weighted by powers of
λ."""


def response_lengths(shape: Sequences) -> list[int]:
    """Return lengths from T down to T/2, the same in every run, so that the bytes are known."""
    return [shape.length - b * shape.length // (2 * shape.batch) for b in range(shape.batch)]


def response_mask(shape: Sequences, device: torch.device) -> Tensor:
    lengths = torch.tensor(response_lengths(shape), device=device)
    return torch.arange(shape.length, device=device) < lengths.unsqueeze(1)


def draw_sequences(shape: Sequences, seed: int, device: torch.device) -> Inputs:
    """Draw inputs with noise in the padding."""
    size = (shape.batch, shape.length)
    names = ("rewards", "values", "logprobs", "ref_logprobs")
    drawn = {
        name: draw_normal(size, torch.float32, device, 4 * seed + i) for i, name in enumerate(names)
    }
    return {
        **drawn,
        "mask": response_mask(shape, device),
        "scores": draw_normal((shape.batch,), torch.float32, device, seed + 2**20),
    }


def loop_gae(rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Compute GAE by a loop over time with zeroed padding, like TRL's PPOTrainer."""
    rewards = rewards.masked_fill(~mask, 0.0)
    values = values.masked_fill(~mask, 0.0)
    length = values.shape[1]
    last: Tensor | float = 0.0
    reversed_advantages = []
    for t in reversed(range(length)):
        next_values = values[:, t + 1] if t < length - 1 else 0.0
        delta = rewards[:, t] + GAMMA * next_values - values[:, t]
        last = delta + GAMMA * LAM * last
        reversed_advantages.append(last)
    advantages = torch.stack(reversed_advantages[::-1], dim=1)
    return advantages, advantages + values


def _exact_gae(rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return [B, T] advantages and returns in fp64, 0 where masked."""
    r, v = (x.detach().cpu().double().numpy().T.copy() for x in (rewards, values))
    m = mask.cpu().numpy().T
    advantages = np.zeros_like(v)
    next_value = np.zeros(v.shape[1])
    next_advantage = np.zeros(v.shape[1])
    for t in reversed(range(v.shape[0])):
        advantage = r[t] + GAMMA * next_value - v[t] + GAMMA * LAM * next_advantage
        next_value = np.where(m[t], v[t], next_value)
        next_advantage = np.where(m[t], advantage, next_advantage)
        advantages[t] = np.where(m[t], advantage, 0.0)
    return advantages.T, np.where(m, advantages + v, 0.0).T


def _sequence_truth(device: torch.device, **arrays: np.ndarray) -> dict[str, Truth]:
    return {
        name: Truth(torch.from_numpy(x.copy()).to(device), float(np.abs(x).max()))
        for name, x in arrays.items()
    }


def _gae_truth(inputs: Inputs) -> dict[str, Truth]:
    advantages, returns = _exact_gae(inputs["rewards"], inputs["values"], inputs["mask"])
    return _sequence_truth(inputs["mask"].device, advantages=advantages, returns=returns)


def _gae_from(function: Callable[..., tuple[Tensor, Tensor]]) -> Callable[[Inputs], Outputs]:
    def call(inputs: Inputs) -> Outputs:
        advantages, returns = function(inputs["rewards"], inputs["values"], inputs["mask"])
        return {"advantages": advantages, "returns": returns}

    return call


def _our_gae(rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return fastppo.gae(rewards, values, mask, gamma=GAMMA, lam=LAM)


def _only(inputs: Inputs, *names: str) -> Inputs:
    return {name: inputs[name] for name in names}


def _valid(shape: Sequences) -> tuple[int, int]:
    """Return the numbers of all entries and of valid entries."""
    return shape.batch * shape.length, sum(response_lengths(shape))


def gae_case(shape: Sequences) -> Case:
    entries, valid = _valid(shape)

    def verl(device: torch.device) -> Provider:
        gae = peers.verl_gae(device)

        def call(inputs: Inputs) -> Outputs:
            # verl whitens its advantages, so only its returns can be compared.
            return {"returns": gae(inputs["rewards"], inputs["values"], inputs["mask"])[1]}

        return Provider(VERL_GAE, call)

    def rl_triton(device: torch.device) -> Provider:
        gae, prepare = peers.rl_triton_gae(device)
        return Provider(
            "rl-triton", lambda inputs: {"advantages": gae(*inputs.values())}, prepare=prepare
        )

    return Case(
        "gae",
        str(shape),
        torch.float32,
        # valid rewards and values read; the whole mask read, two whole results written
        bytes_moved=valid * 2 * FLOAT_BYTES + entries * (MASK_BYTES + 2 * FLOAT_BYTES),
        bytes_and_flop="rewards, values and mask read, two results written; 6 FLOP per token",
        flop=valid * 6,  # δ: 3; A = δ + γλ·A_next: 2; A + V: 1
        draw=lambda seed, device: _only(
            draw_sequences(shape, seed, device), "rewards", "values", "mask"
        ),
        truth=_gae_truth,
        providers=(
            Provider("FastPPO", _gae_from(_our_gae)),
            Provider(LOOP, _gae_from(loop_gae)),
        ),
        tolerance=SEQUENCE_TOLERANCE,
        peers=(Peer(VERL_GAE, "verl", verl), Peer("rl-triton", "rl-triton", rl_triton)),
    )


def eager_whiten(x: Tensor, mask: Tensor) -> Tensor:
    count = mask.sum()
    mean = torch.where(mask, x, 0.0).sum() / count
    variance = torch.where(mask, (x - mean) ** 2, 0.0).sum() / (count - 1)
    return torch.where(mask, (x - mean) * torch.rsqrt(variance + 1e-8), 0.0)


def loop_advantages(
    scores: Tensor, values: Tensor, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute k1 reward shaping, GAE by the loop, and whitening, like most trainers."""
    rewards = -KL_COEF * (logprobs - ref_logprobs)
    last = mask.sum(1) - 1  # right padding
    rewards[torch.arange(len(scores), device=scores.device), last] += scores
    advantages, returns = loop_gae(rewards, values, mask)
    return eager_whiten(advantages, mask), returns


def _our_advantages(
    scores: Tensor, values: Tensor, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor]:
    out = fastppo.compute_advantages(
        scores, values, logprobs, ref_logprobs, mask, kl_coef=KL_COEF, gamma=GAMMA, lam=LAM
    )
    return out.advantages, out.returns


def _advantages_from(
    function: Callable[..., tuple[Tensor, Tensor]],
) -> Callable[[Inputs], Outputs]:
    def call(inputs: Inputs) -> Outputs:
        advantages, returns = function(*inputs.values())
        return {"advantages": advantages, "returns": returns}

    return call


def _exact_whitened(x: np.ndarray, mask: np.ndarray) -> np.ndarray:
    unmasked = x[mask]
    return np.where(mask, (x - unmasked.mean()) / np.sqrt(unmasked.var(ddof=1) + 1e-8), 0.0)


def _advantages_truth(inputs: Inputs) -> dict[str, Truth]:
    mask = inputs["mask"].cpu().numpy()
    rewards = -KL_COEF * (inputs["logprobs"].double() - inputs["ref_logprobs"].double())
    for b, length in enumerate(inputs["mask"].sum(1).tolist()):
        rewards[b, length - 1] += inputs["scores"][b].double()
    advantages, returns = _exact_gae(rewards, inputs["values"], inputs["mask"])
    white = _exact_whitened(advantages, mask)
    return _sequence_truth(inputs["mask"].device, advantages=white, returns=returns)


def advantages_case(shape: Sequences) -> Case:
    entries, valid = _valid(shape)
    return Case(
        "compute_advantages",
        str(shape),
        torch.float32,
        # valid values, logprobs and ref logprobs read; the whole mask read, two whole results
        # written; a score read and a KL written per sequence
        bytes_moved=valid * 3 * FLOAT_BYTES
        + entries * (MASK_BYTES + 2 * FLOAT_BYTES)
        + shape.batch * 2 * FLOAT_BYTES,
        bytes_and_flop="values, two logprobs and mask read, two results written; 14 FLOP per token",
        flop=valid * 14,  # shaping: 2; the KL's sum: 1; GAE: 6; moments: 3; whitening: 2
        draw=lambda seed, device: _only(
            draw_sequences(shape, seed, device),
            "scores",
            "values",
            "logprobs",
            "ref_logprobs",
            "mask",
        ),
        truth=_advantages_truth,
        providers=(
            Provider("FastPPO", _advantages_from(_our_advantages)),
            Provider(LOOP, _advantages_from(loop_advantages)),
        ),
        tolerance=SEQUENCE_TOLERANCE,
        peers=(
            Peer(
                "verl",
                "verl",
                lambda d: Provider("verl", _advantages_from(peers.verl_advantages(d))),
            ),
        ),
    )


def _whiten_from(function: Callable[..., Tensor]) -> Callable[[Inputs], Outputs]:
    return lambda inputs: {"whitened": function(inputs["values"], inputs["mask"])}


def _whiten_truth(inputs: Inputs) -> dict[str, Truth]:
    x = inputs["values"].cpu().double().numpy()
    mask = inputs["mask"].cpu().numpy()
    return _sequence_truth(inputs["mask"].device, whitened=_exact_whitened(x, mask))


def whiten_case(shape: Sequences) -> Case:
    entries, valid = _valid(shape)
    return Case(
        "whiten",
        str(shape),
        torch.float32,
        # valid x read; the whole mask read and the whole result written
        bytes_moved=valid * FLOAT_BYTES + entries * (MASK_BYTES + FLOAT_BYTES),
        bytes_and_flop="x and mask read, the result written; 5 FLOP per token",
        flop=valid * 5,  # moments: 3; subtract and multiply: 2
        draw=lambda seed, device: _only(draw_sequences(shape, seed, device), "values", "mask"),
        truth=_whiten_truth,
        providers=(
            Provider("FastPPO", _whiten_from(fastppo.whiten)),
            Provider("eager PyTorch", _whiten_from(eager_whiten)),
            Provider(COMPILED, _whiten_from(lambda *a: compiled(eager_whiten)(*a))),
        ),
        tolerance=SEQUENCE_TOLERANCE,
        peers=(
            Peer("TRL", "trl", lambda d: Provider("TRL", _whiten_from(peers.trl_whiten(d)))),
            Peer("verl", "verl", lambda d: Provider("verl", _whiten_from(peers.verl_whiten(d)))),
        ),
    )
