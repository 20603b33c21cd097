"""A short drill of each cause on every test run; all drills with `make drills`."""

from pathlib import Path

import pytest

from leadline.run_dir import read_metrics
from tests.drills.faults import FAULTS
from tests.drills.healthy import HEALTHY
from tests.drills.matrix import Outcome, outcome, page
from tests.drills.run import Drill, run_into

SHORT_FAULTS = [drill for drill in FAULTS if drill.sections.get("run", {}).get("steps") == 8]
ONE_OF_EACH_CAUSE = list({drill.cause: drill for drill in reversed(SHORT_FAULTS)}.values())[::-1]
ODD_LOOKS = (
    "loss-gspo kl-k3 async-2 sparse-reward resumed bfloat16-engine lora refill replay-async epochs-and-minibatches top-p "
    "stop-strings"
).split()
SOME_HEALTHY = [drill for drill in HEALTHY if drill.name in ODD_LOOKS]


def told(done: Outcome) -> str:
    return "\n".join(f"{f.name} ({f.severity}, {f.confidence}): {f.message}" for f in done.report.findings)


@pytest.mark.parametrize("drill", ONE_OF_EACH_CAUSE, ids=lambda drill: drill.name)
def test_an_induced_fault_is_named_first(drill: Drill) -> None:
    done = outcome(drill)
    assert done.first == drill.cause, told(done)
    assert done.report.verdict == "fault"


@pytest.mark.parametrize("drill", SOME_HEALTHY, ids=lambda drill: drill.name)
def test_a_healthy_run_has_no_error(drill: Drill) -> None:
    done = outcome(drill)
    assert done.first == "healthy", told(done)


def test_every_drill_has_a_name_of_its_own_and_there_are_enough() -> None:
    names = [drill.name for drill in (*FAULTS, *HEALTHY)]
    assert len(set(names)) == len(names)
    assert {drill.name for drill in SOME_HEALTHY} == set(ODD_LOOKS)
    assert len(FAULTS) >= 40
    assert len(HEALTHY) >= 30


def test_a_fault_leaves_no_trace_in_the_next_run(tmp_path: Path) -> None:
    """Patches are undone: a healthy run gives the same numbers before and after a broken one."""
    plain = next(drill for drill in HEALTHY if drill.name == "three-steps")
    broken = next(drill for drill in FAULTS if drill.name == "advantages-negated")
    losses = []
    for name, drill in (("before", plain), ("broken", broken), ("after", plain)):
        run_into(drill, tmp_path / name)
        losses.append(norms(tmp_path / name))
    assert losses[0] == losses[2] != losses[1]


def norms(path: Path) -> list[float]:
    return [row["optimizer/update_norm"] for row in read_metrics(path / "metrics.jsonl")[:3]]


def test_the_page_counts_what_was_named_and_what_was_not() -> None:
    done = outcome(next(drill for drill in FAULTS if drill.name == "rewards-equal"))
    wrong = Outcome(Drill("rewards-equal", "reward-sign-wrong"), done.report, 0.0)
    text = page([done, wrong])
    assert "- 2 faults with 2 causes: 1 named first." in text
    assert "| reward-sign-wrong | 1 | 0 | zero-reward-variance-within-group |" in text
    assert "| zero-reward-variance-within-group | 1 | 1 |  |" in text
