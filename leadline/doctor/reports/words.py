"""How reports write numbers, ranges and verdicts."""

import math

from leadline.doctor.report import Budget, NotChecked, Report
from leadline.doctor.reports.examined import Examined

HARMLESS = "healthy-"
"""Facts with such a name are sentences on what looks odd and is harmless."""

HEADLINES = {
    "fault": "Something is wrong",
    "doubt": "Something may be wrong",
    "healthy": "Nothing wrong found",
    "undecided": "Could not decide",
}


def number(value: float | None) -> str:
    """Four digits or fewer, with an exponent for what is very small or large; `not logged` for None.

    Example: 1.3e-8, 0.71, 1,536, nan
    """
    if value is None:
        return "not logged"
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}"
    if not 1e-3 <= abs(value) < 1e6:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def plain(text: str) -> str:
    """The text without control characters: a log must not steer the terminal that shows it."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


def bounds(low: float | None, high: float | None) -> str:
    """`0.5`, `0.5 to 1`, `at most 1`, `at least 0.5` or `?`."""
    if low is None and high is None:
        return "?"
    if low is None:
        return f"at most {number(high)}"
    if high is None:
        return f"at least {number(low)}"
    return number(low) if low == high else f"{number(low)} to {number(high)}"


def count(amount: int, thing: str) -> str:
    """`1 row`, `2 rows`."""
    return f"{amount} {thing}" if amount == 1 else f"{amount} {thing}s"


def tone(report: Report) -> str:
    """The verdict, or "doubt" for a fault that no error finding shows."""
    errors = any(finding.severity == "error" for finding in report.findings)
    return "doubt" if report.findings and not errors else report.verdict


def headline(report: Report) -> str:
    """The verdict in a few words, e.g. `Something is wrong`."""
    return HEADLINES[tone(report)]


def because(report: Report) -> str:
    """The first reason for the verdict, in one line."""
    if report.findings:
        first = report.findings[0]
        rest = f" (and {count(len(report.findings) - 1, 'more finding')})" if len(report.findings) > 1 else ""
        since = f", since step {first.step}" if first.step else ""
        return f"{first.title.rstrip('.')}{since}{rest}."
    unchecked = len(report.not_checked)
    if report.verdict == "undecided":
        broken = sum(bool(check.broke) for check in report.not_checked)
        return (
            f"{count(broken, 'check')} broke." if broken else f"The log lacks what {count(unchecked, 'check')} needed."
        )
    return f"{count(unchecked, 'check')} could not be made." if unchecked else "Every check was made."


def budget_steps(budget: Budget | None) -> str:
    """`step 10` or `steps 10 to 70`; empty if the budget has none."""
    if budget is None or not budget.last:
        return ""
    return f"step {budget.last}" if budget.first == budget.last else f"steps {budget.first} to {budget.last}"


def unchecked(examined: Examined) -> str:
    """How many checks could not be made, in one line."""
    checks = count(len(examined.report.not_checked), "check")
    return f"{checks} need the log of a run." if not len(examined.run.rows) else f"{checks} could not be made."


def reasons(check: NotChecked) -> list[str]:
    """Why a check was not made, and what would let it."""
    if check.broke:
        return [f"The check itself broke: {check.broke}"]
    lines = [f"not logged: {', '.join(f'`{name}`' for name in check.missing)}"] if check.missing else []
    return [*lines, check.enable] if check.enable else lines


def run_facts(examined: Examined) -> list[tuple[str, str]]:
    """Source, framework, rows, steps, then what the report adds."""
    run, report = examined.run, examined.report
    rows = len(run.rows)
    facts = {"source": report.source, "framework": report.framework, "rows": f"{rows:,}" if rows else "settings only"}
    if rows:
        first, last = int(run.rows[0]["step"]), int(run.rows[-1]["step"])
        facts["steps"] = str(first) if first == last else f"{first} to {last}"
    added = {name: value for name, value in report.facts.items() if name not in facts and not name.startswith(HARMLESS)}
    return [(name, value) for name, value in {**facts, **added}.items() if value]


def harmless(report: Report) -> list[str]:
    """What looks odd in this run and is not, in sentences."""
    return [text for name, text in report.facts.items() if name.startswith(HARMLESS)]
