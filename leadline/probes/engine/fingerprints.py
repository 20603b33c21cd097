"""What a gap's shape says about its cause where no experiment can be made: marks, weaker than a counterfactual."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from leadline.probes.engine.drawn import Drawn
from leadline.probes.engine.gap import Gap, correlation

ROUNDING = 0.07
"""Mean |Delta| of dense models in bfloat16 reaches this: 0.02 to 0.06 nats were measured."""
ONE_SIDED = 0.98
CONFIDENT = 0.02
"""Share of tokens that the engine gave 1/2 and the trainer a seventh of that: 0 to 1e-3 for sampling causes."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A cause that the shape of the gap points to."""

    cause: str
    reason: str


def marks(gap: Gap, drawn: Drawn, trainer: Tensor) -> Iterator[Mark]:
    """The causes that the shape points to, the surest first."""
    yield from _placeholders(drawn)
    if gap.mean_abs <= 1e-4 or not gap.tokens:
        return
    yield from _ages(drawn, trainer)
    if gap.confident >= CONFIDENT:
        yield Mark(
            "other_weights", f"{gap.confident:.1%} of the tokens are likely to the engine and out of the question here"
        )
    yield from _first_tokens(drawn, trainer)
    if gap.one_sided >= ONE_SIDED and gap.mean < 0 and gap.negative > 0.5 and gap.max_abs < 4:
        yield Mark("support", f"{gap.negative:.1%} of the tokens are likelier to the engine, none less likely")
    if gap.mean_abs > ROUNDING and abs(gap.engine_correlation) > 0.5 and gap.confident < CONFIDENT:
        way = "rises" if gap.engine_correlation > 0 else "falls"
        cause = "raw_logprobs" if gap.engine_correlation > 0 else "temperature"
        yield Mark(
            cause, f"Δ {way} with the engine's logprob (r = {gap.engine_correlation:+.2f}), as a temperature does it"
        )
    if gap.mean_abs <= ROUNDING and gap.one_sided < 0.2 and gap.tail < 0.6:
        yield Mark(
            "dtype", f"mean |Δ| {gap.mean_abs:.2g} to both sides is what bfloat16 rounding of a dense model makes"
        )
    if gap.mean_abs <= ROUNDING * 2 and gap.one_sided < 0.2 and gap.tail >= 0.8:
        yield Mark("moe_routing", f"5 % of the tokens hold {gap.tail:.0%} of the squared gap")


def _placeholders(drawn: Drawn) -> Iterator[Mark]:
    scored = drawn.engine[drawn.engine.isfinite()]
    zeros = float((scored == 0).double().mean()) if len(scored) else 0.0
    if zeros > 0.05 and (
        drawn.trainer is None or float((drawn.trainer[drawn.engine == 0] < -0.05).double().mean()) > 0.2
    ):
        yield Mark("placeholders", f"{zeros:.1%} of the engine's logprobs are exactly 0")


def _ages(drawn: Drawn, trainer: Tensor) -> Iterator[Mark]:
    if drawn.ages is None:
        return
    size = (trainer - drawn.engine).abs()
    known = size.isfinite() & drawn.ages.isfinite()
    ages, size = drawn.ages[known].double(), size[known]
    related = correlation(ages, size)
    if len(ages) and float(ages.max()) > 0 and related > 0.1 and related * len(ages) ** 0.5 > 6:
        young, old = size[ages == ages.min()].mean(), size[ages == ages.max()].mean()
        yield Mark("staleness", f"mean |Δ| is {old:.2g} at age {int(ages.max())} and {young:.2g} at {int(ages.min())}")


def _first_tokens(drawn: Drawn, trainer: Tensor) -> Iterator[Mark]:
    squares = torch.nan_to_num((trainer - drawn.engine).square(), nan=0.0, posinf=0.0)
    first = drawn.positions < 2
    share, expected = float(squares[first].sum() / squares.sum().clamp(min=1e-12)), float(first.double().mean())
    if share > 0.7 and expected < 0.3:
        yield Mark("first_tokens", f"the first two tokens of completions hold {share:.0%} of the squared gap")
