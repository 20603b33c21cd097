import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leadline.config import Config
from leadline.models import load_model
from leadline.objective.advantages import group_advantages
from leadline.types import Group
from tests.builders import (
    MODELS,
    all_logprobs,
    group,
    groups,
    on_policy,
    optimizer_inputs,
    policy,
    same,
    settings,
    snapshot,
)

LOSSES = ("grpo", "dapo", "dr_grpo", "bnpo", "gspo", "cispo", "reinforce")


# ---- the gradient


def only_gradient(config: Config, drawn: Sequence[Group], offset: float = 0.1) -> dict[str, Tensor]:
    made = policy(config)
    batch = on_policy(made, drawn, offset)
    seen = optimizer_inputs(made)
    made.update(batch)
    [gradient] = seen
    return gradient


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Largest |difference| relative to the largest gradient."""
    assert one.keys() == other.keys()
    largest = max(float(g.abs().max()) for g in one.values())
    return max(float((one[name] - other[name]).abs().max()) for name in one) / largest


@pytest.mark.parametrize("loss", LOSSES)
def test_micro_batches_never_change_the_gradient(loss: str) -> None:
    gradients = [
        only_gradient(settings(objective={"loss": loss, "beta": 0.1}, optimizer={"tokens_per_micro": tokens}), groups())
        for tokens in (16, 4096)
    ]
    assert largest_difference(*gradients) < 1e-5


def test_the_gradients_of_micro_batches_are_summed_in_float32_whatever_the_model() -> None:
    made = policy(settings(model={"dtype": "bfloat16"}, optimizer={"tokens_per_micro": 16}))
    batch = on_policy(made, groups(), 0.1)
    weight = made.model.lm_head.weight
    parts: list[Tensor] = []
    weight.register_post_accumulate_grad_hook(lambda w: parts.append(w.grad.float()))
    seen = optimizer_inputs(made)
    made.update(batch)
    assert len(parts) > 5  # many micro-batches
    assert torch.equal(seen[0]["lm_head.weight"], sum(parts[1:], parts[0]))


@pytest.mark.parametrize("loss", ["dapo", "grpo"])
def test_groups_without_signal_change_only_the_denominators(loss: str) -> None:
    config = settings(objective={"loss": loss})
    with_signal = only_gradient(config, groups())
    more = only_gradient(config, [group((1.0, 1.0), (5, 8), seed=9), *groups()])
    scale = 63 / 76 if loss == "dapo" else 12 / 14
    assert largest_difference({name: g * scale for name, g in with_signal.items()}, more) < 1e-5


def padded_loss(model: nn.Module, frozen: nn.Module, drawn: Sequence[Group], config: Config, offset: float) -> Tensor:
    """GRPO the plain way: every sequence right-padded, a mask, rectangular tensors, one forward."""
    rows = [(g.prompt.token_ids, r.completion.token_ids) for g in drawn for r in g.rollouts]
    width = max(len(p) + len(c) for p, c in rows)
    ids = torch.tensor([[*p, *c, *[0] * (width - len(p) - len(c))] for p, c in rows])
    attention = torch.tensor([[1] * (len(p) + len(c)) + [0] * (width - len(p) - len(c)) for p, c in rows])
    mask = torch.tensor([[len(p) <= t < len(p) + len(c) for t in range(1, width)] for p, c in rows])

    def logprobs(which: nn.Module) -> Tensor:
        logits = which(input_ids=ids, attention_mask=attention).logits[:, :-1]
        return logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]

    rewards = torch.tensor([r.reward for g in drawn for r in g.rollouts])
    owners = torch.tensor([i for i, g in enumerate(drawn) for _ in g.rollouts])
    advantages = group_advantages(rewards, owners, scaling="group_std", epsilon=1e-6)[:, None]
    policy_logprobs = logprobs(model)
    ratio = (policy_logprobs - policy_logprobs.detach()).exp()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    d = logprobs(frozen).detach() - policy_logprobs
    per_token = -surrogate * math.exp(offset) + config.objective.beta * (d.exp() - d - 1)
    if config.objective.loss == "dapo":
        return (per_token * mask).sum() / mask.sum()
    return ((per_token * mask).sum(1) / mask.sum(1)).mean()


@pytest.mark.parametrize(("loss", "beta"), [("dapo", 0.0), ("grpo", 0.0), ("grpo", 0.5)])
def test_the_gradient_is_that_of_the_plain_padded_implementation(loss: str, beta: float) -> None:
    config = settings(objective={"loss": loss, "beta": beta}, optimizer={"tokens_per_micro": 40})
    made = policy(config)
    made.update(on_policy(made, groups()))  # away from the reference
    batch = on_policy(made, groups(), offset=0.1)
    seen = optimizer_inputs(made)
    frozen = load_model(config.model).model
    made.model.zero_grad()
    expected_loss = padded_loss(made.model, frozen, groups(), config, 0.1)
    expected_loss.backward()
    expected = {name: p.grad.clone() for name, p in made.model.named_parameters() if p.grad is not None}
    made.model.zero_grad()
    update = made.update(batch)
    assert largest_difference(expected, seen[0]) < 1e-5
    assert update.metrics["loss"] == pytest.approx(float(expected_loss.detach()), abs=1e-5)


def test_a_constant_offset_of_the_engine_changes_the_gradient_by_no_more_than_itself_however_long() -> None:
    # 0.02 nats per token over 256 tokens: a product would be e^5.12 = 167. Per token the weight is e^0.02 = 1.0202,
    # so the gradient's norm changes by 2.02 %.
    config = settings(sampling={"max_tokens": 256}, optimizer={"max_grad_norm": 1e9})
    norms = []
    for offset in (0.0, 0.02, -0.02):
        made = policy(config)
        batch = on_policy(made, [group((0.0, 1.0), (256, 256), seed=1)], offset)
        norms.append(made.update(batch).metrics["optimizer/grad_norm"])
    assert norms[1] / norms[0] == pytest.approx(math.exp(0.02), rel=1e-4)
    assert norms[2] / norms[0] == pytest.approx(math.exp(-0.02), rel=1e-4)
    assert all(abs(norm / norms[0] - 1) <= 0.021 for norm in norms)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_recomputing_activations_changes_the_work_and_not_the_gradient(model: dict[str, Any]) -> None:
    gradients, forwards = [], []
    for recompute in (False, True):
        made = policy(settings(model={**model, "gradient_checkpointing": recompute}))
        batch = on_policy(made, groups(), 0.1)
        [layer] = [m for name, m in made.model.named_modules() if name.endswith("layers.0.mlp")]
        calls: list[int] = []
        layer.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        gradients.append(optimizer_inputs(made))
        made.update(batch)
        forwards.append(len(calls))
        assert not made.model.training
    assert forwards == [1, 2]
    assert largest_difference(gradients[0][0], gradients[1][0]) < 1e-6


# ---- several optimizer steps


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("epochs", "parts"), [(1, 2), (3, 1), (2, 4)])
def test_the_first_optimizer_step_is_on_policy_and_later_ones_move_away(dtype: str, epochs: int, parts: int) -> None:
    config = settings(
        model={"dtype": dtype},
        optimizer={"epochs_per_batch": epochs, "minibatches": parts, "learning_rate": 1e-3},
    )
    made = policy(config)
    seen = optimizer_inputs(made)
    metrics = made.update(on_policy(made, groups())).metrics
    assert len(seen) == metrics["optimizer/steps"] == epochs * parts
    assert metrics["policy/first_ratio_error"] == 0  # packed alike, even bfloat16 is exact
    assert metrics["policy/first_clip_fraction"] == 0
    assert metrics["policy/first_kl_old"] < 1e-8
    assert metrics["policy/kl_old"] > 1e-8
    assert metrics["policy/ratio_min"] < 0.999
    assert metrics["policy/ratio_max"] > 1.001
    assert made.version == 1


def test_one_optimizer_step_has_a_ratio_of_exactly_one() -> None:
    made = policy(settings())
    metrics = made.update(on_policy(made, groups())).metrics
    assert metrics["policy/ratio_min"] == metrics["policy/ratio_max"] == metrics["policy/ratio_mean"] == 1
    assert metrics["policy/kl_old"] == 0


@pytest.mark.parametrize("loss", ["dapo", "grpo", "dr_grpo"])
def test_minibatch_gradients_have_the_scale_of_the_whole(loss: str) -> None:
    # At a rate that moves nothing, the mean over the optimizer steps is the gradient of one step on everything.
    objective, optimizer = {"loss": loss}, {"learning_rate": 1e-30}
    whole = only_gradient(settings(objective=objective, optimizer=optimizer), groups())
    made = policy(settings(objective=objective, optimizer={**optimizer, "minibatches": 2, "epochs_per_batch": 2}))
    batch = on_policy(made, groups(), 0.1)
    seen = optimizer_inputs(made)
    made.update(batch)
    assert len(seen) == 4
    assert largest_difference(whole, {name: sum(g[name] for g in seen) / 4 for name in whole}) < 1e-5
    assert largest_difference(seen[0], seen[1]) > 0.1
    assert largest_difference(seen[0], seen[2]) < 1e-6


def test_the_rate_follows_the_schedule_of_the_run() -> None:
    made = policy(settings(run={"steps": 4}, optimizer={"schedule": "linear", "learning_rate": 1e-3}))
    rates = [made.update(on_policy(made, groups())).metrics["optimizer/learning_rate"] for _ in range(4)]
    assert rates == pytest.approx([1e-3, 0.75e-3, 0.5e-3, 0.25e-3])


def test_update_norm_is_the_measured_change() -> None:
    made = policy(settings())
    before = torch.cat([p.detach().flatten().clone() for p in made.model.parameters()])
    metrics = made.update(on_policy(made, groups())).metrics
    after = torch.cat([p.detach().flatten() for p in made.model.parameters()])
    assert metrics["optimizer/update_norm"] == pytest.approx(float((after - before).norm() / after.norm()), rel=1e-3)


def test_an_update_makes_good_completions_likelier() -> None:
    made = policy(settings())
    batch = on_policy(made, groups())
    made.update(batch)
    moved = all_logprobs(made, batch) - batch.rollout_logprobs
    assert float((moved * batch.token_advantages()).mean()) > 0.01


# ---- entropy


def test_the_entropy_bonus_is_the_coefficient_times_the_mean_entropy_and_raises_it() -> None:
    # One group without signal: nothing else moves the policy.
    barren = [group((1.0, 1.0), (8, 8), seed=1)]
    made = policy(settings(objective={"entropy_bonus": 0.5}))
    first = made.update(on_policy(made, barren)).metrics
    assert first["loss/entropy"] / first["policy/entropy"] == pytest.approx(-0.5, rel=1e-6)
    assert first["optimizer/grad_norm"] > 1e-3
    for _ in range(3):
        last = made.update(on_policy(made, barren)).metrics
    assert last["policy/entropy"] > first["policy/entropy"] + 0.05


def test_without_a_bonus_the_entropy_is_measured_and_has_no_gradient() -> None:
    made = policy(settings())
    batch = on_policy(made, groups())
    scores = made.logprobs(batch, batch.forwarded)
    assert scores.logprobs.requires_grad
    assert not scores.entropies.requires_grad
    metrics = made.update(batch).metrics
    assert metrics["policy/entropy"] == pytest.approx(float(scores.entropies.mean()), rel=1e-6)
    assert metrics["loss/entropy"] == 0


def test_each_optimizer_step_trains_the_top_fifth_of_its_own_tokens_by_its_own_policy() -> None:
    made = policy(
        settings(
            objective={"entropy_quantile": 0.8},
            optimizer={"minibatches": 2, "epochs_per_batch": 2, "learning_rate": 1e-2, "tokens_per_micro": 20},
        )
    )
    box = made.update(on_policy(made, groups())).blackbox
    for step in range(4):
        here = box["seen_optimizer_step"] == step
        trained, entropies = box["seen_trained"][here], box["seen_entropies"][here]
        assert int(trained.sum()) == math.ceil(0.2 * len(trained))
        assert entropies[trained].min() > entropies[~trained].max()


def test_a_step_whose_tokens_are_all_masked_moves_nothing_although_adamw_remembers() -> None:
    masking = {"importance_action": "mask", "importance_low": 0.9, "importance_high": 1.1}
    made = policy(settings(objective=masking, optimizer={"weight_decay": 0.1}))
    made.update(on_policy(made, groups()))
    before = snapshot(made.model)
    update = made.update(on_policy(made, groups(), offset=1.0))
    assert same(snapshot(made.model), before)
    assert (update.metrics["optimizer/steps"], update.metrics["optimizer/discarded_steps"]) == (0, 0)
    assert update.metrics["optimizer/update_norm"] == 0
    assert made.discarded_in_a_row == 0


def test_an_entropy_quantile_trains_the_top_tokens_only() -> None:
    made = policy(settings(objective={"entropy_quantile": 0.8}))
    batch = on_policy(made, groups())
    entropies = made.logprobs(batch, batch.forwarded).entropies.detach()
    update = made.update(batch)
    trained = update.blackbox["seen_trained"]
    assert int(trained.sum()) == update.metrics["policy/tokens"] == 13  # the top fifth of 63 tokens, the limit included
    assert entropies[trained].min() > entropies[~trained].max()
    assert update.metrics["ledger/low_entropy_tokens"] == 50
