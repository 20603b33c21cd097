import json
from dataclasses import replace
from pathlib import Path

from leadline.doctor.reports import render
from leadline.doctor.reports.examined import Examined
from leadline.doctor.rule import Evidence, Finding
from tests.doctor.reports.example import FIRST, HEALTHY, REPORT, RUN, SICK, UNDECIDED


def test_verdict_and_findings_are_at_the_top() -> None:
    report = json.loads(render([SICK], "json"))
    assert report["verdict"] == "fault"
    assert [(f["name"], f["severity"]) for f in report["findings"]] == [
        ("importance-correction-erases-signal", "error"),
        ("truncation-rate-high-unresolved", "warning"),
    ]
    assert report["findings"][0]["run"] == "runs/one/trainer_state.json"
    assert report["runs"][0]["first_step"] == 1
    assert report["runs"][0]["last_step"] == 120
    assert report["runs"][0]["signal_budget"]["factors"][1]["dead"] is True


def test_a_finding_survives_the_way_there_and_back() -> None:
    written = json.loads(render([SICK], "json"))["findings"][0]
    del written["run"]
    assert Finding.from_dict(written) == FIRST


def test_numbers_that_are_not_finite_are_strings() -> None:
    odd = replace(FIRST, evidence=(Evidence("loss", 1, float("nan"), float("-inf"), "x"),))
    text = render([Examined(RUN, replace(REPORT, findings=(odd,)))], "json")
    evidence = json.loads(text, parse_constant=lambda name: 1 / 0)["findings"][0]["evidence"][0]
    assert (evidence["value"], evidence["limit"]) == ("NaN", "-Infinity")


def test_the_worst_verdict_of_several_runs_is_that_of_all_and_its_findings_come_first() -> None:
    report = json.loads(render([HEALTHY, UNDECIDED, SICK], "json"))
    assert report["verdict"] == "fault"
    assert len(report["runs"]) == 3
    assert json.loads(render([HEALTHY, UNDECIDED], "json"))["verdict"] == "undecided"
    assert json.loads(render([HEALTHY], "json"))["verdict"] == "healthy"


def test_settings_alone_have_no_steps() -> None:
    run = json.loads(render([UNDECIDED], "json"))["runs"][0]
    assert (run["rows"], run["first_step"], run["last_step"]) == (0, None, None)


def keys(value: object) -> set[str]:
    if isinstance(value, list):
        return {name for item in value for name in keys(item)}
    if isinstance(value, dict):
        return set(value) | keys([item for name, item in value.items() if name != "facts"])
    return set()


def test_every_field_is_documented() -> None:
    page = (Path(__file__).parents[3] / "docs" / "doctor.md").read_text()
    assert not [name for name in keys(json.loads(render([SICK, UNDECIDED], "json"))) if f"`{name}`" not in page]
