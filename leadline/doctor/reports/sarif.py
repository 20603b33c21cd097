"""Findings about settings as SARIF 2.1.0, for code scanning."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from leadline.doctor.reports.examined import Examined
from leadline.doctor.rule import Finding

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
SETTINGS = (".json", ".yaml", ".yml", ".toml", ".sh", ".txt", ".py")
MAX_BYTES = 4 << 20
"""A larger file is a log, in which no setting is looked for."""


def render(runs: Sequence[Examined], version: str) -> str:
    """One SARIF run; each finding is a result at the line of its setting in the file that holds it."""
    found = [(run, finding) for run in runs for finding in run.report.findings]
    rules = {finding.rule: finding for _, finding in found}
    driver = {"name": "leadline", "version": version, "rules": [_rule(rules[name]) for name in sorted(rules)]}
    results = [_result(run, finding, sorted(rules)) for run, finding in found]
    log = {"$schema": SCHEMA, "version": "2.1.0", "runs": [{"tool": {"driver": driver}, "results": results}]}
    return json.dumps(log, indent=2, ensure_ascii=False)


def _rule(finding: Finding) -> dict[str, Any]:
    return {
        "id": finding.rule,
        "name": finding.name,
        "shortDescription": {"text": finding.title},
        "help": {"text": finding.fix or finding.title},
        "defaultConfiguration": {"level": finding.severity},
    }


def _result(examined: Examined, finding: Finding, rules: Sequence[str]) -> dict[str, Any]:
    text = " ".join(part for part in (finding.message, finding.fix and f"Fix: {finding.fix}", finding.avoid) if part)
    path, line = _place(examined, finding)
    where = {"artifactLocation": {"uri": path.as_posix()}, "region": {"startLine": line}}
    return {
        "ruleId": finding.rule,
        "ruleIndex": rules.index(finding.rule),
        "level": finding.severity,
        "message": {"text": text},
        "locations": [{"physicalLocation": where}],
        "partialFingerprints": {"leadline/v1": f"{finding.rule}:{path.name}"},
    }


def _place(examined: Examined, finding: Finding) -> tuple[Path, int]:
    """File and line of the first setting that the evidence is about; the first line of what was read if none is found."""
    files = [file for path in _paths(examined) for file in _files(path)]
    for name in _names(examined, finding):
        pattern = re.compile(rf"(?<![\w.]){re.escape(name)}(?!\w)")
        for file in files:
            for number, line in enumerate(_lines(file), start=1):
                if pattern.search(line):
                    return file, number
    return (files or _paths(examined))[0], 1


def _names(examined: Examined, finding: Finding) -> Iterator[str]:
    """What the settings may be called in a file: in full, then by the last part, which is a key in nested files."""
    for item in finding.evidence:
        option = examined.run.option(item.metric)
        for name in (option, item.metric):
            if name:
                yield name
                yield name.rsplit(".", 1)[-1]


def _paths(examined: Examined) -> list[Path]:
    return [*examined.configs, *map(Path, examined.report.source.split(", "))]


def _files(path: Path) -> list[Path]:
    found = sorted(path.iterdir()) if path.is_dir() else [path]
    return [file for file in found if file.is_file() and file.suffix in SETTINGS and file.stat().st_size <= MAX_BYTES]


def _lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8", errors="replace").splitlines()
