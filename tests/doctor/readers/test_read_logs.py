"""Sample logs of each framework, as it prints or writes them."""

import io
import math
from pathlib import Path

import pytest

from leadline.doctor.readers import coverage, read_runs
from leadline.doctor.run_log import RunLog
from leadline.doctor.table import State

LOGS = Path(__file__).parents[2] / "golden" / "logs"

FRAMEWORKS = {
    "verl_console.log": "verl",
    "verl_rounded.log": "verl",
    "verl_file.jsonl": "verl",
    "slime_console.log": "slime",
    "prime_rl_console.log": "prime_rl",
    "prime_rl_metrics.jsonl": "prime_rl",
    "openrlhf_console.log": "openrlhf",
    "areal_console.log": "areal",
    "skyrl_console.log": "skyrl",
    "nemo_rl_console.log": "nemo_rl",
    "nemo_rl_train_data_step4.jsonl": "nemo_rl",
    "roll_console.log": "roll",
    "open_instruct_console.log": "open_instruct",
    "art_history.jsonl": "art",
    "trl_console.log": "trl",
    "trl_run": "trl",
    "ms_swift_console.log": "trl",
    "pasted_table.txt": "trl",
}


def read(name: str) -> RunLog:
    (run,) = read_runs([LOGS / name])
    return run


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_the_framework_is_recognised_by_content(name: str) -> None:
    assert read(name).framework == FRAMEWORKS[name]


@pytest.mark.parametrize("name", [name for name in FRAMEWORKS if (LOGS / name).is_file()])
def test_the_name_of_a_file_says_nothing(name: str, tmp_path: Path) -> None:
    hidden = tmp_path / "x"
    hidden.write_bytes((LOGS / name).read_bytes())
    (run,) = read_runs([hidden])
    assert (run.framework, run.names) == (FRAMEWORKS[name], read(name).names)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_at_least_95_percent_of_the_keys_are_understood(name: str) -> None:
    unknown_on_purpose = {"loss/std", "batch/percent_solved_mean"}
    covered = coverage(read(name))
    assert len(covered.understood) >= 4
    assert set(covered.not_understood) <= unknown_on_purpose


def test_a_verl_line_is_read_through_prefixes_colours_and_progress_bars() -> None:
    run = read("verl_console.log")
    assert run.series("reward/mean") == [(1, 0.41), (2, 0.42), (3, 0.43)]
    assert run.series("loss/policy")[0] == (1, 0.0121)
    assert run.states("optimizer/grad_norm") == [State.PRESENT, State.NON_FINITE, State.PRESENT]
    assert run.raw_name("optimizer/grad_norm") == "actor/grad_norm"


def test_differences_of_probabilities_are_not_differences_of_logprobs() -> None:
    run = read("verl_console.log")
    assert run.series("importance/prob_diff_abs_mean")[0] == (1, 0.004)
    assert run.state("importance/log_ratio_abs_mean") is State.MISSING
    roll = read("roll_console.log")
    assert roll.series("importance/prob_diff_mean")[0] == (1, -0.002)
    assert roll.is_missing("importance/log_ratio_mean")


def test_signed_and_squared_kl_of_the_update_are_no_k3() -> None:
    assert read("verl_console.log").series("policy/kl_old_k1")[0] == (1, -1.2e-05)
    roll = read("roll_console.log")
    assert roll.series("policy/kl_old_k2")[0] == (1, 1e-5)
    assert roll.series("policy/kl_old_k1")[0] == (1, -1e-5)
    assert roll.is_missing("policy/kl_old")


def test_the_dual_clip_is_not_the_lower_clip() -> None:
    run = read("verl_console.log")
    assert not run.is_missing("policy/dual_clip_fraction")
    assert run.is_missing("policy/clip_low_fraction")


def test_weights_after_a_bound_are_not_ratios_before_it() -> None:
    assert read("trl_console.log").is_missing("importance/ratio_mean")
    assert read("trl_console.log").series("importance/weight_mean")[0] == (10, 0.99)
    assert read("slime_console.log").series("importance/weight_mean")[0] == (0, 1.0001)
    assert read("verl_console.log").series("importance/ratio_mean")[0] == (1, 0.9998)


def test_rewards_that_slime_normalised_are_not_the_reward() -> None:
    run = read("slime_console.log")
    assert run.series("reward/mean") == [(0, 0.40), (2, 0.41), (4, 0.42)]
    assert run.series("reward/shaped_mean")[0] == (0, -1.2e-09)


def test_rollouts_of_slime_stand_at_the_first_optimizer_step_that_they_feed() -> None:
    run = read("slime_console.log")
    assert [step for step, _ in run.series("loss")] == [0, 1, 2, 3, 4, 5]
    assert [step for step, _ in run.series("rollout/length_mean")] == [0, 2, 4]


def test_groups_without_spread_are_added_up_over_the_reward_values() -> None:
    assert read("slime_console.log").series("reward/zero_std_groups")[0] == (0, 5.0)


def test_lengths_with_the_prompt_are_not_completion_lengths() -> None:
    run = read("areal_console.log")
    assert run.series("rollout/total_length_mean")[0] == (1, 912.0)
    assert run.is_missing("rollout/length_mean")
    assert run.state("advantage/mean") is State.NON_FINITE
    assert "bonus" in run.caveats["kl/reward_term"]


def test_what_skyrl_rounds_away_is_text_and_not_zero() -> None:
    run = read("skyrl_console.log")
    assert run.state("optimizer/learning_rate") is State.STRING
    assert run.state("importance/ratio_min") is State.PLACEHOLDER
    assert run.state("kl/k3") is State.NON_FINITE
    assert run.series("policy/clip_fraction")[0] == (1, 0.0)
    assert run.resolution("policy/clip_fraction") == pytest.approx(5e-5)


def test_three_decimals_of_an_old_verl_are_known_to_be_rounded() -> None:
    run = read("verl_rounded.log")
    assert run.state("optimizer/learning_rate") is State.STRING
    assert run.resolution("policy/kl_old_k1") == pytest.approx(5e-4)
    assert read("verl_console.log").resolution("policy/kl_old_k1") == 0


def test_null_is_logged_and_undefined() -> None:
    run = read("verl_file.jsonl")
    assert run.states("optimizer/grad_norm") == [State.PRESENT, State.PRESENT, State.NULL, State.NULL]
    assert math.isnan(run.series("optimizer/grad_norm")[-1][1])
    assert run.notes == ("The last line is half-written and was left out.",)


def test_a_key_that_vanishes_is_dropped() -> None:
    run = read("prime_rl_metrics.jsonl")
    assert len(run.rows) == 8, "five lines a step are one row"
    assert run.states("optimizer/grad_norm") == [State.PRESENT] * 3 + [State.DROPPED] * 5
    assert run.state("optimizer/grad_norm") is State.DROPPED
    assert run.state("loss") is State.PRESENT


def test_bare_nan_and_null_of_a_trainer_state_are_two_things() -> None:
    run = read("trl_run")
    assert run.states("optimizer/grad_norm") == [State.PRESENT, State.PRESENT, State.NON_FINITE]
    assert run.states("reward/mean") == [State.PRESENT, State.NULL, State.PRESENT]
    assert run.notes == ()
    assert run.setting("sampling.temperature") is None, "the config of a model is not the config of a run"


def test_the_summary_that_the_trainer_prints_at_the_end_is_no_row() -> None:
    run = read("trl_console.log")
    assert run.series("loss") == [(10, 0.0001), (20, 0.0002), (30, 0.0003)]
    assert run.notes == ()


def test_the_config_printed_at_the_top_is_joined_to_the_log() -> None:
    verl = read("verl_console.log")
    assert verl.setting("objective.beta") == 0.001
    assert verl.setting("sampling.temperature") == 1.0, "and not the temperature of the evaluation"
    assert verl.option("objective.beta") == "actor_rollout_ref.actor.kl_loss_coef"
    trl = read("trl_console.log")
    assert (trl.setting("objective.importance_level"), trl.setting("objective.importance_action")) == (
        "sequence",
        "mask",
    )
    assert trl.setting("raw.vllm_importance_sampling_mode") == "sequence_mask"


def test_a_token_dump_gives_the_mismatch_that_no_metric_has() -> None:
    run = read("nemo_rl_train_data_step4.jsonl")
    assert run.series("importance/log_ratio_abs_mean") == [(4, pytest.approx(0.4 / 5))]
    assert run.series("importance/log_ratio_mean") == [(4, pytest.approx(0.0))]
    assert run.series("importance/scored_fraction") == [(4, pytest.approx(5 / 6))]


def test_a_panel_of_open_instruct_is_read_over_wrapped_lines() -> None:
    run = read("open_instruct_console.log")
    assert run.series("importance/log_ratio_abs_mean") == [(1, 0.009), (2, 0.009), (3, 0.009)]
    assert run.series("rollout/truncated_fraction")[0] == (1, pytest.approx(0.06))
    assert run.is_missing("importance/kl_k3"), "a KL weighted by the probability is none"


def test_what_could_be_logged_is_named_with_its_option() -> None:
    run = read("openrlhf_console.log")
    assert "eval/reward_mean" in run.could_log
    assert "importance/kl_k1" not in run.could_log
    assert "--get-mismatch-metrics" in read("slime_console.log").could_log["importance/kl_k3"]


def test_runs_of_a_ui_export_are_told_apart() -> None:
    first, second = read_runs([LOGS / "wandb_export.csv"])
    assert first.series("reward/mean") == [(1, 0.1), (2, 0.2)]
    assert second.series("reward/mean") == [(1, 0.7)]
    assert "run-b" in second.notes[0]


def test_a_pasted_table_is_a_log() -> None:
    run = read("pasted_table.txt")
    assert run.series("reward/zero_std_fraction") == [(1, 1.0), (2, 1.0)]


def test_numbers_in_the_text_around_a_table_belong_to_the_row_with_the_same_numbers() -> None:
    text = (
        "step   loss  reward  IS_ratio_mean\n  10    0.0   0.81   2.0e-9\n  20    0.0   0.92   3.0e-9\n\nAlso:\n"
        "sampling/importance_sampling_ratio/mean:   3.0e-9\nsampling/sampling_logp_difference/mean: 0.31\n\n"
        'generation_kwargs = {\n    "temperature": 0.6,\n    "stop": ["</a>"],\n}\n'
    )
    (run,) = read_runs([io.StringIO(text)])
    assert run.framework == "trl"
    assert run.series("importance/weight_mean") == [(10, 2e-9), (20, 3e-9)]
    assert run.series("importance/log_ratio_abs_mean") == [(20, 0.31)]
    assert run.setting("sampling.stop") == ["</a>"]


def test_a_fix_quoted_in_prose_is_not_taken_for_the_config() -> None:
    text = "{'loss': 0.0, 'reward': 0.5, 'grad_norm': 0.1}\nI now use\n  importance_mode:\n  beta: 0.5\n"
    (run,) = read_runs([io.StringIO(text)])
    assert run.setting("objective.beta") is None


def test_the_same_input_gives_the_same_answer() -> None:
    first, second = read("verl_console.log"), read("verl_console.log")
    assert str(list(first.rows)) == str(list(second.rows))
    assert first.names == second.names and first.unread == second.unread
