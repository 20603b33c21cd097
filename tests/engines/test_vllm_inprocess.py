"""vLLM inside the process of the trainer. Skipped without vLLM; LEADLINE_REQUIRE_VLLM=1 forbids that.

One engine for the whole file: vLLM starts once in a process.
"""

import asyncio
import importlib.util
import os
from collections.abc import Awaitable, Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch

from leadline.engines.vllm_inprocess import VLLMInProcess
from leadline.engines.vllm_server import ServerOptions
from leadline.engines.vllm_snapshot import policy_score
from leadline.errors import EngineError
from leadline.models import Loaded, merged_weights
from leadline.settings.rollout import Sampling
from leadline.types import Completion, FinishReason, Prompt
from tests.engines.test_contract import plain_logprobs
from tests.engines.vllm_models import changed, llama, saved

MISSING = importlib.util.find_spec("vllm") is None
if MISSING and os.environ.get("LEADLINE_REQUIRE_VLLM"):
    raise ImportError("LEADLINE_REQUIRE_VLLM is set, but vllm cannot be imported: run `make vllm`")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(MISSING, reason="vllm is not installed (make vllm)"),
    pytest.mark.filterwarnings("ignore"),  # of vLLM's own code, which runs here
]

TOLERANCE = 1e-4
PROMPT = Prompt(index=3, text="", token_ids=tuple(range(5, 25)))
LONG = Prompt(index=4, text="", token_ids=tuple(i % 256 + 4 for i in range(400)))
FREE = Sampling(max_tokens=32)
A, B = llama(tied=True), changed(llama(tied=True), 1)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMInProcess]:
    options = ServerOptions(
        model=str(saved(A, tmp_path_factory.mktemp("model"))),
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=16,
        kv_cache_bytes=64 << 20,
        eager=True,
    )
    made = VLLMInProcess(
        options, eos_ids=frozenset(), vocab_size=260, seed=0, score=policy_score(A.model), model=A.model
    )
    yield made
    asyncio.run(made.close())


def run(engine: VLLMInProcess, body: Callable[[VLLMInProcess], Awaitable[Any]]) -> Any:
    async def started() -> Any:
        await engine.load_weights(merged_weights(A.model), 1)
        return await body(engine)

    return asyncio.run(started())


def gap(completion: Completion, loaded: Loaded, prompt: Prompt, sampling: Sampling = FREE) -> torch.Tensor:
    return (torch.tensor(completion.logprobs) - plain_logprobs(loaded.model, prompt, completion, sampling)).abs()


def test_greedy_takes_the_same_tokens_twice(engine: VLLMInProcess) -> None:
    sampling = Sampling(max_tokens=24, temperature=0)

    async def body(engine: VLLMInProcess) -> list[Completion]:
        return [*await engine.generate(PROMPT, 2, sampling), *await engine.generate(PROMPT, 1, sampling)]

    one, two, three = run(engine, body)
    assert one == two == three
    assert gap(one, A, PROMPT, sampling).max() < TOLERANCE


@pytest.mark.parametrize(
    "knobs",
    [{}, {"temperature": 0.7, "top_k": 50, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.2}],
    ids=["plain", "everything"],
)
def test_logprobs_are_of_the_distribution_that_was_sampled(engine: VLLMInProcess, knobs: dict[str, float]) -> None:
    sampling = Sampling(max_tokens=32, **knobs)
    for completion in run(engine, lambda engine: engine.generate(LONG, 4, sampling)):
        assert len(completion.token_ids) == 32
        assert completion.finish_reason is FinishReason.LENGTH
        assert gap(completion, A, LONG, sampling).max() < TOLERANCE


def test_every_end_of_a_completion_has_its_reason(engine: VLLMInProcess) -> None:
    [free] = run(engine, lambda engine: engine.generate(PROMPT, 1, FREE))
    end = next(i for i in range(6, 32) if free.token_ids[i] not in free.token_ids[:i])
    stop = FREE.model_copy(update={"stop_token_ids": (free.token_ids[end],)})
    [stopped] = run(engine, lambda engine: engine.generate(PROMPT, 1, stop))
    assert (stopped.token_ids, stopped.finish_reason) == (free.token_ids[: end + 1], FinishReason.STOP)
    engine._eos_ids = frozenset({2, free.token_ids[end]})
    try:
        [ended] = run(engine, lambda engine: engine.generate(PROMPT, 1, FREE))
    finally:
        engine._eos_ids = frozenset()
    assert (ended.token_ids, ended.finish_reason) == (free.token_ids[: end + 1], FinishReason.EOS)


def test_a_stop_string_ends_a_completion_with_the_token_that_completes_it(engine: VLLMInProcess) -> None:
    hot = Sampling(max_tokens=200, temperature=1.5)
    [free] = run(engine, lambda engine: engine.generate(PROMPT, 1, hot))
    pieces = [A.tokenizer.decode(token) for token in free.token_ids]
    pairs = ["", *(a + b for a, b in pairwise(pieces))]
    end = next(t for t in range(1, 200) if len(pairs[t]) == 2 and pairs[t].isascii() and pairs[t] not in pairs[:t])
    stop = hot.model_copy(update={"stop": (pairs[end],)})
    [completion] = run(engine, lambda engine: engine.generate(PROMPT, 1, stop))
    assert completion.finish_reason is FinishReason.STOP
    assert completion.token_ids == free.token_ids[: end + 1]


def test_completions_under_way_go_on_with_new_weights_token_by_token(engine: VLLMInProcess) -> None:
    """Also across the prompt's cached keys: all are computed anew."""
    engine._score = None  # the policy of the fixture has not changed; what is drawn proves the load

    async def body(engine: VLLMInProcess) -> list[Completion]:
        running = asyncio.create_task(engine.generate(LONG, 4, Sampling(max_tokens=400)))
        while not any(request.draws[0].token_ids for request in engine._requests.values()):
            await asyncio.sleep(0.01)
        await engine.load_weights(merged_weights(B.model), 2)
        return await running

    try:
        completions = run(engine, body)
    finally:
        engine._score = policy_score(A.model)
    for completion in completions:
        assert set(completion.policy_versions) == {1, 2}
        of_b = torch.tensor([version == 2 for version in completion.policy_versions])
        assert torch.where(of_b, gap(completion, B, LONG), gap(completion, A, LONG)).max() < TOLERANCE


def test_probes_see_weights_that_are_not_the_policys_and_lose_nothing_that_runs(engine: VLLMInProcess) -> None:
    score = engine._score

    async def body(engine: VLLMInProcess) -> list[Completion]:
        running = asyncio.create_task(engine.generate(LONG, 2, Sampling(max_tokens=200)))
        await asyncio.sleep(0.1)
        engine._score = lambda weights, ids: score(merged_weights(B.model), ids)  # type: ignore[misc]
        with pytest.raises(EngineError, match="differ from the policy's"):
            await engine.load_weights(merged_weights(A.model), 3)
        return await running

    try:
        completions = run(engine, body)
    finally:
        engine._score = score
    assert [len(completion.token_ids) for completion in completions] == [200, 200]
    assert all(gap(completion, A, LONG).max() < TOLERANCE for completion in completions)


def test_weights_that_lack_tensors_are_refused_and_the_old_ones_stay(engine: VLLMInProcess) -> None:
    async def body(engine: VLLMInProcess) -> Completion:
        some = {name: tensor for name, tensor in merged_weights(B.model).items() if "mlp" not in name}
        with pytest.raises(EngineError, match="6 tensors of the served model are not among the new weights"):
            await engine.load_weights(some, 2)
        [completion] = await engine.generate(LONG, 1, FREE)
        return completion

    completion = run(engine, body)
    assert set(completion.policy_versions) == {1}
    assert gap(completion, A, LONG).max() < TOLERANCE


def test_close_returns_what_runs_as_aborted_and_nothing_starts_afterwards(engine: VLLMInProcess) -> None:
    async def body(engine: VLLMInProcess) -> list[Completion]:
        running = asyncio.create_task(engine.generate(PROMPT, 2, Sampling(max_tokens=900)))
        await asyncio.sleep(0.1)
        engine._closed = True  # what close does first; the fixture closes for good
        try:
            completions = await running
            with pytest.raises(EngineError, match="closed"):
                await engine.generate(PROMPT, 1, FREE)
        finally:
            engine._closed = False
        return completions

    assert {completion.finish_reason for completion in run(engine, body)} == {FinishReason.ABORT}
