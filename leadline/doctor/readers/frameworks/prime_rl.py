"""prime-rl: trainer and orchestrator."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from leadline.doctor.readers.frameworks.framework import Framework, Key, Row

GIB = 2.0**30
FILTERED = "over the tokens left after groups without advantage are removed; a NaN is not written at all"
CURRENT = "current policy in place of pi_old; " + FILTERED
DPPO = "tokens that the DPPO mask on the probability difference removed"
BINARY = "exact for rewards of 0 and 1 only"
AGENT = r"train/agg/(?:all|effective)/(?:[^/]+/)?"

KEYS: Mapping[str, str | Key] = {
    "loss/mean": Key("loss", "policy and KL term together"),
    "optim/grad_norm": "optimizer/grad_norm",
    "optim/lr": "optimizer/learning_rate",
    "mismatch_kl/all/mean": Key("importance/kl_k3", CURRENT),
    "mismatch_kl/mean": Key("importance/kl_k3", CURRENT),
    "entropy/all/mean": "policy/entropy",
    "entropy/mean": "policy/entropy",
    "entropy/all/max": "policy/entropy_max",
    "entropy/all/min": "policy/entropy_min",
    "is_masked/mean": Key("policy/masked_fraction", DPPO),
    "is_masked/all/mean": Key("policy/masked_fraction", DPPO),
    "is_masked_low/mean": Key("policy/clip_low_fraction", DPPO),
    "is_masked_high/mean": Key("policy/clip_high_fraction", DPPO),
    "importance_ratio/mean": "importance/policy_ratio_mean",
    "reward/mean": "reward/mean",
    "reward/std": "reward/std",
    "reward/min": "reward/min",
    "reward/max": "reward/max",
    "batch/solve_none": Key("reward/all_failed_fraction", BINARY),
    "batch/solve_all": Key("reward/all_solved_fraction", BINARY),
    "seq_len/mean": "rollout/total_length_mean",
    "seq_len/max": "rollout/total_length_max",
    "off_policy/mean": "staleness/mean",
    "off_policy/max": "staleness/max",
    "off_policy/dropped": "rollout/dropped_samples",
    "time/step": "time/step_s",
    "time/wait_for_batch": "time/wait_s",
    "time/broadcast_weights": "time/load_weights_s",
    "time/forward_backward": "time/update_s",
    "perf/throughput": "throughput/tokens_per_s",
    "perf/throughput_per_gpu": "throughput/tokens_per_device_s",
    "perf/mfu": Key("throughput/model_flops_fraction", factor=0.01),
    "perf/peak_memory": Key("memory/allocated_bytes", factor=GIB),
}

PATTERNS: tuple[tuple[str, str | Key], ...] = (
    (AGENT + r"reward/(mean|std|min|max)", "reward/{0}"),
    (AGENT + r"num_output_tokens/(mean|std|min|max)", "rollout/length_{0}"),
    (AGENT + r"num_input_tokens/(mean|min|max)", "rollout/prompt_length_{0}"),
    (AGENT + r"is_truncated/mean", "rollout/truncated_fraction"),
    (AGENT + r"has_error/mean", "rollout/failed_fraction"),
    (AGENT + r"num_turns/(mean|min|max)", "rollout/turns_{0}"),
    (AGENT + r"solved_none", Key("reward/all_failed_fraction", BINARY)),
    (AGENT + r"solved_all", Key("reward/all_solved_fraction", BINARY)),
    (AGENT + r"solved_some", "reward/mixed_fraction"),
    (AGENT + r"is_trainable/mean", "rollout/filter_pass_fraction"),
    (r"eval/(.+)", "eval/score/{0}"),
    (r"time/([^/]+)", "time/{0}_s"),
)

_LINE = re.compile(r"\bStep (\d+)\s*\|(.*)")
_CELLS: tuple[tuple[str, str, float], ...] = (
    (r"Loss:?\s+(\S+)", "loss/mean", 1.0),
    (r"Entropy:?\s+(\S+)", "entropy/all/mean", 1.0),
    (r"Mismatch KL:?\s+(\S+)", "mismatch_kl/all/mean", 1.0),
    (r"Grad\.? Norm:?\s+(\S+)", "optim/grad_norm", 1.0),
    (r"LR:?\s+(\S+)", "optim/lr", 1.0),
    (r"Throughput:?\s+(\S+) tokens/s", "perf/throughput", 1.0),
    (r"MFU:?\s+(\S+)%", "perf/mfu", 1.0),
    (r"Peak Mem\.:?\s+([\d.]+)(?:/[\d.]+)? GiB", "perf/peak_memory", 1.0),
    (r"Reward:?\s+(\S+)", "reward/mean", 1.0),
    (r"Trainable:?\s+\d+/\d+ \(([\d.]+)%\)", "train/agg/all/is_trainable/mean", 0.01),
    (r"Turns:?\s+(\S+)", "train/agg/all/num_turns/mean", 1.0),
    (r"Max\.? Off-Policy(?: Level)?:?\s+(\S+)", "off_policy/max", 1.0),
    (r"Async Level:?\s+(\S+)", "off_policy/mean", 1.0),
    (r"Error:?\s+([\d.]+)%", "train/agg/all/has_error/mean", 0.01),
    (r"Truncation:?\s+([\d.]+)%", "train/agg/all/is_truncated/mean", 0.01),
    (r"Seq\. Length:?\s+(\S+) tokens/sample", "seq_len/mean", 1.0),
    (r"(?:Time:\s*)?([\d.]+)s", "time/step", 1.0),
)


def console(lines: Iterator[str]) -> Iterator[Row]:
    """`SUCCESS Step 12 | 9.50s | Loss 0.0012 | ...` of either process."""
    for line in lines:
        match = _LINE.search(line)
        if not match:
            continue
        row: dict[str, Any] = {"step": match[1]}
        for cell in match[2].split("|"):
            for pattern, key, factor in _CELLS:
                value = re.fullmatch(pattern, cell.strip())
                if value:
                    row[key] = value[1] if factor == 1.0 else float(value[1]) * factor
        if len(row) > 1:
            yield row


OPTIONS = {
    "model.name": "model.name",
    "rollout.group_size": "orchestrator.rollouts_per_example",
    "rollout.max_staleness": "orchestrator.max_off_policy_steps",
    "sampling.temperature": "orchestrator.sampling.temperature",
    "sampling.max_tokens": "orchestrator.sampling.max_tokens",
    "objective.loss": "trainer.loss.type",
    "optimizer.learning_rate": "trainer.optim.lr",
    "optimizer.max_grad_norm": "trainer.optim.max_norm",
    "optimizer.weight_decay": "trainer.optim.weight_decay",
    "run.steps": "max_steps",
    "engine.kind": "inference.backend",
}
ALIASES = {
    "orchestrator.group_size": "rollout.group_size",
    "optim.lr": "optimizer.learning_rate",
    "max_off_policy_steps": "rollout.max_staleness",
    "sampling.max_tokens": "sampling.max_tokens",
    "sampling.temperature": "sampling.temperature",
    "orchestrator.train.sampling.max_tokens": "sampling.max_tokens",
    "orchestrator.train.sampling.temperature": "sampling.temperature",
}

PRIME_RL = Framework(
    name="prime_rl",
    words=("prime-rl", "prime_rl", "primerl", "primeintellect"),
    keys=KEYS,
    patterns=PATTERNS,
    steps=("step", "_step", "Step"),
    marks=(r"SUCCESS Step \d+ \|", r"\bStep \d+ \|.*(?:Mismatch KL|Grad\. Norm|Off-Policy|Async Level)"),
    console=console,
    could_log={
        "importance/policy_ratio_mean": "enable_token_export",
        "importance/log_ratio_abs_mean": "enable_token_export",
        "eval/reward_mean": "orchestrator.eval",
    },
    options=OPTIONS,
    aliases=ALIASES,
    ignored=(r"step|_step|time|_runtime|_timestamp|progress/.*|disk/.*|system/.*|inference/.*",),
)
