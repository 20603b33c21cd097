"""A step that is not finite is discarded, counted and kept for inspection; training goes on."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from leadline.policy.policy import Policy
from leadline.policy.update_metrics import Update
from tests.builders import NAN, all_finite, group, groups, on_policy, poison_logits, policy, same, settings, snapshot


def healthy(made: Policy) -> Update:
    return made.update(on_policy(made, groups()))


def poisoned(made: Policy) -> Update:
    batch = on_policy(made, groups())
    return made.update(replace(batch, advantages=batch.advantages * NAN))


def test_discarded_steps_in_a_row_are_counted_and_a_taken_one_resets_the_count() -> None:
    made = policy(settings())
    counts = []
    for step in (poisoned, poisoned, healthy, poisoned):
        step(made)
        counts.append(made.discarded_in_a_row)
    assert counts == [1, 2, 0, 1]
    assert made.version == 4


def test_a_step_without_any_gradient_leaves_the_count_alone() -> None:
    made = policy(settings())
    poisoned(made)
    made.update(on_policy(made, [group((1.0, 1.0), (3, 4))]))
    assert made.discarded_in_a_row == 1


def test_a_discarded_minibatch_does_not_stop_the_others() -> None:
    made = policy(settings(optimizer={"minibatches": 2}))
    batch = on_policy(made, groups())
    advantages = batch.advantages.clone()
    advantages[0] = NAN
    before = snapshot(made.model)
    update = made.update(replace(batch, advantages=advantages))
    assert update.discarded
    assert (update.metrics["optimizer/discarded_steps"], update.metrics["optimizer/steps"]) == (1, 1)
    assert not same(snapshot(made.model), before)
    assert all_finite(made)
    assert update.metrics["ledger/discarded_tokens"] + update.metrics["ledger/reached_tokens"] == 63


def test_training_goes_on_as_if_the_discarded_step_had_never_been() -> None:
    one, other = policy(settings()), policy(settings())
    steps: list[Callable[[Policy], Update]] = [healthy, poisoned, healthy]
    for step in steps:
        step(one)
    for _ in range(2):
        healthy(other)
    assert same(snapshot(one.model), snapshot(other.model))


@pytest.mark.parametrize("optimizer", [{}, {"epochs_per_batch": 2, "minibatches": 2}], ids=["one step", "four steps"])
def test_the_black_box_of_a_discarded_step_can_be_saved_and_shows_the_fault(
    optimizer: dict[str, Any], tmp_path: Path
) -> None:
    made = policy(settings(optimizer=optimizer, objective={"beta": 0.1}))
    batch = on_policy(made, groups())
    poison_logits(made, NAN)
    update = made.update(batch)
    save_file(update.blackbox, tmp_path / "step.safetensors")
    read = load_file(tmp_path / "step.safetensors")
    steps = made.config.optimizer.optimizer_steps
    seen = 63 * made.config.optimizer.epochs_per_batch
    assert torch.equal(read["token_ids"], batch.token_ids)
    assert torch.equal(read["prompt_ids"], torch.cat(batch.prompt_ids))
    assert len(read["group_of_prompt_token"]) == len(read["prompt_ids"])
    assert len(read["seen_logprobs"]) == len(read["seen_tokens"]) == seen
    assert read["seen_logprobs"].isnan().any()
    assert read["seen_optimizer_step"].unique().tolist() == list(range(steps))
    faulty = read["completion_of_token"][read["seen_tokens"][read["seen_logprobs"].isnan()]].unique()
    assert len(faulty) <= 2 * steps  # the poisoned position lies in one row of each micro-batch


def test_the_black_box_of_a_step_that_nothing_was_forwarded_in_can_be_saved(tmp_path: Path) -> None:
    made = policy(settings())
    update = made.update(on_policy(made, [group((1.0, 1.0), (3, 4))]))
    save_file(update.blackbox, tmp_path / "step.safetensors")
    assert "seen_tokens" not in update.blackbox
