"""Rows in disorder, twice, of resumed runs and of several runs."""

import io
import json
import random
from collections.abc import Sequence
from typing import Any

from leadline.doctor.readers import read_runs
from leadline.doctor.run_log import RunLog


def row(step: int, value: float = 0.0, **more: Any) -> dict[str, Any]:
    return {"step": step, "loss": value or step / 10, "grad_norm": 1.0, "learning_rate": 1e-6, "reward": 0.5, **more}


def runs(rows: Sequence[dict[str, Any]]) -> list[RunLog]:
    return read_runs([io.StringIO("".join(json.dumps(row) + "\n" for row in rows))])


def losses(run: RunLog) -> list[tuple[int, float]]:
    return run.series("loss")


def test_the_order_of_rows_does_not_matter() -> None:
    rows = [row(step) for step in range(1, 30)]
    shuffled = rows[:]
    random.Random(3).shuffle(shuffled)
    (straight,), (mixed,) = runs(rows), runs(shuffled)
    assert losses(straight) == losses(mixed)
    assert straight.notes == ()
    assert mixed.notes == ("Rows were not in the order of steps and were sorted.",)


def test_rows_that_stand_twice_count_once_and_that_is_said() -> None:
    (run,) = runs([row(1), row(2), row(2), row(3)])
    assert [step for step, _ in losses(run)] == [1, 2, 3]
    assert run.notes == ("1 rows were logged twice and count once.",)


def test_rows_of_a_step_that_complement_each_other_are_one() -> None:
    (run,) = runs([row(1), {"step": 1, "eval_reward": 0.7}, row(2)])
    assert len(run.rows) == 2
    assert run.series("eval/reward_mean") == [(1, 0.7)]
    assert run.notes == ()


def test_a_resumed_run_continues_where_it_was_resumed() -> None:
    (run,) = runs([*(row(step) for step in range(1, 8)), *(row(step, value=9.0) for step in range(5, 9))])
    assert losses(run)[3:5] == [(4, 0.4), (5, 9.0)]
    assert len(run.rows) == 8
    assert run.notes == ("The run was resumed at step 5; 3 rows of abandoned attempts were left out.",)


def test_a_log_that_starts_again_holds_two_runs() -> None:
    first, second = runs([*(row(step) for step in (1, 2, 3)), *(row(step, value=9.0) for step in (1, 2))])
    assert len(first.rows) == 3 and losses(second) == [(1, 9.0), (2, 9.0)]
    assert "this is run 2" in second.notes[0]


def test_runs_with_names_are_told_apart_though_their_rows_alternate() -> None:
    found = runs([row(step, value=value, run_name=name) for step in (1, 2) for name, value in (("a", 1.0), ("b", 2.0))])
    assert [losses(run) for run in found] == [[(1, 1.0), (2, 1.0)], [(1, 2.0), (2, 2.0)]]


def test_of_two_values_at_one_step_the_last_counts_and_that_is_said() -> None:
    (run,) = runs([row(1), row(2, value=0.3), row(2, value=0.4), row(3)])
    assert losses(run)[1] == (2, 0.4)
    assert any("Step 2 was logged more than once" in note for note in run.notes)


def test_rows_without_steps_are_numbered_from_1() -> None:
    (run,) = runs([{"loss": 0.5, "grad_norm": 1.0, "reward": 0.1}, {"loss": 0.4, "grad_norm": 1.0, "reward": 0.1}])
    assert [step for step, _ in losses(run)] == [1, 2]
