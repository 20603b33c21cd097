"""Each stage of the ledger has a case that sends tokens there."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from leadline.metrics import LEDGER_STAGES
from leadline.policy.update_metrics import Update
from leadline.types import FinishReason, Group
from tests.builders import (
    NAN,
    group,
    groups,
    on_policy,
    policy,
    same,
    settings,
    snapshot,
    stages,
)


def run(drawn: Sequence[Group], offset: float | Tensor = 0.0, **sections: dict[str, Any]) -> Update:
    made = policy(settings(**sections))
    return made.update(on_policy(made, drawn, offset))


def pair(finish: FinishReason = FinishReason.EOS) -> list[Group]:
    """Two rollouts of 6 and 10 tokens with equal |advantage|; `finish` is that of both."""
    return [group((0.0, 1.0), (6, 10), seed=1, finish=finish)]


def test_on_policy_everything_reaches_the_gradient() -> None:
    update = run(pair())
    assert stages(update, "tokens") == {"reached": 16}
    assert stages(update) == {"reached": 1.0}
    assert update.fates == ["reached", "reached"]


def test_failed() -> None:
    update = run([group((0.0, NAN, 1.0), (6, 5, 10), seed=1)])
    assert stages(update, "tokens") == {"failed": 5, "reached": 16}
    assert update.metrics["ledger/failed_share"] == 0  # without a reward there is no advantage and no mass
    assert update.fates == ["reached", "failed", "reached"]


def test_no_signal() -> None:
    update = run([*pair(), group((1.0, 1.0), (3, 4), seed=2)])
    assert stages(update, "tokens") == {"no_signal": 7, "reached": 16}
    assert update.fates == ["reached", "reached", "no_signal", "no_signal"]


def test_nothing_but_groups_without_signal_has_no_shares() -> None:
    update = run([group((1.0, 1.0), (3, 4), seed=2)])
    assert stages(update, "tokens") == {"no_signal": 7}
    assert update.metrics["ledger/sampled_mass"] == 0
    assert all(math.isnan(update.metrics[f"ledger/{stage}_share"]) for stage in LEDGER_STAGES)


def test_truncated() -> None:
    cut = group((2.0, 0.0), (16, 16), seed=2, finish=FinishReason.LENGTH)
    update = run([*pair(), cut], objective={"mask_truncated": True})
    assert stages(update, "tokens") == {"truncated": 32, "reached": 16}
    assert stages(update)["truncated"] == pytest.approx(32 / 48)  # equal |advantage| everywhere
    assert update.fates == ["reached", "reached", "truncated", "truncated"]


@pytest.mark.parametrize("finish", [FinishReason.STOP, FinishReason.EOS])
def test_a_completion_that_fills_the_limit_and_ended_by_itself_is_not_truncated(finish: FinishReason) -> None:
    full = group((2.0, 0.0), (16, 16), seed=2, finish=finish)
    assert stages(run([full], objective={"mask_truncated": True})) == {"reached": 1.0}


def test_all_truncated_changes_nothing_and_says_so() -> None:
    made = policy(settings(objective={"mask_truncated": True}))
    before = snapshot(made.model)
    update = made.update(on_policy(made, pair(FinishReason.LENGTH)))
    assert stages(update) == {"truncated": 1.0}
    assert stages(update, "tokens") == {"truncated": 16}
    assert same(snapshot(made.model), before)
    assert update.metrics["optimizer/steps"] == 0
    assert update.metrics["optimizer/grad_norm"] == 0
    assert update.metrics["loss"] == 0
    assert made.version == 1


def test_unscored_tokens_that_are_dropped() -> None:
    offset = torch.zeros(16)
    offset[[2, 3, 9]] = NAN
    update = run(pair(), offset, objective={"on_unscored": "drop"})
    assert stages(update, "tokens") == {"unscored": 3, "reached": 13}
    assert stages(update)["unscored"] == pytest.approx(3 / 16)


def test_unscored_tokens_that_are_trained() -> None:
    offset = torch.zeros(16)
    offset[[2, 3, 9]] = NAN
    assert stages(run(pair(), offset)) == {"reached": 1.0}


def test_a_completion_of_unscored_tokens_only() -> None:
    offset = torch.zeros(16)
    offset[:6] = NAN
    update = run(pair(), offset, objective={"on_unscored": "drop"})
    assert stages(update, "tokens") == {"unscored": 6, "reached": 10}
    assert update.fates == ["unscored", "reached"]


def test_low_entropy() -> None:
    update = run(pair(), objective={"entropy_quantile": 0.75})
    assert stages(update, "tokens") == {"low_entropy": 12, "reached": 4}
    assert stages(update) == pytest.approx({"low_entropy": 12 / 16, "reached": 4 / 16})


def test_importance_masked() -> None:
    offset = torch.zeros(16)
    offset[[0, 8]] = torch.tensor([-1.0, 2.0])  # e^-1 = 0.37 and e^2 = 7.4
    bounds = {"importance_action": "token_mask", "importance_low": 0.5, "importance_high": 2.0}
    update = run(pair(), offset, objective=bounds)
    assert stages(update, "tokens") == {"importance_masked": 2, "reached": 14}
    assert stages(update)["importance_masked"] == pytest.approx(2 / 16, rel=1e-5)


def test_importance_shrunk() -> None:
    offset = torch.zeros(16)
    offset[:8] = math.log(0.25)
    update = run(pair(), offset)
    assert stages(update, "tokens") == {"reached": 16}
    assert stages(update) == pytest.approx({"importance_shrunk": 0.5 * 0.75, "reached": 1 - 0.5 * 0.75}, rel=1e-4)


def test_a_weight_above_one_adds_mass_which_the_ledger_shows_as_negative() -> None:
    update = run(pair(), math.log(1.5))
    assert stages(update) == pytest.approx({"importance_shrunk": -0.5, "reached": 1.5}, rel=1e-4)


def test_clipped_and_ratio_drift() -> None:
    # A second epoch after a large first step: some tokens are beyond the clip, the others' ratios are not 1.
    update = run(
        groups(),
        objective={"clip_low": 0.05, "clip_high": 0.05},
        optimizer={"epochs_per_batch": 2, "learning_rate": 0.01},
    )
    tokens, shares = stages(update, "tokens"), stages(update)
    assert tokens["clipped"] > 1
    assert tokens["clipped"] + tokens["reached"] == 63
    assert tokens["clipped"] == pytest.approx(63 * update.metrics["policy/clip_fraction"])
    assert shares["clipped"] > 0.05
    assert abs(shares["ratio_drift"]) > 1e-3


def test_discarded() -> None:
    made = policy(settings())
    batch = on_policy(made, [*pair(), group((1.0, 1.0), (3, 4), seed=2)])
    made.model.lm_head.register_forward_hook(lambda *_: torch.tensor(NAN) * _[2])
    update = made.update(batch)
    assert stages(update, "tokens") == {"discarded": 16, "no_signal": 7}
    assert stages(update) == {"discarded": 1.0}
    assert update.discarded
    assert update.fates == ["discarded", "discarded", "no_signal", "no_signal"]


def test_one_discarded_epoch_of_two_is_half_the_mass() -> None:
    made = policy(settings(optimizer={"epochs_per_batch": 2}))
    calls: list[int] = []

    def poison_the_last(module: Any, inputs: Any, logits: Tensor) -> Tensor:
        calls.append(1)
        return logits * NAN if len(calls) == 4 else logits  # the engine's logprobs, the old ones, two epochs

    made.model.lm_head.register_forward_hook(poison_the_last)
    update = made.update(on_policy(made, pair()))
    assert stages(update, "tokens") == {"discarded": 8, "reached": 8}
    assert stages(update) == pytest.approx({"discarded": 0.5, "reached": 0.5})


def test_an_empty_completion_is_nowhere_and_its_fate_is_empty() -> None:
    update = run([group((0.0, 1.0, 0.2), (6, 0, 3), seed=1)])
    assert stages(update, "tokens") == {"reached": 9}
    assert update.fates == ["reached", "empty", "reached"]


# ---- the engine that is off by 0.3 nats a token, over 150 tokens: every completion's product is e^-45 = 2.9e-20


def off_by_a_third(objective: dict[str, Any]) -> tuple[Update, dict[str, Tensor], dict[str, Tensor]]:
    config = settings(sampling={"max_tokens": 150}, objective=objective, optimizer={"learning_rate": 1e-3})
    made = policy(config)
    before = snapshot(made.model)
    update = made.update(on_policy(made, [group((0.0, 1.0), (150, 150), seed=1)], -0.3))
    return update, before, snapshot(made.model)


def test_a_sequence_mask_with_a_lower_bound_masks_it_all() -> None:
    bounds = {"importance_action": "sequence_mask", "importance_low": 0.5, "importance_high": 2.0}
    update, before, after = off_by_a_third(bounds)
    assert stages(update) == {"importance_masked": 1.0}
    assert update.metrics["importance/masked_fraction"] == 1.0
    assert update.metrics["optimizer/grad_norm"] == 0
    assert update.metrics["optimizer/update_norm"] == 0
    assert same(before, after)
    assert update.fates == ["importance_masked"] * 2


def test_a_sequence_mask_without_a_lower_bound_as_trl_ships_it_shrinks_it_to_nothing() -> None:
    bounds = {"importance_action": "sequence_mask", "importance_low": 0.0, "importance_high": 3.0}
    update, _, _ = off_by_a_third(bounds)
    assert update.metrics["ledger/importance_shrunk_share"] == pytest.approx(1.0, abs=1e-12)
    assert update.metrics["ledger/reached_share"] < 1e-15
    assert update.metrics["importance/masked_fraction"] == 0
    assert update.metrics["optimizer/grad_norm"] < 1e-15
    assert update.metrics["importance/sequence_ratio_mean"] == pytest.approx(math.exp(-45), rel=1e-2)
    assert update.fates == ["importance_shrunk"] * 2


def test_a_truncated_token_weight_trains_all_the_same() -> None:
    update, before, after = off_by_a_third({"importance_action": "token_truncate"})
    assert update.metrics["ledger/reached_share"] == pytest.approx(math.exp(-0.3), rel=1e-4)  # 0.74
    assert update.metrics["ledger/reached_share"] > 0.7
    assert not same(before, after)
