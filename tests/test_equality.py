"""The fast path is the slow one: loss and every parameter's gradient, against padded rows and whole logits.

The reference is written out here: every sequence right-padded to a rectangle, a mask, logits of all positions, and a loss
from the objective's own formula, in which the slow `tests/reference.py` gives what has no gradient.
"""

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leadline.config import Config
from leadline.policy.batch import Batch
from leadline.policy.policy import Policy
from leadline.policy.self_check import set_attention
from tests import reference
from tests.builders import groups, on_policy, optimizer_inputs, policy, settings

LOSSES = ("grpo", "dapo", "dr_grpo", "bnpo", "gspo", "cispo", "reinforce")
OFFSET = 0.1
CASES: dict[str, dict[str, dict[str, Any]]] = {
    **{loss: {"objective": {"loss": loss}} for loss in LOSSES},
    "kl": {"objective": {"loss": "grpo", "beta": 0.3}},
    "sequence weights": {"objective": {"importance_level": "sequence", "importance_action": "mask"}},
    "geometric weights": {"objective": {"loss": "gspo", "importance_level": "geometric", "importance_high": 1.05}},
    "adapter": {"model": {"lora_rank": 4}, "objective": {"beta": 0.3}},
    "adapter on the head": {"model": {"lora_rank": 4, "lora_targets": ["lm_head", "q_proj", "down_proj"]}},
    "recomputing": {"model": {"gradient_checkpointing": True}},
    "recomputing an adapter": {"model": {"gradient_checkpointing": True, "lora_rank": 4}},
    "temperature": {"sampling": {"temperature": 0.7}},
    "truncated": {"sampling": {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.01}},
    "penalty": {"sampling": {"repetition_penalty": 1.3}, "objective": {"beta": 0.1}},
    "entropy bonus": {"objective": {"entropy_bonus": 0.05}},
    "everything": {
        "objective": {"loss": "gspo", "beta": 0.1, "entropy_bonus": 0.01},
        "sampling": {"temperature": 1.2, "top_p": 0.95, "repetition_penalty": 1.1},
        "model": {"gradient_checkpointing": True},
        "optimizer": {"tokens_per_micro": 40},
    },
}


def padded(model: nn.Module, batch: Batch, config: Config) -> tuple[Tensor, Tensor]:
    """(logprobs, entropies) of the batch's tokens from one rectangle of right-padded rows."""
    prompts = [batch.prompt_ids[int(g)].tolist() for g in batch.group_of_completion]
    completions = [batch.token_ids[batch.tokens_of([c])].tolist() for c in range(batch.num_completions)]
    width = max(len(p) + len(c) for p, c in zip(prompts, completions, strict=True))
    rows = [[*p, *c] for p, c in zip(prompts, completions, strict=True)]
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    logits = model(input_ids=ids, attention_mask=mask).logits
    logprobs, entropies = [], []
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        for t, token in enumerate(completion):
            support = sampled_from(logits[row, len(prompt) + t - 1], {*prompt, *completion[:t]}, token, config)
            distribution = support.log_softmax(-1)
            inside = distribution[distribution > -torch.inf]
            logprobs.append(distribution[token])
            entropies.append(-(inside.exp() * inside).sum())
    return torch.stack(logprobs), torch.stack(entropies)


def sampled_from(logits: Tensor, before: set[int], token: int, config: Config) -> Tensor:
    """One row of logits as they were sampled from; which entries fell is decided by the slow reference."""
    sampling = config.sampling
    seen = [v in before for v in range(len(logits))]
    cut = (sampling.top_k, sampling.top_p, sampling.min_p, sampling.repetition_penalty)
    kept = reference.processed_logits(logits.tolist(), sampling.temperature, *cut, seen)
    penalty = torch.where(logits > 0, 1 / sampling.repetition_penalty, sampling.repetition_penalty)
    scaled = torch.where(torch.tensor(seen), logits * penalty, logits) / sampling.temperature
    fallen = torch.tensor([value == -torch.inf for value in kept])
    fallen[token] = False
    return scaled.masked_fill(fallen, -torch.inf)


def reference_loss(
    logprobs: Tensor, entropies: Tensor, old: Tensor, ref: Tensor, batch: Batch, config: Config
) -> Tensor:
    """The loss of one optimizer step on the whole batch, with one ratio per token or per completion."""
    objective = config.objective
    owner = batch.completion_of_token.tolist()
    plain = {
        "rewards": batch.rewards.tolist(),
        "group_of_completion": batch.group_of_completion.tolist(),
        "completion_of_token": owner,
        "loss_mask": batch.loss_mask.tolist(),
        "old_logprobs": old.tolist(),
        "rollout_logprobs": batch.rollout_logprobs.tolist(),
        "max_tokens": config.sampling.max_tokens,
    }
    importance = {
        "level": objective.importance_level,
        "action": objective.importance_action,
        "low": objective.importance_low,
        "high": objective.importance_high,
        "veto": objective.importance_veto,
    }
    constants = {"scaling": objective.advantage_scaling, "aggregation": objective.resolved_aggregation}
    advantages, shares, weights = map(torch.tensor, reference.constants(plain, {**constants, "importance": importance}))
    log_ratio = logprobs - old
    if objective.loss == "gspo":
        by_completion = [log_ratio[batch.completion_of_token == c].mean() for c in owner]
        log_ratio = torch.stack(by_completion)
    ratio = log_ratio.exp()
    bounded = ratio.clamp(1 - objective.clip_low, 1 + objective.clip_low)
    losses = {
        "cispo": -ratio.detach().clamp(max=1 + objective.clip_low) * advantages * logprobs,
        "reinforce": -advantages * logprobs,
    }.get(objective.loss, -torch.minimum(ratio * advantages, bounded * advantages))
    apart = ref - logprobs
    kl = objective.beta * (apart.exp() - apart - 1) if objective.beta else torch.zeros(())
    return (shares * (weights * losses + kl - objective.entropy_bonus * entropies)).sum()


def slow_gradients(made: Policy, batch: Batch, old: Tensor | None) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients by name of one optimizer step, with the model's own attention."""
    ref = torch.zeros(())
    if made.config.objective.beta:
        frozen, off = (
            (made.reference, contextlib.nullcontext()) if made.reference else (made.model, made.model.disable_adapter())
        )
        with torch.no_grad(), off:
            ref = padded(frozen, batch, made.config)[0]
    logprobs, entropies = padded(made.model, batch, made.config)
    before = logprobs.detach() if old is None else old
    loss = reference_loss(logprobs, entropies, before, ref, batch, made.config)
    trained = {name: p for name, p in made.model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    return float(loss.detach()), {n: g for n, g in zip(trained, found, strict=True) if g is not None}


def moved(sections: dict[str, dict[str, Any]], shares: bool) -> tuple[Policy, Batch]:
    """A policy two steps away from its reference, and a batch that an engine drew 0.1 nats off."""
    made = policy(settings(**sections))
    if not shares:
        made.packs = False
        set_attention(made, "sdpa")
    for _ in range(2):
        made.update(on_policy(made, groups()))
    return made, on_policy(made, groups(), OFFSET)


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        size = max(float(gradient.norm()), 1e-4 * max(float(g.norm()) for g in expected.values()))
        assert float((found[name] - gradient).norm()) <= 1e-5 * size, name


@pytest.mark.parametrize("shares", [True, False], ids=["shared prompts", "sequences alone"])
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_equal_those_of_padded_rows_and_whole_logits(name: str, shares: bool) -> None:
    made, batch = moved(CASES[name], shares)
    assert made.packs == shares
    assert made.head is not None
    expected_loss, expected = slow_gradients(made, batch, None)
    seen = optimizer_inputs(made)
    update = made.update(batch)
    assert update.metrics["loss"] == pytest.approx(expected_loss, rel=1e-5, abs=1e-6)
    assert_equal(seen[0], expected)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_second_optimizer_step_on_the_same_batch_equals_it_too(loss: str) -> None:
    # The ratio is no longer 1, and some of it is clipped: a rate at which a step moves logprobs by a few tenths.
    sections = {"objective": {"loss": loss, "beta": 0.1}, "optimizer": {"epochs_per_batch": 2, "learning_rate": 5e-3}}
    made, batch = moved(sections, shares=True)
    with torch.no_grad():
        old = padded(made.model, batch, made.config)[0]
    seen = optimizer_inputs(made)
    step, slow = made.optimizer.step, []

    def then_the_slow_way(loss: float, rate: float) -> Any:
        outcome = step(loss, rate)
        slow.append(slow_gradients(made, batch, old)[1])
        return outcome

    made.optimizer.step = then_the_slow_way  # type: ignore[method-assign]
    metrics = made.update(batch).metrics
    assert metrics["policy/ratio_max"] > 1.1
    assert_equal(seen[1], slow[0])
