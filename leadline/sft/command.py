"""`leadline sft`: parses, builds, prints, sets the exit code.

Exit codes: 0 done, 2 an error the user can act on, 130 stopped with Ctrl-C.
"""

import asyncio
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperCommand

from leadline.errors import ConfigError
from leadline.loop.interrupt import StopOnce, heard, left_at_once
from leadline.numerals import duration, number
from leadline.recipe import recipe_values
from leadline.settings_help import settings_help
from leadline.sft.config import MEANT, SFT_SECTIONS, SftConfig, parse_sft_config

if TYPE_CHECKING:
    from leadline.sft.session import SftSession


class WithSftSettings(TyperCommand):
    """A command whose help ends with every setting of a fine-tuning recipe."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        formatter.write("\n" + settings_help(formatter.width, SFT_SECTIONS, MEANT))


def sft(
    recipe: Annotated[Path, typer.Argument(help="The run, as a TOML file.", metavar="RECIPE.toml")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="section.field=value", help="Override a setting; repeatable.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in run.dir from its last checkpoint.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check the recipe without training.")] = False,
) -> None:
    """Fine-tune a model on demonstrations: a warm start for reinforcement learning."""
    config = parse_sft_config(recipe_values(recipe, overrides or []))
    if dry_run and resume:
        raise ConfigError("--resume is set, but --dry-run makes no step. It would be ignored. Remove one of them.")
    if dry_run:
        from leadline.sft.dry_run import check_sft_recipe

        raise typer.Exit(check_sft_recipe(config, Console()))
    path = Path(config.run.dir.replace("{recipe}", recipe.stem))
    settings = [word for override in overrides or [] for word in ("--set", override)]
    again = shlex.join(["leadline", "sft", str(recipe), *settings, "--resume"])
    raise typer.Exit(_tune(config, path, resume, again))


def _tune(config: SftConfig, path: Path, resume: bool, again: str) -> int:
    """Trains; the exit code. `again` is the command that continues the run."""
    from leadline.screen import Screen
    from leadline.sft.screen import sft_face
    from leadline.sft.session import open_sft_session

    stop = StopOnce()
    started = time.perf_counter()
    with left_at_once(), Screen(config, face=sft_face(config)) as screen:
        session = open_sft_session(config, path, resume=resume, stopping=lambda: stop.asked, screen=screen)
        with heard(stop):
            asyncio.run(session.run())
    out = Console(highlight=False, markup=False, soft_wrap=True)
    took = duration(time.perf_counter() - started)
    out.print(f"{session.policy.version} of {config.run.steps} steps in {took}; the run is in {path}")
    for line in _results(session):
        out.print(line)
    if session.finished:
        return 0
    out.print(f"Stopped. Continue with: {again}")
    return 130


def _results(session: "SftSession") -> list[str]:
    """What the held-out demonstrations say, and where the model is."""
    lines = []
    evaluations = [session.evaluations[step] for step in sorted(session.evaluations)]
    if len(evaluations) > 1:
        for name, words in HELD_OUT.items():
            if name in evaluations[0]:
                before, after = (number(e[name]) for e in (evaluations[0], evaluations[-1]))
                lines.append(f"held-out {words}: {before} before, {after} after")
    if latest := session.run_dir.latest_checkpoint():
        lines.append(f"the model of step {latest[0]}: model.name = {str(latest[1] / 'model')!r}")
    return lines


HELD_OUT = {
    "eval/loss": "loss (nats per token)",
    "eval/perplexity": "perplexity",
    "eval/reward_mean": "reward of greedy completions",
}
