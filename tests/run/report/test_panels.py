"""Panels: each metric has one, and legends are of metrics that there are."""

from __future__ import annotations

import torch
from fastppo_kernels.records import SUMS

from fastppo.functional.losses import loss_metrics
from fastppo.run.report.panels import LABELS, PANELS


def test_the_clip_corners_are_those_that_the_loss_counts() -> None:
    corners = {name for name in loss_metrics(torch.ones(len(SUMS))) if name in LABELS}
    assert corners == LABELS.keys()
    assert any(set(panel.metrics) == corners for panel in PANELS)
