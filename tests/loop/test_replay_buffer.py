from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from leadline.config import Config
from leadline.engines.hf import HFEngine
from leadline.engines.scripted import ScriptedEngine, echo_script
from leadline.errors import NoSignalError
from leadline.loop.replay_buffer import ReplayBuffer, fresh
from leadline.models import load_model
from leadline.policy.policy import Policy
from leadline.train import Step
from leadline.types import Completion, FinishReason, Group, Prompt, Rollout
from tests.builders import same, settings, snapshot
from tests.loops import CountingPolicy, SlowLoading, completion, lengths, run, token_sum


def group(index: int, version: int) -> Group:
    drawn = Completion((7, 8), (-1.0, -2.0), (version, version + 1), FinishReason.EOS)
    return Group(Prompt(index, "", (1,)), [Rollout(drawn, "", reward=float(i)) for i in range(2)])


def indices(groups: Sequence[Group]) -> list[int]:
    return [group.prompt.index for group in groups]


# The buffer -----------------------------------------------------------------------------------------------------------


def test_a_group_is_given_once_marked_as_replayed_with_all_that_was_drawn() -> None:
    buffer = ReplayBuffer(3)
    buffer.keep([group(4, 0)], 1)
    (taken,) = buffer.take(2, 1)
    assert taken == replace(group(4, 0), replayed=True)
    assert buffer.take(2, 1) == []


def test_the_youngest_come_first_and_of_one_age_the_first_prompts() -> None:
    buffer = ReplayBuffer(9)
    buffer.keep([group(1, 0), group(5, 2), group(3, 2), group(4, 1)], 4)
    assert indices(buffer.take(3, 4)) == [3, 5, 4]
    assert indices(buffer.groups) == [1]


def test_a_group_is_kept_up_to_the_bound_of_its_oldest_token_and_no_longer() -> None:
    buffer = ReplayBuffer(3)
    buffer.keep([group(1, 2)], 3)
    assert indices(ReplayBuffer(3, buffer.groups).take(1, 5)) == [1]
    assert ReplayBuffer(3, buffer.groups).take(1, 6) == []
    buffer.keep([], 6)
    assert buffer.groups == ()


def test_a_replayed_group_is_not_kept_again() -> None:
    buffer = ReplayBuffer(9)
    buffer.keep([group(1, 0)], 1)
    buffer.keep(buffer.take(1, 1), 2)
    assert buffer.groups == ()


@pytest.mark.parametrize("count", [0, -1])
def test_nothing_is_given_where_nothing_lacks(count: int) -> None:
    buffer = ReplayBuffer(9, [group(1, 0)])
    assert buffer.take(count, 1) == []
    assert indices(buffer.groups) == [1]


def test_without_a_bound_nothing_is_kept() -> None:
    buffer = ReplayBuffer(0)
    buffer.keep([group(1, 0)], 1)
    assert buffer.groups == ()


def test_a_group_without_tokens_is_not_kept() -> None:
    buffer = ReplayBuffer(9)
    buffer.keep([Group(Prompt(0, "", (1,)), [])], 1)
    assert buffer.groups == ()


# In the loop ----------------------------------------------------------------------------------------------------------


def config(*, steps: int, **rollout: Any) -> Config:
    return settings(
        rollout={"group_size": 4, "groups_per_step": 3, **rollout}, run={"steps": steps}, objective={"loss": "dapo"}
    )


def barren_after(first: int, *but: int) -> Any:
    """A script in which the completions of all prompts from this one on are alike."""
    return lambda prompt, n: (
        [completion(1)] * n if prompt.index >= first and prompt.index not in but else lengths(prompt, n)
    )


def replayed(step: Step) -> list[int]:
    return indices([group for group in step.groups if group.replayed])


def test_groups_of_earlier_steps_stand_in_for_those_without_signal_each_once() -> None:
    steps = run(config(steps=4, replay_max_staleness=9), ScriptedEngine(barren_after(3, 4)))
    assert [replayed(step) for step in steps] == [[], [0, 1], [4, 2], []]
    assert [step.metrics["rollout/replayed_groups"] for step in steps] == [0, 2, 2, 0]
    second = steps[1]
    assert indices(second.groups) == [3, 4, 5, 0, 1]
    owners = second.batch.group_of_completion[second.batch.completion_of_token]
    assert set(owners[second.batch.loss_mask].tolist()) == {1, 3, 4}, "what is replaced is out of the loss"
    assert set(second.batch.staleness[owners >= 3].tolist()) == {1}
    assert set(second.batch.staleness[owners < 3].tolist()) == {0}


def test_no_group_is_twice_in_a_step_and_none_more_than_twice_in_a_run() -> None:
    steps = run(
        config(steps=12, replay_max_staleness=3, max_staleness=1), SlowLoading(barren_after(0, *range(0, 40, 3)))
    )
    assert sum(map(len, map(replayed, steps))) > 3
    for step in steps:
        assert len(set(indices(step.groups))) == len(step.groups)
    again = [index for step in steps for index in replayed(step)]
    assert len(again) == len(set(again))


@pytest.mark.parametrize(("max_staleness", "bound"), [(0, 1), (0, 3), (2, 4)])
def test_no_token_is_older_than_its_bound_and_both_bounds_are_reached(max_staleness: int, bound: int) -> None:
    made = config(steps=12, replay_max_staleness=bound, max_staleness=max_staleness)
    steps = run(made, SlowLoading(barren_after(9)), policy=CountingPolicy(0.002))
    for step in steps:
        of_token = step.batch.group_of_completion[step.batch.completion_of_token]
        again = torch.isin(of_token, torch.tensor(sorted(step.batch.replayed), dtype=torch.long))
        assert int(step.batch.staleness[~again].max()) <= max_staleness
        assert not again.any() or int(step.batch.staleness[again].max()) <= bound
    oldest = max(int(step.batch.staleness.max()) for step in steps)
    assert oldest == bound


def test_a_refill_comes_first_and_the_buffer_stands_in_for_the_rest() -> None:
    steps = run(config(steps=2, replay_max_staleness=9, refill=1), ScriptedEngine(barren_after(3, 6)))
    assert indices(steps[1].groups) == [3, 4, 5, 6, 0, 1]
    assert steps[1].metrics["rollout/refilled_groups"] == 1
    assert steps[1].metrics["rollout/replayed_groups"] == 2


def test_monitors_are_of_the_groups_that_were_sampled_for_the_step() -> None:
    metrics = run(config(steps=2, replay_max_staleness=9), ScriptedEngine(barren_after(3)))[1].metrics
    assert metrics["reward/mean"] == 1.0
    assert metrics["rollout/zero_signal_fraction"] == 1.0
    assert metrics["rollout/tokens"] == 12


def test_replays_do_not_keep_a_run_alive_in_which_nothing_can_be_learned() -> None:
    made = config(steps=9, replay_max_staleness=99, max_steps_without_signal=2)
    policy = CountingPolicy()
    with pytest.raises(NoSignalError):
        run(made, ScriptedEngine(barren_after(9)), policy=policy)
    assert policy.version == 4  # three steps with a signal, one on replays alone; the second of those is not trained


def test_fresh_groups_are_those_that_are_not_replayed() -> None:
    groups = [group(0, 0), replace(group(1, 0), replayed=True)]
    assert fresh(groups) == groups[:1]


# With a real policy ---------------------------------------------------------------------------------------------------


def sometimes(completion_ids: Sequence[int]) -> float:
    """A reward that half the groups lack."""
    return token_sum(completion_ids) if sum(completion_ids[:2]) % 4 == 0 else 0.0


def tiny(config: Config) -> tuple[Policy, HFEngine]:
    loaded = load_model(config.model, seed=0)
    engine = HFEngine(loaded.model, tokenizer=loaded.tokenizer, eos_ids=loaded.eos_ids, seed=0)
    return Policy(loaded, config), engine


def trained(**rollout: Any) -> tuple[list[Step], Policy]:
    made = config(steps=6, max_steps_without_signal=9, **rollout)
    policy, engine = tiny(made)
    return run(made, engine, policy=policy, reward=sometimes), policy


def test_the_same_seed_replays_the_same_groups_and_trains_the_same_weights() -> None:
    (one, first), (other, second) = trained(replay_max_staleness=3), trained(replay_max_staleness=3)
    assert [indices(step.groups) for step in one] == [indices(step.groups) for step in other]
    assert any(map(replayed, one))
    assert same(snapshot(first.model), snapshot(second.model))
    assert not same(snapshot(first.model), snapshot(trained()[1].model))


def test_replayed_tokens_are_weighted_by_the_policy_of_today_over_the_weights_that_drew_them() -> None:
    steps, _ = trained(replay_max_staleness=3)
    step = next(step for step in steps if replayed(step))
    box, age = step.update.blackbox, step.batch.staleness
    old = age[box["seen_tokens"]] > 0
    assert old.any()
    ratio = box["seen_old_logprobs"] - step.batch.rollout_logprobs[box["seen_tokens"]]
    assert torch.equal(box["seen_log_ratio"], ratio)
    assert float(ratio[old].abs().mean()) > 100 * float(ratio[~old].abs().mean()) > 0


def test_the_ledger_says_how_much_of_the_step_was_trained_before() -> None:
    steps, _ = trained(replay_max_staleness=3)
    step = next(step for step in steps if len(replayed(step)) in (1, 2))
    tokens = [len(r.completion.token_ids) for group in step.groups if group.replayed for r in group.rollouts]
    assert step.metrics["ledger/replayed_tokens"] == sum(tokens)
    assert step.metrics["ledger/sampled_tokens"] == step.metrics["rollout/tokens"] + sum(tokens)
    batch = step.batch
    mass = batch.token_advantages().abs().double() / int(batch.loss_mask.sum())
    again = torch.isin(batch.group_of_completion[batch.completion_of_token], torch.tensor(sorted(batch.replayed)))
    assert step.metrics["ledger/replayed_mass"] == pytest.approx(float(mass[again].sum()))
    assert step.metrics["ledger/sampled_mass"] == pytest.approx(float(mass.sum()))
    assert 0 < float(mass[again].sum()) < float(mass.sum())
    without, _ = trained()
    assert "ledger/replayed_mass" not in without[0].metrics


def test_a_step_that_was_discarded_leaves_no_group_to_replay() -> None:
    made = config(steps=2, replay_max_staleness=3)
    policy, _ = tiny(made)
    policy.model.lm_head.weight.register_hook(lambda grad: grad * torch.nan)  # type: ignore[union-attr, operator]
    steps = run(made, ScriptedEngine(echo_script(260, frozenset({3}), 8)), policy=policy, reward=token_sum)
    assert steps[0].update.discarded
    assert [step.place.replay for step in steps] == [(), ()]
