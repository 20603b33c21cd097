"""Which hypothesis closes the gap, and whether any does.

The measure is counterfactual. With Delta = trainer - engine, a hypothesis predicts the engine's logprobs e, so it says
that Delta is trainer - e. What it leaves is r = e - engine, and it explains 1 - sum r^2 / sum Delta^2 of the gap. Rounding
that both sides share hides a small effect in that number, not in the slope of Delta on trainer - e, which is 1 for a
true hypothesis whatever the noise.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from leadline.probes.engine.causes import ORDER, Hypothesis
from leadline.probes.engine.gap import Gap

FLOAT32_FLOOR = 1e-4
"""Mean |Delta| in nats below which float32 on both sides has nothing to answer for: 2e-6 to 8e-6 on 22 architectures."""
NOISE_FACTOR = 3.0
"""Rounding of two implementations may differ by so much from that of one."""
NOISE_ONE_SIDED = 0.35
"""Rounding errs to both sides: 0 to 0.1 of |mean| / mean |Delta| in bfloat16."""
ENOUGH, ENOUGH_FITTED, ENOUGH_EXACT = 0.5, 0.8, 0.9
"""Share of the gap that a hypothesis must explain to be named; more if a number in it was fitted."""
LEFT_FITTED, LEFT_EXACT = 0.3, 0.1
"""... and of mean |Delta| at most so much may be left."""
EXACT = ("off_by_one", "scaled_logprobs", "probabilities", "weights_rounded")
"""Met to the last digits or not at all: some scale explains 90 % of any large gap to other weights, for most of it is that
the trainer finds the tokens unlikely; and rounded weights explain half of what an engine in half precision does."""
SLOPE_TOLERANCE, SLOPE_SIGMAS, SLOPE_Z = 0.15, 4.0, 6.0
ROUNDED = ("dtype", "weights_rounded")
"""Hypotheses that are no fault where such rounding is accepted."""
ALIKE = 0.02
"""Hypotheses whose explained shares differ by less are equal; the simpler is named."""
ROUTING_TAIL = 0.5
"""In a mixture of experts: share of the squared gap in 5 % of the tokens from which it is routing. It is 0.29 for errors
of a normal distribution, 0.3 of dense models in bfloat16, 0.55 and 0.81 of two small mixtures."""


@dataclass(frozen=True, slots=True)
class Fit:
    """How well one hypothesis explains the gap."""

    cause: str
    detail: str
    explained: float
    """1 - sum r^2 / sum Delta^2, at most 1; below 0 it makes the gap larger."""
    slope: float
    slope_error: float
    left: float
    """mean |r| in nats."""
    before: float
    """mean |Delta| on the same tokens."""
    tokens: int
    fitted: bool = False
    second: str = ""

    @property
    def fits(self) -> bool:
        """The effect is there in the size that the hypothesis says, beyond chance, and it is most of the gap."""
        off = max(SLOPE_TOLERANCE, SLOPE_SIGMAS * self.slope_error)
        if not (abs(self.slope - 1) <= off and self.slope >= SLOPE_Z * self.slope_error):
            return False
        if self.cause in EXACT:
            return self.explained >= ENOUGH_EXACT and self.left <= LEFT_EXACT * self.before
        if self.fitted:
            return self.explained >= ENOUGH_FITTED and self.left <= LEFT_FITTED * self.before
        return self.explained >= ENOUGH


@dataclass(frozen=True, slots=True)
class Rounding:
    """Mean |Delta| in nats that rounding alone makes, by dtype, measured on these tokens with this model."""

    by_dtype: dict[str, float] = field(default_factory=dict)
    accepted: str = "float32"
    """The coarsest dtype that trainer and engine are known to compute in."""

    @property
    def floor(self) -> float:
        """The largest mean |Delta| that needs no explanation."""
        return max(FLOAT32_FLOOR, NOISE_FACTOR * self.by_dtype.get(self.accepted, 0.0))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is named, and why."""

    cause: str
    detail: str
    explained: float
    """Share of the gap; NaN where the cause is told by its marks and not by an experiment."""
    left: float
    """mean |r| in nats after it."""
    second: str = ""


def fit(hypothesis: Hypothesis, engine: Tensor, trainer: Tensor) -> Fit | None:
    """How well the hypothesis explains the gap; None if it says nothing on at least 8 scored tokens."""
    both = engine.isfinite() & trainer.isfinite() & hypothesis.predicted.isfinite()
    if int(both.sum()) < 8:
        return None
    delta = (trainer - engine)[both].double()
    claimed = (trainer - hypothesis.predicted)[both].double()
    rest = delta - claimed
    squares, claimed_squares = float(delta.square().sum()), float(claimed.square().sum())
    slope = float((delta * claimed).sum()) / claimed_squares if claimed_squares else 0.0
    noise = float((delta - slope * claimed).square().mean())
    return Fit(
        hypothesis.cause,
        hypothesis.detail,
        explained=1 - float(rest.square().sum()) / squares if squares else 0.0,
        slope=slope,
        slope_error=math.sqrt(noise / claimed_squares) if claimed_squares else math.inf,
        left=float(rest.abs().mean()),
        before=float(delta.abs().mean()),
        tokens=int(both.sum()),
        fitted=hypothesis.fitted,
        second=hypothesis.second,
    )


def ranked(fits: Sequence[Fit]) -> list[Fit]:
    """The best first: those that fit before those that do not; of equals the simplest."""

    def key(one: Fit) -> tuple[bool, int, bool, int, float]:
        return (not one.fits, -round(one.explained / ALIKE), bool(one.second), ORDER[one.cause], -one.explained)

    return sorted(fits, key=key)


def settled(fits: Sequence[Fit], rounding: Rounding) -> bool:
    """Whether one of them closes the gap to what rounding leaves, so that no other need be tried."""
    best = ranked(fits)[:1]
    return bool(best and best[0].fits and (best[0].left <= rounding.floor or best[0].explained > 0.98))


def is_noise(gap: Gap, rounding: Rounding) -> bool:
    """Whether rounding alone makes such a gap."""
    if gap.mean_abs <= FLOAT32_FLOOR:
        return True
    return gap.mean_abs <= rounding.floor and gap.one_sided <= NOISE_ONE_SIDED


def judge(gap: Gap, fits: Sequence[Fit], rounding: Rounding, *, experts: bool) -> Verdict:
    """The cause that the evidence names; `noise` and `unexplained` are answers too."""
    noise = is_noise(gap, rounding)
    named = [one for one in ranked(fits) if one.fits and not (noise and one.cause in ROUNDED)]
    best = named[0] if named else None
    rounded = _as_rounding(gap, rounding)
    if experts and gap.tail >= ROUTING_TAIL and rounded and (best is None or best.cause == "dtype"):
        detail = f"5 % of the tokens hold {gap.tail:.0%} of the squared gap"
        return Verdict("moe_routing", detail, math.nan, gap.median_abs)
    if best is not None and gap.mean_abs > FLOAT32_FLOOR:
        return Verdict(best.cause, best.detail, best.explained, best.left, best.second)
    if noise:
        return Verdict("noise", f"mean |Δ| {gap.mean_abs:.2g}, floor {rounding.floor:.2g} nats", math.nan, gap.mean_abs)
    if rounded:
        detail = f"as large as {rounded} rounding of this model: {rounding.by_dtype[rounded]:.2g} nats a token here"
        return Verdict("dtype", detail, math.nan, gap.mean_abs)
    return Verdict("unexplained", "", 0.0, gap.mean_abs)


def _as_rounding(gap: Gap, rounding: Rounding) -> str | None:
    """The dtype whose rounding is nearest to the gap in size, if it is near and the gap errs to both sides."""
    sizes = {name: size for name, size in rounding.by_dtype.items() if size > 0}
    if not sizes or gap.one_sided > NOISE_ONE_SIDED:
        return None
    nearest = min(sizes, key=lambda name: abs(math.log(gap.mean_abs / sizes[name])))
    return nearest if 1 / NOISE_FACTOR <= gap.mean_abs / sizes[nearest] <= NOISE_FACTOR else None
