import asyncio
import math
from collections.abc import Sequence

import pytest

from leadline.engines.scripted import ScriptedEngine
from leadline.errors import RewardError
from leadline.rollouts import check_failures, has_signal, rollout_metrics
from leadline.types import Completion, FinishReason, Group, Prompt, Rollout
from tests.builders import settings
from tests.loops import TOKENIZER, completion, lengths, roller

NAN = math.nan
PROMPT = Prompt(4, "say it", (5, 6, 7), {"answer": "b"})


def group(*rewards: float, **more: object) -> Group:
    return Group(PROMPT, [Rollout(completion(), "", {}, reward) for reward in rewards], **more)  # type: ignore[arg-type]


def failed(error: str) -> Rollout:
    return Rollout(completion(), "", {"other": 1.0}, error=error)


# From a prompt to its group -------------------------------------------------------------------------------------------


def test_a_group_holds_what_the_engine_drew_and_what_the_reward_said_of_the_text() -> None:
    ids = TOKENIZER("ab", add_special_tokens=False)["input_ids"]
    drawn = [
        Completion((ids[1], 3), (-0.5, -0.25), (0, 0), FinishReason.EOS),
        Completion((ids[0],), (-1.5,), (0,), FinishReason.LENGTH),
    ]

    def correct(completion: str, answer: str) -> float:
        return float(completion == answer)

    config = settings(rollout={"group_size": 2})
    made = asyncio.run(roller(config, ScriptedEngine({4: drawn}), correct).train_group(PROMPT))
    assert made.prompt is PROMPT
    assert [r.completion.token_ids for r in made.rollouts] == [(ids[1], 3), (ids[0],)]
    assert [r.text for r in made.rollouts] == ["b", "a"]  # the terminator is not part of the text
    assert [r.reward for r in made.rollouts] == [1.0, 0.0]
    assert made.timings.keys() == {"generate", "reward"}


def test_the_soft_overlong_penalty_is_part_of_the_training_reward_and_logged_as_a_component() -> None:
    config = settings(
        sampling={"max_tokens": 4},
        rollout={"group_size": 4},
        objective={"overlong_buffer": 2, "overlong_penalty": 0.5},
    )
    part = roller(config, ScriptedEngine(lengths))
    trained = asyncio.run(part.train_group(PROMPT))
    assert [r.reward for r in trained.rollouts] == [1.0, 2.0, 3.0 - 0.25, 4.0 - 0.5]
    assert [r.rewards["overlong"] for r in trained.rollouts] == [0.0, 0.0, -0.25, -0.5]
    assert rollout_metrics([trained])["reward/overlong/mean"] == pytest.approx(-0.75 / 4)
    evaluated = asyncio.run(part.group(PROMPT, 4, config.sampling))
    assert [r.reward for r in evaluated.rollouts] == [1.0, 2.0, 3.0, 4.0]


def test_a_failed_rollout_stays_failed_under_the_overlong_penalty() -> None:
    def broken(completion_ids: Sequence[int]) -> float:
        raise ValueError("no")

    config = settings(sampling={"max_tokens": 4}, rollout={"group_size": 4}, objective={"overlong_buffer": 2})
    made = asyncio.run(roller(config, ScriptedEngine(lengths), broken).train_group(PROMPT))
    assert all(math.isnan(r.reward) and r.error for r in made.rollouts)


# Signal and failures --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ((0.0, 1.0), True),
        ((1.0, 1.0, 1.0), False),
        ((NAN, 1.0), False),  # one reward alone has nothing to be compared with
        ((NAN, 1.0, 0.0), True),
        ((NAN, NAN), False),
        ((1.0, 1.0 + 1e-12), False),  # equal in the precision of advantages, where their difference is exactly 0
    ],
)
def test_a_group_has_a_signal_if_two_rewards_differ(rewards: tuple[float, ...], expected: bool) -> None:
    assert has_signal(group(*rewards)) is expected


def test_as_many_failures_as_allowed_pass_and_one_more_stops_the_run_quoting_the_first() -> None:
    half = Group(PROMPT, [failed("judge: timeout"), failed("judge: 503"), *group(1.0, 0.0).rollouts])
    check_failures([half], limit=0.5)
    with pytest.raises(RewardError, match=r"max_failed_fraction is 0.49, but 2 of 4 .* the first: judge: timeout\."):
        check_failures([half], limit=0.49)


# Metrics --------------------------------------------------------------------------------------------------------------


def test_rewards_are_counted_over_rollouts_that_have_one_and_spread_within_groups() -> None:
    groups = [group(0.0, 1.0, NAN), Group(PROMPT, [*group(3.0, 3.0).rollouts, failed("judge: 503")])]
    metrics = rollout_metrics(groups)
    assert metrics["reward/mean"] == pytest.approx(7 / 4)
    assert metrics["reward/std"] == pytest.approx(math.sqrt(27 / 16))
    assert metrics["reward/group_std"] == pytest.approx((0.5 + 0.0) / 2)
    assert (metrics["reward/min"], metrics["reward/max"]) == (0.0, 3.0)
    assert metrics["rollout/failed_fraction"] == pytest.approx(1 / 6)
    assert metrics["rollout/unrewarded_fraction"] == pytest.approx(1 / 6)
    assert metrics["rollout/zero_signal_fraction"] == 0.5


def test_a_component_is_averaged_over_the_rollouts_for_which_it_had_a_reward() -> None:
    parts = [{"right": 1.0, "short": 0.5}, {"right": 0.0, "short": None}, {"right": None, "short": 0.1}]
    metrics = rollout_metrics([Group(PROMPT, [Rollout(completion(), "", rewards, 1.0) for rewards in parts])])
    assert metrics["reward/right/mean"] == 0.5
    assert metrics["reward/short/mean"] == pytest.approx(0.3)
    assert metrics["reward/short/none_fraction"] == pytest.approx(1 / 3)


def test_lengths_reasons_and_entropy_are_of_all_completions() -> None:
    drawn = [
        completion(2, -1.0),
        completion(6, -0.5, FinishReason.LENGTH),
        completion(0, reason=FinishReason.ABORT),
        Completion((7, 7), (-2.0, NAN), (0, 0), FinishReason.STOP),
    ]
    metrics = rollout_metrics([Group(PROMPT, [Rollout(c, "", {}, 0.0) for c in drawn]), group(0.0)])
    assert metrics["rollout/tokens"] == 12
    assert metrics["rollout/prompt_tokens"] == 6  # the prompt once per group
    assert metrics["rollout/length_mean"] == pytest.approx(12 / 5)
    assert (metrics["rollout/length_min"], metrics["rollout/length_max"]) == (0, 6)
    assert metrics["rollout/truncated_fraction"] == 0.2
    assert metrics["rollout/entropy"] == pytest.approx((2 * 1.0 + 6 * 0.5 + 2.0 + 2 * 1.0) / 11)
    reasons = {reason: metrics[f"rollout/finish_{reason}_fraction"] for reason in FinishReason}
    assert reasons == {"eos": 0.4, "stop": 0.2, "length": 0.2, "abort": 0.2}


def test_a_mean_over_nothing_is_nan_and_not_zero() -> None:
    metrics = rollout_metrics([group(NAN, NAN)])
    assert all(math.isnan(metrics[f"reward/{name}"]) for name in ("mean", "std", "group_std", "max", "min"))
    empty = rollout_metrics([Group(PROMPT, [Rollout(completion(0, reason=FinishReason.ABORT), "", error="aborted")])])
    assert math.isnan(empty["rollout/entropy"]) and empty["rollout/tokens"] == 0
