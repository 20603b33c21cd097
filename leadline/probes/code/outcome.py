"""What one call of a function gave: its values and its gradient, and when two calls gave the same."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from leadline.probes.code.batch import ProbeBatch

EXACT = 1e-6
"""Two results are the same when no entry differs by more than this, relative to the largest entry of the second."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Values in float64; a scalar is one value."""

    values: Tensor | None
    gradient: Tensor | None = None
    """Of the values' weighted sum with respect to the tensor that is trained; None: no gradient reaches it."""
    error: str | None = None

    @property
    def finite(self) -> bool:
        tensors = [t for t in (self.values, self.gradient) if t is not None]
        return self.error is None and all(bool(t.isfinite().all()) for t in tensors)


def measure(function: Callable[[ProbeBatch], Tensor], batch: ProbeBatch, trained: str | None) -> Outcome:
    """Calls the function with `batch.<trained>` in a graph. What it raises becomes `error`."""
    leaf = None
    if trained is not None:
        leaf = getattr(batch, trained).detach().clone().requires_grad_()
        # A clone of the leaf is what a model's output is: a part of the graph, which in-place operations may change.
        batch = replace(batch, **{trained: leaf.clone()})
    try:
        output = _quietly(function, batch)
        values = output.detach().double().flatten()
        if leaf is None or not output.requires_grad:
            return Outcome(values)
        weights = _weights(output.numel()).to(output.dtype)
        (gradient,) = torch.autograd.grad((output.flatten() * weights).sum(), leaf, allow_unused=True)
    except Exception as error:  # the user's code runs here
        return Outcome(None, error=f"{type(error).__name__}: {error}")
    return Outcome(values, None if gradient is None else gradient.double())


def value(function: Callable[[ProbeBatch], Tensor], batch: ProbeBatch) -> Outcome:
    """The values alone: a quarter of the time of `measure`."""
    try:
        with torch.no_grad():
            return Outcome(_quietly(function, batch).double().flatten())
    except Exception as error:
        return Outcome(None, error=f"{type(error).__name__}: {error}")


def same(one: Outcome, other: Outcome, tolerance: float = EXACT) -> bool:
    """Values and gradient agree; a gradient that is zero everywhere is one that is cut."""
    return same_values(one, other, tolerance) and difference(one.gradient, other.gradient) <= tolerance


def same_values(one: Outcome, other: Outcome, tolerance: float = EXACT) -> bool:
    """The values agree, whatever the gradients."""
    return one.error is None and other.error is None and difference(one.values, other.values) <= tolerance


def difference(one: Tensor | None, other: Tensor | None) -> float:
    """The largest difference relative to the largest entry of `other`; infinite where shapes or non-finite entries differ."""
    if one is None or other is None:
        rest = one if other is None else other
        return 0.0 if rest is None or not bool(rest.abs().gt(0).any()) else float("inf")
    if one.shape != other.shape or not bool((one.isfinite() == other.isfinite()).all()):
        return float("inf")
    finite = other.isfinite()
    if not bool(finite.any()):
        return 0.0
    largest = float((one - other)[finite].abs().max())
    return largest / max(float(other[finite].abs().max()), 1e-12)


def _quietly(function: Callable[[ProbeBatch], Tensor], batch: ProbeBatch) -> Tensor:
    """Its warnings are about batches that it was not written for."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(batch)


def _weights(count: int) -> Tensor:
    """Positive and all different, so that no two entries of an output can be exchanged unnoticed."""
    return 1 + 0.5 * torch.arange(count, dtype=torch.float64).cos()
