from typing import Any

import pytest
import torch
from torch import nn

from leadline.models import load_model
from leadline.objective.chunked import chunked_scores
from leadline.objective.chunks import Replay
from leadline.policy.heads import ModelHead, head_input
from tests.builders import settings, token_ids
from tests.families import model_of

IDS = torch.tensor([token_ids(12, 3)])


@pytest.mark.parametrize("name", ["llama", "phi", "gemma2", "granite", "cohere", "falcon-h1", "gpt2"])
def test_the_heads_input_and_what_is_done_to_its_product_give_the_models_logits(name: str) -> None:
    model: Any = model_of(name)
    head = ModelHead(model)
    with torch.no_grad():
        expected = model(input_ids=IDS).logits[0].log_softmax(-1).gather(-1, IDS[0, :, None])[:, 0]
        with head_input(head) as inputs:
            logits = model(input_ids=IDS).logits
        hidden, layer = head.on(inputs[0][0])
        found, _ = chunked_scores(hidden, layer, IDS[0], Replay())
    assert logits.shape[1] == 0  # nothing was computed
    assert torch.allclose(found, expected, rtol=0, atol=1e-5)
    assert not head.module._forward_pre_hooks


def test_an_adapter_on_the_head_is_part_of_it_and_can_be_switched_off() -> None:
    config = settings(model={"lora_rank": 4, "lora_targets": ["lm_head", "q_proj"]})
    model: Any = load_model(config.model).model
    head = ModelHead(model)
    hidden = torch.randn(5, head.base.in_features, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        head.module.lora_B["default"].weight.normal_(generator=torch.Generator().manual_seed(1))
        left, layer = head.on(hidden)
        assert torch.allclose(left @ layer.weight.T, head.module(hidden), rtol=0, atol=1e-5)
        with model.disable_adapter():
            left, layer = head.on(hidden)
            assert torch.equal(left, hidden)
            assert layer.weight is head.base.weight


def test_a_hook_that_edits_the_logits_is_noticed() -> None:
    model: Any = model_of("llama")
    head = ModelHead(model)
    assert not head.edited
    handle = model.lm_head.register_forward_hook(lambda module, inputs, logits: logits * 2)
    assert head.edited
    handle.remove()
    assert not head.edited


class Odd(nn.Linear):
    """A head that may do anything."""


def test_a_head_that_is_no_linear_layer_is_refused_by_name() -> None:
    model: Any = model_of("llama")
    model.set_output_embeddings(Odd(32, 260))
    with pytest.raises(ValueError, match="its head is a Odd, no linear layer"):
        ModelHead(model)
    with pytest.raises(ValueError, match="its head is missing"):
        ModelHead(nn.Linear(3, 3))
