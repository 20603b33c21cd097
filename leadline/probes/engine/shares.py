"""The gap in three numbers that call for three different things: numerics, staleness, and a bug."""

from dataclasses import dataclass

from leadline.probes.engine.attribute import Attribution

ROUNDING = ("noise", "dtype", "moe_routing", "weights_rounded")
STALE = ("stale_weights", "staleness")


@dataclass(frozen=True, slots=True)
class Shares:
    """Parts of mean |Delta| in nats a token; they add up to it."""

    numerics: float
    """Rounding: the same weights in other kernels or another dtype. Corrected by token weights."""
    staleness: float
    """The weights that drew the tokens are older than those that score them. Corrected by rollout weights."""
    bug: float
    """What neither explains. Corrected by nothing: mend it."""


def shares(found: Attribution) -> Shares:
    """The gap of an attribution, divided by its verdict."""
    total, left = found.gap.mean_abs, found.verdict.left
    if found.verdict.cause in ROUNDING:
        return Shares(total, 0.0, 0.0)
    if found.verdict.cause in STALE and found.youngest is not None:
        return Shares(min(found.youngest, total), max(0.0, total - found.youngest), 0.0)
    rounding = min(left, total, max(found.rounding.floor, *found.rounding.by_dtype.values(), 0.0))
    named = max(0.0, total - left)
    if found.verdict.cause in STALE:
        return Shares(rounding, named, total - named - rounding)
    return Shares(rounding, 0.0, total - rounding)
