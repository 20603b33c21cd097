"""Real completions, and how much signal a reward gives on them."""

import itertools
import json
import math

import polars
import pytest

from leadline.errors import ConfigError, DataError
from leadline.probes.code.group_signal import Distribution, equal_share
from leadline.probes.code.reward import examine_reward
from leadline.probes.code.samples import read_samples
from tests.probes.code.framework_styles import trl_reward


def test_binary_rewards_without_signal_are_p_to_the_g_plus_q_to_the_g():
    rewards = [1.0] * 3 + [0.0]
    assert equal_share(rewards, 8) == pytest.approx(0.75**8 + 0.25**8)
    assert Distribution([rewards, [1.0, 1.0]]).without_signal(8) == pytest.approx((0.75**8 + 0.25**8 + 1) / 2)
    assert math.isnan(Distribution([]).without_signal(4))


@pytest.mark.parametrize("group_size", [2, 3, 4])
def test_with_enough_completions_the_share_is_that_of_all_groups_that_can_be_drawn(group_size):
    rewards = [0.0, 0.5, 0.5, 0.5, 1.0, 1.0, 1.0, 1.0]
    groups = list(itertools.combinations(rewards, group_size))
    assert equal_share(rewards, group_size) == pytest.approx(sum(len(set(g)) == 1 for g in groups) / len(groups))


def write(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def test_completions_with_answers_are_scored_now(tmp_path):
    rows = [
        {"prompt": f"p{i % 2}", "completion": f"\\boxed{{{i % 4}}}", "answer": "1", "reward": 9.0} for i in range(16)
    ]
    report = examine_reward(trl_reward, "x", [], write(tmp_path / "a.jsonl", rows))
    assert report.facts["rewards"] == "16 completions of 2 prompts (scored now): 0 (75%), 1 (25%)"
    assert report.facts["groups without signal"].startswith("G=2 71%, G=4 51%, G=8 50%")


def test_a_parquet_of_rollouts_without_answers_is_taken_as_it_was_scored(tmp_path):
    rollouts = tmp_path / "rollouts"
    rollouts.mkdir()
    polars.DataFrame({"prompt": ["p"] * 8, "completion": ["c"] * 8, "reward": [1.0] * 7 + [math.nan]}).write_parquet(
        rollouts / "step_000000.parquet"
    )
    report = examine_reward(trl_reward, "x", [], tmp_path)
    assert report.facts["rewards"] == "7 completions of 1 prompts (as recorded: no gold answers are there): 1 (100%)"
    assert [f.title for f in report.findings if f.name == "little_signal"] == [
        "100% of groups of 8 will have equal rewards"
    ]


def test_columns_of_the_samples_reach_the_function(tmp_path):
    def reward(completion, answer, unit):
        return float(completion == f"{answer} {unit}") if unit == "km" else math.nan

    path = write(tmp_path / "a.jsonl", [{"prompt": "p", "completion": "5 km", "answer": "5 km", "unit": "km"}])
    assert "not_finite" not in {finding.name for finding in examine_reward(reward, "x", [], path).findings}
    with pytest.raises(ConfigError, match=r"The function takes unit, .* --arg unit=VALUE"):
        examine_reward(reward, "x", [], None)


def test_samples_that_cannot_be_read_say_why(tmp_path):
    with pytest.raises(DataError, match="there is no such file"):
        read_samples(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="line 1 is not JSON"):
        (tmp_path / "b.jsonl").write_text("{")
        read_samples(tmp_path / "b.jsonl")
    with pytest.raises(DataError, match="no row has a completion"):
        read_samples(write(tmp_path / "c.jsonl", [{"prompt": "p"}]))
