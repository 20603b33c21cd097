"""The logs: drawn from a seed, as TRL writes them."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

Values = float | np.ndarray | Callable[[np.ndarray, np.random.Generator], np.ndarray]
Columns = dict[str, Values]
Row = dict[str, float]

IS_MEAN = "sampling/importance_sampling_ratio/mean"
IS_MAX = "sampling/importance_sampling_ratio/max"
GAP = "sampling/sampling_logp_difference/mean"
LENGTH = "completions/mean_length"
TRUNCATED = "completions/clipped_ratio"
DEAD_GROUPS = "frac_reward_zero_std"
HEALTHY = 30

SETTINGS: Mapping[str, Any] = {
    "learning_rate": 1e-6, "beta": 0.001, "epsilon": 0.2, "num_generations": 8, "num_iterations": 1, "temperature": 1.0,
    "max_completion_length": 256, "max_grad_norm": 1.0, "loss_type": "dapo", "mask_truncated_completions": False,
    "use_vllm": True, "vllm_importance_sampling_correction": True, "vllm_importance_sampling_mode": "sequence_mask",
    "bf16": True, "logging_nan_inf_filter": True, "scale_rewards": "group",
}  # fmt: skip


@dataclass(frozen=True)
class Scenario:
    name: str
    told: str
    cause: str | None
    """The name of our finding, or the names that are right, with a `|` between; None: healthy."""
    rows: list[Row]
    settings: Mapping[str, Any] = field(default_factory=lambda: SETTINGS)
    right: Mapping[str, str] = field(default_factory=dict)
    """Detector of a rival -> words (a regular expression) that it must use, or "" if its name is enough."""
    family: frozenset[str] = frozenset()

    @property
    def expected(self) -> str:
        return (self.cause or "healthy").replace("|", " or ")


def draw(changed: Columns, rows: int = 200, every: int = 1) -> list[Row]:
    """The log of a healthy run with some columns changed."""
    random = np.random.default_rng(1)
    step = np.arange(rows)
    columns: Columns = {
        "loss": random.normal(0, 1e-4, rows),
        "grad_norm": 0.25 + random.normal(0, 0.02, rows),
        "learning_rate": 1e-6,
        "reward": 0.3 + 0.001 * step + random.normal(0, 0.02, rows),
        "reward_std": 0.35 + random.normal(0, 0.02, rows),
        DEAD_GROUPS: np.clip(0.15 + random.normal(0, 0.05, rows), 0, 1),
        "kl": 0.001 + 1e-5 * step,
        "entropy": 0.5 + random.normal(0, 0.01, rows),
        LENGTH: 180 + random.normal(0, 5, rows),
        TRUNCATED: np.clip(0.02 + random.normal(0, 0.01, rows), 0, 1),
        "clip_ratio/region_mean": 0.0,
        **changed,
    }
    drawn = {name: column(step, random) if callable(column) else column for name, column in columns.items()}
    full = {name: np.broadcast_to(column, rows).tolist() for name, column in drawn.items()}
    return [{"step": (i + 1) * every, **{name: full[name][i] for name in full}} for i in range(rows)]


def underflow() -> Columns:
    """Rollout weights that are products over a sequence, and have underflowed."""
    return {
        "loss": 0.0,
        "grad_norm": lambda i, r: 0.005 + r.normal(0, 0.0005, len(i)),
        "reward": lambda i, r: 0.4 + r.normal(0, 0.05, len(i)),
        "reward_std": lambda i, r: r.uniform(0.2, 0.68, len(i)),
        DEAD_GROUPS: 0.0,
        GAP: lambda i, r: 0.071 + r.normal(0, 0.004, len(i)),
        IS_MEAN: lambda i, r: 10 ** r.uniform(math.log10(1.6e-10), math.log10(1.5e-7), len(i)),
        IS_MAX: 6e-7,
        TRUNCATED: 1.0,
        LENGTH: 256.0,
    }


def turns(step: int, before: float, then: float) -> Values:
    return lambda i, r: np.where(i < step, before + r.normal(0, 0.02 * abs(before), len(i)), then)


def flat(level: float) -> Values:
    return lambda i, r: level + r.normal(0, 0.01, len(i))


def scenarios() -> list[Scenario]:
    return [*_weights(), *_dead_or_nan(), *_settings(), *_sound()]


def _weights() -> Iterator[Scenario]:
    cause = "importance-correction-erases-signal|sequence-is-sum-deflates-gradient"  # that it is, or also why it is
    right = {"*": r"importance.(sampling|ratio|weight|correction)"}
    without_cut = {TRUNCATED: 0.02, LENGTH: 200.0}
    yield Scenario("S1", "loss 0.0, weights of 1e-8, all cut; 7 rows", cause, draw(underflow(), 7, 10), right=right)
    yield Scenario("S1L", "the same, 200 rows", cause, draw(underflow()), right=right)
    yield Scenario("S1U", "the same, few cut", cause, draw({**underflow(), **without_cut}), right=right)


def _dead_or_nan() -> Iterator[Scenario]:
    dead: Columns = {
        "loss": 0.0, "grad_norm": 0.0, "reward": 0.0, "reward_std": 0.0, DEAD_GROUPS: 1.0, "kl": 0.0
    }  # fmt: skip
    yield Scenario(
        "S2", "every completion gets the same reward", "zero-reward-variance-within-group", draw(dead),
        right={"advantage_collapse": "", "DEGENERATE_GROUPS": "", "ADV_COLLAPSE": "", "REWARD_STD_DEATH": ""},
        family=frozenset({"gradient_pathology", "GRAD_PATHOLOGY"}),
    )  # fmt: skip
    cause, nan = "nan-poisoned-weights", {"gradient_pathology": r"(?i)nan|non-finite", "GRAD_PATHOLOGY": r"(?i)nan"}
    known = frozenset(nan)
    filtered = np.array([0.51, 0.0, 0.0])
    clean: Columns = {"grad_norm": turns(60, 0.25, math.nan), "loss": 0.0}
    lost: Columns = {
        "reward": turns(61, 0.4, 0.0), "reward_std": turns(61, 0.35, 0.0), DEAD_GROUPS: turns(61, 0.15, 1.0),
        "entropy": turns(61, 0.5, math.nan), "kl": turns(61, 0.001, math.nan),
    }  # fmt: skip
    three = draw({"grad_norm": math.nan, "loss": filtered}, 3)
    yield Scenario("S3", "NaN gradients from the start, 3 rows", cause, three, right=nan, family=known)
    yield Scenario("S3C", "NaN gradients from step 61, loss reads 0.0", cause, draw(clean), right=nan, family=known)
    yield Scenario("S3L", "the same, and the run collapses", cause, draw({**clean, **lost}), right=nan, family=known)


def _settings() -> Iterator[Scenario]:
    heavy: Columns = {"kl": lambda i, r: 0.64 * (1 - np.exp(-i / 3)), "reward": flat(0.3)}
    rows = draw(heavy)
    yield Scenario(
        "S4", "beta 0.5: the loss is the KL term", "beta-mis-scaled",
        [{**row, "loss": 0.5 * row["kl"]} for row in rows], {**SETTINGS, "beta": 0.5},
        right={"kl_drift": r"(?i)(lower|reduce|decrease)\W+(the )?(beta|kl)", "KL_BLOWUP": r"(?i)(lower|reduce) (the )?(beta|kl)"},
        family=frozenset({"kl_drift", "KL_BLOWUP"}),
    )  # fmt: skip
    fast: Columns = {
        "learning_rate": 2e-5,
        "entropy": lambda i, r: 0.02 + 0.78 * np.exp(-i / 40) + r.normal(0, 0.002, len(i)),
        "kl": lambda i, r: 0.001 * np.exp(i / 25).clip(0, 4000),
        DEAD_GROUPS: lambda i, r: np.clip(0.15 + i / 220 + r.normal(0, 0.02, len(i)), 0, 0.95),
        "reward": lambda i, r: 0.3 + 0.2 * np.exp(-(((i - 60) / 40) ** 2)) + r.normal(0, 0.01, len(i)),
    }
    yield Scenario(
        "S5", "learning rate 2e-5, all weights trained", "learning-rate-too-high", draw(fast),
        {**SETTINGS, "learning_rate": 2e-5, "beta": 0.0}, right={"*": r"(?i)learning.rate"},
        family=frozenset({"kl_drift", "KL_BLOWUP", "entropy_collapse", "ENTROPY_COLLAPSE"}),
    )  # fmt: skip
    narrow: Columns = {
        "clip_ratio/region_mean": flat(0.7), "kl": 9e-4, "grad_norm": flat(0.012), "reward": flat(0.3)
    }  # fmt: skip
    widen = r"(?i)(widen|raise|increase|larger)[^.]*(epsilon|clip)|epsilon[^.]*(small|narrow)"
    yield Scenario(
        "S6", "epsilon 0.0002", "clip-range-too-narrow",
        [{**row, "grad_norm": abs(row["grad_norm"])} for row in draw(narrow)],
        {**SETTINGS, "epsilon": 0.0002, "num_iterations": 2},
        right={"clip_saturation": widen, "CLIP_SATURATION": widen},
        family=frozenset({"clip_saturation", "CLIP_SATURATION"}),
    )  # fmt: skip
    masked: Columns = {
        "loss": 0.0, "grad_norm": 0.0, "reward": flat(0.3), "reward_std": flat(0.31), DEAD_GROUPS: 0.1, TRUNCATED: 1.0,
        LENGTH: 256.0,
    }  # fmt: skip
    yield Scenario(
        "S9", "cut completions are masked, and all are cut", "all-completions-masked", draw(masked),
        {**SETTINGS, "mask_truncated_completions": True}, right={"*": r"(?i)(is|are|were) (all )?masked|masked out"},
        family=frozenset({"gradient_pathology", "length_pathology", "TRUNCATION_STARVE"}),
    )  # fmt: skip


def _sound() -> Iterator[Scenario]:
    exact: Columns = {"loss": 0.0, "grad_norm": flat(0.3), IS_MEAN: 0.985, IS_MAX: 1.4, GAP: 0.011}
    yield Scenario("S7", "healthy", None, draw({}))
    yield Scenario("S8", "healthy, loss exactly 0.0", None, draw(exact))


def healthy(seed: int) -> Scenario:
    """200 or 400 rows: reward rises, entropy falls slowly from any level, KL small or absent, loss is noise around 0."""
    random = np.random.default_rng(1000 + seed)
    rows = int(random.choice([200, 400]))
    level, decay = float(random.choice([0.25, 0.45, 0.7, 1.3, 2.0])), random.uniform(0.05, 0.3)
    start, rise, way = random.uniform(0.1, 0.5), random.uniform(0.1, 0.4), np.linspace(0, 1, rows)
    columns: Columns = {
        "loss": random.normal(0, float(random.choice([1e-8, 1e-3, 2e-2])), rows),
        "grad_norm": np.abs(random.uniform(0.1, 1.5) * (1 + random.normal(0, 0.1, rows))),
        "reward": np.clip(start + rise * way + random.normal(0, 0.03, rows), 0, 1),
        "reward_std": np.abs(0.35 + random.normal(0, 0.03, rows)),
        DEAD_GROUPS: np.clip(random.uniform(0.05, 0.25) + random.normal(0, 0.05, rows), 0, 1),
        "entropy": level * (1 - decay * way) + random.normal(0, 0.01 * level, rows),
        "kl": np.abs(random.uniform(0.005, 0.09) * way + random.normal(0, 2e-4, rows)),
        LENGTH: 150 + random.uniform(0, 40) * way + random.normal(0, 5, rows),
        IS_MEAN: 0.985 + random.normal(0, 0.003, rows),
        GAP: np.abs(0.012 + random.normal(0, 0.001, rows)),
    }
    log = draw(columns, rows)
    beta = float(random.choice([0.0, 0.001, 0.04]))
    if not beta:
        log = [{name: value for name, value in row.items() if name != "kl"} for row in log]
    return Scenario(f"healthy {seed + 1}", "", None, log, {**SETTINGS, "beta": beta})


def write(scenario: Scenario, directory: Path) -> tuple[Path, Path]:
    """The rows with the settings in a first line, and a trainer_state.json, which has no settings."""
    directory.mkdir(parents=True)
    lines = directory / "metrics.jsonl"
    with lines.open("w") as file:
        for entry in ({"config": dict(scenario.settings)}, *scenario.rows):
            file.write(json.dumps(entry) + "\n")
    state = directory / "state" / "trainer_state.json"
    state.parent.mkdir()
    last = scenario.rows[-1]["step"]
    state.write_text(json.dumps({"global_step": last, "max_steps": last, "log_history": scenario.rows}))
    return lines, state
