"""vLLM inside the process of the trainer: new weights between two steps, and memory that it yields.

What every engine promises is in `test_contract.py`. One engine for all tests: vLLM starts once in a process.
"""

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from leadline.engines.vllm_inprocess import VLLMInProcess
from leadline.engines.vllm_snapshot import policy_score
from leadline.errors import EngineError
from leadline.models import Loaded, merged_weights
from leadline.settings.rollout import Sampling
from leadline.types import Completion, FinishReason, Prompt
from tests.engines.real_vllm import TOLERANCE, InProcess, untied
from tests.engines.test_contract import plain_logprobs
from tests.engines.vllm_models import changed, llama, saved

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]  # of vLLM's own code, which runs here

PROMPT = Prompt(index=3, text="", token_ids=tuple(range(5, 25)))
LONG = Prompt(index=4, text="", token_ids=tuple(i % 256 + 4 for i in range(400)))
FREE = Sampling(max_tokens=32)
A, B = (replace(loaded, eos_ids=frozenset()) for loaded in (untied(), changed(untied(), 1)))


@pytest.fixture
def engine(vllm_here: VLLMInProcess) -> VLLMInProcess:
    return InProcess(vllm_here, A).engine


def run(engine: VLLMInProcess, body: Callable[[VLLMInProcess], Awaitable[Any]]) -> Any:
    async def started() -> Any:
        engine._loading = asyncio.Lock()
        await engine.load_weights(merged_weights(A.model), 1)
        return await body(engine)

    return asyncio.run(started())


def gap(completion: Completion, loaded: Loaded, prompt: Prompt = LONG) -> torch.Tensor:
    return (torch.tensor(completion.logprobs) - plain_logprobs(loaded.model, prompt, completion, FREE)).abs()


# Weights --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drain", [False, True], ids=["continue", "drain"])
def test_completions_under_way_go_on_with_new_weights_token_by_token_or_are_finished_first(
    engine: VLLMInProcess, drain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also across the prompt's cached keys: all are computed anew."""
    monkeypatch.setattr(engine, "_drains", drain)
    monkeypatch.setattr(engine, "_score", None)  # A's: what is drawn proves the load of B

    async def body(engine: VLLMInProcess) -> list[Completion]:
        running = asyncio.create_task(engine.generate(LONG, 4, Sampling(max_tokens=400)))
        while not any(request.draws[0].token_ids for request in engine._requests.values()):
            await asyncio.sleep(0.01)
        await engine.load_weights(merged_weights(B.model), 2)
        [after] = await engine.generate(LONG, 1, FREE)
        assert set(after.policy_versions) == {2}
        assert gap(after, B).max() < TOLERANCE
        return await running

    for completion in run(engine, body):
        assert set(completion.policy_versions) == ({1} if drain else {1, 2})
        of_b = torch.tensor([version == 2 for version in completion.policy_versions])
        assert torch.where(of_b, gap(completion, B), gap(completion, A)).max() < TOLERANCE


def test_probes_see_weights_that_are_not_the_policys_and_lose_nothing_that_runs(
    engine: VLLMInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    score = policy_score(A.model)

    async def body(engine: VLLMInProcess) -> list[Completion]:
        running = asyncio.create_task(engine.generate(LONG, 2, Sampling(max_tokens=200)))
        await asyncio.sleep(0.1)
        monkeypatch.setattr(engine, "_score", lambda weights, ids: score(merged_weights(B.model), ids))
        with pytest.raises(EngineError, match="differ from the policy's"):
            await engine.load_weights(merged_weights(A.model), 3)
        return await running

    completions = run(engine, body)
    assert [len(completion.token_ids) for completion in completions] == [200, 200]
    assert all(gap(completion, A).max() < TOLERANCE for completion in completions)


def test_weights_that_lack_tensors_are_refused_and_the_old_ones_stay(engine: VLLMInProcess) -> None:
    async def body(engine: VLLMInProcess) -> Completion:
        some = {name: tensor for name, tensor in merged_weights(B.model).items() if "mlp" not in name}
        with pytest.raises(EngineError, match="6 tensors of the served model are not among the new weights"):
            await engine.load_weights(some, 2)
        [completion] = await engine.generate(LONG, 1, FREE)
        return completion

    completion = run(engine, body)
    assert set(completion.policy_versions) == {1}
    assert gap(completion, A).max() < TOLERANCE


def test_it_sleeps_when_nothing_runs_and_is_awake_for_requests_and_loads(
    engine: VLLMInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU vLLM's sleep does nothing: here it is recorded, and what happens meanwhile."""
    inner, happened = engine._engine, []
    monkeypatch.setattr(engine, "_yields", True)
    monkeypatch.setattr(inner, "sleep", lambda level: happened.append(f"sleep {level}"))
    monkeypatch.setattr(inner, "wake_up", lambda: happened.append("wake"))
    step, load = inner.step, inner.collective_rpc
    monkeypatch.setattr(inner, "step", lambda: (happened.append("step"), step())[1])
    monkeypatch.setattr(inner, "collective_rpc", lambda work: (happened.append("load"), load(work))[1])

    async def body(engine: VLLMInProcess) -> None:
        happened.clear()
        for _ in range(2):
            await asyncio.gather(*(engine.generate(PROMPT, 2, Sampling(max_tokens=4)) for _ in range(3)))
            while happened[-1] != "sleep 1":
                await asyncio.sleep(0.01)
        await engine.load_weights(merged_weights(B.model), 2)

    monkeypatch.setattr(engine, "_score", None)
    run(engine, body)
    words = [word for i, word in enumerate(happened) if word != "step" or happened[i - 1] != "step"]
    assert words == ["step", "sleep 1", "wake", "step", "sleep 1", "wake", "load"]


def test_close_returns_what_runs_as_aborted_and_nothing_starts_afterwards(engine: VLLMInProcess) -> None:
    async def body(engine: VLLMInProcess) -> list[Completion]:
        running = asyncio.create_task(engine.generate(PROMPT, 2, Sampling(max_tokens=900)))
        await asyncio.sleep(0.1)
        engine._closed = True  # what close does first; the fixture closes for good
        completions = await running
        with pytest.raises(EngineError, match="closed"):
            await engine.generate(PROMPT, 1, FREE)
        return completions

    assert {completion.finish_reason for completion in run(engine, body)} == {FinishReason.ABORT}


def test_a_recipe_trains_with_vllm_in_its_own_process(tmp_path: Path) -> None:
    model = saved(llama(tied=True), tmp_path / "model")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.format(model=model, run=tmp_path / "run"))
    program = [sys.executable, "-m", "leadline", "train", str(recipe)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert "vLLM cannot sleep on a CPU" in done.stdout + done.stderr or torch.cuda.is_available()
    assert "2 of 2 steps" in done.stdout
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count("\n") == 2


RECIPE = """
[model]
name = "{model}"

[data]
source = "reasoning_gym:chain_sum"
params = {{min_terms = 2, max_terms = 2, min_digits = 1, max_digits = 1}}
size = 50
max_prompt_tokens = 200

[[rewards]]
name = "length"
params = {{target = 3, slack = 9}}

[sampling]
max_tokens = 12

[engine]
kind = "vllm_inprocess"
kv_cache_gib = 0.06
max_batch = 8

[rollout]
group_size = 4
groups_per_step = 2

[run]
steps = 2
dir = "{run}"
"""
