"""Hypotheses about what the engine does to the logits: temperature, truncation, penalties, and what it reports.

A parameter that is not known is fitted on the kept logits; the fit is then judged on all tokens like any other
hypothesis.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from leadline.probes.engine.scoring import PLAIN, Kept, kept_logprobs
from leadline.settings.rollout import Sampling

TEMPERATURES = (0.1, 4.0)
TRUNCATIONS: Mapping[str, tuple[float, ...]] = {
    "top_p": (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.92, 0.95, 0.97, 0.98, 0.99),
    "top_k": (1, 2, 3, 5, 8, 10, 16, 20, 25, 30, 32, 40, 50, 64, 100, 128, 200, 256),
    "min_p": (0.005, 0.01, 0.02, 0.03, 0.05, 0.08, 0.1, 0.15, 0.2, 0.3),
}
PENALTIES = (1.02, 1.03, 1.05, 1.08, 1.1, 1.12, 1.15, 1.18, 1.2, 1.25, 1.3, 1.5, 0.9, 0.95)
ABOVE_ROUNDING = 0.1
"""Nats."""
KNOBS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class Reading:
    """One way in which the engine's logprobs may come from the logits."""

    cause: str
    detail: str
    sampling: Sampling
    fitted: bool = False


def readings(sampling: Sampling, kept: Kept, generation_config: Mapping[str, Any]) -> list[Reading]:
    """Every reading that differs from what was asked for."""
    found = [
        *_left_out(sampling),
        *_from_file(sampling, generation_config),
        _fitted_temperature(sampling, kept),
        *_fitted_knobs(sampling, kept),
    ]
    asked = _knobs(sampling)
    distinct = {(reading.cause, _knobs(reading.sampling)): reading for reading in found}
    return [reading for (_, knobs), reading in distinct.items() if knobs != asked]


def _left_out(sampling: Sampling) -> Iterator[Reading]:
    """What was asked for and is not in the numbers."""
    plain = {knob: getattr(PLAIN, knob) for knob in KNOBS}
    yield Reading("raw_logprobs", "as of temperature 1 with nothing applied", _with(sampling, plain))
    for knob in KNOBS:
        value = getattr(sampling, knob)
        if value not in (plain[knob], 0):
            detail = f"{knob} {value:g} was asked for, and the logprobs are as of {plain[knob]:g}"
            yield Reading(knob, detail, _with(sampling, {knob: plain[knob]}))


def _from_file(sampling: Sampling, generation_config: Mapping[str, Any]) -> Iterator[Reading]:
    """What a server does that takes defaults from the model's own file for knobs that a request leaves out."""
    values = {k: v for k in KNOBS if isinstance(v := generation_config.get(k), int | float) and v not in (0, None)}
    if values:
        values = {k: int(v) if k == "top_k" else float(v) for k, v in values.items()}
        said = ", ".join(f"{knob} {value:g}" for knob, value in values.items())
        yield Reading("generation_config", f"{said}, as in generation_config.json", _with(sampling, values))


def _fitted_temperature(sampling: Sampling, kept: Kept) -> Reading:
    """The temperature that fits best, on a grid and then between its neighbours."""

    def distance(temperature: float) -> float:
        return _distance(kept, _with(sampling, {"temperature": temperature}))

    low, high = TEMPERATURES
    grid = torch.logspace(0, 1, 40, base=high / low, dtype=torch.float64).mul(low).tolist()
    best = min(range(len(grid)), key=lambda i: distance(grid[i]))
    found = _golden(distance, grid[max(0, best - 1)], grid[min(len(grid) - 1, best + 1)])
    rounded = round(found, 2)  # as a person would have set it, unless that is worse than the fit's own precision
    value = rounded if distance(rounded) <= 1.05 * distance(found) + 1e-3 else found
    asked = sampling.temperature or 1.0
    return Reading(
        "temperature",
        f"temperature {value:.3g} instead of {asked:g}",
        _with(sampling, {"temperature": value}),
        fitted=True,
    )


def _fitted_knobs(sampling: Sampling, kept: Kept) -> Iterator[Reading]:
    """The best value of each other knob, if it was not asked for."""
    delta = kept_logprobs(kept, sampling) - kept.engine
    likelier_here = float((delta > ABOVE_ROUNDING).double().mean())
    truncations = TRUNCATIONS if likelier_here < 0.1 else {}  # what is left of a truncation is likelier to the engine
    for knob, values in {**truncations, "repetition_penalty": PENALTIES}.items():
        off = getattr(PLAIN, knob)
        if getattr(sampling, knob) != off:
            continue
        candidates = [_with(sampling, {knob: value}) for value in values]
        best = min(candidates, key=lambda candidate: _distance(kept, candidate))
        detail = f"{knob} {getattr(best, knob):g}, which was not asked for"
        yield Reading(knob, detail, best, fitted=True)


def _golden(distance: Callable[[float], float], low: float, high: float) -> float:
    """Where the distance is least between `low` and `high`, by golden sections."""
    ratio = (5**0.5 - 1) / 2
    for _ in range(16):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, right) if distance(left) < distance(right) else (left, high)
    return 0.5 * (low + high)


def _distance(kept: Kept, sampling: Sampling) -> float:
    """Mean |predicted - engine| over the kept tokens that the engine scored."""
    scored = kept.engine.isfinite()
    gaps: Tensor = (kept_logprobs(kept, sampling) - kept.engine)[scored].abs()
    return float(gaps.mean()) if len(gaps) else torch.inf


def _with(sampling: Sampling, values: Mapping[str, Any]) -> Sampling:
    return sampling.model_copy(update=dict(values))


def _knobs(sampling: Sampling) -> tuple[float, ...]:
    temperature, *others = (float(getattr(sampling, knob)) for knob in KNOBS)
    return (temperature or 1.0, *others)


def calibration(engine_like: Tensor, entropies: Tensor) -> float:
    """|z| of mean(log p + H) = 0, which holds for tokens drawn from p: small if they were drawn from this."""
    values = (engine_like + entropies)[engine_like.isfinite()]
    spread = float(values.std()) / math.sqrt(max(1, len(values)))
    return abs(float(values.mean())) / max(spread, 1e-9)
