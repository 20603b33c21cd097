from typing import Any

import pytest
import torch

from leadline.policy.batch import build_batch
from tests.builders import groups, policy, settings

SAMPLING: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"top_k": 30, "top_p": 0.9, "min_p": 0.01},
    {"repetition_penalty": 1.4},
]


@pytest.mark.parametrize("sampling", SAMPLING, ids=str)
@pytest.mark.parametrize("packs", [True, False])
def test_from_hidden_states_the_scores_are_those_of_whole_logits(sampling: dict[str, Any], packs: bool) -> None:
    made = policy(settings(sampling=sampling, objective={"entropy_bonus": 0.1}))
    batch = build_batch(groups(), made.config, 0)
    made.packs = packs
    chunked = made.logprobs(batch, batch.forwarded)
    made.head = None
    whole = made.logprobs(batch, batch.forwarded)
    assert torch.allclose(chunked.logprobs, whole.logprobs, rtol=0, atol=1e-5)
    assert torch.allclose(chunked.entropies, whole.entropies, rtol=0, atol=1e-5)
    assert chunked.entropies.requires_grad
    assert whole.entropies.requires_grad


def test_a_hook_on_the_head_is_obeyed() -> None:
    made = policy(settings())
    batch = build_batch(groups(), made.config, 0)
    with torch.no_grad():
        before = made.logprobs(batch, batch.forwarded).logprobs
        made.model.lm_head.register_forward_hook(lambda module, inputs, logits: 2 * logits)
        after = made.logprobs(batch, batch.forwarded).logprobs
    assert not torch.allclose(before, after, rtol=0, atol=0.1)


def test_a_model_that_gives_all_positions_logits_only_is_scored_at_the_right_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = policy(settings())
    batch = build_batch(groups(), made.config, 0)
    with torch.no_grad():
        expected = made.logprobs(batch, batch.forwarded).logprobs
        monkeypatch.setattr("leadline.policy.scoring._takes_logits_to_keep", lambda model: False)
        for head in (made.head, None):
            made.head = head
            assert torch.allclose(made.logprobs(batch, batch.forwarded).logprobs, expected, rtol=0, atol=1e-5)
