"""Rollouts as JSON values, for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch

from fastppo.rollout import Branch, Rollout

BY_TOKEN = ("sampler_logprobs", "logprobs", "values")
"""Fields with a tensor per response."""


def as_state(rollout: Rollout) -> dict[str, Any]:
    """Return the fields that are not None, by name. JSON keeps the bits of fp32 numbers."""
    known = {field.name: getattr(rollout, field.name) for field in fields(rollout)}
    state: dict[str, Any] = {name: value for name, value in known.items() if value is not None}
    for name in state.keys() & {*BY_TOKEN}:
        state[name] = [row.tolist() for row in state[name]]
    if "final_values" in state:
        state["final_values"] = state["final_values"].tolist()
    if "branches" in state:
        state["branches"] = [
            [[branch.prompt_ids, as_state(branch.rollout)] for branch in branches]
            for branches in state["branches"]
        ]
    return state


def from_state(state: Mapping[str, Any]) -> Rollout:
    """Restore what `as_state` returned. Other keys are ignored."""
    known = {name: state[name] for name in (x.name for x in fields(Rollout)) if name in state}
    for name in known.keys() & {*BY_TOKEN}:
        known[name] = [torch.tensor(row, dtype=torch.float32) for row in known[name]]
    if "final_values" in known:
        known["final_values"] = torch.tensor(known["final_values"], dtype=torch.float32)
    if "branches" in known:
        known["branches"] = [
            [Branch(prompt_ids, from_state(branch)) for prompt_ids, branch in branches]
            for branches in known["branches"]
        ]
    return Rollout(**known)
