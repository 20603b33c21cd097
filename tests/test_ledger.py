from typing import Any

import pytest
import torch
from torch import Tensor

from leadline.ledger import Ledger, Pass
from leadline.metrics import LEDGER_STAGES
from leadline.policy.update_metrics import Update
from leadline.types import Group
from tests.builders import NAN, group, groups, logprob_gradients, on_policy, policy, settings, stages

LOSSES = ("grpo", "dapo", "dr_grpo", "bnpo", "gspo", "cispo", "reinforce")
IMPORTANCE = [
    {"importance_level": level, "importance_action": action, "importance_low": 0.8, "importance_high": 1.3}
    for level in ("token", "sequence", "geometric")
    for action in ("truncate", "mask", "off")
]


def noise(count: int, scale: float = 0.3) -> Tensor:
    return scale * torch.randn(count, generator=torch.Generator().manual_seed(3))


def mixed() -> list[Group]:
    """Four groups with signal, one with none, one with a failed rollout and one at the mean."""
    return [*groups(), group((1.0, 1.0), (5, 8), seed=8), group((0.0, NAN, 0.5, 1.0), (6, 3, 4, 2), seed=9)]


MIXED_TOKENS = 63 + 13 + 15


def sampled(update: Update) -> tuple[float, float]:
    """(tokens, mass) over all stages, added up here."""
    tokens, masses = stages(update, "tokens"), stages(update, "mass")
    assert set(tokens) | set(masses) <= set(LEDGER_STAGES)
    return sum(tokens.values()), sum(masses.values())


def check_identity(objective: dict[str, Any], optimizer: dict[str, Any]) -> Update:
    """Train once; reached mass is what autograd says, the stages add up to what was sampled. Returns the update."""
    config = settings(objective=objective, optimizer={"learning_rate": 3e-3, "tokens_per_micro": 50, **optimizer})
    made = policy(config)
    batch = on_policy(made, mixed(), noise(MIXED_TOKENS))
    gradients = logprob_gradients(made)
    update = made.update(batch)
    steps = config.optimizer.optimizer_steps
    by_autograd = sum(float(g.double().abs().sum()) for g in gradients) / steps
    assert update.metrics["ledger/reached_mass"] == pytest.approx(by_autograd, rel=1e-5)
    assert by_autograd > 0.01
    tokens, mass = sampled(update)
    assert tokens == pytest.approx(MIXED_TOKENS, abs=1e-9)
    assert update.metrics["ledger/sampled_tokens"] == tokens
    assert mass == pytest.approx(update.metrics["ledger/sampled_mass"], rel=1e-12)
    assert sum(stages(update, "share").values()) == pytest.approx(1.0, abs=1e-9)
    return update


@pytest.mark.parametrize("optimizer", [{}, {"minibatches": 2, "epochs_per_batch": 2}], ids=["one step", "four steps"])
@pytest.mark.parametrize("loss", LOSSES)
def test_reached_mass_is_the_gradient_that_autograd_finds_for_every_loss(loss: str, optimizer: dict[str, Any]) -> None:
    check_identity({"loss": loss, "clip_low": 0.05, "clip_high": 0.1, "clip_delta": 1.2}, optimizer)


@pytest.mark.parametrize("optimizer", [{}, {"minibatches": 2, "epochs_per_batch": 2}], ids=["one step", "four steps"])
@pytest.mark.parametrize("objective", IMPORTANCE, ids=lambda o: f"{o['importance_level']}-{o['importance_action']}")
@pytest.mark.parametrize("loss", ["dapo", "gspo"])
def test_reached_mass_is_the_gradient_that_autograd_finds_under_every_importance_correction(
    loss: str, objective: dict[str, Any], optimizer: dict[str, Any]
) -> None:
    check_identity({"loss": loss, **objective}, optimizer)


@pytest.mark.parametrize("loss", ["dapo", "gspo", "cispo"])
def test_reached_mass_is_the_gradient_with_an_entropy_quantile_and_a_veto(loss: str) -> None:
    update = check_identity({"loss": loss, "entropy_quantile": 0.4, "importance_veto": 0.55}, {"minibatches": 2})
    assert {"low_entropy", "importance_masked", "reached"} <= stages(update).keys()


def test_sampled_mass_is_the_advantage_times_the_share_summed_over_all_tokens() -> None:
    update = check_identity({"loss": "dapo"}, {})
    made = policy(settings())
    batch = on_policy(made, mixed())
    expected = float(batch.token_advantages().abs().sum()) / int(batch.loss_mask.sum())
    assert update.metrics["ledger/sampled_mass"] == pytest.approx(expected, rel=1e-6)
    assert int(batch.loss_mask.sum()) == MIXED_TOKENS - 3  # all but the failed rollout's


def test_the_kl_term_is_no_part_of_the_ledger() -> None:
    with_kl, without = (check_identity_free({"beta": beta}) for beta in (0.5, 0.0))
    assert stages(with_kl, "mass") == pytest.approx(stages(without, "mass"), rel=1e-6)


def check_identity_free(objective: dict[str, Any]) -> Update:
    made = policy(settings(objective=objective))
    return made.update(on_policy(made, mixed(), noise(MIXED_TOKENS)))


# ---- by hand


def test_a_pass_by_hand() -> None:
    """The example of `Pass`, then a token without weight, one clipped, one of low entropy."""
    ledger = Ledger(num_completions=4)
    ledger.add_pass(
        Pass(
            completion_of_token=torch.tensor([0, 1, 2, 3]),
            mass=torch.tensor([0.005, 0.01, 0.02, 0.04]),
            kept=torch.tensor([True, True, True, False]),
            weights=torch.tensor([0.8, 0.0, 0.5, 1.0]),
            masked=torch.tensor([False, True, False, False]),
            gain=torch.tensor([1.1, 1.0, 0.0, 1.0]),
            discarded=False,
        ),
        share=1.0,
    )
    metrics = ledger.metrics()
    expected = {
        "low_entropy": 0.04,
        "importance_masked": 0.01,
        "importance_shrunk": 0.001 + 0.01,
        "clipped": 0.01,
        "ratio_drift": -0.0004,
        "reached": 0.0044,
    }
    for stage in LEDGER_STAGES:
        assert metrics[f"ledger/{stage}_mass"] == pytest.approx(expected.get(stage, 0.0), abs=1e-8)
    assert metrics["ledger/sampled_mass"] == pytest.approx(0.075)
    assert metrics["ledger/sampled_tokens"] == 4
    assert ledger.fates() == ["reached", "importance_masked", "importance_shrunk", "low_entropy"]


def test_stages_that_hold_mass_only_have_no_token_column() -> None:
    metrics = Ledger(num_completions=1).metrics()
    assert "ledger/importance_shrunk_tokens" not in metrics
    assert "ledger/ratio_drift_tokens" not in metrics
    assert Ledger(num_completions=2).fates() == ["empty", "empty"]
