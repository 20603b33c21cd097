import time

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from leadline.materials import judge as judging
from leadline.materials.compounds import COMPOUNDS, ELEMENTS
from leadline.materials.judge import TAGS, gap_after, gap_of, judge
from leadline.materials.modification import UNREADABLE, Fault, Refusal, Strain, Swap


def completion(modification: str, hypothesis: str = "raises the gap") -> str:
    return f"<hypothesis>{hypothesis}</hypothesis><modification>{modification}</modification>"


def test_a_right_proposal_has_a_gap_a_change_and_a_claim() -> None:
    verdict = judge("GaAs", completion("substitute Ga -> Al 0.25", "Al raises the gap by 0.4 eV"))
    assert verdict.parsed
    assert verdict.physical
    assert verdict.claim == 1
    assert verdict.gap == pytest.approx(gap_of("GaAs") + verdict.change)
    assert 0.3 < verdict.change < 0.5


@pytest.mark.parametrize(
    ("text", "claim"),
    [
        ("It Raises the gap.", 1),
        ("lowers it", -1),
        ("lower by 0.1 eV, lower than before", -1),
        ("raises or lowers it", None),
        ("praise the gap", None),
        ("", None),
    ],
)
def test_the_claim_is_the_one_direction_that_the_hypothesis_names(text: str, claim: int | None) -> None:
    assert judge("GaAs", completion("swap GaAs -> InP", text)).claim == claim


@pytest.mark.parametrize(
    "text",
    [
        "",
        "swap GaAs -> InP",
        "<modification>swap GaAs -> InP</modification>",
        "<hypothesis>raises</hypothesis><modification>swap GaAs -> InP",
        "<modification>swap GaAs -> InP</modification><hypothesis>raises</hypothesis>",
        completion("swap GaAs -> InP") * 2,
        completion("swap GaAs -> InP") + " as asked",
        completion("<modification>swap GaAs -> InP</modification>"),
        "raises the gapswap GaAs -> InP",  # what is left when special tokens are stripped
    ],
)
def test_a_completion_that_is_not_one_hypothesis_and_one_modification_in_their_tags_does_not_parse(text: str) -> None:
    assert judge("GaAs", text).fault is Fault.TAGS


@pytest.mark.parametrize(
    ("modification", "fault"),
    [
        ("anneal", Fault.GRAMMAR),
        ("swap GaAs -> AlSb", Fault.UNKNOWN),
        ("strain +9%", Fault.OUT_OF_RANGE),
        ("substitute Ga -> Zn 0.5", Fault.NO_COMPOUND),
    ],
)
def test_what_is_wrong_with_a_proposal_is_its_fault(modification: str, fault: Fault) -> None:
    verdict = judge("GaAs", completion(modification))
    assert (verdict.fault, verdict.gap, verdict.change) == (fault, None, None)
    assert verdict.parsed == (fault not in UNREADABLE)
    assert not verdict.physical


def test_a_strain_that_closes_the_gap_leaves_no_semiconductor() -> None:
    assert judge("InSb", completion("strain +4%")).fault is Fault.METAL


def test_a_calculation_that_does_not_end_or_fails_is_a_fault_and_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers: list[object] = [TimeoutError("no result within 2 s"), RuntimeError("the process died"), 1.9]

    def child(material: str, modification: str) -> object:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(judging, "_in_child", child)
    proposal = completion("substitute Ga -> Al 0.1234")  # nobody else has asked for it
    assert [judge("GaAs", proposal).fault for _ in range(3)] == [Fault.NOT_CONVERGED, Fault.NOT_CONVERGED, None]
    assert answers == []
    judging._judged.cache_clear()


def test_eigenvalues_that_do_not_converge_are_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(parameters: object) -> None:
        raise np.linalg.LinAlgError("Eigenvalues did not converge")

    monkeypatch.setattr(judging, "band_gap", fail)
    with pytest.raises(Refusal) as refused:
        gap_after("GaAs", Strain(0.123))
    assert refused.value.fault is Fault.NOT_CONVERGED


words = st.sampled_from(
    [*TAGS, *sorted(ELEMENTS), *COMPOUNDS, "substitute", "swap", "strain", "->", "0.25", "+1.5%", "raises", " ", "\n"]
)
texts = st.lists(st.one_of(words, words, st.text(max_size=4)), max_size=14).map(" ".join)
numbers = st.from_regex(r"[+-]?[0-9]{0,12}\.?[0-9]{0,12}%?", fullmatch=True)
modifications = st.one_of(
    st.builds(
        "substitute {} -> {} {}".format, st.sampled_from(sorted(ELEMENTS)), st.sampled_from(sorted(ELEMENTS)), numbers
    ),
    st.builds("swap {} -> {}".format, st.sampled_from(sorted(COMPOUNDS)), st.sampled_from(sorted(COMPOUNDS))),
    st.builds("strain {}".format, numbers),
    texts,
)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(COMPOUNDS)), st.one_of(texts, modifications.map(completion)))
@example("GaAs", completion("strain +" + "9" * 100_000 + "%"))
@example("GaAs", "<hypothesis>" * 20_000)
@example("GaAs", "\ud800" + completion("swap GaAs -> InP"))
def test_whatever_is_written_has_a_verdict(material: str, text: str) -> None:
    started = time.process_time()
    verdict = judge(material, text)
    assert time.process_time() - started < 0.5
    assert (verdict.gap is None) == (verdict.fault is not None)
    assert verdict.gap is None or 0 < verdict.gap < 6


def test_remembered_verdicts_come_by_the_thousand_a_second() -> None:
    proposals = [completion(str(Swap("GaAs", name))) for name in COMPOUNDS] * 100
    for proposal in proposals[: len(COMPOUNDS)]:
        judge("GaAs", proposal)
    started = time.process_time()
    for proposal in proposals:
        judge("GaAs", proposal)
    assert len(proposals) / (time.process_time() - started) > 1000
