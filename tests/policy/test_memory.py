"""The forecast, the budget that fits, and what happens when memory runs out all the same."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from leadline.errors import ConfigError, TrainingError
from leadline.policy.memory import Budget, Shape, fitting_budget, forecast, plan_memory
from leadline.policy.policy import Policy
from leadline.settings.optimizer import Optimizer
from tests.builders import groups, on_policy, policy, same, settings, snapshot
from tests.memory_peak import CASES, measure

ERROR = 0.15
"""A forecast is this near the most that an update holds, one way or the other."""


@pytest.mark.parametrize("case", CASES)
def test_the_forecast_of_an_update_is_near_the_most_that_its_tensors_hold(case: str) -> None:
    expected, measured = measure(CASES[case])
    assert expected == pytest.approx(measured, rel=ERROR)


def test_the_parts_are_those_that_the_settings_ask_for() -> None:
    shape = Shape(prompt=10, completion=16, group=4)
    plain = forecast(policy(settings()), shape, 1000)
    count = sum(p.numel() for p in policy(settings()).model.parameters())
    assert plain.always == {
        "weights": 4 * count,
        "reference": 0,
        "masters": 0,
        "moments": 8 * count,
        "engine copy": 0,
    }
    rich = forecast(
        policy(
            settings(
                model={"dtype": "bfloat16"},
                objective={"beta": 0.1},
                rollout={"max_staleness": 1},
            )
        ),
        shape,
        1000,
    )
    assert rich.always == {
        "weights": 2 * count,
        "reference": 2 * count,
        "masters": 4 * count,
        "moments": 8 * count,
        "engine copy": 2 * count,
    }
    assert rich.overlapping and not plain.overlapping
    assert plain.total < sum((*plain.always.values(), *plain.updating.values(), *plain.sampling.values()))


def test_activations_grow_with_the_budget_up_to_the_tokens_of_a_step() -> None:
    made, shape = policy(settings(rollout={"groups_per_step": 2})), Shape(prompt=10, completion=16, group=4)
    sizes = [forecast(made, shape, tokens).updating["activations"] for tokens in (40, 80, 148, 10_000)]
    assert sizes[1] == pytest.approx(2 * sizes[0], rel=0.05)
    assert sizes[1] < sizes[2] == sizes[3]


def test_an_automatic_budget_takes_what_is_free_and_no_more_than_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    made, shape = policy(settings(optimizer={"tokens_per_micro": "auto"})), Shape(prompt=10, completion=16, group=4)
    whole = shape.tokens * made.config.rollout.groups_per_step
    assert fitting_budget(made, shape) == whole
    needed = forecast(made, shape, 100)
    monkeypatch.setattr("leadline.policy.memory.free_bytes", lambda device: int(needed.total / 0.9))
    tight = fitting_budget(made, shape)
    assert 26 <= tight < whole
    assert forecast(made, shape, tight).total <= needed.total + needed.always["weights"]
    monkeypatch.setattr("leadline.policy.memory.free_bytes", lambda device: 0)
    assert fitting_budget(made, shape) == 26  # one completion behind its prompt: less cannot be forwarded


def test_a_plan_sets_an_automatic_budget_and_says_so() -> None:
    prompts = [g.prompt for g in groups()]
    made = policy(settings(optimizer={"tokens_per_micro": "auto"}))
    text = plan_memory(made, prompts).text()
    assert f"optimizer.tokens_per_micro = {made.budget.tokens}" in text
    assert "memory forecast: at most" in text and "free" in text
    fixed = policy(settings(optimizer={"tokens_per_micro": 50}))
    plan_memory(fixed, prompts)
    assert fixed.budget.tokens == 50


# When memory runs out -------------------------------------------------------------------------------------------------

OUT_OF_MEMORY = (
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
    RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried ..."),
)


def run_out(made: Policy, errors: Sequence[Exception], *, after: int) -> list[int]:
    """From now on the forward passes from the `after`-th on raise these errors, one each. The sizes of all passes."""
    forward, left, sizes = made.logprobs, list(errors), []

    def logprobs(batch: Any, completions: Sequence[int], **options: Any) -> Any:
        sizes.append(len(completions))
        if left and len(sizes) > after:
            raise left.pop(0)
        return forward(batch, completions, **options)

    made.logprobs = logprobs  # type: ignore[method-assign]
    return sizes


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=["device", "cpu"])
@pytest.mark.parametrize("epochs", [1, 2])
def test_running_out_of_memory_halves_the_budget_and_loses_nothing(error: Exception, epochs: int) -> None:
    optimizer = {"epochs_per_batch": epochs}
    expected = policy(settings(optimizer={"tokens_per_micro": 16, **optimizer}))
    made = policy(settings(optimizer={"tokens_per_micro": "auto", **optimizer}))
    batch = on_policy(expected, groups())
    made.budget.tokens = 64
    sizes = run_out(made, [error, error], after=1)  # the first micro-batch has left its gradients already
    plain, rescued = expected.update(batch), made.update(batch)
    assert made.budget.tokens == 16
    assert len(sizes) > 3
    assert same(snapshot(made.model), snapshot(expected.model))
    for name in ("optimizer/grad_norm", "policy/tokens"):
        assert rescued.metrics[name] == plain.metrics[name]


def test_a_budget_that_is_set_is_kept_and_the_error_names_it() -> None:
    made = policy(settings(optimizer={"tokens_per_micro": 64}))
    batch, before = on_policy(made, groups()), snapshot(made.model)
    run_out(made, OUT_OF_MEMORY, after=1)
    with pytest.raises(TrainingError, match=r"optimizer\.tokens_per_micro is 64, but .* ran out .* set it to 'auto'"):
        made.update(batch)
    assert all(p.grad is None for p in made.model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in snapshot(made.model).items())


def test_a_budget_that_cannot_be_halved_any_more_is_an_error() -> None:
    budget = Budget(Optimizer(tokens_per_micro="auto"))
    undone = []

    def work() -> None:
        raise OUT_OF_MEMORY[0]

    with pytest.raises(TrainingError, match=r"optimizer\.tokens_per_micro is 16"):
        budget.spend(work, undo=lambda: undone.append(budget.tokens))
    assert undone == [4096, 2048, 1024, 512, 256, 128, 64, 32, 16]


def test_another_error_is_not_taken_for_a_lack_of_memory() -> None:
    def work() -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="shapes"):
        Budget(Optimizer(tokens_per_micro="auto")).spend(work, undo=lambda: None)


def test_a_budget_is_a_number_or_auto() -> None:
    with pytest.raises(ConfigError, match="tokens_per_micro"):
        settings(optimizer={"tokens_per_micro": "all"})
