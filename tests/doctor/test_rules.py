"""One test file for every rule: each brings its own sick and healthy runs."""

import importlib
import inspect
import math
from dataclasses import replace
from pathlib import Path

import pytest

from leadline import metrics
from leadline.doctor import rules as package
from leadline.doctor.differential import SYMPTOMS
from leadline.doctor.examine import Verdict, examine
from leadline.doctor.rule import Rule, alternatives
from leadline.doctor.rules import RULES
from leadline.doctor.run_log import RunLog
from leadline.doctor.view import View

LONGEST_RULE = 130
each_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)


@each_rule
def test_a_rule_fires_on_its_sick_runs(rule: Rule) -> None:
    assert rule.sick
    for run in rule.sick:
        (diagnosis,) = examine(run, [rule])
        assert diagnosis.verdict is Verdict.FIRES and diagnosis.finding, diagnosis
        assert diagnosis.finding.rule == rule.id
        assert diagnosis.finding.evidence and diagnosis.finding.fix and diagnosis.finding.confidence


@each_rule
def test_a_rule_is_not_set_off_by_its_healthy_runs(rule: Rule) -> None:
    assert rule.healthy
    for run in rule.healthy:
        verdict = examine(run, [rule])[0].verdict
        assert verdict not in (Verdict.FIRES, Verdict.BROKE)


@each_rule
def test_a_rule_is_clear_or_ruled_out_on_at_least_one_healthy_run(rule: Rule) -> None:
    verdicts = [examine(run, [rule])[0].verdict for run in rule.healthy]
    assert Verdict.CLEAR in verdicts or Verdict.RULED_OUT in verdicts


@each_rule
def test_without_any_one_of_its_needs_a_rule_is_not_checked(rule: Rule) -> None:
    logged = next(
        (run for run in rule.sick if len(run.rows) and not rule.lint(View(run)) and not rule.measure(View(run))), None
    )
    for need in rule.needs if logged else ():
        assert logged
        names = alternatives(need)
        rows = [{key: value for key, value in row.items() if key not in names} for row in logged.rows]
        (diagnosis,) = examine(replace(logged, rows=rows), [rule])
        assert diagnosis.verdict in (Verdict.NOT_CHECKED, Verdict.RULED_OUT)
        assert diagnosis.verdict is Verdict.RULED_OUT or names[0] in diagnosis.missing


@each_rule
def test_evidence_is_a_sentence_about_a_logged_quantity_or_a_setting(rule: Rule) -> None:
    for run in rule.sick:
        view = View(run)
        for item in [*rule.examine(view), *rule.measure(view), *rule.lint(view), *rule.against(view)]:
            assert item.note.endswith(".") and item.note[0] == item.note[0].strip() and "{" not in item.note
            if item.step:
                assert len(view[item.metric]), item
                assert item.step in view[item.metric].steps and item.onset <= item.step


@each_rule
def test_a_rule_survives_an_empty_log_nan_everywhere_and_a_single_row(rule: Rule) -> None:
    names = sorted({name for need in rule.needs for name in alternatives(need)} | {"loss", "reward/mean"})
    logs = [
        RunLog([]),
        RunLog([{"step": 1}]),
        RunLog([{"step": 1, **dict.fromkeys(names, math.nan)}]),
        RunLog([{"step": 1, **dict.fromkeys(names, math.inf)}] * 30),
        RunLog(
            [{"step": 1, **dict.fromkeys(names, 0.0)}], {"model": "a name", "optimizer": {"learning_rate": "words"}}
        ),
    ]
    assert [examine(log, [rule])[0].error for log in logs] == [""] * len(logs)


@each_rule
def test_needs_are_canonical_quantities(rule: Rule) -> None:
    names = [name for need in rule.needs for name in alternatives(need)]
    assert [name for name in names if metrics.find(name) is None] == []


@each_rule
def test_the_page_has_a_title_and_all_sections(rule: Rule) -> None:
    assert rule.title.endswith(".") and len(rule.title) < 120
    for heading in ("Symptom", "Cause", "Fix", "References"):
        assert len(rule.section(heading)) > 30


@each_rule
def test_what_a_rule_explains_is_another_rule(rule: Rule) -> None:
    assert set(rule.explains) <= {other.name for other in RULES} - {rule.name}


@each_rule
def test_file_class_and_name_are_the_same_words(rule: Rule) -> None:
    assert Path(inspect.getfile(type(rule))).stem == rule.name.replace("-", "_")
    assert type(rule).__name__ == "".join(word.capitalize() for word in rule.name.split("-"))


@each_rule
def test_a_rule_file_is_short(rule: Rule) -> None:
    assert len(Path(inspect.getfile(type(rule))).read_text().splitlines()) <= LONGEST_RULE


def test_ids_are_unique_ordered_and_well_formed() -> None:
    ids = [rule.id for rule in RULES]
    assert ids == sorted(set(ids))
    assert all(len(id) == 5 and id[:2] == "LL" and id[2] in "123456" and id[3:].isdigit() for id in ids)


def test_the_causes_of_every_symptom_are_rules() -> None:
    names = {rule.name for rule in RULES}
    assert [cause for symptom in SYMPTOMS for cause in symptom.causes if cause not in names] == []


def test_no_rule_file_is_forgotten() -> None:
    assert package.__file__
    for path in Path(package.__file__).parent.glob("*.py"):
        if path.stem == "__init__":
            continue
        module = importlib.import_module(f"leadline.doctor.rules.{path.stem}")
        (rule,) = [
            item
            for item in vars(module).values()
            if inspect.isclass(item) and issubclass(item, Rule) and item.__module__ == module.__name__
        ]
        assert rule in [type(registered) for registered in RULES]
