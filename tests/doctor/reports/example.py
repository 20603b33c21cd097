"""A sick run of 120 steps and what a doctor could say about it: the input of the renderers' tests."""

import dataclasses
import math

from leadline.doctor.report import Budget, Factor, NotChecked, Report, RuledOut
from leadline.doctor.reports.examined import Examined
from leadline.doctor.rule import Evidence, Finding
from leadline.doctor.run_log import RunLog
from leadline.metrics import LEDGER_STAGES

STEPS, ONSET = 120, 60
HOSTILE = "<script>alert('x')</script> [red]bold[/red] | `"
"""What a log may hold, and no report may run or lay out."""


def _columns() -> dict[str, list[float]]:
    sick = [step >= ONSET for step in range(1, STEPS + 1)]
    shares = {stage: [0.0] * STEPS for stage in LEDGER_STAGES}
    shares["reached"] = [0.1 if ill else 0.8 for ill in sick]
    shares["importance_masked"] = [0.7 if ill else 0.0 for ill in sick]
    shares["no_signal"] = [0.2] * STEPS
    return {
        "loss": [0.0 if ill else 0.01 for ill in sick],
        "reward/mean": [0.2 + 0.002 * step for step in range(STEPS)],
        "optimizer/grad_norm": [math.nan if step == 100 else 0.005 if sick[step] else 0.5 for step in range(STEPS)],
        "importance/weight_mean": [1e-8 if ill else 1.0 for ill in sick],
        "importance/ratio_mean": [1e-8 if ill else 1.0 for ill in sick],
        **{f"ledger/{stage}_share": values for stage, values in shares.items()},
    }


RUN = dataclasses.replace(RunLog.from_columns(_columns()), framework="trl", source="runs/one/trainer_state.json")

FIRST = Finding(
    rule="LL302",
    name="importance-correction-erases-signal",
    severity="error",
    title="The importance correction takes most of the learning signal.",
    message="The weight was 1e-8.",
    fix='Set `vllm_importance_sampling_mode = "token_truncate"`.',
    evidence=(
        Evidence("importance/weight_mean", 120, 1e-8, 0.5, "The mean weight was 1e-8 since step 60.", "proof", ONSET),
        Evidence("optimizer/grad_norm", 120, 0.005, 0.01, "The gradient norm fell to 0.005.", "strong", ONSET),
    ),
    step=ONSET,
    confidence="near certain",
    against=(Evidence("reward/mean", 120, 0.4, 0.0, "The reward still rises."),),
    rivals=("dead-update (likely)",),
    consequences=("no-update-grad-and-kl-exactly-zero",),
    avoid="Do not mask truncated completions.",
    confirm="Run one batch without the correction.",
)
SECOND = Finding(
    rule="LL201",
    name="truncation-rate-high-unresolved",
    severity="warning",
    title="More than half of the completions run into the token limit.",
    message="A setting is " + HOSTILE,
    fix="Raise `max_completion_length`.",
    evidence=(),
    step=90,
    confidence="possible",
)
REPORT = Report(
    verdict="fault",
    findings=(FIRST, SECOND),
    budget=Budget(
        (
            Factor("advantages", 0.8, 0.8, "ledger/no_signal_share"),
            Factor("importance weight", 1e-8, 1e-8, "importance/weight_mean", dead=True),
            Factor("tokens kept", 0.4, 1.0, "rollout/truncated_fraction"),
            Factor("clip pass", None, None),
        ),
        101,
        120,
        "Besides the product, these terms move the weights: KL (`beta` = 0.04).",
    ),
    ruled_out=(
        RuledOut("LL101", "zero-reward-variance-within-group", "All rewards are equal.", "80 % of groups vary."),
    ),
    not_checked=(
        NotChecked("LL401", "first-update-identity-broken", "It differs.", ("policy/first_ratio_error",), "Use it."),
    ),
    facts={"loss": "grpo", "healthy-negative-loss": "A negative loss is normal."},
    source=RUN.source,
    framework="trl",
    notes=("Two rows were logged twice.",),
)
SICK = Examined(RUN, REPORT)
HEALTHY = Examined(RUN, Report("healthy", (), source="runs/two", framework="trl"))
UNDECIDED = Examined(
    RunLog([]),
    Report(
        "undecided",
        (),
        not_checked=(NotChecked("LL402", "nan", "NaN.", (), broke="ZeroDivisionError: x"),),
        source="c.yaml",
    ),
)
