"""The report as JSON. The fields are documented in docs/doctor.md; NaN and infinities are the strings "NaN", "Infinity"."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from leadline.doctor.reports.examined import Examined, worst

FORMAT = 1
"""Raised when a field changes its meaning or goes; a new field does not raise it."""


def render(runs: Sequence[Examined], version: str) -> str:
    """One object for all runs; the findings of all, most likely first, each with the source of its run."""
    return json.dumps(_plain(as_dict(runs, version)), indent=2, allow_nan=False, ensure_ascii=False)


def as_dict(runs: Sequence[Examined], version: str) -> dict[str, Any]:
    """Plain values, floats as they are."""
    return {
        "format": FORMAT,
        "leadline": version,
        "verdict": worst(runs),
        "findings": [
            {"run": run.report.source, **finding.to_dict()}
            for run in sorted(runs, key=lambda run: run.report.verdict != "fault")
            for finding in run.report.findings
        ],
        "runs": [_run(run) for run in runs],
    }


def _run(examined: Examined) -> dict[str, Any]:
    run, report = examined.run, examined.report
    return {
        "source": report.source,
        "framework": report.framework,
        "verdict": report.verdict,
        "rows": len(run.rows),
        "first_step": int(run.rows[0]["step"]) if run.rows else None,
        "last_step": int(run.rows[-1]["step"]) if run.rows else None,
        "facts": dict(report.facts),
        "notes": list(report.notes),
        "signal_budget": asdict(report.budget) if report.budget else None,
        "ruled_out": [asdict(cause) for cause in report.ruled_out],
        "not_checked": [asdict(check) for check in report.not_checked],
    }


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
