"""What a run is watched by: closed-form signs, spikes, thresholds, and the batch that is kept."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from fastppo.run.watch import (
    ABSENT_AFTER,
    SLOPE_WINDOW,
    SPIKE_HISTORY,
    SPIKE_MIN_HISTORY,
    SpikeDetector,
    Threshold,
    Watch,
    crossed,
    parse_threshold,
    rollout_health,
    slope,
)

# ----------------------------------------------------------------------------------- the responses


def test_a_reward_that_pays_for_length_shows_as_a_correlation_of_1() -> None:
    responses = [[1], [1, 2], [1, 2, 3]]
    assert rollout_health(responses, [0.0, 1.0, 2.0])["length_correlation"] == pytest.approx(1)
    assert rollout_health(responses, [2.0, 1.0, 0.0])["length_correlation"] == pytest.approx(-1)
    assert rollout_health(responses, [1.0, 0.0, 1.0])["length_correlation"] == pytest.approx(0)


def test_the_correlations_are_numpys() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 30, 50)
    scores, gold = rng.normal(size=50), rng.normal(size=50)
    health = rollout_health([[0] * n for n in lengths], torch.tensor(scores), {"gold": list(gold)})
    assert health["length_correlation"] == pytest.approx(np.corrcoef(lengths, scores)[0, 1])
    assert health["correlation/gold"] == pytest.approx(np.corrcoef(gold, scores)[0, 1])


@pytest.mark.parametrize(
    ("responses", "scores", "gold"),
    [
        ([[1, 2], [3, 4]], [0.0, 1.0], [0.5, 0.5]),  # equal lengths, a constant gold reward
        ([[1], [3, 4]], [0.1, 0.1], [0.0, 1.0]),  # a constant score
        ([[1]], [0.1], [0.0]),  # one response
    ],
)
def test_a_correlation_with_what_does_not_vary_is_absent(responses, scores, gold) -> None:
    """Not NaN: a NaN would be drawn and compared."""
    found = rollout_health(responses, scores, {"gold": gold})
    assert not {"length_correlation", "correlation/gold"} & found.keys()
    assert all(math.isfinite(value) for value in found.values())


def test_distinct_ngrams_are_a_mean_over_responses_that_have_some() -> None:
    found = rollout_health([[5, 5, 5], [1, 2], [9]], [0.0, 0.0, 0.0])
    assert found["distinct_1"] == pytest.approx((1 / 3 + 1 + 1) / 3)
    assert found["distinct_2"] == pytest.approx((1 / 2 + 1) / 2)
    assert "distinct_2" not in rollout_health([[9]], [0.0])
    assert rollout_health([[7, 8] * 8], [0.0])["distinct_2"] == 2 / 15  # a loop
    assert rollout_health([], [], {"gold": []}) == {}
    assert rollout_health([[1, 2]] * 4, [0.0] * 4)["unique_responses"] == 0.25


def test_scores_and_monitors_are_one_per_response() -> None:
    with pytest.raises(ValueError, match="scores must be one per response: got 1 for 2 responses"):
        rollout_health([[1], [2]], [0.0])


# ------------------------------------------------------------------------------------- instability


def test_the_slope_is_of_the_last_iterations() -> None:
    assert slope([100.0] * 50 + [2.0 * i for i in range(SLOPE_WINDOW)]) == pytest.approx(2.0)
    noisy = torch.randn(40).tolist()
    expected = np.polyfit(range(SLOPE_WINDOW), noisy[-SLOPE_WINDOW:], 1)[0]
    assert slope(noisy) == pytest.approx(expected)


def test_a_slope_needs_two_points_and_leaves_gaps_where_they_are() -> None:
    assert slope([]) is None
    assert slope([1.0]) is None
    assert slope([1.0, math.nan]) is None
    assert slope([0.0, math.nan, 4.0]) == 2.0


def _noise(steps: int, scale: float = 0.1) -> list[float]:
    return (scale * torch.randn(steps)).tolist()


def test_the_bound_is_ten_median_absolute_deviations() -> None:
    history = [-1.0, 1.0] * 16  # median 0, MAD 1
    assert not SpikeDetector(list(history))(10.0)
    assert SpikeDetector(list(history))(10.001)
    assert SpikeDetector([100 + x for x in history])(89.9)
    assert not SpikeDetector([100 + x for x in history])(90.1)
    assert not SpikeDetector([0.0] * (SPIKE_MIN_HISTORY - 1))(1e6), "too few to say"


def test_a_constant_history_does_not_flag_noise() -> None:
    """The MAD is 0 there; the floor is 1e-3 of max(1, |median|), and ten of it are 1 %."""
    assert not SpikeDetector([0.0] * 64)(0.009)
    assert SpikeDetector([0.0] * 64)(0.011)
    assert not SpikeDetector([500.0] * 64)(504.9)
    assert SpikeDetector([500.0] * 64)(505.1)


def test_a_loss_that_stays_at_its_new_level_is_no_spike_any_more() -> None:
    detector = SpikeDetector([0.0] * SPIKE_HISTORY)
    flags = [detector(5.0) for _ in range(SPIKE_HISTORY)]
    assert flags[0]
    assert flags == sorted(flags, reverse=True)  # spikes, then none
    assert not flags[-1]


def test_a_loss_that_is_not_finite_is_left_to_the_skipped_steps() -> None:
    detector = SpikeDetector([0.0] * 20)
    assert not detector(math.nan)
    assert not detector(math.inf)
    assert detector.history == [0.0] * 20


# -------------------------------------------------------------------------------------- thresholds


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("kl > 20", Threshold("kl", ">", 20.0)),
        ("kl>=1e-2", Threshold("kl", ">=", 0.01)),
        ("  entropy<0.5 ", Threshold("entropy", "<", 0.5)),
        ("correlation/my-gold-1.5b <= -0.1", Threshold("correlation/my-gold-1.5b", "<=", -0.1)),
    ],
)
def test_a_threshold_reads_as_it_is_written(text: str, expected: Threshold) -> None:
    assert parse_threshold(text) == expected
    assert parse_threshold(str(expected)) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "kl 20",
        "kl = 20",
        "kl => 20",
        "> 20",
        "kl >",
        20,
        "kl > x",
        "kl > nan",
        "kl > 20 nats",
        "kl > 1 > 0",
    ],
)
def test_anything_else_is_refused_with_the_options_name(text) -> None:
    with pytest.raises(ValueError, match=r"warn_if must read like `kl > 20`: .*; got") as caught:
        parse_threshold(text, "warn_if")
    assert repr(text) in str(caught.value)


def test_crossed_thresholds_are_sentences_with_the_value() -> None:
    watched = [parse_threshold(t) for t in ("kl > 20", "entropy < 0.5", "kl >= 31.25", "x > 0")]
    metrics = {"kl": 31.25, "entropy": 0.7}
    assert crossed(watched, metrics) == ["kl = 31.2 > 20", "kl = 31.25 >= 31.25"]
    assert crossed(watched, {"kl": 20.0, "entropy": 0.5}) == []
    assert crossed(watched, {"entropy": 0.123456}) == ["entropy = 0.123 < 0.5"]
    # With the digits that show on which side it is.
    assert crossed(watched, {"kl": 20.004}) == ["kl = 20.004 > 20"]
    for op, crosses in ((">", [0, 0, 1]), (">=", [0, 1, 1]), ("<", [1, 0, 0]), ("<=", [1, 1, 0])):
        threshold = Threshold("m", op, 2.0)
        assert [len(crossed([threshold], {"m": x})) for x in (1.0, 2.0, 3.0)] == crosses, op


def test_nan_crosses_every_threshold_and_what_is_no_number_none() -> None:
    watched = [Threshold("kl", ">", 20.0)]
    assert crossed(watched, {"kl": math.nan}) == ["kl = nan, watched for kl > 20"]
    assert crossed(watched, {"kl": math.inf}) == ["kl = inf > 20"]
    assert crossed(watched, {"kl": None}) == crossed(watched, {"kl": ["a"]}) == []


# ---------------------------------------------------------------------------- all of it for one run


def _watch(warn: str = "kl > 20", stop: str = "entropy < 0.5") -> Watch:
    warn_if, stop_if = [parse_threshold(warn)], [parse_threshold(stop)]
    return Watch(warn_if, stop_if, expected=[*warn_if, *stop_if])


def test_a_watch_warns_and_says_what_stops_the_run() -> None:
    watch = _watch()
    assert watch({"kl": 1.0, "entropy": 1.0}) == []
    assert watch.stopped_by == []
    assert watch({"kl": 21.0, "entropy": 0.4}) == ["kl = 21 > 20"]
    assert watch.stopped_by == ["entropy = 0.4 < 0.5"]
    assert watch({"kl": 1.0, "entropy": 1.0}) == []
    assert watch.stopped_by == [], "of the last metrics alone"


def test_a_watch_adds_the_slope_of_the_kl() -> None:
    watch = _watch()
    found = []
    for i in range(SLOPE_WINDOW + 5):
        metrics = {"kl": 2.0 * i, "entropy": 1.0}
        watch(metrics)
        found.append(metrics.get("kl_slope"))
    assert found[0] is None
    assert found[1:] == pytest.approx([2.0] * (SLOPE_WINDOW + 4))
    assert len(watch.kl_history) == SLOPE_WINDOW
    without: dict[str, float] = {"entropy": 1.0}
    watch(without)
    assert "kl_slope" not in without, "a run without a KL has no slope of it"


def test_an_expected_metric_that_never_comes_is_reported_once_with_the_nearest_name() -> None:
    thresholds = [parse_threshold(text) for text in ("kl_slop > 1", "kl > 20", "rare > 0")]
    watch = Watch(expected=thresholds)
    sentences = []
    for i in range(ABSENT_AFTER + 3):
        rare = {"rare": 0.1} if i == 1 else {}
        sentences.append(watch({"kl": float(i), "entropy": 1.0} | rare))
    assert [len(of_iteration) for of_iteration in sentences] == [
        int(i == ABSENT_AFTER - 1) for i in range(ABSENT_AFTER + 3)
    ]
    (sentence,) = sentences[ABSENT_AFTER - 1]
    assert "no metric 'kl_slop' in the first 3 iterations" in sentence
    assert "`kl_slop > 1` cannot be crossed; did you mean kl_slope?" in sentence
    assert not any(Watch(thresholds)({"kl": 1.0}) for _ in range(ABSENT_AFTER)), "none is expected"


def test_a_restored_watch_goes_on_as_if_it_had_never_stopped() -> None:
    losses = [*_noise(90), 4.0, *_noise(30), -2.0]
    expected = [parse_threshold("speed > 1")]
    straight = Watch([parse_threshold("kl > 20")], expected=expected)
    interrupted = Watch([parse_threshold("kl > 20")], expected=expected)
    sentences = []
    for i, loss in enumerate(losses):
        if i == 2:  # before the missing metric is due
            state = interrupted.state_dict()
            interrupted = Watch([parse_threshold("kl > 20")], expected=expected)
            interrupted.load_state_dict(json.loads(json.dumps(state)))
        metrics = {"kl": 0.3 * i**2}
        resumed_metrics = dict(metrics)
        assert interrupted.loss_spikes(loss) == straight.loss_spikes(loss) == (abs(loss) > 1)
        sentences.append(straight(metrics))
        assert interrupted(resumed_metrics) == sentences[-1]
        assert resumed_metrics == metrics
    assert "no metric 'speed'" in sentences[ABSENT_AFTER - 1][0]
    assert interrupted.state_dict() == straight.state_dict()
