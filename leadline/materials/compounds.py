"""Thirteen semiconductors: sp3s* tight-binding parameters and lattice constants.

Parameters: P. Vogl, H. P. Hjalmarson, J. D. Dow, A semi-empirical tight-binding theory of the electronic structure of
semiconductors, J. Phys. Chem. Solids 44 (1983) 365, table 1; without spin-orbit coupling, at low temperature. The paper
chose them so that energies at Gamma and X, given to 0.01 eV, come out exactly: a misprint shows, and the tests look.
AlSb and ZnTe are left out, for their printed parameters miss those energies (gaps of 1.88 and 4.05 eV), and tin,
which has no gap.

Lattice constants at room temperature, in angstrom: I. Vurgaftman, J. R. Meyer, L. R. Ram-Mohan, J. Appl. Phys. 89 (2001)
5815 for III-V compounds; O. Madelung (ed.), Semiconductors: Data Handbook, Springer 2004, for the others.
"""

from dataclasses import dataclass
from typing import NamedTuple


class Parameters(NamedTuple):
    """Energies of orbitals and transfer integrals between nearest neighbours, in eV; a is the anion, c the cation.

    Of two transfer integrals s_p and p_s the first names the orbital of the anion, the second that of the cation.
    """

    s_a: float
    p_a: float
    s_c: float
    p_c: float
    excited_a: float
    excited_c: float
    s_s: float
    x_x: float
    x_y: float
    s_p: float
    p_s: float
    excited_p: float
    p_excited: float


@dataclass(frozen=True, slots=True)
class Compound:
    """A zinc-blende (or, with equal elements, diamond) crystal.

    Example:
        COMPOUNDS["GaAs"].cation == "Ga"
    """

    name: str
    cation: str
    anion: str
    lattice_constant: float
    """Edge of the cubic cell, in angstrom."""
    parameters: Parameters


_TABLE = """
C    C  C   3.5668  -4.5450 3.8400 -4.5450 3.8400 11.3700 11.3700 -22.7250 3.8400 11.6700 15.2206 15.2206 8.2109 8.2109
Si   Si Si  5.4310  -4.2000 1.7150 -4.2000 1.7150  6.6850  6.6850  -8.3000 1.7150  4.5750  5.7292  5.7292 5.3749 5.3749
Ge   Ge Ge  5.6579  -5.8800 1.6100 -5.8800 1.6100  6.3900  6.3900  -6.7800 1.6100  4.9000  5.4649  5.4649 5.2191 5.2191
SiC  Si C   4.3596  -8.4537 2.1234 -4.8463 4.3466  9.6534  9.3166 -12.4197 3.0380  5.9216  9.4900  9.2007 8.7138 4.4051
AlP  Al P   5.4672  -7.8466 1.3169 -1.2534 4.2831  8.7069  7.4231  -7.4535 2.3749  4.8378  5.2451  5.2775 5.2508 4.6388
AlAs Al As  5.6611  -7.5273 0.9833 -1.1627 3.5867  7.4833  6.7267  -6.6642 1.8780  4.2919  5.1106  5.4965 4.5216 4.9950
GaP  Ga P   5.4505  -8.1124 1.1250 -2.1976 4.1150  8.5150  7.1850  -7.4709 2.1516  5.1369  4.2771  6.3190 4.6541 5.0950
GaAs Ga As  5.6533  -8.3431 1.0414 -2.6569 3.6686  8.5914  6.7386  -6.4513 1.9546  5.0779  4.4800  5.7839 4.8422 4.8077
GaSb Ga Sb  6.0959  -7.3207 0.8554 -3.8993 2.9146  6.6354  5.9846  -6.1567 1.5789  4.1285  4.9601  4.6675 4.9895 4.2180
InP  In P   5.8697  -8.5274 0.8735 -1.4826 4.0465  8.2635  7.0665  -5.3614 1.8801  4.2324  2.2265  5.5825 3.4623 4.4814
InAs In As  6.0583  -9.5381 0.9099 -2.7219 3.7201  7.4099  6.7401  -5.6052 1.8398  4.4693  3.0354  5.4389 3.3744 3.9097
InSb In Sb  6.4794  -8.0157 0.6738 -3.4643 2.9162  6.4530  5.9362  -5.5193 1.4018  3.8761  3.7880  4.5900 3.5666 3.4048
ZnSe Zn Se  5.6676 -11.8383 1.5072  0.0183 5.9928  7.5872  8.9928  -6.2163 3.0054  5.9942  3.4980  6.3191 2.5891 3.9533
"""


def _read(line: str) -> Compound:
    name, cation, anion, lattice_constant, *parameters = line.split()
    return Compound(name, cation, anion, float(lattice_constant), Parameters(*map(float, parameters)))


COMPOUNDS: dict[str, Compound] = {compound.name: compound for compound in map(_read, _TABLE.strip().splitlines())}
"""By name."""

ELEMENTS = frozenset(element for compound in COMPOUNDS.values() for element in (compound.cation, compound.anion))
"""Symbols of every element that is in a compound."""


def compound_of(cation: str, anion: str) -> Compound | None:
    """The compound of these two elements; None if the table has none."""
    return next((c for c in COMPOUNDS.values() if (c.cation, c.anion) == (cation, anion)), None)
