"""Asynchronous runs that survive a real vLLM, and their own trainer: no group is lost or trained twice, the bound holds."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars
import pytest

from leadline.engines.serve_command import CPU_ARGUMENTS
from leadline.engines.vllm_server import ServerOptions, VLLMServer, free_port
from leadline.run_dir import read_metrics
from tests.engines.vllm_models import llama, saved
from tests.processes import lines, start, wait_for

pytestmark = pytest.mark.vllm

RECIPE = """
[model]
name = "{model}"
device = "cpu"
[data]
source = "reasoning_gym:chain_sum"
size = 40
[[rewards]]
name = "length"
params = {{target = 20, slack = 60}}
[sampling]
max_tokens = 120
[engine]
kind = "vllm"
urls = ["{url}"]
[rollout]
group_size = 4
groups_per_step = 2
max_staleness = {max_staleness}
[optimizer]
learning_rate = 1e-4
[eval]
prompts = 0
[run]
dir = "{run}"
steps = {steps}
checkpoint_every = 2
"""
REAL_STEPS = 8


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServer]:
    folder = tmp_path_factory.mktemp("served")
    options = ServerOptions(
        model=str(saved(llama(tied=True), folder / "model")),
        port=free_port(),
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=16,
        kv_cache_bytes=64 << 20,
        eager=True,
        arguments=CPU_ARGUMENTS,
    )
    with VLLMServer(options, folder / "server.log", {**os.environ, "OMP_NUM_THREADS": "1"}) as running:
        asyncio.run(running.ready(240))
        yield running


class Run:
    """`leadline train` against the server, in a process of its own."""

    def __init__(self, server: VLLMServer, folder: Path, max_staleness: int) -> None:
        self.path, self.output, self.max_staleness = folder / "run", folder / "out.txt", max_staleness
        self.recipe = folder / "recipe.toml"
        values = {"model": server.options.model, "url": server.url, "run": self.path, "steps": REAL_STEPS}
        self.recipe.write_text(RECIPE.format(max_staleness=max_staleness, **values))

    def start(self, *more: str) -> Any:
        return start(self.output, "train", str(self.recipe), *more)

    def steps(self) -> int:
        return lines(self.path / "metrics.jsonl")

    def ended_well(self, process: Any) -> None:
        """Every step was made, each prompt trained once, no token older than the bound, and the policy has moved."""
        process.join(180)
        assert process.exitcode == 0, self.output.read_text()
        tables = [polars.read_parquet(self.path / f"rollouts/step_{n:06d}.parquet") for n in range(1, REAL_STEPS + 1)]
        indices = [index for table in tables for index in table["prompt_index"].unique(maintain_order=True).to_list()]
        assert indices == list(range(2 * REAL_STEPS))
        for step, table in enumerate(tables, start=1):
            assert table["error"].null_count() == len(table) == 8
            assert table["policy_version_min"].min() >= step - 1 - self.max_staleness  # type: ignore[operator]
            assert table["policy_version_max"].max() <= step - 1  # type: ignore[operator]
        rows = read_metrics(self.path / "metrics.jsonl")
        assert [row["step"] for row in rows] == list(range(1, REAL_STEPS + 1))
        # The engine's logprobs are those of the weights they say: fresh tokens agree with the policy to rounding.
        gaps = [row["staleness/age_0/log_ratio_abs_mean"] for row in rows if "staleness/age_0/ess" in row]
        assert all(gap < 1e-3 for gap in gaps)


@pytest.mark.parametrize("max_staleness", [1, 2, 4])
def test_a_real_server_runs_ahead_up_to_the_bound(server: VLLMServer, tmp_path: Path, max_staleness: int) -> None:
    run = Run(server, tmp_path, max_staleness)
    run.ended_well(run.start())
    oldest = max(row["staleness/max"] for row in read_metrics(run.path / "metrics.jsonl"))
    assert 1 <= oldest <= max_staleness


def test_a_real_server_is_killed_while_it_draws_and_started_again(server: VLLMServer, tmp_path: Path) -> None:
    run = Run(server, tmp_path, max_staleness=1)
    process = run.start()
    assert wait_for(process, lambda: run.steps() >= 3), run.output.read_text()
    time.sleep(0.1)  # somewhere in the next step
    assert server.process is not None
    os.killpg(server.process.pid, signal.SIGKILL)
    time.sleep(1)
    server.start()
    asyncio.run(server.ready(240))
    run.ended_well(process)
    assert "is left out until it is well again" in run.output.read_text()
    assert "is back, with the weights of version" in run.output.read_text()


def test_a_trainer_is_killed_and_resumed_while_a_real_server_lives(server: VLLMServer, tmp_path: Path) -> None:
    run = Run(server, tmp_path, max_staleness=1)
    process = run.start()
    assert wait_for(process, lambda: run.steps() >= 5), run.output.read_text()
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    run.ended_well(run.start("--resume"))
