"""Really induced causes, each of which the probe must name first: on one architecture each, in turn, and the noise of all.

`python benchmarks/probe_causes.py` induces every cause on every architecture.
"""

from dataclasses import replace
from itertools import cycle

import pytest

from leadline.probes.engine.attribute import attribute
from leadline.probes.engine.variants import Holding
from tests.probes.engine.architectures import FAMILIES, architecture, holding, moved
from tests.probes.engine.induced import COMMON, EVERYWHERE, HOT, SPECIAL, Make, Seam, drawn_across, probed, raw

IN_TURN = [(name, family, *EVERYWHERE[name]) for name, family in zip(EVERYWHERE, cycle(COMMON), strict=False)]
CASES = [*IN_TURN, *((name, family, cause, make) for name, (family, cause, make) in SPECIAL.items())]


@pytest.mark.parametrize(("name", "family", "cause", "make"), CASES, ids=[f"{case[0]}, {case[1]}" for case in CASES])
def test_an_induced_cause_is_named_first(name: str, family: str, cause: str, make: Make) -> None:
    seam = make(architecture(family))
    found = attribute(drawn_across(seam), probed(seam))
    assert found.verdict.cause == cause
    assert (found.verdict.cause == "noise") == (found.gap.mean_abs <= found.rounding.floor)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_right_engine_is_said_to_be_right_on_every_architecture(family: str) -> None:
    seam = Seam(architecture(family))
    found = attribute(drawn_across(seam), probed(seam))
    assert found.verdict.cause == "noise"
    assert found.gap.mean_abs < 1e-5
    assert not found.fits  # nothing was tried, for nothing is to be explained


def test_two_causes_at_once_are_both_named() -> None:
    loaded = architecture("llama")
    old = moved(loaded, 1)
    served = replace(loaded, model=holding(loaded, old))
    seam = Seam(
        loaded,
        asked=HOT,
        model=served.model,
        report=raw(served),
        known={"others": (Holding("of an older step", old),)},
    )
    found = attribute(drawn_across(seam), probed(seam))
    assert (found.verdict.cause, found.verdict.second) == ("stale_weights", "raw_logprobs")


def test_a_cause_is_named_through_the_noise_of_a_half_precision_engine() -> None:
    for name in ("temperature 0.7 for 1", "top_p 0.9", "old weights", "end of the prompt missing"):
        cause, make = EVERYWHERE[name]
        seam = replace(make(architecture("qwen3")), dtype="bfloat16")
        assert attribute(drawn_across(seam), probed(seam)).verdict.cause == cause


def test_a_gap_that_nothing_explains_is_said_to_be_unexplained() -> None:
    loaded = architecture("llama")
    seam = Seam(loaded, model=holding(loaded, moved(loaded, 1)))  # and the probe is not told of these weights
    found = attribute(drawn_across(seam), probed(seam))
    assert found.verdict.cause == "unexplained"
    assert any("--older" in line for line in found.not_checked)
