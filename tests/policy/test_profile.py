"""Where the time goes adds up, and the useful work is counted as by hand."""

import io
import time

import pytest
import torch
from rich.console import Console

from leadline.policy.batch import build_batch
from leadline.policy.profile import STAGES, Profile, Stopwatch, gemm_rate, update_flops
from tests.builders import group, policy, settings

METRICS = {
    "time/step_s": 1.0,
    "time/wait_for_rollouts_s": 0.5,
    "time/reward_s": 0.1,
    "time/forward_s": 0.1,
    "time/backward_s": 0.2,
    "time/load_weights_s": 0.05,
}


def test_the_stages_and_the_overhead_are_the_whole_step() -> None:
    profile = Profile(gemm_flops_per_s=2e9)
    profile.add({**METRICS, "time/step_s": 60.0}, flops=1.0, record_seconds=1.0)  # the first loads kernels
    for _ in range(3):
        profile.add(METRICS, flops=3e8, record_seconds=0.25)
    summary = profile.summary()
    stages = {name: stage["seconds"] for name, stage in summary["stages"].items()}
    assert tuple(stages) == (*STAGES, "overhead")
    assert stages["generate"] == pytest.approx(0.4)
    assert stages["reward"] == pytest.approx(0.1)
    assert stages["record"] == 0.25
    assert stages["overhead"] == pytest.approx(0.15)
    assert sum(stages.values()) == pytest.approx(summary["step_s"]) == pytest.approx(1.25)
    assert sum(stage["share"] for stage in summary["stages"].values()) == pytest.approx(1)
    assert summary["update_flops_per_s"] == pytest.approx(1e9)
    assert summary["gemm_share"] == pytest.approx(0.5)


def test_the_report_says_what_the_summary_says() -> None:
    profile = Profile(gemm_flops_per_s=2e9)
    profile.add(METRICS, flops=3e8, record_seconds=0.0)
    console = Console(file=io.StringIO(), width=120)
    console.print(profile.report())
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "a step of 1.000 s" in text
    assert "load weights" in text and "0.0500" in text and "5.0%" in text
    assert "1 GFLOP/s of useful work, 50% of bare matrix multiplication (2 GFLOP/s)" in text


def test_a_stopwatch_sums_a_stage_up_until_it_is_read() -> None:
    watch = Stopwatch(torch.device("cpu"))
    for _ in range(2):
        with watch("forward"):
            time.sleep(0.01)
    metrics = watch.metrics()
    assert 0.02 <= metrics.pop("time/forward_s") < 1
    assert metrics == watch.metrics() == {}


def test_an_update_says_how_long_forward_backward_and_optimizer_took() -> None:
    made = policy(settings())
    metrics = made.update(build_batch([group((0.0, 1.0), (5, 4))], made.config, 0)).metrics
    parts = [metrics[f"time/{stage}_s"] for stage in ("forward", "backward", "optimizer")]
    assert all(part > 0 for part in parts)
    assert sum(parts) <= metrics["time/update_s"]


def test_useful_work_is_three_forward_passes_of_what_has_a_gradient() -> None:
    made = policy(settings())
    config = made.model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    queries = config.num_attention_heads * head_dim
    keys = config.num_key_value_heads * head_dim
    layer = config.hidden_size * (2 * queries + 2 * keys + 3 * config.intermediate_size)
    groups = [group((0.0, 1.0), (3, 5)), group((1.0, 1.0), (4, 4), seed=3)]  # the second has no signal
    prompt = len(groups[0].prompt.token_ids)
    positions, predicted = prompt + 2 + 4, 3 + 5
    pairs = prompt * (prompt + 1) // 2 + 2 * prompt + 3 + 4 * prompt + 10
    forward = (
        2 * config.num_hidden_layers * layer * positions
        + 2 * config.vocab_size * config.hidden_size * predicted
        + 4 * config.num_hidden_layers * queries * pairs
    )
    assert update_flops(made.model, build_batch(groups, made.config, 0)) == 3 * forward
    assert update_flops(made.model, build_batch(groups, made.config, 0), passes=2) == 6 * forward


def test_the_rate_of_bare_multiplications_is_by_the_clock_that_is_given() -> None:
    ticks = iter(range(1000))
    model = policy(settings()).model
    weight = max((p for n, p in model.named_parameters() if "mlp" in n), key=lambda p: p.numel())
    assert gemm_rate(model, 10, clock=lambda: float(next(ticks))) == 4 * 6 * 10 * weight.numel()
