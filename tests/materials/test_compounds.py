import numpy as np
import pytest

from leadline.materials.bands import GAMMA, X, band_energies
from leadline.materials.compounds import COMPOUNDS, ELEMENTS, Compound, compound_of

EVERY = pytest.mark.parametrize("compound", COMPOUNDS.values(), ids=COMPOUNDS)


@EVERY
def test_the_energies_that_the_paper_chose_come_out_as_it_states_them_to_a_hundredth(compound: Compound) -> None:
    # All levels at Gamma but those of the excited orbitals, and X_5v, X_1c, X_3c (one level where the atoms are equal):
    # a digit that is misread moves at least one of them off the grid.
    p = compound.parameters
    gamma, x = (np.unique(bands.round(3)) for bands in band_energies(p, np.array([GAMMA, X])))
    excited = {round(energy, 3) for energy in (p.excited_a, p.excited_c)}
    chosen = [level for level in gamma if level not in excited] + list(x[1:3] if p.s_a == p.s_c else x[2:5])
    assert len(chosen) == (6 if p.s_a == p.s_c else 7)
    assert max(abs(level - round(level, 2)) for level in chosen) <= 0.0011
    assert abs(gamma).min() == 0  # the top of the valence band


@EVERY
def test_a_compound_has_the_elements_of_its_name_and_a_crystal_of_equal_elements_equal_sites(
    compound: Compound,
) -> None:
    p = compound.parameters
    assert compound.name in (compound.cation + compound.anion, compound.cation)
    assert compound_of(compound.cation, compound.anion) is compound
    if compound.cation == compound.anion:
        assert (p.s_a, p.p_a, p.excited_a, p.s_p, p.excited_p) == (p.s_c, p.p_c, p.excited_c, p.p_s, p.p_excited)


def test_what_is_not_in_the_table_is_no_compound() -> None:
    assert len(COMPOUNDS) == 13
    assert compound_of("As", "Ga") is None
    assert compound_of("Zn", "As") is None
    assert {"Zn", "Sb", "C"} < ELEMENTS
