"""What the physics says of a completion. It never raises: whatever a model writes has a verdict."""

import re
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from leadline.materials.bands import band_gap
from leadline.materials.compounds import COMPOUNDS
from leadline.materials.modification import UNREADABLE, Fault, Modification, Refusal, modified, parse
from leadline.rewards.isolated import Isolated

TAGS = ("<hypothesis>", "</hypothesis>", "<modification>", "</modification>")
"""In their order. The recipe makes each one token of the tokenizer."""

CACHED = 65_536
"""Modifications of materials whose gap is remembered: about all that the grammar allows with two digits."""

_PROPOSAL = re.compile(r"\s*{}([^<]*){}\s*{}([^<]*){}\s*".format(*TAGS))
_CLAIM = re.compile(r"\b(raise|lower)s?\b", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of one completion.

    Example:
        Verdict(fault=None, gap=1.92, change=0.37, claim=1)
    """

    fault: Fault | None = None
    gap: float | None = None
    """After the modification, in eV; None with a fault."""
    change: float | None = None
    """Gap after less gap before, in eV."""
    claim: int | None = None
    """What the hypothesis says of the sign of the change: 1 raises, -1 lowers, None neither or both."""

    @property
    def parsed(self) -> bool:
        return self.fault not in UNREADABLE

    @property
    def physical(self) -> bool:
        return self.fault is None


def judge(material: str, completion: str) -> Verdict:
    """The verdict on `completion`, a proposal to change `material` (the name of a compound)."""
    proposal = _PROPOSAL.fullmatch(completion)
    if proposal is None:
        return Verdict(Fault.TAGS)
    claim = _claim(proposal[1])
    try:
        gap = _gap(material, str(parse(proposal[2])))
    except Refusal as refusal:
        return Verdict(refusal.fault, claim=claim)
    return Verdict(gap=gap, change=gap - gap_of(material), claim=claim)


@lru_cache
def gap_of(material: str) -> float:
    """The band gap of the compound, in eV."""
    return band_gap(COMPOUNDS[material].parameters).energy


@lru_cache(CACHED)
def gap_after(material: str, modification: Modification) -> float:
    """The band gap of the modified compound, in eV. Raises Refusal: it has none."""
    try:
        energy = band_gap(modified(COMPOUNDS[material], modification)).energy
    except np.linalg.LinAlgError as error:
        raise Refusal(Fault.NOT_CONVERGED, str(error)) from error
    if energy <= 0:
        raise Refusal(Fault.METAL, f"{modification} closes the gap of {material}")
    return energy


def gap_or_fault(material: str, modification: str) -> float | Fault:
    """`gap_after` for the process that scores: the fault is returned, for an exception would lose its kind."""
    try:
        return gap_after(material, parse(modification))
    except Refusal as refusal:
        return refusal.fault


_in_child = Isolated("leadline.materials.judge:gap_or_fault", timeout_s=2.0)


@lru_cache(CACHED)
def _judged(material: str, modification: str) -> float | Fault:
    return _in_child(material, modification)  # type: ignore[no-any-return]


def _gap(material: str, modification: str) -> float:
    try:
        outcome = _judged(material, modification)
    except (TimeoutError, RuntimeError) as error:  # not remembered: the next time the machine may be less busy
        raise Refusal(Fault.NOT_CONVERGED, str(error)) from error
    if isinstance(outcome, Fault):
        raise Refusal(outcome, f"{modification} of {material}: {outcome}")
    return outcome


def _claim(hypothesis: str) -> int | None:
    words = {word.lower() for word in _CLAIM.findall(hypothesis)}
    if len(words) != 1:
        return None
    return 1 if words == {"raise"} else -1
