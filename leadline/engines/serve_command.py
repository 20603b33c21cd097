"""`leadline serve`: a vLLM server that a recipe can train with, until Ctrl-C."""

import asyncio
import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from leadline.engines.vllm_server import LOOPBACK, ServerOptions, VLLMServer, check_installed

CPU_KV_CACHE_GIB = 0.5
"""Without an accelerator and without --kv-cache: vLLM would take a share of all memory."""

CPU_ARGUMENTS = ("--no-enable-chunked-prefill",)
"""A prompt in pieces makes vLLM 0.32 wind back the generator of a seeded request, which a CPU's cannot: it would die."""


def serve(
    model: Annotated[str, typer.Argument(help="As model.name in the recipe.", metavar="MODEL")],
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    host: Annotated[str, typer.Option(help="Address to listen on; any but this machine's own needs a key.")] = LOOPBACK[
        0
    ],
    dtype: Annotated[str | None, typer.Option(help="Default: float32 on a CPU, else bfloat16.")] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Longest prompt and completion together. Default: the model's.")
    ] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Most completions decoded at once.")] = None,
    kv_cache: Annotated[
        float | None, typer.Option(help="Memory for keys and values, in GiB. Default: vLLM's own; 0.5 on a CPU.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="VLLM_API_KEY", help="Demanded on every route but /health.", show_envvar=True)
    ] = None,
    log: Annotated[Path | None, typer.Option(help="File for the server's output.")] = None,
    argument: Annotated[
        list[str] | None, typer.Option(metavar="ARG", help="A further argument for vLLM; repeatable.")
    ] = None,
) -> None:
    """Start a vLLM server for training, and say what to put into the recipe."""
    check_installed()
    options = server_options(
        model,
        host=host,
        port=port,
        dtype=dtype,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        kv_cache_gib=kv_cache,
        api_key=api_key,
        arguments=tuple(argument or ()),
    )
    server = VLLMServer(options, log or Path(tempfile.gettempdir()) / f"leadline-serve-{port}.log")
    typer.echo(f"starting vLLM with {model} on {options.url}; its output goes to {server.log}")
    try:
        asyncio.run(_serve(server))
    except KeyboardInterrupt:
        typer.echo("stopping")
    finally:
        server.stop()


def server_options(
    model: str,
    *,
    host: str = LOOPBACK[0],
    port: int,
    dtype: str | None = None,
    max_model_len: int | None = None,
    max_num_seqs: int | None = None,
    kv_cache_gib: float | None = None,
    api_key: str | None = None,
    arguments: tuple[str, ...] = (),
) -> ServerOptions:
    """Options for the model of a recipe, with what this machine needs. Raises ModelError, EngineError."""
    import torch

    from leadline.model_sources import model_directory
    from leadline.settings.model import Model

    cpu = not torch.accelerator.is_available()
    gib = CPU_KV_CACHE_GIB if cpu and kv_cache_gib is None else kv_cache_gib
    return ServerOptions(
        model=model_directory(Model(name=model)),
        host=host,
        port=port,
        dtype=dtype or ("float32" if cpu else "bfloat16"),
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        kv_cache_bytes=None if gib is None else int(gib * 2**30),
        eager=cpu,
        api_key=api_key,
        arguments=(*(CPU_ARGUMENTS if cpu else ()), *arguments),
    )


def recipe_lines(options: ServerOptions) -> str:
    """What to put into the recipe."""
    return f'[engine]\nkind = "vllm"\nurls = ["{options.url}"]'


async def _serve(server: VLLMServer) -> None:
    server.start()
    await server.ready()
    typer.echo(f"ready. In the recipe:\n\n{recipe_lines(server.options)}\n")
    if server.options.api_key:
        typer.echo("and for the trainer: export VLLM_API_KEY=<the key>\n")
    typer.echo(f"Ctrl-C stops the server (process {server.process and server.process.pid}; this is {os.getpid()}).")
    await server.keep_running()
