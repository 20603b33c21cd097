"""A NaN, an infinity or nothing at all at each input of the trainer: the weights stay finite, and the metrics say it."""

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from leadline.policy.batch import Batch, build_batch
from leadline.policy.policy import Policy
from leadline.policy.step_loss import Scores
from leadline.policy.update_metrics import Update
from leadline.types import Completion, FinishReason, Group, Prompt, Rollout
from tests.builders import (
    MODELS,
    NAN,
    all_finite,
    group,
    groups,
    on_policy,
    optimizer_inputs,
    poison_logits,
    policy,
    rollout,
    same,
    settings,
    snapshot,
)

INF = math.inf
NOT_FINITE = [NAN, INF, -INF]
CORRECTIONS = [
    {"importance_level": level, "importance_action": action, "importance_low": 0.5}
    for level in ("token", "sequence", "geometric")
    for action in ("truncate", "mask", "off")
]


def check_trained(made: Policy, batch: Batch) -> Update:
    """The step is taken: the weights move and stay finite."""
    before = snapshot(made.model)
    update = made.update(batch)
    assert not update.discarded
    assert update.metrics["optimizer/discarded_steps"] == 0
    assert update.metrics["optimizer/grad_norm"] > 0
    assert all_finite(made)
    assert not same(snapshot(made.model), before)
    return update


def check_discarded(made: Policy, batch: Batch) -> Update:
    """The step is not taken: weights and optimizer state are bit for bit as before, and the metrics say so."""
    before, state = snapshot(made.model), copy.deepcopy(made.optimizer.state_dict())
    update = made.update(batch)
    steps = made.config.optimizer.optimizer_steps
    assert update.discarded
    assert update.metrics["optimizer/discarded_steps"] == steps
    assert update.metrics["optimizer/steps"] == 0
    assert math.isnan(update.metrics["optimizer/grad_norm"])
    assert update.metrics["optimizer/update_norm"] == 0
    assert update.metrics["ledger/discarded_tokens"] == 63
    assert update.metrics["ledger/reached_tokens"] == 0
    assert same(snapshot(made.model), before)
    assert equal(made.optimizer.state_dict(), state)
    assert all(p.grad is None for p in made.model.parameters())
    assert made.discarded_in_a_row == steps
    return update


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


# ---- rewards and completions


@pytest.mark.parametrize("reward", NOT_FINITE)
def test_a_reward_that_is_not_finite_leaves_its_group_to_the_others(reward: float) -> None:
    poisoned = group((0.0, reward, 1.0), (6, 5, 10), seed=1)
    without = Group(poisoned.prompt, [poisoned.rollouts[0], poisoned.rollouts[2]])
    gradients = []
    for drawn in ([poisoned], [without]):
        made = policy(settings())
        seen = optimizer_inputs(made)
        update = check_trained(made, on_policy(made, drawn))
        gradients.append(seen[0])
        assert update.metrics["ledger/failed_tokens"] == (5 if drawn == [poisoned] else 0)
    assert all(torch.allclose(gradients[0][name], gradients[1][name], rtol=1e-4, atol=1e-7) for name in gradients[0])


@pytest.mark.parametrize("rewards", [(NAN, NAN, NAN), (INF, INF, INF), (NAN, 2.0, NAN), (INF, 2.0, -INF)], ids=str)
def test_a_step_without_two_finite_rewards_changes_nothing(rewards: tuple[float, ...]) -> None:
    made = policy(settings())
    before = snapshot(made.model)
    update = made.update(on_policy(made, [group(rewards, (6, 5, 10), seed=1)]))
    assert same(snapshot(made.model), before)
    assert update.metrics["optimizer/steps"] == update.metrics["optimizer/discarded_steps"] == 0
    finite = [math.isfinite(r) for r in rewards]
    assert update.fates == ["no_signal" if f else "failed" for f in finite]
    assert update.metrics["ledger/failed_tokens"] == sum(n for n, f in zip((6, 5, 10), finite, strict=True) if not f)
    assert ("advantage/abs_mean" in update.metrics) is any(finite)


def test_an_empty_completion_has_a_reward_and_no_gradient() -> None:
    made = policy(settings())
    empty = Rollout(Completion((), (), (), FinishReason.EOS), text="", reward=1.0)
    drawn = [Group(Prompt(0, "", (5, 6, 7)), [empty, rollout(0.0, 4, 1), rollout(0.3, 3, 2)])]
    update = check_trained(made, on_policy(made, drawn))
    assert update.fates == ["empty", "reached", "reached"]
    assert update.metrics["ledger/sampled_tokens"] == 7


def test_nothing_but_empty_completions_changes_nothing() -> None:
    made = policy(settings())
    before = snapshot(made.model)
    empty = [Rollout(Completion((), (), (), FinishReason.EOS), text="", reward=float(i)) for i in range(2)]
    update = made.update(build_batch([Group(Prompt(0, "", (5, 6, 7)), empty)], made.config, 0))
    assert same(snapshot(made.model), before)
    assert update.fates == ["empty", "empty"]
    assert math.isnan(update.metrics["rollout/unscored_fraction"])


# ---- rollout logprobs


def with_rollout_logprob(batch: Batch, value: float, where: slice | int) -> Batch:
    logprobs = batch.rollout_logprobs.clone()
    logprobs[where] = value
    return replace(batch, rollout_logprobs=logprobs)


@pytest.mark.parametrize("objective", CORRECTIONS, ids=lambda o: f"{o['importance_level']}-{o['importance_action']}")
@pytest.mark.parametrize("where", [7, slice(0, 63)], ids=["one", "all"])
@pytest.mark.parametrize("value", NOT_FINITE)
def test_a_rollout_logprob_that_is_not_finite_never_reaches_the_weights(
    value: float, where: slice | int, objective: dict[str, Any]
) -> None:
    made = policy(settings(objective=objective))
    batch = with_rollout_logprob(on_policy(made, groups()), value, where)
    update = made.update(batch)
    assert all_finite(made)
    assert not update.discarded
    if math.isnan(value):
        share = 1.0 if isinstance(where, slice) else 1 / 63
        assert update.metrics["rollout/unscored_fraction"] == pytest.approx(share, rel=1e-6)
        assert update.metrics["importance/tokens"] == (0 if isinstance(where, slice) else 62)
    else:
        assert update.metrics["importance/log_ratio_abs_max"] == INF
        assert update.metrics["importance/kl_k3"] > 1e3
        assert update.metrics["rollout/unscored_fraction"] == 0


@pytest.mark.parametrize("objective", CORRECTIONS, ids=lambda o: f"{o['importance_level']}-{o['importance_action']}")
def test_unscored_tokens_train_with_a_weight_of_exactly_one(objective: dict[str, Any]) -> None:
    gradients = []
    for chosen in (objective, {"importance_action": "off"}):
        made = policy(settings(objective=chosen))
        seen = optimizer_inputs(made)
        update = check_trained(made, with_rollout_logprob(on_policy(made, groups(), -0.4), NAN, slice(0, 63)))
        assert update.blackbox["seen_weights"].eq(1).all()
        assert update.blackbox["seen_log_ratio"].isnan().all()
        assert update.metrics["ledger/reached_share"] == 1
        gradients.append(seen[0])
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


# ---- what the models say


def poison_reference(made: Policy, value: float) -> None:
    forward = made.logprobs

    def poisoned(batch: Batch, completions: Any, *, reference: bool = False) -> Scores:
        scores = forward(batch, completions, reference=reference)
        if reference:
            scores.logprobs[3] = value
        return scores

    made.logprobs = poisoned  # type: ignore[method-assign]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_reference_logprob_that_is_nan_discards_the_step(estimator: str) -> None:
    made = policy(settings(objective={"beta": 0.1, "kl_estimator": estimator}))
    batch = on_policy(made, groups())
    poison_reference(made, NAN)
    update = check_discarded(made, batch)
    assert math.isnan(update.metrics["loss/kl"])
    assert math.isnan(update.metrics["kl/k3"])


@pytest.mark.parametrize("value", [INF, -INF])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_an_infinite_reference_logprob_never_reaches_the_weights(estimator: str, value: float) -> None:
    made = policy(settings(objective={"beta": 0.1, "kl_estimator": estimator}))
    batch = on_policy(made, groups())
    poison_reference(made, value)
    if estimator == "k3" and value == INF:  # bounded: a divergence of e^20, without a gradient
        assert check_trained(made, batch).metrics["kl/k3"] > 1e6
    else:
        assert not math.isfinite(check_discarded(made, batch).metrics["kl/k1"])


@pytest.mark.parametrize("value", NOT_FINITE)
@pytest.mark.parametrize("loss", ["dapo", "gspo", "cispo", "reinforce"])
def test_an_advantage_that_is_not_finite_discards_the_step(loss: str, value: float) -> None:
    made = policy(settings(objective={"loss": loss}))
    batch = on_policy(made, groups())
    advantages = batch.advantages.clone()
    advantages[4] = value
    check_discarded(made, replace(batch, advantages=advantages))


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("optimizer", [{}, {"epochs_per_batch": 2}], ids=["one step", "two steps"])
def test_a_logit_that_is_nan_or_infinite_discards_the_step(
    optimizer: dict[str, Any], value: float, model: dict[str, Any]
) -> None:
    made = policy(settings(model=model, optimizer=optimizer))
    made.update(on_policy(made, groups()[:1]))  # so that there is an optimizer state to keep
    batch = on_policy(made, groups())
    poison_logits(made, value)
    update = check_discarded(made, batch)
    assert not math.isfinite(update.metrics["loss"])


@pytest.mark.parametrize("quantile", [0.0, 0.5])
def test_a_nan_in_the_logits_is_not_hidden_by_the_entropy_quantile(quantile: float) -> None:
    made = policy(settings(objective={"entropy_quantile": quantile}))
    batch = on_policy(made, groups())
    poison_logits(made, NAN)
    check_discarded(made, batch)


def test_a_logit_of_minus_infinity_is_a_token_without_mass() -> None:
    made = policy(settings(objective={"entropy_bonus": 0.1}))
    batch = on_policy(made, groups())
    poison_logits(made, -INF)
    assert math.isfinite(check_trained(made, batch).metrics["policy/entropy"])


def poison_old(made: Policy, value: float) -> None:
    score = made._score_all

    def poisoned(batch: Batch, *, reference: bool) -> Scores:
        scores = score(batch, reference=reference)
        scores.logprobs[3] = value
        return scores

    made._score_all = poisoned  # type: ignore[method-assign]


@pytest.mark.parametrize("loss", ["dapo", "gspo", "cispo"])
def test_an_old_logprob_that_is_nan_discards_the_step(loss: str) -> None:
    made = policy(settings(objective={"loss": loss}, optimizer={"epochs_per_batch": 2}))
    batch = on_policy(made, groups())
    poison_old(made, NAN)
    update = check_discarded(made, batch)
    assert math.isnan(update.metrics["policy/first_ratio_error"])


@pytest.mark.parametrize("value", [INF, -INF])
@pytest.mark.parametrize("loss", ["dapo", "gspo", "cispo"])
def test_an_infinite_old_logprob_never_reaches_the_weights(loss: str, value: float) -> None:
    made = policy(settings(objective={"loss": loss}, optimizer={"epochs_per_batch": 2}))
    batch = on_policy(made, groups())
    poison_old(made, value)
    update = made.update(batch)
    assert all_finite(made)
    assert update.metrics["policy/first_ratio_error"] > 0.9
    assert update.metrics["importance/log_ratio_abs_max"] == INF


@pytest.mark.parametrize("value", NOT_FINITE)
def test_a_gradient_that_is_not_finite_discards_the_step_although_the_loss_is_finite(value: float) -> None:
    made = policy(settings())
    batch = on_policy(made, groups())
    first = next(made.model.parameters())
    first.register_hook(lambda grad: torch.where(torch.arange(len(grad))[:, None] == 9, value, grad))
    assert math.isfinite(check_discarded(made, batch).metrics["loss"])
