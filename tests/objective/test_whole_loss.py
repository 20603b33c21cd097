"""The parts together: loss and gradient of a small batch against the reference, over every combination of settings."""

import itertools
import math

import pytest
import reference
import torch

from leadline.objective.advantages import group_advantages
from leadline.objective.importance import ACTIONS, LEVELS, rollout_weights
from leadline.objective.kl import ESTIMATORS, kl_divergence
from leadline.objective.losses import LOSSES, policy_loss, token_shares

AGGREGATIONS = ["token_mean", "sequence_mean", "constant", "minibatch_token_mean"]
MAX_TOKENS = 9
LENGTHS = [4, 0, 1, 6, 3, 2, 5]  # ragged; completion 1 is empty
GROUPS = [0, 0, 0, 0, 1, 1, 1]


def make_batch():
    generator = torch.Generator().manual_seed(14)
    n = sum(LENGTHS)

    def normal():
        return torch.randn(n, generator=generator, dtype=torch.float64)

    old = -normal().abs() - 0.1
    completion_of_token = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    drift = torch.tensor([0.4, 0.0, 0.0, -0.1, 0.0, 0.3, 0.5], dtype=torch.float64)[completion_of_token]
    rollout = old + 0.3 * normal()
    rollout[[1, 4, 17]] = math.nan  # completion 2 has only the unscored token
    loss_mask = torch.rand(n, generator=generator) < 0.85
    loss_mask[11:14] = False  # all of completion 4
    return {
        "logprobs": old + 0.2 * normal() + drift,
        "old_logprobs": old,
        "rollout_logprobs": rollout,
        "ref_logprobs": old + 0.5 * normal(),
        "rewards": torch.tensor([0.0, 1.0, 0.5, 1.0, -1.0, math.nan, 2.0], dtype=torch.float64),
        "group_of_completion": torch.tensor(GROUPS),
        "completion_of_token": completion_of_token,
        "loss_mask": loss_mask,
    }


BATCH = make_batch()
PLAIN = {name: value.tolist() for name, value in BATCH.items()} | {"max_tokens": MAX_TOKENS}


def make_settings(loss="dapo", aggregation="token_mean", level="token", action="truncate", **changes):
    return {
        "loss": loss,
        "aggregation": aggregation,
        "scaling": "group_std",
        "importance": {"level": level, "action": action, "low": 0.5, "high": 1.6, "veto": 0.0},
        "clip": {"clip_low": 0.2, "clip_high": 0.25, "clip_delta": None},
        "beta": 0.1,
        "estimator": "k3",
    } | changes


def loss_of(batch, settings, completions=None):
    """The loss of some completions of the batch, counted against the whole of it: a micro-batch."""
    completions = list(range(len(LENGTHS))) if completions is None else completions
    advantages = group_advantages(
        batch["rewards"], batch["group_of_completion"], scaling=settings["scaling"], epsilon=1e-6
    )[batch["completion_of_token"]]
    mask, of_token = batch["loss_mask"], batch["completion_of_token"]
    tokens = torch.isin(of_token, torch.tensor(completions))
    local = torch.tensor([completions.index(c) for c in of_token[tokens].tolist()], dtype=torch.long)
    n = len(completions)
    weights = rollout_weights(
        batch["old_logprobs"][tokens], batch["rollout_logprobs"][tokens], local, n, **settings["importance"]
    ).weights
    token_loss = policy_loss(
        settings["loss"], batch["logprobs"][tokens], batch["old_logprobs"][tokens], advantages[tokens], local, n,
        mask[tokens], **settings["clip"],
    ).loss  # fmt: skip
    shares = token_shares(
        settings["aggregation"], mask[tokens], local, n,
        num_loss_tokens=int(mask.sum()), num_loss_completions=len(of_token[mask].unique()), max_tokens=MAX_TOKENS,
    )  # fmt: skip
    kl = kl_divergence(batch["logprobs"][tokens], batch["ref_logprobs"][tokens], settings["estimator"])
    return (shares * weights * token_loss).sum() + settings["beta"] * (shares * kl).sum()


def loss_and_gradient(batch, settings, parts=(None,)):
    leaf = batch["logprobs"].clone().requires_grad_()
    losses = [loss_of(batch | {"logprobs": leaf}, settings, part) for part in parts]
    for loss in losses:
        loss.backward()
    return sum(loss.item() for loss in losses), leaf.grad


def assert_equals_the_reference(settings):
    """Shares are float32, exact to 6e-8 of themselves: so is the loss, relative to its terms, whose sizes add up to 1."""
    value, gradient = loss_and_gradient(BATCH, settings)
    expected_value, expected_gradient = reference.whole_loss(PLAIN, settings)
    assert value == pytest.approx(expected_value, rel=1e-7, abs=2e-8)
    assert gradient.tolist() == pytest.approx(expected_gradient, rel=1e-7, abs=2e-9)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("loss", LOSSES)
def test_loss_and_gradient_equal_the_reference(loss, aggregation, level, action):
    settings = make_settings(loss, aggregation, level, action)
    assert_equals_the_reference(settings)


@pytest.mark.parametrize(
    "changes",
    [{"estimator": e} for e in ESTIMATORS]
    + [{"scaling": s} for s in ("batch_std", "none", "leave_one_out")]
    + [
        {"beta": 0.0},
        {"clip": {"clip_low": 0.2, "clip_high": 0.25, "clip_delta": 1.3}},
        {"importance": {"level": "token", "action": "truncate", "low": 0.0, "high": 2.0, "veto": 0.6}},
        {"importance": {"level": "geometric", "action": "mask", "low": 0.9, "high": 1.1, "veto": 0.0}},
    ],
)
@pytest.mark.parametrize("loss", ["grpo", "gspo", "cispo"])
def test_loss_and_gradient_equal_the_reference_for_the_other_settings(loss, changes):
    settings = make_settings(loss, "sequence_mean", **changes)
    assert_equals_the_reference(settings)


def test_the_batch_exercises_every_branch():
    advantages = group_advantages(BATCH["rewards"], BATCH["group_of_completion"], scaling="group_std", epsilon=1e-6)
    of_token, mask = BATCH["completion_of_token"], BATCH["loss_mask"]
    for loss in ("grpo", "gspo", "cispo"):
        clipped = policy_loss(
            loss, BATCH["logprobs"], BATCH["old_logprobs"], advantages[of_token], of_token, 7, mask,
            clip_low=0.2, clip_high=0.25, clip_delta=None,
        ).clipped  # fmt: skip
        assert 0 < clipped.sum() < mask.sum(), loss
    for level, action in itertools.product(LEVELS, ("truncate", "mask")):
        low, high = (0.5, 1.6) if level != "geometric" else (0.9, 1.1)
        got = rollout_weights(
            BATCH["old_logprobs"], BATCH["rollout_logprobs"], of_token, 7,
            level=level, action=action, low=low, high=high, veto=0.0,
        )  # fmt: skip
        hit = got.truncated if action == "truncate" else got.masked
        assert 0 < hit.sum() < mask.sum(), (level, action)
    assert BATCH["rollout_logprobs"].isnan().any() and (advantages == 0).any()


@pytest.mark.parametrize("parts", [[[0, 1, 2], [3, 4, 5, 6]], [[6], [0], [1, 4], [5, 3, 2]]])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("loss", LOSSES)
def test_micro_batches_add_up_to_the_whole(loss, aggregation, parts):
    for level, action in [("token", "mask"), ("sequence", "truncate"), ("geometric", "mask")]:
        settings = make_settings(loss, aggregation, level, action)
        value, gradient = loss_and_gradient(BATCH, settings)
        value_of_parts, gradient_of_parts = loss_and_gradient(BATCH, settings, parts)
        assert value_of_parts == pytest.approx(value, rel=1e-9)
        torch.testing.assert_close(gradient_of_parts, gradient, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("level", LEVELS)
def test_an_engine_that_scored_nothing_trains_as_if_it_were_on_policy(level, action):
    unscored = BATCH | {"rollout_logprobs": torch.full_like(BATCH["rollout_logprobs"], math.nan)}
    exact = BATCH | {"rollout_logprobs": BATCH["old_logprobs"]}
    settings = make_settings("grpo", "token_mean", level, action)
    torch.testing.assert_close(loss_and_gradient(unscored, settings), loss_and_gradient(exact, settings))


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_number_moves_only_its_own_completion_out_of_the_gradient(reward):
    rewards = BATCH["rewards"].clone()
    rewards[3] = reward
    value, gradient = loss_and_gradient(BATCH | {"rewards": rewards}, make_settings(beta=0.0))
    assert math.isfinite(value) and gradient.isfinite().all()
    lost = BATCH["completion_of_token"] == 3
    assert (gradient[lost] == 0).all() and (gradient[~lost] != 0).any()


def gradient_norm(nats, level, action, low, high, tokens=256):
    """Norm of the gradient of two completions on policy, whose engine's logprobs are `nats` above the trainer's."""
    n = 2 * tokens
    old = torch.full((n,), -1.0)
    leaf = old.clone().requires_grad_()
    of_token = torch.arange(2).repeat_interleave(tokens)
    weights = rollout_weights(
        old, old + nats, of_token, 2, level=level, action=action, low=low, high=high, veto=0.0
    ).weights
    every = torch.ones(n, dtype=torch.bool)
    advantages = torch.tensor([0.7, -0.7])[of_token]
    loss = policy_loss(
        "grpo", leaf, old, advantages, of_token, 2, every, clip_low=0.2, clip_high=0.2, clip_delta=None
    ).loss
    shares = token_shares(
        "sequence_mean", every, of_token, 2, num_loss_tokens=n, num_loss_completions=2, max_tokens=tokens
    )
    (shares * weights * loss).sum().backward()
    return leaf.grad.norm().item()


@pytest.mark.parametrize("tokens", [16, 256, 2048])
@pytest.mark.parametrize("nats", [0.02, -0.02])
def test_the_default_correction_changes_the_gradient_by_the_offset_itself_at_any_length(nats, tokens):
    exact = gradient_norm(0.0, "token", "truncate", 0.0, 2.0, tokens)
    change = gradient_norm(nats, "token", "truncate", 0.0, 2.0, tokens) / exact
    # 0.9802 for a sampler 0.02 nat above the trainer, 1.0202 for one below: 1.98 % and 2.02 %
    assert change == pytest.approx(math.exp(-nats), rel=1e-5)
    assert abs(math.log(change)) == pytest.approx(0.02, rel=1e-3)


def test_a_product_ratio_loses_the_same_gradient_to_the_length():
    exact = gradient_norm(0.0, "sequence", "mask", 0.0, 3.0)
    assert gradient_norm(0.02, "sequence", "mask", 0.0, 3.0) / exact == pytest.approx(
        math.exp(-5.12), rel=1e-3
    )  # 0.6 %
    assert gradient_norm(-0.02, "sequence", "mask", 0.0, 3.0) == 0.0  # masked whole
