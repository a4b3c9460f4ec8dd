"""What a run is watched by: closed-form signs, spikes, thresholds, and the batch that is kept."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastppo.run.watch import (
    ABSENT_AFTER,
    SLOPE_WINDOW,
    SPIKE_HISTORY,
    SPIKE_MIN_HISTORY,
    AbsentMetrics,
    SpikeDetector,
    Threshold,
    Watch,
    crossed,
    load_batch,
    non_finite_gradients,
    parse_threshold,
    rollout_health,
    save_batch,
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
    found = rollout_health([[0] * n for n in lengths], torch.tensor(scores), {"gold": list(gold)})
    assert found["length_correlation"] == pytest.approx(np.corrcoef(lengths, scores)[0, 1])
    assert found["correlation/gold"] == pytest.approx(np.corrcoef(gold, scores)[0, 1])


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


def test_loops_show_as_few_distinct_ngrams() -> None:
    loop = rollout_health([[7, 8] * 8], [0.0])
    assert (loop["distinct_1"], loop["distinct_2"]) == (2 / 16, 2 / 15)
    varied = rollout_health([list(range(16))], [0.0])
    assert (varied["distinct_1"], varied["distinct_2"]) == (1.0, 1.0)


def test_distinct_ngrams_are_a_mean_over_responses_that_have_some() -> None:
    found = rollout_health([[5, 5, 5], [1, 2], [9]], [0.0, 0.0, 0.0])
    assert found["distinct_1"] == pytest.approx((1 / 3 + 1 + 1) / 3)
    assert found["distinct_2"] == pytest.approx((1 / 2 + 1) / 2)
    assert "distinct_2" not in rollout_health([[9]], [0.0])


def test_a_collapsed_policy_shows_as_few_unique_responses() -> None:
    assert rollout_health([[1, 2]] * 4, [0.0] * 4)["unique_responses"] == 0.25
    assert rollout_health([[1, 2], [2, 1]], [0.0] * 2)["unique_responses"] == 1.0


def test_a_batch_of_none_has_no_signs() -> None:
    assert rollout_health([], [], {"gold": []}) == {}


def test_scores_and_monitors_are_one_per_response() -> None:
    with pytest.raises(ValueError, match="scores must be one per response: got 1 for 2 responses"):
        rollout_health([[1], [2]], [0.0])
    with pytest.raises(ValueError, match="gold must be one per response: got 3 for 2 responses"):
        rollout_health([[1], [2]], [0.0, 1.0], {"gold": [0.0] * 3})


# ------------------------------------------------------------------------------------- instability


@given(st.floats(-5, 5), st.floats(-100, 100), st.integers(2, 30))
def test_the_slope_of_a_line_is_its_own(rise: float, start: float, count: int) -> None:
    line = [start + rise * i for i in range(count)]
    assert slope(line) == pytest.approx(rise, abs=1e-10)


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


def test_a_loss_far_from_its_history_is_a_spike() -> None:
    detector = SpikeDetector()
    assert not any(detector(loss) for loss in _noise(100))
    assert detector(3.0)  # 30 deviations
    assert detector(-3.0)
    assert not detector(0.1)


def test_the_bound_is_ten_median_absolute_deviations() -> None:
    history = [-1.0, 1.0] * 16  # median 0, MAD 1
    assert not SpikeDetector(list(history))(10.0)
    assert SpikeDetector(list(history))(10.001)
    assert SpikeDetector([100 + x for x in history])(89.9)
    assert not SpikeDetector([100 + x for x in history])(90.1)


def test_a_constant_history_does_not_flag_noise() -> None:
    """The MAD is 0 there; the floor is 1e-3 of max(1, |median|), and ten of it are 1 %."""
    assert not SpikeDetector([0.0] * 64)(0.009)
    assert SpikeDetector([0.0] * 64)(0.011)
    assert not SpikeDetector([500.0] * 64)(504.9)
    assert SpikeDetector([500.0] * 64)(505.1)


def test_a_short_history_says_nothing() -> None:
    detector = SpikeDetector()
    for _ in range(SPIKE_MIN_HISTORY):
        assert not detector(0.0)
    assert detector(1.0)
    assert not SpikeDetector([0.0] * (SPIKE_MIN_HISTORY - 1))(1e6)


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


def test_a_restored_detector_judges_the_same() -> None:
    losses = [*_noise(90), 4.0, *_noise(30), -2.0]
    straight, first = SpikeDetector(), SpikeDetector()
    expected = [straight(loss) for loss in losses]
    found = [first(loss) for loss in losses[:70]]
    restored = SpikeDetector(json.loads(json.dumps(first.history)))
    found += [restored(loss) for loss in losses[70:]]
    assert found == expected
    assert sum(expected) == 2
    assert len(restored.history) == SPIKE_HISTORY


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
        *("", "kl", "kl 20", "kl = 20", "kl == 20", "kl => 20", "kl >> 20", "> 20", "kl >", 20),
        *("kl > x", "kl > nan", "kl > inf", "kl > 20 nats", "kl > 1 > 0"),
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


@pytest.mark.parametrize(("op", "holds"), [(">", (0, 0, 1)), (">=", (0, 1, 1))])
def test_each_operator_is_what_it_says(op: str, holds: tuple[int, int, int]) -> None:
    for value, wanted in zip((1.0, 2.0, 3.0), holds, strict=True):
        assert bool(crossed([Threshold("m", op, 2.0)], {"m": value})) == bool(wanted)
        mirrored = Threshold("m", op.replace(">", "<"), 2.0)
        assert bool(crossed([mirrored], {"m": 4.0 - value})) == bool(wanted)


def test_a_sentence_has_the_digits_that_show_the_crossing() -> None:
    assert crossed([Threshold("kl", ">", 20.0)], {"kl": 20.004}) == ["kl = 20.004 > 20"]


def test_nan_crosses_every_threshold_and_what_is_no_number_none() -> None:
    watched = [Threshold("kl", ">", 20.0)]
    assert crossed(watched, {"kl": math.nan}) == ["kl = nan, watched for kl > 20"]
    assert crossed(watched, {"kl": math.inf}) == ["kl = inf > 20"]
    assert crossed(watched, {"kl": None}) == crossed(watched, {"kl": ["a"]}) == []


def test_a_metric_that_never_comes_is_told_once_with_the_nearest_name() -> None:
    absent = AbsentMetrics([Threshold("kl_slop", ">", 1.0), Threshold("kl", ">", 20.0)])
    told = [absent({"kl": 1.0, **({"kl_slope": 0.1} if i else {})}) for i in range(10)]
    assert [bool(sentences) for sentences in told] == [i == ABSENT_AFTER - 1 for i in range(10)]
    (sentence,) = told[ABSENT_AFTER - 1]
    assert "no metric 'kl_slop'" in sentence
    assert "`kl_slop > 1` cannot be crossed; did you mean kl_slope?" in sentence


def test_a_metric_that_comes_in_some_iterations_only_is_there() -> None:
    absent = AbsentMetrics([Threshold("length_correlation", ">", 0.9)])
    assert [absent(m) for m in ({}, {"length_correlation": 0.1}, {}, {})] == [[]] * 4


# ------------------------------------------------------------------------------- non-finite steps


def test_the_batch_of_a_skipped_step_comes_back_as_it_was(tmp_path) -> None:
    whole = torch.randn(6, 4)
    tensors = {
        "input_ids": torch.arange(12).view(2, 6),
        "values": whole[0],
        "returns": whole[0],  # the same memory, which safetensors refuses as it is
        "advantages": whole[:, 1],  # strided
        "logprobs": torch.tensor([float("nan"), -1.0]),
        "weights": torch.ones(3, dtype=torch.bfloat16),
        "ref_logprobs": None,
    }
    path = save_batch(
        tmp_path / "skipped" / "step-000012.safetensors",
        tensors,
        iteration=3,
        step=12,
        non_finite="grad_norm",
        parameters=["head.weight"],
    )
    found, record = load_batch(path)
    assert found.keys() == tensors.keys() - {"ref_logprobs"}
    for name, value in found.items():
        assert value.dtype == tensors[name].dtype
        torch.testing.assert_close(value, tensors[name], rtol=0, atol=0, equal_nan=True)
    assert record == {
        "iteration": 3,
        "step": 12,
        "non_finite": "grad_norm",
        "parameters": ["head.weight"],
    }
    assert [item.name for item in path.parent.iterdir()] == [path.name]  # nothing half-written


def test_a_file_of_another_kind_is_refused(tmp_path) -> None:
    from safetensors.torch import save_file

    save_file({"x": torch.ones(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"other\.safetensors is not the batch of a skipped step"):
        load_batch(tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="non_finite must be loss or grad_norm, got 'norm'"):
        save_batch(tmp_path / "x", {}, iteration=0, step=0, non_finite="norm")


def test_parameters_with_a_broken_gradient_are_named() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    assert non_finite_gradients(model) == []
    model(torch.ones(1, 2)).sum().backward()
    assert non_finite_gradients(model) == []
    model[0].bias.grad[1] = float("nan")
    model[1].weight.grad[0, 0] = float("inf")
    assert non_finite_gradients(model) == ["0.bias", "1.weight"]


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


def test_a_watch_reports_an_expected_metric_that_never_comes() -> None:
    watch = _watch(warn="klx > 20")
    said = [watch({"kl": 1.0, "entropy": 1.0}) for _ in range(ABSENT_AFTER + 1)]
    assert [len(sentences) for sentences in said] == [0] * (ABSENT_AFTER - 1) + [1, 0]
    assert "did you mean kl?" in said[ABSENT_AFTER - 1][0]
    unexpected = Watch([parse_threshold("klx > 20")])
    assert not any(unexpected({"kl": 1.0}) for _ in range(ABSENT_AFTER + 1))


def test_a_restored_watch_goes_on_as_if_it_had_never_stopped() -> None:
    losses, kls = [*_noise(90), 4.0, *_noise(30), -2.0], [0.3 * i**2 for i in range(20)]
    whole, first = _watch(), _watch()
    for each in (whole, first):
        for loss in losses[:70]:
            each.loss_spikes(loss)
        for kl in kls[:8]:
            each({"kl": kl, "entropy": 1.0})
    restored = _watch()
    restored.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for loss in losses[70:]:
        assert restored.loss_spikes(loss) == whole.loss_spikes(loss)
    for kl in kls[8:]:
        one, other = {"kl": kl, "entropy": 1.0}, {"kl": kl, "entropy": 1.0}
        assert restored(one) == whole(other)
        assert one == other
    assert restored.state_dict() == whole.state_dict()


def test_a_state_that_was_loaded_is_a_copy() -> None:
    state = {"losses": [1.0], "kl": [2.0], "absent": {"calls": 1, "seen": ["reward"]}}
    before = json.dumps(state)
    watch = _watch()
    watch.load_state_dict(state)
    watch.loss_spikes(3.0)
    watch({"kl": 4.0})
    assert json.dumps(state) == before


def test_metrics_that_were_seen_before_a_resume_are_not_missed_after_it() -> None:
    """The sentence comes on the third iteration of the run, not on the third after each resume."""
    threshold = parse_threshold("speed > 1")
    first = Watch([threshold], expected=[threshold])
    for _ in range(2):
        assert first({"reward": 1.0}) == []
    resumed = Watch([threshold], expected=[threshold])
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    (sentence,) = resumed({"reward": 1.0})
    assert "no metric 'speed' in the first 3 iterations" in sentence
    again = Watch([threshold], expected=[threshold])
    again.load_state_dict(resumed.state_dict())
    assert again({"reward": 1.0}) == []
