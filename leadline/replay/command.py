"""`leadline replay`: parses, replays, prints, sets the exit code.

Exit codes: 0 the replay is the record, 1 it differs, 2 the step cannot be replayed.
"""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from leadline.errors import LeadlineError


def replay(
    run: Annotated[Path, typer.Argument(help="The directory of a run.", metavar="RUN")],
    step: Annotated[
        int | None, typer.Option(metavar="N", help="Default: the last step that has a black box.", show_default=False)
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="section.field=value",
            help="Replay under this change (several: all together) instead of the usual ones; repeatable.",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Make one step of a run again from its black box: as recorded, and as it would have been.

    No engine is needed. Loss, ledger and the gradient by the tokens' logprobs follow from the black box alone; where the
    checkpoint of the step before is kept, or the step is the first, the whole update is made again too.
    """
    from leadline.doctor.json_lines import to_line
    from leadline.replay.changes import asked_change
    from leadline.replay.report import replay as replayed
    from leadline.replay.text import as_dict, print_report

    change = asked_change(overrides) if overrides else None
    with Console(stderr=True).status("reading") as status:
        report = replayed(run, step, change, progress=lambda text: status.update(text))
    if json:
        typer.echo(to_line(as_dict(report)), nl=False)
    else:
        print_report(report, Console(highlight=False))
    raise typer.Exit(0 if report.agrees else 1)


def restoring_sentence(run: Path) -> str | None:
    """The change that would have restored the signal of the last step that is kept, in a sentence.

    None if there is no black box that can be replayed, if at least half of the signal arrived, or without torch.
    """
    if not any((run / "blackbox").glob("step_*.safetensors")):
        return None
    try:
        from leadline.replay.report import replay as replayed
        from leadline.replay.text import verdict
    except ModuleNotFoundError:
        return None
    try:
        return verdict(replayed(run, None, None, with_weights=False))
    except LeadlineError:
        return None
