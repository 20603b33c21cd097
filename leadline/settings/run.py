"""How long a run is, how it is judged, and what it leaves."""

from typing import Literal

from pydantic import Field

from leadline.settings.section import Section

TrackerName = Literal["tensorboard", "wandb", "trackio", "mlflow"]
CheckName = Literal[
    "tokenizer",
    "terminators",
    "special_tokens",
    "reasoning",
    "lengths",
    "rewards",
    "reference",
    "optimizer",
    "memory",
    "weights",
    "parity",
    "dry_step",
]


class Evaluation(Section):
    """Mean reward on held-out prompts, through the same engine and rewards."""

    prompts: int = Field(64, ge=0)
    """Held-out prompts. 0 = no evaluation."""
    samples: int = Field(1, ge=1)
    """Completions per held-out prompt; pass@k is reported up to this k."""
    every: int = Field(0, ge=0)
    """Steps between evaluations; 0 = only before the first step and after the last."""
    temperature: float | None = Field(None, ge=0)
    """None = as in training. 0 = greedy."""
    pass_threshold: float = 1.0
    """A completion passes with at least this reward."""
    require_improvement: bool = False
    """Exit with 1 unless the 95 % interval of the paired difference lies above 0."""


class Run(Section):
    """How long, where, and what it leaves."""

    steps: int = Field(100, ge=1)
    """Steps in all; one step is one `policy.update`."""
    dir: str = "runs/{recipe}"
    """Run directory; `{recipe}` is the name of the recipe."""
    seed: int = 0
    """Of data order and sampling."""
    checkpoint_every: int = Field(20, ge=0)
    """Steps between checkpoints; 0 = only at the end."""
    keep_checkpoints: int = Field(2, ge=1)
    """How many of the last checkpoints stay."""
    blackbox_steps: int = Field(3, ge=0)
    """The last so many steps are kept at token level in `blackbox/`."""
    rollouts_every: int = Field(1, ge=0)
    """Steps between files in `rollouts/`; 0 = none."""
    mismatch_every: int = Field(20, ge=0)
    """Steps between measurements of the gap between engine and trainer on fresh completions, which split it into
    rounding, staleness and faults (`mismatch/...`). 0 = never."""
    stall_warning_s: float = Field(300.0, gt=0)
    """After so many seconds in which nothing begins or ends, the screen and `stalls.jsonl` say who waits for whom."""
    stall_limit_s: float = Field(3600.0, gt=0)
    """After so many, the run stops with a checkpoint. To be longer than one update, and than one group's generation."""
    skip_checks: tuple[CheckName, ...] = Field((), strict=False)
    """Checks of the preflight that are left out, by name. All others are made before the first step, and one that finds
    something wrong stops the run."""
    trackers: tuple[TrackerName, ...] = Field((), strict=False)
    """Further places to log metrics to."""
