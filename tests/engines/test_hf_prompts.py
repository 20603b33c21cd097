"""A prompt that is held once gives the tokens and logprobs that a copy for each completion gives, or is copied."""

import asyncio
import gc
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.bloom import BloomConfig
from transformers.models.gpt_oss import GptOssConfig
from transformers.models.llama import LlamaConfig
from transformers.models.qwen2 import Qwen2Config

from leadline.engines import hf_cache, hf_decode
from leadline.engines.hf_attention import decode_attention
from leadline.engines.hf_cache import RowLayer
from leadline.engines.hf_prompts import Group, PromptCache, PromptLayer, layer_of, layer_windows
from leadline.errors import EngineError
from leadline.models import Loaded
from leadline.settings.rollout import Sampling
from leadline.types import Completion
from tests.engines.test_hf import ARCHITECTURES, LLAMA_LIKE, PROMPTS, assert_exact, generate, make, tiny

SHARING = {name: ARCHITECTURES[name] for name in ("sliding_window", "learned_positions", "query_key_norm")} | {
    "one_key_head": LlamaConfig(**LLAMA_LIKE | {"num_key_value_heads": 1}),
    "window_in_some_layers": Qwen2Config(**LLAMA_LIKE, use_sliding_window=True, sliding_window=6, max_window_layers=1),
}
COPYING = {
    "soft_cap": ARCHITECTURES["window_in_some_layers"],
    "sinks": GptOssConfig(**LLAMA_LIKE, head_dim=8, num_local_experts=2, num_experts_per_tok=1),
    "positions_in_the_mask": BloomConfig(vocab_size=260, hidden_size=32, n_layer=2, n_head=4),
    "eager": LlamaConfig(**LLAMA_LIKE, attn_implementation="eager"),
}


def loaded(shape: PreTrainedConfig) -> Loaded:
    torch.manual_seed(0)
    return replace(tiny(), model=AutoModelForCausalLM.from_config(shape).eval(), eos_ids=frozenset(range(40)))


def groups_made(monkeypatch: pytest.MonkeyPatch) -> list[Group]:
    """The groups that decoders start from now on."""
    made: list[Group] = []
    new_group = hf_decode.Decoder._new_group
    monkeypatch.setattr(hf_decode.Decoder, "_new_group", lambda *args: (made.append(new_group(*args)), made[-1])[1])
    return made


def copying(monkeypatch: pytest.MonkeyPatch, run: Callable[[], Any]) -> Any:
    with monkeypatch.context() as patch:
        patch.setattr(PromptCache, "can_be_shared", lambda *_: False)
        return run()


# Exactness ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("shape", SHARING.values(), ids=SHARING.keys())
def test_sharing_gives_the_tokens_and_logprobs_of_copies(
    shape: PreTrainedConfig, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf_cache, "ROOM", 5)
    policy, sampling = loaded(shape), Sampling(max_tokens=24, temperature=temperature)

    def run() -> list[list[Completion]]:
        return generate(make(policy, max_batch=7), sampling, PROMPTS, 3)

    copied = copying(monkeypatch, run)
    made = groups_made(monkeypatch)
    shared = run()
    assert [group.prompt for group in made] == [len(prompt.token_ids) for prompt in PROMPTS]
    for ours, theirs in zip(chain(*shared), chain(*copied), strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.finish_reason == theirs.finish_reason
        torch.testing.assert_close(torch.tensor(ours.logprobs), torch.tensor(theirs.logprobs), atol=1e-5, rtol=0)


@pytest.mark.parametrize("shape", COPYING.values(), ids=COPYING.keys())
def test_a_model_that_attends_in_another_way_gets_copies_and_is_exact(
    shape: PreTrainedConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = groups_made(monkeypatch)
    policy = loaded(shape)
    groups = generate(make(policy, max_batch=7), Sampling(max_tokens=12), PROMPTS[3:5], 2)
    assert [group.prompt for group in made] == [0, 0]
    for prompt, group in zip(PROMPTS[3:5], groups, strict=True):
        for completion in group:
            assert_exact(policy.model, prompt, completion)


def test_a_single_completion_gets_its_prompt_copied_beside_groups_that_share(monkeypatch: pytest.MonkeyPatch) -> None:
    made = groups_made(monkeypatch)
    policy = tiny()
    engine = make(policy)

    async def run() -> list[list[Completion]]:
        calls = zip(PROMPTS, (2, 1, 3, 1, 2, 1), strict=True)
        groups = await asyncio.gather(*(engine.generate(p, n, Sampling(max_tokens=9)) for p, n in calls))
        await engine.close()
        return groups

    groups = asyncio.run(run())
    assert [group.prompt for group in made] == [3, 0, 1, 0, 17, 0]
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for completion in group:
            assert_exact(policy.model, prompt, completion)


def test_storage_of_rows_holds_no_prompt_that_is_shared() -> None:
    engine = make(tiny())
    columns: list[int] = []

    async def run() -> None:
        running = asyncio.create_task(engine.generate(PROMPTS[5], 4, Sampling(max_tokens=20)))
        while not running.done():
            columns.extend(layer.stored[0].shape[2] for layer in engine._decoder._cache.cache.layers)
            await asyncio.sleep(0)
        await engine.close()

    asyncio.run(run())
    assert max(columns) == 20


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-6), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("window", [None, 12, 6, 2])
def test_attention_to_shared_prompts_equals_that_to_copies(
    window: int | None, dtype: torch.dtype, error: float
) -> None:
    torch.manual_seed(0)
    groups = [shared_group(rows, own, prompt, dtype) for rows, own, prompt in ((2, 5, 9), (1, 3, 20), (3, 1, 4))]
    columns, rows = 5, 6
    key, value = (torch.randn(rows, 2, columns, 8).to(dtype) for _ in range(2))
    query = torch.randn(rows, 6, 1, 8).to(dtype)
    lengths = [group.own for group in groups for _ in range(group.rows)]
    seen = torch.tensor([[column >= columns - min(own, window or own) for column in range(columns)] for own in lengths])
    layer = RowLayer(key, value, 0, groups)
    result, _ = decode_attention(
        nn.Module(), query, layer.marked(key.clone()), value, seen[:, None, None], sliding_window=window
    )
    assert layer.prompts_read
    row = 0
    for group in groups:
        for _ in range(group.rows):
            held = group.layers[0]
            keys, values = (
                torch.cat([prompt, own[None, row, :, columns - group.own :]], 2)[:, :, -(window or 99) :].float()
                for prompt, own in ((held.keys, key), (held.values, value))
            )
            expected = nn.functional.scaled_dot_product_attention(
                query[None, row].float(), keys, values, enable_gqa=True
            )
            torch.testing.assert_close(result[None, row].float(), expected.transpose(1, 2), atol=error, rtol=error)
            row += 1


def shared_group(rows: int, own: int, prompt: int, dtype: torch.dtype) -> Group:
    layer = PromptLayer()
    layer.update(torch.randn(1, 2, prompt, 8).to(dtype), torch.randn(1, 2, prompt, 8).to(dtype))
    return Group(rows, own, prompt, [layer])


# Who may --------------------------------------------------------------------------------------------------------------


def test_keys_lead_to_their_layer_unless_they_were_changed() -> None:
    layer = PromptLayer()
    keys, _ = layer.update(torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4))
    assert layer_of(keys) is layer
    assert layer_of(keys.repeat_interleave(2, dim=1)) is None
    assert layer_of(keys * 1) is None


def test_a_layer_and_its_keys_are_freed_at_once_and_not_by_the_garbage_collector() -> None:
    gc.disable()
    try:
        layer = PromptLayer()
        layer.update(torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4))
        watched = ref(layer)
        del layer
        assert watched() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("options", "value_dim", "plainly"),
    [
        ({}, 8, True),
        ({"softcap": 5.0}, 8, False),
        ({"s_aux": torch.zeros(6)}, 8, False),
        ({}, 4, False),
        ({"attention_mask": torch.ones(1, 6, 3, 3, dtype=torch.bool)}, 8, False),
    ],
    ids=["plain", "soft cap", "sinks", "narrow values", "a mask by head"],
)
def test_the_attention_tells_the_prompt_how_it_attends(options: dict[str, Any], value_dim: int, plainly: bool) -> None:
    layer, module = PromptLayer(), nn.Module()
    module.num_key_value_groups = 3  # type: ignore[assignment]
    keys, values = layer.update(torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, value_dim))
    mask = torch.ones(1, 1, 3, 3, dtype=torch.bool)
    decode_attention(module, torch.randn(1, 6, 3, 8), keys, values, **{"attention_mask": mask} | options)
    assert (layer.attended, layer.plainly, layer.window) == (True, plainly, None)


def test_windows_are_those_of_the_layers() -> None:
    assert layer_windows(SHARING["window_in_some_layers"]) == [None, 6]
    assert layer_windows(SHARING["one_key_head"]) == [None, None]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda layer: layer.witness(False, None),
        lambda layer: layer.witness(True, 6),
        lambda layer: setattr(layer, "attended", False),
    ],
    ids=["otherwise", "under another window", "not at all"],
)
def test_one_layer_that_attends_otherwise_keeps_a_prompt_from_being_shared(
    spoil: Callable[[PromptLayer], None],
) -> None:
    cache = PromptCache()
    for index in range(2):
        cache.update(torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4), index)
        cache.layers[index].witness(True, None)
    assert cache.can_be_shared([None, None])
    assert not cache.can_be_shared([None])
    spoil(cache.layers[1])
    assert not cache.can_be_shared([None, None])


def test_a_model_that_drops_its_prompt_after_the_prefill_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def unmarked(layer: RowLayer, keys: Tensor) -> Tensor:
        return keys

    monkeypatch.setattr(RowLayer, "marked", unmarked)
    with pytest.raises(EngineError, match=r"engine\.kind is 'hf', but LlamaForCausalLM attends to a new token"):
        generate(make(tiny()), Sampling(max_tokens=5), PROMPTS[:1], 2)
