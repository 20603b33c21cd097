import asyncio
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from leadline.engines.hf import HFEngine
from leadline.engines.scripted import ScriptedEngine
from leadline.evaluate import Difference, Evaluation, evaluate, improvement, paired_difference, pass_at_k
from leadline.models import load_model
from leadline.types import Completion, FinishReason, Group, Prompt, Rollout
from tests.builders import settings
from tests.loops import completion, count, lengths, roller, token_sum

NAN = math.nan
HELD_OUT = [Prompt(-1 - i, f"held out {i}", (5, 6 + i, 7)) for i in range(6)]


def group(*rewards: float) -> Group:
    return Group(HELD_OUT[0], [Rollout(completion(), "", {}, reward) for reward in rewards])


# pass@k ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 5, 6])
def test_pass_at_k_is_the_share_of_all_draws_of_k_with_a_pass(n: int) -> None:
    for passed, k in itertools.product(range(n + 1), range(1, n + 1)):
        rewards = [1.0] * passed + [0.3] * (n - passed)
        draws = list(itertools.combinations(rewards, k))
        expected = sum(max(draw) >= 0.5 for draw in draws) / len(draws)
        assert pass_at_k(group(*rewards), k, threshold=0.5) == pytest.approx(expected, abs=1e-12)


def test_a_reward_of_exactly_the_threshold_passes() -> None:
    assert pass_at_k(group(0.5, 0.0), 1, threshold=0.5) == 0.5


def test_rollouts_without_a_reward_are_left_out_of_the_tries() -> None:
    assert pass_at_k(group(NAN, 1.0, 0.0), 1, threshold=1.0) == 0.5
    assert math.isnan(pass_at_k(group(NAN, 1.0, 0.0), 3, threshold=1.0))  # three tries were not made


# An evaluation --------------------------------------------------------------------------------------------------------


def test_an_evaluation_averages_over_prompts_and_reports_pass_at_powers_of_two() -> None:
    config = settings(eval={"samples": 5, "pass_threshold": 5.0})
    result = asyncio.run(evaluate(roller(config, ScriptedEngine(lengths)), HELD_OUT[:2], config))
    assert result.rewards == (3.0, 3.0)
    assert result.passes == pytest.approx((1 / 5, 1 / 5))
    assert result.metrics["eval/reward_mean"] == 3.0
    assert result.metrics["eval/reward/count/mean"] == 3.0
    assert result.metrics["eval/length_mean"] == 3.0
    assert result.metrics["eval/truncated_fraction"] == 0.0
    assert result.metrics["eval/scored"] == 10
    passes = {name: value for name, value in result.metrics.items() if "pass_at" in name}
    assert passes == pytest.approx({"eval/pass_at_1": 1 / 5, "eval/pass_at_2": 2 / 5, "eval/pass_at_4": 4 / 5})


def test_a_prompt_without_any_reward_is_left_out_of_the_means_and_counted() -> None:
    def picky(completion_ids: Sequence[int]) -> float:
        if len(completion_ids) == 9:
            raise ValueError("no")
        return float(len(completion_ids))

    script = {-1: [completion(9)] * 2, -2: [completion(9), completion(4)], -3: [completion(1), completion(2)]}
    config = settings(eval={"samples": 2, "pass_threshold": 2.0})
    result = asyncio.run(evaluate(roller(config, ScriptedEngine(script), picky), HELD_OUT[:3], config))
    assert math.isnan(result.rewards[0]) and result.rewards[1:] == (4.0, 1.5)
    assert result.metrics["eval/reward_mean"] == pytest.approx(5.5 / 2)
    assert result.metrics["eval/scored"] == 3
    assert result.metrics["eval/pass_at_1"] == pytest.approx((1.0 + 0.5) / 2)
    assert result.metrics["eval/pass_at_2"] == 1.0  # only the last prompt has two tries


def test_evaluation_samples_at_its_own_temperature() -> None:
    seen: list[float] = []

    class Spy(ScriptedEngine):
        async def generate(self, prompt: Prompt, n: int, sampling: Any) -> list[Completion]:
            seen.append(sampling.temperature)
            return await super().generate(prompt, n, sampling)

    for temperature in (None, 0.0, 0.7):
        config = settings(eval={"temperature": temperature})
        asyncio.run(evaluate(roller(config, Spy(lengths)), HELD_OUT[:1], config))
    assert seen == [1.0, 0.0, 0.7]


def test_two_evaluations_of_the_same_weights_draw_the_same_whatever_else_is_sampled_in_between() -> None:
    config = settings(eval={"samples": 2})
    loaded = load_model(config.model)

    async def run() -> list[Any]:
        engine = HFEngine(loaded.model, tokenizer=loaded.tokenizer, eos_ids=loaded.eos_ids, seed=3)
        part = roller(config, engine, token_sum)
        first = await evaluate(part, HELD_OUT, config)
        await part.train_group(Prompt(11, "", (9, 9)))
        second = await evaluate(part, HELD_OUT, config)
        await engine.close()
        return [first, second]

    first, second = asyncio.run(run())
    assert first.rewards == second.rewards
    assert first.metrics == second.metrics
    assert len(set(first.rewards)) == len(HELD_OUT)  # random completions: no two prompts are alike


def test_an_improvement_pairs_the_rewards_and_the_passes_of_each_prompt() -> None:
    before, after = Evaluation((1.0, 2.0), (0.0, 0.5), {}), Evaluation((2.0, 4.0), (0.5, 0.5), {})
    found = improvement(before, after, seed=0)
    assert (found.reward.mean, found.passes.mean) == (1.5, 0.25)
    assert (found.passes.before, found.passes.after) == (0.25, 0.5)


# The paired difference ------------------------------------------------------------------------------------------------


def test_the_interval_covers_the_true_difference_nearly_always_and_not_always() -> None:
    draw = np.random.default_rng(0)
    covered = 0
    for _ in range(80):
        before = draw.normal(0.0, 1.0, 30)
        difference = paired_difference(before, before + draw.normal(0.3, 0.5, 30))
        covered += difference.low <= 0.3 <= difference.high
    assert 70 <= covered < 80


def test_pairing_sees_what_two_means_would_not() -> None:
    draw = np.random.default_rng(1)
    before = draw.normal(0.0, 10.0, 40)
    difference = paired_difference(before, before + draw.normal(0.2, 0.1, 40))
    assert difference.improved and difference.mean == pytest.approx(0.2, abs=0.05)
    assert difference.low < difference.mean < difference.high


def test_the_interval_depends_on_the_seed_alone() -> None:
    before, after = np.random.default_rng(2).normal(size=(2, 30))
    assert paired_difference(before, after, seed=5) == paired_difference(before, after, seed=5)
    assert paired_difference(before, after, seed=5) != paired_difference(before, after, seed=6)


def test_no_change_is_no_improvement() -> None:
    assert paired_difference([0.5, 1.0], [0.5, 1.0]) == Difference(0.75, 0.75, 0.0, 0.0, 0.0, 2)
    assert not paired_difference([0.5, 1.0], [0.5, 1.0]).improved


def test_a_prompt_without_a_reward_in_either_is_left_out_and_counted() -> None:
    difference = paired_difference([0.0, NAN, 0.0, 1.0], [1.0, 1.0, NAN, 1.0])
    assert (difference.mean, difference.prompts) == (0.5, 2)
    assert (difference.before, difference.after) == (0.5, 1.0)  # of these two, as the difference is


def test_nothing_to_compare_is_nan_and_no_improvement() -> None:
    difference = paired_difference([NAN], [1.0])
    assert math.isnan(difference.mean) and difference.prompts == 0 and not difference.improved


def test_evaluations_of_different_prompts_are_never_paired() -> None:
    with pytest.raises(ValueError):
        paired_difference([1.0], [1.0, 2.0])


def test_a_completion_that_is_cut_off_is_counted() -> None:
    config = settings(eval={"samples": 2})
    engine = ScriptedEngine(lambda prompt, n: [completion(3, reason=FinishReason.LENGTH), completion(1)])
    result = asyncio.run(evaluate(roller(config, engine, count), HELD_OUT[:2], config))
    assert result.metrics["eval/truncated_fraction"] == 0.5
