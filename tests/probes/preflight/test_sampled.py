import asyncio
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from leadline.errors import EngineError, TrainingError
from leadline.policy.batch import build_batch
from leadline.probes.preflight import sampled
from leadline.probes.preflight.parts import Parts, Undecided
from leadline.types import Completion, Group
from tests.builders import same, snapshot
from tests.probes.preflight.flights import engine, parts


def drawn(made: Parts) -> list[Group]:
    async def draw() -> list[Group]:
        own = engine(made)
        try:
            return await sampled.draw(made, own)
        finally:
            await own.close()

    return asyncio.run(draw())


def changed(groups: list[Group], change: Callable[[Completion], Completion]) -> list[Group]:
    return [
        replace(group, rollouts=[replace(rollout, completion=change(rollout.completion)) for rollout in group.rollouts])
        for group in groups
    ]


def with_logprobs(groups: list[Group], say: Callable[[float], float]) -> list[Group]:
    return changed(groups, lambda c: replace(c, logprobs=tuple(map(say, c.logprobs))))


def test_what_an_engine_draws_after_a_push_is_of_the_version_pushed(tmp_path: Path) -> None:
    made = parts(tmp_path)
    assert sampled.weights(made, drawn(made)).startswith("the engine took the weights of version 0: all ")


def test_tokens_of_another_version_are_wrong(tmp_path: Path) -> None:
    made = parts(tmp_path)
    old = changed(drawn(made), lambda c: replace(c, policy_versions=(7,) * len(c.token_ids)))
    with pytest.raises(EngineError, match="after version 0 was pushed it draws tokens of version 7"):
        sampled.weights(made, old)


@pytest.mark.parametrize("sections", [{}, {"engine": {"dtype": "bfloat16"}}, {"sampling": {"temperature": 0.7}}])
def test_an_engine_that_rounds_is_fine(sections: dict[str, Any], tmp_path: Path) -> None:
    made = parts(tmp_path, **sections)
    assert "is allowed" in sampled.parity(made, drawn(made))


def test_an_engine_that_reports_logprobs_before_temperature_is_named(tmp_path: Path) -> None:
    plain = parts(tmp_path, sampling={"max_tokens": 24})
    groups = drawn(plain)  # at temperature 1; the policy is asked for 0.5
    asked = parts(tmp_path, sampling={"max_tokens": 24, "temperature": 0.5})
    with pytest.raises(
        EngineError, match=r"its logprobs are .* nats a token from the policy's.*\((raw_logprobs|temperature):"
    ):
        sampled.parity(asked, groups)


def test_a_gap_of_no_known_cause_is_wrong_too(tmp_path: Path) -> None:
    made = parts(tmp_path)
    with pytest.raises(EngineError, match="nats a token from the policy's"):
        sampled.parity(made, with_logprobs(drawn(made), lambda logprob: logprob + 0.1))


def test_an_engine_that_scores_nothing_is_not_judged(tmp_path: Path) -> None:
    made = parts(tmp_path)
    with pytest.raises(Undecided):
        sampled.parity(made, with_logprobs(drawn(made), lambda logprob: math.nan))


OBJECTIVES: list[dict[str, Any]] = [{}, {"beta": 0.1, "loss": "gspo"}, {"entropy_quantile": 0.5}]


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("model", [{}, {"dtype": "bfloat16"}, {"lora_rank": 4}])
def test_a_dry_step_reaches_the_gradient_and_changes_nothing(
    model: dict[str, Any], objective: dict[str, Any], tmp_path: Path
) -> None:
    made = parts(tmp_path, model=model, objective=objective, optimizer={"minibatches": 2})
    policy, groups = made.policy, drawn(made)
    before, optimizer, generator = snapshot(policy.model), repr(policy.optimizer.state_dict()), torch.get_rng_state()
    assert "of the signal reaches a gradient of norm" in sampled.dry_step(made, groups)
    assert same(before, snapshot(policy.model))
    assert repr(policy.optimizer.state_dict()) == optimizer
    assert torch.equal(torch.get_rng_state(), generator)
    assert policy.version == policy.discarded_in_a_row == 0 and not policy.model.training
    assert all(p.grad is None for p in policy.model.parameters())
    assert policy.stopwatch.metrics() == {}


def test_a_dry_step_measures_what_the_step_would(tmp_path: Path) -> None:
    made = parts(tmp_path, objective={"beta": 0.1})
    batch = build_batch(drawn(made), made.config, 0)
    rehearsed, taken = made.policy.rehearse(batch), made.policy.update(batch)
    of_the_move = ("time/", "memory/", "throughput/", "optimizer/update_norm", "optimizer/learning_rate")
    measured = {name: value for name, value in taken.metrics.items() if not name.startswith(of_the_move)}
    assert {"loss", "optimizer/grad_norm", "ledger/reached_share"} <= measured.keys()
    assert {name: rehearsed.metrics[name] for name in measured} == measured


def test_a_step_of_which_nothing_reaches_the_gradient_is_wrong_and_the_stage_is_named(tmp_path: Path) -> None:
    made = parts(tmp_path, objective={"importance_action": "token_mask", "importance_low": 0.5})
    with pytest.raises(TrainingError, match=r"nothing reaches the gradient .*: importance_masked 100%"):
        sampled.dry_step(made, with_logprobs(drawn(made), lambda logprob: logprob + 9))


def test_a_gradient_that_is_not_finite_is_wrong(tmp_path: Path) -> None:
    made = parts(tmp_path)
    groups = drawn(made)
    made.policy.model.lm_head.weight.register_hook(lambda gradient: gradient * math.nan)  # type: ignore[union-attr]
    with pytest.raises(TrainingError, match="the gradient of a first step has the norm nan"):
        sampled.dry_step(made, groups)


def test_completions_that_are_alike_decide_nothing(tmp_path: Path) -> None:
    made = parts(tmp_path)
    alike = [replace(group, rollouts=[group.rollouts[0]] * 2) for group in drawn(made)]
    with pytest.raises(Undecided):
        sampled.dry_step(made, alike)
