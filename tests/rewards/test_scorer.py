import asyncio
import math
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from leadline.errors import ConfigError, DataError, RewardError
from leadline.rewards.component import Component, component
from leadline.rewards.scorer import Scorer, build_scorer
from leadline.settings.reward import Decoding, Reward
from leadline.types import Completion, FinishReason, Prompt, Rollout

PROMPT = Prompt(3, "2 + 3?", (1, 2), {"answer": "5", "level": 2})
TEXTS = ["5", "6", "7"]
COMPLETIONS = [Completion((n,), (-0.5,), (0,), FinishReason.EOS) for n in range(3)]


def score(*parts: Component, texts: Sequence[str] = TEXTS, reasons: Sequence[FinishReason] = ()) -> list[Rollout]:
    completions = [
        Completion((n, 9), (-0.5, -0.5), (0, 0), reasons[n] if reasons else FinishReason.EOS) for n in range(len(texts))
    ]
    return asyncio.run(Scorer(parts).score(PROMPT, completions, texts))


def values(*parts: Component, **kwargs: Any) -> list[float]:
    return [r.reward for r in score(*parts, **kwargs)]


def correct(completion: str, answer: str) -> float:
    return float(completion == answer)


# --- what a function is given -------------------------------------------------------------------------------------


def test_a_plain_function_is_called_for_each_completion_with_the_columns_that_it_names() -> None:
    assert values(component(correct)) == [1.0, 0.0, 0.0]


def test_a_batched_function_gets_lists_and_is_called_once() -> None:
    calls: list[dict[str, Any]] = []

    def batch(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        calls.append({"prompts": prompts, "completions": completions, **columns})
        return [float(c == a) for c, a in zip(completions, columns["answer"], strict=True)]

    assert values(component(batch)) == [1.0, 0.0, 0.0]
    assert calls == [
        {
            "prompts": ["2 + 3?"] * 3,
            "completions": TEXTS,
            "answer": ["5"] * 3,
            "level": [2] * 3,
            "completion_ids": [[0, 9], [1, 9], [2, 9]],
            "finish_reason": ["eos"] * 3,
        }
    ]


def test_a_function_with_kwargs_gets_every_column_and_one_without_only_what_it_names() -> None:
    seen: list[Any] = []

    def everything(completion: str, **columns: Any) -> float:
        seen.append(columns)
        return 0.0

    def some(level: int, finish_reason: str, completion_ids: list[int], unknown: int = 4) -> float:
        seen.append((level, finish_reason, completion_ids, unknown))
        return 0.0

    score(component(everything), texts=["5"])
    score(component(some), texts=["5"], reasons=[FinishReason.LENGTH])
    rest = {"prompt": "2 + 3?", "completion_ids": [0, 9], "finish_reason": "eos", "answer": "5", "level": 2}
    assert seen == [rest, (2, "length", [0, 9], 4)]


def test_batched_may_be_set_against_the_parameter_names() -> None:
    def lists(completion: list[str]) -> list[float]:
        return [float(len(completion))] * len(completion)

    assert values(component(lists, batched=True)) == [3.0, 3.0, 3.0]
    assert values(component(lambda completions: float(completions), batched=False)) == [5.0, 6.0, 7.0]


def test_params_are_bound_and_win_over_a_column() -> None:
    assert values(component(correct, params={"answer": "6"})) == [0.0, 1.0, 0.0]

    def all_columns(completion: str, answer: str, **columns: Any) -> float:
        return float(answer)

    assert values(component(all_columns, params={"answer": "8"})) == [8.0] * 3


def test_params_that_the_function_lacks_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"rewards.params of 'correct' is \{'case': 1\}, but .*'case'"):
        component(correct, params={"case": 1})


def test_positional_only_parameters_are_an_error() -> None:
    with pytest.raises(ConfigError, match="positional-only"):
        component(lambda completion, /: 1.0, label="f")


class Judge:
    def __call__(self, completion: str) -> float:
        return float(completion)


class AsyncJudge:
    async def __call__(self, completion: str) -> float:
        await asyncio.sleep(0)
        return float(completion)


def test_partials_and_callable_objects_score_under_their_own_names() -> None:
    parts = [component(partial(correct, answer="7")), component(Judge())]
    rollouts = score(*parts)
    assert rollouts[2].rewards == {"correct": 1.0, "Judge": 7.0}
    assert rollouts[2].reward == 8.0


async def async_correct(completion: str, answer: str) -> float:
    await asyncio.sleep(0)
    return float(completion == answer)


async def async_batch(completions: list[str]) -> list[float]:
    await asyncio.sleep(0)
    return [float(c) for c in completions]


def test_async_functions_single_batched_partial_and_objects_run_in_the_event_loop() -> None:
    main = threading.get_ident()
    threads: list[int] = []

    async def where(completion: str) -> None:
        threads.append(threading.get_ident())

    score(component(where))
    assert set(threads) == {main}
    assert values(component(async_correct)) == [1.0, 0.0, 0.0]
    assert values(component(async_batch)) == [5.0, 6.0, 7.0]
    assert values(component(partial(async_correct, answer="6"))) == [0.0, 1.0, 0.0]
    assert component(AsyncJudge()).is_async
    assert values(component(AsyncJudge())) == [5.0, 6.0, 7.0]


def test_a_plain_function_that_returns_an_awaitable_is_awaited() -> None:
    assert values(component(lambda completion: async_correct(completion, "7"), label="f")) == [0.0, 0.0, 1.0]


# --- the weighted sum ---------------------------------------------------------------------------------------------


def constant(value: Any, label: str, weight: float = 1.0) -> Component:
    return component(lambda completion: value, label=label, weight=weight)


def test_weights_are_applied_to_the_reward_and_not_to_its_components() -> None:
    rollouts = score(constant(1, "one", 0.7), constant(0, "zero", 0.3))
    assert [r.reward for r in rollouts] == [0.7] * 3
    assert rollouts[0].rewards == {"one": 1.0, "zero": 0.0}


def test_a_component_without_a_reward_leaves_the_sum() -> None:
    rollouts = score(constant(1, "one", 0.7), constant(None, "none", 0.3))
    assert [r.reward for r in rollouts] == [0.7] * 3
    assert rollouts[0].rewards == {"one": 1.0, "none": None}
    assert rollouts[0].error is None


def test_none_may_depend_on_the_completion() -> None:
    maybe = component(lambda completion: None if completion == "6" else 1.0, label="maybe")
    assert [str(v) for v in values(maybe)] == ["1.0", "nan", "1.0"]


def test_a_rollout_without_any_reward_is_nan_and_not_failed() -> None:
    for rollout in score(constant(None, "a"), constant(None, "b")):
        assert math.isnan(rollout.reward)
        assert rollout.error is None


def test_a_component_of_weight_zero_is_logged_but_makes_no_reward() -> None:
    (rollout,) = score(constant(None, "a"), constant(0.5, "logged", 0.0), texts=["5"])
    assert rollout.rewards == {"a": None, "logged": 0.5}
    assert math.isnan(rollout.reward)


# --- failures -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_fails_its_rollout_alone(bad: float) -> None:
    part = component(lambda completion: bad if completion == "6" else 1.0, label="f")
    first, second, third = score(part)
    assert (first.reward, third.reward, first.error, third.error) == (1.0, 1.0, None, None)
    assert math.isnan(second.reward)
    assert second.error == f"f: returned {bad}"


def test_an_exception_fails_its_rollout_alone_and_names_its_type() -> None:
    first, second, third = score(component(lambda completion: 1 / (int(completion) - 6), label="f"))
    assert (first.error, third.error) == (None, None)
    assert second.error == "f: ZeroDivisionError: division by zero"
    assert math.isnan(second.reward)


def test_an_exception_in_a_batched_function_fails_all_its_rollouts() -> None:
    def batch(completions: list[str]) -> list[float]:
        raise KeyError("answer")

    assert [r.error for r in score(component(batch))] == ["batch: KeyError: 'answer'"] * 3


def test_a_component_that_fails_fails_the_rollout_whatever_the_others_say() -> None:
    (rollout,) = score(constant(1, "one"), component(lambda completion: 1 / 0, label="f"), texts=["5"])
    assert math.isnan(rollout.reward)
    assert rollout.error == "f: ZeroDivisionError: division by zero"
    assert rollout.rewards == {"one": 1.0}


def leave(completion: str) -> float:
    raise SystemExit(3)


def stop(completion: str) -> float:
    raise StopIteration


async def async_fail(completion: str) -> float:
    raise TimeoutError("the sandbox")


@pytest.mark.parametrize(
    ("function", "error"),
    [
        (leave, "leave: RuntimeError: SystemExit: 3"),
        (stop, "stop: "),
        (async_fail, "async_fail: TimeoutError: the sandbox"),
    ],
)
def test_no_exception_of_a_reward_ends_the_run(function: Callable[..., Any], error: str) -> None:
    (rollout,) = score(component(function), texts=["5"])
    assert rollout.error is not None
    assert rollout.error.startswith(error)


def test_a_plain_function_that_hangs_times_out_and_does_not_hold_up_the_run() -> None:
    release = threading.Event()
    part = component(lambda completion: release.wait() if completion == "6" else 1.0, label="f", timeout_s=0.2)
    started = time.perf_counter()
    first, second, third = score(part)
    assert time.perf_counter() - started < 2
    assert second.error == "f: timeout, no result within 0.2 s"
    assert (first.reward, third.reward) == (1.0, 1.0)
    release.set()


def test_an_async_function_that_hangs_times_out() -> None:
    async def hang(completions: list[str]) -> list[float]:
        await asyncio.sleep(60)
        return [1.0] * 3

    assert [r.error for r in score(component(hang, timeout_s=0.05))] == ["hang: timeout, no result within 0.05 s"] * 3


def test_hanging_calls_do_not_starve_later_ones() -> None:
    release = threading.Event()
    scorer = Scorer([component(lambda completion: release.wait() if completion == "?" else 1.0, timeout_s=0.1)])
    many = [COMPLETIONS[0]] * 40  # more than there are threads at once

    async def run() -> tuple[list[Rollout], list[Rollout]]:
        return await scorer.score(PROMPT, many, ["?"] * 40), await scorer.score(PROMPT, many, ["5"] * 40)

    hung, fine = asyncio.run(run())
    release.set()
    assert {r.error for r in hung} == {"<lambda>: timeout, no result within 0.1 s"}
    assert [r.reward for r in fine] == [1.0] * 40


def test_the_rewards_of_a_group_run_concurrently() -> None:
    meeting = threading.Barrier(6, timeout=5)  # breaks unless three completions times two rewards meet

    def meet(completion: str) -> float:
        meeting.wait()
        return 1.0

    rollouts = score(component(meet, label="a"), component(meet, label="b"))
    assert [r.error for r in rollouts] == [None] * 3


@pytest.mark.parametrize("returned", ["good", {"reward": 1}, [1.0, 0.0, 1.0]])
def test_a_function_that_returns_no_number_stops_the_run(returned: Any) -> None:
    with pytest.raises(RewardError, match=r"The reward 'f' returned .*, but it scores one completion"):
        score(constant(returned, "f"))


def test_a_batched_function_that_returns_the_wrong_count_stops_the_run() -> None:
    with pytest.raises(RewardError, match=r"The reward 'f' returned list of 2 numbers, but it scores 3 completions"):
        score(component(lambda completions: [1.0, 0.0], label="f"))


def test_an_aborted_completion_is_failed_and_not_scored() -> None:
    seen: list[list[str]] = []

    def batch(completions: list[str]) -> list[float]:
        seen.append(completions)
        return [float(c) for c in completions]

    rollouts = score(component(batch), reasons=[FinishReason.EOS, FinishReason.ABORT, FinishReason.LENGTH])
    assert seen == [["5", "7"]]
    assert [r.error for r in rollouts] == [None, "aborted by the engine", None]
    assert [r.text for r in rollouts] == TEXTS
    assert (rollouts[0].reward, rollouts[2].reward) == (5.0, 7.0)
    assert math.isnan(rollouts[1].reward)


def test_a_group_that_is_aborted_whole_calls_no_reward() -> None:
    def never(completions: list[str]) -> list[float]:
        raise AssertionError

    assert [r.error for r in score(component(never), reasons=[FinishReason.ABORT] * 3)] == ["aborted by the engine"] * 3


def test_a_text_too_few_is_an_error() -> None:
    with pytest.raises(ValueError, match="zip"):
        asyncio.run(Scorer([constant(1, "f")]).score(PROMPT, COMPLETIONS, TEXTS[:2]))


# --- columns and building -----------------------------------------------------------------------------------------


def test_a_column_that_a_reward_needs_and_the_dataset_lacks_is_an_error_at_the_start() -> None:
    scorer = Scorer([component(correct), component(Judge()), component(lambda text, level=1: 1.0, label="f")])
    with pytest.raises(DataError) as error:
        scorer.check_columns({"level", "question"})
    assert str(error.value).count("\n") == 1
    assert "The reward 'correct' needs answer, but the dataset's columns are level, question." in str(error.value)
    assert "The reward 'f' needs text, but" in str(error.value)
    scorer.check_columns({"answer", "text"})


def test_what_is_bound_or_optional_or_given_needs_no_column() -> None:
    def given(
        prompts: Any, completions: Any, completion_ids: Any, finish_reason: Any, level: int = 3, **rest: Any
    ) -> Any:
        return None

    Scorer([component(correct, params={"answer": "5"}), component(given)]).check_columns(set())


def test_the_recipe_gives_labels_weights_params_and_timeouts() -> None:
    scorer = build_scorer(
        [
            Reward(name="exact_match", weight=0.7, params={"casefold": True}),
            Reward(name=f"{__name__}:correct", weight=0.3, label="mine", timeout_s=2),
        ]
    )
    assert [(c.label, c.weight, c.timeout_s) for c in scorer.components] == [("exact_match", 0.7, 30), ("mine", 0.3, 2)]
    rollouts = asyncio.run(scorer.score(PROMPT, COMPLETIONS, TEXTS))
    assert rollouts[0].rewards == {"exact_match": 1.0, "mine": 1.0}
    assert [r.reward for r in rollouts] == [1.0, 0.0, 0.0]


def test_an_unknown_reward_or_parameter_is_an_error() -> None:
    with pytest.raises(RewardError, match="there is no such built-in"):
        build_scorer([Reward(name="nope")])
    with pytest.raises(ConfigError, match=r"rewards.params of 'length'"):
        build_scorer([Reward(name="length", params={"goal": 3})])
    with pytest.raises(ConfigError, match=r"rewards.params of 'dir' .*'batchsize'"):
        build_scorer([Reward(name="model:some/dir", params={"batchsize": 3})])


def test_a_format_reward_may_not_look_for_what_decoding_strips() -> None:
    rewards = [Reward(name="format_tags")]
    with pytest.raises(
        ConfigError, match=r"decoding\.strip_reasoning is true, but the reward format_tags looks for <think>"
    ):
        build_scorer(rewards, Decoding())
    build_scorer(rewards, Decoding(strip_reasoning=False))
    build_scorer([Reward(name="format_tags", params={"tags": ["answer"]})], Decoding())
