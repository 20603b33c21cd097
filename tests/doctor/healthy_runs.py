"""Healthy runs in many shapes, seeded: none may set off an error."""

from typing import Any

import numpy as np

from leadline.doctor.run_log import RunLog


def _noisy(rng: np.random.Generator, start: float, end: float, rows: int, noise: float) -> np.ndarray:
    return np.linspace(start, end, rows) + rng.normal(0, noise, rows)


def healthy_run(seed: int) -> RunLog:
    """One of many variants: KL on and off, asynchronous, sparse rewards, tiny groups, long completions, inner epochs ..."""
    rng = np.random.default_rng(seed)
    rows = int(rng.choice([1, 2, 3, 8, 25, 200, 400]))
    framework = str(rng.choice(["leadline", "trl", "verl", "slime", "prime_rl"]))
    config: dict[str, Any] = {
        "rollout": {"group_size": int(rng.choice([4, 8, 16])), "max_staleness": int(rng.choice([0, 0, 2]))},
        "sampling": {"max_tokens": 1024, "temperature": 1.0, "top_p": 1.0, "top_k": 0},
        "optimizer": {
            "learning_rate": float(rng.choice([1e-7, 1e-6, 3e-6])),
            "max_grad_norm": float(rng.choice([1e-3, 0.1, 1.0])),
            "epochs_per_batch": int(rng.choice([1, 1, 4])),
            "minibatches": 1,
        },
        "objective": {
            "beta": float(rng.choice([0.0, 0.0, 0.001, 0.04])),
            "clip_low": 0.2,
            "loss": str(rng.choice(["grpo", "dapo", "gspo"])),
        },
        "model": {
            "name": str(rng.choice(["Qwen2.5-7B", "Llama-3.1-8B"])),
            "dtype": "bfloat16",
            "lora_rank": int(rng.choice([0, 0, 16])),
        },
    }
    if config["model"]["lora_rank"]:
        config["optimizer"]["learning_rate"] = 2e-5
    inner = config["optimizer"]["epochs_per_batch"] > 1
    reward_start = rng.uniform(0.05, 0.6)
    rise = rng.uniform(0.0, 0.3)
    zero = rng.uniform(0.05, 0.6)
    entropy = float(rng.choice([0.25, 0.45, 0.7, 1.3, 2.0]))
    columns = {
        "loss": rng.normal(0, float(rng.choice([1e-8, 1e-3, 5e-2])), rows),
        "optimizer/grad_norm": np.abs(_noisy(rng, rng.uniform(0.05, 3.0), rng.uniform(0.05, 3.0), rows, 0.05)) + 0.01,
        "optimizer/learning_rate": np.full(rows, config["optimizer"]["learning_rate"]),
        "reward/mean": np.clip(_noisy(rng, reward_start, reward_start + rise, rows, 0.03), 0, 1),
        "reward/std": np.abs(_noisy(rng, 0.4, 0.35, rows, 0.02)),
        "reward/zero_std_fraction": np.clip(_noisy(rng, zero, min(0.7, zero + 0.1), rows, 0.08), 0, 1),
        "policy/entropy": np.abs(_noisy(rng, entropy, entropy * rng.uniform(0.7, 1.05), rows, 0.01 * entropy)),
        "rollout/length_mean": _noisy(rng, 300, 300 * rng.uniform(0.9, 1.6), rows, 8),
        "rollout/length_min": np.abs(_noisy(rng, 40, 45, rows, 5)) + 5,
        "rollout/length_max": np.full(rows, 1024.0),
        "rollout/truncated_fraction": np.clip(_noisy(rng, 0.02, 0.05, rows, 0.01), 0, 1),
        "policy/clip_fraction": np.abs(rng.normal(0, 0.02, rows)) if inner else np.zeros(rows),
    }
    if config["objective"]["beta"]:
        columns["kl/k3"] = np.abs(_noisy(rng, 1e-4, rng.uniform(0.01, 0.15), rows, 1e-4))
        columns["loss"] = columns["loss"] + config["objective"]["beta"] * columns["kl/k3"]
    if framework != "leadline" and rng.random() < 0.6:
        columns["importance/log_ratio_abs_mean"] = np.abs(_noisy(rng, 0.012, 0.014, rows, 0.001))
        columns["importance/kl_k3"] = np.abs(_noisy(rng, 4e-4, 6e-4, rows, 1e-4))
        columns["importance/weight_mean"] = 1 + rng.normal(0, 0.004, rows)
    if config["rollout"]["max_staleness"]:
        columns["staleness/mean"] = np.clip(_noisy(rng, 0.8, 0.9, rows, 0.2), 0, 2)
        columns["staleness/max"] = np.full(rows, 2.0)
    dropped = [name for name in columns if rng.random() < 0.1 and name not in ("loss", "reward/mean")]
    for name in dropped:
        del columns[name]
    first = int(rng.choice([1, 1, 500]))  # a resumed log begins late
    keys = list(columns)
    values = np.array([columns[key] for key in keys]).T.tolist()
    table = [{"step": first + i, **dict(zip(keys, row, strict=True))} for i, row in enumerate(values)]
    return RunLog(table, config, framework=framework)
