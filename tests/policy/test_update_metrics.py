import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from leadline.metrics import find
from leadline.policy.policy import Policy
from leadline.policy.update_metrics import Update
from leadline.types import Group
from tests.builders import NAN, all_logprobs, group, groups, on_policy, policy, settings

ALL_ON = {
    "beta": 0.1,
    "entropy_bonus": 0.01,
    "entropy_quantile": 0.2,
    "importance_action": "mask",
    "importance_low": 0.5,
    "mask_truncated": True,
}


def offsets() -> Tensor:
    """log pi_old - log mu of the 63 tokens of `groups()`."""
    return 0.5 * torch.randn(63, generator=torch.Generator().manual_seed(5))


def run(offset: Tensor | float = 0.0, **sections: dict[str, Any]) -> Update:
    made = policy(settings(**sections))
    return made.update(on_policy(made, groups(), offset))


def of(update: Update, family: str) -> dict[str, float]:
    return {key: value for key, value in update.metrics.items() if key.startswith(family + "/")}


@pytest.mark.parametrize("objective", [{}, ALL_ON], ids=["default", "all on"])
@pytest.mark.parametrize("optimizer", [{}, {"minibatches": 2, "epochs_per_batch": 2}], ids=["one step", "four steps"])
def test_every_metric_is_in_the_registry(objective: dict[str, Any], optimizer: dict[str, Any]) -> None:
    for update in (run(offsets(), objective=objective, optimizer=optimizer), barren()):
        assert len(update.metrics) > 30
        assert [name for name in update.metrics if find(name) is None] == []
        assert all(isinstance(value, float | int) for value in update.metrics.values())


def barren() -> Update:
    made = policy(settings())
    return made.update(on_policy(made, [group((1.0, 1.0), (3, 4))]))


# ---- importance


def test_importance_metrics_by_hand() -> None:
    log_ratio = offsets().double()
    w = log_ratio.exp()
    lengths = [len(r.completion.token_ids) for g in groups() for r in g.rollouts]
    sums = torch.stack([part.sum() for part in log_ratio.split(lengths)])
    expected = {
        "importance/tokens": 63,
        "importance/ratio_mean": w.mean(),
        "importance/ratio_min": w.min(),
        "importance/ratio_max": w.max(),
        "importance/ratio_std": (w.square().mean() - w.mean().square()).sqrt(),
        "importance/sequence_ratio_mean": sums.exp().mean(),
        "importance/sequence_ratio_min": sums.exp().min(),
        "importance/sequence_ratio_max": sums.exp().max(),
        "importance/log_ratio_mean": log_ratio.mean(),
        "importance/log_ratio_abs_mean": log_ratio.abs().mean(),
        "importance/log_ratio_abs_max": log_ratio.abs().max(),
        "importance/kl_k1": -log_ratio.mean(),
        "importance/kl_k3": (w - 1 - log_ratio).mean(),
        "importance/ess": w.sum().square() / (63 * w.square().sum()),
        "importance/masked_fraction": 0.0,
        "importance/truncated_fraction": (w > 1.2).double().mean(),
        "importance/weight_mean": w.clamp(max=1.2).mean(),
    }
    measured = of(run(offsets(), objective={"importance_high": 1.2}), "importance")
    assert measured == pytest.approx({name: float(value) for name, value in expected.items()}, rel=1e-4, abs=1e-9)
    assert measured["importance/truncated_fraction"] > 0.1


APPLIED = ("importance/masked_fraction", "importance/truncated_fraction", "importance/weight_mean")


def test_raw_ratios_are_logged_whatever_the_correction() -> None:
    rows = [
        of(
            run(offsets(), objective={"importance_action": action, "importance_low": 0.7, "importance_high": 1.2}),
            "importance",
        )
        for action in ("off", "token_truncate", "token_mask", "sequence_mask", "geometric_truncate")
    ]
    raw = [{name: value for name, value in row.items() if name not in APPLIED} for row in rows]
    assert all(row == raw[0] for row in raw)
    assert raw[0]["importance/ratio_max"] > 2
    assert rows[0]["importance/masked_fraction"] == rows[0]["importance/truncated_fraction"] == 0
    assert rows[0]["importance/weight_mean"] == 1
    w = offsets().exp()
    outside = float(((w < 0.7) | (w > 1.2)).double().mean())
    assert rows[1]["importance/truncated_fraction"] == pytest.approx(outside)
    assert rows[2]["importance/masked_fraction"] == pytest.approx(outside)


@pytest.mark.parametrize("tokens_per_micro", [16, 60])
def test_a_maximum_is_one_over_micro_batches_and_a_mean_is_over_tokens(tokens_per_micro: int) -> None:
    whole = of(run(offsets()), "importance")
    split = of(run(offsets(), optimizer={"tokens_per_micro": tokens_per_micro}), "importance")
    assert split == pytest.approx(whole, rel=1e-4, abs=1e-6)


def test_importance_metrics_count_each_token_once_however_many_epochs() -> None:
    once = of(run(offsets()), "importance")
    often = of(run(offsets(), optimizer={"minibatches": 2, "epochs_per_batch": 3}), "importance")
    assert often == pytest.approx(once, rel=1e-4, abs=1e-6)


def test_unscored_tokens_enter_no_importance_metric() -> None:
    offset = offsets()
    offset[10:20] = NAN
    update = run(offset)
    scored = offset[~offset.isnan()].double()
    assert update.metrics["importance/tokens"] == 53
    assert update.metrics["importance/ratio_mean"] == pytest.approx(float(scored.exp().mean()), rel=1e-5)
    assert update.metrics["importance/log_ratio_abs_mean"] == pytest.approx(float(scored.abs().mean()), rel=1e-5)
    assert update.metrics["importance/weight_mean"] == pytest.approx(float(scored.exp().clamp(max=2).mean()), rel=1e-5)
    assert update.metrics["rollout/unscored_fraction"] == pytest.approx(10 / 63)


def test_a_completion_without_any_scored_token_has_no_sequence_ratio() -> None:
    offset = torch.full((63,), math.log(1.1))
    offset[:5] = NAN  # the first completion, whose product would be 1
    update = run(offset)
    assert update.metrics["importance/sequence_ratio_min"] == pytest.approx(1.1, rel=1e-4)  # of one token


def test_no_scored_token_is_a_count_of_zero_and_no_number() -> None:
    assert of(run(NAN), "importance") == {"importance/tokens": 0.0}


def test_kl_k3_is_never_negative_however_far_the_engine_is_off() -> None:
    for offset in (30.0, -30.0, math.inf, -math.inf):
        assert run(offset).metrics["importance/kl_k3"] > 10


def test_equal_engines_have_ratios_of_one() -> None:
    row = of(run(), "importance")
    assert row["importance/ratio_min"] == row["importance/ratio_max"] == row["importance/ess"] == 1
    assert row["importance/kl_k1"] == row["importance/kl_k3"] == row["importance/ratio_std"] == 0


# ---- policy, loss, optimizer


def moved(made: Policy, drawn: Any) -> tuple[Update, Tensor]:
    """Two epochs: (update, log pi_theta / pi_old that the second saw)."""
    batch = on_policy(made, drawn)
    seen: list[Tensor] = []
    step = made.optimizer.step

    def spy(loss: float, rate: float) -> Any:
        outcome = step(loss, rate)
        seen.append(all_logprobs(made, batch) - batch.rollout_logprobs)
        return outcome

    made.optimizer.step = spy  # type: ignore[method-assign]
    return made.update(batch), seen[0]


def test_policy_ratio_is_of_the_last_optimizer_step_and_its_extremes_of_all() -> None:
    made = policy(settings(optimizer={"epochs_per_batch": 2, "learning_rate": 3e-3}))
    update, log_ratio = moved(made, groups())
    ratio = log_ratio.exp()
    row = update.metrics
    assert row["policy/ratio_mean"] == pytest.approx(float(ratio.mean()), rel=1e-5)
    assert row["policy/ratio_min"] == pytest.approx(float(ratio.min()), rel=1e-5)
    assert row["policy/ratio_max"] == pytest.approx(float(ratio.max()), rel=1e-5)
    assert row["policy/kl_old"] == pytest.approx(float((ratio - 1 - log_ratio).mean()) / 2, rel=1e-4)  # and 0 at first
    advantages = update.blackbox["advantages"][update.blackbox["completion_of_token"]]
    clipped = ((ratio > 1.2) & (advantages > 0)) | ((ratio < 0.8) & (advantages < 0))
    assert row["policy/clip_fraction"] == pytest.approx(float(clipped.float().mean()) / 2)
    assert row["policy/clip_fraction"] > 0
    assert row["policy/tokens"] == 2 * 63


def test_the_loss_is_the_mean_over_optimizer_steps_and_the_sum_of_its_terms() -> None:
    objective = {"beta": 0.1, "entropy_bonus": 0.01}
    row = run(0.1, objective=objective, optimizer={"minibatches": 2, "learning_rate": 1e-30}).metrics
    whole = run(0.1, objective=objective).metrics
    assert row["loss"] == pytest.approx(row["loss/policy"] + row["loss/kl"] + row["loss/entropy"], abs=1e-9)
    for name in ("loss", "loss/policy", "loss/entropy"):
        assert row[name] == pytest.approx(whole[name], abs=1e-6)


def test_a_step_without_gradient_has_norms_of_zero_and_no_ratios() -> None:
    row = barren().metrics
    assert row["optimizer/grad_norm"] == row["optimizer/update_norm"] == row["optimizer/steps"] == 0
    assert row["loss"] == 0
    assert row["throughput/trained_tokens_per_s"] == 0
    assert not any(name.startswith(("importance/", "policy/")) for name in row)


def test_gradient_norms_are_the_largest_of_the_optimizer_steps() -> None:
    made = policy(settings(optimizer={"minibatches": 4, "max_grad_norm": 2.0}))
    outcomes = []
    step = made.optimizer.step
    made.optimizer.step = lambda loss, rate: outcomes.append(step(loss, rate)) or outcomes[-1]  # type: ignore
    row = made.update(on_policy(made, groups())).metrics
    assert len({o.grad_norm for o in outcomes}) == 4
    assert row["optimizer/grad_norm"] == max(o.grad_norm for o in outcomes) > 2
    assert row["optimizer/grad_norm_clipped"] == 2
    assert row["optimizer/update_norm"] == max(o.update_norm for o in outcomes)


def test_staleness_is_of_trained_tokens() -> None:
    made = policy(settings())
    made.version = 3
    row = made.update(on_policy(made, [*groups(), group((1.0, NAN), (4, 40), seed=7)])).metrics
    assert row["staleness/mean"] == row["staleness/max"] == 3


# ---- ages


def aged(*ages: int, **rollout: int) -> Update:
    """One update on four groups, each of whose tokens are all of one age, with log ratios of a hundredth of it."""
    made = policy(settings(rollout={"max_staleness": 9, **rollout}, objective={"importance_high": 1.05}))
    made.version = 20
    drawn = groups()
    offset = torch.cat([torch.full((_tokens(g),), -0.01 * age) for g, age in zip(drawn, ages, strict=True)])
    batch = on_policy(made, drawn, offset)
    of_token = batch.group_of_completion[batch.completion_of_token]
    return made.update(replace(batch, staleness=torch.tensor(ages)[of_token]))


def _tokens(group: Group) -> int:
    return sum(len(r.completion.token_ids) for r in group.rollouts)


def test_importance_is_told_by_the_age_of_the_tokens() -> None:
    sizes = [_tokens(g) for g in groups()]
    metrics = of(aged(0, 2, 2, 7), "staleness")
    by_age = {name.split("/")[1] for name in metrics if "age" in name}
    assert by_age == {"age_0", "age_2", "age_7"}
    assert metrics["staleness/age_0/tokens"] == sizes[0]
    assert metrics["staleness/age_2/tokens"] == sizes[1] + sizes[2]
    assert metrics["staleness/age_2/log_ratio_abs_mean"] == pytest.approx(0.02, abs=1e-5)
    assert metrics["staleness/age_2/weight_mean"] == pytest.approx(math.exp(-0.02), abs=1e-5)
    assert metrics["staleness/age_7/log_ratio_abs_mean"] == pytest.approx(0.07, abs=1e-5)
    assert metrics["staleness/age_7/ess"] == pytest.approx(1, abs=1e-5)


def test_ages_of_eight_and_more_are_one_and_the_names_are_bounded() -> None:
    sizes = [_tokens(g) for g in groups()]
    metrics = of(aged(8, 9, 11, 500), "staleness")
    assert {name.split("/")[1] for name in metrics if "age" in name} == {"age_8_or_more"}
    assert metrics["staleness/age_8_or_more/tokens"] == sum(sizes)
    assert metrics["staleness/age_8_or_more/ess"] == pytest.approx(45 / 63, abs=0.02)


def test_a_synchronous_run_has_no_ages_and_one_with_replay_has() -> None:
    assert not any("age_" in name for name in aged(0, 0, 0, 0, max_staleness=0).metrics)
    assert any("age_" in name for name in aged(0, 0, 0, 0, max_staleness=0, replay_max_staleness=2).metrics)


def test_advantages_are_of_rollouts_with_a_reward() -> None:
    made = policy(settings(objective={"advantage_scaling": "none"}))
    row = made.update(on_policy(made, [group((0.0, 1.0, NAN, math.inf), (3, 4, 5, 6))])).metrics
    assert row["advantage/abs_mean"] == row["advantage/max"] == -row["advantage/min"] == 0.5


def test_time_is_told_by_stage() -> None:
    row = run().metrics
    assert row["time/score_s"] >= 0
    assert row["time/update_s"] > 0
    assert row["throughput/trained_tokens_per_s"] == pytest.approx(63 / (row["time/score_s"] + row["time/update_s"]))


def test_peak_memory_is_in_bytes() -> None:
    assert 5e7 < run().metrics["memory/peak_bytes"] < 1e12


# ---- black box


def test_the_black_box_holds_the_step_at_token_level() -> None:
    made = policy(settings(optimizer={"minibatches": 2}))
    batch = on_policy(made, groups(), 0.1)
    box = made.update(batch).blackbox
    for name in ("token_ids", "rollout_logprobs", "loss_mask", "rewards", "advantages", "staleness"):
        assert torch.equal(box[name], getattr(batch, name))
    assert box["seen_tokens"].tolist() == list(range(63))
    assert torch.allclose(box["seen_log_ratio"], torch.tensor(0.1), atol=1e-5)
    assert torch.allclose(box["seen_old_logprobs"], batch.rollout_logprobs + 0.1, atol=1e-5)
    halves = box["seen_optimizer_step"]
    assert halves.tolist() == sorted(halves.tolist())
    assert set(halves.tolist()) == {0, 1}
