"""The comparison of doctors: our column, without starting a process."""

from pathlib import Path

import pytest

from benchmarks.doctors.asked import Said
from benchmarks.doctors.judgement import judge_ours, judge_rival
from benchmarks.doctors.scenarios import HEALTHY, SETTINGS, Scenario, healthy, scenarios, write
from leadline.doctor import diagnose
from leadline.doctor.readers import read_runs

SCENARIOS = {scenario.name: scenario for scenario in scenarios()}


def said(log: Path) -> list[Said]:
    (run,) = read_runs([log])
    return [Said(finding.name) for finding in diagnose(run).findings]


@pytest.mark.parametrize("name", SCENARIOS)
def test_ours_is_right_with_the_settings(name: str, tmp_path: Path) -> None:
    lines, _ = write(SCENARIOS[name], tmp_path / "run")
    found = said(lines)
    assert judge_ours(SCENARIOS[name], found) == "right", found


@pytest.mark.parametrize("name", SCENARIOS)
def test_ours_is_right_without_the_settings(name: str, tmp_path: Path) -> None:
    _, state = write(SCENARIOS[name], tmp_path / "run")
    found = said(state)
    assert judge_ours(SCENARIOS[name], found) == "right", found


def test_ours_is_silent_on_every_healthy_run(tmp_path: Path) -> None:
    for seed in range(HEALTHY):
        lines, _ = write(healthy(seed), tmp_path / str(seed))
        assert said(lines) == [], seed


def test_the_first_finding_of_ours_decides() -> None:
    scenario = SCENARIOS["S9"]
    right, other = Said("all-completions-masked"), Said("dead-update")
    assert judge_ours(scenario, [right, other]) == "right"
    assert judge_ours(scenario, [other, right]) == "family"
    assert judge_ours(scenario, [other]) == "wrong"
    assert judge_ours(scenario, []) == "silent"
    assert judge_ours(SCENARIOS["S7"], [other]) == "false alarm"


def test_any_finding_of_a_rival_may_be_right_and_a_symptom_is_family() -> None:
    clip = Said("clip_saturation", "70 % of the tokens are clipped. Lower the learning rate")
    widened = Said("clip_saturation", "70 % of the tokens are clipped. Raise epsilon")
    other = Said("length_pathology", "completions grow")
    assert judge_rival(SCENARIOS["S6"], [other, widened]) == "right"
    assert judge_rival(SCENARIOS["S6"], [other, clip]) == "family"
    assert judge_rival(SCENARIOS["S6"], [other]) == "wrong"
    assert judge_rival(SCENARIOS["S6"], []) == "silent"
    assert judge_rival(SCENARIOS["S8"], [other]) == "false alarm"
    assert judge_rival(SCENARIOS["S8"], []) == "right"


def test_a_name_that_is_not_enough_needs_the_words() -> None:
    scenario = Scenario("x", "", "nan-poisoned-weights", [], SETTINGS, {"gradient_pathology": "(?i)nan"})
    assert judge_rival(scenario, [Said("gradient_pathology", "12 NaN gradients")]) == "right"
    assert judge_rival(scenario, [Said("gradient_pathology", "spikes")]) == "wrong"
