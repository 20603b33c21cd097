"""A real vLLM: what it serves after a push, how it fails without our guards, and what survives its death.

One server at a time, small and random. Without vLLM these tests are skipped; LEADLINE_REQUIRE_VLLM=1 forbids that.
"""

import asyncio
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file

from leadline.engines.serve_command import CPU_ARGUMENTS, recipe_lines
from leadline.engines.vllm_http import VLLMEngine
from leadline.engines.vllm_server import ServerOptions, VLLMServer, free_port
from leadline.engines.vllm_snapshot import policy_score
from leadline.engines.vllm_weights import ServerPush, Transport
from leadline.errors import EngineError
from leadline.models import Loaded, load_model, merged_weights
from leadline.settings.model import Model
from leadline.settings.rollout import EngineSettings, Sampling
from leadline.types import Completion, FinishReason, Prompt
from tests.engines.test_contract import plain_logprobs
from tests.engines.vllm_models import changed, llama, mixture, saved

MISSING = importlib.util.find_spec("vllm") is None
if MISSING and os.environ.get("LEADLINE_REQUIRE_VLLM"):
    raise ImportError("LEADLINE_REQUIRE_VLLM is set, but vllm cannot be imported: run `make vllm`")
pytestmark = [pytest.mark.vllm, pytest.mark.skipif(MISSING, reason="vllm is not installed (make vllm)")]

KEY = "a key of the tests"
TOLERANCE = 1e-4
"""Nats, float32 on both sides: 2e-6 to 8e-6 was measured on twenty architectures."""
KINDS: dict[str, Callable[[], Loaded]] = {
    "tied": lambda: llama(tied=True),
    "untied": lambda: llama(tied=False),
    "mixture": mixture,
}
FREE = Sampling(max_tokens=32, temperature=1.0)
PROMPT = Prompt(index=3, text="", token_ids=tuple(range(5, 25)))
LONG = Prompt(index=4, text="", token_ids=tuple(i % 256 + 4 for i in range(400)))


@dataclass(frozen=True)
class Running:
    """A server, the model it was started from, and one with other weights."""

    kind: str
    server: VLLMServer
    a: Loaded
    b: Loaded

    @property
    def url(self) -> str:
        return self.server.url

    def push(self, loaded: Loaded, **options: Any) -> ServerPush:
        score = policy_score(loaded.model)
        return ServerPush(score, loaded.model.config.vocab_size, model=loaded.model, api_key=KEY, **options)

    def engine(self, loaded: Loaded, **settings: Any) -> VLLMEngine:
        return VLLMEngine(
            [self.url],
            model_name=None,
            eos_ids=settings.pop("eos_ids", frozenset()),
            vocab_size=loaded.model.config.vocab_size,
            seed=0,
            settings=EngineSettings(kind="vllm", urls=(self.url,), **settings),
            push=self.push(loaded),
            tokenizer=loaded.tokenizer,
        )


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", KEY)


@pytest.fixture(scope="module", params=KINDS)
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp(request.param)
    a = KINDS[request.param]()
    b = changed(a, 1)
    saved(b, folder / "b")
    options = ServerOptions(
        model=str(saved(a, folder / "a")),
        port=free_port(),
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=16,
        kv_cache_bytes=64 << 20,
        eager=True,
        api_key=KEY,
        arguments=CPU_ARGUMENTS,
    )
    with VLLMServer(options, folder / "server.log", {**os.environ, "OMP_NUM_THREADS": "1"}) as server:
        asyncio.run(server.ready(240))
        yield Running(request.param, server, a, b)


tied_only = pytest.mark.parametrize("running", ["tied"], indirect=True)


def post(url: str, route: str, body: dict[str, Any] | None = None) -> Any:
    headers = {"Authorization": f"Bearer {KEY}"}
    return httpx.post(url + route, json=body or {}, headers=headers, timeout=120, trust_env=False)


def gap(completion: Completion, loaded: Loaded, prompt: Prompt = PROMPT, sampling: Sampling = FREE) -> torch.Tensor:
    return (torch.tensor(completion.logprobs) - plain_logprobs(loaded.model, prompt, completion, sampling)).abs()


def with_push(running: Running, loaded: Loaded, body: Callable[[ServerPush], Awaitable[Any]], **options: Any) -> Any:
    async def run() -> Any:
        push = running.push(loaded, **options)
        try:
            return await body(push)
        finally:
            await push.close()

    return asyncio.run(run())


def serve(running: Running, loaded: Loaded, version: int = 1) -> None:
    with_push(running, loaded, lambda push: push.push(running.url, merged_weights(loaded.model), version))


def with_engine(running: Running, loaded: Loaded, body: Callable[[VLLMEngine], Awaitable[Any]], **settings: Any) -> Any:
    async def run() -> Any:
        engine = running.engine(loaded, **settings)
        try:
            await engine.load_weights(merged_weights(loaded.model), 1)
            return await body(engine)
        finally:
            await engine.close()

    return asyncio.run(run())


def generate(running: Running, sampling: Sampling, n: int = 1, prompt: Prompt = PROMPT, **settings: Any) -> Any:
    return with_engine(running, running.a, lambda engine: engine.generate(prompt, n, sampling), **settings)


# Weights --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["file", "broadcast"])
def test_after_a_push_both_sides_score_alike_and_no_longer_as_before(running: Running, transport: Transport) -> None:
    serve(running, running.a)

    async def body(push: ServerPush) -> float:
        weights = merged_weights(running.b.model)
        await push.push(running.url, weights, 2)
        return await push.check_probes(running.url, await push.snapshot(weights, 2), "float32")

    assert with_push(running, running.b, body, transport=transport) < TOLERANCE
    with pytest.raises(EngineError, match="probe tokens differ from the policy's"):
        with_push(running, running.a, lambda push: probes(push, running, running.a))


async def probes(push: ServerPush, running: Running, loaded: Loaded) -> float:
    return await push.check_probes(running.url, await push.snapshot(merged_weights(loaded.model), 9), "float32")


def test_sampled_logprobs_are_those_of_the_pushed_weights(running: Running) -> None:
    async def body(engine: VLLMEngine) -> list[Completion]:
        await engine.load_weights(merged_weights(running.b.model), 7)
        return await engine.generate(LONG, 4, FREE)

    for completion in with_engine(running, running.b, body):
        assert set(completion.policy_versions) == {7}
        assert gap(completion, running.b, LONG).max() < TOLERANCE
        assert gap(completion, running.a, LONG).mean() > 0.1


def test_vllms_own_reload_forgets_a_tied_head_and_experts_and_the_probes_see_it(running: Running) -> None:
    serve(running, running.a)
    folder = str(Path(running.server.options.model).parent / "b")
    assert post(running.url, "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}})
    assert post(running.url, "/reset_prefix_cache").json() == {"success": True}
    if running.kind == "untied":
        assert with_push(running, running.b, lambda push: probes(push, running, running.b)) < TOLERANCE
        return
    with pytest.raises(EngineError, match="samples from other weights"):
        with_push(running, running.b, lambda push: probes(push, running, running.b))


@tied_only
def test_an_old_prefix_cache_is_seen_by_the_probes(running: Running) -> None:
    serve(running, running.a)  # its probes leave their prompt in the cache

    async def body(push: ServerPush) -> None:
        snapshot = await push.snapshot(merged_weights(running.b.model), 2)
        await push.send(running.url, snapshot)
        await push.check_probes(running.url, snapshot, "float32")

    with pytest.raises(EngineError, match="probe tokens differ"):
        with_push(running, running.b, body)


@tied_only
def test_a_push_that_lacks_tensors_is_refused_and_the_old_weights_stay(running: Running) -> None:
    serve(running, running.a)
    weights = {name: t for name, t in merged_weights(running.b.model).items() if "layers.1.mlp" not in name}
    with pytest.raises(EngineError, match=r"3 tensors of the served model are not among the new weights"):
        with_push(running, running.b, lambda push: push.push(running.url, weights, 2))
    assert with_push(running, running.a, lambda push: probes(push, running, running.a)) < TOLERANCE


@tied_only
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_and_the_old_ones_stay(running: Running, value: float) -> None:
    serve(running, running.a)
    weights = {
        name: tensor.clone() for name, tensor in merged_weights(running.b.model).items() if "lm_head" not in name
    }
    weights["model.layers.1.mlp.down_proj.weight"][3, 5] = value
    with pytest.raises(EngineError, match=r"down_proj.weight is not finite"):
        with_push(running, running.b, lambda push: push.push(running.url, weights, 2))
    assert with_push(running, running.a, lambda push: probes(push, running, running.a)) < TOLERANCE


@tied_only
def test_a_push_of_only_the_base_of_an_adapter_is_seen(running: Running) -> None:
    loaded = load_model(Model(name=running.server.options.model, lora_rank=4, device="cpu"))
    adapted: Any = loaded.model
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    serve(running, loaded)
    only_base = {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in adapted.base_model.model.state_dict().items()
        if ".lora_" not in name
    }
    with pytest.raises(EngineError, match="probe tokens differ"):
        with_push(running, loaded, lambda push: push.push(running.url, only_base, 2))


@tied_only
def test_a_trainer_that_is_lost_while_it_broadcasts_leaves_the_old_weights(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    from leadline.engines import vllm_weights

    serve(running, running.a)

    def lost(snapshot: Any, host: str, port: int, world: int) -> None:
        group = vllm_weights.broadcast_group(host, port, 0, world)
        for tensor in list(snapshot.tensors.values())[:5]:
            group.broadcast(tensor, 0).wait()
        del group  # its connections break, as those of a process that died
        raise RuntimeError("the cable is out")

    monkeypatch.setattr(vllm_weights, "_send_all", lost)
    with pytest.raises(EngineError, match="keeps its old weights"):
        with_push(
            running,
            running.b,
            lambda push: push.push(running.url, merged_weights(running.b.model), 2),
            transport="broadcast",
        )
    assert with_push(running, running.a, lambda push: probes(push, running, running.a)) < TOLERANCE


@tied_only
@pytest.mark.parametrize("on_new_weights", ["continue", "drain"])
def test_every_token_is_of_the_version_it_carries_while_weights_change_under_it(
    running: Running, on_new_weights: str
) -> None:
    """Whole sequences are drawn under load from weights that change to and fro; none is from a mixture of them."""

    async def body(engine: VLLMEngine) -> list[Completion]:
        asked = [engine.generate(Prompt(i, "", LONG.token_ids[i:]), 4, Sampling(max_tokens=400)) for i in range(4)]
        tasks = [asyncio.create_task(one) for one in asked]
        for version in (2, 3):
            await asyncio.sleep(0.25)  # well before the end, also on an idle machine
            await engine.load_weights(merged_weights((running.a, running.b)[version % 2 == 0].model), version)
        return [completion for group in await asyncio.gather(*tasks) for completion in group]

    completions = with_engine(running, running.a, body, on_new_weights=on_new_weights)
    mixed = [completion for completion in completions if len(set(completion.policy_versions)) > 1]
    assert mixed if on_new_weights == "continue" else not mixed
    for i, completion in enumerate(completions):
        prompt = Prompt(i // 4, "", LONG.token_ids[i // 4 :])
        of_b = torch.tensor([version == 2 for version in completion.policy_versions])
        distance = torch.where(of_b, gap(completion, running.b, prompt), gap(completion, running.a, prompt))
        assert distance.max() < TOLERANCE


# The contract ---------------------------------------------------------------------------------------------------------


@tied_only
def test_greedy_takes_the_same_tokens_twice(running: Running) -> None:
    sampling = Sampling(max_tokens=24, temperature=0)
    [one], [two] = generate(running, sampling), generate(running, sampling)
    assert one == two
    assert gap(one, running.a).max() < TOLERANCE


@tied_only
@pytest.mark.parametrize(
    "knobs",
    [
        {"temperature": 0.6},
        {"top_k": 20},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"repetition_penalty": 1.3},
        {"temperature": 0.7, "top_k": 50, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.2},
    ],
    ids=lambda knobs: "+".join(knobs),
)
def test_logprobs_are_of_the_distribution_that_was_sampled(running: Running, knobs: dict[str, float]) -> None:
    sampling = Sampling(max_tokens=32, **knobs)
    for completion in generate(running, sampling, n=4):
        assert len(completion.token_ids) == 32
        assert gap(completion, running.a, PROMPT, sampling).max() < TOLERANCE


@tied_only
def test_completions_of_a_group_differ_and_are_drawn_again_alike(running: Running) -> None:
    group = generate(running, FREE, n=4)
    assert len({completion.token_ids for completion in group}) == 4
    assert [c.token_ids for c in generate(running, FREE, n=4)] == [c.token_ids for c in group]


@tied_only
def test_every_end_of_a_completion_has_its_reason(running: Running) -> None:
    [free] = generate(running, FREE)
    assert free.finish_reason is FinishReason.LENGTH
    assert len(free.token_ids) == FREE.max_tokens
    end = next(i for i in range(6, 32) if free.token_ids[i] not in free.token_ids[:i])
    token, upto = free.token_ids[end], free.token_ids[: end + 1]
    cases: Sequence[tuple[dict[str, Any], dict[str, Any], FinishReason]] = [
        ({}, {"eos_ids": frozenset({token})}, FinishReason.EOS),
        (
            {},
            {"eos_ids": frozenset({2, 3, token})} if token not in (2, 3) else {"eos_ids": frozenset({token})},
            FinishReason.EOS,
        ),
        ({"stop_token_ids": (token,)}, {}, FinishReason.STOP),
        ({"max_tokens": end + 1}, {"eos_ids": frozenset({token})}, FinishReason.EOS),
    ]
    for knobs, settings, reason in cases:
        [completion] = generate(running, FREE.model_copy(update=knobs), **settings)
        assert completion.token_ids[: end + 1] == upto[: len(completion.token_ids)]
        assert completion.finish_reason is reason


@tied_only
@pytest.mark.parametrize("include_stop", [True, False])
def test_a_stop_string_ends_a_completion_with_the_token_that_completes_it(running: Running, include_stop: bool) -> None:
    [free] = generate(running, Sampling(max_tokens=200, temperature=1.5))
    pieces = [running.a.tokenizer.decode(token) for token in free.token_ids]
    end = next(
        t
        for t in range(2, 200)
        if (s := pieces[t - 1] + pieces[t]).isascii() and len(s) == 2 and s not in "".join(pieces[:t])
    )
    stop = Sampling(max_tokens=200, temperature=1.5, stop=(pieces[end - 1] + pieces[end],), include_stop=include_stop)
    [completion] = generate(running, stop)
    assert completion.finish_reason is FinishReason.STOP
    assert completion.token_ids == free.token_ids[: end + 1]


@tied_only
def test_special_tokens_are_kept(running: Running) -> None:
    group = generate(running, Sampling(max_tokens=200, temperature=2.0), n=4)
    special = set(running.a.tokenizer.all_special_ids)
    assert special & {token for completion in group for token in completion.token_ids}


@tied_only
def test_close_returns_what_runs_as_aborted(running: Running) -> None:
    async def run() -> list[Completion]:
        engine = running.engine(running.a)
        await engine.load_weights(merged_weights(running.a.model), 1)
        task = asyncio.create_task(engine.generate(PROMPT, 2, Sampling(max_tokens=900)))
        await asyncio.sleep(0.2)
        await engine.close()
        return await task

    assert {completion.finish_reason for completion in asyncio.run(run())} == {FinishReason.ABORT}


# The process ----------------------------------------------------------------------------------------------------------


@tied_only
def test_no_route_but_health_answers_without_the_key(running: Running) -> None:
    for route in ("/collective_rpc", "/pause", "/v1/completions", "/update_weights", "/docs"):
        assert httpx.post(running.url + route, json={}, trust_env=False).status_code == 401
    assert httpx.get(running.url + "/health", trust_env=False).status_code == 200


@tied_only
def test_a_server_killed_while_it_generates_comes_back_with_the_newest_weights(running: Running) -> None:
    async def body(engine: VLLMEngine) -> list[Completion]:
        await engine.load_weights(merged_weights(running.b.model), 5)
        watching = asyncio.create_task(running.server.keep_running(0.2))
        generating = asyncio.create_task(engine.generate(LONG, 4, Sampling(max_tokens=500)))
        await asyncio.sleep(0.3)
        assert running.server.process is not None
        os.kill(running.server.process.pid, signal.SIGKILL)
        try:
            return await generating
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching

    completions = with_engine(running, running.b, body)
    assert [len(completion.token_ids) for completion in completions] == [500] * 4
    for completion in completions:
        assert set(completion.policy_versions) == {5}
        assert gap(completion, running.b, LONG).max() < TOLERANCE


def test_serve_says_what_to_put_into_the_recipe_and_ends_with_its_parent(tmp_path: Path) -> None:
    model = saved(llama(tied=True), tmp_path / "model")
    port = free_port()
    words = ["serve", str(model), "--port", str(port), "--kv-cache", "0.05", "--max-num-seqs", "8", "--api-key", KEY]
    program = [sys.executable, "-m", "leadline", *words, "--log", str(tmp_path / "log")]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    command = subprocess.Popen(program, stdout=subprocess.PIPE, env=env, text=True)
    try:
        assert command.stdout is not None
        said = ""
        while "Ctrl-C" not in said and (line := command.stdout.readline()):
            said += line
        options = ServerOptions(model=str(model), port=port)
        assert recipe_lines(options) in said
        assert httpx.get(f"{options.url}/health", trust_env=False).status_code == 200
    finally:
        command.kill()  # not asked: a server must not outlive even that
        command.wait()
        command.stdout.close()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and processes_of(model):
        time.sleep(0.2)
    assert processes_of(model) == []
    free = VLLMServer(ServerOptions(model="none", port=port), tmp_path / "log")
    free._check_port()


def processes_of(model: Path) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            if str(model).encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return found


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    options = ServerOptions(model=str(tmp_path / "no-such-model"), port=free_port())
    with (
        VLLMServer(options, tmp_path / "log") as server,
        pytest.raises(EngineError, match="it ended while starting") as error,
    ):
        asyncio.run(server.ready(120))
    assert "Error: " in str(error.value)


def test_the_snapshot_file_lies_in_memory_and_is_gone_after_close() -> None:
    loaded = llama(tied=True)
    push = ServerPush(policy_score(loaded.model), loaded.model.config.vocab_size)

    async def run() -> Path:
        snapshot = await push.snapshot(merged_weights(loaded.model), 1)
        assert load_file(snapshot.path).keys() == snapshot.fingerprints.keys()
        assert "lm_head.weight" not in snapshot.fingerprints
        await push.close()
        return snapshot.path

    assert not asyncio.run(run()).exists()
