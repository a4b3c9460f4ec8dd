"""AdamW with moments of 8 bits (Dettmers et al. 2022), torchao's: 2 bytes a weight in place of 8.

Weights in bfloat16 have no fp32 masters then: a step is computed in fp32 and rounded at random, up
as often as the remainder says, so that steps below 1/256 of a weight are taken on average.
Gradients are still added up in fp32. Tensors too small for 8-bit blocks, norms and biases, keep
fp32 moments, and masters.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from fastppo.ppo.master_weights import MasterWeights

NEEDED = "torchao>=0.16"

BLOCK = 256
"""Weights that share a scale."""
SMALLEST = 4096
"""Elements: torchao leaves the moments of smaller tensors as they are."""

MOMENTS = ("exp_avg", "exp_avg_sq")
PARTS = ("codes", "scale")
"""The two tensors of an 8-bit one, by torchao's names."""


def is_quantized(weight: Tensor) -> bool:
    """Whether a weight's moments are held in 8 bits."""
    return weight.numel() >= SMALLEST and weight.numel() % BLOCK == 0


def empty_moments(weight: Tensor) -> list[Tensor]:
    """The tensors that a weight's two moments are held in, for counting their bytes."""
    if not is_quantized(weight):
        return [torch.empty_like(weight, dtype=torch.float32) for _ in range(2)]
    blocks = weight.numel() // BLOCK
    codes = [torch.empty_like(weight, dtype=torch.uint8) for _ in range(2)]
    return [*codes, *(torch.empty(blocks, device=weight.device) for _ in range(2))]


@cache
def adamw_8bit() -> type[Any]:
    """The optimiser's class.

    Raises:
        ValueError: torchao is not installed.
    """
    try:
        from torchao.optim import AdamW8bit
        from torchao.optim.subclass_8bit import OptimState8bit
    except ImportError as error:
        raise ValueError(
            f"optimizer=adamw8bit needs torchao, which is not installed: pip install '{NEEDED}'"
        ) from error

    class MasterAdamW8bit(MasterWeights, AdamW8bit):
        """AdamW on fp32 or bfloat16 weights, its moments in 8 bits."""

        @staticmethod
        def has_master(weight: Tensor) -> bool:
            return not is_quantized(weight)

        def step(self, closure: Any = None) -> Any:
            # torchao compiles its step; on a CPU that takes a minute for each shape.
            on_cpu = self.weights[0].device.type == "cpu"
            with torch.compiler.set_stance("force_eager" if on_cpu else "default"):
                return super().step(closure)

        def moment_shapes(self, weight: Tensor) -> dict[str, tuple[int, ...]]:
            """Codes and scales of those that are held in 8 bits."""
            if not is_quantized(weight):
                return super().moment_shapes(weight)
            shapes = {"codes": tuple(weight.shape), "scale": (weight.numel() // BLOCK,)}
            return {f"{name}_{part}": shapes[part] for name in MOMENTS for part in PARTS}

        def state_dict(self) -> dict[str, Any]:
            """Plain tensors alone: of each 8-bit moment its codes and scales."""
            state_dict = super().state_dict()
            state = {index: _plain(entry) for index, entry in state_dict["state"].items()}
            return {**state_dict, "state": state}

        @torch.no_grad()
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            """Restores what `state_dict` gave."""
            state = {index: dict(entry) for index, entry in state_dict["state"].items()}
            names = [f"{moment}_{part}" for moment in MOMENTS for part in PARTS]
            codes = {
                index: {name: entry.pop(name) for name in names}
                for index, entry in state.items()
                if names[0] in entry
            }
            super().load_state_dict({**state_dict, "state": state})
            weights = [weight for group in self.param_groups for weight in group["params"]]
            for index, saved in codes.items():
                for moment in MOMENTS:
                    quantized = self._new_buffer(weights[index], signed=moment == MOMENTS[0])
                    for part in PARTS:
                        getattr(quantized, part).copy_(saved[f"{moment}_{part}"])
                    self.state[weights[index]][moment] = quantized

    def _plain(entry: dict[str, Any]) -> dict[str, Any]:
        """A weight's state with codes and scales in place of 8-bit tensors."""
        plain: dict[str, Any] = {}
        for name, value in entry.items():
            if isinstance(value, OptimState8bit):
                plain |= {f"{name}_{part}": getattr(value, part) for part in PARTS}
            else:
                plain[name] = value
        return plain

    return MasterAdamW8bit
