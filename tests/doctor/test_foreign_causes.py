"""Causes as other frameworks log them: native keys and settings in, the slug of the cause out, first in rank."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from leadline.doctor import diagnose
from leadline.doctor.readers import read_runs

NAN = math.nan
Rows = list[dict[str, float]]


def trl(rows: int = 3, **columns: Any) -> Rows:
    """Rows with TRL's keys; `__` stands for `/`."""
    base = {
        "loss": 0.0, "grad_norm": 0.3, "learning_rate": 1e-6, "reward": 0.4, "reward_std": 0.45, "frac_reward_zero_std": 0.2,
        "completions__mean_length": 230.0, "completions__min_length": 40.0, "completions__max_length": 512.0,
        "completions__clipped_ratio": 0.04,
    }  # fmt: skip
    merged = {**base, **columns}

    def value(name: str, i: int) -> float | None:
        item = merged[name]
        return item(i) if callable(item) else item

    return [
        {"step": i + 1, **{name.replace("__", "/"): v for name in merged if (v := value(name, i)) is not None}}
        for i in range(rows)
    ]


def diagnosed(tmp_path: Path, rows: Rows, config: dict[str, Any]) -> Any:
    (tmp_path / "metrics.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    (tmp_path / "config.json").write_text(json.dumps(config))
    (run,) = read_runs([tmp_path])
    return diagnose(run)


CASES: dict[str, tuple[str, Rows, dict[str, Any]]] = {
    "mask over a stop string": (
        "all-completions-masked",
        trl(grad_norm=0.0, completions__clipped_ratio=1.0),
        {"framework": "trl", "mask_truncated_completions": True, "max_completion_length": 1024},
    ),
    "overlong filter of ms-swift": (
        "all-completions-masked",
        trl(grad_norm=0.0, completions__clipped_ratio=1.0, completions__mean_length=4096.0, completions__max_length=4096.0),
        {"framework": "ms-swift", "overlong_filter": True, "max_completion_length": 4096},
    ),
    "a minimum length": (
        "eos-suppressed-by-min-length",
        [{"step": i, "objective/kl": -2.0 - i, "completions/mean_length": 64.0, "completions/min_length": 64.0} for i in (1, 2, 3)],
        {"framework": "trl", "generation_kwargs": {"min_length": 64, "top_k": 0.0}},
    ),
    "never-ending text": (
        "reward-hacking-nontermination",
        trl(40, reward=lambda i: 0.2 + 0.02 * i, completions__clipped_ratio=lambda i: min(1.0, 0.03 * i)),
        {"framework": "trl", "max_completion_length": 512},
    ),
    "a constant ratio": (
        "ratio-constant-no-policy-gradient",
        trl(40, grad_norm=lambda i: 1e-8 + 0.002 * i, kl=lambda i: 1e-6 + 0.0003 * i),
        {"framework": "trl", "beta": 0.04},
    ),
    "another reference": (
        "reference-model-mismatch",
        trl(6, kl=lambda i: 0.61 + 0.003 * i),
        {"framework": "trl", "beta": 0.04},
    ),
    "train up, held-out down": (
        "overfit-no-kl-anchor",
        [{"step": i, "train_accuracy": 0.4 + 0.004 * i, "val_accuracy": 0.42 - 0.001 * i} for i in range(0, 100, 20)],
        {"framework": "trl", "beta": 0.0},
    ),
    "top_p and a constant ratio": (
        "logprob-truncation-support-mismatch",
        trl(5, sampling__importance_sampling_ratio__mean=0.951, sampling__sampling_logp_difference__mean=0.05),
        {"framework": "trl", "use_vllm": True, "top_p": 0.95, "vllm_importance_sampling_mode": "token_truncate"},
    ),
    "experts": (
        "moe-routing-mismatch",
        [{"step": i, "train/train_rollout_logprob_abs_diff": 0.2 + 0.002 * i, "train/loss": 0.0, "train/grad_norm": 0.3, "rollout/raw_reward": 0.4} for i in range(30)],
        {"framework": "slime", "model": "Qwen3-30B-A3B"},
    ),
    "a cache of old keys": (
        "stale-prefix-cache",
        [{"step": i, "actor/pg_loss": 0.0, "actor/grad_norm": 0.3, "critic/score/mean": 0.4, "rollout_corr/k3_kl": 0.002 + 0.01 * (i % 12)} for i in range(60)],
        {"framework": "verl", "actor_rollout_ref.rollout.enable_prefix_caching": True},
    ),
    "entropy gone": (
        "entropy-collapse",
        [{"step": i, "actor/entropy": 0.9 * 0.93**i, "actor/pg_loss": 0.0, "actor/grad_norm": 0.3, "critic/score/mean": 0.5} for i in range(80)],
        {"framework": "verl", "actor.clip_ratio_high": 0.2},
    ),
    "backends disagree": (
        "gradient-scaling-depends-on-backend",
        [{"step": 1, "grad_norm_zero2": 0.21, "grad_norm_zero3": 1.7}],
        {"framework": "trl", "deepspeed": "zero2|zero3"},
    ),
    "a NaN reward": (
        "nan-reward-poisons-advantage",
        trl(grad_norm=NAN, rewards__math__mean=lambda i: NAN if i else 0.4, reward=lambda i: NAN if i else 0.4),
        {"framework": "trl"},
    ),
    "a rate of supervised fine-tuning": (
        "learning-rate-too-high",
        trl(6, learning_rate=3e-5, kl=lambda i: 0.002 * 6**i, reward=lambda i: 0.4 - 0.06 * i),
        {"framework": "trl", "learning_rate": 3e-5, "beta": 0.04},
    ),
    "the zero-loss table": (
        "importance-correction-erases-signal",
        [
            {"step": 10 * (i + 1), "loss": 0.0, "grad_norm": g, "reward": r, "reward_std": s, "IS_ratio_mean": w}
            for i, (g, r, s, w) in enumerate([
                (0.0053, 0.819, 0.683, 3.97e-10), (0.00483, 1.007, 0.513, 4.87e-9), (0.00628, 0.605, 0.602, 2.01e-10),
                (0.00624, 1.171, 0.239, 1.1e-7), (0.0084, 1.08, 0.529, 1.53e-7), (0.00736, 0.925, 0.494, 1.28e-8),
                (0.00895, 1.078, 0.204, 1.64e-10),
            ])
        ],
        {"framework": "trl"},
    ),
    "a narrow clip": (
        "clip-range-too-narrow",
        trl(20, clip_ratio__region_mean=0.6, kl=0.0009, grad_norm=0.012),
        {"framework": "trl", "epsilon": 0.0002, "num_iterations": 4},
    ),
    "a heavy KL term": (
        "beta-mis-scaled",
        trl(60, loss=0.31, kl=0.62, reward=0.31),
        {"framework": "trl", "beta": 0.5},
    ),
    "only the gradient norm is NaN": (
        "updates-skipped",
        [{"step": i, "actor/entropy": 0.218, "actor/pg_loss": 0.006, "actor/grad_norm": NAN, "actor/ppo_kl": 0.0, "critic/score/mean": 0.903} for i in range(2, 9)],
        {"framework": "verl"},
    ),
    "poisoned weights": (
        "nan-poisoned-weights",
        [{"step": i, "actor/kl_loss": NAN, "actor/pg_loss": NAN, "actor/pg_clipfrac": 0.0, "actor/grad_norm": NAN, "critic/score/mean": -1.0, "response_length/clip_ratio": 1.0} for i in (83, 84, 85)],
        {"framework": "verl"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_cause_is_named_first(name: str, tmp_path: Path) -> None:
    slug, rows, config = CASES[name]
    report = diagnosed(tmp_path, rows, config)
    assert [finding.name for finding in report.findings][:1] == [slug], [(f.name, f.message) for f in report.findings]
    assert report.verdict == "fault"


HEALTHY: dict[str, tuple[Rows, dict[str, Any]]] = {
    "loss 0.0 on policy": (trl(30, kl=lambda i: 0.0005 + 1e-6 * i), {"framework": "trl", "beta": 0.04}),
    "a negative loss": (trl(30, loss=lambda i: -0.02 + 0.001 * (i % 5)), {"framework": "trl"}),
    "a tight clip of the gradient": (trl(30, grad_norm=0.4), {"framework": "trl", "max_grad_norm": 0.001}),
    "no KL at beta 0": (trl(30, kl=NAN), {"framework": "trl", "beta": 0.0}),
    "the KL pull on groups without spread": (
        trl(3, frac_reward_zero_std=lambda i: 1.0 if i == 1 else 0.3, grad_norm=lambda i: 0.02, kl=0.01), {"framework": "trl", "beta": 0.04}
    ),
    "entropy rises with the reward": (
        [{"step": i, "actor/entropy": 0.4 + 0.005 * i, "critic/score/mean": 0.3 + 0.004 * i, "actor/grad_norm": 0.2, "actor/pg_loss": 0.01} for i in range(60)],
        {"framework": "verl"},
    ),
    "the ratio drifts in inner epochs": (
        [{"step": i, "critic/score/mean": 0.4, "actor/grad_norm": 0.3, "actor/pg_loss": 0.01, "actor/ppo_kl": 0.001 * (i % 4), "actor/pg_clipfrac": 0.01 * (i % 4)} for i in range(40)],
        {"framework": "verl", "actor_rollout_ref.actor.ppo_epochs": 4},
    ),
    "the noise floor of two engines": (
        trl(30, sampling__sampling_logp_difference__mean=0.012, sampling__importance_sampling_ratio__mean=0.99),
        {"framework": "trl", "use_vllm": True},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HEALTHY)
def test_what_only_looks_odd_is_no_error(name: str, tmp_path: Path) -> None:
    report = diagnosed(tmp_path, *HEALTHY[name])
    assert [(f.name, f.message) for f in report.findings] == []
    assert report.verdict == "healthy"
