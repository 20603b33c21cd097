"""New weights into a running vLLM server, and the proof that it serves them.

A push is: pause, hand over, drop what was cached, resume, prove. The proof has two parts.
Fingerprints show that every tensor arrived bit for bit and lies in the model so where it still lies there whole; probes,
a few tokens behind a prompt that is longer than a cache block, are scored by the server and by the policy, and show
what fingerprints cannot: that nothing derived from the old weights (a packed head, experts, cached keys) is served on.
"""

import asyncio
import os
import shutil
import socket
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx
from torch import Tensor, nn

from leadline.compute import computed
from leadline.engines.vllm_link import has_tls
from leadline.engines.vllm_server import LOOPBACK, free_port
from leadline.engines.vllm_snapshot import PROBE_PROMPT, PROBE_TOP, PROBES, Score, Snapshot, probe_ids, take_snapshot
from leadline.engines.vllm_worker import broadcast_backend, broadcast_group
from leadline.errors import EngineError
from leadline.types import Weights

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.15, "float16": 0.03}
"""Mean distance in nats between the two scorings that is rounding, by the coarser dtype of the two."""

Transport = Literal["file", "broadcast"]


class ServerPush:
    """A `WeightPush`: hands weights over through a file on the server's own host, and by broadcast elsewhere
    (NCCL between CUDA devices, else gloo).

    Weights are read once, at their first push; a server that comes back later gets those same ones.
    """

    def __init__(
        self,
        score: Score,
        vocab_size: int,
        *,
        model: nn.Module | None = None,
        api_key: str | None = None,
        model_name: str | None = None,
        transport: Transport | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        """`model`: turns names of transformers into those of its checkpoints. `transport`: None = by the address.

        `model_name`: None = the only one that the server serves.
        """
        self._score, self._model, self._name, self._transport = score, model, model_name, transport
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout_s = timeout_s
        self._device = "cpu" if model is None else next(model.parameters()).device.type
        self._probe_ids = probe_ids(vocab_size)
        self._folder = _new_folder()
        self._remove_folder = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._snapshot: Snapshot | None = None
        self._lock = asyncio.Lock()

    async def prepare(self, weights: Weights, version: int) -> Tensor:
        """The weights are read, and scored on the probes. Returns the policy's logprobs behind them, [probe, vocab]."""
        return (await self.snapshot(weights, version)).expected

    async def push(self, url: str, weights: Weights, version: int, name: str) -> str | None:
        """The server at `url` has proved that it serves `weights`, and calls them `name`. Raises EngineError."""
        snapshot = await self.snapshot(weights, version)
        async with self._paused(url):
            receipts = await self.send(url, snapshot)
            await self._drop_caches(url)
            await self.name_weights(url, name)
        check_receipts(url, receipts, snapshot)
        await self.check_probes(url, snapshot, str(receipts[0]["dtype"]))
        return None

    async def name_weights(self, url: str, name: str) -> None:
        """The tokens that the server draws from now on are of weights with this name, if it tells such names."""
        response = await self._request("POST", url, "/update_weight_version", {"new_version": name})
        if response.status_code not in (404, 405):
            _answer(url, "/update_weight_version", response)

    async def snapshot(self, weights: Weights, version: int) -> Snapshot:
        """The weights as they are sent, read once."""
        async with self._lock:
            if self._snapshot is None or self._snapshot.weights is not weights or self._snapshot.version != version:
                self._snapshot = await computed(
                    take_snapshot,
                    weights,
                    version,
                    path=self._folder / "weights.safetensors",
                    score=self._score,
                    probe_ids=self._probe_ids,
                    model=self._model,
                )
            return self._snapshot

    async def send(self, url: str, snapshot: Snapshot) -> list[dict[str, Any]]:
        """Hand the weights over. Returns the receipt of each worker."""
        if (self._transport or transport_for(url)) == "file":
            receipts = await self._call(url, "leadline_load", {"path": str(snapshot.path)})
        else:
            receipts = await self._broadcast(url, snapshot)
        return receipts

    async def check_probes(self, url: str, snapshot: Snapshot, dtype: str, model: str | None = None) -> float:
        """Mean distance in nats between the server's logprobs and the policy's. Raises EngineError past tolerance."""
        model = model or self._name or (await self._get(url, "/v1/models"))["data"][0]["id"]
        prompts = [self._probe_ids[: PROBE_PROMPT + i] for i in range(PROBES)]
        body = {
            "model": model,
            "prompt": prompts,
            "max_tokens": 1,
            "logprobs": PROBE_TOP,
            "return_tokens_as_token_ids": True,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "seed": 0,
        }
        answer = await self._post(url, "/v1/completions", body)
        distances = [
            abs(logprob - float(snapshot.expected[choice["index"], token]))
            for choice in answer["choices"]
            for token, logprob in _top_logprobs(choice).items()
        ]
        mean, limit = sum(distances) / len(distances), max(TOLERANCE[dtype], TOLERANCE[snapshot.dtype])
        if not mean <= limit or len(answer["choices"]) != PROBES:
            raise EngineError(
                f"The weights of version {snapshot.version} were loaded into {url}, but the logprobs of {len(distances)} "
                f"probe tokens differ from the policy's by {mean:.3g} nats on average ({limit} is rounding). The server "
                "samples from other weights than those that are trained. Start it with `leadline serve`, from the same "
                "model, and report the architecture if that does not help."
            )
        return mean

    async def close(self) -> None:
        """The snapshot is deleted."""
        self._remove_folder()

    # ---- the parts of a push

    @asynccontextmanager
    async def _paused(self, url: str) -> Any:
        """No token is drawn inside; what runs is kept, and goes on afterwards."""
        await self._post(url, "/pause?mode=keep", {})
        try:
            yield
        finally:
            await self._post(url, "/resume", {})

    async def _drop_caches(self, url: str) -> None:
        """Keys and values of the old weights are gone; requests under way compute theirs anew."""
        for _ in range(20):
            answer = await self._post(url, "/reset_prefix_cache?reset_running_requests=true", {})
            if answer["success"]:
                return
            await asyncio.sleep(0.1)  # blocks are freed when the outputs of the last step are read
        raise EngineError(
            f"New weights were loaded into {url}, but it keeps the prefix cache of the old ones. Prompts would be "
            "scored with stale keys. Restart the server with `leadline serve`."
        )

    async def _broadcast(self, url: str, snapshot: Snapshot) -> list[dict[str, Any]]:
        world = 1 + int((await self._get(url, "/get_world_size?include_dp=false"))["world_size"])
        host = _own_address(url)
        port = free_port(host)
        described = [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in snapshot.tensors.items()]
        workers = [receipt["device"] for receipt in await self._call(url, "leadline_device", {})]
        backend = broadcast_backend(self._device, workers)
        arguments = {"host": host, "port": port, "world": world, "tensors": described, "backend": backend}
        receiving = asyncio.create_task(self._call(url, "leadline_receive", arguments))
        try:
            await asyncio.to_thread(_send_all, snapshot, host, port, world, backend)
        except RuntimeError as error:
            await asyncio.wait([receiving], timeout=90)
            reason = receiving.exception() if receiving.done() else None
            raise EngineError(
                f"The weights of version {snapshot.version} were being sent to {url}, but the connection broke "
                f"({reason or error}). The server keeps its old weights. Check that it can reach {host}:{port}."
            ) from error
        return await receiving

    async def _call(self, url: str, method: str, arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
        results = (await self._post(url, "/collective_rpc", {"method": method, "kwargs": arguments}))["results"]
        refused = [receipt["refused"] for receipt in results if "refused" in receipt]
        if refused:
            raise EngineError(
                f"New weights were sent to {url}, but it refused them: {refused[0]}. It still serves the old ones. "
                "Start the server from the model that is trained."
            )
        return list(results)

    async def _get(self, url: str, route: str) -> Any:
        return _answer(url, route, await self._request("GET", url, route, None))

    async def _post(self, url: str, route: str, body: Mapping[str, Any]) -> Any:
        return _answer(url, route, await self._request("POST", url, route, body))

    async def _request(self, method: str, url: str, route: str, body: Mapping[str, Any] | None) -> httpx.Response:
        try:
            # no proxies of the environment: a loopback address is not theirs
            async with httpx.AsyncClient(
                headers=self._headers, timeout=self._timeout_s, trust_env=False, verify=has_tls(url)
            ) as client:
                return await client.request(method, url.rstrip("/") + route, json=body)
        except httpx.HTTPError as error:
            raise EngineError(
                f"New weights were being pushed to {url}, but {route.partition('?')[0]} failed "
                f"({type(error).__name__}: {error}). What it serves is unknown. Look at the server's log."
            ) from error


def check_receipts(url: str, receipts: Sequence[Mapping[str, Any]], snapshot: Snapshot) -> None:
    """Raise EngineError unless each worker received every tensor bit for bit, and holds it so where it is whole."""
    for receipt in receipts:
        arrived, live = receipt["tensors"], receipt["live"]
        wrong = sorted(name for name, print_ in snapshot.fingerprints.items() if arrived.get(name) != print_)
        stale = sorted(name for name, print_ in live.items() if snapshot.fingerprints[name] != print_)
        if wrong or stale:
            raise EngineError(
                f"The weights of version {snapshot.version} were loaded into {url}, but {len(wrong)} tensors arrived "
                f"changed or not at all (first: {wrong[:3]}), and {len(stale)} of the model are not what was sent "
                f"(first: {stale[:3]}). The server samples from other weights than those that are trained. Restart it."
            )


FOLDER = "leadline-weights"


def _new_folder() -> Path:
    """In memory where the system has such a place; what runs that were killed left there is removed."""
    parent = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
    for left in parent.glob(f"{FOLDER}-*"):
        if not Path("/proc", left.name.split("-")[2]).exists() and Path("/proc/self").exists():
            shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{FOLDER}-{os.getpid()}-", dir=parent))


def _top_logprobs(choice: Mapping[str, Any]) -> dict[int, float]:
    [at_first_token] = choice["logprobs"]["top_logprobs"]
    return {int(token.removeprefix("token_id:")): float(logprob) for token, logprob in at_first_token.items()}


# ---- the wire


def _answer(url: str, route: str, response: httpx.Response) -> Any:
    if response.is_success:
        is_json = response.headers.get("content-type", "").startswith("application/json")
        return response.json() if is_json else response.text
    advice = (
        "Start it with `leadline serve`, which opens the routes for weights and loads the worker extension."
        if response.status_code in (404, 405) or "leadline_" in response.text
        else "Look at the server's log."
    )
    raise EngineError(
        f"New weights were being pushed to {url}, but {route.partition('?')[0]} answered {response.status_code}: "
        f"{response.text[:300]!r}. What it serves is unknown. {advice}"
    )


def transport_for(url: str) -> Transport:
    """A file where the server is on this host, else a broadcast."""
    host = urlsplit(url).hostname or ""
    return "file" if host in LOOPBACK or host == socket.gethostname() else "broadcast"


def _own_address(url: str) -> str:
    """The address of this machine as the server sees it."""
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname, parts.port or 80))  # sends nothing: it only chooses the route
        return str(probe.getsockname()[0])


def _send_all(snapshot: Snapshot, host: str, port: int, world: int, backend: str) -> None:
    group = broadcast_group(host, port, 0, world, backend)
    for tensor in snapshot.tensors.values():
        group.broadcast(tensor.cuda() if backend == "nccl" else tensor, 0).wait()
