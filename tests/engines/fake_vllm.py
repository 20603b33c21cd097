"""A stand-in for a vLLM server that runs in the test's own event loop, and misbehaves on purpose.

It speaks the routes that the client uses. What it does wrong is a function in `troubles`: each takes one request's
right answer and returns what is sent instead.
"""

import asyncio
import json
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from leadline.errors import EngineError
from leadline.types import Weights

Body = dict[str, Any]
EOS = 2
VOCAB = 260


@dataclass(frozen=True)
class Reply:
    status: int = 200
    body: bytes = b""
    headers: str = ""
    cut: bool = False
    """Send half of the body and close the connection."""
    never: bool = False
    """Send nothing, and keep the connection open."""


Trouble = Callable[[Body, Body], Body | Reply]
"""(request, right answer) -> what is sent."""
Draw = Callable[[Body, asyncio.Event], Awaitable[list[Body]]]
"""(request, set when it is aborted) -> choices, each with token_ids, token_logprobs, finish_reason, stop_reason."""


def random_draw(token_s: float = 0.0) -> Draw:
    """Random tokens that depend on the seed, with their position as logprob; EOS after 3 to 10 of them."""

    async def draw(request: Body, aborted: asyncio.Event) -> list[Body]:
        choices = []
        for i in range(request["n"]):
            rng = np.random.default_rng(request["seed"] + i)
            count = min(int(rng.integers(3, 10)), request["max_tokens"] - 1)
            ids = [*(int(t) for t in rng.integers(3, VOCAB, count)), EOS]
            choices.append({"token_ids": ids, "finish_reason": "stop", "stop_reason": EOS})
        longest = max(len(choice["token_ids"]) for choice in choices)
        drawn = 0
        while drawn < longest and not aborted.is_set():
            await asyncio.sleep(token_s)
            drawn += 1
        for choice in choices:
            if len(choice["token_ids"]) > drawn:
                choice.update(token_ids=choice["token_ids"][:drawn], finish_reason="abort", stop_reason=None)
            choice["token_logprobs"] = [-0.01 * (t + 1) for t in range(len(choice["token_ids"]))]
        return choices

    return draw


class FakeVLLM:
    """A server on a free port of the loopback address. An async context manager."""

    def __init__(self, draw: Draw | None = None, *, context_length: int = 4096, model: str = "policy") -> None:
        self.draw = draw or random_draw()
        self.context_length = context_length
        self.model = model
        self.troubles: deque[Trouble] = deque()
        """One request each, in order."""
        self.always: Trouble | None = None
        """What follows them."""
        self.healthy: bool | None = True
        """None: /health is never answered."""
        self.unknown_routes: set[str] = set()
        self.tells_versions = False
        """It has vLLM's own route for tokens, which says which weights drew which of them (in `weight_versions`)."""
        self.requests: list[Body] = []
        self.paths: list[str] = []
        self.weights: Any = "the command line's"
        self.weight_version = "default"
        self.running = 0
        self.most_running = 0
        self.port = 0
        self._aborts: set[asyncio.Event] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def serving(self) -> bool:
        return self._server is not None and self._server.is_serving()

    async def start(self) -> None:
        self.weights, self.weight_version = "the command line's", "default"
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def kill(self) -> None:
        """As SIGKILL: the port is closed and every connection is reset."""
        assert self._server is not None
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        await asyncio.sleep(0)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.kill()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while self.serving:  # not one that was accepted before a kill
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                method, path, _ = head.split(" ", 2)
                length = next(
                    (int(line.split(":")[1]) for line in head.lower().splitlines() if "content-length" in line), 0
                )
                request = json.loads(await reader.readexactly(length) or b"{}")
                reply = await self._reply(method, path, request, head)
                if not await _send(writer, reply):
                    break
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._writers.discard(writer)
            writer.transport.abort()

    async def _reply(self, method: str, path: str, request: Body, head: str) -> Reply:
        self.paths.append(path)
        if path in self.unknown_routes:
            return Reply(404, b'{"detail":"Not Found"}')
        match path:
            case "/health":
                return Reply(never=True) if self.healthy is None else Reply(200 if self.healthy else 503)
            case "/v1/models":
                model = {"id": self.model, "object": "model", "max_model_len": self.context_length}
                return _json({"object": "list", "data": [model]})
            case "/weight_info":
                return _json({"weight_version": self.weight_version})
            case "/update_weight_version":
                self.weight_version = request["new_version"]
                return _json({"success": True})
            case "/abort_requests":
                for event in self._aborts:
                    event.set()
                return _json({"status": "aborted"})
            case "/v1/completions":
                return await self._complete(request)
            case "/inference/v1/generate" if self.tells_versions:
                return Reply(405) if method == "GET" else await self._generate(request)
        return Reply(404, b'{"detail":"Not Found"}')

    async def _complete(self, request: Body) -> Reply:
        self.requests.append(request)
        event = asyncio.Event()
        self._aborts.add(event)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            choices = await self.draw(request, event)
        finally:
            self.running -= 1
            self._aborts.discard(event)
        trouble = self.troubles.popleft() if self.troubles else self.always
        answer: Body | Reply = {"model": self.model, "choices": [_choice(i, c) for i, c in enumerate(choices)]}
        if trouble is not None:
            answer = trouble(request, answer)
        return answer if isinstance(answer, Reply) else _json(answer)

    async def _generate(self, request: Body) -> Reply:
        """The same completions by vLLM's own route, with the spans that `draw` left in them."""
        knobs = request["sampling_params"]
        reply = await self._complete({**knobs, "model": request["model"], "prompt": request["token_ids"]})
        if reply.status != 200:
            return reply
        answer = json.loads(reply.body)
        for choice in answer["choices"]:
            values = zip(choice["token_ids"], choice["logprobs"]["token_logprobs"], strict=True)
            choice["logprobs"] = {"content": [{"token_id": i, "logprob": x, "top_logprobs": []} for i, x in values]}
        return _json({**answer, "prompt_token_ids": request["token_ids"]})


class FakePush:
    """Weights go over as the object they are."""

    def __init__(self, *servers: FakeVLLM) -> None:
        self.servers = servers
        self.pushes: list[tuple[str, int]] = []
        self.failures: deque[Callable[[FakeVLLM], Awaitable[None]]] = deque()
        """One push each, in order: run before the weights are there."""
        self.busy_during_push: list[int] = []

    async def prepare(self, weights: Weights, version: int) -> None:
        pass

    async def push(self, url: str, weights: Weights, version: int, name: str) -> None:
        server = next(server for server in self.servers if server.url == url)
        self.pushes.append((url, version))
        self.busy_during_push.append(server.running)
        if self.failures:
            server.weights = "half of both"
            await self.failures.popleft()(server)
        if not server.serving:
            raise EngineError(f"{url} is gone")
        server.weights, server.weight_version = weights, name


def _choice(index: int, drawn: Body) -> Body:
    ids, logprobs = drawn["token_ids"], drawn["token_logprobs"]
    return {
        "index": index,
        "text": "",
        "logprobs": {
            "token_logprobs": logprobs,
            "tokens": [f"token_id:{i}" for i in ids],
            "top_logprobs": drawn.get("top_logprobs")
            or [{f"token_id:{i}": x} for i, x in zip(ids, logprobs, strict=True)],
        },
        "finish_reason": drawn["finish_reason"],
        "stop_reason": drawn.get("stop_reason"),
        "token_ids": ids,
        "weight_versions": drawn.get("weight_versions"),
    }


def _json(value: Any) -> Reply:
    return Reply(200, json.dumps(value).encode())


async def _send(writer: asyncio.StreamWriter, reply: Reply) -> bool:
    """Whether the connection goes on."""
    if reply.never:
        await asyncio.sleep(3600)
    head = f"HTTP/1.1 {reply.status} X\r\nContent-Type: application/json\r\n{reply.headers}Content-Length: {len(reply.body)}\r\n\r\n"
    writer.write(head.encode() + (reply.body[: len(reply.body) // 2] if reply.cut else reply.body))
    await writer.drain()
    return not reply.cut
