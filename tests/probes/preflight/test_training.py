from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from leadline.errors import ConfigError, TrainingError
from leadline.probes.preflight import training
from tests.probes.preflight.flights import parts


@pytest.mark.parametrize(
    ("model", "what"), [({}, "a frozen copy that shares no weight"), ({"lora_rank": 4}, "the base under the adapter")]
)
def test_a_frozen_reference_that_is_the_policy_is_fine(model: dict[str, Any], what: str, tmp_path: Path) -> None:
    made = parts(tmp_path, model=model, objective={"beta": 0.1})
    assert training.reference(made) == f"{what}; on 16 tokens it differs from the policy by 0 nats"
    assert training.reference(parts(tmp_path)) == "none: objective.beta is 0"


def test_a_reference_that_is_another_model_is_wrong(tmp_path: Path) -> None:
    made = parts(tmp_path, objective={"beta": 0.1})
    made.policy.reference.lm_head.weight.data[::2] += 1.0  # type: ignore[union-attr, operator, index]
    with pytest.raises(TrainingError, match=r"the reference is .* nats a token away"):
        training.reference(made)


def test_a_reference_that_is_trained_too_is_wrong(tmp_path: Path) -> None:
    made = parts(tmp_path, objective={"beta": 0.1})
    made.policy.reference = made.policy.model
    with pytest.raises(TrainingError, match="is trained too"):
        training.reference(made)


def test_an_optimizer_that_moves_what_is_trainable_is_fine(tmp_path: Path) -> None:
    assert training.optimizer(parts(tmp_path)).endswith("(107,328 weights) that are trainable; none is frozen")
    assert "107,328 are frozen" in training.optimizer(parts(tmp_path, model={"lora_rank": 4}))
    training.optimizer(parts(tmp_path, model={"dtype": "bfloat16"}))


def test_an_optimizer_that_leaves_out_or_holds_on_to_a_weight_is_wrong(tmp_path: Path) -> None:
    made = parts(tmp_path)
    head: Any = made.policy.model.lm_head
    kept, head.weight = head.weight, torch.nn.Parameter(head.weight.detach().clone())
    with pytest.raises(TrainingError, match=r"lm_head.weight is not among them"):
        training.optimizer(made)
    head.weight = kept.requires_grad_(False)
    with pytest.raises(TrainingError, match="The optimizer moves 21 tensors, but 20 of the model are trainable"):
        training.optimizer(made)


def test_a_batch_that_does_not_fit_is_wrong(tmp_path: Path) -> None:
    made = parts(tmp_path)
    assert training.memory(made).startswith("at most ")
    with pytest.raises(ConfigError, match=r"optimizer.tokens_per_micro is .*It would run out of memory"):
        training.memory(replace(made, forecast=replace(made.forecast, free=0)))
