"""`python -m leadline.engines.vllm_main ...`: vLLM's API server with two differences that a trainer needs.

It ends when the process that started it ends, however that died (Linux). And with an API key it guards every route but
`/health`: vLLM itself leaves the routes that pause, load weights and call workers open.
"""

import ctypes
import hashlib
import os
import runpy
import secrets
import signal
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

PARENT = "LEADLINE_PARENT"
"""Environment: the process id to end with. Unset = live on."""
OPEN_ROUTES = ("/health", "/ping")

Scope = MutableMapping[str, Any]


class RequireKey:
    """ASGI middleware: 401 without `Authorization: Bearer $VLLM_API_KEY`."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app
        self._wanted = _digest(f"Bearer {os.environ['VLLM_API_KEY']}".encode())

    async def __call__(self, scope: Scope, receive: Callable[..., Any], send: Callable[..., Awaitable[None]]) -> None:
        if scope["type"] == "lifespan" or scope["path"] in OPEN_ROUTES:
            return await self._app(scope, receive, send)
        given = dict(scope["headers"]).get(b"authorization", b"")
        if secrets.compare_digest(_digest(given), self._wanted):
            return await self._app(scope, receive, send)
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 401, "headers": [(b"content-type", b"text/plain")]})
            await send({"type": "http.response.body", "body": b"an API key is needed\n"})
        return None


def main() -> None:
    """Run vLLM's server with the arguments of this process."""
    if parent := os.environ.pop(PARENT, None):
        _end_with(int(parent))
    # Not imported as a module: vLLM's own entry point is a script, and its place has moved before.
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")


def _end_with(parent: int) -> None:
    if sys.platform != "linux":
        return
    set_parent_death_signal = 1
    ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGTERM)
    if os.getppid() != parent:  # it died before we could ask
        sys.exit(f"the process {parent} that started this server has ended")


def _digest(value: bytes) -> bytes:
    return hashlib.sha256(value).digest()


if __name__ == "__main__":
    main()
