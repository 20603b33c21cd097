import json
from dataclasses import replace
from pathlib import Path

from leadline.doctor.reports import render
from leadline.doctor.reports.examined import Examined
from leadline.doctor.rule import Evidence
from leadline.doctor.run_log import RunLog
from tests.doctor.reports.example import FIRST, HEALTHY, REPORT, SICK


def test_a_finding_points_at_the_line_of_its_setting(tmp_path: Path) -> None:
    config = tmp_path / "grpo.yaml"
    config.write_text("model: tiny\nbeta: 0.0\nlearning_rate: 1.0e-3\n")
    finding = replace(FIRST, evidence=(Evidence("optimizer.learning_rate", 0, 1e-3, 1e-5, "Too high."),), step=0)
    report = replace(REPORT, findings=(finding,), source=str(config))
    log = json.loads(render([Examined(RunLog([]), report)], "sarif"))
    run = log["runs"][0]
    result = run["results"][0]
    assert log["version"] == "2.1.0"
    assert run["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == result["ruleId"] == "LL302"
    assert result["level"] == "error"
    assert result["locations"][0]["physicalLocation"]["region"]["startLine"] == 3


def test_a_clean_run_has_no_results() -> None:
    assert json.loads(render([HEALTHY], "sarif"))["runs"][0]["results"] == []


def test_the_option_of_the_framework_is_looked_for_in_the_named_settings_and_in_the_directory(tmp_path: Path) -> None:
    (tmp_path / "args.yaml").write_text("actor:\n  optim:\n    warmup_lr: 1\n    lr: 1.0e-3\n")
    finding = replace(FIRST, evidence=(Evidence("optimizer.learning_rate", 0, 1e-3, 1e-5, "Too high."),), step=0)
    run = RunLog([], framework="verl", options={"optimizer.learning_rate": "actor.optim.lr"})
    for source, configs in ((str(tmp_path), ()), ("log.jsonl", (tmp_path / "args.yaml",))):
        examined = Examined(run, replace(REPORT, findings=(finding,), source=source), configs)
        place = json.loads(render([examined], "sarif"))["runs"][0]["results"][0]["locations"][0]["physicalLocation"]
        assert place["artifactLocation"]["uri"].endswith("args.yaml")
        assert place["region"]["startLine"] == 4


def test_a_finding_without_a_setting_points_at_what_was_read() -> None:
    result = json.loads(render([SICK], "sarif"))["runs"][0]["results"][1]
    assert result["locations"][0]["physicalLocation"] == {
        "artifactLocation": {"uri": "runs/one/trainer_state.json"},
        "region": {"startLine": 1},
    }
