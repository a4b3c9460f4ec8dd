"""Decide whether to pack sequences into one row.

Most trunks accept positions that restart at each sequence, and keep sequences apart. Others give
wrong results without an error: OPT counts positions along the row. So packing is used only after a
small batch gives the same states and gradients packed and padded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastppo.data.batch import Batch, Layout
from fastppo.models.policy import ActorCritic, LanguageModel
from fastppo.models.trunk import context_length, hidden_states, takes_mark, trunk_of
from fastppo.models.value import CriticValue

LENGTHS = (5, 11, 3, 8)
"""Lengths of the test sequences: a longer one after a shorter one, and the reverse."""
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 5e-2}
"""Relative, by the dtype of the products, for sums in another order. A wrong position or a leak
between sequences changes the first digit."""


def choose_packing(choice: str, policy: ActorCritic, reference: LanguageModel | None) -> str | None:
    """Set `policy.packing` by the option: auto, on or off.

    Args:
        reference: a separate reference model, if there is one.

    Returns:
        A warning if auto would pack and a model does not support it.

    Raises:
        ValueError: the option is on, and packed differs from padded.
    """
    trunks = trunks_of(policy, reference)
    if choice == "off":
        return None
    if choice == "auto":
        # Without kernels for packed rows the mask has quadratic size.
        half = policy.compute_dtype or next(policy.causal_lm.parameters()).dtype
        fast = policy.device.type == "cuda" and half != torch.float32
        if not fast or not all(takes_mark(trunk) for _, trunk in trunks):
            return None
    for who, trunk in trunks:
        with policy.autocast():
            wrong = difference(trunk)
        if wrong is not None:
            sentence = f"{type(trunk).__name__} ({who}) cannot be packed: {wrong}"
            if choice == "on":
                raise ValueError(f"packing=on: {sentence}. Use packing=off")
            return f"packing is off: {sentence}"
    policy.packing = True
    return None


def trunks_of(policy: ActorCritic, reference: LanguageModel | None) -> list[tuple[str, Any]]:
    """Return (role, trunk) for every model that reads the policy's batches."""
    trunks: list[tuple[str, Any]] = [("the policy", trunk_of(policy.causal_lm))]
    if isinstance(policy.value_function, CriticValue):
        trunks.append(("the critic", policy.value_function.trunk))
    if reference is not None:
        trunks.append(("the reference", trunk_of(reference.causal_lm)))
    return trunks


def difference(trunk: Any) -> str | None:
    """Return the difference between packed and padded sequences as a phrase, or None."""
    context = context_length(trunk)
    vocabulary = trunk.get_input_embeddings().weight.shape[0]
    lengths = [min(length, context or length) for length in LENGTHS]
    rows = [[(7 * i + 3 * length) % vocabulary for i in range(length)] for length in lengths]
    batch = Batch.of([row[:1] for row in rows], [row[1:] for row in rows], trunk.device)
    padded = _states_and_gradient(trunk, batch.layout())
    try:
        packed = _states_and_gradient(trunk, batch.packed_layout())
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a trunk may fail in any way
        return f"its forward or backward pass fails ({type(error).__name__}: {error})"
    dtype = torch.float32
    if torch.is_autocast_enabled(batch.device.type):
        dtype = torch.get_autocast_dtype(batch.device.type)
    if padded[0].dtype != torch.float32:
        dtype = padded[0].dtype
    for what, one, other in zip(("hidden states", "gradients"), padded, packed, strict=True):
        off = ((one - other).float().norm() / one.float().norm()).item()
        if not off <= TOLERANCE[dtype]:
            return (
                f"its {what} differ from those of padded sequences by {off:.2g} of their norm "
                f"(tolerance {TOLERANCE[dtype]:g}); it may compute its own positions, or let "
                "sequences attend to one another"
            )
    return None


def _states_and_gradient(trunk: Any, layout: Layout) -> tuple[Tensor, Tensor]:
    """Return the hidden states of all tokens except padding and the gradient of their embeddings.

    That gradient passes through every layer, and needs less memory than gradients of weights.

    Returns:
        [N + B, H] each.
    """
    embedded: list[Tensor] = []

    def keep(module: torch.nn.Module, args: Any, output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[0].clone()  # CTRL scales its embeddings in place

    hook = trunk.get_input_embeddings().register_forward_hook(keep)
    try:
        with torch.enable_grad():
            states = hidden_states(trunk, layout.input_ids, packing=layout.packing)
    finally:
        hook.remove()
    tokens = torch.cat([layout.predicting, layout.final])
    states = states.flatten(0, 1)[tokens]
    # Every entry gets another weight, so that the gradients do not cancel in a norm.
    weights = torch.linspace(-1, 1, states.numel(), device=states.device).view_as(states)
    (gradient,) = torch.autograd.grad((states.float() * weights).sum(), embedded)
    return states.detach(), gradient.flatten(0, 1)[tokens]
