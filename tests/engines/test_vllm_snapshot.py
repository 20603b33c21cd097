"""What is sent to a server, and the policy's scores that the proof of a push compares with."""

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from leadline.compute import computes
from leadline.engines.vllm_snapshot import PROBE_PROMPT, PROBES, plain_tensors, policy_score, probe_ids
from leadline.engines.vllm_weights import ServerPush
from leadline.models import adapter_weights, is_adapter, load_model, merged_weights
from leadline.settings.model import Model
from leadline.types import Weights

IDS = probe_ids(260)


def adapted() -> Any:
    model = load_model(Model(name="tiny", device="cpu", lora_rank=4)).model
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.normal_(std=0.2, generator=draw)
    return model


def trained(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05)


def rows(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([IDS])).logits[0].float().log_softmax(-1)


@pytest.mark.parametrize("adapter", [False, True], ids=["all_weights", "adapter_alone"])
def test_weights_are_scored_as_they_were_given_though_the_policy_is_trained_meanwhile(adapter: bool) -> None:
    model = adapted() if adapter else load_model(Model(name="tiny", device="cpu")).model
    weights = adapter_weights(model) if adapter else merged_weights(model)
    given, before = {name: tensor.clone() for name, tensor in weights.items()}, rows(model)
    trained(model)
    assert (rows(model) - before).abs().max() > 0.01
    assert torch.allclose(policy_score(model)(given, IDS), before, atol=1e-5)


def test_a_merged_adapter_is_scored_by_the_policy_as_it_is() -> None:
    model = adapted()
    assert torch.equal(policy_score(model)(merged_weights(model), IDS), rows(model))


def test_an_adapter_is_its_own_tensors_and_no_other() -> None:
    model = adapted()
    alone = adapter_weights(model)
    assert is_adapter(alone)
    assert len(alone) == 2 * 14
    assert not is_adapter(merged_weights(model))
    assert not is_adapter({})


def test_a_tied_head_is_sent_once() -> None:
    table = torch.randn(4, 2)
    sent = plain_tensors({"embed.weight": table, "lm_head.weight": table, "norm.weight": torch.ones(2)}, None)
    assert sent.keys() == {"embed.weight", "norm.weight"}


def test_probes_stand_behind_more_than_a_cache_block_and_are_the_same_each_time() -> None:
    assert len(IDS) == PROBE_PROMPT + PROBES
    assert PROBE_PROMPT > 128
    assert probe_ids(260) == IDS
    assert max(IDS) < 260


def test_a_push_is_scored_where_everything_is_computed() -> None:
    """A team of threads of its own would slow down those that train."""
    model = load_model(Model(name="tiny", device="cpu")).model
    scored = policy_score(model)
    threads: list[str] = []

    def score(weights: Weights, ids: Sequence[int]) -> Tensor:
        threads.append(threading.current_thread().name)
        return scored(weights, ids)

    push = ServerPush(score, 260)

    async def run() -> None:
        await push.prepare(merged_weights(model), 1)
        await push.close()

    asyncio.run(run())
    assert set(threads) == {computes(lambda: threading.current_thread().name)()}
