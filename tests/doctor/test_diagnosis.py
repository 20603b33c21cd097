"""The whole answer: ranking, confidence, the signal budget, what is ruled out, and silence on healthy runs."""

import math
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from leadline.doctor import confidence, diagnose
from leadline.doctor.evidence import Evidence
from leadline.doctor.report import Report
from leadline.doctor.rule import Rule
from leadline.doctor.rules import RULES
from leadline.doctor.run_log import RunLog
from leadline.doctor.table import Column, Table
from leadline.doctor.view import View
from leadline.metrics import FOREIGN, QUANTITIES
from tests.doctor.healthy_runs import healthy_run

SEED = {
    "loss": [0.0] * 7,
    "optimizer/grad_norm": [0.0053, 0.00483, 0.00628, 0.00624, 0.0084, 0.00736, 0.00895],
    "reward/mean": [0.819, 1.007, 0.605, 1.171, 1.08, 0.925, 1.078],
    "reward/std": [0.683, 0.513, 0.602, 0.239, 0.529, 0.494, 0.204],
    "reward/zero_std_fraction": [0.0] * 7,
    "importance/weight_mean": [3.97e-10, 4.87e-9, 2.01e-10, 1.1e-7, 1.53e-7, 1.28e-8, 1.64e-10],
    "rollout/truncated_fraction": [1.0] * 7,
}


def names(report: Report) -> list[str]:
    return [finding.name for finding in report.findings]


def test_the_seeds_run_is_explained_with_what_it_is_not_and_what_not_to_do() -> None:
    report = diagnose(RunLog.from_columns(SEED))
    first = report.findings[0]
    assert (first.name, first.severity, first.confidence) == (
        "importance-correction-erases-signal",
        "error",
        "near certain",
    )
    assert "mask_truncated" in first.avoid
    out = {item.name: item.fact for item in report.ruled_out}
    assert "0.0 % of the groups" in out["zero-reward-variance-within-group"]
    assert {"nan-poisoned-weights", "no-update-grad-and-kl-exactly-zero"} <= set(out)
    assert report.budget and [factor.name for factor in report.budget.dead] == ["importance weight"]
    assert report.budget.dead[0].high == pytest.approx(4.87e-9)


def test_without_the_deciding_metric_the_doctor_does_not_guess_a_cause_and_says_what_to_log() -> None:
    blind = {name: values for name, values in SEED.items() if name != "importance/weight_mean"}
    run = RunLog(
        RunLog.from_columns(blind).rows,
        framework="trl",
        could_log={"importance/weight_mean": "vllm_importance_sampling_correction"},
    )
    report = diagnose(run)
    assert not any(finding.severity == "error" for finding in report.findings)
    assert "gradient-vanishes" in names(report)
    enabled = {item.name: item.enable for item in report.not_checked}
    assert "vllm_importance_sampling_correction" in enabled["sequence-is-sum-deflates-gradient"]
    assert report.budget and report.budget.factors[1].high is None


def test_a_cause_takes_its_consequences_with_it() -> None:
    rows = 6
    report = diagnose(
        RunLog.from_columns(
            {
                "loss": [0.0] * rows,
                "optimizer/grad_norm": [0.0] * rows,
                "reward/mean": [0.0] * rows,
                "reward/std": [0.0] * rows,
                "reward/zero_std_fraction": [1.0] * rows,
                "rollout/truncated_fraction": [1.0] * rows,
                "rollout/length_mean": [256.0] * rows,
            },
            {"sampling": {"max_tokens": 256}},
        )
    )
    assert names(report) == ["truncation-cap-too-small"]
    assert {"zero-reward-variance-within-group", "truncation-rate-high-unresolved"} <= set(
        report.findings[0].consequences
    )
    assert "1024" in report.findings[0].fix


def test_a_fix_names_the_option_of_the_framework() -> None:
    columns = {"optimizer/grad_norm": [0.3] * 6, "reward/mean": [0.4] * 6, "loss": [0.0] * 6, "reward/std": [0.4] * 6}
    weights = {**columns, "importance/weight_mean": [1e-8] * 6}
    rows = RunLog.from_columns(weights).rows
    ours, theirs = (diagnose(RunLog(rows, framework=name)).findings[0].fix for name in ("leadline", "trl"))
    assert 'importance_level = "token"' in ours
    assert 'vllm_importance_sampling_mode="token_truncate"' in theirs


def test_healthy_runs_of_many_shapes_have_no_error_and_hardly_a_warning() -> None:
    found = Counter(
        (finding.name, finding.severity) for seed in range(120) for finding in diagnose(healthy_run(seed)).findings
    )
    assert [name for name, severity in found if severity == "error"] == []
    assert sum(found.values()) <= 6


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"reward/std": [0.0] * 60, "reward/zero_std_fraction": [1.0] * 60, "optimizer/grad_norm": [0.0] * 60}, "zero-reward-variance-within-group"),
        ({"optimizer/grad_norm": [0.3] * 20 + [math.nan] * 40}, "nan-poisoned-weights"),
        ({"importance/weight_mean": [1e-8] * 60, "optimizer/grad_norm": [0.005] * 60}, "importance-correction-erases-signal"),
        ({"optimizer/grad_norm": [0.0] * 60, "kl/k3": [0.0] * 60}, "no-update-grad-and-kl-exactly-zero"),
        ({"kl/k3": [0.0005] * 5 + [0.6, 1.4, 2.5] + [3.0] * 52, "optimizer/learning_rate": [2e-5] * 60}, "learning-rate-too-high"),
        ({"kl/k3": [1e6] * 60}, "k3-kl-outlier-explosion"),
    ],
)  # fmt: skip
def test_each_fault_in_an_otherwise_healthy_run_is_named_first(changed: dict[str, list[float]], expected: str) -> None:
    healthy = {
        "loss": [1e-8] * 60,
        "optimizer/grad_norm": [0.3] * 60,
        "reward/mean": [0.4] * 60,
        "reward/std": [0.4] * 60,
        "reward/zero_std_fraction": [0.2] * 60,
        "policy/entropy": [0.5] * 60,
        "rollout/truncated_fraction": [0.03] * 60,
    }
    assert names(diagnose(RunLog.from_columns(healthy))) == []
    assert names(diagnose(RunLog.from_columns(healthy | changed)))[0] == expected


def test_a_log_that_says_nothing_decisive_is_undecided_not_healthy() -> None:
    assert diagnose(RunLog.from_columns({"loss": [0.0, 0.1]})).verdict == "undecided"
    assert diagnose(RunLog.from_columns({"loss": [0.0] * 3, "optimizer/grad_norm": [0.3] * 3})).verdict == "healthy"


class Broken(Rule):
    """A rule that raises."""

    id, name, severity = "LL999", "broken", "error"

    def examine(self, run: View) -> list[Evidence]:
        raise ValueError("no such thing")


def test_a_check_that_breaks_is_told_and_nothing_is_called_healthy() -> None:
    run = RunLog.from_columns({"loss": [0.0] * 3, "optimizer/grad_norm": [0.3] * 3})
    report = diagnose(run, [Broken()])
    assert report.verdict == "undecided"
    assert [item.broke for item in report.not_checked] == ["ValueError: no such thing"]


def test_a_config_alone_is_linted() -> None:
    report = diagnose(
        RunLog([], {"optimizer": {"learning_rate": 5e-5, "max_grad_norm": -1.0}, "model": {"lora_rank": 0}})
    )
    assert set(names(report)) == {"learning-rate-too-high", "grad-clip-swallows-update"}
    assert diagnose(RunLog([], {"optimizer": {"learning_rate": 1e-6}})).verdict == "healthy"


def test_confidence_follows_the_table() -> None:
    def item(strength: str, metric: str = "loss") -> Evidence:
        return Evidence(metric, 1, 0.0, 0.0, "A fact.", strength)  # type: ignore[arg-type]

    assert confidence.word(confidence.points([item("proof")])) == "near certain"
    assert confidence.word(confidence.points([item("strong")])) == "likely"
    assert confidence.word(confidence.points([item("strong"), item("weak", "a"), item("weak", "b")])) == "near certain"
    assert confidence.word(confidence.points([item("weak")])) == "possible"
    assert confidence.word(confidence.points([item("strong")], [item("strong")])) == "unlikely"
    assert confidence.points([]) == 0


def test_the_same_input_gives_the_same_answer() -> None:
    for seed in (3, 17):
        assert diagnose(healthy_run(seed)) == diagnose(healthy_run(seed))
    assert diagnose(RunLog.from_columns(SEED)) == diagnose(RunLog.from_columns(SEED))


def test_a_path_is_read(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    file.write_text(
        "".join(f'{{"step": {i}, "loss": 0.0, "grad_norm": 0.3, "reward": 0.5, "reward_std": 0.4}}\n' for i in range(3))
    )
    assert diagnose(file).verdict == "healthy"


def test_a_hundred_thousand_steps_take_about_a_second() -> None:
    rng = np.random.default_rng(0)
    known = [q.name for q in (*QUANTITIES, *FOREIGN) if q.name == q.name.lower() and q.name != "step"][:60]
    columns = {name: Column.of_numbers(np.abs(rng.normal(0.5, 0.2, 100_000))) for name in known}
    run = RunLog(Table(np.arange(1.0, 100_001.0), columns))
    before = time.process_time()
    report = diagnose(run)
    assert time.process_time() - before < 2.5
    assert report.findings and not any(item.broke for item in report.not_checked)
    assert len(RULES) > 90


@pytest.mark.parametrize("seed", range(40))
def test_no_check_breaks_on_any_numbers_or_settings(seed: int) -> None:
    rng = np.random.default_rng(seed)
    pool = [0.0, 1.0, -1.0, math.nan, math.inf, -math.inf, 1e300, -1e300, 1e-300, 0.5, 100.0]
    names_ = [q.name for q in (*QUANTITIES, *FOREIGN) if q.name == q.name.lower() and q.name != "step"]
    chosen = rng.choice(names_, size=40, replace=False)
    rows = [
        {"step": i + 1, **{str(name): float(rng.choice(pool)) for name in chosen if rng.random() < 0.9}}
        for i in range(int(rng.choice([1, 3, 8, 40])))
    ]
    odd = [0, 1, -1, None, "words", "1|2", True, 1e-6, [1, 2], {"a": 1}, math.nan]
    settings = ("objective.beta", "optimizer.learning_rate", "sampling.max_tokens", "sampling.top_p", "rollout.group_size",
                "model.lora_rank", "objective.clip_low", "raw.dropout", "raw.min_length", "optimizer.max_grad_norm")  # fmt: skip
    config = {name: odd[int(rng.integers(len(odd)))] for name in settings}
    report = diagnose(RunLog(rows, config, framework=str(rng.choice(["trl", "verl", "leadline"]))))
    assert [(item.name, item.broke) for item in report.not_checked if item.broke] == []


def test_a_setting_that_is_an_empty_list_says_nothing_by_its_name() -> None:
    pattern = r"\bstop\W*= \S"
    assert View(RunLog([], {"sampling": {"stop": []}})).says(pattern) is None
    assert View(RunLog([], {"sampling": {"stop": ["</a>"]}})).says(pattern) == "sampling.stop = ['</a>']"
