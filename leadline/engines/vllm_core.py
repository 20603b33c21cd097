"""vLLM's own engine object in this process: how it is started, fed and put to sleep."""

import os
import warnings
from typing import Any

import torch

from leadline.engines.vllm_server import ServerOptions, check_installed
from leadline.engines.vllm_spans import knobs
from leadline.engines.vllm_wire import Ask, request_body


def start_engine(options: ServerOptions) -> Any:
    """A vLLM `LLMEngine` whose every step draws what it returns. Raises EngineError if vLLM is not installed.

    On an accelerator it can sleep: its cache and weights leave the device.
    """
    check_installed()
    # Read when vLLM is imported: the engine in this process, and no pinning of its threads
    for name, value in {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",  # its warnings would cut the screen
    }.items():
        os.environ.setdefault(name, value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of packages that we do not own
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        return LLMEngine.from_engine_args(EngineArgs(**_arguments(options)))


def _arguments(options: ServerOptions) -> dict[str, Any]:
    limits = {
        "max_model_len": options.max_model_len,
        "max_num_seqs": options.max_num_seqs,
        "kv_cache_memory_bytes": options.kv_cache_bytes,
        # on a CPU a prompt in pieces ends vLLM: see serve_command.CPU_ARGUMENTS
        "enable_chunked_prefill": None if torch.accelerator.is_available() else False,
    }
    return {
        "model": options.model,
        "dtype": options.dtype,
        "logprobs_mode": options.logprobs_mode,
        "generation_config": "vllm",
        "enforce_eager": options.eager,
        "enable_sleep_mode": can_sleep(),
        "use_tqdm_on_load": False,
        "distributed_executor_backend": "uni",
        "async_scheduling": False,  # a step draws what it returns, so that its version is known
        "disable_log_stats": True,
        **{name: value for name, value in limits.items() if value is not None},
    }


def can_sleep() -> bool:
    """Whether vLLM can take its memory off the device: on a GPU. On a CPU its sleep does nothing."""
    return torch.cuda.is_available()


def add_request(engine: Any, name: str, ask: Ask) -> None:
    """The engine draws the completions of `ask` from its next step on. Raises ValueError if it refuses."""
    from vllm import SamplingParams, TokensPrompt
    from vllm.sampling_params import RequestOutputKind

    body = request_body(ask, "")
    params = SamplingParams(**knobs(body), output_kind=RequestOutputKind.DELTA)
    engine.add_request(name, TokensPrompt(prompt_token_ids=body["prompt"]), params)


def dtype_of(engine: Any) -> str:
    """Name of the dtype in which the engine computes."""
    return str(engine.model_config.dtype).removeprefix("torch.")
