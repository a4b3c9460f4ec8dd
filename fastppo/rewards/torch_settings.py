"""What a user's code might change of torch: its random state and settings. They are restored after
each call.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

ATTENTION = ("flash", "mem_efficient", "math", "cudnn")
"""Torch's kernels of attention, each of which can be switched off."""

DEVICE_TYPES = ("cpu", "cuda")
"""Whose autocast is put back."""


@dataclass(frozen=True, slots=True)
class TorchSettings:
    """The state of torch that users' code shares with the training."""

    random: torch.Tensor
    random_of_gpu: torch.Tensor | None
    dtype: torch.dtype
    device: torch.device
    grad: bool
    threads: int
    precision: str
    """`torch.get_float32_matmul_precision()`."""
    attention: tuple[bool, ...]
    """Whether each of `ATTENTION` may be used."""
    autocast: tuple[tuple[bool, torch.dtype], ...]

    @classmethod
    def now(cls) -> TorchSettings:
        gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
        return cls(
            random=torch.get_rng_state(),
            random_of_gpu=torch.cuda.get_rng_state() if gpu else None,
            dtype=torch.get_default_dtype(),
            device=torch.get_default_device(),
            grad=torch.is_grad_enabled(),
            threads=torch.get_num_threads(),
            precision=torch.get_float32_matmul_precision(),
            attention=tuple(
                getattr(torch.backends.cuda, f"{kernel}_sdp_enabled")() for kernel in ATTENTION
            ),
            autocast=tuple(
                (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
                for device in DEVICE_TYPES
            ),
        )

    def restore(self) -> list[str]:
        """Puts back what has changed since; its names."""
        after = TorchSettings.now()
        changed = []
        if not torch.equal(self.random, after.random):
            changed.append("torch's random state")
            torch.set_rng_state(self.random)
        gpu = self.random_of_gpu
        gpu_after = after.random_of_gpu
        if gpu is not None and gpu_after is not None and not torch.equal(gpu, gpu_after):
            changed.append("the GPU's random state")
            torch.cuda.set_rng_state(gpu)
        if self.dtype != after.dtype:
            changed.append("torch's default dtype")
            torch.set_default_dtype(self.dtype)
        if self.device != after.device:
            changed.append("torch's default device")
            # None is the CPU; one that was chosen costs a call of Python at each operator.
            torch.set_default_device(None if self.device.type == "cpu" else self.device)
        if self.grad != after.grad:
            changed.append("whether torch records gradients")
            torch.set_grad_enabled(self.grad)
        if self.threads != after.threads:
            changed.append("torch's number of threads")
            torch.set_num_threads(self.threads)
        if self.precision != after.precision:
            changed.append("torch's precision of matrix products")
            torch.set_float32_matmul_precision(self.precision)
        if self.attention != after.attention:
            changed.append("torch's kernels of attention")
            for kernel, enabled in zip(ATTENTION, self.attention, strict=True):
                getattr(torch.backends.cuda, f"enable_{kernel}_sdp")(enabled)
        if self.autocast != after.autocast:
            changed.append("torch's autocast")
            for device, (enabled, dtype) in zip(DEVICE_TYPES, self.autocast, strict=True):
                torch.set_autocast_enabled(device, enabled)
                torch.set_autocast_dtype(device, dtype)
        return changed
