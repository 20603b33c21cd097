"""`leadline probe ...`: parses, runs a probe, prints, sets the exit code.

Exit codes: 0 nothing wrong, 1 something found, 2 the input could not be used. Nothing heavy is imported before a
command runs.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from leadline.probes.code.command import code
from leadline.probes.run_command import run
from leadline.probes.trainer.command import trainer

probe = typer.Typer(
    help="Find the fault before the run: between engine and trainer, and in your own code.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@probe.callback()
def root() -> None:
    """Keeps `engine` a word of its own while it is the only probe."""


@probe.command()
def engine(
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="The policy, as model.name in a recipe.", show_default=False)
    ] = None,
    engine: Annotated[
        str, typer.Option(metavar="URL|vllm|hf", help="A running server; vllm starts one; hf samples in this process.")
    ] = "hf",
    sampling: Annotated[
        Path | None, typer.Option(metavar="RECIPE.toml", help="Sample and score as this recipe's [sampling] says.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="One prompt a line. Default: a dozen built in.")
    ] = None,
    completions: Annotated[int, typer.Option(min=2, max=512, help="Completions to draw.")] = 24,
    tokens: Annotated[
        int | None, typer.Option(min=2, help="Longest completion. Default: 64, or less if the recipe says so.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of training: float32, bfloat16 or float16.")] = "float32",
    engine_dtype: Annotated[
        str | None, typer.Option(help="For hf and vllm: what the engine computes in. Default: as --dtype.")
    ] = None,
    adapter: Annotated[Path | None, typer.Option(metavar="DIR", help="A LoRA adapter (peft) on the policy.")] = None,
    older: Annotated[
        list[Path] | None,
        typer.Option(metavar="DIR", help="Weights that the engine may hold instead (an older checkpoint); repeatable."),
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option("--from", metavar="PATH", help="Do not sample: a run directory, a dump or a CSV file."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare the engine's logprobs with the policy's on the same tokens, and name what makes them differ.

    Exit codes: 0 nothing wrong, 1 a cause or an unexplained gap was found, 2 the input could not be used.
    """
    from leadline.probes.engine.probe import Asked, probe_engine, probe_file
    from leadline.probes.engine.report import print_report, to_json

    asked = Asked(
        model=model,
        engine=engine,
        recipe=sampling,
        prompts=prompts,
        completions=completions,
        tokens=tokens,
        dtype=dtype,
        engine_dtype=engine_dtype,
        adapter=adapter,
        older=tuple(older or ()),
    )
    report = probe_engine(asked) if source is None else probe_file(source, asked)
    if json:
        sys.stdout.write(to_json(report) + "\n")
    else:
        print_report(report)
    raise typer.Exit(report.exit_code)


probe.command()(code)
probe.command()(run)
probe.command()(trainer)
