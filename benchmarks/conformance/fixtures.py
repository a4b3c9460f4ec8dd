"""Load the fixtures, and compare outputs with their answers."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file
from torch import Tensor

from benchmarks.conformance.formulas import OPERATIONS, Arrays

FOLDER = Path(__file__).parent

TOLERANCE = 2e-5
"""Tolerance in units of the largest answer, at least 1: a few hundred roundings of fp32. Another
definition is off by 1e-3 or more."""


@dataclass(frozen=True)
class Fixture:
    name: str
    topic: str
    operation: str
    """Key in `OPERATIONS`, which names the inputs and outputs."""
    question: str
    source: str
    options: dict[str, Any]
    inputs: Arrays
    answer: Arrays

    def tensors(self, device: str = "cpu") -> dict[str, Tensor]:
        """Return the inputs as torch tensors, floats in fp32."""
        narrow = {np.dtype(np.float64): np.float32}
        return {
            name: torch.from_numpy(x.astype(narrow.get(x.dtype, x.dtype))).to(device)
            for name, x in self.inputs.items()
        }

    def variant(self, **variant: Any) -> Arrays:
        """Return the outputs of a variant of the formula."""
        return OPERATIONS[self.operation](self.inputs, **self.options | variant)


@functools.cache
def fixtures() -> dict[str, Fixture]:
    tensors = load_file(FOLDER / "fixtures.safetensors")

    def parts(name: str, kind: str) -> Iterator[tuple[str, np.ndarray]]:
        for key, x in tensors.items():
            fixture, part, tensor = key.split("/")
            if (fixture, part) == (name, kind):
                yield tensor, x

    return {
        record["name"]: Fixture(
            **record,
            inputs=dict(parts(record["name"], "inputs")),
            answer=dict(parts(record["name"], "answer")),
        )
        for record in json.loads((FOLDER / "fixtures.json").read_text())
    }


def difference(fixture: Fixture, outputs: Mapping[str, Any], expected: Arrays | None = None) -> str:
    """Compare outputs with the answer or with another expectation.

    Outputs are tensors or arrays; at least one of the answer's is needed. Outputs per token are
    compared where the mask is True, except gradients, which must be 0 elsewhere.

    Returns:
        An empty string if they agree, otherwise the first output that differs, with both values.
    """
    expected = fixture.answer if expected is None else expected
    if not outputs or not outputs.keys() <= expected.keys():
        raise ValueError(f"outputs {sorted(outputs)} must be some of {sorted(expected)}")
    mask = fixture.inputs.get("mask")
    for name, output in outputs.items():
        values = output.detach().cpu().double().numpy() if isinstance(output, Tensor) else output
        wanted = expected[name]
        if values.shape != wanted.shape:
            return f"{name} has shape {values.shape}, expected {wanted.shape}"
        if mask is not None and name != "gradient" and wanted.shape == mask.shape:
            values, wanted = values[mask], wanted[mask]
        scale = max(1.0, float(np.abs(np.nan_to_num(wanted)).max(initial=0.0)))
        if not np.allclose(values, wanted, rtol=0, atol=TOLERANCE * scale, equal_nan=True):
            return (
                f"{name} is {np.round(values, 5).tolist()}, expected {np.round(wanted, 5).tolist()}"
            )
    return ""
