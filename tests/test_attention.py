"""A row that shares prompts gives what each sequence gives alone, for each kind of attention that models have."""

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from leadline.attention import recomputing_contexts
from leadline.batch import Batch, build_batch
from leadline.config import Config
from leadline.models import Loaded, load_model, plain_model
from leadline.policy import Policy
from tests.builders import VOCABULARY, groups, settings

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW: dict[str, Any] = {"sliding_window": 5}
FAMILIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("Llama", {}, "sdpa"),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}, "sdpa"),
    "qwen2": ("Qwen2", {}, "sdpa"),
    "qwen3": ("Qwen3", {}, "sdpa"),
    "mistral-window": ("Mistral", WINDOW, "sdpa"),
    "phi3-window": ("Phi3", WINDOW, "sdpa"),
    "phi": ("Phi", {"partial_rotary_factor": 0.5}, "sdpa"),
    "gemma": ("Gemma", {}, "sdpa"),
    "gemma2-window-softcap": ("Gemma2", {**WINDOW, "attn_logit_softcapping": 2.0}, "eager"),
    "gemma3-window": ("Gemma3Text", WINDOW, "sdpa"),
    "nemotron": ("Nemotron", {}, "sdpa"),
    "olmo2": ("Olmo2", {}, "sdpa"),
    "granite": ("Granite", {"logits_scaling": 2.0, "attention_multiplier": 0.2}, "sdpa"),
    "cohere": ("Cohere", {"logit_scale": 0.25}, "sdpa"),
    "smollm3": ("SmolLM3", {}, "sdpa"),
    "gpt-oss-window-sinks": ("GptOss", {**WINDOW, "num_local_experts": 2, "num_experts_per_tok": 1}, "eager"),
    "qwen3-moe": ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}, "sdpa"),
}


def family(name: str) -> nn.Module:
    kind, options, attention = FAMILIES[name]
    shape = getattr(transformers, f"{kind}Config")(**(SMALL | options))
    model_class = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")
    torch.manual_seed(0)
    made: nn.Module = model_class._from_config(shape, attn_implementation=attention).float().eval()
    return made


def policy_of(made: nn.Module, **sections: dict[str, Any]) -> Policy:
    config = settings(**sections)
    tiny = load_model(config.model)
    return Policy(Loaded(made, tiny.tokenizer, tiny.eos_ids, None), config)


def gradients(made: Policy, batch: Batch, packs: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    made.packs = packs
    made.model.zero_grad()
    logprobs = made.logprobs(batch, batch.forwarded).logprobs
    (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
    return logprobs.detach(), {name: p.grad.clone() for name, p in made.model.named_parameters() if p.grad is not None}


def distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Relative L2 distance of two gradients."""
    assert found.keys() == expected.keys()
    apart = sum(float((found[name] - expected[name]).square().sum()) for name in expected)
    return float((apart / sum(float(g.square().sum()) for g in expected.values())) ** 0.5)


def a_batch(config: Config) -> Batch:
    return build_batch(groups(), config, 0)


@pytest.mark.parametrize("name", FAMILIES)
def test_logprobs_and_gradients_are_those_of_the_sequences_alone(name: str) -> None:
    _, _, attention = FAMILIES[name]
    made = policy_of(family(name), model={"attention": attention})
    assert made.packs, f"{name} fell back to sequences alone, {made.packing_error} nats apart"
    batch = a_batch(made.config)
    shared, shared_gradients = gradients(made, batch, packs=True)
    made._set_attention(attention)
    alone, alone_gradients = gradients(made, batch, packs=False)
    assert torch.allclose(shared, alone, rtol=0, atol=2e-5)
    assert distance(shared_gradients, alone_gradients) < 1e-5


def test_a_model_with_its_own_kind_of_attention_falls_back_to_sequences_alone() -> None:
    shape = transformers.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.3)
    made = policy_of(transformers.BloomForCausalLM(shape).eval())
    assert not made.packs


def test_an_attention_that_the_recipe_names_is_kept() -> None:
    made = policy_of(family("llama"), model={"attention": "flex_attention"})
    assert not made.packs
    assert made.model.config._attn_implementation == "sdpa"  # as it was made: untouched


@pytest.mark.parametrize("name", ["llama", "gemma2-window-softcap"])
def test_recomputed_blocks_see_the_layout_that_they_were_computed_with(name: str) -> None:
    _, _, attention = FAMILIES[name]
    batch = a_batch(settings())
    found = []
    for checkpointing in (False, True):
        made = policy_of(family(name), model={"attention": attention})
        if checkpointing:
            plain_model(made.model).activation_checkpointing_enable(
                {"use_reentrant": False, "context_fn": recomputing_contexts}
            )
            made.model.train()
        found.append(gradients(made, batch, packs=True)[1])
    assert distance(found[1], found[0]) < 1e-6


@pytest.mark.parametrize("name", ["llama", "mistral-window", "gemma2-window-softcap", "gpt-oss-window-sinks"])
def test_without_a_layout_it_is_the_models_plain_attention(name: str) -> None:
    _, _, attention = FAMILIES[name]
    model: Any = family(name)
    ids = torch.randint(VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0  # left padding, as an engine may have
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask).logits
        policy_of(model, model={"attention": attention})
        found = model(input_ids=ids, attention_mask=mask).logits
    assert torch.allclose(found[mask.bool()], expected[mask.bool()], rtol=0, atol=1e-4)
