"""Against the real TRL: each fault is really made, and the callback must name it from inside the run."""

import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="TRL is not installed: pip install trl")
pytest.importorskip("torch")


from leadline.integrations.trl import DoctorCallback
from tests.integrations import trl_runs as runs
from tests.integrations.trl_seen import equal, finite, names, nan_loss, own_output, rows

pytestmark = [
    pytest.mark.filterwarnings("default"),  # TRL and transformers warn about each other, and that is theirs
]


def test_a_nan_loss_logged_as_zero_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    callback = DoctorCallback(on_nonfinite="warn")
    trainer = runs.build(tmp_path, callback, trainer_class=nan_loss(2))
    runs.run(trainer)

    logged = [entry for entry in trainer.state.log_history if entry.get("step") == 2]
    assert logged[0]["loss"] == 0.0 or math.isfinite(logged[0]["loss"])  # what TRL says of it
    assert names(callback)[0] == "nan-poisoned-weights"
    assert "NaN loss was replaced" in callback.findings[0].message
    assert not finite(trainer)
    assert len(own_output(capsys.readouterr().out)) == len(callback.findings)


def test_stop_leaves_the_weights_of_the_step_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stopped = runs.build(tmp_path / "stopped", DoctorCallback(), trainer_class=nan_loss(3), max_steps=6)
    runs.run(stopped)
    whole = runs.build(tmp_path / "whole", None, max_steps=2)
    runs.run(whole)

    assert stopped.state.global_step == 3
    assert equal(runs.weights(stopped), runs.weights(whole))
    output = own_output(capsys.readouterr().out)
    assert output[0].startswith("leadline: step 3 is not finite (loss nan")
    assert "nan-poisoned-weights" in output[1]


def test_rollback_goes_on_as_if_the_step_had_not_been(tmp_path: Path) -> None:
    callback = DoctorCallback(on_nonfinite="rollback")
    trainer = runs.build(tmp_path, callback, trainer_class=nan_loss(2), max_steps=4)
    runs.run(trainer)

    assert trainer.state.global_step == 4
    assert finite(trainer)
    assert [row["optimizer/discarded_steps"] for row in rows(tmp_path)] == [0, 1, 0, 0]
    assert rows(tmp_path)[1]["ledger/discarded_share"] == 1.0
    assert (tmp_path / "leadline" / "blackbox" / "step_000002.safetensors").exists()


def test_rollback_stops_when_no_step_passes_any_more(tmp_path: Path) -> None:
    trainer = runs.build(
        tmp_path, DoctorCallback(on_nonfinite="rollback"), trainer_class=nan_loss(2, last=99), max_steps=12
    )
    runs.run(trainer)
    assert trainer.state.global_step == 6


def test_a_step_that_is_not_finite_is_logged_although_it_is_not_time_to(tmp_path: Path) -> None:
    callback = DoctorCallback()
    runs.run(runs.build(tmp_path, callback, trainer_class=nan_loss(2), logging_steps=10, max_steps=6))
    assert names(callback)[0] == "nan-poisoned-weights"


def test_all_rewards_none_is_named(tmp_path: Path) -> None:
    callback = DoctorCallback()
    runs.run(runs.build(tmp_path, callback, reward=lambda completions, **_: [None] * len(completions), max_steps=4))
    assert names(callback)[0] == "rewards-all-missing"
    assert rows(tmp_path)[-1]["ledger/failed_tokens"] == rows(tmp_path)[-1]["ledger/sampled_tokens"]


def test_a_stop_string_with_truncation_masking_is_named(tmp_path: Path) -> None:
    callback = DoctorCallback()
    trainer = runs.build(
        tmp_path,
        callback,
        rollout=runs.fixed_rollout("</a>"),
        mask_truncated_completions=True,
        generation_kwargs={"stop_strings": ["</a>"]},
        max_steps=4,
    )
    before = runs.weights(trainer)
    runs.run(trainer)

    assert equal(before, runs.weights(trainer))
    errors = [finding.name for finding in callback.findings if finding.severity == "error"]
    assert errors == ["all-completions-masked"]
    assert "stop-string-read-as-truncation" in names(callback)
    assert rows(tmp_path)[-1]["ledger/truncated_share"] == 1.0


@pytest.mark.parametrize(("offset", "stage"), [(0.02, "shrunk"), (-0.02, "masked")])
def test_sequence_mask_under_a_small_offset_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offset: float, stage: str
) -> None:
    monkeypatch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", runs.FakeVLLM)
    monkeypatch.setattr(runs.FakeVLLM, "offset", offset)
    callback = DoctorCallback()
    trainer = runs.build(
        tmp_path,
        callback,
        model=runs.tiny_model(ends=0),
        use_vllm=True,
        max_completion_length=256,
        max_steps=4,
    )
    runs.run(trainer)

    assert names(callback)[0] == "sequence-is-sum-deflates-gradient"
    assert "vllm_importance_sampling_mode" in callback.findings[0].fix
    assert rows(tmp_path)[-1][f"ledger/importance_{stage}_share"] > 0.6
    assert rows(tmp_path)[-1]["importance/log_ratio_mean"] == pytest.approx(-offset, abs=1e-3)


def test_an_exact_sampler_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", runs.FakeVLLM)
    callback = DoctorCallback()
    runs.run(runs.build(tmp_path, callback, use_vllm=True, max_steps=6))
    assert callback.findings == []
    assert rows(tmp_path)[-1]["importance/log_ratio_abs_max"] < 1e-4


def infinite(completions: list[str], **_: Any) -> list[float]:
    return [math.inf, *runs.distinct_letters(completions[1:])]


def test_an_infinite_reward_is_named_before_it_reaches_the_weights(tmp_path: Path) -> None:
    callback = DoctorCallback()
    trainer = runs.build(tmp_path, callback, reward=infinite, scale_rewards="none", max_steps=4)
    before = runs.weights(trainer)
    runs.run(trainer)
    assert names(callback)[0] == "nan-reward-poisons-advantage"
    assert equal(before, runs.weights(trainer))


def test_an_infinite_reward_that_only_kills_its_group_is_named(tmp_path: Path) -> None:
    callback = DoctorCallback()
    runs.run(runs.build(tmp_path, callback, reward=infinite, max_steps=4))
    assert names(callback)
