"""The process-wide settings that a user's code might change: torch's random state and settings, the
working directory, stdout and stderr. They are restored after each call.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

CONSOLES = (1, 2)
"""Descriptors of stdout and stderr. The next file that is opened takes the number of a closed one,
and would be given what is printed."""

DEVICE_TYPES = ("cpu", "cuda")
"""Whose autocast is put back."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What of a process users' code shares with the training."""

    random: torch.Tensor
    random_of_gpu: torch.Tensor | None
    dtype: torch.dtype
    device: torch.device
    grad: bool
    threads: int
    precision: str
    """Of matrix products in fp32."""
    autocast: tuple[tuple[bool, torch.dtype], ...]
    folder: str
    streams: tuple[Any, Any]
    """stdout and stderr."""

    @classmethod
    def now(cls) -> Settings:
        gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
        return cls(
            random=torch.get_rng_state(),
            random_of_gpu=torch.cuda.get_rng_state() if gpu else None,
            dtype=torch.get_default_dtype(),
            device=torch.get_default_device(),
            grad=torch.is_grad_enabled(),
            threads=torch.get_num_threads(),
            precision=torch.get_float32_matmul_precision(),
            autocast=tuple(
                (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
                for device in DEVICE_TYPES
            ),
            folder=_working_directory(),
            streams=(sys.stdout, sys.stderr),
        )

    def restore(self) -> list[str]:
        """Puts back what has changed since; its names."""
        after = Settings.now()
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
        if self.autocast != after.autocast:
            changed.append("torch's autocast")
            for device, (enabled, dtype) in zip(DEVICE_TYPES, self.autocast, strict=True):
                torch.set_autocast_enabled(device, enabled)
                torch.set_autocast_dtype(device, dtype)
        if self.folder and self.folder != after.folder:
            changed.append("the working directory")
            os.chdir(self.folder)
        if self.streams != after.streams:
            changed.append("sys.stdout or sys.stderr")
            sys.stdout = self.streams[0]
            sys.stderr = self.streams[1]
        return changed


def copy_consoles() -> dict[int, int]:
    """Copies of the descriptors of stdout and stderr, which `restore_consoles` closes."""
    copies = {}
    for console in CONSOLES:
        with suppress(OSError):  # the process was started without it
            copies[console] = os.dup(console)
    return copies


def restore_consoles(copies: dict[int, int]) -> list[str]:
    """Puts back what was closed or redirected since it was copied; its names."""
    changed = []
    for console, copy in copies.items():
        with suppress(OSError):  # the copy was closed too
            if not _is_open(console) or not os.path.sameopenfile(console, copy):
                changed.append(f"file descriptor {console}")
            os.dup2(copy, console)
            os.close(copy)
    return changed


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _working_directory() -> str:
    """Its path; empty if it was deleted."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""
