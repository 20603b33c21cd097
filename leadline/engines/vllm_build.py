"""From a recipe to the vLLM engine with all it needs: servers, push, scoring."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from leadline.config import Config
from leadline.engines.serve_command import server_options
from leadline.engines.vllm_http import VLLMEngine
from leadline.engines.vllm_server import VLLMServer, free_port
from leadline.engines.vllm_snapshot import PROBE_PROMPT, PROBES, policy_score
from leadline.engines.vllm_weights import ServerPush
from leadline.models import Loaded


def build_vllm_engine(config: Config, loaded: Loaded, log: Path, say: Callable[[str], None]) -> VLLMEngine:
    """The engine of `engine.urls`, or of a server of its own whose output goes to `log`."""
    settings, key = config.engine, os.environ.get("VLLM_API_KEY")
    server = None if settings.urls else VLLMServer(_server_options(config, loaded, key), log)
    model: Any = loaded.model
    vocab_size, score = model.config.get_text_config().vocab_size, policy_score(model)
    return VLLMEngine(
        [server.url] if server else settings.urls,
        model_name=settings.model_name,
        eos_ids=loaded.eos_ids,
        vocab_size=vocab_size,
        seed=config.run.seed,
        settings=settings,
        push=ServerPush(score, vocab_size, model=model, api_key=key, model_name=settings.model_name),
        tokenizer=loaded.tokenizer,
        score=score,
        server=server,
        say=say,
    )


def _server_options(config: Config, loaded: Loaded, key: str | None) -> Any:
    return server_options(
        config.model.name,
        port=free_port(),
        dtype=config.engine.dtype,
        max_model_len=_longest(config, loaded),
        max_num_seqs=config.engine.max_batch,
        api_key=key,
    )


def _longest(config: Config, loaded: Loaded) -> int | None:
    """Tokens that a prompt and its completion may have: memory for more would be idle."""
    if config.data.max_prompt_tokens is None:
        return loaded.context_length
    longest = config.data.max_prompt_tokens + config.sampling.max_tokens
    longest = max(longest, PROBE_PROMPT + PROBES + 1)  # what proves a push must fit, too
    return longest if loaded.context_length is None else min(longest, loaded.context_length)
