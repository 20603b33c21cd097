"""Whole runs of two hundred steps with one fault each, drawn with noise: the cause comes first."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from leadline.doctor import diagnose
from leadline.doctor.run_log import RunLog

Column = float | Callable[[np.ndarray, np.random.Generator], np.ndarray]


def scenario(config: dict[str, Any] | None = None, rows: int = 200, **changed: Column) -> RunLog:
    """A healthy run in TRL's quantities, with some columns changed; `__` stands for `/`."""
    rng = np.random.default_rng(1)
    columns: dict[str, Column] = {
        "loss": lambda i, r: r.normal(0, 1e-6, len(i)),
        "optimizer__grad_norm": lambda i, r: 0.25 + r.normal(0, 0.02, len(i)),
        "reward__mean": lambda i, r: np.clip(0.3 + 0.001 * i + r.normal(0, 0.02, len(i)), 0, 1),
        "reward__std": lambda i, r: 0.35 + r.normal(0, 0.02, len(i)),
        "reward__zero_std_fraction": lambda i, r: np.clip(0.15 + r.normal(0, 0.05, len(i)), 0, 1),
        "policy__entropy": lambda i, r: 0.5 + r.normal(0, 0.01, len(i)),
        "rollout__truncated_fraction": 0.02,
        "rollout__length_mean": lambda i, r: 220 + r.normal(0, 5, len(i)),
        "kl__k3": lambda i, r: 0.001 + 1e-5 * i,
        **changed,
    }
    steps = np.arange(rows)
    values = {
        name.replace("__", "/"): [float(v) for v in (column(steps, rng) if callable(column) else np.full(rows, column))]
        for name, column in columns.items()
    }
    return RunLog(RunLog.from_columns(values).rows, config, framework="trl")


def after(step: int, before: float, then: float) -> Column:
    return lambda i, r: np.where(i < step, before, then)


def tiny_weights(i: np.ndarray, r: np.random.Generator) -> np.ndarray:
    return 10 ** r.uniform(-10, -7, len(i))


def flat(level: float) -> Column:
    return lambda i, r: level + r.normal(0, 0.01, len(i))


SCENARIOS: dict[str, tuple[str | None, RunLog]] = {
    "weights of 1e-8, all truncated": (
        "importance-correction-erases-signal",
        scenario(importance__weight_mean=tiny_weights, loss=0.0, optimizer__grad_norm=0.005, rollout__truncated_fraction=1.0),
    ),
    "weights of 1e-8": (
        "importance-correction-erases-signal",
        scenario(importance__weight_mean=tiny_weights, loss=0.0, optimizer__grad_norm=0.005),
    ),
    "all rewards equal": (
        "zero-reward-variance-within-group",
        scenario(loss=0.0, optimizer__grad_norm=0.0, reward__mean=0.0, reward__std=0.0, reward__zero_std_fraction=1.0),
    ),
    "three rows of NaN gradients": ("nan-poisoned-weights", scenario(rows=3, optimizer__grad_norm=math.nan)),
    "the gradient turns NaN, the loss reads 0": (
        "nan-poisoned-weights", scenario(optimizer__grad_norm=after(60, 0.25, math.nan), loss=0.0)
    ),
    "... and the run collapses": (
        "nan-poisoned-weights",
        scenario(
            optimizer__grad_norm=after(60, 0.25, math.nan), loss=0.0, reward__mean=after(61, 0.4, 0.0),
            reward__std=after(61, 0.35, 0.0), reward__zero_std_fraction=after(61, 0.15, 1.0),
            policy__entropy=after(61, 0.5, math.nan), kl__k3=after(61, 0.001, math.nan),
        ),
    ),
    "a KL term of 0.5": (
        "beta-mis-scaled",
        scenario({"objective.beta": 0.5}, kl__k3=lambda i, r: 0.6 * (1 - np.exp(-i / 3)), loss=lambda i, r: 0.3 * (1 - np.exp(-i / 3)), reward__mean=flat(0.3)),
    ),
    "a rate of supervised fine-tuning": (
        "learning-rate-too-high",
        scenario(
            {"optimizer.learning_rate": 2e-5}, optimizer__learning_rate=2e-5,
            policy__entropy=lambda i, r: 0.02 + 0.78 * np.exp(-i / 40),
            kl__k3=lambda i, r: 0.001 * np.exp(i / 25).clip(0, 4000),
            reward__zero_std_fraction=lambda i, r: np.clip(0.15 + i / 220, 0, 0.95),
            reward__mean=lambda i, r: 0.3 + 0.2 * np.exp(-(((i - 60) / 40) ** 2)) + r.normal(0, 0.01, len(i)),
        ),
    ),
    "a clip of 0.0002": (
        "clip-range-too-narrow",
        scenario({"objective.clip_low": 0.0002, "optimizer.epochs_per_batch": 2}, policy__clip_fraction=0.7, kl__k3=9e-4, optimizer__grad_norm=0.012, reward__mean=flat(0.3)),
    ),
    "truncation masks everything": (
        "all-completions-masked",
        scenario({"objective.mask_truncated": True}, rollout__truncated_fraction=1.0, loss=0.0, optimizer__grad_norm=0.0, reward__std=0.31, reward__zero_std_fraction=0.1),
    ),
    "healthy": (None, scenario()),
    "healthy, loss 0.0": (None, scenario(loss=0.0, optimizer__grad_norm=0.3, importance__weight_mean=0.985)),
}  # fmt: skip


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_cause_comes_first_and_a_healthy_run_has_none(name: str) -> None:
    cause, run = SCENARIOS[name]
    found = [finding.name for finding in diagnose(run).findings]
    assert found[:1] == ([cause] if cause else []), found
