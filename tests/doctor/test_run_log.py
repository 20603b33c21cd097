import math

import numpy as np
import pytest

from leadline.doctor.run_log import RunLog, Streak, above, below
from leadline.doctor.table import Column, State, Table


def rows(*values: object) -> list[dict[str, object]]:
    return [{"step": step, "x": value} for step, value in enumerate(values, start=1)]


def test_each_of_the_states_is_told_apart() -> None:
    run = RunLog([*rows(1.0, float("nan"), None, "text"), {"step": 5}])  # type: ignore[list-item]
    expected = [State.PRESENT, State.NON_FINITE, State.NULL, State.STRING, State.MISSING]
    assert run.states("x") == expected
    assert run.states("y") == [State.MISSING] * 5


@pytest.mark.parametrize(
    ("value", "state"), [(None, "null"), (math.nan, "non_finite"), ("?", "string"), (1, "present")]
)
def test_a_quantity_without_any_number_has_the_state_of_its_values(value: object, state: str) -> None:
    assert RunLog(rows(value, value)).state("x") == state  # type: ignore[arg-type]


def test_a_number_in_quotes_is_a_number() -> None:
    assert RunLog(rows("1.5", "nan")).series("x")[0] == (1, 1.5)  # type: ignore[arg-type]


def test_what_is_logged_no_more_has_vanished() -> None:
    run = RunLog([{"step": step, "y": 0.0, **({"x": 1.0} if step <= 4 else {})} for step in range(1, 9)])
    assert run.state("x") is State.DROPPED
    assert run.states("x")[3:6] == [State.PRESENT, State.DROPPED, State.DROPPED]


def test_what_is_logged_now_and_then_has_not_vanished() -> None:
    run = RunLog([{"step": step, "y": 0.0, **({"x": 1.0} if step % 10 == 0 else {})} for step in range(1, 59)])
    assert run.state("x") is State.PRESENT


def test_what_was_logged_once_was_never_a_series() -> None:
    run = RunLog([{"step": step, "y": 0.0, **({"x": 1.0} if step == 1 else {})} for step in range(1, 30)])
    assert run.state("x") is State.PRESENT


def test_placeholders_and_text_are_no_part_of_the_series() -> None:
    codes = np.array([0, 4, 6, 5], np.uint8)
    run = RunLog(Table(np.arange(1.0, 5), {"x": Column(np.array([1.0, np.nan, np.nan, np.nan]), codes)}))
    assert [step for step, _ in run.series("x")] == [1, 4]
    assert not run.is_missing("x")


def test_a_quantity_of_placeholders_alone_is_missing() -> None:
    run = RunLog(Table(np.array([1.0]), {"x": Column(np.array([np.nan]), np.array([4], np.uint8))}))
    assert run.is_missing("x") and run.state("x") is State.PLACEHOLDER


def test_a_table_reads_like_the_rows_it_came_from() -> None:
    given = [{"step": 1.0, "a": 1.0}, {"step": 2.0, "b": 2.0}]
    table = Table.from_rows(given)
    assert list(table) == given
    assert table[-1] == given[-1] and table[0:1] == given[:1] and len(table) == 2


def test_streaks_are_longest_and_not_ended_by_nan() -> None:
    run = RunLog.from_columns({"x": [5.0, math.nan, 5.0, 1.0, 5.0, 5.0, 5.0]})
    assert run.streaks("x", above(2.0), 2) == [Streak(1, 3, 2, 5.0), Streak(5, 7, 3, 5.0)]
    assert run.streaks("x", lambda value: value > 2.0, 3) == [Streak(5, 7, 3, 5.0)]
    assert run.streaks("x", below(-1.0), 1) == []


def test_settings_are_found_nested_and_flat() -> None:
    run = RunLog([], {"objective": {"beta": 0.1}, "raw.a.b": 2})
    assert (run.setting("objective.beta"), run.setting("raw.a.b"), run.setting("model.name")) == (0.1, 2, None)
    assert run.option("objective.beta") == "objective.beta"


def test_rows_before_a_step_can_be_left_out() -> None:
    run = RunLog.from_columns({"x": [1.0, 2.0, 3.0]}).since(2)
    assert run.series("x") == [(2, 2.0), (3, 3.0)]
