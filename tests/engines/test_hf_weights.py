"""Which weights the hf engine samples from: the policy's, a copy, an adapter's, and none that are broken."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.gpt2 import GPT2Config

from leadline.errors import EngineError
from leadline.models import load_model, merged_weights
from leadline.settings.model import Model
from leadline.settings.rollout import Sampling
from leadline.types import Completion, Prompt
from tests.engines.hf_engine import PROMPTS, assert_exact, first_tokens, generate, make, plain_logprobs, tiny


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
