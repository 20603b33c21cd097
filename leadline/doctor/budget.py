"""The signal budget: update = advantages x importance weight x tokens kept x clip pass x finite x learning rate.

From leadline's own ledger the first factors are exact; from a foreign log they are bounds. A dead or starved update
must have a dead factor, so the budget says where to look. An additive KL, entropy or auxiliary term moves the weights
even if the product is 0, which the note says.
"""

import numpy as np

from leadline.doctor.report import Budget, Factor
from leadline.doctor.series import Series
from leadline.doctor.signals import CLIP, GRAD, MASKED, WEIGHT, ZERO_SIGNAL
from leadline.doctor.view import View

DEAD = 0.02
"""A factor below this starves the update: leadline's choice, half a decimal below what a rate schedule spans."""


def budget(run: View) -> Budget | None:
    """The factors over the last rows of the log; None if there are no rows."""
    if not run.rows:
        return None
    factors = (_advantages(run), _weight(run), _kept(run), _clip(run), _finite(run), _rate(run))
    steps = run.steps[-20:]
    return Budget(factors, int(steps[0]), int(steps[-1]), _other_terms(run))


def _window(series: Series) -> Series:
    return series.finite.tail(20)


def _factor(name: str, low: float | None, high: float | None, source: str) -> Factor:
    return Factor(name, low, high, source, dead=high is not None and high < DEAD)


def _exact(name: str, series: Series, value: float) -> Factor:
    return _factor(name, value, value, series.name)


def _advantages(run: View) -> Factor:
    zero = _window(run.first_of(*ZERO_SIGNAL))
    if len(zero):
        return _exact("advantages", zero, 1 - zero.median)
    spread = _window(run.first_of("reward/group_std", "advantage/abs_mean"))
    if len(spread):
        alive = float(np.mean(spread.values > 1e-9))
        return _exact("advantages", spread, 0.0) if alive == 0 else _factor("advantages", 0.0, 1.0, spread.name)
    wide = _window(run["reward/std"])
    if len(wide) and wide.high == 0:
        return _exact("advantages", wide, 0.0)
    return Factor("advantages", 0.0 if len(wide) else None, 1.0 if len(wide) else None, wide.name if len(wide) else "")


def _weight(run: View) -> Factor:
    shares = [_window(run[f"ledger/importance_{stage}_share"]) for stage in ("masked", "shrunk")]
    if all(len(share) for share in shares):
        return _exact("importance weight", shares[0], 1 - shares[0].median - shares[1].median)
    weight = _window(run.first_of(*WEIGHT))
    if len(weight):
        return _exact("importance weight", weight, weight.median)
    if run.setting("objective.importance_action") == "off":
        return Factor("importance weight", 1.0, 1.0, "objective.importance_action")
    return Factor("importance weight", None, None)


def _kept(run: View) -> Factor:
    masked = _window(run["ledger/truncated_share"])
    if len(masked):
        return _exact("tokens kept", masked, 1 - masked.median)
    truncated = _window(run["rollout/truncated_fraction"])
    on = run.setting("objective.mask_truncated")
    if on is False:
        return Factor("tokens kept", 1.0, 1.0, "objective.mask_truncated")
    if not len(truncated):
        return Factor("tokens kept", None, None)
    low = 1 - truncated.median
    return _factor("tokens kept", low, low if on else 1.0, truncated.name)


def _clip(run: View) -> Factor:
    share = _window(run["ledger/clipped_share"])
    clipped = share if len(share) else _window(run.first_of(*CLIP))
    return _exact("clip pass", clipped, 1 - clipped.median) if len(clipped) else Factor("clip pass", None, None)


def _finite(run: View) -> Factor:
    grad = run.first_of(*GRAD, *MASKED).tail(20)
    if not len(grad):
        return Factor("finite", None, None)
    return _exact("finite", grad, float(np.mean(np.isfinite(grad.values))))


def _rate(run: View) -> Factor:
    rate = _window(run["optimizer/learning_rate"])
    value = rate.median if len(rate) else run.number("optimizer.learning_rate")
    if np.isnan(value):
        return Factor("learning rate", None, None)
    source = rate.name if len(rate) else "optimizer.learning_rate"
    return Factor("learning rate", value, value, source, dead=value == 0)


def _other_terms(run: View) -> str:
    beta = run.number("objective.beta")
    others = [
        name
        for name, on in (
            (f"KL ({run.option('objective.beta')} = {beta:g})", beta > 0),
            ("entropy bonus", run.number("objective.entropy_bonus") > 0),
            ("auxiliary loss", run.has("loss/auxiliary")),
        )
        if on
    ]
    return f"Besides the product, these terms move the weights: {', '.join(others)}." if others else ""
