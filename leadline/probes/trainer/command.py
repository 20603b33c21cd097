"""`leadline probe trainer`: parses, compares, prints, sets the exit code."""

import logging
import os
import sys
import warnings
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from leadline.errors import ConfigError


class Trainer(StrEnum):
    """The trainers whose code can be run on a batch."""

    TRL = "trl"


def trainer(
    name: Annotated[Trainer, typer.Argument(metavar="TRAINER", help="trl: the installed one.")],
    output: Annotated[Path | None, typer.Option(metavar="FILE.md", help="Write the result as a page, too.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run an installed trainer's own loss on seeded batches, and report where it departs from the equations.

    Exit codes: 0 it does nowhere, 1 it does, 2 it could not be run.
    """
    _offline_and_quiet()
    try:
        from leadline.probes.trainer.conform import trl_conformance

        result = trl_conformance()
    except ModuleNotFoundError as error:
        if error.name != "trl":
            raise
        raise ConfigError(
            "TRAINER is trl, but TRL is not installed. There is nothing to compare. Install it: pip install trl."
        ) from error
    from leadline.probes.trainer.page import print_conformance, to_json, to_markdown

    if output is not None:
        output.write_text(to_markdown(result), encoding="utf-8")
    if json:
        sys.stdout.write(to_json(result) + "\n")
    else:
        print_conformance(result, Console())
    raise typer.Exit(result.exit_code)


def _offline_and_quiet() -> None:
    """What is built here loads nothing; TRL's advice about settings is about runs."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
