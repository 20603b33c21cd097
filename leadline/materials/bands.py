"""Band structure and band gap of a zinc-blende crystal from its sp3s* parameters."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from leadline.materials.compounds import Parameters

Floats = NDArray[np.floating[Any]]

OCCUPIED = 4
"""Bands that eight electrons a cell fill, two each."""

GAMMA, X, L = (0.0, 0.0, 0.0), (0.0, 0.0, 1.0), (0.5, 0.5, 0.5)
"""Points of the Brillouin zone in units of 2 pi / lattice constant."""

POINTS_A_LINE = 48
"""Near its minimum on the line to X a conduction band is parabolic: such a step misses it by less than 1 meV."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Lowest empty energy less highest filled one."""

    energy: float
    """In eV; at most 0 for a metal."""
    direct: bool
    """Both lie at the same point of the Brillouin zone."""


def band_energies(parameters: Parameters, points: Floats) -> Floats:
    """[point, band], in eV, ascending: the ten bands at `points` ([point, 3], in units of 2 pi / lattice constant).

    Raises numpy.linalg.LinAlgError if the eigenvalues do not converge.
    """
    return np.linalg.eigvalsh(_hamiltonian(parameters, np.asarray(points, dtype=float)))


def band_gap(parameters: Parameters) -> Gap:
    """The gap on the lines from Gamma to X, to L, and through K to X, where band edges of these crystals lie.

    Raises numpy.linalg.LinAlgError if the eigenvalues do not converge.
    """
    energies = band_energies(parameters, _LINES)
    filled, empty = energies[:, OCCUPIED - 1], energies[:, OCCUPIED]
    same_place = np.allclose(_LINES[filled.argmax()], _LINES[empty.argmin()])
    return Gap(energy=float(empty.min() - filled.max()), direct=same_place)


def _hamiltonian(p: Parameters, points: Floats) -> NDArray[np.complex128]:
    """[point, 10, 10] in the basis s, x, y, z, excited s of the anion, then of the cation (Vogl et al. 1983, table A)."""
    g0, g1, g2, g3 = _bond_sums(points)
    nothing = np.zeros_like(g0)
    between = [
        [p.s_s * g0, p.s_p * g1, p.s_p * g2, p.s_p * g3, nothing],
        [-p.p_s * g1, p.x_x * g0, p.x_y * g3, p.x_y * g2, -p.p_excited * g1],
        [-p.p_s * g2, p.x_y * g3, p.x_x * g0, p.x_y * g1, -p.p_excited * g2],
        [-p.p_s * g3, p.x_y * g2, p.x_y * g1, p.x_x * g0, -p.p_excited * g3],
        [nothing, p.excited_p * g1, p.excited_p * g2, p.excited_p * g3, nothing],
    ]
    block = np.moveaxis(np.array(between), -1, 0)
    hamiltonian = np.zeros((len(points), 10, 10), dtype=np.complex128)
    hamiltonian[:, :5, 5:] = block
    hamiltonian[:, 5:, :5] = block.conj().transpose(0, 2, 1)
    diagonal = [p.s_a, *[p.p_a] * 3, p.excited_a, p.s_c, *[p.p_c] * 3, p.excited_c]
    hamiltonian[:, range(10), range(10)] = diagonal
    return hamiltonian


def _bond_sums(points: Floats) -> tuple[NDArray[np.complex128], ...]:
    """Phases of the four bonds of an anion, summed with the signs with which s, x, y and z orbitals meet them."""
    bonds = np.array([[1, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]])
    phases = np.exp(0.5j * np.pi * points @ bonds.T)  # [point, bond]; a bond is (1, 1, 1) / 4 of the lattice constant
    signs = np.column_stack([np.ones(4), bonds])
    return tuple((phases @ signs / 4).T)


def _line(end: tuple[float, float, float]) -> Floats:
    return np.linspace(GAMMA, end, POINTS_A_LINE)


_LINES = np.concatenate([_line(X), _line(L), _line((1.0, 1.0, 0.0))])  # K is at (0.75, 0.75, 0), the end is again an X
