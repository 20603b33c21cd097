"""What may be done to a compound, how it is written, and what crystal comes of it.

    substitute Ga -> Al 0.25    a quarter of the gallium sites now hold aluminium
    swap GaAs -> InP            another compound of the table
    strain +1.5%                every length is 1.5 % larger

An alloy is taken in the virtual-crystal approximation: its parameters are the weighted means of those of its two
compounds. No bowing is added: what the gap's curve over the composition has of it comes from the Hamiltonian.

Under strain, equal in all directions, transfer integrals go as the inverse square of the bond length d
(W. A. Harrison, Electronic Structure and the Properties of Solids, Freeman 1980): V -> V (d / d0)^-2, and the energies
of the orbitals stay.
"""

import re
from dataclasses import dataclass
from enum import StrEnum

from leadline.materials.compounds import COMPOUNDS, ELEMENTS, Compound, Parameters, compound_of

MOST_STRAIN = 4.0
"""In percent. Coherent epitaxial layers of these crystals reach about as much; beyond, they relax or break."""

MOST_MISMATCH = 0.15
"""Of lattice constants. Elements of sizes that differ by more form no solid solution (Hume-Rothery's rule)."""


class Fault(StrEnum):
    """Why a proposal has no band gap."""

    TAGS = "tags"
    """The completion is not one hypothesis and one modification, each in its tags."""
    GRAMMAR = "grammar"
    """The modification is none of the three forms."""
    UNKNOWN = "unknown"
    """An element or a compound of which nothing is known here."""
    NOTHING_CHANGES = "nothing_changes"
    """The result is the starting material."""
    WRONG_MATERIAL = "wrong_material"
    """What is to be replaced is not there."""
    OUT_OF_RANGE = "out_of_range"
    """A fraction above 1, or a strain beyond `MOST_STRAIN`."""
    NO_COMPOUND = "no_compound"
    """The new element forms no semiconductor of the table with the other one."""
    IMMISCIBLE = "immiscible"
    """The two compounds differ by more than `MOST_MISMATCH` in size."""
    METAL = "metal"
    """The gap is closed."""
    NOT_CONVERGED = "not_converged"
    """No eigenvalues, or not within the time limit."""


UNREADABLE = frozenset({Fault.TAGS, Fault.GRAMMAR})
"""Faults of the text; all others are of the physics."""


class Refusal(Exception):
    """A proposal that cannot be evaluated, and why. Rewards turn it into a number; nobody else sees it."""

    def __init__(self, fault: Fault, reason: str) -> None:
        super().__init__(reason)
        self.fault = fault


@dataclass(frozen=True, slots=True)
class Substitute:
    """A share of the sites of one element holds another."""

    old: str
    new: str
    fraction: float

    def __str__(self) -> str:
        return f"substitute {self.old} -> {self.new} {self.fraction:g}"


@dataclass(frozen=True, slots=True)
class Swap:
    """Another compound."""

    old: str
    new: str

    def __str__(self) -> str:
        return f"swap {self.old} -> {self.new}"


@dataclass(frozen=True, slots=True)
class Strain:
    """All lengths grow by so many percent."""

    percent: float

    def __str__(self) -> str:
        return f"strain {self.percent:+g}%"


Modification = Substitute | Swap | Strain

_SUBSTITUTE = re.compile(r"substitute ([A-Z][a-z]?) -> ([A-Z][a-z]?) ([01]\.\d{1,4})", re.ASCII)
_SWAP = re.compile(r"swap ([A-Za-z]{1,8}) -> ([A-Za-z]{1,8})", re.ASCII)
_STRAIN = re.compile(r"strain ([+-]\d{1,2}(?:\.\d{1,4})?)%", re.ASCII)


def parse(text: str) -> Modification:
    """The modification that `text` states to the letter, blanks around it apart. Raises Refusal: GRAMMAR."""
    text = text.strip()
    if found := _SUBSTITUTE.fullmatch(text):
        return Substitute(found[1], found[2], float(found[3]))
    if found := _SWAP.fullmatch(text):
        return Swap(found[1], found[2])
    if found := _STRAIN.fullmatch(text):
        return Strain(float(found[1]))
    raise Refusal(Fault.GRAMMAR, f"{text[:80]!r} is neither a substitution, a swap nor a strain")


def modified(compound: Compound, modification: Modification) -> Parameters:
    """The parameters of the crystal that comes of it. Raises Refusal with a fault of the physics."""
    match modification:
        case Substitute():
            return _alloy(compound, modification)
        case Swap():
            return _swapped(compound, modification)
        case Strain():
            return _strained(compound.parameters, modification.percent)


def _alloy(compound: Compound, change: Substitute) -> Parameters:
    if not {change.old, change.new} <= ELEMENTS:
        raise Refusal(Fault.UNKNOWN, f"{change.old} or {change.new} is in no compound of the table")
    if change.old not in (compound.cation, compound.anion):
        raise Refusal(Fault.WRONG_MATERIAL, f"{compound.name} has no {change.old}")
    if change.old == change.new or change.fraction == 0:
        raise Refusal(Fault.NOTHING_CHANGES, f"{change} leaves {compound.name} as it is")
    if change.fraction > 1:
        raise Refusal(Fault.OUT_OF_RANGE, f"{change.fraction:g} is more than all of the {change.old}")
    sites = (change.new if element == change.old else element for element in (compound.cation, compound.anion))
    end = compound_of(*sites)
    if end is None:
        raise Refusal(Fault.NO_COMPOUND, f"{change.new} for {change.old} in {compound.name} gives none of the table")
    smaller, larger = sorted((compound.lattice_constant, end.lattice_constant))
    if larger / smaller - 1 > MOST_MISMATCH:
        raise Refusal(Fault.IMMISCIBLE, f"{compound.name} and {end.name} differ by {larger / smaller - 1:.0%} in size")
    pairs = zip(compound.parameters, end.parameters, strict=True)
    return Parameters(*((1 - change.fraction) * before + change.fraction * after for before, after in pairs))


def _swapped(compound: Compound, change: Swap) -> Parameters:
    if not {change.old, change.new} <= COMPOUNDS.keys():
        raise Refusal(Fault.UNKNOWN, f"{change.old} or {change.new} is not in the table")
    if change.old != compound.name:
        raise Refusal(Fault.WRONG_MATERIAL, f"the material is {compound.name}, not {change.old}")
    if change.new == compound.name:
        raise Refusal(Fault.NOTHING_CHANGES, f"{change} leaves {compound.name} as it is")
    return COMPOUNDS[change.new].parameters


def _strained(parameters: Parameters, percent: float) -> Parameters:
    if percent == 0:
        raise Refusal(Fault.NOTHING_CHANGES, "a strain of 0 % changes nothing")
    if abs(percent) > MOST_STRAIN:
        raise Refusal(Fault.OUT_OF_RANGE, f"a strain of {percent:+g} % is beyond {MOST_STRAIN:g} %")
    scale = (1 + percent / 100) ** -2
    transfer = {name: scale * value for name, value in parameters._asdict().items() if name not in _ORBITALS}
    return parameters._replace(**transfer)


_ORBITALS = frozenset({"s_a", "p_a", "s_c", "p_c", "excited_a", "excited_c"})
"""Parameters of one atom; the others are transfer integrals."""
