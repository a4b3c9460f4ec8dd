"""Memory allocated by the losses; see allocations.py."""

from __future__ import annotations

from typing import Any

import draws
import pytest
import torch
from allocations import allocations
from torch.profiler import ProfilerActivity, profile

import fastppo

PER_TOKEN = 2**15
"""Bytes: more than the numbers per token of these batches, less than a twelfth of the logits."""


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("term", ["policy", "full KL", "soft-cap"])
def test_ppo_loss_on_bf16_logits_makes_no_fp32_copy_of_them(term: str, masked: bool) -> None:
    """The only allocation of the logits' size is their bf16 gradient; in place there is none."""
    n, vocab = 200, 2003
    data = draws.batch((n,), vocab, torch.bfloat16).leaf()
    keywords = draws.options(data, term)
    mask = torch.rand(n) < 0.9 if masked else None
    size = data.logits.numel()
    largest, peak = allocations(
        lambda: fastppo.ppo_loss(*data, mask, **keywords).loss.backward(retain_graph=True)
    )
    assert largest == 2 * size
    assert peak < 2 * 2 * size + PER_TOKEN  # AccumulateGrad may keep a second gradient
    logits = data.logits.detach()

    def in_place() -> None:
        x = logits.requires_grad_()
        fastppo.ppo_loss(x, *data[1:], mask, inplace=True, **keywords)
        x.requires_grad_(False)

    largest, peak = allocations(in_place)
    assert peak < PER_TOKEN


@pytest.mark.parametrize("function", ["ppo_loss", "token_logprobs"])
def test_an_fp32_gradient_is_computed_in_its_final_memory(function: str) -> None:
    """No other allocation has the size of a row."""
    n, vocab = 200, 2003
    data = draws.batch((n,), vocab, torch.float32).leaf()

    def work() -> None:
        if function == "ppo_loss":
            fastppo.ppo_loss(*data)
        else:
            torch.autograd.grad(fastppo.token_logprobs(*data[:2]).sum(), data.logits)

    largest, peak = allocations(work)
    assert largest == 4 * data.logits.numel()
    assert peak < largest + PER_TOKEN


HEADS = {
    "policy": (torch.float64, ()),
    "reference, full KL": (torch.float64, ("full",)),
    "fp16, reference": (torch.float16, ("k3",)),
}


@pytest.mark.parametrize("case", HEADS)
def test_prompt_and_padding_rows_never_reach_the_head(case: str) -> None:
    """A hundred times as many masked rows need the same logits, including the reference's."""
    dtype, kl = HEADS[case]

    def products(padding: int) -> list[int]:
        data = draws.batch((10 + padding,), 103)
        mask = torch.arange(10 + padding) < 10
        hidden = torch.randn(10 + padding, 7).to(dtype).requires_grad_()
        weight = torch.randn(103, 7).to(dtype).requires_grad_()
        options: dict[str, Any] = {"chunk_size": 4, "temperature": torch.full((10 + padding,), 0.7)}
        options["entropy_coef"] = 0.1  # a gradient for every row, clipped or not
        if kl:
            options |= {"ref_hidden": hidden.detach(), "ref_weight": weight.detach()}
            options |= {"kl_coef": 0.1, "kl_estimator": kl[0]}
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
            fastppo.linear_ppo_loss(hidden, weight, *data[1:], mask, **options).loss.backward()
        return sorted(
            max(size for shape in event.input_shapes for size in shape)
            for event in profiler.events()
            if event.name in ("aten::mm", "aten::addmm")
        )

    assert products(padding=0) == products(padding=1000)
