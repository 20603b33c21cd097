"""From a recipe to the vLLM engine with all it needs: servers, push, scoring."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from leadline.config import Config
from leadline.engines.serve_command import server_options
from leadline.engines.vllm_adapter import AdapterPush
from leadline.engines.vllm_core import can_sleep
from leadline.engines.vllm_http import VLLMEngine
from leadline.engines.vllm_inprocess import VLLMInProcess
from leadline.engines.vllm_server import ServerOptions, VLLMServer, free_port
from leadline.engines.vllm_snapshot import PROBE_PROMPT, PROBES, policy_score
from leadline.engines.vllm_weights import ServerPush
from leadline.models import Loaded

COLOCATED_KV_CACHE_GIB = 4
"""In process on an accelerator, without engine.kv_cache_gib: vLLM's own share would be nearly all of its memory."""


def build_vllm_engine(config: Config, loaded: Loaded, log: Path, say: Callable[[str], None]) -> VLLMEngine:
    """The engine of `engine.urls`, or of a server of its own whose output goes to `log`."""
    settings, key = config.engine, os.environ.get("VLLM_API_KEY")
    server = None if settings.urls else VLLMServer(_server_options(config, loaded, key), log)
    model: Any = loaded.model
    vocab_size, score = model.config.get_text_config().vocab_size, policy_score(model)
    push = AdapterPush if settings.lora == "push" else ServerPush
    return VLLMEngine(
        [server.url] if server else settings.urls,
        model_name=settings.model_name,
        eos_ids=loaded.eos_ids,
        vocab_size=vocab_size,
        seed=config.run.seed,
        settings=settings,
        push=push(score, vocab_size, model=model, api_key=key, model_name=settings.model_name),
        tokenizer=loaded.tokenizer,
        server=server,
        say=say,
    )


def build_inprocess_engine(config: Config, loaded: Loaded, say: Callable[[str], None]) -> VLLMInProcess:
    """vLLM in this process. Where no step is sampled ahead it yields its memory while the policy trains, if it can."""
    options = _server_options(config, loaded, key=None)
    if options.kv_cache_bytes is None:
        options = replace(options, kv_cache_bytes=COLOCATED_KV_CACHE_GIB << 30)
    gib = (options.kv_cache_bytes or 0) / 2**30
    if not can_sleep():
        say(
            f"vLLM cannot sleep on a CPU: its cache of {gib:.3g} GiB (engine.kv_cache_gib) stays while the policy trains."
        )
    elif config.rollout.max_staleness:
        say(
            f"rollout.max_staleness is {config.rollout.max_staleness}, so vLLM samples while the policy trains: its cache of "
            f"{gib:.3g} GiB (engine.kv_cache_gib) and its copy of the weights stay on the device."
        )
    model: Any = loaded.model
    return VLLMInProcess(
        options,
        eos_ids=loaded.eos_ids,
        vocab_size=model.config.get_text_config().vocab_size,
        seed=config.run.seed,
        score=policy_score(model),
        model=model,
        drain=config.engine.on_new_weights == "drain",
        yields_memory=config.rollout.max_staleness == 0,
    )


def _server_options(config: Config, loaded: Loaded, key: str | None) -> ServerOptions:
    return server_options(
        config.model.name,
        port=free_port(),
        dtype=config.engine.dtype,
        max_model_len=_longest(config, loaded),
        max_num_seqs=config.engine.max_batch,
        kv_cache_gib=config.engine.kv_cache_gib,
        api_key=key,
        lora_rank=config.model.lora_rank if config.engine.lora == "push" else 0,
    )


def _longest(config: Config, loaded: Loaded) -> int | None:
    """Tokens that a prompt and its completion may have: memory for more would be idle."""
    if config.data.max_prompt_tokens is None:
        return loaded.context_length
    longest = config.data.max_prompt_tokens + config.sampling.max_tokens
    longest = max(longest, PROBE_PROMPT + PROBES + 1)  # what proves a push must fit, too
    return longest if loaded.context_length is None else min(longest, loaded.context_length)
