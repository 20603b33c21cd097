"""LoRA adapters in a real vLLM server: pushed alone, proved, asked for by name. What is not one is refused."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from leadline.engines.vllm_adapter import AdapterPush
from leadline.engines.vllm_http import VLLMEngine
from leadline.errors import EngineError
from leadline.models import Loaded, adapter_weights, load_model
from leadline.settings.model import Model
from leadline.settings.rollout import Sampling
from leadline.types import Completion, Prompt
from tests.engines.real_vllm import KEY, TOLERANCE, Running, Servers
from tests.engines.test_contract import plain_logprobs

pytestmark = pytest.mark.vllm

LONG = Prompt(index=4, text="", token_ids=tuple(i % 256 + 4 for i in range(400)))
FREE = Sampling(max_tokens=32)


@pytest.fixture
def running(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> Running:
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    return servers.get("adapter")


def adapted(running: Running, seed: int, **settings: Any) -> Loaded:
    """The served model with an adapter that changes every linear layer."""
    model = Model(name=running.server.options.model, device="cpu", **{"lora_rank": 4, "lora_alpha": 6.0, **settings})
    loaded = load_model(model)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in loaded.model.named_parameters():
            if ".lora_" in name:
                parameter.normal_(std=0.2, generator=draw)
    return replace(loaded, tokenizer=running.a.tokenizer, eos_ids=frozenset())


def gap(completion: Completion, loaded: Loaded) -> torch.Tensor:
    return (torch.tensor(completion.logprobs) - plain_logprobs(loaded.model, LONG, completion, FREE)).abs()


def with_engine(running: Running, loaded: Loaded, body: Callable[[VLLMEngine], Awaitable[Any]], **settings: Any) -> Any:
    async def run() -> Any:
        engine = running.engine(loaded, push=AdapterPush, lora="push", **settings)
        try:
            await engine.load_weights(adapter_weights(loaded.model), 1)
            return await body(engine)
        finally:
            await engine.close()

    return asyncio.run(run())


def push(running: Running, loaded: Loaded, weights: dict[str, torch.Tensor], name: str = "an adapter") -> str:
    return running.with_push(loaded, lambda push: push.push(running.url, weights, 1, name), AdapterPush)


def test_adapters_are_served_and_change_and_each_token_is_of_its_version(running: Running) -> None:
    one, two = adapted(running, 1), adapted(running, 2)

    async def body(engine: VLLMEngine) -> list[Completion]:
        first = await engine.generate(LONG, 2, FREE)
        one.model.load_state_dict(two.model.state_dict())  # as an update of the policy does
        await engine.load_weights(adapter_weights(one.model), 2)
        return [*first, *await engine.generate(LONG, 2, FREE)]

    before = adapted(running, 1)
    for completion, version, model in zip(
        with_engine(running, one, body), (1, 1, 2, 2), (before, before, two, two), strict=True
    ):
        assert set(completion.policy_versions) == {version}
        assert gap(completion, model).max() < TOLERANCE
        assert gap(completion, running.a).mean() > 0.1, "the base alone would have drawn otherwise"


@pytest.mark.parametrize("on_new_weights", ["continue", "drain"])
def test_completions_under_way_change_the_adapter_token_by_token_or_are_finished_first(
    running: Running, on_new_weights: str
) -> None:
    one, two = adapted(running, 1), adapted(running, 2)
    before = adapted(running, 1)

    async def body(engine: VLLMEngine) -> list[Completion]:
        task = asyncio.create_task(engine.generate(LONG, 4, Sampling(max_tokens=300)))
        await asyncio.sleep(0.3)
        one.model.load_state_dict(two.model.state_dict())
        await engine.load_weights(adapter_weights(one.model), 2)
        return await task

    for completion in with_engine(running, one, body, on_new_weights=on_new_weights):
        assert len(completion.token_ids) == 300
        assert set(completion.policy_versions) == ({1, 2} if on_new_weights == "continue" else {1})
        of_two = torch.tensor([version == 2 for version in completion.policy_versions])
        assert torch.where(of_two, gap(completion, two), gap(completion, before)).max() < TOLERANCE


def test_a_push_proves_the_adapter_and_leaves_no_other(running: Running) -> None:
    for seed in (1, 2):
        loaded = adapted(running, seed)
        assert push(running, loaded, adapter_weights(loaded.model), f"adapter {seed}") == f"adapter {seed}"
    served = running.get("/v1/models")["data"]
    assert [model["id"] for model in served] == ["policy", "adapter 2"]


def test_a_server_that_answers_from_the_base_alone_is_seen(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = adapted(running, 1)
    answer = AdapterPush.check_probes

    async def from_the_base(self: AdapterPush, *arguments: Any, model: str) -> float:
        return await answer(self, *arguments, model="policy")

    monkeypatch.setattr(AdapterPush, "check_probes", from_the_base)
    with pytest.raises(EngineError, match="probe tokens differ from the policy's"):
        push(running, loaded, adapter_weights(loaded.model))


def test_an_adapter_that_lacks_matrices_or_holds_others_is_seen(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, other = adapted(running, 1), adapted(running, 2)
    write = AdapterPush._write

    def of_another(self: AdapterPush, snapshot: Any) -> Any:
        folder = write(self, snapshot)
        save_file(adapter_weights(other.model), folder / "adapter_model.safetensors")
        return folder

    monkeypatch.setattr(AdapterPush, "_write", of_another)
    with pytest.raises(EngineError, match=r"28 of its matrices are not in the model as they were sent"):
        push(running, loaded, adapter_weights(loaded.model))


def test_a_server_for_adapters_refuses_other_weights_and_lives(running: Running) -> None:
    with pytest.raises(EngineError, match=r"refused them: it was started for adapters \(--enable-lora\)"):
        running.serve(running.b)
    loaded = adapted(running, 1)
    push(running, loaded, adapter_weights(loaded.model))


def test_an_adapter_of_too_high_a_rank_is_refused_with_what_the_server_says(running: Running) -> None:
    loaded = adapted(running, 1, lora_rank=16)
    with pytest.raises(EngineError, match=r"load_lora_adapter answered .*rank 16"):
        push(running, loaded, adapter_weights(loaded.model))
