"""How far engine and trainer are apart on the same tokens: Delta = log pi (trainer) - log mu (engine), in nats."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from leadline.objective.importance import effective_sample_size, rollout_weights
from leadline.objective.segments import segment_mean, segment_sum

CORRECTIONS = (
    ("token", "truncate", 0.0, 2.0),
    ("token", "mask", 0.5, 2.0),
    ("sequence", "truncate", 0.0, 2.0),
    ("sequence", "mask", 0.5, 2.0),
    ("geometric", "truncate", 0.99, 1.01),
    ("geometric", "mask", 0.99, 1.01),
)
"""Level, action, low and high of each correction that is tried: the bounds that trainers ship or recommend."""
POSITION_BINS = 8
ENTROPY_BINS = 4


@dataclass(frozen=True, slots=True)
class Correction:
    """What one correction by rollout weights would do to these completions."""

    level: str
    action: str
    low: float
    high: float
    masked: float
    """Share of scored tokens with weight 0."""
    truncated: float
    """Share of scored tokens whose weight is a bound."""
    mean_weight: float
    """Mean weight as applied: with the ESS, for that alone is 1 where every weight is the same e-10."""
    ess: float
    """Effective sample size as a share; NaN if all weights are 0."""


@dataclass(frozen=True, slots=True)
class Bin:
    """Tokens that lie together in position or entropy."""

    low: float
    high: float
    tokens: int
    mean_abs: float
    mean: float


@dataclass(frozen=True, slots=True)
class Gap:
    """Delta = trainer - engine over the scored tokens, in nats."""

    tokens: int
    completions: int
    unscored: int
    mean_abs: float
    mean: float
    std: float
    median_abs: float
    p90: float
    p99: float
    max_abs: float
    negative: float
    """Share of tokens with Delta < 0."""
    confident: float
    """Share of tokens with Delta < -2 that the engine gave at least 1/2: other weights or other tokens."""
    tail: float
    """Share of the squared Delta that the largest 5 % of tokens hold."""
    engine_correlation: float
    """Of Delta with the engine's logprob."""
    entropy_correlation: float
    """Of Delta with the trainer's entropy; NaN without entropies."""
    position_correlation: float
    """Of |Delta| with the position."""
    sequence_mean: float
    sequence_min: float
    sequence_max: float
    """Sums of Delta over a completion."""
    mean_length: float
    by_position: tuple[Bin, ...]
    by_entropy: tuple[Bin, ...]
    corrections: tuple[Correction, ...]

    @property
    def one_sided(self) -> float:
        """|mean| / mean |Delta|: 0 for noise, 1 if every token errs in the same direction."""
        return abs(self.mean) / self.mean_abs if self.mean_abs else 0.0


def measure_gap(engine: Tensor, trainer: Tensor, owner: Tensor, positions: Tensor, entropies: Tensor | None) -> Gap:
    """The gap over the tokens that both sides scored. `owner` is the completion of each token."""
    scored = engine.isfinite() & trainer.isfinite()
    completions = int(owner.max()) + 1 if len(owner) else 0
    delta = (trainer - engine)[scored].double()
    size, place, of = delta.abs(), positions[scored].double(), owner[scored]
    counts = torch.bincount(of, minlength=completions)
    sums = segment_sum(delta, of, completions)[counts > 0]
    known = entropies[scored].double() if entropies is not None else None
    return Gap(
        tokens=len(delta),
        completions=int((counts > 0).sum()),
        unscored=int((~scored).sum()),
        mean_abs=_mean(size),
        mean=_mean(delta),
        std=float(delta.std(correction=0)) if len(delta) else math.nan,
        median_abs=_quantile(size, 0.5),
        p90=_quantile(size, 0.9),
        p99=_quantile(size, 0.99),
        max_abs=_quantile(size, 1.0),
        negative=_mean((delta < 0).double()),
        confident=_mean(((delta < -2) & (engine[scored] > math.log(0.5))).double()),
        tail=_tail(delta),
        engine_correlation=correlation(delta, engine[scored].double()),
        entropy_correlation=correlation(delta, known) if known is not None else math.nan,
        position_correlation=correlation(size, place),
        sequence_mean=_mean(sums),
        sequence_min=_quantile(sums, 0.0),
        sequence_max=_quantile(sums, 1.0),
        mean_length=_mean(counts[counts > 0].double()),
        by_position=_bins(place, delta, POSITION_BINS),
        by_entropy=_bins(known, delta, ENTROPY_BINS) if known is not None else (),
        corrections=_corrections(delta, of, completions),
    )


def correlation(one: Tensor, other: Tensor) -> float:
    """Pearson's; NaN where either does not vary."""
    if len(one) < 2:
        return math.nan
    a, b = one - one.mean(), other - other.mean()
    norm = float((a.square().sum() * b.square().sum()).sqrt())
    return float((a * b).sum()) / norm if norm > 0 else math.nan


def _corrections(delta: Tensor, owner: Tensor, completions: int) -> tuple[Correction, ...]:
    return tuple(_correction(delta, owner, completions, *bounds) for bounds in CORRECTIONS) if len(delta) else ()


def _correction(
    delta: Tensor, owner: Tensor, completions: int, level: str, action: str, low: float, high: float
) -> Correction:
    applied = rollout_weights(
        delta,
        torch.zeros_like(delta),
        owner,
        completions,
        level=level,
        action=action,
        low=low,
        high=high,
        veto=0.0,
    )
    weights = applied.weights
    if level != "token":  # one weight a completion: its tokens are no independent draws
        present = torch.bincount(owner, minlength=completions) > 0
        weights = segment_mean(weights, owner, completions, torch.ones_like(owner, dtype=torch.bool))[present]
    return Correction(
        level,
        action,
        low,
        high,
        masked=_mean(applied.masked.double()),
        truncated=_mean(applied.truncated.double()),
        mean_weight=_mean(applied.weights),
        ess=float(effective_sample_size(weights)),
    )


def _bins(by: Tensor, delta: Tensor, count: int) -> tuple[Bin, ...]:
    """As many tokens in each bin as ties allow, in the order of `by`."""
    if not len(by):
        return ()
    edges = by.quantile(torch.linspace(0, 1, count + 1, dtype=by.dtype)).unique()
    place = torch.bucketize(by, edges[1:-1], right=True)
    return tuple(
        Bin(float(by[inside].min()), float(by[inside].max()), int(inside.sum()), _mean(d.abs()), _mean(d))
        for i in range(max(1, len(edges) - 1))
        if len(d := delta[inside := place == i])
    )


def _tail(delta: Tensor) -> float:
    squares = delta.square().sort(descending=True).values
    total = float(squares.sum())
    return float(squares[: max(1, len(squares) // 20)].sum()) / total if total > 0 else 0.0


def _mean(values: Tensor) -> float:
    return float(values.double().mean()) if len(values) else math.nan


def _quantile(values: Tensor, q: float) -> float:
    return float(values.double().quantile(q)) if len(values) else math.nan
