"""Dumps of rollouts and tokens: what a step's rewards, advantages and logprobs say that no metric does."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from leadline.doctor.readers.bounds import Source
from leadline.doctor.readers.json_rows import jsonl_rows
from leadline.doctor.table import Floats

MAX_SAMPLES = 256
"""Rollouts that are kept as text."""
MAX_TEXT = 2000
TEXTS = ("prompt", "completion", "input", "output", "error", "finish_reason")
HEADS = ("prompt_token_ids",)
"""Lists of which the first `HEAD` entries are kept: how a prompt begins."""
HEAD = 8
NOT_REWARDS = ("step", "advantage", "advantages", "idx", "group", "index")
_STEP = re.compile(r"(?:step|data_step|_)_?(\d+)")

TOKEN_PAIRS = (
    ("generation_logprobs", "prev_logprobs", "token_loss_mask"),
    ("inference_logprobs", "trainer_logprobs", "loss_mask"),
    ("rollout_log_probs", "log_probs", "loss_mask"),
)
"""Names under which a dump has the sampler's and the trainer's logprobs of each token, and their mask."""


def is_token_dump(row: Mapping[str, Any]) -> bool:
    """A row of a dump that has both sides' logprobs."""
    return any(sampler in row and trainer in row for sampler, trainer, _ in TOKEN_PAIRS)


def writer_of(row: Mapping[str, Any]) -> str | None:
    """The framework that writes such a row of a token dump."""
    writers = {"prev_logprobs": "nemo_rl", "trainer_logprobs": "prime_rl", "rollout_log_probs": "slime"}
    return next((writer for key, writer in writers.items() if key in row), None)


def is_rollout_dump(names: Sequence[str]) -> bool:
    """Columns of a table with one row for each completion."""
    return "completion" in names and ("advantage" in names or "prompt" in names or "reward" in names)


def step_in_name(name: str) -> int | None:
    """The step in a file name such as `train_data_step12.jsonl` or `completions_00012.parquet`."""
    stem = name.replace("\\", "/").rsplit("/", 1)[-1].split(".")[0]
    match = _STEP.search(stem)
    return int(match[1]) if match else None


def token_dump_rows(source: Source) -> Iterator[dict[str, Any]]:
    """One row for each step in canonical quantities, out of the logprobs of its tokens."""
    default = step_in_name(source.name) or 1
    held: dict[int, list[tuple[Floats, Floats, Floats]]] = {}
    rewards: dict[int, list[float]] = {}
    for row in jsonl_rows(source):
        step = int(row["step"]) if isinstance(row.get("step"), int | float) else default
        for sampler, trainer, mask in TOKEN_PAIRS:
            if sampler in row and trainer in row:
                parts = _aligned(row[sampler], row[trainer], row.get(mask))
                if parts is not None:
                    held.setdefault(step, []).append(parts)
        reward = row.get("rewards", row.get("reward"))
        if isinstance(reward, int | float):
            rewards.setdefault(step, []).append(float(reward))
    for step in sorted(held):
        yield {"step": step, **gap(held[step]), **spread(rewards.get(step, []))}


def _aligned(sampler: Any, trainer: Any, mask: Any) -> tuple[Floats, Floats, Floats] | None:
    try:
        left, right = _numbers(sampler), _numbers(trainer)
        kept = _numbers(mask) if isinstance(mask, list) else np.ones(len(left))
    except (TypeError, ValueError):
        return None
    if not (len(left) == len(right) == len(kept)) or not len(left):
        return None
    return left, right, kept


def _numbers(values: Any) -> Floats:
    return np.array([np.nan if value is None else value for value in values], np.float64)


def gap(parts: Sequence[tuple[Floats, Floats, Floats]]) -> dict[str, float]:
    """How far trainer and sampler are apart over the trained tokens of a step, and over its completions."""
    sampler, trainer, mask = (np.concatenate([part[i] for part in parts]) for i in range(3))
    trained = mask > 0
    scored = trained & np.isfinite(sampler) & np.isfinite(trainer)
    gap = (trainer - sampler)[scored]
    if not len(gap):
        return {"importance/scored_fraction": 0.0} if trained.any() else {}
    ratio = np.exp(np.clip(gap, -50, 50))
    sums = [float((t - s)[(m > 0) & np.isfinite(t - s)].sum()) for s, t, m in parts]
    return {
        "importance/log_ratio_mean": float(gap.mean()),
        "importance/log_ratio_abs_mean": float(np.abs(gap).mean()),
        "importance/log_ratio_abs_max": float(np.abs(gap).max()),
        "importance/kl_k1": float(-gap.mean()),
        "importance/kl_k3": float((ratio - gap - 1).mean()),
        "importance/ratio_mean": float(ratio.mean()),
        "importance/ratio_min": float(ratio.min()),
        "importance/ratio_max": float(ratio.max()),
        "importance/ess": float(ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum())),
        "importance/sequence_ratio_mean": float(np.exp(np.clip(sums, -500, 500)).mean()),
        "importance/scored_fraction": float(scored.sum() / trained.sum()),
        "importance/tokens": float(len(gap)),
    }


def spread(rewards: Sequence[float]) -> dict[str, float]:
    """Mean and extrema; {} for no rewards."""
    if not rewards:
        return {}
    return {"reward/mean": float(np.mean(rewards)), "reward/max": max(rewards), "reward/min": min(rewards)}


def rollout_dump(
    columns: Mapping[str, Sequence[Any]], name: str
) -> tuple[list[dict[str, Any]], list[Mapping[str, Any]]]:
    """(one row for each step in canonical quantities, a bounded number of rollouts as text)."""
    length = max((len(column) for column in columns.values()), default=0)
    default = step_in_name(name) or 1
    steps = [
        int(step) if isinstance(step, int | float) else default for step in columns.get("step", [default] * length)
    ]
    rows = [
        {"step": step, **_of_step(columns, [i for i, at in enumerate(steps) if at == step])}
        for step in sorted(set(steps))[:1000]
    ]
    samples = [_sample(columns, i, steps[i]) for i in range(min(length, MAX_SAMPLES))]
    return rows, samples


def _of_step(columns: Mapping[str, Sequence[Any]], places: Sequence[int]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    prompts = [str(columns["prompt"][i]) for i in places] if "prompt" in columns else []
    own = "fate" in columns  # a dump of leadline, which says by name what a reward is
    for name, column in columns.items():
        if own and not name.startswith("reward"):
            continue
        values = [column[i] for i in places]
        if name in NOT_REWARDS or not all(value is None or isinstance(value, int | float) for value in values):
            continue
        known = [float(value) for value in values if value is not None]
        base = name if name == "reward" or name.startswith("reward/") else f"reward/{name}"
        row[f"{base}/mean"] = float(np.mean(known)) if known else None
        if name != "reward" and len(known) < len(values):
            row[f"{base}/none_fraction"] = 1 - len(known) / len(values)
    advantages = [columns["advantage"][i] for i in places] if "advantage" in columns else []
    numbers = np.array([value for value in advantages if value is not None], np.float64)
    if len(numbers):
        row["advantage/abs_mean"] = float(np.abs(numbers).mean())
        row["advantage/max"], row["advantage/min"] = float(numbers.max()), float(numbers.min())
        if prompts and len(numbers) == len(prompts):
            groups = Counter(prompts)
            dead = [p for p in groups if not any(a for a, q in zip(numbers, prompts, strict=True) if q == p)]
            row["rollout/zero_signal_fraction"] = len(dead) / len(groups)
    return row


def _sample(columns: Mapping[str, Sequence[Any]], place: int, step: int) -> Mapping[str, Any]:
    sample: dict[str, Any] = {"step": step}
    for name, column in columns.items():
        value = column[place]
        if name in TEXTS and value is not None:
            sample[name] = str(value)[:MAX_TEXT]
        elif isinstance(value, int | float):
            sample[name] = value
        elif name in HEADS and isinstance(value, list):
            sample[name] = value[:HEAD]
    return sample
