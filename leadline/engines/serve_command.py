"""`leadline serve`: a vLLM server that a recipe can train with, until Ctrl-C."""

import asyncio
import json
import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from leadline.engines.vllm_server import LOOPBACK, ServerOptions, VLLMServer, check_installed
from leadline.errors import EngineError

CPU_KV_CACHE_GIB = 0.5
"""Without an accelerator and without --kv-cache: vLLM would take a share of all memory."""

CPU_ARGUMENTS = ("--no-enable-chunked-prefill",)
"""A prompt in pieces makes vLLM 0.32 wind back the generator of a seeded request, which a CPU's cannot: it would die."""

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Those for which vLLM 0.32 has attention kernels on a CPU."""


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
    lora_rank: Annotated[
        int, typer.Option(help="For engine.lora = 'push': serve the base, and take adapters of up to this rank.")
    ] = 0,
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
        lora_rank=lora_rank,
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
    lora_rank: int = 0,
    arguments: tuple[str, ...] = (),
) -> ServerOptions:
    """Options for the model of a recipe, with what this machine needs. Raises ModelError, EngineError."""
    import torch

    from leadline.engines.vllm_adapter import max_rank_for
    from leadline.engines.vllm_snapshot import PROBES
    from leadline.model_sources import model_directory
    from leadline.settings.model import Model

    cpu, directory = not torch.accelerator.is_available(), model_directory(Model(name=model))
    if cpu:
        _check_head_size(model, Path(directory) / "config.json")
    gib = CPU_KV_CACHE_GIB if cpu and kv_cache_gib is None else kv_cache_gib
    return ServerOptions(
        model=directory,
        host=host,
        port=port,
        dtype=dtype or ("float32" if cpu else "bfloat16"),
        max_model_len=max_model_len,
        # Room for the probes of a push beside a full batch that goes on: they would wait until some of it has finished.
        max_num_seqs=None if max_num_seqs is None else max_num_seqs + PROBES,
        kv_cache_bytes=None if gib is None else int(gib * 2**30),
        eager=cpu,
        api_key=api_key,
        max_lora_rank=max_rank_for(lora_rank) if lora_rank else None,
        arguments=(*(CPU_ARGUMENTS if cpu else ()), *arguments),
    )


def _check_head_size(name: str, file: Path) -> None:
    """Raise EngineError if vLLM's attention on a CPU has no kernel for the model; it would die of it while starting."""
    config = json.loads(file.read_text()) if file.is_file() else {}
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    size = config.get("head_dim") or (hidden // heads if heads and hidden else None)
    if size is not None and size not in CPU_HEAD_SIZES and "kv_lora_rank" not in config:
        raise EngineError(
            f"model.name is {name!r}, but its attention heads have {size} dimensions, and vLLM on a CPU takes "
            f"{', '.join(map(str, CPU_HEAD_SIZES))}. It would end while starting. Set engine.kind = 'hf', or train another "
            "model."
        )


def recipe_lines(options: ServerOptions) -> str:
    """What to put into the recipe."""
    lora = '\nlora = "push"' if options.max_lora_rank else ""
    return f'[engine]\nkind = "vllm"\nurls = ["{options.url}"]{lora}'


async def _serve(server: VLLMServer) -> None:
    server.start()
    await server.ready()
    typer.echo(f"ready. In the recipe:\n\n{recipe_lines(server.options)}\n")
    if server.options.api_key:
        typer.echo("and for the trainer: export VLLM_API_KEY=<the key>\n")
    typer.echo(f"Ctrl-C stops the server (process {server.process and server.process.pid}; this is {os.getpid()}).")
    await server.keep_running()
