import pytest

from leadline.loop.activity import Activity


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def activity(clock: Clock) -> Activity:
    return Activity(clock)


def test_it_tells_who_waits_for_whom_and_for_how_long(activity: Activity, clock: Clock) -> None:
    with activity.trainer("waits for the group of prompt 3"), activity.group(3) as first:
        first("the engine")
        clock.now += 60
        with activity.group(4) as second, activity.group(5) as third:
            second("the engine")
            third("rewards")
            clock.now += 5
            assert activity.told() == (
                "The trainer waits for the group of prompt 3, for 1m 05s. "
                "2 groups wait for the engine (longest: prompt 3, for 1m 05s). "
                "1 group waits for rewards (longest: prompt 5, for 5.0s)."
            )


def test_without_groups_the_engine_waits_for_the_trainer(activity: Activity, clock: Clock) -> None:
    with activity.update(7):
        clock.now += 2
        assert activity.told() == (
            "The trainer makes the update to version 7, for 2.0s. No group is under way: the engine waits for the trainer."
        )


def test_of_nested_work_the_innermost_is_told(activity: Activity) -> None:
    with activity.trainer("evaluates"), activity.trainer("waits for the engine to close"):
        assert "evaluates" not in activity.told()
    assert activity.told() == "No group is under way: the engine waits for the trainer."


def test_whatever_begins_or_ends_is_a_sign_of_life(activity: Activity, clock: Clock) -> None:
    def quiet_after(seconds: float) -> float:
        clock.now += seconds
        return activity.quiet_seconds

    assert quiet_after(3) == 3
    with activity.trainer("writes down step 1"):
        assert quiet_after(4) == 4
        with activity.group(1) as waits_for:
            assert quiet_after(5) == 5
            waits_for("rewards")
            assert quiet_after(6) == 6
        assert quiet_after(7) == 7
    assert quiet_after(8) == 8


def test_seconds_with_a_group_under_way_are_counted_once_however_many_there_are(
    activity: Activity, clock: Clock
) -> None:
    clock.now += 10
    with activity.group(1):
        clock.now += 1
        with activity.group(2):
            clock.now += 2
            assert activity.rolling_seconds == 3
        clock.now += 4
    clock.now += 10
    assert activity.rolling_seconds == 7
    with activity.group(3):
        clock.now += 1
        assert activity.rolling_seconds == 8


def test_weights_change_as_long_as_an_update_is_under_way_also_if_it_fails(activity: Activity) -> None:
    with pytest.raises(ZeroDivisionError), activity.update(1):
        assert activity.weights_change
        raise ZeroDivisionError
    assert not activity.weights_change
    with activity.trainer("writes down step 1"):
        assert not activity.weights_change
