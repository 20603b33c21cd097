"""`leadline probe run`: the preflight of a recipe, without training."""

import asyncio
import json as to_json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from leadline.config import Config
from leadline.errors import LeadlineError
from leadline.recipe import load_config

if TYPE_CHECKING:
    from leadline.probes.preflight.flight import Preflight


def run(
    recipe: Annotated[Path, typer.Argument(help="The run, as a TOML file.", metavar="RECIPE.toml")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="section.field=value", help="Override a setting; repeatable.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check a run before its first step, without training: model, text, rewards, engine, and a step that is not taken.

    Exit codes: 0 nothing wrong, 1 a check found something wrong, 2 the recipe could not be used.
    """
    from leadline.dry_run import print_checks

    config = load_config(recipe, overrides or [])
    console, said = Console(highlight=False), Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    found = asyncio.run(_flown(config, said))
    if json:
        sys.stdout.write(to_json.dumps(found.to_dict(), indent=2, ensure_ascii=False) + "\n")
    else:
        print_checks(found.checks, console)
        verdict = f"{len(found.errors)} wrong" if found.errors else "Nothing is wrong"
        console.print(f"{verdict} with {recipe}, after {found.seconds:.1f} s of checks.", soft_wrap=True)
    raise typer.Exit(1 if found.errors else 0)


async def _flown(config: Config, said: Console) -> "Preflight":
    """Every check; those with the engine only if nothing was wrong before, for starting one may take minutes."""
    from leadline.compute import computed
    from leadline.probes.preflight.flight import Preflight
    from leadline.session import build_engine, check_engine, load_parts

    check_engine(config)
    parts = await computed(load_parts, config, lambda stage: None, said.print)
    found = Preflight(parts)
    await computed(found.before_engine)
    if found.errors:
        return found
    with tempfile.TemporaryDirectory(prefix="leadline-probe-") as folder:
        engine = build_engine(config, parts.loaded, Path(folder), said.print)
        try:
            await engine.load_weights(await computed(parts.policy.weights), parts.policy.version)
            await found.with_engine(engine)
        except LeadlineError as error:
            found.add_error("weights", error)
        finally:
            await engine.close()
    return found
