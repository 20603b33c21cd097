"""A replay's report for people and for programs."""

from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from leadline.metrics import LEDGER_STAGES
from leadline.numerals import number, share
from leadline.panels import BAD, DIM, GOOD
from leadline.replay.report import Agreement, Line, Report, as_recorded, restoring


def print_report(report: Report, console: Console) -> None:
    """What was replayed, whether it agrees with the record, and what each change would have done."""
    record = report.record
    forwarded = len(next(iter(record.seen.values())).forwarded) if record.seen else 0
    objective = record.config.objective
    console.print(
        f"step {record.step} of {record.run}: {objective.loss}, {len(record.groups)} groups, {forwarded} tokens, "
        f"correction {objective.importance_level} {objective.importance_action}",
        markup=False, highlight=False, soft_wrap=True,
    )  # fmt: skip
    for line in _agreement(report):
        console.print(line, soft_wrap=True)
    console.print()
    console.print(_table(report))
    for note in _notes(report):
        console.print(note, soft_wrap=True)


def as_dict(report: Report) -> dict[str, Any]:
    """The report as plain values."""
    weights = report.weights
    best = restoring(report)
    return {
        "run": str(report.record.run),
        "step": report.record.step,
        "agrees": report.agrees,
        "tokens": _agreement_dict(report.tokens),
        "update": None if report.update is None else _agreement_dict(report.update),
        "weights": weights if isinstance(weights, str) else str(weights.checkpoint or "the initial model"),
        "recorded": _line_dict(report.recorded),
        "changes": [_line_dict(line) for line in report.lines],
        "restores_the_signal": None if best is None else dict(best.change.settings),
    }


def verdict(report: Report) -> str | None:
    """One sentence: the change that restores a lost signal, if there is one."""
    best = restoring(report)
    if best is None:
        return None
    return (
        f"Replayed step {report.record.step}: {share(report.recorded.reached)} of the signal reached the gradient; with "
        f"{best.change.as_settings} it would have been {share(best.reached)}."
    )


def _agreement(report: Report) -> list[Text]:
    lines = [_agrees("from the recorded logprobs", report.tokens)]
    if report.update is not None:
        lines.append(_agrees("the update made again from its weights", report.update))
    if isinstance(report.weights, str):
        lines.append(Text(f"no gradient by the weights: {report.weights}", style=DIM))
    return lines


def _agrees(what: str, agreement: Agreement) -> Text:
    if not agreement.compared:
        return Text(f"{what}: the run has no metrics of this step to compare with", style=DIM)
    words = f"{what}: {agreement.compared} metrics "
    if not agreement.differences:
        return Text.assemble(words, ("are the recorded ones to the last digit", GOOD))
    old, new = agreement.differences[agreement.worst]
    worst = f"(at most {agreement.largest:.1e}, of {agreement.worst}: {old:.9g} recorded, {new:.9g} replayed)"
    if agreement.holds:
        return Text.assemble(words, ("are the recorded ones up to rounding ", GOOD), (worst, DIM))
    return Text.assemble(words, ("DIFFER from the record ", f"bold {BAD}"), worst)


def _table(report: Report) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("setting", min_width=18, max_width=26, overflow="fold")
    for heading in ("loss", "reached", "∇ tokens", *(("∇ weights",) if report.update else ())):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("where the rest went", overflow="fold", style=DIM)
    table.add_row("as recorded", *_cells(report.recorded, report))
    shown = [line for line in report.lines if line.replayed is not None and not as_recorded(line, report)]
    for line in sorted(shown, key=lambda line: -line.reached):
        table.add_row(str(line.change), *_cells(line, report))
    return table


def _cells(line: Line, report: Report) -> list[RenderableType]:
    assert line.replayed is not None
    metrics = line.replayed.metrics
    reached = metrics["ledger/reached_share"]
    colour = "" if line is report.recorded else GOOD if reached > report.recorded.reached + 0.05 else ""
    rest = {s: metrics[f"ledger/{s}_share"] for s in LEDGER_STAGES if s != "reached"}
    largest = sorted((s for s in rest if abs(rest[s]) > 0.005), key=lambda s: -abs(rest[s]))[:3]
    return [
        number(metrics["loss"]),
        Text(share(reached), style=colour),
        number(line.replayed.pull_norm),
        *((number(line.weight_norm),) if report.update else ()),
        ", ".join(f"{stage.replace('_', ' ')} {share(rest[stage])}" for stage in largest),
    ]


def _notes(report: Report) -> list[RenderableType]:
    notes: list[RenderableType] = [Text(f"∇ norm of the gradient of the loss by {_by(report)}", style=DIM)]
    if same := [str(line.change) for line in report.lines if as_recorded(line, report)]:
        notes.append(Text(f"no difference: {'; '.join(same)}", style=DIM))
    for line in report.lines:
        if line.error:
            notes.append(Text(f"not replayed: {line.change}: {line.error}", style=DIM))
    if (sentence := verdict(report)) is not None:
        notes.append(Group("", Text.assemble(("→ ", GOOD), sentence)))
    return notes


def _by(report: Report) -> str:
    return "the tokens' logprobs" + (" and by the weights" if report.update else "")


def _agreement_dict(agreement: Agreement) -> dict[str, Any]:
    differences = {name: {"recorded": one, "replayed": other} for name, (one, other) in agreement.differences.items()}
    return {
        "compared": agreement.compared,
        "largest_relative_difference": agreement.largest,
        "differences": differences,
    }


def _line_dict(line: Line) -> dict[str, Any]:
    values: dict[str, Any] = {"settings": dict(line.change.settings)}
    if line.replayed is None:
        return values | {"error": line.error}
    metrics = {name: value for name, value in line.replayed.metrics.items() if _is_of_the_loss(name)}
    return values | {
        "gradient_by_logprobs": line.replayed.pull_norm,
        "gradient_by_weights": line.weight_norm,
        "metrics": metrics,
    }


def _is_of_the_loss(name: str) -> bool:
    return name.split("/")[0] in ("loss", "ledger", "importance", "policy", "kl")
