"""Every bug, planted in a function as users write it, is the first that is named; right functions have no fault."""

import pytest

from leadline.probes.code.examine import examine
from leadline.probes.code.mutations import TENSOR_MUTATIONS, collating, decoding
from leadline.probes.code.reward import examine_reward
from leadline.probes.code.structures import examine_collate, examine_decode
from tests.probes.code.framework_styles import COLLATORS, DECODERS, REWARDS, TENSORS
from tests.probes.code.planted_losses import EXPECT, GIVEN, LOSSES
from tests.probes.code.planted_rewards import ERRORS, NOTES
from tests.probes.code.planted_structures import COLLATORS as WRONG_COLLATORS
from tests.probes.code.planted_structures import DECODERS as WRONG_DECODERS
from tests.probes.code.planted_tensors import PLANTED

TENSOR_BUGS = [(role, name, bug) for role, bugs in {"loss": LOSSES, **PLANTED}.items() for name, bug in bugs.items()]
RIGHT = [(role, right) for role, functions in TENSORS.items() for right in functions]


@pytest.mark.parametrize(("role", "name", "bug"), TENSOR_BUGS, ids=[f"{role}-{name}" for role, name, _ in TENSOR_BUGS])
def test_a_bug_in_a_function_of_tensors_is_named_first(role, name, bug):
    report = examine(bug, role, name, GIVEN.get(name, []), EXPECT.get(name) if role == "loss" else None)
    assert report.findings[0].name == name
    assert report.exit_code == 1
    assert report.mutations[0] == name


@pytest.mark.parametrize(("name", "bug"), WRONG_DECODERS.items(), ids=WRONG_DECODERS)
def test_a_bug_in_a_decoder_is_named_first(name, bug):
    report = examine_decode(bug, name, [])
    assert (report.findings[0].name, report.exit_code) == (name, 1)


@pytest.mark.parametrize(("name", "bug"), WRONG_COLLATORS.items(), ids=WRONG_COLLATORS)
def test_a_bug_in_a_collator_is_named_first(name, bug):
    report = examine_collate(bug, name, [])
    assert (report.findings[0].name, report.exit_code) == (name, 1)


@pytest.mark.parametrize(("name", "bug"), ERRORS.items(), ids=ERRORS)
def test_a_fault_of_a_reward_is_the_only_one_named(name, bug):
    assert {finding.name for finding in examine_reward(bug, name, [], None).errors} == {name.strip()}


@pytest.mark.parametrize(("name", "reward"), NOTES.items(), ids=NOTES)
def test_what_a_reward_is_sensitive_to_is_a_note(name, reward):
    report = examine_reward(reward, name, [], None)
    assert name in {finding.name for finding in report.findings}
    assert report.exit_code == 0


@pytest.mark.parametrize(("role", "right"), RIGHT, ids=[f"{role}-{right.__name__}" for role, right in RIGHT])
def test_a_right_function_in_any_frameworks_style_has_no_fault(role, right):
    report = examine(right, role, right.__name__)
    assert report.errors == []
    assert report.matches is not None


@pytest.mark.parametrize("right", DECODERS, ids=lambda f: f.__name__)
def test_a_right_decoder_has_no_fault(right):
    assert examine_decode(right, "right", []).findings == []


@pytest.mark.parametrize("right", COLLATORS, ids=lambda f: f.__name__)
def test_a_right_collator_has_no_fault(right):
    assert examine_collate(right, "right", []).findings == []


@pytest.mark.parametrize("right", REWARDS, ids=lambda f: f.__name__)
def test_a_right_reward_has_no_fault(right):
    assert examine_reward(right, "right", [], None).errors == []


def test_every_mutation_of_the_library_is_planted():
    for role, mutations in TENSOR_MUTATIONS.items():
        assert {mutation.name for mutation in mutations} == {"loss": LOSSES, **PLANTED}[role].keys()
    assert {mutation.name for mutation in decoding.MUTATIONS} == WRONG_DECODERS.keys()
    assert {mutation.name for mutation in collating.MUTATIONS} == WRONG_COLLATORS.keys()
