"""Schedules: how they are written, and what they give."""

from __future__ import annotations

import math

import pytest

from fastppo.ppo.schedule import Schedule


def test_schedules_in_closed_form() -> None:
    linear, cosine = Schedule("vf_coef", "linear", 0.1), Schedule("vf_coef", "cosine", 0.1)
    assert [linear.value(0.5, x) for x in (0, 0.25, 1)] == pytest.approx([0.5, 0.4, 0.1])
    half = 0.1 + 0.4 * 0.5 * (1 + math.cos(math.pi / 4))
    assert [cosine.value(0.5, x) for x in (0, 0.25, 0.5, 1)] == pytest.approx([0.5, half, 0.3, 0.1])
    assert Schedule("vf_coef", "constant", 0.1).value(0.5, 0.7) == 0.5


def test_a_schedule_reads_as_it_is_written() -> None:
    assert Schedule.parse(" kl_coef = cosine : 1e-2 ") == ("kl_coef", "cosine", 0.01)
    for wrong in ("kl_coef=linear", "linear:0", "kl_coef=linear:x"):
        with pytest.raises(ValueError, match="schedules: "):
            Schedule.parse(wrong)
