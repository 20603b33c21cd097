"""A row that shares prompts gives what each sequence gives alone, for each kind of attention that models have."""

from pathlib import Path
from typing import Any

import pytest
import torch

from leadline.config import Config
from leadline.models import plain_model
from leadline.policy.attention import recomputing_contexts
from leadline.policy.batch import Batch, build_batch
from leadline.policy.heads import ModelHead
from leadline.policy.policy import Policy
from leadline.policy.self_check import set_attention
from tests.builders import VOCABULARY, groups, settings
from tests.families import FAMILIES, model_of, policy_of, table

Gradients = tuple[torch.Tensor, dict[str, torch.Tensor]]


def gradients(made: Policy, batch: Batch, packs: bool, head: ModelHead | None = None) -> Gradients:
    """(logprobs, gradient of a weighted sum of them by every parameter) on the path that is asked for."""
    made.packs, made.head = packs, head
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
def test_the_fast_paths_of_a_family_give_the_logprobs_and_gradients_of_its_sequences_alone(name: str) -> None:
    family = FAMILIES[name]
    made = policy_of(model_of(name), model={"attention": family.attention})
    assert (made.packs, made.head is not None) == (family.shares, family.chunks), made.slow_paths
    assert len(made.slow_paths) == (not family.shares) + (not family.chunks)
    batch = a_batch(made.config)
    fast, fast_gradients = gradients(made, batch, made.packs, made.head)
    if family.shares:
        set_attention(made, family.attention)
    plain, plain_gradients = gradients(made, batch, packs=False)
    assert torch.allclose(fast, plain, rtol=0, atol=2e-5)
    assert distance(fast_gradients, plain_gradients) < 1e-5


def test_the_table_of_families_in_the_docs_is_up_to_date() -> None:
    assert Path("docs/families.md").read_text() == table()


def test_an_attention_that_the_recipe_names_is_kept() -> None:
    made = policy_of(model_of("llama"), model={"attention": "flex_attention"})
    assert not made.packs
    assert made.model.config._attn_implementation == "sdpa"  # as it was made: untouched


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt-oss"])
def test_recomputed_blocks_see_the_layout_that_they_were_computed_with(name: str) -> None:
    attention = FAMILIES[name].attention
    batch = a_batch(settings())
    found = []
    for checkpointing in (False, True):
        made = policy_of(model_of(name), model={"attention": attention})
        if checkpointing:
            plain_model(made.model).activation_checkpointing_enable(
                {"use_reentrant": False, "context_fn": recomputing_contexts}
            )
            made.model.train()
        found.append(gradients(made, batch, packs=True)[1])
    assert distance(found[1], found[0]) < 1e-6


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt-oss"])
def test_without_a_layout_it_is_the_models_plain_attention(name: str) -> None:
    attention = FAMILIES[name].attention
    model: Any = model_of(name)
    ids = torch.randint(VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0  # left padding, as an engine may have
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask).logits
        policy_of(model, model={"attention": attention})
        found = model(input_ids=ids, attention_mask=mask).logits
    assert torch.allclose(found[mask.bool()], expected[mask.bool()], rtol=0, atol=1e-4)
