import ast
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

import leadline.doctor
from leadline.doctor.examine import WINDOW, Verdict, examine, live_findings
from leadline.doctor.json_lines import read_lines, to_line
from leadline.doctor.rule import PERSISTENT, Finding
from leadline.doctor.run_log import RunLog

THIRD_PARTY = (
    "numpy",
    "rich",
    "typer",
    "jinja2",
    "markupsafe",
    "pydantic_core",
    "yaml",
    "polars",
    "pyarrow",
    "wandb",
    "zstandard",
)
"""What comes with leadline, and what a reader imports when it meets such a file."""

CONFIG = {"model": {"dtype": "float32"}}


def healthy_row(step: int) -> dict[str, float]:
    """As a run on policy logs it: the loss is 0 to rounding, the gradient is not; one token in fifty is clipped."""
    wobble = 0.1 * math.sin(step)
    return {
        "step": step,
        "loss": 1e-9 * wobble,
        "reward/mean": 0.3 + wobble,
        "reward/group_std": 0.2 + wobble,
        "rollout/failed_fraction": 0.0,
        "rollout/zero_signal_fraction": 0.4 + 4 * wobble,
        "rollout/truncated_fraction": 0.3 + wobble,
        "rollout/unscored_fraction": 0.0,
        "staleness/max": 0,
        "advantage/abs_mean": 0.7,
        "importance/ratio_mean": 1.0 + wobble / 10,
        "importance/log_ratio_abs_mean": 0.012,
        "importance/ess": 0.97,
        "policy/first_ratio_error": 3e-6,
        "policy/first_kl_old": 1e-13,
        "policy/first_clip_fraction": 0.0,
        "kl/k3": 1e-4 * step,
        "optimizer/grad_norm": 0.8 + wobble,
        "optimizer/discarded_steps": 0,
        "ledger/sampled_mass": 0.8,
        "ledger/importance_masked_share": 0.0,
        "ledger/importance_shrunk_share": 0.01,
        "ledger/truncated_share": 0.0,
        "ledger/clipped_share": 0.02,
        "ledger/reached_share": 0.97,
    }


def seed_row(step: int) -> dict[str, float]:
    """The run whose loss was 0.0: sequence ratios of 1e-10, every completion masked, rewards as healthy as can be."""
    return healthy_row(step) | {
        "loss": 0.0,
        "importance/ratio_mean": 0.74,
        "importance/log_ratio_abs_mean": 0.309,
        "importance/sequence_ratio_mean": 3.97e-10,
        "optimizer/grad_norm": 0.0,
        "ledger/importance_masked_share": 1.0,
        "ledger/importance_shrunk_share": 0.0,
        "ledger/clipped_share": 0.0,
        "ledger/reached_share": 0.0,
    }


def live(rows: list[dict[str, float]]) -> list[str]:
    return [finding.name for finding in live_findings(rows, CONFIG, int(rows[-1]["step"]))]


def test_a_healthy_run_is_silent_at_every_age() -> None:
    rows = [healthy_row(step) for step in range(1, 60)]
    assert [live(rows[:age]) for age in range(1, len(rows) + 1)] == [[]] * len(rows)


def test_no_rule_fires_on_a_whole_healthy_log() -> None:
    diagnoses = examine(RunLog([healthy_row(step) for step in range(1, 60)], CONFIG))
    assert {diagnosis.verdict for diagnosis in diagnoses} == {Verdict.CLEAR, Verdict.RULED_OUT, Verdict.NOT_CHECKED}
    assert [diagnosis.rule.name for diagnosis in diagnoses if diagnosis.verdict is Verdict.FIRES] == []


def test_an_empty_log_is_not_checked_rather_than_clear() -> None:
    assert {diagnosis.verdict for diagnosis in examine(RunLog([])) if diagnosis.rule.needs} == {Verdict.NOT_CHECKED}


def test_what_is_nan_throughout_is_not_checked_rather_than_clear() -> None:
    (dead,) = [d for d in examine(RunLog.from_columns({
        "ledger/sampled_mass": [0.0, 0.0], "ledger/reached_share": [math.nan, math.nan]
    })) if d.rule.name == "dead-update"]  # fmt: skip
    assert dead.verdict is Verdict.NOT_CHECKED
    assert dead.undefined == ("ledger/reached_share",) and dead.missing == ()


def test_the_run_whose_loss_was_zero_is_explained_at_its_third_step() -> None:
    rows = [seed_row(step) for step in (1, 2, 3)]
    assert live(rows[:2]) == []
    findings = {finding.name: finding for finding in live_findings(rows, CONFIG, 3)}
    # the dead update is a consequence and no finding of its own
    assert list(findings) == ["importance-correction-erases-signal", "rollout-logprob-mismatch"]
    erased = findings["importance-correction-erases-signal"]
    assert (erased.severity, erased.confidence) == ("error", "near certain")
    assert "100 % of the signal was masked" in erased.message
    assert 'importance_level = "token"' in erased.fix and '"truncate"' in erased.fix
    assert "mask_truncated" in erased.avoid
    assert "0.309" in findings["rollout-logprob-mismatch"].message


@pytest.mark.parametrize("stage", ["truncated", "clipped", "discarded", "failed"])
def test_a_dead_update_names_the_largest_stage_and_its_remedy(stage: str) -> None:
    row = {"ledger/sampled_mass": 1.0, "ledger/reached_share": 0.0, "ledger/stale_share": 0.1}
    rows = [{"step": step, **row, f"ledger/{stage}_share": 0.9} for step in (1, 2, 3)]
    (dead,) = [finding for finding in live_findings(rows, CONFIG, 3) if finding.name == "dead-update"]
    assert f"90 % of it ended at {stage}" in dead.message
    others = [{"step": step, **row} for step in (1, 2, 3)]
    (stale,) = [finding for finding in live_findings(others, CONFIG, 3) if finding.name == "dead-update"]
    assert dead.fix != stale.fix and "max_staleness" in stale.fix


def test_a_finding_is_gone_once_the_run_has_recovered() -> None:
    rows = [seed_row(step) for step in (1, 2, 3)]
    assert live([*rows, healthy_row(4)]) == []


def test_a_discarded_step_is_a_finding_of_that_step_only() -> None:
    bad = healthy_row(2) | {"loss": math.nan, "optimizer/grad_norm": math.nan, "optimizer/discarded_steps": 1}
    assert live([healthy_row(1), bad]) == ["nan-poisoned-weights"]
    assert live([healthy_row(1), bad, healthy_row(3)]) == []


def test_steps_without_any_signal_do_not_hide_a_dead_update() -> None:
    nothing = {"ledger/sampled_mass": 0.0, "ledger/reached_share": math.nan}
    dead = {"ledger/importance_masked_share": 0.1, "ledger/clipped_share": 0.9, "importance/sequence_ratio_mean": 1.0}
    rows = [seed_row(step) | dead if step % 2 else healthy_row(step) | nothing for step in range(1, 2 * PERSISTENT)]
    assert "dead-update" in live(rows)


def test_the_limits_of_the_first_update_follow_the_dtype() -> None:
    rows = [healthy_row(1) | {"policy/first_ratio_error": 0.05}]
    (finding,) = live_findings(rows, {"model": {"dtype": "float32"}}, 1)
    assert finding.name == "first-update-identity-broken"
    assert live_findings(rows, {"model": {"dtype": "bfloat16"}}, 1) == []
    assert live_findings(rows, None, 1), "an unknown dtype gets the strict limit"


class Unread(list[dict[str, float]]):
    """Rows that may be sliced, and not walked through."""

    def __iter__(self):  # type: ignore[no-untyped-def]
        raise AssertionError("the whole log was read")


def test_the_live_doctor_reads_only_the_last_rows() -> None:
    rows = Unread(seed_row(step) for step in range(1, 1000))
    assert "importance-correction-erases-signal" in live(rows)
    assert WINDOW < 50


def test_a_finding_survives_json_with_its_nan(tmp_path: Path) -> None:
    rows = [healthy_row(1) | {"loss": math.nan, "optimizer/grad_norm": math.nan}]
    del rows[0]["optimizer/discarded_steps"]
    (finding,) = live_findings(rows, CONFIG, 1)
    file = tmp_path / "findings.jsonl"
    file.write_bytes(to_line(finding.to_dict()))
    back = Finding.from_dict(read_lines(file)[0])
    assert math.isnan(back.evidence[0].value)
    assert (back.rule, back.message, back.fix, back.step) == (finding.rule, finding.message, finding.fix, 1)
    assert isinstance(back.evidence, tuple)


def test_a_log_keeps_missing_and_nan_apart() -> None:
    run = RunLog([{"step": 1, "a": math.nan}, {"step": 2}, {"step": 3, "a": 2.0, "b": math.nan}])
    assert [step for step, _ in run.series("a")] == [1, 3]
    assert (run.is_missing("a"), run.is_undefined("a")) == (False, False)
    assert (run.is_missing("b"), run.is_undefined("b")) == (False, True)
    assert (run.is_missing("c"), run.is_undefined("c")) == (True, False)


def test_a_setting_is_none_where_it_is_not_known() -> None:
    assert RunLog([], CONFIG).setting("model.dtype") == "float32"
    assert RunLog([], CONFIG).setting("model.dtype.bits") is None
    assert RunLog([], CONFIG).setting("optimizer.beta1") is None
    assert RunLog([]).setting("model.dtype") is None


def test_the_doctor_imports_nothing_heavy_and_is_quick() -> None:
    code = """
import sys, time
before = time.process_time()
from leadline.doctor import diagnose
print(time.process_time() - before, [m for m in ("torch", "polars", "pyarrow", "rich", "typer") if m in sys.modules])
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment).stdout
        for _ in range(3)
    ]
    seconds = min(float(printed.split(maxsplit=1)[0]) for printed in runs)
    assert runs[0].split(maxsplit=1)[1].strip() == "[]"
    assert seconds < 0.5


def test_the_doctor_imports_only_metrics_errors_and_itself() -> None:
    assert leadline.doctor.__file__
    allowed = ("leadline.doctor", "leadline.metrics", "leadline.errors", *THIRD_PARTY)
    version = "leadline"  # the package itself holds nothing but its version
    for path in Path(leadline.doctor.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                known = name.split(".")[0] in sys.stdlib_module_names or name == version
                assert known or name.startswith(allowed), (path, name)
