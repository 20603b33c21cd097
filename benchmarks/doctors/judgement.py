"""Whether what a doctor said is right. The rules are at the head of `__main__.py`."""

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.doctors.asked import Said, ask_leadline, ask_rldoctor, ask_rlprobe
from benchmarks.doctors.scenarios import Scenario


def judge_ours(scenario: Scenario, said: Sequence[Said]) -> str:
    names = [finding.name for finding in said]
    if scenario.cause is None:
        return "false alarm" if names else "right"
    if not names:
        return "silent"
    causes = scenario.cause.split("|")
    return "right" if names[0] in causes else "family" if set(causes) & set(names) else "wrong"


def judge_rival(scenario: Scenario, said: Sequence[Said]) -> str:
    if scenario.cause is None:
        return "false alarm" if said else "right"
    if not said:
        return "silent"
    if any(_names_the_cause(scenario, finding) for finding in said):
        return "right"
    return "family" if any(finding.name in {*scenario.family, "plateau"} for finding in said) else "wrong"


def _names_the_cause(scenario: Scenario, finding: Said) -> bool:
    words = scenario.right.get(finding.name, scenario.right.get("*"))
    return words is not None and bool(re.search(words, finding.words))


@dataclass(frozen=True)
class Doctor:
    name: str
    ask: Callable[[Path], list[Said]]
    judge: Callable[[Scenario, Sequence[Said]], str]
    reads_states: bool
    """Reads trainer_state.json as well."""


def doctors(rivals: str | None) -> list[Doctor]:
    ours = Doctor("leadline", ask_leadline, judge_ours, True)
    if rivals is None:
        return [ours]
    return [
        ours,
        Doctor("rldoctor", lambda log: ask_rldoctor(rivals, log), judge_rival, True),
        Doctor("rlprobe", lambda log: ask_rlprobe(rivals, log), judge_rival, False),
    ]


def examine(doctor: Doctor, scenario: Scenario, log: Path) -> tuple[str, str]:
    """The judgement, and what was said in short."""
    try:
        said = doctor.ask(log)
    except (RuntimeError, ValueError, KeyError) as error:
        print(f"{doctor.name} failed on {scenario.name}: {error}", file=sys.stderr)
        return "failed", "failed"
    return doctor.judge(scenario, said), ", ".join(finding.name for finding in said) or "nothing"
