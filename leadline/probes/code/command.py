"""`leadline probe code`: parses, examines one function, prints, sets the exit code."""

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from leadline.errors import ConfigError

if TYPE_CHECKING:
    from leadline.probes.code.findings import Report


class Role(StrEnum):
    """What the function is for."""

    ADVANTAGES = "advantages"
    LOGPROBS = "logprobs"
    LOSS = "loss"
    KL = "kl"
    IMPORTANCE = "importance"
    DECODE = "decode"
    REWARD = "reward"
    COLLATE = "collate"


def code(
    target: Annotated[
        str,
        typer.Argument(metavar="TARGET", help="package.module:function or file.py:function; a class is built first."),
    ],
    role: Annotated[Role, typer.Option("--as", help="What the function is for.", show_default=False)],
    arguments: Annotated[
        list[str] | None,
        typer.Option("--arg", metavar="NAME=MEANING", help="What a parameter stands for, or its value; repeatable."),
    ] = None,
    expect: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The variant it is meant to be: grpo, dapo, k3, group_std ... Default: any."),
    ] = None,
    samples: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="For --as reward: a run directory, or a parquet or JSONL of completions."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare one of your functions with the equations, and name the bug where it differs.

    Exit codes: 0 nothing wrong, 1 a fault was found, 2 the function could not be used.
    """
    from leadline.probes.code.report import print_report, to_json

    report = _examined(target, role, arguments or [], expect, samples)
    if json:
        sys.stdout.write(to_json(report) + "\n")
    else:
        print_report(report, Console())
    raise typer.Exit(report.exit_code)


def _examined(target: str, role: Role, arguments: list[str], expect: str | None, samples: Path | None) -> "Report":
    from leadline.probes.code.load import load_function

    if samples is not None and role is not Role.REWARD:
        raise ConfigError(
            f"--samples is {str(samples)!r}, but --as is {role}. It would be ignored. Remove one of them."
        )
    if expect is not None and role in (Role.REWARD, Role.DECODE, Role.COLLATE):
        raise ConfigError(f"--expect is {expect!r}, but --as {role} has no variants to choose from. Remove it.")
    function = load_function(target)
    if role is Role.REWARD:
        from leadline.probes.code.reward import examine_reward

        return examine_reward(function, target, arguments, samples)
    if role in (Role.DECODE, Role.COLLATE):
        from leadline.probes.code.structures import examine_collate, examine_decode

        return (examine_decode if role is Role.DECODE else examine_collate)(function, target, arguments)
    from leadline.probes.code.examine import examine

    return examine(function, role, target, arguments, expect)
