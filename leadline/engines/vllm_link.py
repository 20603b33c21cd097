"""One vLLM server as seen from the trainer: its HTTP routes, and what is known of it."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import httpx

from leadline.engines.vllm_spans import GENERATE, generate_body
from leadline.engines.vllm_wire import Ask, quoted, refusal, request_body
from leadline.errors import EngineError

HEALTH_TIMEOUT_S = 10.0
"""A server that lets a question this small wait so long cannot be told from a hanging one."""
LATER = {408, 425, 429}
"""HTTP statuses that say: the request is right, but not now."""


class ServerLost(Exception):
    """The server cannot be used now; the request may succeed on another, or on this one when it is back."""


class Busy(Exception):
    """The server asks to come back after `seconds`."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds


def has_tls(url: str) -> bool:
    """Whether certificates matter: to read all that are known takes 20 ms for every connection."""
    return not url.startswith("http://")


class Link:
    """A server. It takes requests while it is `live` (it answers, and holds the newest weights) and `open`."""

    def __init__(self, url: str, *, timeout_s: float) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.live = False
        self.open = True
        """False while its weights change."""
        self.model = ""
        """What requests ask for: the policy, or the adapter that was pushed last."""
        self.adapter: str | None = None
        self.context_length: int | None = None
        self.version = 0
        """Of the weights it holds."""
        self.holds: str | None = None
        """The name of these weights."""
        self.names = False
        """It remembers that name, so that a restart shows."""
        self.named: dict[str, int] = {}
        """The versions of the weights it was pushed, by name."""
        self.spans = False
        """It has the route that says which weights drew which tokens."""
        self.raw = False
        """It reports logprobs from before temperature and truncation."""
        self.examined = False
        """`raw` was found out since it came (back)."""
        self.completions = 0
        self.tokens = 0
        """Completions and tokens it may still have to draw."""
        self.attempts: set[asyncio.Task[Any]] = set()
        self.updating = asyncio.Lock()
        self.settled = asyncio.Event()
        """Not set while its weights change under requests: what those return may not count."""
        self.settled.set()
        self.lost = asyncio.Event()
        self.losses = 0
        """In a row: how long to wait before the next try."""
        self.trouble = "it has not answered yet"
        self._timeout_s = timeout_s

    @property
    def tells_versions(self) -> bool:
        """Each of its answers says which weights drew which tokens, by names that we gave."""
        return self.spans and self.names

    @property
    def goes_on(self) -> bool:
        """Its requests may span a change of weights. Not with an adapter, which a request names once and for all."""
        return self.tells_versions and self.adapter is None

    def open_connection(self, headers: Mapping[str, str]) -> None:
        # No proxies from the environment: they answer in a server's place, and a loopback address is not theirs.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(
            base_url=self.url, headers=headers, limits=limits, timeout=None, trust_env=False, verify=has_tls(self.url)
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def connect(self, model_name: str | None) -> None:
        """The server answers and serves the model. Raises ServerLost, and EngineError if it serves another."""
        await self._request("GET", "/health")
        response = await self._request("GET", "/v1/models")
        if response.status_code in (401, 403):
            raise EngineError(
                f"The server {self.url} asks for an API key (HTTP {response.status_code}), but the environment variable "
                "VLLM_API_KEY does not hold the right one. It would refuse every request. Set VLLM_API_KEY."
            )
        try:
            models = [model for model in response.json()["data"] if model.get("parent") is None]  # no adapters
            served = {model["id"]: model.get("max_model_len") for model in models}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ServerLost(f"/v1/models is no list of models ({quoted(response.content)})") from error
        if model_name not in served and (model_name is not None or len(served) != 1):
            raise EngineError(
                f"engine.model_name is {model_name!r}, but the server {self.url} serves {sorted(served)}. Requests must "
                "name one of them. Set engine.model_name."
            )
        self.model = model_name or next(iter(served))
        length = served[self.model]
        self.context_length = length if isinstance(length, int) else None
        # Method not allowed, where there is such a route; else unknown, or forbidden.
        self.spans = (await self._request("GET", GENERATE)).status_code == 405

    async def complete(self, ask: Ask) -> bytes:
        """The body of a 200 answer. Raises ServerLost, Busy, and EngineError for what no retry can mend."""
        self._check_fits(ask)
        body, route = request_body(ask, self.adapter or self.model), "/v1/completions"
        if self.tells_versions:
            body, route = generate_body(body), GENERATE
        response = await self._request("POST", route, self._timeout_s, json=body)
        if response.status_code in LATER:
            raise Busy(_retry_after(response))
        if response.status_code != 200:
            raise refusal(self.url, response.status_code, response.content, ask, self.model)
        return response.content

    async def healthy(self) -> bool:
        """Whether it answers, and its engine runs: else /health is a 503."""
        try:
            await self._request("GET", "/health")
        except ServerLost:
            return False
        return True

    async def abort_all(self) -> bool:
        """What runs returns with the tokens it has. False if the server has no such route."""
        return (await self._request("POST", "/abort_requests", json={})).status_code == 200

    async def name_weights(self, name: str) -> None:
        """The weights it holds have this name."""
        response = await self._request("POST", "/update_weight_version", json={"new_version": name})
        self.names = response.status_code == 200
        self.holds = name

    async def weights_name(self) -> str | None:
        """The name of the weights it holds; None if it does not say."""
        response = await self._request("GET", "/weight_info")
        try:
            name = json.loads(response.content)["weight_version"]
        except (ValueError, KeyError, TypeError):
            return None
        return name if isinstance(name, str) else None

    def _check_fits(self, ask: Ask) -> None:
        needed = len(ask.context) + ask.max_tokens
        if self.context_length is not None and needed > self.context_length:
            raise EngineError(
                f"sampling.max_tokens is {ask.sampling.max_tokens} and prompt {ask.prompt.index} has "
                f"{len(ask.prompt.token_ids)} tokens, but the context of the server {self.url} holds "
                f"{self.context_length}. It would cut completions short without a word. Start it with --max-model-len "
                f"{needed} or more, or lower sampling.max_tokens or data.max_prompt_tokens."
            )

    async def _request(
        self, method: str, path: str, timeout_s: float | None = None, json: Any = None
    ) -> httpx.Response:
        timeout_s = timeout_s or HEALTH_TIMEOUT_S
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._http.request(method, path, json=json)
        except TimeoutError as error:
            raise ServerLost(f"{path} was not answered within {timeout_s:g} s") from error
        except httpx.HTTPError as error:
            raise ServerLost(f"{path}: {type(error).__name__} {error}".rstrip()) from error
        if response.status_code >= 500:
            raise ServerLost(f"{path} was answered with HTTP {response.status_code} ({quoted(response.content)})")
        return response


def _retry_after(response: httpx.Response) -> float:
    """Seconds, as the server says them, within reason."""
    try:
        return min(60.0, max(0.1, float(response.headers["retry-after"])))
    except (KeyError, ValueError):
        return 1.0
