"""The command line: parses, builds, prints, sets the exit code.

Exit codes: 0 done, 1 the run did not improve although `eval.require_improvement` asks for it, 2 an error the user can
act on (printed without a traceback), 130 stopped with Ctrl-C.
"""

import asyncio
import json
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperCommand

from leadline import __version__
from leadline.config import Config
from leadline.doctor.command import AFTERWORDS, doctor, rules
from leadline.engines.serve_command import serve
from leadline.errors import ConfigError, LeadlineError
from leadline.loop.interrupt import StopOnce, heard, left_at_once
from leadline.numerals import duration
from leadline.probes.command import probe
from leadline.recipe import load_config
from leadline.replay.command import replay, restoring_sentence
from leadline.settings_help import settings_help
from leadline.sft.command import WithSftSettings, sft

if TYPE_CHECKING:  # it imports torch
    from leadline.evaluate import Difference

app = typer.Typer(
    help="Reinforcement-learning post-training for language models that cannot fail silently.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,  # an error that is not ours is a defect: the plain traceback says most
)
errors = Console(stderr=True)

TRAIN_PACKAGES = ("torch", "transformers", "accelerate", "safetensors", "jaxtyping", "polars", "httpx")
"""What the extra `train` brings, and a command may find missing."""


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Parses what comes before the command."""


class WithSettings(TyperCommand):
    """A command whose help ends with every setting of a recipe, laid out for the width of the terminal."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        formatter.write("\n" + settings_help(formatter.width))


@app.command(cls=WithSettings, context_settings={"max_content_width": 100})
def train(
    recipe: Annotated[Path, typer.Argument(help="The run, as a TOML file.", metavar="RECIPE.toml")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="section.field=value", help="Override a setting; repeatable.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in run.dir from its last checkpoint.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check the recipe without training.")] = False,
    profile: Annotated[bool, typer.Option("--profile", help="Print at the end where the time of a step went.")] = False,
) -> None:
    """Train a model with GRPO or one of its family."""
    config = load_config(recipe, overrides or [])
    if dry_run and resume:
        raise ConfigError("--resume is set, but --dry-run makes no step. It would be ignored. Remove one of them.")
    if dry_run:
        from leadline.dry_run import check_recipe

        raise typer.Exit(check_recipe(config, Console()))
    path = Path(config.run.dir.replace("{recipe}", recipe.stem))
    settings = [word for override in overrides or [] for word in ("--set", override)]
    again = shlex.join(["leadline", "train", str(recipe), *settings, "--resume"])
    raise typer.Exit(_train(config, path, resume, again, profile))


app.command()(doctor)
app.command()(rules)
app.command()(serve)
app.command(cls=WithSftSettings, context_settings={"max_content_width": 100})(sft)
app.command()(replay)
AFTERWORDS.append(restoring_sentence)
app.add_typer(probe, name="probe")


def main() -> None:
    """The console script."""
    try:
        app()
    except LeadlineError as error:
        _print_error(error)
        sys.exit(2)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in TRAIN_PACKAGES:
            raise
        _print_error(
            ConfigError(
                f"This command needs the package {package!r}, but it is not installed: `pip install leadline` alone is the "
                "doctor. Nothing was started. Install the trainer with `pip install 'leadline[train]'`."
            )
        )
        sys.exit(2)


def _print_error(error: LeadlineError) -> None:
    errors.print(f"[bold red]{type(error).__name__}[/]", highlight=False)
    errors.print(str(error), markup=False, highlight=False, soft_wrap=True)


def _train(config: Config, path: Path, resume: bool, again: str, profile: bool) -> int:
    """Trains; the exit code. `again` is the command that continues the run."""
    from leadline.screen import Screen
    from leadline.session import open_session

    stop = StopOnce()
    started = time.perf_counter()
    with left_at_once(), Screen(config) as screen:
        session = open_session(config, path, resume=resume, stopping=lambda: stop.asked, screen=screen)
        if profile:
            session.start_profile()
        with heard(stop), session.watchdog:  # while parts are loaded, Ctrl-C just leaves: nothing is lost yet
            asyncio.run(session.run())
    out = Console(highlight=False, markup=False, soft_wrap=True)
    took = duration(time.perf_counter() - started)
    out.print(f"{session.policy.version} of {config.run.steps} steps in {took}; the run is in {path}")
    if session.profile is not None and session.profile.steps:
        out.print(session.profile.report())
        (path / "profile.json").write_text(json.dumps(session.profile.summary(), indent=2))
    if not session.finished:
        out.print(f"Stopped. Continue with: {again}")
        return 130
    improvement = session.improvement()
    if improvement is None:
        return 0
    out.print(f"mean reward on {improvement.reward.prompts} held-out prompts: {_said(improvement.reward)}")
    if improvement.passes.prompts:  # a run that was begun by an earlier version did not count them
        out.print(f"share with a reward of at least {config.eval.pass_threshold:g}: {_said(improvement.passes)}")
    return 1 if config.eval.require_improvement and not improvement.reward.improved else 0


def _said(difference: "Difference") -> str:
    interval = f"95 % bootstrap interval [{difference.low:+.4f}, {difference.high:+.4f}]"
    means = f"{difference.before:.4f} before, {difference.after:.4f} after"
    return f"{means}; paired difference {difference.mean:+.4f}, {interval}"
