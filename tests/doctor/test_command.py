import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from leadline.cli import app
from leadline.doctor.command import FailOn, exit_code
from leadline.doctor.report import NotChecked, Report
from leadline.doctor.reports.examined import Examined
from leadline.doctor.run_log import RunLog
from leadline.errors import LogError
from tests.doctor.reports.example import FIRST, HEALTHY, SECOND, SICK, UNDECIDED
from tests.doctor.test_watch import DEAD, write
from tests.doctor.test_watch import HEALTHY as HEALTHY_ROW


def run(*words: object, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, ["doctor", *map(str, words)], input=stdin)


@pytest.fixture
def sick(tmp_path: Path) -> Path:
    write(tmp_path / "sick.jsonl", range(1, 31), DEAD)
    return tmp_path / "sick.jsonl"


@pytest.fixture
def healthy(tmp_path: Path) -> Path:
    write(tmp_path / "healthy.jsonl", range(1, 31), HEALTHY_ROW)
    return tmp_path / "healthy.jsonl"


def only(*findings: object, verdict: str = "fault", broke: str = "") -> list[Examined]:
    checks = (NotChecked("LL402", "nan", "NaN.", (), broke=broke),) if broke else ()
    return [Examined(RunLog([]), Report(verdict, findings, not_checked=checks))]  # type: ignore[arg-type]


def test_a_fault_is_1_and_a_clean_run_0(sick: Path, healthy: Path) -> None:
    assert run(sick).exit_code == 1
    assert run(healthy).exit_code == 0
    assert run(healthy, sick).exit_code == 1


def test_the_least_severity_that_fails_is_chosen() -> None:
    assert exit_code([SICK], FailOn.ERROR) == 1
    assert exit_code([SICK], FailOn.NEVER) == 0
    assert exit_code(only(SECOND), FailOn.ERROR) == 0
    assert exit_code(only(SECOND), FailOn.WARNING) == 1
    assert exit_code([HEALTHY], FailOn.WARNING) == 0


def test_what_could_not_be_decided_and_a_broken_check_are_3_and_never_0() -> None:
    assert exit_code([UNDECIDED], FailOn.NEVER) == 3
    assert exit_code([HEALTHY, UNDECIDED], FailOn.ERROR) == 3
    assert exit_code([SICK, UNDECIDED], FailOn.ERROR) == 1
    assert exit_code(only(SECOND, broke="ZeroDivisionError"), FailOn.ERROR) == 3
    assert exit_code(only(FIRST, broke="ZeroDivisionError"), FailOn.NEVER) == 3


def test_what_cannot_be_read_is_said_in_house_form(tmp_path: Path) -> None:
    missing = run(tmp_path / "nothing.jsonl")
    assert isinstance(missing.exception, LogError)
    assert "nothing.jsonl" in str(missing.exception)


def test_json_goes_to_standard_output_and_nothing_else_does(sick: Path) -> None:
    report = json.loads(run(sick, "--format", "json").stdout)
    assert report["verdict"] == "fault"
    assert report["findings"][0]["severity"] == "error"
    assert report["runs"][0]["source"].endswith("sick.jsonl")


def test_a_log_comes_through_standard_input(sick: Path) -> None:
    for words in ((), ("-",)):
        done = run(*words, "--format", "json", stdin=sick.read_text())
        assert done.exit_code == 1
        assert json.loads(done.stdout)["verdict"] == "fault"


def test_the_name_of_the_output_chooses_the_format(sick: Path, tmp_path: Path) -> None:
    for name, begin in (
        ("r.html", "<!doctype html>"),
        ("r.json", "{"),
        ("r.md", "## leadline doctor"),
        ("r.sarif", "{"),
    ):
        done = run(sick, "--output", tmp_path / name)
        assert done.exit_code == 1
        assert done.stdout == ""
        assert (tmp_path / name).read_text().lstrip().startswith(begin)
    run(sick, "--output", tmp_path / "r.md", "--format", "text")
    assert "✗ Something is wrong" in (tmp_path / "r.md").read_text()


def test_an_output_that_cannot_be_written_is_said(sick: Path, tmp_path: Path) -> None:
    done = run(sick, "--output", tmp_path / "no" / "r.html")
    assert isinstance(done.exception, LogError)
    assert "cannot be written" in str(done.exception)


def test_rows_before_since_are_not_looked_at(tmp_path: Path) -> None:
    log = tmp_path / "metrics.jsonl"
    write(log, range(1, 31), DEAD)
    write(log, range(31, 80), HEALTHY_ROW)
    report = json.loads(run(log, "--since", 31, "--format", "json").stdout)
    assert report["runs"][0]["first_step"] == 31
    assert not [finding for finding in report["findings"] if finding["severity"] == "error"]
    late = run(log, "--since", 1000)
    assert isinstance(late.exception, LogError)


def test_coverage_tells_what_was_understood(tmp_path: Path) -> None:
    log = tmp_path / "state.jsonl"
    write(log, range(1, 5), {"loss": 0.1, "reward": 0.5, "frac_reward_zero_std": 0.1, "my_own_key": 3.0})
    text = run(log, "--coverage", "--framework", "trl").stdout
    assert "frac_reward_zero_std" in text
    assert "my_own_key" in text
    assert "reward/zero_std_fraction" in text


def test_watch_wants_one_path(sick: Path) -> None:
    done = run(sick, sick, "--watch")
    assert isinstance(done.exception, LogError)
    assert "2 paths" in str(done.exception)


def test_rules_lists_every_rule_and_prints_the_page_of_one() -> None:
    from leadline.doctor.rules import RULES

    catalogue = CliRunner().invoke(app, ["rules"]).stdout
    for rule in RULES:
        assert rule.id in catalogue
    by_id = CliRunner().invoke(app, ["rules", RULES[0].id.lower()]).stdout
    assert by_id == CliRunner().invoke(app, ["rules", RULES[0].name]).stdout
    assert by_id.startswith(f"# {RULES[0].id} {RULES[0].name}\n")
    assert "## Cause" in by_id


def test_a_rule_that_is_not_there_is_said_with_those_near_it() -> None:
    done = CliRunner().invoke(app, ["rules", "nan"])
    assert isinstance(done.exception, LogError)
    assert "nan-poisoned-weights" in str(done.exception)


def test_any_text_of_a_log_can_be_written(tmp_path: Path) -> None:
    log = tmp_path / "odd.jsonl"
    odd = '"\\ud800\\u001b[2J\\u0000<b>|`": 1.0, "\\u200b": 2'
    log.write_text("".join(f'{{"step": {step}, "loss": 0.1, "reward": 0.5, {odd}}}\n' for step in range(1, 5)))
    for name in ("text", "json", "markdown", "html", "sarif"):
        done = run(log, "--format", name, "--output", tmp_path / f"report.{name}")
        assert isinstance(done.exception, SystemExit | None), done.exception
    assert "\x1b" not in run(log, "--coverage").stdout
