from pathlib import Path
from typing import Any

import pytest
import torch

from leadline.errors import ModelError, TrainingError
from leadline.models import load_model
from leadline.policy.policy import Policy
from tests.builders import (
    MODELS,
    all_logprobs,
    group,
    groups,
    moved_adapter,
    on_policy,
    plain_logprobs,
    policy,
    same,
    settings,
    snapshot,
)

# ---- the frozen copy


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_the_kl_starts_at_zero_and_grows(model: dict[str, Any]) -> None:
    made = policy(settings(model=model, objective={"beta": 0.1}, optimizer={"tokens_per_micro": 40}))
    rows = [made.update(on_policy(made, groups())).metrics for _ in range(3)]
    assert rows[0]["kl/k3"] == rows[0]["kl/k1"] == rows[0]["loss/kl"] == 0
    assert rows[1]["kl/k3"] > 1e-6
    assert rows[1]["loss/kl"] == pytest.approx(0.1 * rows[1]["kl/k3"], rel=1e-4)
    assert rows[2]["kl/k3"] > rows[1]["kl/k3"]


def test_the_reference_is_a_frozen_copy_that_stays() -> None:
    made = policy(settings(objective={"beta": 0.1}))
    assert made.reference is not None
    before = snapshot(made.reference)
    assert same(before, snapshot(made.model))
    for _ in range(2):
        made.update(on_policy(made, groups()))
    assert same(snapshot(made.reference), before)
    assert not same(snapshot(made.model), before)
    assert not any(p.requires_grad for p in made.reference.parameters())
    made.check_frozen()


def test_without_a_kl_term_there_is_no_reference_and_no_kl_metric() -> None:
    made = policy(settings())
    assert made.reference is None
    metrics = made.update(on_policy(made, groups())).metrics
    assert "kl/k3" not in metrics
    assert metrics["loss/kl"] == 0


def unfreeze(made: Policy) -> None:
    assert made.reference is not None
    next(made.reference.parameters()).requires_grad_(True)


def alias(made: Policy) -> None:
    made.reference = made.model


def share_one_storage(made: Policy) -> None:
    assert made.reference is not None
    next(made.reference.parameters()).data = next(made.model.parameters()).data


@pytest.mark.parametrize("fault", [unfreeze, alias, share_one_storage])
def test_a_reference_that_could_drift_is_found(fault: Any, tmp_path: Path) -> None:
    made = policy(settings(objective={"beta": 0.1}))
    fault(made)
    with pytest.raises(TrainingError, match="is trained too"):
        made.check_frozen()
    with pytest.raises(TrainingError, match="is trained too"):
        made.save(tmp_path)


def test_an_adapters_base_that_could_drift_is_found() -> None:
    config = settings(model={"lora_rank": 4}, objective={"beta": 0.1})
    loaded = load_model(config.model)
    loaded.model.base_model.model.lm_head.weight.requires_grad_(True)
    with pytest.raises(TrainingError, match=r"lm_head.* is trained too"):
        Policy(loaded, config)


def test_a_model_without_trainable_weights_is_refused() -> None:
    config = settings()
    loaded = load_model(config.model)
    loaded.model.requires_grad_(False)
    with pytest.raises(ModelError, match="none of its weights can be trained"):
        Policy(loaded, config)


def test_completions_without_signal_are_still_pulled_to_the_reference() -> None:
    made = policy(settings(objective={"beta": 1.0}))
    made.update(on_policy(made, groups()))  # away from the reference, or there would be nothing to pull
    barren = [group((1.0, 1.0), (8, 8), seed=1)]
    first = made.update(on_policy(made, barren)).metrics
    assert first["optimizer/grad_norm"] > 1e-3
    assert first["loss/policy"] == 0
    assert first["ledger/no_signal_tokens"] == first["ledger/sampled_tokens"] == 16
    assert first["ledger/sampled_mass"] == 0
    for _ in range(20):
        last = made.update(on_policy(made, barren)).metrics
    assert last["kl/k3"] < 0.5 * first["kl/k3"]


# ---- the base under an adapter


def test_an_adapter_moves_and_its_base_is_the_reference() -> None:
    fresh = policy(settings())
    made, batch = moved_adapter()
    assert made.reference is None
    assert all((".lora_" in name) == p.requires_grad for name, p in made.model.named_parameters())
    everyone = range(batch.num_completions)
    with torch.no_grad():
        reference_logprobs = made.logprobs(batch, everyone, reference=True).logprobs
    assert torch.allclose(reference_logprobs, all_logprobs(fresh, batch), rtol=0, atol=1e-6)
    assert float((all_logprobs(made, batch) - reference_logprobs).abs().max()) > 0.01
    made.check_frozen()  # looking at the base did not unfreeze it


def test_merged_weights_have_the_logits_of_the_adapter() -> None:
    made, batch = moved_adapter()
    plain = load_model(settings().model).model
    plain.load_state_dict(dict(made.weights()))
    expected = torch.cat([plain_logprobs(plain, batch, c) for c in range(batch.num_completions)])
    assert torch.allclose(all_logprobs(made, batch), expected, rtol=0, atol=1e-5)
