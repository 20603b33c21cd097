"""A vLLM server set up for training, started and watched by us. No torch, no vLLM in this process."""

import asyncio
import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import leadline
from leadline.engines.vllm_main import PARENT
from leadline.errors import EngineError

LOOPBACK = ("127.0.0.1", "::1", "localhost")
LOG_TAIL = 15
"""Lines of the log that an error shows."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What the server is told.

    Example:
        ServerOptions(model="/models/smollm2", port=8000, dtype="float32", kv_cache_bytes=1 << 28, eager=True)
    """

    model: str
    """Hugging Face directory or hub name."""
    host: str = "127.0.0.1"
    port: int = 8000
    dtype: str = "auto"
    max_model_len: int | None = None
    """Longest prompt and completion together; None = the model's."""
    max_num_seqs: int | None = None
    """Most completions decoded at once; None = vLLM's own."""
    kv_cache_bytes: int | None = None
    """None = a share of the accelerator's memory. On a CPU a size must be given."""
    eager: bool = False
    """No compilation: starts much faster, and is as fast on a CPU."""
    logprobs_mode: str = "processed_logprobs"
    """The logprobs of the distribution that is sampled; `raw_logprobs` leaves temperature and the rest out."""
    max_lora_rank: int | None = None
    """Take adapters of up to this rank, which requests name; the base itself takes no new weights. None = no adapters."""
    served_name: str = "policy"
    api_key: str | None = None
    arguments: tuple[str, ...] = ()
    """Further arguments of vLLM."""

    def __post_init__(self) -> None:
        if self.host not in LOOPBACK and not self.api_key:
            raise EngineError(
                f"--host is {self.host!r}, but there is no API key, and the server lets anyone who reaches it load "
                "weights and call its workers. Give --api-key, or keep the host 127.0.0.1."
            )

    @property
    def url(self) -> str:
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


def command(options: ServerOptions) -> list[str]:
    """The command line that starts the server."""
    pairs: dict[str, object] = {
        "--model": options.model,
        "--host": options.host,
        "--port": options.port,
        "--served-model-name": options.served_name,
        "--dtype": options.dtype,
        "--logprobs-mode": options.logprobs_mode,
        "--worker-extension-cls": "leadline.engines.vllm_worker.WorkerExtension",
        # vLLM would fill in every knob that a request leaves out from the model's own file
        "--generation-config": "vllm",
        "--max-model-len": options.max_model_len,
        "--max-num-seqs": options.max_num_seqs,
        "--kv-cache-memory-bytes": options.kv_cache_bytes,
        "--max-lora-rank": options.max_lora_rank,
    }
    given = [part for name, value in pairs.items() if value is not None for part in (name, str(value))]
    flags = ["--enable-scale-out", *(["--enforce-eager"] if options.eager else [])]
    flags += ["--enable-lora"] if options.max_lora_rank else []
    guard = ["--middleware", "leadline.engines.vllm_main.RequireKey"] if options.api_key else []
    return [sys.executable, "-m", "leadline.engines.vllm_main", *given, *flags, *guard, *options.arguments]


def environment(options: ServerOptions, base: Mapping[str, str]) -> dict[str, str]:
    """`base` with what the server needs; what the user has set stays."""
    package = str(Path(leadline.__file__).parents[1])
    paths = [package, *filter(None, [base.get("PYTHONPATH")])]
    defaults = {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else vLLM pins its threads to cores that others use
        "VLLM_NO_USAGE_STATS": "1",
    }
    if options.host in LOOPBACK:
        defaults["VLLM_HOST_IP"] = "127.0.0.1"
    fixed = {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": os.pathsep.join(paths)}
    if options.max_lora_rank:
        fixed["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if options.api_key:
        fixed["VLLM_API_KEY"] = options.api_key  # not on the command line, which every user of the machine can read
    return {**defaults, **base, **fixed}


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on, below those that systems hand out: it stays free for the seconds of a start."""
    draw = random.SystemRandom()
    while True:
        port = draw.randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server((host, port)):
            return port


@dataclass(slots=True)
class VLLMServer:
    """One server process with its children, in a process group of its own. A context manager: leaving it ends all.

    It also ends when this process dies. Output goes to `log`.
    """

    options: ServerOptions
    log: Path
    base_environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return self.options.url

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """Start the process. Raises EngineError if vLLM is not installed or the port is taken."""
        self.stop()  # children of one that died would hold the port
        check_installed()
        self._check_port()
        env = {**environment(self.options, self.base_environment), PARENT: str(os.getpid())}
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command(self.options),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
            )

    async def ready(self, timeout: float = 900.0) -> None:
        """Return once the server answers. Raises EngineError if it ends first, or is not there in time."""
        import httpx  # not at the top: the command line lists `serve` where httpx is not installed

        deadline = time.monotonic() + timeout
        async with httpx.AsyncClient(trust_env=False) as client:
            while not (self.running and await _healthy(client, self.url)):
                if not self.running:
                    raise self._failure(f"it ended while starting (exit status {self.process and self.process.poll()})")
                if time.monotonic() > deadline:
                    raise self._failure(f"it does not answer after {timeout:.0f} s")
                await asyncio.sleep(0.3)

    async def keep_running(self, poll_s: float = 1.0) -> None:
        """Start the server again whenever it has ended, until cancelled. Raises EngineError if it cannot come back."""
        while True:
            await asyncio.sleep(poll_s)
            if not self.running:
                self.start()
                await self.ready()

    def stop(self, patience_s: float = 15.0) -> None:
        """The server and its children have ended: asked first, killed when patience is over."""
        if self.process is None:
            return
        if self.process.poll() is None:
            self.process.terminate()  # only the parent: it ends its children in order
            try:
                self.process.wait(patience_s)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        _end_group(self.process.pid, patience_s=5.0)
        self.process = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def _check_port(self) -> None:
        try:
            with socket.create_server((self.options.host, self.options.port)):
                pass
        except OSError as error:
            raise EngineError(
                f"--port is {self.options.port}, but nothing can listen there ({error.strerror}). The server cannot "
                "start. Choose another port, or end what uses this one."
            ) from error

    def _failure(self, what: str) -> EngineError:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        tail = "\n".join(f"    {line}" for line in _telling(lines))
        return EngineError(
            f"The vLLM server of {self.options.model!r} was started, but {what}. Nothing can be sampled. Read {self.log}, "
            f"which ends with:\n{tail}"
        )


def check_installed() -> None:
    """Raise EngineError if this Python has no vLLM."""
    import importlib.util

    if importlib.util.find_spec("vllm") is None:
        raise EngineError(
            "A vLLM server is asked for, but vLLM is not installed in this environment. None can be started. Run "
            "`pip install vllm` (on a machine without a GPU: make vllm), or give engine.urls of running servers."
        )


async def _healthy(client: Any, url: str) -> bool:
    import httpx

    try:
        return bool((await client.get(f"{url}/health", timeout=5.0)).status_code == 200)
    except httpx.HTTPError:
        return False


def _telling(lines: Sequence[str]) -> Sequence[str]:
    """The first line that names an exception, for the rest of a log of vLLM is about its consequences; and the last."""
    first = next((line for line in lines if re.search(r"\b[A-Z]\w+(Error|Exception): ", line)), None)
    last = lines[-LOG_TAIL:]
    return last if first is None or first in last else [first, "...", *last]


def _end_group(group: int, patience_s: float) -> None:
    """No process of the group is left. Those that outlive their parent may tidy up (shared memory), then are killed."""
    if _group_ended(group, patience_s):
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    _group_ended(group, patience_s)


def _group_ended(group: int, patience_s: float) -> bool:
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False
