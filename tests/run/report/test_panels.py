"""The legends of panels belong to existing metrics."""

from __future__ import annotations

import torch
from fastppo_kernels.records import SUMS

from fastppo.functional.losses import loss_metrics
from fastppo.run.report.panels import LABELS, PANELS


def test_the_clip_fractions_of_the_loss_share_a_panel() -> None:
    corners = {name for name in loss_metrics(torch.ones(len(SUMS))) if name in LABELS}
    assert corners == LABELS.keys()
    assert any(set(panel.metrics) == corners for panel in PANELS)
