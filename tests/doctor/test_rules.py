"""One test file for every rule: each brings its own sick and healthy runs."""

import importlib
import inspect
from pathlib import Path

import pytest

from leadline import metrics
from leadline.doctor import rules as package
from leadline.doctor.examine import Verdict, examine
from leadline.doctor.rule import Rule
from leadline.doctor.rules import RULES
from leadline.doctor.run_log import RunLog

each_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)


@each_rule
def test_a_rule_fires_on_its_sick_runs(rule: Rule) -> None:
    assert rule.sick
    for run in rule.sick:
        (diagnosis,) = examine(run, [rule])
        assert diagnosis.verdict is Verdict.FIRES and diagnosis.finding
        assert diagnosis.finding.rule == rule.id
        assert diagnosis.finding.evidence


@each_rule
def test_a_rule_is_not_set_off_by_its_healthy_runs(rule: Rule) -> None:
    assert rule.healthy
    for run in rule.healthy:
        assert examine(run, [rule])[0].verdict is not Verdict.FIRES


@each_rule
def test_a_rule_is_clear_on_at_least_one_healthy_run(rule: Rule) -> None:
    assert Verdict.CLEAR in [examine(run, [rule])[0].verdict for run in rule.healthy]


@each_rule
def test_without_any_one_of_its_needs_a_rule_is_not_checked(rule: Rule) -> None:
    assert rule.needs
    for name in rule.needs:
        rows = [{key: value for key, value in row.items() if key != name} for row in rule.sick[0].rows]
        (diagnosis,) = examine(RunLog(rows, rule.sick[0].config), [rule])
        assert diagnosis.verdict is Verdict.NOT_CHECKED
        assert diagnosis.missing == (name,)


@each_rule
def test_evidence_is_in_the_order_of_steps_and_about_logged_values(rule: Rule) -> None:
    for run in rule.sick:
        evidence = rule.examine(run)
        assert [item.step for item in evidence] == sorted(item.step for item in evidence)
        for item in evidence:
            logged = dict(run.series(item.metric))[item.step]
            assert logged == item.value or (logged != logged and item.value != item.value)
            assert str(item.step) in item.note and item.note.endswith(".")


@each_rule
def test_needs_and_evidence_are_canonical_quantities(rule: Rule) -> None:
    names = {*rule.needs, *(item.metric for run in rule.sick for item in rule.examine(run))}
    assert [name for name in names if metrics.find(name) is None] == []


@each_rule
def test_the_page_has_a_title_and_all_sections(rule: Rule) -> None:
    assert rule.title.endswith(".") and len(rule.title) < 100
    for heading in ("Symptom", "Cause", "Fix", "References"):
        assert len(rule.section(heading)) > 30


@each_rule
def test_file_class_and_name_are_the_same_words(rule: Rule) -> None:
    assert Path(inspect.getfile(type(rule))).stem == rule.name.replace("-", "_")
    assert type(rule).__name__ == "".join(word.capitalize() for word in rule.name.split("-"))


@each_rule
def test_a_rule_file_is_short(rule: Rule) -> None:
    assert len(Path(inspect.getfile(type(rule))).read_text().splitlines()) <= 100


def test_ids_are_unique_ordered_and_well_formed() -> None:
    ids = [rule.id for rule in RULES]
    assert ids == sorted(set(ids))
    assert all(len(id) == 5 and id[:2] == "LL" and id[2] in "123456" and id[3:].isdigit() for id in ids)


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
