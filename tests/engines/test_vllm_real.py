"""A real vLLM server: what it serves after a push, how it fails without our guards, and what survives its death.

Small random models. What every engine promises is in `test_contract.py`.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file

from leadline.engines.serve_command import recipe_lines
from leadline.engines.vllm_http import VLLMEngine
from leadline.engines.vllm_link import Link
from leadline.engines.vllm_server import ServerOptions, VLLMServer, free_port
from leadline.engines.vllm_snapshot import plain_tensors, policy_score
from leadline.engines.vllm_weights import ServerPush, Transport
from leadline.engines.vllm_wire import Ask
from leadline.engines.vllm_worker import fingerprints
from leadline.errors import EngineError
from leadline.models import Loaded, load_model, merged_weights
from leadline.settings.model import Model
from leadline.settings.rollout import Sampling
from leadline.types import Completion, Prompt
from tests.engines.real_vllm import KEY, TOLERANCE, Running, Servers
from tests.engines.test_contract import plain_logprobs
from tests.engines.vllm_models import llama, saved

pytestmark = pytest.mark.vllm

FREE = Sampling(max_tokens=32, temperature=1.0)
LONG = Prompt(index=4, text="", token_ids=tuple(i % 256 + 4 for i in range(400)))


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", KEY)


@pytest.fixture(scope="module", params=["tied", "mixture"])
def running(request: pytest.FixtureRequest, servers: Servers) -> Running:
    return servers.get(request.param)


tied_only = pytest.mark.parametrize("running", ["tied"], indirect=True)


def gap(completion: Completion, loaded: Loaded, prompt: Prompt = LONG, sampling: Sampling = FREE) -> torch.Tensor:
    return (torch.tensor(completion.logprobs) - plain_logprobs(loaded.model, prompt, completion, sampling)).abs()


# Weights --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["file", "broadcast"])
def test_after_a_push_both_sides_score_alike_and_no_longer_as_before(running: Running, transport: Transport) -> None:
    running.serve(running.a)

    async def body(push: ServerPush) -> float:
        weights = merged_weights(running.b.model)
        await push.push(running.url, weights, 2, "2")
        return await push.check_probes(running.url, await push.snapshot(weights, 2), "float32")

    assert running.with_push(running.b, body, transport=transport) < TOLERANCE
    with pytest.raises(EngineError, match="probe tokens differ from the policy's"):
        running.probes(running.a)


def test_sampled_logprobs_are_those_of_the_pushed_weights(running: Running) -> None:
    async def body(engine: VLLMEngine) -> list[Completion]:
        await engine.load_weights(merged_weights(running.b.model), 7)
        return await engine.generate(LONG, 4, FREE)

    for completion in running.with_engine(running.b, body):
        assert set(completion.policy_versions) == {7}
        assert gap(completion, running.b, LONG).max() < TOLERANCE
        assert gap(completion, running.a, LONG).mean() > 0.1


def test_vllms_own_reload_forgets_a_tied_head_and_experts_and_the_probes_see_it(running: Running) -> None:
    running.serve(running.a)
    folder = str(Path(running.server.options.model).parent / "b")
    assert running.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}})
    assert running.post("/reset_prefix_cache").json() == {"success": True}
    with pytest.raises(EngineError, match="samples from other weights"):
        running.probes(running.b)


def test_vllms_own_checksums_are_the_same_before_and_after_and_ours_are_not(running: Running) -> None:
    """Packed layers hash as empty: a checksum that does not change proves nothing."""

    def checksums() -> dict[str, str]:
        return running.post("/weight_checker", {"action": "checksum"}).json()["checksums"]

    running.serve(running.a)
    before = checksums()
    running.serve(running.b, 2)
    same = [name for name, value in checksums().items() if value == before[name]]
    assert any("qkv_proj" in name for name in same)
    a, b = (fingerprints(plain_tensors(merged_weights(m.model), m.model)) for m in (running.a, running.b))
    assert a.keys() == b.keys()
    assert [name for name in a if a[name] == b[name]] == []


@tied_only
def test_new_weights_under_running_requests_and_without_a_pause_do_not_end_the_server(running: Running) -> None:
    """vLLM's own routes spread a load over several steps of the engine, which then dies: ours is one."""

    async def body(engine: VLLMEngine) -> list[Completion]:
        asked = asyncio.create_task(engine.generate(LONG, 8, Sampling(max_tokens=300)))
        await asyncio.sleep(0.2)
        push = running.push(running.b)
        for version in (2, 3):
            await push.send(running.url, await push.snapshot(merged_weights(running.b.model), version))
        await push.close()
        return await asked

    assert [len(c.token_ids) for c in running.with_engine(running.a, body)] == [300] * 8
    assert running.probes_after_reset(running.b) < TOLERANCE


@tied_only
def test_an_old_prefix_cache_is_seen_by_the_probes(running: Running) -> None:
    running.serve(running.a)  # its probes leave their prompt in the cache

    async def body(push: ServerPush) -> None:
        snapshot = await push.snapshot(merged_weights(running.b.model), 2)
        await push.send(running.url, snapshot)
        await push.check_probes(running.url, snapshot, "float32")

    with pytest.raises(EngineError, match="probe tokens differ"):
        running.with_push(running.b, body)


@tied_only
def test_a_push_that_lacks_tensors_is_refused_and_the_old_weights_stay(running: Running) -> None:
    running.serve(running.a)
    weights = {name: t for name, t in merged_weights(running.b.model).items() if "layers.1.mlp" not in name}
    with pytest.raises(EngineError, match=r"3 tensors of the served model are not among the new weights"):
        running.with_push(running.b, lambda push: push.push(running.url, weights, 2, "2"))
    assert running.probes(running.a) < TOLERANCE


@tied_only
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_and_the_old_ones_stay(running: Running, value: float) -> None:
    running.serve(running.a)
    weights = {
        name: tensor.clone() for name, tensor in merged_weights(running.b.model).items() if "lm_head" not in name
    }
    weights["model.layers.1.mlp.down_proj.weight"][3, 5] = value
    with pytest.raises(EngineError, match=r"down_proj.weight is not finite"):
        running.with_push(running.b, lambda push: push.push(running.url, weights, 2, "2"))
    assert running.probes(running.a) < TOLERANCE


@tied_only
def test_a_push_of_only_the_base_of_an_adapter_is_seen(running: Running) -> None:
    loaded = load_model(Model(name=running.server.options.model, lora_rank=4, device="cpu"))
    adapted: Any = loaded.model
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    running.serve(loaded)
    only_base = {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in adapted.base_model.model.state_dict().items()
        if ".lora_" not in name
    }
    with pytest.raises(EngineError, match="probe tokens differ"):
        running.with_push(loaded, lambda push: push.push(running.url, only_base, 2, "2"))


@tied_only
def test_a_trainer_that_is_lost_while_it_broadcasts_leaves_the_old_weights(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    from leadline.engines import vllm_weights

    running.serve(running.a)

    def lost(snapshot: Any, host: str, port: int, world: int, backend: str) -> None:
        group = vllm_weights.broadcast_group(host, port, 0, world)
        for tensor in list(snapshot.tensors.values())[:5]:
            group.broadcast(tensor, 0).wait()
        del group  # its connections break, as those of a process that died
        raise RuntimeError("the cable is out")

    monkeypatch.setattr(vllm_weights, "_send_all", lost)
    with pytest.raises(EngineError, match="keeps its old weights"):
        running.with_push(
            running.b,
            lambda push: push.push(running.url, merged_weights(running.b.model), 2, "2"),
            transport="broadcast",
        )
    assert running.probes(running.a) < TOLERANCE


LASTING = 900
"""Tokens: a group takes many times as long as the next ones take to begin, so that some are under way at most moments."""
CHANGES = 20
"""A machine that is busy elsewhere may end all groups just before a change, but not before each of so many."""


def is_mixed(completion: Completion) -> bool:
    return len(set(completion.policy_versions)) > 1


@tied_only
@pytest.mark.parametrize("way", ["under_way", "by_abort", "drain"])
def test_every_token_is_of_the_version_it_carries_while_weights_change_under_it(
    running: Running, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole sequences are drawn under load from weights that change to and fro; none is from a mixture of them."""
    if way == "by_abort":  # a server without vLLM's own route
        monkeypatch.setattr(Link, "tells_versions", False)
    asks: list[Ask] = []
    complete = Link.complete

    async def counted(link: Link, ask: Ask) -> bytes:
        asks.append(ask)
        return await complete(link, ask)

    monkeypatch.setattr(Link, "complete", counted)

    def prompt(index: int) -> Prompt:
        return Prompt(index, "", LONG.token_ids[index % 8 : 100])

    async def body(engine: VLLMEngine) -> list[Completion]:
        tasks: list[asyncio.Task[list[Completion]]] = []

        async def groups_start_until(done: Callable[[], bool]) -> None:
            while not done():
                if sum(not task.done() for task in tasks) < 6:
                    tasks.append(
                        asyncio.create_task(engine.generate(prompt(len(tasks)), 4, Sampling(max_tokens=LASTING)))
                    )
                await asyncio.sleep(0.1)

        def completions() -> list[Completion]:
            return [completion for task in tasks if task.done() for completion in task.result()]

        for version in range(2, 4 if way == "drain" else 2 + CHANGES):
            weights = merged_weights((running.a, running.b)[version % 2 == 0].model)
            loading = asyncio.create_task(engine.load_weights(weights, version))
            await groups_start_until(loading.done)
            await loading
            # Those that begin later than the next one are half-way when it is done, and meet the next change.
            next_one = len(tasks)
            await groups_start_until(lambda: len(tasks) > next_one and tasks[next_one].done())  # noqa: B023
            if any(map(is_mixed, completions())):
                break
        await asyncio.gather(*tasks)
        return completions()

    settings = {"on_new_weights": "drain" if way == "drain" else "continue"}
    completions = running.with_engine(running.a, body, **settings)
    assert {len(completion.token_ids) for completion in completions} == {LASTING}
    assert any(map(is_mixed, completions)) == (way != "drain")
    gone_on = [ask for ask in asks if ask.drawn]
    assert bool(gone_on) == (way == "by_abort")
    assert all(len(ask.drawn) + ask.max_tokens == LASTING for ask in gone_on)
    for i, completion in enumerate(completions):
        of_b = torch.tensor([version % 2 == 0 for version in completion.policy_versions])
        asked = prompt(i // 4)
        distance = torch.where(of_b, gap(completion, running.b, asked), gap(completion, running.a, asked))
        assert distance.max() < TOLERANCE


# The process ----------------------------------------------------------------------------------------------------------


@tied_only
def test_no_route_but_health_answers_without_the_key(running: Running) -> None:
    for route in ("/collective_rpc", "/pause", "/v1/completions", "/update_weights", "/docs"):
        assert httpx.post(running.url + route, json={}, trust_env=False).status_code == 401
    assert httpx.get(running.url + "/health", trust_env=False).status_code == 200


@tied_only
def test_a_server_killed_while_it_generates_and_back_in_another_logprob_mode_is_pushed_to_and_examined_before_it_serves(
    running: Running,
) -> None:
    """The last test on this server, which is another one afterwards."""
    said: list[str] = []
    cold = Sampling(max_tokens=8, temperature=0.5)

    async def body(engine: VLLMEngine) -> list[Completion]:
        await engine.load_weights(merged_weights(running.b.model), 5)
        await engine.generate(LONG, 1, cold)
        server = running.server
        server.options = replace(server.options, logprobs_mode="raw_logprobs")
        watching = asyncio.create_task(server.keep_running(0.2))
        generating = asyncio.create_task(engine.generate(LONG, 4, Sampling(max_tokens=500)))
        await asyncio.sleep(0.3)
        assert server.process is not None
        os.kill(server.process.pid, signal.SIGKILL)
        try:
            completions = await generating
            with pytest.raises(EngineError, match="reports raw logprobs"):
                await engine.generate(LONG, 1, cold)
            return completions
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching

    completions = running.with_engine(running.b, body, say=said.append)
    assert [len(completion.token_ids) for completion in completions] == [500] * 4
    for completion in completions:
        assert set(completion.policy_versions) == {5}
        assert gap(completion, running.b).max() < TOLERANCE
    assert [line.split(",")[0] for line in said if "raw" in line] == [f"The server {running.url} reports raw logprobs"]


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
