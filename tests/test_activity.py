"""What code reports about its progress reaches the one who listens."""

from __future__ import annotations

from fastppo.activity import Activity, begin_count, begin_stage, count, counted, during, shown_by


def test_a_phase_has_its_stage_count_and_elapsed_time() -> None:
    now = [100.0]
    activity = Activity(lambda: now[0])
    assert (str(activity), activity.seconds) == ("", 0.0)
    with shown_by(activity), during("generating"):
        assert str(activity) == "generating, 0 s"
        begin_stage("turn 2")
        begin_count(64)
        count(40)
        count()
        now[0] += 137
        assert str(activity) == "generating, turn 2, 41 of 64 done, 137 s"
        begin_stage("turn 3")
        assert str(activity) == "generating, turn 3, 137 s"
        with during("evaluating"):
            begin_count(2)
            assert str(activity) == "evaluating, 0 of 2 done, 0 s"
        assert str(activity) == "generating, turn 3, 137 s"
    assert str(activity) == ""


def test_reports_without_a_listener_or_a_phase_go_nowhere() -> None:
    with during("generating"):
        count()
    activity = Activity()
    with shown_by(activity):
        begin_count(3)
        count()
    assert activity.phase is None


def test_an_item_is_done_when_the_next_one_is_requested() -> None:
    activity = Activity(lambda: 0.0)
    with shown_by(activity), during("updating"):
        seen = [str(activity) for _ in counted(["a", "b"], "epoch 1")]
        assert seen == [
            "updating, epoch 1, 0 of 2 done, 0 s",
            "updating, epoch 1, 1 of 2 done, 0 s",
        ]
        assert str(activity) == "updating, epoch 1, 2 of 2 done, 0 s"
