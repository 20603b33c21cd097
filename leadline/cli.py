"""The command line: parses, builds, prints, sets the exit code.

Exit codes: 0 done, 1 the run did not improve although `eval.require_improvement` asks for it, 2 an error the user can
act on (printed without a traceback), 130 stopped with Ctrl-C.
"""

import asyncio
import signal
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from leadline import __version__
from leadline.config import Config, load_config
from leadline.errors import LeadlineError
from leadline.settings_help import settings_help

app = typer.Typer(
    help="Reinforcement-learning post-training for language models that cannot fail silently.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
errors = Console(stderr=True)


@app.callback()
def root(
    version: Annotated[bool, typer.Option("--version", is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


@app.command(epilog=settings_help(), context_settings={"max_content_width": 120})
def train(
    recipe: Annotated[Path, typer.Argument(help="The run, as a TOML file.", metavar="RECIPE.toml")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="section.field=value", help="Override a setting; repeatable.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in run.dir from its last checkpoint.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check the recipe without training.")] = False,
) -> None:
    """Train a model with GRPO or one of its family."""
    config = load_config(recipe, overrides or [])
    path = Path(config.run.dir.format(recipe=recipe.stem))
    if dry_run:
        from leadline.dry_run import check_recipe

        raise typer.Exit(check_recipe(config, Console()))
    raise typer.Exit(_train(config, path, resume, recipe, overrides or []))


def main() -> None:
    """The console script."""
    try:
        app()
    except LeadlineError as error:
        errors.print(f"[bold red]{type(error).__name__}[/]", highlight=False)
        errors.print(str(error), markup=False, highlight=False)
        sys.exit(2)


def _train(config: Config, path: Path, resume: bool, recipe: Path, overrides: list[str]) -> int:
    from leadline.screen import Screen
    from leadline.session import open_session

    stop = _StopOnce()
    signal.signal(signal.SIGINT, stop)
    started = time.perf_counter()
    with Screen(config) as screen:
        session = open_session(config, path, resume=resume, stopping=lambda: stop.asked, screen=screen)
        difference = asyncio.run(session.run())
    out = Console(highlight=False)
    minutes = (time.perf_counter() - started) / 60
    out.print(f"{session.policy.version} of {config.run.steps} steps in {minutes:.1f} minutes; the run is in {path}")
    if stop.asked:
        settings = "".join(f" --set {override}" for override in overrides)
        out.print(f"Stopped. Continue with: leadline train {recipe}{settings} --resume")
        return 130
    if difference is None:
        return 0
    steps = sorted(session.evaluations)
    before, after = (session.evaluations[step].metrics["eval/reward_mean"] for step in (steps[0], steps[-1]))
    out.print(f"mean reward on {difference.prompts} held-out prompts: {before:.4f} before, {after:.4f} after")
    out.print(
        f"paired difference {difference.mean:+.4f}, 95 % bootstrap interval [{difference.low:+.4f}, {difference.high:+.4f}]"
    )
    return 1 if config.eval.require_improvement and not difference.improved else 0


class _StopOnce:
    """The first Ctrl-C asks for a stop after the step; the second interrupts at once."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self, signum: int, frame: object) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
